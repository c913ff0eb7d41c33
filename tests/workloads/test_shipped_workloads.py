"""The shipped workloads are what the published traces say, computed by `tests.workloads.quantiles`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simtune.errors import UsageError
from simtune.specs.traces import read_trace
from simtune.specs.workload import Poisson, Workload
from simtune.workload.requests import build_stream
from tests.workloads.quantiles import LEVELS, quantile_workload

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = [("chat", "azure_2023_conv.csv.gz"), ("code", "azure_2023_code.csv.gz")]


@pytest.mark.parametrize(("name", "trace_file"), SHIPPED)
def test_a_shipped_workload_is_computed_from_its_trace(data_dir: Path, name: str, trace_file: str) -> None:
    shipped = Workload.from_file(ROOT / "simtune/workloads" / f"{name}.yaml")
    trace = read_trace(data_dir / "traces" / trace_file)
    assert shipped.source is not None
    assert quantile_workload(trace, name, shipped.source) == shipped
    for word in (
        "Azure/AzurePublicDataset",
        f"{len(trace)} requests",
        "CC-BY-4.0",
        "Patel",
        "Splitwise",
        "ISCA 2024",
    ):
        assert word in shipped.source


@pytest.mark.parametrize(("name", "trace_file"), SHIPPED)
def test_its_requests_are_like_those_of_the_trace(data_dir: Path, name: str, trace_file: str) -> None:
    shipped = Workload.from_file(ROOT / "simtune/workloads" / f"{name}.yaml")
    trace = read_trace(data_dir / "traces" / trace_file)
    stream = build_stream(shipped, None, requests=200_000, seed=0)
    for drawn, observed in (
        (stream.prompt_tokens, trace.prompt_tokens),
        (stream.output_tokens, trace.output_tokens),
    ):
        assert drawn.mean() == pytest.approx(observed.mean(), rel=0.02)
        for level in (0.1, 0.5, 0.9, 0.99):
            assert np.quantile(drawn, level) == pytest.approx(np.quantile(observed, level), rel=0.02, abs=1)
        assert (drawn.min(), drawn.max()) >= (observed.min(), 0)
        assert drawn.max() <= observed.max()
    assert isinstance(shipped.arrivals, Poisson)
    assert shipped.arrivals.rate_rps == trace.rate_rps


def test_a_trace_without_times_has_no_mean_rate(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n3772,54\n2015,156\n")
    with pytest.raises(UsageError, match="no arrival times"):
        quantile_workload(read_trace(tmp_path / "t.csv"), "w", "s")


def test_the_levels_run_from_0_to_1_and_are_finest_in_the_tail() -> None:
    steps = np.diff(LEVELS)
    assert (LEVELS[0], LEVELS[-2], LEVELS[-1]) == (0.0, 0.999, 1.0)
    assert (steps > 0).all()
    assert steps[-1] == pytest.approx(0.001)
    assert (np.diff(steps) < 1e-9).all()
