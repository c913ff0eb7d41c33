"""Contents of the report, computed before anything is drawn: small tuples that tests can check.

Seconds come in; milliseconds, percent and words go out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from simtune.costs.predict import Z90, Basis
from simtune.errors import plural
from simtune.results.summary import SLO_METRIC_NAMES, Metric, SimulationSummary, SloLimit
from simtune.runs.schema import CandidateRow, HardwareFacts, Run, Summary
from simtune.sim.run_basis import note
from simtune.specs.base import Spec
from simtune.specs.plan_words import in_words, of_plan, sentence_in_words

FOLLOWS = 0.95
"""Goodput follows the offered rate while it is at least this share of it; beyond lies the knee."""

# --- numbers as a human reads them ------------------------------------------------------------------------

ABSENT = "–"
NO_BREAK = "\u00a0"


def number(value: float | None, digits: int = 3) -> str:
    """Return at least `digits` significant digits, with an exponent only below a millionth; whole numbers unchanged."""
    if value is None:
        return ABSENT
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    if abs(value) < 1e-6:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def ms(seconds: float | None) -> str:
    """Milliseconds, without their unit."""
    return ABSENT if seconds is None else number(seconds * 1e3)


def percent(share: float | None) -> str:
    """Return a share in percent with one decimal; a share just below 1 is never rounded up to 100 %."""
    if share is None:
        return ABSENT
    text = f"{share * 100:.1f} %"
    return "> 99.9 %" if share < 1 and text == "100.0 %" else text


def gib(num_bytes: float) -> str:
    """Binary gigabytes to one decimal."""
    return f"{num_bytes / 2**30:.1f} GiB"


# --- words ------------------------------------------------------------------------------------------------

PARTS: dict[Metric, str] = {"queue": "Queueing", "prefill": "Prefill", "transfer": "KV transfer", "decode": "Decode"}
"""Parts that add up to E2EL."""
METRIC_NAMES: dict[Metric, str] = {
    "ttft": SLO_METRIC_NAMES["ttft"],
    "tpot": SLO_METRIC_NAMES["tpot"],
    "itl": "ITL",
    "e2el": SLO_METRIC_NAMES["e2el"],
    "family": SLO_METRIC_NAMES["family"],
    "family_active": SLO_METRIC_NAMES["family_active"],
    **PARTS,
}


def limit(slo: SloLimit, *, reached: bool = False) -> str:
    """Return the sentence of a limit, with the value that the run reached if wanted; its bound is not broken across
    lines.
    """
    text = slo.sentence(f"{ms(slo.value_s)} ms" if reached else "")
    return text.replace(slo.bound, slo.bound.replace(" ", NO_BREAK), 1)


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def devices(s: Summary) -> str:
    """The kinds of GPU of its pools."""
    return _listed([*dict.fromkeys(profile.device for profile in profiles(s))])


def profiles(s: Summary) -> tuple[HardwareFacts, ...]:
    """Profiles of all kinds of GPU of the pools."""
    return (s.hardware, *s.other_hardware)


def profile_name(hardware: HardwareFacts) -> str:
    """Name of a profile, with the engine of its pools if pools run under several."""
    return hardware.name if hardware.under is None else f"{hardware.name} under {hardware.under}"


def chosen_row(run: Run) -> CandidateRow | None:
    """Row of the chosen plan; None if nothing was searched or chosen."""
    return next((c for c in run.candidates if c.status == "chosen"), None)


def chosen_name(run: Run) -> str:
    """Name of the chosen plan in tables, sweep and quantiles."""
    chosen = chosen_row(run)
    return run.summary.plan.name if chosen is None else chosen.candidate


def chosen_words(run: Run) -> str:
    """Chosen plan in words: `8 servers of 1 GPU, 256 seats, 8,192 tokens a step`."""
    return of_plan(run.summary.plan).words()


def headline(run: Run) -> str:
    """Return a sentence: the plan in words, what it achieves, per GPU, under which limits."""
    s = run.summary
    plan = f"{chosen_words(run)}: {s.model}"
    if s.saturated:
        offered = "its load" if s.offered_rate_rps is None else f"{number(s.offered_rate_rps)} requests/s"
        finished = (
            "" if s.request_throughput_rps is None else f": it finishes {number(s.request_throughput_rps)} a second"
        )
        return f"{plan} cannot keep up with {offered}{finished}."
    if s.slo and not all(x.met for x in s.slo):
        missed = _listed([limit(x, reached=True) for x in s.slo if not x.met])
        rate = "" if s.offered_rate_rps is None else f" at {number(s.offered_rate_rps)} requests/s"
        return f"{plan} misses {missed}{rate}."
    rate_rps = _served_rps(s)
    within = f"within {_listed([limit(x) for x in s.slo])}" if s.slo else "with no latency limit set"
    if s.objective is not None and s.objective.name == "makespan":
        return f"{plan} is done with {plural(s.requests, 'request')} after {number(s.objective.value)} s, {within}."
    if rate_rps is None:
        return f"{plan} runs {within}."
    return f"{plan} serves {number(rate_rps)} requests/s, {number(rate_rps / s.mean_gpus)} per GPU, {within}."


def _served_rps(s: Summary) -> float | None:
    """Return the rate that the headline states: the rate that was searched, else goodput or throughput."""
    if not s.slo:
        return s.request_throughput_rps
    searched = s.objective is not None and s.objective.name.startswith("goodput")
    # A searched rate was confirmed on longer runs than the one reported, whose goodput counts how it begins and ends.
    return s.offered_rate_rps if searched and s.goodput_rps is not None else s.goodput_rps


def _objective_figure(s: Summary) -> list[tuple[str, str, str]]:
    if s.objective is None:
        return []
    words = {
        "goodput": "highest rate in limits",
        "goodput_per_gpu": "highest rate in limits",
        "goodput_per_dollar": "highest rate in limits",
        "pareto": "throughput over delay",
        "joules_per_token": "energy of output",
        "usd_per_million_tokens": "price of output",
        "e2el": "mean E2EL",
        "makespan": "until the last answer",
        "family": "mean latency of a family",
        "family_active": "mean latency of a family without pauses",
        "gpus": "GPUs needed",
        "users": "most users in limits",
        "users_per_gpu": "most users in limits",
    }
    in_seconds = s.objective.unit == "s"
    in_words, unit = (ms, "ms") if in_seconds else (number, s.objective.unit)
    low, high, draws = s.objective.low, s.objective.high, s.objective.draws
    if low is not None and high is not None and low < high and draws:
        unit += f", {in_words(low)}–{in_words(high)} by {len(draws)} draws"
    if s.study is not None and s.study.slo.confidence is not None:
        unit += f", in {percent(s.study.slo.confidence)} of worlds"
    return [(words.get(s.objective.name, s.objective.name), in_words(s.objective.value), unit)]


def key_figures(s: Summary) -> list[tuple[str, str, str]]:
    """(label, value, unit) of what is known."""
    # Latencies of a growing queue show only how long the simulation was.
    latencies: tuple[Metric, ...] = () if s.saturated else ("ttft", "tpot")
    figures = [
        *_objective_figure(s),
        ("offered", number(s.offered_rate_rps), "requests/s"),
        *_within_limits(s),
        ("output per GPU", number(s.output_tokens_per_s_per_gpu), "tokens/s"),
        ("output per user", number(s.output_tokens_per_s_per_user), "tokens/s"),
        *((f"{METRIC_NAMES[x]} p99", ms(s.metrics[x].p99), "ms") for x in latencies if x in s.metrics),
        ("GPUs", number(s.num_gpus), devices(s)),
        *_prices(s),
        ("power", number(s.power_w), "W, mean of all GPUs"),
        ("energy", number(s.joules_per_token), "J per output token"),
        *_certainty(s),
        ("simulated", number(s.requests), "requests" + _lasting(s)),
        ("preemptions", number(s.preemptions), ""),
        *([] if s.role_switches is None else [("role switches", number(s.role_switches), "")]),
        *_drafted(s),
        *(
            (f"prefix cache{f' of {x.pool}' * (len(s.plan.pools) > 1)}", percent(x.hit_rate), "of prompt tokens found")
            for x in s.prefix_cache
        ),
        *(
            (f"tier {x.tier}{f' of {x.pool}' * (len(s.plan.pools) > 1)}", percent(x.hit_rate), "of prompt tokens found")
            for x in s.cache_tiers
        ),
        *(
            (f"adapters{f' of {x.pool}' * (len(s.plan.pools) > 1)}", percent(x.hit_rate), "of requests found in a slot")
            for x in s.adapters
        ),
        *(
            (f"encoder{f' of {x.pool}' * (len(s.plan.pools) > 1)}", percent(x.busy_share), "of the time in steps")
            for x in s.encoders
        ),
    ]
    return [figure for figure in figures if figure[1] != ABSENT]


def _lasting(s: Summary) -> str:
    """Return how long the simulated load lasts, in mean lifetimes of a request, if it has a rate."""
    return "" if s.lifetimes is None else f", {number(s.lifetimes)} lifetimes of one"


def _within_limits(s: Summary) -> list[tuple[str, str, str]]:
    """Return goodput and attainment; without limits the finished requests, since then every request is within them,
    also if the queue grows.
    """
    if not s.slo:
        return [("finished", number(s.request_throughput_rps), "requests/s")]
    return [
        ("goodput", number(s.goodput_rps), "requests/s"),
        ("SLO attainment", percent(s.slo_attainment), "of requests"),
    ]


def _prices(s: Summary) -> list[tuple[str, str, str]]:
    if s.price is None:
        return []
    return [
        ("price", number(s.price.per_million_output_tokens_usd), "USD per 1M output tokens"),
        ("price", number(s.price.per_thousand_requests_usd), "USD per 1,000 requests"),
        ("price", number(s.price.per_hour_usd), "USD per hour"),
    ]


def _certainty(s: Summary) -> list[tuple[str, str, str]]:
    sure = []
    if s.confidence is not None and s.confidence.versus:
        sure.append(("P(no rival is better)", percent(s.confidence.best), f"of {number(s.confidence.worlds)} worlds"))
    if s.p_slo is None or not s.slo:
        return sure
    probability, worlds = s.p_slo
    return [*sure, ("P(SLO holds)", percent(probability), f"of {number(worlds)} worlds")]


def _drafted(s: Summary) -> list[tuple[str, str, str]]:
    if s.speculation is None:
        return []
    wasted = percent(s.speculation.wasted_share)
    return [("tokens per round", number(s.speculation.tokens_per_round), f"{wasted} of those rejected")]


def latency_rows(s: Summary) -> list[tuple[str, ...]]:
    """metric, then mean, p50, p90, p95, p99, max in milliseconds with their intervals, and how many were counted:
    tokens for ITL, else requests. None of a saturated run, whose latencies grow as long as the load lasts.
    """
    rows: list[tuple[str, ...]] = []
    if s.saturated:
        return rows
    for metric, name in METRIC_NAMES.items():
        m = s.metrics.get(metric)
        if m is not None and (m.count or metric in ("ttft", "tpot", "e2el")):
            cells = (ms(getattr(m, x)) + _interval(s, metric, x) for x in ("mean", "p50", "p90", "p95", "p99", "max"))
            rows.append((name, *cells, number(m.count)))
    return rows


E2EL_COLOURS: dict[str, str] = {
    "Queueing": "queue",
    "Prefill": "prefill",
    "KV transfer": "transfer",
    "Decode": "decode",
}
"""The kind of span of the swimlanes whose colour each part has."""


def e2el_parts(s: Summary) -> list[tuple[str, str, float]]:
    """Return (part, mean over all requests, share of the mean E2EL); empty if nothing finished."""
    e2el = s.metrics.get("e2el")
    if e2el is None or not e2el.mean:
        return []
    parts = []
    for metric, name in PARTS.items():
        m = s.metrics.get(metric)
        if m is not None and m.count:
            # A request that was not sent anywhere took no time for it.
            seconds = (m.mean or 0.0) * m.count / e2el.count
            parts.append((name, f"{ms(seconds)} ms", seconds / e2el.mean))
    return parts


def pool_rows(s: Summary) -> list[tuple[str, ...]]:
    """name, role, hardware, instances, GPUs of each, policy, max_num_seqs, token budget of every pool; the hardware
    with the engine if there are several.
    """
    several = len({p.engine for p in s.plan.pools}) > 1
    return [
        (
            p.name,
            p.role,
            f"{p.hardware} under {p.engine or 'no engine'}" if several else p.hardware,
            number(p.instances) + (f" + {p.spare}" if p.spare else ""),
            number(p.devices),
            p.batching.policy,
            number(p.batching.max_num_seqs),
            number(p.batching.max_num_batched_tokens),
        )
        for p in s.plan.pools
    ]


def _interval(s: Summary, metric: str, statistic: str) -> str:
    """Return ` (low-high)` in milliseconds if worlds were drawn."""
    bounds = s.uncertainty.of("metrics", metric, statistic) if s.uncertainty else None
    if bounds is None:
        return ""
    low, high = (ms(x) if x is not None else "unbounded" for x in bounds)
    return f" ({low}–{high})"


def uncertainty_note(s: Summary) -> str | None:
    """Return a note on the intervals and on how often the verdict would differ; None if no worlds were drawn."""
    u = s.uncertainty
    if u is None:
        return None
    return (
        f"In brackets: the middle {percent(u.level)} of {number(u.worlds)} worlds in which each kind of operator is "
        "off by one common error, as large as is to be expected of the shapes that these steps ask for. "
        f"{percent(u.slo_probability)} of these worlds meet every limit, "
        f"{percent(u.saturated_probability)} are saturated."
    )


def settings(spec: Spec) -> list[tuple[str, str]]:
    """Return the settings of a spec, each with its key in the file (`search.tp`, `1, 2, 4`), in the order of its
    fields.
    """
    return [row for key, value in spec.to_data().items() if key != "schema" for row in _flat(value, key)]


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """The settings below a key, those of one block by name."""
    if isinstance(value, Mapping) and value:
        for name, below in sorted(value.items()):
            yield from _flat(below, f"{key}.{name}")
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for i, below in enumerate(value):
            yield from _flat(below, f"{key}.{i}")
    elif isinstance(value, list) and value:
        yield key, ", ".join(map(_word, value))
    elif value is not None and value != []:
        yield key, "none" if value == {} else _word(value)


def _word(value: Any) -> str:
    """Return a value as a file writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- candidates -------------------------------------------------------------------------------------------


