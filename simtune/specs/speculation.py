"""Speculation: who drafts, by which scheme, and how often the target agrees."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from simtune.specs.base import ErrorAt, Name, Part
from simtune.specs.drafters import AnyDrafter, Drafter
from simtune.specs.schemes import AnyScheme, Scheme


class Speculation(Part):
    """Drafter of a pool, its scheme, and the acceptance that is assumed."""

    drafter: AnyDrafter
    scheme: AnyScheme
    acceptance: str = Field(description="an acceptance spec, by name or file")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        check_scheme(self.drafter, self.scheme)
        return self

    def own_devices(self, tp: int) -> int:
        """GPUs beside those of one target on `tp` ranks: of the target's other replicas, and of the drafter."""
        shape = self.scheme.shape
        return (shape.replicas - 1) * tp + self.drafter.ranks(tp) if shape.overlapped else 0


class DrafterChoice(Part):
    """A drafter that may be used, and how often the target keeps what it proposes."""

    name: Name | None = Field(
        None, description="label in the names of candidates; the drafter's method or kind unless given"
    )
    drafter: AnyDrafter
    acceptance: str = Field(description="an acceptance spec, by name or file")
    scheme: AnyScheme | None = Field(None, description="the best chain for every batch size unless given")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.scheme is not None:
            check_scheme(self.drafter, self.scheme)
        return self

    @property
    def label(self) -> str:
        """Label of the drafter in the names of candidates."""
        return self.name or self.drafter.label.replace("_", "-")


def check_scheme(drafter: Drafter, scheme: Scheme) -> None:
    """Raise ErrorAt if a drafter cannot do what a scheme requires."""
    if scheme.needs and not isinstance(drafter, scheme.needs):
        drafters = " or ".join(str(c.model_fields["kind"].default) for c in scheme.needs)
        why = scheme.needs_because.format(drafter=drafter.kind)
        raise ErrorAt(f"scheme {scheme.kind} {why}: take a {drafters}, or a chain", "scheme")
