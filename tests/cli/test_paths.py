"""Paths given as options and arguments: the empty text and blanks are no path."""

from __future__ import annotations

import click
import pytest

from simtune.cli import cli
from tests.cli.conftest import Desk, call

VERBS = sorted(cli.list_commands(click.Context(cli)))


@pytest.mark.parametrize("path", ["", " ", "\u2028"])
@pytest.mark.parametrize("option", ["--costs", "--plan", "--out"])
def test_an_empty_path_is_refused_by_the_name_of_its_option(option: str, path: str) -> None:
    answer = call("simulate", "--workload", "chat", option, path)
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


@pytest.mark.parametrize("verb", ["check", "explain", "optimize", "loop", "validate", "calibrate", "workload"])
def test_an_empty_path_is_refused_by_the_name_of_its_argument(verb: str) -> None:
    answer = call(verb, " ")
    assert answer.code == 2
    assert "is empty; name a file or folder" in answer.err


def test_a_file_with_the_name_of_a_folder_is_refused_before_any_work(desk: Desk) -> None:
    load = ("simulate", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat", "--requests", "20")
    answer = call(*load, "--timeline", "out/")
    assert (answer.code, "'--timeline': 'out/': is the name of a folder; name a file" in answer.err) == (2, True)
    answer = call(*load, "--out", "out", "--timeline", "out")
    assert answer.code == 2
    assert "out: is given to --out, which is a folder, and to --timeline; name another file" in answer.err
    assert not (desk.folder / "out").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--from", "--from '': write a time as 90s, 30m, 1.5h or 2d"),
        ("--to", "--to '': write a time as 90s"),
        ("--peak", "--peak '': write a time as 90s"),
        ("--scale", "--scale '': write a factor of the rate as 2x"),
        ("--utc-offset", "--utc-offset '': write an offset from UTC as +02:00"),
    ],
)
def test_an_empty_time_is_refused_by_the_name_of_its_option(desk: Desk, option: str, message: str) -> None:
    desk.write("trace.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,2\n1,10,2\n")
    answer = call("workload", "trace.csv", option, "", *(("--from", "1s") if option == "--utc-offset" else ()))
    assert (answer.code, message in answer.err) == (2, True)


def test_an_empty_number_of_a_sweep_is_quoted(desk: Desk) -> None:
    load = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat", "--over", "rate=1,2")
    answer = call("sweep", *load, "--requests", " ", "--out", "out")
    assert answer.code == 2
    assert "requests ' ': must be a whole number" in answer.err
    assert not (desk.folder / "out").exists()


def test_a_sweep_of_a_plan_with_too_long_a_name_leaves_no_folder(desk: Desk) -> None:
    load = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat", "--over", "rate=1,2")
    answer = call("sweep", *load, "--plan", "x" * 300, "--out", "out", "--jobs", "1")
    assert (answer.code, "the name is too long" in answer.err) == (2, True)
    assert not (desk.folder / "out").exists()


def test_a_name_with_control_characters_is_refused_in_one_line() -> None:
    answer = call("check", "a\nb\x1b[31m.yaml")
    assert answer.code == 2
    assert r"'a\nb\x1b[31m.yaml': is no name of a file" in answer.err