class Contender(NamedTuple):
    """A candidate beside the chosen one, and why it lost."""

    candidate: CandidateRow
    why: str


_OBJECTIVES: dict[str, tuple[str, str, bool]] = {
    "goodput_per_gpu": ("goodput_rps_per_gpu", "goodput per GPU", True),
    "goodput": ("goodput_rps", "goodput", True),
    "gpus": ("num_gpus", "GPUs", False),
    "usd_per_million_tokens": ("usd_per_million_output_tokens", "USD per output token", False),
}


KNOBS = (
    "gpu", "tp", "pp", "attention_dp", "expert_parallel", "weight_dtype", "kv_dtype", "instances", "prefill", "beside",
    "max_num_seqs", "max_num_batched_tokens", "prefix_caching", "router", "speculation",
)  # fmt: skip
"""Columns of a candidate that plans of a search may differ in."""
RESULTS = (
    "rate_rps", "goodput_rps", "output_tokens_per_s_per_gpu", "output_tokens_per_s_per_user", "ttft_mean_s",
    "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "slo_attainment",
)  # fmt: skip


def runners_up(run: Run, at_most: int = 6) -> list[Contender]:
    """The chosen candidate, then the best of the simulated others: feasible before infeasible, by rank."""
    chosen = [c for c in run.candidates if c.status == "chosen"]
    losers = [c for c in run.candidates if c.status in ("feasible", "infeasible")]
    losers.sort(key=lambda c: (c.status, math.inf if c.rank is None else c.rank))
    return [Contender(c, c.reason or "chosen") for c in chosen] + [
        Contender(c, why_lost(c, chosen[0] if chosen else None, run.summary)) for c in losers[:at_most]
    ]


