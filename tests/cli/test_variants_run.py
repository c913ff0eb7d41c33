"""A run of a study with variants: the best of each, and why no engine can be given the chosen plan."""

from __future__ import annotations

import json
from typing import Any


def test_a_run_states_what_each_variant_gives_and_why_no_engine_can_run_the_plan(desk: Any) -> None:
    desk.study(
        "  confirm: {draws: 0}\n", "  variants: [{research: {kv_policy: {kept: 0.5}}}, {}]\n  confirm: {draws: 0}\n"
    )
    said = desk.optimize("--set", "search.tp=[1]", "--set", "search.max_num_seqs=[64]")
    assert said.code == 0, said.err
    summary = json.loads((desk.folder / "run" / "summary.json").read_text())
    assert [variant["variant"] for variant in summary["variants"]] == ["kept-0.5", ""]
    why = summary["no_engine"]
    assert "research.kv_policy: is simulated only" in why
    assert "To be built in an engine: research.kv_policy (the attention backend and the KV cache manager)." in why
    assert "To be built in an engine" in (desk.folder / "run" / "report.html").read_text()
    assert "note: To be built in an engine" in said.err
    assert "best plan of each variant" in said.out
    assert "1.00 x" in said.out
    assert "as it is" in said.out
