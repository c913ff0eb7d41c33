"""Variants of a study: what a fragment may set, its name, combinations, and what is refused where."""

from __future__ import annotations

import pytest

from simtune.errors import SpecError
from simtune.sim.plan_parts import problems
from simtune.specs.pool import Pool
from simtune.specs.study import Study
from simtune.specs.variants import MOST_VARIANTS, UNSEARCHED

HEAD = """schema: simtune/study@1
name: s
model: llama-3.1-8b
hardware: {profile: h100-sxm, devices: 8}
workload: chat
slo: {ttft_s: {p99: 1.0}}
"""
EAGLE = "{drafter: {kind: eagle, checkpoint: org/head}, acceptance: eagle3-llama-3.1-8b}"


def study(*fragments: str, combine: bool = False, layouts: str = "mixed", more: str = "") -> Study:
    lines = "".join(f"  - {fragment}\n" for fragment in fragments)
    search = f"search:\n  layouts: [{layouts}]\n  combine: {str(combine).lower()}\n  variants:\n{lines}"
    return Study.from_text(HEAD + search + more, "study.yaml")


def labels(*fragments: str, combine: bool = False, more: str = "") -> list[str]:
    return [variant.label for variant in study(*fragments, combine=combine, more=more).variants]


@pytest.mark.parametrize(
    ("fragment", "label"),
    [
        ("{}", ""),
        ("{overlap: ladder}", "overlap-ladder"),
        ("{batching: {policy: layered-prefill}}", "policy-layered-prefill"),
        ("{research: {kv_policy: {kept: 0.25}}}", "kept-0.25"),
        ("{parallelism: {cp: 2}, research: {cp_ring: both_ways}}", "cp-2-cp-ring-both-ways"),
        ("{router: {kind: prefix_aware}}", "router-prefix-aware"),
        ("{async_scheduling: false, cuda_graphs: true}", "no-async-scheduling-cuda-graphs"),
        ("{fused: [norm, rope]}", "fused-norm-rope"),
        ("{engine: sglang-0.5}", "sglang-0.5"),
        ("{name: quarter, research: {kv_policy: {kept: 0.25}}}", "quarter"),
        (f"{{speculation: {EAGLE}}}", "eagle"),
        ("{model: ../fp8/llama-fp8.yaml, score: 67.5}", "llama-fp8"),
    ],
)
def test_a_fragment_is_named_by_its_settings_unless_it_has_a_name(fragment: str, label: str) -> None:
    assert labels(fragment) == [label]


def test_a_study_without_variants_has_its_plans_as_they_are() -> None:
    assert [variant.label for variant in Study.from_text(HEAD).variants] == [""]


def test_fragments_that_set_the_same_key_are_not_combined() -> None:
    cache, ring = "{research: {kv_policy: {kept: 0.25}}}", "{parallelism: {cp: 2}}"
    bits = "{research: {kv_policy: {bits: 4}}}"
    assert labels("{}", cache, ring, combine=True) == ["", "kept-0.25", "cp-2", "kept-0.25-and-cp-2"]
    assert labels(cache, "{research: {kv_policy: {kept: 0.5}}}", combine=True) == ["kept-0.25", "kept-0.5"]
    assert labels(cache, bits, combine=True) == ["kept-0.25", "bits-4", "kept-0.25-and-bits-4"]
    assert labels("{research: {kv_policy: null}}", cache, combine=True) == ["no-kv-policy", "kept-0.25"]
    both = study(cache, ring, combine=True).variants[-1]
    assert both.pool == {"research": {"kv_policy": {"kept": 0.25}}, "parallelism": {"cp": 2}}


def test_each_of_several_engines_is_under_every_variant_that_names_none() -> None:
    engines = "engine: [vllm-0.24, trtllm-1.2]\n"
    assert labels("{}", "{overlap: ladder}", "{engine: none}", more=engines) == [
        "vllm-0.24",
        "trtllm-1.2",
        "vllm-0.24-and-overlap-ladder",
        "trtllm-1.2-and-overlap-ladder",
        "none",
    ]
    without = Study.from_text(HEAD + engines)
    assert [(variant.label, variant.engine) for variant in without.variants] == [
        ("vllm-0.24", "vllm-0.24"),
        ("trtllm-1.2", "trtllm-1.2"),
    ]