def reason_in_words(candidate: CandidateRow, chosen: CandidateRow | None) -> str:
    """The search's own reason; other plans that it names are stated in words."""
    return sentence_in_words(candidate.reason, candidate.candidate, "" if chosen is None else chosen.candidate)


def why_lost(candidate: CandidateRow, chosen: CandidateRow | None, s: Summary) -> str:
    """The search's own reason with plans in words, or how much worse the candidate is by the objective."""
    if candidate.reason:
        return reason_in_words(candidate, chosen)
    if chosen is None or s.objective is None or s.objective.name not in _OBJECTIVES:
        return "ranked after the chosen plan"
    field, words, more_is_better = _OBJECTIVES[s.objective.name]
    value, best = getattr(candidate, field), getattr(chosen, field)
    if value is None or not best:
        return f"{words} not known"
    worse = (best - value if more_is_better else value - best) / best
    if worse < 5e-4:
        return same_result(candidate, chosen) or f"no better in {words}"
    return f"{worse * 100:.1f} % {'less' if more_is_better else 'more'} {words}"


def numbers_at(s: Summary) -> str | None:
    """State at which load the numbers of candidates were taken, if each has one of its own; None if all share one."""
    if s.objective is None or not s.objective.name.startswith("goodput"):
        return None
    return (
        "Numbers of a plan that meets the limits are those at its highest rate; of one that misses them, those at the "
        "rate at which it was seen to, up to where it was given up. So they are not of one load."
    )


