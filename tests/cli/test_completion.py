"""Shells themselves complete verbs and names, by what they are told to source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = f"""#!/bin/sh
exec "{sys.executable}" -c "import sys; sys.argv[0] = 'simtune'; from simtune.cli import main; main()" "$@"
"""
BASH = """
compopt() {{ :; }}  # a builtin that works only while something is typed
eval "$(_SIMTUNE_COMPLETE=bash_source simtune)"
COMP_WORDS=({words}); COMP_CWORD=$(({count} - 1))
_simtune_completion simtune
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
FISH = """
_SIMTUNE_COMPLETE=fish_source simtune | source
complete -C "{words}"
"""


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds simtune."""
    program = tmp_path / "simtune"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.mark.parametrize("name", ["bash", "fish"])
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("simtune opt", "optimize"),
        ("simtune simulate --model llama-3.1-8", "llama-3.1-8b"),
        ("simtune sweep --hardware h100-s", "h100-sxm"),
        ("simtune reproduce sarat", "sarathi"),
        ("simtune speculate --acceptance eagle3-llama-3.1-8", "eagle3-llama-3.1-8b"),
    ],
)
def test_a_shell_completes(name: str, words: str, found: str, shell: dict[str, str], tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    script = (BASH if name == "bash" else FISH).format(words=words, count=len(words.split()))
    said = subprocess.run(
        [name, "-c", script], env=shell, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    )
    assert found in [line.partition("\t")[0] for line in said.stdout.splitlines()]
