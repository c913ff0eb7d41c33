"""Names that a shell can complete: of models, profiles, loads, engine presets, published systems, and files."""

from __future__ import annotations

import itertools
import re

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType


class SpecName(StringParamType):
    """The name of a spec of some kinds, or a file."""

    def __init__(self, *kinds: str) -> None:
        """`kinds` as `simtune list` has them."""
        self.kinds = kinds

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete files, and all names that can be loaded, those in SIMTUNE_PATH included. Files come first, because
        bash forgets earlier completions when it gets them.
        """
        from simtune.specs import catalog

        candidates = sorted({name for kind in self.kinds for name in catalog.names(kind)})
        items = [CompletionItem(name) for name in candidates if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file"), *items]


class SystemName(StringParamType):
    """The name of a published system or a family of them, or a file."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete as for specs. The lists are searched as text and not parsed, which would take a second."""
        from simtune.validation.published.collection import folder

        lists = sorted(folder().glob("*.yaml"))
        systems = (SYSTEM.findall(file.read_text("utf-8")) for file in lists)
        candidates = sorted({*(file.stem for file in lists), *itertools.chain.from_iterable(systems)})
        items = [CompletionItem(name) for name in candidates if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file"), *items]


SYSTEM = re.compile(r"^- name: (\S+)", re.MULTILINE)
MODEL = SpecName("model")
HARDWARE = SpecName("hardware")
WORKLOAD = SpecName("workload")
ENGINE = SpecName("engine")
LAUNCH = SpecName("launch")
ACCEPTANCE = SpecName("acceptance")
PUBLISHED = SystemName()
ANY = SpecName("model", "hardware", "workload", "acceptance", "engine", "launch")
