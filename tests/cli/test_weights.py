"""Random weights: the folder holds what the spec says, and a rigged pair says what it was told to."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simtune.errors import UsageError
from simtune.specs.catalog import load_model
from simtune.specs.folder_lock import release
from simtune.specs.model import Model
from simtune.validation.client.prompts import FIRST_TOKEN
from simtune.validation.servers import random_weights
from simtune.validation.servers.random_weights import Checkpoint, permutations, rigged_pair, write_weights

SMALL = ("hidden_size=64", "vocab_size=131", "layers.0.count=2", "max_position=512")
PARTS = ("layers.0.attention.heads=4", "layers.0.attention.kv_heads=2", "layers.0.attention.head_dim=32")
WIDE = ("layers.0.feed_forward.intermediate_size=96", "tie_embeddings=false")


def small(name: str, *more: str) -> Model:
    return load_model(name, (*SMALL, *PARTS, *WIDE, *more))


FP32 = ("dtype=fp32", "weight_dtype=fp32")


def read(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A safetensors file, by its published layout."""
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors, end = {}, 0
    for name, t in header.items():
        begin, stop = t["data_offsets"]
        assert begin == end, "one after another, in order"
        end = stop
        data = raw[8 + size + begin : 8 + size + stop]
        if t["dtype"] == "BF16":
            values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[t["dtype"]])
        tensors[name] = values.reshape(t["shape"])
    assert len(raw) == 8 + size + end
    return tensors


@pytest.mark.parametrize(
    ("name", "more", "architecture"),
    [
        ("llama-3.1-8b", (), "LlamaForCausalLM"),
        ("llama-3.1-8b", ("tie_embeddings=true",), "LlamaForCausalLM"),
        ("qwen2.5-7b", (), "Qwen2ForCausalLM"),
        ("qwen3-8b", FP32, "Qwen3ForCausalLM"),
    ],
)
def test_weights_folder_holds_the_model(tmp_path: Path, name: str, more: tuple[str, ...], architecture: str) -> None:
    model = small(name, *more)
    write_weights(model, tmp_path / "out", seed=4)
    tensors = read(tmp_path / "out")
    assert sum(t.size for t in tensors.values()) == model.parameters
    again = load_model(str(tmp_path / "out" / "config.json"))
    assert again.layers == model.layers
    same = ("hidden_size", "vocab_size", "max_position", "tie_embeddings", "dtype", "weight_dtype", "parameters")
    assert [getattr(again, field) for field in same] == [getattr(model, field) for field in same]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [architecture]
    spread = tensors["model.layers.1.mlp.up_proj.weight"].std()
    assert spread == pytest.approx(0.02, rel=0.05)
    assert (tensors["model.norm.weight"] == 1).all()
    write_weights(model, tmp_path / "twin", seed=4)
    assert (tmp_path / "twin" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixtral-8x7b", "a moe feed-forward block"),
        ("gemma-3-27b", "sliding attention"),
        ("deepseek-v3", "mla attention"),
        ("gpt-oss-20b", "sinks|sliding"),
    ],
)
def test_layer_that_cannot_be_written_is_named(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Checkpoint.of(load_model(name))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("learned_positions=512",), "learned positions, layer norms, or norms behind its sublayers"),
        (("weight_dtype=fp8",), "weights in another format than bf16"),
        (("layers.0.attention.sinks=true",), "attention with sinks, gates, norms or widths of its own"),
        (("layers.0.attention.output_bias=true",), "biases as none of the three has"),
        (("layers.0.feed_forward.gated=false",), "a feed-forward block without a gate or with biases"),
        (("layers.0.attention.output_bias=true", "layers.0.attention.qkv_bias=true"), None),
    ],
)
def test_layer_that_no_architecture_has_is_named(more: tuple[str, ...], said: str | None) -> None:
    model = small("llama-3.1-8b", *more)
    if said is None:
        written = {tensor.name: tensor.shape for tensor in Checkpoint.of(model).tensors()}
        assert written["model.layers.1.self_attn.o_proj.bias"] == (64,)
        assert sum(np.prod(shape) for shape in written.values()) == model.parameters
    else:
        with pytest.raises(UsageError, match=said):
            Checkpoint.of(model)


