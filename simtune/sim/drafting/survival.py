"""Survival: probability that each request of a stream keeps at least a given number of drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simtune.arrays import Array, Ints, Mask
from simtune.errors import Infeasible, UsageError
from simtune.sim.drafting.uniform import uniform
from simtune.specs.acceptance import Acceptance, BetaMixture, Drift
from simtune.specs.schemes import Scheme
from simtune.workload.requests import RequestStream

_EQUAL = 1e-12
"""Tolerance: survivals are products in some order; a smaller difference counts as none."""
_OWN = -1
"""Purpose of the random numbers by which requests draw their own acceptance."""


class Survival:
    """P(at least d drafts are accepted) of the requests of a stream under one scheme, d = 1 ... `depth`.

    The survival is that of a request's class. If the class has a distribution over requests, each request is given an
    acceptance of its own, the quantile at a random number that belongs to the request. If acceptance drifts, a request
    has the acceptance at its arrival.
    Raises Infeasible if the scheme drafts more than the acceptance covers, UsageError if rates drift by the
    clock and requests come when others have ended.
    """

    def __init__(self, scheme: Scheme, acceptance: Acceptance, stream: RequestStream, seed: int) -> None:
        self.depth = scheme.shape.depth
        self.class_of = stream.class_index  # of each request
        self.rates = [acceptance.rates_for(name) for name in stream.class_names]
        drifts = [acceptance.drift_for(name) for name in stream.class_names]
        try:
            self._of_class = np.array([scheme.survival(rates) for rates in self.rates])
            self._drifting = {
                index: _Drifting(
                    drift,
                    [scheme.survival(stage) for stage in (self.rates[index], *drift.later)],
                    _since_the_start(drift, acceptance, stream),
                )
                for index, drift in enumerate(drifts)
                if drift is not None
            }
        except ValueError as error:
            raise Infeasible(f"acceptance {acceptance.name}: {error}; draft less, or measure more") from None
        self._own = self._own_acceptance(seed, len(stream))

    def columns(self, requests: Ints) -> Array:
        """Return survivals of shape (requests, depth)."""
        classes = self.class_of[requests]
        columns: Array = self._of_class[classes]
        for index, rates in enumerate(self.rates):
            if isinstance(rates, BetaMixture):
                of_class = classes == index
                own_rates = self._own[requests[of_class]]
                columns[of_class] = own_rates[:, None] ** np.arange(1, self.depth + 1)
        for index, drifting in self._drifting.items():
            of_class = classes == index
            columns[of_class] = drifting.columns(requests[of_class])
        return columns

    def drafts_above(self, least: float, requests: Ints) -> Ints:
        """Return the number of drafts after which the survival falls below `least`."""
        drafts: Ints = at_least(self.columns(requests), least).sum(axis=1)
        return drafts

    def _own_acceptance(self, seed: int, n: int) -> Array:
        """Return the acceptance of requests whose class has a distribution of acceptance; 0 for other requests."""
        own_rates = np.zeros(n)
        for index, rates in enumerate(self.rates):
            if isinstance(rates, BetaMixture):
                from scipy.special import betaincinv

                of_class = np.flatnonzero(self.class_of == index)
                quantiles = uniform(seed, of_class, np.zeros_like(of_class), _OWN)
                own_rates[of_class] = betaincinv(rates.a, rates.b, quantiles)
        return own_rates


class _Drifting:
    """Survival of the requests of a class whose acceptance drifts."""

    def __init__(self, drift: Drift, survivals: Sequence[tuple[float, ...]], since: Array) -> None:
        self._drift, self._survivals, self._since = drift, np.array(survivals), since

    def columns(self, requests: Ints) -> Array:
        """Return survivals of shape (requests, depth)."""
        columns: Array = self._drift.shares(self._since[requests]) @ self._survivals
        return columns


def _since_the_start(drift: Drift, acceptance: Acceptance, stream: RequestStream) -> Array:
    if drift.over == "requests":
        return stream.numbers.astype(np.float64)
    if stream.arrival_s is None:
        raise UsageError(
            f"acceptance {acceptance.name}: drifts over seconds, which needs known arrival times, and a closed loop "
            "has none; set `over: requests`, or use open arrivals"
        )
    return stream.arrival_s


def at_least(survival: Array, least: float) -> Mask:
    """Return a mask of the survivals that are not below `least`."""
    return survival >= least - _EQUAL
