"""Texts can be read: every pair of colours of the style has the contrast that WCAG 2.2 asks of AA (1.4.3)."""

from __future__ import annotations

import re

import pytest

from simtune.report import figures
from simtune.report.templates import template

STYLE = template("style.j2")
LEAST = 4.5
ON = {
    "ink": ("paper", "raised"),
    "soft": ("paper", "raised"),
    "accent": ("paper", "raised"),
    "warn": ("paper", "warn-paper"),
    "note": ("paper", "note-paper"),
}
"""What is written on what."""


def themes() -> dict[str, dict[str, str]]:
    """Colours by name, of a light screen, a dark one, and paper; the later two where they differ from the first."""
    found = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    light, dark, paper = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in found)
    return {"light": light, "dark": light | dark, "print": light | paper}


def luminance(colour: str) -> float:
    """Relative luminance of an sRGB colour."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(c * weight for c, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(one: str, other: str) -> float:
    """The ratio of the lighter to the darker."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_of_black_on_white_is_21() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_text_colours_have_enough_contrast(theme: str) -> None:
    colours = themes()[theme]
    faint = {
        (text, ground): round(contrast(colours[text], colours[ground]), 2)
        for text, grounds in ON.items()
        for ground in grounds
        if contrast(colours[text], colours[ground]) < LEAST
    }
    assert faint == {}


def test_text_on_bars_has_enough_contrast() -> None:
    inside = re.search(r"bartext-inside \{ fill: (#[0-9a-f]{6})", STYLE)
    assert inside is not None
    assert [c for c in figures.COLOURS if contrast(inside[1], c) < LEAST] == []


def test_texts_use_the_colours_of_the_theme_only() -> None:
    rules = re.sub(r":root \{.*?\}", "", STYLE.partition("</style>")[0], flags=re.DOTALL)
    written = re.findall(r"[ ;{]color: ([^;]+);", rules)
    assert len(written) > 10
    assert {c for c in written if c != "inherit"} <= {f"var(--{name})" for name in ON}
