"""Lists of which a single entry may be written without a list."""

from __future__ import annotations

from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema


class OneOrMore:
    """States in the schema that a single entry may be written without a list."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        several = handler(core_schema)
        return {"anyOf": [several["items"], several]}


def listed(value: Any) -> Any:
    """Return a list as it is, and anything else as a list of one entry."""
    return value if isinstance(value, (list, tuple)) else (value,)
