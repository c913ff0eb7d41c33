"""A plan from what starts real engines: the reverse of `simtune.emit`, by the same tables of options."""

from __future__ import annotations

from simtune.emit.importing.imported_plan import Imported, ImportRequest, import_plan

__all__ = ["ImportRequest", "Imported", "import_plan"]
