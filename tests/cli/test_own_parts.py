"""Policies and routers from outside, as a user types them: what they may be called, and what is said when they fail."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT, bytes_of, typed

pytestmark = pytest.mark.usefixtures("own_code_allowed")

MODULE = """\
import simtune


class Mine(simtune.StallFree):
    def __init__(self, *, step: int = 1, **settings):
        super().__init__(**settings)
        self.step = step

    def key(self, request):
        return -request.id // self.step


class Typo(Mine):
    def key(self, request):
        return request.idd


class Second(simtune.Router):
    def choose(self, request, now):
        return [core for core in self.cores if core.up][-1]


class Fails(simtune.Router):
    def choose(self, request, now):
        raise LookupError("no core is good enough")


class Neither:
    pass
"""

PLAN = """\
schema: simtune/plan@1
name: mine
model: llama-3.1-8b
pools:
  - hardware: h100-sxm
    instances: 2
    batching:
      policy: own_parts:Mine
      max_num_seqs: 64
      max_num_batched_tokens: 2048
      options: {step: 2}
    max_model_len: 8192
router:
  kind: own_parts:Second
"""


@pytest.fixture
def mine(desk: Any) -> Iterator[Any]:
    """A desk with a module of one's own and a plan that names what is in it."""
    desk.write("own_parts.py", MODULE)
    desk.write("plan.yaml", PLAN)
    path = list(sys.path)
    yield desk
    sys.path[:] = path
    sys.modules.pop("own_parts", None)


def test_a_plan_with_parts_of_ones_own_runs(mine: Any) -> None:
    said = mine.simulate("--plan", "plan.yaml", "--out", "run", "--json")
    assert said.code == 0, said.err
    assert said.json["plan"]["pools"][0]["batching"]["options"] == {"step": 2}
    assert said.json["plan"]["router"] == {"kind": "own_parts:Second", "options": {}}
    assert said.err == "note: No engine settings: no engine has policy own_parts:Mine.\n"
    again = mine.simulate("--plan", "run/plan.yaml", "--json")
    assert again.json["metrics"] == said.json["metrics"]
    assert mine.simulate("--plan", "plan.yaml", "--uncertainty", 20, "--jobs", 2).code == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("own_parts:Mine", "own_part:Mine", "plan.yaml:8:7: pools.0.batching.policy: own_part:Mine: there is no "),
        ("own_parts:Mine", "own_parts:Min", "plan.yaml:8:7: pools.0.batching.policy: own_parts:Min: own_parts.py has "
         "no Min, did you mean Mine?"),
        ("own_parts:Mine", "own_parts:Neither", "plan.yaml:8:7: pools.0.batching.policy: own_parts:Neither "
         "(own_parts.py:28) is no policy: it is not derived from simtune.engine.scheduler.Scheduler"),
        ("own_parts:Mine", "mine", "plan.yaml:8:7: pools.0.batching.policy: must be one of vllm-fcfs, "),
        ("step: 2", "stepp: 2", "plan.yaml:11:17: pools.0.batching.options.stepp: unknown option of Mine, did you mean "
         "step?; it takes step"),
        ("own_parts:Second", "own_parts:Mine", "plan.yaml:14:3: router.kind: own_parts:Mine (own_parts.py:4) is no "
         "router: it is not derived from simtune.sim.router.Router"),
        ("own_parts:Second", "secnd", "plan.yaml:13:1: router: unknown kind 'secnd': one of round_robin, "),
    ],
)  # fmt: skip
def test_missing_custom_parts_are_refused(mine: Any, old: str, new: str, message: str) -> None:
    """Told with the line of the plan, by `simulate` and by `check`."""
    assert old in PLAN
    mine.write("plan.yaml", PLAN.replace(old, new))
    told = mine.refused(mine.simulate, "--plan", "plan.yaml", "--out", "run")
    assert told.startswith(message)
    checked = typed("check", "plan.yaml")
    assert (checked.code, checked.err.strip()) == (2, told)


def test_a_module_that_cannot_be_imported(mine: Any) -> None:
    mine.write("plan.yaml", PLAN.replace("own_parts:Second", "round_robin"))
    mine.write("own_parts.py", MODULE + "\nimport own_partss\n")
    told = mine.refused(mine.simulate, "--plan", "plan.yaml")
    assert told.startswith(
        "plan.yaml:8:7: pools.0.batching.policy: own_parts:Mine: its module cannot be imported: own_parts.py:31: "
        "ModuleNotFoundError: No module named 'own_partss'"
    )
    mine.write("own_parts.py", MODULE + "\ndef broken(:\n")
    assert "cannot be imported: own_parts.py:31: SyntaxError: " in mine.refused(mine.simulate, "--plan", "plan.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("own_parts:Mine", "own_parts:Typo", "policy own_parts:Typo failed in Typo.key (own_parts.py:15): "),
        ("own_parts:Second", "own_parts:Fails", "router own_parts:Fails failed in Fails.choose (own_parts.py:25): "
         "LookupError: no core is good enough"),
    ],
)  # fmt: skip
def test_custom_parts_that_fail_during_a_run_are_blamed(mine: Any, old: str, new: str, message: str) -> None:
    """One line, and nothing half-written."""
    mine.write("plan.yaml", PLAN.replace(old, new))
    told = mine.refused(mine.simulate, "--plan", "plan.yaml", "--out", "run", "--per-request", "requests.csv")
    assert told.startswith(message)
    assert "\n" not in told


