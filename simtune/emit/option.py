"""Options of engines, each with the setting of a pool that it carries: one table for writing and for reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simtune.specs.pool import Pool


@dataclass(frozen=True, slots=True)
class Option:
    """Option of an engine: the type of its value, and the setting of a pool whose value it is."""

    type: type
    key: str = ""
    """Key of the pool, its parts joined with dots; empty if the option depends on several settings."""
    values: Mapping[Any, Any] | None = None
    """Value of the option by that of the setting, if they differ; the option is left out for other values."""
    unless: Any = None
    """Value of the setting for which the option is left out."""
    stated: bool = False
    """True if it is written only if a plan, a study or a preset sets it: see `Pool.stated`."""

    def written(self, pool: Pool) -> Any:
        """Return the value of the option for a pool, None if it is left out."""
        if not self.key:
            return None
        value: Any = pool.stated(self.key) if self.stated else pool
        for part in () if self.stated else self.key.split("."):
            value = getattr(value, part, None)
        if value is None or value == self.unless:
            return None
        return value if self.values is None else self.values.get(value)

    def read(self, value: Any) -> Any:
        """Return the value of the setting for one of the option. Raises KeyError if no setting has that value."""
        if self.values is None:
            return value
        settings = {word: setting for setting, word in self.values.items()}
        return not settings[True] if value is False and True in settings else settings[value]


def written(options: Mapping[str, Option], pool: Pool, **special: Any) -> dict[str, Any]:
    """Return the values of options for a pool, in the order of their table and without those that are left out.

    `special` has the values of options that depend on several settings, with _ for - in their names.
    """
    values = {name: special.get(name.replace("-", "_"), option) for name, option in options.items()}
    filled = {name: value.written(pool) if isinstance(value, Option) else value for name, value in values.items()}
    return {name: value for name, value in filled.items() if value is not None}
