"""Contents of the files of a run: `summary.json`, `candidates.csv`, `search.csv`, `requests.csv`, `manifest.json`.

Declared once; the same classes are filled in, written, and read again. The numbers of the simulation itself are
declared where they are computed, in `simtune.results.summary`. Seconds, bytes, tokens, requests per second.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, ValidationInfo, field_serializer, field_validator, model_validator

from simtune.results.summary import CostBasis, LatencyQuantiles, SimulationSummary, Uncertainty
from simtune.runs.files import SUMMARY_SCHEMA
from simtune.runs.price import Price
from simtune.runs.swimlanes import Swimlanes
from simtune.specs.base import Count, ErrorAt, NonNegative, Positive, Record, Seq, Share, Spec, Whole
from simtune.specs.plan import Plan
from simtune.specs.schema_versions import REDO, schema_problem
from simtune.specs.study import Study
from simtune.tuner.certificate.search_certificate import Certificate
from simtune.tuner.doubt.confidence import Confidence
from simtune.tuner.doubt.slo_probability import SloProbability
from simtune.tuner.search.day import DayPlan
from simtune.tuner.search.front_points import FrontPoint
from simtune.workload.load import LoadFacts

COURSE = "search.csv"
MANIFEST_SCHEMA: Literal["simtune/manifest@1"] = "simtune/manifest@1"

# --- parts of the summary: what was simulated -------------------------------------------------------------


class OperatorQuality(Record):
    """|predicted / measured - 1| of one operator's time model on points it never saw; null if untested."""

    key: str
    median: NonNegative | None
    p90: NonNegative | None
    max: NonNegative | None
    provenance: str
    source: str


class HardwareFacts(Record):
    """The part of the hardware profile that a reader needs to judge the numbers."""

    name: str
    under: str | None = Field(None, description="engine of its pools; written only if pools run under several")
    engine: str = Field(description="engine whose kernels were measured")
    device: str
    operators: Seq[OperatorQuality]
    estimated: Seq[str] = Field(description="operators without a table, estimated from the data sheet")
    corrected: str | None = Field(description="step times by an engine's own log: how, and by which")
    validated: str | None = Field(description="by what and how far off; null when never")
    published_runs: str | None = Field(
        None, description="how far off predictions of such deployments were on serving runs that others measured"
    )


class MemoryUse(Record):
    """Memory of one device under vLLM's accounting."""

    total_bytes: Positive
    weights_bytes: NonNegative
    kv_bytes: NonNegative
    other_bytes: NonNegative
    kv_bytes_per_token: Positive
    num_blocks: Count


class StepPart(Record):
    """Time of one operator kind in a step."""

    operator: str
    seconds: NonNegative
    provenance: str


class StepTime(Record):
    """Predicted time of one step, by operator kind."""

    step: str
    parts: Seq[StepPart]


class Timeline(Record):
    """State over simulated time, sampled at even times."""

    t_s: Seq[float]
    running: Seq[float] = Field(description="requests")
    waiting: Seq[float] = Field(description="requests")
    kv_used: Seq[float] = Field(description="used share of the KV blocks")

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        lengths = {len(self.t_s), len(self.running), len(self.waiting), len(self.kv_used)}
        if len(lengths) > 1:
            raise ValueError("t_s, running, waiting and kv_used must be equally long")
        return self


class PoolTimeline(Timeline):
    """The timeline of one pool."""

    pool: str


# --- parts of the summary: what was searched --------------------------------------------------------------


class ObjectiveValue(Record):
    """Value of the study's objective that the chosen plan reached."""

    name: str
    unit: str
    value: float
    bound: float | None = Field(None, description="no plan of the space reaches more, under the cost model")
    gap: NonNegative | None = Field(None, description="by how much a plan could be better at most, as a share of value")
    gap_on_draw: NonNegative | None = Field(
        None, description="the same on the requests of the search, with every plan held against the chosen one there"
    )
    draws: Seq[float] | None = Field(None, description="on each fresh draw of the requests, if the load is given")
    low: float | None = Field(None, description="lower end of its interval (90 %) from one draw to another")
    high: float | None = Field(None, description="upper end of that interval")


