"""KV caches on their way: which GPUs send one, and when an engine that polls every few steps hears of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import simtune
from simtune.costs.predict import Profile
from simtune.errors import UsageError
from simtune.sim.kv_links import BOOTSTRAP_S
from simtune.specs.catalog import load_engine, load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.preset import merged
from simtune.specs.workload import ClosedLoop, FixedLength, Poisson, Workload

H200 = load_hardware("h200-sxm")
NIC_BYTES_PER_S = H200.links["inter_node"].bytes_per_s


def transfers_s(model_name: str, engine: str, prefill: dict[str, Any], decode: dict[str, Any], **link: Any) -> float:
    """Return the seconds of one transfer of 8,192 tokens in a plan with two pools, the link's setup left out."""
    model = load_model(model_name)
    settings = load_engine(engine).settings(H200.device, model)
    sides = (("prefill", prefill), ("decode", decode))
    pools = [
        {**settings, "name": role, "role": role, "hardware": "h200-sxm", "engine": engine, "instances": 1,
         "parallelism": parallelism, "max_model_len": 9000}
        for role, parallelism in sides
    ]  # fmt: skip
    way = {"setup_s": 0.0, "descriptor_s": 0.0, **link}
    plan = Plan.model_validate({"name": "p", "model": model.name, "pools": pools, "link": way})
    load = Workload(
        name="one",
        requests=1,
        arrivals=ClosedLoop(users=1),
        prompt=FixedLength(tokens=8192),
        output=FixedLength(tokens=4),
    )
    result = simtune.simulate(load, plan=plan, model=model, hardware=H200)
    return float(result.transfer_s[0])


@pytest.mark.parametrize(
    ("prefill", "decode", "lanes"), [({"tp": 4}, {"tp": 4}, 4), ({"tp": 4}, {"tp": 2}, 2), ({"tp": 2}, {"tp": 8}, 2)]
)
def test_heads_go_from_gpu_to_gpu(prefill: dict[str, int], decode: dict[str, int], lanes: int) -> None:
    alone_s = transfers_s("llama-3.1-8b", "sglang-0.5", {"tp": 1}, {"tp": 1})
    assert transfers_s("llama-3.1-8b", "sglang-0.5", prefill, decode) == pytest.approx(alone_s / lanes, rel=1e-3)


def test_a_rank_sends_the_heads_that_it_has() -> None:
    """Ranks of two GPUs: four receive from two."""
    sides = {"tp": 2, "attention_dp": 2, "expert_parallel": True}, {"tp": 4}
    alone_s = transfers_s("qwen3-30b-a3b", "sglang-0.5", {"tp": 1}, {"tp": 1})
    assert transfers_s("qwen3-30b-a3b", "sglang-0.5", *sides) == pytest.approx(alone_s / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("prefill", "decode", "rate"),
    [
        ({"tp": 1, "attention_dp": 8}, {"tp": 8}, 1 / 8),  # one GPU sends it to eight
        ({"tp": 8}, {"tp": 1, "attention_dp": 8}, 1.0),  # one GPU receives it
    ],
)
def test_latent_vectors_go_whole_to_every_gpu(prefill: dict[str, int], decode: dict[str, int], rate: float) -> None:
    """Each GPU sends its own copy to another one if tp is 8 on both sides."""
    pair_s = transfers_s("deepseek-v3", "trtllm-1.2", {"tp": 8}, {"tp": 8})
    sides = ({**side, "expert_parallel": True} for side in (prefill, decode))
    assert transfers_s("deepseek-v3", "trtllm-1.2", *sides) == pytest.approx(pair_s / rate, rel=1e-3)
    assert pair_s > 8192 * 61 * 576 / NIC_BYTES_PER_S


def test_a_rate_that_is_stated_counts_as_it_is() -> None:
    sides = {"tp": 2, "attention_dp": 2, "expert_parallel": True}, {"tp": 4}
    layers, heads = 48, 4
    stated_s = transfers_s("qwen3-30b-a3b", "sglang-0.5", *sides, bytes_per_s=1e9)
    assert stated_s == pytest.approx(8192 * 2 * layers * heads * 128 * 2 / 1e9, rel=1e-3)


def test_an_engine_that_polls_every_few_steps_takes_requests_over_later() -> None:
    """A request that is handed over waits for 0 to 10 steps, about 5 in the mean, if the engine polls every tenth time;
    an idle engine polls at once."""
    model = load_model("llama-3.1-8b")
    waits, steps_s = [], []
    for interval in (1, 10):
        options = {"batching": {"options": {"scheduler_recv_interval": interval}}}
        settings = load_engine("sglang-0.5").settings(H200.device, model)
        pools = [
            {**(merged(options, settings) if role == "decode" else settings), "name": role, "role": role,
             "hardware": "h200-sxm", "engine": "sglang-0.5", "instances": 1, "max_model_len": 2000}
            for role in ("prefill", "decode")
        ]  # fmt: skip
        plan = Plan.model_validate({"name": "p", "model": model.name, "pools": pools, "link": {}})
        load = Workload(
            name="load", requests=400, arrivals=Poisson(rate_rps=4.0),
            prompt=FixedLength(tokens=256), output=FixedLength(tokens=512),
        )  # fmt: skip
        result = simtune.simulate(load, plan=plan, model=model, hardware=H200)
        waits.append(result.transfer_s)
        steps_s.append(float(np.median(result.tpot_s)))
    later = waits[1] - waits[0]
    step_s = steps_s[1]
    assert 3.5 * step_s < later.mean() < 6.5 * step_s
    assert later[0] == pytest.approx(0.0, abs=1e-9)
    assert later.max() < 12 * step_s


@pytest.mark.parametrize(("engine", "agreed_s"), [("sglang-0.5", BOOTSTRAP_S), ("vllm-0.28", 0.0)])
def test_instances_of_sglang_agree_on_a_handover_before_its_first_byte(engine: str, agreed_s: float) -> None:
    parallel = {"tp": 4}
    sizes = {"bytes_per_s": 1e15, "descriptor_s": 0.0}
    without, by_default = (
        transfers_s("llama-3.1-8b", engine, parallel, parallel, **sizes, setup_s=setup_s) for setup_s in (0.0, None)
    )
    setup_s = Profile(H200).predictor("kv_transfer", "bf16", variant="inter_node").operator.base.overhead_s
    assert by_default - without == pytest.approx(setup_s + agreed_s, abs=0.002)


def test_a_card_without_a_link_between_nodes_has_one_within_a_node() -> None:
    l40s, model = load_hardware("l40s"), load_model("llama-3.1-8b")
    batching = {"max_num_seqs": 8, "max_num_batched_tokens": 1024}
    pools = [
        {"name": role, "role": role, "hardware": "l40s", "batching": batching, "max_model_len": 1024, "instances": 1}
        for role in ("prefill", "decode")
    ]
    load = {"arrival_s": [0.0], "prompt_tokens": [512], "output_tokens": [4]}

    def simulated(**link: Any) -> float:
        plan = Plan.model_validate({"name": "p", "model": model.name, "pools": pools, "link": link})
        return float(simtune.simulate(load, plan=plan, model=model, hardware=l40s).transfer_s[0])

    with pytest.raises(UsageError, match=r"l40s: no link inter_node .* write link: \{path: intra_node\} if"):
        simulated()
    kv_bytes = 512 * 32 * 2 * 8 * 128 * 2
    assert simulated(path="intra_node") > kv_bytes / l40s.links["intra_node"].bytes_per_s
