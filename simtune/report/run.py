"""Reads a run directory: `summary.json`, and `candidates.csv` where a search wrote one."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simtune.errors import Problem, SpecError, UsageError
from simtune.specs import yamlfile
from simtune.specs.base import Count, NonNegative, Positive, Seq, Share
from simtune.specs.speculation import Speculation


class _Block(BaseModel):
    """Part of a summary. Keys the report does not show are let through."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class OperatorQuality(_Block):
    """|predicted/measured - 1| of one operator's time model on points it never saw; null if untested."""

    key: str
    median: NonNegative | None
    p90: NonNegative | None
    max: NonNegative | None
    provenance: str
    source: str


class HardwareFacts(_Block):
    name: str
    engine: str
    device: str
    operators: Seq[OperatorQuality]
    estimated: Seq[str] = Field((), description="operators without a table, estimated from the data sheet")
    corrected: str | None = Field(None, description="step times by an engine's own log: how, and by which")
    validated: str | None = Field(description="by what and how far off; null when never")


class Objective(_Block):
    name: str
    unit: str
    value: float


class SloResult(_Block):
    """One limit, and what the plan reached: null when nothing finished."""

    metric: str
    statistic: str
    limit_s: Positive
    value_s: NonNegative | None
    met: bool
    request_class: str | None = Field(None, alias="class")


class Metric(_Block):
    """Distribution over requests; only the count when nothing was counted."""

    unit: Literal["s"]
    count: Annotated[int, Field(ge=0)]
    mean: NonNegative | None = None
    max: NonNegative | None = None
    p50: NonNegative | None = None
    p90: NonNegative | None = None
    p95: NonNegative | None = None
    p99: NonNegative | None = None


class Memory(_Block):
    """One device's memory under vLLM's accounting."""

    total_bytes: Positive
    weights_bytes: NonNegative
    kv_bytes: NonNegative
    other_bytes: NonNegative
    kv_bytes_per_token: Positive
    num_blocks: Count


class SweepPoint(_Block):
    candidate: str
    rate_rps: Positive
    goodput_rps: NonNegative
    slo_attainment: Share | None
    saturated: bool


class Quantiles(_Block):
    """Latencies at evenly spaced levels from 0 to 1; empty when nothing was counted."""

    ttft_s: Seq[float]
    tpot_s: Seq[float]


class RunnerUp(_Block):
    candidate: str
    ttft_quantiles_s: Seq[float]
    tpot_quantiles_s: Seq[float]


class StepPart(_Block):
    operator: str
    seconds: NonNegative
    provenance: str


class StepTime(_Block):
    step: str
    parts: Seq[StepPart]


class Timeline(_Block):
    """State over simulated time; `kv_used` is the used fraction of the KV blocks."""

    t_s: Seq[float]
    running: Seq[float]
    waiting: Seq[float]
    kv_used: Seq[float]

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        lengths = {len(self.t_s), len(self.running), len(self.waiting), len(self.kv_used)}
        if len(lengths) > 1:
            raise ValueError("t_s, running, waiting and kv_used must be equally long")
        return self


class PoolTimeline(Timeline):
    pool: str


class Instance(_Block):
    """One simulated instance: the share of the time in which it ran steps, and the requests it answered."""

    pool: str
    instance: Annotated[int, Field(ge=0)]
    busy: NonNegative
    requests: Annotated[int, Field(ge=0)]


class PrefixCacheUse(_Block):
    """Of the prompt tokens a pool admitted, how many it had cached."""

    pool: str
    queried_tokens: Count
    hit_tokens: Annotated[int, Field(ge=0)]
    hit_rate: Share


class _Parallelism(_Block):
    tp: Count
    pp: Count
    attention_dp: Count = 1


class _Batching(_Block):
    policy: str = "vllm-fcfs"
    max_num_seqs: Count
    max_num_batched_tokens: Count


class PoolFacts(_Block):
    name: str = "mixed"
    role: str = "mixed"
    hardware: str | None = None
    instances: Count
    parallelism: _Parallelism
    batching: _Batching | None = None
    speculation: Speculation | None = None


class PlanFacts(_Block):
    """What the headline says of a plan."""

    name: str
    pools: Annotated[Seq[PoolFacts], Field(min_length=1, strict=False)]


