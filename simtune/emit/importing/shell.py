"""Commands of a shell script, as far as its text determines them: nothing is run.

Variables, arrays, defaults, sums, functions, here-documents, `if` and `case` over known values, and `for` over words
are followed. What depends on anything else stays open: `${NAME}` stands in the words, and a command below a condition
that is not known is marked.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simtune.emit.importing.shell_values import OPEN, Values
from simtune.emit.importing.shell_words import REDIRECTIONS, Token, tokens
from simtune.errors import Problem, SpecError

MOST_COMMANDS = 20_000
"""Most commands that are followed: loops and functions multiply them."""
_DEEPEST = 20
_LINES_A_STEP = 50
"""Lines of a block that count as a command: loops look for the end of a block again and again."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_CLOSES = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}"}
_COMPARED = {
    "-eq": int.__eq__, "-ne": int.__ne__, "-gt": int.__gt__, "-ge": int.__ge__, "-lt": int.__lt__, "-le": int.__le__,
}  # fmt: skip


class Command(NamedTuple):
    """Command as it would be called."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    line: int | None
    branch: str
    """Label of the innermost `case` around it, empty without one."""
    conditional: bool
    """True if it depends on a condition that is not known."""


class Script(NamedTuple):
    """Commands of a script, and the files that it writes from its own text."""

    commands: tuple[Command, ...]
    files: Mapping[str, str]


class _Line(NamedTuple):
    """Simple command before its words are known, and the operator behind it."""

    tokens: tuple[Token, ...]
    end: str
    line: int

    @property
    def keyword(self) -> str:
        """The first word as it is written."""
        return self.tokens[0].text if self.tokens else ""

    def without_keyword(self) -> _Line:
        """Return the command behind a keyword."""
        return _Line(self.tokens[1:], self.end, self.line)


def read_script(text: str, file: str, variables: Mapping[str, str], first_line: int = 1) -> Script:
    """Return what a script starts, with some variables set. Raises SpecError for text that is not valid shell."""
    reading = _Reading(file, Values(file, dict(variables)), frozenset(variables))
    reading.run(_lines(text, file, first_line))
    return Script(tuple(reading.commands), reading.files)


def _ended(words: Sequence[Token], end: Token) -> list[_Line]:
    """Return the command that a token ends, and the token if it is a command of its own."""
    lines = [_Line(tuple(words), end.text, words[0].line)] if words else []
    return [*lines, _Line((), end.text, end.line)] if end.text in ("(", ")", ";;") else lines


def _lines(text: str, file: str, first_line: int) -> list[_Line]:
    """Return the simple commands of a text."""
    lines: list[_Line] = []
    words: list[Token] = []
    depth = 0
    for token in tokens(text, file, first_line):
        array = token.text == "(" and words and words[-1].text.endswith("=") and not depth
        if array or depth:
            depth += (token.text == "(") - (token.text == ")") if token.kind == "operator" else 0
            words += [token] if token.kind != "line" else []
        elif token.kind in ("word", "document") or token.text in REDIRECTIONS:
            if token.kind == "document" and lines and not words:
                # The document follows the end of the line that it belongs to.
                lines[-1] = _Line((*lines[-1].tokens, token), lines[-1].end, lines[-1].line)
            else:
                words.append(token)
        else:
            lines += _ended(words, token)
            words = []
    return [*lines, _Line(tuple(words), "\n", words[0].line)] if words else lines


@dataclass
class _Reading:
    """State of a script while it is followed."""

    file: str
    values: Values
    fixed: frozenset[str]
    """Variables that the user sets, whatever the script sets."""
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    functions: dict[str, list[_Line]] = field(default_factory=dict)
    branch: str = ""
    conditional: bool = False
    followed: int = 0
    depth: int = 0
    ended: bool = False

    def run(self, lines: Sequence[_Line]) -> None:
        """Follow commands in their order. Raises SpecError for too many of them."""
        at = 0
        status: bool | None = True
        joined = ""
        while at < len(lines) and not self.ended:
            line = lines[at]
            self.followed += 1
            if self.followed > MOST_COMMANDS or self.depth > _DEEPEST:
                message = f"more than {MOST_COMMANDS:,} commands to follow, or blocks nested deeper than {_DEEPEST}"
                raise SpecError(Problem(self.file, f"{message}; cut it to what starts the servers", "", line.line))
            runs = _runs(joined, status)
            if line.keyword in _CLOSES:
                end = _end(lines, at)
                self.followed += (end - at) // _LINES_A_STEP
                if runs is not False:
                    self._block(line.keyword, lines[at:end], runs is None)
                joined, at = lines[end].end, end + 1
            elif line.end == "(" and lines[at + 2 : at + 3] and lines[at + 2].end == ")" and len(line.tokens) == 1:
                joined, at = "", self._function(lines, at)
            else:
                status = status if runs is False else self._command(line, runs is None)
                joined, at = line.end, at + 1

    def _function(self, lines: Sequence[_Line], at: int) -> int:
        """Keep the body of `name() {`; return the place behind it."""
        body = at + 3
        end = _end(lines, body) if lines[body : body + 1] and lines[body].keyword == "{" else body
        inner = lines[body:end]
        self.functions[lines[at].keyword] = [inner[0].without_keyword(), *inner[1:]] if inner else []
        return end + 1

    def _block(self, keyword: str, lines: Sequence[_Line], conditional: bool) -> None:
        before, self.conditional = self.conditional, self.conditional or conditional
        self.depth += 1
        self._inside(keyword, lines)
        self.depth -= 1
        self.conditional = before

    def _inside(self, keyword: str, lines: Sequence[_Line]) -> None:
        match keyword:
            case "if":
                self._if(lines)
            case "for":
                self._for(lines)
            case "case":
                self._case(lines)
            case "{":
                self.run([lines[0].without_keyword(), *lines[1:]])
            case _:
                self._under(True, _behind(lines[1:], "do"))

    def _under(self, conditional: bool, lines: Sequence[_Line]) -> None:
        """Follow commands that may depend on a condition that is not known."""
        before, self.conditional = self.conditional, self.conditional or conditional
        self.run(lines)
        self.conditional = before
        self.ended = self.ended and not conditional

    def _if(self, lines: Sequence[_Line]) -> None:
        conditional = False
        for condition, body in _branches(lines):
            holds = True if condition is None else self._holds(condition)
            if holds is not False:
                self._under(conditional or holds is None, body)
            if holds:
                return
            conditional = conditional or holds is None

    def _for(self, lines: Sequence[_Line]) -> None:
        words = self._words(lines[0].tokens[1:])
        body = _behind(lines[1:], "do")
        if len(words) < 2 or words[1] != "in" or any(OPEN.search(word) for word in words[2:]):
            self._under(True, body)
            return
        for word in words[2:]:
            self.values.variables[words[0]] = word
            self.run(body)

    def _case(self, lines: Sequence[_Line]) -> None:
        subject = " ".join(self._words(lines[0].tokens[1:2]))
        opened = OPEN.search(subject)
        before = self.branch
        for labels, body in _labels(lines):
            names = [name for token in labels for name in self.values.words(token)]
            if opened or any(fnmatch.fnmatchcase(subject, name) for name in names):
                self.branch = before if names == ["*"] else "|".join(names)
                self._under(bool(opened) and names == ["*"], body)
                if not opened:
                    break
        self.branch = before

    def _holds(self, condition: Sequence[_Line]) -> bool | None:
        """Return the result of a condition, None if it is not known."""
        status: bool | None = True
        joined = ""
        for line in condition:
            runs = _runs(joined, status)
            if runs is None:
                status = None
            elif runs:
                status = self._test(self._words(line.tokens))
            joined = line.end
        return status

    def _words(self, line: Sequence[Token]) -> list[str]:
        return [word for token in line if token.kind == "word" for word in self.values.words(token)]

    def _test(self, words: list[str]) -> bool | None:
        """Return the result of a test of known words, None if it is not known or no test."""
        negated = words[:1] == ["!"]
        words = words[negated:]
        if not words or any(OPEN.search(word) for word in words):
            return None
        if words[0] not in ("[", "[[", "test") and words[-1] not in ("]", "]]"):
            return None
        words = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
        if words[:1] == ["!"]:
            result = self._test(words[1:])
            return None if result is None else not result
        result = _compared(words)
        return result if not negated or result is None else not result

    def _command(self, line: _Line, conditional: bool) -> bool | None:
        """Follow a simple command; return the result that decides about what && or || joins to it."""
        if line.keyword in ("[", "[[", "test", "!"):
            return self._test(self._words(line.tokens))
        words, environment = self._assigned(line.tokens, conditional or self.conditional)
        if not words:
            return True
        self._keep_document(line.tokens, words)
        if words[0] in self.functions:
            self._call(words)
        elif words[0] in ("exit", "return") and not (conditional or self.conditional):
            self.ended = True
        elif words[0] not in (":", "echo", "printf"):
            self.commands.append(
                Command(tuple(words), environment, line.line, self.branch, conditional or self.conditional)
            )
        return True

    def _call(self, words: list[str]) -> None:
        outer = {name: value for name, value in self.values.variables.items() if name.isdigit() or name == "@"}
        inner = {str(at): word for at, word in enumerate(words[1:], 1)}
        self.values.variables.update({**inner, "@": tuple(words[1:])})
        self.depth += 1
        self.run(self.functions[words[0]])
        self.depth -= 1
        self.ended = False
        for name in inner:
            del self.values.variables[name]
        self.values.variables.update(outer)

    @staticmethod
    def _end_of_array(line: Sequence[Token], at: int) -> int:
        """Return the place of the bracket that ends an array, or the end of the line."""
        return next((i for i in range(at, len(line)) if line[i].text == ")"), len(line))

    def _assigned(self, line: Sequence[Token], conditional: bool) -> tuple[list[str], dict[str, str]]:
        """Set what is assigned; return the words behind it, and the environment that they are called with."""
        words: list[str] = []
        environment: dict[str, str] = {}
        at, declares = 0, False
        while at < len(line):
            token = line[at]
            if not words and (token.text in _DECLARES or (declares and token.text.startswith("-"))):
                at, declares = at + 1, True
                continue
            assignment = None if words else _assignment(token)
            if _redirects(token):
                at += 2
                continue
            if assignment is not None and [following.text for following in line[at + 1 : at + 2]] == ["("]:
                end = self._end_of_array(line, at)
                self._set(assignment, tuple(self._words(line[at + 2 : end])), conditional)
                at = end
            elif assignment is not None:
                value = " ".join(self._value(token, assignment.end()))
                environment[assignment[1]] = value
            elif token.kind == "word":
                words += self.values.words(token)
            at += 1
        if not words:
            self._set_all(line, environment, conditional)
        return words, environment

    def _set_all(self, line: Sequence[Token], environment: Mapping[str, str], conditional: bool) -> None:
        """Set the variables of a line without a command, which are no environment of one."""
        for token in line:
            assignment = _ASSIGNMENT.match(token.text)
            if assignment is not None and assignment[1] in environment:
                self._set(assignment, environment[assignment[1]], conditional)

    def _value(self, token: Token, start: int) -> list[str]:
        """Return the words behind the = of an assignment, in which blanks do not separate."""
        pieces = [piece._replace(quoted=True) for piece in token.pieces]
        (text,) = self.values.words(token._replace(pieces=tuple(pieces)))[:1] or ("",)
        return [text[start:]]

    def _set(self, assignment: re.Match[str], value: str | tuple[str, ...], conditional: bool) -> None:
        name, adds = assignment[1], bool(assignment[2])
        variables = self.values.variables
        before = variables.get(name, () if isinstance(value, tuple) else "")
        if name in self.fixed:
            return
        if conditional:
            # Which of the values it has is not known.
            variables[name] = f"${{{name}}}"
        elif adds and isinstance(before, tuple):
            variables[name] = (*before, *(value if isinstance(value, tuple) else (value,)))
        else:
            variables[name] = f"{before}{value}" if adds and isinstance(value, str) else value

    def _keep_document(self, line: Sequence[Token], words: list[str]) -> None:
        """Keep the text that `cat > FILE << END` or `tee FILE << END` writes."""
        document = next((token for token in line if token.kind == "document"), None)
        at = next((i for i, token in enumerate(line) if token.text in (">", ">>")), None)
        if document is None or words[0] not in ("cat", "tee"):
            return
        target = words[1:2] if at is None else self._words(line[at + 1 : at + 2])
        if target:
            appended = self.files.get(target[0], "") if at is not None and line[at].text == ">>" else ""
            self.files[target[0]] = appended + self.values.text(document.pieces, document.line)


def _runs(joined: str, status: bool | None) -> bool | None:
    """Return whether a command behind an operator is run, by the status before it; None if that is not known."""
    if joined == "&&":
        return status
    if joined == "||":
        return None if status is None else not status
    return True


def _end(lines: Sequence[_Line], at: int) -> int:
    """Return the place of the word that closes a block; the last place if none does."""
    closing = [_CLOSES[lines[at].keyword]]
    for place in range(at + 1, len(lines)):
        keyword = lines[place].keyword
        if keyword in ("then", "do", "else") and len(lines[place].tokens) > 1:
            keyword = lines[place].tokens[1].text
        if keyword in _CLOSES:
            closing.append(_CLOSES[keyword])
        elif keyword == closing[-1]:
            closing.pop()
            if not closing:
                return place
    return len(lines) - 1


def _behind(lines: Sequence[_Line], keyword: str) -> list[_Line]:
    """Return the commands behind a keyword."""
    at = next((i for i, line in enumerate(lines) if line.keyword == keyword), len(lines))
    return [lines[at].without_keyword(), *lines[at + 1 :]] if at < len(lines) else []


def _branches(lines: Sequence[_Line]) -> list[tuple[list[_Line] | None, list[_Line]]]:
    """Return condition and body of each branch of an `if`; the condition of `else` is None."""
    branches: list[tuple[list[_Line] | None, list[_Line]]] = []
    current: list[_Line] = []
    depth = 0
    for line in lines:
        keyword = line.keyword
        nested = len(line.tokens) > 1 and keyword in ("then", "do", "else") and line.tokens[1].text in _CLOSES
        if depth == 1 and keyword in ("if", "elif", "then", "else", "fi"):
            if keyword == "elif":
                current = [line.without_keyword()]
                branches.append((current, []))
            elif keyword == "then":
                current = branches[-1][1]
                current.append(line.without_keyword())
            elif keyword == "else":
                branches.append((None, []))
                current = branches[-1][1]
                current.append(line.without_keyword())
            elif keyword == "if":
                current.append(line)
        elif depth == 0:
            current = [line.without_keyword()]
            branches.append((current, []))
        else:
            current.append(line)
        depth += (keyword in _CLOSES) + nested - (keyword in _CLOSES.values())
    return branches


def _labels(lines: Sequence[_Line]) -> list[tuple[list[Token], list[_Line]]]:
    """Return labels and commands of each branch of a `case`."""
    branches: list[tuple[list[Token], list[_Line]]] = []
    labels: list[Token] = list(lines[0].tokens[3:])
    opens = True
    for line in lines if labels else lines[1:]:
        if opens and line.keyword != "esac":
            labels = [*labels, *(line.tokens if line is not lines[0] else ())]
            if line.end == ")" or (not line.tokens and line.end == ")"):
                branches.append((labels, []))
                labels, opens = [], False
        elif line.end == ";;":
            if line.tokens:
                branches[-1][1].append(line)
            opens = True
        elif not opens:
            branches[-1][1].append(line)
    return branches


def _compared(words: Sequence[str]) -> bool | None:
    """Return the result of a comparison without its brackets, None if it is not known."""
    match words:
        case ["-n", text] | [text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, sign, right] if sign in _COMPARED and left.isdecimal() and right.isdecimal():
            return bool(_COMPARED[sign](int(left), int(right)))
    return None


def _assignment(token: Token) -> re.Match[str] | None:
    return _ASSIGNMENT.match(token.text) if token.kind == "word" else None


def _redirects(token: Token) -> bool:
    return token.kind == "operator" and token.text in REDIRECTIONS
