"""The folder of a validation: what was asked, what was measured so far, and in the end what came of it.

    manifest.json                  versions, inputs, the time of day
    question.json                  a digest of everything that what is measured depends on
    plan.yaml                      the plan
    measured/<load>-<repeat>.jsonl one finished run each (`simtune/measured@1`)
    refused/<load>-<repeat>.jsonl  runs with failed requests, or whose client was late
    predicted/<load>.csv           the simulated requests
    validation.json, .html         the comparison

A run that stands in measured/ is not run again; a folder that was made for another question is not gone on with.
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
from simtune.validation.loads import Load
from simtune.validation.servers.server import Engine
from simtune.workload.requests import RequestStream

QUESTION = "question.json"


class ValidationFolder:
    """Where a validation is kept while it runs."""

    def __init__(self, out: Path, question: Mapping[str, Any], force: bool) -> None:
        """Go on in `out` where it was made for the same question, else begin. Raises UsageError where it holds another
        run and `force` does not allow to replace it."""
        self._out = out
        text = json.dumps(question, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        asked = json.dumps({"schema": "simtune/question@1", "sha256": digest}, indent=1) + "\n"
        kept = out / QUESTION
        same = kept.is_file() and kept.read_bytes() == asked.encode()
        if kept.is_file() and not same and not force:
            raise UsageError(
                f"{out}: holds a validation of another plan, load or engine; give --force to replace it, or name "
                "another folder"
            )
        claim(out, force or same)
        if same:
            clear_within(out)
        else:  # both at once: with one of them alone the same command would be refused
            write(out, {MANIFEST: "{}\n", QUESTION: asked})

    def keep(self, files: Files) -> None:
        """Write files, each whole or not at all."""
        for name, content in files.items():
            write_file(self._out / name, content)

    def finished(self, load: Load, repeat: int) -> MeasuredRun | None:
        """A run that is there already."""
        path = self._out / "measured" / _name(load, repeat)
        return read_measured(path) if path.is_file() else None

    def measured(self, load: Load, repeat: int, run: MeasuredRun) -> None:
        """Keep a run that can be judged."""
        self.keep({f"measured/{_name(load, repeat)}": run.to_text()})

    def refused(self, load: Load, repeat: int, run: MeasuredRun) -> None:
        """Keep a run that cannot, for who wants to know why."""
        self.keep({f"refused/{_name(load, repeat)}": run.to_text()})

    def keep_records(self, name: str, outcome: Record, manifest: Manifest) -> None:
        """What came of it, last."""
        records: tuple[tuple[str, Record], ...] = ((name, outcome), (MANIFEST, manifest))
        files: Files = {
            name: json.dumps(record.to_data(), indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
            for name, record in records
        }
        self.keep(files)

    def export(self, tool: str, load: Load, repeat: int, run: MeasuredRun) -> None:
        """A run as another tool writes it."""
        ending, text_of = EXPORTS[tool]
        self.keep({f"{tool}/{load.label}-{repeat}{ending}": text_of(run)})


def as_loads(
    runs: Sequence[MeasuredRun], stream: RequestStream | None
) -> tuple[list[Load], dict[str, list[MeasuredRun]]]:
    """Runs that were measured elsewhere as loads of one run each: their own requests, at the times they were sent.

    What prompts share, their classes and priorities are those of `stream`, where it is the one that was sent; else
    nothing is shared.
    """
    loads, by_label = [], {}
    for number, run in enumerate(runs):
        same = stream is not None and len(stream) == len(run.requests)
        same = same and stream is not None and np.array_equal(stream.prompt_tokens, run.prompt_tokens)
        base = stream if same and stream is not None else _plain(run)
        label = run.facts.label if run.facts.label not in by_label else f"{run.facts.label}-{number}"
        order = np.maximum.accumulate(run.sent_s)
        loads.append(Load(label, replace(base, arrival_s=order, users=None, output_tokens=_answered(run))))
        by_label[label] = [run]
    return loads, by_label


def _answered(run: MeasuredRun) -> Ints:
    """A request that failed before its first token is simulated with one."""
    return np.maximum(1, run.output_tokens)


def _plain(run: MeasuredRun) -> RequestStream:
    zeros = np.zeros(len(run.requests), dtype=np.int64)
    return RequestStream(run.sent_s, run.prompt_tokens, _answered(run), zeros, zeros, ("default",), (None,))


def _name(load: Load, repeat: int) -> str:
    return f"{load.label}-{repeat}.jsonl"


@dataclass(frozen=True)
class Round:
    """How loads are run."""

    repeats: int
    most_late: float
    seed: int


Progress = Callable[[int, int, str], None]


def run_once(
    engine: Engine, plan: Plan, load: Load, repeat: int, how: Round, folder: ValidationFolder, prompts: str
) -> MeasuredRun:
    """One run, unless it is there already, and kept; `prompts` and the repeat name the prompts that are sent.

    Raises EngineError where the client was too late.
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
    engine: Engine, plans: Sequence[tuple[Plan, Load]], how: Round, folder: ValidationFolder, progress: Progress
) -> dict[str, list[MeasuredRun]]:
    """Every plan under its load so many times, by the load's label; an engine is started once for each plan, and all
    plans get the same prompts, in every repeat others.

    Raises EngineError where requests failed: an order of plans that did not serve the same requests means nothing.
    """
    runs: dict[str, list[MeasuredRun]] = {}
    for done, (plan, load) in enumerate(plans):
        for repeat in range(how.repeats):
            progress(done * how.repeats + repeat, len(plans) * how.repeats, plan.name)
            run = run_once(engine, plan, load, repeat, how, folder, "every plan")
            if run.failed:
                why = run.failed[0].error
                raise EngineError(f"plan {plan.name}: {len(run.failed)} requests failed, the first because: {why}")
            runs.setdefault(load.label, []).append(run)
    return runs


def run_loads(
    engine: Engine, plan: Plan, loads: Sequence[Load], how: Round, folder: ValidationFolder, progress: Progress
) -> dict[str, list[MeasuredRun]]:
    """Every load so many times, by its label; all loads in turn, so that a machine's drift meets all of them.

    The first load is repeated before the others: what repeats differ by is known first. Every run has prompts of its
    own, so that an engine's prefix cache holds nothing of an earlier one. Ends early at a run with failed
    requests, which is the last of its load. Raises EngineError where the client was too late for its times to count.
    """
    first, *rest = loads
    turns = [(first, repeat) for repeat in range(how.repeats)]
    turns += [(load, repeat) for repeat in range(how.repeats) for load in rest]
    runs: dict[str, list[MeasuredRun]] = {}
    for done, (load, repeat) in enumerate(turns):
        progress(done, len(turns), f"{load.label}, repeat {repeat + 1}")
        run = run_once(engine, plan, load, repeat, how, folder, load.label)
        runs.setdefault(load.label, []).append(run)
        if run.failed:
            break
    return runs