class UncertaintyFacts(_Block):
    """Intervals over worlds in which operator times are off; nested like the summary, None where unbounded."""

    worlds: Count
    level: Share
    saturated_probability: Share
    slo_probability: Share
    intervals: dict[str, Any]

    def of(self, *keys: str) -> tuple[float | None, float | None] | None:
        """The interval of the number at these nested keys, if there is one."""
        found: Any = self.intervals
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return (found[0], found[1]) if isinstance(found, list) and len(found) == 2 else None


class Drafted(_Block):
    """What the verifications of a simulation came to."""

    tokens_per_round: Positive
    wasted_share: Share = Field(description="of the verified tokens")


class Cell(_Block):
    """The best way to speculate at one batch and context, and its gain over none."""

    scheme: str
    short: str
    off: bool
    gain: Positive
    occurs: bool = Field(description="so many sequences of such a length fit")


class FixedSetting(_Block):
    scheme: str
    gain: Positive


class BatchPoint(_Block):
    """Of a chain whose length follows the batch: tokens of a round, and wasted ones, per sequence."""

    batch: Count
    draft_tokens: Annotated[int, Field(ge=0)]
    tokens: Positive
    wasted: NonNegative


class EngineSettings(_Block):
    """What of the schedule an engine can be told: `loss` is the share of its gain that is lost by that."""

    engine: str
    scheme: str
    gain: Positive
    loss: float
    settings: dict[str, Any] | None
    why: str = Field(description="there are no settings")


class DraftNode(_Block):
    path: Seq[Count]
    probability: Share


class DraftShape(_Block):
    batch: Count
    context: Count
    nodes: Seq[DraftNode]


class LoadPoint(_Block):
    """Simulated speculation at one offered rate, per round of a request."""

    rate_rps: Positive
    tokens: Positive
    wasted: NonNegative


class AcceptanceFacts(_Block):
    name: str
    origin: str


class SpeculationFacts(_Block):
    """The schedule over (batch, context), and what is left of it in an engine's own terms."""

    drafter: str
    acceptance: AcceptanceFacts
    batches: Seq[Count]
    contexts: Seq[Count]
    cells: Seq[Seq[Cell]]
    gain: Positive
    fixed: FixedSetting
    by_batch: Seq[BatchPoint]
    engines: Seq[EngineSettings]
    draft: DraftShape
    load: Seq[LoadPoint] = ()


class Summary(_Block):
    """`summary.json` as far as the report shows it. Seconds, requests per second, bytes."""

    schema_id: Literal["simtune/summary@1"] = Field(alias="schema")
    name: str
    study: dict[str, Any] | None = None
    plan: PlanFacts
    model: str
    hardware: HardwareFacts
    objective: Objective | None = None
    slo: Seq[SloResult] = ()
    metrics: dict[str, Metric]
    offered_rate_rps: Positive | None = None
    request_throughput_rps: NonNegative | None = None
    goodput_rps: NonNegative | None = None
    slo_attainment: Share | None = None
    output_tokens_per_s_per_gpu: NonNegative | None = None
    output_tokens_per_s_per_user: NonNegative | None = None
    num_gpus: Count
    requests: Annotated[int, Field(ge=0)]
    refused: Annotated[int, Field(ge=0)] = Field(0, description="requests longer than max_model_len")
    unserved: Annotated[int, Field(ge=0)] = Field(0, description="requests left when no instance was up any more")
    preemptions: Annotated[int, Field(ge=0)] | None = None
    saturated: bool
    interrupted: bool = Field(False, description="the search was stopped and this is its best so far")
    seed: int | None = None
    memory: Memory | None = None
    sweep: Seq[SweepPoint] | None = None
    runners_up: Seq[RunnerUp] | None = None
    quantiles: Quantiles | None = None
    breakdown: Seq[StepTime] | None = None
    timeline: Timeline | None = None
    pool_timelines: Seq[PoolTimeline] | None = Field(None, description="where there are several pools")
    instances: Seq[Instance] = ()
    prefix_cache: Seq[PrefixCacheUse] = ()
    uncertainty: UncertaintyFacts | None = None
    speculation: Drafted | None = None
    draft_schedule: SpeculationFacts | None = None


Status = Literal["chosen", "feasible", "infeasible", "pruned", "does_not_fit"]


