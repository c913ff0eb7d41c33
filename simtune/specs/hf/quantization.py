"""Number formats that a checkpoint's quantisation block gives to each module.

A block names a format, or several, each with the modules that are kept in it, and modules that are left in the dtype of
activations: by their name, the beginning or a part of it, a glob or a regular expression. The formats of attention,
dense feed-forward blocks and experts are decided by the names that their layers have in checkpoints. The head is
quantised only if a group names it, embeddings never.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Any, NamedTuple

from simtune.errors import Problem
from simtune.specs.hf.architecture import Layers
from simtune.specs.hf.config_reader import ALIASES, Config

KNOWN = "fp8, fbgemm_fp8, awq and gptq, compressed-tensors, modelopt (FP8, NVFP4), mxfp4, bitsandbytes"

_GATED = ("gate_proj", "up_proj", "down_proj")

_KINDS = {
    "attention": (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj", "self_attn.o_proj"),
        *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"),
        *("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj"),
    ),
    "linear": (
        *("linear_attn.in_proj_qkvz", "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"),
        *("mixer.in_proj", "mixer.out_proj"),
    ),
    "kda": (
        "self_attn.qkv_proj",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.g_proj",
        "self_attn.o_proj",
    ),
    "dense": (
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_up_proj"),
        *("feed_forward.up_proj", "mixer.up_proj", "mixer.down_proj"),
    ),
    "shared": (
        *(f"mlp.{name}.{product}" for name in ("shared_expert", "shared_experts") for product in _GATED),
        *(f"feed_forward.shared_expert.{product}" for product in _GATED),
        *("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
    ),
    "experts": (
        *("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj", "mlp.experts.gate_up_proj"),
        *("block_sparse_moe.experts.0.w1", "feed_forward.experts.gate_up_proj"),
        *("mixer.experts.0.up_proj", "mixer.experts.0.down_proj"),
    ),
}
"""Names that products have inside a layer of a checkpoint. No architecture has all: a layer's products of a kind are
left out if any of the names is.
"""

_NO_PRODUCTS = re.compile(
    r"lm_head|embed|norm|gate|router|conv1d|in_proj_(ba|a|b)$|bias|indexer|weights_proj|kv_b_proj|A_log|dt_bias"
    r"|visual|vision|image|audio|projector|patch_merge|mtp|eh_proj|shared_head|index_[qk]_proj|^head$"
    r"|attn_m[hq]a|hyper_connection|mapping_proj|hc_(attn|ffn)|\.(b|f_a|f_b|g_a|g_b|fused_qkvbfg_a)_proj$|[qkv]_conv1d"
)
"""Other names and patterns that a block may list: small modules, for which no format is given, and other parts of the
model.
"""


_WRAPPER = re.compile(r"(?:model\.)?language_model\.(?:model\.)?")
"""Prefixes that a multimodal wrapper puts before the names of its language part."""


class _Unread(Exception):
    """Why a block cannot be read."""


class _QuantGroup(NamedTuple):
    """Modules that a checkpoint keeps in one format."""

    targets: Sequence[str]
    """Patterns of their names; empty if the group has all products that no other group names."""
    format: str


class _Chosen(NamedTuple):
    """Formats of modules under a quantisation block."""

    left_out: Sequence[str]
    groups: Sequence[_QuantGroup]

    @classmethod
    def of(cls, block: dict[str, Any], format_: str) -> _Chosen:
        """Read the modules of a block; `format_` is that of products without one of their own."""
        keys = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")
        left_out = [pattern for key in keys for pattern in _listed(block, key)]
        return cls(left_out, _groups(block) or [_QuantGroup((), format_)])

    def format_of(self, names: Sequence[str], dtype: str) -> str:
        """Return the format of products with any of these names; `dtype` if they are left out, or in no group.

        A group that names them outranks one of all products, as in compressed-tensors. Raises _Unread if groups of
        different formats name them.
        """
        if _named_in(self.left_out, names):
            return dtype
        formats = {group.format for group in self.groups if _named_in(group.targets, names)}
        formats = formats or {group.format for group in self.groups if not group.targets}
        if len(formats) > 1:
            raise _Unread(f"formats of parts of {names[0]} differ ({', '.join(sorted(formats))}): not modelled")
        return formats.pop() if formats else dtype

    @property
    def patterns(self) -> list[str]:
        """All patterns of names."""
        return [*self.left_out, *(target for group in self.groups for target in group.targets)]


def _named_in(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(any(map(_matcher(pattern), names)) for pattern in patterns)


def _groups(block: dict[str, Any]) -> list[_QuantGroup]:
    """Return the groups that a block states, by pattern (compressed-tensors) or module by module (modelopt)."""
    layers = block.get("quantized_layers")
    if isinstance(layers, dict):
        targets: dict[str, dict[str, None]] = {}
        for name, layer in layers.items():
            if not isinstance(layer, dict):
                raise _Unread(f"quantized_layers: {name} must be a mapping with quant_algo")
            format_ = _modelopt(layer)
            if format_ is not None:
                targets.setdefault(format_, {})[_EXPERT.sub("experts.0", str(name))] = None
        return [_QuantGroup(list(of_format), format_) for format_, of_format in targets.items()]
    groups = block.get("config_groups")
    if not isinstance(groups, dict):
        return []
    if not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise _Unread("compressed-tensors without config_groups")
    by_targets = [(_listed(group, "targets"), _of_group(group)) for group in groups.values()]
    return [_QuantGroup([] if "Linear" in targets else targets, format_) for targets, format_ in by_targets]


_EXPERT = re.compile(r"\bexperts\.\d+")
"""Number of an expert: all experts of a layer are kept alike."""


def _listed(block: dict[str, Any], key: str) -> list[str]:
    names = block.get(key) or []
    if not isinstance(names, list):
        raise _Unread(f"{key} must be a list of module names, not {names!r}")
    return [str(name) for name in names]


class Formats(NamedTuple):
    """Number formats of a checkpoint, as dtype settings of a model spec."""

    of_model: dict[str, str]
    """Formats of all weights, of modules that differ, and of the KV cache if the checkpoint names one."""
    of_attention: Sequence[str | None]
    """Format of each layer's projections if it differs from that of the model, else None."""


