"""A plan that leaves devices of the study idle says how many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

STUDY = """schema: simtune/study@1
name: idle
model: llama-3.2-1b
hardware: [{profile: h100-sxm, devices: 3}]
workload: chat
slo: {ttft_s: {p90: 1.0}, tpot_s: {p90: 0.05}}
objective: goodput_per_gpu
search: {tp: [2], max_num_seqs: [64], max_num_batched_tokens: [2048], requests: 100, confirm: {draws: 0}}
"""


def test_devices_that_stay_idle_are_named(call: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    said = call("optimize", tmp_path / "study.yaml", "--out", tmp_path / "run", "--jobs", "1")
    assert said.code == 0, said.err
    assert "1 of the 3 h100-sxm of the study stay idle under this plan\n" in said.out
