"""A plan as vLLM reads it: one settings file per pool, and a script that starts every instance."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from simtune.emit import speculation
from simtune.errors import UsageError
from simtune.specs import yamlfile
from simtune.specs.model import Model
from simtune.specs.plan import Plan, Pool
from simtune.specs.speculation import ByBatch, DraftModel

VLLM_VERSION = "0.32.0"

OPTIONS: dict[str, type] = {
    "tensor-parallel-size": int,
    "pipeline-parallel-size": int,
    "data-parallel-size": int,
    "enable-expert-parallel": bool,
    "max-num-seqs": int,
    "max-num-batched-tokens": int,
    "max-model-len": int,
    "gpu-memory-utilization": float,
    "num-gpu-blocks-override": int,
    "block-size": int,
    "kv-cache-dtype": str,
    "scheduling-policy": str,
    "enable-chunked-prefill": bool,
    "enable-prefix-caching": bool,
    "async-scheduling": bool,
    "enforce-eager": bool,
    "watermark": float,
    "kv-transfer-config": str,
    "speculative-config": str,
}
"""The long options of `vllm serve` that are written here, and the type of their value.

Named as in the argument parser of that version. A bool has a twin `no-<option>`.
"""

_WRITTEN = f"Written by simtune with the option names of vLLM {VLLM_VERSION}."
SCHEDULING_POLICY = {"vllm-fcfs": "fcfs", "vllm-priority": "priority"}
_NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
"""How prefill and decode instances send KV caches to one another: NIXL, in both roles."""


def emit(
    plan: Plan, model: Model, devices_per_node: int = 8, draft_models: Mapping[str, Model] | None = None
) -> dict[str, str]:
    """Text by file name: `engine/vllm-<pool>.yaml` for each pool, and `engine/launch.sh`.

    A pool's file is used as `vllm serve MODEL --config FILE`. `draft_models` are those that draft, by the names the
    plan gives. Raises UsageError, with every reason, when vLLM would refuse the plan.
    """
    drafts = draft_models or {}
    problems = [f"{plan.name}: pool {p.name}: {why}" for p in plan.pools for why in _refusals(p, model, drafts)]
    if problems:
        raise UsageError("\n".join(problems))
    files = {f"engine/{_file(p)}": _settings_text(plan, p, model, drafts) for p in plan.pools}
    files["engine/launch.sh"] = _launch_script(plan, model, devices_per_node)
    return files


def _file(pool: Pool) -> str:
    return f"vllm-{pool.name}.yaml"


def _kv_cache_dtype(pool: Pool, model: Model) -> str | None:
    """vLLM's word for the dtype of the KV cache, None where it has none."""
    dtype = pool.kv_cache.dtype
    if dtype is None or dtype == model.dtype:
        return "auto"
    return dtype if dtype == "fp8" else None


def _max_model_len(pool: Pool, model: Model) -> int:
    return model.max_position if pool.max_model_len is None else pool.max_model_len


def _speculative_config(pool: Pool, drafts: Mapping[str, Model]) -> str | None:
    """Raises UsageError where vLLM cannot be told."""
    if pool.speculation is None:
        return None
    drafter = pool.speculation.drafter
    draft = drafts.get(drafter.model) if isinstance(drafter, DraftModel) else None
    return json.dumps(speculation.vllm(pool.speculation, draft))


