"""Loads with images: one request in closed form, images that come again, jumps, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import simpy
from pydantic import ValidationError

from simtune.costs.encoder import ENCODER, EncoderCosts, Work
from simtune.costs.ticks import to_ticks
from simtune.errors import Infeasible, UsageError
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.drawn_worlds import spreads
from simtune.sim.encode_stages import encode_works
from simtune.sim.run_basis import cost_basis, timed_steps
from simtune.sim.stations import serve
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.encoder import Encoder
from simtune.specs.plan import Plan
from simtune.specs.workload import Workload
from simtune.workload.requests import RequestStream, build_stream

MODEL, H100 = load_model("qwen2.5-vl-7b"), load_hardware("h100-sxm")
PICTURES: dict[str, Any] = {"sizes": [{"width": 1280, "height": 720}]}
AGAIN: dict[str, Any] = {**PICTURES, "per_request": [1, 3], "repeats": {"share": 0.5, "images": 4}}


def load(images: dict[str, Any] | None = None, **more: Any) -> Workload:
    lengths = {"prompt": {"kind": "fixed", "tokens": 100}, "output": {"kind": "fixed", "tokens": 40}}
    settings = {"name": "w", "arrivals": {"kind": "poisson", "rate_rps": 5.0}, **lengths, "images": images, **more}
    return Workload.model_validate(settings)


def requests(workload: Workload, number: int) -> RequestStream:
    return build_stream(workload, None, requests=number, seed=0, towers=MODEL.towers)


def deployed(encoder: dict[str, Any] | None, **more: Any) -> Deployment:
    """Memory is that of 4,000 blocks, whatever the encoder takes."""
    batching = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, **more.pop("batching", {})}
    kv_cache = {"num_blocks": 4001, **more.pop("kv_cache", {})}
    pool = {"hardware": "h100-sxm", "instances": 1, "batching": batching, "kv_cache": kv_cache, "max_model_len": 16384}
    plan = Plan.model_validate({"name": "p", "model": MODEL.name, "pools": [{**pool, "encoder": encoder, **more}]})
    return deploy(plan, MODEL, H100)


def same(a: Result, b: Result) -> bool:
    columns = ("arrival", "scheduled", "first_token", "finish", "preemptions")
    return all((getattr(a.outcome, name) == getattr(b.outcome, name)).all() for name in columns)


def test_a_request_alone_is_encoded_and_then_computed() -> None:
    """The image has 46 x 26 tokens and two around it; a step of 2,048 tokens has room for it and 100 of text."""
    deployment = deployed({}, async_scheduling=False)
    stream = requests(load(PICTURES), 1)
    assert stream.prompt_tokens.tolist() == [100 + 46 * 26 + 2]
    outcome = deployment.simulate(stream).outcome
    encoding = EncoderCosts(MODEL, H100, deployment.plan.pools[0]).seconds([Work(1, 4 * 46 * 26, 46 * 26)])
    prefill = deployment.costs.mixed(0, 0, [(0, 1298)], 1)
    assert outcome.first_token[0] - outcome.arrival[0] == to_ticks(encoding) + prefill


def test_an_image_in_two_chunks_is_encoded_in_the_first() -> None:
    deployment = deployed({}, batching={"max_num_batched_tokens": 1000}, async_scheduling=False)
    outcome = deployment.simulate(requests(load(PICTURES), 1)).outcome
    encoding = EncoderCosts(MODEL, H100, deployment.plan.pools[0]).seconds([Work(1, 4784, 1196)])
    chunks = deployment.costs.mixed(0, 0, [(0, 1000)], 0) + deployment.costs.mixed(0, 0, [(1000, 298)], 1)
    assert outcome.first_token[0] - outcome.arrival[0] == to_ticks(encoding) + chunks


def test_a_load_without_images_takes_no_tick_more_beside_an_encoder() -> None:
    encoders: tuple[dict[str, Any] | None, ...] = (None, {})
    for policy in ("vllm-fcfs", "vllm-priority"):
        for kv_cache in ({}, {"prefix_caching": True}):
            settings = {"batching": {"policy": policy}, "kv_cache": kv_cache}
            results = [deployed(encoder, **settings).simulate(requests(load(), 80)) for encoder in encoders]
            assert same(*results)


@pytest.mark.parametrize("images", [PICTURES, AGAIN])
@pytest.mark.parametrize("kv_cache", [{}, {"prefix_caching": True}, {"num_blocks": 1100}])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_jumps_beside_images_are_exact_to_the_tick(
    images: dict[str, Any], kv_cache: dict[str, Any], async_scheduling: bool
) -> None:
    deployment = deployed({"tp_mode": "data"}, kv_cache=kv_cache, async_scheduling=async_scheduling)
    stream = requests(load(images, arrivals={"kind": "gamma", "rate_rps": 12.0, "cv": 2.0}), 60)
    assert same(deployment.simulate(stream), deployment.simulate(stream, single_steps=True))


def test_images_that_come_again_are_found() -> None:
    """Ten images are all there are, and the encoder's cache has room for all of them: each is encoded once."""
    small = {"sizes": [{"width": 280, "height": 280}], "repeats": {"share": 1.0, "images": 10}}
    summary = deployed({}).simulate(requests(load(small), 200)).summary()
    (work,) = summary.encoders
    assert (work.encoded_images, work.cache_hits) == (10, 190)
    assert 0 < work.encoder_s < summary.duration_s
    # with a prefix cache most prompts begin with blocks that are there, and reach no image at all
    (cached,) = deployed({}, kv_cache={"prefix_caching": True}).simulate(requests(load(small), 200)).summary().encoders
    assert cached.encoded_images <= 10
    # new images are encoded each
    new = {"sizes": small["sizes"]}
    (fresh,) = deployed({}).simulate(requests(load(new), 200)).summary().encoders
    assert (fresh.encoded_images, fresh.cache_hits) == (200, 0)


