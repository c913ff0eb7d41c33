"""Servers of SGLang that only encode media (`--encoder-only`), as a stage in front of the pool of the others that
compute prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simtune.emit.importing.knowledge import IGNORED
from simtune.emit.importing.launches import Given, Launch, switch, whole_number
from simtune.emit.importing.pool_draft import Note
from simtune.errors import Problem, SpecError
from simtune.specs.base import spec_name

_BETWEEN = (
    "language-only",
    "encoder-urls",
    "encoder-transfer-backend",
    "encoder-bootstrap-port",
    "encoder-register-urls",
)
"""Options by which both kinds of servers find each other."""
_CACHES = ("enable-prefix-mm-cache", "enable-mm-global-cache")
_READ = ("encoder-only", "tp-size", "tensor-parallel-size", "tp", "mm-enable-dp-encoder")


def parted(launches: Sequence[Launch]) -> tuple[list[Launch], list[Launch]]:
    """Return the starts of servers that only encode, and the others, without the options by which they find each other.

    Raises SpecError if one kind is started without the other.
    """
    encoders = [launch for launch in launches if _is_set(launch, "encoder-only")]
    servers = [launch for launch in launches if launch not in encoders]
    apart = [launch for launch in servers if _is_set(launch, "language-only")]
    if encoders:
        taking = [launch for launch in servers if launch.value("disaggregation-mode") != "decode"]
        _check_servers(encoders[0], [launch for launch in taking if launch not in apart], bool(servers))
        for launch in launches:
            launch.given = launch.without(*_BETWEEN)
    elif apart:
        why = "takes embeddings of servers that are not started here; put those in (--encoder-only)"
        raise SpecError(Problem(apart[0].file, why, "--language-only", apart[0].line))
    return encoders, servers


def _check_servers(encoder: Launch, complete: Sequence[Launch], any_server: bool) -> None:
    """Raise SpecError if no server takes embeddings, or if some are `complete`: they encode as well."""
    if complete:
        why = "servers that only encode are started, and this one encodes too; give it --language-only"
        raise SpecError(Problem(complete[0].file, why, "", complete[0].line))
    if not any_server:
        why = "starts servers that only encode; put those in that take their embeddings (--language-only)"
        raise SpecError(Problem(encoder.file, why, "", encoder.line))


def stages_of(
    encoders: Sequence[Launch], pools: Sequence[Mapping[str, Any]], notes: list[Note], *, lenient: bool
) -> dict[str, Any]:
    """Return the key of a plan with these pools for servers that only encode; nothing without any. Notes on their other
    options are added to `notes`.

    Raises SpecError if the servers differ, or keep what they encoded, unless `lenient`.
    """
    if not encoders:
        return {}
    shapes = {(_ranks(launch), _is_set(launch, "mm-enable-dp-encoder")) for launch in encoders}
    if len(shapes) > 1:
        message = "servers that encode differ in their ranks; a stage has equal servers: start them alike"
        raise SpecError(Problem(encoders[0].file, message, "", encoders[0].line))
    for launch in encoders:
        for option in launch.given:
            if option.name in _CACHES and _is_set(launch, option.name) and not lenient:
                message = (
                    "is not simulated; a stage encodes every item; remove it, or give --lenient to go on without it"
                )
                raise SpecError(option.problem(message))
            if option.name not in _READ:
                why = IGNORED[launch.family].get(option.name, "it changes nothing of how media are encoded here")
                notes.append(Note("ignored", f"--{option.name}", why))
    ((devices, by_item),) = shapes
    stage = {
        **_place(encoders[0], pools),
        "encoder": "data" if by_item else "weights",
        "devices": devices,
        "instances": sum(launch.instances for launch in encoders),
    }
    return {"stages": [stage]}


def _place(encoder: Launch, pools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the name of a stage, and that of the pool which it serves: the one that takes new requests."""
    name = spec_name(encoder.pool or "encode", "encode")
    taking = [pool["name"] for pool in pools if pool.get("role") != "decode"]
    if any(pool["name"] == name for pool in pools):
        name = "encode"
    return {"name": name, "pool": taking[0] if taking else pools[0]["name"]}


def _is_set(launch: Launch, name: str) -> bool:
    option = _option(launch, name)
    return option is not None and switch(option)


def _option(launch: Launch, *names: str) -> Given | None:
    return next((option for option in reversed(launch.given) if option.name in names), None)


def _ranks(launch: Launch) -> int:
    option = _option(launch, "tp-size", "tensor-parallel-size", "tp")
    return 1 if option is None else whole_number(option)
