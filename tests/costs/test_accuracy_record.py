"""The record of errors on published serving runs: complete, computed anew for one run, and in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving.record import LikeRun, OtherCardRun, PlainRun, judged, less_medians, plain_runs
from simtune.costs.accuracy_record import accuracy_record, base_name, kind_of, number_format, published_runs
from simtune.report.hardware_page import facts
from simtune.specs.catalog import load_hardware, load_model


def test_every_published_run_is_in_the_record(data_dir: Path) -> None:
    cells = accuracy_record().cells
    assert all(len(cell.tpot) == len(cell.ttft) for cell in cells)
    assert sum(len(cell.tpot) + cell.refused for cell in cells) == sum(1 for _ in plain_runs(data_dir))


@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        # What ids state, where they state it: tp4_ep4 of vLLM, tp2_ep2 with data-parallel attention of TensorRT-LLM.
        ({"tp": "4", "attention_dp": "4", "moe_ep": "16"}, (4, 1)),
        ({"tp": "1", "attention_dp": "4", "moe_ep": "2"}, (1, 2)),
        ({"tp": "1", "attention_dp": "64", "moe_ep": "8"}, (1, 8)),
        ({"tp": "1", "attention_dp": "8", "moe_ep": "8"}, (1, 8)),
        ({"tp": "1", "attention_dp": "4", "moe_ep": "1"}, (1, 4)),
        ({"tp": "4", "attention_dp": "1", "moe_ep": "4"}, (4, 1)),
        ({"tp": "8", "attention_dp": "", "moe_ep": "1"}, (8, 1)),
    ],
)
def test_sizes_are_read_as_launch_files_set_them(row: dict[str, str], ranks: tuple[int, int]) -> None:
    assert PlainRun(row).ranks == ranks


def test_no_run_takes_more_than_a_node(data_dir: Path) -> None:
    assert all(tp * groups <= 8 for tp, groups in (run.ranks for run in plain_runs(data_dir)))


@pytest.mark.parametrize("number", [0, 1])
def test_a_run_predicted_anew_is_off_as_recorded(number: int, data_dir: Path) -> None:
    runs = [run for run in plain_runs(data_dir) if run.model == "llama-3.1-70b" and run.concurrency <= 16]
    cell, errors = judged(runs[number])
    (recorded,) = (
        c for c in accuracy_record().cells if (c.model, c.kind, c.hardware, c.engine, c.preset, c.format) == cell
    )
    assert isinstance(errors, dict)
    assert round(errors["tpot"], 4) in recorded.tpot
    assert round(errors["ttft"], 4) in recorded.ttft


@pytest.mark.parametrize(
    ("engine", "prompt", "tokens"), [("trtllm", 8192, 8392), ("trtllm", 4096, 8192), ("vllm", 8192, 8192)]
)
def test_steps_hold_the_longest_prompt_where_none_is_cut(engine: str, prompt: int, tokens: int, data_dir: Path) -> None:
    """TensorRT-LLM takes no prompt beyond the tokens of a step; vLLM cuts prompts."""
    row = next(run.row for run in plain_runs(data_dir) if run.row["engine"] == engine and run.sweep)
    run = PlainRun({**row, "model": "meta-llama/Llama-3.1-70B", "gpu": "h200_sxm", "isl": str(prompt)})
    assert run.plan.pools[0].batching.max_num_batched_tokens == tokens


def test_launch_facts_are_of_the_origin_of_a_run_and_its_engine(data_dir: Path) -> None:
    rows = [run.row for run in plain_runs(data_dir) if run.model in ("llama-3.1-70b", "llama-3.1-8b")]
    for row in rows:
        run = LikeRun(row)
        launch = run.launch
        assert launch is not None
        assert launch.name.startswith("inferencex-") == run.sweep
        assert (launch.model, launch.hardware) == (run.model, run.hardware)
    llama = [LikeRun(row) for row in rows if row["engine"] == "trtllm" and row["engine_version"] == ""]
    assert {run.release for run in llama} == {"trtllm-1.0"}
    pairs = {(run.hardware, card.hardware) for run in llama if (card := OtherCardRun(run.row).launch) is not None}
    assert pairs == {("b200", "h200-sxm"), ("h200-sxm", "b200")}


def test_a_deployment_is_told_the_runs_nearest_to_it() -> None:
    model = load_model("llama-3.1-70b").model_copy(update={"weight_dtype": "fp8"})
    exact = published_runs("h200-sxm", "vllm-0.33", model)
    assert exact.startswith("h200-sxm, vllm, dense models in fp8: ")
    assert "none of this kind" not in exact
    other_format = published_runs(
        "h200-sxm-trtllm", "trtllm-1.4", model.model_copy(update={"weight_dtype": "awq_int4"})
    )
    assert "in awq_int4: none of this kind; h200-sxm, trtllm, dense models: " in other_format
    other_card = published_runs("rtx-4090", "vllm-0.33", model)
    assert "none of this kind; dense models: " in other_card
    assert "none of this kind; h200-sxm, dense models: " in published_runs("h200-sxm", None, model)


def test_formats_and_kinds_are_those_of_the_weights() -> None:
    experts = load_model("gpt-oss-120b")
    assert (kind_of(experts), number_format(experts)) == ("moe", "mxfp4")
    assert (kind_of(load_model("llama-3.1-8b")), number_format(load_model("llama-3.1-8b"))) == ("dense", "bf16")
    assert [base_name(name) for name in ("b200-sglang", "h100-sxm", "h100-sxm-trtllm")] == [
        "b200",
        "h100-sxm",
        "h100-sxm",
    ]


def test_a_card_is_shown_with_its_runs() -> None:
    shown = [text for name, text in facts(load_hardware("h200-sxm")) if name == "published runs"]
    assert len(shown) == len(list(accuracy_record().of_card("h200-sxm"))) > 2
    assert facts(load_hardware("l4"))[-1] == ("published runs", "none of this card")


def test_what_a_group_of_runs_has_in_common_is_taken_out() -> None:
    """One group is twice too slow throughout; ratios of the other are 1.2, 1.8 and 0.6."""
    errors = [(("a",), 1.0), (("a",), 1.0), (("b",), 0.2), (("b",), 0.8), (("b",), -0.4)]
    assert less_medians(errors) == pytest.approx([0.0, 0.0, 0.0, 0.5, -0.5])
