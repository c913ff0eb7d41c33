"""Runs on a real system that tell the leading plans of a search apart: `measure.json` and the files beside it.

measure.json           the plans with their values in every world, and the runs (`simtune/measure@1`)
measure.sh             the commands of load generators, in order
loads/<run>.jsonl      the trace of a run, in Mooncake's keys
plans/<plan>/          plan.yaml and the launch settings of the part of the plan that is measured
answer.json            the answer after measurements (`simtune.validation.measured_answer`)
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from simtune.arrays import Array
from simtune.emit.load_generators import RESULTS, GeneratedLoad, commands
from simtune.errors import UsageError
from simtune.runs.engine_files import engine_files, searched_plan
from simtune.runs.files import Files
from simtune.runs.schema import CandidateRow, Run
from simtune.sim.drawn_worlds import DrawnWorlds
from simtune.sim.uncertainty import LEVEL, interval
from simtune.specs.base import Count, NonNegative, Positive, Record, Seq, Share
from simtune.specs.plan_words import in_words
from simtune.specs.references import Places, unmoved
from simtune.specs.tower import MEDIA_NAMES
from simtune.specs.trace_write import written_names
from simtune.tuner.certificate.search_certificate import Certificate
from simtune.tuner.doubt.leaders import Leader, PlanErrors, leaders
from simtune.tuner.doubt.next_loads import WORLDS, LoadOfPlan, LoadsOfStudy, NextRun, choose, latencies
from simtune.tuner.question import Question
from simtune.tuner.space.expressible import space_for
from simtune.tuner.trial import Trial
from simtune.workload.requests import RequestStream
from simtune.workload.trace_media import media_kinds

MEASURE_SCHEMA: Literal["simtune/measure@1"] = "simtune/measure@1"
MEASURE = "measure.json"
SCRIPT = "measure.sh"
ENDS = ((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2)
"""Quantiles of a predicted mean that are stated."""


class LeadingPlan(Record):
    """A plan that is compared."""

    name: str
    gpus: Count = Field(description="GPUs of the part that is measured")
    parts: Count = Field(description="how many such parts the plan has; the rate is measured on one")
    value: NonNegative | None = Field(description="of the objective, in the search; null if the plan missed the SLO")
    log_values: Seq[float] = Field(description="logarithm of its value in each world")
    own_errors: Seq[float] = Field(description="logarithm of the error of the plan by itself in each world")
    log_sd: dict[str, NonNegative] = Field(description="standard deviation of the log error of each kind of operator")

    @property
    def values(self) -> tuple[float | None, ...]:
        """Interval of the value over the worlds."""
        return tuple(interval(np.exp(self.log_values).tolist()))


class PredictedMean(Record):
    """Mean latency of a run, predicted: the ends of its interval, and the middle."""

    metric: str
    low_s: NonNegative
    middle_s: NonNegative
    high_s: NonNegative


class RunToMake(Record):
    """A run that is worth making."""

    name: str = Field(description="of its result file, without the ending: of the plan and the load")
    plan: str
    load: str
    requests: Count
    rate_rps: Positive | None = Field(description="null for users that wait for their answers")
    users: Count | None
    prompt_tokens: Count | None = Field(description="null where prompts differ: see the trace")
    output_tokens: Count | None
    predicted: Seq[PredictedMean]
    right_after: Share = Field(description="probability of choosing the better plan after this run and those before")
    commands: dict[str, str] = Field(description="by load generator; $URL and $MODEL are the server's")

    @property
    def words(self) -> str:
        """The load in words."""
        pace = f"{self.users} at once" if self.rate_rps is None else f"{self.rate_rps:g} requests/s"
        lengths = "the requests of the study"
        if self.prompt_tokens is not None:
            lengths = f"prompts of {self.prompt_tokens:,} and outputs of {self.output_tokens:,} tokens"
        return f"{lengths}, {pace}, {self.requests:,} requests"


class NextMeasurement(Record):
    """`measure.json`."""

    schema_id: Literal["simtune/measure@1"] = Field(alias="schema")
    study: str
    study_file: str | None = Field(description="where it is; null: where the search read it")
    unit: str
    digest: str = Field(description="of the certificate of the run that it belongs to")
    seed: int
    worlds: Count
    noise: Positive = Field(description="standard deviation of a measured mean, and of a plan by itself, as a share")
    right: Share = Field(description="probability that the better of the chosen plan and its nearest rival is chosen")
    rival: str = Field(description="the nearest rival")
    plans: Seq[LeadingPlan] = Field(description="the chosen plan first")
    runs: Seq[RunToMake] = Field(description="in the order in which they help")

    def lines(self) -> list[str]:
        """Return the lines that are printed below the tables."""
        last = self.runs[-1].right_after
        if last <= self.right:
            return [
                f"{self.right:.0%} sure of the chosen plan against {in_words(self.rival)}; no run adds to it: the runs "
                "check the prediction where the two differ most"
            ]
        sure = ", ".join(f"{number} runs {run.right_after:.0%}" for number, run in enumerate(self.runs, 1))
        return [
            f"{self.right:.0%} sure of the chosen plan against {in_words(self.rival)}; expected after "
            + sure.replace("1 runs", "1 run")
        ]


class PreparedRuns(NamedTuple):
    """Runs to make, and their files."""

    record: NextMeasurement
    files: Files


def next_measurement(
    question: Question, run: Run, noise: float, study_file: str | None = None, places: Places = unmoved
) -> PreparedRuns:
    """Return the runs that tell the leading plans of a finished search apart; `places` has those of the study's
    references. Raise UsageError if there is no rival, if plans of this study are not told apart by runs, or if its
    requests hold media."""
    if kinds := media_kinds(question.workload, question.trace):
        raise UsageError(
            f"measure: requests of this load hold {' and '.join(MEDIA_NAMES[kind] for kind in kinds)}, which load "
            "generators would send as text of the same length, so that nothing would be encoded; search with a load of "
            "text alone"
        )
    certificate = run.certificate
    if certificate is None:
        raise UsageError("measure: this run has no certificate; name a run directory that simtune optimize wrote")
    seed, worlds = question.study.seed, DrawnWorlds.of(WORLDS, question.study.seed)
    plans = leaders(question, trials_of(question, certificate, run.candidates), PlanErrors(worlds, seed, noise))
    if len(plans) < 2:
        raise UsageError("measure: the search has no second plan to tell the chosen one from")
    loads = LoadsOfStudy(question, plans)
    log_means = latencies(loads, plans, worlds, seed)
    right, chosen_runs = choose([plan.log_values for plan in plans], log_means, noise)
    entries = [(proposed, loads.of(plans[proposed.plan], proposed.option)) for proposed in chosen_runs]
    runs = tuple(
        _run(proposed, load, plans[proposed.plan], predicted_means(log_means[proposed.plan, proposed.option]), seed)
        for proposed, load in entries
    )
    rival = max(number for number, _ in log_means)
    record = NextMeasurement(
        schema_id=MEASURE_SCHEMA,
        study=question.study.name,
        study_file=study_file,
        unit=question.objective.unit,
        digest=certificate.digest,
        seed=seed,
        worlds=WORLDS,
        noise=noise,
        right=right,
        rival=plans[rival].name,
        plans=tuple(map(_leading, plans)),
        runs=runs,
    )
    traces: Files = {
        _trace_file(entry.name): mooncake_text(load.stream)
        for entry, (_, load) in zip(runs, entries, strict=True)
        if load.kind == "trace"
    }
    return PreparedRuns(record, {SCRIPT: script(record), **traces, **_plan_files([plans[0], plans[rival]], places)})


def trials_of(question: Question, certificate: Certificate, rows: Sequence[CandidateRow]) -> list[Trial]:
    """Return the plans of a finished search, as far as its files contain them, in their order."""
    candidates = {candidate.name: candidate for candidate in space_for(question).candidates}
    fates = {fate.plan: fate for fate in certificate.plans}
    trials = []
    for row in rows:
        fate, candidate = fates.get(row.candidate), candidates.get(row.candidate)
        if fate is not None and candidate is not None:
            trial = Trial(candidate, row.status, row.reason, rate_rps=row.rate_rps, best=fate.best)
            trial.same_as, trial.allocation = fate.same_as, fate.allocation
            trials.append(trial)
    if not trials or trials[0].status != "chosen":
        raise UsageError("measure: candidates.csv does not begin with the chosen plan of this study; search again")
    return trials


def _leading(plan: Leader) -> LeadingPlan:
    return LeadingPlan(
        name=plan.name,
        gpus=plan.gpus,
        parts=plan.servers,
        value=plan.value,
        log_values=tuple(_short(x) for x in plan.log_values.tolist()),
        own_errors=tuple(_short(x) for x in plan.own_errors.tolist()),
        log_sd={kind: _short(sd) for kind, sd in sorted(plan.log_sd.items())},
    )


def _short(value: float) -> float:
    """Return a value to six decimals, because the last bits depend on the processor."""
    return round(value, 6)


def predicted_means(logs: Mapping[str, Array]) -> tuple[PredictedMean, ...]:
    """Return the middle and the interval of mean latencies, given their logarithms in each world."""
    means = []
    for metric, at in logs.items():
        low, middle, high = (float(f"{x:.6g}") for x in np.exp(np.quantile(at, ENDS)))
        means.append(PredictedMean(metric=metric, low_s=low, middle_s=middle, high_s=high))
    return tuple(means)


def _run(
    proposed: NextRun, load: LoadOfPlan, plan: Leader, predicted: tuple[PredictedMean, ...], seed: int
) -> RunToMake:
    label, stream = proposed.option.label, load.stream
    name = f"{plan.name}.{label}"
    generated = GeneratedLoad(
        name,
        len(stream),
        seed,
        trace=_trace_file(name) if load.kind == "trace" else None,
        block_tokens=None if stream.hash_ids is None else stream.block_tokens,
        rate_rps=load.rate_rps,
        users=load.users,
        prompt_tokens=load.prompt_tokens or 0,
        output_tokens=load.output_tokens or 0,
    )
    return RunToMake(
        name=name,
        plan=plan.name,
        load=label,
        requests=len(stream),
        rate_rps=load.rate_rps,
        users=load.users,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        predicted=predicted,
        right_after=proposed.right_after,
        commands=commands(generated),
    )


def _trace_file(name: str) -> str:
    return f"loads/{name}.jsonl"


def mooncake_text(stream: RequestStream) -> str:
    """Return requests in Mooncake's keys, times in milliseconds, as JSON lines."""
    assert stream.arrival_s is not None
    blocks = None if stream.hash_ids is None else written_names(stream.hash_ids)
    lines = []
    for number, sent_s in enumerate(stream.arrival_s.tolist()):
        row: dict[str, Any] = {
            "timestamp": round(1e3 * sent_s, 3),
            "input_length": int(stream.prompt_tokens[number]),
            "output_length": int(stream.output_tokens[number]),
        }
        if blocks is not None:
            # load generators take the size of blocks from their command, simtune from here
            row |= {"hash_ids": blocks[number], "block_tokens": stream.block_tokens}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def _plan_files(plans: Sequence[Leader], places: Places) -> Files:
    """Return plan and launch settings of the measured part of each plan."""
    files: Files = {}
    for plan in plans:
        folder, deployment = f"plans/{plan.name}", plan.server
        files[f"{folder}/plan.yaml"] = searched_plan(
            deployment.plan, "To be measured; written by simtune.", places(folder)
        )
        # Plans of techniques that no engine has are told apart as well; their folder says what would have to be built.
        settings = engine_files(deployment, simulated_only=True)
        files |= {f"{folder}/{name}": content for name, content in settings.items()}
    return files


