"""Fragments of pools and plans that a search tries as variants, and random small studies that have some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from simtune.costs.other_engines import for_engine
from simtune.specs.catalog import engine_family, load_engine
from simtune.tuner.question import Question, StudyEngine

FRAGMENTS: tuple[dict[str, Any], ...] = (
    {"overlap": "ladder"},
    {"overlap": "split_sequence"},
    {"batching": {"policy": "sarathi"}},
    {"batching": {"policy": "orca", "max_num_batched_tokens": 8192}},
    {"batching": {"policy": "static"}},
    {"batching": {"policy": "sglang"}},
    {"batching": {"policy": "tensorrt-llm"}},
    {"batching": {"policy": "shortest-predicted-first"}},
    {"batching": {"policy": "skip-join-mlfq"}},
    {"batching": {"policy": "layered-prefill", "max_num_batched_tokens": 8192}},
    {"batching": {"policy": "vllm-priority", "long_prefill_token_threshold": 256}},
    {"research": {"kv_policy": {"kept": 0.25}}},
    {"research": {"kv_policy": {"decode_sparsity": 0.5, "prefill_sparsity": 0.3}}},
    {"kv_cache": {"memory_utilization": 0.5}},
    {"kv_cache": {"num_blocks": 900}},
    {"kv_cache": {"prefix_caching": True}},
    {"kv_cache": {"preemption": "swap", "num_blocks": 700}},
    {"kv_cache": {"watermark": 0.1, "block_size": 32}},
    {"kv_cache": {"dtype": "fp8"}},
    {"parallelism": {"cp": 2}},
    {"parallelism": {"prefill_context_parallel": 2}},
    {"parallelism": {"pp": 2}, "batching": {"chunk_pipeline": "fixed"}},
    {"parallelism": {"pp": 2}, "batching": {"policy": "sglang", "chunk_pipeline": "dynamic"}},
    {"parallelism": {"tp": 2}},
    {"research": {"offload": {"weights": 0.2}}},
    {"weight_dtype": "fp8"},
    {"async_scheduling": False},
    {"cuda_graphs": False},
    {"exposed_host": "all"},
    {"host": {"step_s": 0.004, "per_sequence_s": 1e-5}},
    {"research": {"runtime": {"kernels_per_layer": 12, "kernel_floor_s": 2e-6, "launch_s": 3e-6}}},
    {"front_end": {"request_s": 0.01, "token_s": 1e-6}},
    {"instances": 1},
    {"spare": 1},
    {"max_model_len": 8192},
    {"fused": ["norm"]},
    {"router": {"kind": "least_tokens"}},
    {"router": {"kind": "power_of_two"}},
    {"engine": "sglang-0.5"},
    {"engine": "trtllm-1.2", "max_model_len": 8192},
    {"engine": "none"},
)
"""Fragments that plans of every layout may have."""
OF_PAIRS: tuple[dict[str, Any], ...] = (
    {"link": {"path": "intra_node", "layerwise": True}},
    {"link": {"bytes_per_s": 2e9, "shared": True}},
    {"link": {"first_token": "prefill"}},
    {"decode_router": {"kind": "round_robin"}},
    {"local_prefill": {"below_tokens": 64}},
    {"local_prefill": {"below_tokens": 0, "queue_above": 2}},
    {"decode": {"research": {"kv_policy": {"kept": 0.5}}}},
    {"decode": {"batching": {"policy": "sglang"}}},
    {"prefill": {"batching": {"policy": "shortest-predicted-first"}}},
    {"prefill": {"parallelism": {"cp": 2}}},
    {"prefill": {"parallelism": {"prefill_context_parallel": 2}}},
)
"""Fragments that only plans with prefill and decode pools may have."""


def with_fragments(question: Question, seed: int, most: int = 2) -> Question:
    """Return a question with up to `most` random fragments, alone or combined, beside its plans as they are."""
    draw = np.random.default_rng(seed)
    pairs = "prefill-decode" in question.study.search.layouts
    every = FRAGMENTS + OF_PAIRS * pairs
    chosen = draw.choice(len(every), size=int(draw.integers(1, most + 1)), replace=False)
    return with_variants(question, {}, *(every[i] for i in chosen), combine=bool(draw.integers(2)))


def with_variants(question: Question, *fragments: dict[str, Any], combine: bool = False) -> Question:
    """Return a question with variants, as a study's file with them would be read."""
    data = question.study.to_data()
    data["search"] |= {"variants": list(fragments), "combine": combine}
    del data["schema"]
    study = type(question.study).model_validate(data)
    names = {variant.engine for variant in study.variants if variant.engine}
    engines = {
        name: StudyEngine(
            None if name == "none" else load_engine(name),
            tuple(for_engine(hardware, engine_family(name)) for hardware in question.hardware),
        )
        for name in names
    }
    return replace(question, study=study, engines=engines)
