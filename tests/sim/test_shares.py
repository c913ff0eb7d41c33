"""Two pools on shares of the same GPUs: what a share takes, what both take together, and what makes no sense."""

from __future__ import annotations

import numpy as np
import pytest

from simtune.costs.compiled import CompiledCosts, compile_costs
from simtune.costs.share import share_of
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import SpecError
from simtune.sim.deployment import deploy
from simtune.sim.drawn_worlds import Blueprint, PerturbedWorld
from simtune.sim.pool_power import power_of
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.testing.clusters import stream_of
from tests.costs.made_up import calibrated
from tests.oracles.split import Asked, Share, SplitDevice

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("a100-sxm-80g")
ALONE = {"max_model_len": 8192, "batching": {"max_num_seqs": 64, "max_num_batched_tokens": 8192}}
PROMPT = [(0, 4096)]


def costs(processors: float, bandwidth: float) -> CompiledCosts:
    pool = Pool.model_validate({"hardware": HARDWARE.name, "instances": 1, **ALONE}, strict=False)
    return compile_costs(MODEL, share_of(HARDWARE, processors, bandwidth), pool, 8192)


def text_of(first: str, second: str, more: str = "instances: 1") -> str:
    common = f"hardware: a100-sxm-80g, max_model_len: 8192, {more}"
    batching = "batching: {max_num_seqs: 64, max_num_batched_tokens: 8192}"
    return (
        "schema: simtune/plan@1\nname: split\nmodel: llama-3.1-8b\nlink: {}\npools:\n"
        f"- {{name: p, role: prefill, {common}, {batching}, kv_cache: {{memory_utilization: 0.4}}, {first}}}\n"
        f"- {{name: d, role: decode, {common}, {batching}, kv_cache: {{memory_utilization: 0.5}}, {second}}}\n"
    )


SHARED = ("share: {processors: 0.6, bandwidth: 0.4}", "share: {processors: 0.4, bandwidth: 0.6, beside: p}")


def test_a_step_is_as_long_as_the_resource_it_waits_for() -> None:
    """A prompt of 4,096 tokens waits for the processors, a decode of one sequence for the memory."""
    whole, few, slow = costs(1, 1), costs(0.5, 1), costs(1, 0.5)
    assert few.mixed(0, 0, PROMPT, 1) / whole.mixed(0, 0, PROMPT, 1) == pytest.approx(2, rel=0.12)
    assert slow.mixed(0, 0, PROMPT, 1) / whole.mixed(0, 0, PROMPT, 1) < 1.2
    assert few.decode(1, 1000)[0] / whole.decode(1, 1000)[0] == pytest.approx(1, abs=0.05)
    assert slow.decode(1, 1000)[0] / whole.decode(1, 1000)[0] == pytest.approx(2, rel=0.12)


def test_a_smaller_share_is_never_faster_and_never_slower_than_its_smallest_part() -> None:
    whole = costs(1, 1)
    for processors, bandwidth in ((0.8, 0.8), (0.5, 0.9), (0.3, 0.3)):
        share = costs(processors, bandwidth)
        least = min(processors, bandwidth)
        for chunks in (PROMPT, [(0, 64)], [(2000, 512)]):
            ratio = share.mixed(0, 0, chunks, 1) / whole.mixed(0, 0, chunks, 1)
            assert 0.98 < ratio < 1.02 / least
        for batch in (1, 32, 64):
            ratio = share.decode(batch, 1000 * batch)[0] / whole.decode(batch, 1000 * batch)[0]
            assert 0.98 < ratio < 1.02 / least


def test_a_share_is_corrected_as_its_device_is() -> None:
    device = calibrated(HARDWARE, decode=(1.5, 1e-3))
    assert device.calibration is not None
    assert share_of(device, 0.5, 0.5).calibration == device.calibration


def test_other_worlds_are_of_the_same_shares() -> None:
    """They are deployed anew on what the first was deployed on: a share of a share would be slower."""
    deployment = deploy(Plan.from_text(text_of(*SHARED)), MODEL, HARDWARE)
    assert [*deployment.profiles.values()] == [HARDWARE, HARDWARE]
    anew = Blueprint.of(deployment).deploy(PerturbedWorld())
    for one, other in zip(deployment.pools, anew.pools, strict=True):
        assert one.costs.decode(1, 1000) == other.costs.decode(1, 1000)


def test_the_smallest_share_is_still_one_of_a_gpu() -> None:
    least = share_of(HARDWARE, 0.01, 0.01)
    assert least.device.processors == 2
    assert costs(0.01, 0.01).mixed(0, 0, PROMPT, 1) > 50 * costs(1, 1).mixed(0, 0, PROMPT, 1)


def test_gpus_and_watts_of_two_pools_on_the_same_ones_are_counted_once() -> None:
    plan = Plan.from_text(text_of(*SHARED, "instances: 2"))
    assert plan.num_devices == 2
    deployment = deploy(plan, MODEL, HARDWARE)
    power = power_of(deployment.pools)
    assert power is not None
    assert HARDWARE.device.power is not None
    assert sum(of_pool.tdp_w for of_pool in power.values()) == pytest.approx(HARDWARE.device.power.tdp_w)
    result = deployment.simulate(stream_of([0.0, 0.1, 0.2], [2000] * 3, [50] * 3))
    assert result.completed.all()
    assert result.num_gpus == 2


