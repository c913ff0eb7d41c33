"""Results as tables of pandas or Arrow, where these are installed, as figures of Plotly, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from simtune.errors import UsageError


def frame(columns: Mapping[str, Any]) -> Any:
    """A `pandas.DataFrame` of these columns. Raises UsageError where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise UsageError("to_pandas() needs pandas; pip install pandas, or take the columns themselves") from None
    return pandas.DataFrame(dict(columns))


def arrow(columns: Mapping[str, Any]) -> Any:
    """A `pyarrow.Table` of these columns. Raises UsageError where pyarrow is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise UsageError("to_arrow() needs pyarrow; pip install 'simtune[parquet]'") from None
    return pyarrow.table(dict(columns))


class PlainCurve(NamedTuple):
    """A named curve, or points where `mode` says so."""

    name: str
    x: Sequence[Any]
    y: Sequence[Any]
    mode: str = "lines"


def plotted(across: str, up: str, curves: Sequence[PlainCurve], **axes: Any) -> Any:
    """A `plotly.graph_objects.Figure` of curves between two titled axes; `axes` are further settings of its layout."""
    from plotly.graph_objects import Figure

    data = [
        {"type": "scatter", "mode": curve.mode, "name": escape(curve.name), "x": [*curve.x], "y": [*curve.y]}
        for curve in curves
    ]
    titles = {"xaxis": {"title": {"text": escape(across)}}, "yaxis": {"title": {"text": escape(up)}}}
    return Figure(data=data, layout={**titles, **axes})


def html_table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Two columns under a title, everything escaped."""
    body = "".join(f"<tr><th>{escape(what)}</th><td>{escape(how)}</td></tr>" for what, how in rows)
    return f"<table><caption>{escape(title)}</caption>{body}</table>"
