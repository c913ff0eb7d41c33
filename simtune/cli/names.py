"""Names that a shell can complete: of models, hardware profiles, loads and engine presets, and files beside them."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType


class SpecName(StringParamType):
    """The name of a spec of some kinds, or a file."""

    def __init__(self, *kinds: str) -> None:
        """`kinds` as `simtune list` has them."""
        self.kinds = kinds

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Files, and all that can be named, those in SIMTUNE_PATH included. Files come first, for at them bash forgets
        what it has heard before.
        """
        from simtune.specs import catalog

        known = sorted({name for kind in self.kinds for name in catalog.names(kind)})
        items = [CompletionItem(name) for name in known if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file"), *items]


MODEL = SpecName("model")
HARDWARE = SpecName("hardware")
WORKLOAD = SpecName("workload")
ENGINE = SpecName("engine")
ANY = SpecName("model", "hardware", "workload", "acceptance", "engine")
