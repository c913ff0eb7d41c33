"""Steps that are kept for timelines take little memory, and nothing is made of them that is not written."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import simtune.runs.contents
from simtune.api import load_specs, set_up
from simtune.results.recorded_steps import COUNTS, RecordedSteps
from simtune.results.result import Result
from tests.cli.conftest import call


def run(requests: int, *, record: bool) -> Result:
    specs = load_specs("llama-3.1-8b", "h100-sxm", "chat")
    return set_up(specs, rate_rps=12.0, requests=requests).run(record=record)


@pytest.fixture(scope="module")
def records() -> RecordedSteps:
    return run(1_000, record=True).outcome.records


def test_items_and_columns_say_the_same(records: RecordedSteps) -> None:
    items = list(records)
    assert len(items) == len(records) > 1_000
    for name in COUNTS:
        assert records.column(name).tolist() == [getattr(item, name) for item in items]
    assert records.chunks().tolist() == [[i, *chunk] for i, item in enumerate(items) for chunk in item.chunks]
    assert records.preempted().tolist() == [[i, lost] for i, item in enumerate(items) for lost in item.preempted]
    assert items[-1] == records[-1]
    assert items[3:9:2] == records[3:9:2]
    assert sum(item.prefill_tokens for item in items) == sum(tokens for *_, tokens in records.chunks().tolist())


def test_no_steps() -> None:
    empty = RecordedSteps()
    assert (len(empty), list(empty), empty.column("start").tolist()) == (0, [], [])
    assert (empty.chunks().shape, empty.preempted().shape) == ((0, 3), (0, 2))
    with pytest.raises(IndexError):
        empty[0]


def test_a_jump_takes_little_more_than_its_numbers(records: RecordedSteps) -> None:
    """Ten numbers of 8 bytes, two ends, and 16 bytes for a chunk; as objects of Python they took 600."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = run(1_000, record=True).outcome.records
    taken = tracemalloc.get_traced_memory()[0]
    size = len(kept) * 8 * (len(COUNTS) + 2) + 16 * len(kept.chunks())
    del kept
    freed = taken - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert before < taken
    assert freed < 1.3 * size + 200_000
    assert np.array_equal(records.column("core"), run(1_000, record=True).outcome.records.column("core"))


@pytest.mark.parametrize(
    ("part", "maker", "file"),
    [
        ("requests", "requests_csv", "requests.csv"),
        ("trace", "trace_file", "trace.json.gz"),
        ("swimlanes", "swimlanes_of", "swimlanes.json.gz"),
    ],
)
def test_what_is_left_out_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, maker: str, file: str
) -> None:
    monkeypatch.setattr(simtune.runs.contents, maker, lambda result: pytest.fail("it is not to be made"))
    load = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat", "--requests", "100")
    said = call("simulate", *load, "--rate", 4, "--out", tmp_path / "run", "--leave-out", part, "-q")
    assert said.code == 0
    assert not (tmp_path / "run" / file).exists()
