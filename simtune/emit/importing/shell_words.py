"""Text of a shell script, cut into words and operators. Nothing is run, and nothing outside the text is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from simtune.errors import Problem, SpecError

Kind = str
"""`text`, `variable` ($NAME and ${...}), `sum` ($((...))) or `command` ($(...) and backquotes)."""

_OPERATORS = (
    "&&",
    "||",
    ";;",
    "<<<",
    "<<-",
    "<<",
    ">>",
    "&>>",
    "&>",
    ">&",
    "<&",
    ">|",
    ";",
    "&",
    "|",
    "(",
    ")",
    "<",
    ">",
)
_BY_LENGTH = sorted(_OPERATORS, key=len, reverse=True)
REDIRECTIONS = frozenset({"<", ">", ">>", "&>", "&>>", ">&", "<&", ">|", "<<<"})
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
MOST_CHARACTERS = 1 << 18
"""Most characters of a script: launch scripts have some thousand."""


class Piece(NamedTuple):
    """Part of a word."""

    kind: Kind
    text: str
    quoted: bool


class Token(NamedTuple):
    """Word, operator, end of line, or here-document."""

    kind: str
    """`word`, `operator`, `line` or `document`."""
    text: str
    pieces: tuple[Piece, ...]
    line: int


class _Reader:
    """Position in a text."""

    def __init__(self, text: str, file: str, line: int) -> None:
        self.text, self.file, self.at, self.line = text, file, 0, line

    def ahead(self, words: str) -> bool:
        """True if the text goes on with some words."""
        return self.text.startswith(words, self.at)

    def take(self, count: int) -> str:
        """Return the next characters and pass them."""
        part = self.text[self.at : self.at + count]
        self.at += count
        self.line += part.count("\n")
        return part

    def error(self, message: str, line: int) -> SpecError:
        """Return the error of a text that is not valid shell."""
        return SpecError(Problem(self.file, message, "", line))

    def until(self, end: str, what: str) -> str:
        """Return the text before `end` and pass both. Raises SpecError if the text ends first."""
        at = self.text.find(end, self.at)
        if at < 0:
            raise self.error(f"{what} has no end; close it", self.line)
        return self.take(at + len(end) - self.at)[: -len(end)]

    def inside(self, opening: str, closing: str, what: str) -> str:
        """Return the text up to the bracket that closes one already passed; quotes hide brackets."""
        start, line, depth = self.at, self.line, 1
        while depth:
            if self.at >= len(self.text):
                raise self.error(f"{what} has no end; close it", line)
            character = self.take(1)
            if character == "\\":
                self.take(1)
            elif character == "'" and '"' not in (opening, closing):
                self.until("'", "a quoted text")
            depth += (character == opening) - (character == closing)
        return self.text[start : self.at - 1]


def _blank(reader: _Reader) -> int:
    """Return the number of characters that separate words here: a blank, a continued line, or a comment."""
    if reader.ahead("\\\n"):
        return 2
    if reader.text[reader.at] == "#":
        end = reader.text.find("\n", reader.at)
        return (len(reader.text) if end < 0 else end) - reader.at
    return int(reader.text[reader.at] in " \t\r")


def tokens(text: str, file: str, line: int = 1) -> Iterator[Token]:
    """Yield the tokens of a script. Raises SpecError for quotes and brackets without end."""
    if len(text) > MOST_CHARACTERS:
        raise SpecError(
            Problem(file, f"is longer than {MOST_CHARACTERS:,} characters; cut it to what starts the servers")
        )
    reader, pending = _Reader(text, file, line), list[tuple[str, bool, bool]]()
    expects_delimiter: str | None = None
    while reader.at < len(text):
        if reader.text[reader.at] == "\n":
            yield Token("line", "\n", (), reader.line)
            reader.take(1)
            yield from _documents(reader, pending)
        elif blank := _blank(reader):
            reader.take(blank)
        elif operator := next((o for o in _BY_LENGTH if reader.ahead(o)), None):
            at_line = reader.line
            reader.take(len(operator))
            if operator in ("<<", "<<-"):
                expects_delimiter = operator
            else:
                yield Token("operator", operator, (), at_line)
        else:
            token = _word(reader)
            if expects_delimiter is not None:
                quoted = any(piece.quoted for piece in token.pieces)
                pending.append(("".join(p.text for p in token.pieces), quoted, expects_delimiter == "<<-"))
                expects_delimiter = None
            elif not (token.text.isdigit() and reader.text[reader.at : reader.at + 1] in ("<", ">")):
                yield token


def _documents(reader: _Reader, pending: list[tuple[str, bool, bool]]) -> Iterator[Token]:
    """Yield the here-documents that begin at this line."""
    while pending:
        delimiter, quoted, strips = pending.pop(0)
        line, lines = reader.line, list[str]()
        while True:
            if reader.at >= len(reader.text):
                raise reader.error(f"the text up to {delimiter} has no end; write {delimiter} on a line below it", line)
            end = reader.text.find("\n", reader.at)
            row = reader.take((len(reader.text) if end < 0 else end + 1) - reader.at).rstrip("\r\n")
            row = row.lstrip("\t") if strips else row
            if row == delimiter:
                break
            lines.append(row)
        content = "".join(f"{row}\n" for row in lines)
        pieces = (Piece("text", content, True),) if quoted else pieces_of(content, reader.file, line)
        yield Token("document", content, pieces, line)


def pieces_of(text: str, file: str, line: int) -> tuple[Piece, ...]:
    """Return a text between double quotes as pieces."""
    reader = _Reader(text, file, line)
    return tuple(_quoted(reader, None))


def _word(reader: _Reader) -> Token:
    line, start, pieces = reader.line, reader.at, list[Piece]()
    while reader.at < len(reader.text):
        character = reader.text[reader.at]
        if character in " \t\r\n;&|()<>":
            break
        if character == "'":
            reader.take(1)
            pieces.append(Piece("text", reader.until("'", "a quoted text"), True))
        elif character == '"':
            reader.take(1)
            pieces += [Piece("text", "", True), *_quoted(reader, '"')]
        elif character == "\\":
            reader.take(1)
            escaped = reader.take(1)
            pieces += [] if escaped == "\n" else [Piece("text", escaped, True)]
        elif character in "$`":
            pieces.append(_expansion(reader, False))
        else:
            pieces.append(Piece("text", reader.take(1), False))
    return Token("word", reader.text[start : reader.at], tuple(pieces), line)


def _quoted(reader: _Reader, end: str | None) -> Iterator[Piece]:
    """Yield the pieces up to a closing quote, or to the end of the text without one."""
    line = reader.line
    while reader.at < len(reader.text):
        character = reader.text[reader.at]
        if character == end:
            reader.take(1)
            return
        if character == "\\" and reader.text[reader.at + 1 : reader.at + 2] in ('"', "\\", "$", "`", "\n"):
            reader.take(1)
            escaped = reader.take(1)
            yield Piece("text", "" if escaped == "\n" else escaped, True)
        elif character in "$`":
            yield _expansion(reader, True)
        else:
            yield Piece("text", reader.take(1), True)
    if end is not None:
        raise reader.error("a quoted text has no end; close it", line)


def _expansion(reader: _Reader, quoted: bool) -> Piece:
    """Return what begins with $ or a backquote."""
    if reader.take(1) == "`":
        return Piece("command", reader.until("`", "a command in backquotes"), quoted)
    if reader.ahead("(("):
        reader.take(2)
        text = reader.inside("(", ")", "$((")
        if reader.ahead(")"):
            reader.take(1)
        return Piece("sum", text, quoted)
    if reader.ahead("("):
        reader.take(1)
        return Piece("command", reader.inside("(", ")", "$("), quoted)
    if reader.ahead("{"):
        reader.take(1)
        return Piece("variable", reader.inside("{", "}", "${"), quoted)
    name = _NAME.match(reader.text, reader.at)
    if name is None:
        return Piece("text", "$", quoted)
    return Piece("variable", reader.take(len(name[0])), quoted)
