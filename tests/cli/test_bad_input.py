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
from tests.fuzz.corpus import ENGINE, FACTS

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
        pytest.param(
            "search:",
            "link: {}\nsearch:",
            "study.yaml:9:1: link: has no effect if all plans have only mixed pools; write layouts: "
            "[prefill-decode] (or both) under search, or remove it",
            id="a link that no plan has",
        ),
        pytest.param("name: tiny\n", "", "study.yaml:1:1: name: is required and missing", id="missing key"),
        pytest.param("simtune/study@1", "simtune/plan@1",
                     "study.yaml:1:1: schema: must be simtune/study@1, found 'simtune/plan@1'", id="another kind"),
        pytest.param("devices: 2}", "devices: 2", "study.yaml:5:9: not valid YAML: did not find expected ',' or '}'",
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
    message = desk.refused(desk.simulate, "--model", "llama-3.1-70b", "--set", "plan.pools.0.parallelism.tp=1")
    assert "GiB per device are missing" in message


def test_a_model_that_fits_no_node(desk: Any) -> None:
    message = desk.refused(
        desk.simulate, "--model", "llama-3.1-70b", "--set", "hardware.device.memory_bytes=8e9", code=3
    )
    assert "with tp 8 pp 1" in message
    assert "GiB per device are missing" in message


def test_an_slo_that_no_plan_can_meet_names_the_nearest_plan_and_the_limit_it_missed(desk: Any) -> None:
    message = desk.refused(desk.optimize, "--set", "slo.tpot_s.p99=0.0005", code=3)
    assert message.startswith("tiny: 4 plans fit, none meets the SLO. The nearest, 1 server of ")
    assert re.search(r"p99 TPOT ≤ 0\.5 ms \(it reaches \S+ ms\)", message)
    assert message.endswith("Relax the SLO, lower the load, or allow more or faster devices")


def test_no_shape_fits_the_devices(desk: Any) -> None:
    message = desk.refused(desk.optimize, "--set", "search.tp=[4]", code=3)
    assert message.startswith("tiny: no tp x pp of the search space fits 2 h100-sxm devices; allow more devices")


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
            "t.csv:1: output_tokens: this column is missing; found: arrival_s, prompt_tokens; it may also be called "
            "generated_tokens, generatedtokens, completion_tokens, num_decode_tokens, output_length, output_toks; "
            "another name: simtune workload FILE --columns arrival=NAME,prompt=NAME,output=NAME",
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
            "drop requests that generated nothing, or give the first token its 1: simtune workload --zero-output",
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
    assert desk.refused(desk.simulate, workload="t.csv").startswith("workload t.csv: no such file; ")


def test_a_model_that_can_read_no_request_is_not_searched_for(desk: Any) -> None:
    text = load_model("llama-3.1-8b").to_yaml().replace("max_position: 131072", "max_position: 7")
    desk.write("short.yaml", text)
    desk.study("model: llama-3.1-8b", "model: ./short.yaml")
    assert desk.refused(desk.optimize).startswith(
        "every request is longer than max_model_len (7 tokens), the longest of"
    )


def test_a_table_without_a_usable_row_is_named(desk: Any, call: Call) -> None:
    desk.write("gemm.csv", "framework,version,device,gemm_dtype,m,n,k,latency\nV,1,Made-up 1,bfloat16,1,512,512,-0.0\n")
    desk.write("facts.yaml", FACTS)
    message = desk.refused(call, "fit", "gemm.csv", "--facts", "facts.yaml", "--out", "out")
    assert message.startswith("gemm.csv: gemm.bf16: no row can be used: 1 rows read, 0 used; 1 left out: no positive")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("max_num_seqs: 0", "e.yaml:5:38: pool.batching.max_num_seqs: must be greater than or equal to 1 (found 0)"),
        (
            "max_num_sequences: 3",
            "e.yaml:5:38: pool.batching.max_num_sequences: unknown key, did you mean max_num_seqs?",
        ),
    ],
)
def test_a_preset_with_settings_that_no_pool_has(desk: Any, setting: str, message: str) -> None:
    name = setting.split(":")[0]
    own = ENGINE.replace("max_num_seqs: 16", setting).replace("batching.max_num_seqs: a", f"batching.{name}: a")
    desk.write("e.yaml", own)
    assert desk.refused(desk.simulate, "--engine", "./e.yaml") == message


