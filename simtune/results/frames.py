"""Results as tables of pandas or Arrow if these are installed, as figures of Plotly, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from simtune.errors import UsageError


def frame(columns: Mapping[str, Any]) -> Any:
    """Return a `pandas.DataFrame` of these columns. Raise UsageError if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise UsageError("to_pandas() needs pandas; pip install pandas, or use the columns themselves") from None
    return pandas.DataFrame(dict(columns))


def arrow(columns: Mapping[str, Any]) -> Any:
    """Return a `pyarrow.Table` of these columns. Raise UsageError if pyarrow is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise UsageError("to_arrow() needs pyarrow; pip install 'simtune[parquet]'") from None
    return pyarrow.table(dict(columns))


class PlainCurve(NamedTuple):
    """A named curve, or points if `mode` is "markers"."""

    name: str
    x: Sequence[Any]
    y: Sequence[Any]
    mode: str = "lines"


def plotted(across: str, up: str, curves: Sequence[PlainCurve], **axes: Any) -> Any:
    """Return a `plotly.graph_objects.Figure` of curves between two titled axes; `axes` are further settings of its
    layout."""
    from plotly.graph_objects import Figure

    data = [
        {"type": "scatter", "mode": curve.mode, "name": escape(curve.name), "x": [*curve.x], "y": [*curve.y]}
        for curve in curves
    ]
    titles = {"xaxis": {"title": {"text": escape(across)}}, "yaxis": {"title": {"text": escape(up)}}}
    return Figure(data=data, layout={**titles, **axes})


def html_table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of two columns under a title, with all text escaped."""
    body = "".join(f"<tr><th>{escape(label)}</th><td>{escape(how)}</td></tr>" for label, how in rows)
    return f"<table><caption>{escape(title)}</caption>{body}</table>"
