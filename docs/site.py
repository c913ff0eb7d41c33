"""Hooks of the documentation site (`make docs`): the settings reference, and links that lead out of docs/.

mkdocs loads this file by its path (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

SPECS = ("plan", "study", "workload", "model", "hardware")
"""Kinds of files whose settings are listed, in this order."""


def on_files(files: Any, config: Any) -> Any:
    """Add the settings reference, which is generated from the schemas of the files."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "settings.md", content=settings_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to files of the repository that are no page of the site by the path of the file, and write the name
    of a fenced block's file as its title."""
    markdown = re.sub(r"^```(\w+) (\S+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s]+)\)", _as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    path = str(PurePosixPath(link[2].replace("../", "").partition("#")[0]))
    text = link[1].strip("`")
    return f"`{path}`" if text == path or path.endswith(text) else f"{link[1]} (`{path}`)"


# --- the settings reference -----------------------------------------------------------------------------------


def settings_page() -> str:
    """Return the page that lists every key of every kind of file, as Markdown."""
    from simtune.specs.catalog import KINDS

    lines = [
        "# Settings",
        "",
        "Every key of the files that simtune reads, generated from the schemas that it checks them by "
        "(`simtune schema KIND` prints them).",
    ]
    for kind in SPECS:
        lines += ["", *_section(kind, KINDS[kind].model_json_schema())]
    return "\n".join(lines) + "\n"


def _section(kind: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"## {kind.capitalize()}"
    yield from _table(schema)
    for name, part in sorted(schema.get("$defs", {}).items()):
        if part.get("properties"):
            yield from ("", f"### {name} {{#{kind}-{name.lower()}}}")
            yield from _table(part)


def _table(schema: dict[str, Any]) -> Iterator[str]:
    if description := schema.get("description"):
        yield from ("", _cell(description.partition("\n\n")[0]), "")
    required = schema.get("required", ())
    yield from ("| key | value | unless given | meaning |", "|---|---|---|---|")
    for key, field in schema["properties"].items():
        default = "required" if key in required else f"`{field['default']}`" if "default" in field else ""
        yield f"| `{key}` | {_cell(_values(field))} | {_cell(default)} | {_cell(field.get('description', ''))} |"


def _values(field: dict[str, Any]) -> str:
    """Return in words which values a field takes."""
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    for alternatives in ("anyOf", "oneOf"):
        if alternatives in field:
            return " or ".join(dict.fromkeys(_values(one) for one in field[alternatives] if one.get("type") != "null"))
    if field.get("type") == "array":
        return f"list of {_values(field.get('items', {}))}"
    bounds = [
        f"{sign} {field[key]:g}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in field
    ]
    return " ".join([str(field.get("type", "any")), *bounds])


def _cell(text: str) -> str:
    """Return text that is safe in a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")
