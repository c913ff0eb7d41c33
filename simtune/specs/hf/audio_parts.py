"""Audio encoders of multimodal configs: `audio_config`, family by family.

Defaults are those of the configuration classes of `transformers`; what feature extractors do, which is stated in
preprocessor_config.json, is what is published with the first checkpoint of a family: 100 frames of sound a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from simtune.specs.audio import Audio
from simtune.specs.hf.config_reader import Config
from simtune.specs.hf.vision_parts import Block, sizes_in, value_in


def audio_of(config: Config) -> Block | None:
    """Return the audio encoder of a config as plain data of `simtune.specs.audio.Audio`; None if there is none, if its
    family is not modelled, or if sizes are impossible: the language part is read all the same."""
    block, listed = config.data.get("audio_config"), config.data.get("architectures")
    block = _WHISPER.get(str(config.data.get("audio_model_id"))) if block is None else block
    if not isinstance(block, dict) or not isinstance(listed, list) or not listed:
        return None
    read = _FAMILIES.get(str(listed[0]))
    audio = None if read is None else read(sizes_in(block), config.data, config.count("hidden_size"))
    if audio is None:
        return None
    try:
        Audio.model_validate(audio)
    except ValidationError:
        return None
    config.asked.add("audio_config")
    return audio


def _shared(block: Block) -> Block:
    """Return the sizes of the transformer, whose defaults are those of Whisper's encoder."""
    return {
        "hidden_size": _of_either(block, "d_model", "hidden_size", 1280),
        "layers": _of_either(block, "encoder_layers", "num_hidden_layers", 32),
        "heads": _of_either(block, "encoder_attention_heads", "num_attention_heads", 20),
        "intermediate_size": _of_either(block, "encoder_ffn_dim", "intermediate_size", 5120),
        "mel_bins": value_in(block, "num_mel_bins", 128),
    }


def _of_either(block: Block, name: str, other_name: str, default: int) -> Any:
    return value_in(block, name, value_in(block, other_name, default))


def _whisper(block: Block) -> Block:
    """Return the sizes of an encoder over chunks of 30 s, each filled up with silence."""
    positions = value_in(block, "max_source_positions", 1500)
    return {**_shared(block), "chunk": 2 * positions, "padded": True, "positions": positions}


_RESERVED = 750
"""Embeddings of 30 s by Qwen2-Audio's formula, for which vLLM keeps room in all of Qwen's families
(`Qwen2AudioProcessingInfo.get_mm_max_tokens_per_item`)."""


def _qwen2_audio(block: Block, data: Block, hidden: int) -> Block:
    # one chunk, and the rest of a recording is cut off; transformers' encoder, whole on every rank
    sizes = _whisper(block)
    return {
        **sizes,
        "max_frames": sizes["chunk"],
        "pool": 2,
        "pooled": True,
        "projector": [hidden],
        "markers": 2,
        "ranks": "repeat",
        "reserved": _RESERVED,
    }


def _voxtral(block: Block, data: Block, hidden: int) -> Block:
    # the projector reads as many patches together as its first product is wide
    sizes = _whisper(block)
    pool = max(1, sizes["intermediate_size"] // sizes["hidden_size"])
    return {**sizes, "pool": pool, "projector": [hidden, hidden], "markers": 1}


def _qwen25_omni(block: Block, data: Block, hidden: int) -> Block:
    # transformers' encoder, whole on every rank; a chunk of two windows of frames makes one of patches
    window = value_in(block, "n_window", 100)
    return {
        **_shared(block),
        "chunk": 2 * window,
        "window": window,
        "pool": 2,
        "pooled": True,
        "projector": [value_in(block, "output_dim", hidden)],
        "markers": 2,
        "ranks": "repeat",
        "reserved": _RESERVED,
    }


def _qwen3_omni(block: Block, data: Block, hidden: int) -> Block:
    sizes, chunk = _shared(block), 2 * value_in(block, "n_window", 50)
    # three convolutions halve the frames of a chunk, and rows of some chunks attend to one another
    patches = -(-chunk // 8)
    return {
        **sizes,
        "chunk": chunk,
        "halvings": 3,
        "channels": value_in(block, "downsample_hidden_size", 480),
        "window": patches * (value_in(block, "n_window_infer", 800) // chunk),
        "projector": [sizes["hidden_size"], value_in(block, "output_dim", hidden)],
        "markers": 2,
        "ranks": "share_if_even",
        "reserved": _RESERVED,
    }


def _ultravox(block: Block, data: Block, hidden: int) -> Block | None:
    if value_in(data, "num_projector_layers", 0):
        # a projector with layers of its own
        return None
    sizes = _whisper(block)
    inner, pool = value_in(data, "hidden_size", 4096), value_in(data, "stack_factor", 8)
    return {
        **sizes,
        "padded": False,
        "whole_tokens": True,
        "pool": pool,
        "projector": [inner, hidden],
        "gated_projector": data.get("projector_act", "swiglu") == "swiglu",
        # vLLM's dummy recording has 16 chunks (_MAX_ENCODER_BATCH_SIZE of ultravox.py)
        "reserved": 16 * -(-sizes["positions"] // pool),
    }


_FAMILIES: dict[str, Callable[[Block, Block, int], Block | None]] = {
    "Qwen2AudioForConditionalGeneration": _qwen2_audio,
    "VoxtralForConditionalGeneration": _voxtral,
    "Qwen2_5OmniModel": _qwen25_omni,
    "Qwen2_5OmniForConditionalGeneration": _qwen25_omni,
    "Qwen3OmniMoeForConditionalGeneration": _qwen3_omni,
    "UltravoxModel": _ultravox,
}
"""Readers by the architecture that a config states: of its audio part, all of it, the hidden size of its text part."""
_WHISPER: dict[str, Block] = {
    "openai/whisper-large-v3": {},
    "openai/whisper-large-v3-turbo": {},
    "openai/whisper-medium": {
        "d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
        "num_mel_bins": 80,
    },
    "openai/whisper-small": {
        "d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072,
        "num_mel_bins": 80,
    },
}  # fmt: skip
"""Encoders that configs name by their checkpoints, as differences from the largest one."""
