"""Tables of experts of AIConfigurator: the fused kernels of each engine, in ms, and the exchange of tokens, in us.

Balanced routing deals tokens out: token t takes every (experts / topk)-th expert from the t-th on. `power_law_x` is not
routing by chance: loads of the experts are drawn with a density that falls as load^-x between 1 and 0.8 times the
tokens, or 0.01 and 2 if there are fewer rows than experts, anew for each of five runs, and the rank measured is the one
with the most rows (`sample_power_law` and `power_law_logits_v3` of its collector). If several ranks share the experts,
a shape does not determine such a time: from 100 rows an expert on it is 1 to 3 times that of balanced rows. On one rank
a Zipf exponent of 0.5 does: over 20 tables fits of balanced rows are 10.3 % off there (mean of medians), 7.5 % on
balanced rows they did not see, and 12.8 % if skewed rows are taken to be dealt out
(benchmarks/costs/test_moe_accuracy.py). So skewed rows are left out if a format has balanced ones; if it has none,
those on one rank are used.

A row of the moe table is all tokens through one rank: with `moe_ep_size` ranks the rank has every token and multiplies
the rows of its own experts, so nothing was dispatched.

Two kinds of balanced rows do not match their columns, and are left out. DeepSeek-V3's router takes experts of four of
eight groups. If the layer of an engine routes, as in vLLM's and SGLang's tables, four of the eight experts that a token
is dealt are forbidden by this; ties replace them, the same for all tokens. These, and half of all experts, are on the
first rank, the one measured: with that as input, a base of all other models is 4 to 14 % off at the median of these
rows, with dealt-out experts as input 20 to 36 (benchmarks/costs/test_grouped_router.py). TensorRT-LLM's rows are dealt
out: 36 to 39, and 6 to 8. And Nemotron's experts have no gate, which only TensorRT-LLM's tables state, in the kernel's
name.
"""

from __future__ import annotations

import numpy as np

from simtune.arrays import Array, Mask
from simtune.costs.operators.moe import DEALT, received
from simtune.costs.tables.common import AICONFIGURATOR, MS, US, Columns, FileContent, FormatReaders, Table, finish, take
from simtune.costs.tables.screen import ABOVE_LAUNCHES
from simtune.specs.base import DTYPE_BYTES, Dtype
from simtune.specs.hardware import OperatorKind

_DTYPES: dict[str, Dtype] = {
    "bfloat16": "bf16",
    "float16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "w4a16_mxfp4": "mxfp4",
    "w4a8_mxfp4_mxfp8": "mxfp4_mxfp8",
    "int4_wo": "int4",
}

POWER_LAW = 0.5
"""Zipf exponent that is taken for `power_law_1.01` and `power_law_1.2` on one rank."""

_BACKENDS = {"deepep_ll": "low_latency", "deepep_ht": "high_throughput"}
_PHASES: dict[str, OperatorKind] = {"dispatch": "moe_dispatch", "combine": "moe_combine"}
_SENT: Dtype = "bf16"
"""Format of `default`: dispatch and combine of as many tokens take about the same time, so neither sends eight bits."""

_GROUPED = (7168.0, 8.0, 256.0)
"""Hidden, experts per token and experts of DeepSeek-V3, the only model here whose router has groups."""

_ROUTED_BY_HAND = ("vllm_fused_moe", "moe_torch_flow", "deepgemm")
"""Prefixes of the names of kernels for which the collector chose the experts: vLLM's to 0.19, TensorRT-LLM's."""

_PLAIN = {(2688.0, 6.0, 128.0)} | {(hidden, 22.0, 512.0) for hidden in (1024.0, 2048.0, 4096.0, 8192.0)}
"""Hidden, experts per token and experts of Nemotron 3, whose kernels without a gate TensorRT-LLM's tables name."""

_LOW_LATENCY = "min_latency"
_LOW_LATENCY_TOKENS = 128
"""Tokens up to which TensorRT-LLM's low-latency kernel of nvfp4 experts is taken for a shape that two kernels were
measured on, as in AIConfigurator's own look-up."""


_DISPATCHED = "deepepmoe"
"""Name of the kernels of SGLang behind DeepEP, which multiply the rows that reached a rank."""
_MODES = {"moe_context": "high_throughput", "moe_generation": "low_latency"}
"""DeepEP's kernels in front of them: rows of all experts one after the other, or in slots of each expert."""


