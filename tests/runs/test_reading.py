"""A damaged run directory is refused with the file, the place and the rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simtune.errors import SpecError, UsageError
from simtune.runs.run_reader import read_run
from simtune.runs.schema import CandidateRow
from simtune.runs.tables import columns

RunMaker = Callable[..., Path]

POOL = {"hardware": "h100-sxm", "instances": 1, "batching": {"max_num_seqs": 64, "max_num_batched_tokens": 2048}}
PLAN = {"schema": "simtune/plan@1", "name": "p", "model": "llama-3.1-8b", "pools": [POOL]}


def damage(run: Path, file: str, old: str, new: str) -> Path:
    text = (run / file).read_text()
    assert old in text
    (run / file).write_text(text.replace(old, new, 1))
    return run


def line_of(run: Path, file: str, text: str) -> int:
    return 1 + next(i for i, line in enumerate((run / file).read_text().splitlines()) if text in line)


def test_what_is_written_is_what_is_read(make_run: RunMaker, optimized: Any) -> None:
    summary, rows = optimized
    run = read_run(make_run())
    assert json.loads(json.dumps(run.summary.to_data())) == summary
    assert run.summary.slo[0].limit_s == 1.0
    assert [c.candidate for c in run.candidates] == [row["candidate"] for row in rows]
    first, last = run.candidates[0], run.candidates[-1]
    assert (first.status, first.rank, first.saturated) == ("chosen", 1, False)
    assert first.goodput_rps == rows[0]["goodput_rps"]
    assert (last.rank, last.goodput_rps, last.saturated, last.kv_blocks) == (None, None, None, None)


def test_keys_and_columns_that_are_not_known_yet_are_let_through(make_run: RunMaker) -> None:
    run = make_run(something_new={"a": 1})
    text = (run / "candidates.csv").read_text().splitlines()
    (run / "candidates.csv").write_text("\n".join([text[0] + ",new", *(line + ",1" for line in text[1:])]) + "\n")
    assert len(read_run(run).candidates) == len(text) - 1


def test_a_folder_that_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        read_run(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"holds no summary\.json"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("changed", "key", "words"),
    [
        ({"num_gpus": 0}, "num_gpus", "greater than or equal to 1"),
        ({"schema": "simtune/summary@3"}, "schema", "simtune/summary@2"),
        ({"saturated": "no"}, "saturated", "boolean"),
        ({"plan": {**PLAN, "pools": []}}, "plan.pools", "at least 1"),
        ({"plan": {**PLAN, "rooter": {}}}, "plan.rooter", "unknown key, did you mean router?"),
        (
            {"timeline": {"t_s": [0.0], "running": [], "waiting": [], "kv_used": []}},
            "timeline",
            "equally long",
        ),
        ({"slo_attainment": 1.5}, "slo_attainment", "less than or equal to 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(
    make_run: RunMaker, changed: dict[str, Any], key: str, words: str
) -> None:
    run = make_run(**changed)
    with pytest.raises(SpecError) as caught:
        read_run(run)
    (problem,) = caught.value.problems
    assert problem.file == str(run / "summary.json")
    assert problem.key == key
    assert words in problem.message
    assert problem.line == line_of(run, "summary.json", f'"{key.split(".")[-1]}"')


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            "simtune/summary@3",
            "is simtune/summary@3, of a newer simtune; this one reads simtune/summary@2: upgrade simtune, or do "
            "the run again",
        ),
        (
            "simtune/summary@0",
            "is simtune/summary@0, of an older simtune; this one reads simtune/summary@2: do the run",
        ),
        ("simtune/plan@1", "must be simtune/summary@2, found 'simtune/plan@1'"),
        (None, "must be simtune/summary@2"),
    ],
)
def test_another_version_is_refused_with_a_remedy(make_run: RunMaker, found: str | None, words: str) -> None:
    """Whatever else is in the file: a newer one may have other keys altogether."""
    run = make_run(schema=found, metrics="of another kind")
    with pytest.raises(SpecError) as caught:
        read_run(run)
    (problem,) = caught.value.problems
    assert (problem.file, problem.key, problem.line) == (str(run / "summary.json"), "schema", 2)
    assert problem.message.startswith(words)


def test_a_plan_of_another_version_is_refused_too(make_run: RunMaker) -> None:
    with pytest.raises(SpecError, match=r"plan\.schema: is simtune/plan@2, of a newer simtune"):
        read_run(make_run(plan={**PLAN, "schema": "simtune/plan@2"}))


def test_a_missing_key_is_named(make_run: RunMaker) -> None:
    run = make_run()
    data = json.loads((run / "summary.json").read_text())
    del data["metrics"], data["saturated"]
    (run / "summary.json").write_text(json.dumps(data))
    with pytest.raises(SpecError) as caught:
        read_run(run)
    assert {p.key for p in caught.value.problems} == {"metrics", "saturated"}


def test_text_that_is_not_json(make_run: RunMaker) -> None:
    run = damage(make_run(), "summary.json", '"preemptions": 0,', '"preemptions": ,')
    with pytest.raises(SpecError, match=r"summary\.json:\d+:\d+: not valid JSON") as caught:
        read_run(run)
    assert caught.value.problems[0].line == line_of(run, "summary.json", '"preemptions"')


@pytest.mark.parametrize("word", ["NaN", "Infinity"])
def test_numbers_that_json_does_not_have(make_run: RunMaker, word: str) -> None:
    run = damage(make_run(), "summary.json", '"preemptions": 0,', f'"preemptions": {word},')
    with pytest.raises(SpecError, match=f"{word} is not JSON"):
        read_run(run)


def test_a_summary_that_is_no_mapping(make_run: RunMaker) -> None:
    run = make_run()
    (run / "summary.json").write_text("[]")
    with pytest.raises(SpecError, match=r"summary\.json"):
        read_run(run)


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("status", "best", "must be one of chosen, feasible"),
        ("tp", "two", "must be a whole number, not 'two'"),
        ("tp", "", "must be a whole number, not ''"),
        ("tp", "0", "must be 1 or more, not '0'"),
        ("goodput_rps", "nan", "must be a number or empty, not 'nan'"),
        ("attention_dp", "two", "must be a whole number or empty, not 'two'"),
        ("saturated", "maybe", "must be true, false or empty"),
        ("candidate", "", "must be a name"),
        ("ttft_p99_s", "1e308", "must be 1e+24 or less"),
        ("goodput_rps", "-1", "must be 0 or more"),
    ],
)
def test_a_wrong_cell_is_named_with_line_and_column(
    make_run: RunMaker, optimized: Any, column: str, value: str, rule: str
) -> None:
    rows = [dict(row) for row in optimized[1]]
    rows[2][column] = value
    with pytest.raises(SpecError) as caught:
        read_run(make_run(candidates=rows))
    (problem,) = caught.value.problems
    assert problem.file.endswith("candidates.csv")
    assert (problem.key, problem.line) == (column, 4)
    assert problem.message.startswith(rule)


def test_all_wrong_cells_are_told_at_once(make_run: RunMaker, optimized: Any) -> None:
    rows = [{**row, "tp": "x"} for row in optimized[1]]
    with pytest.raises(SpecError) as caught:
        read_run(make_run(candidates=rows))
    assert len(caught.value.problems) == len(rows)


def test_a_table_without_a_column_or_with_a_ragged_row(make_run: RunMaker) -> None:
    with pytest.raises(SpecError, match="lacks the columns kv_blocks"):
        read_run(damage(make_run(), "candidates.csv", ",kv_blocks,", ",blocks,"))
    ragged = make_run()
    with (ragged / "candidates.csv").open("a") as file:
        file.write("1,2,3\n")
    with pytest.raises(SpecError, match=f"3 cells under a header of {len(columns(CandidateRow))}"):
        read_run(ragged)


def test_a_table_cut_off_inside_a_quoted_cell(make_run: RunMaker) -> None:
    run = make_run()
    with (run / "candidates.csv").open("a") as file:
        file.write('1,"unfinished')
    with pytest.raises(SpecError, match="not valid CSV"):
        read_run(run)
