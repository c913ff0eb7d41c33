"""simtune speculate: a schedule for drafts without a study, and studies that ask for drafts."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from simtune.emit import ENGINES

Call = Callable[..., Any]

EAGLE = "{kind: eagle, checkpoint: org/head, draft_vocab_size: 32000}"
ASKED = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--acceptance", "eagle3-llama-3.1-8b")


def test_the_table_has_a_cell_for_every_batch_and_context(call: Call) -> None:
    said = call("speculate", *ASKED, "--drafter", EAGLE)
    assert (said.code, said.err) == (0, "")
    rows = [line for line in said.out.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512"]
    assert rows[0].count("3 ×") == 6, "all three that were measured, everywhere"
    assert rows[-1].count(" - ") == 5, "512 sequences fit only where they are short"
    assert "gain, all cells alike:" in said.out
    line = next(line for line in said.out.splitlines() if line.startswith('  {"method"'))
    assert ENGINES["vllm"].problems(json.loads(line)) == []


def test_speculate_json_equals_the_table(call: Call) -> None:
    facts = call("speculate", *ASKED, "--drafter", EAGLE, "--json").json
    assert facts["batches"][-1] == 512
    assert facts["contexts"] == [512, 1024, 2048, 4096, 8192, 16384]
    gains = [cell["gain"] for row in facts["cells"] for cell in row]
    assert min(gains) >= 1
    assert max(gains) > facts["gain"] >= facts["fixed"]["gain"] >= 1
    for engine, name in zip(facts["engines"], ("vllm", "sglang", "tensorrt-llm"), strict=True):
        assert ENGINES[name].problems(engine["settings"]) == []
        assert engine["gain"] <= facts["gain"]
        assert engine["loss"] == pytest.approx(1 - engine["gain"] / facts["gain"])
    kept = [p["tokens"] + p["wasted"] for p in facts["by_batch"]]
    assert kept == pytest.approx([p["draft_tokens"] + 1 for p in facts["by_batch"]]), "kept or wasted, and no third"


def test_heads_with_ranks_get_trees(call: Call) -> None:
    facts = call(
        "speculate", "--model", "vicuna-7b", "--hardware", "a100-sxm-80g", "--acceptance", "medusa-vicuna-7b",
        "--drafter", "{kind: medusa, heads: 4}", "--json",
    ).json  # fmt: skip
    sizes = [row[0]["short"] for row in facts["cells"]]
    assert sizes[0].startswith("T")
    assert sizes[-1] in ("off", "1", "2")
    nodes = {tuple(node["path"]): node["probability"] for node in facts["draft"]["nodes"]}
    assert all(path[:-1] in nodes or len(path) == 1 for path in nodes)
    assert all(p <= nodes.get(path[:-1], 1) for path, p in nodes.items())
    assert "checkpoint" in facts["engines"][0]["why"]
    assert "no medusa drafter" in facts["engines"][1]["why"]


def test_a_page_is_written_once(call: Call, desk: Any) -> None:
    said = call("speculate", *ASKED, "--drafter", "eagle3", "--html", "page.html")
    assert (said.code, said.err) == (0, "wrote page.html\n")
    assert "What engines can be told" in (desk.folder / "page.html").read_text()
    message = desk.refused(call, "speculate", *ASKED, "--drafter", "eagle3", "--html", "page.html")
    assert message == "page.html: exists already; give --force to replace it"


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        pytest.param("egale3", "--drafter: drafter: unknown kind 'egale3'", id="unknown"),
        pytest.param("medusa", "--drafter: drafter.heads: is required and missing", id="needs more"),
        pytest.param("{kind: eagle, draft_vocab_sise: 3}",
                     "--drafter: drafter.draft_vocab_sise: unknown key, did you mean draft_vocab_size?", id="key"),
        pytest.param("{kind: draft_model, model: vicuna-7b}", "its vocabulary of 32000 is not the 128256", id="vocab"),
        pytest.param("{kind: draft_model, model: gone}", "no model is called 'gone'", id="draft model"),
    ],
)  # fmt: skip
def test_impossible_drafter_is_refused(call: Call, desk: Any, drafter: str, message: str) -> None:
    assert message in desk.refused(call, "speculate", *ASKED, "--drafter", drafter)


def test_missing_acceptance_table_is_refused(call: Call, desk: Any) -> None:
    message = desk.refused(call, "speculate", *ASKED[:4], "--drafter", "eagle3", "--acceptance", "./gone.yaml")
    assert "gone.yaml" in message


def test_a_target_that_does_not_fit(call: Call, desk: Any) -> None:
    asked = ("--model", "llama-3.1-70b", "--hardware", "h100-sxm", "--drafter", "eagle3")
    message = desk.refused(call, "speculate", *asked, "--acceptance", "eagle3-llama-3.1-8b", code=3)
    assert "GiB" in message


# --- in a plan --------------------------------------------------------------------------------------------

PLAN = """\
schema: simtune/plan@1
name: drafting
model: vicuna-7b
pools:
- hardware: a100-sxm-80g
  instances: 1
  batching: {max_num_seqs: 16, max_num_batched_tokens: 2048}
  speculation:
    drafter: {kind: eagle, checkpoint: org/head}
    acceptance: medusa-vicuna-7b
    scheme: {kind: dynamic_tree, steps: 2, topk: 2, tokens: 4}
