"""How far long work is, said where nobody looks at a terminal."""

from __future__ import annotations

import json
import time

import click

EVERY_S = 20.0
"""Between two lines about work under way, where nobody looks at a terminal."""
EVERY_JSON_S = 1.0


class Pace:
    """Says now and then in a line of its own how far something is: how many of how many, how fast, how much longer."""

    def __init__(self, what: str, as_json: bool) -> None:
        self.what, self.as_json = what, as_json
        self._began = self._said = time.monotonic()

    def __call__(self, done: int, total: int, words: str) -> None:
        """So much is done."""
        now = time.monotonic()
        if now - self._said < (EVERY_JSON_S if self.as_json else EVERY_S) and not (self.as_json and done == total):
            return
        self._said = now
        passed = now - self._began
        rate = done / passed if passed > 0 and done else None
        left = None if rate is None else (total - done) / rate
        if self.as_json:
            shown = {"what": self.what, "done": done, "total": total, "words": words}
            paced = {"elapsed_s": passed, "per_s": rate, "left_s": left}
            line = json.dumps(shown | paced, sort_keys=True, allow_nan=False)
        else:
            pace = "" if rate is None or left is None else f", {rate:,.3g}/s, about {left:,.0f} s left"
            line = f"{self.what}: {done:,} of {total:,} in {passed:,.0f} s{pace}; {words}".rstrip("; ")
        click.echo(line, err=True)
