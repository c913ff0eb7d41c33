"""Fit of a compact spec of sessions to a trace of agents: turns, growth of prompts, pauses, sub-agents, and the share
of prompts that a prefix cache finds at most. A fit to every other session is judged by the sessions left out.

A turn belongs to the session's own thread if no other turn may run beside it and its prompt goes on from the one
before; all others are those of sub-agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import UsageError
from simtune.specs.trace_cut import of_rows
from simtune.specs.trace_media import media_note
from simtune.specs.traces import Trace
from simtune.specs.workload import (
    Arrivals,
    DrawnLengths,
    LognormalSpread,
    Poisson,
    QuantileSpread,
    Sessions,
    SharedPrefix,
    SubAgents,
    Workload,
)
from simtune.workload.length_fit import fit_lengths
from simtune.workload.load import Agreement, kolmogorov_distance, shared_share
from simtune.workload.requests import RequestStream, build_stream
from simtune.workload.sampling import spread_values

STEPS = (10, 20, 40)
CLOSE = 0.02
TAIL = (0.98, 0.99, 1.0)
"""Lengths and values are described as shortly as this closeness allows, as in `simtune.workload.length_fit`."""
FEWEST = 4
"""Sessions from which on half of them are held out."""
_BLOCK = 16


@dataclass
class SessionFacts:
    """Values of the turns of many sessions, by kind of turn."""

    turns: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    agent_turns: list[int] = field(default_factory=list)
    agent_first: list[int] = field(default_factory=list)
    agent_added: list[int] = field(default_factory=list)
    agent_output: list[int] = field(default_factory=list)
    agent_pause_s: list[float] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)
    """Sub-agents after each turn that is not the last."""
    cut: int = 0
    """Turns whose prompt is shorter than the text before it."""


@dataclass(frozen=True)
class FittedSessions:
    """A fitted spec, its numbers beside those of sessions that were held out, and what it lacks."""

    workload: Workload
    agreements: tuple[Agreement, ...]
    lost: tuple[str, ...]


def fit_sessions(trace: Trace, name: str, arrivals: Arrivals, seed: int = 0) -> FittedSessions:
    """Fit a spec to all sessions of a trace; judge a fit to every other session by the sessions left out."""
    assert trace.turns is not None
    fitted, judged, label = trace, trace, "of the sessions fitted to"
    if trace.num_arrivals >= FEWEST:
        number = trace.turns.session
        halves = [of_rows(trace, number % 2 == part, trace.arrival_s, "half of the sessions") for part in (0, 1)]
        fitted, judged, label = *halves, "held out"
    stream = build_stream(_spec(fitted, name, arrivals), None, requests=judged.num_arrivals, seed=seed)
    facts = facts_of(trace)
    lost = [f"{facts.cut:,} turns with less text than before them; prompts of the spec only grow"] if facts.cut else []
    if trace.media is not None and any(trace.media):
        lost.append(f"{media_note(trace.media)}; replay the trace itself")
    return FittedSessions(_spec(trace, name, arrivals), tuple(_agreements(judged, stream, label)), tuple(lost))


def arrivals_without_times(trace: Trace, rate_rps: float | None) -> Arrivals:
    """Return Poisson arrivals of sessions. Raise UsageError without a rate."""
    if rate_rps is None:
        raise UsageError(
            f"{trace.file}: a spec needs a rate of sessions, and this trace has no arrival times; set one with --rate, "
            "and put a closed loop in its place for lanes"
        )
    return Poisson(rate_rps=rate_rps)


def facts_of(trace: Trace) -> SessionFacts:
    """Return the values of all turns of a trace with sessions."""
    assert trace.turns is not None
    facts = SessionFacts()
    for begin, end in zip(trace.turns.first[:-1].tolist(), trace.turns.first[1:].tolist(), strict=True):
        _add_session(facts, trace, begin, end)
    return facts


def _add_session(facts: SessionFacts, trace: Trace, begin: int, end: int) -> None:
    assert trace.turns is not None
    after, pause_s = trace.turns.after[begin:end], trace.turns.pause_s[begin:end].tolist()
    prompt, output = trace.prompt_tokens[begin:end].tolist(), trace.output_tokens[begin:end].tolist()
    names = None if trace.hash_ids is None else [trace.hash_ids[i] for i in range(begin, end)]
    thread = _thread(after, prompt, names)
    facts.turns.append(len(thread))
    facts.first.append(prompt[0])
    facts.output += [output[turn] for turn in thread]
    facts.pause_s += [pause_s[turn] for turn in thread[1:]]
    of_thread = set(thread)
    begun = [0] * (end - begin)
    """Sub-agents that each turn starts."""
    agent_of: dict[int, list[int]] = {}
    for turn in range(end - begin):
        if turn in of_thread:
            continue
        before = max(after[turn], default=-1)
        if before in agent_of:
            agent_of[turn] = [*agent_of.pop(before), turn]
            facts.agent_added.append(max(1, prompt[turn] - prompt[before] - output[before]))
            facts.agent_pause_s.append(pause_s[turn])
        else:
            agent_of[turn] = [turn]
            facts.agent_first.append(prompt[turn])
            if before >= 0:
                begun[before] += 1
        facts.agent_output.append(output[turn])
    facts.agent_turns += [len(agent) for agent in agent_of.values()]
    facts.forks += [begun[turn] for turn in thread[:-1]]
    for before, turn in pairwise(thread):
        read = sum(output[turn_read] for turn_read in after[turn] if turn_read not in of_thread)
        added = prompt[turn] - prompt[before] - output[before] - read
        facts.cut += added < 1
        facts.added.append(max(1, added))


def _thread(
    after: Sequence[tuple[int, ...]], prompt: Sequence[int], names: Sequence[tuple[int, ...]] | None
) -> list[int]:
    """Return the turns of a session's own thread."""
    size = len(after)
    before: list[int] = []
    """Turns that are over before each turn is sent, as bits."""
    for waits_for in after:
        bits = 0
        for turn_over in waits_for:
            bits |= before[turn_over] | 1 << turn_over
        before.append(bits)
    follows = [sum(bits >> turn & 1 for bits in before) for turn in range(size)]
    thread = [0]
    for turn in range(1, size):
        if before[turn].bit_count() + follows[turn] < size - 1:
            continue
        last = thread[-1]
        if names is None or not names[last]:
            goes_on = prompt[turn] >= prompt[last]
        else:
            goes_on = names[turn][:1] == names[last][:1]
        if goes_on:
            thread.append(turn)
    return thread


