"""Pool of a plan while its options are read, and notes on options that have no part in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simtune.emit.importing.launches import Given
from simtune.emit.importing.shell_values import OPEN
from simtune.errors import Problem, SpecError
from simtune.specs.model import Model


class Note(NamedTuple):
    """Remark on what has no part in a plan."""

    kind: str
    """`ignored`, `unknown`, `not simulated` or `assumed`."""
    name: str
    """Option, or nothing."""
    why: str


def note_lines(notes: Iterable[Note]) -> tuple[str, ...]:
    """Return notes as lines, those of one reason in one line."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for note in notes:
        names.setdefault((note.kind, note.why), {})[note.name] = None
    lines = []
    for (kind, why), of_reason in names.items():
        listed = ", ".join(name for name in of_reason if name)
        lines.append(f"{kind}: {': '.join(part for part in (listed, why) if part)}")
    return tuple(lines)


@dataclass
class PoolDraft:
    """Settings of a pool, by what its server is started with."""

    model: Model
    preset: dict[str, Any]
    """Settings of the engine's preset for the model and the hardware."""
    acceptance: str | None
    reference_of: Callable[[str], str]
    """Returns a model that simtune can load for a checkpoint."""
    lenient: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    division: tuple[int, int] | None = None
    """Processors for prompts and for decodes, if the server divides those of its GPUs; None if it does not."""
    notes: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def model_has_experts(self) -> bool:
        """True for a mixture of experts."""
        return any(group.feed_forward.kind == "moe" for group in self.model.layers)

    def set(self, key: str, value: Any) -> None:
        """Set a value by its key."""
        *parts, last = key.split(".")
        block = self.data
        for part in parts:
            block = block.setdefault(part, {})
        block[last] = value

    def get(self, key: str) -> Any:
        """Return a value by its key: what is set here, else what the preset sets."""
        for data in (self.data, self.preset):
            value: Any = data
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                return value
        return None

    def ignore(self, option: Given, why: str) -> None:
        """Note that an option changes nothing that is simulated."""
        self.notes.append(Note("ignored", f"--{option.name}", why))

    def assume(self, text: str) -> None:
        """Note what was assumed."""
        self.notes.append(Note("assumed", "", text))

    def unknown(self, option: Given, hint: str = "") -> None:
        """Note an option that is not known."""
        self.notes.append(Note("unknown", f"--{option.name}{hint}", ""))

    def refuse(self, option: Given, changes: str) -> None:
        """Refuse an option that would change what is not simulated; with `lenient` note it."""
        if self.lenient:
            self.notes.append(Note("not simulated", f"--{option.name}", f"it changes {changes}"))
        else:
            message = f"is not simulated; it changes {changes}; remove it, or give --lenient to go on without it"
            self.problems.append(option.problem(message))


def refuse_open(option: Given) -> None:
    """Raise SpecError if the value of an option depends on a variable that is not set."""
    opened = OPEN.search(str(option.value))
    if opened is not None:
        name = opened[1]
        how = (
            f"{name} is not set here; give --env {name}=VALUE"
            if name
            else "a command's output is not known; write the value"
        )
        raise SpecError(option.problem(how))
