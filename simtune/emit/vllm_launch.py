"""The POSIX shell script that starts every vLLM instance of a plan."""

from __future__ import annotations

import shlex

from simtune.specs.model import Model
from simtune.specs.plan import Plan, Pool


def settings_file(pool: Pool) -> str:
    """The name of the settings file of a pool's instances, beside the script."""
    return f"vllm-{pool.name}.yaml"


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
            nodes[-1].append(f"start {settings_file(pool)} {visible} {len(nodes[-1])}")
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


def launch_script(plan: Plan, model: Model, devices_per_node: int, written: str) -> str:
    """Ports count up from PORT on each node; hosts are never guessed. `written` says by whom it was."""
    lines = ["#!/bin/sh", f"# Starts plan {plan.name}. {written}"]
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
        f'echo "an instance of pool {pool.name} spans nodes: start it with {settings_file(pool)} by hand" >&2',
        "exit 1",
    ]
