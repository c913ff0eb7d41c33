"""Prefill and decode pools on the same GPUs as SGLang runs them: one server whose prompts and decodes are on streams
with processors of their own (`--enable-pdmux`).

Options, and the file of the division, are those of sgl-project/sglang, python/sglang/srt/multiplex/pdmux_context.py and
arg_groups/validation_hook.py: pp 1, no chunked prefill, no overlap schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from simtune.emit.emitter import EngineFiles, LaunchArgs
from simtune.emit.encoder_servers import encoder_files, encoder_stage
from simtune.emit.releases import ReleaseNumber
from simtune.emit.serving import ServingEmitter
from simtune.emit.sglang import NEWEST, Sglang
from simtune.errors import UsageError
from simtune.specs import yamlfile
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Device
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool

CONFIG = "pdmux.yaml"
"""Name of the file of the division, beside the script."""
GROUPS = 3
"""Groups of streams: all processors for prompts, the division, all processors for decodes."""
_CHUNKS = "max-prefill-tokens"
_DIGITS = 4


class Division(NamedTuple):
    """Processors of the streams of a device."""

    prefill: int
    decode: int

    @classmethod
    def of(cls, device: Device, prefill: float, decode: float) -> Division:
        """Return the division nearest to shares of the processors, in parts that a device can be divided into."""
        least, multiple = parts_of(device)
        most = device.processors
        first = round(prefill * most / multiple) * multiple
        first = min(max(first, least), (most - least) // multiple * multiple)
        return cls(first, min(most - first, max(least, round(decode * most))))

    def shares(self, device: Device) -> tuple[float, float]:
        """Return the shares of the processors, which add up to no more than 1."""
        prefill = round(self.prefill / device.processors, _DIGITS)
        remainder = round(1 - prefill, _DIGITS)
        return prefill, min(round(self.decode / device.processors, _DIGITS), remainder)


def parts_of(device: Device) -> tuple[int, int]:
    """Return the fewest processors of a stream, and what their number is a multiple of, by the compute capability:
    those of SGLang's `get_arch_constraints`, for newer devices those of Hopper."""
    match = re.fullmatch(r"sm_(\d+)\d[a-z]?", device.architecture or "")
    return {6: (1, 1), 7: (2, 2), 8: (4, 2)}.get(int(match[1]) if match else 9, (8, 8))


class MultiplexedSglang(Sglang):
    """SGLang with prompts and decodes on streams of their own."""

    server = Sglang.server._replace(
        command=f'{Sglang.server.command} \\\n        --pdmux-config-path "$here/{CONFIG}"',
    )

    def __init__(self, release: ReleaseNumber = NEWEST, plan: Plan | None = None) -> None:
        super().__init__(release)
        self._plan = plan

    def of(self, engine: str | None) -> MultiplexedSglang:
        """See `Emitter.of`."""
        release = super().of(engine)._release
        return MultiplexedSglang(release, self._plan)

    def serving(self, pool: Pool, model: Model) -> LaunchArgs:
        """See `ServingEmitter.serving`."""
        return {**super().serving(pool, model), "enable-pdmux": True, "sm-group-num": GROUPS}

    def unsaid(self, pool: Pool) -> Iterator[str]:
        """See `Emitter.unsaid`; and how streams differ from pools that keep their shares."""
        yield from super().unsaid(pool)
        assert self._plan is not None
        prefill, decode = of_roles(self._plan)
        yield "share: a stream has all processors while the other one is idle here"
        yield "share.bandwidth, share.kv_cache: both streams have all of the bandwidth and of one KV cache here"
        if prefill.batching.max_num_seqs != decode.batching.max_num_seqs:
            yield f"batching.max_num_seqs: {decode.batching.max_num_seqs} requests in all, prompts among them"
        division, device = division_of(self._plan), load_hardware(decode.hardware).device
        stated = tuple(round(pool.share.processors, _DIGITS) for pool in (prefill, decode) if pool.share is not None)
        if division.shares(device) != stated:
            yield (
                f"share.processors: {division.prefill} and {division.decode} of {device.processors} here, the nearest "
                f"to {stated[0]:g} and {stated[1]:g} into which the device can be divided"
            )


