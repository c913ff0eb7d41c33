"""What TensorRT-LLM and SGLang make of budgets and memory, where vLLM's rules would refuse a plan that they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simtune.costs.memory import kv_capacity
from simtune.engine.policies.tensorrt_llm import TensorRtLlmScheduler
from simtune.engine.request import Request
from simtune.errors import Infeasible
from simtune.sim.deployment import deploy
from simtune.specs.catalog import load_engine, load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.workload import ClosedLoop, FixedLength, Slo, Workload
from simtune.workload.requests import build_stream
from tests.cli.conftest import call

LLAMA = load_model("llama-3.1-8b")
HYBRID = load_model("qwen3-next-80b-a3b")


def pool_of(engine: str, model: Any = LLAMA, hardware: str = "h100-sxm", tp: int = 1, **own: Any) -> Pool:
    settings = load_engine(engine).settings(load_hardware(hardware).device, model)
    data = {"hardware": hardware, "instances": 1, "parallelism": {"tp": tp}, **settings, **own}
    return Pool.model_validate(data)


# --- the token budget of TensorRT-LLM bounds prompts -------------------------------------------------------


def test_a_budget_below_max_model_len_is_enough_where_nothing_is_computed_again() -> None:
    pool = pool_of("trtllm-1.2", max_model_len=32768)
    assert pool.batching.max_num_batched_tokens < 32768
    assert not pool.batching.chunked_prefill
    deploy(Plan(name="p", model=LLAMA.name, pools=(pool,)), LLAMA, load_hardware("h100-sxm"))


def test_where_requests_are_paused_the_budget_holds_the_longest_of_them() -> None:
    pool = pool_of("trtllm-1.2", max_model_len=32768)
    options = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    paused = pool.model_copy(update={"batching": pool.batching.model_copy(update={"options": options})})
    with pytest.raises(Infeasible, match="must be at least max_model_len"):
        deploy(Plan(name="p", model=LLAMA.name, pools=(paused,)), LLAMA, load_hardware("h100-sxm"))


def scheduler(**own: Any) -> TensorRtLlmScheduler:
    usual = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    return TensorRtLlmScheduler(**{**usual, "chunked_prefill": False, **own})


@pytest.mark.parametrize(
    ("prompt", "output", "own", "taken"),
    [
        (16, 40, {}, True),
        (17, 1, {}, False),  # no step has room for the prompt
        (17, 1, {"chunked_prefill": True}, True),
        (16, 49, {}, False),  # longer than max_model_len
        (8, 9, {"max_new_tokens": 8}, False),  # nothing is reserved for the ninth token
        (8, 8, {"max_new_tokens": 8}, True),
    ],
)
def test_requests_that_are_refused(prompt: int, output: int, own: dict[str, Any], taken: bool) -> None:
    assert scheduler(**own).add(Request(0, prompt, output)) is taken


def test_a_long_context_is_served_by_the_engine_as_it_comes() -> None:
    """Answers reach past the budget of 8,192 tokens; prompts past it are refused and counted."""
    said = call(
        *("simulate", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--engine", "trtllm-1.2", "--json", "-q"),
        *("--workload", "chat", "--requests", "40", "--rate", "1"),
        *("--set", "workload.prompt={kind: quantiles, levels: [0.0, 0.5, 1.0], tokens: [6000, 8000, 9000]}"),
        *("--set", "workload.output={kind: fixed, tokens: 1000}"),
    )
    assert said.code == 0, said.err
    assert 0 < said.json["refused"] < 40


# --- memory shares -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["trtllm-1.0", "trtllm-1.2"])
def test_a_share_of_what_is_free_leaves_more_than_one_of_the_device(engine: str) -> None:
    """0.9 of 80 GiB less weights would be 8 GiB less the tenth of them; TensorRT-LLM takes 0.9 of the rest."""
    pool, hardware = pool_of(engine, max_model_len=8192), load_hardware("h100-sxm")
    memory = kv_capacity(LLAMA, hardware, pool)
    free = memory.total_bytes - memory.weights_bytes - memory.other_bytes
    assert memory.kv_bytes == pytest.approx(0.9 * free)
    of_device = {"memory_utilization_of": "device"}
    vllm = pool.model_copy(update={"kv_cache": pool.kv_cache.model_copy(update=of_device)})
    less = kv_capacity(LLAMA, hardware, vllm)
    assert memory.kv_bytes - less.kv_bytes == pytest.approx(0.1 * (memory.weights_bytes + memory.other_bytes))


# --- seats of SGLang ---------------------------------------------------------------------------------------


def test_seats_of_a_hybrid_model_are_fitted_to_memory() -> None:
    """2,048 seats of 2 x 36 layers' states would take more than the card has."""
    pool, hardware = pool_of("sglang-0.5", HYBRID, tp=4, max_model_len=8192), load_hardware("h100-sxm")
    memory = kv_capacity(HYBRID, hardware, pool)
    held = memory.utilization * memory.total_bytes - memory.weights_bytes - memory.other_bytes
    fixed = pool.model_copy(update={"kv_cache": pool.kv_cache.model_copy(update={"state_memory_ratio": None})})
    with pytest.raises(Infeasible, match="2048 seats"):
        kv_capacity(HYBRID, hardware, fixed)
    one = fixed.model_copy(update={"batching": pool.batching.model_copy(update={"max_num_seqs": 1})})
    state = kv_capacity(HYBRID, hardware, one).seat_bytes
    states = int(held * 0.9 / 1.9 / state)
    assert memory.seats == states // 3
    assert memory.seat_bytes == pytest.approx(states * state)
    assert memory.kv_bytes == pytest.approx(held - states * state)
    assert memory.seat_bytes / memory.kv_bytes == pytest.approx(0.9, rel=0.01)