def test_a_study_with_variants_reads_back_as_it_was_written() -> None:
    asked = study("{}", "{overlap: ladder}", combine=True, more="engine: [vllm-0.24, sglang-0.5]\n")
    assert Study.from_text(asked.to_yaml()) == asked


@pytest.mark.parametrize(
    ("fragment", "problem"),
    [
        ("{overlp: ladder}", ":11:6: search.variants.0.overlp: unknown key, did you mean overlap?"),
        ("{overlap: laddr}", ":11:6: search.variants.0.overlap: must be one of two_batches, split_sequence, ladder"),
        (
            "{research: {kv_policy: {kept: 2}}}",
            ":11:29: search.variants.0.research.kv_policy.kept: must be less than or",
        ),
        ("{kv_cache: {bock_size: 16}}", ":11:17: search.variants.0.kv_cache.bock_size: unknown key, did you mean"),
        ("{fused: [norm, rop]}", ":11:20: search.variants.0.fused.1: must be one of norm, rope, attention"),
        ("{research: {cp_ring: both_ways}}", "search.variants.0.research.cp_ring: requires ranks that share"),
        ("{parallelism: {expert_replicas: 3}}", "search.variants.0.parallelism.expert_replicas: requires whole"),
        ("{router: {kind: prefix_awar}}", ":11:6: search.variants.0.router: unknown kind 'prefix_awar'"),
        ("{link: {path: nvlink}}", ":11:6: search.variants.0.link: has no effect if all plans have only mixed pools"),
        ("{decode: {overlap: ladder}}", ":11:6: search.variants.0.decode: has no effect if all plans have only mixed"),
        ("{engine: 3}", ":11:6: search.variants.0.engine: must be an engine preset"),
        ("{name: a b, overlap: ladder}", ":11:6: search.variants.0.name: must consist of letters, digits"),
        (
            "{speculation: {drafter: {kind: ngram, lookup_max: 4}}}",
            ":11:6: search.variants.0.speculation: lacks acceptance",
        ),
        ("ladder", ":11:5: search.variants.0: must be a mapping"),
        ("{score: 68.0}", "search.variants.0.score: is of a checkpoint; write its `model` beside it, or the score of"),
        ("{model: x, score: high}", ":11:16: search.variants.0.score: must be a valid number"),
        ("{model: x, score: .nan}", "search.variants.0.score: must be a finite number"),
    ],
)
def test_a_fragment_that_no_plan_can_have_is_refused_at_its_key(fragment: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        study(fragment)
    assert str(caught.value).startswith("study.yaml:")
    assert problem in str(caught.value)


def test_a_floor_on_the_score_needs_a_score_of_every_checkpoint() -> None:
    floor, scored = "constraints: [score >= 67]\n", "{model: llama-fp8.yaml, score: 67.5}"
    variants = study("{}", scored, more=f"{floor}score: 68.4\n").variants
    assert [variant.scored(68.4) for variant in variants] == [68.4, 67.5]
    for fragments, more, problem in (
        (("{}", scored), floor, "constraints.0: llama-3.1-8b has no score; write `score` in the study, beside `model`"),
        (
            ("{model: x.yaml}",),
            f"{floor}score: 68.4\n",
            "constraints.0: x.yaml has no score; write `score` beside `model`",
        ),
        (("{}",), "score: 68.4\n", "score: has no effect without a variant that has another model; remove it"),
    ):
        with pytest.raises(SpecError) as caught:
            study(*fragments, more=more)
        assert problem in str(caught.value)


def test_a_fixed_pool_serves_no_other_checkpoint() -> None:
    batching = "{max_num_seqs: 8, max_num_batched_tokens: 8}"
    fixed = f"fixed: [{{role: prefill, hardware: h100-sxm, instances: 1, batching: {batching}}}]\n"
    with pytest.raises(SpecError, match=r"search\.variants\.0\.model: a fixed pool serves the study's model"):
        study("{model: llama-fp8.yaml}", layouts="prefill-decode", more=fixed)


def test_a_role_has_keys_of_a_pool_alone() -> None:
    for fragment, problem in (
        ("{decode: {overlp: ladder}}", "search.variants.0.decode.overlp: unknown key, did you mean overlap?"),
        ("{prefill: {kv_cache: {watermark: 2}}}", "search.variants.0.prefill.kv_cache.watermark: must be less than"),
        ("{prefill: {engine: none}}", "search.variants.0.prefill.engine: unknown key"),
        ("{prefill: 3}", "search.variants.0.prefill: must be a mapping"),
    ):
        with pytest.raises(SpecError) as caught:
            study(fragment, layouts="prefill-decode")
        assert problem in str(caught.value)


def test_a_setting_is_accepted_if_some_parallelism_of_the_study_allows_it() -> None:
    with pytest.raises(SpecError, match="expert_locality"):
        study("{research: {expert_locality: 0.5}}")
    more = "  expert_parallel: [false, true]\n  attention_dp: [1, 2]\n"
    assert study("{research: {expert_locality: 0.5}}", more=more).variants[0].label == "expert-locality-0.5"


def test_a_key_that_cannot_be_searched_is_refused_with_the_reason() -> None:
    for key, reason in UNSEARCHED.items():
        with pytest.raises(SpecError) as caught:
            study(f"{{{key}: x}}")
        assert f"search.variants.0.{key}: cannot be searched as a variant: {reason}" in str(caught.value)


def test_every_other_key_of_a_pool_is_known() -> None:
    for key in Pool.model_fields.keys() - UNSEARCHED.keys() - {"name"}:
        assert "unknown key" not in problem_of(f"{{{key}: null}}"), key


def problem_of(fragment: str) -> str:
    """Return the problems of a fragment, in words; empty without any."""
    try:
        study(fragment)
    except SpecError as error:
        return str(error)
    return ""


def test_names_and_numbers_of_variants_are_limited() -> None:
    with pytest.raises(SpecError, match=r"search\.variants\.1: is called overlap-ladder, as variant 1 is"):
        study("{overlap: ladder}", "{overlap: ladder}")
    many = [f"{{kv_cache: {{{key}: {value}}}}}" for key, value in (("block_size", 32), ("watermark", 0.1))]
    many += ["{overlap: ladder}", "{async_scheduling: false}", "{cuda_graphs: false}", "{weight_dtype: fp8}"]
    many += ["{instances: 1}", "{max_model_len: 8192}", "{exposed_host: all}"]
    with pytest.raises(SpecError, match=f"more than {MOST_VARIANTS} combinations"):
        study(*many, combine=True)
    with pytest.raises(SpecError, match=r"search\.combine: has no effect without variants"):
        Study.from_text(HEAD + "search: {combine: true}\n")
    drafter = f"speculation:\n- {{name: eagle, {EAGLE[1:-1]}}}\n"
    with pytest.raises(
        SpecError, match=r"search\.variants\.0\.speculation: a drafter of the study is called eagle too"
    ):
        study(f"{{speculation: {EAGLE}}}", more=drafter)


def test_many_fragments_of_which_no_two_go_together_are_not_combined() -> None:
    many = [f"{{kv_cache: {{memory_utilization: 0.{number}}}}}" for number in range(10, 70)]
    assert len(labels(*many, combine=True)) == 60


def test_parts_from_outside_that_a_fragment_names_are_checked_where_it_names_them() -> None:
    asked = study(
        "{batching: {policy: 'nowhere.here:Mine'}}",
        "{decode: {batching: {policy: 'nowhere.here:Mine'}}}",
        "{router: {kind: 'nowhere.here:Second'}}",
        "{batching: {policy: sarathi}}",
        layouts="prefill-decode",
    )
    places = [".".join(map(str, at)) for at, _ in problems(asked)]
    assert places == [
        "search.variants.0.batching.policy",
        "search.variants.1.decode.batching.policy",
        "search.variants.2.router.kind",
    ]
