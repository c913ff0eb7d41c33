"""Where a step's time goes, as a run directory tells it."""

from __future__ import annotations

import json
from pathlib import Path


def test_every_part_of_a_decode_step_is_accounted_for(tiny_run: Path) -> None:
    summary = json.loads((tiny_run / "summary.json").read_text())
    decode, mixed = summary["breakdown"]
    parts = {part["operator"]: part for part in decode["parts"]}
    assert {"gemm", "decode_attention", "elementwise", "head", "sampling"} <= set(parts)
    assert "prefill_attention" not in parts
    assert "prefill_attention" in {part["operator"] for part in mixed["parts"]}
    assert parts["gemm"]["provenance"] == parts["head"]["provenance"] == "published-tables"
    assert parts["sampling"]["provenance"] == "data-sheet"
    assert sum(p["seconds"] for p in mixed["parts"]) > sum(p["seconds"] for p in decode["parts"])
