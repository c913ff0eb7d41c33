"""Searches over encoder servers in front of pools: their GPUs count, and no plan is better than the search says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simtune.costs.encoder import EncoderCosts, Work
from simtune.errors import Infeasible, SpecError, UsageError
from simtune.sim.encode_stages import encode_works
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan_words import in_words, of_plan
from simtune.specs.pool import Pool
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import ClosedLoop, Lognormal, Poisson, Slo, Workload
from simtune.tuner.bounds.best_case import sustained_rps
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.question_checks import check as check_question
from simtune.tuner.space.candidates import Candidate, space_of
from simtune.validation.next_measurement import next_measurement
from tests.tuner.fragments import with_variants
from tests.tuner.test_exhaustive import check

SEES = load_model("qwen2.5-vl-7b")
PICTURES: dict[str, Any] = {"sizes": [{"width": 1280, "height": 720}], "per_request": [1, 3], "share": 0.7}
ONE, TWO = ({"name": f"enc-{n}", "encoders_apart": {"instances": n}} for n in (1, 2))


def question(
    *fragments: dict[str, Any], devices: int = 4, load: dict[str, Any] | None = None, **search: Any
) -> Question:
    fields: dict[str, Any] = {"images": PICTURES, "arrivals": Poisson(rate_rps=4.0), **(load or {})}
    lengths = {"prompt": Lognormal(mean_tokens=200, sigma=0.8, max_tokens=2000),
               "output": Lognormal(mean_tokens=40, sigma=0.8, max_tokens=300)}  # fmt: skip
    workload = Workload.model_validate({"name": "load", "requests": 60, **lengths, **fields})
    objective = search.pop("objective", "goodput")
    choices: dict[str, Any] = {
        "tp": (1,),
        "pp": (1,),
        "max_num_seqs": (32,),
        "max_num_batched_tokens": (2048,),
        **search,
    }
    study = Study(
        name="study",
        model=SEES.name,
        hardware=(HardwareCount(profile="h100-sxm", devices=devices),),
        workload=workload.name,
        slo=Slo(ttft_s={"p90": 1.0}, tpot_s={"p90": 0.04}),
        objective=objective,
        search=Search(confirm=Confirmation(draws=0), **choices),
    )
    return with_variants(Question(study, SEES, (load_hardware("h100-sxm"),), workload, None), *fragments)


def test_gpus_of_encoder_servers_are_counted_and_not_served_on() -> None:
    asked = question({}, ONE, {"encoders_apart": {"instances": 1, "devices": 2, "tp_mode": "data", "bytes_per_s": 1e9}})
    every = space_of(asked.study).candidates
    assert {c.name: (c.num_gpus, c.pools[0].instances) for c in every} == {
        "tp1-pp1-x4-s32-t2048": (4, 4),
        "tp1-pp1-enc1-v-enc-1-x3-s32-t2048": (4, 3),
        "tp1-pp1-enc2-v-instances-1-devices-2-tp-mode-data-bytes-per-s-1000000000.0-x2-s32-t2048": (4, 2),
    }
    inside, narrow, wide = (asked.plan(c, 4096) for c in sorted(every, key=lambda c: c.pools[0].shape.encoder_devices))
    assert inside.pools[0].encoder is not None
    assert inside.stages is None
    assert narrow.pools[0].encoder is None
    assert [plan.num_devices for plan in (inside, narrow, wide)] == [4, 4, 4]
    (stage,) = wide.stages or ()
    assert (stage.pool, stage.devices, stage.instances, stage.encoder) == ("mixed", 2, 1, "data")
    assert stage.bytes_per_s == 1e9
    assert in_words(narrow.name).startswith("3 servers of 1 GPU behind 1 GPU for encoders")
    assert of_plan(narrow.model_copy(update={"name": "mine"})).words().startswith("3 servers of 1 GPU behind 1 GPU for")
    assert of_plan(narrow).gpus == 4
    with pytest.raises(Infeasible, match="fits 1 h100-sxm devices"):
        space_of(question(ONE, devices=1).study)


def test_per_gpu_every_number_of_instances_behind_encoder_servers_is_a_plan() -> None:
    """A server may be too much for one instance and too little for three."""
    every = space_of(question({}, ONE, objective="goodput_per_gpu").study).candidates
    assert sorted((c.num_gpus, c.pools[0].instances) for c in every) == [(2, 1), (3, 2), (4, 3), (4, 4)]


def test_encoder_servers_are_in_front_of_prefill_pools() -> None:
    asked = question(ONE, layouts=("prefill-decode",), devices=4)
    every = space_of(asked.study).candidates
    assert sorted((c.pools[0].instances, c.pools[1].instances, c.num_gpus) for c in every) == [(1, 2, 4), (2, 1, 4)]
    plan = asked.plan(every[0], 4096)
    assert [(pool.encoder, pool.role) for pool in plan.pools] == [(None, "prefill"), (None, "decode")]
    assert [stage.pool for stage in plan.stages or ()] == ["prefill"]


def test_a_capacity_is_that_of_the_instances_that_are_left_or_of_the_servers() -> None:
    """One server is the bottleneck of three instances; behind three servers the only instance is, which serves more
    than a fourth of four instances that encode in their steps."""
    three = {"name": "enc-3", "encoders_apart": {"instances": 3}}
    asked = question({}, ONE, three)
    every = space_of(asked.study).candidates
    cache = PlanCache(asked, every)
    settled = [cache.settled(candidate) for candidate in every]
    bounds = {c.pools[0].instances: cache.capacity(c) for c in settled if isinstance(c, Candidate)}
    assert [bounds[n].by for n in (3, 1, 4)] == ["capacity of the encoder servers", "capacity", "capacity"]
    assert 1.2 < bounds[1].rps / (bounds[4].rps / 4) < 2.0
    behind = next(c for c in settled if isinstance(c, Candidate) and c.pools[0].instances == 3)
    deployment, stream = cache.deployment(behind), asked.capacity_stream(behind)
    (work,) = encode_works(deployment.plan, SEES, deployment.pools, stream).values()
    assert bounds[3].rps == pytest.approx(1 / work.busy_s.mean())


VIDEOS: dict[str, Any] = {"share": 0.3, "sizes": [{"width": 280, "height": 280}], "seconds": 2.0}


@pytest.mark.parametrize("seed", range(24))
def test_no_run_serves_more_than_the_capacity_with_its_media(seed: int) -> None:
    """All requests at once, on random small plans: in steps or on servers, with items that come again or not."""
    draw = np.random.default_rng(seed)
    sizes = [{"width": int(draw.integers(100, 1400)), "height": int(draw.integers(100, 1000))} for _ in range(3)]
    images: dict[str, Any] = {"sizes": sizes, "per_request": [1, int(draw.integers(2, 5))], "share": 0.9}
    if draw.random() < 0.4:
        images["repeats"] = {"share": float(draw.uniform(0.2, 0.9)), "images": int(draw.integers(1, 5))}
    load: dict[str, Any] = {"images": images, "requests": int(draw.integers(20, 80))}
    if draw.random() < 0.5:
        load["videos"] = VIDEOS
    tp_mode, budget = str(draw.choice(["data", "weights"])), int(draw.choice([2048, 4096]))
    apart = {"encoders_apart": {"instances": int(draw.integers(1, 3)), "devices": 1, "tp_mode": tp_mode}}
    fragment = apart if seed % 3 == 0 else {"encoder": {"tp_mode": tp_mode}}
    tp = int(draw.choice([1, 2]))
    asked = question(
        {**fragment, "kv_cache": {"prefix_caching": bool(draw.random() < 0.5)}},
        load=load, tp=(tp,), max_num_batched_tokens=(budget,), max_num_seqs=(64,),
    )  # fmt: skip
    every = space_of(asked.study).candidates
    cache = PlanCache(asked, every)
    settled = cache.settled(every[0])
    assert isinstance(settled, Candidate)
    deployment, stream = cache.deployment(settled), cache.stream(settled)
    assert stream.arrival_s is not None
    at_once = replace(stream, arrival_s=np.zeros(len(stream)))
    served_rps = len(stream) / float(deployment.simulate(at_once).finish_s.max())
    bound_rps = sustained_rps(deployment, stream)
    assert served_rps <= bound_rps
    as_text = replace(deployment, plan=deployment.plan.model_copy(update={"stages": None}))
    as_text = replace(as_text, pools=tuple(replace(pool, encoder=None) for pool in deployment.pools))
    text_rps = sustained_rps(as_text, stream)
    assert bound_rps <= text_rps
    assert bound_rps < 0.98 * text_rps or "repeats" in images or "stages" in deployment.plan.model_fields_set
    assert served_rps > 0.1 * bound_rps, "the bound is no more than ten times what is served"


@pytest.mark.parametrize("model", ["qwen2.5-vl-7b", "gemma-3-27b"])
@pytest.mark.parametrize("tp_mode", ["data", "weights"])
@pytest.mark.parametrize("tp", [1, 2])
def test_least_seconds_of_items_add_up_to_no_more_than_any_step_of_them(model: str, tp_mode: str, tp: int) -> None:
    sees = load_model(model)
    pool = Pool.model_validate(
        {
            "hardware": "h100-sxm", "instances": 1, "parallelism": {"tp": tp}, "encoder": {"tp_mode": tp_mode},
            "batching": {"max_num_seqs": 8, "max_num_batched_tokens": 8192},
        }
    )  # fmt: skip
    costs, draw = EncoderCosts(sees, load_hardware("h100-sxm"), pool), np.random.default_rng(0)
    tower = sees.vision
    assert tower is not None
    closest = 0.0
    for _ in range(8):
        shapes = [tower.shape(int(w), int(h)) for w, h in draw.integers(64, 1500, (int(draw.integers(1, 9)), 2))]
        items = [Work.of(shape, "image") for shape in shapes]
        least = costs.least_seconds(items, sum(item.vectors for item in items))
        ratio = float(least.sum()) / costs.seconds(items)
        assert ratio <= 1 + 1e-9
        closest = max(closest, ratio)
    assert closest > 0.5


@pytest.mark.parametrize("layout", ["mixed", "prefill-decode"])
@pytest.mark.parametrize("objective", ["goodput", "goodput_per_gpu"])
def test_no_plan_with_encoder_servers_is_better_than_the_search_says(layout: Any, objective: Any) -> None:
    """Servers that encode let short prompts pass those with pictures."""
    counts = check(question(ONE, TWO, devices=4, layouts=(layout,), objective=objective))
    assert counts is not None
    assert counts[1] > 1


@pytest.mark.parametrize(
    ("load", "why"),
    [
        ({"images": None}, "variant enc-1 has encoders_apart, and workload load has no images, videos or recordings"),
        ({"arrivals": ClosedLoop(users=3)}, "which encode in order of arrival, and workload load is a closed loop"),
        ({"arrivals": Poisson(rate_rps=3.0, max_in_flight=4)}, "workload load holds requests back"),
    ],
)  # fmt: skip
def test_loads_that_no_server_could_encode_ahead_are_refused(load: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_question(question(ONE, load=load))


@pytest.mark.parametrize(
    ("fragment", "why"),
    [
        ("{encoders_apart: {instances: 0}}", "encoders_apart.instances: must be greater than or equal to 1"),
        ("{encoders_apart: {gpus: 2}}", "search.variants.0.encoders_apart.gpus: unknown key"),
        ("{encoders_apart: {}, encoder: {}}", "encoders_apart and encoder cannot be combined; write them as two"),
        ("{stages: []}", "encoder servers are searched as encoders_apart"),
    ],
)  # fmt: skip
def test_a_wrong_fragment_is_refused(fragment: str, why: str) -> None:
    text = (
        "schema: simtune/study@1\nname: s\nmodel: qwen2.5-vl-7b\nhardware: {profile: h100-sxm, devices: 2}\n"
        "workload: chat\nslo: {ttft_s: {p90: 1}}\n"
    )
    with pytest.raises(SpecError, match=why):
        Study.from_text(text + f"search: {{variants: [{fragment}]}}\n")


def test_a_load_with_media_is_not_measured_as_text() -> None:
    with pytest.raises(UsageError, match=r"hold images, which load generators would send as text .* text alone"):
        next_measurement(question({}), None, 0.03)  # type: ignore[arg-type]
