"""A sweep is one simulation for each point, the same in any number of processes, and goes on where it was."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import simtune
from simtune.cli import main
from simtune.errors import Problem, UsageError
from simtune.report.sources import read_all
from simtune.runs import grid_sweep as sweeps
from simtune.runs.grid_sweep import Axis, Base, Point, axis, points, sweep
from simtune.runs.sweep_files import read_sweep, write_sweep
from simtune.specs.row_journal import RowJournal

BASE = Base(model="llama-3.1-8b", hardware="h100-sxm", workload="chat", requests="30")


def test_fields_and_values_are_written_as_lists_or_ranges() -> None:
    assert axis("hardware=h100-sxm,l40s") == Axis("hardware", ("h100-sxm", "l40s"))
    assert axis("rate=0.5:2:0.5").values == ("0.5", "1", "1.5", "2")
    grid = points([Axis("rate", ("1", "2")), Axis("plan.x", ("a", "b"))], zipped=False)
    assert [tuple(row.values()) for row in grid] == [("1", "a"), ("1", "b"), ("2", "a"), ("2", "b")]
    assert points([Axis("rate", ("1", "2")), Axis("seed", ("5", "6"))], zipped=True)[1] == {"rate": "2", "seed": "6"}


@pytest.mark.parametrize(
    "text", ["rate", "speed=1,2", "rate=", "rate=1:x:2", "rate=5:1:1", "rate=1:5:0", "rate=1:1e9:0.001", "rate=1:inf:1"]
)
def test_what_is_no_field_or_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--over"):
        axis(text)


def test_grids_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="names a field twice"):
        points([Axis("rate", ("1",)), Axis("rate", ("2",))], zipped=False)
    with pytest.raises(UsageError, match="lists of one length: rate has 1, seed has 2"):
        points([Axis("rate", ("1",)), Axis("seed", ("1", "2"))], zipped=True)


def test_a_point_is_the_simulation_of_the_same_question() -> None:
    row = Point(BASE, {"rate": "4", "plan.pools.0.batching.max_num_seqs": "16"}).run()
    result = simtune.simulate("chat", model="llama-3.1-8b", hardware="h100-sxm", rate_rps=4, requests=30)
    assert row["error"] is None
    assert row["rate"] == "4"
    assert row["offered_rate_rps"] == pytest.approx(4)
    assert row["ttft_p50_s"] == result.summary().metrics["ttft"].p50  # sixteen seats are enough for so few


def test_what_does_not_fit_is_a_row_and_what_is_misspelt_an_error() -> None:
    row = Point(BASE, {"model": "llama-3.1-70b", "plan.pools.0.parallelism.tp": "1"}).run()
    assert "llama-3.1-70b" in row["error"]
    misspelt = "plan.pools.0.batching.max_num_sqs"
    with pytest.raises(simtune.SpecError, match=rf"^--over: {misspelt}: unknown key, did you mean max_num_seqs"):
        Point(BASE, {misspelt: "16"}).run()
    with pytest.raises(simtune.SpecError, match=r"^--set: pools.0.batching.max_num_sqs: unknown key"):
        Point(BASE, {"rate": "4"}, (f"{misspelt}=16",)).run()
    row = Point(BASE, {"plan.pools.7.batching.max_num_seqs": "16"}).run()
    assert row["error"].startswith("--over plan.pools.7.batching.max_num_seqs=16: '7' is not an index")


def test_what_is_misspelt_is_said_from_another_process_too() -> None:
    wrong = simtune.SpecError(
        [Problem("plan.yaml", "must be at least 1", "tp", 3, 5), Problem("plan.yaml", "no such pool")]
    )
    again = pickle.loads(pickle.dumps(wrong))
    assert (str(again), again.problems) == (str(wrong), wrong.problems)


def test_points_that_are_done_are_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = RowJournal(tmp_path / "points.jsonl")
    todo = [Point(BASE, {"rate": rate}) for rate in ("2", "3")]
    first = list(sweep(todo[:1], journal, jobs=1))
    with journal.file.open("a") as file:
        file.write('{"key": "cut o')
    asked: list[Point] = []
    run = Point.run

    def noted(point: Point) -> Any:
        asked.append(point)
        return run(point)

    monkeypatch.setattr(sweeps.Point, "run", noted)
    both = list(sweep(todo, RowJournal(journal.file), jobs=1))
    assert asked == todo[1:]
    assert both[0] == first[0]
    assert len(journal.read()) == 2


def test_the_command_writes_a_table_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sw"
    words = ["sweep", "--model", "llama-3.1-8b", "--workload", "chat", "--requests", "30", "--jobs", "1"]
    words += ["--over", "hardware=h100-sxm,l40s", "--over", "rate=2,4", "--out", str(out), "--json", "-q"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    with (out / "sweep.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["hardware"] for row in written] == ["h100-sxm", "h100-sxm", "l40s", "l40s"]
    assert [float(row["ttft_p99_s"]) for row in written] == [row["ttft_p99_s"] for row in rows]
    page = (out / "sweep.html").read_text()
    assert 'id="ttft_p99_s"' in page
    assert "<script src" not in page
    again = read_sweep(out)
    assert again.keys == ("hardware", "rate")
    assert list(again.rows) == rows
    (out / "sweep.html").unlink()
    assert called("report", out) == 0
    assert (out / "sweep.html").read_text() == page
    assert called("report", out, out, "--out", tmp_path / "one.html") == 2
    assert "every sweep has a page of its own" in capsys.readouterr().err
    assert called("report", tmp_path) == 0
    index = (tmp_path / "index.html").read_text()
    assert 'href="sw/sweep.html"' in index
    assert "sweep of 4 points over hardware, rate" in index
    assert index.count('<svg class="thumbnail"') == 1


def called(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rate,error\n2,\n", "as its header"),
        ("rate,saturated,error\n", "no points"),
        ("rate,saturated,error\n2,false\n", "sweep.csv:2: 2 cells under a header of 3"),
        ("rate,saturated,num_gpus,error\n2,false,many,\n", "sweep.csv:2: num_gpus: must be a number"),
        ("rate,saturated,num_gpus,error\n2,false,nan,\n", "sweep.csv:2: num_gpus: must be a number"),
        ("rate,saturated,num_gpus,error\n2,false,1e303,\n", "sweep.csv:2: num_gpus: must be a number"),
    ],
)
def test_a_damaged_table_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "sweep.csv").write_text(text)
    with pytest.raises(simtune.SpecError, match=said):
        read_sweep(tmp_path)


def test_points_that_could_not_be_are_read_as_such(tmp_path: Path) -> None:
    (tmp_path / "sweep.csv").write_text("rate,saturated,num_gpus,error\n2,,,does not fit\n4,true,2,\n")
    assert read_sweep(tmp_path).rows == (
        {"rate": "2", "saturated": None, "num_gpus": None, "error": "does not fit"},
        {"rate": "4", "saturated": True, "num_gpus": 2, "error": None},
    )


def test_a_sweep_is_not_compared_with_runs(tmp_path: Path) -> None:
    (tmp_path / "sweep.csv").write_text("rate,saturated,error\n2,true,\n")
    with pytest.raises(UsageError, match="is a sweep"):
        read_all([tmp_path, tmp_path])


def test_a_table_is_kept_as_parquet_too(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    rows = [{"rate": "2", "saturated": False, "num_gpus": 1, "error": None}]
    parquet = pytest.importorskip("pyarrow.parquet")
    write_sweep(tmp_path / "s", rows, "page", as_parquet=True)
    assert parquet.read_table(tmp_path / "s" / "sweep.parquet").to_pylist() == rows


def test_results_are_tables_where_pandas_is() -> None:
    result = simtune.simulate("chat", model="llama-3.1-8b", hardware="h100-sxm", rate_rps=4, requests=20)
    pandas = pytest.importorskip("pandas")
    table = result.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert table["ttft_s"].tolist() == result.ttft_s.tolist()
    assert len(table) == len(result.stream)
    assert "ttft p50, p99" in result._repr_html_()


def test_a_point_is_another_one_when_a_file_that_it_rests_on_has_changed(tmp_path: Path) -> None:
    """A folder, and a file that a file names: a sweep that went on had kept the earlier numbers."""
    load, trace, card = tmp_path / "load.yaml", tmp_path / "own.csv", tmp_path / "card"
    load.write_text("trace: own.csv\n")
    trace.write_text("1")
    card.mkdir()
    (card / "profile.yaml").write_text("a")
    point = Point(Base(workload=str(load), hardware=str(card)), {})
    names = [point.name]
    for file in (trace, card / "profile.yaml"):
        file.write_text("2")
        names.append(point.name)
    assert len(set(names)) == 3


def test_a_sweep_of_which_no_point_can_be_leaves_no_folder(tmp_path: Path) -> None:
    out, words = tmp_path / "out", ("--model", "./none.yaml", "--hardware", "h100-sxm", "--workload", "chat")
    with pytest.raises(SystemExit):
        main(["sweep", *words, "--over", "rate=2,4", "--jobs", "1", "--out", str(out)])
    assert list(tmp_path.iterdir()) == []


def test_a_setting_of_no_spec_is_refused() -> None:
    base = Base("llama-3.1-8b", "h100-sxm", "chat")
    row = Point(base, {}, ("seed=3",)).run()
    assert row["error"] == "--set seed=3: begin with model, hardware, workload, plan, as in plan.router.kind=..."


def test_a_name_that_is_too_long_is_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat", "--over", "rate=2")
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *words, "--out", "x" * 5000])
    assert ended.value.code == 2
    assert "xxxx...: the name is too long; give a shorter one" in capsys.readouterr().err