def formats(
    config: Config,
    dtype: str,
    attention: Layers,
    feed_forward: Layers,
    modules: Mapping[str, Sequence[str]] | None = None,
) -> Formats:
    """Return the number formats that a checkpoint's quantisation block means; without a block all are `dtype`.

    `modules` are names of products that replace the usual ones of their kind. The block is in config.json, or in the
    hf_quant_config.json beside it, which engines read if config.json has none. A block that cannot be read is noted as
    a problem of `config`.
    """
    plain = Formats({"weight_dtype": dtype}, [None] * len(attention))
    products = _Products(attention, feed_forward, {**_KINDS, **(modules or {})})
    stated = _EXPERT_DTYPES.get(str(config.get("expert_dtype")))
    block = config.get(*ALIASES["quantization"])
    if not block and config.modelopt is not None:
        try:
            return _read(_of_modelopt(config.modelopt.data), dtype, products, stated)
        except _Unread as why:
            config.problems.append(Problem(config.modelopt.file, str(why), "quantization"))
            return plain
    if not block:
        return plain
    if not isinstance(block, dict):
        block = {"quant_method": block}
    try:
        return _read(block, dtype, products, stated)
    except _Unread as why:
        config.problem(config.key(*ALIASES["quantization"]), str(why))
        return plain


_EXPERT_DTYPES = {"fp4": "mxfp4_mxfp8"}
"""Formats by the word that DeepSeek V4 has for its experts: 4 bits in blocks of 32, multiplied with 8-bit inputs."""


class _Products(NamedTuple):
    """Layers of a model, and the names of their products in checkpoints by kind."""

    attention: Layers
    feed_forward: Layers
    kinds: Mapping[str, Sequence[str]]


def _of_modelopt(data: Any) -> dict[str, Any]:
    """The block of an hf_quant_config.json, in the form in which config.json has it."""
    block = data.get("quantization") if isinstance(data, dict) else None
    if not isinstance(block, dict):
        raise _Unread("must be a mapping with quant_algo, as modelopt writes it")
    return {**block, "quant_method": "modelopt"}


def _read(block: dict[str, Any], dtype: str, products: _Products, experts: str | None) -> Formats:
    """Return the formats of a block; `experts` is that of routed experts if the config states it beside the block."""
    method = str(block.get("quant_method") or block.get("quant_algo") or "").lower()
    if method not in _METHODS:
        raise _Unread(f"the method {block.get('quant_method')} is not modelled; modelled: {KNOWN}")
    if method == "fp8" and block.get("moe_quant_algo"):
        # the lists of such a block are about its experts; all else is as in the checkpoint they were made from
        experts = _modelopt({"quant_algo": block["moe_quant_algo"]})
        block = {"weight_block_size": block.get("weight_block_size")}
    format_ = dtype if isinstance(block.get("quantized_layers"), dict) else _METHODS[method](block) or dtype
    # Checkpoints have only experts in mxfp4.
    if method == "mxfp4":
        return Formats({"weight_dtype": dtype, "expert_dtype": format_}, [None] * len(products.attention))
    chosen = _Chosen.of(block, format_)
    by_kind = _by_kind(dtype, chosen, products)
    if experts is not None:
        by_kind.of_model["expert_dtype"] = experts
    head = next((group.format for group in chosen.groups if "lm_head" in group.targets), None)
    if head is not None and not _named_in(chosen.left_out, ["lm_head"]):
        by_kind.of_model["head_dtype"] = head
    if _fp8_cache(block):
        by_kind.of_model["kv_dtype"] = "fp8"
    return by_kind


