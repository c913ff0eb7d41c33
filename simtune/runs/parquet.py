"""Tables as Parquet, which needs pyarrow."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from simtune.errors import UsageError


def require(what: str, otherwise: str = "") -> None:
    """Raise UsageError, before any work, if pyarrow is missing for `what`; `otherwise` is another remedy."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise UsageError(f"{what} needs pyarrow; pip install 'simtune[parquet]'{otherwise}") from None


def table_bytes(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """Return a table of columns as Parquet."""
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(dict(columns)), sink)
    return sink.getvalue()
