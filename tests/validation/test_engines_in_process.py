"""Engines in this process as `simtune validate` asks for them: a plan and a load in, a measured run out."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.costs.compiled import LinearCosts
from simtune.engine import Request
from simtune.errors import UsageError
from simtune.report.validation_page import curves, queues_figure
from simtune.results.result import Result
from simtune.runs.timeline import sampled
from simtune.sim.deployment import NO_HARDWARE, Deployment, deploy
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.model import DenseFeedForward, FullAttention, LayerGroup, Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.testing.clusters import stream_of
from simtune.validation.client.measured_run import Clock, MeasuredRun
from simtune.validation.servers import torch_engine, transformers_engine
from simtune.validation.servers.executed_scheduler import TokenShare
from simtune.validation.servers.in_process import MOST_SAMPLES, queue_samples
from simtune.validation.servers.random_weights import write_weights
from simtune.validation.servers.torch_engine import TorchEngine
from simtune.validation.servers.transformers_engine import TransformersEngine
from simtune.workload.requests import RequestStream
from tests.validation.served_steps import PretendedClock, PretendedExecutor

COSTS = LinearCosts(1e-3, 1e-5, 1e-7, 1e-8)
LONG = 500
"""Tokens of a prompt that no engine here takes."""


def model() -> Model:
    group = LayerGroup(
        count=2,
        attention=FullAttention(heads=4, kv_heads=2, head_dim=32),
        feed_forward=DenseFeedForward(intermediate_size=256),
    )
    sizes = {"hidden_size": 128, "vocab_size": 512, "max_position": 512}
    return Model.model_validate({"name": "tiny", **sizes, "layers": (group,), "dtype": "fp32", "weight_dtype": "fp32"})


def plan(name: str = "one", blocks: int = 60, seats: int = 4, policy: str = "vllm-fcfs", **pool: Any) -> Plan:
    settings = {"async_scheduling": False, "kv_cache": KvCache(num_blocks=blocks), "max_model_len": 256, **pool}
    batching = Batching.model_validate({"policy": policy, "max_num_seqs": seats, "max_num_batched_tokens": 64})
    pools = (Pool(hardware="unbound", instances=1, batching=batching, **settings),)
    return Plan(name=name, model="tiny", pools=pools)


def deployed(its: Plan) -> Deployment:
    return deploy(its, model(), NO_HARDWARE, OwnCosts(COSTS))


class Cyclic:
    """An executor that refers to itself, as a decoder and its graphs do."""

    def __init__(self, machine: PretendedMachine) -> None:
        self.itself, self.run, self.release = self, machine.run, machine.release


class PretendedMachine:
    """Clocks of a machine, and executors that move whichever was started last."""

    def __init__(self) -> None:
        self.clock, self.started = PretendedClock(), 0
        self.cached: dict[Request, int] = {}

    def clocks(self) -> PretendedClock:
        self.clock = PretendedClock()
        return self.clock

    def executor(self, deployment: Deployment, device: str) -> PretendedMachine:
        self.started += 1
        self.cached = {}
        return self

    def run(self, shares: Sequence[TokenShare]) -> None:
        step = PretendedExecutor(COSTS, self.clock)
        step.cached = self.cached
        step.run(shares)

    def release(self, request: Request) -> None:
        self.cached.pop(request, None)


def load(gap_s: float | None = 0.004) -> RequestStream:
    prompt, output = [40, 50, 60, LONG, 30, 90, 20], [70, 60, 1, 5, 90, 40, 80]
    if gap_s is None:
        return stream_of(None, prompt, output, users=3, think_s=0.01)
    return stream_of([gap_s * i for i in range(len(prompt))], prompt, output)


@pytest.mark.parametrize("gap_s", [0.004, 0.0, None])
def test_what_is_measured_by_a_clock_that_costs_move_is_what_is_simulated(gap_s: float | None) -> None:
    its, machine, stream = deployed(plan(blocks=17)), PretendedMachine(), load(gap_s)
    engine = TorchEngine(its, clocks={"cpu": machine.clocks}, make=machine.executor)
    run = engine.run(its.plan, stream, label="light")
    predicted = its.simulate(stream)
    lengths = stream.output_tokens.tolist()
    assert [len(r.times_s or ()) for r in run.requests] == [0 if n == 3 else lengths[n] for n in range(len(lengths))]
    for metric in ("ttft", "e2el", "tpot"):
        np.testing.assert_allclose(run.values(metric), predicted.values(metric), rtol=1e-9, err_msg=metric)
    assert run.facts.preemptions == predicted.outcome.preemptions.sum()
    assert predicted.outcome.preemptions.sum() > 0
    assert [r.request for r in run.failed] == [3]
    assert run.failed[0].error == "longer than the engine can hold"
    assert (run.facts.label, run.facts.engine.engine, run.facts.clock) == ("light", "torch", "cpu")
    repeated = engine.run(its.plan, stream, label="light")
    assert repeated.to_text() == run.to_text()
    assert machine.started == 1
    engine.close()
    engine.close()


@pytest.mark.parametrize("gap_s", [0.004, 0.0])
def test_so_many_run_and_wait_as_are_simulated_to(gap_s: float) -> None:
    its, machine, stream = deployed(plan(blocks=17)), PretendedMachine(), load(gap_s)
    engine = TorchEngine(its, clocks={"cpu": machine.clocks}, make=machine.executor)
    run = engine.run(its.plan, stream, label="light")
    queues = run.facts.queues
    assert queues is not None
    result = its.simulate(stream, record=True)
    timeline = sampled(result)
    end = max(timeline.t_s)
    inside = [i for i, at in enumerate(timeline.t_s) if 0 < at < end]
    at = np.searchsorted(queues.t_s, np.array(timeline.t_s)[inside], side="right") - 1
    same = np.array(queues.running)[at] == np.array(timeline.running)[inside]
    assert same.mean() > 0.98, "but where a point of one falls on a step of the other"
    same = np.array(queues.waiting)[at] == np.array(timeline.waiting)[inside]
    assert same.mean() > 0.85, "a simulation notes who has come to wait when its next jump begins"
    assert (queues.running[-1], queues.waiting[-1]) == (0, 0)
    assert max(queues.running) > 1
    page = render_of(run, result)
    assert "running, predicted" in page
    assert "waiting, measured" in page


def test_of_many_queue_lengths_the_last_is_kept() -> None:
    count = 2 * MOST_SAMPLES + 3
    kept = queue_samples([(float(at), 1, 0) for at in range(count)] + [(float(count), 0, 0)])
    assert kept is not None
    assert MOST_SAMPLES / 2 < len(kept.t_s) <= MOST_SAMPLES
    assert (kept.t_s[-1], kept.running[-1]) == (count, 0)
    assert queue_samples([]) is None


def render_of(run: MeasuredRun, result: Result) -> str:
    figure = queues_figure(curves("light", result, [run], sampled(result)))
    return json.dumps(figure)


def test_another_plan_is_another_engine() -> None:
    its, machine, stream = deployed(plan()), PretendedMachine(), load(0.0)
    engine = TorchEngine(its, clocks={"cpu": machine.clocks}, make=machine.executor)
    wide, narrow = (engine.run(p, stream, label=p.name) for p in (its.plan, plan("narrow", seats=1)))
    assert machine.started == 2
    assert (narrow.statistic("e2el", "mean") or 0) > (wide.statistic("e2el", "mean") or 0)
    with pytest.raises(UsageError, match="async_scheduling"):
        engine.run(plan("ahead", async_scheduling=True), stream, label="ahead")


def test_an_engine_is_gone_before_the_next_one_is_made() -> None:
    """Weights of two may not fit into a device."""
    its, machine, stream = deployed(plan()), PretendedMachine(), load(0.0)
    alive: list[Any] = []

    def make(deployment: Deployment, device: str) -> Any:
        assert [ref() for ref in alive] == [None] * len(alive)
        executor = Cyclic(machine.executor(deployment, device))
        alive.append(weakref.ref(executor))
        return executor

    engine = TorchEngine(its, clocks={"cpu": machine.clocks}, make=make)
    for p in (its.plan, plan("narrow", seats=1)):
        engine.run(p, stream, label=p.name)
    assert len(alive) == 2


def test_processor_time_is_of_processors() -> None:
    with pytest.raises(UsageError, match="--clock cpu: is the processor's time, and cuda does the work"):
        TorchEngine(deployed(plan()), device="cuda", make=PretendedMachine().executor)


def test_without_torch_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="the torch engine needs torch, which is not installed: pip install torch"):
        TorchEngine(deployed(plan()))


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("clock", ["cpu", "wall"])
def test_the_decoder_is_measured_by_both_clocks(clock: Clock) -> None:
    its, stream = deployed(plan()), load()
    engine = TorchEngine(its, clock=clock)
    run = engine.run(its.plan, stream, label="light")
    assert [r.request for r in run.failed] == [3]
    assert run.facts.clock == clock
    assert run.facts.engine.version
    assert run.output_tokens[run.completed].tolist() == np.delete(stream.output_tokens, 3).tolist()
    assert (run.values("ttft") > 0).all()
    assert (run.values("itl") > 0).all()
    assert len(run.values("itl")) == int((np.delete(stream.output_tokens, 3) - 1).sum())
    engine.close()


TRANSFORMERS: dict[str, Any] = {"policy": "transformers-fifo", "kv_cache": KvCache(num_blocks=60, prefix_caching=False)}


@pytest.mark.parametrize("changed", [{}, {"policy": "transformers-fifo", "async_scheduling": True}])
def test_plans_of_other_engines_are_refused_by_transformers(changed: dict[str, Any], tmp_path: Path) -> None:
    named = "async_scheduling" if changed else "batching.policy vllm-fcfs"
    with pytest.raises(UsageError, match=f"the transformers engine has no {named}"):
        TransformersEngine(deployed(plan(**changed)), tmp_path)


def test_without_transformers_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_engine, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs transformers and torch, which are missing"):
        TransformersEngine(deployed(plan(**TRANSFORMERS)), tmp_path)


@pytest.mark.skipif(find_spec("transformers") is None or find_spec("torch") is None, reason="needs transformers")
@pytest.mark.parametrize("gap_s", [0.004, None])
@pytest.mark.parametrize("clock", ["cpu", "wall"])
def test_transformers_answers_in_full(gap_s: float | None, clock: Clock, tmp_path: Path) -> None:
    its, stream = deployed(plan(**TRANSFORMERS)), load(gap_s)
    with pytest.raises(UsageError, match="has no config"):
        TransformersEngine(its, tmp_path)
    engine = TransformersEngine(its, write_weights(model(), tmp_path / "tiny"), clock=clock)
    run = engine.run(its.plan, stream, label="light")
    assert [r.request for r in run.failed] == [3]
    assert (run.facts.engine.engine, run.facts.clock) == ("transformers", clock)
    assert run.output_tokens[run.completed].tolist() == np.delete(stream.output_tokens, 3).tolist()
    assert (run.values("ttft") > 0).all()
    assert (run.values("itl") > 0).all()
    engine.close()
