"""Whether a load is kept up with: oracles whose capacity is known, random loads at many lengths, and short loads."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from simtune.arrays import Array
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.results.result import Result
from simtune.results.steady import GROWTH, LEAST, Steadiness, _growth, _rise, in_system, needed_for, steadiness
from simtune.sim.deployment import deploy
from simtune.specs.catalog import load_hardware, load_model, load_workload
from simtune.specs.plan import Plan
from simtune.specs.workload import Slo
from simtune.workload.requests import build_stream

LENGTHS = (50, 100, 200, 400, 1000, 2000, 4000, 8000, 20_000)


def test_the_rise_is_from_the_first_quarter_to_the_last() -> None:
    """Of 1 ... 10 the last two, of mean 9.5, over the first two, of mean 1.5; the middle does not count."""
    assert _rise(np.arange(1.0, 11.0)) == 8.0
    assert _rise(np.array([3.0, 3.0, 99.0, -99.0, 99.0, 0.0, 1.0, 1.0])) == -2.0


def test_growth_is_the_mean_increment_in_its_standard_errors() -> None:
    """Ten increments of 2 and ten of 0, the last of them within the last part: their mean is 1, their standard
    deviation sqrt(20 / 19), so the standard error is 1 / sqrt(19)."""
    ends = np.cumsum([0.0, *[2.0, 0.0] * 10])
    queue = np.append(np.repeat(ends[:-1], 3)[:-1], ends[-1])
    assert _growth(queue) == pytest.approx(19**0.5)
    assert _growth(np.repeat(np.arange(20.0), 5)) > GROWTH
    assert _growth(np.zeros(100)) == 0.0
    assert _growth(np.arange(101.0)) == np.inf, "all increments are 5"


@pytest.mark.parametrize(
    ("filling", "queueing", "verdict"),
    [
        # A queue of one more request with each arrival, before seats that are full.
        (0.0, 1.0, "saturated"),
        # The queue grows by a third as much as the batch: the first fill is not over.
        (1.0, 1 / 3, "too short to tell"),
        # Neither grows.
        (0.0, 0.0, "stable"),
    ],
)
def test_a_load_is_saturated_if_the_queue_grows_more_than_the_batch(
    filling: float, queueing: float, verdict: Steadiness
) -> None:
    at = np.arange(2000)
    noise = np.random.default_rng(0).integers(0, 3, len(at))
    queue = np.rint(queueing * at).astype(np.int64)
    running = 5 + noise + np.rint(filling * at).astype(np.int64)
    assert steadiness(queue + running, queue, len(at)) == verdict


def servers(arrival: Array, work: Array, seats: int) -> tuple[Array, Array]:
    """Starts and ends under first come, first served, at `seats` servers."""
    free, start = [0.0] * seats, np.empty(len(arrival))
    for i, (at, takes) in enumerate(zip(arrival.tolist(), work.tolist(), strict=True)):
        start[i] = max(at, heapq.heappop(free))
        heapq.heappush(free, start[i] + takes)
    return start, start + work


def shared(arrival: Array, work: Array, seats: int, speed: Callable[[int], float]) -> tuple[Array, Array]:
    """The same where all that have a seat share one processor, each at speed(how many there are): a batch."""
    start, end = np.empty(len(arrival)), np.empty(len(arrival))
    waiting, running = deque[int](), list[tuple[float, int]]()
    virtual, now, number = 0.0, 0.0, 0
    while number < len(arrival) or running:
        done = now + (running[0][0] - virtual) / speed(len(running)) if running else np.inf
        if number < len(arrival) and arrival[number] <= done:
            virtual += (arrival[number] - now) * speed(len(running)) if running else 0.0
            now = arrival[number]
            waiting.append(number)
            number += 1
        else:
            now, (virtual, over) = done, heapq.heappop(running)
            end[over] = now
        while waiting and len(running) < seats:
            begun = waiting.popleft()
            start[begun] = now
            heapq.heappush(running, (virtual + work[begun], begun))
    return start, end


def judged(arrival: Array, start: Array, end: Array) -> Steadiness:
    at, over = (np.rint(t * TICKS_PER_SECOND).astype(np.int64) for t in (arrival, end))
    waiting = np.arange(len(at)) - np.searchsorted(np.sort(start), arrival, side="right")
    return steadiness(*in_system(at, over, np.maximum(waiting, 0)), len(at))


def verdicts(seed: int) -> tuple[float, list[Steadiness]]:
    """(load over capacity, verdicts at LENGTHS) of a random system: the first requests of one stream."""
    draw, n = np.random.default_rng(seed), LENGTHS[-1]
    seats, sigma = int(draw.choice([1, 4, 16, 64, 256])), float(draw.choice([0.01, 0.5, 1.0]))
    load = float(draw.choice([0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 3.0]))
    work = np.exp(sigma * draw.standard_normal(n) - sigma**2 / 2)
    fixed = float(draw.choice([0.9, 0.5, 0.1]))
    batch = bool(draw.integers(2))
    speed = (lambda k: 1 / (fixed + (1 - fixed) * k)) if batch else (lambda k: 1.0)
    arrival = np.cumsum(draw.exponential(1 / (load * seats * speed(seats)), n))
    start, end = shared(arrival, work, seats, speed) if batch else servers(arrival, work, seats)
    # First come, first served: later requests change nothing for earlier ones, but in a batch that they slow down.
    found = []
    for n in LENGTHS:
        some = shared(arrival[:n], work[:n], seats, speed) if batch else (start[:n], end[:n])
        found.append(judged(arrival[:n], *some))
    return load, found


def check(seeds: range) -> None:
    decided, right = 0, 0
    for seed in seeds:
        load, found = verdicts(seed)
        assert not {"stable", "saturated"} <= set(found), (seed, load, found)
        if load <= 0.8 or load >= 1.2:
            decided += found[-1] != "too short to tell"
            right += found[-1] == ("stable" if load < 1 else "saturated")
            assert found[-1] in ("too short to tell", "stable" if load < 1 else "saturated")
    assert right == decided > 0


def test_no_verdict_turns_round_with_the_length() -> None:
    check(range(5))


@pytest.mark.slow
def test_of_many_loads_no_verdict_turns_round_with_the_length() -> None:
    check(range(5, 160))


@pytest.mark.parametrize("requests", [2000, 8000])
@pytest.mark.parametrize("seats", [1, 16])
def test_a_verdict_is_monotone_in_the_rate(requests: int, seats: int) -> None:
    """On one draw, stretched: stable, then too short to tell, then saturated."""
    draw = np.random.default_rng(3)
    work, gaps = np.exp(0.5 * draw.standard_normal(requests) - 0.125), draw.exponential(1 / seats, requests)
    order = ["stable", "too short to tell", "saturated"]
    loads = (0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
    arrivals = [np.cumsum(gaps) / load for load in loads]
    found = [order.index(judged(arrival, *servers(arrival, work, seats))) for arrival in arrivals]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 2)


def test_few_requests_are_never_calm() -> None:
    none = np.zeros(LEAST, dtype=np.int64)
    assert steadiness(none[1:], none[1:], LEAST - 1) == "too short to tell"
    assert steadiness(none, none, LEAST) == "stable"


def test_what_is_still_being_filled_is_too_short_to_tell() -> None:
    """100 seats fill with 90 requests that stay for 90 gaps each: as if they piled up, until the first one ends."""
    arrival = np.arange(2000.0)
    work = np.full(2000, 90.0)
    found = [judged(arrival[:n], *servers(arrival[:n], work[:n], 100)) for n in (60, 120, 2000)]
    assert found == ["too short to tell", "too short to tell", "stable"]


def chat_on_one_card(requests: int, rate_rps: float) -> Result:
    pool = {"hardware": "h100-sxm", "instances": 1, "max_model_len": 8192}
    batching = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    plan = Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": [pool | {"batching": batching}]})
    deployment = deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"))
    return deployment.simulate(
        build_stream(load_workload("chat")[0], None, requests=requests, seed=0).at_rate(rate_rps),
        Slo(ttft_s={"p99": 9.0}),
    )


def test_requests_that_run_pile_up_too() -> None:
    """30 requests in 30 ms at a card with 256 seats, hardly any of which waits."""
    result = chat_on_one_card(30, 1000.0)
    assert result.steadiness == "too short to tell"
    throughput = result.summary().request_throughput_rps
    assert result.lifetimes is not None
    assert throughput is not None
    assert result.lifetimes < 0.1
    assert result.goodput_rps == pytest.approx(throughput)
    assert throughput < 30
    assert result.too_few_for == ("p90", "p95", "p99")


def test_a_stable_card_has_the_offered_rate_as_goodput() -> None:
    """Its duration includes the last answer, so that the throughput of a short run is below the rate."""
    result = chat_on_one_card(400, 2.5)
    assert (result.steadiness, result.slo_attainment) == ("stable", 1.0)
    assert result.goodput_rps == pytest.approx(2.5)
    assert chat_on_one_card(100, 1000.0).too_few_for == ("p95", "p99"), "100 requests are enough for p90"


@pytest.mark.slow
def test_a_card_is_saturated_above_what_it_serves_and_stable_below() -> None:
    found = [chat_on_one_card(8000, rate).steadiness for rate in (5.0, 10.0, 40.0, 1000.0)]
    assert found == ["stable", "stable", "saturated", "saturated"]


@pytest.mark.parametrize(("statistic", "needed"), [("mean", 1), ("p50", 20), ("p90", 100), ("p95", 200), ("p99", 1000)])
def test_a_percentile_needs_ten_values_beyond_it(statistic: str, needed: int) -> None:
    assert needed_for(statistic) == needed


def test_a_batch_is_finite_and_has_no_verdict() -> None:
    """Far above what the card serves: as it goes on it would be saturated, as a batch it has an end."""
    workload = load_workload("chat")[0]
    pool = {"hardware": "h100-sxm", "instances": 1, "max_model_len": 8192}
    batching = {"max_num_seqs": 32, "max_num_batched_tokens": 8192}
    plan = Plan.model_validate({"name": "p", "model": "llama-3.1-8b", "pools": [pool | {"batching": batching}]})
    deployment = deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"))
    found = {}
    for batch in (False, True):
        load = workload.model_copy(update={"batch": batch})
        found[batch] = deployment.simulate(build_stream(load, None, requests=600, seed=0).at_rate(200.0))
    assert found[False].steadiness == "saturated"
    assert (found[True].steadiness, found[True].lifetimes, found[True].saturated) == (None, None, False)
    assert found[True].duration_s == found[False].duration_s
    assert found[True].goodput_rps == pytest.approx(600 / found[True].duration_s)
