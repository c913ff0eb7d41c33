"""A mutant is the same code but for one mistake."""

from __future__ import annotations

import ast
import itertools
import json
from pathlib import Path
from random import Random

import pytest

from tests.mutants.campaign import FILE_S, MUTATED, ROOT, TESTS, batches, costs, files, first_of, ordered_for, run
from tests.mutants.forked import FAILED, in_fork
from tests.mutants.mutations import mistakes, mutant
from tests.mutants.reach import ReachingTest, counted
from tests.mutants.survivors import SURVIVORS

LINK = "simtune/sim/link.py"
SOURCE = """\
class A:
    def f(self, x: int = 3) -> int:
        if x < 2 and x:
            self.n += 1
        return x - 1
"""


def test_each_kind_of_mistake_is_made_once() -> None:
    made = {mutant(SOURCE, Random(seed)) for seed in range(200)}
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    told = set()
    on_lines = {n: mistakes(SOURCE, n) for n in range(1, 6)}
    for one in made:
        assert one is not None
        text, line, before, after = one
        told.add((line, before, after))
        assert (before, after) in on_lines[line]
        assert sum(a != b for a, b in zip(plain, text.splitlines(), strict=True)) == 1
    assert told >= {
        (3, "x < 2", "x <= 2"), (3, "x < 2 and x", "x < 2 or x"), (4, "self.n += 1", "pass"), (5, "x - 1", "x + 1"),
        (5, "1", "2"), (3, "if x < 2 and x", "if not (x < 2 and x)"),
    }  # fmt: skip


def test_survivors_that_are_explained_are_mistakes_in_the_code_as_it_is() -> None:
    for file, line, before, after, _ in SURVIVORS:
        source = (ROOT / file).read_text()
        at = [number for number, text in enumerate(source.splitlines(), 1) if text.strip() == line]
        assert any((before, after) in mistakes(source, number) for number in at), f"{file}: {line}: {before} -> {after}"


def test_mutants_are_of_the_engine_and_the_simulator() -> None:
    assert {str(path.relative_to(ROOT)).startswith(MUTATED) for path in files(ROOT)} == {True}
    assert mutant("x: int = 3\n", Random(0)) is None


def _mask(*lines: int) -> str:
    return f"{sum(1 << line for line in lines):x}"


def _test(name: str, seconds: float, *lines: int) -> ReachingTest:
    return ReachingTest(name, seconds, {LINK: _mask(*lines)} if lines else {})


def test_a_test_reaches_the_lines_that_it_ran() -> None:
    test = _test("a.py::t[1]", 1.0, 3, 7)
    assert [test.reaches(LINK, line, line) for line in (2, 3, 4, 7, 8)] == [False, True, False, True, False]
    assert test.reaches(LINK, 4, 8)
    assert not test.reaches(LINK, 4, 6)
    assert not test.reaches("simtune/sim/other.py", 1, 9)
    assert (test.file, test.function, test.num_lines) == ("a.py", "a.py::t", 2)


def test_a_mutant_meets_the_tests_that_reach_it(tmp_path: Path) -> None:
    module = tmp_path / LINK
    module.parent.mkdir(parents=True)
    module.write_text(
        "class Link:\n    def f(self):\n        return (\n            1 +\n            2\n        )\n    x = 1\n"
    )
    tests = [
        _test("elsewhere.py::t", 1.0, 7),
        _test("long.py::t", 60.0, 3, 4),
        _test("named.py::t[1]", 3.0, 5),
        _test("named.py::t[2]", 3.0, 5),
        _test("short.py::t", 2.0, 3),
        _test("wide.py::t", 2.0, 3, *range(20, 40)),
    ]
    for test in tests:
        (tmp_path / test.file).write_text("Link" if test.file == "named.py" else "")
    ordered = ordered_for(tmp_path, _test("import", 0.0, 1, 7), tests, module, 5)
    assert [test.name for test in ordered] == [
        "named.py::t[1]",
        "short.py::t",
        "named.py::t[2]",
        "wide.py::t",
        "long.py::t",
    ]
    assert [[test.name for test in batch] for batch in batches(ordered)] == [
        ["named.py::t[1]"], ["short.py::t"], ["named.py::t[2]", "wide.py::t"], ["long.py::t"],
    ]  # fmt: skip
    assert {test.name for test in ordered_for(tmp_path, _test("import", 0.0, 1, 7), tests, module, 7)} == {
        test.name for test in tests
    }, "what importing runs is met by all that reach the file"


