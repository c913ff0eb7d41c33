"""A gateway's spend log as CSV: its times are read, and columns that are not read are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.errors import SpecError
from simtune.specs.traces import read_trace
from tests.cli.conftest import call

SPEND = Path(__file__).parent / "data" / "f06-start-time-ignored" / "spend.csv"


def written(folder: Path, text: str) -> Path:
    path = folder / "log.csv"
    path.write_text(text)
    return path


def test_arrivals_are_those_of_start_time() -> None:
    trace = read_trace(SPEND)
    assert trace.rate_rps == pytest.approx(1.0)
    assert trace.began_s == 1785578400.0
    assert trace.ignored == ("request_id", "endTime", "model")
    assert "columns not read: request_id, endTime, model" in call("workload", SPEND).err


@pytest.mark.parametrize(
    ("column", "first", "second"),
    [
        ("created", "1785578400", "1785578402"),
        ("created_at", "1785578400000", "1785578402000"),
        ("ts", "2026-08-01 10:00:00", "2026-08-01 10:00:02"),
        ("time", "01.08.2026 12:00:00.5 +02:00", "01.08.2026 12:00:02.5 +02:00"),
        ("@timestamp", "2026/08/01 10:00:00,25", "2026/08/01 10:00:02,25"),
        ("arrival_s", "2026-08-01T10:00:00Z", "2026-08-01T10:00:02Z"),
    ],
)
def test_clocks(tmp_path: Path, column: str, first: str, second: str) -> None:
    """Of the names that logs have for it; `arrival_s` too, if it holds dates."""
    rows = f'"{column}",prompt_tokens,output_tokens\n"{first}",5,6\n"{second}",7,8\n'
    trace = read_trace(written(tmp_path, rows))
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == pytest.approx([0, 2])
    assert trace.began_s == pytest.approx(1785578400, abs=1)


def test_a_time_that_could_be_two_days_is_refused(tmp_path: Path) -> None:
    rows = "ts,prompt_tokens,output_tokens\n03/01/2026 10:00:00,5,6\n"
    with pytest.raises(SpecError, match=r"ts: must be a time such as .*, not '03/01/2026 10:00:00'"):
        read_trace(written(tmp_path, rows))


def test_numbers_of_no_known_unit_are_refused_once(tmp_path: Path) -> None:
    rows = "ts,prompt_tokens,output_tokens\n" + "".join(f"{i},5,6\n" for i in range(100))
    with pytest.raises(SpecError) as error:
        read_trace(written(tmp_path, rows))
    (problem,) = error.value.problems
    assert "--columns arrival_s=ts" in problem.message


def test_columns_of_unread_names_are_named_where_arrivals_are_missing(tmp_path: Path) -> None:
    path = written(tmp_path, "when,prompt_tokens,output_tokens\n2026-08-01T10:00:00Z,5,6\n")
    (note,) = read_trace(path).notes
    assert note.startswith("no column gives arrivals, so it is lengths only; not read: when. Arrivals may be called")
    said = call("simulate", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", path, "-q")
    assert said.code == 2
    assert "has no arrival times (columns not read: when)" in said.err


def test_a_clock_of_wrong_form_ends_soon(tmp_path: Path) -> None:
    """Of a million rows the first that cannot be read are shown, and no more are looked at."""
    rows = "ts,prompt_tokens,output_tokens\n" + "soon,5,6\n" * 20_000
    with pytest.raises(SpecError) as error:
        read_trace(written(tmp_path, rows))
    assert len(error.value.problems) == 21
