"""Files and folders given as options and arguments."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import click


class PathText(click.Path):
    """A path; rejected are the empty text, which would be the working directory, blanks, and control characters."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a path."""
        if isinstance(value, str) and not value.strip():
            self.fail("is empty; name a file or folder, or leave it out.", param, ctx)
        if isinstance(value, str) and value.endswith("/") and not self.dir_okay:
            self.fail(f"{value!r}: is the name of a folder; name a file", param, ctx)
        if isinstance(value, str) and any(unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in value):
            # No file can have a NUL in its name; line ends and escape sequences would spoil a message, and logs.
            self.fail(f"{value!r}: is no name of a file", param, ctx)
        return super().convert(value, param, ctx)


PATH = PathText(path_type=Path)
FILE = PathText(dir_okay=False, path_type=Path)
TEXT = PathText()
"""A path that stays text: of a file that may be given in other ways as well."""
