"""From nothing to a study; what a plan does; whether the installation is whole."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from simtune.cli import main
from simtune.profiling import installation
from simtune.specs.catalog import load_study
from simtune.specs.new_study import profile_of
from tests.cli.conftest import Desk, Said
from tests.specs.published.configs import PUBLISHED


def test_a_study_is_written_that_can_be_searched(desk: Desk, call: Callable[..., Said]) -> None:
    Path("log.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,20,5\n")
    said = call(
        "new", "mine/cheap.yaml", "--model", "qwen3-8b", "--hardware", "l40s", "--workload", "log.csv", "--tpot", 40
    )
    assert said.code == 0, said
    study = load_study("mine/cheap.yaml")
    assert (study.name, study.model, study.workload) == ("cheap", "qwen3-8b", "../log.csv")
    assert (study.slo.ttft_s, study.slo.tpot_s) == ({"p99": 1.0}, {"p99": 0.04})
    assert call("optimize", "mine/cheap.yaml", "--dry-run").code == 0
    assert "exists; give --force" in desk.refused(call, "new", "mine/cheap.yaml")
    assert "did you mean qwen3-8b" in desk.refused(call, "new", "x.yaml", "--model", "qwen3-8")
    assert "must be one of goodput_per_gpu" in desk.refused(call, "new", "x.yaml", "--objective", "speed")


@pytest.mark.parametrize(
    ("card", "devices", "path"),
    [("l40s", 4, "intra_node"), ("l40s", 16, None), ("h100-sxm", 4, None), ("l40s", 1, None)],
)
def test_pools_are_linked_within_a_node_if_the_card_has_no_other_link(
    desk: Desk, call: Callable[..., Said], card: str, devices: int, path: str | None
) -> None:
    assert call("new", "cards.yaml", "--model", "qwen3-8b", "--hardware", card, "--devices", devices).code == 0
    link = load_study("cards.yaml").link
    assert (link and link.path) == path
    if path is not None:
        assert "link" not in call("optimize", "cards.yaml", "--dry-run").out


@pytest.mark.parametrize(
    ("driver", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80g"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX 5000 Ada Generation", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_card_is_known_by_the_name_that_its_driver_gives(driver: str, profile: str | None) -> None:
    assert profile_of(driver) == profile


def test_the_card_of_this_machine_is_the_default(
    desk: Desk, call: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "devices", lambda: ["NVIDIA L40S", "NVIDIA L40S"])
    assert call("new").code == 2  # the desk has a study.yaml
    assert call("new", "s.yaml").code == 0
    study = load_study("s.yaml")
    assert "profile: l40s, devices: 2" in Path("s.yaml").read_text()
    assert study.workload == "chat"


def test_a_card_without_a_profile_is_named(
    desk: Desk, call: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho NVIDIA A10G\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    said = call("new", "s.yaml")
    assert said.err.startswith("note: no profile is of NVIDIA A10G, which is in this machine")
    assert "profile: h100-sxm, devices: 8" in Path("s.yaml").read_text()


def test_invalid_answer_is_prompted_for_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(
        [
            "qwen3-8",
            "qwen3-8b",
            "l40s",
            "two",
            "0",
            "2",
            "vllm-0.2",
            "sglang-0.5",
            "chat",
            "-1",
            "800",
            "x",
            "40",
            "gpu",
            "gpus",
        ]
    )
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda prompt: next(typed))
    monkeypatch.setattr(installation, "devices", lambda: [])
    with pytest.raises(SystemExit) as ended:
        main(["new", "s.yaml"])
    assert ended.value.code == 0
    said = capsys.readouterr().err
    assert [said.count(word) for word in ("did you mean qwen3-8b?", "'two'", "1<=x<=", "0<x<=", "'x'")] == [1] * 5
    study = load_study("s.yaml")
    (cards,) = study.hardware
    assert (study.model, cards.profile, cards.devices) == ("qwen3-8b", "l40s", 2)
    assert (study.slo.ttft_s, study.slo.tpot_s) == ({"p99": 0.8}, {"p99": 0.04})
    assert (study.engine, study.objective) == ("sglang-0.5", "gpus")
    assert len(re.findall(r"did you mean vllm-0\.\d\d\?", said)) == 1
    assert said.count("gpu: must be one of goodput_per_gpu") == 1


class Terminal(io.StringIO):
    """What a person types at."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("main_is_known", [True, False])
