"""Strict YAML: what is written is what is read, and every value remembers its line and column.

PyYAML follows YAML 1.1, where `1e9` is a string, `NO` is false, `12:30:00` is 45000 and a repeated key silently wins.
Here numbers and booleans are those of YAML 1.2's core schema, nothing is a date, and a repeated key is an error. JSON
is YAML; a file that is JSON after its comments is read by the parser of JSON, which is a hundred times faster.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from simtune.errors import Problem, SpecError
from simtune.specs.input_files import DEEPEST, LARGEST_INT, JsonError, parse_json, shortened

_INT = re.compile(r"[-+]?[0-9]+$|0x[0-9a-fA-F]+$|0o[0-7]+$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")

_COMMENTS = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*")
_WIDTH = 110
"""Columns of the files that are written."""

_BREAKS = re.compile(r"[\x85\u2028\u2029]")

_MOST_REPEATED = 100_000
"""Most values that aliases may stand for, all together: a few lines can stand for more values than fit in memory."""

# The parser of libyaml is ten times faster; PyYAML is also built without it.
_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BaseLoader):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own shape)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def descend_resolver(self, parent: yaml.Node | None, index: Any) -> None:
        """Called before each node is composed: libyaml's composer recurses in C and would overflow the stack."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise yaml.YAMLError(f"nested deeper than {DEEPEST} levels")

    def ascend_resolver(self) -> None:
        """Called after each node."""
        self._depth -= 1


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""])


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    number = int(node.value, 0) if node.value[:2] in ("0x", "0o") else int(node.value)
    if abs(number) > LARGEST_INT:
        message = f"{shortened(node.value)} is larger than any number of 64 bits"
        raise yaml.constructor.ConstructorError(problem=message, problem_mark=node.start_mark)
    return number


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


# Text, numbers, switches, lists and mappings are all there is: no dates, sets or bytes by a tag.
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in _BaseLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in ("null", "bool", "str", "seq", "map")
}
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: plain Python `data`, and the node tree with the place of each value."""

    file: str
    data: Any
    node: yaml.Node | None
    overridden: tuple[tuple[str, ...], ...] = ()
    """Keys whose values were set from outside the file: what is wrong with them is not the file's fault."""
    json_text: str | None = None
    """Text that was parsed as JSON, without nodes: they are composed only for a message that needs a place."""

    def position(self, loc: Sequence[str | int]) -> tuple[int | None, int | None]:
        """Return line and column (from 1) of the deepest part of `loc` that is in the file.

        Parts that are not in the file are skipped: pydantic puts the tag of a chosen variant into its locations, and a
        missing key has no place of its own but that of its parent.
        """
        root = self.node if self.json_text is None else _composed(self.json_text)
        if root is None:
            return None, None
        mark, node = root.start_mark, root
        for part in loc:
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if key.value == str(part):
                        mark, node = key.start_mark, value
                        break
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                mark = node.start_mark
        return mark.line + 1, mark.column + 1


def _composed(text: str) -> yaml.Node | None:
    """Return the nodes of a JSON text, None if libyaml refuses it, as it does lines of some thousand characters."""
    try:
        node: yaml.Node | None = _Loader(text).get_single_node()
    except yaml.YAMLError:
        return None
    return node


def _duplicates(node: yaml.Node, file: str, prefix: str = "") -> list[Problem]:
    problems: list[Problem] = []
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            path = f"{prefix}{name}"
            if name in first:
                mark = key.start_mark
                message = f"this key already stands at line {first[name]}; keep one of the two"
                problems.append(Problem(file, message, path, mark.line + 1, mark.column + 1))
            first.setdefault(name, key.start_mark.line + 1)
            problems += _duplicates(value, file, path + ".")
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            problems += _duplicates(item, file, f"{prefix}{i}.")
    return problems


class _Expanded:
    """Count of values and depth of a document once its aliases are written out. Raises SpecError for too much."""

    def __init__(self, file: str, most: int) -> None:
        self._file, self._most = file, most
        self._known: dict[int, tuple[int, int] | None] = {}

    def measure(self, node: yaml.Node) -> tuple[int, int]:
        """Return values and levels of a node."""
        if isinstance(node, yaml.ScalarNode):
            return 1, 0
        if id(node) not in self._known:
            # None while the node is measured: meeting it again inside itself is an alias that contains itself.
            self._known[id(node)] = None
            pairs = isinstance(node, yaml.MappingNode)
            inner = [self.measure(x) for x in ([x for pair in node.value for x in pair] if pairs else node.value)]
            self._known[id(node)] = 1 + sum(n for n, _ in inner), 1 + max((depth for _, depth in inner), default=0)
        size = self._known[id(node)]
        if size is None:
            raise self._refusal(node, "an alias contains itself")
        if size[0] > self._most:
            raise self._refusal(node, f"its aliases stand for more than {_MOST_REPEATED:,} values; write them out")
        if size[1] > DEEPEST:
            raise self._refusal(node, f"nested deeper than {DEEPEST} levels")
        return size

    def _refusal(self, node: yaml.Node, message: str) -> SpecError:
        return SpecError(Problem(self._file, message, "", node.start_mark.line + 1, node.start_mark.column + 1))


