"""Numbers given as options are bounded as those in files are: one clear line and exit code 2, whatever the verb."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from simtune.cli import VERBS, cli
from simtune.cli.numbers import RealRange, WholeRange
from tests.cli.conftest import Desk, call

WILD = ("nan", "-nan", "inf", "-inf", "1e300", "1e308", "-1e300", "99999999999999999999", "9" * 400, "9" * 5_000, "-1")


def numeric() -> Iterator[tuple[str, click.Option]]:
    context = click.Context(cli)
    for verb in VERBS:
        command = cli.get_command(context, verb)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option) and isinstance(
                option.type, (click.types.IntParamType, click.types.FloatParamType)
            ):
                yield verb, option


OPTIONS = [pytest.param(option, id=f"{verb} {option.opts[0]}") for verb, option in numeric()]


def test_numeric_options_are_found() -> None:
    assert len(OPTIONS) > 25


@pytest.mark.parametrize("option", OPTIONS)
def test_every_numeric_option_has_both_bounds(option: click.Option) -> None:
    assert isinstance(option.type, (WholeRange, RealRange))
    assert None not in (option.type.min, option.type.max)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("text", [pytest.param(text, id=text[:8] + str(len(text))) for text in WILD])
def test_numeric_options_refuse_out_of_range_values(option: click.Option, text: str) -> None:
    with pytest.raises(click.BadParameter) as error:
        option.type.convert(text, option, None)
    assert "\n" not in error.value.message
    assert len(error.value.message) < 500


@pytest.mark.parametrize(
    "words",
    [
        "--rate 1e300", "--rate nan", "--rate inf", "--rate 0", "--rate 1e-30", "--rate 2e9", "--requests 99999999999",
        "--requests 0", "--uncertainty 99999999999", "--uncertainty 19", "--seed 99999999999999999999", "--seed -1",
        "--jobs 99999999999", "--window nan..2", "--window 5..1e400",
    ],
)  # fmt: skip
def test_simulate_checks_its_numbers(desk: Desk, words: str) -> None:
    more = () if "window" not in words else ("--timeline", "t.json.gz")
    if "1e400" in words:  # to the end
        assert desk.simulate(*words.split(), *more, "--rate", 4, "-q").code == 0
        return
    desk.refused(desk.simulate, *words.split(), *more)


@pytest.mark.parametrize(
    "words",
    [
        "--scale 1e308x", "--scale nanx", "--scale 1e-300", "--scale 0", "--peak 1e300", f"--peak {'9' * 400}d",
        "--peak 99999999999d", "--rate 1e300", "--rate nan", "--characters-per-token nan", "--part 99999999999",
        f"--from {'9' * 400}s",
    ],
)  # fmt: skip
def test_workload_checks_its_numbers(desk: Desk, words: str) -> None:
    desk.write("t.csv", "arrival_s,prompt_tokens,output_tokens\n0,5,6\n1,7,8\n3,7,8\n")
    desk.refused(call, "workload", "t.csv", *words.split())


@pytest.mark.parametrize(
    "words",
    [
        "--over rate=nan", "--over rate=1e300", "--over requests=99999999999", "--over seed=99999999999999999999",
        "--over rate=1:1e300:1", "--over rate=nan:2:1", "--over rate=1:2:nan", "--over seed=1 --rate nan",
        "--over seed=1 --requests -5", f"--over seed={'9' * 5000}",
    ],
)  # fmt: skip
def test_sweep_checks_its_numbers(desk: Desk, words: str) -> None:
    load = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat")
    said = call("sweep", *load, *words.split(), "--jobs", 1, "-q")
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert len(said.err) < 500


@pytest.mark.parametrize(
    "words",
    ["--rates nan", "--rates 1e300", "--rates 1,inf", "--tolerance nan", "--tolerance 1e300",
     "--uncertainty 99999999999", "--repeat 99999999999", "--plans 99999999999", "--max-lateness nan", "--timeout inf"],
)  # fmt: skip
def test_validate_checks_its_numbers(desk: Desk, tiny_run: Path, words: str) -> None:
    engine = ("--workload", "chat", "--engine", "http://127.0.0.1:9", "--out", "measured")
    said = call("validate", tiny_run / "plan.yaml", *engine, *words.split(), "-q")
    assert said.code == 2
    assert words.split()[0] in said.err
    assert not (desk.folder / "measured").exists()


@pytest.mark.parametrize(
    "words",
    [
        "optimize study.yaml --worlds 99999999999", "optimize study.yaml --robust nan", "optimize study.yaml --jobs -1",
        "new s.yaml --devices 99999999999", "new s.yaml --ttft nan", "new s.yaml --tpot 1e300",
        "reproduce sarathi --jobs 99999999999", "profile --budget 99999999999h", f"profile --budget {'9' * 400}s",
        f"profile --tp {'9' * 5000}",
    ],
)  # fmt: skip
def test_other_verbs_check_their_numbers(desk: Desk, words: str) -> None:
    said = call(*words.split())
    assert (said.code, said.out) == (2, "")
    assert "Traceback" not in said.err
    assert len(said.err) < 1_000


@pytest.mark.parametrize("word", ["1", "0.5", "1000000000", "1e-3"])
def test_rates_within_bounds_are_read(word: str) -> None:
    assert RealRange(above=0, most=1e9).convert(word, None, None) == float(word)
