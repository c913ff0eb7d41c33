"""Runs verbs in forked children of one warm process, and kills them: `python -m tests.kills.forked` reads jobs.

A job is a line of JSON: the verb, the folder to stand in, the signal to send, and after how many seconds (null: never):
a kill to the verb alone, an interrupt to its workers too, as terminals do. With `most_bytes` the disk is full for every
file that would be larger. So is its answer: exit code, or minus the signal; how long it ran; and how many processes
were left over.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.kills import verbs

WALL_S = 300
PATIENCE, PATIENCE_S = 3, 20
NEEDED = (
    "scipy.special", "simtune.api", "simtune.cli.loop", "simtune.cli.optimize", "simtune.cli.profile",
    "simtune.cli.reproduce", "simtune.cli.sweep", "simtune.cli.validate", "simtune.profiling.run",
    "simtune.report.measured_page", "simtune.report.page", "simtune.report.published_page",
    "simtune.report.sweep_page", "simtune.report.validation_page", "simtune.runs.contents",
    "simtune.runs.sweep_files", "simtune.runs.timeline", "tests.fake_server",
    "simtune.tuner.certificate.search_certificate", "simtune.tuner.search.search_journal",
    "simtune.validation.client.load_client", "simtune.validation.judge.prediction", "simtune.validation.loads",
    "simtune.validation.published", "simtune.validation.session",
    "tests.profiling.pretended", "tests.validation.pretended_loop",
)  # fmt: skip
"""Loaded before the first job, so that kills fall into the work."""


def main() -> None:
    """Answer jobs until stdin ends."""
    for name in NEEDED:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line))), flush=True)


def _forked(job: dict[str, Any]) -> dict[str, Any]:
    begun = time.monotonic()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the verb begins
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _run(job, writes)
    os.close(writes)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if job["after_s"] is not None and not _ended(child, begun + job["after_s"]):
        if job["signal"] == signal.SIGKILL:
            os.kill(child, signal.SIGKILL)
        else:
            _interrupt(child)
    _, status = os.waitpid(child, 0)
    os.set_blocking(reads, False)
    with open(reads, "rb") as said:
        (Path(job["folder"]) / "stderr").write_bytes(said.read() or b"")
    took = time.monotonic() - begun
    ended = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return {"code": ended, "seconds": took, "orphans": _orphans(child)}


def _ended(child: int, until: float) -> bool:
    """Wait until then, or until it ends; whether it has."""
    while time.monotonic() < until:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        time.sleep(0.001)
    return False


def _interrupt(child: int) -> None:
    """Again where Python was where it lets none through, as when it closes a file."""
    for _ in range(PATIENCE):
        os.killpg(child, signal.SIGINT)
        if _ended(child, time.monotonic() + PATIENCE_S):
            return
    os.kill(child, signal.SIGKILL)


def _orphans(session: int) -> int:
    """Processes of a session that do not end within ten seconds of their parent."""
    until = time.monotonic() + 10
    while alive := [pid for pid in os.listdir("/proc") if pid.isdigit() and _session(int(pid)) == session]:
        if time.monotonic() > until:
            break
        time.sleep(0.005)
    return len(alive)


def _session(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])


def _run(job: dict[str, Any], writes: int) -> None:
    """In the child; never returns. What it prints goes to a pipe, which no full disk cuts."""
    code = 70
    try:
        os.setsid()
        os.chdir(job["folder"])
        for stream in (1, 2):
            os.dup2(writes, stream)
        # Those of the parent take what they write to for a file.
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let it be ignored in their background
        signal.alarm(WALL_S)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            verbs.most_bytes = job["most_bytes"]
            verbs.VERBS[job["verb"]].run(Path("out"))
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
