"""Profile a whole engine: drive it through designed sessions, and record the time of every step.

A session is a handful of requests, each of which arrives after a number of steps; all steps of a session are measured.
Sessions of equal requests make decode steps of every batch size at every context, single prompts make chunks behind
every past, and prompts that arrive while others decode make mixed steps; in a ladder requests end one after the other.
Some sessions of random requests are held out: nothing is ever fitted to them. All sessions are run in rounds, each in
an order of its own, until the budget is spent: a step that was run several times counts by its median, and drift
affects all sessions equally.

A step takes longer right after the batch has changed, and the first time that it has a given number of tokens. So there
are also sessions of random requests that come and go, many or a few at a time; and before the first session an engine
runs every number of tokens once, uncounted, like an engine that has served for a while.

sessions.jsonl is written a session at a time, so that a killed run can be resumed. steps.jsonl is the result: a log
that `simtune simulate --costs` and `simtune calibrate` read (`simtune.costs.engine_steps`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simtune.costs.calibration import TimedStep, write_steps
from simtune.costs.engine_steps import EngineSteps, engine_costs
from simtune.costs.iteration import StepWork
from simtune.errors import SimtuneError, UsageError
from simtune.profiling.timing import now
from simtune.runs.files import write_file
from simtune.specs.input_files import decoded, json_document, json_lines, read_bytes, read_text
from simtune.specs.model import Model
from simtune.validation.servers.driven_engines import DrivenRequest, StepDriver

SESSIONS, STEPS, HELD_OUT, SUMMARY = "sessions.jsonl", "steps.jsonl", "held_out.jsonl", "summary.json"
SCHEMA = "simtune/engine-sessions@1"
ROUNDS = 5
"""Largest number of rounds."""
DECODES = 6
"""Decode steps of a session of equal requests."""
_SPACING = (0.5, 4.0, 16.0)
"""Mean steps between two requests of random sessions: from many requests at a time to a few."""
_RANDOM_REQUESTS = 1.5
"""Requests of a random session, over the seats."""


class DesignedSession(NamedTuple):
    """Requests by the step after which they arrive; `fitted` is False if the steps of the session are held out."""

    requests: tuple[DrivenRequest, ...]
    fitted: bool = True


def design(seats: int, budget: int, longest: int, seed: int = 0, drafts: int = 0) -> list[DesignedSession]:
    """Return sessions for an engine of a number of seats, a token budget and a longest request.

    `drafts` is the number of drafts that it verifies at once. Outputs are long enough for the required steps even if
    all drafts are accepted.
    """
    rng, most = np.random.default_rng(seed), 1 + drafts
    count = max(1, min(DECODES, longest // 2 // most))
    room = longest - most * count - 2
    contexts = np.unique(np.geomspace(min(16, room), room, 5).round().astype(int)).tolist()
    tokens = sorted({*_octaves(budget), budget})
    mixed = [
        _mixed(_Steps(batch, context, count, most), [new for new in tokens[2::2] if new < longest], budget, room)
        for batch in sorted({2, max(1, seats // 2), max(1, seats - 1)})
        for context in (contexts[len(contexts) // 2], contexts[-2])
    ]
    answers = [most * (3 + 3 * i) for i in range(seats)]
    ladder = tuple(DrivenRequest(0, max(1, longest // 4), answer) for answer in answers if answer < longest // 2)
    random = [
        DesignedSession(_random(rng, round(_RANDOM_REQUESTS * seats), spacing, longest), fitted=fitted)
        for fitted in (True, True, True, False)
        for spacing in _SPACING
    ]
    batches = sorted({*_octaves(seats), seats})
    decodes = _decodes([_Steps(batch, context, count, most) for batch in batches for context in contexts], budget)
    return [*decodes, *_chunks(tokens, budget, longest), *mixed, DesignedSession(ladder), *random]


def warm_up(budget: int, longest: int) -> tuple[DrivenRequest, ...]:
    """Return a prompt of every number of tokens that a step may have, one after the other."""
    return tuple(DrivenRequest(at, 1 + at, 1) for at in range(min(budget, longest - 1)))


def _octaves(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i < most]


class _Steps(NamedTuple):
    """Required decode steps: batch, context, number of steps, and the most tokens that a request gets in one step."""

    batch: int
    context: int
    steps: int
    most: int


def _decodes(sessions: Sequence[_Steps], budget: int) -> list[DesignedSession]:
    """Return sessions of requests that decode together, each with about the same context when the last prompt is
    done."""
    return [
        DesignedSession(tuple(_resident(steps, i, budget - steps.most * steps.batch) for i in range(steps.batch)))
        for steps in sessions
    ]


def _resident(wanted: _Steps, number: int, tokens: int) -> DrivenRequest:
    """Return a request that decodes while the prompts behind it are computed, `tokens` tokens a step."""
    behind = wanted.batch - 1 - number
    waits = min((wanted.context - 1) // wanted.most, -(-behind * wanted.context // max(1, tokens)))
    return DrivenRequest(0, wanted.context - wanted.most * waits, wanted.most * (waits + wanted.steps) + 1)


def _chunks(tokens: Sequence[int], budget: int, longest: int) -> list[DesignedSession]:
    """Return single prompts whose last chunk has each number of tokens behind a past of whole budgets."""
    pasts = [past for past in range(0, longest, budget) if past + 2 < longest]
    return [
        DesignedSession((DrivenRequest(0, past + new, 1),))
        for new in tokens
        for past in sorted({pasts[0], pasts[len(pasts) // 2], pasts[-1]})
        if past + new < longest
    ]


def _mixed(wanted: _Steps, late: Sequence[int], budget: int, room: int) -> DesignedSession:
    """Return prompts of the lengths `late` that arrive one after the other while a batch decodes."""
    batch, context, _, most = wanted
    filled = -(-batch * context // budget) + 2
    comers = tuple(DrivenRequest(filled + 2 * i, new, 2) for i, new in enumerate(late))
    answer = max(2, min(room - context, most * (2 * len(late) + 8)))
    return DesignedSession(tuple(DrivenRequest(0, context, answer) for _ in range(batch)) + comers)


def _random(rng: np.random.Generator, count: int, spacing: float, longest: int) -> tuple[DrivenRequest, ...]:
    """Return requests with lengths spread over the octaves, at random times, `spacing` steps apart on average."""
    at = np.cumsum(rng.exponential(spacing, count)).astype(int)
    prompt = np.exp(rng.uniform(np.log(8), np.log(0.7 * longest), count)).astype(int)
    output = rng.integers(2, max(3, min(64, longest // 4)), count)
    return tuple(DrivenRequest(int(a), int(p), int(o)) for a, p, o in zip(at, prompt, output, strict=True))


class StepErrors(NamedTuple):
    """Errors |predicted / measured - 1| of steps that were not fitted, and the error of their sum."""

    steps: int
    median: float
    p90: float
    total: float
    """Predicted over measured, all steps together, less 1."""

    @classmethod
    def of(cls, costs: EngineSteps, steps: Sequence[TimedStep]) -> StepErrors:
        """Return the errors of one or more steps; equal steps count by their median."""
        by_key: dict[StepWork, list[float]] = {}
        for step in steps:
            by_key.setdefault(step.batch, []).append(step.seconds)
        measured = np.array([np.median(times) for times in by_key.values()])
        predicted = np.array([costs.seconds(work) for work in by_key])
        errors = np.abs(predicted / measured - 1)
        total = float(predicted.sum() / measured.sum() - 1)
        return cls(len(measured), float(np.median(errors)), float(np.quantile(errors, 0.9)), total)


@dataclass(frozen=True)
class EngineProfile:
    """Result of the profile of an engine."""

    costs: EngineSteps
    fitted: list[TimedStep]
    held_out: list[TimedStep]
    errors: dict[str, StepErrors]
    """Errors of the held-out steps: those that decode only, and those with prompt tokens."""
    summary: dict[str, Any]


def profile_engine(
    make: Callable[[float | None], StepDriver],
    model: Model,
    out: Path,
    *,
    budget_s: float,
    rounds: int = ROUNDS,
    seed: int = 0,
    clock: Callable[[], float] = now,
    progress: Callable[[int, int], None] = lambda done, planned: None,
) -> EngineProfile:
    """Run every session at least once, and on until the budget is spent, and fit. Resume a run that was stopped.

    `make` starts the engine, given the reference of an earlier gauge. Raise UsageError if the folder contains sessions
    of another engine, model or size.
    """
    started = clock()
    with closing(_SessionJournal(out / SESSIONS)) as journal, closing(make(journal.reference_s)) as engine:
        facts = {**engine.facts(), "model": model.to_data(), "size": list(engine.size), "seed": seed}
        journal.open(facts)
        seats, tokens, longest, _ = engine.size
        sessions = design(seats, tokens, longest, seed, facts.get("draft_tokens", 0))
        order = [
            (r, int(i)) for r in range(rounds) for i in np.random.default_rng((seed, r)).permutation(len(sessions))
        ]
        engine.run(warm_up(tokens, longest))
        for r, i in order:
            if (r, i) in journal.done:
                continue
            # The first round is never cut short, so that every session is measured at least once.
            if r and clock() - started > budget_s:
                break
            journal.record(r, i, engine.run(sessions[i].requests, "steps", seed).steps)
            progress(len(journal.done), len(order))
    return _finish(journal, sessions, facts, out, clock() - started)


def _finish(
    journal: _SessionJournal, sessions: Sequence[DesignedSession], facts: dict[str, Any], out: Path, spent_s: float
) -> EngineProfile:
    """Fit the steps, and write the files of the profile."""
    steps: dict[bool, list[TimedStep]] = {True: [], False: []}
    for (_, i), session in sorted(journal.done.items()):
        steps[sessions[i].fitted] += session
    costs = engine_costs(steps[True], str(out / STEPS))
    kinds = {kind: [s for s in steps[False] if s.kind == kind] for kind in ("decode", "prefill")}
    errors = {kind: StepErrors.of(costs, steps_of_kind) for kind, steps_of_kind in kinds.items() if steps_of_kind}
    summary = {
        **{key: facts[key] for key in sorted(facts) if key not in ("model", "seed")},
        "model": facts["model"]["name"],
        "sessions": len(journal.done),
        "steps": len(steps[True]),
        "steps_held_out": len(steps[False]),
        "spent_s": round(spent_s, 1),
        "held_out": {kind: e._asdict() for kind, e in errors.items()},
    }
    for name, fitted in ((STEPS, True), (HELD_OUT, False)):
        write_file(out / name, write_steps(steps[fitted], model=summary["model"]))
    write_file(out / SUMMARY, json.dumps(summary, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return EngineProfile(costs, steps[True], steps[False], errors, summary)


def reference_beside(steps: Path) -> float | None:
    """Return the reference of the gauge by which the steps of a profile were timed; None for a log from elsewhere."""
    summary = steps.with_name(SUMMARY)
    if not summary.is_file():
        return None
    try:
        return float(json_document(read_text(summary), str(summary))["reference_s"])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{summary}: has no reference_s; profile the engine again") from None


class _SessionJournal:
    """File of the sessions that were run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: dict[tuple[int, int], list[TimedStep]] = {}
        self._header: dict[str, Any] | None = None
        text = read_bytes(path) if path.exists() else b""
        complete_lines = text[: text.rfind(b"\n") + 1]
        if text != complete_lines:
            # The session that was being written is run again.
            os.truncate(path, len(complete_lines))
        for number, data in json_lines(decoded(path, complete_lines), str(path)):
            if self._header is None:
                self._header = data
                continue
            try:
                self.done[data["round"], data["session"]] = [_step(step) for step in data["steps"]]
            except (KeyError, TypeError, ValueError):
                raise UsageError(f"{path}:{number}: is no session; remove the line, and it is run again") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    @property
    def reference_s(self) -> float | None:
        """Reference of the gauge in the first run; None without a file."""
        return None if self._header is None else float(self._header["reference_s"])

    def open(self, facts: dict[str, Any]) -> None:
        """Write or compare the header. Raise UsageError if the file contains sessions of something else."""
        header = json.loads(json.dumps({"schema": SCHEMA, **facts}))
        if self._header is None:
            self._header = header
            self._write(header)
        for key in header:
            if self._header.get(key) != header[key]:
                raise UsageError(
                    f"{self._path}: contains sessions of another {key}, which cannot be mixed; use another folder"
                )

    def record(self, round_: int, session: int, steps: list[TimedStep]) -> None:
        rows = [[(b := s.batch).num_decodes, b.context_tokens, b.chunks, s.seconds, b.draft_tokens] for s in steps]
        self._write({"round": round_, "session": session, "steps": rows})
        self.done[round_, session] = [_step(row) for row in rows]

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise SimtuneError(
                f"{self._path}: cannot be written ({error.strerror}); its {len(self.done)} sessions are kept: make "
                "room and give the same command again"
            ) from None

    def close(self) -> None:
        # On a full disk the file keeps what could not be written, which `_write` has reported.
        with contextlib.suppress(OSError):
            self._file.close()


def _step(row: Sequence[Any]) -> TimedStep:
    decodes, context, chunks, seconds, drafts = row
    pieces = tuple((past, new) for past, new in chunks)
    return TimedStep(StepWork(decodes, context, pieces, decodes + len(pieces), draft_tokens=drafts), seconds)
