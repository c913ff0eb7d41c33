"""How large a class and a function may be, how tangled, and how many things a class name may stand for.

What ruff can count (branches, arguments, docstrings) it is asked in pyproject.toml.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from radon.complexity import cc_visit_ast
from radon.visitors import Function as Measured

from tests.docs.reading import modules
from tests.package.test_import_law import floor

LARGEST_CLASS = 250
LARGEST_FUNCTION = 50
MOST_TANGLED = 15
MOST_HOMONYMS = 1
FREE = {"cli"}
"""Floors whose functions may be longer: an option is a line."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield every class of the package with the name of its module."""
    for module, tree in modules().items():
        yield from ((module, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function and method of the package with the name of its module."""
    for module, tree in modules().items():
        yield from ((module, node) for node in ast.walk(tree) if isinstance(node, Function))


def lines(node: ast.ClassDef | Function) -> int:
    """Of a definition, docstring included."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_no_class_is_too_large() -> None:
    assert [(module, node.name, lines(node)) for module, node in classes() if lines(node) > LARGEST_CLASS] == []


def test_no_function_is_too_long() -> None:
    counted = [(module, node) for module, node in functions() if "." not in module or floor(module) not in FREE]
    assert [(module, node.name, lines(node)) for module, node in counted if lines(node) > LARGEST_FUNCTION] == []


def test_no_function_is_too_tangled() -> None:
    """Cyclomatic complexity as radon counts it: comprehensions and conditions with `and` and `or` are branches."""
    measured = [
        (module, block.fullname, block.complexity)
        for module, tree in modules().items()
        for block in cc_visit_ast(tree)
        if isinstance(block, Measured)
    ]
    assert len(measured) > 1000
    assert [found for found in measured if found[2] > MOST_TANGLED] == []


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(node.name for _, node in classes())
    homonyms = sorted(name for name, count in names.items() if count > 1)
    assert len(homonyms) <= MOST_HOMONYMS, homonyms
