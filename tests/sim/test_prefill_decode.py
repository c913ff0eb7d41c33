"""Prefill and decode apart: against the theory of queues in tandem, and by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import VllmFcfs
from simtune.errors import Infeasible, UsageError
from simtune.results.result import Result
from simtune.sim.core import EngineCore, KvConnector, Stepping
from simtune.sim.deployment import deploy
from simtune.sim.link import TransferLink
from simtune.sim.router import LeastTokens, RoundRobin
from simtune.sim.stepping import Pipeline
from simtune.sim.world import World
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import KvLink, Plan
from simtune.specs.plan_events import Failure
from simtune.specs.pool import Batching, Pool, Role
from simtune.specs.workload import FixedLength, Lognormal, Poisson, Workload
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream, build_stream

PLENTY = 10**6


@dataclass(frozen=True)
class Apart:
    """Prefill instances that take one prompt at a time, 1 s per token, and one decode instance.

    KV blocks hold one token and have 100 bytes.
    """

    bytes_per_s: float
    prefills: int = 1
    pp: int = 1
    prefill_blocks: int = PLENTY
    decode_seats: int = 1000
    decode_step_s: float = 1.0
    setup_s: float = 0.0
    block_s: float = 0.0
    layers: int = 1
    shared: bool = False

    def run(self, stream: RequestStream) -> Result:
        stepping = [Pipeline(self.pp) if self.pp > 1 else Stepping() for _ in range(self.prefills)]
        links = [TransferLink(self.bytes_per_s, number) for number in range(1 if self.shared else self.prefills)]
        front = [
            EngineCore(
                self.engine(self.prefill_blocks, seats=1),
                LinearCosts(step_s=0.0, per_token_s=1.0),
                i,
                "prefill",
                stepping=stepping[i],
                connector=KvConnector(
                    links[0 if self.shared else i],
                    100,
                    round(self.setup_s * TICKS_PER_SECOND),
                    round(self.block_s * TICKS_PER_SECOND),
                    self.layers,
                ),
            )
            for _ in range(self.pp)
            for i in range(self.prefills)
        ]
        back = [
            EngineCore(self.engine(PLENTY, self.decode_seats), LinearCosts(step_s=self.decode_step_s), pool="decode")
        ]
        for number, core in enumerate(front + back):
            core.number = number
        world = World(front + back, stream, router=RoundRobin(front), decode_router=LeastTokens(back))
        return Result(stream, world.run(), num_gpus=2, offered_rate_rps=stream.offered_rate_rps)

    def engine(self, blocks: int, seats: int) -> VllmFcfs:
        return VllmFcfs(
            num_blocks=blocks,
            block_size=1,
            max_num_seqs=seats,
            max_num_batched_tokens=PLENTY,
            max_model_len=min(blocks, PLENTY),
        )


def poisson(rate_rps: float, prompt_tokens: int, requests: int) -> RequestStream:
    workload = Workload(
        name="tandem",
        arrivals=Poisson(rate_rps=rate_rps),
        prompt=FixedLength(tokens=prompt_tokens),
        output=FixedLength(tokens=2),
    )
    return build_stream(workload, None, requests=requests, seed=7)


# --- theory -----------------------------------------------------------------------------------------------


def first_tokens(stream: RequestStream, stages: int) -> np.ndarray:
    """Return TTFTs of prompts of 4 s that go through equal stages one after the other (Lindley's recursion).

    Only the first stage makes them wait: it lets out no two prompts within the time that the next one needs.
    """
    assert stream.arrival_s is not None
    backlog = np.concatenate([[0.0], np.cumsum(4.0 / stages - np.diff(stream.arrival_s))])
    return np.asarray(4.0 + backlog - np.minimum.accumulate(backlog))


@pytest.mark.parametrize("row", [1, 3])
@pytest.mark.parametrize("pp", [1, 2])
def test_equal_prompts_are_a_queue_of_deterministic_service_and_a_pipeline_two_in_tandem(
    row: int, pp: int, oracle_dir: Path
) -> None:
    """DistServe's TTFT (arXiv 2401.09670): D + R D^2 / (2 (1 - R D)), and D + R D^2 / (4 (2 - R D)) in two stages.

    Each TTFT of the simulator is that of the recursion, whose mean in a longer run is that of the formula.
    """
    oracle = json.loads((oracle_dir / "queueing.json").read_text())["distserve"][row]
    tokens = 4
    ttft = first_tokens(poisson(oracle["R"] / tokens, tokens, 60_000), pp).mean() / tokens
    assert ttft == pytest.approx(oracle["single" if pp == 1 else "pp2"], rel=0.02)
    stream = poisson(oracle["R"] / tokens, tokens, 6_000)
    result = Apart(bytes_per_s=1e6, pp=pp).run(stream)
    np.testing.assert_allclose(result.ttft_s, first_tokens(stream, pp), atol=1e-5)


def test_a_pipeline_takes_more_than_one_server_could(oracle_dir: Path) -> None:
    """Two stages of D/2 each take prompts at R D = 1.4."""
    oracle = json.loads((oracle_dir / "queueing.json").read_text())["distserve_pp_sim"]
    ttft = first_tokens(poisson(oracle["R"] / 4, 4, 60_000), 2).mean() / 4
    assert ttft == pytest.approx(oracle["formula"], rel=0.02)
    stream = poisson(oracle["R"] / 4, 4, 6_000)
    result = Apart(bytes_per_s=1e6, pp=2).run(stream)
    np.testing.assert_allclose(result.ttft_s, first_tokens(stream, 2), atol=1e-5)


def test_transfers_shorter_than_a_prefill_never_meet() -> None:
    """A deterministic station lets nobody out in less than D: what follows and is faster adds its time, no queue.

    Prompts of 4 s, and 1 s of setup, 4 x 0.25 s of descriptors and 400 bytes at 400/s for each transfer.
    """
    result = Apart(bytes_per_s=400.0, setup_s=1.0, block_s=0.25).run(poisson(0.8 / 4, 4, 20_000))
    assert np.abs(result.transfer_s - 3.0).max() < 1e-9
    # Steps of the decode instance begin at once when it is idle: then an answer of two tokens is over after one step.
    assert result.decode_s.min() == pytest.approx(1.0)
    assert result.decode_s.max() < 2.0 + 1e-9
    total = sum(getattr(result, f"{part}_s").mean() for part in ("queue", "prefill", "transfer", "decode"))
    assert total == pytest.approx(result.e2el_s.mean())


def test_a_link_that_is_the_bottleneck_is_busy_as_in_a_tandem() -> None:
    """Transfers of 5 s after prefills of 4 s: whoever comes last in a busy period leaves as if one after the other."""
    result = Apart(bytes_per_s=80.0, decode_step_s=1e-6).run(poisson(0.15, 4, 5_000))
    ready, sent = result.first_token_s, np.sort(result.transferred_s)
    ends: list[tuple[float, bool]] = []
    now = 0.0
    for at in ready.tolist():
        if at >= now and ends:
            ends[-1] = (now, True)
        now = max(now, at) + 5.0
        ends.append((now, False))
    last = [(i, end) for i, (end, closes) in enumerate(ends) if closes]
    assert len(last) > 100
    for i, end in last:
        assert sent[i] == pytest.approx(end, abs=1e-5)
    assert result.transfer_s.max() > 10.0


# --- by hand ----------------------------------------------------------------------------------------------


def test_a_full_decode_instance_fills_the_prefill_instance() -> None:
    """One decode seat; room for one prompt of 3 on the prefill instance. Answers of 5 tokens take 4 steps of 1 s."""
    world = Apart(bytes_per_s=300.0, prefill_blocks=5, decode_seats=1)
    result = world.run(stream_of([0.0] * 4, [3] * 4, [5] * 4))
    # A is done at 3, sent by 4, decodes until 8. B begins when A's blocks are free, is done at 7, waits for the seat
    # until 8, and is sent by 9. Only then C begins.
    assert result.scheduled_s.tolist() == [0.0, 4.0, 9.0, 14.0]
    assert result.first_token_s.tolist() == [3.0, 7.0, 12.0, 17.0]
    assert result.transferred_s.tolist() == [4.0, 9.0, 14.0, 19.0]
    assert result.finish_s.tolist() == [8.0, 13.0, 18.0, 23.0]
    roomy = Apart(bytes_per_s=300.0, decode_seats=1).run(stream_of([0.0] * 4, [3] * 4, [5] * 4))
    assert roomy.scheduled_s.tolist() == [0.0, 3.0, 6.0, 9.0]


def test_layers_sent_while_the_prompt_is_computed_arrive_sooner_with_the_same_bytes() -> None:
    """10 tokens, 1000 bytes, 10 s of prefill: all but the last of 4 layers are there by then, if the link can."""
    stream = stream_of([0.0], [10], [2])
    after, during, slow = (
        Apart(bytes_per_s=rate, layers=layers).run(stream) for rate, layers in ((100.0, 1), (100.0, 4), (50.0, 4))
    )
    assert after.transfer_s.tolist() == [10.0]
    assert during.transfer_s.tolist() == [2.5]
    assert slow.transfer_s.tolist() == [10.0]  # 500 of the 1000 bytes are left
    sent = {x.outcome.transferred_bytes for x in (after, during, slow)}
    assert sent == {1000}


def test_instances_with_a_link_each_do_not_slow_one_another() -> None:
    stream = stream_of([0.0, 0.0], [10, 10], [2, 2])
    own = Apart(bytes_per_s=100.0, prefills=2).run(stream)
    common = Apart(bytes_per_s=100.0, prefills=2, shared=True).run(stream)
    assert own.transfer_s.tolist() == [10.0, 10.0]
    assert common.transfer_s.tolist() == [20.0, 20.0]
    assert own.outcome.transferred_bytes == common.outcome.transferred_bytes == 2000


# --- a real model -----------------------------------------------------------------------------------------


def plan(link: KvLink, prefills: int = 2, block_size: int = 16) -> Plan:
    batching = Batching(max_num_seqs=64, max_num_batched_tokens=4096)
    instances: dict[Role, int] = {"prefill": prefills, "decode": 1}
    pools = [
        Pool(name=role, role=role, hardware="h100-sxm", instances=n, batching=batching, max_model_len=8192)
        for role, n in instances.items()
    ]
    pools = [p.model_copy(update={"kv_cache": p.kv_cache.model_copy(update={"block_size": block_size})}) for p in pools]
    return Plan(name="apart", model="llama-3.1-8b", pools=tuple(pools), link=link)


def chat(requests: int = 400) -> RequestStream:
    workload = Workload(
        name="chat",
        arrivals=Poisson(rate_rps=8.0),
        prompt=Lognormal(mean_tokens=900, sigma=1.0, max_tokens=6000),
        output=Lognormal(mean_tokens=20, sigma=1.5, max_tokens=2000),
    )
    return build_stream(workload, None, requests=requests, seed=3)


@pytest.mark.parametrize("block_size", [16, 32])
def test_transferred_bytes_are_those_of_whole_blocks(block_size: int) -> None:
    model, stream = load_model("llama-3.1-8b"), chat()
    hardware, results = load_hardware("h100-sxm"), []
    for layerwise in (False, True):
        deployment = deploy(
            plan(KvLink(layerwise=layerwise, first_token="prefill"), block_size=block_size), model, hardware
        )
        results.append(deployment.simulate(stream))
    # Keys and values of 32 layers with 8 heads of 128 numbers, 2 bytes each.
    blocks = -(-stream.prompt_tokens // block_size)
    sent = stream.output_tokens > 1
    assert 0 < sent.sum() < len(sent), "a one-token answer is complete with its prompt"
    expected = int(blocks[sent].sum()) * block_size * 2 * 32 * 8 * 128 * 2
    assert [x.outcome.transferred_bytes for x in results] == [expected, expected]
    assert results[1].values("transfer").mean() < results[0].values("transfer").mean()
    assert (np.isfinite(results[0].transfer_s) == sent).all()


def test_the_plan_may_say_how_fast_the_link_is() -> None:
    model, hardware, stream = load_model("llama-3.1-8b"), load_hardware("h100-sxm"), chat(60)
    link = KvLink(bytes_per_s=1e9, setup_s=0.5, descriptor_s=1e-6, packed=True)
    fast = deploy(plan(link, prefills=4), model, hardware).simulate(stream.at_rate(0.05))
    blocks = -(-stream.prompt_tokens // 16)
    seconds = 0.5 + blocks * (1e-6 + 16 * 131_072 / 1e9)
    sent = np.isfinite(fast.transfer_s)
    # Alone on its link, a transfer may still wait for the step under way on the decode instance.
    late = (fast.transfer_s - seconds)[sent]
    assert -1e-6 < late.min() < 1e-6
    assert late.max() < 0.05


def test_hardware_without_the_named_link_is_refused() -> None:
    with pytest.raises(Infeasible, match="carrier_pigeon"):
        deploy(plan(KvLink(path="carrier_pigeon")), load_model("llama-3.1-8b"), load_hardware("h100-sxm"))


def test_a_request_that_one_decode_pool_could_not_hold_is_refused_and_blocks_nobody() -> None:
    whole = plan(KvLink())
    prefill, decode = whole.pools
    small = decode.model_copy(update={"name": "small", "max_model_len": 512})
    stream = chat()
    too_long = stream.prompt_tokens + stream.output_tokens > 512
    assert 0 < too_long.sum() < len(stream)
    deployment = deploy(
        whole.model_copy(update={"pools": (prefill, decode, small)}),
        load_model("llama-3.1-8b"),
        load_hardware("h100-sxm"),
    )
    result = deployment.simulate(stream)
    assert result.completed.tolist() == (~too_long).tolist()
    assert (result.refused, result.unserved) == (too_long.sum(), 0)


def test_requests_that_nobody_is_left_to_serve_are_not_refused_but_pile_up() -> None:
    whole = plan(KvLink())
    stream = chat()
    assert stream.arrival_s is not None
    events = (Failure(at_s=float(stream.arrival_s[len(stream) // 2]), pool="decode", instance=0),)
    result = deploy(
        whole.model_copy(update={"events": events}), load_model("llama-3.1-8b"), load_hardware("h100-sxm")
    ).simulate(stream)
    assert result.refused == 0
    assert 0 < result.unserved == len(stream) - result.completed.sum()
    assert result.saturated
    assert not result.meets_slo
    at_once = tuple(Failure(at_s=0.0, pool="prefill", instance=i) for i in range(2))
    with pytest.raises(UsageError, match="leave no instance"):
        deploy(
            whole.model_copy(update={"events": at_once}), load_model("llama-3.1-8b"), load_hardware("h100-sxm")
        ).simulate(stream)


def test_a_decode_router_hears_of_answers_whatever_chooses_the_prefill_instance() -> None:
    """A long prompt, answered long ago, does not weigh on its decode instance: of two idle ones the first is taken."""
    world, costs = Apart(bytes_per_s=1e6), LinearCosts(step_s=1.0)
    front = EngineCore(world.engine(PLENTY, 1), costs, connector=KvConnector(TransferLink(1e6), 100, 0, 0))
    back = [EngineCore(world.engine(PLENTY, 8), costs, instance, "decode") for instance in range(2)]
    stream = stream_of([0.0, 1.0, 100.0], [20, 5, 5], [3, 3, 3])
    cores = [front, *back]
    for number, core in enumerate(cores):
        core.number = number
    outcome = World(cores, stream, router=RoundRobin([front]), decode_router=LeastTokens(back)).run()
    assert outcome.core.tolist() == [1, 2, 1]
