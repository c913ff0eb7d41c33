"""DeepSeek-V3.1 on H20, prompts of 128k tokens: one node of tp 8 beside a pipeline of four (SGLang 0.5.7).

Published by LMSYS (lmsys.org/blog/2026-01-15-chunked-pipeline): TTFT 48.5 s on one node and 15.5 s, 67.9 % less, on
four; prefill 3.20 times as fast with fixed chunks of 4,096 tokens, 3.31 times with dynamic ones that begin at 12,288.
"""

from __future__ import annotations

import pytest

from simtune.sim.deployment import deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of

MODEL, HARDWARE = load_model("deepseek-v3"), load_hardware("h20")
PROMPT = 128 * 1024
DYNAMIC = {"chunk_pipeline": "dynamic", "options": {"smooth_factor": 0.65}}


def ttft_s(pp: int, chunk: int, **batching: object) -> float:
    """TTFT of a prompt that is alone; the memory of one node holds the keys of one such prompt in either."""
    pool = {
        "hardware": "h20",
        "instances": 1,
        "parallelism": {"tp": 8, "pp": pp},
        "batching": {"policy": "sglang", "max_num_seqs": 16, "max_num_batched_tokens": chunk, **batching},
        "kv_cache": {"block_size": 64, "num_blocks": 50_000},
        "max_model_len": PROMPT + 64,
    }
    plan = Plan.model_validate({"name": "p", "model": MODEL.name, "pools": [pool]}, strict=False)
    return float(deploy(plan, MODEL, HARDWARE).simulate(stream_of([0.0], [PROMPT], [1])).ttft_s[0])


@pytest.mark.slow
def test_a_pipeline_of_four_nodes_prefills_as_much_faster_as_published() -> None:
    one = ttft_s(1, 12_288)
    fixed, dynamic = ttft_s(4, 4096), ttft_s(4, 12_288, **DYNAMIC)
    assert one == pytest.approx(48.5, rel=0.15)
    assert dynamic == pytest.approx(15.5, rel=0.15)
    assert one / fixed == pytest.approx(3.20, rel=0.15)
    assert one / dynamic == pytest.approx(3.31, rel=0.15)
    assert 1 - dynamic / one == pytest.approx(0.679, rel=0.15)
    # Chunks one by one are no faster over four nodes than on one.
    assert ttft_s(4, 12_288, chunk_pipeline="one") == pytest.approx(one, rel=0.05)
