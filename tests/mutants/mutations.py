"""One mistake in some Python: a comparison turned, a number off by one, a branch taken wrongly, work left out."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from random import Random

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip


def _turn(node: ast.Compare) -> None:
    node.ops[0] = _COMPARED[type(node.ops[0])]()


def _compute(node: ast.BinOp | ast.AugAssign) -> None:
    node.op = _COMPUTED[type(node.op)]()


def _join(node: ast.BoolOp) -> None:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()


def _count(node: ast.Constant) -> None:
    assert isinstance(node.value, int)
    node.value = not node.value if isinstance(node.value, bool) else node.value + 1


def _negate(node: ast.If | ast.While | ast.IfExp) -> None:
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _way(node: ast.AST) -> Callable[..., None] | None:
    """How a node can be mistaken, if it can."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        return _turn
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _COMPUTED:
        return _compute
    if isinstance(node, ast.BoolOp):
        return _join
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return _count
    if isinstance(node, (ast.If, ast.IfExp)):
        return _negate
    return None


def _omitted(tree: ast.AST) -> list[tuple[list[ast.stmt], int]]:
    """Statements that could be left out: calls and assignments in functions."""
    return [
        (body, i)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for block in ast.walk(function)
        for body in (getattr(block, "body", None), getattr(block, "orelse", None))
        if isinstance(body, list)
        for i, statement in enumerate(body)
        if isinstance(statement, ast.AugAssign)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call))
        or (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], (ast.Attribute, ast.Subscript)))
    ]


def _in_functions(tree: ast.AST) -> list[ast.AST]:
    """What runs: not annotations, docstrings or defaults of classes."""
    found: list[ast.AST] = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                found += [node for node in ast.walk(statement) if _way(node) is not None]
    return list({id(node): node for node in found}.values())


def mutant(source: str, random: Random) -> tuple[str, int, str, str] | None:
    """The source with one mistake, its line, and the code there before and after; None where none can be made."""
    tree = ast.parse(source)
    places, left_out = _in_functions(tree), _omitted(tree)
    if not places and not left_out:
        return None
    if random.random() < len(left_out) / (len(places) + len(left_out)):
        body, i = random.choice(left_out)
        line, before, after = body[i].lineno, ast.unparse(body[i]), "pass"
        body[i] = ast.copy_location(ast.Pass(), body[i])
    else:
        node = random.choice(places)
        old = copy.deepcopy(node)
        way = _way(node)
        assert way is not None
        way(node)
        line, before, after = node.lineno, _told(old), _told(node)  # type: ignore[attr-defined]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n", line, before, after


def mistakes(source: str, line: int) -> set[tuple[str, str]]:
    """The code before and after of every mistake that can be made on a line."""
    tree = ast.parse(source)
    made = {(ast.unparse(body[i]), "pass") for body, i in _omitted(tree) if body[i].lineno == line}
    for node in _in_functions(tree):
        if node.lineno == line:  # type: ignore[attr-defined]
            turned, way = copy.deepcopy(node), _way(node)
            assert way is not None
            way(turned)
            made.add((_told(node), _told(turned)))
    return made


def _told(node: ast.AST) -> str:
    """Code in a few words."""
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}"
    return ast.unparse(node)[:100]