def test_its_scheduler_has_these_seats() -> None:
    pool, hardware = pool_of("sglang-0.5", HYBRID, tp=4, max_model_len=8192), load_hardware("h100-sxm")
    deployed = deploy(Plan(name="p", model=HYBRID.name, pools=(pool,)), HYBRID, hardware).pools[0]
    (core,) = deployed.cores(1, None)
    assert core.scheduler.max_num_seqs == deployed.memory.seats < pool.batching.max_num_seqs


def test_few_seats_are_left_alone() -> None:
    pool = pool_of("sglang-0.5", HYBRID, tp=4, max_model_len=8192)
    few = pool.model_copy(update={"batching": pool.batching.model_copy(update={"max_num_seqs": 5})})
    assert kv_capacity(HYBRID, load_hardware("h100-sxm"), few).seats == 5


def test_models_without_states_keep_their_seats() -> None:
    pool = pool_of("sglang-0.5")
    memory = kv_capacity(LLAMA, load_hardware("h100-sxm"), pool)
    assert (memory.seats, memory.seat_bytes) == (2048, 0)


def test_a_card_without_room_for_a_state_is_refused() -> None:
    hardware = load_hardware("h100-sxm")
    device = hardware.device.model_copy(update={"memory_bytes": hardware.device.memory_bytes * 0.37})
    small = hardware.model_copy(update={"device": device})
    with pytest.raises(Infeasible, match=r"GiB per device are missing"):
        kv_capacity(HYBRID, small, pool_of("sglang-0.5", HYBRID, tp=4))


# --- check refuses what simulate refuses -------------------------------------------------------------------

DRAFTS = {"drafter": {"kind": "eagle"}, "scheme": {"kind": "chain", "tokens": 3}, "acceptance": "eagle3-llama-3.1-8b"}


@pytest.mark.parametrize(
    ("engine", "own", "said"),
    [
        ("vllm-0.24", {"kv_cache": {"prefix_caching": True, "preemption": "swap"}}, "do not go together"),
        ("vllm-0.24", {"parallelism": {"tp": 3}}, "tp"),
        ("vllm-0.24", {"max_model_len": 1_000_000}, "exceeds the longest context"),
    ],
)
def test_check_refuses_what_simulate_refuses(tmp_path: Path, engine: str, own: dict[str, Any], said: str) -> None:
    pool = {"hardware": "h100-sxm", "instances": 1, "engine": engine, **own}
    plan = {"schema": "simtune/plan@1", "name": "p", "model": "llama-3.1-8b", "pools": [pool]}
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(plan))
    checked = call("check", path)
    simulated = call("simulate", "--plan", path, "--workload", "chat", "--requests", "10", "-q")
    assert (checked.code, simulated.code) == (2, 2)
    assert said in checked.err
    assert checked.err == simulated.err


def test_check_accepts_a_plan_that_runs_and_says_what_it_could_not_look_at(tmp_path: Path) -> None:
    pool = {"hardware": "h100-sxm", "instances": 1, "engine": "vllm-0.24", "max_model_len": 8192}
    plan = {"schema": "simtune/plan@1", "name": "p", "model": "llama-3.1-8b", "pools": [pool]}
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(plan))
    said = call("check", path)
    assert said.code == 0
    assert "not tried" not in said.out
    batching = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    plain = {"hardware": "h100-sxm", "instances": 1, "batching": batching}
    path.write_text(json.dumps({**plan, "model": "our-own", "pools": [plain]}))
    said = call("check", path)
    assert said.code == 0
    assert "not tried on its hardware: no model is called 'our-own'" in said.out


# --- room for output: as much as clients ask for ----------------------------------------------------------


@pytest.mark.parametrize("engine", ["trtllm-1.2", "sglang-0.5"])
def test_room_is_kept_for_what_clients_ask_for(engine: str) -> None:
    """40,000 tokens of KV cache hold eighty requests of 400 tokens, or two of those that may become 16,000 long."""
    pool = pool_of(engine, max_model_len=16_000, kv_cache={"num_blocks": 2500, "block_size": 16})
    deployment = deploy(Plan(name="p", model=LLAMA.name, pools=(pool,)), LLAMA, load_hardware("h100-sxm"))
    load = Workload(
        name="load",
        arrivals=ClosedLoop(users=40),
        prompt=FixedLength(tokens=200),
        output=FixedLength(tokens=200),
        requests=80,
    )
    rates = {}
    for most in (None, 100, 1_000, 15_000):
        stream = build_stream(load.model_copy(update={"max_tokens": most}), None, requests=80, seed=0)
        rate = deployment.simulate(stream, Slo()).summary().output_tokens_per_s
        assert rate is not None
        rates[most] = rate
    assert rates[100] == rates[None], "fewer tokens than the output has are its own length"
    assert rates[None] >= rates[1_000] > 1.3 * rates[15_000]