def _refusals(pool: Pool, model: Model, drafts: Mapping[str, Model]) -> list[str]:
    """What vLLM would not start with, in its own terms."""
    found = []
    try:
        _speculative_config(pool, drafts)
    except UsageError as error:
        found.append(f"speculation: {error}")
    batching, tp, pp = pool.batching, pool.parallelism.tp, pool.parallelism.pp
    if pool.speculation is not None:
        drafter = pool.speculation.drafter
        if isinstance(drafter, DraftModel) and drafter.tp not in (None, 1, tp):
            found.append(f"speculation.drafter.tp: vLLM drafts on 1 GPU or on the target's {tp}, not on {drafter.tp}")
        if isinstance(pool.speculation.scheme, ByBatch) and pool.parallelism.attention_dp > 1:
            found.append(
                "speculation.scheme: with attention_dp vLLM drops draft lengths by batch size, "
                "because its ranks would draft unequal lengths; take a chain"
            )
    if pool.batching.policy not in SCHEDULING_POLICY:
        found.append(f"batching.policy: vLLM has no {pool.batching.policy}; it has {', '.join(SCHEDULING_POLICY)}")
    if pool.kv_cache.preemption == "swap":
        found.append("kv_cache.preemption: vLLM V1 recomputes what it preempts; it cannot swap")
    if _kv_cache_dtype(pool, model) is None:
        found.append(
            f"kv_cache.dtype: vLLM cannot keep a {pool.kv_cache.dtype} cache for a {model.dtype} model; "
            f"leave it out ({model.dtype}) or use fp8"
        )
    if batching.max_num_batched_tokens < batching.max_num_seqs:
        found.append(
            f"batching: vLLM wants max_num_batched_tokens ({batching.max_num_batched_tokens}) "
            f"to be at least max_num_seqs ({batching.max_num_seqs})"
        )
    if not batching.chunked_prefill and batching.max_num_batched_tokens < _max_model_len(pool, model):
        found.append(
            f"batching: without chunked_prefill vLLM wants max_num_batched_tokens "
            f"({batching.max_num_batched_tokens}) to be at least max_model_len "
            f"({_max_model_len(pool, model)})"
        )
    for heads in sorted({group.attention.heads for group in model.layers}):
        if heads % tp:
            found.append(f"parallelism.tp: {tp} does not divide the {heads} attention heads of {model.name}")
    if pp > model.num_layers:
        found.append(f"parallelism.pp: {pp} stages for the {model.num_layers} layers of {model.name}")
    if pool.parallelism.expert_parallel and not any(group.feed_forward.kind == "moe" for group in model.layers):
        found.append(f"parallelism.expert_parallel: {model.name} is no mixture of experts")
    return found


def _settings(pool: Pool, model: Model, drafts: Mapping[str, Model]) -> dict[str, int | float | str | bool]:
    settings: dict[str, int | float | str | bool | None] = {
        "tensor-parallel-size": pool.parallelism.tp,
        "pipeline-parallel-size": pool.parallelism.pp,
        "data-parallel-size": pool.parallelism.attention_dp if pool.parallelism.attention_dp > 1 else None,
        "enable-expert-parallel": pool.parallelism.expert_parallel or None,
        "max-num-seqs": pool.batching.max_num_seqs,
        "max-num-batched-tokens": pool.batching.max_num_batched_tokens,
        "max-model-len": _max_model_len(pool, model),
        "gpu-memory-utilization": pool.kv_cache.memory_utilization,
        "num-gpu-blocks-override": pool.kv_cache.num_blocks,
        "block-size": pool.kv_cache.block_size,
        "kv-cache-dtype": _kv_cache_dtype(pool, model),
        "scheduling-policy": SCHEDULING_POLICY[pool.batching.policy],
        "watermark": pool.kv_cache.watermark or None,
        "enable-chunked-prefill": pool.batching.chunked_prefill,
        "enable-prefix-caching": pool.kv_cache.prefix_caching,
        "async-scheduling": pool.schedules_async,  # vLLM refuses to be told so where it cannot
        "enforce-eager": not pool.cuda_graphs or None,
        "kv-transfer-config": None if pool.role == "mixed" else _NIXL,
        "speculative-config": _speculative_config(pool, drafts),
    }
    given = {option: value for option, value in settings.items() if value is not None}
    assert all(isinstance(value, OPTIONS[option]) for option, value in given.items())
    # `option: false` is dropped without a word by some vLLM versions; `no-option: true` is understood by all.
    return {f"no-{o}" if v is False else o: True if v is False else v for o, v in given.items()}


def _settings_text(plan: Plan, pool: Pool, model: Model, drafts: Mapping[str, Model]) -> str:
    comment = f"Plan {plan.name}, pool {pool.name}. {_WRITTEN}\nUse: vllm serve MODEL --config {_file(pool)}"
    if pool.async_scheduling and not pool.schedules_async:
        assert pool.speculation is not None
        comment += f"\nvLLM cannot schedule asynchronously with {pool.speculation.drafter.kind} drafts."
    return yamlfile.dump(_settings(pool, model, drafts), comment)


