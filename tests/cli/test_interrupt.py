"""Ctrl-C ends a command with exit code 130, wherever it lands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simtune.errors import is_interrupt

ROOT = Path(__file__).resolve().parents[2]

DURING_IMPORT = {
    "as it is": "raise KeyboardInterrupt",
    "wrapped with a cause": """
try:
    raise KeyboardInterrupt
except KeyboardInterrupt as error:
    raise RuntimeError("Error calling __set_name__") from error
""",
    "raised while it is handled": """
try:
    raise KeyboardInterrupt
except KeyboardInterrupt:
    raise ImportError("half of a module")
""",
    "out of __set_name__": """
class Field:
    def __set_name__(self, owner, name):
        raise KeyboardInterrupt

class Table:
    field = Field()
""",
}


@pytest.mark.parametrize("body", DURING_IMPORT.values(), ids=list(DURING_IMPORT))
def test_an_interrupt_during_a_lazy_import_is_an_interrupt(body: str, tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text(body)
    done = subprocess.run(
        [sys.executable, "-m", "simtune", "list", "model"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == "interrupted; what was not finished was not written"
    assert done.returncode == 130


def test_error_chain_without_interrupt_is_not_an_interrupt() -> None:
    error = RuntimeError("a circle")
    error.__context__ = other = ValueError()
    other.__context__ = error
    assert not is_interrupt(error)
    other.__cause__ = KeyboardInterrupt()
    assert is_interrupt(error)
