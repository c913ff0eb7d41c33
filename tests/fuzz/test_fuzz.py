"""Mutated files through every verb that reads files: no traceback, no end in sight, no message without a place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz import campaign, corpus, options
from tests.validation import test_server_fuzz

FEW, MANY = 48, 10_000


@pytest.fixture(scope="module")
def desk() -> Iterator[campaign.Desk]:
    with campaign.desk() as found:
        yield found


def test_mutated_files_are_answered(desk: campaign.Desk) -> None:
    """Inputs 0 to FEW of those of which `make fuzz` tries many."""
    answers = [desk.answer(number) for number in range(FEW)]
    assert [(a.number, a.case.name, a.wrong) for a in answers if a.wrong is not None] == []
    assert {answer.code for answer in answers} >= {0, 2}


@pytest.mark.parametrize("number", [71641, 72671, 73116, 76251, 76539, 78310, 82189, 85413, 200890, 201074])
def test_what_was_once_wrong_is_answered(desk: campaign.Desk, number: int) -> None:
    assert desk.answer(number).wrong is None


def test_mutated_options_are_answered(desk: campaign.Desk) -> None:
    answers = [desk.answer_options(number) for number in range(16)]
    assert [(a.number, a.case.command, a.wrong) for a in answers if a.wrong is not None] == []
    assert {answer.code for answer in answers} >= {0, 2}


@pytest.mark.parametrize("number", [13, 92, 153, 262, 681])
def test_options_that_were_once_answered_wrongly(desk: campaign.Desk, number: int) -> None:
    assert desk.answer_options(number).wrong is None


def test_an_impossible_number_is_seen() -> None:
    assert options.impossible(("simulate", "--rate", "nan", "--requests", "20")) == ["simulate --rate 'nan'"]
    assert options.impossible(("simulate", "--plan", "nan", "--seed", "3")) == []
    case = corpus.Case("options", ("simulate", "--rate", "nan"))
    answer = campaign.Answer(0, case, "", 0, "", "", 0.1, 10, (), ("simulate --rate 'nan'",))
    assert answer.wrong == "accepted: simulate --rate 'nan'"


@pytest.mark.slow
def test_many_mutated_options_are_answered(desk: campaign.Desk) -> None:
    found = (desk.answer_options(number) for number in range(MANY))
    assert [(a.number, a.case.command, a.wrong) for a in found if a.wrong is not None] == []


@pytest.mark.slow
def test_many_mutated_files_are_answered(desk: campaign.Desk) -> None:
    found = (desk.answer(number) for number in range(FEW, MANY))
    assert [(a.number, a.case.name, a.wrong) for a in found if a.wrong is not None] == []


def test_a_campaign_of_servers_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert campaign.servers([3], 60.0) == 0
    assert "1 servers" in capsys.readouterr().out
    monkeypatch.setattr(test_server_fuzz, "judged", lambda number: "no message" if number > 4 else None)
    assert campaign.servers(range(3, 8), 60.0) == 1
    assert "    3  no message  e.g. [5, 6, 7]" in capsys.readouterr().out


def test_every_file_of_the_corpus_is_mutated() -> None:
    assert {case.file for case in corpus.cases()} == {*corpus.texts(), *corpus.ALSO}


def test_what_is_wrong_is_seen() -> None:
    """The judge is no yes-man."""

    def judged(code: int, out: str = "{}", err: str = "", left: tuple[str, ...] = ()) -> str | None:
        case = corpus.Case("own.csv", ("check", "--json", "own.csv"))
        return campaign.Answer(0, case, "bytes", code, out, err, 0.1, 10, left).wrong

    assert judged(0) is None
    assert judged(2, err="own.csv:3: prompt_tokens: must be a number") is None
    assert judged(-9) == "ended by signal 9"
    assert judged(1, err="out of memory") == "exit 1: out of memory"
    assert judged(2, err="that is wrong") == "names neither file nor key: that is wrong"
    assert judged(0, out='{"x": NaN}').startswith("stdout is no JSON")  # type: ignore[union-attr]
    assert judged(0, left=(".out-x",)) == "left .out-x"
    frames = 'Traceback (most recent call last):\n  File "/x/simtune/sim/core.py", line 12, in f\nValueError: odd\n'
    assert judged(1, err=frames) == "traceback at sim/core.py:12 ValueError: odd"
