"""The answer of a search after runs on a real system: `answer.json`.

Each measured run is simulated with its own requests at the times they were sent, in the worlds of `measure.json`. A
measured mean that lies farther from the prediction than errors and noise explain (by more than CONTRADICTS standard
deviations) contradicts the cost model: its run moves nothing, and the answer says so. All others move the values of all
plans in every world (`simtune.tuner.doubt.next_loads.conditioned`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from simtune.arrays import Array
from simtune.errors import UsageError
from simtune.sim.deployment import Deployment
from simtune.sim.drawn_worlds import DrawnWorlds
from simtune.sim.uncertainty import interval
from simtune.specs.base import Count, NonNegative, Record, Seq, Share
from simtune.specs.plan_words import in_words
from simtune.tuner.doubt.leaders import METRICS, drawn_latencies
from simtune.tuner.doubt.next_loads import NOISIER, conditioned, noises
from simtune.validation.client.measured_formats import read_run
from simtune.validation.client.measured_run import MeasuredRun
from simtune.validation.next_measurement import LeadingPlan, NextMeasurement, PredictedMean, predicted_means
from simtune.validation.session import as_loads

ANSWER_SCHEMA: Literal["simtune/answer@1"] = "simtune/answer@1"
ANSWER = "answer.json"
CONTRADICTS = 3.29
"""Standard deviations that a measured mean lies from its prediction once in a thousand times."""

Verdict = Literal["within", "outside", "contradicts"]


class MeasuredMean(Record):
    """A mean latency of a run, predicted and measured."""

    predicted: PredictedMean
    measured_s: NonNegative
    verdict: Verdict = Field(description="within the interval, outside of it, or beyond what errors and noise explain")


class RunMade(Record):
    """A run on a real system."""

    file: str
    plan: str
    requests: Count
    means: Seq[MeasuredMean]

    @property
    def contradicts(self) -> bool:
        """True if one of its means contradicts the cost model; such a run moves nothing."""
        return any(mean.verdict == "contradicts" for mean in self.means)


class PlanAnswer(Record):
    """A plan before and after the runs."""

    name: str
    before: Seq[float | None] = Field(description="[low, high] of the objective")
    after: Seq[float | None]
    best_before: Share = Field(description="share of worlds in which it is worth most")
    best_after: Share


class MeasuredAnswer(Record):
    """`answer.json`."""

    schema_id: Literal["simtune/answer@1"] = Field(alias="schema")
    study: str
    unit: str
    chosen: str = Field(description="the plan that the search chose")
    best: str = Field(description="the plan that is best in most worlds, now")
    plans: Seq[PlanAnswer] = Field(description="the chosen plan first")
    runs: Seq[RunMade]
    contradicted: bool = Field(description="whether any run contradicts the cost model")
    moved: bool = Field(description="whether any run moved the answer")

    def lines(self) -> list[str]:
        """Return the lines that are printed below the tables."""
        against = [run for run in self.runs if run.contradicts]
        lines = []
        if against and not self.moved:
            lines.append(
                "every run contradicts the prediction by more than its errors and the noise explain: the answer stays "
                "as it was, and is in doubt as a whole; correct the hardware profile (simtune calibrate, simtune "
                "profile), then search again"
            )
        elif against:
            names = ", ".join(Path(run.file).name for run in against)
            lines.append(f"{names}: contradicts the prediction by more than its errors and the noise explain; left out")
        now = next(plan for plan in self.plans if plan.name == self.best)
        same = "is still" if self.best == self.chosen else "is now"
        lines.append(
            f"{in_words(self.best)} {same} the best plan: in {now.best_after:.0%} of worlds, before in "
            f"{now.best_before:.0%}"
        )
        return lines


@dataclass(frozen=True)
class _ComparedRun:
    """A measured run beside the logarithms of its predicted means in each world."""

    run: RunMade
    predicted: Mapping[str, Array]
    measured: Mapping[str, float]


def measured_answer(
    record: NextMeasurement, servers: Mapping[str, Deployment], files: Sequence[Path]
) -> MeasuredAnswer:
    """Return the answer after the runs in files; `servers` are the measured parts of the plans of the record, by name.

    Raise UsageError if a file names no plan of the record, or if requests of a run failed.
    """
    worlds = DrawnWorlds.of(record.worlds, record.seed)
    results = [_compared(record, servers, worlds, path) for path in files]
    before = np.array([plan.log_values for plan in record.plans])
    # A run that contradicts the model would move the worlds far outside of where their regression was seen.
    usable = [result for result in results if not result.run.contradicts]
    metrics = [metric for result in usable for metric in result.measured]
    after = before
    if usable:
        predicted = np.array([result.predicted[metric] for result in usable for metric in result.measured])
        measured = np.array([result.measured[metric] for result in usable for metric in result.measured])
        after = conditioned(before, predicted, measured, noises(metrics, record.noise), record.seed)
    best = _best(after)
    return MeasuredAnswer(
        schema_id=ANSWER_SCHEMA,
        study=record.study,
        unit=record.unit,
        chosen=record.plans[0].name,
        best=record.plans[int(np.argmax(best))].name,
        plans=tuple(
            PlanAnswer(
                name=plan.name,
                before=_ends(before[i]),
                after=_ends(after[i]),
                best_before=_best(before)[i],
                best_after=best[i],
            )
            for i, plan in enumerate(record.plans)
        ),
        runs=tuple(result.run for result in results),
        contradicted=any(result.run.contradicts for result in results),
        moved=bool(usable),
    )


def _ends(log_values: Array) -> tuple[float | None, ...]:
    """Return the interval of a value to six digits."""
    ends = interval(np.exp(log_values).tolist())
    return tuple(None if end is None else float(f"{end:.6g}") for end in ends)


def _best(values: Array) -> list[float]:
    """Return the share of worlds in which each plan is worth most; plans that are equal share a world."""
    most = values == values.max(axis=0)
    return [float(x) for x in (most / most.sum(axis=0)).mean(axis=1)]


def plan_of(record: NextMeasurement, path: Path) -> LeadingPlan:
    """Return the plan that a result file is of, by the name of the file or of a folder it is in. Raise UsageError if
    they name no plan of the record."""
    for part in reversed(path.absolute().parts):
        # Longest name first: the name of a plan may be the beginning of another.
        for plan in sorted(record.plans, key=lambda plan: -len(plan.name)):
            if part == plan.name or part.startswith(f"{plan.name}."):
                return plan
    names = ", ".join(plan.name for plan in record.plans)
    raise UsageError(
        f"{path}: neither the file nor a folder it is in names the plan that was run; call it PLAN.LOAD.json, PLAN one "
        f"of {names}"
    )


def _compared(
    record: NextMeasurement, servers: Mapping[str, Deployment], worlds: DrawnWorlds, path: Path
) -> _ComparedRun:
    plan, run = plan_of(record, path), read_run(path)
    if run.failed:
        raise UsageError(
            f"{path}: {len(run.failed)} of {len(run.requests)} requests failed ({run.failed[0].error}); measure again"
        )
    (load,), _ = as_loads([run], None)
    logs = drawn_latencies(servers[plan.name], load.stream, worlds, np.array(plan.own_errors), plan.log_sd, record.seed)
    measured = {name: math.log(value) for name in logs if (value := _mean(run, name))}
    if not measured:
        raise UsageError(f"{path}: no request has a latency")
    means = tuple(
        MeasuredMean(
            predicted=mean,
            measured_s=math.exp(measured[mean.metric]),
            verdict=_verdict(logs[mean.metric], measured[mean.metric], mean, record.noise * NOISIER[mean.metric]),
        )
        for mean in predicted_means(logs)
        if mean.metric in measured
    )
    return _ComparedRun(
        RunMade(file=str(path), plan=plan.name, requests=len(run.requests), means=means), logs, measured
    )


def _mean(run: MeasuredRun, metric: str) -> float | None:
    return run.statistic("ttft" if metric == METRICS[0] else "tpot", "mean")


def _verdict(predicted: Array, measured: float, mean: PredictedMean, noise: float) -> Verdict:
    off = abs(measured - float(predicted.mean())) / math.hypot(float(predicted.std()), noise)
    if off > CONTRADICTS:
        return "contradicts"
    return "within" if mean.low_s <= math.exp(measured) <= mean.high_s else "outside"
