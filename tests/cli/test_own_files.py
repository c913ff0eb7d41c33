"""Models, profiles and acceptance of the user's own, in a folder that no command runs in: every file that a command
writes can be read by the next one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from simtune.specs import catalog
from simtune.specs.references import from_folder, moved, to_folder, with_places
from tests.cli.conftest import call

STUDY = """\
schema: simtune/study@1
name: own
model: ./mine.yaml
hardware: {profile: ./card, devices: 1}
engine: vllm
workload: load.yaml
slo: {ttft_s: {mean: 2.0}, tpot_s: {mean: 0.05}}
objective: goodput
speculation:
  - drafter: {kind: eagle, method: eagle3, checkpoint: some/head, draft_vocab_size: 32000}
    scheme: {kind: chain, tokens: 2}
    acceptance: kept.yaml
search: {tp: [1], pp: [1], max_num_seqs: [64], max_num_batched_tokens: [2048], requests: 60, confirm: {draws: 0}}
"""
LOAD = """\
schema: simtune/workload@1
name: load
requests: 60
arrivals: {kind: poisson, rate_rps: 2.0}
prompt: {kind: fixed, tokens: 600}
output: {kind: fixed, tokens: 60}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study in `studies/first`, all that it names beside it, and its run in `runs/a`."""
    work = tmp_path_factory.mktemp("work")
    folder = work / "studies" / "first"
    folder.mkdir(parents=True)
    (work / "elsewhere").mkdir()
    model = catalog.load_model("llama-3.1-8b").model_copy(update={"name": "mine"})
    (folder / "mine.yaml").write_text(model.to_yaml())
    (folder / "kept.yaml").write_text(catalog.load_acceptance("eagle3-llama-3.1-8b").to_yaml())
    shutil.copytree(Path(catalog.__file__).parents[1] / "hwprofiles" / "h100-sxm", folder / "card")
    (folder / "study.yaml").write_text(STUDY)
    (folder / "load.yaml").write_text(LOAD)
    words = ("optimize", "studies/first/study.yaml", "--out", "runs/a", "--jobs", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        patch.setattr(sys, "argv", ["simtune", *words])  # the command that the run stores
        succeeds(*words)
    return work


@pytest.fixture
def work(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in that folder."""
    monkeypatch.chdir(made)
    return made


def succeeds(*words: str) -> str:
    """Return what a command prints, which must succeed."""
    answer = call(*words)
    assert answer.code == 0, answer
    return answer.out


def test_the_plan_of_a_search_can_be_used_from_any_folder(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (work / "runs" / "a" / "plan.yaml").read_text()
    assert "model: ../../studies/first/mine.yaml" in text
    assert "hardware: ../../studies/first/card" in text
    assert "acceptance: ../../studies/first/kept.yaml" in text
    assert str(work) not in text, "a run can be moved with its study"
    succeeds("certify", "runs/a")
    monkeypatch.chdir(work / "elsewhere")
    succeeds("check", "../runs/a/plan.yaml")
    succeeds("explain", "../runs/a")
    succeeds("certify", "../runs/a", "--study", "../studies/first/study.yaml")
    succeeds("measure", "../runs/a", "--study", "../studies/first/study.yaml", "--out", "m", "--force")
    plans = [*Path("m").glob("plans/*/plan.yaml")]
    assert plans
    for plan in plans:
        succeeds("check", str(plan))
    load = str(work / "studies" / "first" / "load.yaml")
    succeeds("simulate", "--plan", "../runs/a/plan.yaml", "--workload", load, "--out", "b", "--force")
    monkeypatch.chdir(work)
    succeeds("simulate", "--plan", "elsewhere/b/plan.yaml", "--workload", load)


def test_a_plan_that_is_not_the_chosen_one_is_refused_though_its_files_are_named_otherwise(work: Path) -> None:
    plan = work / "runs" / "a" / "plan.yaml"
    text = plan.read_text()
    try:
        plan.write_text(text.replace("../../studies/first/mine.yaml", "../../studies/first/./mine.yaml"))
        succeeds("certify", "runs/a")  # the same file by another path
        shutil.copy(work / "studies" / "first" / "mine.yaml", work / "other.yaml")
        plan.write_text(text.replace("../../studies/first/mine.yaml", "../../other.yaml"))
        answer = call("certify", "runs/a")
        assert answer.code == 4
        assert "the plan that was handed out is not" in answer.err
    finally:
        plan.write_text(text)


def test_plans_of_a_front_name_their_files_from_a_folder_further_down(work: Path) -> None:
    text = STUDY.replace("objective: goodput", "objective: pareto")
    (work / "studies" / "first" / "front.yaml").write_text(text)
    succeeds("optimize", "studies/first/front.yaml", "--out", "runs/front", "--jobs", "1")
    point = work / "runs" / "front" / "front" / "01.yaml"
    assert "model: ../../../studies/first/mine.yaml" in point.read_text()
    succeeds("check", str(point))


def test_a_plan_made_of_a_model_and_a_card_names_their_files(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("--model", "studies/first/mine.yaml", "--hardware", "studies/first/card")
    succeeds("simulate", *files, "--workload", "studies/first/load.yaml", "--out", "runs/b")
    monkeypatch.chdir(work / "elsewhere")
    assert "../studies/first/mine.yaml" in succeeds("check", "../runs/b/plan.yaml")


def test_a_file_beside_the_plan_comes_before_one_in_the_present_folder(work: Path) -> None:
    place = from_folder(Path("studies/first"))
    (work / "mine.yaml").write_text("")
    assert place("mine.yaml") == "studies/first/mine.yaml"
    assert place("mine.yaml as LlamaForCausalLM") == "studies/first/mine.yaml as LlamaForCausalLM"
    (work / "here.yaml").write_text("")
    assert place("here.yaml") == "here.yaml", "as plans of earlier releases name them"
    assert place("llama-3.1-8b") == "llama-3.1-8b"
    assert place("some/head") == "some/head", "no file: a model of a hub"
    assert to_folder(Path("elsewhere"))(str(work / "here.yaml")) == str(work / "here.yaml")
    assert moved(Path("studies/first"), Path("runs/a"))("")("mine.yaml") == "../../studies/first/mine.yaml"


def test_all_references_of_a_plan_are_placed_and_nothing_else() -> None:
    pool = {
        "name": "hardware", "hardware": "a", "engine": "b", "costs": "t", "role": 3,
        "speculation": {"acceptance": "c", "drafter": {"kind": "draft_model", "model": "d"}},
    }  # fmt: skip
    plan = {"name": "model", "model": "e", "pools": [pool, "wrong"], "link": {"costs": "l"}, "links": [{"costs": "m"}]}
    placed = with_places(plan, str.upper)
    assert placed == {
        "name": "model", "model": "E", "link": {"costs": "l"}, "links": [{"costs": "m"}],
        "pools": [
            {"name": "hardware", "hardware": "A", "engine": "B", "costs": "t", "role": 3,
             "speculation": {"acceptance": "C", "drafter": {"kind": "draft_model", "model": "D"}}},
            "wrong",
        ],
    }  # fmt: skip
    with_tables = with_places(plan, str.upper, tables=True)
    assert with_tables["pools"][0]["costs"] == "T"
    assert (with_tables["link"], with_tables["links"]) == ({"costs": "L"}, [{"costs": "M"}])
    assert with_places({"pools": None, "model": 3}, str.upper) == {"pools": None, "model": 3}
