"""Variants of a study's plans: merged over every pool, bounded by their own costs, named, certified, and written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from simtune.emit import to_build
from simtune.errors import Infeasible, SpecError, UsageError
from simtune.runs.engine_files import NO_ENGINE, engine_files
from simtune.specs.base import ErrorAt
from simtune.specs.catalog import KINDS, load_model
from simtune.specs.plan_words import in_words
from simtune.specs.pool import Pool
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.systems import Systems, unfolded
from simtune.specs.variants import DIMENSIONS, UNSEARCHED, at_path, check_fragments
from simtune.specs.workload import FixedLength, Poisson, Slo, Workload
from simtune.tuner.bounds.best_case import slo_bound
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.variant_gains import family_gains, variant_gains
from simtune.tuner.space.candidates import Candidate, space_of
from simtune.tuner.space.expressible import space_for
from tests.docs.reading import ROOT
from tests.tuner.fragments import FRAGMENTS, OF_PAIRS, with_variants
from tests.tuner.test_search import question as of_search
from tests.tuner.truths import MODEL, true_device

DEVICE = true_device().model_copy(update={"device": true_device().device.model_copy(update={"memory_bytes": 4e9})})
LOAD = Workload(
    name="load",
    requests=30,
    arrivals=Poisson(rate_rps=6.0),
    prompt=FixedLength(tokens=120),
    output=FixedLength(tokens=20),
)


def question(*fragments: dict[str, Any], combine: bool = False, devices: int = 2, **search: Any) -> Question:
    given = {"tp": (1,), "pp": (1,), "max_num_seqs": (16,), "max_num_batched_tokens": (256,)}
    study = Study(
        name="study",
        model=MODEL.name,
        hardware=(HardwareCount(profile="made-up", devices=devices),),
        workload=LOAD.name,
        slo=Slo(ttft_s={"p99": 2.0}, tpot_s={"p99": 0.2}),
        search=Search(**{**given, "confirm": Confirmation(draws=0), **search}),
    )
    asked = Question(study, MODEL, (DEVICE,), LOAD, None)
    return with_variants(asked, *fragments, combine=combine) if fragments else asked


def pools(asked: Question) -> dict[str, Pool]:
    """The pool that decodes of each plan, by the variant of the plan."""
    return {c.decoding.shape.variant: asked.plan(c, 1024).pools[-1] for c in space_of(asked.study).candidates}


def names(asked: Question) -> list[str]:
    return [candidate.name for candidate in space_of(asked.study).candidates]


def test_a_fragment_is_merged_over_every_pool() -> None:
    asked = question({}, {"research": {"kv_policy": {"kept": 0.25}}}, {"overlap": "ladder"}, combine=True)
    assert {label: (pool.studied.kv_policy, pool.overlap) for label, pool in pools(asked).items()} == {
        "": (None, None),
        "kept-0.25": (pools(asked)["kept-0.25"].studied.kv_policy, None),
        "overlap-ladder": (None, "ladder"),
        "kept-0.25-and-overlap-ladder": (pools(asked)["kept-0.25"].studied.kv_policy, "ladder"),
    }
    policy = pools(asked)["kept-0.25"].studied.kv_policy
    assert policy is not None
    assert policy.kept == 0.25


def test_a_fragment_replaces_the_choices_for_what_it_sets() -> None:
    asked = question({}, {"parallelism": {"tp": 2}}, {"batching": {"max_num_seqs": 4}}, {"instances": 1})
    assert names(asked) == [
        "tp1-pp1-x2-s16-t256",
        "tp1-pp1-v-instances-1-x1-s16-t256",
        "tp1-pp1-v-max-num-seqs-4-x2-s4-t256",
        "tp2-pp1-v-tp-2-x1-s16-t256",
    ]
    values: dict[str, Any] = {"weight_dtype": "fp8", "kv_dtype": "fp8", "prefix_caching": True, "expert_parallel": True}
    for name, path in DIMENSIONS.items():
        value = fragment = values.get(name, 2)
        for key in reversed(path):
            fragment = {key: fragment}
        (candidate,) = space_of(question(fragment).study).candidates
        assert candidate.decoding.names[name] == value, name
        assert at_path(asked.plan(candidate, 1024).pools[0].model_dump(), path) == value, name


def test_gpus_that_a_fragment_adds_are_counted() -> None:
    ring, apart = {"parallelism": {"cp": 2}}, {"research": {"afd": {"ffn_devices": 3}}}
    every = space_of(question({}, ring, apart, devices=4).study).candidates
    assert {c.name: c.num_gpus for c in every} == {
        "tp1-pp1-x4-s16-t256": 4,
        "tp1-pp1-cp2-v-cp-2-x2-s16-t256": 4,
        "tp1-pp1-ffn3-v-ffn-devices-3-x1-s16-t256": 4,
    }
    for candidate in every:
        plan = question(devices=4).plan(candidate, 1024)
        assert plan.num_devices == 4
        assert f"server{'s' * (plan.pools[0].instances > 1)} of {plural_gpus(plan.pools[0])}" in in_words(plan.name)


def test_instances_that_stand_by_are_counted_among_the_gpus_and_serve_nothing() -> None:
    asked = question({}, {"spare": 1}, devices=3)
    plain, spare = space_of(asked.study).candidates
    assert (plain.name, spare.name) == ("tp1-pp1-x3-s16-t256", "tp1-pp1-spare1-v-spare-1-x2-s16-t256")
    assert (plain.num_gpus, spare.num_gpus) == (3, 3)
    plan = asked.plan(spare, 1024)
    assert (plan.num_devices, plan.pools[0].instances, plan.pools[0].spare) == (3, 2, 1)
    assert in_words(spare.name).startswith("2 servers of 1 GPU and 1 to stand by")
    cache = PlanCache(asked, (plain, spare))
    settled = [cache.settled(candidate) for candidate in (plain, spare)]
    assert all(isinstance(candidate, Candidate) for candidate in settled)
    rates = [cache.capacity(candidate).rps for candidate in settled if isinstance(candidate, Candidate)]
    assert rates[1] == pytest.approx(rates[0] * 2 / 3)
    with pytest.raises(Infeasible, match="fits 1 made-up devices"):
        space_of(question({"spare": 1}, devices=1).study)


def test_a_day_has_no_spare_instances() -> None:
    asked = question({"decode": {"spare": 1}}, layouts=("prefill-decode",)).study
    day = {"startup_s": 1.0, "windows": [{"hours": 24.0, "rate_rps": 1.0}]}
    with pytest.raises(SpecError, match=r"search\.variants\.0: a day starts and stops replicas"):
        Study.from_text(yaml.safe_dump({**asked.to_data(), "day": day}))


def plural_gpus(pool: Pool) -> str:
    return f"{pool.devices} GPU{'s' * (pool.devices > 1)}"


def test_plans_of_mixed_pools_have_no_variant_that_changes_nothing_in_them() -> None:
    role, link = {"decode": {"overlap": "ladder"}}, {"link": {"path": "intra_node", "layerwise": True}}
    asked = question({}, role, link, {"overlap": "ladder"}, layouts=("mixed", "prefill-decode"), combine=True)
    mixed = {c.decoding.shape.variant for c in space_of(asked.study).candidates if len(c.pools) == 1}
    apart = {c.decoding.shape.variant for c in space_of(asked.study).candidates if len(c.pools) == 2}
    assert mixed == {"", "overlap-ladder"}
    assert apart == {variant.label for variant in asked.study.variants}
    plans = {
        c.decoding.shape.variant: asked.plan(c, 1024) for c in space_of(asked.study).candidates if len(c.pools) == 2
    }
    assert [pool.overlap for pool in plans["decode-overlap-ladder"].pools] == [None, "ladder"]
    assert [pool.overlap for pool in plans["overlap-ladder"].pools] == ["ladder", "ladder"]
    layerwise = [label for label, plan in plans.items() if plan.link is not None and plan.link.layerwise]
    assert layerwise
    assert all("layerwise" in label for label in layerwise)


def test_options_of_a_replaced_policy_are_left_out() -> None:
    asked = question({}, {"batching": {"policy": "sarathi"}})
    study = asked.study.model_copy(update={"batching": None})
    (_, changed) = space_of(study).candidates
    preset = {"batching": {"policy": "tensorrt-llm", "options": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}}
    assert changed.pools[0].pool(study, 1024, {"hardware": "made-up", **preset}).batching.options is None


def test_settings_that_contradict_a_plan_do_not_fit() -> None:
    asked = question({}, {"parallelism": {"expert_replicas": 2}}, expert_parallel=(False, True))
    cache = PlanCache(asked, space_of(asked.study).candidates)
    refused = [r.reason for c in space_of(asked.study).candidates if isinstance(r := cache.settled(c), Refused)]
    assert (
        "parallelism.expert_replicas: requires whole experts on each rank; set expert_parallel, or remove it" in refused
    )


def test_constraints_speak_of_variants() -> None:
    asked = question({}, {"overlap": "ladder"})
    study = asked.study.model_copy(update={"constraints": ("variant != 'overlap-ladder'",)})
    assert [candidate.decoding.shape.variant for candidate in space_of(study).candidates] == [""]


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=str)
def test_every_fragment_is_bounded_by_its_own_costs(fragment: dict[str, Any]) -> None:
    """Step costs, memory and capacity of a variant are those of the plan that is written for it."""
    fragment = {**fragment, "max_model_len": 512} if "max_model_len" in fragment else fragment
    asked = question(fragment)
    if "offload" in fragment.get("research", {}):
        (refused,) = [PlanCache(asked, every).settled(c) for every in [space_of(asked.study).candidates] for c in every]
        assert refused == Refused(
            "does_not_fit", "hardware made-up: no link to the host for offloaded weights; add links.host to its profile"
        )
        return
    settled, cache = settled_plans(asked)
    assert settled
    for candidate in settled:
        deployment = cache.deployment(candidate)
        assert deployment.pools[0].spec == cache.pool(candidate.pools[0])
        assert cache.capacity(candidate).rps > 0


def settled_plans(asked: Question) -> tuple[list[Candidate], PlanCache]:
    every = space_of(asked.study).candidates
    cache = PlanCache(asked, every)
    return [s for c in every if not isinstance(s := cache.settled(c), Refused)], cache


def test_less_kept_of_the_kv_cache_serves_no_less() -> None:
    asked = question({}, {"research": {"kv_policy": {"kept": 0.25}}}, {"host": {"step_s": 0.5, "per_sequence_s": 0.0}})
    settled, cache = settled_plans(asked)
    deployments = {c.decoding.shape.variant: cache.deployment(c) for c in settled}
    rps = {label: slo_bound(d, asked.stream(settled[0]), asked.study.slo).rps for label, d in deployments.items()}
    assert rps["kept-0.25"] >= rps[""] > rps["step-s-0.5-per-sequence-s-0.0"] == 0.0
    assert cache.memory(settled[1].pools[0]).num_blocks >= cache.memory(settled[0].pools[0]).num_blocks


def test_a_certificate_names_every_variant_and_is_checked() -> None:
    asked = question({}, {"overlap": "ladder"}, {"async_scheduling": False}, {"kv_cache": {"num_blocks": 40}})
    tuned = optimize(asked, jobs=1)
    certificate = certificate_of(tuned)
    assert certificate.variants == tuple(variant.label for variant in asked.study.variants)
    assert {fate.plan for fate in certificate.plans} == set(names(asked))
    audit = Audit(certificate, asked)
    assert audit.run(), audit.problems
    fewer = question({}, {"overlap": "ladder"})
    assert not Audit(certificate, fewer).run()


def test_a_study_without_variants_has_none_in_its_certificate() -> None:
    assert "variants" not in certificate_of(optimize(question(), jobs=1)).to_data()


# --- engines ----------------------------------------------------------------------------------------------


def test_each_engine_has_its_scheduler_its_host_times_and_its_kernels() -> None:
    asked = question({"engine": "sglang-0.5"}, {"engine": "trtllm-1.2"}, {"engine": "none"})
    policies = {label: (pool.engine, pool.batching.policy) for label, pool in pools(asked).items()}
    assert policies == {
        "sglang-0.5": ("sglang-0.5", "sglang"),
        "trtllm-1.2": ("trtllm-1.2", "tensorrt-llm"),
        "none": ("none", "vllm-fcfs"),
    }
    assert pools(asked)["sglang-0.5"].host is not None
    engines = {name: replace(engine, hardware=(true_device(),)) for name, engine in asked.engines.items()}
    other = replace(asked, engines=engines)
    for candidate in space_of(asked.study).candidates:
        assert other.hardware_of(candidate.pools[0]) is engines[candidate.pools[0].shape.engine].hardware[0]


# --- plans for no engine ----------------------------------------------------------------------------------


def written(*fragments: dict[str, Any]) -> dict[str, str]:
    """The engine files of the chosen plan of a study with these variants alone."""
    asked = question(*fragments)
    (candidate,) = space_for(asked).candidates
    settled = PlanCache(asked, [candidate]).settled(candidate)
    assert isinstance(settled, Candidate)
    return dict(engine_files(asked.deploy(settled, 1024), simulated_only=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fragment", "why", "part"),
    [
        ({"overlap": "ladder"}, "overlap: is simulated only", "overlap (the model runner and its kernels)"),
        (
            {"research": {"kv_policy": {"kept": 0.5}}},
            "research.kv_policy: is",
            "research.kv_policy (the attention backend",
        ),
        (
            {"batching": {"policy": "orca", "max_num_batched_tokens": 1024}},
            "no engine has policy orca",
            "batching.policy orca (the scheduler)",
        ),
        ({"engine": "none", "overlap": "ladder"}, "the plan is for no engine", "overlap (the model runner"),
        ({"cuda_graphs": False, "kv_cache": {"preemption": "swap"}}, "no engine schedules and preempts", ""),
    ],
)
def test_a_plan_that_no_engine_can_be_given_says_why_and_what_is_to_be_built(
    fragment: dict[str, Any], why: str, part: str
) -> None:
    files = written(fragment)
    assert list(files) == [NO_ENGINE]
    assert why in files[NO_ENGINE]
    assert part in files[NO_ENGINE]


def test_a_variant_that_an_engine_has_settings_for_is_written() -> None:
    assert "engine/vllm-mixed.yaml" in written({"cuda_graphs": False})
    (candidate,) = space_of(question({"overlap": "ladder"}).study).candidates
    plan = question().plan(candidate, 1024)
    assert to_build(plan) == ["overlap (the model runner and its kernels)"]
    deployment = question().deploy(candidate, 1024)
    with pytest.raises(UsageError, match="overlap: is simulated only"):
        engine_files(deployment)


def test_what_an_engine_refuses_without_the_variant_stays_out() -> None:
    """A token budget below the seats is refused for the plan as it is, so no variant of it is searched either."""
    asked = question({}, {"overlap": "ladder"}, tp=(3,), devices=3)
    with pytest.raises(Infeasible, match="the engine refuses all 2 plans"):
        space_for(asked)


# --- all that published systems need ----------------------------------------------------------------------

_REFUSED = {"role", "hardware", "stages", "control", "links"}
"""Keys in setups of published systems that no fragment may have, each with its reason in UNSEARCHED."""


def setups() -> list[dict[str, Any]]:
    """Every side of every published system that is run, with all its settings."""
    sides = []
    for path in sorted((ROOT / "simtune" / "systems").glob("*.yaml")):
        systems = KINDS["systems"].from_file(path)
        assert isinstance(systems, Systems)
        for system in systems.systems:
            for side in systems.sides(system).values():
                sides += unfolded(side)
    return sides


def fragments_of(side: dict[str, Any]) -> list[dict[str, Any]]:
    """The pools of a side and its plan, as fragments."""
    plan = {key: value for key, value in side.get("plan", {}).items() if key in ("router", "decode_router", "link")}
    refused = {key for key in side.get("plan", {}) if key not in plan}
    assert refused <= UNSEARCHED.keys(), refused
    pools = [_over(side.get("pool", {}), pool) for pool in ({}, *side.get("pools", ()))]
    left_out = (*UNSEARCHED, "name", "share")
    fragments = [{key: value for key, value in {**pool, **plan}.items() if key not in left_out} for pool in pools]
    # Of pools on the same GPUs, the shares of all roles are one fragment.
    shares = {pool["role"]: {key: pool["share"][key] for key in ("processors", "bandwidth")}
              for pool in pools if "share" in pool}  # fmt: skip
    return [*fragments, {"share": shares}] if shares else fragments


def _over(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _over(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return result


def test_every_setting_of_a_published_system_can_be_a_fragment_but_those_with_a_reason() -> None:
    every = setups()
    cuts = [{"tp": 1, "pp": 1, "attention_dp": dp, "expert_parallel": ep} for dp in (1, 8) for ep in (False, True)]
    keys: set[str] = set()
    for side in every:
        for pool in (side.get("pool", {}), *side.get("pools", ()), side.get("plan", {})):
            keys |= pool.keys()
        for fragment in fragments_of(side):
            try:
                check_fragments([fragment], combine=False, pairs=True, cuts=cuts)
            except ErrorAt as error:
                raise AssertionError(f"{fragment}: {error.at}: {error}") from None
    assert len(every) > 200
    assert keys & UNSEARCHED.keys() == _REFUSED


def test_every_fragment_of_the_list_is_searched() -> None:
    """Each of the fragments is a plan of its own in a space, or does not fit for a stated reason."""
    for fragment in FRAGMENTS + OF_PAIRS:
        asked = question(fragment, devices=4, layouts=("prefill-decode",))
        (label,) = {candidate.decoding.shape.variant for candidate in space_of(asked.study).candidates}
        assert label
        assert in_words(space_of(asked.study).candidates[0].name).endswith(f"variant {label}")


def test_a_study_file_with_engines_and_variants_is_loaded_with_their_kernels(tmp_path: Path) -> None:
    from simtune.api import load_question

    file = tmp_path / "study.yaml"
    file.write_text(
        "schema: simtune/study@1\nname: s\nmodel: llama-3.1-8b\nhardware: {profile: h100-sxm, devices: 2}\n"
        "workload: chat\nslo: {ttft_s: {p99: 1.0}}\nengine: [vllm-0.24, sglang-0.5]\n"
        "search: {tp: [1], variants: [{}, {engine: none}]}\n"
    )
    asked = load_question(str(file))
    profiles = {name: engine.hardware[0].name for name, engine in asked.engines.items()}
    assert profiles == {"vllm-0.24": "h100-sxm", "sglang-0.5": "h100-sxm-sglang", "none": "h100-sxm"}
    assert load_model("llama-3.1-8b") == asked.model
    plans = {pool.engine: pool.hardware for pool in pools(asked).values()}
    assert plans == {"vllm-0.24": "h100-sxm", "sglang-0.5": "h100-sxm-sglang", "none": "h100-sxm"}


def test_each_variant_has_a_plan_that_was_simulated_and_a_bound() -> None:
    slow = {"host": {"step_s": 0.05, "per_sequence_s": 0.0}}
    tuned = optimize(question({}, {"overlap": "ladder"}, slow), jobs=1)
    gains = {gain.variant: gain for gain in variant_gains(tuned)}
    assert list(gains) == ["", "overlap-ladder", "step-s-0.05-per-sequence-s-0.0"]
    for label, gain in gains.items():
        rows = [row for row in tuned.rows if row.candidate.decoding.shape.variant == label]
        assert any(row.simulations or row.same_as for row in rows), label
        assert gain.reached is not None
        assert gain.at_most is not None
        assert gain.reached <= gain.at_most * (1 + 1e-9)
    chosen = gains[tuned.chosen.candidate.decoding.shape.variant]
    assert (chosen.plan, chosen.reached) == (tuned.chosen.candidate.name, tuned.value)
    assert (gains["step-s-0.05-per-sequence-s-0.0"].reached or 0.0) < 0.5 * tuned.value
    assert variant_gains(optimize(question(), jobs=1)) == []


def test_prefill_decode_is_put_against_mixed_where_both_are_searched() -> None:
    sizes: dict[str, Any] = {"max_num_seqs": (64,), "max_num_batched_tokens": (2048,)}
    asked = of_search(tp=(1,), pp=(1,), devices=2, layouts=("mixed", "prefill-decode"), **sizes)
    tuned = optimize(asked, jobs=1)
    first, second = family_gains(tuned)
    assert {first.family, second.family} == {"mixed", "prefill/decode"}
    assert (first.plan, first.reached) == (tuned.chosen.candidate.name, tuned.value)
    assert second.at_most is not None
    assert second.at_most >= (second.reached or 0.0)
    assert family_gains(optimize(of_search(tp=(1,), pp=(1,), devices=1, **sizes), jobs=1)) == []