class SweepPoint(Record):
    """A candidate under one offered rate."""

    candidate: str
    rate_rps: Positive = Field(description="offered")
    goodput_rps: NonNegative
    slo_attainment: Share | None
    ttft_p99_s: NonNegative | None
    tpot_p99_s: NonNegative | None
    saturated: bool
    tokens_per_round: Positive | None = Field(description="delivered by one verification; null without drafts")
    wasted_per_round: NonNegative | None = Field(description="tokens verified and not delivered")


class RunnerUp(Record):
    """A rival of the chosen plan, at the rate that it was judged at."""

    candidate: str
    ttft_quantiles_s: Seq[float] = Field(description="at evenly spaced levels from 0 to 1")
    tpot_quantiles_s: Seq[float]


# --- parts of the summary: how to draft -------------------------------------------------------------------


class ScheduleCell(Record):
    """The best way to draft at one batch and context, and its gain over no drafts."""

    scheme: str
    short: str
    off: bool
    gain: Positive
    occurs: bool = Field(description="the batch of this context fits in memory")


class FixedScheme(Record):
    """The best of one scheme for all batches and contexts."""

    scheme: str
    gain: Positive


class ChainAtBatch(Record):
    """Tokens of a round, and wasted ones, per sequence, of a chain whose length follows the batch."""

    batch: Count
    draft_tokens: Whole
    tokens: Positive
    wasted: NonNegative


class EngineDrafting(Record):
    """Part of the schedule that an engine can be given: `loss` is the share of the gain that is lost by the
    restriction.
    """

    engine: str
    scheme: str
    gain: Positive
    loss: float
    settings: dict[str, Any] | None
    why: str = Field(description="there are no settings")


class DraftNode(Record):
    """A drafted token, by the ranks along its path, and how likely the target takes it."""

    path: Seq[Count]
    probability: Share


class DraftShape(Record):
    """The draft of the cell that gains most."""

    batch: Count
    context: Count
    nodes: Seq[DraftNode]


class DraftedLoad(Record):
    """Simulated drafting at one offered rate, per round of a request."""

    rate_rps: Positive
    tokens: Positive
    wasted: NonNegative


class AcceptanceFacts(Record):
    """Source of the acceptance."""

    name: str
    origin: str


class DraftSchedule(Record):
    """The best drafts over (batch, context), and what is left of them in an engine's own terms."""

    drafter: str
    acceptance: AcceptanceFacts
    batches: Seq[Count]
    contexts: Seq[Count]
    cells: Seq[Seq[ScheduleCell]] = Field(description="by batch, then by context")
    chain_lengths: Seq[Seq[Whole]] = Field(description="the best chain of each cell; 0 where none pays")
    gain: Positive
    fixed: FixedScheme
    by_batch: Seq[ChainAtBatch]
    engines: Seq[EngineDrafting]
    draft: DraftShape
    load: Seq[DraftedLoad] = Field((), description="left out where nothing was simulated")


# --- summary.json -----------------------------------------------------------------------------------------


class VariantResult(Record):
    """The best that a search knows of the plans of a variant."""

    variant: str = Field(description="name of the variant; empty for the plans as they are")
    plan: str = Field(description="the plan that reached the most; empty where none met the SLO")
    reached: float | None = Field(description="objective of that plan; on the search's draw unless it was chosen")
    at_most: float | None = Field(description="no plan of the variant exceeds it; null where none can meet the SLO")
    score: float | None = Field(None, description="score of its model; left out where the study gives none")
    reason: str = Field("", description="why most of its plans cannot meet the SLO, where none can")


class FamilyResult(Record):
    """The best that a search knows of prefill/decode plans, or of mixed ones."""

    family: str = Field(description="prefill/decode, or mixed")
    plan: str = Field(description="the plan that reached the most; empty where none met the SLO")
    reached: float | None = Field(description="objective of that plan; on the search's draw unless it was chosen")
    at_most: float | None = Field(description="no plan of the family exceeds it; null where none can meet the SLO")


