"""Stored figures of benchmarks: compared by their noise, kept with their circumstances, said when they get worse."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import machine, results
from benchmarks.results import Better, Circumstances, Figure, Recorder, Stored
from benchmarks.sim import test_four_loads
from tests.docs import reading

ROOT = Path(__file__).resolve().parents[2]
HERE = Circumstances(commit="a1b2c3", date="2026-01-02", python="CPython 3.12.1", processor="some processor")


def figure(value: float, better: Better = "lower", noise: float = 0.0, unit: str = "x") -> Figure:
    return Figure(value, unit, better, noise)


def stored(**figures: Figure) -> dict[str, Stored]:
    return {name: Stored(found, HERE) for name, found in figures.items()}


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (figure(10), figure(10.05), "same"),  # less than a per cent
        (figure(10), figure(10.2), "REGRESSION"),
        (figure(10), figure(9.8), "better"),
        (figure(10, "higher"), figure(9.8, "higher"), "REGRESSION"),
        (figure(10, "higher"), figure(10.2, "higher"), "better"),
        (figure(10, noise=0.3), figure(10.5, noise=0.3), "same"),  # the noise of both sides
        (figure(10, noise=0.2), figure(10.5, noise=0.2), "REGRESSION"),
        (figure(34.68, "same"), figure(35.2, "same"), "changed"),
        (figure(10), figure(10, unit="s"), "changed"),
        (figure(0), figure(0), "same"),
        (None, figure(1), "new"),
        (figure(1), None, "absent"),
    ],
)
def test_a_change_beyond_noise_has_a_direction(before: Figure | None, now: Figure | None, verdict: str) -> None:
    assert results.verdict(before, now) == verdict


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(0, 10), st.sampled_from(["higher", "lower"]))
def test_better_one_way_is_worse_the_other(a: float, b: float, noise: float, better: Better) -> None:
    def verdict(before: float, now: float, way: Better) -> str:
        return results.verdict(figure(before, way, noise), figure(now, way, noise))

    turned: Better = "lower" if better == "higher" else "higher"
    opposite = {"better": "REGRESSION", "REGRESSION": "better", "same": "same"}
    assert verdict(a, b, turned) == opposite[verdict(a, b, better)]


def test_what_must_not_pass_unseen() -> None:
    before = stored(
        slower=figure(1, noise=0.1), quicker=figure(1), fact=figure(3, "same"), gone=figure(1), noisy=figure(1, noise=2)
    )
    now = {
        "slower": figure(2),
        "quicker": figure(0.5),
        "fact": figure(4, "same"),
        "noisy": figure(2),
        "fresh": figure(1),
    }
    rows = results.compare(before, now)
    assert [row.name for row in rows] == sorted({*before, *now})
    assert {row.name: row.verdict for row in rows} == {
        "slower": "REGRESSION",
        "quicker": "better",
        "fact": "changed",
        "gone": "absent",
        "noisy": "same",
        "fresh": "new",
    }
    assert [row.name for row in results.failed(rows)] == ["fact", "slower"]
    assert {row.name: row.change for row in rows if row.change is not None}["slower"] == 1.0


def test_the_table_shows_both_sides_and_counts_files_that_were_not_run() -> None:
    before = stored(
        **{
            "sim/a: one": figure(2, noise=0.1),
            "sim/a: two": figure(3),
            "costs/b: one": figure(1),
            "costs/b: two": figure(1),
        }
    )
    header, *rows, rest = results.table(results.compare(before, {"sim/a: one": figure(4, noise=0.2)}))
    assert header.split() == ["figure", "stored", "now", "change", "verdict"]
    assert rows[0].split() == [
        "sim/a:", "one", "2", "±", "0.1", "x", "4", "±", "0.2", "x", "+100.0%", "REGRESSION"
    ]  # fmt: skip
    assert rows[1].split() == ["sim/a:", "two", "3", "x", "-", "-", "absent"]
    assert rest == "absent: 2 stored figures of files that were not run"


def test_other_machines_are_named() -> None:
    before = stored(a=figure(1), b=figure(1))
    assert results.elsewhere(before, ["a"], HERE) == []
    assert results.elsewhere(before, ["a"], dataclasses.replace(HERE, commit="d4e5f6", date="2026-03-04")) == []
    (line,) = results.elsewhere(before, ["a", "b"], dataclasses.replace(HERE, python="CPython 3.13.0"))
    assert "CPython 3.12.1" in line
    assert "CPython 3.13.0" in line
    assert results.elsewhere(before, ["c"], dataclasses.replace(HERE, processor="another")) == []


def test_the_middle_of_repeats_and_their_spread() -> None:
    assert results.middle([2.0]) == (2.0, 0.0)
    samples = np.random.default_rng(0).normal(10, 1, 10_000)
    median, noise = results.middle(samples.tolist())
    assert median == pytest.approx(10, abs=0.05)
    assert noise == pytest.approx(1.28, abs=0.05)  # 10th to 90th percentile of a normal law
    assert results.middle([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 100])[1] == 0.0  # one disturbed repeat is not the noise


def test_figures_are_kept_with_their_circumstances(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert results.read(file) == {}
    later = dataclasses.replace(HERE, commit="d4e5f6", date="2026-03-04")
    kept = {"a": Stored(figure(1), HERE), "c": Stored(figure(2, "higher", 0.5), later), "b": Stored(figure(3), HERE)}
    results.write(file, kept)
    assert results.read(file) == kept
    runs = json.loads(file.read_text())["runs"]
    assert [(run["commit"], list(run["figures"])) for run in runs] == [("a1b2c3", ["a", "b"]), ("d4e5f6", ["c"])]
    file.write_text('{"schema": "other@1"}')
    with pytest.raises(ValueError, match="schema"):
        results.read(file)


def test_a_figure_is_finite_and_has_a_direction() -> None:
    for value, noise in ((float("nan"), 0.0), (1.0, float("inf")), (1.0, -1.0)):
        with pytest.raises(ValueError, match="finite"):
            Figure(value, "x", "lower", noise)
    with pytest.raises(ValueError, match="higher, lower or same"):
        Figure(1.0, "x", "less", 0.0)  # type: ignore[arg-type]


def test_names_begin_with_the_file_and_are_taken_once() -> None:
    figures: dict[str, Figure] = {}
    record = Recorder(Path("benchmarks/sim/test_scale.py"), figures)
    record("chat", 1.23456789, "s", "lower", 0.123456)
    record.samples("ratio", [1.0, 2.0, 3.0], "x", "higher")
    assert figures["sim/scale: chat"] == Figure(1.23457, "s", "lower", 0.12)
    assert figures["sim/scale: ratio"] == Figure(2.0, "x", "higher", 0.8)
    with pytest.raises(ValueError, match="twice"):
        record("chat", 2.0, "s", "lower")


def test_time_is_scaled_by_the_unit_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "unit_s", lambda: 0.25)  # a machine twice as fast as the one times are given for
    assert machine.scaled(3.0) == 6.0
    timed = machine.repeated(lambda: None, rounds=4, clock=iter(range(8)).__next__)
    assert timed.seconds == [1, 1, 1, 1]
    assert timed.scaled == [2.0] * 4
    calls: list[int] = []
    quick = machine.per_call(lambda: calls.append(1), rounds=2, at_least_s=1e-3)
    assert len(quick.seconds) == 2
    assert 0 < quick.seconds[0] < 1e-3
    assert quick.scaled == [2 * s for s in quick.seconds]


def test_circumstances_of_this_checkout() -> None:
    here = machine.circumstances(ROOT)
    assert here.python.endswith(".".join(map(str, sys.version_info[:2])) + f".{sys.version_info.micro}")
    assert len(here.date) == 10
    assert here.processor


# --- a whole session --------------------------------------------------------------------------------------

BENCHMARK = """
import pytest
pytestmark = pytest.mark.benchmark_only

