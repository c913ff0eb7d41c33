"""Paths given as options: the empty text is no path."""

from __future__ import annotations

import click
import pytest

from simtune.cli import cli
from tests.cli.conftest import call

VERBS = sorted(cli.list_commands(click.Context(cli)))


@pytest.mark.parametrize("option", ["--costs", "--plan", "--out"])
def test_an_empty_path_is_refused_by_the_name_of_its_option(option: str) -> None:
    answer = call("simulate", "--workload", "chat", option, "")
    assert answer.code == 2
    assert f"'{option}': is empty; name a file or folder" in answer.err


def test_all_paths_are_of_the_type_that_refuses_the_empty_text() -> None:
    for verb in VERBS:
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None
        for parameter in command.params:
            if isinstance(parameter.type, click.Path):
                with pytest.raises(click.BadParameter, match="is empty"):
                    parameter.type.convert("", parameter, None)
