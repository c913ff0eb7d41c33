"""The space: what a study spans, and what never gets into it."""

from __future__ import annotations

from typing import Any

from simtune.specs.plan import OwnRouting
from simtune.specs.study import HardwareCount, Search, Study, StudyBatching
from simtune.specs.workload import Slo
from simtune.tuner.space import Candidate, ParallelShape, members, shapes


def study(devices: int = 8, objective: Any = "goodput_per_gpu", **search: Any) -> Study:
    return Study(
        name="s",
        model="llama-3.1-8b",
        hardware=HardwareCount(profile="h100-sxm", devices=devices),
        workload="chat",
        slo=Slo(ttft_s={"p99": 1.0}),
        objective=objective,
        search=Search(**search),
    )


def test_every_cut_that_the_devices_allow_uses_all_of_them() -> None:
    found = shapes(study(tp=(1, 2, 4, 8), pp=(1, 2)))
    cuts = [(1, 1, 8), (1, 2, 4), (2, 1, 4), (2, 2, 2), (4, 1, 2), (4, 2, 1), (8, 1, 1)]
    assert found == [ParallelShape(*cut) for cut in cuts]
    assert all(shape.num_gpus == 8 for shape in found)
    assert shapes(study(devices=1, tp=(2, 4), pp=(1,))) == []
    assert shapes(study(devices=6, tp=(4,), pp=(1,))) == [ParallelShape(4, 1, 1)]


def test_counting_gpus_makes_every_number_of_instances_a_shape() -> None:
    cuts = [(1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 1, 4), (2, 1, 1), (2, 1, 2)]
    found = shapes(study(devices=4, objective="gpus", tp=(1, 2), pp=(1,)))
    assert found == [ParallelShape(*cut) for cut in cuts]
    assert shapes(study(devices=4, tp=(1,), pp=(1,), instances=(2, 9))) == [ParallelShape(1, 1, 2)]


def test_members_and_their_plans() -> None:
    s = study(max_num_seqs=(64, 128, 64), max_num_batched_tokens=(2048,))
    found = members(s, ParallelShape(2, 1, 4))
    assert found == [Candidate(ParallelShape(2, 1, 4), 64, 2048), Candidate(ParallelShape(2, 1, 4), 128, 2048)]
    plan = found[1].plan(s, 4096)
    (pool,) = plan.pools
    assert plan.name == found[1].name == "tp2-pp1-x4-s128-t2048"
    assert (pool.parallelism.tp, pool.instances, pool.batching.max_num_seqs, pool.max_model_len) == (2, 4, 128, 4096)
    assert plan.num_devices == 8


def test_a_study_says_policy_and_router_of_all_its_plans() -> None:
    plain = study(max_num_seqs=(64,), max_num_batched_tokens=(2048,))
    (candidate,) = members(plain, ParallelShape(1, 1, 2))
    assert candidate.plan(plain, 4096).pools[0].batching.policy == "vllm-fcfs"
    asked = plain.model_copy(
        update={
            "batching": StudyBatching(policy="shortest-predicted-first", prediction_sigma=0.1),
            "router": OwnRouting(kind="mine.router:Mine", options={"a": 1}),
        }
    )
    plan = candidate.plan(asked, 4096)
    batching = plan.pools[0].batching
    assert (batching.policy, batching.prediction_sigma, batching.max_num_seqs) == ("shortest-predicted-first", 0.1, 64)
    assert (plan.router.kind, plan.router.options) == ("mine.router:Mine", {"a": 1})
