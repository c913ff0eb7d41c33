"""Constraints of a search space: expressions over the settings of a plan, such as `tp <= 4 or gpu != 'l40s'`.

An expression is a small part of Python's: comparisons (also chained, `in` and `not in`), `and`, `or`, `not`, the
operators + - * / // %, numbers, texts, true and false, lists. It is checked for every pool of a plan; its names are the
settings of the pool. An expression that names a pool by its role, as in `decode.instances >= 2 * prefill.instances`, is
checked for the plan as a whole, and is true if the plan has no pool of that role.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from simtune.errors import UsageError, suggest

POOL_NAMES = (
    "role",
    "gpu",
    "tp",
    "pp",
    "attention_dp",
    "expert_parallel",
    "weight_dtype",
    "kv_dtype",
    "instances",
    "devices",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefix_caching",
    "max_model_len",
    "drafter",
    "variant",
    "engine",
    "model",
    "score",
)
"""Settings of a pool: `gpu` is its hardware profile, `devices` are those of all its instances; `weight_dtype`,
`kv_dtype`, `drafter`, `variant`, and the `engine` and `model` of a variant are '' if the plan names none;
`max_model_len` is 0 unless it is searched; `score` is that of the model.
"""
PLAN_NAMES = ("num_gpus", "router")
"""Settings of a whole plan."""
ROLES = ("mixed", "prefill", "decode")

Names = Mapping[str, Any]

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}


class Formula:
    """An expression over named values, checked when the object is made."""

    term: ClassVar[str] = "expression"
    """Word for it in messages."""

    def __init__(self, text: str, names: Sequence[str], roles: Sequence[str] = ()) -> None:
        """Parse an expression over `names`, each also of the pools of `roles`. Raises ValueError with the part of the
        expression that is not understood and what may stand there.
        """
        self.text = text
        try:
            self._body = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"{text!r} is no expression; write it like tp <= 4 or gpu != 'l40s'") from None
        self.roles = frozenset(_checked(self._body, text, names, roles))
        """Roles of the pools that the expression names; empty if it is checked against every pool."""
        self.names = frozenset(node.id for node in ast.walk(self._body) if isinstance(node, ast.Name)) - _WORDS.keys()
        """Names that must have a value."""

    def value(self, values: Names) -> Any:
        """Return what the expression comes to. Raises UsageError if two values cannot be computed or compared."""
        return self._value(self._body, values)

    def _value(self, node: ast.AST, names: Names) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return names[name] if name not in _WORDS else _WORDS[name]
            case ast.Attribute(value=ast.Name(id=role), attr=name):
                return names[role][name]
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item, names) for item in items]
            case ast.BoolOp(op=op, values=values):
                parts = (self._value(value, names) for value in values)
                return all(parts) if isinstance(op, ast.And) else any(parts)
        return self._operation(node, names)

    def _operation(self, node: ast.AST, names: Names) -> Any:
        match node:
            case ast.UnaryOp(op=sign, operand=operand):
                return self._computed(_UNARY[type(sign)], self._value(operand, names))
            case ast.BinOp(left=left, op=sign, right=right):
                return self._computed(_BINARY[type(sign)], self._value(left, names), self._value(right, names))
            case ast.Compare(left=left, ops=signs, comparators=others):
                values = [self._value(value, names) for value in (left, *others)]
                pairs = zip(signs, values, values[1:], strict=False)
                return all(self._computed(_COMPARE[type(sign)], a, b) for sign, a, b in pairs)
        raise AssertionError(ast.dump(node))

    def _computed(self, compute: Callable[..., Any], *values: Any) -> Any:
        try:
            return compute(*values)
        except (TypeError, ZeroDivisionError, OverflowError, ValueError) as error:
            raise UsageError(f"{self.term} {self.text!r}: {error}") from None


class Constraint(Formula):
    """An expression over the settings of a plan."""

    term = "constraint"

    def __init__(self, text: str) -> None:
        """Parse an expression. Raises ValueError with the part of the expression that is not understood and what may
        stand there.
        """
        super().__init__(text, (*POOL_NAMES, *PLAN_NAMES), ROLES)

    def mentions(self, name: str) -> bool:
        """True if the constraint names a setting, of every pool or of those of a role."""
        return name in self.names or any(n.attr == name for n in ast.walk(self._body) if isinstance(n, ast.Attribute))

    def holds(self, pool: Names, plan: Names) -> bool:
        """True if the constraint holds for one pool of a plan. Raises UsageError if two settings cannot be compared."""
        return bool(self.value({**plan, **pool}))

    def holds_for_plan(self, pools: Mapping[str, Names], plan: Names) -> bool:
        """True if the constraint holds for a whole plan, given the settings of its pools by role."""
        if not self.roles:
            return all(self.holds(pool, plan) for pool in pools.values())
        return not self.roles <= pools.keys() or bool(self.value({**plan, **pools}))


_WORDS = {"true": True, "false": False, "True": True, "False": False}


def _checked(node: ast.AST, text: str, names: Sequence[str], roles: Sequence[str]) -> set[str]:
    """Return the roles that an expression names. Raises ValueError for a part that is not understood."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return set()
        case ast.Name(id=name):
            _check_name(name, text, names)
            return set()
        case ast.Attribute(value=ast.Name(id=role), attr=name) if roles:
            _check_attribute(role, name, text)
            return {role}
        case ast.List() | ast.Tuple() | ast.BoolOp() | ast.UnaryOp() | ast.BinOp() | ast.Compare():
            children = list(ast.iter_child_nodes(node))
            if all(type(child) in _KNOWN for child in children if isinstance(child, _OPERATORS)):
                inside = [_checked(child, text, names, roles) for child in children if not isinstance(child, _GRAMMAR)]
                return set().union(*inside)
    raise ValueError(
        f"{text!r}: only comparisons, and, or, not, + - * / // %, numbers, texts and lists are understood here"
    )


def _check_name(name: str, text: str, names: Sequence[str]) -> None:
    if name not in (*names, *_WORDS):
        hint = suggest(name, (*names, *_WORDS)) or f"; names are {', '.join(names)}"
        raise ValueError(f"{text!r}: there is no setting {name!r}{hint}")


def _check_attribute(role: str, name: str, text: str) -> None:
    if role not in ROLES:
        raise ValueError(f"{text!r}: there is no pool {role!r}{suggest(role, ROLES)}; pools: {', '.join(ROLES)}")
    if name not in POOL_NAMES:
        raise ValueError(f"{text!r}: a pool has no {name!r}{suggest(name, POOL_NAMES)}")


_OPERATORS = (ast.operator, ast.unaryop, ast.cmpop)
_GRAMMAR = (*_OPERATORS, ast.boolop, ast.expr_context)
_KNOWN = {*_BINARY, *_COMPARE, *_UNARY}