def _nodes(plan: Plan, devices_per_node: int) -> list[list[str]]:
    """The `start` lines of each node: instances in plan order, none of them across two nodes."""
    nodes: list[list[str]] = [[]]
    device = 0
    for pool in plan.pools:
        need = pool.parallelism.devices
        for _ in range(pool.instances):
            if device + need > devices_per_node:
                nodes.append([])
                device = 0
            visible = ",".join(str(d) for d in range(device, device + need))
            nodes[-1].append(f"start {_file(pool)} {visible} {len(nodes[-1])}")
            device += need
    return nodes


_FUNCTIONS = """
PORT="${PORT:-8000}"
NIXL_PORT="${NIXL_PORT:-5600}"
here="$(cd "$(dirname "$0")" && pwd)"
pids=

start() {  # settings file, devices, number on this node
    CUDA_VISIBLE_DEVICES="$2" VLLM_NIXL_SIDE_CHANNEL_PORT="$((NIXL_PORT + $3))" \\
        vllm serve "$MODEL" --config "$here/$1" --port "$((PORT + $3))" &
    pids="$pids $!"
}

trap 'kill $pids 2>/dev/null || :' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"""

_APART = [
    "# It must send a prompt to a prefill instance first, and then, with the kv_transfer_params of its answer, to a",
    "# decode instance, as the proxy of vLLM's NIXL example does.",
]

_WAIT = """
# The script ends when an instance it waits for fails, and takes the others down with it.
for pid in $pids; do wait "$pid"; done"""


def _launch_script(plan: Plan, model: Model, devices_per_node: int) -> str:
    """POSIX shell. Ports count up from PORT on each node; hosts are never guessed."""
    lines = ["#!/bin/sh", f"# Starts plan {plan.name}. {_WRITTEN}"]
    for pool in plan.pools:
        tp, pp = pool.parallelism.tp, pool.parallelism.pp
        lines.append(f"# Pool {pool.name}: {pool.instances} x (tp {tp}, pp {pp}) on {pool.hardware!r}.")
        if pool.parallelism.devices > devices_per_node:
            return "\n".join([*lines, *_spans_nodes(pool, devices_per_node), ""])
    nodes = _nodes(plan, devices_per_node)
    lines += [
        f"# The plan routes requests by {plan.router.kind}: the router before the instances is yours to choose.",
        *_APART * (plan.pools[0].role != "mixed"),
        "#",
        "# MODEL  what vLLM loads",
        "# PORT   port of the first instance on this node, 8000 unless given; the others follow it",
    ]
    if len(nodes) > 1:
        lines += [
            f"# NODE   which node this is, 0 to {len(nodes) - 1}, for a node has {devices_per_node} devices",
            f"#        and the plan {plan.num_devices}: run it on {len(nodes)} hosts, each with its NODE",
        ]
    lines += ["set -eu", ""]
    if model.hf is None:
        lines.append(f': "${{MODEL:?set MODEL to what vLLM should load as {model.name}}}"')
    else:
        lines.append(f'[ -n "${{MODEL:-}}" ] || MODEL={shlex.quote(model.hf)}')
    lines.append(_FUNCTIONS)
    if len(nodes) == 1:
        lines += nodes[0]
    else:
        lines.append('case "${NODE:?set NODE to the number of this node, from 0}" in')
        for node, starts in enumerate(nodes):
            lines += [f"{node})", *(f"    {line}" for line in starts), "    ;;"]
        lines += [f'*) echo "NODE must be 0 to {len(nodes) - 1}" >&2; exit 2 ;;', "esac"]
    return "\n".join([*lines, _WAIT, ""])


def _spans_nodes(pool: Pool, devices_per_node: int) -> list[str]:
    need = pool.parallelism.devices
    return [
        f"# An instance of pool {pool.name} needs {need} devices, a node has {devices_per_node}.",
        "# vLLM must then be told its hosts, which a plan does not know: see its page on multi-node serving.",
        f'echo "an instance of pool {pool.name} spans nodes: start it with {_file(pool)} by hand" >&2',
        "exit 1",
    ]