def same_result(candidate: CandidateRow, chosen: CandidateRow) -> str | None:
    """Return why a candidate is no worse and no better, if every number is equal: the knobs that differ never bind."""
    if candidate.ttft_p99_s is None or any(getattr(candidate, x) != getattr(chosen, x) for x in RESULTS):
        return None
    differ = [knob for knob in KNOBS if getattr(candidate, knob) != getattr(chosen, knob)]
    return f"the same in every number: {' and '.join(differ) or 'what differs'} never binds"


def status_counts(candidates: Sequence[CandidateRow]) -> str:
    """`48 candidates: 1 chosen, 12 feasible, 35 pruned`."""
    names = {"does_not_fit": "do not fit in memory"}
    counts = [
        (sum(c.status == status for c in candidates), names.get(status, status))
        for status in ("chosen", "feasible", "infeasible", "pruned", "does_not_fit")
    ]
    return f"{plural(len(candidates), 'candidate')}: " + ", ".join(f"{n:,} {name}" for n, name in counts if n)


class ParetoPoint(NamedTuple):
    """A simulated candidate in the plane of tokens/s/user (x) and tokens/s/GPU (y)."""

    x: float
    y: float
    candidate: CandidateRow


class ParetoInfo(NamedTuple):
    """`front` rises in x and falls in y, `dominated` is feasible but beaten, `unfinished` was stopped when a limit was
    lost, so that its place is that of a part of the load, `unknown` not simulated.
    """

    front: tuple[ParetoPoint, ...]
    dominated: tuple[ParetoPoint, ...]
    infeasible: tuple[ParetoPoint, ...]
    unfinished: tuple[ParetoPoint, ...]
    unknown: int