def test_a_file_is_imported_once() -> None:
    tests = [_test("a.py::t", 1.0), _test("a.py::u", 2.0), _test("b.py::t", 1.0)]
    assert costs(tests) == [1.0 + FILE_S, 2.0, 1.0 + FILE_S]
    assert [first_of(tests, within) for within in (0.0, 3.0 + FILE_S, 4.0 + FILE_S, 5.0)] == [1, 2, 2, 3]


def test_a_campaign_counts_what_is_caught_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("slipcover")
    tree = tmp_path / "tree"
    for folder in (*TESTS, *MUTATED):
        (tree / folder).mkdir(parents=True)
    for package in ("simtune", *MUTATED):
        (tree / package / "__init__.py").touch()
    module = tree / LINK
    source = "def f(x):\n    y = x + 1\n    return y\n" + "# long\n" * 20
    module.write_text(source)
    weak = tree / "tests/sim/test_link.py"
    weak.write_text(
        "from simtune.sim.link import f\n\ndef test_f():\n    assert f(1) != 0\n\ndef test_g():\n    pass\n"
    )
    rows = run(tmp_path, range(3), 1e9, 1e9)
    expected = ["caught" if "x - 1" in row["after"] else "survives" for row in rows]
    assert [row["fate"] for row in rows] == expected
    assert len(rows) == 3
    assert module.read_text() == source
    _, tests = counted(tmp_path / "counted")
    assert {test.name: {*test.lines} for test in tests} == {
        "tests/sim/test_link.py::test_f": {LINK},
        "tests/sim/test_link.py::test_g": set(),
    }
    assert [row["fate"] for row in run(tmp_path, range(3), 1e9, 0.0)] == expected, "a fate in the journal stays"
    weak.with_name("test_slow.py").write_text("from simtune.sim.link import f\n\ndef test_f():\n    assert f(1) == 2\n")
    (tmp_path / "mutants.jsonl").unlink()
    slow = {"name": "tests/sim/test_slow.py::test_f", "seconds": 1e6, "lines": {LINK: _mask(2, 3)}}
    (tmp_path / "counted/tests.sim.test_slow.py.jsonl").write_text(json.dumps(slow) + "\n")
    first = ["open" if fate == "survives" else fate for fate in expected]
    assert [row["fate"] for row in run(tmp_path, range(3), 1e9, 1e3)] == first, "what takes longer is left for later"
    rows = run(tmp_path, range(3), 1e9, 1e9)
    assert {row["fate"] for row in rows} == {"caught"}
    killed = {"path": str(module), "text": source, "changed": module.stat().st_mtime_ns}
    (tmp_path / "undo.jsonl").write_text(json.dumps(killed) + "\n")
    module.write_text("a mistake")
    monkeypatch.setattr("tests.mutants.campaign.caught", lambda *_: pytest.fail("in the journal already"))
    assert run(tmp_path, range(3), 1e9, 1e9) == rows
    assert module.read_text() == source


def test_a_run_without_an_end_is_a_failure() -> None:
    assert in_fork(lambda: 0, 1.0) == 0
    assert in_fork(lambda: 3, 1.0) == 3
    assert in_fork(lambda: sum(1 for _ in itertools.repeat(0)), 0.0) == FAILED
    assert in_fork(lambda: 1 // 0, 1.0) == FAILED
