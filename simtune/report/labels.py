"""Names of users as labels of figures: Plotly takes labels for HTML of a few elements and entities."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from itertools import takewhile

from simtune.specs.plan_words import differing

LONGEST = 40
"""Most characters of a name in a legend: they fit beside a line on a phone."""


def escape(text: str) -> str:
    """Return a text escaped for a label. Quotes are kept, since Plotly has no entity for them."""
    return html.escape(text, quote=False)


def briefs(names: Sequence[str], longest: int = LONGEST) -> dict[str, str]:
    """Return the labels of names for one legend, escaped. Of a long name the label has the beginning and the end; names
    whose labels would be equal also keep the part in which they differ. Different names never have the same label.
    """
    different = list(dict.fromkeys(names))
    labels = {name: name if len(name) <= longest else _ends(name, longest) for name in different}
    for alike in _alike(labels):
        labels |= {name: _middle(name, alike, longest) for name in alike}
    for alike in _alike(labels):
        labels |= {name: f"{labels[name]} ({i})" for i, name in enumerate(alike, 1)}
    return {name: escape(label) for name, label in labels.items()}


def plan_labels(names: Sequence[str], chosen: str = "") -> dict[str, str]:
    """Return the labels of plans for one legend, escaped: what only some of them have, in words, on several lines where
    it is long. The chosen plan is marked.
    """
    words, cut = differing(names), briefs(names)
    lines = {
        name: [cut[name]] if text == name else [escape(line) for line in textwrap.wrap(text, LONGEST + 8)]
        for name, text in words.items()
    }
    return {name: "<br>".join(text) + " (chosen)" * (name == chosen) for name, text in lines.items()}


def _ends(name: str, longest: int) -> str:
    half = longest // 2
    return f"{name[: half - 1]}…{name[-half:]}"


def _middle(name: str, alike: Sequence[str], longest: int) -> str:
    """Return the beginning of a name, the place from which on it differs from names like it, and its end."""
    third = longest // 3
    same = sum(1 for _ in takewhile(lambda letters: len({*letters}) == 1, zip(*alike, strict=False)))
    begin = max(third, same - 2)
    return f"{name[: third - 2]}…{name[begin : begin + third]}…{name[-third:]}"


def _alike(labels: Mapping[str, str]) -> list[list[str]]:
    """Return the groups of names that have the same label."""
    groups: dict[str, list[str]] = {}
    for name, label in labels.items():
        groups.setdefault(label, []).append(name)
    return [names for names in groups.values() if len(names) > 1]