def test_of_time(record):
    record("time", {time}, "s", "lower", noise=0.1)
    assert {time} < 100

def test_of_error(record):
    record("error", 5.0, "% off", "lower")

def test_skipped(record):
    record("never", 1.0, "x", "lower")
    pytest.skip("nothing to measure")
"""


def session(folder: Path, time: float, *options: str) -> tuple[int, str]:
    (folder / "test_made_up.py").write_text(BENCHMARK.format(time=time))
    command = [sys.executable, "-m", "pytest", str(folder / "test_made_up.py"), "-c", str(ROOT / "pyproject.toml")]
    command += ["-p", "benchmarks.conftest", "-m", "benchmark_only"]
    command += [word for name in ("cacheprovider", "xdist", "hypothesispytest") for word in ("-p", f"no:{name}")]
    command += ["--results", str(folder / "results.json"), *options]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    return done.returncode, done.stdout


def test_a_session_stores_compares_and_fails_on_a_regression(tmp_path: Path) -> None:
    file, name = tmp_path / "results.json", f"{tmp_path.name}/made_up"
    code, out = session(tmp_path, 2.0, "--store")
    assert code == 0
    assert "2 figures are stored" in out
    assert set(results.read(file)) == {f"{name}: time", f"{name}: error"}
    before = file.read_bytes()

    code, out = session(tmp_path, 3.0)
    assert code == 1
    assert f"REGRESSION: {name}: time" in out

    code, out = session(tmp_path, 200.0, "--store")  # a session with a failure stores nothing
    assert code == 1
    assert f"{name}: time" in out
    assert "absent" in out
    assert file.read_bytes() == before


# --- what is stored ---------------------------------------------------------------------------------------


def test_stored_figures_are_of_benchmarks_that_exist() -> None:
    for name in results.read(ROOT / "benchmarks" / "results.json"):
        folder, _, stem = name.partition(":")[0].partition("/")
        assert (ROOT / "benchmarks" / folder / f"test_{stem}.py").is_file(), name


def test_every_benchmark_records_something() -> None:
    files = sorted((ROOT / "benchmarks").rglob("test_*.py"))
    assert files
    assert [file.name for file in files if "record" not in file.read_text(encoding="utf-8")] == []


# --- the document -----------------------------------------------------------------------------------------

DOCUMENT = reading.text(reading.DOCS / "benchmarks.md")


def test_the_document_lists_every_benchmark() -> None:
    listed = [
        reading.quoted(row["benchmark"])[0] for table in reading.tables(DOCUMENT) for row in table if "benchmark" in row
    ]
    files = (ROOT / "benchmarks").rglob("test_*.py")
    assert listed == sorted(str(file.relative_to(ROOT)) for file in files)


def test_the_document_explains_every_verdict() -> None:
    explained = [
        reading.quoted(row["verdict"])[0] for table in reading.tables(DOCUMENT) for row in table if "verdict" in row
    ]
    assert sorted(explained) == sorted(get_args(results.Verdict))


def test_numbers_of_the_document_are_those_of_the_code() -> None:
    words = " ".join(DOCUMENT.split())
    assert f"than {results.LEAST:.0%}".replace("%", " %") in words
    assert "ten million turns" in words
    assert (machine.UNIT_TURNS, machine.UNIT_S, machine.SCALED) == (10_000_000, 0.5, "scaled s")
    assert (test_four_loads.PAIRS, test_four_loads.MOST) == (9, 1.03)
    assert set(test_four_loads.LOADS) == {"chat", "code", "reasoning", "chain"}
