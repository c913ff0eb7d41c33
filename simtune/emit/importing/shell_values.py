"""Values of shell words: variables, defaults and sums, from what a script sets. Commands are never run."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from simtune.emit.importing.shell_words import Piece, Token, pieces_of
from simtune.emit.launch import SETTINGS_AS_OPTIONS
from simtune.errors import Problem, SpecError

Value = str | tuple[str, ...]
OPEN = re.compile(r"\$\{(\w+)\}|\$\(")
"""A variable or a command whose value is not known."""
MOST_EXPANDED = 1 << 22
"""Most characters of all values that a script puts together: it can double a value again and again."""
_MOST_DEFAULTS = 8
_PARAMETER = re.compile(r"(\w+|[@*#?$!-])(?:\[(\d{1,6}|[@*])\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_THIS = r"""["']?\$(0|\{0\}|\{BASH_SOURCE(\[0\])?\})["']?"""
_FOLDER = re.compile(rf"""(cd\s+)?["']?\$\(\s*dirname\s+(--\s+)?{_THIS}\s*\)["']?\s*(&&|;)\s*pwd(\s+-P)?""")
_DIRNAME = re.compile(rf"dirname\s+(--\s+)?{_THIS}")
_SUM = re.compile(r"[\d\s+*/%()-]{1,200}")
_SUMS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class Values:
    """Variables of a script while it is read."""

    file: str
    variables: dict[str, Value] = field(default_factory=dict)
    expanded: int = 0
    depth: int = 0

    def words(self, token: Token) -> list[str]:
        """Return the words that a word stands for; a variable without quotes is cut at blanks."""
        result: list[str] = []
        word: str | None = None
        for piece in token.pieces:
            value = self._piece(piece, token.line)
            if piece.quoted and isinstance(value, str):
                word = (word or "") + value
                continue
            parts = value if isinstance(value, tuple) else tuple(value.split()) if piece.kind != "text" else (value,)
            if not parts:
                continue
            word = (word or "") + parts[0]
            for part in parts[1:]:
                result.append(word)
                word = part
        return result if word is None else [*result, word]

    def text(self, pieces: tuple[Piece, ...], line: int) -> str:
        """Return pieces as one text."""
        values = (self._piece(piece, line) for piece in pieces)
        return "".join(value if isinstance(value, str) else " ".join(value) for value in values)

    def _piece(self, piece: Piece, line: int) -> Value:
        value = self._value(piece, line)
        self.expanded += len(value) if isinstance(value, str) else sum(len(word) + 1 for word in value)
        if self.expanded > MOST_EXPANDED:
            message = f"its values make more than {MOST_EXPANDED:,} characters; cut it to what starts the servers"
            raise SpecError(Problem(self.file, message, "", line))
        return value

    def _value(self, piece: Piece, line: int) -> Value:
        match piece.kind:
            case "text":
                return piece.text
            case "variable":
                return self._parameter(piece.text, line)
            case "sum":
                return self._sum(piece.text, line)
        return self._command(piece.text, line)

    def _element(self, name: str, place: str | None) -> Value | None:
        """Return the value of a variable, of an array the element at `place`; None if it has none."""
        value = self.variables.get(name)
        if isinstance(value, tuple) and place not in ("@", "*") and name not in "@*":
            return "".join(value[int(place or 0) :][:1])
        return value

    def _parameter(self, text: str, line: int) -> Value:
        match = _PARAMETER.fullmatch(text)
        if match is None:
            name = re.split(r"\W", text, maxsplit=1)[0]
            return f"${{{name}}}" if name else "$("
        name, place, action, word = match.groups()
        value = self._element(name, place)
        absent = value is None or (not value and (action or "").startswith(":"))
        if action is not None and action[-1] == "+":
            return "" if absent else self._word(word, line)
        if absent and action is not None and action[-1] in "-=":
            value = self._word(word, line)
            if action[-1] == "=":
                self.variables[name] = value
        return f"${{{name}}}" if value is None else value

    def _word(self, text: str, line: int) -> str:
        """Return the default of a variable, with its quotes removed."""
        if self.depth >= _MOST_DEFAULTS:
            message = f"defaults are nested deeper than {_MOST_DEFAULTS} levels; write the value"
            raise SpecError(Problem(self.file, message, "", line))
        self.depth += 1
        value = self.text(pieces_of(text.strip("\"'"), self.file, line), line)
        self.depth -= 1
        return value

    def _sum(self, text: str, line: int) -> str:
        names = re.sub(r"\$\{?(\w+)\}?|\b([A-Za-z_]\w*)", lambda m: str(self._parameter(m[1] or m[2], line)), text)
        number = None if _SUM.fullmatch(names) is None else _calculated(names)
        open_name = OPEN.search(names)
        if number is None:
            return "$(" if open_name is None else open_name[0]
        return str(number)

    def _command(self, text: str, line: int) -> Value:
        """Return the value of commands whose output is known without running them."""
        text = text.strip()
        if _FOLDER.fullmatch(text) or _DIRNAME.fullmatch(text) or text == "pwd":
            return "."
        if text.startswith(SETTINGS_AS_OPTIONS):
            file = self.text(pieces_of(text[len(SETTINGS_AS_OPTIONS) :].strip().strip('"'), self.file, line), line)
            return ("--config", file)
        return "$("


def _calculated(text: str) -> int | None:
    """Return the value of a sum of whole numbers, None if it is none."""
    try:
        return _of_node(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, KeyError, MemoryError):
        return None


def _of_node(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_of_node(node.operand)
    if isinstance(node, ast.BinOp):
        value = _SUMS[type(node.op)](_of_node(node.left), _of_node(node.right))
        if abs(value) >= 1 << 63:
            raise ValueError("larger than any number of a shell")
        return value
    raise ValueError("not a sum")
