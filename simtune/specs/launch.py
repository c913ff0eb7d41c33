"""Launch facts: what a published launch file of an engine sets for a model on a card, beyond defaults of the engine.

`--like NAME` lets a plan or a search have them: they outrank the settings of the engine's preset, and what the user
says outranks them. Some depend on the load, as `--max-num-seqs $CONC` does; such a setting is an expression over
`users` (of a closed loop), `prompt` and `output` (tokens of the longest of each): `{of_load: 2 * prompt}`. Files that
launch prefill and decode pools have settings of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simtune.errors import UsageError
from simtune.specs.base import Dtype, ErrorAt, Part, Seq, Spec
from simtune.specs.constraints import Formula
from simtune.specs.pool import Role
from simtune.specs.preset import Case, EnginePreset, check_pool, merged
from simtune.specs.traces import Trace
from simtune.specs.workload import ClosedLoop, FixedLength, Lengths, Lognormal, Quantiles, Workload

OF_LOAD = "of_load"
NAMES = ("users", "prompt", "output")
_SOME_LOAD = {"users": 64, "prompt": 1024, "output": 1024}
"""A load for which the settings of a file are checked."""


@dataclass(frozen=True)
class LoadShape:
    """Facts of a load on which settings of launch files depend."""

    users: int | None
    """Requests that a closed loop has under way; None for loads with a rate."""
    prompt: int
    """Tokens of the longest prompt."""
    output: int
    """Tokens of the longest answer."""

    @classmethod
    def of(cls, workload: Workload, trace: Trace | None) -> LoadShape:
        """Return the shape of a load, with the trace that it replays, if any."""
        users = workload.arrivals.users if isinstance(workload.arrivals, ClosedLoop) else None
        prompts, outputs = (None, None) if trace is None else (trace.prompt_tokens, trace.output_tokens)
        classes = workload.classes
        return cls(
            users,
            max(_longest(lengths, prompts) for lengths in (workload.prompt, *(c.prompt for c in classes)) if lengths),
            max(_longest(lengths, outputs) for lengths in (workload.output, *(c.output for c in classes)) if lengths),
        )

    @property
    def values(self) -> dict[str, int]:
        """The values that it has, by name."""
        every = {"users": self.users, "prompt": self.prompt, "output": self.output}
        return {name: value for name, value in every.items() if value is not None}


def _longest(lengths: Lengths, in_trace: Any) -> int:
    match lengths:
        case FixedLength(tokens=tokens):
            return tokens
        case Lognormal(max_tokens=most):
            return most
        case Quantiles(tokens=tokens):
            return round(tokens[-1])
    return int(max(in_trace))


Drafting = Literal["always", "never", "both"]
"""Drafts of the servers that were launched: with, without, or both for the same load."""


class LaunchCase(Part):
    """Settings for some loads: they replace those above if the condition holds."""

    when: str = Field(description="condition over users, prompt and output, such as users >= 16")
    pool: dict[str, Any] = Field({}, description="keys of a plan's pool")
    prefill: dict[str, Any] = Field({}, description="keys of a prefill pool, over those of pool")
    decode: dict[str, Any] = Field({}, description="keys of a decode pool, over those of pool")
    drafts: Drafting | None = Field(None, description="whether servers were launched with drafts")

    @cached_property
    def condition(self) -> Formula:
        """The condition, parsed."""
        return Formula(self.when, NAMES)


class LaunchFacts(Spec):
    """Settings of a published launch file."""

    KIND: ClassVar[str] = "launch"
    model: str = Field(description="the model that was served")
    weights: Dtype = Field(description="format of the weights of its experts, or of all its weights")
    hardware: str = Field(description="the card")
    engine: str = Field(description="preset of the engine and release, as a plan names it")
    pool: dict[str, Any] = Field(description="keys of a plan's pool; values may be {of_load: expression}")
    prefill: dict[str, Any] = Field({}, description="keys of a prefill pool, over those of pool")
    decode: dict[str, Any] = Field({}, description="keys of a decode pool, over those of pool")
    drafts: Drafting | None = Field(
        None, description="whether servers were launched with drafts, which plans do not get from here"
    )
    cases: Seq[LaunchCase] = ()
    source: str = Field(description="repository and file of the launch file, with its licence")
    left_out: Seq[str] = Field((), description="what the file sets besides and no plan states")

    @model_validator(mode="after")
    def _understood(self) -> Self:
        for at, case in enumerate(self.cases):
            try:
                Formula(case.when, NAMES)
            except ValueError as error:
                raise ErrorAt(str(error), "cases", at, "when") from None
        for at, part in enumerate(self._parts):
            place: tuple[str | int, ...] = () if at == 0 else ("cases", at - 1)
            for key, settings in (("pool", part.pool), ("prefill", part.prefill), ("decode", part.decode)):
                try:
                    stated = dict(_stated(settings, _SOME_LOAD))
                except (ValueError, UsageError) as error:
                    raise ErrorAt(str(error), *place, key) from None
                check_pool(stated, *place, key)
        return self

    @property
    def _parts(self) -> tuple[LaunchFacts | LaunchCase, ...]:
        return (self, *self.cases)

    @property
    def disaggregated(self) -> bool:
        """True if the file launches prefill and decode pools."""
        return any(part.prefill or part.decode for part in self._parts)

    def drafting(self, load: LoadShape) -> Drafting | None:
        """Return whether servers were launched with drafts for a load; None if nothing is stated."""
        stated = self.drafts
        for case in self.cases:
            if case.condition.names <= load.values.keys() and case.condition.value(load.values):
                stated = case.drafts or stated
        return stated

    def settings(self, load: LoadShape, role: Role = "mixed") -> tuple[dict[str, Any], list[str]]:
        """Return the keys of a pool of a role that the launch file sets for a load, and what would need the users of a
        closed loop, which the load does not have: keys and conditions.
        """
        values, unknown = load.values, list[str]()
        settings = self._of(self, role, values, unknown)
        for case in self.cases:
            if not case.condition.names <= values.keys():
                unknown.append(f"those when {case.when}")
            elif case.condition.value(values):
                settings = merged(self._of(case, role, values, unknown), settings)
        return settings, unknown

    @staticmethod
    def _of(
        part: LaunchFacts | LaunchCase, role: Role, values: Mapping[str, int], unknown: list[str]
    ) -> dict[str, Any]:
        """Return the settings of a pool of a role in one part of the file."""
        of_role: dict[str, Any] = {"prefill": part.prefill, "decode": part.decode}.get(role, {})
        return merged(dict(_stated(of_role, values, unknown)), dict(_stated(part.pool, values, unknown)))

    def over(self, preset: EnginePreset, load: LoadShape, role: Role = "mixed") -> EnginePreset:
        """Return a preset of the same engine whose settings for a pool of a role are these, and its defaults where the
        launch file sets nothing. Raises UsageError for a preset of another engine, and for a mixed pool if the file
        launches prefill and decode pools.
        """
        if preset.family != self.engine.partition("-")[0]:
            raise UsageError(
                f"--like {self.name}: a launch file of {self.engine}, and {preset.name} is another engine; "
                "leave the engine out, or name a release of the same one"
            )
        if role == "mixed" and self.disaggregated:
            raise UsageError(
                f"--like {self.name}: a launch file of prefill and decode pools; give a plan that has such pools"
            )
        last = Case(pool=self.settings(load, role)[0])
        return preset.model_copy(update={"cases": (*preset.cases, last)})


def _stated(
    settings: Mapping[str, Any], values: Mapping[str, int], unknown: list[str] | None = None, above: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield settings with the value of each expression; keys whose value needs what the load lacks go to `unknown`."""
    for key, value in settings.items():
        if not isinstance(value, Mapping):
            yield key, value
        elif value.keys() != {OF_LOAD}:
            yield key, dict(_stated(value, values, unknown, f"{above}{key}."))
        elif (formula := Formula(str(value[OF_LOAD]), NAMES)).names <= values.keys():
            yield key, formula.value(values)
        elif unknown is not None:
            unknown.append(f"{above}{key}")