def _spec(trace: Trace, name: str, arrivals: Arrivals) -> Workload:
    facts = facts_of(trace)
    added = facts.added or facts.first
    return Workload(
        name=name,
        source=f"fitted to {trace.num_arrivals:,} sessions of {trace.file} (sha256 {trace.sha256[:12]})",
        requests=trace.num_arrivals,
        arrivals=arrivals,
        prompt=_lengths(added),
        output=_lengths(facts.output),
        sessions=Sessions(
            turns=_turns(facts.turns),
            pause_s=_spread(facts.pause_s),
            first_prompt=_lengths(facts.first),
            subagents=_agents(facts),
        ),
        shared_prefix=_prefix(trace),
    )


def _agents(facts: SessionFacts) -> SubAgents | None:
    forks = [count for count in facts.forks if count]
    if not forks:
        return None
    return SubAgents(
        share=len(forks) / len(facts.forks),
        count=max(1, round(float(np.mean(forks)))),
        turns=_turns(facts.agent_turns),
        pause_s=_spread(facts.agent_pause_s),
        first_prompt=_lengths(facts.agent_first),
        prompt=_lengths(facts.agent_added) if facts.agent_added else None,
        output=_lengths(facts.agent_output),
    )


def _prefix(trace: Trace) -> SharedPrefix | None:
    """Return the prefix with which first prompts of most sessions begin alike; None if there is none."""
    assert trace.turns is not None
    if trace.hash_ids is None:
        return None
    names_before: set[int] = set()
    common = []
    for begin in trace.turns.first[:-1].tolist():
        row, shared = trace.hash_ids[begin], 0
        while shared < len(row) and row[shared] in names_before:
            shared += 1
        names_before.update(row)
        common.append(shared * trace.block_tokens)
    tokens = int(np.median(common[1:])) if len(common) > 1 else 0
    return SharedPrefix(groups=1, tokens=tokens // _BLOCK * _BLOCK) if tokens >= _BLOCK else None


def _lengths(tokens: Sequence[int]) -> DrawnLengths:
    lengths = fit_lengths(np.array(tokens, dtype=np.int64))
    assert lengths.kind != "trace"
    return lengths


def _turns(counts: Sequence[int]) -> int | LognormalSpread | QuantileSpread:
    if min(counts) == max(counts):
        return counts[0]
    return _quantiles(np.array(counts, dtype=np.float64))


def _spread(seconds: Sequence[float]) -> float | LognormalSpread | QuantileSpread:
    """Return a fixed value, a lognormal distribution if it is close, else quantiles."""
    values = np.array(seconds if len(seconds) else [0.0], dtype=np.float64)
    if values.min() == values.max():
        return float(values[0])
    evenly = (np.arange(len(values)) + 0.5) / len(values)
    if values.min() > 0:
        lognormal = LognormalSpread(
            mean=float(values.mean()), sigma=max(float(np.log(values).std()), 1e-6), max=float(values.max())
        )
        if kolmogorov_distance(values, spread_values(lognormal, evenly)) <= CLOSE:
            return lognormal
    return _quantiles(values)


def _quantiles(values: Array) -> QuantileSpread:
    evenly = (np.arange(len(values)) + 0.5) / len(values)
    for steps in STEPS:
        levels = (*(i / steps for i in range(steps) if i / steps < TAIL[0]), *TAIL)
        observed = np.quantile(values, levels, method="inverted_cdf")
        spread = QuantileSpread(levels=levels, values=tuple(observed.tolist()))
        if kolmogorov_distance(values, spread_values(spread, evenly)) <= CLOSE:
            break
    return spread


def _agreements(judged: Trace, stream: RequestStream, label: str) -> list[Agreement]:
    """Return the numbers of recorded sessions beside those of drawn ones."""
    assert judged.turns is not None
    assert stream.turns is not None
    sizes = [np.diff(judged.turns.first), stream.turns.sizes]
    rows = [
        _pair(f"{label}: requests of a session, mean", sizes, "mean"),
        _pair(f"{label}: requests of a session, largest gap of distributions", sizes, "gap"),
    ]
    of_turns: list[tuple[str, Array | Ints, Array | Ints]] = [
        ("pause, mean s", judged.turns.pause_s, stream.turns.pause / TICKS_PER_SECOND),
        ("prompt tokens, mean", judged.prompt_tokens, stream.prompt_tokens),
        ("output tokens, mean", judged.output_tokens, stream.output_tokens),
    ]
    rows += [_pair(f"{label}: {quantity}", (a, b), "mean") for quantity, a, b in of_turns]
    rows += [
        Agreement(f"{label}: {side} tokens, p99", *(float(np.quantile(x, 0.99)) for x in columns))
        for side, columns in (
            ("prompt", (judged.prompt_tokens, stream.prompt_tokens)),
            ("output", (judged.output_tokens, stream.output_tokens)),
        )
    ]
    shares = [shared_share(x.hash_ids, x.block_tokens, x.prompt_tokens) for x in (judged, stream)]
    rows.append(Agreement(f"{label}: share of prompt tokens that an endless cache finds", *shares))
    return rows


def _pair(what: str, columns: Sequence[Array | Ints], number: str) -> Agreement:
    recorded, simulated = columns
    if number == "gap":
        return Agreement(what, 0.0, kolmogorov_distance(recorded, simulated))
    return Agreement(what, float(recorded.mean()), float(simulated.mean()))
