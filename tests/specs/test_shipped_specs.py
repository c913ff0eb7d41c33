"""The specs that come with simtune are valid, have the right size and are written as simtune writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.specs.base import Spec
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Parallelism, Pool
from simtune.specs.workload import (
    ClosedLoop,
    FixedInterval,
    FixedLength,
    Gamma,
    Lognormal,
    Poisson,
    Quantiles,
    RequestClass,
    Slo,
    TraceArrivals,
    TraceLengths,
    Workload,
)

ROOT = Path(__file__).resolve().parents[2]
MODELS = sorted((ROOT / "simtune/models").glob("*.yaml"))
WORKLOADS = sorted((ROOT / "simtune/workloads").glob("*.yaml"))

# Parameters in units of 1e9, as the publishers' model cards and weight files state them.
PUBLISHED_PARAMETERS = {
    "llama-2-7b": 6.74,
    "llama-2-70b": 68.98,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "llama-3.1-70b": 70.55,
    "codellama-34b": 33.74,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "mixtral-8x7b": 46.70,
    "vicuna-7b": 6.74,
    "vicuna-13b": 13.02,
    "deepseek-v3": 671.03,
    "deepseek-r1": 671.03,
    "gemma-3-27b": 27.01,
    "glm-4.5": 352.8,  # without the layer that predicts a token further
    "glm-5": 744,
    "gpt-oss-120b": 116.83,
    "gpt-oss-20b": 20.91,
    "kimi-k2": 1026.4,
    "llama-3.3-70b": 70.55,
    "llama-4-maverick": 400.7,
    "llama-4-scout": 107.8,
    "minimax-m2": 228.7,
    "mistral-small-24b": 23.57,
    "nemotron-nano-9b-v2": 8.89,
    "phi-4": 14.66,
    "qwen2.5-7b": 7.62,
    "qwen2.5-vl-7b": 7.62,
    "qwen2.5-72b": 72.71,
    "qwen3-235b-a22b": 235.09,
    "qwen3-next-80b-a3b": 79.7,
    "qwen3.5-27b": 27,
    "qwen3.5-122b-a10b": 122,
    "qwen3.5-397b-a17b": 397,
    "minimax-m2.5": 229,
    "deepseek-v3.2": 671,  # without the layer that predicts a token further
    "deepseek-v4-flash": 284,
    "deepseek-v4-pro": 1600,
    "voxtral-mini-3b": 4.0,  # embeddings and decoder, arXiv 2507.13264, table 1
}


ROUNDED = {"deepseek-v4-pro": 50}
"""Half of the last digit that is published, in billions, if that is more than half a percent."""


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_a_shipped_model_has_the_published_number_of_parameters(path: Path) -> None:
    model = Model.from_file(path)
    assert model.name == path.stem
    kinds = {"vision": model.vision, "audio": model.audio}
    encoders = [name for name, encoder in kinds.items() if encoder is not None]
    parts = [f", language and {name} parts" for name in encoders] or ["", ", language part only"]
    assert model.source in {f"published config.json of {model.hf}{part}" for part in parts}
    published = PUBLISHED_PARAMETERS[path.stem]
    rounding = ROUNDED.get(path.stem, 0.005 * published)
    assert model.parameters / 1e9 == pytest.approx(published, abs=rounding)


def test_every_published_count_is_that_of_a_shipped_model() -> None:
    assert {path.stem for path in MODELS} == set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize("path", MODELS + WORKLOADS, ids=lambda p: p.stem)
def test_a_shipped_file_is_what_simtune_would_write(path: Path) -> None:
    kind: type[Spec] = Model if path in MODELS else Workload
    spec = kind.from_file(path)
    text = path.read_text(encoding="utf-8")
    comment = "\n".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    assert spec.to_yaml(comment) == text
    assert kind.from_text(spec.to_yaml()) == spec


# --- round trips of anything valid ------------------------------------------------------------------------

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
COUNTS = st.integers(1, 10**6)
RATES = st.floats(1e-6, 1e6)
GPUS = st.integers(1, 100)
TEXTS = st.none() | st.text(max_size=20)


@st.composite
def quantiles(draw: st.DrawFn) -> Quantiles:
    inner = draw(st.lists(st.floats(0, 1, exclude_min=True, exclude_max=True), max_size=5, unique=True))
    tokens = draw(st.lists(st.floats(1, 1e6), min_size=len(inner) + 2, max_size=len(inner) + 2))
    return Quantiles(levels=(0.0, *sorted(inner), 1.0), tokens=tuple(sorted(tokens)))


LENGTHS = st.one_of(
    st.builds(FixedLength, tokens=COUNTS),
    st.builds(Lognormal, mean_tokens=RATES, sigma=st.floats(1e-6, 20), max_tokens=COUNTS),
    quantiles(),
    st.just(TraceLengths()),
)
ARRIVALS = st.one_of(
    st.builds(Poisson, rate_rps=RATES),
    st.builds(Gamma, rate_rps=RATES, cv=st.floats(1e-3, 1e3)),
    st.builds(FixedInterval, rate_rps=RATES),
    st.builds(ClosedLoop, users=COUNTS, think_s=st.floats(0, 1e3)),
    st.builds(TraceArrivals, rate_rps=st.none() | RATES),
)
LIMITS = st.dictionaries(st.sampled_from(["mean", "p50", "p90", "p99", "p99.9"]), RATES, max_size=3)
CLASSES = st.builds(
    RequestClass,
    name=NAMES,
    share=RATES,
    priority=st.integers(-9, 9),
    prompt=st.none() | LENGTHS,
    output=st.none() | LENGTHS,
    slo=st.none() | st.builds(Slo, ttft_s=LIMITS, tpot_s=LIMITS, e2el_s=LIMITS),
)
WORKLOAD = st.builds(
    Workload,
    name=NAMES,
    source=TEXTS,
    requests=COUNTS,
    arrivals=ARRIVALS,
    prompt=LENGTHS,
    output=LENGTHS,
    trace=st.just("t.csv") | st.text(min_size=1, max_size=20),
    classes=st.lists(CLASSES, max_size=3, unique_by=lambda c: c.name).map(tuple),
)
PLAN = st.builds(
    Plan,
    name=NAMES,
    model=st.text(max_size=20),
    pools=st.builds(
        Pool,
        name=NAMES,
        hardware=st.text(max_size=20),
        instances=GPUS,
        parallelism=st.builds(Parallelism, tp=GPUS, pp=GPUS),
        batching=st.builds(Batching, max_num_seqs=COUNTS, max_num_batched_tokens=COUNTS, chunked_prefill=st.booleans()),
        kv_cache=st.builds(
            KvCache,
            dtype=st.none() | st.sampled_from(["bf16", "fp8"]),
            block_size=COUNTS,
            memory_utilization=st.floats(0, 1, exclude_min=True),
            other_memory_gib=st.none() | st.floats(0, 40),
            num_blocks=st.none() | COUNTS.map(lambda n: n + 10**12),  # enough for any max_model_len
        ),
        async_scheduling=st.booleans(),
        max_model_len=st.none() | COUNTS,
    ).map(lambda pool: (pool,)),
)


@given(WORKLOAD | PLAN)
def test_any_workload_or_plan_reads_back_as_itself(spec: Workload | Plan) -> None:
    again = type(spec).from_text(spec.to_yaml("a comment"))
    assert again == spec
    assert again.to_yaml("a comment") == spec.to_yaml("a comment")
