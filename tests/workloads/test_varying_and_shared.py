"""Load that changes with time, prompts that begin alike, and traces repeated without sharing across rounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simtune.errors import UsageError
from simtune.results.result import Result
from simtune.sim.deployment import deploy
from simtune.specs import room
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.columns import replay
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.specs.traces import Trace
from simtune.specs.workload import (
    Arrivals,
    FixedLength,
    Lognormal,
    Piecewise,
    Poisson,
    Segment,
    Sessions,
    SharedPrefix,
    TraceArrivals,
    TraceLengths,
    Workload,
)
from simtune.workload.requests import RepeatedBlocks, RequestStream, build_stream

DAY = Piecewise(
    segments=(
        Segment(for_s=100, rate_rps=20),
        Segment(for_s=50, rate_rps=0),
        Segment(for_s=200, rate_rps=2),
        Segment(for_s=10, rate_rps=100),
    )
)
CYCLE_S, PER_CYCLE = 360.0, 3400.0


def stream_of(arrivals: Arrivals, requests: int, shared: SharedPrefix | None = None, seed: int = 0) -> RequestStream:
    workload = Workload(
        name="w",
        arrivals=arrivals,
        prompt=Lognormal(mean_tokens=1000, sigma=0.6, max_tokens=8000),
        output=FixedLength(tokens=10),
        shared_prefix=shared,
    )
    return build_stream(workload, None, requests=requests, seed=seed)


# --- rates that change ------------------------------------------------------------------------------------


def test_each_segment_has_its_rate_and_the_day_begins_again() -> None:
    stream = stream_of(DAY, 60_000)
    assert stream.arrival_s is not None
    assert (np.diff(stream.arrival_s) >= 0).all()
    days, at = np.divmod(stream.arrival_s, CYCLE_S)
    whole = days < days.max()
    begin = 0.0
    for segment in DAY.segments:
        inside = whole & (at >= begin) & (at < begin + segment.for_s)
        expected = segment.rate_rps * segment.for_s * days.max()
        assert abs(inside.sum() - expected) <= 4 * np.sqrt(expected)
        if expected:
            gaps = np.diff(stream.arrival_s[inside & (days == 1)])
            assert gaps.mean() == pytest.approx(1 / segment.rate_rps, rel=0.25)
        begin += segment.for_s
    per_day = np.bincount(days[whole].astype(int))
    assert abs(per_day - PER_CYCLE).max() < 5 * np.sqrt(PER_CYCLE)


def test_one_segment_is_poisson_and_another_rate_stretches_the_pattern() -> None:
    steady = stream_of(Piecewise(segments=(Segment(for_s=7, rate_rps=5),)), 1000)
    plain = stream_of(Poisson(rate_rps=5), 1000)
    assert steady.arrival_s == pytest.approx(plain.arrival_s)
    day = stream_of(DAY, 20_000)
    double = day.at_rate(2 * (day.offered_rate_rps or 0.0))
    assert day.arrival_s is not None
    assert double.arrival_s == pytest.approx(day.arrival_s / 2)
    assert (double.prompt_tokens == day.prompt_tokens).all()


def test_more_requests_only_append() -> None:
    few, many = stream_of(DAY, 500), stream_of(DAY, 5000)
    assert few.arrival_s is not None
    assert many.arrival_s is not None
    assert (many.arrival_s[:500] == few.arrival_s).all()


def test_somebody_must_come() -> None:
    with pytest.raises(ValidationError, match="at least one segment must have a rate above zero"):
        Piecewise(segments=(Segment(for_s=7, rate_rps=0),))


# --- prompts that begin alike -----------------------------------------------------------------------------

SHARED = SharedPrefix(groups=5, tokens=600, block_tokens=16)


def test_a_group_shares_as_much_of_its_prefix_as_the_prompt_has() -> None:
    stream = stream_of(Poisson(rate_rps=4), 2000, SHARED)
    assert stream.session is not None
    assert stream.hash_ids is not None
    assert stream.block_tokens == 16
    sizes = np.bincount(stream.session, minlength=5)
    assert len(sizes) == 5
    assert abs(sizes - 400).max() < 4 * np.sqrt(400)
    rows = list(zip(stream.prompt_tokens.tolist(), stream.session.tolist(), stream.hash_ids, strict=True))
    whole = {group: blocks for _, group, blocks in rows if len(blocks) == 600 // 16}
    assert len({block for blocks in whole.values() for block in blocks}) == 5 * 37, "no two groups share a block"
    for prompt, group, blocks in rows:
        assert len(blocks) == min(600, prompt) // 16
        assert blocks == whole[group][: len(blocks)]


def simulated(prefix_caching: bool, instances: int = 1) -> Result:
    pool = Pool(
        hardware="h100-sxm",
        instances=instances,
        batching=Batching(max_num_seqs=64, max_num_batched_tokens=4096),
        kv_cache=KvCache(prefix_caching=prefix_caching),
        max_model_len=16_384,
    )
    plan = Plan(name="p", model="llama-3.1-8b", pools=(pool,))
    deployment = deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"))
    return deployment.simulate(stream_of(Poisson(rate_rps=2.0), 1000, SHARED))


def test_the_hit_rate_is_that_of_everyone_but_the_first_of_a_group() -> None:
    """Requests rarely overlap and the cache is large: all but the first find what they share, if it is all cached."""
    cached, plain = simulated(True), simulated(False)
    (pool,) = cached.summary().prefix_cache
    stream = cached.stream
    assert stream.session is not None
    assert pool.pool == "mixed"
    assert pool.queried_tokens == stream.prompt_tokens.sum()
    # At least one token is computed anew; what is found is whole blocks, and never more than somebody had before.
    there = np.minimum(stream.prompt_tokens - 1, np.minimum(stream.prompt_tokens, 600) // 16 * 16) // 16 * 16
    expected = 0
    longest = dict.fromkeys(range(5), 0)
    for group, tokens in zip(stream.session.tolist(), there.tolist(), strict=True):
        expected += min(longest[group], tokens)
        longest[group] = max(longest[group], tokens)
    assert expected * 0.99 <= pool.hit_tokens <= expected
    assert pool.hit_rate == pool.hit_tokens / pool.queried_tokens
    assert "prefix_cache" not in plain.summary().to_data()
    assert cached.values("ttft").mean() < plain.values("ttft").mean()


def test_two_instances_have_to_learn_the_prefixes_each() -> None:
    one, two = (simulated(True, n).summary().prefix_cache[0].hit_tokens for n in (1, 2))
    assert 0 < one - two <= 5 * 600


# --- traces that are repeated -----------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=4).map(tuple), min_size=1, max_size=6),
    st.lists(st.integers(-1, 20), max_size=20),
    st.data(),
)
def test_a_repeated_round_has_the_same_pattern_and_other_names(
    rows: list[tuple[int, ...]], requests: list[int], data: st.DataObject
) -> None:
    blocks = RepeatedBlocks(rows, np.array(requests, dtype=np.int64))
    assert len(blocks) == len(requests)
    for request, found in zip(requests, blocks, strict=True):
        if request < 0:
            assert found == ()
            continue
        row = rows[request % len(rows)]
        assert len({b - a for a, b in zip(row, found, strict=True)}) <= 1
        for other, named in zip(requests, blocks, strict=True):
            if other >= 0 and other // len(rows) != request // len(rows):
                assert not set(found) & set(named), "rounds share nothing"
    mine = np.array(data.draw(st.lists(st.booleans(), min_size=len(requests), max_size=len(requests))), dtype=bool)
    assert list(blocks.kept(mine)) == [found for found, keep in zip(blocks, mine, strict=True) if keep]
    assert list(blocks[1:3]) == list(blocks)[1:3]
    assert blocks == list(blocks)


def test_a_trace_that_says_what_is_shared_needs_no_groups() -> None:
    trace = Trace("t.jsonl", "", np.array([0.0, 1.0]), np.array([600, 700]), np.array([1, 2]), ((0, 1), (0, 2)))
    workload = Workload(
        name="w", arrivals=TraceArrivals(), prompt=TraceLengths(), output=TraceLengths(), trace="t.jsonl",
        shared_prefix=SHARED,
    )  # fmt: skip
    with pytest.raises(UsageError, match="the trace names shared blocks already; remove shared_prefix"):
        build_stream(workload, trace, requests=2, seed=0)


# --- conversations ----------------------------------------------------------------------------------------


def conversations(requests: int, shared: SharedPrefix | None = None, rate_rps: float = 1.0) -> RequestStream:
    workload = Workload(
        name="w",
        arrivals=Poisson(rate_rps=rate_rps),
        prompt=FixedLength(tokens=100),
        output=FixedLength(tokens=60),
        shared_prefix=shared,
        sessions=Sessions(follow="arrivals", concurrent=4, turns=3),
    )
    return build_stream(workload, None, requests=requests, seed=1)


def test_each_turn_begins_with_all_turns_before_it_and_their_answers() -> None:
    stream = conversations(22)
    assert stream.prompt_tokens.tolist() == [100] * 4 + [260] * 4 + [420] * 4 + [100] * 4 + [260] * 4 + [420] * 2
    assert stream.session is not None
    assert stream.session.tolist() == [*range(4)] * 3 + [*range(12, 16)] * 2 + [12, 13]
    assert stream.hash_ids is not None
    for before, after in ((0, 4), (4, 8), (13, 17)):
        mine, then = stream.hash_ids[before], stream.hash_ids[after]
        assert len(mine) == (stream.prompt_tokens[before] + 60) // 16
        assert then[: len(mine)] == mine
    assert not set(stream.hash_ids[0]) & {*stream.hash_ids[1], *stream.hash_ids[12]}


def test_names_of_blocks_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two turns of 8,000 tokens one has 501 blocks and one 1,003. Names that take little are never refused."""
    monkeypatch.setattr(room, "memory", lambda: (1e9, 0.0))

    def drawn(requests: int) -> RequestStream:
        workload = Workload(
            name="w",
            arrivals=Poisson(rate_rps=1.0),
            prompt=FixedLength(tokens=8000),
            output=FixedLength(tokens=24),
            sessions=Sessions(follow="arrivals", concurrent=4, turns=2),
        )
        return build_stream(workload, None, requests=requests, seed=1)

    stream = drawn(400)
    assert stream.hash_ids is not None
    assert sum(map(len, stream.hash_ids)) == 200 * (501 + 1003)
    with pytest.raises(UsageError, match=r"names of 3,008,000 blocks that prompts share need about 114\.7 MiB"):
        drawn(4000)


