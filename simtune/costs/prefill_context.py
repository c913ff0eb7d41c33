"""Prompts that groups of tensor-parallel ranks divide among them, each of which keeps the whole KV cache.

vLLM (`--prefill-context-parallel-size`) and SGLang (`--enable-prefill-cp` with `--attn-cp-size`) cut the tokens of
every prompt in a step into 2 g pieces and give group i of g the pieces i and 2 g - 1 - i, so that all groups relate
equally many pairs of tokens. In each layer a group gathers the keys and values of the tokens of all groups, stores
them, and attends with its own queries to everything before: a chunk takes prefill / g, and one gathering. What is
repeated for the tokens before a chunk is repeated by every group.

Sources: `PCPManager` in vllm/v1/worker/gpu/pcp_manager.py and vllm/v1/attention/ops/pcp.py (vLLM 0.32),
python/sglang/srt/layers/cp/zigzag.py (SGLang 0.5.23).

To the fast side: every group expands the latents of all tokens of a chunk, which is divided here, and decodes in steps
with prompts are divided as the prompts are but for their attention. To the slow side: vLLM 0.32 and later decode each
request on one group only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from simtune.arrays import Array
from simtune.costs.layers import AttentionCosts, AttentionLayer
from simtune.costs.predict import Profile
from simtune.costs.step_calls import EqualLayers, StepCall
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.model import Model
from simtune.specs.pool import Pool


def over_prompt_groups(costs: AttentionCosts, groups: int) -> AttentionCosts:
    """Return the costs of attention if `groups` groups of ranks divide prompts; decodes attend as without."""
    return costs._replace(
        prefill=lambda tokens: costs.prefill(tokens) / groups, among=lambda tokens: costs.among(tokens) / groups
    )


def gathered_keys(model: Model, pool: Pool, profile: Profile, layers: Sequence[EqualLayers]) -> list[StepCall]:
    """Return the gathering of keys and values in each layer, by the tokens of a group; nothing if there is one group.

    Over several nodes it is a ring by the data sheet of the link between them, since collectives were measured in one.
    Keys and values are sent in the format of activations.
    """
    parallelism = pool.parallelism
    groups = parallelism.prompt_groups
    if groups == 1:
        return []
    if parallelism.tp * groups > profile.hardware.device.devices_per_node:
        send = profile.predictor("send_recv", model.dtype, variant="inter_node")

        def gather_s(token_bytes: float, tokens: Array) -> Array:
            return send.seconds(bytes=(groups - 1) * tokens * token_bytes)

    else:
        gather = profile.predictor("all_gather", model.dtype)

        def gather_s(token_bytes: float, tokens: Array) -> Array:
            return gather.seconds(devices=groups, bytes=groups * tokens * token_bytes)

    return [
        StepCall("send", equal.number, partial(gather_s, _token_bytes(equal.attention, model.dtype)))
        for equal in layers
        if equal.attention.values_per_token
    ]


def _token_bytes(layer: AttentionLayer, dtype: str) -> float:
    """Return the bytes that a token's keys and values are sent in, those of an indexer among them."""
    return layer.values_per_token * DTYPE_BYTES[dtype] + layer.index_bytes
