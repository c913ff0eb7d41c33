"""Drafters in a study: chosen for the load and the cut of the GPUs, tried beside none, and kept with the reason."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import yaml

from simtune.emit import ENGINES
from simtune.errors import SpecError, UsageError
from simtune.sim.drafting import Drafting
from simtune.specs.acceptance import Acceptance, PerPosition, PerRank
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.drafters import DraftModel, Eagle, Medusa
from simtune.specs.feedback import StepRule
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, Parallelism, Pool
from simtune.specs.schemes import (
    Adaptive,
    BatchRange,
    ByBatch,
    Chain,
    Dsi,
    DynamicTree,
    Frontier,
    Pearl,
    Scheme,
    StaticTree,
    Threshold,
    TokenBudget,
)
from simtune.specs.speculation import DrafterChoice, Speculation
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import FixedLength, Poisson, Slo, Workload
from simtune.tuner.bounds import Capacity
from simtune.tuner.drafting import (
    Draft,
    DraftContexts,
    DraftGrid,
    described,
    round_costs,
    schedule,
)
from simtune.tuner.drafting.choose import NONE, DraftSetting
from simtune.tuner.drafting.study_drafters import batches_up_to
from simtune.tuner.plan_cache import PlanCache
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.candidates import Candidate, space_of
from simtune.workload.requests import RequestStream, build_stream

VLLM = ENGINES["vllm"]
MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
HEAD = Eagle(checkpoint="org/head", draft_vocab_size=32000)


def load(prompt: int = 900, output: int = 200, rate_rps: float = 8.0, requests: int = 300) -> Workload:
    return Workload(
        name="load",
        requests=requests,
        arrivals=Poisson(rate_rps=rate_rps),
        prompt=FixedLength(tokens=prompt),
        output=FixedLength(tokens=output),
    )


def draft(*conditional: float, scheme: Scheme | None = None, model: str | None = None) -> Draft:
    acceptance = Acceptance(
        name="mine", origin="assumed", source="made up", rates=PerPosition(conditional=conditional or (0.8, 0.8, 0.8))
    )
    drafter = HEAD if model is None else DraftModel(model=model)
    drafting = Drafting(acceptance, None if model is None else load_model(model))
    return Draft(DrafterChoice(name="eagle3", drafter=drafter, acceptance="mine", scheme=scheme), drafting)


def pool(max_num_seqs: int = 256, **more: Any) -> Pool:
    batching = Batching(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192)
    return Pool(hardware="h100-sxm", instances=1, batching=batching, **more)


def question(*drafts: Draft, workload: Workload | None = None, **search: Any) -> Question:
    space: dict[str, Any] = {"tp": (1,), "pp": (1,), "max_num_seqs": (64,), "max_num_batched_tokens": (2048,)}
    space |= {"confirm": Confirmation(draws=0), **search}
    workload = workload or load()
    study = Study(
        name="study",
        model=MODEL.name,
        hardware=(HardwareCount(profile="h100-sxm", devices=1),),
        workload=workload.name,
        slo=Slo(ttft_s={"p99": 1.0}, tpot_s={"p99": 0.012}),
        speculation=tuple(d.choice for d in drafts),
        search=Search(**space),
    )
    return Question(study, MODEL, (HARDWARE,), workload, None, drafts)


def drafting(speculation: Speculation) -> Candidate:
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    return Candidate.mixed("h100-sxm", 1, drafter="eagle3", speculation=speculation, **settings)


# --- the schedule -----------------------------------------------------------------------------------------


def test_contexts_are_those_at_which_the_load_decodes() -> None:
    stream = build_stream(load(prompt=900, output=248), None, requests=100, seed=0)
    assert DraftContexts.of(stream) == DraftContexts((1024,), (1.0,))
    short = build_stream(load(prompt=100, output=56), None, requests=100, seed=0)
    both = DraftContexts.of(stream), DraftContexts.of(short)
    assert both[1] == DraftContexts((128,), (1.0,))
    assert batches_up_to(1) == (1,)
    assert batches_up_to(96) == (1, 2, 4, 8, 16, 32, 64, 96)


def test_cells_that_do_not_fit_have_no_share() -> None:
    found = schedule(draft(), MODEL, HARDWARE, pool(512), DraftContexts.even((512, 16384)))
    assert found.batches[-1] == 512
    assert found.shares[-1].tolist() == pytest.approx([1 / len(found.batches), 0])
    assert (found.shares[0] > 0).all()
    facts = described(draft(), found)
    assert [cell["occurs"] for cell in facts["cells"][-1]] == [True, False]
    # A long context alone leaves no room for the largest batches, which are then not looked at.
    assert schedule(draft(), MODEL, HARDWARE, pool(512), DraftContexts.even((16384,))).batches[-1] < 64


def chosen(drafts: Draft, on: Pool, requests: RequestStream) -> Speculation | None:
    grid = DraftGrid.of(drafts, MODEL, HARDWARE, on, DraftContexts.of(requests))
    return grid.speculation(drafts, round_costs(drafts, MODEL, HARDWARE, on))


def test_what_drafts_is_chosen_for_the_load() -> None:
    weak = draft(0.45, 0.45, 0.45)
    short = build_stream(load(prompt=400, output=200), None, requests=50, seed=0)
    long = build_stream(load(prompt=8000, output=400), None, requests=50, seed=0)
    on_short = chosen(weak, pool(512), short)
    assert on_short is not None
    assert isinstance(on_short.scheme, ByBatch)
    assert on_short.scheme.tokens_for(1) == 3
    assert on_short.scheme.tokens_for(512) == 0, "compute-bound: switched off"
    on_long = chosen(weak, pool(64), long)
    assert on_long is not None
    assert isinstance(on_long.scheme, ByBatch | Chain)
    assert on_long.acceptance == "mine"
    assert chosen(draft(0.01), pool(), short) is None


def test_a_pipeline_batches_less() -> None:
    halves = pool(256).model_copy(update={"parallelism": pool().parallelism.model_copy(update={"pp": 2})})
    assert schedule(draft(), MODEL, HARDWARE, halves, DraftContexts.even((512,))).batches[-1] == 128


def test_medusa_heads_limit_the_depth() -> None:
    rates = PerRank(probability=tuple((0.7, 0.1) for _ in range(6)))
    acceptance = Acceptance(name="m", origin="assumed", source="made up", rates=rates)
    heads = Draft(DrafterChoice(drafter=Medusa(heads=3, checkpoint="x"), acceptance="m"), Drafting(acceptance))
    found = schedule(heads, MODEL, HARDWARE, pool(8), DraftContexts.even((512,)), max_nodes=16)
    assert max(setting.depth for setting in found.settings) == 3
    facts = described(heads, found)
    nodes = {tuple(node["path"]): node["probability"] for node in facts["draft"]["nodes"]}
    assert len(nodes) > 3
    assert nodes[(1, 1)] == pytest.approx(0.49)
    best = found.best(facts["draft"]["batch"], facts["draft"]["context"])[0]
    assert 1 + sum(nodes.values()) == pytest.approx(best.tokens)


def test_yield_and_waste_add_up_to_what_is_verified() -> None:
    found = schedule(draft(0.5, 0.5), MODEL, HARDWARE, pool(64), DraftContexts.even((512,)))
    for row in described(draft(0.5, 0.5), found)["by_batch"]:
        assert row["tokens"] == pytest.approx(np.cumsum([1, 0.5, 0.25])[row["draft_tokens"]])
        assert row["wasted"] == pytest.approx(row["draft_tokens"] + 1 - row["tokens"])


@pytest.mark.parametrize(
    ("scheme", "words", "short"),
    [
        (NONE, "none", "off"),
        (Chain(tokens=3), "chain of 3", "3"),
        (ByBatch(max_tokens=2, ranges=(BatchRange(first=1, last=7, tokens=4), BatchRange(first=8, last=64, tokens=0))),
         "chain of 2 to batch 7, 0 to batch 64", "≤2"),
        (Threshold(max_tokens=8, stop_at=0.4), "chain of 8 at most, stopped at 0.4", "≤8"),
        (Adaptive(start=2, max_tokens=6, rule=StepRule(up=1, down_times=0.5)), "chain of 1 to 6, by acceptance (steps)",
         "≤6"),
        (StaticTree(nodes=((1,), (2,), (1, 1))), "tree of 3, 2 deep", "T3"),
        (DynamicTree(steps=3, topk=4, tokens=9), "EAGLE-2 tree of 9: 3 steps, topk 4", "T9"),
        (DynamicTree(steps=3, topk=1, tokens=3), "chain of 3", "3"),
        (Pearl(tokens=5), "chain of 5 beside every step (PEARL)", "5"),
        (Dsi(tokens=2, replicas=3), "chain of 2 in every tick of 3 replicas (DSI)", "2"),
        (Frontier(tokens=6, chunks=2, draft_share=0.5, verify_share=0.5), "chain of 6 in 2 chunks", "6"),
        (TokenBudget(tokens=64, max_tokens=4), "64 tokens for the batch, 4 for each at most", "≤4"),
    ],
)  # fmt: skip
def test_schemes_in_words(scheme: Scheme | DraftSetting, words: str, short: str) -> None:
    assert (scheme.in_words(), scheme.in_short()) == (words, short)


# --- the search -------------------------------------------------------------------------------------------


def test_every_candidate_is_tried_with_and_without() -> None:
    q = question(draft(), max_num_seqs=(16, 64))
    tuned = optimize(q, jobs=1)
    assert {row.candidate.name for row in tuned.rows} == {
        f"tp1-pp1-x1-s{seqs}-t2048{drafter}" for seqs in (16, 64) for drafter in ("", "-eagle3")
    }
    assert all((row.candidate.speculation is not None) == bool(row.candidate.drafter) for row in tuned.rows)
    assert all(row.reason for row in tuned.rows)


def test_a_drafter_that_never_pays_is_said_to() -> None:
    tuned = optimize(question(draft(0.01)), jobs=1)
    (row,) = (row for row in tuned.rows if row.candidate.drafter)
    assert (row.status, row.reason) == ("pruned", "drafting with eagle3 pays at no batch size")
    assert tuned.chosen.candidate.speculation is None


def test_a_study_without_drafters_searches_what_it_always_did() -> None:
    study = question().study
    (candidate,) = space_of(study).candidates
    assert candidate == Candidate.mixed("h100-sxm", 1, max_num_seqs=64, max_num_batched_tokens=2048)
    assert candidate.name == "tp1-pp1-x1-s64-t2048"


def test_drafters_have_names_of_their_own() -> None:
    named = DrafterChoice(name="other", drafter=HEAD, acceptance="mine")
    assert [choice.label for choice in (draft().choice, named)] == ["eagle3", "other"]
    text = (
        "schema: simtune/study@1\nname: s\nmodel: llama-3.1-8b\nhardware: {profile: h100-sxm, devices: 1}\n"
        "workload: chat\nslo: {ttft_s: {p99: 1}}\nspeculation:\n"
        "  - {drafter: {kind: ngram, lookup_max: 3}, acceptance: a}\n"
        "  - {drafter: {kind: ngram, lookup_max: 4}, acceptance: a}\n"
    )
    with pytest.raises(SpecError, match="2 drafters are called ngram; give each a name of its own"):
        Study.from_text(text)


# --- what is emitted --------------------------------------------------------------------------------------


def plan_with(speculation: Speculation) -> Plan:
    return Plan(name="plan", model=MODEL.name, pools=(pool(speculation=speculation),))


def test_vllm_is_told_in_one_line_of_json() -> None:
    scheme = ByBatch(
        max_tokens=3, ranges=(BatchRange(first=1, last=63, tokens=3), BatchRange(first=64, last=256, tokens=0))
    )
    text = VLLM.files(plan_with(draft().speculation(scheme)), MODEL)["engine/vllm-mixed.yaml"]
    told = json.loads(yaml.safe_load(text)["speculative-config"])
    assert VLLM.problems(told) == []
    assert told["num_speculative_tokens_per_batch_size"] == [[1, 63, 3], [64, 256, 0]]
    plain = VLLM.files(Plan(name="plan", model=MODEL.name, pools=(pool(),)), MODEL)["engine/vllm-mixed.yaml"]
    assert "speculative-config" not in plain


def test_vllm_is_told_which_model_drafts() -> None:
    small = load_model("llama-3.2-1b")
    named = Speculation(drafter=DraftModel(model="small"), scheme=Chain(tokens=2), acceptance="mine")
    text = VLLM.files(plan_with(named), MODEL, draft_models={"small": small})["engine/vllm-mixed.yaml"]
    assert json.loads(yaml.safe_load(text)["speculative-config"])["model"] == small.hf
    with pytest.raises(UsageError, match="plan: pool mixed: speculation: draft model small"):
        VLLM.files(plan_with(named), MODEL)


def test_vllm_refuses_a_tree_together_with_all_else_that_is_wrong() -> None:
    tree = draft().speculation(DynamicTree(steps=3, topk=4, tokens=9))
    wrong = plan_with(tree).model_copy(
        update={"pools": (pool(speculation=tree, parallelism=Parallelism(tp=3)),)},
    )
    with pytest.raises(UsageError) as caught:
        VLLM.files(wrong, MODEL)
    assert "speculation: vLLM has no setting for a dynamic_tree scheme" in str(caught.value)
    assert "parallelism.tp: 3 does not divide" in str(caught.value)


# --- under load -------------------------------------------------------------------------------------------

AT_NINE = ByBatch(max_tokens=3, ranges=(BatchRange(first=1, last=8, tokens=3), BatchRange(first=9, last=64, tokens=0)))


def test_what_drafting_gains_is_in_the_table() -> None:
    """Of those that draft and those that do not, the best of each is taken to its own highest rate."""
    tuned = optimize(question(draft(), max_num_seqs=(32, 64)), jobs=1)
    with_, without = (
        max(
            r.rate_rps or 0.0 for r in tuned.rows if r.status in ("chosen", "feasible") and r.candidate.drafter == label
        )
        for label in ("eagle3", "")
    )
    assert tuned.chosen.candidate.drafter == "eagle3"
    assert with_ > 1.3 * without > 0
    tally = tuned.result.drafted
    assert 2.5 < tally.tokens / tally.rounds < 1 + 0.8 + 0.64 + 0.512, "the last round of each answer is cut"


@pytest.mark.parametrize(
    "scheme",
    [
        Chain(tokens=3),
        AT_NINE,
        Frontier(tokens=3, chunks=3, draft_share=0.1, verify_share=0.9),
        Dsi(tokens=3, replicas=2),
    ],
    ids=lambda scheme: scheme.kind,
)
@pytest.mark.parametrize("workload", [load(), load(prompt=6000, output=100), load(prompt=50, output=600)])
def test_the_capacity_bound_holds_with_drafts(scheme: Scheme, workload: Workload) -> None:
    """Far more is offered than can be served: what is served per second is no more than the bound."""
    d = draft(0.98, 0.98, 0.98, scheme=scheme, model="llama-3.2-1b" if isinstance(scheme, Dsi) else None)
    q = question(d, workload=workload)
    candidate = drafting(d.speculation(scheme))
    deployment = q.deploy(candidate, 8192)
    stream = q.stream(candidate, 1000.0)
    (deployed,) = deployment.pools
    bound = Capacity(deployed.costs.tables, stream, 8192).rps(deployed)  # type: ignore[attr-defined]
    served = deployment.simulate(stream, q.study.slo).summary().request_throughput_rps
    assert served is not None
    assert 0.1 * bound < served <= bound


def test_a_batch_that_hovers_at_a_threshold_drafts_now_this_now_that() -> None:
    """Three drafts below nine sequences, none from there on: where few are running a round yields what a chain
    of three does, where many are what none does, and of a load about the threshold something between."""
    d = draft(scheme=AT_NINE)
    q = question(d)
    candidate = drafting(d.speculation(AT_NINE))
    deployment = q.deploy(candidate, 4096)
    drafted = [q.watch(candidate, deployment, rate).drafted for rate in (2.0, 8.0, 20.0)]
    per_round = [tally.tokens / tally.rounds for tally in drafted]
    assert per_round[0] > 2.8 > per_round[1] > 1.1 > per_round[2] > 1


def test_a_plan_whose_drafts_are_settled_is_settled_again() -> None:
    """As the chosen plan is, hour by hour of a day: with the same drafts, in memory that is found anew."""
    asked = question(draft())
    every = [candidate for candidate in space_of(asked.study).candidates if candidate.drafter]
    first = PlanCache(asked, every).settled(every[0])
    assert isinstance(first, Candidate)
    assert first.speculation is not None
    again = PlanCache(asked, [first]).settled(first)
    assert isinstance(again, Candidate)
    assert again.speculation == first.speculation
