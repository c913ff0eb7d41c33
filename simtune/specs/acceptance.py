"""Acceptance spec: how often the target keeps what a drafter proposes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from simtune.arrays import Array
from simtune.specs.base import ErrorAt, Name, NonNegative, Part, Positive, Seq, Spec

Probability = Annotated[float, Field(ge=0, le=1)]

_ROUNDING = 1e-6
"""Probabilities read from a printed table may add up to a little more than 1."""


class PerPosition(Part):
    """`conditional[j]`: draft token j + 1 of a chain is kept, given that all before it were."""

    kind: Literal["per_position"] = "per_position"
    conditional: Annotated[Seq[Probability], Field(min_length=1)]
    standard_error: Seq[NonNegative] | None = None

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if self.standard_error is not None and len(self.standard_error) != len(self.conditional):
            raise ValueError(f"{len(self.conditional)} positions but {len(self.standard_error)} standard errors")
        return self

    @property
    def longest(self) -> int | None:
        """Draft tokens that are covered; None if any number is."""
        return len(self.conditional)

    def chain(self, length: int) -> tuple[float, ...]:
        """Conditional acceptance at the first `length` positions of a chain; fewer if fewer are covered."""
        return self.conditional[:length]

    def ranks(self, depth: int) -> tuple[tuple[float, ...], ...]:
        """Return, for each depth of a tree, the probability that the target takes the candidate of each rank."""
        return tuple((a,) for a in self.chain(depth))

    def shifted(self, errors: float) -> Self:
        """Return the rates raised by `errors` of their standard errors; the same rates if these are not known."""
        if self.standard_error is None:
            return self
        pairs = zip(self.conditional, self.standard_error, strict=True)
        return self.model_copy(update={"conditional": tuple(_probability(a + errors * se) for a, se in pairs)})


class PerRank(Part):
    """`probability[d][r]`: the candidate of rank r + 1 at depth d + 1 is what the target takes, given that its
    parent was taken. The candidates of a node exclude one another, so each row adds up to at most 1.
    """

    kind: Literal["per_rank"] = "per_rank"
    probability: Annotated[Seq[Annotated[Seq[Probability], Field(min_length=1)]], Field(min_length=1)]
    standard_error: Seq[Seq[NonNegative]] | None = None

    @field_validator("probability")
    @classmethod
    def _exclusive(cls, probability: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        for depth, row in enumerate(probability, start=1):
            if sum(row) > 1 + _ROUNDING:
                raise ValueError(
                    f"the ranks at depth {depth} add up to {sum(row):.4g}, and at most one candidate is taken; "
                    "cumulative top-k accuracies must be differenced first (`simtune acceptance` does)"
                )
        return probability

    @model_validator(mode="after")
    def _same_shape(self) -> Self:
        errors = self.standard_error
        if errors is not None and [len(row) for row in errors] != [len(row) for row in self.probability]:
            raise ValueError("standard_error must have the shape of probability")
        return self

    @property
    def longest(self) -> int | None:
        """Depths that are covered."""
        return len(self.probability)

    @property
    def falling(self) -> bool:
        """True if no rank is likelier than the one before it, as every exact greedy choice of a tree needs."""
        return all(a >= b for row in self.probability for a, b in pairwise(row))

    def chain(self, length: int) -> tuple[float, ...]:
        """Conditional acceptance of the best candidate at each of the first `length` depths."""
        return tuple(row[0] for row in self.probability[:length])

    def ranks(self, depth: int) -> tuple[tuple[float, ...], ...]:
        """Probabilities by depth and rank, as the file gives them; fewer if fewer depths are covered."""
        return self.probability[:depth]

    def shifted(self, errors: float) -> Self:
        """See `PerPosition.shifted`; a row that would add up to more than 1 is scaled down to it."""
        if self.standard_error is None:
            return self
        rows = []
        for row, error in zip(self.probability, self.standard_error, strict=True):
            moved = [_probability(p + errors * se) for p, se in zip(row, error, strict=True)]
            rows.append(tuple(p / max(1.0, sum(moved)) for p in moved))
        return self.model_copy(update={"probability": tuple(rows)})


class BetaMixture(Part):
    """Every request has an acceptance of its own, the same at all positions, drawn from Beta(a, b).

    Over all requests the conditional acceptance at position j is then (a + j - 1) / (a + b + j - 1): it rises,
    because the requests that get that far are the easy ones.
    """

    kind: Literal["beta"] = "beta"
    a: Positive
    b: Positive
    standard_error: Annotated[Seq[NonNegative], Field(min_length=2, max_length=2)] | None = Field(
        None, description="of a and of b"
    )

    @property
    def longest(self) -> int | None:
        """None: a chain may have any length."""
        return None

    def chain(self, length: int) -> tuple[float, ...]:
        """Conditional acceptance at each position, over all requests."""
        return tuple((self.a + j) / (self.a + self.b + j) for j in range(length))

    def ranks(self, depth: int) -> tuple[tuple[float, ...], ...]:
        """Acceptance of the only candidate at each depth, which is that of the chain."""
        return tuple((a,) for a in self.chain(depth))

    def shifted(self, errors: float) -> Self:
        """Return the mixture with the mean a / (a + b) raised by `errors` of its standard errors, at the same a + b.

        Its error follows from those of a and b to first order, as if they were independent.
        """
        if self.standard_error is None:
            return self
        a, b, total = self.a, self.b, self.a + self.b
        error = math.hypot(b * self.standard_error[0], a * self.standard_error[1]) / total**2
        mean = min(max(a / total + errors * error, 1e-3), 1 - 1e-3)
        return self.model_copy(update={"a": mean * total, "b": (1 - mean) * total})


class Revealed(Part):
    """Every draft token has an acceptance of its own, `rate[i]` for `share[i]` of them, and the drafter's confidence
    shows which before the token is drafted. Adaptive stopping relies on it.
    """

    kind: Literal["revealed"] = "revealed"
    rate: Annotated[Seq[Probability], Field(min_length=1)]
    share: Annotated[Seq[Positive], Field(min_length=1)]

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if len(self.rate) != len(self.share):
            raise ValueError(f"{len(self.rate)} rates but {len(self.share)} shares")
        if abs(sum(self.share) - 1) > _ROUNDING:
            raise ValueError(f"the shares add up to {sum(self.share):.6g}, not to 1")
        return self

    @property
    def longest(self) -> int | None:
        """None: a chain may have any length."""
        return None

    def chain(self, length: int) -> tuple[float, ...]:
        """The mean over all draft tokens, at every position."""
        return (sum(r * s for r, s in zip(self.rate, self.share, strict=True)),) * length

    def ranks(self, depth: int) -> tuple[tuple[float, ...], ...]:
        """Acceptance of the only candidate at each depth, which is that of the chain."""
        return tuple((a,) for a in self.chain(depth))

    def shifted(self, errors: float) -> Self:
        """Return the same rates: they are given without errors."""
        return self


def _probability(x: float) -> float:
    return min(max(x, 0.0), 1.0)


Rates = Annotated[PerPosition | PerRank | BetaMixture | Revealed, Field(discriminator="kind")]
FixedRates = Annotated[PerPosition | PerRank, Field(discriminator="kind")]

# --- drift ------------------------------------------------------------------------------------------------

Over = Annotated[
    Literal["requests", "seconds"],
    Field(description="requests: how many came before in the load; seconds: when a request arrives"),
]


class DriftPoint(Part):
    """Rates that a drift has reached after a number of requests or seconds."""

    at: Positive = Field(description="requests or seconds from the start of the load")
    rates: FixedRates


class LinearDrift(Part):
    """Drift in straight lines from one point to the next, from the rates that have this drift; constant after the last
    point.

    A request keeps the acceptance with which it arrives. The probability that at least n drafts are kept changes
    linearly for every n, so the tokens of a round do too.
    """

    kind: Literal["linear"] = "linear"
    over: Over = "requests"
    points: Annotated[Seq[DriftPoint], Field(min_length=1)]

    @field_validator("points")
    @classmethod
    def _ascending(cls, points: tuple[DriftPoint, ...]) -> tuple[DriftPoint, ...]:
        for a, b in pairwise(points):
            if b.at <= a.at:
                raise ValueError(f"points must ascend: {b.at:g} comes after {a.at:g}")
        return points

    @property
    def later(self) -> tuple[PerPosition | PerRank, ...]:
        """Rates of the points, in order."""
        return tuple(point.rates for point in self.points)

    def shares(self, since: Array) -> Array:
        """Return an array (n, 1 + later): the weights of the first rates and of each of the later ones at times `since`
        after the start of the load.
        """
        at = [0.0, *(point.at for point in self.points)]
        return np.stack([np.interp(since, at, row) for row in np.eye(len(at))], axis=1)

    def shifted(self, errors: float) -> Self:
        """See `PerPosition.shifted`."""
        points = tuple(p.model_copy(update={"rates": p.rates.shifted(errors)}) for p in self.points)
        return self.model_copy(update={"points": points})


class ExponentialDrift(Part):
    """Drift towards other rates: 1 / e of the distance is left after every `constant` requests or seconds.

    A request keeps the acceptance with which it arrives; see `LinearDrift`.
    """

    kind: Literal["exponential"] = "exponential"
    over: Over = "requests"
    to: FixedRates
    constant: Positive = Field(description="requests or seconds")

    @property
    def later(self) -> tuple[PerPosition | PerRank, ...]:
        """The rates that the drift approaches."""
        return (self.to,)

    def shares(self, since: Array) -> Array:
        """See `LinearDrift.shares`."""
        remaining = np.exp(-since / self.constant)
        return np.stack([remaining, 1 - remaining], axis=1)

    def shifted(self, errors: float) -> Self:
        """See `PerPosition.shifted`."""
        return self.model_copy(update={"to": self.to.shifted(errors)})


Drift = Annotated[LinearDrift | ExponentialDrift, Field(discriminator="kind")]


_DRIFT = Field(None, description="how the rates change while a load is served; without it they stay as they are")


def _check_drift(rates: Rates, drift: Drift | None) -> None:
    if drift is not None and not isinstance(rates, PerPosition | PerRank):
        raise ErrorAt(
            f"rates of kind {rates.kind} cannot drift, for each request or token has an acceptance of its own there; "
            "give them per_position or per_rank",
            "drift",
        )


class Condition(Part):
    """Rates of one class of requests, at one temperature, or of both together."""

    request_class: Name | None = None
    temperature: NonNegative | None = None
    rates: Rates
    drift: Drift | None = _DRIFT

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        _check_drift(self.rates, self.drift)
        if self.request_class is None and self.temperature is None:
            raise ValueError("give a request_class, a temperature or both; what holds for all stands in `rates`")
        return self


class Acceptance(Spec):
    """Probabilities that a target keeps the tokens of a drafter: `rates` in general, `conditions` for requests for
    which more is known.

    Rates that drift are those at the start of a load, and those that draft lengths are chosen by.
    """

    KIND: ClassVar[str] = "acceptance"
    origin: Literal["measured", "published", "assumed"]
    source: str = Field(description="the logs, or the publication with its licence")
    target: str | None = None
    drafter: str | None = None
    rates: Rates
    drift: Drift | None = _DRIFT
    conditions: Seq[Condition] = ()

    @model_validator(mode="after")
    def _can_drift(self) -> Self:
        _check_drift(self.rates, self.drift)
        return self

    @field_validator("conditions")
    @classmethod
    def _distinct(cls, conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
        keys = [(c.request_class, c.temperature) for c in conditions]
        if len(set(keys)) < len(keys):
            raise ValueError("two conditions are for the same request_class and temperature; keep one")
        return conditions

    def rates_for(self, request_class: str | None = None, temperature: float | None = None) -> Rates:
        """Return the rates of the most specific condition that applies to such a request, or the general rates."""
        return self._for(request_class, temperature)[0]

    def drift_for(self, request_class: str | None = None, temperature: float | None = None) -> Drift | None:
        """Return the drift of the rates of `rates_for`; None if they do not change."""
        return self._for(request_class, temperature)[1]

    def _for(self, request_class: str | None, temperature: float | None) -> tuple[Rates, Drift | None]:
        fitting = [
            c
            for c in self.conditions
            if c.request_class in (None, request_class) and c.temperature in (None, temperature)
        ]
        if not fitting:
            return self.rates, self.drift
        best = max(fitting, key=lambda c: (c.request_class is not None, c.temperature is not None))
        return best.rates, best.drift

    def shifted(self, errors: float) -> Self:
        """Return all rates raised by `errors` of their standard errors, to draw a world in which they are all off
        together.
        """
        conditions = tuple(c.model_copy(update=_shifted(c, errors)) for c in self.conditions)
        return self.model_copy(update={**_shifted(self, errors), "conditions": conditions})

    def notices(self) -> list[str]:
        """Warnings for a user of these rates."""
        rated: list[tuple[str, Acceptance | Condition]] = [
            ("", self),
            *((f"conditions.{i}.", c) for i, c in enumerate(self.conditions)),
        ]
        return [
            f"{self.name}: {where}rates: a later rank is likelier than an earlier one, as in noisy measurements; trees "
            "are chosen by dynamic programming, which needs no order"
            for where, entry in rated
            if isinstance(entry.rates, PerRank) and not entry.rates.falling
        ] + [
            f"{self.name}: {where}drift: drafts are chosen by the rates at the start; what they drift to is simulated"
            for where, entry in rated
            if entry.drift is not None
        ]


def _shifted(rated: Condition | Acceptance, errors: float) -> dict[str, Rates | Drift | None]:
    drift = rated.drift
    return {"rates": rated.rates.shifted(errors), "drift": None if drift is None else drift.shifted(errors)}
