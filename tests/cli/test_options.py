"""Options that verbs share are declared in one module."""

from __future__ import annotations

import ast
from pathlib import Path

import click
import pytest

import simtune
from simtune.cli.options import jobs_option, seed_option

CLI = Path(simtune.__file__).with_name("cli")
OTHER_MEANING = {("acceptance", "--model")}
"""Options of the name of a shared one that are something else: the model to take from a table."""


def declared(module: Path, call: str) -> set[str]:
    """Names of the options that calls of `call` declare in a module."""
    calls = (node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call))
    first = (node.args[0] for node in calls if ast.unparse(node.func) == call and node.args)
    return {arg.value for arg in first if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}


def test_a_shared_option_is_declared_nowhere_else() -> None:
    shared = declared(CLI / "options.py", "SharedOption")
    assert {"--model", "--hardware", "--workload", "--plan", "--seed", "--out", "--json"} <= shared
    elsewhere = {(m.stem, name) for m in CLI.glob("*.py") for name in declared(m, "click.option") & shared}
    assert elsewhere == OTHER_MEANING


def test_a_verb_may_change_a_shared_option_for_itself_alone() -> None:
    @click.command()
    @seed_option
    @jobs_option.but("processes", required=True, help="Other words.")
    def verb(seed: int | None, processes: int) -> None:
        """Print both."""
        click.echo(f"{seed} {processes}")

    (seed, jobs) = verb.params
    assert isinstance(jobs, click.Option)
    assert (seed.name, jobs.name, jobs.help, jobs.required) == ("seed", "processes", "Other words.", True)
    plain = click.command()(jobs_option(lambda jobs: None)).params[0]
    assert isinstance(plain, click.Option)
    assert plain.help == "Processes; one per core by default."
    with pytest.raises(click.BadParameter):
        verb.main(["--jobs", "0"], standalone_mode=False)
