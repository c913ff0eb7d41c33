"""A commented study from six answers."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from simtune.errors import UsageError
from simtune.specs.catalog import load_engine, load_hardware, load_model, load_workload, names
from simtune.specs.hardware import Hardware
from simtune.specs.preset import DEFAULT_ENGINE
from simtune.specs.references import beside
from simtune.specs.study import ObjectiveName

OBJECTIVES: tuple[str, ...] = get_args(ObjectiveName)
_SEVERAL_SERVERS = ("vllm", "sglang", "trtllm")
"""Families of engines that hand KV caches from one server to another and place whole experts on ranks."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers that make a study: model, hardware and number of devices, engine release, load, SLO limits."""

    model: str
    hardware: str
    devices: int
    workload: str
    ttft_p99_s: float
    tpot_p99_s: float
    objective: str = "goodput_per_gpu"
    name: str = "study"
    engine: str = DEFAULT_ENGINE
    confidence: float | None = None
    """Share of worlds that have to keep the limits; None: they are kept as predicted."""


_LAYOUTS = """\
  # One pool of instances that prefill and decode, or pools of either kind.
  layouts: [mixed, prefill-decode]
"""
_LINK = """\
# KV caches go from prefill to decode pools within one node: the profile has no link between nodes.
link: {path: intra_node}
"""
_ATTENTION_DP = """\
  # Attention on every rank for requests of its own, beside experts that all ranks share.
  attention_dp: [1, {most}]
"""
_EXPERTS = """\
  # Every rank with a slice of every expert, or with whole experts.
  expert_parallel: [false, true]
"""


def study_text(answers: Answers, folder: Path) -> str:
    """A study's file in a folder, to which its paths become relative; in the answers they are from here.

    Raises UsageError or SpecError if a name leads nowhere.
    """
    has_experts = any(group.feed_forward.kind == "moe" for group in load_model(answers.model).layers)
    preset = load_engine(answers.engine)
    hardware = load_hardware(answers.hardware)
    device = hardware.device
    workload, _ = load_workload(answers.workload)
    if answers.devices < 1:
        raise UsageError(f"at least one device is needed, not {answers.devices}")
    most = min(answers.devices, device.devices_per_node)
    tp = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    layouts = experts = link = ""
    if preset.family in _SEVERAL_SERVERS and answers.devices > 1:
        layouts, link = _LAYOUTS, _link(hardware, answers.devices)
        experts = _EXPERTS + _ATTENTION_DP.format(most=tp[-1]) if has_experts else ""
    confidence = (
        "  # confidence: 0.9  # the share of worlds, in which the profile is off, that have to keep them\n"
        if answers.confidence is None
        else f"  # The share of worlds, in which the profile is off, that have to keep them.\n"
        f"  confidence: {answers.confidence:g}\n"
    )
    price = f", {device.price_per_hour_usd:g} USD an hour each" if device.price_per_hour_usd else ""
    return f"""\
# simtune optimize THIS_FILE --out runs/{answers.name}
schema: simtune/study@1
name: {answers.name}
# A name of `simtune list model`, a spec, or a Hugging Face config.json.
model: {_from(folder, answers.model)}
# {device.name}{price}; the search uses at most `devices` of them.
hardware: {{profile: {_from(folder, answers.hardware)}, devices: {answers.devices}}}
# {preset.release}: the settings that the search leaves open are as this release sets them, and the files that start it
# are in its words. `simtune list engines` has others; name the one that you run (`vllm --version`).
engine: {_from(folder, answers.engine)}
# {workload.source or workload.name}
workload: {_from(folder, answers.workload)}
# Limits in seconds: 99 of 100 requests have their first token, and each token after it, within them.
slo:
  ttft_s: {{p99: {answers.ttft_p99_s:g}}}
  tpot_s: {{p99: {answers.tpot_p99_s:g}}}
{confidence}# goodput_per_gpu, goodput and goodput_per_dollar look for the highest rate within the limits; gpus,
# usd_per_million_tokens and e2el take the load's own rate: gpus finds how many GPUs the load needs.
objective: {answers.objective}
{link}search:
{layouts}  tp: [{", ".join(map(str, tp))}]
{experts}  max_num_seqs: [64, 128, 256, 512]
  max_num_batched_tokens: [1024, 2048, 4096, 8192]
"""


def _link(hardware: Hardware, devices: int) -> str:
    """Return the link between prefill and decode pools, if the profile has none between nodes and one node has all
    GPUs."""
    in_one_node = devices <= hardware.device.devices_per_node and "intra_node" in hardware.links
    return _LINK if in_one_node and "inter_node" not in hardware.links else ""


def _from(folder: Path, reference: str) -> str:
    """A path as it is from the folder, and kept a path; a name as it is."""
    # A name, or a model by its id: no path that could become relative.
    if beside(folder / "below", reference) == reference:
        return reference
    relative = os.path.relpath(reference, folder)
    return relative if os.sep in relative else f"./{relative}"


def profile_of(driver_name: str) -> str | None:
    """Return the built-in profile of a card by the name that its driver gives it, `NVIDIA H100 80GB HBM3`; None if no
    profile is of that card. A card of another form or memory (PCIe, NVL, Ada, Laptop, 40GB) is another card.
    """
    card_words = _words(driver_name) - _SAY_NOTHING
    models = {word for word in card_words if any(map(str.isdigit, word))}
    for name in names("hardware"):
        if models & _words(name) and card_words <= _words(name) | _words(load_hardware(name).device.name):
            return name
    return None


_SAY_NOTHING = {"nvidia", "geforce", "hbm2", "hbm2e", "hbm3", "hbm3e"}
"""Words in a driver's name of a card that are no other card's."""


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