class SglangServers(Sglang):
    """SGLang, also for prefill and decode pools on the same GPUs, and with encoders on servers of their own."""

    knows = Sglang.knows | {"share"}

    def takes_stages(self, plan: Plan) -> bool:
        """See `Emitter.takes_stages`."""
        return not plan.stages or encoder_stage(plan) is not None

    def files(
        self, plan: Plan, model: Model, devices_per_node: int = 8, draft_models: Mapping[str, Model] | None = None
    ) -> EngineFiles:
        """See `Sglang.files`."""
        if any(pool.share is not None for pool in plan.pools):
            return _shared_files(plan, model, devices_per_node, draft_models)
        if plan.stages:
            return encoder_files(plan, model, devices_per_node, draft_models)
        return super().files(plan, model, devices_per_node, draft_models)


def of_roles(plan: Plan) -> tuple[Pool, Pool]:
    """Return the prefill and the decode pool of a plan."""
    prefill = next(pool for pool in plan.pools if pool.role == "prefill")
    return prefill, next(pool for pool in plan.pools if pool.role == "decode")


def division_of(plan: Plan) -> Division:
    """Return the processors of the streams of a plan."""
    prefill, decode = of_roles(plan)
    assert prefill.share is not None
    assert decode.share is not None
    device = load_hardware(decode.hardware).device
    return Division.of(device, prefill.share.processors, decode.share.processors)


def refusals(plan: Plan) -> Iterator[str]:
    """Yield why SGLang would not run the pools of a plan on streams of one server."""
    if [pool.role for pool in plan.pools].count("mixed") or len(plan.pools) != 2:
        yield f"{plan.name}: share: SGLang divides GPUs between one prefill and one decode pool"
        return
    for pool in plan.pools:
        yield from (f"{plan.name}: pool {pool.name}: {why}" for why in _of_pool(pool))


def _of_pool(pool: Pool) -> Iterator[str]:
    if pool.share is None or pool.share.kv_cache is None:
        yield "share.kv_cache: SGLang's streams are of one process; give both pools a share of its KV cache"
    if pool.parallelism.pp > 1:
        yield "parallelism.pp: SGLang divides processors with pp 1 only; set it to 1"
    if pool.batching.chunked_prefill:
        yield "batching.chunked_prefill: SGLang divides processors without chunks only; set it to false"
    if pool.async_scheduling:
        yield "async_scheduling: SGLang divides processors without its overlap schedule only; set it to false"
    for key in ("speculation", "lora"):
        if getattr(pool, key) is not None:
            yield f"{key}: SGLang is not given it with divided processors here; remove it, or share"


def _shared_files(
    plan: Plan, model: Model, devices_per_node: int, draft_models: Mapping[str, Model] | None
) -> EngineFiles:
    """Return the files with which SGLang runs prefill and decode pools on the same GPUs. Raises UsageError, with every
    reason, if it would refuse them."""
    if problems := [*refusals(plan)]:
        raise UsageError("\n".join(problems))
    prefill, decode = of_roles(plan)
    batching = decode.batching.model_copy(update={"max_num_batched_tokens": prefill.batching.max_num_batched_tokens})
    pool = decode.model_copy(update={"name": "pdmux", "role": "mixed", "share": None, "batching": batching})
    server = plan.model_copy(update={"pools": (pool,), "link": None, "decode_router": None})
    emitter = MultiplexedSglang(plan=plan).of(decode.engine)
    files = ServingEmitter.files(emitter, server, model, devices_per_node, draft_models)
    division = {"sm_group_num": GROUPS, "manual_divisions": [[*division_of(plan), 0]]}
    comment = f"Plan {plan.name}. [processors for prompts, for decodes, decodes from which on] (PD multiplexing)"
    return files | {f"engine/{CONFIG}": yamlfile.dump(division, comment)}
