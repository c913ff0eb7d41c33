"""References of specs to other specs: built-in names, and files as seen from one folder or another.

A file names other files from its own folder. In memory a plan names them from the present one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simtune.specs.base import Spec
from simtune.specs.hf import hub

SPEC_SUFFIXES = (".yaml", ".yml", ".json")
TRACE_SUFFIXES = (".csv", ".jsonl", ".csv.gz", ".jsonl.gz")

Place = Callable[[str], str]
"""Function from a reference to what it is from elsewhere; names of built-in specs stay."""
Places = Callable[[str], Place]
"""Places by a folder within a run; the run's own is empty."""

_OF_POOL = ("hardware", "engine")
_OF_SPECULATION = ("acceptance",)
_OF_DRAFTER = ("model",)
_TABLES = ("costs",)


_AS = re.compile(r"(.+) as (\w+)")


def is_path(reference: str) -> bool:
    """True if a reference is the path of a file, not a built-in name."""
    return "/" in reference or os.sep in reference or reference.endswith((*SPEC_SUFFIXES, *TRACE_SUFFIXES))


def on_word(reference: str) -> tuple[str, str | None]:
    """Return a model's reference, and the architecture that it is to be read as if one is stated behind it."""
    match = _AS.fullmatch(reference)
    return (reference, None) if match is None else (match[1], match[2])


def beside(folder: Path, reference: str) -> str:
    """A reference found in a file of `folder`: names stay, models in Hugging Face's cache by their ids too, relative
    paths are taken from there.
    """
    plain, architecture = on_word(reference)
    path = folder / plain
    if not is_path(plain) or not (path.exists() or not hub.cached_config(plain)):
        return reference
    return _as(str(path), architecture)


def from_folder(folder: Path) -> Place:
    """Return the place of references in a file of `folder`, from the present folder. What is not a file there stays as
    it is: a name, or a path from the present folder."""
    return _of_files(folder, str)


def to_folder(folder: Path) -> Place:
    """Return the place of references from the present folder, in a file of `folder`; absolute paths stay."""

    def relative(path: Path) -> str:
        return str(path) if path.is_absolute() else Path(os.path.relpath(path, folder)).as_posix()

    return _of_files(Path(), relative)


def moved(folder: Path, run: Path) -> Places:
    """Return the places of references in a file of `folder`, by the folder within `run` whose files name them."""
    read = from_folder(folder)

    def places(within: str) -> Place:
        written = to_folder(run / within)
        return lambda reference: written(read(reference))

    return places


def unmoved(within: str) -> Place:
    """Return the place of references that stay as they are."""
    return str


def same_plan(plan: Spec, folder: Path, other: Spec) -> bool:
    """True if two plans are alike; the references of the first are from `folder`, of the second from the present
    one."""
    read, absolute = from_folder(folder), _of_files(Path(), os.path.abspath)
    data = with_places(plan.to_data(), lambda reference: absolute(read(reference)))
    return data == with_places(other.to_data(), absolute)


def _of_files(folder: Path, change: Callable[[Path], str]) -> Place:
    """Return a place that changes references to files that are there, as seen from `folder`, and leaves others."""

    def place(reference: str) -> str:
        plain, architecture = on_word(reference)
        path = folder / plain
        return _as(change(path), architecture) if is_path(plain) and path.exists() else reference

    return place


def with_places(plan: Mapping[str, Any], place: Place, *, tables: bool = False) -> dict[str, Any]:
    """Return the plain data of a plan with all references replaced by `place`, those of `tables` only if asked for.

    What is no text, or no mapping, stays: it is reported when the plan is read.
    """
    of_pool, of_link = (*_OF_POOL, *(_TABLES if tables else ())), _TABLES if tables else ()

    def in_speculation(entry: Any) -> Any:
        return _within(_placed(entry, _OF_SPECULATION, place), "drafter", lambda d: _placed(d, _OF_DRAFTER, place))

    def in_pool(entry: Any) -> Any:
        return _within(_placed(entry, of_pool, place), "speculation", in_speculation)

    def in_links(entries: Any) -> Any:
        return [_placed(entry, of_link, place) for entry in entries] if isinstance(entries, list) else entries

    placed = _placed(plan, ("model",), place)
    placed = _within(placed, "pools", lambda pools: [*map(in_pool, pools)] if isinstance(pools, list) else pools)
    placed = _within(placed, "link", lambda link: _placed(link, of_link, place))
    return dict(_within(placed, "links", in_links))


def _placed(entry: Any, keys: tuple[str, ...], place: Place) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    return {key: place(v) if key in keys and isinstance(v, str) else v for key, v in entry.items()}


def _within(entry: Any, key: str, change: Callable[[Any], Any]) -> Any:
    return {**entry, key: change(entry[key])} if isinstance(entry, Mapping) and key in entry else entry


def _as(path: str, architecture: str | None) -> str:
    return path if architecture is None else f"{path} as {architecture}"
