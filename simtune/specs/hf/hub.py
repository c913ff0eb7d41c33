"""Models that others have fetched from Hugging Face: the cache of huggingface_hub, read and never filled."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_id(reference: str) -> bool:
    """True if a reference has the form of a model's id on Hugging Face, `Qwen/Qwen3-8B`."""
    return _ID.fullmatch(reference) is not None and not reference.startswith(".")


def folder() -> Path:
    """Return the folder of the cache, set by the environment (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME) as for
    huggingface_hub.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or base / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def cached_config(reference: str) -> Path | None:
    """Return the config.json of a model that was fetched by its id: of the branch `main` if that is known, else of the
    first snapshot by name; None if there is none.
    """
    if not is_id(reference):
        return None
    model = folder() / ("models--" + reference.replace("/", "--"))
    try:
        revision = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    snapshots = model / "snapshots"
    configs = [snapshots / revision / "config.json"] if revision else []
    configs += sorted(snapshots.glob("*/config.json"))
    return next((path for path in configs if path.is_file()), None)
