"""From nothing to a study; what a plan does; whether the installation is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from simtune.profiling import installation
from simtune.specs.catalog import load_study
from simtune.specs.new_study import profile_of
from tests.cli.conftest import Desk, Said


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
    ("driver", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80g"),
        ("NVIDIA GeForce GTX 1080", None),
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


def test_a_run_is_explained_with_its_neighbours(tiny_run: Path, call: Callable[..., Said]) -> None:
    said = call("explain", tiny_run)
    assert said.code == 0, said
    assert "max_num_seqs" in said.out
    assert "one step of each setting" in said.out
    assert call("explain", tiny_run / "plan.yaml", "--json").json["steps"] == []


def test_the_doctor_names_what_is_wrong(desk: Desk, call: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("doctor").code == 0
    monkeypatch.setenv("SIMTUNE_PATH", "nowhere")
    said = call("doctor", "--json")
    assert said.code == 1
    (problem,) = [finding for finding in said.json if finding["state"] == "problem"]
    assert problem["says"] == "nowhere is no folder; make it or take it out"


def test_every_objective_of_a_study_may_be_asked_for(tmp_path: Path) -> None:
    from typing import get_args

    from simtune.specs.new_study import OBJECTIVES, Answers, study_text
    from simtune.specs.study import Objective

    assert get_args(Objective) == OBJECTIVES
    for objective in OBJECTIVES:
        file = tmp_path / f"{objective}.yaml"
        file.write_text(study_text(Answers("llama-3.1-8b", "h100-sxm", 2, "chat", 1.0, 0.05, objective), tmp_path))
        assert load_study(str(file)).objective == objective
