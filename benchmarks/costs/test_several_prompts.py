"""Steps with several prompts, beside kernels and blocks that were measured with several prompts at once.

    python -m pytest benchmarks/costs/test_several_prompts.py -m benchmark_only -s

A step takes what its prompts take that fill the device together, no less than the longest alone, and counts the
overhead of a call and, of latent attention whose whole block was measured, the products of all tokens once. Against
that: calls of several prompts by the operator that was fitted on calls of several as well; rows of several prompts that
had no part in the fit of the other half of a table, up to 16,384 tokens; and SGLang's blocks of latent attention with
several prompts, on which nothing was fitted, in rows of at least twice the shortest. `each` counts a call with its
products for every prompt, `sum` their times alone and one overhead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.costs.cards import CARDS, Card
from benchmarks.results import Recorder
from simtune.costs.fit import fit_predictor
from simtune.costs.hardware_profile import data_sheet
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.layers import AttentionLayer, attention_layer
from simtune.costs.operators import operator_key
from simtune.costs.predict import Predictor, Profile
from simtune.costs.tables import Table, read_tables, take
from simtune.costs.tables.common import MS, read_parquet
from simtune.costs.tables.screen import screen
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Arrays, Hardware, Provenance
from simtune.specs.model import Attention, FullAttention, LinearAttention, SlidingAttention
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
    parts = step.breakdown(StepWork(chunks=((0, int(tokens)),) * int(prompts)))
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


@pytest.mark.parametrize("kind", ["prefill_attention", "delta_prefill"])
@pytest.mark.parametrize(
    ("card", "engine"),
    [("h100-sxm", "vllm"), ("b200", "vllm"), ("l40s", "vllm"), ("h200-sxm", "sglang"), ("b200", "trtllm")],
)
def test_rows_of_several_prompts(card: str, engine: str, kind: str, data_dir: Path, record: Recorder) -> None:
    """The half of a table that was not fitted, by layers of its heads."""
    table = _of_engine(CARDS[card], engine, kind, data_dir)
    if table is None:
        pytest.skip("no table of this engine")
    sheet = data_sheet(table, CARDS[card].facts)
    rows = np.random.default_rng(0).permutation(len(table))
    half = fit_predictor(
        take(table, rows[: len(rows) // 2]), sheet.processors, sheet.flops_per_s, sheet.bytes_per_s, sheet.chip
    )
    others = take(table, rows[len(rows) // 2 :])
    batch, tokens = others.shape["batch"], others.shape["tokens"]
    several = (batch > 1) & (tokens >= 64) & (batch * tokens <= 16384)
    profile = Profile(_with_operator(load_hardware(CARDS[card].profile), half))
    now, added = [], []
    for row in np.flatnonzero(several):
        costs = _layer({name: float(values[row]) for name, values in others.shape.items()}, kind).costs(
            profile, "bf16", (kind == "prefill_attention" and table.kv_dtype) or "bf16"
        )
        length = np.array([tokens[row]])
        alone, among = (float(of(length)[0]) for of in (costs.prefill, costs.among))
        measured = others.seconds[row]
        now.append((costs.overhead_s + max(alone, batch[row] * min(alone, among))) / measured - 1)
        added.append((costs.overhead_s + batch[row] * alone) / measured - 1)
    for label, errors in (("now", now), ("sum", added)):
        sizes = np.abs(errors)
        print(f"{card}, {engine}, {kind}, {label}: {len(errors)} rows: {np.median(sizes):.1%} / "
              f"{np.quantile(sizes, 0.9):.1%}")  # fmt: skip
    record(
        f"{card}, {engine}, {kind}, rows of several prompts", 100 * float(np.median(np.abs(now))), "% median", "lower"
    )
    assert np.median(np.abs(now)) < 0.8 * np.median(np.abs(added))


def _of_engine(card: Card, engine: str, kind: str, data_dir: Path) -> Table | None:
    """The first table of a kind in bf16, screened."""
    folder = data_dir / "profiles/aiconfigurator_0.12" / card.folder
    name = "gdn" if kind == "delta_prefill" else "context_attention"
    for path in sorted(folder.glob(f"{engine}_*_{name}_perf.parquet")):
        for key, table in read_tables([path], engine).operators.items():
            if key.startswith(f"{kind}.bf16"):
                return screen(table, data_sheet(table, card.facts))
    return None


def _with_operator(hardware: Hardware, predictor: Predictor) -> Hardware:
    operator = predictor.operator.model_copy(
        update={"provenance": Provenance(kind="published-tables", source="half of a table")}
    )
    key = operator_key(operator.kind, operator.dtype, operator.kv_dtype, operator.variant)
    operators = {name: o for name, o in hardware.operators.items() if o.kind not in (operator.kind, "conv_prefill")}
    arrays = {name: predictor.arrays[name] for name in predictor.arrays}
    new = hardware.model_copy(update={"operators": {**operators, key: operator}})
    return new.with_arrays(Arrays({**hardware.arrays, **arrays}))


def _layer(shape: dict[str, float], kind: str) -> AttentionLayer:
    sizes = {name: int(value) for name, value in shape.items()}
    attention: Attention
    if kind == "delta_prefill":
        names = ("heads", "key_heads", "key_dim", "value_dim")
        attention = LinearAttention.model_validate({name: sizes[name] for name in names} | {"conv_width": 4})
    else:
        of_all = {name: sizes[name] for name in ("heads", "kv_heads", "head_dim")}
        cut = sizes["window"] < sizes["tokens"]
        attention = FullAttention.model_validate(of_all)
        if cut:
            attention = SlidingAttention.model_validate(of_all | {"window": sizes["window"]})
    return attention_layer(load_model("llama-3.1-8b"), attention, 1)
