"""LoRA adapters beside drafts: the target verifies drafts with the adapters of their requests, drafters have none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.costs.adapted_steps import AdaptedRounds
from simtune.costs.drafting import CompiledRounds
from simtune.errors import Infeasible
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.drafting import Drafting
from simtune.sim.feasibility import FIXED_SCHEMES
from simtune.specs.acceptance import PerPosition
from simtune.specs.catalog import load_model
from simtune.specs.drafters import Drafter, DraftModel, Eagle, Ngram
from simtune.specs.schemes import Chain
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream
from tests.sim.test_adapters import HARDWARE, MODEL, asking, plan_of, use_of
from tests.sim.test_speculative_world import AHEAD, SCHEMES, acceptance, drafter_for

DRAFT = load_model("llama-3.2-1b")
DRAFTS = 3
ALL_REJECTED = PerPosition(conditional=(0.0,) * DRAFTS)
DRAFTERS: tuple[Drafter, ...] = (Eagle(), Ngram(lookup_max=4), DraftModel(model="llama-3.2-1b"))


def drafting(name: str = "", drafter: Drafter | None = None, **pool: Any) -> Deployment:
    """Return a deployment whose pool drafts by a scheme of the tests, or a chain of which no draft is accepted."""
    scheme, rates = SCHEMES[name] if name else (Chain(tokens=DRAFTS), ALL_REJECTED)
    drafter = drafter or drafter_for(scheme)
    speculation = {"drafter": drafter.model_dump(), "scheme": scheme.model_dump(), "acceptance": "assumed"}
    lora = pool.pop("lora", {"slots": 2, "host_slots": 3})
    plan = plan_of(lora, speculation=speculation, **pool)
    return deploy(plan, MODEL, HARDWARE, drafting=Drafting(acceptance(rates), DRAFT))


def run(deployment: Deployment, adapter: list[int], prompt: int = 50, output: int = 20, **options: Any) -> Result:
    n = len(adapter)
    return deployment.simulate(asking(stream_of(None, [prompt] * n, [output] * n, users=1), adapter), **options)


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.kind)
def test_a_request_pays_the_products_of_all_tokens_verified(drafter: Drafter) -> None:
    """No draft is accepted: of 20 tokens the prompt gives one and 19 rounds one each. A round verifies all
    drafts and one token more; the drafter adds none."""
    deployment, output = drafting(drafter=drafter, lora={"slots": 1}), 20
    base, adapted = (run(deployment, [number], output=output) for number in (-1, 0))
    costs = deployment.pools[0].adapters
    assert costs is not None
    (core,) = adapted.outcome.cores
    verified = core.drafting.drafts + core.drafting.rounds
    assert verified == (output - 1) * (DRAFTS + 1)
    products = costs.ticks(50, 1) + (output - 1) * costs.ticks(DRAFTS + 1, 1)
    assert core.adapters is not None
    assert core.adapters.products == products
    # Nothing else differs but the load: steps of this model on this card outlast the host's work.
    longer = (adapted.outcome.finish - base.outcome.finish)[0]
    assert longer == products + core.adapters.waited


@pytest.mark.parametrize(
    ("name", "later"),
    [(name, False) for name in SCHEMES if SCHEMES[name][0].shape.in_turn] + [(name, True) for name in AHEAD],
)
def test_jumps_are_single_steps_to_the_tick(name: str, later: bool) -> None:
    deployments = {
        policy: drafting(
            name,
            async_scheduling=later,
            batching={"policy": policy, "max_num_seqs": 4, "max_num_batched_tokens": 64},
            kv_cache={"num_blocks": 60, "block_size": 4},
            max_model_len=120,
        )
        for policy in (("vllm-fcfs", "sglang") if SCHEMES[name][0].kind in FIXED_SCHEMES else ("vllm-fcfs",))
    }

    @given(st.data())
    @settings(max_examples=12, deadline=None)
    def check(data: st.DataObject) -> None:
        n = data.draw(st.integers(1, 12))
        gaps = data.draw(st.lists(st.sampled_from([0.0, 1e-3, 0.02]), min_size=n, max_size=n))
        output = data.draw(st.lists(st.integers(1, 60), min_size=n, max_size=n))
        adapter = data.draw(st.lists(st.integers(-1, 2), min_size=n, max_size=n))
        stream = asking(stream_of(np.cumsum(gaps), [20] * n, output), adapter)
        deployment = deployments[data.draw(st.sampled_from(sorted(deployments)))]
        _check_same(deployment, stream)

    check()


def _check_same(deployment: Deployment, stream: RequestStream) -> None:
    jumped, stepped = (deployment.simulate(stream, single_steps=single) for single in (False, True))
    for column in ("scheduled", "first_token", "finish", "preemptions"):
        assert np.array_equal(getattr(jumped.outcome, column), getattr(stepped.outcome, column)), column
    assert jumped.completed.all()
    assert use_of(jumped) == use_of(stepped)


def test_a_load_without_adapters_takes_the_same_time_to_the_tick() -> None:
    rng = np.random.default_rng(1)
    stream = stream_of(np.cumsum(rng.exponential(0.01, 40)), rng.integers(1, 900, 40), rng.integers(1, 60, 40))
    plain, slots = (drafting("chain", lora=lora).simulate(stream).outcome for lora in (None, {"slots": 4}))
    for name in ("scheduled", "first_token", "finish"):
        assert np.array_equal(getattr(plain, name), getattr(slots, name)), name


@pytest.fixture(scope="module")
def rounds() -> CompiledRounds:
    costs = drafting("chain").pools[0].costs
    assert isinstance(costs, CompiledRounds)
    return costs


@given(st.integers(0, 40_000_000), st.integers(1, 7), st.integers(1, 400), st.integers(0, 500))
@settings(max_examples=60, deadline=None)
def test_products_are_in_the_pass_of_the_target(
    rounds: CompiledRounds, extra: int, decodes: int, mean: int, chunk: int
) -> None:
    """They may hide behind the least time of a pass, and one that is too long for that makes a round longer by as
    much."""
    adapted, contexts = AdaptedRounds(rounds), decodes * mean
    work = decodes, decodes * (DRAFTS + 1), DRAFTS, contexts
    chunks = [(0, chunk)] if chunk else ()
    plain = rounds.round(*work, chunks, len(chunks))
    adapted.extra = extra
    longer = adapted.round(*work, chunks, len(chunks))
    assert plain <= longer <= plain + extra
    adapted.extra = hides = 1 << 36
    longest = adapted.round(*work, chunks, len(chunks))
    adapted.extra = hides + extra
    assert adapted.round(*work, chunks, len(chunks)) == longest + extra
    assert rounds.round(*work, chunks, len(chunks)) == plain
    if not chunk:
        ends = adapted.rounds(*work[:3], [contexts, contexts + decodes])
        assert ends[0] == adapted.round(*work[:3], contexts + work[1])


@pytest.mark.parametrize("name", ["overlapped", "replicas", "chunks"])
def test_schemes_that_verify_otherwise_are_refused(name: str) -> None:
    with pytest.raises(
        Infeasible, match=r"lora and scheme .* do not go together: products of adapters are modelled in"
    ):
        drafting(name)
