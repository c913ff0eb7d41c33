"""A run of a study with variants: the best of each, and why no engine can be given the chosen plan."""

from __future__ import annotations

import json
from typing import Any

from tests.docs.reading import ROOT


def test_a_run_states_what_each_variant_gives_and_why_no_engine_can_run_the_plan(desk: Any) -> None:
    layered = "{batching: {policy: layered-prefill}}"
    desk.study(
        "  confirm: {draws: 0}\n",
        f"  variants: [{{research: {{kv_policy: {{kept: 0.5}}}}}}, {{}}, {layered}]\n  confirm: {{draws: 0}}\n",
    )
    said = desk.optimize("--set", "search.tp=[1]", "--set", "search.max_num_seqs=[64]")
    assert said.code == 0, said.err
    summary = json.loads((desk.folder / "run" / "summary.json").read_text())
    assert [variant["variant"] for variant in summary["variants"]] == ["kept-0.5", "", "policy-layered-prefill"]
    *searched, refused = summary["variants"]
    assert not any(variant.get("reason") for variant in searched)
    assert refused["reason"].startswith("policy layered-prefill never cuts prompts: max_num_batched_tokens")
    assert f"none of policy-layered-prefill: {refused['reason']}" in said.out
    why = summary["no_engine"]
    assert "research.kv_policy: is simulated only" in why
    assert "To be built in an engine: research.kv_policy (the attention backend and the KV cache manager)." in why
    assert "To be built in an engine" in (desk.folder / "run" / "report.html").read_text()
    assert "note: To be built in an engine" in said.err
    assert "best plan of each variant" in said.out
    assert "1.00 x" in said.out
    assert "as it is" in said.out


def test_a_run_states_the_score_of_each_checkpoint_and_leaves_out_those_below_the_floor(desk: Any) -> None:
    model = (ROOT / "simtune" / "models" / "llama-3.1-8b.yaml").read_text()
    (desk.folder / "quantised.yaml").write_text(model.replace("weight_dtype: bf16", "weight_dtype: fp8"))
    fragments = "{}, {model: quantised.yaml, score: 68.0}, {name: poor, model: quantised.yaml, score: 60}"
    desk.study(
        "  confirm: {draws: 0}\n",
        f"  variants: [{fragments}]\n  confirm: {{draws: 0}}\nscore: 68.4\nconstraints: [score >= 67]\n",
    )
    said = desk.optimize("--set", "search.tp=[1]", "--set", "search.max_num_seqs=[64]")
    assert said.code == 0, said.err
    summary = json.loads((desk.folder / "run" / "summary.json").read_text())
    assert [(v["variant"], v["score"], v["reached"] is None) for v in summary["variants"]] == [
        ("", 68.4, False),
        ("quantised", 68.0, False),
        ("poor", 60.0, True),
    ]
    assert "constraint `score >= 67`" in said.out
    assert "score" in next(line for line in said.out.splitlines() if "of the first" in line)
    assert "quantised.yaml" in (desk.folder / "run" / "plan.yaml").read_text()
