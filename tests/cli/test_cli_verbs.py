"""What each verb answers when it is asked rightly: data on stdout, words on stderr, and the exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import simtune
from simtune.cli import VERBS
from simtune.costs.other_engines import for_engine
from simtune.emit import ENGINES
from simtune.engine import POLICIES
from simtune.sim.router import ROUTERS
from simtune.specs.catalog import KINDS, load_hardware, names
from simtune.specs.hardware import Arrays

Call = Callable[..., Any]


# --- the command itself -----------------------------------------------------------------------------------


def test_help_names_every_verb_and_the_exit_codes(typed: Call) -> None:
    said = typed("--help")
    assert said.code == 0
    assert said.err == ""
    for verb, words in VERBS.items():
        assert f"  {verb}" in said.out
        assert words.split(".")[0].split(",")[0] in " ".join(said.out.split())
    assert "3 no feasible plan" in said.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(call: Call, verb: str) -> None:
    said = call(verb, "--help")
    assert said.code == 0
    assert said.out.startswith("Usage: ")
    assert "-h" in said.out


def test_version(typed: Call) -> None:
    said = typed("--version")
    assert (said.code, said.out, said.err) == (0, f"simtune, version {simtune.__version__}\n", "")


def test_without_a_verb_it_shows_help_and_refuses(typed: Call) -> None:
    said = typed()
    assert (said.code, said.out) == (2, "")
    assert "Commands:" in said.err


def test_an_unknown_verb_is_answered_with_the_nearest(call: Call) -> None:
    said = call("optimise", "study.yaml")
    assert (said.code, said.out) == (2, "")
    assert said.err.endswith("Error: No such command 'optimise'. Did you mean 'optimize'?\n")
    assert call("frobnicate").err.endswith("Error: No such command 'frobnicate'.\n")


def test_closed_pipe_is_no_error(start: Call) -> None:
    process = start("schema", "hardware")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


def test_requests_beyond_memory_are_refused_with_a_message(call: Call, desk: Any) -> None:
    message = desk.refused(desk.simulate, "--requests", 10**9)
    assert message.startswith("1,000,000,000 requests need about 419.1 GiB of memory, and ")
    assert message.endswith(" are free; ask for fewer: --requests, or search.requests of a study")


# --- list, show, check, schema ----------------------------------------------------------------------------


def test_list_shows_what_is_built_in(call: Call) -> None:
    said = call("list")
    assert said.code == 0
    assert said.out.splitlines()[0] == "model:"
    assert "  h100-sxm" in said.out.splitlines()
    specs = {kind: names(kind) for kind in ("model", "hardware", "workload", "acceptance", "engine", "launch")}
    parts = {"policy": [*POLICIES], "router": [*ROUTERS], "emitter": [*ENGINES]}
    assert call("list", "--json").json == specs | parts
    assert call("list", "workload", "--json").json == {"workload": ["chat", "code"]}


@pytest.mark.parametrize("kind", ["model", "hardware", "workload", "acceptance", "engine", "launch"])
def test_whatever_is_listed_can_be_shown(call: Call, kind: str) -> None:
    for name in names(kind):
        said = call("show", name, "--json")
        assert said.code == 0
        assert said.json["schema"] == f"simtune/{kind}@1"
        assert said.json["name"] == name


def test_show_prints_the_spec_itself(call: Call, desk: Any) -> None:
    said = call("show", "llama-3.1-8b")
    assert yaml.safe_load(said.out) == call("show", "llama-3.1-8b", "--json").json
    assert yaml.safe_load(call("show", "study.yaml").out)["name"] == "tiny"


def test_a_model_is_shown_and_listed_with_its_size(call: Call) -> None:
    shown = call("show", "gpt-oss-120b").out.splitlines()[:4]
    assert shown == [
        "# parameters: 116.83B, 5.13B active",
        "# layers: 36: 18 sliding + moe, 18 full + moe",
        "# KV cache: 72.0 KiB per token in bf16",
        "# formats: bf16, experts mxfp4",
    ]
    listed = call("list", "model").out
    for name in names("model"):
        assert f"│ {name} " in listed
    (line,) = [line for line in listed.splitlines() if "│ deepseek-v3 " in line]
    for known in ("671.03B", "58 mla + moe", "68.6 KiB per token in bf16", "fp8_block, activations bf16"):
        assert known in line


def test_a_setting_of_a_config_applies_or_is_an_error(call: Call, desk: Any) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    desk.write("config.json", json.dumps(config))
    asked = ("simulate", "--model", "./config.json", "--hardware", "h100-sxm", "--workload", "chat", "--requests", "10")
    one, more = (call(*asked, "--json", *more) for more in ((), ("--set", "model.num_hidden_layers=400")))
    assert more.json["metrics"]["itl"]["mean"] > one.json["metrics"]["itl"]["mean"]
    wrong = call(*asked, "--set", "model.num_hiden_layers=8")
    assert wrong.code == 2
    assert "--set: num_hiden_layers: unknown key" in wrong.err


def test_show_of_a_profile_says_how_far_off_it_is(call: Call) -> None:
    said = call("show", "h100-sxm")
    assert said.code == 0
    hardware = for_engine(load_hardware("h100-sxm"))
    for key, operator in hardware.operators.items():
        (line,) = [line for line in said.out.splitlines() if f"│ {key} " in line]
        assert operator.origin in line
    first = next(iter(hardware.operators.values())).hold_out[0]
    assert f"{first.median:.1%}/{first.p90:.1%}" in said.out
    assert "source: " in said.out


def test_check_accepts_valid_files_and_reports_invalid_ones(call: Call, desk: Any, tiny_run: Path) -> None:
    desk.write("trace.csv", "arrival_s,prompt_tokens,output_tokens\n0,5,3\n1,7,4\n")
    good = call("check", "study.yaml", "trace.csv", tiny_run / "plan.yaml")
    assert (good.code, good.err) == (0, "")
    said = good.out.splitlines()
    assert said[0] == "study.yaml: ok: study tiny: goodput_per_gpu of llama-3.1-8b under chat"
    assert said[1].startswith(
        "trace.csv: ok: workload trace: 2 requests, 1 requests/s, prompt tokens p50 7 p99 7, output"
    )
    assert said[2].startswith(f"{tiny_run / 'plan.yaml'}: ok: plan tp")
    assert "GPUs (h100-sxm): 2 servers of 1 GPU, " in said[2]
    assert said[2].endswith(" a step, vllm-fcfs")

    desk.write("bad.yaml", "schema: simtune/plan@1\nname: x\nmodle: y\n")
    both = call("check", "study.yaml", "bad.yaml", "nosuch.csv")
    assert both.code == 2
    assert both.out == said[0] + "\n"
    lines = both.err.splitlines()
    assert "bad.yaml:3:1: modle: unknown key, did you mean model?" in lines
    assert any(line.startswith("bad.yaml") and "pools: is required and missing" in line for line in lines)
    assert any(line.startswith("workload ./nosuch.csv: no such file; ") for line in lines)

    found = call("check", "--json", "study.yaml", "bad.yaml", "nosuch.csv")
    assert (found.code, found.err) == (2, "")
    understood = {"study.yaml": said[0].removeprefix("study.yaml: ok: ")}
    problems = {"bad.yaml": lines[:-1], "nosuch.csv": lines[-1:]}
    assert found.json == {"ok": False, "problems": problems, "understood": understood}
    assert call("check", "--json", "study.yaml").json == {"ok": True, "problems": {}, "understood": understood}


def test_check_states_which_trace_columns_were_read(call: Call, desk: Any) -> None:
    rows = "".join(f"{10 * i},{i % 7},x\n" for i in range(1, 201))
    desk.write("t.csv", "prompt_tokens,output_tokens,note\n" + rows.replace(",0,", ",7,"))
    assert call("check", "t.csv").out == (
        "t.csv: ok: workload t: 200 requests, no arrival times, prompt tokens p50 1,010 p99 1,990, "
        "output tokens p50 4 p99 7, columns ignored: note\n"
    )


def test_check_states_that_prompts_share_prefixes(call: Call, desk: Any) -> None:
    desk.write(
        "shared.yaml",
        "schema: simtune/workload@1\nname: w\nrequests: 10\narrivals: {kind: poisson, rate_rps: 1}\n"
        "prompt: {kind: fixed, tokens: 300}\noutput: {kind: fixed, tokens: 8}\n"
        "shared_prefix: {tokens: 256, groups: 2, block_tokens: 64}\n",
    )
    said = call("check", "shared.yaml")
    assert said.code == 0
    assert "requests/s, prompts share prefixes, prompt tokens p50 300" in said.out


def test_check_opens_the_arrays_of_a_profile(call: Call, desk: Any) -> None:
    profile = load_hardware("h100-sxm")
    name = next(key for key in profile.arrays if key.endswith(".weights"))
    arrays = {key: array[:-1] if key == name else array for key, array in profile.arrays.items()}
    desk.write("h/profile.yaml", profile.model_copy(update={"arrays_sha256": None}).to_yaml())
    (desk.folder / "h" / "arrays.npz").write_bytes(Arrays(arrays).to_bytes())
    message = desk.refused(call, "check", "h/profile.yaml")
    assert message.startswith("h/arrays.npz: ")
    assert "are not those of a residual with" in message


@pytest.mark.parametrize("kind", KINDS)
def test_schema_describes_the_files_that_are_read(call: Call, kind: str) -> None:
    said = call("schema", kind)
    assert said.code == 0
    document = said.json
    assert document["properties"]["schema"] == {"const": f"simtune/{kind}@1"}
    assert {"schema", "name"} <= set(document["required"])
    assert document["additionalProperties"] is False


@pytest.mark.parametrize(("kind", "known"), [("summary", "goodput_rps"), ("candidates", "rank"), ("requests", "good")])
def test_schema_describes_the_files_that_are_written(call: Call, kind: str, known: str) -> None:
    document = call("schema", kind).json
    assert known in document["required"]
    assert document["properties"][known]["description"]


# --- simulate ---------------------------------------------------------------------------------------------


def test_simulate_prints_latencies(desk: Any) -> None:
    said = desk.simulate()
    assert (said.code, said.err) == (0, "")
    for word in ("TTFT", "TPOT", "E2EL", "p99", "offered rate rps"):
        assert word in said.out
    assert sorted(path.name for path in desk.folder.iterdir()) == ["study.yaml", "tmp"], "nothing is written unasked"


def test_simulate_as_json_is_one_document(desk: Any) -> None:
    said = desk.simulate("--json")
    assert (said.code, said.err) == (0, "")
    answer = said.json
    assert answer["schema"] == "simtune/summary@2"
    assert answer["completed"] == answer["requests"] == 200
    assert answer["num_gpus"] == 1
    assert 0 < answer["metrics"]["ttft"]["p50"] < answer["metrics"]["e2el"]["p50"]


def test_setting_without_effect_is_noted(desk: Any) -> None:
    said = desk.simulate("--set", "plan.pools.0.fused=[norm]", "--json")
    assert said.code == 0
    assert said.err == (
        "note: pools.0.fused: tp 1 has no all-reduce that could hold a norm; leave norm out, or raise tp\n"
    )
    assert said.json["plan"]["pools"][0]["fused"] == ["norm"]
    assert "fused" not in desk.simulate("--engine", "vllm-0.24").err, "its preset says so of itself"


def test_a_model_too_large_for_one_gpu_gets_the_fewest_that_hold_it(call: Call) -> None:
    asked = ("--model", "llama-3.1-70b", "--hardware", "h100-sxm", "--workload", "chat")
    said = call("simulate", *asked, "--rate", 1, "--requests", 100, "--json")
    assert said.code == 0
    assert said.json["plan"]["pools"][0]["parallelism"]["tp"] > 1


def test_streamed_simulation_keeps_no_requests_and_prints_the_same(desk: Any) -> None:
    whole, streamed = desk.simulate("--json").json, desk.simulate("--stream", "--json").json
    for key in ("requests", "completed", "num_gpus", "output_tokens_per_s"):
        assert streamed[key] == pytest.approx(whole[key], rel=1e-6)
    assert streamed["metrics"]["ttft"]["p50"] == pytest.approx(whole["metrics"]["ttft"]["p50"], rel=0.02)
    refused = desk.simulate("--stream", "--out", "run", "--uncertainty", 20)
    assert refused.code == 2
    assert "--stream keeps no requests, which --out and --uncertainty would need; leave one out" in refused.err


def test_requests_left_without_instances_are_reported_as_unserved(call: Call, desk: Any) -> None:
    desk.write(
        "plan.yaml",
        "schema: simtune/plan@1\nname: p\nmodel: llama-3.1-8b\npools: [{hardware: h100-sxm, instances: 1, "
        "batching: {max_num_seqs: 8, max_num_batched_tokens: 512}, max_model_len: 8192}]\n"
        "events: [{kind: failure, pool: mixed, instance: 0, at_s: 1}]\n",
    )
    said = call("simulate", "--plan", "plan.yaml", "--workload", "chat", "--requests", 50, "--rate", 5)
    assert said.code == 3
    assert "NOT SERVED: requests were left when no instance was up any more" in said.out


def test_overload_is_called_saturated(desk: Any) -> None:
    said = desk.simulate("--rate", 500)
    assert said.code == 3
    assert "SATURATED" in said.out
    document = desk.simulate("--rate", 500, "--json")
    assert document.code == 3
    assert document.json["saturated"] is True


def test_the_seed_changes_the_requests_and_only_the_seed(desk: Any) -> None:
    first, again, other = (desk.simulate("--json", "--seed", seed).out for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_set_reaches_every_spec(desk: Any) -> None:
    answer = desk.simulate(
        "--json",
        "--set", "workload.arrivals.rate_rps=1",
        "--set", "plan.pools.0.batching.max_num_seqs=16",
        "--set", "plan.pools.0.parallelism.tp=2",
    ).json  # fmt: skip
    assert answer["offered_rate_rps"] == pytest.approx(1, rel=0.2)
    assert answer["num_gpus"] == 2
    assert answer["plan"]["pools"][0]["batching"]["max_num_seqs"] == 16


def test_a_trace_is_replayed_as_it_was_published(desk: Any) -> None:
    desk.write("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n"
                            "2023-11-16 18:15:46.6805900,374,44\n"
                            "2023-11-16 18:15:50.9951690,396,109\n")  # fmt: skip
    answer = desk.simulate("--requests", 2, "--json", workload="azure.csv").json
    assert answer["requests"] == 2
    assert answer["offered_rate_rps"] == pytest.approx(1 / (50.9951690 - 46.6805900))


# --- optimize, report -------------------------------------------------------------------------------------


def test_optimize_answers_on_stdout_and_writes_the_run(desk: Any) -> None:
    said = desk.optimize()
    assert (said.code, said.err) == (0, ""), "progress is for terminals"
    assert "chosen plan first" in said.out
    assert "plan:   run/plan.yaml" in said.out
    assert "4 candidates: 1 chosen" in said.out
    assert "left out" not in said.out


def test_optimize_states_candidates_left_out_before_the_search(desk: Any) -> None:
    said = desk.optimize("--set", "constraints=[tp * max_num_seqs < 128]")
    assert said.code == 0
    left = re.search(r"^(\d+) more left out before the search: constraint `tp \* max_num_seqs < 128`$", said.out, re.M)
    assert left is not None
    assert f"{4 - int(left[1])} candidates: 1 chosen" in said.out


def test_optimize_as_json_agrees_with_the_run_directory(desk: Any) -> None:
    said = desk.optimize("--json")
    assert (said.code, said.err) == (0, "")
    summary = json.loads((desk.folder / "run" / "summary.json").read_text())
    assert said.json["objective"]["value"] == summary["objective"]["value"]
    assert said.json["metrics"] == summary["metrics"]
    assert said.json["plan"] == yaml.safe_load((desk.folder / "run" / "plan.yaml").read_text())


def test_optimize_as_json_without_a_feasible_plan_is_a_document(desk: Any) -> None:
    desk.study("ttft_s: {p99: 1.0}", "ttft_s: {p99: 0.001}")
    said = desk.optimize("--json", "--quiet")
    assert said.code == 3
    answer = said.json
    assert answer["plan"] is None
    assert said.err == answer["reason"] + "\n"
    assert "none meets the SLO" in answer["reason"]
    assert answer["nearest"]["plan"] in answer["reason"]
    assert answer["nearest"]["reason"] in answer["reason"]


def test_optimize_as_json_of_an_empty_space_is_a_document(desk: Any) -> None:
    said = desk.optimize("--json", "--dry-run", "--set", "constraints=[tp > 4]")
    assert said.code == 3
    assert said.json == {"study_file": "study.yaml", "plan": None, "reason": said.err.rstrip(), "nearest": None}


def test_optimize_takes_settings_and_seed(desk: Any) -> None:
    assert desk.optimize("--set", "search.tp=[2]", "--seed", 7).code == 0
    summary = json.loads((desk.folder / "run" / "summary.json").read_text())
    assert summary["study"]["search"]["tp"] == [2]
    assert summary["seed"] == summary["study"]["seed"] == 7


def test_a_dry_run_counts_and_writes_nothing(desk: Any) -> None:
    said = desk.optimize("--dry-run")
    assert said.out == "tiny: 4 candidates in 2 shapes (how GPUs are cut into pools of instances)\n"
    assert desk.optimize("--dry-run", "--json").json == {
        "study": "tiny",
        "candidates": 4,
        "shapes": 2,
        "left_out": {},
    }
    assert not (desk.folder / "run").exists()


def test_a_fitted_profile_is_a_profile_like_the_built_in_ones(call: Call, desk: Any) -> None:
    rows = ["framework,version,device,gemm_dtype,m,n,k,latency"]
    rows += [
        f"V,1,Made-up 1,bfloat16,{m},{n},{k},{1e3 * (3e-6 + 2 * m * n * k / 6e13 + 2 * (m * k + n * k + m * n) / 8e11)}"
        for m in (1, 16, 256, 4096)
        for n in (512, 2048, 8192)
        for k in (512, 2048, 8192)
    ]
    desk.write("tables/gemm.csv", "\n".join(rows) + "\n")
    desk.write("facts.yaml", "schema: simtune/device@1\nname: made-up\nengine: none 1.0\ndevice:\n"
               "  {name: Made-up 1, vendor: nobody, memory_bytes: 8e10, memory_bytes_per_s: 1e12, processors: 10,\n"
               "   flops_per_s: {bf16: 1e14}, source: made up}\n")  # fmt: skip
    said = call("fit", "tables", "--facts", "facts.yaml", "--out", "made-up", "--json")
    assert said.code == 0, said
    assert said.json["profile"]["name"] == "made-up"
    shown = call("show", "./made-up", "--json").json
    assert len(shown.pop("arrays_sha256")) == 64, "the two files belong together"
    assert shown == said.json["profile"]
    assert call("check", "made-up/profile.yaml").out.startswith("made-up/profile.yaml: ok: hardware made-up: ")
    message = desk.refused(call, "fit", "tables", "--facts", "facts.yaml", "--out", "made-up")
    assert message == "made-up/profile.yaml: there is a profile already; give --force to replace it"
    message = desk.refused(call, "fit", "nosuch.csv", "--facts", "facts.yaml", "--out", "other")
    assert message == "nosuch.csv: no such file or folder"


# --- settings from the environment ------------------------------------------------------------------------


def test_options_may_come_from_the_environment_and_flags_win(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("simulate", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat", "--json")
    monkeypatch.setenv("SIMTUNE_SIMULATE_REQUESTS", "30")
    assert call(*asked).json["requests"] == 30
    assert call(*asked, "--requests", 20).json["requests"] == 20


WORKLOAD = """\
# mine
schema: simtune/workload@1   # a comment
name: {name}
arrivals: {{kind: poisson, rate_rps: 2}}
prompt: {{kind: fixed, tokens: {tokens}}}
output: {{kind: fixed, tokens: 10}}
"""


def test_names_are_looked_up_in_the_users_folders_first(call: Call, desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.write("mine/chat.yaml", WORKLOAD.format(name="chat", tokens=111))
    desk.write("mine/nightly.yaml", WORKLOAD.format(name="nightly", tokens=222))
    desk.write("mine/notes.yaml", "just: notes\n")
    desk.write("theirs/nightly.yaml", WORKLOAD.format(name="nightly", tokens=333))
    assert call("show", "nightly").code == 2
    monkeypatch.setenv("SIMTUNE_PATH", "mine:nosuch:theirs")
    assert call("list", "workload", "--json").json == {"workload": ["chat", "code", "nightly"]}
    assert call("show", "chat", "--json").json["prompt"]["tokens"] == 111, "shadows the built-in one"
    assert call("show", "nightly", "--json").json["prompt"]["tokens"] == 222, "the first folder wins"
    answer = desk.simulate("--json", workload="nightly").json
    assert answer["total_tokens_per_s"] / answer["output_tokens_per_s"] == pytest.approx(232 / 10)


def test_a_plan_brings_its_model_and_hardware_and_may_be_tried_on_others(call: Call, tiny_run: Path) -> None:
    plan = str(tiny_run / "plan.yaml")
    asked = ("simulate", "--plan", plan, "--workload", "chat", "--requests", "50", "--json")
    own, other = call(*asked), call(*asked, "--model", "qwen3-8b", "--hardware", "a100-sxm-80g")
    assert (own.code, other.code) == (0, 0)
    made_for, tried = json.loads(own.out)["plan"], json.loads(other.out)["plan"]
    assert (tried["model"], tried["pools"][0]["hardware"]) == ("qwen3-8b", "a100-sxm-80g")
    assert (made_for["model"], made_for["pools"][0]["hardware"]) != (tried["model"], tried["pools"][0]["hardware"])


def test_uncertainty_gives_intervals_in_every_form(call: Call, desk: Any) -> None:
    asked = ("simulate", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat", "--requests", "100")
    said = json.loads(call(*asked, "--uncertainty", "20", "--json").out)
    low, high = said["uncertainty"]["intervals"]["metrics"]["tpot"]["mean"]
    assert low < said["metrics"]["tpot"]["mean"] < high
    assert "(" in call(*asked, "--uncertainty", "20", "--out", "run").out
    assert "In brackets: the middle 90" in Path("run/report.html").read_text()
    assert json.loads(Path("run/summary.json").read_text())["uncertainty"] == said["uncertainty"]


def test_terminal_without_unicode_shows_replacements() -> None:
    """And does not lose what was computed."""
    done = subprocess.run(
        [sys.executable, "-m", "simtune", "show", "h100-sxm"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b"fitted operators" in done.stdout
