"""Whole plans for engines that serve one pool of equal instances each: settings files and a script."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from simtune.emit.emitter import Emitter, EngineFiles, LaunchArgs, with_unsaid, written_by
from simtune.emit.launch import Server, launch_script
from simtune.emit.option import Option
from simtune.errors import UsageError
from simtune.specs import yamlfile
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool


class ServingEmitter(Emitter):
    """An engine that is started with one file of settings per pool."""

    server: ClassVar[Server]
    serving_options: ClassVar[Mapping[str, Option]]
    """The options that settings are written under, in that order."""
    kv_dtypes: ClassVar[Mapping[str, str]]
    """The engine's words for dtypes of the KV cache that are not the model's own."""

    def schedules(self, pool: Pool) -> bool:
        """True for the engine's own policies with preemption by recompute."""
        return pool.batching.policy in self.policies and pool.kv_cache.preemption != "swap"

    def files(
        self, plan: Plan, model: Model, devices_per_node: int = 8, draft_models: Mapping[str, Model] | None = None
    ) -> EngineFiles:
        """`engine/<engine>-<pool>.yaml` for each pool, and `engine/launch.sh`. See `Emitter.files`."""
        drafts, of = draft_models or {}, {pool.name: self.of(pool.engine) for pool in plan.pools}
        problems = [
            f"{plan.name}: pool {pool.name}: {why}" for pool in plan.pools for why in self.refusals(pool, model, drafts)
        ]
        if problems:
            raise UsageError("\n".join(problems))
        written = written_by(*of.values())
        files = {}
        for pool in plan.pools:
            settings = {**of[pool.name].serving(pool, model), **self.drafting(pool, drafts)}
            assert not (wrong := self.misnamed(settings)), wrong
            comment = with_unsaid(f"Plan {plan.name}, pool {pool.name}. {written_by(of[pool.name])}", self.unsaid(pool))
            files[f"engine/{self.server.settings_file(pool)}"] = yamlfile.dump(settings, comment)
        files["engine/launch.sh"] = launch_script(plan, model, devices_per_node, written, self.server)
        if plan.pools[0].role != "mixed" and all(p.model_devices <= devices_per_node for p in plan.pools):
            files |= self.router_files(plan, devices_per_node, written)
        return files

    @abstractmethod
    def router_files(self, plan: Plan, devices_per_node: int, names: str) -> EngineFiles:
        """Return the files of a router that sends prompts to prefill and their results to decode instances."""

    @abstractmethod
    def serving(self, pool: Pool, model: Model) -> LaunchArgs:
        """Return all settings but those of drafts, in the engine's words; None is the engine's word for no value."""

    def drafting(self, pool: Pool, draft_models: Mapping[str, Model]) -> LaunchArgs:
        """Return the settings of a pool's drafts; none if it has none. Raises UsageError if the engine cannot be given
        them.
        """
        if pool.speculation is None:
            return {}
        return self.speculation(pool.speculation, draft_models.get(pool.speculation.drafter.own_model or ""))

    def refusals(self, pool: Pool, model: Model, draft_models: Mapping[str, Model]) -> Iterator[str]:
        """See `Emitter.refusals`."""
        yield from super().refusals(pool, model, draft_models)
        if pool.batching.policy not in self.policies:
            yield f"batching.policy: {self.title} has no {pool.batching.policy}; it has {', '.join(self.policies)}"
        if pool.kv_cache.preemption == "swap":
            yield f"kv_cache.preemption: {self.title} recomputes preempted requests; set preemption to recompute"
        if self.kv_dtype(pool, model) is None:
            yield f"kv_cache.dtype: {self.title} has no setting for a {pool.kv_cache.dtype} cache for {model.name}"
        if pool.speculation is not None:
            try:
                self.speculation(pool.speculation)
            except UsageError as error:
                if pool.speculation.drafter.own_model is None:
                    yield f"speculation: {error}"

    def kv_dtype(self, pool: Pool, model: Model) -> str | None:
        """Return the engine's word for the dtype of the KV cache, None if it has none."""
        dtype = pool.kv_cache.dtype
        if dtype is None or dtype == (model.kv_dtype or model.dtype):
            return "auto"
        return self.kv_dtypes.get(dtype)

    def misnamed(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the settings whose name or type is wrong: none of those that are written here."""
        option_types = {**{name: option.type for name, option in self.serving_options.items()}, **self.options}
        stated = {name: value for name, value in settings.items() if value is not None}
        return [name for name, value in stated.items() if not isinstance(value, option_types.get(name, ()))]


def own_options(pool: Pool) -> LaunchArgs:
    """Return the settings that the plan gives only to its policy."""
    return dict(pool.batching.options or {})
