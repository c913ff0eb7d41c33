"""Entries of an InferenceX configuration: engine, model and points of its search space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from simtune.emit.importing.launches import Given, Launch
from simtune.emit.importing.pool_draft import Note
from simtune.errors import Problem, SpecError, suggest
from simtune.specs.yamlfile import Document

_FRAMEWORKS = {"vllm": "vllm", "sglang": "sglang", "trt": "trtllm", "trtllm": "trtllm"}
_SHOWN = 12


class Entry(NamedTuple):
    """Point of the search space of an entry."""

    name: str
    data: Mapping[str, Any]
    lengths: Mapping[str, Any]
    point: Mapping[str, Any]
    path: tuple[str | int, ...]


def is_config(data: Mapping[str, Any]) -> bool:
    """True if every value of a mapping is an entry."""
    return bool(data) and all(isinstance(value, dict) and "framework" in value for value in data.values())


def chosen(document: Document, wanted: str | None) -> Entry:
    """Return the point that `wanted` names: NAME, or NAME:N for the N-th point from 1. Raises SpecError if none is
    named and there are several."""
    points = list(_points(document.data))
    if wanted is None and len(points) == 1:
        return points[0]
    entries = list(dict.fromkeys(point.name for point in points))
    name, _, number = (wanted or (entries[0] if len(entries) == 1 else "")).partition(":")
    of_name = [point for point in points if point.name == name]
    if number.isdecimal() and 0 < int(number[:9]) <= len(of_name):
        return of_name[int(number) - 1]
    if not number and len(of_name) == 1:
        return of_name[0]
    if of_name:
        raise SpecError(_several(document.file, name, of_name))
    hint = suggest(name, entries) if wanted else ""
    listed = ", ".join(entries[:_SHOWN]) + (", ..." if len(entries) > _SHOWN else "")
    message = f"give --entry NAME with one of its {len(entries)} entries{hint}: {listed}"
    raise SpecError(Problem(document.file, message, "", 1))


def _points(data: Mapping[str, Any]) -> list[Entry]:
    points: list[Entry] = []
    for name, entry in data.items():
        lengths = entry.get("seq-len-configs")
        for at, config in enumerate(lengths if isinstance(lengths, list) else ()):
            space = config.get("search-space") if isinstance(config, dict) else None
            for number, point in enumerate(space if isinstance(space, list) else ()):
                if isinstance(point, dict):
                    path = (str(name), "seq-len-configs", at, "search-space", number)
                    points.append(Entry(str(name), entry, config, point, path))
    return points


def _words(entry: Entry) -> str:
    point = entry.point
    shape = ", ".join(f"{key} {point[key]}" for key in ("tp", "ep", "dp-attn", "spec-decoding") if key in point)
    return f"{entry.lengths.get('isl')} in, {entry.lengths.get('osl')} out, {shape or 'prefill and decode apart'}"


def notes(entry: Entry) -> list[Note]:
    """Return what an entry states of the load, which is no part of a plan."""
    point = entry.point
    users = point.get("conc-list") or [point.get("conc-start"), point.get("conc-end")]
    load = f"{entry.lengths.get('isl')} prompt and {entry.lengths.get('osl')} output tokens, users {users}"
    return [
        Note("ignored", "load", f"{load}; a plan has none"),
        Note(
            "ignored", "precision", f"{entry.data.get('precision')} is the checkpoint's, and the model's spec states it"
        ),
        Note("assumed", "", "settings of its launch script are those of the preset; import the script for them"),
    ]


def launches(document: Document, entry: Entry) -> list[Launch]:
    """Return the servers of a point. Raises SpecError for an engine that is not simulated."""
    line = document.position(entry.path)[0]
    framework = str(entry.data.get("framework")).removeprefix("dynamo-")
    family = _FRAMEWORKS.get(framework)
    if family is None:
        message = f"{framework} is not simulated; it can be {', '.join(_FRAMEWORKS)}"
        raise SpecError(Problem(document.file, message, f"{entry.name}.framework", line))
    roles = [role for role in ("prefill", "decode") if isinstance(entry.point.get(role), dict)]
    servers = [(role, entry.point[role]) for role in roles] or [("mixed", entry.point)]
    started = []
    for role, server in servers:
        options = [Given(name, value, document.file, line) for name, value in _options(family, server)]
        drafts = entry.point.get("spec-decoding")
        if drafts not in (None, "none"):
            options.append(Given("spec-decoding", drafts, document.file, line))
        if role != "mixed":
            options.append(Given("disaggregation-mode", role, document.file, line))
        launch = Launch(family, str(entry.data.get("model")), options, document.file, line)
        launch.image, launch.pool = str(entry.data.get("image", "")), role
        launch.role = None if role == "mixed" else role
        count = server.get("num-worker", 1)
        launch.instances = count if isinstance(count, int) and count > 0 else 1
        started.append(launch)
    return started


def _options(family: str, server: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the options that the launch scripts make of tp, ep and dp-attn."""
    ranks, experts, attention = server.get("tp", 1), server.get("ep", 1), server.get("dp-attn") is True
    if family == "vllm":
        shape = [("data-parallel-size", ranks), ("tensor-parallel-size", 1)] if attention else []
        return [
            *(shape or [("tensor-parallel-size", ranks)]),
            *([("enable-expert-parallel", True)] if experts != 1 else []),
        ]
    if family == "sglang":
        return [("tp-size", ranks), ("ep-size", experts), *([("attn-dp-size", ranks)] if attention else [])]
    return [
        ("tensor-parallel-size", ranks),
        ("moe-expert-parallel-size", experts),
        *([("enable-attention-dp", True)] if attention else []),
    ]


def _several(file: str, name: str, points: Sequence[Entry]) -> Problem:
    rows = [f"{name}:{at} ({_words(point)})" for at, point in enumerate(points, 1)]
    listed = "; ".join(rows[:_SHOWN]) + ("; ..." if len(rows) > _SHOWN else "")
    return Problem(file, f"has {len(rows)} points; give --entry with one of {listed}", name)
