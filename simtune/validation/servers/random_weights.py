"""Random weights for a model spec, in the folder that engines load: config.json and model.safetensors.

Three architectures are written, chosen by what the attention of the spec has: LlamaForCausalLM (no biases, or on all
four projections), Qwen2ForCausalLM (biases of queries, keys and values), Qwen3ForCausalLM (queries and keys normed).

`rigged_pair` writes a target and a draft model whose greedy answers are known: every layer adds nothing to the residual
stream, and the head maps the embedding of a token to the next token of a permutation, one cycle over all. The draft
model's permutation differs for a chosen share of the tokens, so the target rejects that share of its drafts. All matrix
products run at full size. The output does not depend on the KV cache: paging and KV transfer cannot be checked with it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Ints
from simtune.errors import UsageError
from simtune.runs.files import alone, whole
from simtune.specs.model import DenseFeedForward, FullAttention, LayerGroup, Model
from simtune.validation.client.prompts import FIRST_TOKEN

SPREAD = 0.02
"""Standard deviation of the matrices, as in the initial weights of GPT-2 and Llama."""
SMALLEST_RIGGED = 64
"""Hidden size below which the embeddings of different tokens are too similar."""
CONFIG, TRUTH = "config.json", "truth.json"
"""Files by which the folder of a model and that of a rigged pair are recognised."""
_ROWS = 1 << 22
"""Numbers that are drawn at a time."""
_DTYPES = {"fp32": ("F32", 4, "float32"), "bf16": ("BF16", 2, "bfloat16"), "fp16": ("F16", 2, "float16")}


Floats = NDArray[np.float32]


class Tensor(NamedTuple):
    """A tensor of a checkpoint. Its numbers are drawn, or all equal `value`, or rows of `table`."""

    name: str
    shape: tuple[int, ...]
    spread: float = SPREAD
    value: float | None = None
    table: Floats | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Architecture and parts of the checkpoint of a model."""

    model: Model
    architecture: str
    attention: FullAttention
    feed_forward: DenseFeedForward

    @classmethod
    def of(cls, model: Model) -> Checkpoint:
        """Return the checkpoint of a model. Raise UsageError naming every part of the model that cannot be written."""
        first = model.layers[0]
        attention, feed_forward = first.attention, first.feed_forward
        wrong = list(_unwritten(model))
        if type(attention) is not FullAttention or not isinstance(feed_forward, DenseFeedForward) or wrong:
            raise UsageError(
                f"{model.name}: random weights are written for dense models as Llama, Qwen2 and Qwen3 are; "
                f"this one has {', '.join(wrong)}"
            )
        architecture = "LlamaForCausalLM"
        if attention.qk_norm:
            architecture = "Qwen3ForCausalLM"
        elif attention.qkv_bias and not attention.output_bias:
            architecture = "Qwen2ForCausalLM"
        return cls(model, architecture, attention, feed_forward)

    def config(self) -> dict[str, Any]:
        """Return the content of config.json in Hugging Face's format."""
        m, a = self.model, self.attention
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.architecture.removesuffix("ForCausalLM").lower(),
            "hidden_size": m.hidden_size,
            "intermediate_size": self.feed_forward.intermediate_size,
            "num_hidden_layers": m.num_layers,
            "num_attention_heads": a.heads,
            "num_key_value_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "hidden_act": "silu",
            "vocab_size": m.vocab_size,
            "max_position_embeddings": m.max_position,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "tie_word_embeddings": m.tie_embeddings,
            "torch_dtype": _DTYPES[m.dtype][2],
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if self.architecture == "LlamaForCausalLM":
            config |= {"attention_bias": a.output_bias, "mlp_bias": False}
        elif self.architecture == "Qwen3ForCausalLM":
            config["attention_bias"] = False
        return config

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors, in order of the layers."""
        m, a, wide = self.model, self.attention, self.feed_forward.intermediate_size
        hidden = m.hidden_size
        # Smaller for outputs that are added to the residual stream, so that its size stays constant over the layers.
        into = SPREAD / math.sqrt(2 * m.num_layers)
        yield Tensor("model.embed_tokens.weight", (m.vocab_size, hidden))
        widths = {"q": a.heads * a.head_dim, "k": a.kv_heads * a.head_dim, "v": a.kv_heads * a.head_dim}
        for i in range(m.num_layers):
            layer = f"model.layers.{i}"
            yield Tensor(f"{layer}.input_layernorm.weight", (hidden,), value=1.0)
            for name, width in widths.items():
                yield Tensor(f"{layer}.self_attn.{name}_proj.weight", (width, hidden))
                if a.qkv_bias:
                    yield Tensor(f"{layer}.self_attn.{name}_proj.bias", (width,))
            yield Tensor(f"{layer}.self_attn.o_proj.weight", (hidden, widths["q"]), into)
            if a.output_bias:
                yield Tensor(f"{layer}.self_attn.o_proj.bias", (hidden,), into)
            for name in ("q_norm", "k_norm") if a.qk_norm else ():
                yield Tensor(f"{layer}.self_attn.{name}.weight", (a.head_dim,), value=1.0)
            yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,), value=1.0)
            for name in ("gate", "up"):
                yield Tensor(f"{layer}.mlp.{name}_proj.weight", (wide, hidden))
            yield Tensor(f"{layer}.mlp.down_proj.weight", (hidden, wide), into)
        yield Tensor("model.norm.weight", (hidden,), value=1.0)
        if not m.tie_embeddings:
            yield Tensor("lm_head.weight", (m.vocab_size, hidden))


def _unwritten(model: Model) -> Iterator[str]:
    """Yield the parts of a model that cannot be written, in words."""
    for group in model.layers:
        yield from _unwritten_layer(group)
    first = model.layers[0]
    if any((g.attention, g.feed_forward) != (first.attention, first.feed_forward) for g in model.layers):
        yield "layers that differ"
    if model.residual is not None:
        yield f"sublayers joined by {model.residual.kind} residuals"
    if model.learned_positions or model.norm_bias or model.norms_per_sublayer > 1:
        yield "learned positions, layer norms, or norms behind its sublayers"
    attention = {model.of_group(group).dtype_of("attention") for group in model.layers}
    if attention | {model.dtype_of("dense"), model.dtype_of("head")} != {model.dtype}:
        yield f"weights in another format than {model.dtype}"


def _unwritten_layer(group: LayerGroup) -> Iterator[str]:
    attention, feed_forward = group.attention, group.feed_forward
    if attention.kind != "full":
        yield f"{attention.kind} attention"
    elif not attention.like_llama:
        yield "attention with sinks, gates, norms or widths of its own"
    elif (attention.output_bias and not attention.qkv_bias) or (attention.qk_norm and attention.qkv_bias):
        yield "biases as none of the three has"
    if feed_forward.kind != "dense":
        yield f"a {feed_forward.kind} feed-forward block"
    elif not feed_forward.gated or feed_forward.bias:
        yield "a feed-forward block without a gate or with biases"


def write_weights(model: Model, out: Path, *, seed: int = 0, force: bool = False) -> Path:
    """Write random weights for a model; the same bytes for the same seed. Raise UsageError if it cannot."""
    checkpoint = Checkpoint.of(model)
    tensors = list(checkpoint.tensors())
    with _replacing(out, CONFIG, _bytes_of(checkpoint, tensors), force) as folder:
        _write(checkpoint, tensors, folder, seed)
    return out


def rigged_pair(
    target: Model, draft: Model, out: Path, acceptance: float, *, seed: int = 0, force: bool = False
) -> float:
    """Write `out`/target and `out`/draft, and the next token of each token to `out`/truth.json.

    Return the share of the drafts that is accepted: `acceptance`, rounded to a token of the vocabulary. Raise
    UsageError if the two models do not fit together or cannot be rigged.
    """
    if not 0 <= acceptance <= 1:
        raise UsageError(f"an acceptance is a share from 0 to 1, not {acceptance}")
    if target.vocab_size != draft.vocab_size:
        raise UsageError(
            f"{draft.name} has {draft.vocab_size} tokens and {target.name} {target.vocab_size}; they must agree"
        )
    checkpoints = [Checkpoint.of(model) for model in (target, draft)]
    for model in (target, draft):
        if model.tie_embeddings:
            raise UsageError(
                f"{model.name}: ties its embeddings, so its head cannot be rigged; set tie_embeddings=false"
            )
        if model.hidden_size < SMALLEST_RIGGED:
            raise UsageError(f"{model.name}: a hidden size below {SMALLEST_RIGGED} does not tell tokens apart")
    follows, drafted = permutations(target.vocab_size, acceptance, seed)
    share = float((follows == drafted)[FIRST_TOKEN:].mean())
    truth = {"schema": "simtune/rigged@1", "acceptance": share, "next": follows.tolist(), "drafted": drafted.tolist()}
    size = sum(_bytes_of(checkpoint, checkpoint.tensors()) for checkpoint in checkpoints)
    with _replacing(out, TRUTH, size, force) as folder:
        for checkpoint, name, after in zip(checkpoints, ("target", "draft"), (follows, drafted), strict=True):
            (folder / name).mkdir()
            _write(checkpoint, list(_rigged(checkpoint, after, seed)), folder / name, seed)
        (folder / TRUTH).write_text(json.dumps(truth) + "\n", encoding="utf-8")
    return share


def permutations(vocab_size: int, acceptance: float, seed: int) -> tuple[Ints, Ints]:
    """Return (next token of each token, next token by the draft model): cycles over all tokens from FIRST_TOKEN on."""
    body = _generator(seed, 0).permutation(np.arange(FIRST_TOKEN, vocab_size))
    follows = np.arange(vocab_size)
    follows[body] = np.roll(body, -1)
    wrong = np.sort(_generator(seed, 1).permutation(body)[: round((1 - acceptance) * len(body))])
    if len(wrong) == 1:
        # A single token has no other to swap with.
        wrong = wrong[:0]
    drafted = follows.copy()
    drafted[wrong] = follows[np.roll(wrong, -1)]
    return follows, drafted


def _rigged(checkpoint: Checkpoint, follows: Ints, seed: int) -> Iterator[Tensor]:
    m = checkpoint.model
    table = _generator(seed, 2).standard_normal((m.vocab_size, m.hidden_size), dtype=np.float32)
    table = (table / np.linalg.norm(table, axis=1, keepdims=True)).astype(np.float32)
    head = np.zeros_like(table)
    head[follows] = table
    special = {"model.embed_tokens.weight": table, "lm_head.weight": head}
    for tensor in checkpoint.tensors():
        if tensor.name in special:
            yield tensor._replace(table=special[tensor.name])
        elif tensor.name.rpartition(".")[0].endswith(("o_proj", "down_proj")) or tensor.name.endswith("bias"):
            yield tensor._replace(value=0.0)
        else:
            yield tensor


def _generator(seed: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, purpose))))


# --- the files --------------------------------------------------------------------------------------------


@contextmanager
def _replacing(out: Path, known_by: str, size: int, force: bool) -> Iterator[Path]:
    """Yield a folder that replaces `out` once it is complete.

    With `force` earlier weights, which are recognised by one of their files, are replaced too. Raise UsageError.
    """
    alone(out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file; name a folder")
    if out.exists() and any(out.iterdir()) and not (force and (out / known_by).is_file()):
        raise UsageError(f"{out}: is not empty; name another folder" + (", or give --force" if not force else ""))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror}); name a folder you may write to") from None
    if size > (free := shutil.disk_usage(out.parent).free):
        raise UsageError(f"{out}: {size / 1e9:.1f} GB of weights do not fit on {free / 1e9:.1f} GB of free disk")
    with whole(out) as folder:
        yield folder


def _bytes_of(checkpoint: Checkpoint, tensors: Iterable[Tensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors) * _DTYPES[checkpoint.model.dtype][1]


def _write(checkpoint: Checkpoint, tensors: list[Tensor], folder: Path, seed: int) -> None:
    """Write config.json and model.safetensors."""
    code, size, _ = _DTYPES[checkpoint.model.dtype]
    with (folder / "model.safetensors").open("wb") as file:
        _write_safetensors(file, tensors, code, size, seed)
    (folder / CONFIG).write_text(json.dumps(checkpoint.config(), indent=1) + "\n", encoding="utf-8")


def _write_safetensors(file: BinaryIO, tensors: list[Tensor], code: str, size: int, seed: int) -> None:
    """Write the format of Hugging Face's safetensors: eight bytes of header length, the header as JSON padded to eight
    bytes, then the tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + math.prod(tensor.shape) * size
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for number, tensor in enumerate(tensors):
        for block in _numbers(tensor, seed, number):
            file.write(_encoded(block, code))


def _numbers(tensor: Tensor, seed: int, number: int) -> Iterator[Floats]:
    """Yield the tensor's numbers in order, in blocks."""
    if tensor.table is not None:
        yield tensor.table.reshape(-1)
        return
    generator, count = _generator(seed, 16 + number), math.prod(tensor.shape)
    for begin in range(0, count, _ROWS):
        n = min(_ROWS, count - begin)
        if tensor.value is not None:
            yield np.full(n, tensor.value, dtype=np.float32)
        else:
            yield (generator.standard_normal(n, dtype=np.float32) * tensor.spread).astype(np.float32)


def _encoded(values: Floats, code: str) -> bytes:
    """Return little-endian bytes; bfloat16 is the upper half of a float32, rounded to nearest even."""
    if code == "BF16":
        bits: NDArray[np.uint32] = values.astype("<f4").view("<u4")
        return bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes())
    return values.astype("<f4" if code == "F32" else "<f2").tobytes()