def test_a_prompt_finds_the_blocks_of_the_same_image_behind_the_same_prefix() -> None:
    """Behind a shared prefix of 32 tokens, 102 tokens of one image: 8 whole blocks of 16 in all, each time but the
    first."""
    small = {"sizes": [{"width": 280, "height": 280}], "repeats": {"share": 1.0, "images": 1}}
    workload = load(small, shared_prefix={"groups": 1, "tokens": 32})
    stream = requests(workload, 3)
    assert stream.hash_ids is not None
    assert {len(names) for names in stream.hash_ids} == {(32 + 102) // 16}
    assert len(set(stream.hash_ids)) == 1
    assert stream.media is not None
    assert stream.media.start.tolist() == [32] * 3
    (use,) = deployed({}, kv_cache={"prefix_caching": True}).simulate(stream).summary().prefix_cache
    assert use.hit_tokens == 2 * 8 * 16


def test_a_request_has_the_same_images_however_many_are_drawn() -> None:
    drawn = {"kind": "quantiles", "levels": [0.0, 1.0], "pixels": [100, 900]}
    sizes = [{"width": 300, "height": 200}, {"width": drawn, "height": 400}]
    repeats = {"share": 0.5, "images": 20, "skew": 1.0}
    images = {"share": 0.5, "per_request": [1, 2, 5], "sizes": sizes, "repeats": repeats}
    few, many = (requests(load(images), number) for number in (40, 400))
    assert few.media is not None
    assert many.media is not None
    assert [few.media.of(i) for i in range(40)] == [many.media.of(i) for i in range(40)]
    assert (few.prompt_tokens == many.prompt_tokens[:40]).all()
    kept = many.kept(np.arange(400) % 3 == 1)
    assert kept.media is not None
    assert [kept.media.of(i) for i in range(10)] == [many.media.of(3 * i + 1) for i in range(10)]
    counts = many.media.per_request
    assert 0.4 < (counts > 0).mean() < 0.6
    assert set(counts.tolist()) == {0, 1, 2, 5}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"parallelism": {"pp": 2}}, "encoder and parallelism.pp do not go together; leave one of them out"),
        ({"batching": {"policy": "sglang"}}, "policy sglang has no encoder"),
        (
            {"encoder": {"disable_chunked_mm_input": True}},
            "disable_chunked_mm_input needs a step for the largest item",
        ),
    ],
)
def test_a_pool_that_cannot_encode_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(Infeasible, match=why):
        deployed(settings.pop("encoder", {}), **settings)


def test_a_load_with_images_needs_a_model_and_a_pool_for_them() -> None:
    with pytest.raises(UsageError, match=r"pool mixed does not encode them; add encoder: \{\} to the pool"):
        deployed(None).simulate(requests(load(PICTURES), 2))
    unsized = build_stream(load(PICTURES), None, requests=2, seed=0)
    assert unsized.prompt_tokens.tolist() == [100, 100]
    with pytest.raises(UsageError, match="not sized"):
        deployed({}).simulate(unsized)
    text = load_model("qwen2.5-7b")
    plan = deployed({}).plan
    with pytest.raises(
        Infeasible, match=r"model qwen2\.5-7b states no vision encoder and no audio encoder; add vision"
    ):
        deploy(plan, text, H100)


# --- servers of their own -----------------------------------------------------------------------------------


def apart(**stage: Any) -> Deployment:
    batching, kv_cache = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}, {"num_blocks": 4001}
    pool = {"hardware": "h100-sxm", "instances": 1, "batching": batching, "kv_cache": kv_cache, "max_model_len": 16384}
    stages = [{"name": "encode", "pool": "mixed", "encoder": "weights", "devices": 1, **stage}]
    pools = [{**pool, "async_scheduling": False}]
    return deploy(
        Plan.model_validate({"name": "p", "model": MODEL.name, "pools": pools, "stages": stages}), MODEL, H100
    )


