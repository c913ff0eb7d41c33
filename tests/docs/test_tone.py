"""How plainly the package is written may only improve: `tests/docs/tone.py` measures it."""

from __future__ import annotations

import ast
import json

from tests.docs import tone

STORED: dict[str, float] = json.loads(tone.STORED.read_text(encoding="utf-8"))


def test_the_tone_does_not_get_worse() -> None:
    now = tone.measured()
    worse = {
        name: (now[name], STORED[name]) for name in ("openers", "phrases", "pronoun_locals") if now[name] > STORED[name]
    }
    assert not worse, f"measured, stored: {worse}; `python -m tests.docs.tone FILE` lists the places"
    assert now["comments_percent"] >= STORED["comments_percent"] - 0.05


def test_what_is_measured() -> None:
    tree = ast.parse('"""Of it."""\nx = 1\n"""Whether."""\ndef f():\n    """Return it."""\n    "no docstring"\n')
    assert [text for _, text in tone.docstrings(tree)] == ["Of it.", "Whether.", "Return it."]
    assert [bool(tone.OPENERS.fullmatch(tone.opener(text))) for _, text in tone.docstrings(tree)] == [True, True, False]