"""


LOAD = """\
schema: simtune/workload@1
name: load
requests: 50
arrivals: {kind: poisson, rate_rps: 1}
prompt: {kind: fixed, tokens: 200}
output: {kind: fixed, tokens: 100}
"""


def simulated(call: Call, desk: Any, old: str = "", new: str = "") -> dict[str, str]:
    """Texts of the engine files of a simulated plan."""
    desk.write("plan.yaml", PLAN.replace(old, new))
    desk.write("load.yaml", LOAD)
    said = call("simulate", "--plan", "plan.yaml", "--workload", "./load.yaml", "--out", "run")
    assert said.code == 0, said
    folder = desk.folder / "run" / "engine"
    return {file.name: file.read_text() for file in folder.iterdir()} if folder.exists() else {}


def test_a_plan_with_a_tree_tells_engines_that_draft_trees(call: Call, desk: Any) -> None:
    files = simulated(call, desk)
    assert sorted(files) == ["sglang-speculation.yaml", "tensorrt-llm-speculation.yaml"]
    told = yaml.safe_load(files["sglang-speculation.yaml"])
    assert ENGINES["sglang"].problems(told) == []
    assert told["speculative-num-draft-tokens"] == 5, "SGLang counts the root"
    summary = json.loads((desk.folder / "run" / "summary.json").read_text())["speculation"]
    written = (desk.folder / "run" / "report.html").read_text()
    assert "tokens per round" in written
    assert f"{summary['tokens_per_round']:.2f}" in written


def test_a_plan_with_a_chain_tells_vllm(call: Call, desk: Any) -> None:
    files = simulated(call, desk, "{kind: dynamic_tree, steps: 2, topk: 2, tokens: 4}", "{kind: chain, tokens: 2}")
    assert sorted(files) == ["dynamo.yaml", "launch.sh", "vllm-mixed.yaml"]
    told = json.loads(yaml.safe_load(files["vllm-mixed.yaml"])["speculative-config"])
    assert ENGINES["vllm"].problems(told) == []


@pytest.mark.parametrize(
    ("scheme", "gpus"),
    [
        ("{kind: dsi, tokens: 2, replicas: 3}", 4),
        ("{kind: frontier, tokens: 4, chunks: 2, draft_share: 0.4, verify_share: 0.6}", 1),
    ],
)
def test_plan_with_drafts_that_no_engine_supports_runs(call: Call, desk: Any, scheme: str, gpus: int) -> None:
    plan = PLAN.replace("{kind: eagle, checkpoint: org/head}", "{kind: draft_model, model: vicuna-7b}")
    files = simulated(call, desk, PLAN, plan.replace("{kind: dynamic_tree, steps: 2, topk: 2, tokens: 4}", scheme))
    assert files == {"none.txt": "No engine settings: no engine has settings for its drafts.\n"}
    summary = json.loads((desk.folder / "run" / "summary.json").read_text())
    assert (summary["num_gpus"], summary["completed"]) == (gpus, 50)
    assert summary["speculation"]["tokens_per_round"] > 1
    assert call("check", "plan.yaml").code == 0


# --- in a study -------------------------------------------------------------------------------------------

DRAFTER = """\
speculation:
  - drafter: {kind: eagle, checkpoint: org/head, draft_vocab_size: 32000}
    acceptance: eagle3-llama-3.1-8b
