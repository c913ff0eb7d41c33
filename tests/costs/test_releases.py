"""A plan gets, of each operator, the kernels of the release nearest to its engine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.costs.shipped import RELEASES, fitted
from simtune.api import load_specs, set_up
from simtune.costs.other_engines import for_preset, load_kernels
from simtune.costs.predict import Profile
from simtune.costs.releases import BY_RELEASE, RELEASE_LOG_SD, EngineRelease, engine_release, release_profiles
from simtune.costs.software import engine_of, release_of_software, releases_in
from simtune.report.hardware_page import facts
from simtune.report.plan_in_words import explain
from simtune.sim.run_basis import cost_basis, note
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Hardware, Operator
from tests.costs.made_up import hardware
from tests.costs.test_profiles import NEWER

MLA = {"batch": 16.0, "context": 4096.0, "heads": 128.0, "hidden": 7168.0, "q_rank": 1536.0}
MLA |= {"latent": 512.0, "rope": 64.0, "nope": 128.0, "v_dim": 128.0}


def shipped(name: str) -> Hardware:
    """A profile of a further release."""
    return load_hardware(str(RELEASES / name))


def software(operator: Operator) -> str:
    """The software that an operator's table names."""
    assert operator.provenance.software is not None
    return operator.provenance.software


def test_releases_are_read_from_names() -> None:
    assert release_of_software("TRTLLM 1.3.0rc23") == (1, 3, 0, 23)
    assert release_of_software("VLLM") == release_of_software("SGLang unknown") == release_of_software(None) == ()
    assert releases_in("TensorRT-LLM 1.2 and 1.3") == ((1, 2), (1, 3))
    vllm = engine_release("vllm-0.24")
    assert vllm == EngineRelease("vllm", ((0, 24),))
    assert engine_release("vllm@0.31") == EngineRelease("vllm", ((0, 31),)), "not that of its preset, 0.28"
    assert engine_release("vllm") == engine_release("vllm-0.33")
    assert engine_release(None) is engine_release("llamacpp") is engine_release("transformers") is None


@pytest.mark.parametrize(
    ("runs", "ordered"),
    [
        ("0.33", ["0.31.0", "0.25.0", "0.24.0"]),
        ("0.28", ["0.25.0", "0.31.0", "0.24.0", "0.19.0"]),
        ("0.28", ["0.27.1", "0.31.0"]),
        ("0.24", ["0.24.0", "0.25.0"]),
        ("0.11", ["0.19.0", "0.24.0"]),
        ("1.4", ["1.3.0rc23", "1.3.0rc20"]),
        ("1.2", ["1.3.0rc20", "1.3.0rc23"]),
        ("0.5.16", ["0.5.17", "0.5.14", "0.5.20"]),
    ],
)
def test_the_nearest_release_comes_first(runs: str, ordered: list[str]) -> None:
    engine = EngineRelease("vllm", releases_in(runs))
    by_distance = sorted(set(ordered), key=lambda name: engine.distance(release_of_software(f"x {name}")))
    assert by_distance == ordered
    assert [name for name in ordered if engine.runs(release_of_software(f"x {name}"))] == [
        name for name in ordered if name.startswith(f"{runs}.")
    ]


def test_every_profile_of_a_further_release_has_a_recipe() -> None:
    assert {folder.name for folder in RELEASES.iterdir()} == {*NEWER}


@pytest.mark.parametrize("name", NEWER)
def test_a_profile_of_a_further_release_is_found_and_has_what_the_first_lacks(name: str) -> None:
    profile, first = shipped(name), load_hardware(NEWER[name]["newer"])
    family = engine_of(profile.engine)
    assert family is not None
    assert name in [further.name for further in release_profiles(first.name, family)]
    assert name in [further.name for further in release_profiles(NEWER[name]["facts"], family)]
    assert profile.operators
    assert (profile.device, profile.links) == (first.device, first.links)
    for key, operator in profile.operators.items():
        assert engine_of(software(operator)) == family, key
        assert release_of_software(software(operator)), key
        assert key not in first.operators or software(first.operators[key]) != software(operator), key


@pytest.mark.slow
@pytest.mark.parametrize("name", NEWER)
def test_a_profile_of_a_further_release_is_a_fit_of_the_published_tables(name: str, data_dir: Path) -> None:
    profile, fresh = shipped(name), fitted(name, NEWER[name], data_dir)
    assert set(profile.operators) == set(fresh.operators)
    for key, operator in fresh.operators.items():
        assert profile.operators[key].base.model_dump() == pytest.approx(operator.base.model_dump(), rel=0.01), key
        assert profile.operators[key].provenance == operator.provenance, key