def test_jumps_are_single_steps_to_the_tick() -> None:
    deployment = deploy(Plan.from_text(text_of(*SHARED)), MODEL, HARDWARE)
    stream = stream_of([0.02 * i for i in range(30)], [300 + 37 * i for i in range(30)], [20 + i for i in range(30)])
    jumped, stepped = deployment.simulate(stream), deployment.simulate(stream, single_steps=True)
    for column in ("scheduled", "first_token", "transferred", "finish"):
        assert getattr(jumped.outcome, column).tolist() == getattr(stepped.outcome, column).tolist()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (SHARED[0], "", "pools.0.share: one pool, and one alone, must be `beside: p`"),
        ("", SHARED[1], "pools.1.share.beside: pool p has its GPUs to itself; give it a share without `beside`"),
        (SHARED[0], SHARED[1].replace("0.4", "0.5"), "pools.1.share.processors: shares of p and d come to 1.1"),
        (SHARED[0], SHARED[1].replace("0.6", "0.7"), "pools.1.share.bandwidth: shares of p and d come to 1.1"),
        (SHARED[0], SHARED[1].replace("p}", "q}"), "pools.1.share.beside: it is to be beside pool 'q'"),
        (SHARED[0], f"{SHARED[1]}, parallelism: {{tp: 2}}", "share GPUs: give them the same hardware, instances and"),
        (SHARED[0], f"{SHARED[1]}, costs: steps.csv", "pools.1.share: measured whole steps are those of a whole GPU"),
    ],
)
def test_shares_that_make_no_sense_are_refused_with_their_place(first: str, second: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        Plan.from_text(text_of(first, second).replace(", }", "}"), "p.yaml")
    assert message in str(error.value)


def test_pools_that_take_more_memory_than_there_is_are_refused() -> None:
    text = text_of(*SHARED).replace("memory_utilization: 0.5", "memory_utilization: 0.7")
    with pytest.raises(SpecError, match=r"pools\.1\.kv_cache: p and d take 1\.1 of the memory of their GPUs"):
        Plan.from_text(text, "p.yaml")


@pytest.mark.parametrize(("processors", "bandwidth"), [(60, 40), (30, 20), (80, 70)])
def test_two_pools_on_one_device_are_two_processes_that_hold_their_shares_of_it(
    processors: int, bandwidth: int
) -> None:
    """Beside simpy: neither ever waits for the other, both are at work at once, and tokens come when they should."""
    shares = Share(processors, bandwidth), Share(100 - processors, 100 - bandwidth)
    alone = {**ALONE, "hardware": HARDWARE.name, "instances": 1, "async_scheduling": False}
    pool = Pool.model_validate(alone, strict=False)
    ahead, behind = (
        compile_costs(MODEL, share_of(HARDWARE, share.processors / 100, share.bandwidth / 100), pool, 8192)
        for share in shares
    )
    rng = np.random.default_rng(processors)
    n = 25
    arrival_s = np.cumsum(rng.exponential(0.35, n)).tolist()
    prompt_tokens, output_tokens = rng.integers(100, 3000, n).tolist(), rng.integers(2, 60, n).tolist()
    device = SplitDevice(
        [Asked(*request) for request in zip(arrival_s, prompt_tokens, output_tokens, strict=True)],
        shares,
        prefill_s=lambda tokens: ahead.mixed(0, 0, [(0, tokens)], 1) / TICKS_PER_SECOND,
        decode_s=lambda sequences, context: behind.decode(sequences, context)[0] / TICKS_PER_SECOND,
        transfer_s=lambda tokens: 1e-3,
    )
    device.run()
    text = text_of(
        *(
            f"async_scheduling: false, share: {{processors: {share.processors / 100}, "
            f"bandwidth: {share.bandwidth / 100}{beside}}}"
            for share, beside in zip(shares, ("", ", beside: p"), strict=True)
        )
    )
    link = "link: {setup_s: 0.001, descriptor_s: 0, bytes_per_s: 1.0e+18, first_token: prefill}"
    plan = Plan.from_text(text.replace("link: {}", link).replace("max_num_seqs: 64", "max_num_seqs: 1", 1))
    result = deploy(plan, MODEL, HARDWARE).simulate(stream_of(arrival_s, prompt_tokens, output_tokens))
    outcome = result.outcome
    assert outcome.first_token / TICKS_PER_SECOND == pytest.approx([r.first_token_s for r in device.requests], abs=1e-8)
    assert outcome.finish / TICKS_PER_SECOND == pytest.approx([r.finish_s for r in device.requests], abs=1e-6)
    busy_s = [core.busy / TICKS_PER_SECOND for core in outcome.cores]
    assert busy_s == pytest.approx(device.busy_s, abs=1e-6)
    assert device.waited_s == 0
    assert device.overlapped_s > 0.1
