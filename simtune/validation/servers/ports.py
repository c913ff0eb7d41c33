"""Ports of the loopback for engines that are started here."""

from __future__ import annotations

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """That nobody listens on, each another one."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def side_channel(port: int) -> dict[str, str]:
    """Environment of a vLLM, which tells others at this port where its KV cache is, where it has a connector."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
