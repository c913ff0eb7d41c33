"""Every engine beside every scheme and drafter: settings in its own words, or a refusal; and an engine of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import ClassVar

import pytest

from simtune import emit
from simtune.emit import ENGINES, Emitter, EngineFiles, drafting_settings, engine_files, engine_for, engines
from simtune.errors import UsageError
from simtune.specs import plugins
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.drafters import (
    DRAFTERS,
    BlockDrafter,
    Drafter,
    DraftModel,
    Eagle,
    Medusa,
    Ngram,
    ParallelDecoder,
    Suffix,
)
from simtune.specs.feedback import StepRule
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.schemes import (
    SCHEMES,
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
from simtune.specs.speculation import Speculation

MODEL, DRAFT = load_model("llama-3.1-8b"), load_model("llama-3.2-1b")
ONE_OF_EACH: list[Scheme] = [
    Chain(tokens=3),
    ByBatch(max_tokens=3, ranges=(BatchRange(first=1, last=8, tokens=3),)),
    Threshold(max_tokens=3, stop_at=0.5),
    Adaptive(start=2, max_tokens=3, rule=StepRule(up=2, down=1)),
    StaticTree(nodes=((1,), (2,))),
    DynamicTree(steps=2, topk=2, tokens=4),
    TokenBudget(tokens=9, max_tokens=3),
    Pearl(tokens=3),
    Dsi(tokens=3, replicas=2),
    Frontier(tokens=4, chunks=2, draft_share=0.5, verify_share=0.5),
]
EACH_DRAFTER: list[Drafter] = [
    DraftModel(model="small"),
    Eagle(checkpoint="org/head"),
    Medusa(heads=4, checkpoint="org/heads"),
    Ngram(lookup_max=3),
    Suffix(),
    BlockDrafter(layers=2, checkpoint="org/block"),
    ParallelDecoder(),
]


def test_there_is_one_of_each() -> None:
    assert {type(scheme) for scheme in ONE_OF_EACH} == set(SCHEMES.values())
    assert {type(drafter) for drafter in EACH_DRAFTER} == set(DRAFTERS.values())
    assert [emitter.name for emitter in ENGINES.values()] == list(ENGINES)
    assert list(ENGINES) == ["vllm", "sglang", "tensorrt-llm", "llamacpp", "transformers"]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_is_told_what_it_says_it_knows_and_of_nothing_else(engine: str) -> None:
    emitter, expressed, drafting = ENGINES[engine], set(), set()
    for scheme, drafter in product(ONE_OF_EACH, EACH_DRAFTER):
        if scheme.needs and not isinstance(drafter, scheme.needs):
            continue
        settings, why = drafting_settings(emitter, Speculation(drafter=drafter, scheme=scheme, acceptance="a"), DRAFT)
        assert (settings is None) == bool(why)
        if settings is not None:
            assert emitter.problems(settings) == []
            expressed.add(type(scheme))
            drafting.add(type(drafter))
        else:
            assert scheme.kind in why or drafter.kind in why
    assert expressed == set(emitter.schemes)
    # Medusa is written for releases before the newest.
    assert drafting == set(emitter.drafters) - ({Medusa} if engine == "vllm" else set())


def test_the_engine_of_a_policy() -> None:
    assert engine_for("vllm-priority") is ENGINES["vllm"]
    assert engine_for("static") is None


def plan_of(scheme: Scheme | None = None, policy: str = "vllm-fcfs") -> Plan:
    drafter = Eagle(checkpoint="org/head")
    speculation = None if scheme is None else Speculation(drafter=drafter, scheme=scheme, acceptance="a")
    pool = Pool.model_validate(
        {
            "hardware": load_hardware("h100-sxm").name,
            "instances": 1,
            "batching": {"policy": policy, "max_num_seqs": 8, "max_num_batched_tokens": 8192},
            "max_model_len": 8192,
            "speculation": speculation,
        }
    )
    return Plan(name="plan", model=MODEL.name, pools=(pool,))


class Own(Emitter):
    """An engine of static batches that is told of chains."""

    name = "own"
    title = "Own"
    version = "1"
    options: ClassVar[Mapping[str, type]] = {"drafts": int}
    schemes: ClassVar = {Chain: lambda scheme: {"drafts": scheme.tokens}}
    drafters: ClassVar = {Eagle: lambda drafter, checkpoint: {}}
    takes = "it drafts chains"
    policies: ClassVar[Mapping[str, str]] = {"static": "batch"}

    def schedules(self, pool: Pool) -> bool:
        return pool.batching.policy in self.policies

    def files(
        self, plan: Plan, model: Model, devices_per_node: int = 8, draft_models: Mapping[str, Model] | None = None
    ) -> EngineFiles:
        return {"engine/own.txt": f"{plan.name}\n"}


def test_an_engine_of_ones_own_is_written_for_where_it_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    static = plan_of(policy="static")
    assert engine_files(static, MODEL, 8, {}) == {}
    monkeypatch.setitem(ENGINES, "own", Own())
    assert engine_files(static, MODEL, 8, {}) == {"engine/own.txt": "plan\n"}
    assert "engine/vllm-mixed.yaml" in engine_files(plan_of(), MODEL, 8, {}), "the first that can run the plan is"
    tree = engine_files(plan_of(DynamicTree(steps=2, topk=2, tokens=4)), MODEL, 8, {})
    assert list(tree) == ["engine/sglang-speculation.yaml", "engine/tensorrt-llm-speculation.yaml"]
    assert "The drafts of the plan, for which vLLM has no setting." in tree["engine/sglang-speculation.yaml"]


def test_installed_packages_register_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (emit, plugins):
        monkeypatch.setattr(module, "registered", lambda group: {"own": f"{__name__}:Own"})
    assert list(engines()) == ["vllm", "sglang", "tensorrt-llm", "llamacpp", "transformers", "own"]
    assert engine_files(plan_of(policy="static"), MODEL, 8, {}) == {"engine/own.txt": "plan\n"}
    own = engine_for("static")
    assert own is not None
    assert own.title == "Own"


def test_what_is_told_of_drafts_alone_writes_no_plan() -> None:
    with pytest.raises(UsageError, match="SGLang has no vllm-fcfs; it has sglang"):
        ENGINES["sglang"].files(plan_of(), MODEL)