class Summary(SimulationSummary):
    """`summary.json`: the question, the choice, and the results of its simulation."""

    schema_id: Literal["simtune/summary@2"] = Field(alias="schema")
    name: str
    seed: Whole | None
    study: Study | None = Field(description="null where one plan was simulated without a search")
    objective: ObjectiveValue | None
    sweep: Seq[SweepPoint] | None
    runners_up: Seq[RunnerUp] | None
    interrupted: bool = Field(False, description="the search was stopped and this is its best so far")
    draft_schedule: DraftSchedule | None = Field(None, description="left out where the study names no drafter")
    front: Seq[FrontPoint] = Field((), description="the highest load first; left out where no front was asked for")
    day: DayPlan | None = Field(None, description="left out where the study has none")
    confidence: Confidence | None = Field(None, description="left out where the choice was not judged in other worlds")
    uncertainty: Uncertainty | None = Field(None, description="null where no worlds were redrawn")
    slo_probability: SloProbability | None = Field(
        None, description="of the chosen plan of a study; left out where worlds were redrawn, or nothing is limited"
    )
    plan: Plan
    model: str
    model_notes: Seq[str] = Field((), description="assumptions on the model; left out where there are none")
    hardware: HardwareFacts = Field(description="of the first pool")
    other_hardware: Seq[HardwareFacts] = Field((), description="of other pools; left out where all pools have the same")
    memory: MemoryUse | None
    breakdown: Seq[StepTime] | None
    cost_basis: CostBasis | None = Field(None, description="null where step costs were brought from outside")
    timeline: Timeline | None
    pool_timelines: Seq[PoolTimeline] | None = Field(description="where there are several pools")
    quantiles: LatencyQuantiles | None
    price: Price | None = Field(None, description="null where a hardware profile names no price")
    load: LoadFacts | None = Field(None, description="the requests that were simulated")
    load_source: str | None = Field(None, description="workload, and where its numbers come from")
    launch: str | None = Field(None, description="starts the plan; left out where no engine has its policy")
    no_engine: str | None = Field(
        None, description="why no engine can be given the plan, and what it lacks; left out unless a variant is why"
    )
    variants: Seq[VariantResult] = Field((), description="best of each variant; left out where there is one")
    families: Seq[FamilyResult] = Field(
        (),
        description="best of prefill/decode and of mixed plans, the chosen one's first; left out where one is searched",
    )

    @field_validator("plan", "study", mode="before")
    @classmethod
    def _without_its_schema(cls, value: Any, info: ValidationInfo) -> Any:
        """Check the version of a spec that has a file of its own, and remove it."""
        if not isinstance(value, dict):
            return value
        spec: type[Spec] = Plan if info.field_name == "plan" else Study
        if value.get("schema") != spec.schema_id():
            raise ErrorAt(schema_problem(value.get("schema"), spec.schema_id(), REDO), "schema")
        return {key: below for key, below in value.items() if key != "schema"}

    @field_serializer("plan", "study")
    def _as_its_own_file(self, spec: Spec | None) -> dict[str, Any] | None:
        return None if spec is None else spec.to_data()

    @model_validator(mode="before")
    @classmethod
    def _of_version_1(cls, data: Any) -> Any:
        """Read what version 1 called odds; it is `slo_probability` since version 2."""
        if not isinstance(data, dict) or data.get("schema") != "simtune/summary@1":
            return data
        renamed = {key: value for key, value in data.items() if key != "odds"} | {"schema": SUMMARY_SCHEMA}
        if isinstance(odds := data.get("odds"), dict):
            renamed["slo_probability"] = {"probability": odds.get("slo_probability")} | {
                key: value for key, value in odds.items() if key != "slo_probability"
            }
        return renamed

    @property
    def p_slo(self) -> tuple[float, int] | None:
        """Probability that the SLO holds, and the number of worlds that it is of; None if no world was drawn."""
        if self.uncertainty is not None:
            return self.uncertainty.slo_probability, self.uncertainty.worlds
        stated = self.slo_probability
        return None if stated is None else (stated.probability, stated.worlds)


# --- the tables -------------------------------------------------------------------------------------------


def _column(meaning: str, unit: str | None = None) -> Any:
    return Field(description=meaning, json_schema_extra=None if unit is None else {"unit": unit})