_OPENS = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
_CLOSES = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)


def _too_deep(text: str) -> yaml.Mark | None:
    """Return the mark at which lists and mappings exceed `DEEPEST` levels, None if they do not.

    Releases of PyYAML and libyaml differ in the depth they accept and in how they report it. The scanner written in
    Python has no limit and does not recurse, so that its tokens give one answer under every release.
    """
    depth = 0
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            depth += isinstance(token, _OPENS) - isinstance(token, _CLOSES)
            if depth > DEEPEST:
                mark: yaml.Mark = token.start_mark
                return mark
    except yaml.YAMLError:
        # The text up to the syntax error is not nested too deeply; the caller reports that error.
        pass
    return None


def parse(text: str, file: str) -> Document:
    """Parse YAML or JSON text. Raises SpecError for a syntax error, a repeated key, and aliases without end."""
    document = _parsed_as_json(text, file)
    if document is not None:
        return document
    try:
        return _parsed(text, file)
    # ValueError: numbers of thousands of digits.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        deep = _too_deep(text)
        if deep is not None:
            message = f"not valid YAML: nested deeper than {DEEPEST} levels"
            raise SpecError(Problem(file, message, "", deep.line + 1, deep.column + 1)) from None
        mark = getattr(error, "problem_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        problem = getattr(error, "problem", None) or error
        raise SpecError(Problem(file, f"not valid YAML: {problem}", "", line, column)) from None


def _parsed_as_json(text: str, file: str) -> Document | None:
    """Return the document of a text that is JSON after its comments. None if it is not strict JSON, and if YAML might
    read it otherwise: characters that YAML excludes, escaped surrogates.
    """
    comments = _COMMENTS.match(text)
    begin = comments.end() if comments else 0
    if not text.startswith("{", begin) or "\\u" in text:
        return None
    if not text.translate({ord(space): None for space in "\n\r\t"}).isprintable():
        return None
    try:
        return Document(file, parse_json(text[begin:]), None, json_text=text)
    except JsonError:
        return None


def _parsed(text: str, file: str) -> Document:
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return Document(file, None, None)
    if "*" in text:
        _Expanded(file, _MOST_REPEATED + len(text)).measure(node)
    problems = _duplicates(node, file)
    if problems:
        raise SpecError(problems)
    return Document(file, loader.construct_document(node), node)


def scalar(text: str) -> Any:
    """The value of a YAML scalar or flow collection, as in `--set key=value`."""
    return parse(text, "--set").data


def dump(data: Any, comment: str = "") -> str:
    """YAML text of plain data: keys in the order given, lists of scalars inline, floats read back exactly."""
    return _head(comment) + yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH)


def dump_json(data: Any, comment: str = "") -> str:
    """JSON text of plain data after a comment, for large files: parsed a hundred times faster than block style.

    What fits on a line stays on it; lists of numbers fill their lines. Raises ValueError for an infinite number.
    """
    return _head(comment) + "\n".join(_json_lines(data, "", "")) + "\n"


def _head(comment: str) -> str:
    return "".join(f"# {line}\n" for line in comment.splitlines())


def _json_lines(value: Any, indent: str, key: str) -> Iterator[str]:
    """Yield the lines of a value, the first after `key`."""
    flat = indent + key + json.dumps(value, ensure_ascii=False, allow_nan=False)
    deeper = indent + "  "
    if len(flat) <= _WIDTH or not isinstance(value, (dict, list)):
        yield flat
    elif isinstance(value, list) and not any(isinstance(item, (dict, list, str)) for item in value):
        yield indent + key + "["
        numbers = json.dumps(value, allow_nan=False)[1:-1]
        yield textwrap.fill(
            numbers, _WIDTH, initial_indent=deeper, subsequent_indent=deeper,
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip
        yield indent + "]"
    else:
        keyed = isinstance(value, dict)
        items: Iterable[tuple[str, Any]] = value.items() if isinstance(value, dict) else (("", item) for item in value)
        inner = [(f"{json.dumps(name)}: " if keyed else "", item) for name, item in items]
        yield indent + key + ("{" if keyed else "[")
        for number, (name, item) in enumerate(inner, 1):
            *lines, last = _json_lines(item, deeper, name)
            yield from lines
            yield last + ("," if number < len(inner) else "")
        yield indent + ("}" if keyed else "]")


class _Dumper(yaml.SafeDumper):
    # Quote what any reader would take for something else than text, those of YAML 1.1 included.
    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own shape)
        first: [
            *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
            *_Loader.yaml_implicit_resolvers.get(first, []),
        ]
        for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_float(dumper: _Dumper, value: float) -> yaml.ScalarNode:
    text = repr(value).replace("inf", ".inf").replace("nan", ".nan")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_str(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    # Only double quotes keep Unicode's line breaks.
    quoted = '"' if _BREAKS.search(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=quoted)


def _represent_list(dumper: _Dumper, value: list[Any]) -> yaml.SequenceNode:
    scalars = not any(isinstance(item, (list, dict)) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=scalars)


_Dumper.add_representer(float, _represent_float)
_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(list, _represent_list)