def _experts(columns: Columns) -> FileContent:
    columns.require("distribution")
    if columns.only("kernel_source") == _DISPATCHED:
        return _dispatched(columns)
    shape = {
        "tokens": columns.numbers("num_tokens"),
        "hidden": columns.numbers("hidden_size"),
        "intermediate": columns.numbers("inter_size") / columns.numbers("moe_tp_size"),
        "experts_per_token": columns.numbers("topk"),
        "experts": columns.numbers("num_experts"),
        "ep": columns.numbers("moe_ep_size"),
        "skew": np.where(columns.equal("distribution", "balanced"), DEALT, POWER_LAW),
    }
    kernels = columns.text("kernel_source") if "kernel_source" in columns.names else [""] * len(columns)
    by_hand = np.array([not kernel or kernel.startswith(_ROUTED_BY_HAND) for kernel in kernels], dtype=np.bool_)
    excluded = {
        "experts without a gate": _named(kernels, "nongated") | _of_models(shape, _PLAIN),
        "a router of groups, whose experts are not dealt out": _of_models(shape, {_GROUPED}) & ~by_hand,
        "another kernel stands for the shape": _replaced(columns.text("moe_dtype"), kernels, shape),
    }
    content = FileContent()
    names = np.array(columns.text("moe_dtype"), dtype=object)
    seconds = columns.numbers("latency") * MS
    for name in dict.fromkeys(names):
        rows = np.flatnonzero(names == name)
        if name not in _DTYPES:
            content.skip(len(rows), f"moe_dtype {name}")
            continue
        part = take(_table(columns, "moe", _DTYPES[name], shape, seconds), rows)
        content.tables.append(
            finish(part, _unusable_routing(part.shape) | {why: mask[rows] for why, mask in excluded.items()})
        )
    return content


def _dispatched(columns: Columns) -> FileContent:
    """Read experts of a rank to which tokens were dispatched. Rows count the tokens of all ranks; with uniform routing
    each rank multiplies as many rows.

    Kernels for few tokens get the rank's rows only: with 256 ranks 64 times the tokens take twice as long. Those for
    many get the buffer of all tokens, most of which have no expert on the rank: there each further token takes 9 ns of
    an H200, three passes over its values. A token then has fewer than one expert on average.

    The shortest calls for many tokens, which follow each other without a graph, take as long as the host launches them.
    """
    columns.require("op_name")
    tokens, k, experts, ep = (columns.numbers(name) for name in ("num_tokens", "topk", "num_experts", "moe_ep_size"))
    local = [received(t, round(e), round(n), round(r)) for t, e, n, r in zip(tokens, experts, k, ep, strict=True)]
    few = columns.equal("op_name", "moe_generation")
    shape = {
        "tokens": np.where(few, [rank.tokens for rank in local], tokens),
        "hidden": columns.numbers("hidden_size"),
        "intermediate": columns.numbers("inter_size") / columns.numbers("moe_tp_size"),
        "experts_per_token": np.where(few, [rank.experts_per_token for rank in local], k / ep),
        "experts": experts / ep,
        "ep": np.ones_like(ep),
        "skew": np.full_like(ep, DEALT),
    }
    seconds = columns.numbers("latency") * MS
    content = FileContent()
    for op_name, variant in _MODES.items():
        for name in dict.fromkeys(columns.text("moe_dtype")):
            rows = np.flatnonzero(columns.equal("op_name", op_name) & columns.equal("moe_dtype", name))
            if name not in _DTYPES:
                content.skip(len(rows), f"moe_dtype {name}")
            elif len(rows):
                part = take(_table(columns, "moe", _DTYPES[name], shape, seconds, variant), rows)
                excluded = {"skewed routing": ~columns.equal("distribution", "uniform")[rows]}
                if variant == "high_throughput":
                    excluded["launched by the host"] = part.seconds < ABOVE_LAUNCHES * part.seconds.min()
                content.tables.append(finish(part, excluded))
    return content


def _unusable_routing(shape: dict[str, Array]) -> dict[str, Mask]:
    """Select skewed rows of a format that has balanced ones; of one that has none, those of several ranks."""
    skewed = shape["skew"] != DEALT
    if not skewed.all():
        return {"skewed routing": skewed}
    return {"skewed routing over several ranks": shape["ep"] > 1}


def _named(kernels: list[str], part: str) -> Mask:
    return np.array([part in kernel for kernel in kernels], dtype=np.bool_)


def _of_models(shape: dict[str, Array], models: set[tuple[float, float, float]]) -> Mask:
    """Select rows with the hidden size, experts per token and experts of one of these models."""
    sizes = zip(*(shape[name].tolist() for name in ("hidden", "experts_per_token", "experts")), strict=True)
    return np.array([size in models for size in sizes], dtype=np.bool_)


