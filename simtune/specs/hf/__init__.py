"""A model spec from a Hugging Face config.json, read as it is published.

Only architectures listed here are read, because the meaning and the default of a key differ between them. What would
change a layer's cost and is not modelled (layers of kinds that no spec has, formats that no kernel table has) is an
error that names the key, never a silent approximation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from simtune.errors import Problem, SpecError
from simtune.specs.base import override
from simtune.specs.hf import quantization
from simtune.specs.hf.architecture import Architecture
from simtune.specs.hf.architectures import (
    ARCHITECTURES,
    FLAT_WRAPPERS,
    LANGUAGE_MODELS,
    NOT_MODELLED,
    REFUSED,
    WRAPPERS,
)
from simtune.specs.hf.audio_parts import audio_of
from simtune.specs.hf.config_reader import ALIASES, LANGUAGE_PARTS, Config, language_parts
from simtune.specs.hf.vision_parts import vision_of
from simtune.specs.model import Model
from simtune.specs.yamlfile import Document

MODELOPT = "hf_quant_config.json"
"""File in which modelopt writes number formats, beside a config.json that may name none."""


REMEDY = (
    "write a model spec (`simtune schema model` lists its keys), or if its layers are those of one that is, "
    "name it on your own word (--as LlamaForCausalLM)"
)
"""Remedies for an architecture that is not modelled."""


def from_config(
    document: Document,
    name: str,
    settings: Sequence[str] = (),
    *,
    modelopt: Document | None = None,
    notes: Sequence[str] = (),
    architecture: str | None = None,
) -> Model:
    """Return the Model that a Hugging Face config.json describes. Raises SpecError with every problem found.

    A multimodal config is read for its language part (`text_config`), and `source` says so. `settings` are `key=value`:
    of the config if it has the key or its architecture reads the key, else of the model spec that was read; any other
    key is a problem. `modelopt` is the hf_quant_config.json beside the config: number formats are read from it if the
    config names none. `notes` are kept in the model before those on what is assumed here. `architecture` is read in
    place of the one that the config states, on the word of the caller: a note says so.
    """
    if not isinstance(document.data, dict):
        message = "a Hugging Face config.json was expected: a JSON object"
        raise SpecError(Problem(document.file, message, "", 1, 1))
    document = _thinking(document)
    if architecture is not None:
        document, note = _on_word(document, architecture)
        notes = [note, *notes]
    standing = {key for part in (document.data, Config(document).nested or {}) for key in part}
    config_keys = standing | _read(Config(_overridden(document, settings), modelopt), name)[1]
    ours: list[str] = []
    theirs: list[str] = []
    for setting in settings:
        (theirs if _head(setting) in config_keys else ours).append(setting)
    spec, _ = _read(Config(_overridden(document, theirs), modelopt), name, raising=True)
    all_notes = [*notes, *spec.pop("notes")]
    if all_notes:
        spec["notes"] = all_notes
    return Model.from_document(override(Document(document.file, spec, None), ours))


def _thinking(document: Document) -> Document:
    """Return the config of the part that reads and answers, if it is one of several that a config contains."""
    thinker = document.data.get("thinker_config")
    if not isinstance(thinker, dict):
        return document
    shared = {key: value for key, value in document.data.items() if not isinstance(value, dict) or key in _OF_ALL}
    return replace(document, data={**shared, **{key: value for key, value in thinker.items() if key not in shared}})


_OF_ALL = ("quantization_config", "compression_config")
"""Blocks of a config that hold for all of its parts."""


def _on_word(document: Document, architecture: str) -> tuple[Document, str]:
    """Return the config as one of another architecture, and the note that says so."""
    if architecture not in ARCHITECTURES:
        modelled = ", ".join(ARCHITECTURES)
        raise SpecError(Problem("--as", f"{architecture} is not modelled; modelled: {modelled}", "architectures"))
    listed = document.data.get("architectures")
    stated = ", ".join(map(str, listed)) if isinstance(listed, list) and listed else "none"
    parts = {
        key: {k: v for k, v in part.items() if k != "architectures"}
        for key, part in document.data.items()
        if isinstance(part, dict) and key in LANGUAGE_PARTS
    }
    note = (
        f"read as {architecture} on the user's word (--as): config.json states {stated}, whose own keys are ignored; "
        "sizes, memory and times hold only if its layers are the same"
    )
    return replace(document, data={**document.data, **parts, "architectures": [architecture]}), note


def _head(setting: str) -> str:
    return setting.partition("=")[0].split(".")[0]


def _overridden(document: Document, settings: Sequence[str]) -> Document:
    """Return the config with settings in place of its own values: in its language part if the key is there, under the
    name that it has there.
    """
    part = Config(document).part
    nested = document.data.get(part, {}) if part else {}
    placed = []
    for setting in settings:
        head, standing = _head(setting), {**document.data, **nested}
        names = next((names for names in ALIASES.values() if head in names), (head,))
        name = next((name for name in names if name in standing), head)
        placed.append(f"{part}." * (name in nested) + name + setting[len(head) :])
    return override(document, placed)


def _read(config: Config, name: str, raising: bool = False) -> tuple[dict[str, Any], set[str]]:
    """Return the spec as plain data, and the keys of the config that were read.

    Raises SpecError if the architecture is not known, and where anything is wrong if `raising`.
    """
    architecture_name, architecture = _architecture(config)
    config.of_architecture(architecture.names, architecture.defaults)
    _refuse_not_modelled(config, architecture)
    config.refuse_contradictions()
    attention = architecture.attention(config, architecture)
    feed_forward = architecture.feed_forward(config, architecture)
    dtype, positions = config.dtype(), config.count("max_position_embeddings")
    formats = quantization.formats(config, dtype, attention, feed_forward, architecture.modules)
    encoders = _encoders(config)
    spec: dict[str, Any] = {
        "schema": Model.schema_id(),
        "name": name,
        "source": f"Hugging Face config.json of a {architecture_name}{_parts(config, [*encoders])}",
        "hidden_size": config.count("hidden_size"),
        "vocab_size": config.count("vocab_size"),
        "max_position": positions,
        "tie_embeddings": config.flag("tie_word_embeddings"),
        "learned_positions": 0 if architecture.positions is None else positions + architecture.positions,
        "norms_per_sublayer": architecture.norms_per_sublayer,
        "norm_bias": architecture.norm_bias,
        "mtp_layers": config.count(architecture.mtp, default=0, minimum=0),
        "residual": architecture.residual(config),
        "dtype": dtype,
        "notes": list(config.notes),
        **formats.of_model,
    }
    if architecture.kv_dtype is not None:
        spec["kv_dtype"] = architecture.kv_dtype
    spec |= encoders
    # Raised after every key was asked for, so that the user sees at once all that is wrong in the file.
    if raising:
        config.raise_if_any()
    # Equal neighbours only: the order of layers decides what a pipeline stage holds.
    layers = [
        layer
        for layer in zip(attention, feed_forward, formats.of_attention, strict=True)
        if not layer[0]["kind"] == layer[1]["kind"] == "none"
    ]
    spec["layers"] = [
        {"count": len(list(equal)), "attention": mixing, "feed_forward": behind}
        | ({} if projections is None else {"attention_dtype": projections})
        for (mixing, behind, projections), equal in groupby(layers)
    ]
    return spec, config.asked


def _encoders(config: Config) -> dict[str, Any]:
    """Return the encoders of media of a config as plain data, by the key of the spec."""
    blocks = {"vision": vision_of(config), "audio": audio_of(config)}
    return {key: block for key, block in blocks.items() if block is not None}


def _parts(config: Config, encoders: Sequence[str]) -> str:
    """Return the parts of a multimodal config that are read, and the file of its number formats, in words."""
    parts = "" if config.nested is None else ", language part only"
    if parts and encoders:
        parts = f", {', '.join(['language', *encoders][:-1])} and {encoders[-1]} parts"
    if config.modelopt is not None and not config.get(*ALIASES["quantization"]):
        parts += f", number formats from the {MODELOPT} beside it"
    return parts


def _architecture(config: Config) -> tuple[str, Architecture]:
    """Raise SpecError at once: without a known architecture no other key has a meaning."""
    listed: Any = config.data.get("architectures")
    if listed is None and config.data.get("model_type") in LANGUAGE_MODELS:
        listed = [LANGUAGE_MODELS[config.data["model_type"]]]
    if not isinstance(listed, list) or len(listed) != 1:
        config.problem("architectures", f"must be a list with the one architecture of the model, not {listed!r}")
        config.raise_if_any()
    name = str(listed[0])
    if name in WRAPPERS:
        name = _wrapped(config, name)
    if name not in ARCHITECTURES:
        # No other name is suggested: what is spelt alike may be another architecture altogether.
        why = f": {REFUSED[name]}" if name in REFUSED else ""
        config.problem("architectures", f"{name} is not modelled{why}; {REMEDY}; modelled: {', '.join(ARCHITECTURES)}")
    config.raise_if_any()
    return name, ARCHITECTURES[name]


def _wrapped(config: Config, name: str) -> str:
    """The architecture of a multimodal model's language part."""
    if config.nested is None and name in FLAT_WRAPPERS:
        return FLAT_WRAPPERS[name]
    part = config.nested or {}
    listed, model_type = part.get("architectures"), part.get("model_type")
    inner = str(listed[0]) if isinstance(listed, list) and listed else LANGUAGE_MODELS.get(str(model_type))
    if inner is None:
        elsewhere = config.data.get("text_model_id")
        why = f"of model_type {model_type}, is not modelled"
        if isinstance(elsewhere, str) and not part:
            why = f"{elsewhere}, is not in this file; add its config.json as text_config"
        config.problem("architectures", f"the language part of this {name}, {why}")
        config.raise_if_any()
    return str(inner)


def _refuse_not_modelled(config: Config, architecture: Architecture) -> None:
    for key, meaning in NOT_MODELLED.items():
        if config.get(key) and key not in architecture.knows:
            config.problem(key, f"{meaning}: not modelled")
    config.asked.difference_update(NOT_MODELLED)
    for key in ("indexer_types", "index_topk_pattern"):
        if (
            key not in architecture.knows
            and config.get(key)
            and "shared" in str(config.get(key)).replace("S", "shared")
        ):
            config.problem(key, "indexers shared between layers: not modelled")
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        config.problem("word_embed_proj_dim", "embeddings narrower than the hidden size: not modelled")


__all__ = ["ALIASES", "ARCHITECTURES", "MODELOPT", "NOT_MODELLED", "Architecture", "from_config", "language_parts"]
