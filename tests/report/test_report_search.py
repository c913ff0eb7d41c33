"""What a report says of a search: what is proved, how sure the choice is, steps of every knob, prices of two kinds of
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simtune.api import load_question
from simtune.report import info, verdict
from simtune.report.neighbours import neighbours
from simtune.report.page import render
from simtune.runs.run_reader import read_run
from simtune.runs.schema import Run
from simtune.tuner.space.candidates import Candidate, PoolChoice, PoolShape

RunMaker = Callable[..., Path]

SURE = {
    "worlds": 40,
    "level": 0.9,
    "best": 0.75,
    "versus": [{"candidate": "rival", "probability": 0.8, "gap": [-0.02, None]}],
    "right": 0.8,
    "to_measure": [
        {
            "error": "gemm",
            "share": 0.6,
            "right_after": 0.93,
            "points": [
                {"operator": "gemm.bf16", "hardware": "h100", "shape": {"m": 8}, "log_sd": 0.1, "basis": "interpolated"}
            ],
            "acceptance": [],
        }
    ],
    "quantiles": [],
}


def with_others(run: Run, *changes: dict[str, Any]) -> Run:
    """The chosen plan, and others that differ from it in these columns."""
    chosen = run.candidates[0]
    others = [
        chosen.model_copy(
            update={"candidate": f"other{i}", "status": "pruned", "rank": i + 2, "reason": f"why {i}"} | c
        )
        for i, c in enumerate(changes)
    ]
    return run._replace(candidates=(chosen, *others))


def test_report_states_the_proof(make_run: RunMaker) -> None:
    goal = {"name": "goodput_per_gpu", "unit": "requests/s/GPU", "value": 10.0}
    run = read_run(make_run(objective=goal | {"bound": 10.2, "gap": 0.02}))
    sentence = verdict.proof(run.summary)
    assert sentence is not None
    assert "more than 2.0 % better under this cost model: 10.2 requests/s/GPU" in sentence
    assert sentence in render(run)
    both = read_run(make_run(objective=goal | {"bound": 10.8, "gap": 0.08, "gap_on_draw": 0.02})).summary
    assert verdict.proof(both) == (
        "No plan in this space is more than 2.0 % better on the same requests, or 8.0 % on any, under this cost model: "
        "10.8 requests/s/GPU is the best that is not ruled out."
    )
    best = read_run(make_run(objective=goal | {"bound": 10.0, "gap": 0.0})).summary
    assert verdict.proof(best) == "No plan in this space is better under this cost model."
    assert verdict.proof(read_run(make_run(objective=goal)).summary) is None


def test_report_states_confidence_in_the_choice(make_run: RunMaker) -> None:
    run = read_run(make_run(confidence=SURE))
    assert info.rivals(run.summary) == [("rival", "80.0 %", "−2.0 % to unbounded")]
    assert info.to_measure(run.summary) == [("gemm", "60.0 %", "93.0 %", "gemm.bf16 m=8 on h100 (interpolated, ±10%)")]
    assert ("P(no rival is better)", "75.0 %", "of 40 worlds") in info.key_figures(run.summary)
    page = render(run)
    assert "How sure the choice is" in page
    assert "What to measure next" in page
    assert "How sure the choice is" not in render(read_run(make_run()))


def test_neighbours_step_every_knob_of_the_search(make_run: RunMaker) -> None:
    run = read_run(make_run())
    run = with_others(
        run,
        {"attention_dp": 2, "instances": 4},
        {"expert_parallel": True},
        {"kv_dtype": "fp8"},
        {"prefix_caching": True},
        {"router": "least_tokens"},
        {"gpu": "l40s", "instances": 2},
        {"prefill": "l40s tp1-pp1-x1"},
        {"kv_dtype": "fp8", "prefix_caching": True},
    )
    chosen = run.candidates[0].model_copy(update={"attention_dp": 1, "expert_parallel": False})
    others = [c.model_copy(update={"attention_dp": c.attention_dp or 1}) for c in run.candidates[1:]]
    others = [c.model_copy(update={"expert_parallel": bool(c.expert_parallel)}) for c in others]
    run = run._replace(candidates=(chosen, *others))
    steps = {step.knob: (step.chosen, step.value, step.effect) for step in neighbours(run)}
    assert steps == {
        "attention_dp": ("1", "2", "why 0"),
        "expert_parallel": ("off", "on", "why 1"),
        "kv_dtype": ("none", "fp8", "why 2"),
        "prefix_caching": ("none", "on", "why 3"),
        "router": ("none", "least_tokens", "why 4"),
        "gpu": ("none", "l40s", "why 5"),
        "prefill": ("none", "l40s tp1-pp1-x1", "why 6"),
    }


def test_edge_notes_compare_plans_with_the_same_pools(make_run: RunMaker) -> None:
    run = with_others(
        read_run(make_run()), {"max_num_seqs": 128}, {"max_num_seqs": 512, "prefill": "p"}, {"attention_dp": 2}
    )
    assert verdict.edges(run) == ["max_num_seqs 256 is the largest of those tried (128, 256)"]
    apart = tuple(c.model_copy(update={"prefill": "p"}) for c in run.candidates)
    words = "max_num_seqs 256 of the decode pool is neither"
    assert all(words.split(" is ")[0] not in note for note in verdict.edges(run._replace(candidates=apart)))
    small = tuple(c for c in apart if c.max_num_seqs <= 256)
    assert verdict.edges(run._replace(candidates=small)) == [
        "max_num_seqs 256 of the decode pool is the largest of those tried (128, 256)"
    ]


def test_each_kind_of_gpu_has_its_own_price(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(
        "schema: simtune/study@1\nname: two\nmodel: llama-3.1-8b\nworkload: chat\nslo: {ttft_s: {p99: 1}}\n"
        "hardware:\n- {profile: h100-sxm, devices: 2}\n- {profile: l40s, devices: 4}\n",
        "utf-8",
    )
    question = load_question(str(file), ())
    each = {name: hardware.device.price_per_hour_usd for name, hardware in question.profiles.items()}
    prefill = PoolChoice(PoolShape("h100-sxm", 2, role="prefill"), 1, 64, 2048)
    decode = PoolChoice(PoolShape("l40s", 4, role="decode"), 1, 64, 2048)
    assert each["h100-sxm"]
    assert each["l40s"]
    usd = question.usd_per_hour(Candidate((prefill, decode)))
    assert usd == pytest.approx(2 * each["h100-sxm"] + 4 * each["l40s"])


def test_all_kinds_of_gpu_are_named(make_run: RunMaker, optimized: Any) -> None:
    first = optimized[0]["hardware"]
    run = read_run(make_run(other_hardware=[{**first, "name": "l40s", "device": "NVIDIA L40S"}]))
    assert info.devices(run.summary) == f"{first['device']} and NVIDIA L40S"
    page = render(run)
    assert f"on {first['device']} and NVIDIA L40S" in page
    assert "l40s: |predicted" in page