"""


def with_drafter(desk: Any, text: str = DRAFTER) -> None:
    desk.study("search:\n", text + "search:\n")


def test_a_study_with_a_drafter_tries_both_and_emits_what_it_chose(desk: Any) -> None:
    with_drafter(desk)
    assert desk.optimize("--set", "search.tp=[1]").code == 0
    run = desk.folder / "run"
    with (run / "candidates.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [bool(row["speculation"]) for row in rows].count(True) == len(rows) / 2
    assert all(
        row["speculation"].startswith("eagle3: chain of ") for row in rows if row["candidate"].endswith("-eagle3")
    )
    plan = yaml.safe_load((run / "plan.yaml").read_text())
    scheme = plan["pools"][0]["speculation"]["scheme"]
    told = json.loads(yaml.safe_load((run / "engine" / "vllm-mixed.yaml").read_text())["speculative-config"])
    assert ENGINES["vllm"].problems(told) == []
    assert told["num_speculative_tokens"] == scheme.get("max_tokens", scheme.get("tokens"))
    sglang = yaml.safe_load((run / "engine" / "sglang-speculation.yaml").read_text())
    assert ENGINES["sglang"].problems(sglang) == []
    other = yaml.safe_load((run / "engine" / "tensorrt-llm-speculation.yaml").read_text())["speculative_config"]
    assert ENGINES["tensorrt-llm"].problems(other) == []
    facts = json.loads((run / "summary.json").read_text())["draft_schedule"]
    assert facts["drafter"] == "eagle3"
    assert 'id="speculation-gains"' in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(DRAFTER.replace("acceptance: eagle3-llama-3.1-8b", "acceptance: ./gone.yaml"), "gone.yaml",
                     id="no acceptance"),
        pytest.param(DRAFTER.replace("checkpoint: org/head, ", ""), "name the `checkpoint` that vLLM loads",
                     id="no checkpoint"),
        pytest.param(DRAFTER.replace("eagle3-llama-3.1-8b", "medusa-vicuna-7b")
                     + "    scheme: {kind: static_tree, nodes: [[1], [2]]}\n",
                     "vLLM has no setting for a static_tree scheme", id="a tree"),
        pytest.param(DRAFTER.replace("{kind: eagle, checkpoint: org/head, draft_vocab_size: 32000}",
                                     "{kind: draft_model, model: llama-3.2-1b}")
                     + "    scheme: {kind: pearl, tokens: 3}\n",
                     "vLLM has no setting for a pearl scheme: it drafts and verifies in turn", id="beside the target"),
        pytest.param(DRAFTER
                     + "    scheme: {kind: frontier, tokens: 3, chunks: 2, draft_share: 0.4, verify_share: 0.6}\n",
                     "vLLM has no setting for a frontier scheme: it drafts and verifies in turn", id="in chunks"),
        pytest.param(DRAFTER + "    scheme: {kind: pearl, tokens: 3}\n",
                     "speculation.0.scheme: scheme pearl drafts while the target verifies", id="a head beside it"),
        pytest.param(DRAFTER + "    scheme: {kind: chain, tokens: 5}\n",
                     "drafter eagle3: drafts are 5 tokens deep, and the rates are known for 3", id="too deep"),
        pytest.param(DRAFTER + DRAFTER.partition("\n")[2],
                     "study.yaml:9:1: speculation: 2 drafters are called eagle3; give each a name of its own",
                     id="two of a name"),
        pytest.param(DRAFTER.replace("{kind: eagle, checkpoint: org/head, draft_vocab_size: 32000}",
                                     "{kind: draft_model, model: vicuna-7b}"),
                     "its vocabulary of 32000 is not the 128256", id="vocabulary"),
    ],
)  # fmt: skip
def test_study_with_an_impossible_drafter_is_refused(desk: Any, text: str, message: str) -> None:
    with_drafter(desk, text)
    assert message in desk.refused(desk.optimize)
