"""Published systems: the claim of each, and the two setups whose ratio simtune compares with the claim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import Field, field_validator, model_validator

from simtune.errors import SpecError, suggest
from simtune.specs.acceptance import Acceptance
from simtune.specs.base import Count, ErrorAt, Name, NonNegative, Part, Positive, Seq, Share, Spec
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.setting_paths import covered, leaves
from simtune.specs.workload import Workload
from simtune.specs.yamlfile import Document

S = TypeVar("S", bound=Spec)

PRIMITIVES: dict[str, str] = {
    "device": "a profile of a device that is neither a GPU nor a processor",
    "hierarchy": "drafts that a drafter of their own verifies, or several drafters that share a tree",
    "sp": "chunks or rounds of one sequence that follow one another through the stages of a pipeline",
    "tpf": "passes that compute a block or a whole sequence again, and candidates side by side in one pass",
}
"""Missing features that an entry may list as needed, in words."""

OWN_BAND = "a band: no figure is published"
"""Assumption of every claim that has no figure."""

LatencyMetric = Literal["ttft", "tpot", "e2el", "queue", "prefill", "transfer", "decode"]
LoadMetric = Literal[LatencyMetric, "output_tokens_per_s", "total_tokens_per_s", "duration", "group", "tokens"]
LATENCIES: tuple[str, ...] = get_args(LatencyMetric)
Formula = Literal["padded_tokens", "pollaczek_khinchine"]
InputSource = Literal["published", "derived", "substitute", "second-hand", "assumed"]
SOURCED: tuple[InputSource, ...] = ("published", "derived", "substitute")
"""Sources of inputs that can cover settings."""

# --- what is measured -------------------------------------------------------------------------------------


class UnderLoad(Part):
    """A number of a simulated run."""

    kind: Literal["load"] = "load"
    metric: LoadMetric = Field(
        "output_tokens_per_s",
        description="group: from the arrival of a group's first branch to the end of its last, mean over groups",
    )
    statistic: Annotated[str, Field(pattern=r"^(mean|p[0-9]+(\.[0-9]+)?)$")] = Field(
        "mean", description="statistic of latencies"
    )
    request_class: str | None = None
    per_gpu: bool = False


class HighestRate(Part):
    """The highest rate at which a share of the requests meets these limits, by bisection."""

    kind: Literal["highest_rate"] = "highest_rate"
    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    e2el_s: Positive | None = None
    share: Share = Field(
        0.9, description="share of the requests that must keep all limits; each class its own slo if any"
    )
    from_rps: Positive = Field(description="a rate at which the limits are certainly kept")
    to_rps: Positive = Field(description="a rate at which the limits are certainly missed")
    tolerance: Positive = 0.05
    per_gpu: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.from_rps >= self.to_rps:
            raise ErrorAt(f"from_rps ({self.from_rps:g}) must be below to_rps ({self.to_rps:g})", "from_rps")
        return self


class StepSeconds(Part):
    """Seconds of one step (see `setup.step`) for each token it delivers, by the cost model only."""

    kind: Literal["step"] = "step"
    only: Seq[str] = Field(
        (), description="kinds of `StepModel.breakdown` that count; all, with the host, unless given"
    )
    within_s: Positive | None = Field(
        None, description="as many decodes as a step of this length allows, and no more than the step has"
    )
    per_gpu: bool = Field(False, description="seconds of all GPUs of the instance, over the tokens of all its groups")


class MemoryHeld(Part):
    """Capacity of the memory: tokens of the KV cache, or the longest context of one sequence."""

    kind: Literal["memory"] = "memory"
    metric: Literal["kv_tokens", "longest_context"] = "kv_tokens"


Measure = Annotated[UnderLoad | HighestRate | StepSeconds | MemoryHeld, Field(discriminator="kind")]

# --- what runs --------------------------------------------------------------------------------------------


class OneStep(Part):
    """Load of the one step of `StepSeconds`."""

    decodes: Annotated[int, Field(ge=0)] | Literal["capacity"] = Field(
        0, description="sequences that decode; capacity: as many as the KV cache holds, up to max_num_seqs"
    )
    context: NonNegative = Field(0, description="mean KV tokens of each")
    chunks: Seq[Annotated[Seq[int], Field(min_length=2, max_length=2)]] = Field((), description="[past, new tokens]")
    shared_prefix: Annotated[int, Field(ge=0)] = Field(
        0, description="the first tokens of every context, which all decodes share and attention reads once"
    )
    delivers: Positive | None = Field(
        None, description="tokens of the step; one for each decode and chunk unless given"
    )


class Setup(Part):
    """A side of a comparison. A setting that is left out is taken from `setup` of the entry, then from that of the
    file.

    Mappings are merged key by key, but one with another `kind` takes the place of the first; lists take the place of
    lists, and null removes a key.
    """

    model: str | None = Field(None, description="name of a model, or of one of `models` of the file")
    hardware: str | None = None
    workload: dict[str, Any] = Field({}, description="fields of a workload; a number of tokens is a fixed length")
    pool: dict[str, Any] = Field({}, description="fields of the one pool of a plan, or of all of `pools`")
    pools: Seq[dict[str, Any]] = ()
    plan: dict[str, Any] = Field({}, description="other fields of a plan: router, link, events")
    step: OneStep | None = None
    order: Literal["arrival", "output", "predicted", "prefix"] | None = Field(
        None, description="all requests at once, in this order; predicted by output length and prediction_sigma"
    )
    prediction_sigma: NonNegative = 0.35
    branches: Count | None = Field(None, description="requests of a group, in a row; they arrive together")
    finish_first: Count | None = Field(
        None, description="branches of a group stop at the length of the n-th shortest, with n this number"
    )
    best_of: Seq[dict[str, Any]] = Field((), description="alternatives of fields of the pool; the best result counts")
    phases: Seq[Phase] = Field((), description="in place of one setup: several, whose seconds are added up")
    beside: bool = Field(False, description="phases run in parallel: the longest counts")


class Phase(Part):
    """A setup of several that follow one another, each unloaded by the others."""

    times: NonNegative = Field(1.0, description="weight of the phase: how often, or with which share, it counts")
    setup: Setup


Setup.model_rebuild()


class Claim(Part):
    """Claim of a publication, and the band within which a simulation agrees with it.

    Gains are above 1 if the variant is better: less time, more tokens per second.
    """

    says: str
    gain: Positive | None = Field(
        None, description="gain of the variant over the base; left out if no figure is published"
    )
    value: Positive | None = Field(None, description="in place of a gain: the variant's own number")
    formula: Formula | None = Field(
        None,
        description="in place of a gain, what a published formula makes of these requests: padded_tokens: of batches "
        "in order of arrival, each padded to its longest prompt, over the prompts themselves; pollaczek_khinchine: the "
        "mean wait of an M/G/1 queue with the service times of the base, over that with those of the variant",
    )
    band: Annotated[Seq[Positive], Field(min_length=2, max_length=2)] | None = Field(
        None,
        description="band of the gain, of the variant's number over `value`, or of the gain over that of the formula; "
        "needed if a variant is run",
    )

    @field_validator("band")
    @classmethod
    def _ordered(cls, band: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if band is not None and band[0] > band[1]:
            raise ValueError(
                f"the lower bound {band[0]:g} exceeds the upper bound {band[1]:g}; write the lower bound first"
            )
        return band

    @property
    def has_figure(self) -> bool:
        """True if a gain, a value or a formula is published."""
        return any(x is not None for x in (self.gain, self.value, self.formula))

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.gain is not None and self.value is not None:
            raise ErrorAt("give a gain or a value, not both", "value")
        if self.formula is not None and (self.gain, self.value) != (None, None):
            raise ErrorAt("a formula takes the place of a gain or a value; give one of them", "formula")
        return self


class Otherwise(Part):
    """Settings of both sides, and of each side alone, in place of an assumed input."""

    setup: Setup = Setup()
    base: Setup = Setup()
    variant: Setup = Setup()


class Probe(Otherwise):
    """A variation of one thing, which shows where a difference comes from."""

    what: str
    measure: Measure | None = Field(None, description="measure in place of the entry's own")


class Input(Part):
    """An input of the result, and its source."""

    what: str
    source: InputSource = Field(
        description="published: by what makes the claim, or with it; derived: follows from what is published; "
        "substitute: stands for what simtune lacks; second-hand: by a summary or notes that others wrote, without the "
        "publication seen; assumed: no publication states it"
    )
    where: str | None = Field(None, description="place where it is published, or what it follows from or stands for")
    covers: Seq[str] = Field(
        (),
        description="settings of which this is the source, on both sides, by their keys: pool.speculation.scheme; a "
        "path covers all settings below it. An assumed input covers the settings that its `otherwise` changes",
    )
    otherwise: Seq[Otherwise] = Field(
        (),
        description="for an assumed input: the ends of the range that it could have instead; it decides nothing if the "
        "band holds at all of them",
    )

    @model_validator(mode="after")
    def _sourced(self) -> Self:
        if self.source != "assumed" and self.where is None:
            raise ErrorAt(f"{self.source}: say where it is published, what it follows from or stands for", "where")
        if (self.source == "assumed") != bool(self.otherwise):
            raise ErrorAt(
                "the ends of what it could be are given of what is assumed, and of nothing else; a guess that is not "
                "varied stands under the entry's `assumed`",
                "otherwise",
            )
        if self.covers and self.source not in SOURCED:
            raise ErrorAt(
                f"{self.source} inputs are no source of a setting; leave out covers"
                + (", which `otherwise` decides" if self.source == "assumed" else ""),
                "covers",
            )
        return self


class PublishedSystem(Part):
    """A published system, with a setup to run or the reason why it is not run."""

    name: Name
    title: str
    year: int | None = None
    source: str = Field(description="arXiv number, URL or title of what makes the claim")
    claim: Claim | None = None
    measure: Measure = UnderLoad()
    setup: Setup = Setup()
    base: Setup = Setup()
    variant: Setup | None = None
    inputs: Seq[Input] = Field((), description="inputs of the result: all with their sources")
    assumed: Seq[str] = Field((), description="inputs that decide the result and are not published")
    chosen: str | None = Field(
        None, description="choices made with the claim or a result in sight: being within the band is then no evidence"
    )
    not_modelled: Seq[str] = Field((), description="features of the variant that are left out")
    needs: Seq[str] = Field((), description="primitives that simtune lacks")
    not_a_schedule: str | None = Field(None, description="reason why the headline is nothing that a schedule decides")
    probes: Seq[Probe] = Field((), description="for a difference: further runs that measure where it comes from")
    because: str | None = Field(None, description="for a difference: what is known beside what is measured")

    @field_validator("needs")
    @classmethod
    def _known(cls, needs: tuple[str, ...]) -> tuple[str, ...]:
        for name in needs:
            if name not in PRIMITIVES:
                hint = suggest(name, PRIMITIVES) or f"; known: {', '.join(PRIMITIVES)}"
                raise ValueError(f"unknown primitive {name!r}{hint}")
        return needs

    @model_validator(mode="after")
    def _run_or_said_why_not(self) -> Self:
        reasons = [bool(self.needs), self.not_a_schedule is not None, self.variant is not None]
        if sum(reasons) != 1:
            raise ValueError(
                "give a variant that is run, or what it needs, or why it is not a schedule: one of the three"
            )
        if self.variant is not None and (self.claim is None or self.claim.band is None):
            raise ValueError("a variant is run to be held against a claim: give one, with its band")
        if self.variant is None and self.chosen is not None:
            raise ErrorAt("nothing is run, so nothing was chosen; leave it out", "chosen")
        return self

    @property
    def unpublished(self) -> tuple[str, ...]:
        """Inputs that decide the verdict and are not published, and the band if the claim has no figure."""
        if self.variant is None or self.claim is None or self.claim.has_figure:
            return tuple(self.assumed)
        return (*self.assumed, OWN_BAND)


class Systems(Spec):
    """A family of published systems."""

    KIND: ClassVar[str] = "systems"
    title: str
    setup: Setup = Setup()
    models: dict[str, dict[str, Any]] = Field({}, description="fields of models that entries name")
    acceptance: dict[str, dict[str, Any]] = Field({}, description="fields of acceptance that entries name")
    systems: Annotated[Seq[PublishedSystem], Field(min_length=1)]

    @field_validator("systems")
    @classmethod
    def _distinct(cls, systems: tuple[PublishedSystem, ...]) -> tuple[PublishedSystem, ...]:
        names = [s.name for s in systems]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(f"two systems are called {name}; give one another name")
        return systems

    def own_model(self, name: str) -> Model | None:
        """Return a model that the file defines; None if it defines none of this name."""
        fields = self.models.get(name)
        return None if fields is None else _read(Model, name, fields)

    def own_acceptance(self, name: str) -> Acceptance | None:
        """Return an acceptance spec that the file defines; None if it defines none of this name."""
        fields = self.acceptance.get(name)
        return None if fields is None else _read(Acceptance, name, fields)

    def varied(self, system: PublishedSystem, otherwise: Otherwise) -> dict[str, dict[str, Any]]:
        """`sides`, with an assumed input otherwise."""
        shared = _given(otherwise.setup)
        return {
            side: merged(merged(side_settings, shared), _given(getattr(otherwise, side)))
            for side, side_settings in self.sides(system).items()
        }

    def sides(self, system: PublishedSystem) -> dict[str, dict[str, Any]]:
        """Return the merged settings of base and variant of a system that is run."""
        if system.variant is None:
            return {}
        common = merged(_given(self.setup), _given(system.setup))
        setups = {"base": system.base, "variant": system.variant}
        if system.claim is not None and system.claim.value is not None:
            del setups["base"]
        return {side: merged(common, _given(setup)) for side, setup in setups.items()}

    def settings(self, system: PublishedSystem) -> set[SideSetting]:
        """Return all settings of a system that is run, in phases and alternatives too; probes have none."""
        return _settings(self.sides(system), system.measure)

    def varied_settings(self, system: PublishedSystem, assumed: Input) -> set[SideSetting]:
        """Return the settings that at least one end of an assumed input has otherwise."""
        ends = [_settings(self.varied(system, otherwise), system.measure) for otherwise in assumed.otherwise]
        return {setting for setting in self.settings(system) if any(setting not in end for end in ends)}


# --- settings ---------------------------------------------------------------------------------------------


class SideSetting(NamedTuple):
    """A number or choice of one side."""

    side: str
    path: str
    value: str
    """The value as JSON."""


UNUSED: dict[str, tuple[str, ...]] = {
    "load": ("step",),
    "highest_rate": ("step", "workload.arrivals.rate_rps"),
    "step": ("workload",),
    "memory": ("workload", "step"),
}
"""Settings that a kind of measure does not read; the highest rate is searched for."""


def _settings(sides: Mapping[str, Mapping[str, Any]], measure: Measure) -> set[SideSetting]:
    settings: set[SideSetting] = set()
    for side, side_settings in sides.items():
        arranged: dict[str, Any] = {
            "phases": [{"times": phase["times"]} for phase in side_settings.get("phases", ()) if "times" in phase]
        }
        if side_settings.get("phases") and "beside" in side_settings:
            arranged["beside"] = side_settings["beside"]
        for part in (arranged, *map(_without_defaults, unfolded(side_settings))):
            settings |= {SideSetting(side, path, value) for path, value in leaves(part) if value != "[]"}
    return {setting for setting in settings if not covered(setting.path, UNUSED[measure.kind])}


def _without_defaults(side: Mapping[str, Any]) -> dict[str, Any]:
    """Return a side without the lengths that all classes, or all parts of a graph, have of their own."""
    load = side.get("workload", {})
    parts = load.get("classes") or load.get("graph") or ()
    unread = {key for key in ("prompt", "output") if parts and all(key in part for part in parts)}
    return {**side, "workload": {key: value for key, value in load.items() if key not in unread}}


# --- setups to specs --------------------------------------------------------------------------------------


def _given(setup: Setup) -> dict[str, Any]:
    """Return the settings of a setup as plain data."""
    return setup.model_dump(exclude_unset=True)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`; see `Setup`."""
    if "kind" in over and over["kind"] != under.get("kind"):
        return dict(over)
    result = dict(under)
    for key, value in over.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


