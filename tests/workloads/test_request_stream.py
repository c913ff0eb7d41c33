"""The requests of a workload: right on average, and the same ones for every plan that is compared on them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from simtune.errors import UsageError
from simtune.specs.traces import Trace, read_trace
from simtune.specs.workload import (
    Arrivals,
    ClosedLoop,
    FixedInterval,
    FixedLength,
    Gamma,
    Lengths,
    Lognormal,
    Poisson,
    Quantiles,
    RequestClass,
    Slo,
    TraceArrivals,
    TraceLengths,
    Workload,
)
from simtune.workload.requests import RequestStream, build_stream

TRACE = Trace(
    file="t.jsonl",
    sha256="",
    arrival_s=np.array([0.0, 1.0, 1.0, 4.0]),
    prompt_tokens=np.array([600, 700, 10, 20]),
    output_tokens=np.array([1, 2, 3, 4]),
    hash_ids=((0, 1), (0, 2), (3,), ()),
)
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "class_index", "priority")


def workload(
    arrivals: Arrivals = Poisson(rate_rps=4.0),  # noqa: B008 (immutable)
    prompt: Lengths = FixedLength(tokens=100),  # noqa: B008
    output: Lengths = FixedLength(tokens=10),  # noqa: B008
    classes: tuple[RequestClass, ...] = (),
) -> Workload:
    return Workload(name="w", arrivals=arrivals, prompt=prompt, output=output, trace="t.jsonl", classes=classes)


def arrivals_of(stream: RequestStream) -> NDArray[np.float64]:
    assert stream.arrival_s is not None
    return stream.arrival_s


REPLAY = workload(TraceArrivals(), TraceLengths(), TraceLengths())
RATES = st.floats(0.01, 1000)
ARRIVALS = st.one_of(
    st.builds(Poisson, rate_rps=RATES),
    st.builds(Gamma, rate_rps=RATES, cv=st.floats(0.2, 4)),
    st.builds(FixedInterval, rate_rps=RATES),
    st.builds(ClosedLoop, users=st.integers(1, 9), think_s=st.floats(0, 9)),
    st.builds(TraceArrivals, rate_rps=st.none() | RATES),
)
LENGTHS = st.one_of(
    st.builds(FixedLength, tokens=st.integers(1, 10**9)),
    st.builds(Lognormal, mean_tokens=st.floats(0.1, 1e5), sigma=st.floats(0.01, 9), max_tokens=st.integers(1, 10**9)),
    st.just(Quantiles(levels=(0, 0.5, 0.9, 1), tokens=(1, 2.5, 700, 10**9))),
    st.just(TraceLengths()),
)
CLASSES = st.lists(
    st.builds(
        RequestClass,
        name=st.sampled_from("abcd"),
        share=st.floats(0.01, 100),
        priority=st.integers(-3, 3),
        prompt=st.none() | LENGTHS,
        output=st.none() | LENGTHS,
    ),
    max_size=3,
    unique_by=lambda c: c.name,
).map(tuple)
WORKLOADS = st.builds(workload, ARRIVALS, LENGTHS, LENGTHS, CLASSES)
SEEDS = st.integers(0, 2**64)


# --- common random numbers --------------------------------------------------------------------------------


@given(WORKLOADS, SEEDS, st.integers(1, 40), st.integers(0, 40))
def test_more_requests_are_the_same_ones_and_some_after(w: Workload, seed: int, few: int, further: int) -> None:
    short = build_stream(w, TRACE, requests=few, seed=seed)
    long = build_stream(w, TRACE, requests=few + further, seed=seed)
    assert (len(short), len(long)) == (few, few + further)
    for column in COLUMNS:
        if getattr(short, column) is None:
            assert getattr(long, column) is None
        else:
            np.testing.assert_array_equal(getattr(short, column), getattr(long, column)[:few])
    if long.hash_ids is not None:
        assert short.hash_ids == long.hash_ids[:few]


@given(WORKLOADS, SEEDS, st.integers(1, 40))
def test_a_stream_can_always_be_simulated(w: Workload, seed: int, requests: int) -> None:
    stream = build_stream(w, TRACE, requests=requests, seed=seed)
    assert stream.prompt_tokens.min() >= 1
    assert stream.output_tokens.min() >= 1
    assert max(stream.prompt_tokens.max(), stream.output_tokens.max()) <= 10**9
    assert {stream.prompt_tokens.dtype, stream.output_tokens.dtype, stream.class_index.dtype} == {np.dtype(np.int64)}
    if stream.arrival_s is None:
        assert stream.users is not None
    else:
        assert np.isfinite(stream.arrival_s).all()
        assert (np.diff(stream.arrival_s, prepend=0.0) >= 0).all()


@given(ARRIVALS.filter(lambda a: a.kind not in ("closed_loop", "trace")), SEEDS, st.integers(-8, 8))
def test_another_rate_is_the_same_pattern_stretched(arrivals: Any, seed: int, power: int) -> None:
    """Exactly: a rate 2^k times as high divides every arrival time by 2^k, to the last bit."""
    w = workload(arrivals, prompt=Lognormal(mean_tokens=300, sigma=1, max_tokens=9999))
    base = build_stream(w, None, requests=30, seed=seed)
    faster = arrivals.model_copy(update={"rate_rps": arrivals.rate_rps * 2.0**power})
    other = build_stream(w.model_copy(update={"arrivals": faster}), None, requests=30, seed=seed)
    np.testing.assert_array_equal(arrivals_of(other) * 2.0**power, arrivals_of(base))
    np.testing.assert_array_equal(other.prompt_tokens, base.prompt_tokens)


@given(SEEDS)
def test_what_one_purpose_draws_does_not_move_another(seed: int) -> None:
    spread = Lognormal(mean_tokens=300, sigma=1, max_tokens=99_999)
    two = (RequestClass(name="a"), RequestClass(name="b", share=2.0))
    plain = build_stream(workload(prompt=spread, output=spread), None, requests=30, seed=seed)
    for other in (
        workload(Gamma(rate_rps=4.0, cv=2.0), prompt=spread, output=FixedLength(tokens=1)),
        workload(ClosedLoop(users=3), prompt=spread),
        workload(prompt=spread, classes=two),
    ):
        np.testing.assert_array_equal(
            build_stream(other, None, requests=30, seed=seed).prompt_tokens, plain.prompt_tokens
        )
    assert (plain.prompt_tokens != plain.output_tokens).any()


@given(SEEDS, SEEDS)
def test_a_seed_decides_everything(seed: int, other: int) -> None:
    spread = Lognormal(mean_tokens=300, sigma=1, max_tokens=99_999)
    w = workload(prompt=spread, output=spread, classes=(RequestClass(name="a"), RequestClass(name="b")))
    first, second = (build_stream(w, None, requests=60, seed=s) for s in (seed, other))
    for column in ("arrival_s", "prompt_tokens", "output_tokens", "class_index"):
        same = np.array_equal(getattr(first, column), getattr(second, column))
        assert same == (seed == other)


def test_the_draws_stay_the_same_from_release_to_release() -> None:
    """Golden numbers: a change here changes the results of every study that anyone has written down."""
    spread = Lognormal(mean_tokens=300, sigma=1, max_tokens=99_999)
    w = workload(prompt=spread, output=spread, classes=(RequestClass(name="a"), RequestClass(name="b")))
    stream = build_stream(w, None, requests=4, seed=7)
    assert arrivals_of(stream).tolist() == pytest.approx(
        [0.1581624002707595, 0.29700739653249864, 0.4097466207116941, 0.47748691923898745], rel=1e-12
    )
    assert stream.prompt_tokens.tolist() == [519, 143, 374, 252]
    assert stream.output_tokens.tolist() == [17, 108, 743, 88]
    assert stream.class_index.tolist() == [0, 0, 1, 1]


# --- distributions ----------------------------------------------------------------------------------------

MANY = 200_000


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(arrivals_of(build_stream(workload(), None, requests=MANY, seed=1)), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.01)
    for q in (0.1, 0.5, 0.99):
        assert np.quantile(gaps, q) == pytest.approx(-math.log1p(-q) / 4, rel=0.02)


@pytest.mark.parametrize("cv", [0.25, 1.0, 2.0, 4.0])
def test_gamma_gaps_have_the_coefficient_of_variation_asked_for(cv: float) -> None:
    stream = build_stream(workload(Gamma(rate_rps=4.0, cv=cv)), None, requests=MANY, seed=2)
    gaps = np.diff(arrivals_of(stream), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 4, rel=4 * cv / math.sqrt(MANY))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_gamma_with_cv_one_is_poisson() -> None:
    gamma = build_stream(workload(Gamma(rate_rps=4.0, cv=1.0)), None, requests=1000, seed=3)
    poisson = build_stream(workload(), None, requests=1000, seed=3)
    np.testing.assert_allclose(arrivals_of(gamma), arrivals_of(poisson), rtol=1e-12)


def test_a_fixed_interval_is_fixed() -> None:
    stream = build_stream(workload(FixedInterval(rate_rps=4.0)), None, requests=5, seed=0)
    assert arrivals_of(stream).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_lognormal_lengths_have_the_mean_and_shape_asked_for() -> None:
    w = workload(prompt=Lognormal(mean_tokens=1000, sigma=0.8, max_tokens=10**6))
    tokens = build_stream(w, None, requests=MANY, seed=4).prompt_tokens
    assert tokens.mean() == pytest.approx(1000.5, rel=0.01)  # rounding up adds half a token
    assert np.log(tokens).std() == pytest.approx(0.8, rel=0.01)
    clipped = workload(prompt=Lognormal(mean_tokens=1000, sigma=0.8, max_tokens=1200))
    np.testing.assert_array_equal(
        build_stream(clipped, None, requests=MANY, seed=4).prompt_tokens, np.minimum(tokens, 1200)
    )


def test_quantile_lengths_follow_their_table() -> None:
    table = Quantiles(levels=(0, 0.5, 0.9, 1), tokens=(10, 100, 1000, 5000))
    tokens = build_stream(workload(output=table), None, requests=MANY, seed=5).output_tokens
    for level, expected in ((0.25, 55), (0.5, 100), (0.9, 1000), (0.95, 3000)):
        assert np.quantile(tokens, level) == pytest.approx(expected, rel=0.02)
    assert (tokens.min(), tokens.max()) == (10, 5000)


def test_classes_come_by_share_with_their_own_lengths_priority_and_objective() -> None:
    slo = Slo(ttft_s={"p99": 1.0})
    classes = (
        RequestClass(name="chat", share=3.0, slo=slo),
        RequestClass(name="batch", share=1.0, priority=5, prompt=FixedLength(tokens=7)),
    )
    stream = build_stream(workload(classes=classes), None, requests=MANY, seed=6)
    batch = stream.class_index == 1
    assert batch.mean() == pytest.approx(0.25, abs=0.005)
    assert (stream.class_names, stream.slos) == (("chat", "batch"), (slo, None))
    assert set(stream.prompt_tokens[batch].tolist()) == {7}
    assert set(stream.prompt_tokens[~batch].tolist()) == {100}
    assert set(stream.priority[batch].tolist()) == {5}
    assert set(stream.priority[~batch].tolist()) == {0}


def test_without_classes_all_requests_are_of_one() -> None:
    stream = build_stream(workload(), None, requests=3, seed=0)
    assert (stream.class_names, stream.slos, stream.class_index.tolist()) == (
        ("default",),
        (None,),
        [0, 0, 0],
    )


def test_a_closed_loop_has_users_instead_of_arrival_times() -> None:
    stream = build_stream(workload(ClosedLoop(users=8, think_s=0.5)), None, requests=3, seed=0)
    assert stream.arrival_s is None
    assert (stream.users, stream.think_s) == (8, 0.5)
    assert build_stream(workload(), None, requests=3, seed=0).users is None


def test_some_cores_see_their_share_of_a_stream() -> None:
    stream = build_stream(REPLAY, TRACE, requests=7, seed=0)
    share = stream.share_of(2, 3)
    mine = [0, 1, 3, 4, 6]
    assert arrivals_of(share).tolist() == arrivals_of(stream)[mine].tolist()
    assert share.prompt_tokens.tolist() == stream.prompt_tokens[mine].tolist()
    assert share.output_tokens.tolist() == stream.output_tokens[mine].tolist()
    assert stream.hash_ids is not None
    assert share.hash_ids == tuple(stream.hash_ids[i] for i in mine)
    assert len(share) == len(share.class_index) == len(share.priority) == len(mine)
    assert build_stream(workload(ClosedLoop(users=2)), None, requests=4, seed=0).share_of(1, 2).arrival_s is None


def test_a_stream_stretched_to_a_rate_has_exactly_that_rate_and_the_same_pattern() -> None:
    stream = build_stream(workload(), None, requests=500, seed=3)
    faster = stream.at_rate(40.0)
    assert faster.offered_rate_rps == pytest.approx(40.0, rel=1e-12)
    ratio = arrivals_of(faster) / arrivals_of(stream)
    assert ratio == pytest.approx(np.full(500, ratio[0]), rel=1e-12)
    assert faster.prompt_tokens is stream.prompt_tokens
    with pytest.raises(UsageError, match=r"no request rate to change; change arrivals.users"):
        build_stream(workload(ClosedLoop(users=2)), None, requests=4, seed=0).at_rate(1.0)


def test_the_offered_rate_is_one_over_the_mean_gap() -> None:
    assert build_stream(REPLAY, TRACE, requests=4, seed=0).offered_rate_rps == 3 / 4.0
    assert build_stream(REPLAY, TRACE, requests=1, seed=0).offered_rate_rps is None
    assert build_stream(workload(ClosedLoop(users=2)), None, requests=4, seed=0).offered_rate_rps is None
    fixed = build_stream(workload(FixedInterval(rate_rps=4.0)), None, requests=9, seed=0)
    assert fixed.offered_rate_rps == 4.0


# --- traces -----------------------------------------------------------------------------------------------


def test_a_trace_is_replayed_as_it_is() -> None:
    stream = build_stream(REPLAY, TRACE, requests=4, seed=0)
    assert arrivals_of(stream).tolist() == [0.0, 1.0, 1.0, 4.0]
    assert stream.prompt_tokens.tolist() == [600, 700, 10, 20]
    assert stream.output_tokens.tolist() == [1, 2, 3, 4]
    assert stream.hash_ids == TRACE.hash_ids
    assert stream.block_tokens == 512


def test_a_longer_replay_repeats_the_trace_one_mean_gap_after_its_end() -> None:
    stream = build_stream(REPLAY, TRACE, requests=9, seed=0)
    mean_gap = 4.0 / 3
    again = 4.0 + mean_gap
    expected = [0, 1, 1, 4, again, again + 1, again + 1, again + 4, 2 * again]
    np.testing.assert_allclose(arrivals_of(stream), expected, rtol=1e-15)
    assert stream.prompt_tokens.tolist() == [600, 700, 10, 20] * 2 + [600]
    assert stream.output_tokens.tolist() == [1, 2, 3, 4] * 2 + [1]


def test_a_repeat_shares_prefixes_within_itself_only() -> None:
    ids = build_stream(REPLAY, TRACE, requests=8, seed=0).hash_ids
    assert ids is not None
    first, second = ids[:4], ids[4:]
    assert {x for row in first for x in row}.isdisjoint(x for row in second for x in row)
    assert second[0][0] == second[1][0]
    assert [len(row) for row in second] == [len(row) for row in first]


def test_a_share_of_a_load_keeps_what_its_prompts_share() -> None:
    """The names of their blocks, whether they come from a trace or are listed."""
    repeated = build_stream(REPLAY, TRACE, requests=10, seed=0)
    assert repeated.hash_ids is not None
    rows = tuple(repeated.hash_ids)
    for whole in (repeated, replace(repeated, hash_ids=rows)):
        seen = whole.share_of(2, 3).hash_ids
        assert seen is not None
        assert (*seen,) == tuple(row for i, row in enumerate(rows) if i % 3 < 2)
    assert replace(repeated, hash_ids=None).share_of(2, 3).hash_ids is None


def test_a_replay_can_be_stretched_to_a_rate() -> None:
    stretched = workload(TraceArrivals(rate_rps=3.0), TraceLengths(), TraceLengths())
    for stream in (
        build_stream(stretched, TRACE, requests=4, seed=0),
        build_stream(REPLAY, TRACE, requests=4, seed=0).at_rate(3.0),
    ):
        np.testing.assert_allclose(arrivals_of(stream), np.array([0.0, 1, 1, 4]) / 4, rtol=1e-15)
    long = build_stream(stretched, TRACE, requests=401, seed=0)
    assert 400 / arrivals_of(long)[-1] == pytest.approx(3.0, rel=1e-12)


def test_prefix_ids_go_with_the_trace_s_own_prompts_only() -> None:
    assert build_stream(workload(TraceArrivals()), TRACE, requests=4, seed=0).hash_ids is None
    mixed = workload(
        TraceArrivals(),
        TraceLengths(),
        classes=(RequestClass(name="a"), RequestClass(name="b", prompt=FixedLength(tokens=5))),
    )
    stream = build_stream(mixed, TRACE, requests=40, seed=0)
    assert stream.hash_ids is not None
    assert set(stream.class_index.tolist()) == {0, 1}
    for k, tokens, ids, row in zip(stream.class_index, stream.prompt_tokens, stream.hash_ids, range(40), strict=True):
        assert (tokens, len(ids)) == ((5, 0) if k else (TRACE.prompt_tokens[row % 4], len(TRACE.hash_ids[row % 4])))  # type: ignore[index]


@pytest.mark.parametrize("name", ["azure_2023_conv.csv.gz", "azure_2023_code.csv.gz", "mooncake_conversation.jsonl.gz"])
def test_a_published_trace_replays_to_the_last_bit(data_dir: Path, name: str) -> None:
    trace = read_trace(data_dir / "traces" / name)
    stream = build_stream(REPLAY, trace, requests=len(trace), seed=0)
    np.testing.assert_array_equal(arrivals_of(stream), trace.arrival_s)
    np.testing.assert_array_equal(stream.prompt_tokens, trace.prompt_tokens)
    np.testing.assert_array_equal(stream.output_tokens, trace.output_tokens)
    assert stream.hash_ids == trace.hash_ids


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("w", "trace", "options", "told"),
    [
        (REPLAY, None, {}, "no trace was read for it"),
        (workload(prompt=TraceLengths()), None, {}, "no trace was read for it"),
        (workload(), None, {"requests": 0}, "at least one request is needed, not 0"),
        (workload(), None, {"seed": -1}, "the seed must not be negative: -1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(w: Workload, trace: Trace | None, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        build_stream(w, trace, **{"requests": 3, "seed": 0, **options})


@pytest.mark.parametrize("rate_rps", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_must_be_one(rate_rps: float) -> None:
    with pytest.raises(UsageError, match=rf"must be above 0 and at most 1e\+09 requests/s, not {rate_rps}"):
        build_stream(workload(), None, requests=3, seed=0).at_rate(rate_rps)


def test_a_trace_without_times_or_with_all_at_once_cannot_give_a_rate() -> None:
    lengths_only = Trace("l.csv", "", None, TRACE.prompt_tokens, TRACE.output_tokens)
    with pytest.raises(UsageError, match=r"l\.csv: has no arrival times"):
        build_stream(REPLAY, lengths_only, requests=2, seed=0)
    at_once = Trace("o.csv", "", np.zeros(4), TRACE.prompt_tokens, TRACE.output_tokens)
    assert arrivals_of(build_stream(REPLAY, at_once, requests=3, seed=0)).tolist() == [0, 0, 0]
    stretched = workload(TraceArrivals(rate_rps=1.0), TraceLengths(), TraceLengths())
    for w, requests in ((REPLAY, 5), (stretched, 3)):
        with pytest.raises(UsageError, match="neither stretched nor repeated"):
            build_stream(w, at_once, requests=requests, seed=0)
    with pytest.raises(UsageError, match="all come at once have no rate to change"):
        build_stream(REPLAY, at_once, requests=3, seed=0).at_rate(1.0)