def _places(candidates: Sequence[CandidateRow]) -> list[ParetoPoint]:
    """Return the points of candidates that were simulated far enough to have both coordinates."""
    return [
        ParetoPoint(c.output_tokens_per_s_per_user, c.output_tokens_per_s_per_gpu, c)
        for c in candidates
        if c.output_tokens_per_s_per_user is not None and c.output_tokens_per_s_per_gpu is not None
    ]


def pareto(candidates: Sequence[CandidateRow]) -> ParetoInfo:
    """Feasible candidates that no other feasible one equals or beats in both coordinates and beats in one."""
    points = _places(candidates)
    feasible = [p for p in points if p.candidate.status in ("chosen", "feasible")]
    front: list[ParetoPoint] = []
    dominated: list[ParetoPoint] = []
    for p in sorted(feasible, key=lambda p: (-p.x, -p.y)):
        if not front or p.y > front[-1].y or (p.x, p.y) == (front[-1].x, front[-1].y):
            front.append(p)
        else:
            dominated.append(p)
    number_missed = sum(p.candidate.status == "infeasible" for p in points)
    # Thousands of plans may have the result of one that was simulated, and its place.
    missed = [*{(p.x, p.y): p for p in reversed(points) if p.candidate.status == "infeasible"}.values()][::-1]
    stopped = [p for p in missed if p.candidate.finished is False]
    infeasible = [p for p in missed if p.candidate.finished is not False]
    unknown = len(candidates) - len(feasible) - number_missed
    return ParetoInfo(tuple(reversed(front)), tuple(dominated), tuple(infeasible), tuple(stopped), unknown)


# --- curves -----------------------------------------------------------------------------------------------


def series(run: Run) -> dict[str, int]:
    """A number, and so a colour, for each plan drawn as a curve in any figure; the chosen one is 0."""
    s = run.summary
    names = [
        chosen_name(run),
        *(r.candidate for r in s.runners_up or ()),
        *(p.candidate for p in s.sweep or ()),
    ]
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


class GoodputCurve(NamedTuple):
    """Goodput against offered rate of one candidate, rates rising; `knee` is an index or None."""

    candidate: str
    rate_rps: tuple[float, ...]
    goodput_rps: tuple[float, ...]
    attainment: tuple[float | None, ...]
    saturated: tuple[bool, ...]
    knee: int | None