POOL: dict[str, Any] = {"instances": 1, "batching": {"max_num_seqs": 256, "max_num_batched_tokens": 8192}}
WORKLOAD: dict[str, Any] = {"arrivals": {"kind": "closed_loop", "users": 1}, "requests": 4}


def plan_of(side: Mapping[str, Any], name: str) -> Plan:
    """The plan of a side. Raises SpecError."""
    shared = merged(POOL, side.get("pool", {}))
    pools = []
    for fields in side.get("pools") or [{}]:
        pool = merged(shared, fields)
        if "hardware" in side:
            pool.setdefault("hardware", side["hardware"])
        pools.append(pool)
    return _read(Plan, name, {"model": side.get("model"), "pools": pools, **side.get("plan", {})})


def workload_of(side: Mapping[str, Any], name: str) -> Workload:
    """The workload of a side; a number of tokens in place of lengths is their fixed length. Raises SpecError."""
    fields = merged(WORKLOAD, side.get("workload", {}))
    fields = {key: _length(value) if key in ("prompt", "output") else value for key, value in fields.items()}
    for parts in {"classes", "graph"} & set(fields):
        fields[parts] = [
            {key: _length(value) if key in ("prompt", "output") else value for key, value in part.items()}
            for part in fields[parts]
        ]
    return _read(Workload, name, fields)


