"""Verbs that go on where they were killed: how each is begun, gone on with, and what it must have left in the end."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from simtune.errors import SimtuneError

STUDY = """\
schema: simtune/study@1
name: tiny
model: llama-3.1-8b
hardware: {profile: h100-sxm, devices: 2}
workload: chat
slo:
  ttft_s: {p99: 1.0}
  tpot_s: {p99: 0.030}
search:
  {tp: [1, 2], pp: [1], max_num_seqs: [64, 128], max_num_batched_tokens: [2048], requests: 60, confirm: {draws: 0}}
"""
PLAN = """\
schema: simtune/plan@1
name: one
model: llama-3.1-8b
pools:
  - hardware: h100-sxm
    instances: 1
    max_model_len: 4096
    batching: {max_num_seqs: 8, max_num_batched_tokens: 512}
"""
LOAD = """\
schema: simtune/workload@1
name: short
requests: 4
arrivals: {kind: poisson, rate_rps: 4}
prompt: {kind: fixed, tokens: 30}
output: {kind: fixed, tokens: 4}
"""

Left = dict[str, bytes]
"""What a verb left, by name."""


def _files(out: Path, besides: tuple[str, ...] = ()) -> Left:
    """Every file below, hidden ones and what is beside the folder too, but for those that say when or how long."""
    found = {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}
    beside = [p.name for p in out.parent.iterdir() if p.name.startswith(".")]
    assert not beside, f"left beside it: {beside}"
    return {name: raw for name, raw in found.items() if name not in besides}


most_bytes: int | None = None
"""The disk is full for files that would be larger; None: it is not."""


def _begin() -> None:
    """Let the disk be full for what the verb writes, not for what this module does."""
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


def _simtune(*words: str) -> None:
    from simtune.cli import main

    _begin()
    main(list(words))


def _optimize(out: Path) -> None:
    if (out / "manifest.json").exists() and not json.loads((out / "summary.json").read_text())["interrupted"]:
        return
    _simtune("optimize", "study.yaml", "--out", str(out), "--jobs", "2", "--resume", "--quiet")


def _sweep(out: Path) -> None:
    load = ("--model", "llama-3.1-8b", "--workload", "chat", "--requests", "40")
    axes = ("--over", "hardware=h100-sxm,l40s", "--over", "rate=1:8:1")
    _simtune("sweep", *load, *axes, "--out", str(out), "--jobs", "2", "--quiet")


def _reproduce(out: Path) -> None:
    systems = ("blasst", "dms", "markov-transformers")
    kept = ("--journal", str(out / "findings.jsonl"), "--html", str(out / "page.html"), "--force")
    _simtune("reproduce", *systems, *kept, "--jobs", "1", "--quiet")


def _profile(out: Path) -> None:
    """The command, on a device that only pretends, by a clock of its own."""
    from simtune.profiling import run
    from tests.profiling.pretended import PretendedRig, model

    class Rig(PretendedRig):
        def __init__(self, device: str | None, models: list[Any]) -> None:
            super().__init__()

        def close(self) -> None:
            pass

    whole = run.profile
    module = ModuleType("simtune.profiling.rig")
    module.TorchRig = Rig  # type: ignore[attr-defined]
    sys.modules["simtune.profiling.rig"] = module
    run.profile = lambda rig, *a, **n: whole(rig, *a, **{**n, "clock": rig.clock, "started": 0.0})
    Path("tiny.yaml").write_text(model().to_yaml())
    _simtune("profile", "--model", "tiny.yaml", "--budget", "20s", "--out", str(out), "--quiet")


def _profiled(out: Path) -> Left:
    """Shapes and times of all points, in order: fits follow from them, and when they were measured does not."""
    points = []
    for line in (out / "measurements.jsonl").read_text().splitlines()[1:]:
        point = json.loads(line)
        points.append(json.dumps([point.get(key) for key in ("op", "kind", "shape", "seconds", "dtype")]))
    assert {"profile.yaml", "arrays.npz", "summary.json"} <= {p.name for p in out.iterdir()}
    return {"points": "\n".join(sorted(points)).encode()}


def _loop(out: Path) -> None:
    from simtune.specs import folder_lock
    from tests.validation.driven_engine import PretendedDriver
    from tests.validation.pretended_loop import loop

    _begin()
    try:
        loop(out, lambda size, reference_s: PretendedDriver(size))
    except SimtuneError as error:  # as the command does
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    finally:
        folder_lock.release()


def _looped(out: Path) -> Left:
    """Which stages are done and which files there are: an engine that goes on has other noise than one that went on."""
    stages = sorted(json.loads((out / "state.json").read_text())["done"])
    return dict.fromkeys(_files(out), b"") | {"stages": "\n".join(stages).encode()}


def _validate(out: Path) -> None:
    from tests.fake_server import FakeServer

    port = int(Path("port").read_text()) if Path("port").exists() else 0
    with FakeServer(first_token_s=0.005, token_s=0.02, port=port) as server:
        Path("port").write_text(str(server.port))
        engine = ("--engine", server.url, "--uncertainty", "0", "--max-lateness", "1e6", "--tolerance", "1e6")
        loads = ("--workload", "load.yaml", "--rates", "40,80", "--repeat", "2", "--quiet")
        _simtune("validate", "plan.yaml", *loads, *engine, "--out", str(out))


def _validated(out: Path) -> Left:
    """Which runs there are, and what was predicted: times on a server are never the same twice."""
    names = {name: b"" for name in _files(out) if name.startswith("measured/")}
    assert json.loads((out / "validation.json").read_text())
    return names | {name: raw for name, raw in _files(out).items() if name.startswith(("plan", "predicted/"))}


@dataclass(frozen=True)
class Verb:
    """A verb that is begun and gone on with by the same command."""

    run: Callable[[Path], None]
    left: Callable[[Path], Left]
    kept: str = "nothing"
    """Files of finished work, of which a kill may lose none."""


VERBS: dict[str, Verb] = {
    "optimize": Verb(_optimize, lambda out: _files(out, ("manifest.json",))),
    "sweep": Verb(_sweep, lambda out: _files(out, ("points.jsonl",))),
    "reproduce": Verb(_reproduce, lambda out: _files(out, ("findings.jsonl",))),
    "profile": Verb(_profile, _profiled),
    "loop": Verb(_loop, _looped, kept="round-*/run/plan.yaml"),
    "validate": Verb(_validate, _validated, kept="measured/*.jsonl"),
}


def prepare(folder: Path) -> None:
    """The files that the commands name."""
    for name, text in (("study.yaml", STUDY), ("plan.yaml", PLAN), ("load.yaml", LOAD)):
        (folder / name).write_text(text)
