"""Results as tables of pandas, where that is installed, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from simtune.errors import UsageError


def frame(columns: Mapping[str, Any]) -> Any:
    """A `pandas.DataFrame` of these columns. Raises UsageError where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise UsageError("to_pandas() needs pandas; pip install pandas, or take the columns themselves") from None
    return pandas.DataFrame(dict(columns))


def html_table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Two columns under a title, everything escaped."""
    body = "".join(f"<tr><th>{escape(what)}</th><td>{escape(how)}</td></tr>" for what, how in rows)
    return f"<table><caption>{escape(title)}</caption>{body}</table>"