def _length(value: Any) -> Any:
    return {"kind": "fixed", "tokens": value} if isinstance(value, int) else value


def _read(kind: type[S], name: str, fields: Mapping[str, Any]) -> S:
    data = {"schema": kind.schema_id(), "name": name, **fields}
    return kind.from_document(Document(name, data, None))


def problems(systems: Systems) -> Iterator[tuple[Sequence[str | int], str]]:
    """Yield the problems of the plans, workloads, models and rates that a file's entries expand to, each once with its
    key.
    """
    yield from {(tuple(at), message): None for at, message in _all_problems(systems)}


def _all_problems(systems: Systems) -> Iterator[tuple[Sequence[str | int], str]]:
    for name in systems.models:
        yield from _problems(("models", name), partial(systems.own_model, name))
    for name in systems.acceptance:
        yield from _problems(("acceptance", name), partial(systems.own_acceptance, name))
    for i, system in enumerate(systems.systems):
        yield from _cover_problems(systems, system, i)
        for places, side in _placed(systems, system, i):
            settings = {at: _given(setup) for at, setup in places.items()}
            for alternative in unfolded(side):
                for keys, message in _problems((), partial(plan_of, alternative, "plan")):
                    yield _place(settings, ("pool", *keys)), message
                if "step" not in alternative and system.measure.kind in ("load", "highest_rate"):
                    for keys, message in _problems((), partial(workload_of, alternative, "workload")):
                        yield _place(settings, ("workload", *keys)), message


