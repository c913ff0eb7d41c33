"""Names of parts in specs: built in, registered by an installed package, or an import path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from simtune.errors import suggest
from simtune.specs import plugins


class PartName:
    """Marks a text in a spec as the name of a part. Only its form is checked: a spec can be read without the part."""

    def __init__(self, group: str, built_in: Sequence[str] = ()) -> None:
        """`group` is the entry-point group in which packages register names."""
        self._group, self._built_in = group, tuple(built_in)

    def knows(self, name: object) -> bool:
        """True if a part may have that name."""
        if not isinstance(name, str):
            return False
        return name in self._built_in or plugins.is_import_path(name) or name in plugins.registered(self._group)

    def _checked(self, name: str) -> str:
        if not self.knows(name):
            names = [*self._built_in, *plugins.registered(self._group)]
            choices = ", ".join([*names, f"or an import path {plugins.EXAMPLE}"])
            raise ValueError(f"must be one of {choices}, not {name!r}{suggest(name, names)}")
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        names = [*self._built_in, *plugins.registered(self._group)]
        enumerated = [{"enum": names}] if names else []
        return {"anyOf": [*enumerated, {"type": "string", "pattern": plugins.IMPORT_PATH}]}
