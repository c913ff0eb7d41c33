"""Measures how plainly the package, the documents and the messages are written: `python -m tests.docs.tone` stores it.

    python -m tests.docs.tone

The figures of `tone.json` may only fall, that of comments only rise (`test_tone.py`).
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.docs import reading
from tests.docs.reading import DOCS, ROOT

STORED = Path(__file__).with_name("tone.json")
OPENERS = re.compile(
    r"(What|Whether|How|Of|Those|Who|Whom|Whose|Where|As|By|Which|That|So|With|From|To|Than|Its|One|Nobody|Nothing)"
)
"""First words of docstrings that state no verb and name no thing."""
PRONOUNS = re.compile(
    r"(its|own|one|those|whole|known|said|kept|told|asked|given|wanted|seen|made|taken|tried|used|shown|held|left|done"
    r"|there|here|both|each|others?|rest|what|which|whose|named|needed|drawn|missing)"
)
"""Names of local variables that name nothing."""
PHRASES = ("so many", "nobody")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those below fields and constants included."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        previous: ast.stmt | None = None
        for position, statement in enumerate(node.body):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                of_field = isinstance(previous, ast.Assign | ast.AnnAssign)
                if isinstance(text, str) and (position == 0 or of_field):
                    yield statement.lineno, text
            previous = statement


def opener(text: str) -> str:
    """Return the first word of a docstring."""
    words = re.findall(r"[\w']+", text)
    return words[0] if words else ""


def opened_badly(path: Path) -> list[str]:
    """Return place and first line of the docstrings of a file that open with one of OPENERS."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for line, text in docstrings(reading.parsed(path))
        if OPENERS.fullmatch(opener(text))
    ]


def pronoun_locals(path: Path) -> list[str]:
    """Return place and name of the local variables of a file that are one of PRONOUNS, one for each assignment."""
    found: set[tuple[int, int, str]] = set()
    for node in ast.walk(reading.parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and PRONOUNS.fullmatch(name.id):
                    found.add((name.lineno, name.col_offset, name.id))
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for line, _, name in sorted(found)]


def phrases(path: Path) -> list[str]:
    """Return place and text of the lines of a file that contain one of PHRASES."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if any(re.search(rf"\b{phrase}\b", line, re.IGNORECASE) for phrase in PHRASES)
    ]


def comment_lines(path: Path) -> int:
    """Return the number of lines of a file that hold a comment and nothing else; headings of sections do not count."""
    with tokenize.open(path) as file:
        tokens = tokenize.generate_tokens(file.readline)
        return sum(
            token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip() and "---" not in token.string
            for token in tokens
        )


def documents() -> list[Path]:
    """Return the documents and the templates of the pages."""
    pages = (ROOT / "simtune").rglob("*.j2")
    return [*(ROOT / name for name in DOCUMENTS), *sorted(DOCS.glob("*.md")), *sorted(pages)]


def measured() -> dict[str, float]:
    """Return the figures that `tone.json` stores."""
    sources = list(reading.sources())
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)
    return {
        "docstrings": sum(len(list(docstrings(reading.parsed(path)))) for path in sources),
        "openers": sum(len(opened_badly(path)) for path in sources),
        "phrases": sum(len(phrases(path)) for path in [*sources, *documents()]),
        "pronoun_locals": sum(len(pronoun_locals(path)) for path in sources),
        "comments_percent": round(100 * sum(map(comment_lines, sources)) / lines, 2),
    }


def main() -> None:
    """Store the figures; with arguments list the places in these files or folders instead."""
    for given in sys.argv[1:]:
        path = Path(given).resolve()
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            for place in [*opened_badly(file), *phrases(file), *pronoun_locals(file)]:
                sys.stdout.write(f"{place}\n")
    if not sys.argv[1:]:
        STORED.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(STORED.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
