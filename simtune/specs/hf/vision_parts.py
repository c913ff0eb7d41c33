"""Vision encoders of multimodal configs: `vision_config`, family by family.

Defaults are those of the configuration classes of `transformers`; limits of the processors, which stand in
preprocessor_config.json, are those that are published with the first checkpoint of a family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from simtune.specs.hf.config_reader import Config
from simtune.specs.vision import Vision

Block = dict[str, Any]


def vision_of(config: Config) -> Block | None:
    """Return the vision encoder of a config as plain data of `simtune.specs.vision.Vision`; None if there is none, if
    its family is not modelled, or if sizes are missing or impossible: the language part is read all the same.
    """
    block, listed = config.data.get("vision_config"), config.data.get("architectures")
    if not isinstance(block, dict) or not isinstance(listed, list) or not listed:
        return None
    read, sizes = _FAMILIES.get(str(listed[0])), sizes_in(block)
    if read is None or "hidden_size" not in sizes:
        return None
    vision = read(sizes, sizes_in(config.data), config.count("hidden_size"))
    try:
        Vision.model_validate(vision)
    except ValidationError:
        return None
    config.asked.add("vision_config")
    return vision


def sizes_in(block: Block) -> Block:
    """Return the switches, the whole numbers above 0 and the lists of such numbers in a block."""
    return {key: value for key, value in block.items() if _is_size(value)}


def _is_size(value: Any) -> bool:
    if isinstance(value, list):
        return all(type(number) is int and number >= 0 for number in value)
    return isinstance(value, bool) or (type(value) is int and value > 0)


def value_in(block: Block, key: str, default: int | None = None) -> Any:
    """Return a value of a block, or a default if it is absent or null."""
    value = block.get(key)
    return default if value is None else value


def _shared(block: Block, layers: int | None, heads: int | None, inner: int | None, patch: int | None) -> Block:
    """Return the sizes that all families but the oldest name alike."""
    return {
        "hidden_size": block["hidden_size"],
        "layers": value_in(block, "num_hidden_layers", value_in(block, "depth", layers)),
        "heads": value_in(block, "num_attention_heads", value_in(block, "num_heads", heads)),
        "intermediate_size": value_in(block, "intermediate_size", inner),
        "patch": value_in(block, "patch_size", patch),
    }


def _qwen2(block: Block, data: Block, hidden: int) -> Block:
    width = value_in(block, "embed_dim", 1280)
    sizes = _shared({**block, "hidden_size": width, "intermediate_size": 4 * width}, 32, 16, None, 14)
    return {**sizes, **_native(block, width, value_in(block, "hidden_size"), 3136, 12_845_056)}


def _native(block: Block, width: int, out: int, least: int, most: int) -> Block:
    merge = value_in(block, "spatial_merge_size", 2)
    return {
        "merge": merge,
        "frames": value_in(block, "temporal_patch_size", 2),
        "projector": [width * merge**2, out],
        "sizing": {"kind": "native", "min_pixels": least, "max_pixels": most},
        # the same limits for each frame: preprocessor_config.json is that of the video processor too
        "video": {"limits": "frame", "min_pixels": least, "max_pixels": most},
    }


def _qwen25(block: Block, data: Block, hidden: int) -> Block:
    sizes, out = _shared(block, 32, 16, 3420, 14), value_in(block, "out_hidden_size", hidden)
    patches = value_in(block, "window_size", 112) // sizes["patch"]
    full_layers = value_in(block, "fullatt_block_indexes") or [7, 15, 23, 31]
    native = _native(block, sizes["hidden_size"], out, 3136, 12_845_056)
    return {**sizes, "gated": True, "window": patches**2, "full_layers": len(full_layers), **native}


def _qwen3(block: Block, data: Block, hidden: int, deepstack: int = 3) -> Block:
    sizes, out = _shared(block, 27, 16, 4304, 16), value_in(block, "out_hidden_size", hidden)
    indexes = block.get("deepstack_visual_indexes")
    return {
        **sizes,
        "positions": value_in(block, "num_position_embeddings", 2304),
        "projectors": 1 + (deepstack if indexes is None else len(indexes)),
        **_native(block, sizes["hidden_size"], out, 65_536, 16_777_216),
        # of video_preprocessor_config.json, for all frames together
        "video": {
            "limits": "clip",
            "min_pixels": 4096,
            "max_pixels": 25_165_824,
            "timestamps": True,
            "group_markers": 2,
        },
    }


def _qwen35(block: Block, data: Block, hidden: int) -> Block:
    return _qwen3(block, data, hidden, deepstack=0)


def _qwen25_omni(block: Block, data: Block, hidden: int) -> Block:
    turns = {
        "positions_per_s": value_in(block, "tokens_per_second", 25),
        "chunk_s": value_in(data, "seconds_per_chunk", 2),
    }
    return {**_qwen25(block, data, hidden), "video": _frames(128 * 28**2, 768 * 28**2, turns)}


def _qwen3_omni(block: Block, data: Block, hidden: int) -> Block:
    # Qwen3-VL's encoder behind the processors of Qwen2-VL, which write no times
    sizing = {"kind": "native", "min_pixels": 3136, "max_pixels": 12_845_056}
    # its processor counts turns by one frame per second, whatever the loader samples
    turns = {"positions_per_s": value_in(data, "position_id_per_seconds", 13), "fps": 1.0}
    return {**_qwen3(block, data, hidden), "sizing": sizing, "video": _frames(128 * 32**2, 768 * 32**2, turns)}


def _frames(least: int, most: int, sound: Block) -> Block:
    """Return limits of each frame: `videos_kwargs` of processing_qwen2_5_omni.py and processing_qwen3_omni_moe.py,
    which replace those of preprocessor_config.json; and turns of frames and sound."""
    return {"limits": "frame", "min_pixels": least, "max_pixels": most, "sound": sound}


def _gemma3(block: Block, data: Block, hidden: int) -> Block:
    sizes, side = _shared(block, 27, 16, 4304, 14), value_in(block, "image_size", 896)
    patches = side // sizes["patch"]
    return {
        **sizes,
        "merge": patches // round(value_in(data, "mm_tokens_per_image", 256) ** 0.5),
        "positions": patches**2,
        "projector": [hidden],
        "pooled": True,
        "sizing": {"kind": "fixed", "side": side, "markers": 4},
    }


def _llama4(block: Block, data: Block, hidden: int) -> Block:
    sizes, side = _shared(block, 34, 16, 5632, 14), value_in(block, "image_size", 336)
    joined, out = value_in(block, "projector_input_dim", 4096), value_in(block, "projector_output_dim", 4096)
    tiles = {"kind": "tiles", "side": side, "max_tiles": 16, "choice": "scale", "tile_markers": 1, "markers": 3}
    positions = (side // sizes["patch"]) ** 2 + 1
    return {**sizes, "merge": 2, "positions": positions, "projector": [joined, out, hidden], "sizing": tiles}


def _mistral3(block: Block, data: Block, hidden: int) -> Block:
    sizes, merge = _shared(block, 24, 16, 4096, 14), value_in(data, "spatial_merge_size", 2)
    rows = {"kind": "rows", "longest_side": value_in(block, "image_size", 1540)}
    projector = [sizes["hidden_size"], hidden, hidden]
    return {**sizes, "gated": True, "merge": merge, "projector": projector, "sizing": rows}


def _internvl(block: Block, data: Block, hidden: int) -> Block:
    sizes, side = (
        _shared(block, 24, 16, 4096, 14),
        value_in(data, "force_image_size", value_in(block, "image_size", 448)),
    )
    side, patch = (value[0] if isinstance(value, list) else value for value in (side, sizes["patch"]))
    tiles = {
        "kind": "tiles",
        "side": side,
        "max_tiles": value_in(data, "max_dynamic_patch", 12),
        "thumbnail": value_in(data, "use_thumbnail", True),
    }
    positions = (side // patch) ** 2 + 1
    return {
        **sizes, "patch": patch, "merge": 2, "positions": positions, "projector": [hidden, hidden], "sizing": tiles
    }  # fmt: skip


def _kimi(block: Block, data: Block, hidden: int) -> Block:
    sizes = _shared(block, 27, 16, 4304, 14)
    kernel = block.get("merge_kernel_size") or [2, 2]
    merge = kernel[0] if isinstance(kernel, list) else kernel
    return {
        **sizes,
        "merge": merge,
        "positions": value_in(block, "init_pos_emb_height", 64) * value_in(block, "init_pos_emb_width", 64),
        "projector": [sizes["hidden_size"] * merge**2, hidden],
        "sizing": {"kind": "padded", "max_patches": 4096, "markers": 4},
    }


_FAMILIES: dict[str, Callable[[Block, Block, int], Block]] = {
    "Qwen2VLForConditionalGeneration": _qwen2,
    "Qwen2_5_VLForConditionalGeneration": _qwen25,
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3VLMoeForConditionalGeneration": _qwen3,
    "Qwen2_5OmniModel": _qwen25_omni,
    "Qwen2_5OmniForConditionalGeneration": _qwen25_omni,
    "Qwen3OmniMoeForConditionalGeneration": _qwen3_omni,
    "Qwen3_5ForConditionalGeneration": _qwen35,
    "Qwen3_5MoeForConditionalGeneration": _qwen35,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Llama4ForConditionalGeneration": _llama4,
    "Mistral3ForConditionalGeneration": _mistral3,
    "InternVLChatModel": _internvl,
    "InternVLForConditionalGeneration": _internvl,
    "KimiVLForConditionalGeneration": _kimi,
}
"""Readers by the architecture that a config states: of its vision part, all of it, the hidden size of its text part."""
