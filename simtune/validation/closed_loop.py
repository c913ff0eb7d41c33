"""The closed loop: profile an engine, find its best plan, run the plan on it, compare, and fit again if it was off.

    profile ──> optimize ──> replay ──> compare ──> within tolerance: done
                   ▲                        │
                   └── the replay's steps ──┘

The search uses the operators of the study's hardware, corrected by the engine's steps (`simtune.costs.calibration`);
the prediction that is compared with the engine uses the steps themselves (`simtune.costs.engine_steps`), and from the
next round on those of replays as well. A load is replayed several times, and its medians count; their spread is the
noise.

Every stage leaves its output in the folder and its name in state.json, which is replaced as a whole: a run that is
killed continues with the stage it was in, and within the profile with the session it was in. Engines in interpreters of
their own end when their standard input closes, so that none is left over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.costs.calibration import Log, TimedStep, calibrate, read_steps, write_steps
from simtune.costs.engine_steps import engine_costs
from simtune.errors import UsageError
from simtune.runs.files import hold, write_file
from simtune.sim.deployment import Deployment, deploy, length_limit
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.hardware import Hardware
from simtune.specs.input_files import json_document, read_text
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.tuner.question import Question
from simtune.tuner.search.front import answer
from simtune.tuner.trial import Tuned
from simtune.validation.client.measured_run import (
    EngineFacts,
    MeasuredFacts,
    MeasuredMetric,
    MeasuredRequest,
    MeasuredRun,
    read_measured,
)
from simtune.validation.servers.driven_engines import DrivenRequest, DriverClock, EngineSize, StepDriver, requests_of
from simtune.validation.servers.engine_profile import STEPS, profile_engine
from simtune.workload.requests import RequestStream

STATE, REPORT, PROFILE, RUN = "state.json", "report.json", "profile", "run"
SCHEMA = "simtune/loop@1"
METRICS: tuple[MeasuredMetric, ...] = ("ttft", "tpot", "e2el")
MakeDriver = Callable[[EngineSize, float | None], StepDriver]


@dataclass(frozen=True)
class LoopSettings:
    """Budget, repeats and tolerance of a loop."""

    budget_s: float = 120.0
    """Seconds for the engine's profile."""
    tolerance: float = 0.1
    """Relative tolerance of the means of TTFT, TPOT and E2EL; errors up to twice the repeat noise count as within
    it."""
    rounds: int = 3
    repeats: int = 3
    requests: int = 60
    """Number of requests in each replay."""
    load: float = 0.7
    """Share of the rate that the plan was found to sustain, at which it is replayed."""
    clock: DriverClock = "cpu"


class MetricVerdict(NamedTuple):
    """The mean of a metric, predicted and measured."""

    metric: str
    predicted_s: float
    measured_s: float
    """Median over the repeats, in seconds."""
    noise: float
    """Half the range of the repeats over their median."""

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1

    def within(self, tolerance: float) -> bool:
        """Return True if the error is at most `tolerance`, or at most twice the noise."""
        return abs(self.error) <= max(tolerance, 2 * self.noise)


class LoopRound(NamedTuple):
    """Result of a round."""

    plan: str
    rate_rps: float
    """Requests per second of the replay."""
    verdicts: list[MetricVerdict]


