"""Kernels of another engine than the one that runs are named, and their intervals are wider."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.api import load_specs, set_up
from simtune.costs.other_engines import OTHER_ENGINE_LOG_SD, for_engine, load_kernels
from simtune.costs.predict import Basis, Profile, typical_log_sd
from simtune.costs.software import engine_of
from simtune.report import info
from simtune.report.hardware_page import facts
from simtune.report.plan_in_words import explain
from simtune.results.result import Result
from simtune.runs.contents import of_simulation
from simtune.runs.manifest import manifest
from simtune.sim.deployment import Deployment
from simtune.sim.drawn_worlds import Blueprint, PerturbedWorld
from simtune.sim.run_basis import asked_calls, cost_basis, note
from simtune.specs.catalog import load_hardware, sister_of
from tests.costs.made_up import hardware
from tests.costs.test_profiles import ALL_RECIPES

SHAPE = {"m": 64.0, "n": 4096.0, "k": 4096.0}


CARRIED = [
    (name.rpartition("-")[0], f"{name.rpartition('-')[2]}-{'0.5' if name.endswith('sglang') else '1.2'}")
    for name, recipe in ALL_RECIPES.items()
    if "carried" in recipe
]


@pytest.mark.parametrize(("card", "engine"), CARRIED)
def test_kernels_of_an_engine_are_carried_over_from_a_sister_card(card: str, engine: str) -> None:
    sister = load_hardware(ALL_RECIPES[f"{card}-{engine.partition('-')[0]}"]["transfer"])
    own, profile = load_hardware(card), load_kernels(card, engine)
    assert (profile.name, profile.device, profile.engine) == (card, own.device, sister.engine)
    gemm, of_sister = profile.operators["gemm.bf16"], sister.operators["gemm.bf16"]
    assert gemm.provenance.kind == "transferred"
    assert (gemm.other_engine, gemm.provenance.software) == (None, of_sister.provenance.software)
    here, there = (Profile(p).predictor("gemm", "bf16") for p in (profile, sister))
    assert here.seconds(**SHAPE) > 0
    assert here.log_sd(**SHAPE) > there.log_sd(**SHAPE)
    assert profile.operators["all_gather.bf16"] == own.operators["all_gather.bf16"], "NCCL's, of the card itself"
    assert set(profile.operators) >= set(own.operators)


@pytest.mark.parametrize("engine", ["sglang-0.5", "trtllm-1.2"])
@pytest.mark.parametrize("card", ["b200", "l40s", "rtx-pro-6000"])
def test_a_card_with_kernels_or_without_a_sister_has_none(card: str, engine: str) -> None:
    assert sister_of(card, engine) is None


@pytest.mark.parametrize("engine", ["sglang-0.5", "trtllm-1.2", "llamacpp", "transformers"])
@pytest.mark.parametrize("card", ["l40s", "rtx-pro-6000"])
def test_a_card_without_a_profile_of_the_engine_answers_with_anothers_kernels(card: str, engine: str) -> None:
    own, other = load_kernels(card, "vllm-0.24"), load_kernels(card, engine)
    here, there = (Profile(profile).predictor("gemm", "bf16") for profile in (own, other))
    assert there.seconds(**SHAPE) == here.seconds(**SHAPE)
    assert there.basis(**SHAPE) == Basis.OTHER_ENGINE != here.basis(**SHAPE)
    widened = float(there.log_sd(**SHAPE)) ** 2 - float(here.log_sd(**SHAPE)) ** 2
    assert widened == pytest.approx(OTHER_ENGINE_LOG_SD["gemm"] ** 2, rel=1e-4)


def test_an_engine_with_a_profile_of_its_own_gets_its_kernels() -> None:
    profile = load_kernels("h100-sxm", "sglang-0.5")
    assert profile.name == "h100-sxm-sglang"
    assert profile.operators["gemm.bf16"].other_engine is None


def test_operators_that_a_profile_borrowed_are_named_without_an_engine_too() -> None:
    profile = for_engine(load_hardware("h100-sxm"))
    assert [key for key, o in profile.operators.items() if o.other_engine is not None] == ["gemm.fp8_block", "moe.fp8"]
    assert profile.operators["gemm.fp8_block"].origin == "other-engine"
    assert for_engine(profile) is profile


def test_kernels_of_libraries_and_of_unknown_engines_are_nobodys_in_particular() -> None:
    profile = load_kernels("l40s", "sglang-0.5")
    assert profile.operators["all_gather.bf16"].other_engine is None, "NCCL's"
    assert for_engine(hardware()) == hardware()
    assert engine_of(None) is None


def test_the_facts_of_a_profile_say_which_operators_are_of_another_engine() -> None:
    shown = dict(facts(for_engine(load_hardware("h100-sxm-sglang"))))["kernels of"]
    others = "1 operator of TRTLLM 1.3.0rc20, 10 operators of VLLM"
    assert f"SGLang 0.5.14; kernels of another engine, in wider intervals: {others}" in shown
    assert dict(facts(load_hardware("h100-sxm")))["kernels of"] == "vLLM 0.24.0", "as read, before it is marked"


def test_a_simulation_says_how_much_of_its_time_is_another_engines(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    pool = "{name: a, role: mixed, hardware: l40s, engine: sglang-0.5, instances: 1}"
    plan.write_text(f"schema: simtune/plan@1\nname: p\nmodel: llama-3.1-8b\npools: [{pool}]\n")
    experiment = set_up(load_specs(None, None, "chat", str(plan)), requests=20)
    basis = cost_basis(experiment.deployment, experiment.run())
    assert basis is not None
    assert basis.other_engine > 0.8
    assert "kernels of another engine (" in (note(basis) or "")
    kind = {operator.operator: operator for operator in basis.operators}["gemm"]
    assert kind.log_sd > OTHER_ENGINE_LOG_SD["gemm"]
    assert kind.log_sd > typical_log_sd(load_hardware("l40s").operators["gemm.bf16"])


PAIR = """\
schema: simtune/plan@1
name: pair
model: llama-3.1-8b
link: {}
pools:
  - {name: p, role: prefill, hardware: mi300x, engine: vllm-0.24, instances: 1}
  - {name: d, role: decode, hardware: mi300x, engine: sglang-0.5, instances: 1}
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Deployment, Result]:
    plan = tmp_path_factory.mktemp("pair") / "plan.yaml"
    plan.write_text(PAIR)
    experiment = set_up(load_specs(None, None, "chat", str(plan)), requests=20)
    return experiment.deployment, experiment.run()