def test_conversations_of_a_group_share_its_prefix() -> None:
    stream = conversations(24, SharedPrefix(groups=1, tokens=64))
    assert stream.hash_ids is not None
    assert all(ids[:4] == (0, 1, 2, 3) for ids in stream.hash_ids)
    assert stream.hash_ids[0][4] != stream.hash_ids[1][4]
    with pytest.raises(ValidationError, match="must be that of shared_prefix"):
        Workload(
            name="w",
            arrivals=DAY,
            prompt=FixedLength(tokens=1),
            output=FixedLength(tokens=1),
            shared_prefix=SharedPrefix(groups=1, tokens=64, block_tokens=32),
            sessions=Sessions(follow="arrivals", concurrent=1, turns=1),
        )


def test_an_engine_computes_only_what_a_turn_adds() -> None:
    """Slow enough that every turn is answered before the next: all whole blocks known before are found, but where the
    whole prompt is known a last one is computed again."""
    result = run(conversations(24, rate_rps=0.2))
    found = {100: 0, 260: (100 + 59) // 16 * 16, 420: (260 + 59) // 16 * 16}
    hits = sum(core.hit_tokens for core in result.outcome.cores)
    assert hits == sum(found[prompt] for prompt in conversations(24).prompt_tokens.tolist())


def run(stream: RequestStream, num_blocks: int | None = None, *, caching: bool = True) -> Result:
    pool = Pool(
        hardware="h100-sxm",
        instances=1,
        batching=Batching(max_num_seqs=64, max_num_batched_tokens=2048),
        kv_cache=KvCache(prefix_caching=caching, num_blocks=num_blocks),
        max_model_len=8192,
    )
    plan = Plan(name="p", model="llama-3.1-8b", pools=(pool,))
    return deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm")).simulate(stream)


def test_a_preempted_request_finds_its_own_blocks_though_nothing_has_a_name() -> None:
    workload = Workload(
        name="w", arrivals=Poisson(rate_rps=20), prompt=FixedLength(tokens=400), output=FixedLength(tokens=400)
    )
    stream = build_stream(workload, None, requests=200, seed=1)
    tight = {caching: run(stream, 1200, caching=caching) for caching in (False, True)}
    assert all(result.outcome.preemptions.sum() > 30 for result in tight.values())
    assert tight[True].outcome.finish.max() < tight[False].outcome.finish.max()


def test_conversations_of_a_trace_go_on_only_within_a_round() -> None:
    prompt = np.array([10, 20, 30])
    trace = Trace("t", "", np.array([0.0, 1.0, 2.0]), prompt, prompt, session=np.array([0, 1, 0]))
    stream = build_stream(replay(trace, "t"), trace, requests=5, seed=0)
    assert stream.session is not None
    assert stream.session.tolist() == [0, 1, 0, 2, 3]
