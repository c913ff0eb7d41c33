"""Results that hold totals are named, with the option of the very tool that writes requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import call

BENCH = Path(__file__).parent / "data" / "f08-totals-only" / "bench.jsonl"


def test_sglang_is_told_from_vllm(tmp_path: Path) -> None:
    assert "only totals are here; run sglang.bench_serving with --output-details" in call("workload", BENCH).err
    first = json.loads(BENCH.read_text().splitlines()[0])
    vllm = {key: value for key, value in first.items() if key != "sharegpt_output_len"} | {"backend": "vllm"}
    (tmp_path / "vllm.json").write_text(json.dumps(vllm))
    assert "run vllm bench serve with --save-detailed" in call("workload", tmp_path / "vllm.json").err


@pytest.mark.parametrize(
    ("keys", "title"),
    [
        (("load_summary", "successes", "failures"), "inference-perf's results"),
        (("engine", "world_info", "request_info", "performance"), "trtllm-bench's report"),
    ],
)
def test_reports_of_other_tools(tmp_path: Path, keys: tuple[str, ...], title: str) -> None:
    (tmp_path / "report.json").write_text(json.dumps({key: {} for key in keys}))
    result = call("workload", tmp_path / "report.json")
    assert result.code == 2
    assert f"looks like {title}: it holds totals and no requests; state a workload" in result.err