def test_pools_of_one_profile_under_two_engines_have_kernels_of_their_own(pair: tuple[Deployment, Result]) -> None:
    """Of two pools with one name of a profile both once had the kernels of the last, and their intervals."""
    deployment, _ = pair
    borrowed = [pool.hardware.operators["gemm.bf16"].other_engine for pool in deployment.pools]
    assert borrowed[0] is None
    assert (borrowed[1] or "").startswith("VLLM")
    anew = Blueprint.of(deployment).deploy(PerturbedWorld())
    assert [pool.hardware for pool in anew.pools] == [pool.hardware for pool in deployment.pools]


def test_the_basis_of_a_run_names_profile_and_engine_of_each_pool(pair: tuple[Deployment, Result]) -> None:
    basis = cost_basis(*pair)
    assert basis is not None
    prefill, decode = basis.pools
    assert (prefill.pool, prefill.profile) == ("p", "mi300x under vllm-0.24")
    assert (decode.pool, decode.profile) == ("d", "mi300x under sglang-0.5")
    assert prefill.other_engine < 0.05 < 0.8 < decode.other_engine
    assert prefill.share + decode.share == pytest.approx(1, abs=1e-5)
    words = note(basis) or ""
    assert "; pool p (mi300x under vllm-0.24): " in words
    assert "kernels of another engine (" in words.split("; pool d (mi300x under sglang-0.5): ")[1]
    assert {profile for profile, _ in asked_calls(*pair)} == {prefill.profile, decode.profile}


def test_summary_report_and_manifest_name_profile_and_engine_of_each_pool(pair: tuple[Deployment, Result]) -> None:
    deployment, result = pair
    summary = of_simulation(deployment, result, "pair", 0, leave_out=("requests", "trace", "swimlanes")).run.summary
    names = ["mi300x under vllm-0.24", "mi300x under sglang-0.5"]
    assert [info.profile_name(hardware) for hardware in info.profiles(summary)] == names
    assert [row[2] for row in info.pool_rows(summary)] == names
    assert info.devices(summary).count("MI300X") == 1
    origins = [{o.key: o.provenance for o in hardware.operators} for hardware in info.profiles(summary)]
    assert [origin["gemm.bf16"] for origin in origins] == ["transferred", "other-engine"]
    inputs = manifest(("simulate",), tuple(deployment.profiles.values()), None, 0).inputs
    assert sorted(inputs) == ["hardware:mi300x", "hardware:mi300x (2)"]
    words, operators = dict(explain(deployment)), load_kernels("mi300x", "sglang-0.5").operators
    other = [key for key, operator in operators.items() if operator.other_engine is not None]
    assert (
        f"engine sglang-0.5: kernels of profile mi300x, but {len(other)} operators of another engine" in words["pool d"]
    )


def test_pools_under_one_engine_are_not_told_apart(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PAIR.replace("sglang-0.5", "vllm-0.24"))
    experiment = set_up(load_specs(None, None, "chat", str(plan)), requests=20)
    assert set(experiment.deployment.profile_labels.values()) == {"mi300x"}
    basis = cost_basis(experiment.deployment, experiment.run())
    assert basis is not None
    assert "pools" not in basis.to_data()