def script(record: NextMeasurement) -> str:
    """Return a shell script with the runs of each plan, by the first load generator that can send the load."""
    plans = list(dict.fromkeys(run.plan for run in record.runs))
    lines = [
        "#!/bin/sh",
        f"# Runs that tell the leading plans of {record.study} apart. Written by simtune measure.",
        f"# sh {SCRIPT} PLAN runs the loads of a plan that is served at URL under the name MODEL, one of",
        *(f"#   {plan}, started by the settings in plans/{plan}/engine" for plan in plans),
        f"# Then: simtune validate RUN --from FILE, with every file in {RESULTS}. Other generators: {MEASURE}.",
        "set -eu",
        ': "${URL:?address of the server}" "${MODEL:?name under which it serves the model}"',
        'cd "$(dirname "$0")"',
        f"mkdir -p {RESULTS}",
        'case "${1:-}" in',
    ]
    for plan in plans:
        lines.append(f"{shlex.quote(plan)})")
        for run in record.runs:
            if run.plan == plan:
                lines += [f"    # {run.load}: {run.words}", f"    {next(iter(run.commands.values()))}"]
        lines.append("    ;;")
    return "\n".join([*lines, '*) echo "name a plan: ' + " ".join(plans) + '" >&2; exit 2 ;;', "esac", ""])
