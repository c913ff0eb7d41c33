"""Progress of long work: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S = 20.0
"""Seconds between two lines about running work if there is no terminal."""
EVERY_JSON_S = 1.0


def seconds_of(work: Callable[[], None]) -> float:
    """Return how long some work takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


class Deadline:
    """True, when it is called, once a number of seconds have passed since it was made."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._ends = seconds, time.monotonic() + seconds
        self.passed = False

    def __call__(self) -> bool:
        """Return True if the time is up."""
        self.passed = time.monotonic() >= self._ends
        return self.passed


class Pace:
    """Prints from time to time a line with the progress of work: number done, total, rate, remaining time."""

    def __init__(self, what: str, as_json: bool) -> None:
        self.what, self.as_json = what, as_json
        self._began = self._said = time.monotonic()

    def __call__(self, done: int, total: int, words: str) -> None:
        """Report that `done` of `total` is finished."""
        now = time.monotonic()
        if now - self._said < (EVERY_JSON_S if self.as_json else EVERY_S) and not (self.as_json and done == total):
            return
        self._said = now
        passed = now - self._began
        rate = done / passed if passed > 0 and done else None
        left_s = None if rate is None else (total - done) / rate
        if self.as_json:
            state = {"what": self.what, "done": done, "total": total, "words": words}
            paced = {"elapsed_s": passed, "per_s": rate, "left_s": left_s}
            line = json.dumps(state | paced, sort_keys=True, allow_nan=False)
        else:
            pace = "" if rate is None or left_s is None else f", {rate:,.3g}/s, about {left_s:,.0f} s left"
            line = f"{self.what}: {done:,} of {total:,} in {passed:,.0f} s{pace}; {words}".rstrip("; ")
        click.echo(line, err=True)


class Bar:
    """A bar on a terminal that is gone when it is closed: how many of how many, how fast, how much longer."""

    def __init__(self, what: str, console: Console, patience_s: float = 0.0) -> None:
        """Shows the bar at the first call after `patience_s`; immediately if that is 0."""
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn(what),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, rate="")
        self._began, self._patience_s = time.monotonic(), patience_s
        if not patience_s:
            self._bar.start()

    def __call__(self, done: int, total: int, words: str) -> None:
        """Report that `done` of `total` is finished."""
        passed = time.monotonic() - self._began
        rate = f"{done / passed:,.3g}/s" if done and passed > 0 else ""
        self._bar.update(self._task, completed=done, total=total, description=words, rate=rate)
        if passed >= self._patience_s and not self._bar.live.is_started:
            self._bar.start()

    def close(self) -> None:
        """Take it away."""
        self._bar.stop()
