"""A measured run: its columns, and its own file written and read."""

import math
from pathlib import Path

import numpy as np
import pytest

from simtune.errors import SpecError
from simtune.validation.client.measured_run import (
    EngineFacts,
    MeasuredFacts,
    MeasuredRequest,
    MeasuredRun,
    read_measured,
)

FACTS = MeasuredFacts(label="light", engine=EngineFacts(engine="vllm", version="0.32.0"))


def request(
    number: int, sent: float, times: tuple[float, ...], tokens: int, error: str | None = None
) -> MeasuredRequest:
    return MeasuredRequest(
        request=number,
        due_s=sent,
        sent_s=sent,
        first_token_s=times[0] if times else None,
        finish_s=times[-1] if times and error is None else None,
        prompt_tokens=10,
        output_tokens=tokens,
        times_s=times,
        error=error,
    )


RUN = MeasuredRun(
    FACTS,
    (
        request(0, 0.0, (0.5, 0.6, 0.8), 3),
        request(1, 1.0, (1.25,), 1),
        request(2, 2.0, (2.5, 3.0), 5),  # tokens that came together
        request(3, 2.0, (2.1,), 1, "the connection was closed after 1 of 8 tokens"),
    ),
)


def test_columns_count_what_was_answered_to_the_end() -> None:
    assert RUN.completed.tolist() == [True, True, True, False]
    assert RUN.values("ttft").tolist() == [0.5, 0.25, 0.5]
    assert RUN.values("e2el").tolist() == pytest.approx([0.8, 0.25, 1.0])
    assert RUN.values("tpot").tolist() == pytest.approx([0.15, 0.125]), "one-token answers have none"
    assert RUN.values("itl").tolist() == pytest.approx([0.1, 0.2, 0.5]), "what comes together counts as one"
    assert RUN.duration_s == 3.0
    assert RUN.request_throughput_rps == 1.0
    assert RUN.output_tokens_per_s == 3.0
    assert RUN.statistic("ttft", "mean") == pytest.approx(1.25 / 3)
    assert RUN.statistic("e2el", "p50") == pytest.approx(0.8)
    assert [r.request for r in RUN.failed] == [3]


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "measured.jsonl"
    file.write_text(RUN.to_text())
    again = read_measured(file)
    assert again.facts == RUN.facts
    assert again.requests == RUN.requests
    assert again.to_text() == RUN.to_text()
    assert np.array_equal(again.finish_s, RUN.finish_s, equal_nan=True)


def test_what_never_came_has_no_statistics() -> None:
    run = MeasuredRun(FACTS, (request(0, 0.0, (), 0, "answered 500"),))
    assert run.statistic("tpot", "p99") is None
    assert run.request_throughput_rps is None
    assert math.isnan(run.ttft_s[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        (RUN.to_text()[:-9], ":5: not JSON"),
        (RUN.to_text().replace('"sent_s":2.0', '"sent_s":-2.0', 1), ":4: sent_s: "),
        (RUN.to_text().replace('"sent_s":2.0', '"sent_s":1e9', 1), ":4: sent_s: "),
        (RUN.to_text().replace('"sent_s":2.0', '"sent_s":NaN', 1), ":4: not JSON"),
        (RUN.to_text().replace("measured@1", "measured@9"), ":1: schema: "),
        (RUN.to_text().splitlines()[0], "has no requests"),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "measured.jsonl"
    file.write_text(text)
    with pytest.raises(SpecError, match=said):
        read_measured(file)


@pytest.mark.parametrize("label", ["", "../../x", ".hidden", "a/b", "a\\\\b", "1" * 5000, "a\\nb"])
def test_a_label_that_can_name_no_file_is_refused(tmp_path: Path, label: str) -> None:
    """Files are named after it, in one folder."""
    file = tmp_path / "measured.jsonl"
    header, rest = RUN.to_text().split("\n", 1)
    file.write_text(header.replace(f'"label":"{RUN.facts.label}"', f'"label":"{label}"') + "\n" + rest)
    with pytest.raises(SpecError, match=":1: label: "):
        read_measured(file)
