"""Parts of a trace: what is kept is what was asked for, and is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.errors import UsageError
from simtune.specs.columns import replay
from simtune.specs.trace_cut import Cut, busiest, duration_s, in_words, merged, replayed_part, scaled
from simtune.specs.trace_write import trace_text
from simtune.specs.traces import Trace, read_trace

MIDNIGHT = 1_772_323_200.0  # 2026-03-01 00:00 UTC


def made(times: list[float], began_s: float | None = None, **more: object) -> Trace:
    count = len(times)
    lengths = np.arange(1, count + 1)
    return Trace("t", "0" * 64, np.array(times), lengths, lengths * 2, began_s=began_s, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("2d", 172800), ("250ms", 0.25)]
)
def test_times_are_written_with_their_unit(text: str, seconds: float) -> None:
    assert duration_s(text, "--from") == seconds


@pytest.mark.parametrize("text", ["", "0s", "-3m", "3 weeks", "h", "nan"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write a time as 90s, 30m"):
        duration_s(text, "--from")


def test_times_in_words() -> None:
    assert [in_words(x) for x in (0.5, 45, 150, 9000, 604800)] == ["0.5 s", "45 s", "2.5 min", "2.5 h", "7 days"]


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=60), st.floats(0.5, 500))
def test_no_window_is_busier(times: list[float], window_s: float) -> None:
    trace = made(sorted(times))
    assert trace.arrival_s is not None
    kept = busiest(trace, window_s)
    starts = trace.arrival_s
    most = max(int(((starts >= t) & (starts <= t + window_s)).sum()) for t in starts)
    assert len(kept) == most
    assert kept.arrival_s is not None
    assert kept.arrival_s[0] == 0
    assert kept.arrival_s[-1] <= window_s * (1 + 1e-12) + 1e-9


def test_hours_of_every_day_are_joined() -> None:
    hour, day = 3600.0, 86400.0
    times = [0.0, 9 * hour, 17 * hour, 20 * hour, day + 9.5 * hour, day + 23 * hour]
    cut = Cut(begin="09:00", end="18:00").of(made(times, MIDNIGHT))
    assert cut.arrival_s is not None
    assert cut.arrival_s.tolist() == [0.0, 8 * hour, 9.5 * hour]
    assert cut.prompt_tokens.tolist() == [2, 3, 5]
    assert cut.began_s == MIDNIGHT + 9 * hour
    assert cut.notes == ("09:00 to 18:00 of 2 days: 3 of 6 requests",)
    local = Cut(begin="09:00", end="18:00", utc_offset="-01:00").of(made(times, MIDNIGHT))
    assert local.prompt_tokens.tolist() == [3]


def test_times_since_the_start_need_no_clock() -> None:
    cut = Cut(begin="10s", end="1m").of(made([0.0, 10.0, 60.0, 61.0]))
    assert cut.arrival_s is not None
    assert cut.arrival_s.tolist() == [0.0, 50.0]
    assert cut.notes == ("from 10 s to 60 s after the first request: 2 of 4 requests",)


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        (Cut(begin="09:00"), "does not tell the time of day"),
        (Cut(begin="5m", end="1m"), "the end must come after the beginning"),
        (Cut(begin="20s", end="30s"), "nothing is left"),
        (Cut(scale="fast"), "write a factor of the rate as 2x"),
        (Cut(scale="0x"), "write a factor of the rate as 2x"),
        (Cut(begin="09:00", utc_offset="CET"), "write an offset from UTC as"),
    ],
)
def test_cuts_that_cannot_be_made_say_why(cut: Cut, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        cut.of(made([0.0, 10.0]))


def test_one_log_is_itself_and_lengths_alone_stay_without_times() -> None:
    one, lengths = made([0.0, 1.0]), Trace("t", "", None, np.array([3, 4]), np.array([4, 5]))
    assert merged([one]) is one
    both = merged([lengths, lengths])
    assert (both.arrival_s, both.hash_ids) == (None, None)
    assert both.prompt_tokens.tolist() == [3, 4, 3, 4]
    assert replayed_part(replay(made([0.0, 1.0]), "load"), lengths, 1) == "only the first 1 of 2 requests of t"


def test_lengths_alone_have_no_busiest_window() -> None:
    lengths = Trace("t", "", None, np.array([1]), np.array([1]))
    with pytest.raises(UsageError, match="has no arrival times"):
        busiest(lengths, 60)


def test_scaling_keeps_the_pattern() -> None:
    twice = scaled(made([0.0, 1.0, 5.0]), 2.0)
    assert twice.arrival_s is not None
    assert twice.arrival_s.tolist() == [0.0, 0.5, 2.5]


def test_what_is_cut_off_is_said() -> None:
    trace = made([0.0, 10.0, 20.0, 21.0, 22.0])
    assert replayed_part(replay(trace, "load"), trace, 5) is None
    assert replayed_part(replay(trace, "load"), trace, 8_000) == "the 5 requests of t, repeated to 8,000"
    assert replayed_part(replay(trace, "load"), trace, 3) == (
        "only the first 3 of 5 requests of t: 20 s of 22 s, 0.1 requests/s where all have 0.182; "
        "simtune workload --peak takes the busiest window"
    )


def test_logs_of_two_hosts_become_one_by_their_clocks() -> None:
    one = made([0.0, 10.0], MIDNIGHT, hash_ids=((0, 1), (0, 2)), session=np.array([0, 1]))
    two = made([0.0, 2.0], MIDNIGHT + 5, hash_ids=((0,), (0, 1)), session=np.array([0, 0]))
    both = merged([one, two])
    assert both.arrival_s is not None
    assert both.session is not None
    assert both.arrival_s.tolist() == [0.0, 5.0, 7.0, 10.0]
    assert both.hash_ids == ((0, 1), (3,), (3, 4), (0, 2))
    assert both.session.tolist() == [0, 2, 2, 1]
    assert both.began_s == MIDNIGHT
    with pytest.raises(UsageError, match="only some say what prompts share"):
        merged([one, made([0.0])])
    lengths = Trace("t", "", None, np.array([3]), np.array([4]))
    with pytest.raises(UsageError, match="only some have arrival times; read them in separate commands"):
        merged([one, lengths])


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    trace = made([0.0, 1 / 3], hash_ids=((0,), (0, 1)), session=np.array([0, 0]), block_tokens=1)
    path = tmp_path / "t.jsonl"
    path.write_text(trace_text(trace, path.name))
    again = read_trace(path)
    assert again.arrival_s is not None
    assert again.session is not None
    assert again.arrival_s.tolist() == pytest.approx([0.0, 1 / 3])
    assert (again.hash_ids, again.block_tokens, again.session.tolist()) == (trace.hash_ids, 1, [0, 0])
    with pytest.raises(UsageError, match=r"end the name in \.jsonl"):
        trace_text(trace, "t.csv")
    plain = tmp_path / "t.csv"
    plain.write_text(trace_text(made([0.0, 2.0]), plain.name))
    assert read_trace(plain).output_tokens.tolist() == [2, 4]
