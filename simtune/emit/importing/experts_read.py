"""Experts that are placed by their load, and instances that go on with fewer ranks, as launches of engines set them."""

from __future__ import annotations

from simtune.emit.importing.launches import Given, Launch, switch, whole_number
from simtune.emit.importing.pool_draft import PoolDraft, refuse_open
from simtune.emit.importing.reader import json_value

VLLM = ("enable-eplb", "eplb-config", "enable-elastic-ep")
SGLANG = ("enable-eplb", "ep-num-redundant-experts", "elastic-ep-backend")
_WITHOUT = "experts are not placed by load without enable-eplb"


def read_placement(draft: PoolDraft, launch: Launch, names: tuple[str, str, str]) -> None:
    """Read the options of `names` among those given. Raises SpecError for a value that no plan has."""
    options = {option.name: option for option in launch.given if option.name in names}
    for option in options.values():
        refuse_open(option)
    start, replicas, elastic = (options.get(name) for name in names)
    if start is None or not switch(start):
        for idle in (replicas, elastic):
            if idle is not None:
                draft.ignore(idle, _WITHOUT)
        return
    if not draft.get("parallelism.expert_parallel"):
        draft.refuse(start, "the placement of experts, of which each rank has a slice")
        return
    draft.set("parallelism.expert_replicas", 0 if replicas is None else _replicas(replicas))
    if elastic is None or str(elastic.value) in ("none", "False", "false"):
        return
    if (draft.get("parallelism.attention_dp") or 1) > 1:
        draft.set("parallelism.elastic_experts", True)
    else:
        draft.ignore(elastic, "there are no data-parallel ranks")


def _replicas(option: Given) -> int:
    """Return the number of replicas of all experts of a layer."""
    if option.name != "eplb-config":
        return whole_number(option)
    config = json_value(option)
    inner = Given(
        f"{option.name}.num_redundant_experts", config.get("num_redundant_experts", 0), option.file, option.line
    )
    return whole_number(inner)