def test_a_plan_gets_the_nearest_release_and_a_wider_interval_where_it_is_another() -> None:
    older, newer = (load_kernels("h100-sxm", engine) for engine in ("vllm-0.24", "vllm-0.33"))
    key = "mla_decode_block.bf16"
    assert (software(older.operators[key]), software(newer.operators[key])) == ("VLLM 0.24.0", "VLLM 0.25.0")
    assert (older.operators[key].other_release, newer.operators[key].other_release) == (None, "vLLM 0.25.0")
    first, further = load_hardware("h100-sxm"), shipped("h100-sxm-vllm-0.31")
    at = [Profile(p).predictor("mla_decode_block", "bf16") for p in (first, further, older, newer)]
    seconds, log_sd = zip(*((float(p.seconds(**MLA)), float(p.log_sd(**MLA))) for p in at), strict=True)
    assert seconds[2:] == seconds[:2]
    assert seconds[1] < 0.8 * seconds[0], "its kernels changed in 0.25"
    assert log_sd[2] == log_sd[0]
    assert log_sd[3] == pytest.approx((log_sd[1] ** 2 + RELEASE_LOG_SD["mla_decode_block"] ** 2) ** 0.5, rel=1e-4)


def test_kernels_that_were_measured_once_are_named_as_of_another_release() -> None:
    profile = load_kernels("l40s", "vllm-0.33")
    assert profile.operators["gemm.bf16"].other_release == "vLLM 0.24.0"
    assert profile.operators["all_gather.bf16"].other_release is None, "NCCL's"
    first, same = load_hardware("l40s"), load_kernels("l40s", "vllm-0.24")
    assert same.operators["gemm.bf16"] == first.operators["gemm.bf16"]
    assert {o.other_release for o in same.operators.values()} == {None, "vLLM 0.19.0", "vLLM 0.14.0"}, "carried over"
    assert for_preset(hardware(), None) == hardware()


def test_kernels_of_the_engine_stand_for_those_of_another() -> None:
    first, nearest = load_hardware("h100-sxm"), load_kernels("h100-sxm", "vllm-0.24")
    key = "gemm.fp8_block"
    assert engine_of(software(first.operators[key])) == "trtllm"
    assert (nearest.operators[key].other_engine, nearest.operators[key].other_release) == (None, "vLLM 0.31.0")


def test_a_plan_that_names_a_release_gets_its_kernels(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    pool = "{name: a, role: mixed, hardware: h100-sxm, engine: vllm@0.31, instances: 1}"
    plan.write_text(f"schema: simtune/plan@1\nname: p\nmodel: llama-3.1-8b\npools: [{pool}]\n")
    (profile,) = set_up(load_specs(None, None, "chat", str(plan)), requests=1).deployment.profiles.values()
    gemm, attention = (profile.operators[key] for key in ("gemm.bf16", "decode_attention.bf16"))
    assert (software(gemm), gemm.other_release) == ("VLLM 0.31.0", None)
    assert (software(attention), attention.other_release) == ("VLLM 0.25.0", "vLLM 0.25.0")


def test_show_explain_and_the_basis_of_a_run_name_other_releases(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    pool = "{name: a, role: mixed, hardware: h100-sxm, engine: vllm-0.33, instances: 1}"
    plan.write_text(f"schema: simtune/plan@1\nname: p\nmodel: llama-3.1-8b\npools: [{pool}]\n")
    experiment = set_up(load_specs(None, None, "chat", str(plan)), requests=20)
    basis = cost_basis(experiment.deployment, experiment.run())
    assert basis is not None
    assert set(basis.other_releases) == {"vLLM 0.25.0", "vLLM 0.31.0"}
    assert 0.5 < sum(basis.other_releases.values()) < 1
    assert "of the step time rests on kernels of another release (vLLM 0.25.0, vLLM 0.31.0)" in (note(basis) or "")
    assert {o.operator: o.log_sd for o in basis.operators}["gemm"] > RELEASE_LOG_SD["gemm"]
    words = " ".join(dict(explain(experiment.deployment))["pool a"])
    assert ", and of other releases " in words
    assert "5 of vLLM 0.31.0" in words
    shown = dict(facts(load_hardware("h100-sxm")))
    assert "5 operators of 0.31.0; a plan gets of each operator the release nearest" in shown["and by release"]
    assert "and by release" not in dict(facts(load_hardware("l40s")))
    assert set(BY_RELEASE) == {"vllm", "sglang", "trtllm"}
