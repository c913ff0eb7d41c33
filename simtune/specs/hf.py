"""A model spec from a Hugging Face config.json, read as it is.

Only architectures listed here are read, because the meaning and the default of a key differ between them.
What would change a layer's cost and is not modelled (sparse attention, state-space layers of other models,
another quantisation than fp8 and 4-bit weights) is an error that names the key, never a silent approximation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from simtune.errors import Problem, SpecError, suggest
from simtune.specs.model import Model
from simtune.specs.yamlfile import Document


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How one architecture reads its config.

    window: what an integer `sliding_window` means without `layer_types`: nothing this architecture knows,
    every layer, the layers from max_window_layers on if use_sliding_window, or only layer_types can tell.
    expert_size: the key of an expert's width; None is a dense model. own_head_dim: head_dim has a default of
    its own, so it must be given. tied: tie_word_embeddings when the key is absent. latent: its attention is MLA.
    hybrid: its layers are gated attention and gated delta nets. knows: keys of `NOT_MODELLED` it gives a meaning.
    """

    window: Literal["unknown", "every", "switched", "listed"]
    expert_size: str | None = None
    own_head_dim: bool = False
    tied: bool = False
    latent: bool = False
    hybrid: bool = False
    knows: tuple[str, ...] = ()


_DEEPSEEK = _Architecture(
    "unknown",
    expert_size="moe_intermediate_size",
    latent=True,
    knows=("kv_lora_rank", "first_k_dense_replace", "n_shared_experts"),
)

ARCHITECTURES: dict[str, _Architecture] = {
    "LlamaForCausalLM": _Architecture("unknown"),
    "MistralForCausalLM": _Architecture("every"),
    "Mistral3ForConditionalGeneration": _Architecture("every"),
    "MixtralForCausalLM": _Architecture("every", expert_size="intermediate_size"),
    "Phi3ForCausalLM": _Architecture("every"),
    "Qwen2ForCausalLM": _Architecture("switched"),
    "Qwen2MoeForCausalLM": _Architecture("switched", expert_size="moe_intermediate_size"),
    "Qwen3ForCausalLM": _Architecture("switched", own_head_dim=True),
    "Qwen3MoeForCausalLM": _Architecture("switched", expert_size="moe_intermediate_size", own_head_dim=True),
    "Qwen3NextForCausalLM": _Architecture(
        "unknown",
        expert_size="moe_intermediate_size",
        own_head_dim=True,
        hybrid=True,
        knows=("linear_num_value_heads", "full_attention_interval"),
    ),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "GemmaForCausalLM": _Architecture("unknown", own_head_dim=True, tied=True),
    "Gemma2ForCausalLM": _Architecture("listed", own_head_dim=True, tied=True),
    "Gemma3ForCausalLM": _Architecture("listed", own_head_dim=True, tied=True),
    "Gemma3ForConditionalGeneration": _Architecture("listed", own_head_dim=True, tied=True),
}

ALIASES = {
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": (
        "num_experts_per_tok",
        "top_k_experts",
        "experts_per_token",
        "num_experts_per_token",
    ),
    "dtype": ("dtype", "torch_dtype"),
    "quantization": ("quantization_config", "compression_config"),
}

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

NOT_MODELLED = {
    "kv_lora_rank": "latent attention (MLA)",
    "index_topk": "sparse attention",
    "first_k_dense_replace": "dense first layers of a mixture of experts",
    "n_shared_experts": "shared experts counted in units",
    "full_attention_interval": "linear attention between full layers",
    "linear_num_value_heads": "linear attention",
    "attention_chunk_size": "chunked attention",
    "hybrid_override_pattern": "layers of mixed kinds",
    "layers_block_type": "layers of mixed kinds",
    "block_configs": "layers of differing shapes",
    "attn_layer_period": "state-space layers",
    "mamba_d_state": "state-space layers",
    "ssm_cfg": "state-space layers",
    "conv_L_cache": "convolution layers",
    "num_kv_shared_layers": "layers that share a KV cache",
}
"""Keys whose presence (not null, 0, false or empty) means a layer kind that costs differently."""