def sweep_curves(run: Run) -> list[GoodputCurve]:
    """Return a curve for each candidate of the sweep, in the order of `series`."""
    points = run.summary.sweep or ()
    curves = []
    for name in series(run):
        rising = sorted((p for p in points if p.candidate == name), key=lambda p: p.rate_rps)
        if rising:
            rates, goodputs = tuple(p.rate_rps for p in rising), tuple(p.goodput_rps for p in rising)
            attainment, saturated = tuple(p.slo_attainment for p in rising), tuple(p.saturated for p in rising)
            curves.append(GoodputCurve(name, rates, goodputs, attainment, saturated, knee(rates, goodputs, saturated)))
    return curves


def knee(rates: Sequence[float], goodputs: Sequence[float], saturated: Sequence[bool]) -> int | None:
    """Index of the last of the rising rates up to which goodput follows without saturation, or None."""
    last = None
    for i, (rate, goodput, overloaded) in enumerate(zip(rates, goodputs, saturated, strict=True)):
        if overloaded or goodput < FOLLOWS * rate:
            break
        last = i
    return last


class LimitLine(NamedTuple):
    """A limit to draw on a CDF; `level` is None for a mean, which is no point of the distribution."""

    label: str
    ms: float
    level: float | None


class Cdf(NamedTuple):
    """Curves of one metric: milliseconds at evenly spaced levels from 0 to 1."""

    title: str
    curves: tuple[tuple[str, tuple[float, ...]], ...]
    limits: tuple[LimitLine, ...]
    logarithmic: bool


def cdfs(run: Run) -> list[Cdf]:
    """TTFT and TPOT of the chosen plan and the runners-up, with the limits on them."""
    s = run.summary
    if s.quantiles is None or s.saturated:
        return []
    name, rivals = chosen_name(run), s.runners_up or ()
    quantiles: dict[Metric, list[tuple[str, tuple[float, ...]]]] = {
        "ttft": [(name, s.quantiles.ttft_s), *((r.candidate, r.ttft_quantiles_s) for r in rivals)],
        "tpot": [(name, s.quantiles.tpot_s), *((r.candidate, r.tpot_quantiles_s) for r in rivals)],
    }
    return [
        _cdf(s, metric, [(who, values) for who, values in curves if len(values) > 1])
        for metric, curves in quantiles.items()
        if len(curves[0][1]) > 1
    ]


