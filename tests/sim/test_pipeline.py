"""Virtual engines that share the stages of a pipeline, by hand: steps that the stages cannot share evenly, and their
own shares of the KV blocks."""

from __future__ import annotations

import pytest

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import Infeasible
from simtune.results.outcome import Outcome
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.stepping import Pipeline
from simtune.sim.world import World
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.testing.clusters import stream_of
from tests.sim.worlds import Setting


def run(ticks: int, stages: int, answers: list[int], *, single_steps: bool) -> Outcome:
    """Requests that come at once, each on a virtual engine of its own; every step takes so many ticks."""
    n = len(answers)
    costs = LinearCosts(ticks / TICKS_PER_SECOND)
    world = Setting(100, 1, 4, 8, stages, costs, stream_of([0.0] * n, [1] * n, answers))
    return World(world.make_cores(Pipeline(stages)), world.stream, single_steps=single_steps).run()


@pytest.mark.parametrize("single_steps", [True, False])
@pytest.mark.parametrize("ticks", [6, 7, 8])
def test_the_stages_take_as_long_as_the_step(ticks: int, single_steps: bool) -> None:
    outcome = run(ticks, 3, [9], single_steps=single_steps)
    assert (outcome.first_token.tolist(), outcome.finish.tolist()) == ([ticks], [9 * ticks])


@pytest.mark.parametrize("single_steps", [True, False])
def test_a_pipeline_is_as_fast_as_its_slowest_stage(single_steps: bool) -> None:
    """Of 5 ticks the first stage takes 3, always busy with one step or the other, and the second 2: a step of each
    engine leaves every 6 ticks, those of the other 3 later. The longer answer has its last ten steps to itself."""
    outcome = run(5, 2, [20, 30], single_steps=single_steps)
    assert outcome.first_token.tolist() == [5, 8]
    assert outcome.finish.tolist() == [5 + 19 * 6, 8 + 19 * 6 + 10 * 5]


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("ticks", range(7, 13))
def test_steps_of_engines_beside_one_another_are_taken_as_if_one_by_one(ticks: int, stages: int) -> None:
    answers = [30, 45, 37][:stages]
    flown, stepped = (run(ticks, stages, answers, single_steps=single) for single in (False, True))
    assert flown.finish.tolist() == stepped.finish.tolist()
    assert flown.steps == stepped.steps == sum(answers)


def test_a_virtual_engine_must_hold_the_longest_request_in_its_own_blocks() -> None:
    """Each of two has half of those of the instance."""
    pool = {
        "hardware": "h100-sxm",
        "instances": 1,
        "parallelism": {"pp": 2},
        "batching": {"max_num_seqs": 4, "max_num_batched_tokens": 512},
        "kv_cache": {"memory_utilization": 0.2, "block_size": 16},
    }
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")

    def deployed(longest: int) -> Deployment:
        given = {"name": "p", "model": model.name, "pools": [{**pool, "max_model_len": longest}]}
        return deploy(Plan.model_validate(given, strict=False), model, hardware, LinearCosts(1e-3))

    own = deployed(16).pools[0].memory.num_blocks // 2
    assert 16 * own < model.max_position
    deployed(16 * own)
    too_long = 16 * own + 1
    with pytest.raises(
        Infeasible, match=rf"{own} blocks and one request of max_model_len \({too_long}\) needs {own + 1}:"
    ):
        deployed(too_long)