def test_a_trace_longer_than_the_model_can_read(desk: Any) -> None:
    desk.write("t.csv", HEADER + "0,500000,3\n1,500000,3\n")
    message = desk.refused(desk.simulate, workload="t.csv")
    assert message.startswith("every request is longer than max_model_len (131072 tokens)")


# --- too much ---------------------------------------------------------------------------------------------

LOAD = """\
schema: simtune/workload@1
name: load
requests: 100
arrivals: {kind: poisson, rate_rps: 3}
prompt: {kind: fixed, tokens: 50}
output: {kind: fixed, tokens: 5}
shared_prefix: {groups: 2, tokens: 32}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("groups: 2,", "groups: 9223372036854775808,", "load.yaml:7:25: not valid YAML: 9223372036854775808 is larger"),
        ("groups: 2,", "groups: 9223372036854775807,", "load.yaml:7:17: shared_prefix.groups: must be less than or"),
        ("rate_rps: 3", "rate_rps: 5.0e-324", "load.yaml:4:27: arrivals.rate_rps: must be at least 1e-18"),
        ("rate_rps: 3", "rate_rps: 1e-9", "workload load: the last of 200 requests comes after "),
        ("rate_rps: 3", "rate_rps: .nan", "load.yaml:4:27: arrivals.rate_rps: must be a finite number (found nan)"),
        ("tokens: 50", "tokens: 1e308", "load.yaml:5:23: prompt.tokens: must be a valid integer, not the"),
        ("requests: 100", "requests: 1" + "0" * 18, "load.yaml:3:1: requests: must be less than or"),
    ],
)  # fmt: skip
def test_workload_with_impossible_values_is_refused(desk: Any, old: str, new: str, message: str) -> None:
    desk.write("load.yaml", LOAD.replace(old, new))
    assert desk.refused(desk.simulate, workload="./load.yaml").startswith(message)


def test_empty_prefix_groups_take_no_memory(desk: Any) -> None:
    desk.write("load.yaml", LOAD.replace("groups: 2,", "groups: 1000000000,"))
    assert desk.simulate(workload="./load.yaml").code == 0


def test_prefix_blocks_beyond_memory_are_refused_before_the_run(desk: Any) -> None:
    desk.write("load.yaml", LOAD.replace("tokens: 32", "tokens: 1000000000, block_tokens: 1").replace(
        "tokens: 50", "tokens: 1000000000"))  # fmt: skip
    message = desk.refused(desk.simulate, workload="./load.yaml")
    assert message.startswith("workload load: names of 200,000,000,000 blocks that prompts share need about 7.3 TiB of")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("instances=99999999999", "--set: pools.0.instances: must be less than or equal to 100000 (found 99999999999)"),
        ("kv_cache.block_size=2147483648", "--set: pools.0.kv_cache.block_size: must be less than or equal to 1048576"),
        ("batching.max_num_seqs=1e30", "--set: pools.0.batching.max_num_seqs: must be a valid integer"),
        (
            "batching.max_num_batched_tokens=999999999999",
            "--set: pools.0.batching.max_num_batched_tokens: must be less",
        ),
        ("max_model_len=9007199254740993", "--set: pools.0.max_model_len: must be less than or equal to 134217728"),
        ("parallelism.tp=100000000", "--set: pools.0.parallelism.tp: must be less than or equal to 100000"),
    ],
)
def test_plan_with_impossible_values_is_refused(desk: Any, setting: str, message: str) -> None:
    said = desk.refused(desk.simulate, "--set", f"plan.pools.0.{setting}")
    assert said.startswith(message)


def test_a_deployment_of_more_gpus_than_there_are(desk: Any) -> None:
    said = desk.refused(
        desk.simulate, "--set", "plan.pools.0.instances=100000", "--set", "plan.pools.0.parallelism.tp=16"
    )
    assert said == "--set: pools.0.instances: 1,600,000 GPUs in all, at most 1,000,000"


@pytest.mark.parametrize(
    ("key", "value"), [("experts", 10**30), ("num_experts", 10**400), ("num_hidden_layers", 10**10)]
)
def test_model_config_with_impossible_values_is_refused(desk: Any, call: Call, key: str, value: int) -> None:
    text = json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, key: value})
    desk.write("config.json", text)
    assert "config.json:1:" in desk_lines(desk, call)


def desk_lines(desk: Any, call: Call) -> str:
    """What is said of config.json; there may be several lines."""
    said = call("show", "./config.json")
    assert (said.code, said.out) == (2, "")
    return str(said.err)


@pytest.mark.parametrize("odd", ["pipe", "device"])
def test_endless_input_is_not_read(desk: Any, call: Call, odd: str) -> None:
    path = desk.folder / "t.csv"
    if odd == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    said = call("simulate", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "t.csv")
    assert said.code == 2
    assert said.err == f"t.csv: is a {odd}, a regular file was expected; write what comes from it to a file first\n"


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
def test_output_folder_without_write_permission_is_refused(desk: Any) -> None:
    locked = desk.folder / "locked"
    locked.mkdir(mode=0o555)
    message = desk.refused(desk.optimize, "--out", "locked/run")
    assert message == "locked/run: cannot be written (Permission denied); name a folder you may write to"


def test_output_folder_is_checked_before_the_search(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simtune.tuner.search.front.answer", lambda *args, **named: pytest.fail("it searched"))
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


def test_setting_of_simulate_must_name_its_spec(desk: Any) -> None:
    message = desk.refused(desk.simulate, "--set", "arrivals.rate_rps=3")
    assert message.endswith("begin with one of model., hardware., workload., plan.")
    message = desk.refused(desk.simulate, "--set", "workload.arrivals.rate_rps=-3")
    assert message.endswith("arrivals.rate_rps: must be greater than 0 (found -3)")
    message = desk.refused(desk.simulate, "--set", "plan.pools.0.batching.max_seqs=3")
    assert message.endswith("pools.0.batching.max_seqs: unknown key, did you mean max_num_seqs?")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--rate", "0", "0.0 is not in the range 0<x<=1000000000.0"),
        ("--rate", "-2", "-2.0 is not in the range 0<x<=1000000000.0"),
        ("--rate", "nan", "nan is not in the range 0<x<=1000000000.0"),
        ("--rate", "inf", "inf is not in the range 0<x<=1000000000.0"),
        ("--rate", "fast", "'fast' is not a valid float"),
        ("--requests", "0", "0 is not in the range 1<=x<=1000000000"),
        ("--seed", "-1", "-1 is not in the range 0<=x<=9223372036854775807"),
        ("--colour", "red", "No such option"),  # the rest is click's, and changes with it
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
    [("schema", "stdy"), ("list", "modles"), ("show", "chta"), ("check",), ("report", "nosuch"), ("show", "x.yaml")],
)
def test_other_verbs_refuse_bad_input(desk: Any, call: Call, asked: tuple[str, ...]) -> None:
    message = desk.refused(call, *asked)
    assert asked[-1] in message or asked == ("check",)


def test_report_of_a_folder_without_a_run_is_refused(desk: Any, call: Call) -> None:
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
        (
            "parallelism={cp: 2, prefill_context_parallel: 2}",
            "--set: pools.0.parallelism.prefill_context_parallel: cannot be combined with cp, which divides the KV "
            "cache; set one of the two to 1",
        ),
        ("max_model_len=200000", "max_model_len (200000) exceeds the longest context of llama-3.1-8b (131072)"),
    ],
)
def test_a_plan_that_contradicts_itself(desk: Any, setting: str, message: str) -> None:
    desk.write("plan.yaml", "schema: simtune/plan@1\nname: mine\nmodel: llama-3.1-8b\npools:\n"
               "- {hardware: h100-sxm, instances: 1, batching: {max_num_seqs: 64, max_num_batched_tokens: 2048},\n"
               "   max_model_len: 16384}\n")  # fmt: skip
    assert desk.simulate("--plan", "plan.yaml").code == 0
    said = desk.refused(desk.simulate, "--plan", "plan.yaml", "--set", f"plan.pools.0.{setting}")
    assert message in said


MINE = """\
schema: simtune/plan@1
name: mine
model: llama-3.1-8b
pools:
- {name: a, hardware: h100-sxm, instances: 2, batching: {max_num_seqs: 64, max_num_batched_tokens: 2048},
   max_model_len: 16384}