def _cover_problems(systems: Systems, system: PublishedSystem, i: int) -> Iterator[tuple[Sequence[str | int], str]]:
    """Yield the paths of `covers` that no setting has."""
    if not any(item.covers for item in system.inputs):
        return
    paths = sorted({setting.path for setting in systems.settings(system)})
    for n, item in enumerate(system.inputs):
        for k, cover in enumerate(item.covers):
            if not any(covered(path, [cover]) for path in paths):
                hint = suggest(cover, paths) or f"; its settings are {', '.join(paths)}."
                message = f"no setting of {system.name} is called {cover!r}{hint} Correct the path or leave it out"
                yield ("systems", i, "inputs", n, "covers", k), message


def _placed(
    systems: Systems, system: PublishedSystem, i: int
) -> Iterator[tuple[dict[tuple[Any, ...], Setup], dict[str, Any]]]:
    """Yield the settings of each setup of a system that is run, by their keys, the setup's own first; and the merged
    setup.
    """
    shared: dict[tuple[Any, ...], Setup] = {("systems", i, "setup"): system.setup, ("setup",): systems.setup}
    for side, merged_side in systems.sides(system).items():
        yield {("systems", i, side): getattr(system, side), **shared}, merged_side
    varied: dict[tuple[Any, ...], Otherwise] = {
        ("systems", i, "inputs", n, "otherwise", k): otherwise
        for n, entry in enumerate(system.inputs)
        for k, otherwise in enumerate(entry.otherwise)
    }
    varied |= {("systems", i, "probes", n): probe for n, probe in enumerate(system.probes)}
    for at, otherwise in varied.items():
        for side, merged_side in systems.varied(system, otherwise).items():
            settings = {(*at, side): getattr(otherwise, side), (*at, "setup"): otherwise.setup}
            yield {**settings, ("systems", i, side): getattr(system, side), **shared}, merged_side