def test_layers_that_differ_are_not_written() -> None:
    model = small("llama-3.1-8b")
    (group,) = model.layers
    other = group.model_copy(update={"attention": group.attention.model_copy(update={"heads": 2})})
    with pytest.raises(UsageError, match="layers that differ"):
        Checkpoint.of(model.model_copy(update={"layers": (group, other)}))


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.7, 1.0])
def test_random_pair_accepts_the_requested_share_of_drafts(tmp_path: Path, acceptance: float) -> None:
    """By the arithmetic of the two networks: what a token's embedding scores highest, layers adding nothing."""
    target, draft = small("llama-3.1-8b"), small("llama-3.1-8b", "hidden_size=96", "layers.0.count=1")
    share = rigged_pair(target, draft, tmp_path / "pair", acceptance, seed=1)
    assert share == pytest.approx(acceptance, abs=1 / (target.vocab_size - FIRST_TOKEN))
    truth = json.loads((tmp_path / "pair" / "truth.json").read_text())
    spoken = []
    for name, key in (("target", "next"), ("draft", "drafted")):
        tensors = read(tmp_path / "pair" / name)
        assert not any(t.any() for n, t in tensors.items() if "o_proj" in n or "down_proj" in n)
        said = (tensors["model.embed_tokens.weight"] @ tensors["lm_head.weight"].T).argmax(axis=1)
        assert said[FIRST_TOKEN:].tolist() == truth[key][FIRST_TOKEN:]
        spoken.append(said[FIRST_TOKEN:])
    assert (spoken[0] == spoken[1]).mean() == share
    token, seen = FIRST_TOKEN, set()
    while token not in seen:
        seen.add(token)
        token = truth["next"][token]
    assert seen == set(range(FIRST_TOKEN, target.vocab_size)), "one cycle over all tokens"


def test_drafts_are_a_permutation_too() -> None:
    follows, drafted = permutations(500, 0.6, seed=0)
    assert sorted(follows) == sorted(drafted) == list(range(500))
    assert (follows[FIRST_TOKEN:] == drafted[FIRST_TOKEN:]).mean() == pytest.approx(0.6, abs=0.002)


def test_single_wrong_draft_cannot_be_swapped() -> None:
    follows, drafted = permutations(100, 1 - 1 / (100 - FIRST_TOKEN), seed=0)
    assert (follows == drafted).all(), "it has nobody to swap with"


def test_weights_that_do_not_fit_on_the_disk_are_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e5))
    model = small("llama-3.1-8b")
    with pytest.raises(UsageError, match=r"out: 0\.0 GB of weights do not fit on 0\.0 GB of free disk"):
        write_weights(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pairs_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    target = small("llama-3.1-8b")
    with pytest.raises(UsageError, match=r"an acceptance is a share from 0 to 1, not 1\.5"):
        rigged_pair(target, target, tmp_path / "pair", 1.5)
    for draft, said in (
        (small("llama-3.1-8b", "vocab_size=99"), "must agree"),
        (small("llama-3.1-8b", "tie_embeddings=true"), "cannot be rigged"),
        (small("llama-3.1-8b", "hidden_size=32"), "does not tell tokens apart"),
    ):
        with pytest.raises(UsageError, match=said):
            rigged_pair(target, draft, tmp_path / "pair", 0.5)
    assert not (tmp_path / "pair").exists()


def test_a_folder_is_not_overwritten_unasked(tmp_path: Path) -> None:
    model = small("llama-3.1-8b")
    write_weights(model, tmp_path / "out")
    with pytest.raises(UsageError, match="give --force"):
        write_weights(model, tmp_path / "out")
    write_weights(model, tmp_path / "out", force=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("\\end")
    with pytest.raises(UsageError, match="is not empty"):
        write_weights(model, tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_existing_weights_stay_until_the_new_ones_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full as the second of two models is written."""
    model, out = small("llama-3.1-8b"), tmp_path / "pair"
    rigged_pair(model, model, out, 0.5)
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {path.name for path in kept} == {"truth.json", "config.json", "model.safetensors"}
    begun = []

    def full(file: Any, *rest: Any) -> None:
        begun.append(file.name)
        if len(begun) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(b"0" * 100)

    monkeypatch.setattr(random_weights, "_write_safetensors", full)
    with pytest.raises(UsageError, match=r"pair: cannot be written \(No space left on device\)"):
        rigged_pair(model, model, out, 0.9, force=True)
    assert len(begun) == 2
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept
    release()
    assert [path.name for path in tmp_path.iterdir()] == ["pair"], "nothing half-written beside it"


def test_weights_path_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="out: is a file; name a folder"):
        write_weights(small("llama-3.1-8b"), tmp_path / "out", force=True)
    with pytest.raises(UsageError, match="out/in: cannot be written"):
        write_weights(small("llama-3.1-8b"), tmp_path / "out" / "in")


def test_the_command_writes_both_kinds(tmp_path: Path, call: Callable[..., Any]) -> None:
    settings = [word for s in (*SMALL, *PARTS, *WIDE) for word in ("--set", f"model.{s}")]
    drafts = [word.replace("model.", "draft.") for word in settings]
    said = call("weights", "llama-3.1-8b", "--out", tmp_path / "one", *settings)
    assert said.code == 0, said
    assert "random parameters of llama-3.1-8b" in said.out
    pair = ("--rigged", "llama-3.1-8b", "--acceptance", "0.75", *settings, *drafts)
    said = call("weights", "llama-3.1-8b", "--out", tmp_path / "two", *pair)
    assert said.code == 0, said
    assert "0.7500 of the drafts are accepted" in said.out
    assert call("weights", "llama-3.1-8b", "--out", tmp_path / "x", "--acceptance", "0.5").code == 2
