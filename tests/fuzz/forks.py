"""Runs commands in forked children of one warm process, each with limits: `python forks.py` reads jobs from stdin.

A job is a line of JSON: the folder to stand in, the command and the seconds that it may use. So is its answer: exit
code, or minus the signal that ended it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
from typing import Any

MEMORY = 2 << 30
CPU_S, LONG_S = 20, 600
"""What a command may use, and what one that asks for much may."""


def main() -> None:
    """Answer jobs until stdin ends; those of `warm` run here, so that all modules are there for the others."""
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(_warm(job) if job["warm"] else _forked(job)), flush=True)


def _warm(job: dict[str, Any]) -> dict[str, Any]:
    from simtune.cli import main as simtune

    os.chdir(job["folder"])
    sys.argv = ["simtune", *job["command"]]  # which manifests hold
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            simtune(job["command"])
        except SystemExit as stop:
            return {"code": stop.code, "err": said.getvalue()}
    return {"code": 0, "err": ""}


def _forked(job: dict[str, Any]) -> dict[str, Any]:
    child = os.fork()
    if child == 0:
        _run(job)
    _, status, used = os.wait4(child, 0)
    ended = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return {"code": ended, "cpu_s": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss * 1024}


def _run(job: dict[str, Any]) -> None:
    """In the child; never returns."""
    code = 70
    try:
        os.chdir(job["folder"])
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        sys.argv = ["simtune", *job["command"]]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"]))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(job["wall_s"])
        from simtune.cli import main as simtune

        simtune(job["command"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
