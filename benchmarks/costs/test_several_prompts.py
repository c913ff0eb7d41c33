"""Steps with several prompts, beside kernels and blocks that were measured with several prompts at once.

    python -m pytest benchmarks/costs/test_several_prompts.py -m benchmark_only -s

A step adds the attention of its prompts, and counts the overhead of a call and, of latent attention whose whole block
was measured, the products of all tokens once. Against that: calls of several prompts by the operator that was fitted on
calls of several as well; and SGLang's blocks of latent attention with several prompts, on which nothing was fitted, in
rows of at least twice the shortest. `each` counts a call with its products for every prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.predict import Profile
from simtune.costs.tables.common import MS, read_parquet
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.pool import Batching, KvCache, Parallelism, Pool

pytestmark = pytest.mark.benchmark_only

CALLS = [(prompts, tokens) for prompts in (2, 4, 8, 16) for tokens in (256, 512, 1024, 2048)]


def steps(model: str, hardware: str, tp: int, kv_dtype: Any) -> StepModel:
    """A model with only attention in its layers, with experts in blocks of 8 bits if it has experts."""
    spec = load_model(model).without_feed_forward().with_weights("fp8_block" if model == "deepseek-v3" else None)
    pool = Pool(
        hardware=hardware,
        instances=1,
        parallelism=Parallelism(tp=tp),
        batching=Batching(max_num_seqs=2048, max_num_batched_tokens=65536),
        kv_cache=KvCache(dtype=kv_dtype),
    )
    return StepModel(spec, load_hardware(hardware), pool)


def attention_s(step: StepModel, prompts: int, tokens: int) -> float:
    """Seconds of the attention of a step, and of its products if they belong to measured blocks."""
    parts = step.breakdown(StepWork(chunks=((0, tokens),) * prompts))
    latent = step.attention.layers[0][1].products is not None
    return parts["prefill_attention"] + (parts["gemm"] if latent else 0.0)


def show(name: str, joint: list[float], apart: list[float], record: Recorder) -> None:
    for label, errors in (("once", joint), ("each", apart)):
        sizes = np.abs(errors)
        print(f"{name}, {label}: {len(errors)} calls: {np.median(sizes):.1%} / {np.quantile(sizes, 0.9):.1%}")
    record(f"{name}, several prompts", 100 * float(np.median(np.abs(joint))), "% median", "lower")
    assert np.median(np.abs(joint)) < np.median(np.abs(apart))


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize(
    ("model", "hardware", "kind", "kv_dtype"),
    [
        ("llama-3.1-70b", "h100-sxm", "prefill_attention", "bf16"),
        ("llama-3.1-70b", "b200", "prefill_attention", "bf16"),
        ("deepseek-v3", "h200-sxm", "mla_context_block", "fp8"),
        ("deepseek-v3", "h200-sxm-trtllm", "mla_context_block", "fp8"),
        ("deepseek-v3", "b200", "mla_context_block", "fp8"),
    ],
)
def test_several_prompts_in_one_call(
    model: str, hardware: str, kind: Any, kv_dtype: Any, tp: int, record: Recorder
) -> None:
    step, profile = steps(model, hardware, tp, kv_dtype), Profile(load_hardware(hardware))
    spec = load_model(model)
    layers = spec.num_layers
    attention: Any = spec.layers[0].attention
    if kind == "prefill_attention":
        shape: dict[str, Any] = {"heads": attention.heads // tp, "kv_heads": attention.kv_heads // tp, "head_dim": 128}
        operator = profile.predictor(kind, "bf16", kv_dtype=kv_dtype)
    else:
        sizes = {"latent": "kv_lora_rank", "rope": "qk_rope_head_dim", "nope": "qk_nope_head_dim"}
        shape = {name: getattr(attention, field) for name, field in sizes.items()}
        shape |= {"heads": attention.heads // tp, "hidden": spec.hidden_size}
        shape |= {"q_rank": attention.q_lora_rank, "v_dim": attention.v_head_dim}
        operator = profile.predictor(kind, "fp8_block", kv_dtype=kv_dtype)
    joint, apart = [], []
    for prompts, tokens in CALLS:
        call = shape | ({"window": tokens} if kind == "prefill_attention" else {})
        at_once = layers * float(operator.seconds(batch=np.array([prompts]), tokens=tokens, context=tokens, **call)[0])
        joint.append(attention_s(step, prompts, tokens) / at_once - 1)
        apart.append(prompts * attention_s(step, 1, tokens) / at_once - 1)
    show(f"{model} on {hardware}, tp {tp}", joint, apart, record)


@pytest.mark.parametrize(("card", "hardware"), [("h200_sxm", "h200-sxm-sglang"), ("b200_sxm", "b200-sglang")])
def test_latent_attention_of_sglang(card: str, hardware: str, data_dir: Path, record: Recorder) -> None:
    (path,) = (data_dir / "profiles/aisimulate_0.13" / card).glob("*_wideep_context_mla_perf.parquet")
    columns = read_parquet(path)
    heads, prompts, tokens = (columns.numbers(name).astype(int) for name in ("num_heads", "batch_size", "isl"))
    measured = columns.numbers("latency") * MS
    models = {int(number): steps("deepseek-v3", hardware, 128 // int(number), "fp8") for number in np.unique(heads)}
    layers = load_model("deepseek-v3").num_layers
    rows = np.flatnonzero((prompts > 1) & (tokens >= 128) & (measured > 2 * measured.min()))
    joint, apart = [], []
    for row in rows:
        step = models[int(heads[row])]
        in_layers = layers * measured[row]
        joint.append(attention_s(step, prompts[row], tokens[row]) / in_layers - 1)
        apart.append(prompts[row] * attention_s(step, 1, tokens[row]) / in_layers - 1)
    show(f"SGLang on {card}", joint, apart, record)
