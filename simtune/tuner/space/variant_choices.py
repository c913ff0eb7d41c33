"""Choices of a search under a variant: settings that a variant fixes take the place of all choices for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simtune.specs.study import PoolChoices, Study
from simtune.specs.variants import DIMENSIONS, Variant, at_path


def narrowed(study: Study, variant: Variant) -> Study:
    """Return the study with only the choices that a variant leaves open."""
    common = _fixed(variant.pool)
    roles = {role: _fixed(variant.by_role.get(role, {})) for role in ("prefill", "decode")}
    for role, of_role in roles.items():
        # `instances` of an autoscaled pool are those that it begins with.
        most = _most_scaled(variant.of_role(role))
        roles[role] = of_role | ({} if most is None else {"instances": (most,)})
    if (most := _most_scaled(variant.pool)) is not None:
        common["instances"] = (most,)
    if not common and not any(roles.values()):
        return study
    search = study.search
    update: dict[str, Any] = dict(common)
    for role, of_role in roles.items():
        choices: PoolChoices | None = getattr(search, role)
        if choices is not None or of_role:
            update[role] = (choices or PoolChoices()).model_copy(update={**common, **of_role})
    return study.model_copy(update={"search": search.model_copy(update=update)})


def _most_scaled(fragment: Mapping[str, Any]) -> int | None:
    """Return the most instances of a pool with the settings of a fragment; None unless it is autoscaled."""
    return at_path(fragment, ("autoscaling", "max_instances"))  # type: ignore[no-any-return]


def _fixed(fragment: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the only choice of each dimension that a fragment sets."""
    values = {name: at_path(fragment, path) for name, path in DIMENSIONS.items()}
    return {name: (value,) for name, value in values.items() if value is not None}
