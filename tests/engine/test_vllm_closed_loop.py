"""Steps between a client and vLLM's engine core in a closed loop, counted on vLLM itself and in a simulation.

The file in `logs` has them by release, with asynchronous scheduling and without, without drafts and with two a step,
all of which are accepted (the driver is vllm_closed_loop.py):

    VLLM_PYTHON=.venv-vllm/bin/python python -m pytest -m slow tests/engine/test_vllm_closed_loop.py

counts them anew, in about a minute each: release 0.32 in the environment of `make vllm`, the others as `make releases`
unpacks them (RELEASES may name another folder). SIMTUNE_STORE=1 stores what it counts.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.sim.deployment import deploy
from simtune.sim.drafting import Drafting
from simtune.specs.acceptance import Acceptance, PerPosition
from simtune.specs.catalog import load_engine, load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.preset import merged
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream

PYTHON = os.environ.get("VLLM_PYTHON", "")
RELEASES = Path(os.environ.get("RELEASES", Path(PYTHON).parents[1] / "releases" if PYTHON else ""))
INSTALLED = "0.32"
DRIVER = Path(__file__).with_name("vllm_closed_loop.py")
STORED = Path(__file__).with_name("logs") / "vllm_closed_loop.json"
COUNTED: list[dict[str, Any]] = json.loads(STORED.read_text())
MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
STEP_S = 0.1


def key(counted: dict[str, Any]) -> tuple[str, bool, int]:
    """Return release, scheduling and drafts of a count."""
    return counted["vllm"], counted["async_scheduling"], counted.get("drafts", 0)


def store_order(counted: dict[str, Any]) -> tuple[int, str, bool]:
    release, asynchronous, drafts = key(counted)
    return drafts, release, not asynchronous


def label(counted: dict[str, Any]) -> str:
    release, asynchronous, drafts = key(counted)
    return f"{release}-{'async' if asynchronous else 'sync'}" + (f"-{drafts} drafts" if drafts else "")


CASES = [
    pytest.param(counted, users, id=f"{label(counted)}-{users}") for counted in COUNTED for users in counted["users"]
]


def stream(counted: dict[str, Any], users: int, front_end_s: float) -> RequestStream:
    """Return the requests of the driver: each user begins, a millisecond later, when the first answer has two tokens
    more."""
    lengths = counted["lengths"]
    # The prompt's step gives one token, each step after it one and the drafts.
    steps = [1 + math.ceil((2 * user - 1) / (1 + counted.get("drafts", 0))) for user in range(1, users)]
    begins = [0.0] + [number * STEP_S + front_end_s + 0.001 for number in steps]
    due = begins + [begins[-1]] * (len(lengths) - users)
    requests = stream_of(None, [prompt for prompt, _ in lengths], [output for _, output in lengths], users=users)
    return replace(requests, due_s=np.array(due))


def simulated(counted: dict[str, Any], users: int) -> tuple[list[int], list[int]]:
    """Simulate the release's preset. Return the steps that end from the sending of each request to its first token,
    and the sequences in each step."""
    release = counted["vllm"].rpartition(".")[0]
    preset = load_engine(f"vllm@{release}").settings(HARDWARE.device, MODEL)
    settings = {
        "hardware": "h100-sxm", "instances": 1, "async_scheduling": counted["async_scheduling"], "max_model_len": 256,
        "batching": {"max_num_seqs": 8, "max_num_batched_tokens": 256}, "kv_cache": {"num_blocks": 400},
    }  # fmt: skip
    drafting, drafts = None, counted.get("drafts", 0)
    if drafts:
        scheme = {"kind": "chain", "tokens": drafts}
        settings["speculation"] = {"drafter": {"kind": "eagle"}, "scheme": scheme, "acceptance": "all"}
        rates = PerPosition(conditional=(1.0,) * drafts)
        drafting = Drafting(Acceptance(name="all", origin="assumed", source="the executor's", rates=rates))
    plan = Plan.model_validate({"name": "p", "model": MODEL.name, "pools": [merged(settings, preset)]}, strict=False)
    front_end = plan.pools[0].front_end
    assert front_end is not None
    requests = stream(counted, users, front_end.request_s)
    costs = {pool.name: LinearCosts(STEP_S) for pool in plan.pools}
    deployment = deploy(plan, MODEL, HARDWARE, costs, drafting=drafting)
    result = deployment.simulate(requests, record=True, single_steps=True)
    steps = result.outcome.records
    assert steps is not None
    ends, rounding = steps.column("end") / TICKS_PER_SECOND, 1e-9
    spans = zip(result.outcome.arrival / TICKS_PER_SECOND, result.first_token_s, strict=True)
    counts = [int(np.sum((ends > sent + rounding) & (ends <= first + rounding))) for sent, first in spans]
    return counts, [step.num_decodes + len(step.chunks) for step in steps]


@pytest.mark.parametrize(("counted", "users"), CASES)
def test_a_simulation_takes_the_steps_that_vllm_takes(counted: dict[str, Any], users: str) -> None:
    measured = counted["users"][users]
    counts, sequences = simulated(counted, int(users))
    assert counts == measured["to_first_token"]
    assert sequences == [len(requests) for requests in measured["steps"]]


@pytest.mark.parametrize(("counted", "users"), CASES)
def test_no_step_lies_between_joining_and_the_first_token(counted: dict[str, Any], users: str) -> None:
    """All that a request waits for is the step that it may join: its first token comes with that step."""
    assert counted["users"][users]["to_join"] == counted["users"][users]["to_first_token"]


@pytest.mark.parametrize(
    "counted", [pytest.param(count, id=label(count)) for count in COUNTED if count["async_scheduling"]]
)
def test_asynchronous_scheduling_adds_a_step_for_a_client_of_a_busy_engine(counted: dict[str, Any]) -> None:
    """A request that comes during a step joins the third: the next one is dispatched, and the one after it scheduled
    when that began. An idle engine computes it at once; with drafts, after the step that it began before it knew that
    accepted drafts had completed the answer before."""
    release, _, drafts = key(counted)
    synchronous = next(count for count in COUNTED if key(count) == (release, False, drafts))
    usual = [Counter(count["users"]["4"]["to_first_token"]).most_common(1)[0][0] for count in (synchronous, counted)]
    assert usual == [2, 3]
    assert set(synchronous["users"]["1"]["to_first_token"]) == {1}
    assert Counter(counted["users"]["1"]["to_first_token"]).most_common(1)[0][0] == (2 if drafts else 1)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("release", ["0.14", "0.19", "0.24", "0.28", INSTALLED, "0.33"])
def test_vllm_takes_the_stored_steps(release: str, asynchronous: bool, drafts: int, tmp_path: Path) -> None:
    environment = dict(os.environ)
    if release != INSTALLED:
        unpacked = RELEASES / f"vllm-{release}"
        if not unpacked.is_dir():
            pytest.skip(f"{unpacked} is not there; make releases unpacks it")
        # The wheel for GPUs takes a processor only if its version says so.
        version = tmp_path / "version" / f"vllm-{release}.0+cpu.dist-info"
        version.mkdir(parents=True)
        (version / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}.0+cpu\n")
        environment["PYTHONPATH"] = f"{version.parent}{os.pathsep}{unpacked}"
    out = tmp_path / "out.json"
    subprocess.run(
        [PYTHON, DRIVER, out, str(int(asynchronous)), str(drafts)], check=True, cwd=tmp_path, env=environment
    )
    counted = json.loads(out.read_text())
    assert counted["vllm"].startswith(f"{release}.")
    others = [count for count in COUNTED if key(count) != key(counted)]
    if os.environ.get("SIMTUNE_STORE"):
        stored = sorted([*others, counted], key=store_order)
        STORED.write_text("[\n" + ",\n".join(map(json.dumps, stored)) + "\n]\n")
    else:
        assert counted in COUNTED
