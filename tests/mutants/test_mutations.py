"""A mutant is the same code but for one mistake."""

from __future__ import annotations

import ast
from random import Random

from tests.mutants.campaign import MUTATED, ROOT, files, ordered_for
from tests.mutants.mutations import mutant

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
    for one in made:
        assert one is not None
        text, line, before, after = one
        told.add((line, before, after))
        assert sum(a != b for a, b in zip(plain, text.splitlines(), strict=True)) == 1
    assert told >= {
        (3, "x < 2", "x <= 2"), (3, "x < 2 and x", "x < 2 or x"), (4, "self.n += 1", "pass"), (5, "x - 1", "x + 1"),
        (5, "1", "2"), (3, "if x < 2 and x", "if not (x < 2 and x)"),
    }  # fmt: skip


def test_mutants_are_of_the_engine_and_the_simulator() -> None:
    assert {str(path.relative_to(ROOT)).startswith(MUTATED) for path in files(ROOT)} == {True}
    assert mutant("x: int = 3\n", Random(0)) is None


def test_the_tests_that_know_a_module_come_first() -> None:
    by_module = {
        "simtune/sim/link.py": "tests/sim/test_link.py",
        "simtune/sim/families.py": "tests/sim/test_families.py",
        "simtune/sim/agenda.py": "tests/sim/test_agenda.py",
    }
    for module, test in by_module.items():
        found = ordered_for(ROOT, ROOT / module)
        assert found.index(test) < 3
        assert len(found) == len(set(found)) > 30
