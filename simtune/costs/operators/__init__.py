"""Operators: the shapes that describe a call, and the work that a shape implies.

Each operator kind turns shapes into three numbers, the terms of the fitted time
(`simtune.specs.hardware.BaseFit`): flops, bytes moved to and from memory (or over the link), and `blocks`,
the serial units whose fixed cost a roofline does not see. All in SI units, on numpy arrays of equal length.
The forms were found on tables of AIConfigurator for H200, A100 and H100. A new kind is a class in the file of its
family, with all that is known of the kind (`OperatorForm`), and a line in `OPERATORS`; `OperatorKind` names it for
the files of profiles.
"""

from __future__ import annotations

from simtune.costs.operators.attention import (
    DecodeAttention,
    EncoderAttention,
    MixedAttention,
    PrefillAttention,
    TreeAttention,
)
from simtune.costs.operators.base import UNKNOWN, Chip, CurveForm, OperatorForm, Setting, Shape, Terms
from simtune.costs.operators.communication import AllReduce, ExpertExchange, KvTransferForm, OnePass, SendRecv
from simtune.costs.operators.latent import (
    DsaContextBlock,
    DsaDecodeBlock,
    LatentProducts,
    MlaContextBlock,
    MlaDecode,
    MlaDecodeBlock,
    MlaPrefill,
)
from simtune.costs.operators.matrix import Gemm, Quantise
from simtune.costs.operators.moe import Moe
from simtune.costs.operators.small import Elementwise, HyperPost, HyperPre, Sampling
from simtune.costs.operators.sparse import SparseContextBlock, SparseDecode, SparseDecodeBlock, SparsePrefill
from simtune.costs.operators.state import (
    ConvDecode,
    ConvPrefill,
    DeltaDecode,
    DeltaPrefill,
    KdaDecode,
    KdaPrefill,
    LinearDecode,
    LinearPrefill,
)
from simtune.specs.hardware import OperatorKind

__all__ = ["OPERATORS", "UNKNOWN", "Chip", "CurveForm", "OperatorForm", "Setting", "Shape", "Terms", "operator_key"]

OPERATORS: dict[OperatorKind, OperatorForm] = {
    "gemm": Gemm(),
    "quantise": Quantise(),
    "prefill_attention": PrefillAttention(),
    "decode_attention": DecodeAttention(),
    "mixed_attention": MixedAttention(),
    "tree_attention": TreeAttention(),
    "encoder_attention": EncoderAttention(),
    "mla_prefill": MlaPrefill(),
    "mla_decode": MlaDecode(),
    "mla_products": LatentProducts(),
    "mla_context_block": MlaContextBlock(),
    "mla_decode_block": MlaDecodeBlock(),
    "dsa_context_block": DsaContextBlock(),
    "dsa_decode_block": DsaDecodeBlock(),
    "sparse_prefill": SparsePrefill(),
    "sparse_decode": SparseDecode(),
    "sparse_context_block": SparseContextBlock(),
    "sparse_decode_block": SparseDecodeBlock(),
    "linear_prefill": LinearPrefill(),
    "linear_decode": LinearDecode(),
    "delta_prefill": DeltaPrefill(),
    "delta_decode": DeltaDecode(),
    "kda_prefill": KdaPrefill(),
    "kda_decode": KdaDecode(),
    "conv_prefill": ConvPrefill(),
    "conv_decode": ConvDecode(),
    "moe": Moe(),
    "elementwise": Elementwise(),
    "hyper_pre": HyperPre(),
    "hyper_post": HyperPost(),
    "sampling": Sampling(),
    "all_reduce": AllReduce(),
    "all_gather": OnePass(),
    "reduce_scatter": OnePass(),
    "all_to_all": OnePass(),
    "moe_dispatch": ExpertExchange(),
    "moe_combine": ExpertExchange(),
    "send_recv": SendRecv(),
    "kv_transfer": KvTransferForm(),
}


def operator_key(kind: str, dtype: str, kv_dtype: str | None = None, variant: str | None = None) -> str:
    """Return the operator's name in a profile: gemm.bf16, decode_attention.bf16.kv-fp8, elementwise.norm.bf16."""
    parts = [kind] if variant is None else [kind, variant]
    parts.append(dtype)
    if kv_dtype is not None and kv_dtype != dtype:
        parts.append(f"kv-{kv_dtype}")
    return ".".join(parts)
