"""What the verbs refuse besides files that are wrong: options that do not fit, names that are none, other logs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.conftest import Desk, call
from tests.fuzz.corpus import FACTS

POOL = "{hardware: h100-sxm, instances: 1, batching: {max_num_seqs: 8, max_num_batched_tokens: 512}"
PLAN = f"schema: simtune/plan@1\nname: p\nmodel: llama-3.1-8b\npools: [{POOL}}}]\n"
APART = PLAN.replace(f"[{POOL}}}]", f"[{POOL}, name: a, role: prefill}}, {POOL}, name: b, role: decode}}]\nlink: {{}}")
LOAD = """\
schema: simtune/workload@1
name: short
requests: 4
arrivals: {kind: poisson, rate_rps: 4}
prompt: {kind: fixed, tokens: 30}
output: {kind: fixed, tokens: 4}
"""
STEPS = '{"decodes": 1}\n'
SPLITWISE = (
    "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time\n"
    "llama-2-70b,h100-80gb,8,128,1,64,20,30\n"
)
SCRAPE = "# TYPE vllm:request_prompt_tokens histogram\n"
HALF = "import simtune\n\n\nclass Half(simtune.Router):\n    pass\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "calibrate h100-sxm --measured steps.jsonl --plan apart.yaml --out new",
            "apart.yaml: has 2 pools; a log is of one",
        ),
        ("calibrate h100-sxm --measured steps.jsonl --out new", "name the model the engine ran (--model), or its plan"),
        (
            "calibrate h100-sxm --measured splitwise.csv --model llama-3.1-8b --out new",
            "has no row of llama-3.1-8b on NVIDIA H100 SXM5 80GB at tp 1; its rows are of llama-2-70b on h100-80gb",
        ),
        ("validate plan.yaml --engine http://127.0.0.1:9 --out v", "name the load to send: --workload"),
        (
            "sweep --model llama-3.1-8b --hardware h100-sxm --workload chat --over rate=1:x:2 --out s",
            "--over rate=1:x:2: FROM:TO:STEP must be numbers",
        ),
        (
            "sweep --model llama-3.1-8b --hardware h100-sxm --workload chat --over rate=3:1:1 --out s",
            "--over rate=3:1:1: STEP must be above zero, and TO not below FROM",
        ),
        (
            "sweep --model llama-3.1-8b --hardware h100-sxm --workload chat --over rate=1:3:0 --out s",
            "STEP must be above zero",
        ),
        (
            "sweep --model llama-3.1-8b --hardware h100-sxm --workload chat --over rate=1,2 --over rate=3 --out s",
            "--over names a field twice: rate, rate",
        ),
        (
            "fit --facts facts.yaml --out new",
            "give tables to fit (SOURCE...), or a profile to transfer from (--transfer-from)",
        ),
        (
            "calibrate h100-sxm --measured steps.csv --model llama-3.1-8b --out new",
            "at least 8 decode or prefill steps are needed; the log has 1 decode",
        ),
        ("simulate --plan plan.yaml --workload chat --leave-out trace", "--leave-out says what --out FOLDER lacks"),
        (
            "sweep --plan plan.yaml --workload chat --over rate=1,2 --parquet",
            "--parquet needs a folder: --out runs/NAME",
        ),
        ("sweep --plan plan.yaml --over rate=1,2 --out s", "name a --workload"),
        (
            "sweep --plan plan.yaml --workload chat --over rate=1:2000000:1 --out s",
            "--over rate=1:2000000:1: has more than 100,000 values; take a larger STEP",
        ),
        (
            "sweep --plan plan.yaml --workload chat --over rate=1:1000:1 --over seed=1:1000:1 --out s",
            "the grid has more than 100,000 points; sweep fewer values",
        ),
        ("weights llama-3.1-8b --out w --rigged llama-3.2-1b", "--rigged DRAFT and --acceptance SHARE belong together"),
        (
            "workload scrape.txt trace.csv",
            "trace.csv: is no scrape, and others of these files are; read them in separate commands",
        ),
        ("show nothing-like-this", "nothing built in is called 'nothing-like-this'"),
        ("check plon.yaml", "plon.yaml: `schema` is 'simtune/plon@1', did you mean simtune/plan@1?"),
        ("check other.yaml", "other.yaml: `schema` is 'mine'; it must be one of "),
        ("simulate --plan one.yaml --workload chat", "half:Half "),
        ("simulate --plan two.yaml --workload chat", "half.py has no Helf, did you mean Half?"),
    ],
)
@pytest.mark.usefixtures("own_code_allowed")
def test_refusal_states_the_reason(desk: Desk, words: str, said: str) -> None:
    for name, text in (
        ("plan.yaml", PLAN),
        ("apart.yaml", APART),
        ("plon.yaml", PLAN.replace("plan@1", "plon@1")),
        ("other.yaml", "schema: mine\n"),
        ("one.yaml", PLAN + "router: {kind: 'half:Half'}\n"),
        ("two.yaml", PLAN + "router: {kind: 'half:Helf'}\n"),
        ("half.py", HALF),
        ("facts.yaml", FACTS),
        ("scrape.txt", SCRAPE),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens\n0,8,8\n"),
        ("steps.csv", "num_decodes,context_tokens,prefill_tokens,seconds\n1,8,0,0.1\n"),
        ("steps.jsonl", STEPS),
        ("splitwise.csv", SPLITWISE),
    ):
        desk.write(name, text)
    assert said in _refused(desk, *words.split())


def _refused(desk: Desk, *words: str) -> str:
    """The message, on one line."""
    before = {path for path in desk.folder.rglob("*") if "__pycache__" not in path.parts}
    done = call(*words)
    assert (done.code, done.out) == (2, ""), done
    assert {path for path in desk.folder.rglob("*") if "__pycache__" not in path.parts} == before
    return " ".join(done.err.split())


def test_a_name_with_a_nul_is_no_file(desk: Desk) -> None:
    assert "'a\\x00b.yaml': is no name of a file" in _refused(
        desk, "simulate", "--plan", "a\0b.yaml", "--workload", "chat"
    )


@pytest.mark.usefixtures("own_code_allowed")
def test_incomplete_router_is_refused_with_missing_methods(desk: Desk) -> None:
    desk.write("half.py", HALF)
    desk.write("one.yaml", PLAN + "router: {kind: 'half:Half'}\n")
    said = _refused(desk, "simulate", "--plan", "one.yaml", "--workload", "chat")
    assert "is not a whole router: it lacks choose" in said


def test_unknown_objective_is_refused_with_the_valid_ones(desk: Desk) -> None:
    said: Any = call("new", "mine.yaml", "--objective", "fast", "--model", "llama-3.1-8b")
    assert said.code == 2
    assert "--objective" in said.err
    assert "goodput_per_gpu" in said.err
    assert not (desk.folder / "mine.yaml").exists()


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ("layered-prefill", "group_tokens: 0", "group_tokens (0) must be at least 1"),
        ("sglang", "scheduler_recv_interval: often", "'<' not supported between instances of 'str' and 'int'"),
        ("sglang", "scheduler_recv_interval: 0", "scheduler_recv_interval (0) must be at least 1"),
        ("sglang", "schedule_conservativeness: 0", "schedule_conservativeness (0) must be above 0"),
        ("tensorrt-llm", "capacity_scheduler_policy: NONE", "capacity_scheduler_policy must be GUARANTEED_NO_EVICT or"),
        ("tensorrt-llm", "context_chunking_policy: NONE", "context_chunking_policy must be FIRST_COME_FIRST_SERVED or"),
    ],
)
def test_settings_that_a_policy_cannot_run_with(desk: Desk, policy: str, options: str, said: str) -> None:
    batching = f"policy: {policy}, options: {{{options}}}, max_num_seqs: 8"
    desk.write("plan.yaml", PLAN.replace("max_num_seqs: 8", batching).replace("}}]", "}, max_model_len: 512}]"))
    desk.write("load.yaml", LOAD)
    told = _refused(desk, "simulate", "--plan", "plan.yaml", "--workload", "load.yaml")
    assert f"batching.options of policy {policy}: " in told
    assert said in told