def _cdf(s: Summary, metric: Metric, curves: Sequence[tuple[str, Sequence[float]]]) -> Cdf:
    in_ms = tuple((name, tuple(v * 1e3 for v in values)) for name, values in curves)
    limits = tuple(LimitLine(limit(x), x.limit_s * 1e3, _level(x.statistic)) for x in s.slo if x.metric == metric)
    # A logarithmic axis where one curve's tail is far from its middle, and no value forbids it.
    wide = any(values[-1] > 20 * values[len(values) // 2] for _, values in in_ms)
    return Cdf(METRIC_NAMES[metric], in_ms, limits, wide and all(values[0] > 0 for _, values in in_ms))


def _level(statistic: str) -> float | None:
    return float(statistic[1:]) / 100 if statistic.startswith("p") else None


# --- where time and memory go -----------------------------------------------------------------------------


class Layer(NamedTuple):
    """An operator across the steps of a breakdown; `ms[i]` belongs to step i."""

    operator: str
    provenance: str
    ms: tuple[float, ...]


class BreakdownInfo(NamedTuple):
    """`labels` name each step with its total."""

    labels: tuple[str, ...]
    layers: tuple[Layer, ...]


def breakdown(s: Summary) -> BreakdownInfo:
    """Steps as stacks of operators; an operator whose provenance differs between steps is two layers."""
    steps = s.breakdown or ()
    keys = list(dict.fromkeys((p.operator, p.provenance) for step in steps for p in step.parts))
    layers = tuple(
        Layer(
            *key,
            tuple(sum(1e3 * p.seconds for p in x.parts if (p.operator, p.provenance) == key) for x in steps),
        )
        for key in keys
    )
    labels = tuple(f"{x.step}: {ms(sum(p.seconds for p in x.parts))} ms" for x in steps)
    return BreakdownInfo(labels, layers)


SOURCES_OF_TTFT = {
    "front end": "times of the preset or plan",
    "queue": "scheduler",
    "prefill": "cost model",
    "handover": "link",
    "first delivery": "decode steps",
}
"""Source of the time of each part of the time to first token."""


def first_token(s: SimulationSummary) -> BreakdownInfo:
    """Mean times to first token as stacks of their parts; parts that are nothing for all groups are left out."""
    groups = s.first_token_parts
    layers = tuple(
        Layer(name, source, tuple(1e3 * group.parts[name] for group in groups))
        for name, source in SOURCES_OF_TTFT.items()
        if any(group.parts[name] for group in groups)
    )
    labels = tuple(f"{g.group} ({number(g.requests)}): {ms(sum(g.parts.values()))} ms" for g in groups)
    return BreakdownInfo(labels, layers)


class MemoryShares(NamedTuple):
    """Return parts of one device's memory as (name, size, share of all), and the contents of the KV part."""

    parts: tuple[tuple[str, str, float], ...]
    holds: str


def memory(s: Summary) -> MemoryShares | None:
    """Return weights, KV cache, other memory and free memory; None if the run has no memory accounting."""
    m = s.memory
    if m is None:
        return None
    sizes = [
        ("weights", m.weights_bytes),
        ("KV cache", m.kv_bytes),
        ("activations and other", m.other_bytes),
    ]
    free_bytes = m.total_bytes - sum(size for _, size in sizes)
    if free_bytes > 0:
        sizes.append(("left free", free_bytes))
    tokens = int(m.kv_bytes / m.kv_bytes_per_token)
    return MemoryShares(
        tuple((name, gib(size), size / m.total_bytes) for name, size in sizes),
        f"{m.num_blocks:,} KV blocks, about {tokens:,} tokens, on one device of {gib(m.total_bytes)}",
    )


class BasisInfo(NamedTuple):
    """Basis of the step time: (words, share) of all of it, and a row of cells for each operator kind."""

    shares: tuple[tuple[str, float], ...]
    rows: tuple[tuple[str, ...], ...]
    note: str | None


def cost_basis(s: Summary) -> BasisInfo | None:
    """Return operator, share of the step time, 90 % interval of its time, then its shares; None if the user's own costs
    are used.
    """
    if s.cost_basis is None:
        return None
    names = [(kind.words, kind.name.lower()) for kind in Basis]
    rows = tuple(
        (
            o.operator,
            percent(o.share),
            f"× or ÷ {math.exp(Z90 * o.log_sd):.2f}",
            *(percent(getattr(o.basis, name)) if getattr(o.basis, name) else ABSENT for _, name in names),
        )
        for o in s.cost_basis.operators
    )
    return BasisInfo(tuple((words, getattr(s.cost_basis, name)) for words, name in names), rows, note(s.cost_basis))


def quality_rows(s: Summary, hardware: HardwareFacts, *, used: bool) -> list[tuple[str, ...]]:
    """Return operator, median, p90 and largest hold-out error, provenance and source, of operators that took time in
    this run, or of the others. All count as used if the run does not list them.
    """
    timed = None if s.cost_basis is None else {o.operator for o in s.cost_basis.operators}
    return [
        (o.key, percent(o.median), percent(o.p90), percent(o.max), o.provenance, o.source)
        for o in hardware.operators
        if (timed is None or o.key.partition(".")[0] in timed) is used
    ]


# --- how sure the choice is -------------------------------------------------------------------------------


def rivals(s: Summary) -> list[tuple[str, ...]]:
    """rival, probability that the chosen plan beats it, and by how much its value is the larger, as a share."""
    return [
        (
            in_words(v.candidate),
            percent(v.probability),
            " to ".join("unbounded" if g is None else _more(g) for g in v.gap),
        )
        for v in (s.confidence.versus if s.confidence else ())
    ]


def to_measure(s: Summary) -> list[tuple[str, ...]]:
    """Return the errors in doubt, how often the choice would be right once each is known, and the shapes to measure."""
    return [
        (
            doubt.error,
            percent(doubt.share),
            percent(doubt.right_after),
            "; ".join(map(str, doubt.points or doubt.acceptance)),
        )
        for doubt in (s.confidence.to_measure if s.confidence else ())
    ]


def _more(share: float) -> str:
    return f"{share * 100:+.1f} %".replace("-", "−")
