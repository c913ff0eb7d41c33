"""Errors that simtune raises for its user.

* SimtuneError            anything a user can act on; the command line prints it without a traceback
  - UsageError            a request that cannot be carried out as put (exit code 2)
    - PartError           a policy, router or cost model brought from outside that cannot be used, or failed
  - SpecError             one or more problems in a file the user wrote (exit code 2)
  - EngineError           a real engine did not start, ended, or cannot be judged (exit code 1)
  - Infeasible            the question is well put and the answer is "no plan can do that" (exit code 3)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class SimtuneError(Exception):
    """Base of all errors meant for the user. `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(SimtuneError):
    """A request that cannot be carried out as put: a missing file, a folder in the way, an unknown name."""

    exit_code = 2


class PartError(UsageError):
    """A part brought from outside the package that cannot be used, or that failed while it was."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a file: its place, the key, the rule, and the remedy."""

    file: str
    message: str
    key: str = ""
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        place = self.file
        if self.line is not None:
            place += f":{self.line}"
            if self.column is not None:
                place += f":{self.column}"
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


class SpecError(SimtuneError):
    """All problems in a spec, trace or table; `problems` contains them in file order."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(p) for p in self.problems))

    def __reduce__(self) -> tuple[type[SpecError], tuple[list[Problem]]]:
        """Pickle the error by its problems, not by their text."""
        return type(self), (self.problems,)


class EngineError(SimtuneError):
    """A real engine did not start, ended, or could not be measured well enough for a result."""


class Infeasible(SimtuneError):
    """No plan in the space meets the limits; the message states what is missing."""

    exit_code = 3


def is_interrupt(error: BaseException) -> bool:
    """Return True if the error is a KeyboardInterrupt or came from one.

    Ctrl-C may land while a module is being imported, and code there turns it into another exception: until Python 3.12
    one out of `__set_name__` becomes a RuntimeError. The chain of `__cause__` and `__context__` still holds it.
    """
    visited: set[int] = set()
    chain = [error]
    while chain:
        link = chain.pop()
        if isinstance(link, KeyboardInterrupt):
            return True
        if id(link) not in visited:
            visited.add(id(link))
            chain += [further for further in (link.__cause__, link.__context__) if further is not None]
    return False


def plural(count: int, word: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def suggest(word: str, known: Iterable[str]) -> str:
    """`, did you mean x?` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""
