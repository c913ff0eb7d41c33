"""A process with all its children that ends with this one, however this one ends.

A guard process is in between: it starts the command in a session of its own and holds the other end of a pipe. When the
pipe closes, on `stop` or because this process was killed, it ends the whole session; when the guard itself is killed,
the kernel ends the command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from simtune.errors import EngineError

GRACE_S = 10.0
"""Seconds between the request to end a session and its end by force."""

_GUARD = r"""
import ctypes, json, os, select, signal, subprocess, sys

def die_with_guard():
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

signal.signal(signal.SIGINT, signal.SIG_IGN)
os.setsid()
asked = json.loads(sys.stdin.buffer.readline())
child = subprocess.Popen(asked["command"], stdin=subprocess.DEVNULL, preexec_fn=die_with_guard)
ending = False
while child.poll() is None and not ending:
    ending = bool(select.select([0], [], [], 0.1)[0]) and not os.read(0, 1)

def end(how):
    try:
        os.killpg(child.pid, how)
    except ProcessLookupError:
        pass

if ending:
    end(signal.SIGTERM)
    try:
        child.wait(asked["grace_s"])
    except subprocess.TimeoutExpired:
        pass
end(signal.SIGKILL)
sys.exit(abs(child.wait()) % 256)
"""


def start(command: Sequence[str], environment: Mapping[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a command behind a guard and return the guard; both write to `log`.

    Raise EngineError if the system has no sessions of processes (Windows).
    """
    if not hasattr(os, "setsid"):
        raise EngineError(
            "simtune starts engines on Linux and macOS only; start the engine and give its URL (--engine)"
        )
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _GUARD], stdin=subprocess.PIPE, stdout=log, stderr=log, env=dict(environment)
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"command": list(command), "grace_s": GRACE_S}).encode() + b"\n")
    process.stdin.flush()
    os.set_inheritable(process.stdin.fileno(), False)
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the command with all its children, and wait until they have ended."""
    assert process.stdin is not None
    if not process.stdin.closed:
        process.stdin.close()
    process.wait()
