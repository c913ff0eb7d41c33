"""From Python: specs as names or objects, requests as columns, costs of one's own."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simtune
from simtune import api
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.catalog import load_hardware, load_model, load_workload
from simtune.specs.pool import KvCache
from simtune.specs.study import Confirmation, HardwareCount, Search
from simtune.specs.workload import Slo
from tests.cli.conftest import STUDY

COLUMNS = {
    "arrival_s": np.arange(60) * 0.02 + 100.0,
    "prompt_tokens": np.full(60, 300),
    "output_tokens": np.arange(1, 61),
}


def seconds(num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
    return 0.005 + 1e-5 * (num_decodes + sum(tokens for _, tokens in chunks)) + 1e-8 * context_tokens


def test_public_names_are_found_where_they_are_said_to_be() -> None:
    homes = {name: module for module, names in simtune._HOMES.items() for name in names}
    assert sorted(homes, key=lambda name: (name.upper() != name, name[0].islower(), name)) == simtune.__all__
    assert set(simtune.__all__) <= set(dir(simtune))
    for name in simtune.__all__:
        assert getattr(simtune, name) is not None
    tree = ast.parse(Path(simtune.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    said = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert said == homes
    with pytest.raises(AttributeError, match="module 'simtune' has no attribute 'simulat'"):
        simtune.simulat  # noqa: B018


def test_objects_and_names_come_to_the_same() -> None:
    by_name = simtune.simulate("chat", model="llama-3.1-8b", hardware="h100-sxm", rate_rps=6, requests=80, seed=3)
    workload, _ = load_workload("chat")
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
    by_object = simtune.simulate(workload, model=model, hardware=hardware, rate_rps=6, requests=80, seed=3)
    assert by_object.outcome.finish.tolist() == by_name.outcome.finish.tolist()
    plan = api.set_up(api.load_specs("llama-3.1-8b", "h100-sxm", "chat"), requests=80, seed=3).deployment.plan
    planned = simtune.simulate(workload, plan=plan, rate_rps=6, requests=80, seed=3)
    assert planned.num_gpus == 1
    assert planned.completed.all()


def test_paths_come_to_the_same_as_texts(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(STUDY)
    (tmp_path / "load").write_text(Path(simtune.__file__).with_name("workloads").joinpath("chat.yaml").read_text())
    assert api.load_question(study) == api.load_question(str(study))
    by_path = api.load_question(study, workload=tmp_path / "load")
    assert by_path.workload == load_workload("chat")[0]
    folder = Path(simtune.__file__).with_name("hwprofiles") / "h100-sxm"
    specs = api.load_specs(Path(simtune.__file__).with_name("models") / "llama-3.1-8b.yaml", folder, "chat")
    assert (specs.model, specs.hardware[0].name) == (load_model("llama-3.1-8b"), "h100-sxm")


def test_a_path_is_never_a_built_in_name() -> None:
    with pytest.raises(simtune.UsageError, match=r"workload \./chat: no such file"):
        api.load_specs("llama-3.1-8b", "h100-sxm", Path("chat"))


# --- requests as columns ----------------------------------------------------------------------------------


def test_columns_are_replayed_as_they_are() -> None:
    result = simtune.simulate(COLUMNS, model="llama-3.1-8b", hardware="h100-sxm")
    assert result.arrival_s.tolist() == pytest.approx((COLUMNS["arrival_s"] - 100.0).tolist())
    assert result.stream.output_tokens.tolist() == COLUMNS["output_tokens"].tolist()
    assert result.completed.all()
    doubled = simtune.simulate(COLUMNS, model="llama-3.1-8b", hardware="h100-sxm", rate_rps=100.0)
    assert doubled.offered_rate_rps == pytest.approx(100.0)


def test_columns_equal_the_trace_file_that_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    rows = zip(*(column.tolist() for column in COLUMNS.values()), strict=True)
    path.write_text("\n".join([",".join(COLUMNS), *(",".join(map(str, row)) for row in rows)]))
    results = [
        simtune.simulate(load, model="llama-3.1-8b", hardware="h100-sxm")
        for load in (COLUMNS, str(path), simtune.read_trace(path))
    ]
    assert len({str(result.outcome.finish.tolist()) for result in results}) == 1


def test_columns_may_say_what_prompts_share() -> None:
    shared = {**COLUMNS, "hash_ids": [[1, 2]] * 60, "block_tokens": 16}
    pool = api.set_up(api.load_specs("llama-3.1-8b", "h100-sxm", COLUMNS)).deployment.plan.pools[0]
    caching = pool.model_copy(update={"kv_cache": KvCache(prefix_caching=True)})
    plan = simtune.Plan(name="p", model="llama-3.1-8b", pools=(caching,))
    result = simtune.simulate(shared, plan=plan)
    assert result.outcome.cores[0].hit_tokens > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival_s": None}, "arrival_s must be a column of finite numbers"),
        ({"arrival_s": np.arange(60)[::-1]}, "arrival_s must not fall"),
        ({"arrival_s": [np.nan] * 60}, "arrival_s must be a column of finite numbers"),
        ({"prompt_tokens": [0.5] * 60}, "prompt_tokens must be whole numbers of tokens from 1"),
        ({"output_tokens": [0] * 60}, "output_tokens must be whole numbers of tokens from 1"),
        ({"output_tokens": [1] * 59}, "must be of one length: arrival_s 60, prompt_tokens 60, output_tokens 59"),
        ({"prompts": [1] * 60}, "unknown trace column prompts; expected one of arrival_s, prompt_tokens"),
    ],
)
def test_columns_that_are_no_trace(change: dict[str, Any], message: str) -> None:
    with pytest.raises(simtune.UsageError, match=message):
        simtune.simulate({**COLUMNS, **change}, model="llama-3.1-8b", hardware="h100-sxm")
    with pytest.raises(simtune.UsageError, match="the columns of a trace lack output_tokens"):
        simtune.simulate(
            {k: v for k, v in COLUMNS.items() if k != "output_tokens"}, model="llama-3.1-8b", hardware="h100-sxm"
        )


# --- costs of one's own -----------------------------------------------------------------------------------


def test_a_function_of_seconds_is_a_cost_model() -> None:
    """Every first token comes after whole steps of the function, and so does all else."""
    alone = {"arrival_s": [0.0], "prompt_tokens": [100], "output_tokens": [3]}
    result = simtune.simulate(alone, model="llama-3.1-8b", hardware="h100-sxm", costs=seconds)
    steps = [seconds(0, 0, [(0, 100)]), seconds(1, 101, ()), seconds(1, 102, ())]
    assert result.ttft_s[0] == pytest.approx(steps[0], abs=1e-11)
    assert result.e2el_s[0] == pytest.approx(sum(steps), abs=1e-11)


def test_costs_with_the_protocol_come_to_the_same_in_jumps() -> None:
    linear = simtune.LinearCosts(step_s=0.005, per_token_s=1e-5, per_context_s=1e-8)
    jumped = simtune.simulate(COLUMNS, model="llama-3.1-8b", hardware="h100-sxm", costs=linear)
    stepped = simtune.simulate(COLUMNS, model="llama-3.1-8b", hardware="h100-sxm", costs=seconds)
    assert jumped.e2el_s.tolist() == pytest.approx(stepped.e2el_s.tolist(), rel=1e-6)


def test_with_costs_nothing_is_left_to_estimate_and_memory_need_not_bind() -> None:
    """Without hardware and plan every seat has room for the longest request."""
    result = simtune.simulate(COLUMNS, model="llama-3.1-8b", costs=seconds)
    assert result.completed.all()
    experiment = api.set_up(api.load_specs("llama-3.1-8b", None, COLUMNS), costs=seconds)
    assert experiment.deployment.estimated == []
    assert experiment.deployment.plan.pools[0].hardware == "unbound"
    memory = experiment.deployment.memory
    pool = experiment.deployment.plan.pools[0]
    assert memory.num_blocks * 16 >= pool.batching.max_num_seqs * experiment.deployment.max_model_len
    assert (pool.instances, pool.max_model_len) == (1, 512), "the longest of 360 tokens, in whole 256"
    with pytest.raises(simtune.UsageError, match="name a model and a hardware profile, or a plan that does"):
        simtune.simulate(COLUMNS, model="llama-3.1-8b")
    with pytest.raises(simtune.UsageError, match="name a model and a hardware profile, or a plan that does"):
        simtune.simulate(COLUMNS, costs=seconds)


def test_costs_that_fail_are_named_with_the_line() -> None:
    def broken(num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        return 1 / (num_decodes - num_decodes)

    with pytest.raises(
        simtune.PartError, match=r"cost model .*broken failed in .*broken \(.*test_simulate.py:\d+\): Zero"
    ):
        simtune.simulate(COLUMNS, model="llama-3.1-8b", costs=broken)
    with pytest.raises(simtune.PartError, match=r"lambda.*decode returned \(0, 0, 1\), expected at least one tick"):
        simtune.simulate(COLUMNS, model="llama-3.1-8b", costs=lambda b, c, chunks: 0.01 if chunks else 0.0)
    with pytest.raises(simtune.PartError, match=r"cost model dict \(builtins\) has no method decode"):
        simtune.simulate(COLUMNS, model="llama-3.1-8b", costs={})  # type: ignore[arg-type]


def test_costs_go_to_other_processes() -> None:
    costs = pickle.loads(pickle.dumps(OwnCosts(seconds)))
    assert costs.decode(3, 50) == OwnCosts(seconds).decode(3, 50)


# --- a study as an object ---------------------------------------------------------------------------------


def test_a_study_of_objects() -> None:
    study = simtune.Study(
        name="mine",
        model="what the model argument is",
        hardware=(HardwareCount(profile="what the hardware argument is", devices=2),),
        workload="what the workload argument is",
        slo=Slo(ttft_s={"p99": 1.0}, tpot_s={"p99": 0.03}),
        search=Search(
            tp=(1,),
            pp=(1,),
            max_num_seqs=(64,),
            max_num_batched_tokens=(2048,),
            requests=100,
            confirm=Confirmation(draws=0),
        ),
    )
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
    tuned = simtune.optimize(study, model=model, hardware=hardware, workload=COLUMNS, jobs=1)
    assert tuned.value > 0
    assert tuned.deployment.plan.model == "llama-3.1-8b"
    assert tuned.deployment.plan.pools[0].hardware == "h100-sxm"
    with pytest.raises(simtune.UsageError, match="settings override fields of a study's file"):
        simtune.optimize(study, settings=["seed=1"])
    two = study.model_copy(update={"hardware": (*study.hardware, HardwareCount(profile="l40s", devices=1))})
    with pytest.raises(simtune.UsageError, match="mine names several hardware profiles; change them in the study"):
        simtune.optimize(two, model=model, hardware=hardware, workload=COLUMNS, jobs=1)