def _place(settings: Mapping[tuple[Any, ...], Mapping[str, Any]], keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the path of a setting: in the first of these mappings that has it, by the path of each mapping."""
    for at, mapping in settings.items():
        node: Any = mapping
        for key in keys:
            node = node.get(key) if isinstance(node, Mapping) else None
        if node is not None:
            return (*at, *keys)
    return (*next(iter(settings)), *keys)


def unfolded(side: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all setups of a side that are run: its phases, and all alternatives of each phase."""
    common = {key: value for key, value in side.items() if key not in ("phases", "beside")}
    setups = [merged(common, phase.get("setup", {})) for phase in side.get("phases") or [{}]]
    return [alternative for setup in setups for alternative in alternatives(setup)]


def alternatives(side: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The setups that `best_of` chooses among."""
    common = {key: value for key, value in side.items() if key != "best_of"}
    return [merged(common, {"pool": fields}) for fields in side.get("best_of") or [{}]]


def _problems(at: tuple[str | int, ...], make: Any) -> Iterator[tuple[Sequence[str | int], str]]:
    try:
        make()
    except SpecError as error:
        for problem in error.problems:
            keys: list[str | int] = [int(k) if k.isdigit() else k for k in problem.key.split(".") if k]
            if keys[:2] == ["pools", 0]:
                keys = keys[2:]
            yield (*at, *keys), problem.message


__all__ = [
    "Claim",
    "Input",
    "Otherwise",
    "Probe",
    "PublishedSystem",
    "Setup",
    "Systems",
    "alternatives",
    "merged",
    "plan_of",
    "problems",
    "unfolded",
    "workload_of",
]
