"""The loop that takes samples until they agree, on a clock that only pretends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from simtune.profiling.timing import (
    ALLOWANCE_S,
    FEWEST,
    MOST,
    WARM_UP_S,
    AmongOthers,
    Call,
    CpuThread,
    CpuWall,
    Sample,
    Timer,
    cpu_timer,
    measure,
)


class Pretended:
    """Samples of given seconds, then the last of them for ever; counts the calls it was asked for."""

    name = "pretended"
    shortest_s = 3e-4
    warm_up_s = WARM_UP_S

    def __init__(self, *samples: Sample) -> None:
        self.samples, self.counts, self.starts = list(samples), list[int](), list[int]()

    def sample(self, calls: Sequence[Call], first: int, count: int) -> Sample:
        self.counts.append(count)
        self.starts.append(first)
        return self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]


def nothing() -> None:
    return None


def test_short_calls_are_repeated_until_the_clock_is_precise() -> None:
    timer = Pretended(Sample(1e-6, True))
    found = measure(timer, [nothing])
    assert found.seconds == 1e-6
    assert found.n == FEWEST  # they agree at once
    assert timer.counts[-1] == 300  # of 1 us, to fill 0.3 ms


def test_operands_rotate_through_all_samples() -> None:
    timer = Pretended(Sample(1e-4, True))
    measure(timer, [nothing] * 3)
    assert timer.starts == [sum(timer.counts[:i]) for i in range(len(timer.counts))]


def test_a_call_longer_than_the_allowance_is_not_warmed_up_and_made_twice() -> None:
    timer = Pretended(Sample(3 * ALLOWANCE_S, True), Sample(2 * ALLOWANCE_S, True))
    found = measure(timer, [nothing])
    assert timer.counts == [1, 1]
    assert found.seconds == 2 * ALLOWANCE_S  # the lower median of two


def test_warm_up_samples_do_not_count() -> None:
    timer = Pretended(Sample(5e-3, True), Sample(5e-3, True), Sample(1e-3, True))
    assert measure(timer, [nothing]).p90 == pytest.approx(1e-3)


def test_samples_that_do_not_agree_are_taken_to_the_limit() -> None:
    timer = Pretended(*(Sample(1e-3 * (1 + i % 3), True) for i in range(40)))
    found = measure(timer, [nothing])
    assert found.n == MOST
    assert found.seconds == 2e-3
    assert found.mad == 1e-3


def test_disturbed_samples_are_left_out_and_their_share_is_told() -> None:
    clean, disturbed = Sample(1e-3, True), Sample(9e-3, False)
    found = measure(Pretended(*[clean] * 3, *[disturbed, disturbed, clean] * 10), [nothing])
    assert found.seconds == 1e-3
    assert 0.3 < found.clean < 0.6


def test_where_nothing_was_clean_the_shortest_quarter_counts() -> None:
    samples = [Sample(1e-2 * (1 + i % 8), False) for i in range(60)]
    found = measure(Pretended(*samples), [nothing])
    assert found.clean == 0
    assert found.seconds == 3e-2  # the first two warmed up


@pytest.mark.parametrize(("clean_of_ten", "clock"), [(10, CpuWall), (9, CpuWall), (5, CpuThread)])
def test_on_a_busy_machine_processor_time_counts(
    monkeypatch: pytest.MonkeyPatch, clean_of_ten: int, clock: type
) -> None:
    looked = count()
    monkeypatch.setattr(CpuWall, "sample", lambda self, *given: Sample(1e-3, next(looked) % 10 < clean_of_ten))
    timer, clean = cpu_timer(lambda: None)
    assert type(timer) is clock
    assert clean == pytest.approx(clean_of_ten / 10)


@pytest.mark.parametrize("timer", [CpuWall(), CpuThread()])
def test_the_clocks_of_a_processor_time_what_is_called(timer: Timer) -> None:
    made: list[int] = []
    calls = [lambda: made.append(0), lambda: made.append(1)]
    sample = timer.sample(calls, 1, 3)
    assert made == [1, 0, 1]
    assert sample.seconds >= 0


def test_among_others_only_what_is_measured_counts() -> None:
    made: list[str] = []
    others = [lambda: made.append("a"), lambda: made.append("b")]
    timer = AmongOthers(Pretended(*(Sample(1e-3 * i, i != 2) for i in range(1, 4))), others)
    sample = timer.sample([nothing], 0, 3)
    assert sample.seconds == pytest.approx(2e-3)
    assert sample.clean is False
    assert made == ["a", "b", "a"]
    assert timer.name == "pretended"
