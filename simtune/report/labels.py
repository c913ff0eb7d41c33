"""Names of users as labels of figures: Plotly takes labels for HTML of a few elements and entities."""

from __future__ import annotations

import html

LONGEST = 40
"""Most characters of a name in a legend: they fit beside a line on a phone."""


def escape(text: str) -> str:
    """Return a text escaped for a label. Quotes are kept, since Plotly has no entity for them."""
    return html.escape(text, quote=False)


def brief(name: str, longest: int = LONGEST) -> str:
    """A name for a legend, escaped; of a long one the beginning and the end."""
    half = longest // 2
    return escape(name if len(name) <= longest else f"{name[: half - 1]}…{name[-half:]}")
