"""Parquet without pyarrow is refused before anything is simulated, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import call

LOAD = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat", "--requests", "20")


@pytest.mark.usefixtures("no_pyarrow")
def test_a_sweep_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    answer = call("sweep", *LOAD, "--over", "rate=2,4", "--out", tmp_path / "out", "--parquet", "--jobs", 1)
    assert answer.code == 2
    assert "--parquet needs pyarrow; pip install 'simtune[parquet]'" in answer.err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_pyarrow")
def test_requests_are_refused_before_they_are_simulated(tmp_path: Path) -> None:
    answer = call("simulate", *LOAD, "--out", tmp_path / "out", "--per-request", tmp_path / "requests.parquet")
    assert answer.code == 2
    assert "requests.parquet: Parquet needs pyarrow; pip install 'simtune[parquet]', or name a .csv" in answer.err
    assert not (tmp_path / "out").exists()
