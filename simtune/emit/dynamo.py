"""A plan as NVIDIA Dynamo deploys it: a DynamoGraphDeployment with a frontend, and a service of workers for each pool.

Names are those of `nvidia.com/v1alpha1` as Dynamo 1.6.1 documents it (docs.nvidia.com/dynamo, kubernetes templates and
disaggregated serving): `spec.services.<Name>` with `componentType`, `subComponentType`, `replicas`, `extraPodSpec`; its
workers take `--disaggregation-mode agg|prefill|decode` and pass the options of their engine through. They are checked
against that page alone: its types need a runtime that comes with a GPU image.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from simtune.emit.dynamo_planner import left_to_planner, planner_config, planner_refusal
from simtune.emit.emitter import EngineFiles, with_unsaid
from simtune.specs import yamlfile
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool

DYNAMO_VERSION = "1.6.1"
ROUTER_MODES = {"round_robin": "round-robin", "prefix_aware": "kv"}
"""Dynamo's words for the routers that it has too."""
_DEFAULT_MODE = "round-robin"
_ROLES = {"mixed": "agg", "prefill": "prefill", "decode": "decode"}
_OWN = ("disaggregation-mode",)
"""Options of an engine that Dynamo's worker has of its own."""


def deployment_file(
    plan: Plan,
    model: Model,
    written: str,
    worker: tuple[str, str],
    settings: Callable[[Pool], Mapping[str, Any]],
    left_open: Callable[[Pool], Iterable[str]] = lambda pool: (),
) -> EngineFiles:
    """Return `engine/dynamo.yaml`, with workers (their module, their option for the model) that are given an engine's
    own `settings` of each pool; `written` states whose names these are, `left_open` lists the settings of a pool that
    the engine decides.

    The user fills in the image: a plan names none. Settings that the deployment lacks are listed at its top.
    """
    router = ROUTER_MODES.get(plan.router.kind, _DEFAULT_MODE)
    checkpoint = model.hf or model.name
    module, model_option = worker
    services = {"Frontend": _single("frontend", ["--router-mode", router, *_conditional(plan)])}
    for pool in plan.pools:
        arguments = [model_option, checkpoint, "--disaggregation-mode", _ROLES[pool.role], *_options(settings(pool))]
        if pool.role == "decode" and _conditional(plan) and module == "dynamo.vllm":
            arguments.append("--enable-conditional-disagg")
        services[service_name(pool)] = {
            "componentType": "worker",
            **({} if pool.role == "mixed" else {"subComponentType": pool.role}),
            "replicas": pool.instances + pool.spare,
            "resources": {"limits": {"gpu": str(pool.devices)}},
            "extraPodSpec": _container(["python3", "-m", module], arguments),
        }
    config = planner_config(plan, module)
    if config is not None:
        services["Planner"] = _single("planner", ["--config", json.dumps(config)])
    manifest = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": kubernetes_name(plan.name)},
        "spec": {"services": services},
    }
    comment = (
        f"Plan {plan.name} for NVIDIA Dynamo {DYNAMO_VERSION}. {written}\n"
        "Put the image of your Dynamo runtime in for IMAGE; then kubectl apply -f dynamo.yaml"
    )
    undecided = [f"pool {pool.name}: {why}" for pool in plan.pools for why in left_open(pool)]
    unsaid = [*_unsaid(plan, model), *_scaling_unsaid(plan, module), *undecided]
    return {"engine/dynamo.yaml": yamlfile.dump(manifest, with_unsaid(comment, unsaid))}


def _conditional(plan: Plan) -> list[str]:
    """Return the options by which the router leaves prompts to decode instances; it needs to know their caches."""
    rule = plan.local_prefill
    if rule is None or not rule.below_tokens or ROUTER_MODES.get(plan.router.kind) != "kv":
        return []
    share = 1.0 if rule.below_share is None else rule.below_share
    bounding = {"policy": "isl_bounding", "eff_isl_threshold": rule.below_tokens, "eff_isl_ratio_threshold": share}
    return ["--router-conditional-disagg", "--router-conditional-disagg-config", json.dumps(bounding)]


def _local_unsaid(plan: Plan) -> Iterator[str]:
    """Yield what Dynamo does otherwise with prompts that are left to decode instances."""
    rule = plan.local_prefill
    if rule is None or not rule.keeps_any:
        return
    if not _conditional(plan):
        yield "local_prefill: Dynamo's router goes by what decode instances have cached; set router to prefix_aware"
    elif rule.below_share is None:
        yield "local_prefill: Dynamo leaves no prompt to a decode instance of which nothing is cached"
    if rule.queue_above is not None:
        yield "local_prefill.queue_above: Dynamo judges the load of prefill instances by a rule of its own"


def _unsaid(plan: Plan, model: Model) -> Iterator[str]:
    """Yield the settings of the plan that Dynamo is not given, and what it does instead."""
    if plan.router.kind not in ROUTER_MODES:
        yield f"router: Dynamo has no {plan.router.kind}; requests are dealt out {_DEFAULT_MODE}"
    elif plan.router.model_fields_set - {"kind"}:
        yield "router: its options are Dynamo's own"
    if plan.link is not None and plan.link.first_token == "prefill":
        yield "link.first_token: Dynamo's front end answers from the decode instance"
    if plan.decode_router is not None:
        yield "decode_router: Dynamo chooses the decode instance by its own rule"
    if plan.links or (plan.link is not None and plan.link.model_fields_set):
        yield "link: Dynamo sends KV caches by NIXL over what there is"
    yield from _local_unsaid(plan)
    if plan.events:
        yield "events: what happens to instances is not a setting"
    if plan.control is not None:
        yield "control: instances keep their roles; Dynamo's planner scales pools by rules of its own"
    if len({pool.hardware for pool in plan.pools}) > 1:
        yield "hardware: give the pods of each pool a node selector for its GPUs"
    if model.hf is None:
        yield f"model: its spec names no `hf`; put what the workers load in for {model.name}"


def _scaling_unsaid(plan: Plan, module: str) -> Iterator[str]:
    """Yield what Dynamo's planner does otherwise than the pools' autoscaling, or why it cannot be given that."""
    why = planner_refusal(plan, module)
    if not why:
        yield from left_to_planner(plan)
    for pool in plan.pools:
        if why and pool.autoscaling is not None:
            yield f"autoscaling of pool {pool.name}: replicas stay as they are here; of Dynamo's planner: {why}"


def service_name(pool: Pool) -> str:
    """Return a pool's name as that of a service: capitalised words of letters and digits only."""
    return "".join(word[:1].upper() + word[1:] for word in re.split(r"[^A-Za-z0-9]+", pool.name)) + "Worker"


def kubernetes_name(name: str) -> str:
    """A name as Kubernetes takes it (RFC 1123): lower-case letters, digits and -, 63 of them at most."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:63].strip("-") or "plan"


def _options(settings: Mapping[str, Any]) -> Iterator[str]:
    """An engine's settings as its long options; a true one is a flag."""
    for option, value in settings.items():
        if value is None or value is False or option in _OWN:
            continue
        yield f"--{option}"
        if value is not True:
            yield str(value)


def _single(name: str, arguments: list[str]) -> dict[str, Any]:
    """Return a service of one pod that runs a module of Dynamo."""
    container = _container(["python3", "-m", f"dynamo.{name}"], arguments)
    return {"componentType": name, "replicas": 1, "extraPodSpec": container}


def _container(command: list[str], arguments: list[str]) -> dict[str, Any]:
    return {"mainContainer": {"image": "IMAGE", "command": command, "args": arguments}}