def _replaced(dtypes: list[str], kernels: list[str], shape: dict[str, Array]) -> Mask:
    """Select rows of low-latency kernels beyond their tokens, and up to there those of the kernels that they
    replace."""
    low_latency, few = _named(kernels, _LOW_LATENCY), shape["tokens"] <= _LOW_LATENCY_TOKENS
    shapes = list(zip(dtypes, *(column.tolist() for column in shape.values()), strict=True))
    low_latency_shapes = {key for key, chosen in zip(shapes, low_latency & few, strict=True) if chosen}
    beside = np.array([key in low_latency_shapes for key in shapes], dtype=np.bool_)
    replaced: Mask = np.where(low_latency, ~few, beside)
    return replaced


def _exchange(columns: Columns) -> FileContent:
    columns.require("phase", "comm_dtype")
    shape = {
        "tokens": columns.numbers("num_tokens"),
        "row_bytes": columns.numbers("hidden_size") * DTYPE_BYTES[_SENT],
        "experts_per_token": columns.numbers("topk"),
        "experts": columns.numbers("num_experts"),
        "ep": columns.numbers("ep_size"),
        "nodes": columns.numbers("node_num"),
    }
    content = FileContent()
    seconds = columns.numbers("latency") * US
    members: dict[tuple[str, str, str], list[int]] = {}
    row_names = zip(columns.text("comm_backend"), columns.text("phase"), columns.text("comm_dtype"), strict=True)
    for row, name in enumerate(row_names):
        members.setdefault(name, []).append(row)
    for (backend, phase, sent), rows in members.items():
        if backend not in _BACKENDS or phase not in _PHASES or sent != "default":
            content.skip(len(rows), f"comm_backend {backend}, phase {phase}, comm_dtype {sent}")
            continue
        part = _table(columns, _PHASES[phase], _SENT, shape, seconds, _BACKENDS[backend])
        content.tables.append(finish(take(part, np.array(rows))))
    return content


_DISPATCHED_BYTES = 1 + 4 / 128
"""Bytes of a value that DeepEP's low-latency kernels dispatch: 8 bits, and a scale in 32 for every 128; the bandwidths
in their tables are of as many."""
_PROCESSORS = 20
"""Processors that DeepEP's other kernels occupy unless an engine sets it (`Buffer.num_sms`)."""
_GRACE_DEVICES, _NODE_DEVICES = 4, 8
"""Devices of a node of Grace hosts, and of the usual ones: tables count nodes."""


def _deep_ep(columns: Columns) -> FileContent:
    """Read DeepEP's kernels, dispatch and combine in columns of their own, in us.

    Low-latency ones dispatch in 8 bits. The others take about as long for dispatch as for combine: both send 16 bits.
    """
    low_latency = "dispatch_avg_t_us" in columns.names
    node = (
        _GRACE_DEVICES if (columns.device() or "").upper().removeprefix("NVIDIA ").startswith("GB") else _NODE_DEVICES
    )
    common = {
        "tokens": columns.numbers("num_token"),
        "experts_per_token": columns.numbers("num_topk"),
        "experts": columns.numbers("num_experts"),
        "ep": node * columns.numbers("node_num"),
        "nodes": columns.numbers("node_num"),
    }
    content = FileContent()
    for phase, kind in _PHASES.items():
        eight_bits = low_latency and phase == "dispatch"
        width = _DISPATCHED_BYTES if eight_bits else DTYPE_BYTES[_SENT]
        shape = common | {"row_bytes": columns.numbers("hidden_size") * width}
        seconds = columns.numbers(f"{phase}_avg_t_us" if low_latency else f"{phase}_transmit_us") * US
        variant = "low_latency" if low_latency else "high_throughput"
        table = _table(columns, kind, _SENT, shape, seconds, variant)
        elsewhere = (
            {}
            if low_latency
            else {f"on other than {_PROCESSORS} processors": columns.numbers(f"{phase}_sms") != _PROCESSORS}
        )
        content.tables.append(finish(table, elsewhere))
    return content


def _table(
    columns: Columns,
    kind: OperatorKind,
    dtype: Dtype,
    shape: dict[str, Array],
    seconds: Array,
    variant: str | None = None,
) -> Table:
    """Return all rows of a file as if they were of one operator."""
    software = " ".join(x for x in (columns.only("framework"), columns.only("version")) if x)
    return Table(
        kind=kind,
        dtype=dtype,
        variant=variant,
        shape=shape,
        seconds=seconds,
        origin=AICONFIGURATOR,
        files=(columns.file,),
        device=columns.device(),
        software=software or None,
    )


FORMATS: FormatReaders = {("moe_dtype",): _experts, ("comm_backend",): _exchange, ("num_topk", "node_num"): _deep_ep}
