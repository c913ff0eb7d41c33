"""Settings for engines: files for those that can run a plan, and what of a schedule for drafts each can be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simtune.emit import speculation, vllm
from simtune.errors import UsageError
from simtune.runs.files import Files
from simtune.sim.deployment import Deployment
from simtune.specs import yamlfile
from simtune.specs.model import Model
from simtune.specs.speculation import DraftModel, Speculation
from simtune.tuner.drafting import Draft, described, in_words
from simtune.tuner.speculation import Schedule

MAX_NODES = 64
"""Tokens of the largest draft tree that is tried for the report."""

_TREE_ENGINES = {"sglang": speculation.sglang, "tensorrt-llm": speculation.tensorrt_llm}


def speculation_facts(draft: Draft, found: Schedule) -> dict[str, Any]:
    """A schedule for drafts in plain data, with what of it every engine can be told."""
    trees = [(name, settings_of, found.dynamic_tree()) for name, settings_of in _TREE_ENGINES.items()]
    engines = []
    for name, settings_of, projection in [("vllm", speculation.vllm, found.by_batch()), *trees]:
        settings, why = None, "drafting pays nowhere"
        if projection.scheme is not None:
            settings, why = _settings(settings_of, draft.speculation(projection.scheme), draft.drafting.model)
        engines.append(
            {
                "engine": name,
                "scheme": in_words(projection.scheme),
                "gain": projection.gain,
                "loss": projection.loss,
                "settings": settings,
                "why": why,
            }
        )
    return {**described(draft, found), "engines": engines}


def _settings(
    settings_of: Callable[[Speculation, Model | None], dict[str, Any]], wanted: Speculation, model: Model | None
) -> tuple[dict[str, Any] | None, str]:
    """An engine's settings, or None and why there are none."""
    try:
        return settings_of(wanted, model), ""
    except UsageError as error:
        return None, str(error)


def other_engines(facts: dict[str, Any]) -> Files:
    """The best single draft for engines that take a tree."""
    files: Files = {}
    for told in facts["engines"]:
        if told["engine"] in _TREE_ENGINES and told["settings"] is not None:
            what = (
                f"{told['scheme'].capitalize()}: the best single draft for this load by the cost model, not simulated."
            )
            files |= _drafting_file(told["engine"], told["settings"], what)
    return files


def _drafting_file(engine: str, settings: dict[str, Any], what: str) -> Files:
    """SGLang reads its options from a file as they are, TensorRT-LLM those of speculation under a key."""
    comment = f"{what}\nWritten by simtune with the names of {engine} {speculation.VERSIONS[engine]}."
    data = {"speculative_config": settings} if engine == "tensorrt-llm" else settings
    return {f"engine/{engine}-speculation.yaml": yamlfile.dump(data, comment)}


def engine_files(deployment: Deployment) -> Files:
    """Settings for vLLM; none where a policy is not its own, or it cannot draft or swap as the plan does.

    Then those of the engines that can, as far as drafting goes.
    """
    for pool in deployment.pools:
        if pool.spec.batching.policy not in vllm.SCHEDULING_POLICY or pool.spec.kv_cache.preemption == "swap":
            return {}
    drafting = [(p.spec.speculation, p.drafting.model) for p in deployment.pools if p.spec.speculation and p.drafting]
    if not all(_settings(speculation.vllm, *each)[0] for each in drafting):
        files: Files = {}
        for name, settings_of in _TREE_ENGINES.items():
            settings, _ = _settings(settings_of, *drafting[0])
            if settings is not None:
                files |= _drafting_file(name, settings, "The drafts of the plan, which vLLM cannot be told.")
        return files
    models = {s.drafter.model: model for s, model in drafting if isinstance(s.drafter, DraftModel) and model}
    return {**vllm.emit(deployment.plan, deployment.model, deployment.hardware.device.devices_per_node, models)}
