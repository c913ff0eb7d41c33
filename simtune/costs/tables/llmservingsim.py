"""Tables of LLMServingSim: layers.csv of its first layout (ns), and dense.csv, per_sequence.csv, attention.csv, moe.csv
and skew.csv of its present layout (us), one folder for each tensor parallelism.

They time the layers of one model, and do not contain its sizes: the model is found by its name in a meta.yaml beside
the table or in the path, among the models simtune knows, and the tensor parallelism in a column or as tpN in the path.
moe.csv times the whole block of experts with its router; its number of visited experts is that of tokens dealt out to
all, or that of chance, or neither, which no model here describes. If it was measured for expert parallelism, the
experts and the visits of a token are those of one rank.

Layers of the first layout are torch modules launched eagerly, so small ones take longer than an engine's kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simtune.arrays import Array, Mask
from simtune.costs.operators.moe import DEALT, active_experts
from simtune.costs.tables.common import (
    LLMSERVINGSIM,
    NS,
    US,
    Columns,
    FileContent,
    FormatReaders,
    ImbalanceTable,
    Table,
    finish,
    take,
)
from simtune.errors import Problem, SpecError
from simtune.specs import catalog, yamlfile
from simtune.specs.hardware import OperatorKind
from simtune.specs.input_files import read_text
from simtune.specs.model import DenseFeedForward, FullAttention, Model, MoeFeedForward

_PARENTS = 4  # model/dtype/tp1/dense.csv
# relative difference to the experts that chance activates
_AS_CHANCE = 0.1
# A difference of two times that is smaller is mostly their noise.
_LEAST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class _Source:
    """Facts about a table from its path and its meta.yaml."""

    model: Model
    path: Path
    device: str | None
    software: str | None
    iterations: int | None

    def layer(self, name: str, tp: float, fused: bool) -> tuple[OperatorKind, str | None, float, float] | None:
        """Return a layer's operator: kind, variant, and n and k of a product or width and 0; None if there is none.

        `fused` are the kernels of an engine, not separate torch modules.
        """
        group = self.model.layers[0]
        attention, feed_forward = group.attention, group.feed_forward
        assert isinstance(attention, FullAttention)
        assert isinstance(feed_forward, DenseFeedForward | MoeFeedForward)
        dense = isinstance(feed_forward, DenseFeedForward)
        hidden, inter, d = self.model.hidden_size, feed_forward.intermediate_size / tp, attention.head_dim
        q, kv = attention.heads / tp * d, max(1, attention.kv_heads / tp) * d
        products = {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "qkv_proj": (q + 2 * kv, hidden),
            "o_proj": (hidden, q),
            "lm_head": (self.model.vocab_size / tp, hidden),
        }
        if dense:
            products |= dict.fromkeys(("gate_proj", "up_proj"), (inter, hidden))
            products |= {"gate_up_proj": (2 * inter, hidden), "down_proj": (hidden, inter)}
        if name in products:
            return "gemm", None, *products[name]
        widths = {
            **({"act_fn": ("activation", (3 if fused else 2) * inter)} if dense else {}),
            **dict.fromkeys(("rope", "rotary_emb"), ("rope", 2 * (q + kv))),
            **dict.fromkeys(("input_layernorm", "post_layernorm"), ("norm", 2 * hidden)),
            # The engine's own norms add the residual first; `layernorm` is the mean of the two of a model's only layer,
            # the first of which has no residual to add.
            "layernorm": ("norm", 3 * hidden),
            "final_layernorm": ("norm", (4 if fused else 2) * hidden),
        }
        return ("elementwise", *widths[name], 0.0) if name in widths else None


def _layers(columns: Columns) -> FileContent:
    """Read the first layout: every layer by tokens; `attn` is the attention of one whole prompt."""
    source, tp = _source(columns), columns.numbers("tp_size")
    tokens, past = columns.numbers("input"), columns.numbers("kv_cache")
    seconds = columns.numbers("latency(ns)") * NS
    content = FileContent()
    for name, rows in _groups(columns, "layer_name"):
        if name == "attn":
            content.tables += [
                _attention_rows(source, rows & (tp == t), t, np.ones(len(columns)), tokens, past, seconds)
                for t in np.unique(tp[rows])
            ]
        else:
            _add(content, source, name, rows, tp, tokens, seconds, False)
    return content


def _dense(columns: Columns) -> FileContent:
    source = _source(columns)
    tp = np.full(len(columns), _tensor_parallel(columns.path))
    content = FileContent()
    for name, rows in _groups(columns, "layer"):
        _add(content, source, name, rows, tp, columns.numbers("tokens"), columns.numbers("time_us") * US, True)
    return content


def _per_sequence(columns: Columns) -> FileContent:
    source = _source(columns)
    if columns.file.startswith("mtp"):
        content = FileContent()
        content.skip(len(columns), "a drafter's layers, whose sizes the model does not determine")
        return content
    tp = np.full(len(columns), _tensor_parallel(columns.path))
    sequences, seconds = columns.numbers("sequences"), columns.numbers("time_us") * US
    content = FileContent()
    for name, rows in _groups(columns, "layer"):
        if name == "sampler":
            content.skip(int(rows.sum()), "greedy sampling, which says nothing of sampling with a temperature")
        else:
            _add(content, source, name, rows, tp, sequences, seconds, True)
    return content


def _attention(columns: Columns) -> FileContent:
    """Read the present layout: one kernel over at most one prefill chunk and some decodes; kv_decode excludes the new
    token.

    Later tables also contain sparse attention's indexer and verification, and instead of the past of a chunk the
    average distance that its queries look back, half the chunk included.
    """
    source, tp = _source(columns), _tensor_parallel(columns.path)
    chunk, decodes = columns.numbers("prefill_chunk"), columns.numbers("n_decode")
    seconds, ones = columns.numbers("time_us") * US, np.ones(len(columns))
    has_past = "kv_prefill" in columns.names
    past = columns.numbers("kv_prefill") if has_past else columns.numbers("prefill_key") - chunk / 2
    context, plain = columns.numbers("kv_decode"), np.ones(len(columns), dtype=np.bool_)
    if "layer" in columns.names:
        plain &= columns.equal("layer", "attention")
    if "decode_q_len" in columns.names:
        plain &= columns.numbers("decode_q_len") == 1
    content = FileContent()
    content.skip(int((~plain).sum()), "an indexer, or several query tokens a sequence")
    content.skip(int((plain & (chunk == 0) & (decodes == 0)).sum()), "an empty batch")
    alone, mixed = plain & (chunk > 0) & (decodes == 0), plain & (chunk > 0) & (decodes > 0)
    content.tables += [
        _attention_rows(source, alone, tp, ones, chunk, past, seconds),
        _attention_rows(source, plain & (chunk == 0) & (decodes > 0), tp, decodes, None, context, seconds),
    ]
    if mixed.any():
        prefills = {(c, p): s for c, p, s in zip(*(x[alone].tolist() for x in (chunk, past, seconds)), strict=True)}
        prefill = np.array([prefills.get(c, np.nan) for c in zip(chunk.tolist(), past.tolist(), strict=True)])
        content.tables.append(_mixed_rows(source, mixed, tp, decodes, chunk, context, seconds, prefill))
    return content


def _moe(columns: Columns) -> FileContent:
    """Read the block of experts of one rank, by tokens and by the number of experts that some token visits."""
    source, tp = _source(columns), _tensor_parallel(columns.path)
    feed_forward = source.model.layers[0].feed_forward
    content = FileContent()
    if not isinstance(feed_forward, MoeFeedForward):
        content.skip(len(columns), f"model {source.model.name} has no experts")
        return content
    tokens, active = columns.numbers("tokens"), columns.numbers("activated_experts")
    ranks = columns.numbers("ep") if "ep" in columns.names else np.ones(len(columns))
    experts = feed_forward.experts / ranks
    visits = np.maximum(1, np.floor(feed_forward.experts_per_token / ranks))
    dealt = active == np.minimum(tokens * visits, experts)
    by_chance = np.abs(active / active_experts(tokens, experts, visits, np.zeros(len(columns))) - 1) < _AS_CHANCE
    shape = {
        "tokens": tokens,
        "hidden": np.full(len(columns), float(source.model.hidden_size)),
        "intermediate": np.full(len(columns), feed_forward.intermediate_size / tp),
        "experts_per_token": visits,
        "experts": experts,
        "ep": np.ones(len(columns)),
        "skew": np.where(dealt, DEALT, 0.0),
    }
    everything = np.ones(len(columns), dtype=np.bool_)
    excluded = {"as many experts as neither dealing out nor chance wakes": ~(dealt | by_chance)}
    seconds = columns.numbers("time_us") * US
    content.tables.append(_finish(source, "moe", None, shape, seconds, everything, excluded))
    return content


def _skew(columns: Columns) -> FileContent:
    """Read batches with some sequences longer than the others. The times are sums over the iterations of the
    measurement: on two devices they are 3.00 times those of the attention table at the same lengths, and meta.yaml
    states 3.
    """
    source, tp, content = _source(columns), _tensor_parallel(columns.path), FileContent()
    if source.iterations is None:
        content.skip(len(columns), "no measurement_iterations in a meta.yaml beside it, over which its times are sums")
        return content
    n, mean, longest = (columns.numbers(name) for name in ("n", "kv_mean", "kv_big"))
    even, skewed = (columns.numbers(name) * US / source.iterations for name in ("t_mean_us", "t_skew_us"))
    attention = source.model.layers[0].attention
    assert isinstance(attention, FullAttention)
    good = (even > 0) & (skewed > 0) & (longest > mean) & (n > 0)
    content.skip(int((~good).sum()), "no positive time or no sequence longer than the mean")
    content.imbalance.append(
        ImbalanceTable(
            columns.equal("regime", "mixed")[good],
            n[good] * max(1, attention.kv_heads / tp),
            (longest - mean)[good],
            even[good],
            skewed[good],
            LLMSERVINGSIM,
            (columns.file,),
            source.device,
        )
    )
    return content


def _attention_rows(
    source: _Source, rows: Mask, tp: float, batch: Array, tokens: Array | None, past: Array, seconds: Array
) -> Table:
    attention = source.model.layers[0].attention
    assert isinstance(attention, FullAttention)
    context = past + (1 if tokens is None else tokens)
    shape = {
        "batch": batch,
        **({} if tokens is None else {"tokens": tokens}),
        "context": context,
        "heads": np.full(len(rows), attention.heads / tp),
        "kv_heads": np.full(len(rows), max(1, attention.kv_heads / tp)),
        "head_dim": np.full(len(rows), float(attention.head_dim)),
        "window": context,
    }
    kind: OperatorKind = "decode_attention" if tokens is None else "prefill_attention"
    return _finish(source, kind, None, shape, seconds, rows)


def _mixed_rows(
    source: _Source, rows: Mask, tp: float, batch: Array, chunk: Array, past: Array, seconds: Array, prefill: Array
) -> Table:
    """Return the time that decodes add to the kernel of a chunk: its time less that of the chunk alone, unless
    noise."""
    attention = source.model.layers[0].attention
    assert isinstance(attention, FullAttention)
    shape = {
        "batch": batch,
        "tokens": chunk,
        "context": past + 1,
        "heads": np.full(len(rows), attention.heads / tp),
        "kv_heads": np.full(len(rows), max(1, attention.kv_heads / tp)),
        "head_dim": np.full(len(rows), float(attention.head_dim)),
        "window": past + 1,
    }
    excluded = {
        "no row of the same chunk alone": rows & np.isnan(prefill),
        f"less than {_LEAST_SHARE:.0%} of the time of the chunk they share a kernel with": rows
        & (seconds < (1 + _LEAST_SHARE) * prefill),
    }
    return _finish(source, "mixed_attention", None, shape, seconds - prefill, rows, excluded)


def _add(
    content: FileContent, source: _Source, name: str, rows: Mask, tp: Array, tokens: Array, seconds: Array, fused: bool
) -> None:
    for t in np.unique(tp[rows]):
        operator, of_tp = source.layer(name, float(t), fused), rows & (tp == t)
        if operator is None:
            content.skip(int(of_tp.sum()), f"no operator for the layer {name}")
            continue
        kind, variant, wide, deep = operator
        if kind == "gemm":
            shape = {"m": tokens, "n": np.full(len(rows), wide), "k": np.full(len(rows), deep)}
        else:
            shape = {"rows": tokens, "width": np.full(len(rows), wide)}
        content.tables.append(_finish(source, kind, variant, shape, seconds, of_tp))


def _finish(
    source: _Source,
    kind: OperatorKind,
    variant: str | None,
    shape: dict[str, Array],
    seconds: Array,
    rows: Mask,
    excluded: Mapping[str, Mask] | None = None,
) -> Table:
    table = Table(
        kind,
        "bf16",
        shape,
        seconds,
        LLMSERVINGSIM,
        (source.path.name,),
        kv_dtype="bf16" if kind.endswith("attention") else None,
        variant=variant,
        device=source.device,
        software=source.software,
    )
    return finish(take(table, np.flatnonzero(rows)), {why: hit[rows] for why, hit in (excluded or {}).items()})


def _groups(columns: Columns, name: str) -> Iterable[tuple[str, Mask]]:
    return ((value, columns.equal(name, value)) for value in dict.fromkeys(columns.text(name)))


def _source(columns: Columns) -> _Source:
    """Return the surroundings of a table. Raises SpecError if no known model is named there, or one of another kind."""
    path = columns.path
    meta = next((p for p in (path.with_name("meta.yaml"), path.parent.parent / "meta.yaml") if p.is_file()), None)
    facts = yamlfile.parse(read_text(meta), str(meta)).data if meta else {}
    facts = facts if isinstance(facts, dict) else {}
    dtype = facts.get("variant", "bf16")
    if dtype not in ("bf16", "fp16"):
        raise SpecError(Problem(str(meta), f"only bf16 and fp16 tables can be read, not {dtype}", "variant"))
    model = _model(path, str(facts.get("model", "")))
    engine, iterations = facts.get("vllm_version"), facts.get("measurement_iterations")
    return _Source(
        model,
        path,
        facts.get("gpu"),
        f"vLLM {engine}, eager" if engine else None,
        iterations if isinstance(iterations, int) and iterations > 0 else None,
    )


def _model(path: Path, reference: str) -> Model:
    models = sorted(catalog.names("model"), key=len, reverse=True)
    words = [reference.rsplit("/", 1)[-1], *(part for part in path.parts[: -_PARENTS - 2 : -1])]
    for word in words:
        for name in models:
            if word.lower() == name or re.match(re.escape(name) + r"[-_.]", word.lower()):
                model = catalog.load_model(name)
                layers = model.layers
                if len(layers) > 1 or type(layers[0].attention) is not FullAttention:
                    message = f"model {name}: only models with one kind of layer, of full attention, can be read so"
                    raise SpecError(Problem(str(path), message))
                return model
    message = (
        "whose layers are these? Name the model in the file name (Llama-3.1-8B_tp1_...), a folder, or `model:` of a "
        f"meta.yaml beside it; known: {', '.join(sorted(models))}"
    )
    raise SpecError(Problem(str(path), message))


def _tensor_parallel(path: Path) -> float:
    for word in path.parts[: -_PARENTS - 2 : -1]:
        match = re.search(r"(?:^|_)tp(\d+)(?:_|\.|$)", word)
        if match:
            return float(match[1])
    raise SpecError(Problem(str(path), "on how many ranks? Name the file or its folder tp1, tp2, ..."))


FORMATS: FormatReaders = {
    ("latency(ns)",): _layers,
    ("layer", "tokens", "time_us"): _dense,
    ("layer", "sequences", "time_us"): _per_sequence,
    ("prefill_chunk", "n_decode", "time_us"): _attention,
    ("tokens", "activated_experts", "time_us"): _moe,
    ("t_skew_us",): _skew,
}
