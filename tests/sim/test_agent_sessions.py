"""Sessions whose turns follow answers: closed forms, a closed loop in simpy, and laws of order and text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.errors import SpecError, UsageError
from simtune.results.result import Result
from simtune.runs.request_columns import requests_table
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.workload import Sessions, Slo, Workload
from simtune.validation.loads import loads
from simtune.workload.requests import RequestStream, build_stream

STEP_S = 0.01


class Constant:
    """Every step takes the same."""

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """(ticks, how they grow, for how many steps that holds)."""
        return to_ticks(STEP_S), 0, 1 << 60

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """Ticks of any other step."""
        return to_ticks(STEP_S)


class ByToken:
    """A step takes a tick of 1 ms for each prompt token that it computes, and 10 ms."""

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """(ticks, how they grow, for how many steps that holds)."""
        return to_ticks(STEP_S), 0, 1 << 60

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """Ticks of any other step."""
        return to_ticks(STEP_S + 1e-3 * sum(new for _, new in chunks))


def workload(sessions: dict[str, Any], **fields: Any) -> Workload:
    load = {"arrivals": {"kind": "fixed", "rate_rps": 0.001}, "prompt": 32, "output": 10, **fields}
    for key in ("prompt", "output"):
        if isinstance(load.get(key), int):
            load[key] = {"kind": "fixed", "tokens": load[key]}
    return Workload.model_validate({"name": "w", "sessions": sessions, **load}, strict=False)


def deployed(costs: Any = None, *, roles: tuple[str, ...] = ("mixed",), **pool: Any) -> Deployment:
    fields = {
        "hardware": "h100-sxm",
        "instances": pool.pop("instances", 1),
        "async_scheduling": False,
        "batching": {"max_num_seqs": pool.pop("seats", 4096), "max_num_batched_tokens": 1 << 17},
        "kv_cache": {"num_blocks": 1 << 17, **pool.pop("kv_cache", {})},
        "max_model_len": 65536,
        **pool,
    }
    pools = [{**fields, "name": role, "role": role} for role in roles]
    link: dict[str, Any] = {"link": {}} if len(roles) > 1 else {}
    plan = Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": pools, **link}, strict=False)
    return deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"), OwnCosts(costs or Constant()))


def drawn(load: Workload, sessions: int, seed: int = 0) -> RequestStream:
    return build_stream(load, None, requests=sessions, seed=seed)


# --- closed forms ---------------------------------------------------------------------------------------------------


def test_a_session_alone_takes_its_turns_and_its_pauses() -> None:
    """Five turns of ten steps of 10 ms, and four pauses of 1.5 s."""
    result = deployed().simulate(drawn(workload({"turns": 5, "pause_s": 1.5}), 3))
    assert result.values("family") == pytest.approx([5 * 10 * STEP_S + 4 * 1.5] * 3, abs=1e-9)
    assert result.values("family_active") == pytest.approx([5 * 10 * STEP_S] * 3, abs=1e-9)
    assert result.arrival_s[1:5] == pytest.approx(result.finish_s[:4] + 1.5)
    summary = result.summary()
    assert summary.metrics["family"].count == summary.metrics["family_active"].count == 3
    table = requests_table(result)
    assert table["family_s"] == result.family_s.tolist()
    assert table["family_active_s"] == result.family_active_s.tolist()


def test_a_prompt_holds_all_before_it_and_is_found_cached() -> None:
    """Turn k computes what it adds: 32 tokens, and the last token of the answer before, in blocks of 16."""
    load = workload({"turns": 4, "pause_s": 1.0, "first_prompt": {"kind": "fixed", "tokens": 320}}, output=16)
    stream = drawn(load, 2)
    assert stream.prompt_tokens.tolist() == [320, 368, 416, 464] * 2
    result = deployed(ByToken(), kv_cache={"prefix_caching": True}).simulate(stream)
    computed = [320, 48, 48, 48]
    assert result.ttft_s[:4] == pytest.approx([STEP_S + 1e-3 * tokens for tokens in computed])
    use = result.summary().prefix_cache
    assert use is not None
    assert use[0].hit_tokens == 2 * (320 + 368 + 416)


def test_sub_agents_run_at_once_and_the_next_turn_reads_their_answers() -> None:
    agents = {"share": 1.0, "count": 3, "turns": 2, "pause_s": 0.25, "prompt": {"kind": "fixed", "tokens": 100}}
    agents["output"] = {"kind": "fixed", "tokens": 20}
    result = deployed().simulate(drawn(workload({"turns": 2, "pause_s": 1.0, "subagents": agents}), 2))
    assert result.stream.prompt_tokens[:8].tolist() == [32, *[100, 220] * 3, 32 + 10 + 32 + 3 * 20]
    active_s = (10 + 2 * 20 + 10) * STEP_S
    assert result.values("family_active") == pytest.approx([active_s] * 2, abs=1e-9)
    assert result.values("family") == pytest.approx([active_s + 0.25 + 1.0] * 2, abs=1e-9)


@pytest.mark.parametrize("inherits", [False, True])
def test_sub_agents_begin_anew_or_go_on_from_the_session(inherits: bool) -> None:
    agents = {"share": 1.0, "count": 2, "turns": 1, "inherits": inherits}
    stream = drawn(workload({"turns": 2, "subagents": agents}, prompt=64, output=32), 1)
    assert stream.hash_ids is not None
    main, one, other, last = stream.hash_ids
    assert stream.prompt_tokens.tolist() == [64, *[160 if inherits else 64] * 2, 64 + 32 + 64 + 2 * 32]
    assert (one[:6] == main, other[:6] == main) == (inherits, inherits)
    assert last[:6] == main
    assert not set(one[6:]) & set(other[6:])
    if not inherits:
        assert not set(main) & (set(one) | set(other))


# --- a closed loop of sessions --------------------------------------------------------------------------------------


def closed_loop(stream: RequestStream, users: int, think_s: float) -> tuple[list[float], list[float]]:
    """Arrival and finish of each turn if every turn takes its answer's steps: users take sessions in order, each turn
    follows its pause."""
    env, took = simpy.Environment(), (stream.output_tokens * STEP_S).tolist()
    arrival, finish = [math.nan] * len(stream), [math.nan] * len(stream)
    assert stream.turns is not None
    waiting = iter(zip(stream.turns.first[:-1].tolist(), stream.turns.first[1:].tolist(), strict=True))
    pause_s = (stream.turns.pause / TICKS_PER_SECOND).tolist()

    def user() -> Generator[simpy.Event, Any, None]:
        for begin, end in waiting:
            for turn in range(begin, end):
                yield env.timeout(pause_s[turn])
                arrival[turn] = env.now
                yield env.timeout(took[turn])
                finish[turn] = env.now
            yield env.timeout(think_s)

    for _ in range(users):
        env.process(user())
    env.run()
    return arrival, finish


def test_a_closed_loop_of_sessions_is_that_of_simpy() -> None:
    """One seat for each user, and steps that take as long with one request as with many: no turn waits for another
    but for the step under way, so instances of one seat each stand for the users."""
    spread = {"kind": "lognormal", "mean": 2.0, "sigma": 1.0, "max": 30.0}
    output = {"kind": "lognormal", "mean_tokens": 40, "sigma": 0.8, "max_tokens": 300}
    arrivals = {"kind": "closed_loop", "users": 5, "think_s": 0.7}
    load = workload({"turns": {"kind": "lognormal", "mean": 6, "sigma": 0.7, "max": 25}, "pause_s": spread},
                    output=output, arrivals=arrivals)  # fmt: skip
    stream = drawn(load, 60)
    arrival, finish = closed_loop(stream, 5, 0.7)
    result = deployed(instances=60 * 25).simulate(stream)
    assert len(set(stream.turns.sizes.tolist())) > 5  # type: ignore[union-attr]
    assert result.arrival_s.tolist() == pytest.approx(arrival, abs=1e-6)
    assert result.finish_s.tolist() == pytest.approx(finish, abs=1e-6)


def test_as_many_sessions_are_under_way_as_there_are_users() -> None:
    result = deployed().simulate(
        drawn(workload({"turns": 3, "pause_s": 2.0}, arrivals={"kind": "closed_loop", "users": 4}), 20)
    )
    begins, ends = result.outcome.family_begin, result.outcome.family_end
    assert [int(((begins <= at) & (ends > at)).sum()) for at in begins[:16].tolist()] == [4] * 16


# --- warm-up --------------------------------------------------------------------------------------------------------


def test_the_warm_up_is_simulated_and_left_out() -> None:
    load = workload({"turns": 3, "pause_s": 1.0}, arrivals={"kind": "closed_loop", "users": 2}, prompt=64)
    stream = drawn(load, 10)
    warmed = drawn(load.model_copy(update={"warm_up": 4}), 10)
    one, other = (deployed(seats=1).simulate(s) for s in (stream, warmed))
    assert one.finish_s.tolist() == other.finish_s.tolist()
    assert other.values("family").tolist() == one.values("family")[4:].tolist()
    assert other.values("ttft").tolist() == one.values("ttft")[12:].tolist()
    assert other.num_judged() == other.num_good == 18
    start_s = one.arrival_s[12]
    counted = one.finish_s >= start_s
    summary = other.summary()
    assert summary.duration_s == pytest.approx(one.finish_s.max() - start_s)
    assert summary.output_tokens_per_s == pytest.approx(10 * counted.sum() / summary.duration_s)
    assert summary.instances[0].busy == one.summary().instances[0].busy
    late = dataclasses.replace(other, slo=Slo(family_s={"p90": float(one.values("family")[4:].max())}))
    assert late.meets_slo


@pytest.mark.parametrize("count", [4, 9])
def test_a_warm_up_of_all_arrivals_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"warm_up leaves out {count} arrivals of 4; lower it"):
        drawn(workload({"turns": 2}, warm_up=count), 4)


# --- laws -----------------------------------------------------------------------------------------------------------

SPREADS = st.sampled_from(
    [0.0, 0.4, {"kind": "lognormal", "mean": 0.5, "sigma": 1.0, "max": 3.0},
     {"kind": "quantiles", "levels": [0, 0.5, 1], "values": [0.0, 0.1, 2.0]}]
)  # fmt: skip
TURNS = st.sampled_from([1, 3, {"kind": "lognormal", "mean": 3, "sigma": 0.8, "max": 9}])
AGENTS = st.none() | st.fixed_dictionaries(
    {"share": st.sampled_from([0.3, 1.0]), "count": st.integers(1, 3), "turns": TURNS, "pause_s": SPREADS,
     "inherits": st.booleans()}
)  # fmt: skip
LENGTHS = {"kind": "lognormal", "mean_tokens": 60, "sigma": 1.0, "max_tokens": 400}


@settings(max_examples=8, deadline=None)
@given(
    st.fixed_dictionaries({"turns": TURNS, "pause_s": SPREADS, "subagents": AGENTS}),
    st.integers(2, 9),
    st.sampled_from([{"kind": "poisson", "rate_rps": 1.0}, {"kind": "closed_loop", "users": 3, "think_s": 0.2}]),
    st.sampled_from([("mixed",), ("prefill", "decode")]),
)
def test_no_turn_comes_before_its_pause_and_all_are_answered(
    sessions: dict[str, Any], seats: int, arrivals: dict[str, Any], roles: tuple[str, ...]
) -> None:
    load = workload(sessions, arrivals=arrivals, prompt=LENGTHS, output=LENGTHS)
    stream = drawn(load, 8)
    turns = stream.turns
    assert turns is not None
    deployment = deployed(seats=seats, roles=roles, instances=2, kv_cache={"prefix_caching": True})
    jumped, single = (deployment.simulate(stream, single_steps=s) for s in (False, True))
    for name in ("arrival", "scheduled", "first_token", "finish", "family_begin", "family_end"):
        assert (getattr(jumped.outcome, name) == getattr(single.outcome, name)).all()
    check_order(stream, jumped)
    check_text(stream)
    longer = drawn(load, 11)
    for name in ("prompt_tokens", "output_tokens"):
        assert (getattr(longer, name)[: len(stream)] == getattr(stream, name)).all(), "more sessions append"


def check_order(stream: RequestStream, result: Result) -> None:
    """Turns are sent a pause after the last of those that they wait for; sessions last until their last turn."""
    turns, outcome = stream.turns, result.outcome
    assert turns is not None
    assert result.completed.all()
    for session, (begin, end) in enumerate(zip(turns.first[:-1].tolist(), turns.first[1:].tolist(), strict=True)):
        for turn in range(begin, end):
            before = [int(outcome.finish[begin + other]) for other in turns.after[turn]]
            sent = max(before, default=int(outcome.family_begin[session])) + int(turns.pause[turn])
            assert outcome.arrival[turn] == sent
        assert outcome.family_end[session] == outcome.finish[begin:end].max()
    assert (result.family_active_s <= result.family_s + 1e-9).all()
    assert (result.family_active_s >= result.e2el_s - 1e-9).all()


def check_text(stream: RequestStream) -> None:
    """Texts of different sessions share nothing; a text that is continued is the beginning of the next prompt."""
    assert stream.hash_ids is not None
    assert stream.session is not None
    assert stream.turns is not None
    owner: dict[int, int] = {}
    for blocks, session in zip(stream.hash_ids, stream.session.tolist(), strict=True):
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            assert owner.setdefault(block, session) == session
    lengths = (stream.prompt_tokens + stream.output_tokens) // stream.block_tokens
    assert [len(blocks) for blocks in stream.hash_ids] == lengths.tolist()


def test_a_group_shares_its_prefix_and_no_more() -> None:
    load = workload({"turns": 3}, prompt=100, shared_prefix={"groups": 2, "tokens": 64, "block_tokens": 16})
    stream = drawn(load, 12)
    assert stream.hash_ids is not None
    leads = {blocks[:4] for blocks in stream.hash_ids}
    assert len(leads) == 2
    assert len({blocks[4] for blocks in stream.hash_ids}) == 12
    assert stream.hash_ids[1][:6] == stream.hash_ids[0][:6]


def test_classes_are_of_sessions() -> None:
    classes = [{"name": "a", "output": {"kind": "fixed", "tokens": 5}}, {"name": "b", "priority": 1}]
    stream = drawn(workload({"turns": 4}, classes=classes), 20)
    by_session = stream.class_index.reshape(20, 4)
    assert (by_session == by_session[:, :1]).all()
    assert len(set(by_session[:, 0].tolist())) == 2
    assert (stream.output_tokens == np.where(stream.class_index == 0, 5, 10)).all()


def test_sessions_on_an_instance_that_fails_go_on() -> None:
    deployment = deployed(instances=2)
    events = [{"kind": "failure", "at_s": 0.05, "pool": "mixed", "instance": 0}]
    plan = Plan.model_validate({**deployment.plan.model_dump(), "events": events}, strict=False)
    failing = dataclasses.replace(deployment, plan=plan)
    load = workload({"turns": 3, "pause_s": 0.5}, arrivals={"kind": "closed_loop", "users": 4})
    result = failing.simulate(drawn(load, 8))
    assert result.completed.all()
    assert result.outcome.resent.sum() > 0


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sessions", "message"),
    [
        (
            "{follow: answers, concurrent: 3, turns: 2}",
            "sessions.concurrent: turns follow answers, so arrivals are those of sessions",
        ),
        ("{follow: arrivals, turns: 2}", "sessions.follow: follow: arrivals needs the number of conversations"),
        (
            "{follow: arrivals, concurrent: 2, turns: 2, pause_s: 1}",
            "sessions.pause_s: needs turns that follow answers",
        ),
        ("{turns: 0}", "sessions.turns"),
        ("{turns: 2, subagents: {share: 2, turns: 1}}", "sessions.subagents.share"),
        ("{turns: 2, pause_s: {kind: quantiles, levels: [0, 1], values: [2, 1]}}", "values must not fall"),
        ("{turns: 2}\nbatch: true\nwarm_up: 1", "warm_up: a batch is judged as a whole; remove warm_up, or batch"),
    ],
)
def test_sessions_that_cannot_be_are_refused_with_their_place(sessions: str, message: str) -> None:
    text = (
        "schema: simtune/workload@1\nname: w\narrivals: {kind: poisson, rate_rps: 1}\n"
        f"prompt: {{kind: fixed, tokens: 5}}\noutput: {{kind: fixed, tokens: 5}}\nsessions: {sessions}\n"
    )
    with pytest.raises(SpecError) as caught:
        Workload.from_text(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("load", [{"sessions": {"turns": 2}}, {"graph": [{"name": "a", "count": 2}]}])
def test_what_follows_answers_cannot_be_sent_by_the_load_client(load: dict[str, Any]) -> None:
    fixed = {"kind": "fixed", "tokens": 8}
    spec = {"name": "w", "arrivals": {"kind": "poisson", "rate_rps": 1.0}, "prompt": fixed, "output": fixed, **load}
    stream = drawn(Workload.model_validate(spec, strict=False), 3)
    with pytest.raises(UsageError, match="requests of this workload follow one another"):
        loads(deployed(), stream)


def test_adapters_are_not_named_by_the_load_client() -> None:
    fixed = {"kind": "fixed", "tokens": 8}
    spec = {"name": "w", "arrivals": {"kind": "poisson", "rate_rps": 1.0}, "prompt": fixed, "output": fixed}
    stream = drawn(Workload.model_validate(spec | {"adapters": {"count": 2}}, strict=False), 3)
    with pytest.raises(UsageError, match="requests of this workload ask for LoRA adapters, and the load client sends"):
        loads(deployed(), stream)


def test_the_audit_counts_energy_over_the_warm_up_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SIMTUNE_AUDIT", "1")
    monkeypatch.chdir(tmp_path)
    load = workload({"turns": 2, "pause_s": 0.5}, arrivals={"kind": "closed_loop", "users": 2}, warm_up=6)
    summary = deployed().simulate(drawn(load, 8)).summary()
    assert summary.energy_j is not None


def test_a_run_lasts_as_many_lifetimes_as_sessions_follow_one_another() -> None:
    """Eleven sessions, one every 1,000 s, of 3 turns of 0.1 s and two pauses of 1 s."""
    result = deployed().simulate(drawn(workload({"turns": 3, "pause_s": 1.0}), 11))
    assert result.lifetimes == pytest.approx(10 * 1000 / 2.3)


def test_conversations_of_files_without_follow_take_turns_in_order_of_arrival() -> None:
    assert Sessions.model_validate({"concurrent": 3, "turns": 2}).follow == "arrivals"
    assert Sessions.model_validate({"turns": 2}).follow == "answers"
