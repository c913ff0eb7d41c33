"""The POSIX shell script that starts every instance of a plan on its engine."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool

SETTINGS_AS_OPTIONS = r"sed -n '/^[a-z]/{s/: true$//;s/: / /;s/^/--/;p;}'"
"""Shell text that prints a settings file, of one `option: value` a line, as options; `option: true` is a flag."""


class Server(NamedTuple):
    """Names, and shell text that starts an engine."""

    name: str
    """Name of the engine in the names of files."""
    title: str
    """Name of the engine in sentences."""
    command: str
    """Shell text that serves $MODEL by the settings in $here/$1, on the devices $2, as number $3 of the node."""
    ports: str = ""
    """Shell text that sets the variable from which the command counts its ports."""
    apart: tuple[str, ...] = ()
    """Notes on prefill and decode instances apart."""
    apart_options: str = ""
    """Shell text that follows the command if prefill and decode instances are apart."""
    more: Mapping[str, str] = MappingProxyType({})
    """Shell text that follows the number of an instance, as argument $4, by the name of its settings file."""
    multi_node: str = "see its page on multi-node serving"

    def settings_file(self, pool: Pool) -> str:
        """Return the name of the settings file of a pool's instances, beside the script."""
        return f"{self.name}-{pool.name}.yaml"


class Endpoint(NamedTuple):
    """Address at which an instance of a pool listens, as the script starts it."""

    pool: Pool
    node: int
    number: int
    """Number of the instance on its node, which is added to PORT."""
    first_device: int

    @property
    def host(self) -> str:
        """A shell variable for the host of the node: hosts are not in a plan."""
        return f"HOST{self.node}"


def endpoints(plan: Plan, devices_per_node: int) -> list[Endpoint]:
    """Return the endpoints of all instances in plan order, none of them across two nodes."""
    placed: list[Endpoint] = []
    node = device = number = 0
    for pool in plan.pools:
        need = pool.model_devices
        for _ in range(pool.most_instances):
            if device + need > devices_per_node:
                node, device, number = node + 1, 0, 0
            placed.append(Endpoint(pool, node, number, device))
            device, number = device + need, number + 1
    return placed


def _nodes(plan: Plan, devices_per_node: int, server: Server) -> list[list[str]]:
    """The `start` lines of each node."""
    placed = endpoints(plan, devices_per_node)
    nodes: list[list[str]] = [[] for _ in range(placed[-1].node + 1)]
    for pool, node, number, device in placed:
        visible = ",".join(str(d) for d in range(device, device + pool.model_devices))
        file = server.settings_file(pool)
        nodes[node].append(f"start {file} {visible} {number}{server.more.get(file, '')}")
    return nodes


def _first_token(plan: Plan) -> list[str]:
    if plan.link is None or plan.link.first_token != "prefill":
        return []
    return ["# Not said here: link.first_token: this router answers from the decode instance."]


def router_script(plan: Plan, devices_per_node: int, written: str, command: Callable[[list[Endpoint]], str]) -> str:
    """The script that starts the router before prefill and decode instances.

    `command` makes shell text of the endpoints, in which $HOST0, $HOST1, ... are the nodes, $PORT is the port of the
    first instance on each, and $ROUTER_PORT the router's own.
    """
    placed = endpoints(plan, devices_per_node)
    hosts = sorted({endpoint.node for endpoint in placed})
    lines = [
        "#!/bin/sh",
        f"# Starts the router of plan {plan.name}, before the instances of launch.sh. {written}",
        "# PORT         as for launch.sh: port of the first instance on each node, 8000 unless given",
        "# ROUTER_PORT  where it listens, 9000 unless given",
        *(f"# HOST{node}        the host of node {node}" for node in hosts),
        *_first_token(plan),
        "set -eu",
        'PORT="${PORT:-8000}"',
        'ROUTER_PORT="${ROUTER_PORT:-9000}"',
    ]
    if len(hosts) == 1:
        lines.append('HOST0="${HOST0:-127.0.0.1}"')
    else:
        lines += [f': "${{HOST{node}:?set HOST{node} to the host of node {node}}}"' for node in hosts]
    return "\n".join([*lines, f"exec {command(placed)}", ""])


_FUNCTIONS = """
PORT="${{PORT:-8000}}"
{ports}here="$(cd "$(dirname "$0")" && pwd)"
pids=

start() {{  # settings file, devices, number on this node
    {command} &
    pids="$pids $!"
}}

trap 'kill $pids 2>/dev/null || :' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"""

_WAIT = """
# The script ends when an instance it waits for fails, and takes the others down with it.
for pid in $pids; do wait "$pid"; done"""


def launch_script(plan: Plan, model: Model, devices_per_node: int, written: str, server: Server) -> str:
    """Return a script that starts all instances. Ports count up from PORT on each node; hosts are never guessed.
    `written` states which release the settings are for.
    """
    lines = ["#!/bin/sh", f"# Starts plan {plan.name}. {written}"]
    for pool in plan.pools:
        tp, pp = pool.parallelism.tp, pool.parallelism.pp
        spare = f", and {pool.spare} to stand by" if pool.spare else ""
        lines.append(f"# Pool {pool.name}: {pool.instances} x (tp {tp}, pp {pp}){spare} on {pool.hardware!r}.")
        # Each engine has its own way to start an instance over several nodes, so the script stops with instructions.
        if pool.model_devices > devices_per_node:
            return "\n".join([*lines, *_spans_nodes(pool, devices_per_node, server), ""])
    nodes = _nodes(plan, devices_per_node, server)
    lines += [
        f"# The plan routes requests by {plan.router.kind}: the router before the instances is yours to choose.",
        *(f"# {line}" for line in server.apart if plan.pools[0].role != "mixed"),
        "#",
        f"# MODEL  what {server.title} loads",
        "# PORT   port of the first instance on this node, 8000 unless given; the others follow it",
    ]
    if len(nodes) > 1:
        lines += [
            f"# NODE   which node this is, 0 to {len(nodes) - 1}, for a node has {devices_per_node} devices",
            f"#        and the plan {plan.num_devices}: run it on {len(nodes)} hosts, each with its NODE",
        ]
    lines += ["set -eu", ""]
    if model.hf is None:
        lines.append(f': "${{MODEL:?set MODEL to what {server.title} should load as {model.name}}}"')
    else:
        lines.append(f'[ -n "${{MODEL:-}}" ] || MODEL={shlex.quote(model.hf)}')
    command = server.command if plan.pools[0].role == "mixed" else server.command + server.apart_options
    lines.append(_FUNCTIONS.format(ports=server.ports, command=command))
    if len(nodes) == 1:
        lines += nodes[0]
    else:
        lines.append('case "${NODE:?set NODE to the number of this node, from 0}" in')
        for node, starts in enumerate(nodes):
            lines += [f"{node})", *(f"    {line}" for line in starts), "    ;;"]
        lines += [f'*) echo "NODE must be 0 to {len(nodes) - 1}" >&2; exit 2 ;;', "esac"]
    return "\n".join([*lines, _WAIT, ""])


def _spans_nodes(pool: Pool, devices_per_node: int, server: Server) -> list[str]:
    need = pool.model_devices
    return [
        f"# An instance of pool {pool.name} needs {need} devices, a node has {devices_per_node}.",
        f"# {server.title} then needs its hosts, which a plan does not name: {server.multi_node}.",
        f'echo "an instance of pool {pool.name} spans nodes: start it with {server.settings_file(pool)} by hand" >&2',
        "exit 1",
    ]