def _by_kind(dtype: str, chosen: _Chosen, products: _Products) -> Formats:
    """Settings by the formats of modules. Raises _Unread if those of feed-forward blocks of different layers differ, or
    a name is not known."""
    names = _names(products)
    _refuse_unknown(chosen.patterns, names, len(products.attention))
    projections = [chosen.format_of(layer, dtype) if layer else None for layer in names["attention"]]
    of = {
        kind: _format_of_kind(kind, layers, chosen, dtype)
        for kind, layers in names.items()
        if kind != "attention" and any(layers)
    }
    # The model gets the format of most layers; other layers state their own.
    if any(projections):
        of["attention"] = max(filter(None, projections), key=projections.count)
    return Formats(_settings(of), [None if p == of.get("attention") else p for p in projections])


def _settings(of: dict[str, str]) -> dict[str, str]:
    """Return the settings of a model spec by the formats of kinds."""
    weight = of.get("dense") or of.get("shared") or of.get("experts") or of["attention"]
    keys = {"attention_dtype": "attention", "expert_dtype": "experts", "shared_dtype": "shared"}
    differing = {key: of.get(kind, weight) for key, kind in keys.items()}
    return {"weight_dtype": weight, **{key: value for key, value in differing.items() if value != weight}}


def _format_of_kind(kind: str, layers: Sequence[Sequence[str]], chosen: _Chosen, dtype: str) -> str:
    """Return the format of the products of a kind, by the names in each layer. Raises _Unread if layers differ."""
    formats = {chosen.format_of(names, dtype) for names in layers if names}
    if len(formats) == 2 and dtype in formats:
        raise _Unread(f"{kind} is quantised in some layers and not in others: not modelled")
    if len(formats) > 1:
        raise _Unread(f"formats of {kind} differ between layers ({', '.join(sorted(formats))}): not modelled")
    return formats.pop()


def _names(products: _Products) -> dict[str, list[list[str]]]:
    """Names of the products of each kind, layer by layer; empty for a layer that has none of the kind."""
    names: dict[str, list[list[str]]] = {"attention": [], "dense": [], "shared": [], "experts": []}
    for i, (mixing, behind) in enumerate(zip(products.attention, products.feed_forward, strict=True)):
        of = {
            "attention": {"linear": "linear", "kda": "kda", "none": None}.get(mixing["kind"], "attention"),
            "dense": "dense" if behind["kind"] == "dense" else None,
            "shared": "shared" if behind.get("shared_intermediate_size") else None,
            "experts": "experts" if behind["kind"] == "moe" else None,
        }
        for kind, words in of.items():
            inside = () if words is None else products.kinds[words]
            names[kind].append([f"{_root(name)}.layers.{i}.{name}" for name in inside])
    return names


def _root(name: str) -> str:
    return "backbone" if name.startswith("mixer.") else "model"


def _refuse_unknown(patterns: Sequence[str], names: dict[str, list[list[str]]], num_layers: int) -> None:
    """Raise _Unread for a pattern that names no known module: it might be the module that takes the time."""
    module_names = [name for layers in names.values() for layer in layers for name in layer]
    for pattern in patterns:
        layer = re.search(r"layers\.(\d+)", pattern)
        # Layers beyond the last one predict further tokens (MTP).
        further = layer is not None and int(layer[1]) >= num_layers
        if not (further or _NO_PRODUCTS.search(pattern) or any(map(_matcher(pattern), module_names))):
            raise _Unread(f"it names {pattern}, which is no module that is known here")


