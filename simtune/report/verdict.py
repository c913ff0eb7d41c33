"""Verdict on a run, in sentences: where time goes, which limit binds, what the search left open."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from simtune.report.info import PARTS, chosen_row, limit, number, percent
from simtune.report.neighbours import NO_EFFECT, neighbours
from simtune.runs.schema import CandidateRow, Run, StepTime, Summary
from simtune.tuner.objectives import OBJECTIVES

OPERATOR_WORDS = {
    "gemm": "matrix products with the weights",
    "head": "the output head",
    "decode_attention": "reading the KV cache in attention",
    "prefill_attention": "attention of prompts",
    "moe": "experts",
    "all_reduce": "all-reduce between GPUs",
    "elementwise": "elementwise operators",
    "host": "the engine's host side",
}


def bottleneck(s: Summary) -> str | None:
    """Return a sentence: which limit binds, what takes most of a request's time, and of a step's, how full the KV cache
    is.

    None if nothing finished.
    """
    parts = _time_parts(s)
    if not parts:
        return None
    name, share = max(parts, key=lambda part: part[1])
    clauses = [f"{share:.0%} of a request's time is {name.lower()}"]
    step = _step_for(s.breakdown or (), name)
    if step is not None:
        total = sum(part.seconds for part in step.parts)
        most = max(step.parts, key=lambda part: part.seconds)
        words = OPERATOR_WORDS.get(most.operator, most.operator.replace("_", " "))
        kind = re.sub(r"^pool \S+, ", "", step.step.split(":")[0])
        clauses.append(f"{most.seconds / total:.0%} of a {kind} step is {words}")
    if s.timeline and s.timeline.kv_used:
        kv_used = s.timeline.kv_used
        clauses.append(f"the KV cache is {sum(kv_used) / len(kv_used):.0%} full on average, {max(kv_used):.0%} at most")
    text = "; ".join([_binding(s), *clauses])
    return f"{text[0].upper()}{text[1:]}."


def price_in_words(s: Summary) -> str | None:
    """State what output tokens cost under the load of the run; None if a price is not known, or nothing finished."""
    if s.price is None or s.price.per_million_output_tokens_usd is None:
        return None
    per_million, per_hour = number(s.price.per_million_output_tokens_usd), number(s.price.per_hour_usd)
    return f"{per_million} USD per million output tokens at this load; all GPUs cost {per_hour} USD per hour"


def families_in_words(s: Summary) -> str | None:
    """State how much better the chosen family is than the other, prefill/decode or mixed; None unless both were
    searched."""
    if len(s.families) != 2 or s.objective is None:
        return None
    chosen, rival = s.families
    if chosen.reached is None:
        return None
    best, bound = (_times(chosen.reached, value, s.objective.name) for value in (rival.reached, rival.at_most))
    against = f"{chosen.family} against {rival.family}"
    if bound is None:
        return f"{against}: no {rival.family} plan of this space fits and can meet the SLO"
    least = f"at least {bound:.2f} x, by what no {rival.family} plan exceeds"
    if bound < 1:
        least = f"a {rival.family} plan that is up to {1 / bound:.2f} x better is not ruled out"
    if best is None:
        return f"{against}: {least}; none was found to meet the SLO"
    return f"{against}: {best:.2f} x, the best plan of each; {least}"


def _times(chosen: float, rival: float | None, objective: str) -> float | None:
    """Return the factor by which a value is better than another; None if there is none."""
    if not chosen or not rival:
        return None
    return chosen / rival if OBJECTIVES[objective].sign > 0 else rival / chosen


def _time_parts(s: Summary) -> list[tuple[str, float]]:
    """Return the shares of the mean E2EL by the part that took the time."""
    e2el = s.metrics.get("e2el")
    if e2el is None or not e2el.mean:
        return []
    parts = [(name, s.metrics.get(metric)) for metric, name in PARTS.items()]
    return [(name, (m.mean or 0.0) * m.count / e2el.count / e2el.mean) for name, m in parts if m and m.count]


def _step_for(steps: Sequence[StepTime], part: str) -> StepTime | None:
    """Return the kind of step in which this part of a request's time is spent; None if it is not spent in steps."""
    if part == "KV transfer":
        return None
    kind = "prefill" if part == "Prefill" else "decode"
    alike = [step for step in steps if kind in step.step.split(":")[0]]
    chosen = alike or [step for step in steps if kind == "prefill" and "mixed" in step.step] or list(steps)
    return chosen[0] if chosen and any(part.seconds for part in chosen[0].parts) else None


