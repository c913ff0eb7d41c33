"""Blocks of a spec that are of one of several classes, which their `kind` selects."""

from __future__ import annotations

from typing import Annotated, Any, Union, get_args

from pydantic import BaseModel, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from simtune.errors import PartError
from simtune.specs.plugins import Brought, PartKind, blame, is_import_path, registered


def by_kind(*classes: type[Any]) -> dict[str, type[Any]]:
    """The classes by the literal of their field `kind`."""
    return {get_args(c.model_fields["kind"].annotation)[0]: c for c in classes}


class OneOf:
    """Annotates a field of a base class: its block is of the class, of one kind of part, that `kind` names.

    The class is built in, registered by an installed package, or at an import path. The properties `asked` of a class
    from outside are read when the block is read, so that an error in them is reported at the place of the block.
    """

    def __init__(self, kind_of_part: PartKind[Any], *asked: str) -> None:
        self._kind_of_part, self._asked = kind_of_part, asked

    @property
    def known(self) -> list[type[BaseModel]]:
        """The classes that are built in."""
        return list(self._kind_of_part.built_in.values())

    def __get_pydantic_core_schema__(self, base: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        union: Any = Union[tuple(self.known)]  # noqa: UP007 - of a tuple
        inner = handler.generate_schema(Annotated[union, Field(discriminator="kind")])

        def validated(value: Any, known: core_schema.ValidatorFunctionWrapHandler) -> Any:
            kind = value.get("kind") if isinstance(value, dict) else None
            if isinstance(kind, str) and self._from_outside(kind):
                return self._brought(kind, value)
            return value if isinstance(value, base) and type(value) not in self.known else known(value)

        as_it_is = core_schema.simple_ser_schema("any")
        return core_schema.no_info_wrap_validator_function(validated, inner, serialization=as_it_is)

    def _from_outside(self, kind: str) -> bool:
        importable = is_import_path(kind) or kind in registered(self._kind_of_part.group)
        return importable and kind not in self._kind_of_part.built_in

    def _brought(self, kind: str, block: dict[str, Any]) -> Any:
        """Raise ValueError, in words for the user, if the class cannot be loaded or fails."""
        try:
            cls = self._kind_of_part.find(kind)
        except PartError as error:
            raise ValueError(str(error)) from None
        try:
            part = cls.model_validate(block)
            for name in self._asked:
                getattr(part, name)
            return part
        except ValidationError:
            raise
        except Exception as error:
            raise ValueError(str(blame(error, [Brought(self._kind_of_part.noun, kind, cls)]))) from error
