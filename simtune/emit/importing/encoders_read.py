"""Servers that only encode media, as a stage in front of the pool of the others that compute prompts: SGLang's with
`--encoder-only`, vLLM's that produce embeddings (`--ec-transfer-config`)."""

from __future__ import annotations

import json
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
    "ec-transfer-config",
    "enable-request-id-headers",
)
"""Options by which both kinds of servers find each other."""
_CACHES = ("enable-prefix-mm-cache", "enable-mm-global-cache")
_OPTIONS = {
    "sglang": ("--encoder-only", "--language-only"),
    "vllm": ("ec_producer in --ec-transfer-config", "ec_consumer in --ec-transfer-config"),
}
"""Options of servers that only encode, and of those that take their embeddings, by engine."""
_READ = ("mm-encoder-tp-mode", "encoder-only", "tp-size", "tensor-parallel-size", "tp", "mm-enable-dp-encoder")


def parted(launches: Sequence[Launch]) -> tuple[list[Launch], list[Launch]]:
    """Return the starts of servers that only encode, and the others, without the options by which they find each other.

    Raises SpecError if one kind is started without the other.
    """
    encoders = [launch for launch in launches if _encodes_alone(launch)]
    servers = [launch for launch in launches if launch not in encoders]
    apart = [launch for launch in servers if _takes_embeddings(launch)]
    if encoders:
        taking = [launch for launch in servers if "decode" not in (launch.value("disaggregation-mode"), launch.role)]
        _check_servers(encoders[0], [launch for launch in taking if launch not in apart], bool(servers))
        for launch in launches:
            launch.given = launch.without(*_BETWEEN)
    elif apart:
        encode, take = _OPTIONS[apart[0].family]
        why = f"takes embeddings of servers that are not started here; put those in ({encode})"
        raise SpecError(Problem(apart[0].file, why, take, apart[0].line))
    return encoders, servers


def _check_servers(encoder: Launch, complete: Sequence[Launch], any_server: bool) -> None:
    """Raise SpecError if no server takes embeddings, or if some are `complete`: they encode as well."""
    if complete:
        take = _OPTIONS[encoder.family][1]
        why = f"servers that only encode are started, and this one encodes too; give it {take}"
        raise SpecError(Problem(complete[0].file, why, "", complete[0].line))
    if not any_server:
        take = _OPTIONS[encoder.family][1]
        why = f"starts servers that only encode; put those in that take their embeddings ({take})"
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
    shapes = {(_ranks(launch), _is_by_item(launch)) for launch in encoders}
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


def _role(launch: Launch) -> str:
    """Return the role of a server of vLLM in the transfer of embeddings; empty without one."""
    try:
        config = json.loads(str(launch.value("ec-transfer-config") or "{}"))
    except json.JSONDecodeError:
        return ""
    return str(config.get("ec_role", "")) if isinstance(config, dict) else ""


def _encodes_alone(launch: Launch) -> bool:
    return _is_set(launch, "encoder-only") or _role(launch) == "ec_producer"


def _takes_embeddings(launch: Launch) -> bool:
    return _is_set(launch, "language-only") or _role(launch) == "ec_consumer"


def _is_by_item(launch: Launch) -> bool:
    """Return True if the ranks of a server encode items apart."""
    return _is_set(launch, "mm-enable-dp-encoder") or launch.value("mm-encoder-tp-mode") == "data"


def _is_set(launch: Launch, name: str) -> bool:
    option = _option(launch, name)
    return option is not None and switch(option)


def _option(launch: Launch, *names: str) -> Given | None:
    return next((option for option in reversed(launch.given) if option.name in names), None)


def _ranks(launch: Launch) -> int:
    option = _option(launch, "tp-size", "tensor-parallel-size", "tp")
    return 1 if option is None else whole_number(option)
