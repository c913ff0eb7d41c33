"""Decode context parallelism against the operators it is made of, and the rules of vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.memory import kv_capacity
from simtune.costs.predict import Profile
from simtune.emit import ENGINES
from simtune.errors import Infeasible
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.model import FullAttention
from simtune.specs.pool import Batching, Parallelism, Pool
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import FixedLength, Poisson, Slo, Workload
from simtune.tuner.bounds import PlanBounds
from simtune.tuner.bounds.floors import least_e2el_s
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.candidates import space_of
from tests.tuner.fragments import with_variants

HARDWARE = load_hardware("h100-sxm")
MODEL = load_model("qwen3-30b-a3b")


def pool(size: int | None, tp: int = 8, **more: Any) -> Pool:
    return Pool(
        hardware="h100-sxm",
        instances=1,
        parallelism=Parallelism(tp=tp, decode_context_parallel=size),
        batching=Batching(max_num_seqs=64, max_num_batched_tokens=2048),
        **more,
    )


@pytest.mark.parametrize("size", [2])
def test_a_rank_keeps_a_part_of_the_tokens(size: int) -> None:
    plain, shared = (kv_capacity(MODEL, HARDWARE, pool(of)).num_blocks for of in (None, size))
    assert shared + 1 == pytest.approx(size * (plain + 1), abs=size)


@pytest.mark.parametrize(("batch", "context"), [(1, 100_000), (16, 8192), (64, 2000)])
def test_decodes_read_a_part_of_the_context_and_exchange_once_a_layer(batch: int, context: int) -> None:
    size, tp, attention = 2, 8, MODEL.layers[0].attention
    assert isinstance(attention, FullAttention)
    work = StepWork(num_decodes=batch, context_tokens=batch * context, num_samples=batch)
    plain, shared = (StepModel(MODEL, HARDWARE, pool(of)).breakdown(work) for of in (None, size))
    profile = Profile(HARDWARE, in_step=True)
    dtype, heads = MODEL.dtype, attention.heads // tp * size
    part = np.array([context / size])
    attention_s = profile.predictor("decode_attention", dtype, kv_dtype=dtype).seconds(
        batch=batch, context=part, window=part, heads=heads, kv_heads=1, head_dim=attention.head_dim
    )
    row_bytes = batch * heads * attention.head_dim * 2
    exchange_s = sum(
        profile.predictor(kind, dtype).seconds(devices=size, bytes=row_bytes)
        for kind in ("all_gather", "reduce_scatter")
    )
    expected = MODEL.num_layers * (attention_s + exchange_s)
    assert shared["decode_attention"] == pytest.approx(float(expected[0]), rel=1e-9)
    assert {k: v for k, v in plain.items() if k != "decode_attention"} == pytest.approx(
        {k: v for k, v in shared.items() if k != "decode_attention"}
    )


def test_long_contexts_decode_faster() -> None:
    model = load_model("deepseek-v3")
    work = StepWork(num_decodes=64, context_tokens=64 * 60_000, num_samples=64)
    seconds = [
        StepModel(model, load_hardware("h200-sxm"), pool(size).model_copy(update={"hardware": "h200-sxm"})).seconds(
            work
        )
        for size in (None, 8)
    ]
    assert seconds[1] < 0.9 * seconds[0]


@pytest.mark.parametrize(
    ("size", "tp", "error", "words"),
    [
        (3, 8, ValidationError, r"must divide tp \(8\)"),
        (4, 8, Infeasible, "keeps each of the 4 KV heads 2 times"),
        (2, 4, Infeasible, "keeps each of the 4 KV heads 1 times"),
    ],
)
def test_sizes_that_vllm_refuses(size: int, tp: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        StepModel(MODEL, HARDWARE, pool(size, tp))


def test_it_is_written_for_vllm_alone() -> None:
    refused = list(ENGINES["sglang"].refusals(pool(2), MODEL, {}))
    assert any(reason.startswith("parallelism.decode_context_parallel: ") for reason in refused)
    settings = ENGINES["vllm"]._settings(pool(2), MODEL, {})  # type: ignore[attr-defined]
    assert settings["decode-context-parallel-size"] == 2
    assert not any("decode_context" in reason for reason in ENGINES["vllm"].refusals(pool(2), MODEL, {}))
    old = ENGINES["vllm"].of("vllm-0.10")
    assert any("decode_context_parallel: vLLM 0.10 has none" in reason for reason in old.refusals(pool(2), MODEL, {}))


@pytest.mark.slow
def test_a_search_bounds_it_and_writes_a_certificate() -> None:
    load = Workload(
        name="load",
        requests=40,
        arrivals=Poisson(rate_rps=4.0),
        prompt=FixedLength(tokens=4000),
        output=FixedLength(tokens=60),
    )
    study = Study(
        name="study",
        model=MODEL.name,
        hardware=(HardwareCount(profile="h100-sxm", devices=8),),
        workload=load.name,
        slo=Slo(ttft_s={"p99": 2.0}, tpot_s={"p99": 0.03}),
        search=Search(
            tp=(8,), pp=(1,), max_num_seqs=(64,), max_num_batched_tokens=(2048,), confirm=Confirmation(draws=0)
        ),
    )
    asked = with_variants(
        Question(study, MODEL, (HARDWARE,), load, None), {}, {"parallelism": {"decode_context_parallel": 2}}
    )
    tuned = optimize(asked, jobs=1)
    assert {row.candidate.decoding.shape.variant for row in tuned.rows} == {"", "decode-context-parallel-2"}
    audit = Audit(certificate_of(tuned), asked)
    assert audit.run(), audit.problems
    cache = PlanCache(asked, space_of(asked.study).candidates)
    for row in tuned.rows:
        settled = cache.settled(row.candidate)
        assert not isinstance(settled, Refused)
        deployment = cache.deployment(settled)
        stream = asked.stream(settled, 4.0)
        least_s = least_e2el_s(PlanBounds(deployment, stream))
        assert 0 < least_s <= float(deployment.simulate(stream).e2el_s.mean())