def test_a_model_is_found_in_the_cache_of_hugging_face(
    main_is_known: bool, desk: Desk, call: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.dumps(PUBLISHED["Qwen3-8B"].config)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    fetched = tmp_path / "hf/hub/models--Qwen--Qwen3-8B"
    for revision, text in (("aaa", "{}" if main_is_known else config), ("bbb", config)):
        (fetched / "snapshots" / revision).mkdir(parents=True)
        (fetched / "snapshots" / revision / "config.json").write_text(text)
    if main_is_known:
        (fetched / "refs").mkdir()
        (fetched / "refs/main").write_text("bbb")
    assert call("new", "deep/s.yaml", "--model", "Qwen/Qwen3-8B").code == 0
    assert load_study("deep/s.yaml").model == "Qwen/Qwen3-8B"
    assert call("optimize", "deep/s.yaml", "--dry-run").code == 0
    said = call("show", "Qwen/Qwen3-8B")
    assert said.code == 0
    assert "Qwen3-8B" in said.out
    refused = desk.refused(call, "show", "Qwen/Qwen3-32B")
    assert "no such model in" in refused
    assert "did you mean qwen3-32b?" in refused


def test_a_run_is_explained_with_its_neighbours(tiny_run: Path, call: Callable[..., Said]) -> None:
    said = call("explain", tiny_run)
    assert said.code == 0, said
    assert "max_num_seqs" in said.out
    assert "one step of each setting" in said.out
    assert call("explain", tiny_run / "plan.yaml", "--json").json["steps"] == []


def test_doctor_names_problems(desk: Desk, call: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"engine": ["vllm-0.24"], "hardware": ["h100-sxm", "cpu-x86-1thread"]}
    monkeypatch.setattr("simtune.profiling.installation.names", few.get)
    assert call("doctor").code == 0
    monkeypatch.setenv("SIMTUNE_PATH", "nowhere")
    said = call("doctor", "--json")
    assert said.code == 1
    (problem,) = [finding for finding in said.json if finding["state"] == "problem"]
    assert problem["says"] == "nowhere is not a folder; create it or remove it from SIMTUNE_PATH"


def test_the_doctor_states_what_works_on_this_system(
    call: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simtune.profiling.installation.names", lambda kind: ["cpu-x86-1thread"][: kind == "hardware"])
    # From Python 3.12 on it calls Windows where `sys.platform` is that.
    monkeypatch.setattr("shutil.which", lambda name: None)
    for system, states, says in (
        ("linux", "ok", "Linux: everything works"),
        ("darwin", "ok", "macOS: everything works, but"),
        ("win32", "ok", "Windows: everything works, but starting engines"),
        ("aix", "problem", "aix is not tested; Linux, macOS and Windows are"),
    ):
        monkeypatch.setattr("sys.platform", system)
        (found,) = [finding for finding in call("doctor", "--json").json if finding["what"] == "platform"]
        assert found["state"] == states
        assert found["says"].startswith(says)


def test_the_doctor_reports_that_no_profile_can_be_read(
    call: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simtune.profiling.installation.names", lambda kind: [])
    said = call("doctor")
    assert said.code == 1
    assert "problem  hardware profiles  none can be read; install simtune again\n" in said.out


def test_every_objective_of_a_study_may_be_asked_for(tmp_path: Path) -> None:
    from typing import get_args

    from simtune.specs.new_study import OBJECTIVES, Answers, study_text
    from simtune.specs.study import ObjectiveName

    assert get_args(ObjectiveName) == OBJECTIVES
    for objective in OBJECTIVES:
        file = tmp_path / f"{objective}.yaml"
        file.write_text(study_text(Answers("llama-3.1-8b", "h100-sxm", 2, "chat", 1.0, 0.05, objective), tmp_path))
        assert load_study(str(file)).objective == objective