@lru_cache(maxsize=4096)
def _matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that is true of the modules that a pattern covers: by regular expression, glob, its name, or
    the name of what it is part of."""
    if pattern.startswith("re:"):
        return lambda name: _matches_expression(pattern[3:], name)
    pattern = _WRAPPER.sub("model.", pattern)
    if "*" in pattern:
        # One expression for each pattern: published checkpoints list hundreds of modules, each held against all names.
        return re.compile("|".join(map(translate, (pattern, pattern + ".*", "*" + pattern)))).match
    return lambda name: f".{pattern}." in f".{name}."


def _matches_expression(expression: str, name: str) -> bool:
    inner = name.removeprefix("model.")
    wrapped = (name, f"language_model.{name}", f"model.language_model.{inner}", f"language_model.{inner}")
    return any(re.match(expression, wrapped_name) for wrapped_name in wrapped)


def _fp8_cache(block: dict[str, Any]) -> bool:
    scheme = block.get("kv_cache_scheme")
    is_fp8 = isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    algorithm = block.get("kv_cache_quant_algo")
    if algorithm not in (None, "FP8"):
        raise _Unread(f"kv_cache_quant_algo {algorithm} is not modelled; modelled: FP8")
    return is_fp8 or algorithm == "FP8"


# --- formats ----------------------------------------------------------------------------------------------


def _fp8(block: dict[str, Any]) -> str:
    size = block.get("weight_block_size")
    if size is None:
        return "fp8"
    if size != [128, 128]:
        raise _Unread(f"fp8 with a scale for each block of {size} weights is not modelled, only [128, 128]")
    return "fp8_block"


def _of_bits(method: str, formats: dict[int, str]) -> Callable[[dict[str, Any]], str]:
    def read(block: dict[str, Any]) -> str:
        bits = block.get("bits", block.get("w_bit"))
        by_module = next((key for key in ("dynamic", "modules_in_block_to_quantize") if block.get(key)), None)
        if by_module is not None:
            raise _Unread(f"{method} with rules by module ({by_module}) is not modelled")
        if not isinstance(bits, int) or bits not in formats:
            described = method if bits is None else f"{method} with {bits} bits"
            raise _Unread(f"the method {described} is not modelled; modelled: {KNOWN}")
        return formats[bits]

    return read


_MODELOPT = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8_block",
    "FP8_BLOCK_SCALES": "fp8_block",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4_wo",
    "MXFP8": "mxfp8",
    "W4A16_AWQ": "int4",
    "W4A16_GPTQ": "int4",
    "W8A16": "int8_wo",
}
"""Formats by the algorithms of modelopt and TensorRT-LLM (QuantAlgo)."""


def _modelopt(block: dict[str, Any]) -> str | None:
    algorithm = block.get("quant_algo")
    if algorithm is None and "config_groups" in block:
        return _compressed(block)
    # Weights are unquantised; the KV cache may be quantised nevertheless.
    if algorithm is None and "quant_algo" in block:
        return None
    if algorithm not in _MODELOPT:
        raise _Unread(f"modelopt with quant_algo {algorithm} is not modelled; modelled: {', '.join(_MODELOPT)}")
    return _MODELOPT[algorithm]


def _bitsandbytes(block: dict[str, Any]) -> str:
    """Return the format of bitsandbytes weights. Its 4 bits come in groups of 64; kernels and bytes are taken for those
    of other 4-bit weights.
    """
    if block.get("load_in_4bit") or block.get("_load_in_4bit"):
        return "int4"
    if block.get("load_in_8bit") or block.get("_load_in_8bit"):
        return "int8"
    raise _Unread("bitsandbytes with neither load_in_4bit nor load_in_8bit")


def _compressed(block: dict[str, Any]) -> str:
    groups = _groups(block)
    if not groups:
        raise _Unread("compressed-tensors without config_groups")
    return groups[0].format


def _of_group(group: dict[str, Any]) -> str:
    weights, activations = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict):
        raise _Unread(f"a group without weights: {group!r}")
    bits, type_, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if (bits, type_) == (8, "float") and activations:
        return (
            _fp8({"weight_block_size": weights.get("block_structure") or [128, 128]}) if strategy == "block" else "fp8"
        )
    if (bits, type_) == (4, "float"):
        return {16: "nvfp4", 32: "mxfp4"}.get(weights.get("group_size") or 0) or _no(weights, activations)
    if (bits, type_) == (8, "int"):
        return "int8" if activations else "int8_wo"
    if (bits, type_) == (4, "int") and not activations:
        return "int4"
    return _no(weights, activations)


def _no(weights: dict[str, Any], activations: Any) -> str:
    bits = f"weights of {weights.get('num_bits')} bits ({weights.get('type')})"
    beside = f"activations of {activations.get('num_bits')} bits" if isinstance(activations, dict) else "no activations"
    raise _Unread(f"{bits} and {beside} quantised: not modelled; modelled: {KNOWN}")


_METHODS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda block: "fp8",
    "awq": _of_bits("awq", {4: "int4"}),
    "gptq": _of_bits("gptq", {4: "int4", 8: "int8_wo"}),
    "mxfp4": lambda block: "mxfp4",
    "compressed-tensors": _compressed,
    "compressed_tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "bitsandbytes": _bitsandbytes,
}