class TuningLoop:
    """A study on an engine, in a folder."""

    def __init__(
        self,
        question: Question,
        out: Path,
        make: MakeDriver,
        *,
        settings: LoopSettings | None = None,
        write_run: Callable[[Tuned, Path], None],
        note: Callable[[str], None] = lambda words: None,
    ) -> None:
        """Prepare the loop.

        `make` starts an engine of a size, given the reference of an earlier gauge; `write_run` writes the run directory
        of a search, with the engine's settings. Raise UsageError if the folder belongs to another study, and for a
        study of several kinds of hardware or checkpoints: the engine runs one.
        """
        if len(question.hardware) > 1:
            names = ", ".join(hardware.name for hardware in question.hardware)
            raise UsageError(
                f"{question.study.name}: hardware: the engine runs on one kind, but the study has {names}; keep one"
            )
        if question.checkpoints:
            raise UsageError(
                f"{question.study.name}: search.variants: the engine runs one checkpoint, but the study has "
                f"{len(question.models)}; keep one"
            )
        (self._hardware,) = question.hardware
        self._question, self._out, self._make = question, out, make
        self._settings = settings or LoopSettings()
        self._write_run, self._note = write_run, note
        hold(out)
        self._state = _LoopState(out / STATE, _digest(question, self._settings))

    def run(self) -> list[LoopRound]:
        """Run rounds up to the first within tolerance, or all of them. Stages that were finished before are not
        repeated."""
        self._stage("profile", self._profile)
        rounds = []
        for number in range(1, self._settings.rounds + 1):
            tuned = self._stage(f"optimize {number}", partial(self._optimize, number))
            self._stage(f"replay {number}", partial(self._replay, number, tuned))
            compared = self._stage(f"compare {number}", partial(self._compare, number, tuned))
            verdicts = [MetricVerdict(*row) for row in compared["verdicts"]]
            rounds.append(LoopRound(tuned["plan"], tuned["replay_rps"], verdicts))
            if all(v.within(self._settings.tolerance) for v in verdicts):
                break
        report = [{**r._asdict(), "verdicts": [v._asdict() | {"error": v.error} for v in r.verdicts]} for r in rounds]
        write_file(self._out / REPORT, json.dumps({"schema": SCHEMA, "rounds": report}, indent=1) + "\n")
        return rounds

    def _stage(self, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if name not in self._state.done:
            self._note(name)
            self._state.finish(name, run())
        return self._state.done[name]

    def _folder(self, number: int) -> Path:
        folder = self._out / f"round-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # --- stages -----------------------------------------------------------------------------------------------

    def _profile(self) -> dict[str, Any]:
        """Profile an engine as large as the largest plan of the study."""
        question, search = self._question, self._question.study.search
        longest = length_limit(question.model, self._requests())
        size = EngineSize(max(search.max_num_seqs), max(search.max_num_batched_tokens), longest)
        profiled = profile_engine(
            lambda reference_s: self._make(size, reference_s),
            question.model,
            self._out / PROFILE,
            budget_s=self._settings.budget_s,
            seed=question.study.seed,
        )
        return {"reference_s": profiled.summary["reference_s"], "held_out": profiled.summary["held_out"]}

    def _optimize(self, number: int) -> dict[str, Any]:
        """Find the best plan by operators that the engine's steps so far have corrected."""
        tuned = answer(replace(self._question, hardware=(self._corrected(number),)), jobs=1)
        self._write_run(tuned, self._folder(number) / RUN)
        plan, rate = tuned.deployment.plan, tuned.chosen.rate_rps
        assert rate is not None
        (pool,) = plan.pools
        return {"plan": plan.name, "replay_rps": self._settings.load * rate / pool.instances}

    def _replay(self, number: int, tuned: dict[str, Any]) -> dict[str, Any]:
        """Run the plan's settings on the engine, under its load, several times."""
        settings, plan = self._settings, self._plan(number)
        stream = self._stream(tuned)
        engine = self._make(size_of(plan.pools[0]), self._state.done["profile"]["reference_s"])
        steps: list[TimedStep] = []
        try:
            engine.run([DrivenRequest(0, int(stream.prompt_tokens[0]), 2)])
            for repeat in range(settings.repeats):
                driven = engine.run(requests_of(stream), settings.clock, repeat)
                steps += driven.steps
                run = _measured(stream, driven.requests, engine.facts(), settings.clock, f"round {number}")
                write_file(self._folder(number) / f"measured-{repeat}.jsonl", run.to_text())
        finally:
            engine.close()
        write_file(self._folder(number) / STEPS, write_steps(steps, model=self._question.model.name))
        return {"steps": len(steps)}

    def _compare(self, number: int, tuned: dict[str, Any]) -> dict[str, Any]:
        """Compare means predicted from the steps known before the replay with those measured in it."""
        plan, stream = self._plan(number), self._stream(tuned)
        costs = OwnCosts(engine_costs(self._log(number), "the engine's steps"))
        predicted = self._deployed(plan, costs).simulate(stream)
        folder, verdicts = self._folder(number), []
        runs = [read_measured(folder / f"measured-{i}.jsonl") for i in range(self._settings.repeats)]
        for metric in METRICS:
            means = [float(run.values(metric).mean()) for run in runs]
            middle = float(np.median(means))
            noise = (max(means) - min(means)) / 2 / middle
            verdicts.append(MetricVerdict(metric, float(_finite(predicted.values(metric)).mean()), middle, noise))
        return {"verdicts": [list(v) for v in verdicts]}

    # --- what they work on ------------------------------------------------------------------------------------

    def _log(self, number: int) -> list[TimedStep]:
        """Return the steps known before a round: those of the profile, and of earlier replays."""
        files = [self._out / PROFILE / STEPS, *(self._folder(i) / STEPS for i in range(1, number))]
        return [step for file in files for step in read_steps(file).steps]

    def _corrected(self, number: int) -> Hardware:
        question = self._question
        size = question.study.search
        batching = {"max_num_seqs": max(size.max_num_seqs), "max_num_batched_tokens": max(size.max_num_batched_tokens)}
        pool = Pool.model_validate({"hardware": self._hardware.name, "instances": 1, "batching": batching})
        log = Log(self._log(number))
        correction = calibrate(question.model, self._hardware, pool, log, self._out / PROFILE / STEPS)
        return self._hardware.model_copy(update={"calibration": correction})

    def _plan(self, number: int) -> Plan:
        return Plan.from_file(self._folder(number) / RUN / "plan.yaml")

    def _deployed(self, plan: Plan, costs: OwnCosts) -> Deployment:
        # Engines that are driven step by step schedule synchronously.
        pool = plan.pools[0].model_copy(update={"instances": 1, "async_scheduling": False})
        plan = plan.model_copy(update={"pools": (pool,)})
        return deploy(plan, self._question.model, self._hardware, costs)

    def _stream(self, tuned: dict[str, Any]) -> RequestStream:
        return self._requests().at_rate(tuned["replay_rps"])

    def _requests(self) -> RequestStream:
        question = self._question
        return question.draws.stream(self._settings.requests)


def size_of(pool: Pool) -> EngineSize:
    """Return the engine size of a pool's settings."""
    batching = pool.batching
    assert pool.max_model_len is not None
    return EngineSize(
        batching.max_num_seqs, batching.max_num_batched_tokens, pool.max_model_len, pool.kv_cache.block_size
    )


def _measured(
    stream: RequestStream, times: Sequence[Any], facts: dict[str, Any], clock: DriverClock, label: str
) -> MeasuredRun:
    """Return a session as a measured run."""
    assert stream.arrival_s is not None
    requests = tuple(
        MeasuredRequest(
            request=number,
            due_s=float(due),
            sent_s=sent,
            first_token_s=first,
            finish_s=finish,
            prompt_tokens=int(prompt),
            output_tokens=int(output),
        )
        for number, (due, (sent, first, finish, *_), prompt, output) in enumerate(
            zip(stream.arrival_s, times, stream.prompt_tokens, stream.output_tokens, strict=True)
        )
    )
    engine = EngineFacts(engine=facts["engine"], version=facts.get("version"))
    facts_of_run = MeasuredFacts(label=label, engine=engine, clock="wall" if clock == "wall" else "cpu")
    return MeasuredRun(facts_of_run, requests)


def _finite(values: Array) -> Array:
    finite: Array = values[np.isfinite(values)]
    return finite


def _digest(question: Question, settings: LoopSettings) -> str:
    """Return a digest of the inputs that a folder belongs to."""
    parts = [
        question.study.to_data(),
        question.model.to_data(),
        *(hardware.to_data() for hardware in question.hardware),
    ]
    text = json.dumps([*parts, question.workload.to_data(), vars(settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _LoopState:
    """File state.json: the finished stages, and the results that later stages need."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest = path, digest
        self.done: dict[str, dict[str, Any]] = {}
        if path.exists():
            data = json_document(read_text(path), str(path))
            if not isinstance(data, dict) or data.get("inputs") != digest or not isinstance(data.get("done"), dict):
                raise UsageError(f"{path}: is of another study, engine settings or hardware; name another folder")
            self.done = data["done"]

    def finish(self, stage: str, result: dict[str, Any]) -> None:
        self.done[stage] = json.loads(json.dumps(result))
        data = {"schema": SCHEMA, "inputs": self._digest, "done": self.done}
        write_file(self._path, json.dumps(data, indent=1) + "\n")
