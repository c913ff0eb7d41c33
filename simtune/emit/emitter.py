"""Base class of all emitters: the settings that an engine can be given, and the parts that emitters share."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

from simtune.emit.adapters import lora_unsaid
from simtune.errors import UsageError, suggest
from simtune.specs import yamlfile
from simtune.specs.autoscaling import Autoscaling
from simtune.specs.cache_tiers import CacheTier
from simtune.specs.catalog import load_engine, names
from simtune.specs.drafters import Drafter
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import HostTimes, Pool
from simtune.specs.schemes import Scheme
from simtune.specs.speculation import Speculation

LaunchArgs = dict[str, Any]
EngineFiles = dict[str, str]
"""Texts by file name, in a run directory."""

T = TypeVar("T")
_OF_BATCHING = {
    "long_prefill_token_threshold": "a long prompt may take a whole step here",
    "long_prefill_token_threshold_adaptive": "the threshold is the same whatever requests there are here",
    "prefill_schedule_interval": "every step may have prompts here",
    "max_num_active_seqs": "as many requests run as there are seats here",
    "max_num_queued_reqs": "any number of requests is queued here",
    "max_num_queued_tokens": "prompts of any number of tokens are queued here",
    "max_queued_requests": "any number of requests waits here",
    "scheduler_reserve_full_isl": "the engine admits by a rule of its own",
}
"""Settings of batching that not every engine has, and what engines and releases without them do."""
SCALED_BY = (
    "an engine serves one instance; set the rule where instances are started: Dynamo's planner, Kubernetes' "
    "HorizontalPodAutoscaler, llm-d's workload variant autoscaler"
)
"""Programs that are given the autoscaling of a pool, since no engine is."""
_RANKS_FIXED = "ranks are neither added nor removed on request; every instance keeps {ranks} of them"
"""Autoscaling of ranks on an engine that cannot be asked for another number."""


def simulated_only(pool: Pool) -> tuple[tuple[str, str, Any], ...]:
    """Return (key, part of an engine that would have to be changed, value) of each setting that is only simulated."""
    parallelism, studied = pool.parallelism, pool.studied
    return (
        (
            "overlap",
            "the model runner and its kernels",
            None if pool.overlap == "two_batches" else pool.overlap,
        ),
        ("parallelism.cp", "the attention backend and its communication", parallelism.cp),
        ("research.runtime", "kernels of another engine", studied.runtime),
        ("research.kv_policy", "the attention backend and the KV cache manager", studied.kv_policy),
        ("research.offload", "the weight loader and the attention backend", studied.offload),
        ("research.afd", "the model runner, on servers of two kinds", studied.afd),
        ("research.cp_ring", "the attention backend and its communication", studied.cp_ring),
        ("research.expert_locality", "the placement of experts", studied.expert_locality),
    )


def unsupported_settings(pool: Pool) -> Iterator[str]:
    """Yield the settings of a pool that are only simulated: no engine can be given them."""
    for key, _, value in simulated_only(pool):
        if value is not None:
            yield f"{key}: is simulated only; remove it to have engine settings written"


def quantised(pool: Pool, model: Model) -> bool:
    """True if a pool has weights in another dtype than their checkpoint."""
    return model.with_weights(pool.weight_dtype) is not model


def _of_preset(pool: Pool, key: str) -> HostTimes | str | None:
    """Return the host setting of the shipped preset that a pool names; None if it has none, or no preset is named."""
    setting = _shipped(pool.engine, os.environ.get("SIMTUNE_PATH", "")).get(key) if pool.engine else None
    return HostTimes.model_validate(setting) if isinstance(setting, dict) else setting


@cache
def _shipped(engine: str, path: str) -> Mapping[str, Any]:
    """Return the settings of pools of a preset by its name; empty for a path. `path` is where presets are looked for:
    a report asks for every plan that was simulated."""
    return load_engine(engine).pool if engine in names("engine") else {}


class Emitter(ABC):
    """Translates a plan into the settings of one engine.

    A class states what its engine has settings for. Any other setting is refused with the reason, never rounded in
    silence. An emitter whose engine schedules (`policies`) writes whole plans and defines `files`; another one writes
    drafting settings only.
    """

    name: ClassVar[str]
    """Name of the engine in the names of files, and in reports."""
    title: ClassVar[str]
    """Name of the engine in sentences."""
    version: str
    """Release whose option names are written."""
    options: ClassVar[Mapping[str, type]]
    """Names of the options that set speculation, and the types of their values."""
    schemes: ClassVar[Mapping[type[Scheme], Callable[[Any], LaunchArgs]]]
    """Settings of each scheme that the engine has; a chain by another name is written as a chain."""
    drafters: ClassVar[Mapping[type[Drafter], Callable[[Any, str | None], LaunchArgs]]]
    """Settings of each drafter that the engine has, given the checkpoint that it loads beside the target."""
    takes: ClassVar[str]
    """Schemes that the engine has, in words that end a refusal."""
    no_drafter: ClassVar[str] = "{title} {version} has no {drafter} drafter"
    knows: frozenset[str] = frozenset()
    """Settings of a pool that not every engine has, and this one has."""
    splits_steps: ClassVar[bool] = False
    """True if the engine can be set to run a step as two batches (`Pool.overlap`)."""
    chunk_pipelines: ClassVar[tuple[str, ...]] = ("one",)
    """Ways in which the engine can send chunks of a prompt through a pipeline (`Batching.chunk_pipeline`), the one that
    it takes unless given another first."""
    tier_ratios: ClassVar[bool] = False
    """True if the engine can be given the size of such a tier over that of the devices' cache."""
    tiers_written: ClassVar[frozenset[str]] = frozenset()
    """Rules by which the engine writes to a tier of its prefix cache in host memory (`CacheTier.written`)."""
    quantizations: ClassVar[Mapping[str, str]] = {}
    """The engine's words for dtypes to which it quantises the weights of a checkpoint as it loads them."""
    policies: ClassVar[Mapping[str, str]] = {}
    """The engine's words for the batching policies that it has."""
    own_defaults: ClassVar[tuple[str, ...]] = ("kv_cache.prefix_caching",)
    """Keys of a pool whose default differs between the engine and simtune. They are written only if `Pool.stated`: an
    engine must not lose its own default because a study does not mention a setting."""
    presets: ClassVar[frozenset[str]] = frozenset()
    """Presets of an engine whose policy another engine has too: their plans are its own."""

    def of(self, engine: str | None) -> Self:
        """Return the same engine, of the release of a preset, by name or file; of the newest if none is named. Raises
        UsageError if there is no such preset.
        """
        return self

    def meant_by(self, pool: Pool) -> bool:
        """True if a pool is of this engine rather than of another one that has its policy."""
        return pool.engine in self.presets

    def schedules(self, pool: Pool) -> bool:
        """True if the engine has the batching policy of a pool, and preempts as it does."""
        return False

    def files(
        self, plan: Plan, model: Model, devices_per_node: int = 8, draft_models: Mapping[str, Model] | None = None
    ) -> EngineFiles:
        """Return all files with which the engine is started for a plan that it schedules. `draft_models` are the models
        that draft, by the names in the plan. Raises UsageError, with every reason, if the engine would refuse the plan.
        """
        raise UsageError(f"{self.title}: only speculative-decoding settings can be emitted")

    def takes_stages(self, plan: Plan) -> bool:
        """Return True if the engine has servers for what requests go through before or beside it."""
        return not plan.stages

    def server_files(
        self, plan: Plan, model: Model, devices_per_node: int = 8, draft_models: Mapping[str, Model] | None = None
    ) -> EngineFiles:
        """Return those of `files` that its commands are made of. A report has them for every plan that was simulated:
        an engine may leave out files that are not asked for."""
        return self.files(plan, model, devices_per_node, draft_models)

    def refusals(self, pool: Pool, model: Model, draft_models: Mapping[str, Model]) -> Iterator[str]:
        """Yield, key by key, the settings of a pool with which the engine would not start, or that are not written
        here.
        """
        yield from unsupported_settings(pool)
        if pool.encoder is not None and self.name != "vllm":
            yield f"encoder: {self.title} is given no encoder settings here; remove it"
        if pool.cascade_attention and self.name != "vllm":
            yield f"cascade_attention: {self.title} has none; remove it"
        if pool.lora is not None and "lora" not in self.knows:
            yield f"lora: {self.title} is not set to serve adapters here; remove it to have engine settings written"
        if pool.overlap == "two_batches" and not self.splits_steps:
            yield f"overlap: {self.title} is not set to run two batches here; remove it to have engine settings written"
        yield from self._ranks_refused(pool)
        yield from self._shares_refused(pool)
        if quantised(pool, model) and pool.weight_dtype not in self.quantizations:
            has = f"it has one for {' and '.join(self.quantizations)}; " if self.quantizations else ""
            yield (
                f"weight_dtype: {self.title} has no setting that quantises weights to {pool.weight_dtype}; {has}remove "
                "it, or name a checkpoint with such weights as model"
            )

    def _ranks_refused(self, pool: Pool) -> Iterator[str]:
        for key, ranks in (
            ("decode_context_parallel", pool.parallelism.decode_ranks),
            ("prefill_context_parallel", pool.parallelism.prompt_groups),
        ):
            if ranks > 1 and f"{key}_size" not in self.knows:
                yield f"parallelism.{key}: {self.title} {self.version} has none; leave it out"
        if pool.parallelism.expert_replicas is not None and "enable_eplb" not in self.knows:
            yield (
                f"parallelism.expert_replicas: {self.title} {self.version} is not set to place experts by load here; "
                "remove it to have engine settings written"
            )

    def _shares_refused(self, pool: Pool) -> Iterator[str]:
        if pool.share is not None and "share" not in self.knows:
            yield f"share: {self.title} has no setting for shares of a GPU; remove it, or split GPUs by CUDA MPS"

    def quantization(self, pool: Pool, model: Model) -> str | None:
        """Return the engine's word for the format to which it quantises weights, None if they stay as in the
        checkpoint.
        """
        return self.quantizations[str(pool.weight_dtype)] if quantised(pool, model) else None

    def host_tier(self, pool: Pool) -> CacheTier | None:
        """Return the tier that the engine can be given as its part of the host's memory; None if the plan has none."""
        for tier in (pool.kv_cache.tiers or ())[:1]:
            sized = tier.size(pool.model_devices) or (tier.device_ratio and self.tier_ratios)
            if sized and not tier.shared and tier.written in self.tiers_written:
                return tier
        return None

    def unsaid(self, pool: Pool) -> Iterator[str]:
        """Yield, key by key, the settings of a pool that the engine cannot be given, with what it does instead."""
        batching, cache = pool.batching, pool.kv_cache
        yield from self.left_open(pool)
        if cache.watermark and "watermark" not in self.knows:
            yield f"kv_cache.watermark: {cache.watermark:g} of the blocks stay free in the plan, and not here"
        if (chunks := self.chunks_unsaid(pool)) is not None:
            yield f"batching.chunk_pipeline: {chunks}"
        for key, words in _OF_BATCHING.items():
            if getattr(batching, key) is not None and key not in self.knows:
                yield f"batching.{key}: {words}"
        if pool.message_tokens > 1 and "stream_interval" not in self.knows:
            yield "stream_interval: every token is sent on its own here"
        if batching.safety_margin is not None:
            yield "batching.safety_margin: the engine admits by a rule of its own"
        if pool.kv_cache.other_memory_gib is not None:
            yield "kv_cache.other_memory_gib: the engine measures what else takes memory"
        if "lora_targets" not in self.knows:
            yield from lora_unsaid(pool)
        yield from self._parts_unsaid(pool)
        if pool.autoscaling is not None:
            yield f"autoscaling: {self._scaled_by(pool, pool.autoscaling)}"
        for key in ("host", "exposed_host"):
            if getattr(pool, key) not in (None, _of_preset(pool, key)):
                yield f"{key}: its times are the engine's own"

    def _scaled_by(self, pool: Pool, scaling: Autoscaling) -> str:
        """Return which program would have to add and remove the instances of a pool, or their ranks."""
        return _RANKS_FIXED.format(ranks=pool.parallelism.attention_dp) if scaling.scales_ranks else SCALED_BY

    def chunks_unsaid(self, pool: Pool) -> str | None:
        """Return how the engine sends chunks of a prompt through a pipeline, if it cannot be given the plan's way."""
        setting = pool.batching.chunk_pipeline
        if setting is None or pool.parallelism.pp == 1 or setting in self.chunk_pipelines:
            return None
        ways = {
            "one": "one chunk of a prompt is in the pipeline at a time",
            "fixed": "chunks of a prompt follow one another",
        }
        return f"{ways[self.chunk_pipelines[0]]} here"

    def _parts_unsaid(self, pool: Pool) -> Iterator[str]:
        for key in ("cache_size", "max_batched_embeds"):
            if getattr(pool.encoder, key, None) is not None:
                yield f"encoder.{key}: as many embeddings as max_num_batched_tokens here"
        host = self.host_tier(pool)
        for tier in pool.kv_cache.tiers or ():
            if tier is not host:
                yield f"kv_cache.tiers: {tier.name} is not set here; the engine keeps nothing in it"

    def left_open(self, pool: Pool) -> Iterator[str]:
        """Name each of `own_defaults` that is left to the engine, with the value that the simulation took."""
        for key in self.own_defaults:
            if pool.stated(key) is None:
                part, name = key.split(".")
                value = getattr(getattr(pool, part), name)
                words = {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value:g}"
                yield f"{key}: neither plan nor study sets it, so the engine's default applies; simulated: {words}"

    def speculation(self, speculation: Speculation, draft: Model | None = None) -> LaunchArgs:
        """Return the engine's settings of speculation. `draft` is the model that a draft model names.

        Raises UsageError if the engine cannot be given them.
        """
        drafter, scheme = speculation.drafter, speculation.scheme.as_chain() or speculation.scheme
        of_scheme, of_drafter = _of_class(self.schemes, scheme), _of_class(self.drafters, drafter)
        if of_scheme is None:
            why = self.takes if scheme.shape.in_turn else "it drafts and verifies in turn; take a chain"
            raise self._refused(scheme, why)
        if of_drafter is None:
            raise UsageError(self.no_drafter.format(title=self.title, version=self.version, drafter=drafter.kind))
        if why_not := self.refuses_together(drafter, scheme):
            raise self._refused(scheme, why_not)
        settings = {**of_drafter(drafter, self._checkpoint(drafter, draft)), **of_scheme(scheme)}
        assert not self.problems(settings), self.problems(settings)
        return settings

    def refuses_together(self, drafter: Drafter, scheme: Scheme) -> str:
        """Return why the engine cannot draft by a scheme with a drafter that it has; empty if it can."""
        return ""

    def problems(self, settings: LaunchArgs) -> list[str]:
        """Return what is wrong with the names and types of speculation settings: nothing for settings that are written
        here.
        """
        problems = []
        for option, value in settings.items():
            if option not in self.options:
                problems.append(f"{self.name} {self.version} has no {option}{suggest(option, self.options)}")
            elif not isinstance(value, self.options[option]) or (
                self.options[option] is int and isinstance(value, bool)
            ):
                problems.append(f"{self.name} {self.version}: {option} cannot be {value!r}")
        return problems

    def drafting_file(self, settings: LaunchArgs, what: str) -> EngineFiles:
        """Return speculation settings as a file that the engine reads, with `what` they are at its top."""
        comment = f"{what}\nWritten by simtune with the names of {self.name} {self.version}."
        return {f"engine/{self.name}-speculation.yaml": yamlfile.dump(settings, comment)}

    def _checkpoint(self, drafter: Drafter, draft: Model | None) -> str | None:
        """Return the checkpoint that the engine loads beside the target, None if it loads none."""
        if drafter.own_model is not None:
            if draft is None or draft.hf is None:
                why = f"its spec names no `hf`, which {self.title} would load"
                raise UsageError(f"draft model {drafter.own_model}: {why}")
            return draft.hf
        if not drafter.loads_checkpoint:
            return None
        if drafter.weights is None:
            raise UsageError(f"drafter {drafter.label}: name the `checkpoint` that {self.title} loads")
        return drafter.weights

    def _refused(self, scheme: Scheme, why: str) -> UsageError:
        return UsageError(f"{self.title} has no setting for a {scheme.kind} scheme: {why}")


def _of_class(table: Mapping[type, T], value: object) -> T | None:
    """The entry of an object's class, or of the nearest class it derives from."""
    return next((table[c] for c in type(value).__mro__ if c in table), None)


def loaded(key: str, checkpoint: str | None) -> LaunchArgs:
    """The setting that names what is loaded, if anything is."""
    return {} if checkpoint is None else {key: checkpoint}


def written_by(*emitters: Emitter) -> str:
    """Return a sentence for a file's comment: the release whose option names are written."""
    versions = sorted({emitter.version for emitter in emitters})
    return f"Written by simtune with the option names of {emitters[0].title} {' and '.join(versions)}."


def with_unsaid(comment: str, unsaid: Iterable[str]) -> str:
    """Return a file's comment that lists the settings of the plan that are not in the file."""
    return "\n".join([comment, *(f"Not said here: {reason}." for reason in unsaid)])
