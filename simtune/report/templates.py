"""The templates of the pages."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from simtune.report.contents import with_contents

if TYPE_CHECKING:
    from markupsafe import Markup


def template(name: str) -> str:
    """The text of a template as it is."""
    return (files("simtune.report") / name).read_text("utf-8")


def fill(name: str, **values: object) -> str:
    """A template with its values, all of them escaped that are no Markup; a value it lacks is an error.

    A page gets a table of contents.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["key"] = _key
    return with_contents(environment.from_string(template(name)).render(**values))


def _key(text: str) -> Markup:
    """Return the key of a setting, which may be broken behind dots and underscores."""
    from markupsafe import Markup, escape

    escaped = str(escape(text))
    return Markup(escaped.replace(".", ".<wbr>").replace("_", "_<wbr>"))