- {name: b, hardware: h100-sxm, instances: 1, batching: {max_num_seqs: 64, max_num_batched_tokens: 2048},
   max_model_len: 16384}
"""
RANKS = """\
schema: simtune/plan@1
name: mine
model: qwen3-30b-a3b
pools:
- {name: a, hardware: h100-sxm, instances: 1, batching: {max_num_seqs: 64, max_num_batched_tokens: 2048},
   max_model_len: 16384,
   parallelism: {attention_dp: 4, expert_parallel: true, expert_replicas: 96, elastic_experts: true}}
"""
APART = MINE.replace("{name: a,", "{name: a, role: prefill,").replace("{name: b,", "{name: b, role: decode,")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            MINE + "router: {kind: round_robin, weights: {c: 2}}\n",
            "plan.yaml:9:39: router.weights.c: the router gives a weight to pool 'c', which is not there; pools: a, b",
            id="a weight for a pool that is not there",
        ),
        pytest.param(
            MINE + "router: {kind: by_length, longest: {c: 2000}}\n",
            "plan.yaml:9:37: router.longest.c: the router gives prompts up to a length to pool 'c', which is not "
            "there; pools: a, b",
            id="a length for a pool that is not there",
        ),
        pytest.param(
            MINE + "events: [{kind: failure, at_s: 5, pool: c, instance: 0}]\n",
            "plan.yaml:9:35: events.0.pool: the failure names pool 'c', which is not there; pools: a, b",
            id="a failure in a pool that is not there",
        ),
        pytest.param(
            MINE + "events: [{kind: switch, at_s: 5, pool: a, instance: 0, to: d}]\n",
            "plan.yaml:9:56: events.0.to: the switch names pool 'd', which is not there; pools: a, b",
            id="a switch to a pool that is not there",
        ),
        pytest.param(
            MINE + "events: [{kind: failure, at_s: 5, pool: a, instance: 2}]\n",
            "plan.yaml:9:44: events.0.instance: pool a has 2 instances, numbered from 0; there is no 2",
            id="an instance that is not there",
        ),
        pytest.param(
            MINE + "events:\n- {kind: failure, at_s: -1, pool: a, instance: 0}\n",
            "plan.yaml:10:19: events.0.at_s: must be greater than or equal to 0 (found -1)",
            id="a failure in the past",
        ),
        pytest.param(
            MINE + "events:\n- {kind: failure, at_s: 5, pool: a, instance: 0, recover_s: 10}\n"
            "- {kind: failure, at_s: 14, pool: a, instance: 0}\n",
            "plan.yaml:11:19: events.1.at_s: the failure of instance 0 of pool a at 14 s comes before an earlier "
            "event of that instance is over; list them in order, a start first; a failed instance comes back by "
            "recover_s",
            id="a failure of what has not recovered",
        ),
        pytest.param(
            MINE + "events:\n- {kind: failure, at_s: 5, pool: a, instance: 0}\n"
            "- {kind: start, at_s: 14, pool: a, instance: 0}\n",
            "plan.yaml:11:17: events.1.at_s: the start of instance 0 of pool a at 14 s comes after its last "
            "event; list them in order, a start first; a failed instance comes back by recover_s",
            id="a start of what is lost for good",
        ),
        pytest.param(
            MINE + "events: [{kind: rank_failure, at_s: 5, pool: a, instance: 0, rank: 0}]\n",
            "plan.yaml:9:11: events.0.kind: the instances of pool a have no data-parallel ranks; write a failure of "
            "the instance, or raise parallelism.attention_dp",
            id="a rank of an instance without any",
        ),
        pytest.param(
            RANKS + "events: [{kind: rank_failure, at_s: 5, pool: a, instance: 0, rank: 4}]\n",
            "plan.yaml:8:62: events.0.rank: an instance of pool a has 4 ranks, numbered from 0; there is no 4",
            id="a rank that is not there",
        ),
        pytest.param(
            RANKS.replace("elastic_experts: true", "elastic_experts: false")
            + "events: [{kind: rank_failure, at_s: 5, pool: a, instance: 0, rank: 0, pause_s: 1}]\n",
            "plan.yaml:8:71: events.0.pause_s: has no effect if the whole instance fails with the rank; remove it, or "
            "set parallelism.elastic_experts of pool a",
            id="a pause of an instance that fails",
        ),
        pytest.param(
            RANKS + "events: [{kind: scale, at_s: 5, pool: a, instance: 0, ranks: 5}]\n",
            "plan.yaml:8:55: events.0.ranks: an instance of pool a has at most 4 ranks; lower it, or raise "
            "parallelism.attention_dp",
            id="more ranks than there are",
        ),
        pytest.param(
            RANKS.replace("elastic_experts: true", "elastic_experts: false")
            + "events: [{kind: scale, at_s: 5, pool: a, instance: 0, ranks: 2}]\n",
            "plan.yaml:8:11: events.0.kind: the number of ranks is fixed; set parallelism.elastic_experts of pool a, "
            "or remove the event",
            id="ranks that are fixed",
        ),
        pytest.param(
            RANKS + "events:\n- {kind: rank_failure, at_s: 5, pool: a, instance: 0, rank: 1, recover_s: 10}\n"
            "- {kind: rank_failure, at_s: 14, pool: a, instance: 0, rank: 1}\n",
            "plan.yaml:10:24: events.1.at_s: the rank_failure of rank 1 of instance 0 of pool a at 14 s comes before "
            "an earlier event of that instance is over; list them in order, a start first; a failed instance "
            "comes back by recover_s",
            id="two failures of one rank",
        ),
        pytest.param(
            RANKS
            + "events:\n"
            + "".join(f"- {{kind: rank_failure, at_s: 5, pool: a, instance: 0, rank: {i}}}\n" for i in range(4)),
            "plan.yaml:12:55: events.3.rank: the last rank of instance 0 of pool a fails; let another one come back "
            "before (recover_s), or write a failure of the instance",
            id="the last rank",
        ),
        pytest.param(
            RANKS + "events:\n- {kind: scale, at_s: 5, pool: a, instance: 0, ranks: 3}\n"
            "- {kind: rank_failure, at_s: 14, pool: a, instance: 0, rank: 1}\n",
            "plan.yaml:10:4: events.1.kind: instance 0 of pool a is scaled, and ranks of it fail; no engine does both: "
            "keep one kind of these events for an instance",
            id="ranks that fail and are scaled",
        ),
        pytest.param(
            RANKS + "events:\n- {kind: scale, at_s: 5, pool: a, instance: 0, ranks: 3}\n"
            "- {kind: failure, at_s: 14, pool: a, instance: 0}\n",
            "plan.yaml:10:4: events.1.kind: ranks of instance 0 of pool a change before, and an event of the whole "
            "instance can only come first; remove it, or the events of ranks",
            id="an instance that fails after its ranks changed",
        ),
        pytest.param(
            RANKS.replace(
                "elastic_experts: true}",
                "elastic_experts: false},\n   autoscaling: {startup_s: 1, "
                "rule: {kind: rate, requests_per_s: 1}, min_ranks: 2}",
            ),
            "plan.yaml:8:71: pools.0.autoscaling.min_ranks: requires instances that go on with fewer ranks; set "
            "attention_dp above 1, expert_parallel, expert_replicas and elastic_experts in parallelism, or scale "
            "instances (max_instances)",
            id="ranks by load of instances that cannot go on with fewer",
        ),
        pytest.param(
            RANKS.replace(
                "elastic_experts: true}",
                "elastic_experts: true},\n   autoscaling: {startup_s: 1, "
                "rule: {kind: rate, requests_per_s: 1}, min_ranks: 2}",
            )
            + "events:\n- {kind: scale, at_s: 5, pool: a, instance: 0, ranks: 3}\n",
            "plan.yaml:8:4: pools.0.autoscaling: cannot be combined with events of the plan; remove one of the two",
            id="ranks by load and at stated times",
        ),
        pytest.param(
            RANKS.replace(", expert_replicas: 96", ""),
            "plan.yaml:7:58: pools.0.parallelism.elastic_experts: requires data-parallel ranks and experts that are "
            "placed by load; set attention_dp above 1 and expert_replicas, or remove it",
            id="elastic experts that are not placed",
        ),
        pytest.param(
            RANKS.replace("max_model_len", "lora: {rank: 8, slots: 2}, max_model_len"),
            "plan.yaml:7:79: pools.0.parallelism.elastic_experts: cannot be combined with lora; remove one of the two",
            id="elastic experts with adapters",
        ),
        pytest.param(
            MINE.replace("max_model_len: 16384}", "max_model_len: 16384, kv_cache: {num_blocks: 1024}}", 1),
            "plan.yaml:6:37: pools.0.kv_cache.num_blocks: 1024 KV blocks, one of them the engine's own, cannot hold "
            "one request of max_model_len (16384), which needs 1024; give 1025 or more, or lower max_model_len",
            id="no room for one request",
        ),
        pytest.param(
            APART,
            "plan.yaml:1:1: prefill and decode pools need a link between them; write `link: {}` for the hardware's "
            "inter_node link",
            id="no link",
        ),
        pytest.param(
            MINE.replace("{name: a,", "{name: a, role: prefill,").replace("{name: b,", "{name: b, role: prefill,"),
            "plan.yaml:1:1: a prefill pool needs a decode pool beside it; add one, or make the role mixed",
            id="nobody decodes",
        ),
        pytest.param(
            MINE + "link: {}\n",
            "plan.yaml:9:1: link: has no effect if all pools are mixed; remove it, or give pools the roles prefill "
            "and decode",
            id="a link between mixed pools",
        ),
        pytest.param(
            MINE + "decode_router: {kind: least_tokens}\n",
            "plan.yaml:9:1: decode_router: has no effect if all pools are mixed; remove it, or give pools the roles "
            "prefill and decode",
            id="a router between mixed pools",
        ),
        pytest.param(
            APART + "link: {}\nlinks: [{from: a, to: b}]\n",
            "plan.yaml:9:1: link: every pair of pools has a link of its own in `links`, so `link` is not used; remove "
            "it",
            id="a link that nothing takes",
        ),
        pytest.param(
            APART + "link: {}\nrouter: {kind: round_robin, weights: {b: 2}}\n",
            "plan.yaml:10:39: router.weights.b: the router gives a weight to pool b, and router sends new "
            "requests: name "
            "it in decode_router, or leave it out",
            id="a weight for a pool that takes nothing new",
        ),
        pytest.param(
            APART + "link: {}\ndecode_router: {kind: by_length, longest: {a: 2000}}\n",
            "plan.yaml:10:44: decode_router.longest.a: the router gives prompts up to a length to pool a, and "
            "decode_router sends those whose prompt is done: name it in router, or leave it out",
            id="a length for a pool that decodes nothing",
        ),
        pytest.param(
            APART + "link: {costs: transfers.jsonl, path: intra_node}\n",
            "plan.yaml:9:32: link.path: cannot be combined with costs, whose measured transfers replace the link's "
            "rates; remove one of the two",
            id="a link both measured and rated",
        ),
        pytest.param(
            APART + "link: {costs: transfers.jsonl, packed: true}\n",
            "plan.yaml:9:32: link.packed: a measured transfer has its pieces in it; give descriptor_s, or leave "
            "this out",
            id="pieces of measured transfers",
        ),
    ],
)
def test_plan_that_names_missing_parts_is_refused(desk: Any, text: str, message: str) -> None:
    desk.write("plan.yaml", text)
    assert desk.refused(desk.simulate, "--plan", "plan.yaml") == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("batching.safety_margin=0.1",), "policy vllm-fcfs has no safety_margin; leave it out, or choose transf"),
        (
            ("batching.prediction_sigma=0.2",),
            "policy vllm-fcfs predicts no output lengths; leave prediction_sigma out, or choose "
            "shortest-predicted-first",
        ),
        (("batching.self_preemption_ends_step=always",), "batching.self_preemption_ends_step"),
        (("batching.draft_rules=vllm-0.31",), "batching.draft_rules"),
        (("research.expert_locality=0.5",), "set expert_parallel and an attention_dp above 1, or remove it"),
        (
            (
                "expert_exchange=all_gather",
                "parallelism={attention_dp: 2, expert_parallel: true}",
                "research.expert_locality=1",
            ),
            "has no effect if all ranks gather all tokens; set expert_exchange to deepep, or remove it",
        ),
        (("batching.policy=static", "max_model_len=4096"), "policy static never cuts prompts"),
        (("batching.policy=orca", "max_model_len=4096"), "policy orca never cuts prompts"),
        (
            ("batching.policy=orca", "max_model_len=2048", "batching.long_prefill_token_threshold=64"),
            "policy orca has no long_prefill_token_threshold; leave it out, or choose vllm-fcfs or vllm-priority",
        ),
        (
            ("batching.policy=sarathi", "batching.scheduler_reserve_full_isl=false"),
            "policy sarathi has no scheduler_reserve_full_isl; leave it out, or choose vllm-fcfs or vllm-priority",
        ),
        (("batching.policy=transformers-fifo", "kv_cache.watermark=0.1"), "keeps blocks free by safety_margin"),
        (
            ("batching.policy=transformers-prefill-first", "batching.chunked_prefill=false",
             "batching.max_num_batched_tokens=16384"),
            "policy transformers-prefill-first always cuts prompts at the token budget; leave chunked_prefill out",
        ),
        (
            ("batching.policy=static", "kv_cache.prefix_caching=true"),
            "policy static has no prefix_caching: each prompt is computed at the length of the longest of its batch; "
            "leave it out, or choose vllm-fcfs or vllm-priority or sglang",
        ),
        (
            ("batching.policy=sglang", "kv_cache.preemption=swap"),
            "policy sglang has no swap: SGLang computes retracted requests again; leave it out, or choose vllm-fcfs or "
            "vllm-priority",
        ),
        (
            ("kv_cache.prefix_caching=true", "kv_cache.preemption=swap"),
            "prefix_caching and preemption by swap do not go together; choose one",
        ),
    ],
)  # fmt: skip
def test_policy_with_an_unsupported_setting_is_refused(desk: Any, settings: tuple[str, ...], message: str) -> None:
    desk.write("plan.yaml", MINE)
    given = [x for setting in settings for x in ("--set", f"plan.pools.0.{setting}")]
    assert message in desk.refused(desk.simulate, "--plan", "plan.yaml", *given)


def test_a_link_that_the_hardware_does_not_have(desk: Any) -> None:
    desk.write("plan.yaml", APART + "link: {path: pigeon}\n")
    message = desk.refused(desk.simulate, "--plan", "plan.yaml")
    assert message.startswith("plan mine: hardware h100-sxm: ")
    assert "pigeon" in message


def test_router_without_the_workload_fields_it_needs_is_refused(desk: Any) -> None:
    desk.write("plan.yaml", MINE + "router: {kind: session_affinity}\n")
    message = desk.refused(desk.simulate, "--plan", "plan.yaml")
    assert message.startswith("the session_affinity router needs sessions, and the workload has none; give it a")
    message = desk.refused(desk.simulate, "--plan", "plan.yaml", "--set", "plan.router={kind: prefix_aware}")
    assert message.startswith(
        "the prefix_aware router needs prompts that say what they share; use a trace with hash_ids"
    )


def test_prefixes_named_in_blocks_that_are_no_multiple_of_kv_blocks(desk: Any) -> None:
    desk.write("plan.yaml", MINE)
    shared = "workload.shared_prefix={groups: 4, tokens: 100, block_tokens: 24}"
    said = desk.simulate("--plan", "plan.yaml", "--set", shared)
    assert said.code == 0, "without prefix caching nobody asks"
    message = desk.refused(
        desk.simulate, "--plan", "plan.yaml", "--set", shared, "--set", "plan.pools.1.kv_cache.prefix_caching=true"
    )
    assert message == (
        "the workload names what prompts share in blocks of 24 tokens, which must be a multiple of the KV block size "
        "of pool b (16), or divide it; change either"
    )


def test_simulate_checks_timeline_and_table_options(desk: Any) -> None:
    window = desk.refused(desk.simulate, "--window", "1..2")
    assert window == "--window chooses what --timeline FILE shows; give both"
    for text in ("2..1", "1-2", "x..y", "..3", "nan..2"):
        message = desk.refused(desk.simulate, "--window", text, "--timeline", "t.json.gz")
        assert message == f"--window {text}: write it as FROM..TO in simulated seconds, for example 10..20"
    message = desk.refused(desk.simulate, "--per-request", "r.xlsx")
    assert message == "r.xlsx: end the name in .csv, .jsonl or .parquet"
    assert desk.simulate("--timeline", "t.json.gz", "--window", "1..2", "--per-request", "r.jsonl").code == 0
    for flag, file in (("--timeline", "t.json.gz"), ("--per-request", "r.jsonl")):
        message = desk.refused(desk.simulate, flag, file)
        assert message == f"{file}: exists; give --force to replace it, or name another file"
        assert desk.simulate(flag, file, "--force").code == 0


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


# --- images -----------------------------------------------------------------------------------------------

PICTURES = (
    "schema: simtune/workload@1\nname: pictures\narrivals: {kind: poisson, rate_rps: 3}\n"
    "prompt: {kind: fixed, tokens: 50}\noutput: {kind: fixed, tokens: 5}\n"
    "images: {sizes: [{width: 640, height: 480}]}\n"
)


def test_images_for_a_model_that_reads_none(desk: Any) -> None:
    desk.write("pictures.yaml", PICTURES)
    message = desk.refused(desk.simulate, "--out", "run", workload="./pictures.yaml")
    assert message.startswith(
        "workload pictures has images, and model llama-3.1-8b states no vision encoder; add vision to the model spec"
    )
    desk.study("workload: chat", "workload: pictures.yaml")
    assert desk.refused(desk.optimize) == message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("width: 640", "width: 0",
         "pictures.yaml:6:19: images.sizes.0.width: must be from 1 to 100,000 pixels (found 0)"),
        ("640", "wide",
         "pictures.yaml:6:19: images.sizes.0.width: must be a number of pixels, or quantiles of it (found 'wide')"),
        ("sizes:", "share: 2, sizes:", "pictures.yaml:6:10: images.share: must be less than or equal to 1 (found 2)"),
        ("sizes:", "per_request: 0, sizes:",
         "pictures.yaml:6:10: images.per_request.0: must be greater than or equal to 1 (found 0)"),
        (
            "images:", "sessions: {concurrent: 2, turns: 3}\nimages:",
            "pictures.yaml:7:1: images: images need turns that follow answers; remove images, or follow and concurrent",
        ),
    ],
)  # fmt: skip
def test_images_that_cannot_be(desk: Any, old: str, new: str, message: str) -> None:
    desk.write("pictures.yaml", PICTURES.replace(old, new))
    assert desk.refused(desk.simulate, "--out", "run", workload="./pictures.yaml") == message


MEDIA = PICTURES + "videos: {sizes: [{width: 640, height: 360}], seconds: 5}\naudio: {seconds: 3}\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seconds: 5", "seconds: 5, fps: 0", "pictures.yaml:7:58: videos.fps: must be greater than 0 (found 0)"),
        (
            "seconds: 5", "seconds: 5, fps: 1, frames: 4",
            "pictures.yaml:7:1: videos: frames that clients send are not sampled again; remove fps, or frames",
        ),
        (
            "seconds: 5", "seconds: 0",
            "pictures.yaml:7:46: videos.seconds: must be above 0 and at most 100,000 seconds (found 0)",
        ),
        (
            "seconds: 3", "seconds: short",
            "pictures.yaml:8:9: audio.seconds: must be a number of seconds, or quantiles of it (found 'short')",
        ),
        (
            "{seconds: 3", "{block_tokens: 8, seconds: 3",
            "pictures.yaml:8:9: audio.block_tokens: blocks are of one size in all media; give each the same "
            "block_tokens",
        ),
        (
            "images:", "graph: [{name: ask}]\nimages:",
            "pictures.yaml:7:1: images: images are those of single requests and of sessions; remove images, or graph",
        ),
    ],
)  # fmt: skip
def test_videos_and_recordings_that_cannot_be(desk: Any, old: str, new: str, message: str) -> None:
    desk.write("pictures.yaml", MEDIA.replace(old, new))
    assert desk.refused(desk.simulate, "--out", "run", workload="./pictures.yaml") == message


def test_recordings_and_short_videos_for_a_model_that_sees(desk: Any) -> None:
    """The model has no encoder for sound; a video of one frame has no patch."""
    model = ("--model", "qwen2.5-vl-7b")
    desk.write("pictures.yaml", MEDIA)
    message = desk.refused(desk.simulate, "--out", "run", *model, workload="./pictures.yaml")
    assert message.startswith(
        "workload pictures has audio, and model qwen2.5-vl-7b states no audio encoder; add audio to the model spec"
    )
    desk.write("pictures.yaml", MEDIA.replace("seconds: 5", "seconds: 0.03").replace("audio: {seconds: 3}\n", ""))
    message = desk.refused(desk.simulate, "--out", "run", *model, workload="./pictures.yaml")
    assert message == (
        "workload pictures: videos.seconds: a video of 0.03 s at 30 frames per second has 1 of the 2 frames that one "
        "patch needs; raise seconds or frame_rate"
    )