def from_config(document: Document, name: str) -> Model:
    """The Model that a Hugging Face config.json describes. Raises SpecError with every problem found.

    A multimodal config is read for its language part (`text_config`), and `source` says so.
    """
    if not isinstance(document.data, dict):
        message = "a Hugging Face config.json was expected: a JSON object"
        raise SpecError(Problem(document.file, message, "", 1, 1))
    config = _Config(document)
    architecture_name, architecture = config.architecture()
    config.refuse_not_modelled(architecture)
    config.refuse_contradictions()
    num_layers = config.count("num_hidden_layers")
    if architecture.latent:
        attention = [_latent(config)] * num_layers
    elif architecture.hybrid:
        attention = _hybrid(config, num_layers)
    else:
        attention = _softmax(config, architecture, architecture_name, num_layers)
    feed_forward = _feed_forward(config, architecture, num_layers)
    dtype = config.choice("dtype", DTYPES)
    language_part = "" if config.nested is None else ", language part only"
    spec: dict[str, Any] = {
        "schema": Model.schema_id(),
        "name": name,
        "source": f"Hugging Face config.json of a {architecture_name}{language_part}",
        "hidden_size": config.count("hidden_size"),
        "vocab_size": config.count("vocab_size"),
        "max_position": config.count("max_position_embeddings"),
        "tie_embeddings": config.flag("tie_word_embeddings", architecture.tied),
        "dtype": dtype,
        "weight_dtype": _quantised(config) or dtype,
    }
    config.raise_if_any()
    spec["layers"] = [
        {"count": len(list(equal)), "attention": attention_, "feed_forward": feed_forward_}
        for (attention_, feed_forward_), equal in groupby(zip(attention, feed_forward, strict=True))
    ]
    return Model.from_document(Document(document.file, spec, None))


def _softmax(
    config: _Config, architecture: _Architecture, architecture_name: str, num_layers: int
) -> list[dict[str, Any]]:
    """The attention of each layer: full, or over a sliding window."""
    heads = config.count("num_attention_heads")
    # Llama's own default is one KV head per query head; elsewhere the default is some other number.
    default = heads if architecture_name.startswith("Llama") else None
    shape = {"heads": heads, "kv_heads": config.count("num_key_value_heads", default=default)}
    windows = _windows(config, architecture, architecture_name, num_layers)
    shape["head_dim"] = _head_dim(config, architecture, heads)
    return [
        {**({"kind": "full"} if window is None else {"kind": "sliding", "window": window}), **shape}
        for window in windows
    ]


