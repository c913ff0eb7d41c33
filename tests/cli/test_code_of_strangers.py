"""A module that a file names is imported only with permission: it leaves a mark where it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simtune.errors import PartError
from simtune.specs.plugins import ALLOW_CODE, need_permission
from tests.cli.conftest import call

MODULE = """\
from pathlib import Path

import simtune

Path("mark").write_text("this module ran")


class Mine(simtune.StallFree):
    pass


class Second(simtune.Router):
    def choose(self, request, now):
        return self.cores[0]
"""
PLAN = """\
schema: simtune/plan@1
name: strange
model: llama-3.1-8b
pools:
  - hardware: h100-sxm
    instances: 1
    batching: {policy: POLICY, max_num_seqs: 64, max_num_batched_tokens: 2048}
    SPECULATION
    max_model_len: 8192
router: {kind: ROUTER}
"""
STUDY = """\
schema: simtune/study@1
name: strange
model: llama-3.1-8b
hardware: {profile: h100-sxm, devices: 1}
workload: chat
objective: goodput
slo: {ttft_s: {p90: 1.0}}
batching: {policy: "stranger:Mine"}
"""
DRAFTS = "speculation: {scheme: {kind: 'stranger:Mine'}, drafter: {kind: ngram}, acceptance: {per_position: [0.5]}}"


def plan(policy: str = "vllm-fcfs", router: str = "round_robin", speculation: str = "") -> str:
    text = PLAN.replace("POLICY", f"'{policy}'").replace("ROUTER", f"'{router}'")
    return text.replace("SPECULATION", speculation or "async_scheduling: true")


@pytest.fixture
def strange_module(desk: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(ALLOW_CODE, raising=False)
    desk.write("stranger.py", MODULE)
    desk.write("policy.yaml", plan(policy="stranger:Mine"))
    desk.write("router.yaml", plan(router="stranger:Second"))
    desk.write("drafts.yaml", plan(speculation=DRAFTS))
    desk.write("study.yaml", STUDY)
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("stranger", None)


@pytest.mark.usefixtures("strange_module")
@pytest.mark.parametrize("file", ["policy.yaml", "router.yaml", "drafts.yaml", "study.yaml"])
@pytest.mark.parametrize("verb", ["check", "explain", "run", "dry run"])
def test_no_verb_imports_what_a_file_names(verb: str, file: str) -> None:
    study = file == "study.yaml"
    if verb == "check":
        said = call("check", file)
    elif verb == "explain":
        said = call("explain", file)
    elif study:
        said = call("optimize", file, "--out", "run", *(("--dry-run",) if verb == "dry run" else ()))
    else:
        said = call("simulate", "--plan", file, "--workload", "chat")
    assert said.code == 2, said.err
    assert not Path("mark").exists()
    assert not Path("run").exists()
    assert "stranger" not in sys.modules
    if verb != "explain" or not study:
        assert "runs the code of stranger.py (owned by " in said.err
        assert "--allow-code" in said.err


@pytest.mark.usefixtures("strange_module")
def test_with_permission_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_CODE, "0")
    assert call("check", "policy.yaml").code == 2
    assert not Path("mark").exists()
    assert call("check", "policy.yaml", "--allow-code").code == 0
    assert Path("mark").read_text() == "this module ran"


@pytest.mark.usefixtures("strange_module")
def test_the_environment_gives_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_CODE, "1")
    assert call("check", "router.yaml").code == 0
    assert Path("mark").exists()


def test_the_package_of_a_module_is_not_imported_to_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_CODE, raising=False)
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "strange_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it ran')")
    (package / "part.py").write_text("")
    with pytest.raises(PartError, match=r"strange_package/__init__\.py"):
        need_permission("strange_package.part:Mine")
    assert "strange_package" not in sys.modules


def test_what_is_imported_already_and_what_is_not_there_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_CODE, raising=False)
    need_permission("tests.cli.test_code_of_strangers:Anything")
    need_permission("no_such_module_anywhere:Mine")