STUDY = """\
batching: {policy: "own_parts:Mine", options: {step: 2}}
router: {kind: "own_parts:Second"}
search:"""


def test_a_study_with_parts_of_ones_own(mine: Any) -> None:
    """In other processes too, and with the same answer."""
    mine.study("search:", STUDY)
    alone = mine.optimize("--json", "--quiet")
    assert alone.code == 0, alone.err
    plan = alone.json["plan"]
    assert plan["pools"][0]["batching"]["policy"] == "own_parts:Mine"
    assert plan["router"]["kind"] == "own_parts:Second"
    why = "No engine settings: no engine has policy own_parts:Mine."
    assert alone.err == f"note: {why}\n"
    assert (mine.folder / "run" / "engine" / "none.txt").read_text() == f"{why}\n"
    said = typed("optimize", "study.yaml", "--out", "two", "--jobs", 2, "--json")
    assert said.code == 0, said.err
    assert {**said.json, "out": None} == {**alone.json, "out": None}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "batching.policy=own_parts:Typo",
            "policy own_parts:Typo failed in Typo.key (own_parts.py:15): AttributeError: ",
        ),
        (
            "router.kind=own_parts:Fails",
            "router own_parts:Fails failed in Fails.choose (own_parts.py:25): LookupError: no",
        ),
        (
            "batching.options.stepp=1",
            "--set: batching.options.stepp: unknown option of Mine, did you mean step?; it takes",
        ),
    ],
)
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_study_whose_parts_fail(mine: Any, setting: str, message: str, jobs: int) -> None:
    mine.study("search:", STUDY)
    before = bytes_of(mine.folder)
    said = typed(
        "optimize", "study.yaml", "--out", "run", "--jobs", jobs, "--set", setting, PYTHONDONTWRITEBYTECODE="1"
    )
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(message)
    assert said.err.count("\n") == 1
    assert bytes_of(mine.folder) == before


# --- registered by an installed package -------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of packages in which one registers a policy and a router."""
    site = tmp_path / "site"
    info = site / "ownparts-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "own_parts.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ownparts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[simtune.policies]\nnewest = own_parts:Mine\nbroken = own_parts:Gone\n\n"
        "[simtune.routers]\nsecond = own_parts:Second\n"
    )
    return site


def test_registered_names_are_names_like_others(desk: Any, installed: Path) -> None:
    desk.write("plan.yaml", PLAN.replace("own_parts:Mine", "newest").replace("own_parts:Second", "second"))
    path = os.pathsep.join((str(ROOT), str(installed)))
    said = typed("simulate", "--plan", "plan.yaml", "--workload", "chat", "--requests", 100, "--json", PYTHONPATH=path)
    assert said.code == 0, said.err
    assert said.json["plan"]["router"]["kind"] == "second"
    listed = json.loads(typed("list", "--json", PYTHONPATH=path).out)
    assert listed["policy"][-2:] == ["broken", "newest"]
    assert listed["router"][-1] == "second"
    schema = typed("schema", "plan", PYTHONPATH=path).json
    policy = schema["$defs"]["Batching"]["properties"]["policy"]["anyOf"]
    assert "vllm-fcfs" in policy[0]["enum"]
    assert "newest" in policy[0]["enum"]
    assert policy[1]["pattern"].endswith("$")


def test_registered_name_without_an_object_is_refused(desk: Any, installed: Path) -> None:
    desk.write("plan.yaml", PLAN.replace("own_parts:Mine", "broken"))
    said = typed(
        "simulate", "--plan", "plan.yaml", "--workload", "chat", PYTHONPATH=os.pathsep.join((str(ROOT), str(installed)))
    )
    assert said.code == 2
    assert said.err.startswith("plan.yaml:8:7: pools.0.batching.policy: own_parts:Gone: ")
    assert "own_parts.py has no Gone\n" in said.err


def test_built_in_parts_are_listed() -> None:
    listed = json.loads(typed("list", "--json").out)
    assert listed["policy"][0] == "vllm-fcfs"
    assert "prefix_aware" in listed["router"]
    assert listed["emitter"] == ["vllm", "sglang", "tensorrt-llm", "llamacpp", "transformers"]
    assert typed("list", "router").out.splitlines()[:2] == ["router:", "  round_robin"]