Status = Literal["chosen", "feasible", "infeasible", "pruned", "does_not_fit"]


class CandidateRow(Record):
    """A row of `candidates.csv`: a plan that was considered. A cell is empty if the search did not need the value."""

    MAY_LACK: ClassVar[frozenset[str]] = frozenset({"weight_dtype", "beside"})
    rank: Annotated[int | None, _column("place in the list, the chosen plan first")]
    candidate: Annotated[str, Field(min_length=1, description="name of the plan")]
    gpu: Annotated[str | None, _column("hardware profile of the pool that decodes")] = None
    tp: Annotated[Count, _column("tensor-parallel ranks of a pipeline stage of that pool", "GPUs")]
    pp: Annotated[Count, _column("its pipeline stages")]
    attention_dp: Annotated[Count | None, _column("its groups of ranks with requests of their own")] = None
    expert_parallel: Annotated[bool | None, _column("whether its ranks have whole experts")] = None
    weight_dtype: Annotated[
        str | None, _column("what its weights are quantised to; there only where a plan of the table names one")
    ] = None
    kv_dtype: Annotated[str | None, _column("format of its KV cache; empty for the engine's or the model's own")] = None
    prefix_caching: Annotated[bool | None, _column("empty where it stands as the engine sets it")] = None
    router: Annotated[str | None, _column("how requests are routed; numbered where the study names several")] = None
    instances: Annotated[Count, _column("its engine instances")]
    prefill: Annotated[str | None, _column("the prefill pool; empty where one pool does all")] = None
    beside: Annotated[
        str | None, _column("the mixed pool of other hardware; there only where a plan of the table has one")
    ] = None
    num_gpus: Annotated[Count, _column("of all instances together", "GPUs")]
    max_num_seqs: Annotated[Count, _column("largest batch of the pool that decodes", "requests")]
    max_num_batched_tokens: Annotated[Count, _column("its token budget of a step", "tokens")]
    speculation: Annotated[str | None, _column("drafter and scheme; empty where it does not draft")]
    status: Annotated[
        Status, _column("whether it met the SLO, could not win (pruned), or needs more memory (does_not_fit)")
    ]
    reason: Annotated[str, _column("why it was chosen, or why not")]
    kv_blocks: Annotated[int | None, _column("KV cache of an instance", "blocks")]
    rate_bound_rps: Annotated[NonNegative | None, _column("no higher rate is possible", "requests/s")]
    bounded_by: Annotated[str | None, _column("what says so")] = None
    rate_rps: Annotated[NonNegative | None, _column("offered in its last simulation", "requests/s")]
    goodput_rps: Annotated[NonNegative | None, _column("answered within every limit", "requests/s")]
    goodput_rps_per_gpu: Annotated[NonNegative | None, _column("goodput over num_gpus", "requests/s/GPU")]
    output_tokens_per_s_per_gpu: Annotated[
        NonNegative | None, _column("output throughput over num_gpus", "tokens/s/GPU")
    ]
    output_tokens_per_s_per_user: Annotated[NonNegative | None, _column("1 / mean TPOT", "tokens/s")]
    ttft_mean_s: Annotated[NonNegative | None, _column("time to first token, mean", "s")]
    ttft_p99_s: Annotated[NonNegative | None, _column("time to first token, 99th percentile", "s")]
    tpot_mean_s: Annotated[NonNegative | None, _column("time per output token after the first, mean", "s")]
    tpot_p99_s: Annotated[NonNegative | None, _column("time per output token after the first, 99th percentile", "s")]
    slo_attainment: Annotated[NonNegative | None, _column("share of the finished requests within every limit")]
    saturated: Annotated[bool | None, _column("requests pile up faster than they are served")]
    simulations: Annotated[int | None, _column("how many it took")]
    finished: Annotated[
        bool | None, _column("whether its last simulation ran to the end, or stopped when a limit was lost")
    ] = None
    usd_per_million_output_tokens: Annotated[
        NonNegative | None, _column("price of its GPUs over its output", "USD")
    ] = None
    joules_per_token: Annotated[NonNegative | None, _column("energy of its GPUs over its output tokens", "J")] = None
    launch: Annotated[
        str | None, _column("starts it; empty where it was not simulated itself or no engine can run it")
    ] = None