def _binding(s: Summary) -> str:
    """State which limit is nearest, or what else limits the plan."""
    if s.saturated:
        return "requests come faster than they are served"
    reached = [(x.value_s / x.limit_s, x) for x in s.slo if x.value_s is not None]
    if not reached:
        return "no latency limit binds, for none is set" if not s.slo else "no limit is reached, for nothing finished"
    share, nearest = max(reached, key=lambda pair: pair[0])
    if share > 1:
        return f"a limit is missed: {limit(nearest, reached=True)}"
    if share >= 0.9:
        return f"a limit binds: {limit(nearest, reached=True)}"
    return f"no limit binds: the nearest, {limit(nearest)}, is {percent(share)} used"


def proof(s: Summary) -> str | None:
    """State what the search has shown of all other plans; None if nothing was searched."""
    o = s.objective
    if o is None or o.gap is None or o.bound is None:
        return None
    if not o.gap:
        return "No plan in this space is better under this cost model."
    same = "" if o.gap_on_draw is None else f"{percent(o.gap_on_draw)} better on the same requests, or "
    best = o.value * (1 + math.copysign(o.gap, o.bound - o.value))
    return (
        f"No plan in this space is more than {same}{percent(o.gap)} {'on any,' if same else 'better'} "
        "under this cost model: "
        f"{number(best)} {o.unit} is the best that is not ruled out."
    )


def edges(run: Run) -> list[str]:
    """Notes on knobs whose chosen value is the largest or smallest that was tried, so that the best may lie beyond.

    Plans are compared that have the same pools; of a prefill and a decode pool it is the one that decodes. A knob whose
    next value changes nothing is not named: its limit is not reached.
    """
    chosen = chosen_row(run)
    if chosen is None:
        return []
    alike = [
        c for c in run.candidates if c.status != "does_not_fit" and (c.prefill is None) == (chosen.prefill is None)
    ]
    unfelt = {step.knob for step in neighbours(run) if step.effect.startswith(NO_EFFECT)}
    knobs = ("max_num_seqs", "max_num_batched_tokens", "tp", "pp", "attention_dp")
    notes = (_edge(knob, chosen, alike, run) for knob in knobs if knob not in unfelt)
    return [note for note in notes if note is not None]


def _ends_here(knob: str, value: int, chosen: CandidateRow, run: Run) -> bool:
    """True if no plan lies beyond the value of a knob: larger ones were tried and do not fit, an instance would need
    more GPUs than the study has, or seats and token budget bound each other."""
    rows = [c for c in run.candidates if (c.prefill is None) == (chosen.prefill is None)]
    if any(c.status == "does_not_fit" and getattr(c, knob) > value for c in rows):
        return True
    # The token budget cannot be below one token for every seat.
    if knob == "max_num_batched_tokens" and value == chosen.max_num_seqs:
        return True
    study = run.summary.study
    if study is None or knob not in ("tp", "pp", "attention_dp"):
        return False
    gpus = chosen.tp * chosen.pp * (chosen.attention_dp or 1)
    return value == max(getattr(c, knob) or 1 for c in rows) and 2 * gpus > sum(x.devices for x in study.hardware)


def _edge(knob: str, chosen: CandidateRow, alike: Sequence[CandidateRow], run: Run) -> str | None:
    """Return the note on one knob; None if its value is between others, the only one, or an end beyond which there is
    nothing, such as 1.
    """
    values = sorted({value for c in alike if (value := getattr(c, knob)) is not None})
    value = getattr(chosen, knob)
    if len(values) < 2 or value == 1 or value not in (values[0], values[-1]) or _ends_here(knob, value, chosen, run):
        return None
    end = "smallest" if value == values[0] else "largest"
    of_pool = "" if chosen.prefill is None else " of the decode pool"
    return f"{knob} {value:,}{of_pool} is the {end} of those tried ({', '.join(f'{x:,}' for x in values)})"