def _head_dim(config: _Config, architecture: _Architecture, heads: int) -> int:
    if architecture.own_head_dim or config.get("head_dim") is not None:
        return config.count("head_dim")
    hidden_size = config.get("hidden_size")
    if type(hidden_size) is int and hidden_size > 0 and hidden_size % heads:
        config.problem("hidden_size", f"{hidden_size} is no multiple of {heads} heads; give head_dim")
    return max(1, hidden_size // heads) if type(hidden_size) is int else 1


def _latent(config: _Config) -> dict[str, Any]:
    """The attention of every layer of a DeepSeek model. A q_lora_rank of null projects queries directly."""
    return {
        "kind": "mla",
        "heads": config.count("num_attention_heads"),
        "q_lora_rank": None if config.get("q_lora_rank") is None else config.count("q_lora_rank"),
        **{key: config.count(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    }


def _hybrid(config: _Config, num_layers: int) -> list[dict[str, Any]]:
    """The attention of each layer of a Qwen3-Next model, by layer_types or every full_attention_interval-th full."""
    full = {
        "kind": "full",
        "heads": config.count("num_attention_heads"),
        "kv_heads": config.count("num_key_value_heads"),
        "head_dim": config.count("head_dim"),
        "output_gate": True,
    }
    linear = {
        "kind": "linear",
        "heads": config.count("linear_num_value_heads"),
        "key_heads": config.count("linear_num_key_heads"),
        "key_dim": config.count("linear_key_head_dim"),
        "value_dim": config.count("linear_value_head_dim"),
        "conv_width": config.count("linear_conv_kernel_dim"),
    }
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.count("full_attention_interval")
        return [full if (i + 1) % interval == 0 else linear for i in range(num_layers)]
    if not config.check_layer_types(kinds, num_layers, ("full_attention", "linear_attention")):
        return [full] * num_layers
    return [linear if kind == "linear_attention" else full for kind in kinds]


def _windows(
    config: _Config, architecture: _Architecture, architecture_name: str, num_layers: int
) -> Sequence[int | None]:
    """The sliding window of each layer in tokens; None is full attention."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return _listed_windows(config, kinds, num_layers)
    full: list[int | None] = [None] * num_layers
    if config.get("sliding_window") is None or not config.flag("use_sliding_window", architecture.window != "switched"):
        return full
    window = config.count("sliding_window")
    if architecture.window == "every":
        return [window] * num_layers
    if architecture.window == "switched":
        first = config.count("max_window_layers", minimum=0)
        return [window if i >= first else None for i in range(num_layers)]
    if architecture.window == "listed":
        config.problem("layer_types", "is missing: which layers use sliding_window? write one kind for each layer")
    else:
        config.problem("sliding_window", f"is not known for a {architecture_name}; set it to null or give layer_types")
    return full


def _listed_windows(config: _Config, kinds: Any, num_layers: int) -> Sequence[int | None]:
    if not config.check_layer_types(kinds, num_layers, ("full_attention", "sliding_attention")):
        return [None] * num_layers
    window = config.count("sliding_window") if "sliding_attention" in kinds else None
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _feed_forward(config: _Config, architecture: _Architecture, num_layers: int) -> list[dict[str, Any]]:
    """The feed-forward block of each layer."""
    if architecture.expert_size is None:
        if config.get(*ALIASES["experts"]):
            config.problem(config.key(*ALIASES["experts"]), "experts are not known for this dense architecture")
        return [{"kind": "dense", "intermediate_size": config.count("intermediate_size")}] * num_layers
    size = config.count(architecture.expert_size)
    if architecture.latent:  # its shared experts are as wide as the others, and counted
        shared = size * config.count("n_shared_experts", default=0, minimum=0)
    else:
        shared = config.count("shared_expert_intermediate_size", default=0, minimum=0)
    moe = {
        "kind": "moe",
        "experts": config.count(*ALIASES["experts"]),
        "experts_per_token": config.count(*ALIASES["experts_per_token"]),
        "intermediate_size": size,
        "shared_intermediate_size": shared,
    }
    if architecture.latent:
        first = config.count("first_k_dense_replace", default=0, minimum=0)
        step = config.count("moe_layer_freq", default=1)
        return _mixed(config, moe, [i < first or i % step != 0 for i in range(num_layers)])
    step = config.count("decoder_sparse_step", default=1)
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        config.problem("mlp_only_layers", f"must be a list of layer numbers, not {dense_layers!r}")
        dense_layers = []
    return _mixed(config, moe, [i in dense_layers or (i + 1) % step != 0 for i in range(num_layers)])


def _mixed(config: _Config, moe: dict[str, Any], is_dense: list[bool]) -> list[dict[str, Any]]:
    dense = {"kind": "dense", "intermediate_size": config.count("intermediate_size")} if any(is_dense) else moe
    return [dense if d else moe for d in is_dense]


def _quantised(config: _Config) -> str | None:
    """The dtype of quantised weights, None when they are not quantised."""
    quantization = config.get(*ALIASES["quantization"])
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method == "fp8":
        return "fp8"
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    if method in ("awq", "gptq") and bits == 4:
        return "int4"
    described = method if bits is None else f"{method} with {bits} bits"
    known = "fp8, awq and gptq with 4 bits"
    config.problem(config.key(*ALIASES["quantization"]), f"the method {described} is not modelled; modelled: {known}")
    return None


class _Config:
    """Reads keys with their aliases, the language part first, and collects what is wrong."""

    def __init__(self, document: Document) -> None:
        self.data: dict[str, Any] = document.data
        nested = self.data.get("text_config")
        self.nested: dict[str, Any] | None = nested if isinstance(nested, dict) else None
        self.document = document
        self.problems: list[Problem] = []

    def key(self, *names: str) -> str:
        """The name that stands in the file, or the first."""
        for part in (self.nested or {}, self.data):
            for name in names:
                if part.get(name) is not None:
                    return name
        return names[0]

    def get(self, *names: str) -> Any:
        """The value under one of these names; null is as good as absent."""
        name = self.key(*names)
        value = (self.nested or {}).get(name)
        return self.data.get(name) if value is None else value

    def problem(self, key: str, message: str) -> None:
        part = [] if self.nested is None or key in self.data else ["text_config"]
        line, column = self.document.position([*part, key])
        self.problems.append(Problem(self.document.file, message, ".".join([*part, key]), line, column))

    def raise_if_any(self) -> None:
        if self.problems:
            raise SpecError(sorted(self.problems, key=lambda p: (p.line or 0, p.column or 0)))

    def count(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number. A wrong or missing one is reported and stands in as the minimum, at least 1."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if type(value) is int and value >= minimum:
            return value
        if value is None:
            aliases = f" (also read: {', '.join(names[1:])})" if len(names) > 1 else ""
            self.problem(names[0], f"is required and missing{aliases}")
        else:
            self.problem(self.key(*names), f"must be a whole number of at least {minimum}, not {value!r}")
        return max(minimum, 1)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.problem(name, f"must be true or false, not {value!r}")
        return default

    def choice(self, what: str, values: dict[str, str]) -> str:
        names = ALIASES[what]
        value = self.get(*names)
        if isinstance(value, str) and value in values:
            return values[value]
        known = ", ".join(values)
        if value is None:
            self.problem(names[0], f"is required and missing (also read: {', '.join(names[1:])}): one of {known}")
        else:
            self.problem(self.key(*names), f"must be one of {known}, not {value!r}")
        return next(iter(values.values()))

    def architecture(self) -> tuple[str, _Architecture]:
        """Raises SpecError at once: without a known architecture no other key has a meaning."""
        listed = self.data.get("architectures")
        if not isinstance(listed, list) or len(listed) != 1:
            self.problem("architectures", f"must be a list with the one architecture of the model, not {listed!r}")
        elif str(listed[0]) not in ARCHITECTURES:
            hint = suggest(str(listed[0]), ARCHITECTURES)
            known = ", ".join(ARCHITECTURES)
            self.problem("architectures", f"{listed[0]} is not modelled{hint}; modelled: {known}")
        self.raise_if_any()
        name = str(self.data["architectures"][0])
        return name, ARCHITECTURES[name]

    def check_layer_types(self, kinds: Any, num_layers: int, known: tuple[str, ...]) -> bool:
        """Whether they are one known kind for each layer; what is wrong with them is reported."""
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            given = f"{len(kinds)} kinds" if isinstance(kinds, list) else repr(kinds)
            self.problem("layer_types", f"must be a list of {num_layers} layer kinds, not {given}")
            return False
        for kind in sorted({str(kind) for kind in kinds if kind not in known}):
            self.problem("layer_types", f"the layer kind {kind} is not modelled; modelled: {', '.join(known)}")
        return True

    def refuse_not_modelled(self, architecture: _Architecture) -> None:
        for key, meaning in NOT_MODELLED.items():
            if self.get(key) and key not in architecture.knows:
                self.problem(key, f"{meaning}: not modelled")

    def refuse_contradictions(self) -> None:
        for names in ALIASES.values():
            given = {name: self.get(name) for name in names if self.get(name) is not None}
            first, *rest = given or ("",)
            for other in rest:
                if given[other] != given[first]:
                    self.problem(other, f"{given[other]!r} contradicts {first}, which is {given[first]!r}")
