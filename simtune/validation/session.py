"""The folder of a validation: its question, the runs measured so far, and the result.

    manifest.json                  versions, inputs, the time of day
    question.json                  a digest of everything that what is measured depends on
    plan.yaml                      the plan
    measured/<load>-<repeat>.jsonl one finished run each (`simtune/measured@1`)
    refused/<load>-<repeat>.jsonl  runs with failed requests, or whose client was late
    predicted/<load>.csv           the simulated requests
    validation.json, .html         the comparison

A run with a file in measured/ is not repeated; a folder that was made for another question is not resumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from simtune.arrays import Ints
from simtune.errors import EngineError, UsageError
from simtune.runs.files import MANIFEST, Files, claim, clear_within, write, write_file
from simtune.runs.schema import Manifest
from simtune.specs.base import Record
from simtune.specs.plan import Plan
from simtune.validation.client.measured_formats import EXPORTS
from simtune.validation.client.measured_run import MeasuredRun, read_measured
from simtune.validation.client.prompts import prompt_seed
from simtune.validation.judge.comparison import check_client
from simtune.validation.loads import NamedLoad
from simtune.validation.servers.server import Engine
from simtune.workload.requests import RequestStream

QUESTION = "question.json"


class ValidationFolder:
    """Folder of a validation while it runs."""

    def __init__(self, out: Path, question: Mapping[str, Any], force: bool) -> None:
        """Resume in `out` if it was made for the same question, otherwise begin.

        Raise UsageError if the folder holds another run and `force` does not allow to replace it.
        """
        self.path = out
        text = json.dumps(question, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        question_text = json.dumps({"schema": "simtune/question@1", "sha256": digest}, indent=1) + "\n"
        question_file = out / QUESTION
        same = question_file.is_file() and question_file.read_bytes() == question_text.encode()
        if question_file.is_file() and not same and not force:
            raise UsageError(
                f"{out}: holds a validation of another plan, load or engine; give --force to replace it, or name "
                "another folder"
            )
        claim(out, force or same)
        if same:
            clear_within(out)
        # Write both together: with one of them alone the same command would be refused.
        else:
            write(out, {MANIFEST: "{}\n", QUESTION: question_text})

    def keep(self, files: Files) -> None:
        """Write files, each completely or not at all."""
        for name, content in files.items():
            write_file(self.path / name, content)

    def finished(self, load: NamedLoad, repeat: int) -> MeasuredRun | None:
        """Return a run that was finished before; None if there is none."""
        path = self.path / "measured" / _name(load, repeat)
        return read_measured(path) if path.is_file() else None

    def measured(self, load: NamedLoad, repeat: int, run: MeasuredRun) -> None:
        """Store a run that can be judged."""
        self.keep({f"measured/{_name(load, repeat)}": run.to_text()})

    def refused(self, load: NamedLoad, repeat: int, run: MeasuredRun) -> None:
        """Store a run that cannot be judged, for diagnosis."""
        self.keep({f"refused/{_name(load, repeat)}": run.to_text()})

    def keep_records(self, name: str, outcome: Record, manifest: Manifest) -> None:
        """Store the outcome and the manifest, after everything else."""
        records: tuple[tuple[str, Record], ...] = ((name, outcome), (MANIFEST, manifest))
        files: Files = {
            name: json.dumps(record.to_data(), indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
            for name, record in records
        }
        self.keep(files)

    def export(self, tool: str, load: NamedLoad, repeat: int, run: MeasuredRun) -> None:
        """Write a run in the format of another tool."""
        ending, text_of = EXPORTS[tool]
        self.keep({f"{tool}/{load.label}-{repeat}{ending}": text_of(run)})


def as_loads(
    runs: Sequence[MeasuredRun], stream: RequestStream | None
) -> tuple[list[NamedLoad], dict[str, list[MeasuredRun]]]:
    """Return runs that were measured elsewhere as loads of one run each: their own requests, at the times they were
    sent.

    Shared prefixes, classes and priorities are those of `stream`, if it is the one that was sent; otherwise nothing is
    shared.
    """
    loads, by_label = [], {}
    for number, run in enumerate(runs):
        same = stream is not None and len(stream) == len(run.requests)
        same = same and stream is not None and np.array_equal(stream.prompt_tokens, run.prompt_tokens)
        base = stream if same and stream is not None else _plain(run)
        label = run.facts.label if run.facts.label not in by_label else f"{run.facts.label}-{number}"
        order = np.maximum.accumulate(run.sent_s)
        loads.append(
            NamedLoad(label, replace(base, arrival_s=order, due_s=None, users=None, output_tokens=_answered(run)))
        )
        by_label[label] = [run]
    return loads, by_label


def _answered(run: MeasuredRun) -> Ints:
    """Return output tokens, at least 1: a request that failed before its first token is simulated with one."""
    return np.maximum(1, run.output_tokens)


def _plain(run: MeasuredRun) -> RequestStream:
    zeros = np.zeros(len(run.requests), dtype=np.int64)
    return RequestStream(run.sent_s, run.prompt_tokens, _answered(run), zeros, zeros, ("default",), (None,))


def _name(load: NamedLoad, repeat: int) -> str:
    return f"{load.label}-{repeat}.jsonl"


@dataclass(frozen=True)
class Round:
    """Number of repeats, tolerated lateness of the client, and seed."""

    repeats: int
    most_late: float
    seed: int


OnProgress = Callable[[int, int, str], None]


def run_once(
    engine: Engine, plan: Plan, load: NamedLoad, repeat: int, how: Round, folder: ValidationFolder, prompts: str
) -> MeasuredRun:
    """Return one run, measured unless it is stored already; `prompts` and the repeat name the prompts that are sent.

    Raise EngineError if the client was too late.
    """
    run = folder.finished(load, repeat)
    if run is not None:
        return run
    run = engine.run(plan, load.stream, label=load.label, seed=prompt_seed(how.seed, f"{prompts} {repeat}"))
    failed = bool(run.failed)
    try:
        if not failed:
            check_client(run, how.most_late)
    except EngineError:
        folder.refused(load, repeat, run)
        raise
    (folder.refused if failed else folder.measured)(load, repeat, run)
    return run


def run_plans(
    engine: Engine, plans: Sequence[tuple[Plan, NamedLoad]], how: Round, folder: ValidationFolder, progress: OnProgress
) -> dict[str, list[MeasuredRun]]:
    """Run every plan under its load `how.repeats` times. Return the runs by the load's label.

    An engine is started once for each plan, and all plans get the same prompts, different ones in every repeat. Raise
    EngineError if requests failed: plans that did not serve the same requests cannot be ordered.
    """
    runs: dict[str, list[MeasuredRun]] = {}
    for index, (plan, load) in enumerate(plans):
        for repeat in range(how.repeats):
            progress(index * how.repeats + repeat, len(plans) * how.repeats, plan.name)
            run = run_once(engine, plan, load, repeat, how, folder, "every plan")
            if run.failed:
                why = run.failed[0].error
                raise EngineError(f"plan {plan.name}: {len(run.failed)} requests failed, the first because: {why}")
            runs.setdefault(load.label, []).append(run)
    return runs


def run_loads(
    engine: Engine, plan: Plan, loads: Sequence[NamedLoad], how: Round, folder: ValidationFolder, progress: OnProgress
) -> dict[str, list[MeasuredRun]]:
    """Run every load `how.repeats` times, all loads in turn, so that a machine's drift affects all of them equally.
    Return the runs by label.

    The first load is repeated before the others, so that the noise of repeats is known first. Every run has prompts of
    its own, so that an engine's prefix cache holds nothing of an earlier one. Runs end early at one with failed
    requests, which is the last of its load. Raise EngineError if the client was too late for its times to count.
    """
    first, *later_loads = loads
    turns = [(first, repeat) for repeat in range(how.repeats)]
    turns += [(load, repeat) for repeat in range(how.repeats) for load in later_loads]
    runs: dict[str, list[MeasuredRun]] = {}
    for index, (load, repeat) in enumerate(turns):
        progress(index, len(turns), f"{load.label}, repeat {repeat + 1}")
        run = run_once(engine, plan, load, repeat, how, folder, load.label)
        runs.setdefault(load.label, []).append(run)
        if run.failed:
            break
    return runs