def test_a_request_alone_is_encoded_sent_and_computed() -> None:
    deployment = apart(bytes_per_s=1e9)
    outcome = deployment.simulate(requests(load(PICTURES), 1)).outcome
    encoding = EncoderCosts(MODEL, H100, deployment.plan.pools[0]).seconds([Work(1, 4784, 1196)])
    sent = 1196 * 3584 * 2 / 1e9
    prefill = deployment.costs.mixed(0, 0, [(0, 1298)], 1)
    assert outcome.first_token[0] - outcome.arrival[0] == pytest.approx(to_ticks(encoding + sent) + prefill, abs=2)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_pool_of_encoders_is_the_queue_of_simpy(servers: int) -> None:
    """Servers take requests in turn; embeddings travel while the next request is encoded."""
    deployment = apart(instances=servers, bytes_per_s=2e9, seconds=0.001)
    sizes = [{"width": 1280, "height": 720}, {"width": 2000, "height": 1500}]
    images = {"share": 0.7, "per_request": [1, 4], "sizes": sizes}
    stream = requests(load(images, arrivals={"kind": "poisson", "rate_rps": 20.0 * servers}), 400)
    assert stream.arrival_s is not None
    assert stream.media is not None
    costs = EncoderCosts(MODEL, H100, deployment.plan.pools[0])
    environment = simpy.Environment()
    resource = simpy.Resource(environment, servers)
    arrived: dict[int, float] = {}

    def request(number: int) -> Any:
        shapes = [image.shape for image in stream.media.of(number)]  # type: ignore[union-attr]
        yield environment.timeout(stream.arrival_s[number])  # type: ignore[index]
        with resource.request() as server:
            yield server
            yield environment.timeout(0.001 + costs.seconds([Work.of(s, "image") for s in shapes]))
        yield environment.timeout(sum(s.vectors for s in shapes) * 3584 * 2 / 2e9)
        arrived[number] = environment.now

    for number in range(len(stream)):
        environment.process(request(number))
    environment.run()
    works = encode_works(deployment.plan, MODEL, deployment.pools, stream)
    ends = serve(deployment.plan.stages or (), stream.arrival_s, stream.prompt_tokens, works)["encode"]
    assert ends == pytest.approx([arrived[number] for number in range(len(stream))], abs=1e-9)
    result = deployment.simulate(stream)
    assert result.completed.all()
    # the pool itself encodes nothing
    assert not result.summary().encoders


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        ({"devices": 0}, "encode encodes on GPUs; give each server 1 or more"),
        ({"place": "beside"}, "encode encodes images whole, before the prompt is computed"),
        ({"parts": 2}, "encode encodes images whole, before the prompt is computed"),
        ({"encoder": None, "bytes_per_s": 1e9}, "is of stages that encode images; set encoder, or remove it"),
    ],
)
def test_a_stage_that_cannot_encode_is_refused(stage: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        apart(**stage)


def test_images_are_encoded_in_one_place() -> None:
    deployment = apart()
    pool = deployment.plan.pools[0].model_copy(update={"encoder": Encoder()})
    twice = deploy(deployment.plan.model_copy(update={"pools": (pool,)}), MODEL, H100)
    with pytest.raises(UsageError, match="stage encode encodes images already; remove encoder from pool mixed"):
        twice.simulate(requests(load(PICTURES), 2))
    with pytest.raises(UsageError, match="16 heads of the vision encoder"):
        apart(devices=5).simulate(requests(load(PICTURES), 2))


def test_intervals_and_what_the_step_time_rests_on_name_the_encoder() -> None:
    """Its share is that of the ticks beside the other kinds; a world in which it is off is off by it."""
    deployment = deployed({})
    result = deployment.simulate(requests(load({"sizes": [{"width": 1024, "height": 768}]}), 60))
    (use,) = result.outcome.cores
    assert use.encoder is not None
    basis = cost_basis(deployment, result)
    assert basis is not None
    (of_encoder,) = [x for x in basis.operators if x.operator == ENCODER]
    assert of_encoder.share == pytest.approx(use.encoder.ticks / use.busy, abs=1e-4)
    assert of_encoder.log_sd > 0
    assert sum(x.share for x in basis.operators) == pytest.approx(1, abs=1e-4)
    for _, by_kind, total in timed_steps(deployment, result):
        assert by_kind[ENCODER] / total == pytest.approx(of_encoder.share, abs=1e-4)
        assert sum(by_kind.values()) == pytest.approx(total)
    assert spreads(deployment, result)[ENCODER] == pytest.approx(of_encoder.log_sd, rel=1e-3)
    assert ENCODER not in spreads(deployment, deployment.simulate(requests(load(), 60)))
    slow = deploy(deployment.plan, deployment.model, deployment.profiles, factors={ENCODER: 2.0}).pools[0].encoder
    assert slow is not None
    assert deployment.pools[0].encoder is not None
    works = [Work(1, 1024, 256)]
    assert slow.costs.seconds(works) == pytest.approx(2 * deployment.pools[0].encoder.costs.seconds(works))
