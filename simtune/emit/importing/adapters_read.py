"""Slots for LoRA adapters, from the options of engines that serve them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from simtune.emit.adapters import ATTENTION, TRTLLM_ALL, TRTLLM_ATTENTION
from simtune.emit.importing.launches import Given, Launch, plain, switch, whole_number
from simtune.emit.importing.pool_draft import PoolDraft, refuse_open
from simtune.errors import SpecError
from simtune.specs.adapters import LoraRank

VLLM = ("enable-lora", "max-loras", "max-lora-rank", "max-cpu-loras", "lora-target-modules", "lora-modules")
SGLANG = (
    "enable-lora", "max-loras-per-batch", "max-lora-rank", "max-loaded-loras", "lora-target-modules", "lora-paths",
)  # fmt: skip
"""Options that are read together: the switch, slots, the rank, adapters in host memory, matrices, and the adapters."""
_PACKED = frozenset({"qkv_proj", "o_proj"})


def read_lora(draft: PoolDraft, launch: Launch, names: Sequence[str], *, slots: int, rank: int | None) -> None:
    """Read the options of `names` among those given; `slots` and `rank` are the engine's own defaults, None if it looks
    at the adapters. Raises SpecError for a value that no plan has."""
    options = {option.name: option for option in launch.given if option.name in names}
    for option in options.values():
        refuse_open(option)
    switched, *settings, paths = names
    if paths in options:
        draft.ignore(options[paths], "the adapters for which requests ask are those of the load")
    # SGLang serves adapters whose paths it is given without the switch.
    start = options.get(switched) or (options.get(paths) if names is SGLANG else None)
    if start is not None and (start.name == paths or switch(start)):
        _set(draft, options, settings, slots, rank, start)
        return
    for name in settings:
        if name in options:
            draft.ignore(options[name], f"there are no adapters without {switched}")


def _set(
    draft: PoolDraft, options: Mapping[str, Given], names: Sequence[str], slots: int, rank: int | None, start: Given
) -> None:
    of_slots, of_rank, of_host, of_targets = names
    if of_slots in options:
        slots = whole_number(options[of_slots])
    if of_rank in options:
        rank = whole_number(options[of_rank])
    if rank is None:
        raise SpecError(start.problem(f"the rank of the adapters is not known here; give --{of_rank}"))
    if rank not in get_args(LoraRank):
        ranks = ", ".join(map(str, get_args(LoraRank)))
        raise SpecError(options[of_rank].problem(f"{rank}: no such rank is simulated; it can be {ranks}"))
    draft.set("lora.rank", rank)
    draft.set("lora.slots", slots)
    if of_host in options and (in_host := whole_number(options[of_host])) != slots:
        draft.set("lora.host_slots", in_host)
    if of_targets not in options:
        return
    modules = frozenset(str(options[of_targets].value).split())
    if modules in (frozenset(ATTENTION), _PACKED):
        draft.set("lora.targets", "attention")
    elif modules != {"all"}:
        draft.refuse(options[of_targets], "which matrices adapters change; those of attention, or all, can be")


def read_trtllm(draft: PoolDraft, option: Given, config: Mapping[str, Any]) -> None:
    """Read lora_config. Raises SpecError for a value that no plan has."""
    options = {
        str(key).replace("_", "-"): Given(f"{option.name}.{plain(str(key))}", value, option.file, option.line)
        for key, value in config.items()
    }
    targets = options.pop("lora-target-modules", None)
    for name in options.keys() - {"max-lora-rank", "max-loras", "max-cpu-loras"}:
        draft.ignore(options[name], "the adapters for which requests ask are those of the load")
    if "max-loras" not in options:
        raise SpecError(option.problem("the number of slots is not known here; set max_loras"))
    _set(draft, options, ("max-loras", "max-lora-rank", "max-cpu-loras", "lora-target-modules"), 1, 64, option)
    modules = set() if targets is None else set(targets.value)
    if modules == set(TRTLLM_ATTENTION):
        draft.set("lora.targets", "attention")
    elif targets is not None and modules != set(TRTLLM_ALL):
        draft.refuse(targets, "which matrices adapters change; those of attention, or all, can be")
