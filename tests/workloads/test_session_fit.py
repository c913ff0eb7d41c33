"""Specs of sessions fitted to traces of agents: what was drawn from a spec is found again."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import UsageError
from simtune.specs.trace_turns import TraceTurns
from simtune.specs.traces import Trace
from simtune.specs.workload import ClosedLoop, FixedLength, Poisson, Workload
from simtune.workload.load import shared_share
from simtune.workload.load_fit import fit_workload
from simtune.workload.requests import build_stream
from simtune.workload.session_fit import _thread, facts_of
from tests.sim.test_agent_sessions import workload

SPREAD = {"kind": "lognormal", "mean": 6, "sigma": 0.5, "max": 20}
PAUSE = {"kind": "lognormal", "mean": 2.0, "sigma": 1.0, "max": 40}
AGENTS = {"share": 0.25, "count": 2, "turns": 3, "pause_s": 0.5, "first_prompt": {"kind": "fixed", "tokens": 900}}


def recorded(load: Workload, sessions: int, *, times: bool = True) -> Trace:
    """A trace of what a spec draws."""
    stream = build_stream(load, None, requests=sessions, seed=3)
    assert stream.turns is not None
    assert stream.arrival_s is not None
    pause_s = stream.turns.pause / TICKS_PER_SECOND
    return Trace(
        "t", hashlib.sha256(b"").hexdigest(), stream.arrival_s if times else None, stream.prompt_tokens,
        stream.output_tokens, stream.hash_ids, stream.block_tokens, stream.session,
        TraceTurns(stream.turns.first, stream.turns.after, pause_s),
    )  # fmt: skip


LOAD = workload(
    {"turns": SPREAD, "pause_s": PAUSE, "subagents": AGENTS, "first_prompt": {"kind": "fixed", "tokens": 2000}},
    arrivals={"kind": "poisson", "rate_rps": 0.5},
    prompt={"kind": "lognormal", "mean_tokens": 300, "sigma": 0.8, "max_tokens": 3000},
    output={"kind": "lognormal", "mean_tokens": 80, "sigma": 0.5, "max_tokens": 500},
    shared_prefix={"groups": 1, "tokens": 1024, "block_tokens": 16},
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return recorded(LOAD, 300)


def test_turns_growth_pauses_and_sub_agents_are_found_again(trace: Trace) -> None:
    fitted = fit_workload(trace, "fitted").workload
    sessions = fitted.sessions
    assert sessions is not None
    assert sessions.first_prompt == FixedLength(tokens=2000)
    assert fitted.shared_prefix is not None
    assert fitted.shared_prefix.tokens == 1024
    agents = sessions.subagents
    assert agents is not None
    assert (agents.count, agents.turns, agents.pause_s) == (2, 3, 0.5)
    assert agents.first_prompt == FixedLength(tokens=900)
    assert agents.share == pytest.approx(0.25, abs=0.04)
    facts = facts_of(trace)
    assert facts.cut == 0
    assert np.mean(facts.turns) == pytest.approx(6, rel=0.1)
    assert np.mean(facts.pause_s) == pytest.approx(2.0, rel=0.1)
    assert np.mean(facts.added) == pytest.approx(300, rel=0.1)
    assert fitted.arrivals.kind in ("poisson", "gamma")


def test_quantiles_are_as_few_as_describe_what_was_recorded() -> None:
    """Evenly spread pauses, some of them 0, need ten steps and the tail."""
    evenly = {"kind": "quantiles", "levels": [0.0, 1.0], "values": [0.0, 10.0]}
    load = workload({"turns": 8, "pause_s": evenly}, arrivals={"kind": "poisson", "rate_rps": 0.5})
    sessions = fit_workload(recorded(load, 100), "fitted").workload.sessions
    assert sessions is not None
    assert not isinstance(sessions.pause_s, float)
    assert sessions.pause_s.kind == "quantiles"
    assert len(sessions.pause_s.levels) == 13


def test_a_fit_is_judged_by_sessions_that_were_held_out(trace: Trace) -> None:
    rows = {row.what.removeprefix("held out: "): row for row in fit_workload(trace, "fitted").agreements}
    assert all(row.what.startswith("held out") for row in rows.values())
    for what in ("requests of a session, mean", "prompt tokens, mean", "output tokens, mean"):
        row = rows[what]
        assert row.recorded is not None
        assert row.drawn == pytest.approx(row.recorded, rel=0.15)
    ceiling = rows["share of prompt tokens that an endless cache finds"]
    assert ceiling.recorded is not None
    assert ceiling.drawn == pytest.approx(ceiling.recorded, abs=0.02)
    half = trace.turns.session % 2 == 1  # type: ignore[union-attr]
    assert trace.hash_ids is not None
    names = [trace.hash_ids[i] for i in np.flatnonzero(half).tolist()]
    assert ceiling.recorded == shared_share(names, 16, trace.prompt_tokens[half])


def test_a_spec_that_was_fitted_is_drawn_and_read_again(trace: Trace) -> None:
    fitted = fit_workload(trace, "fitted").workload
    again = Workload.from_text(fitted.to_yaml())
    assert again == fitted
    assert build_stream(again, None, requests=5, seed=0).turns is not None


def test_sessions_without_times_need_a_rate() -> None:
    untimed = recorded(LOAD, 8, times=False)
    with pytest.raises(UsageError, match=r"a spec needs a rate of sessions, .* set one with --rate"):
        fit_workload(untimed, "t")
    fitted = fit_workload(untimed, "t", 2.0)
    assert fitted.workload.arrivals == Poisson(rate_rps=2.0)
    lanes = fitted.workload.model_copy(update={"arrivals": ClosedLoop(users=3)})
    assert build_stream(lanes, None, requests=5, seed=0).users == 3


def test_contexts_that_agents_cut_are_counted() -> None:
    cut = recorded(workload({"turns": 4}, arrivals={"kind": "poisson", "rate_rps": 1}), 6)
    prompts = cut.prompt_tokens.copy()
    prompts[3::4] = 20
    fewer = Trace(
        cut.file, cut.sha256, cut.arrival_s, prompts, cut.output_tokens, cut.hash_ids, 16, cut.session, cut.turns
    )
    assert any("6 turns with less text than before them" in lost for lost in fit_workload(fewer, "t").lost)


@pytest.mark.parametrize(
    ("after", "prompt", "names", "thread"),
    [
        # One turn after another.
        ([(), (0,), (1,), (2,)], [5, 6, 7, 8], None, [0, 1, 2, 3]),
        # Two turns beside each other are not of the thread; the one that waits for both is.
        ([(), (0,), (0,), (1, 2)], [5, 6, 7, 8], None, [0, 3]),
        # A turn whose prompt is shorter, or begins otherwise, does not go on.
        ([(), (0,), (1,), (2,)], [5, 4, 7, 8], None, [0, 2, 3]),
        ([(), (0,), (1,)], [5, 6, 7], [(1, 2), (9,), (1, 3)], [0, 2]),
    ],
)
def test_the_thread_of_a_session_are_turns_that_are_before_or_after_all_others(
    after: list[tuple[int, ...]], prompt: list[int], names: list[tuple[int, ...]] | None, thread: list[int]
) -> None:
    assert _thread(after, prompt, names) == thread
