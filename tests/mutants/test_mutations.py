"""A mutant is the same code but for one mistake."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from random import Random

import pytest

from tests.mutants.campaign import MUTATED, ROOT, TESTS, WORLDS, TestFile, batches, files, naming, ordered_for, run
from tests.mutants.mutations import mistakes, mutant
from tests.mutants.survivors import SURVIVORS

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


def test_a_mutant_meets_the_tests_that_reach_it(tmp_path: Path) -> None:
    module = tmp_path / "simtune/sim/link.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "class Link:\n    def f(self):\n        return (\n            1 +\n            2\n        )\n    x = 1\n"
    )
    reached = {"simtune/sim/link.py": [1, 2, 3, 7]}
    tests = [
        TestFile("elsewhere.py", 1.0, {"simtune/sim/link.py": [1, 2, 7]}),
        TestFile("long.py", 60.0, reached),
        TestFile("named.py", 3.0, reached),
        TestFile("short.py", 2.0, reached),
    ]
    for test in tests:
        (tmp_path / test.name).write_text("Link" if test.name == "named.py" else "")
    found = ordered_for(tmp_path, tests, module, 5)
    assert [test.name for test in found] == ["named.py", "short.py", "long.py"]
    assert [*batches(found)] == [["named.py", "short.py"], ["long.py"], []]


def test_by_name_a_mutant_meets_the_files_that_name_its_module(tmp_path: Path) -> None:
    module = tmp_path / "simtune/sim/link.py"
    module.parent.mkdir(parents=True)
    module.write_text("class Link:\n    def f(self):\n        return 1\n")
    texts = {"tests/sim/test_link.py": "Link link", "tests/sim/test_long.py": "Link", "tests/sim/test_else.py": "other"}
    for name, text in (texts | {WORLDS: "worlds"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests/tiers").mkdir()
    seconds = {"tests/sim/test_link.py::a": 0.2, "tests/sim/test_long.py::a": 0.25, "tests/sim/test_long.py::b": 9.0}
    (tmp_path / "tests/tiers/durations.json").write_text(json.dumps({"durations": seconds}))
    found = naming(tmp_path, module)
    named = ["tests/sim/test_link.py", "tests/sim/test_long.py"]
    assert [test.name for test in found] == [*named, "tests/sim/test_else.py", WORLDS]
    assert [test.seconds for test in found] == [0.7, 0.75, 0.5, 0.5]


def test_a_campaign_counts_what_is_caught_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("slipcover")
    tree = tmp_path / "tree"
    for folder in (*TESTS, *MUTATED):
        (tree / folder).mkdir(parents=True)
    for package in ("simtune", *MUTATED):
        (tree / package / "__init__.py").touch()
    module = tree / "simtune/sim/link.py"
    source = "def f(x):\n    y = x + 1\n    return y\n" + "# long\n" * 20
    module.write_text(source)
    test = tree / "tests/sim/test_link.py"
    begin = tree / "tests/coverage/begin"
    shutil.copytree(ROOT / "tests/coverage/begin", begin)
    test.write_text("from simtune.sim.link import f\n\ndef test_f():\n    assert f(1) != 0\n")
    weak = run(tmp_path, range(3), 1e9, 1e9)
    expected = ["caught" if "x - 1" in row["after"] else "survives" for row in weak]
    assert [row["fate"] for row in weak] == expected
    assert len(weak) == 3
    assert module.read_text() == source
    slow = test.with_name("test_slow.py")
    assert [row["fate"] for row in run(tmp_path, range(3), 1e9, 0.0)] == expected, "a fate that is known stays"
    slow.write_text("from simtune.sim.link import f\n\ndef test_f():\n    assert f(1) == 2\n")
    (tmp_path / "mutants.jsonl").unlink()
    known = TestFile("tests/sim/test_slow.py", 1e6, {"simtune/sim/link.py": [1, 2, 3]})
    with (tmp_path / "tests.jsonl").open("a") as file:
        file.write(json.dumps(vars(known)) + "\n")
    first = ["open" if fate == "survives" else fate for fate in expected]
    assert [row["fate"] for row in run(tmp_path, range(3), 1e9, 1e3)] == first, "what takes longer is left for later"
    weak = run(tmp_path, range(3), 1e9, 1e9)
    assert {row["fate"] for row in weak} == {"caught"}
    (tmp_path / "undo.jsonl").write_text(json.dumps({"path": str(module), "text": source}) + "\n")
    module.write_text("a mistake")  # of a campaign that was killed
    monkeypatch.setattr("tests.mutants.campaign.caught", lambda *_: pytest.fail("known already"))
    assert run(tmp_path, range(3), 1e9, 1e9) == weak
    assert module.read_text() == source