class CourseRow(Record):
    """A row of `search.csv`: how far a search had come, whenever its best plan or its bound had changed."""

    simulations: Annotated[Whole, _column("that were done")]
    decided: Annotated[Whole, _column("plans whose fate was known")]
    plan: Annotated[str, _column("the best so far; empty where there was none")]
    value: Annotated[float | None, _column("of the objective, reached by it")]
    bound: Annotated[float | None, _column("of the objective, that no plan exceeds")]


class RequestRow(Record):
    """A row of `requests.csv`: a simulated request. A time is empty if the event never happened."""

    MAY_LACK: ClassVar[frozenset[str]] = frozenset(
        {"family_s", "family_active_s", "held_s", "front_end_s", "delivery_s"}
    )

    request: Annotated[Whole, _column("number, by arrival")]
    request_class: Annotated[str, Field(alias="class", description="class of the workload")]
    engine_core: Annotated[int, _column("number of the engine core that it finished on; -1 where it never got to one")]
    prompt_tokens: Annotated[Whole, _column("length of the prompt", "tokens")]
    output_tokens: Annotated[Whole, _column("length of the answer", "tokens")]
    arrival_s: Annotated[float | None, _column("when it came", "s")]
    held_s: Annotated[
        float | None, _column("until arrival_s from when it was due, held back by the client (max_in_flight)", "s")
    ] = None
    scheduled_s: Annotated[float | None, _column("when it first was in a step", "s")]
    first_token_s: Annotated[float | None, _column("when its first token was there", "s")]
    finish_s: Annotated[float | None, _column("when its last token was there", "s")]
    ttft_s: Annotated[float | None, _column("first_token_s - arrival_s", "s")]
    tpot_s: Annotated[float | None, _column("mean time per token after the first; empty for one-token answers", "s")]
    e2el_s: Annotated[float | None, _column("finish_s - arrival_s", "s")]
    family_s: Annotated[
        float | None,
        _column("of a request graph or session: from its family's arrival until the last node or turn was over", "s"),
    ] = None
    family_active_s: Annotated[
        float | None, _column("the part of family_s in which requests of the family were under way", "s")
    ] = None
    front_end_s: Annotated[float | None, _column("the part of queue_s in the front end", "s")] = None
    queue_s: Annotated[float | None, _column("scheduled_s - arrival_s", "s")]
    prefill_s: Annotated[
        float | None,
        _column("until its prompt was done, first_token_s - scheduled_s unless a decode instance delivers that", "s"),
    ]
    transfer_s: Annotated[float | None, _column("until its KV cache had come to a decode instance", "s")]
    delivery_s: Annotated[
        float | None, _column("from there to the first token, if a decode instance delivers that", "s")
    ] = None
    decode_s: Annotated[float | None, _column("from there, or from the first token, to the last", "s")]
    preemptions: Annotated[Whole, _column("times it was put back to waiting")]
    resent: Annotated[Whole, _column("times it was sent to another instance after a failure")]
    good: Annotated[bool, _column("finished within every limit that applies to it")]


# --- manifest.json ----------------------------------------------------------------------------------------


class TraceFile(Record):
    """A published trace that a run read."""

    file: str
    sha256: str


class Manifest(Record):
    """`manifest.json`: what is needed to do it again. The only file that tells the time of day."""

    schema_id: Literal["simtune/manifest@1"] = Field(alias="schema")
    simtune: str
    python: str
    platform: str
    packages: dict[str, str]
    command: Seq[str]
    seed: Whole
    inputs: dict[str, str] = Field(description="sha256 by kind and name, as each was understood")
    trace: TraceFile | None
    written: str = Field(description="time of day, UTC")


class Run(NamedTuple):
    """Data that a report is drawn from."""

    summary: Summary
    candidates: tuple[CandidateRow, ...]
    """Candidates of the search; empty if nothing was searched."""
    swimlanes: Swimlanes | None = None
    """Swimlanes; None if the run kept no steps."""
    certificate: Certificate | None = None
    """Certificate of the search; None if nothing was searched."""
    course: tuple[CourseRow, ...] = ()
