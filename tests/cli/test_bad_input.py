"""Wrong input is refused: exit code 2, or 3 where the question is right and the answer is no.

Each time with one message that says where, what and what to do, no traceback, and nothing written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from simtune.specs.catalog import load_model

Call = Callable[..., Any]

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


# --- studies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param("search:", "serch:", "study.yaml:9:1: serch: unknown key, did you mean search?", id="unknown key"),
        pytest.param(
            "  ttft_s: {p99: 1.0}",
            "  ttft_s: {p99: 1.0}\n  ttft_s: {p99: 2.0}",
            "study.yaml:8:3: slo.ttft_s: this key already stands at line 7; keep one of the two",
            id="duplicate key",
        ),
        pytest.param(
            "{p99: 0.030}",
            "{p99: 30ms}",
            "study.yaml:8:12: slo.tpot_s.p99: must be a valid number, not the text '30ms'",
            id="wrong unit type",
        ),
        pytest.param(
            "{p99: 0.030}",
            "{p99: -0.030}",
            "study.yaml:8:12: slo.tpot_s.p99: must be greater than 0 (found -0.03)",
            id="negative limit",
        ),
        pytest.param(
            "tp: [1, 2]",
            "tp: [1, 2.5]",
            "study.yaml:10:11: search.tp.1: must be a valid integer, not the number 2.5",
            id="half a GPU",
        ),
        pytest.param("name: tiny\n", "", "study.yaml:1:1: name: is required and missing", id="missing key"),
        pytest.param("simtune/study@1", "simtune/plan@1",
                     "study.yaml:1:1: schema: must be simtune/study@1, found 'simtune/plan@1'", id="another kind"),
        pytest.param("devices: 2}", "devices: 2", "study.yaml:5:9: not valid YAML: expected ',' or '}', but got ':'",
                     id="broken YAML"),
    ],
)  # fmt: skip
def test_a_study_with_a_mistake(desk: Any, old: str, new: str, message: str) -> None:
    desk.study(old, new)
    assert desk.refused(desk.optimize) == message


def test_a_missing_study(desk: Any, call: Call) -> None:
    assert desk.refused(call, "optimize", "nosuch.yaml", "--out", "run") == "nosuch.yaml: no such file"


def test_an_unknown_model_is_answered_with_the_nearest_and_all_there_are(desk: Any) -> None:
    desk.study("llama-3.1-8b", "llama-3.1-8")
    message = desk.refused(desk.optimize)
    assert message.startswith("no model is called 'llama-3.1-8', did you mean llama-3.1-8b? Known: ")
    assert "qwen3-8b" in message
    assert "./mine.yaml" in message


def test_a_closed_loop_has_no_rate_to_search_for(desk: Any) -> None:
    desk.write("users.yaml", "schema: simtune/workload@1\nname: users\narrivals: {kind: closed_loop, users: 4}\n"
               "prompt: {kind: fixed, tokens: 50}\noutput: {kind: fixed, tokens: 5}\n")  # fmt: skip
    desk.study("workload: chat", "workload: ./users.yaml")
    message = desk.refused(desk.optimize)
    assert message.endswith("workload users is a closed loop; use objective e2el or gpus")
    assert desk.optimize("--set", "objective=e2el").code == 0
    message = desk.refused(desk.simulate, "--rate", 3, workload="./users.yaml")
    assert message == "a closed loop has no request rate to change; change arrivals.users instead"


def test_a_negative_rate_in_a_workload(desk: Any) -> None:
    desk.write("load.yaml", "schema: simtune/workload@1\nname: load\narrivals: {kind: poisson, rate_rps: -3}\n"
               "prompt: {kind: fixed, tokens: 50}\noutput: {kind: fixed, tokens: 5}\n")  # fmt: skip
    message = "load.yaml:3:27: arrivals.rate_rps: must be greater than 0 (found -3)"
    assert desk.refused(desk.simulate, "--out", "run", workload="./load.yaml") == message
    desk.study("workload: chat", "workload: load.yaml")
    assert desk.refused(desk.optimize) == message


# --- the answer is no -------------------------------------------------------------------------------------


def test_a_model_that_cannot_fit_says_how_much_is_missing(desk: Any) -> None:
    desk.study("llama-3.1-8b", "llama-3.1-70b")
    message = desk.refused(desk.optimize, "--set", "search.tp=[1]", code=3)
    missing, weights, other, share, total = map(
        float,
        re.findall(
            r" ([\d.]+) GiB per device are missing: weights take ([\d.]+) GiB and everything else ([\d.]+) GiB "
            r"of ([\d.]+) x ([\d.]+) GiB",
            message,
        )[0],
    )
    # Missing is what weights and the rest take beyond the share of the memory, and room for at least one block.
    assert missing == pytest.approx(weights + other - share * total, abs=0.05)
    assert "more tp or pp" in message
    message = desk.refused(desk.simulate, "--model", "llama-3.1-70b", "--set", "plan.pools.0.parallelism.tp=1", code=3)
    assert "GiB per device are missing" in message


def test_a_model_that_fits_no_node(desk: Any) -> None:
    message = desk.refused(
        desk.simulate, "--model", "llama-3.1-70b", "--set", "hardware.device.memory_bytes=8e9", code=3
    )
    assert "with tp 8 pp 1" in message
    assert "GiB per device are missing" in message


def test_an_slo_that_no_plan_can_meet_names_the_nearest_plan_and_the_limit_it_missed(desk: Any) -> None:
    message = desk.refused(desk.optimize, "--set", "slo.tpot_s.p99=0.0005", code=3)
    assert message.startswith("tiny: 4 plans fit, none meets the SLO. The nearest, tp")
    assert re.search(r"TPOT p99 \S+ ms \(limit 0\.5 ms\)", message)
    assert message.endswith("Relax the SLO, lower the load, or allow more or faster devices")


def test_no_shape_fits_the_devices(desk: Any) -> None:
    message = desk.refused(desk.optimize, "--set", "search.tp=[4]", code=3)
    assert message.startswith("tiny: no tp x pp of the search space fits 2 devices; allow more devices")


def test_hardware_without_the_operator_a_model_needs(desk: Any) -> None:
    llama = load_model("llama-3.1-8b").to_yaml()
    desk.write("eight.yaml", llama.replace("weight_dtype: bf16", "weight_dtype: fp8"))
    message = desk.refused(desk.simulate, "--model", "./eight.yaml", "--hardware", "a100-sxm-80g", code=3)
    assert message.startswith("hardware a100-sxm-80g: no operator gemm.fp8, which this model needs")
    assert "simtune fit" in message


# --- traces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "arrival_s,prompt_tokens\n0,5\n",
            "t.csv:1: output_tokens: this column is missing; found: arrival_s, prompt_tokens",
            id="missing column",
        ),
        pytest.param(
            HEADER + "0,5,3\n1,nan,6\n",
            "t.csv:3: prompt_tokens: must be a finite number, not 'nan'",
            id="NaN",
        ),
        pytest.param(
            HEADER + "0,5,3\n1,6,-4\n",
            "t.csv:3: output_tokens: must be at least 1 token, not -4; "
            "drop requests that generated nothing, or give the first token its 1",
            id="negative length",
        ),
        pytest.param(
            HEADER + "0,5,3\n2,5,3\n1,5,3\n",
            "t.csv:4: arrival_s: 1 is earlier than 2 of line 3; sort the rows by time",
            id="unsorted times",
        ),
        pytest.param("", "t.csv: the file is empty; a trace has one request per line", id="empty file"),
        pytest.param(HEADER, "t.csv:1: the trace is empty: a header and no request", id="header only"),
        pytest.param(
            HEADER + "0,5,3\n1,5\n",
            "t.csv:3: has 2 columns, the header has 3; the file seems to be cut off",
            id="cut off",
        ),
    ],
)
def test_a_trace_with_a_mistake(desk: Any, text: str, message: str) -> None:
    desk.write("t.csv", text)
    assert desk.refused(desk.simulate, "--out", "run", workload="t.csv") == message
    desk.study("workload: chat", "workload: t.csv")
    assert desk.refused(desk.optimize) == message


def test_a_missing_trace(desk: Any) -> None:
    assert desk.refused(desk.simulate, workload="t.csv") == "t.csv: no such file"


def test_a_trace_longer_than_the_model_can_read(desk: Any) -> None:
    desk.write("t.csv", HEADER + "0,500000,3\n1,500000,3\n")
    message = desk.refused(desk.simulate, workload="t.csv")
    assert message.startswith("every request is longer than max_model_len (131072 tokens)")


# --- folders to write to ----------------------------------------------------------------------------------


def test_a_file_where_the_run_should_go(desk: Any) -> None:
    desk.write("run", "mine")
    assert desk.refused(desk.optimize, "--force") == "run: is a file; name a folder for the run"


@pytest.mark.parametrize("verb", ["optimize", "simulate"])
def test_a_folder_that_cannot_be_made(desk: Any, verb: str) -> None:
    desk.write("file", "mine")
    message = desk.refused(getattr(desk, verb), "--out", "file/run")
    assert message == "file/run: cannot be written (Not a directory); name a folder you may write to"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_one_may_not_write_to(desk: Any) -> None:
    locked = desk.folder / "locked"
    locked.mkdir(mode=0o555)
    message = desk.refused(desk.optimize, "--out", "locked/run")
    assert message == "locked/run: cannot be written (Permission denied); name a folder you may write to"


def test_the_folder_is_tried_before_the_search(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simtune.tuner.search.optimize", lambda *args, **named: pytest.fail("it searched"))
    desk.write("file", "mine")
    desk.refused(desk.optimize, "--out", "file/run")


# --- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("serch.tp=[1]", "study.yaml:1:1: serch: unknown key, did you mean search?"),
        ("search.tp.x=1", "--set search.tp.x=1: 'x' is not an index into a list of 2"),
        ("model.name=x", "--set model.name=x: 'name' cannot be set inside the text 'llama-3.1-8b'"),
        ("seed", "--set seed: write it as key=value, for example --set arrivals.rate_rps=8"),
        ("=3", "--set =3: write it as key=value, for example --set arrivals.rate_rps=8"),
    ],
)
def test_a_setting_with_a_mistake(desk: Any, setting: str, message: str) -> None:
    assert desk.refused(desk.optimize, "--set", setting) == message


def test_a_setting_of_simulate_says_whose_it_is(desk: Any) -> None:
    message = desk.refused(desk.simulate, "--set", "arrivals.rate_rps=3")
    assert message.endswith("begin with one of model., hardware., workload., plan.")
    message = desk.refused(desk.simulate, "--set", "workload.arrivals.rate_rps=-3")
    assert message.endswith("arrivals.rate_rps: must be greater than 0 (found -3)")
    message = desk.refused(desk.simulate, "--set", "plan.pools.0.batching.max_seqs=3")
    assert message.endswith("pools.0.batching.max_seqs: unknown key, did you mean max_num_seqs?")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--rate", "0", "0.0 is not in the range x>0"),
        ("--rate", "-2", "-2.0 is not in the range x>0"),
        ("--rate", "nan", "the request rate must be positive and finite, not nan requests/s"),
        ("--rate", "inf", "the request rate must be positive and finite, not inf requests/s"),
        ("--rate", "fast", "'fast' is not a valid float"),
        ("--requests", "0", "0 is not in the range x>=1"),
        ("--seed", "-1", "-1 is not in the range x>=0"),
        ("--colour", "red", "No such option '--colour'"),
    ],
)
def test_an_option_with_a_mistake(desk: Any, option: str, value: str, words: str) -> None:
    assert words in desk.refused(desk.simulate, option, value)


def test_a_required_option_is_asked_for(desk: Any, call: Call) -> None:
    assert desk.refused(call, "optimize", "study.yaml") == "Error: name the run directory to write: --out runs/NAME"
    message = desk.refused(call, "simulate", "--hardware", "h100-sxm", "--workload", "chat")
    assert message == "name a model and a hardware profile, or a plan that does"


@pytest.mark.parametrize(
    "asked",
    [("schema", "stdy"), ("list", "models"), ("show", "chta"), ("check",), ("report", "nosuch"), ("show", "x.yaml")],
)
def test_other_verbs_refuse_too(desk: Any, call: Call, asked: tuple[str, ...]) -> None:
    message = desk.refused(call, *asked)
    assert asked[-1] in message or asked == ("check",)


def test_a_report_of_what_is_no_run(desk: Any, call: Call) -> None:
    message = desk.refused(call, "report", ".")
    assert message == ".: holds no summary.json, so it is not a run directory of simtune"


def test_a_report_of_a_damaged_run_leaves_the_page(desk: Any, call: Call) -> None:
    assert desk.simulate("--out", "run").code == 0
    (desk.folder / "run" / "summary.json").write_text("{")
    assert "summary.json" in desk.refused(call, "report", "run")


# --- plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "batching.max_num_batched_tokens=32",
            "max_num_batched_tokens (32) must be at least max_num_seqs (64); vLLM refuses it too",
        ),
        ("parallelism.tp=3", "model llama-3.1-8b with tp 3: tp must divide the 32 attention heads"),
        ("parallelism.pp=33", "model llama-3.1-8b: pp 33 exceeds its 32 layers"),
        ("max_model_len=200000", "max_model_len (200000) exceeds the longest context of llama-3.1-8b (131072)"),
        ("kv_cache.num_blocks=20", "one request of max_model_len"),
    ],
)
def test_a_plan_that_contradicts_itself(desk: Any, setting: str, message: str) -> None:
    desk.write("plan.yaml", "schema: simtune/plan@1\nname: mine\nmodel: llama-3.1-8b\npools:\n"
               "- {hardware: h100-sxm, instances: 1, batching: {max_num_seqs: 64, max_num_batched_tokens: 2048},\n"
               "   max_model_len: 16384}\n")  # fmt: skip
    assert desk.simulate("--plan", "plan.yaml").code == 0
    said = desk.refused(desk.simulate, "--plan", "plan.yaml", "--set", f"plan.pools.0.{setting}", code=3)
    assert message in said


def test_a_missing_plan(desk: Any) -> None:
    assert desk.refused(desk.simulate, "--plan", "nosuch.yaml") == "nosuch.yaml: no such file"


# --- models -----------------------------------------------------------------------------------------------


def test_a_config_of_an_unknown_architecture_is_refused_by_name(desk: Any, call: Call) -> None:
    desk.write("mamba/config.json", json.dumps({"architectures": ["MambaForCausalLM"], "hidden_size": 2560}))
    for message in (
        desk.refused(desk.simulate, "--model", "mamba/config.json"),
        desk.refused(desk.simulate, "--model", "./mamba"),
        desk.refused(call, "check", "mamba"),
    ):
        assert message.startswith("mamba/config.json:1:2: architectures: MambaForCausalLM is not modelled")
        assert "LlamaForCausalLM" in message


def test_a_config_of_a_known_architecture_is_taken_as_it_is(desk: Any) -> None:
    desk.write("mine/config.json", json.dumps({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    }))  # fmt: skip
    assert desk.simulate("--model", "mine/config.json").code == 0


def test_a_folder_that_holds_no_model(desk: Any) -> None:
    (desk.folder / "empty").mkdir()
    assert desk.refused(desk.simulate, "--model", "./empty") == "empty/config.json: no such file"


# --- in a process of its own ------------------------------------------------------------------------------


def test_exit_codes_and_streams_as_a_shell_sees_them(desk: Any, typed: Call) -> None:
    desk.study("search:", "serch:")
    message = desk.refused(typed, "optimize", "study.yaml", "--out", "run")
    assert message == "study.yaml:9:1: serch: unknown key, did you mean search?"
    desk.study("model: llama-3.1-8b", "model: llama-3.1-70b")
    message = desk.refused(typed, "optimize", "study.yaml", "--out", "run", "--set", "search.tp=[1]", code=3)
    assert "GiB per device are missing" in message