class Candidate(NamedTuple):
    """A row of `candidates.csv`; None where the search did not need to know."""

    rank: int | None
    candidate: str
    tp: int
    pp: int
    instances: int
    num_gpus: int
    max_num_seqs: int
    max_num_batched_tokens: int
    speculation: str
    status: Status
    reason: str
    kv_blocks: int | None
    rate_bound_rps: float | None
    rate_rps: float | None
    goodput_rps: float | None
    goodput_rps_per_gpu: float | None
    output_tokens_per_s_per_gpu: float | None
    output_tokens_per_s_per_user: float | None
    ttft_mean_s: float | None
    ttft_p99_s: float | None
    tpot_mean_s: float | None
    tpot_p99_s: float | None
    slo_attainment: float | None
    saturated: bool | None
    simulations: int | None


class Run(NamedTuple):
    """A run directory in memory; `data` is the summary as it stands in the file."""

    summary: Summary
    data: dict[str, Any]
    candidates: tuple[Candidate, ...]


def read_run(run: Path) -> Run:
    """Raises UsageError when `run` is no run directory, SpecError when one of its files is damaged."""
    if not run.is_dir():
        raise UsageError(f"{run}: no such folder; name the run directory that --out wrote")
    if not (run / "summary.json").is_file():
        raise UsageError(f"{run}: holds no summary.json, so it is not a run directory of simtune")
    data, summary = _read_summary(run / "summary.json")
    table = run / "candidates.csv"
    return Run(summary, data, _read_candidates(table) if table.exists() else ())


def _read_summary(path: Path) -> tuple[dict[str, Any], Summary]:
    text = yamlfile.read_text(path)

    def no_constant(name: str) -> NoReturn:
        raise SpecError(Problem(str(path), f"{name} is not JSON: write null where there is no number"))

    try:
        data = json.loads(text, parse_constant=no_constant)
        return data, Summary.model_validate(data)
    except json.JSONDecodeError as error:
        raise SpecError(Problem(str(path), f"not valid JSON: {error.msg}", "", error.lineno, error.colno)) from None
    except ValidationError as error:
        document = yamlfile.parse(text, str(path))  # knows the lines; too slow to be the everyday reader
        raise SpecError(
            [
                Problem(
                    str(path),
                    e["msg"].replace("Input should be", "must be"),
                    ".".join(str(part) for part in e["loc"]),
                    *document.position(e["loc"]),
                )
                for e in error.errors()
            ]
        ) from None


def _bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _status(text: str) -> str:
    if text not in get_args(Status):
        raise ValueError
    return text


def _required(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _number(text: str) -> float:
    value = float(text)
    if not abs(value) < float("inf"):
        raise ValueError
    return value


def _optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: parse(text) if text else None


_COLUMNS: dict[str, tuple[Callable[[str], Any], str]] = {
    "rank": (_optional(int), "a whole number or empty"),
    "candidate": (_required, "a name"),
    "status": (_status, "one of " + ", ".join(get_args(Status))),
    "reason": (str, "text"),
    "speculation": (str, "text"),
    "kv_blocks": (_optional(int), "a whole number or empty"),
    "saturated": (_optional(_bool), "true, false or empty"),
    "simulations": (_optional(int), "a whole number or empty"),
    **dict.fromkeys(
        ("tp", "pp", "instances", "num_gpus", "max_num_seqs", "max_num_batched_tokens"),
        (int, "a whole number"),
    ),
}
_FLOAT = (_optional(_number), "a number or empty")


def _read_candidates(path: Path) -> tuple[Candidate, ...]:
    rows = csv.reader(io.StringIO(yamlfile.read_text(path), newline=""), strict=True)
    try:
        header = next(rows, [])
        missing = [name for name in Candidate._fields if name not in header]
        if missing:
            raise SpecError(Problem(str(path), f"lacks the columns {', '.join(missing)}", "", 1))
        found, problems = [], []
        for row in rows:
            if len(row) != len(header):
                message = f"{len(row)} cells under a header of {len(header)}"
                problems.append(Problem(str(path), message, "", rows.line_num))
                continue
            cells = dict(zip(header, row, strict=True))
            values = {}
            for name in Candidate._fields:
                parse, rule = _COLUMNS.get(name, _FLOAT)
                try:
                    values[name] = parse(cells[name])
                except (ValueError, KeyError):
                    problems.append(Problem(str(path), f"must be {rule}, not {cells[name]!r}", name, rows.line_num))
            if len(values) == len(Candidate._fields):
                found.append(Candidate(**values))
    except csv.Error as error:
        raise SpecError(Problem(str(path), f"not valid CSV: {error}", "", rows.line_num)) from None
    if problems:
        raise SpecError(problems)
    return tuple(found)
