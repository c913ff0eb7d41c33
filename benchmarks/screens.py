"""Pictures of pages as people see them: `make screens`, or `python -m benchmarks.screens PAGE... --out FOLDER`.

Without a page it makes every kind of page there is (`benchmarks/pages.py`), with plain and with hostile names. Each
is drawn by Chromium at the width of a desk and of a phone, light and dark, and printed on A4. What is cut or stands out
of its screen or paper, labels over each other, and texts that are too faint (WCAG AA) are named: each is an error. With
`--sheets` the tops of all kinds also go to docs/screens (`benchmarks/sheets.py`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks import sheets
from benchmarks.browser import Browser
from benchmarks.pages import make
from benchmarks.picture import BROWSERS

FLAWS = Path(__file__).with_name("screens.js").read_text("utf-8")
"""What is cut, lies over something else, or is too faint, by the page's own account of itself."""
PAPER_WIDTH = 688
"""Of A4 between its margins of 14 mm, in CSS pixels."""
HEIGHT, HIGHEST = 900, 12_000
"""Of a screen, and of a picture; what is longer becomes several."""
MOST = 8
"""Flaws of a page that are named."""


class View(NamedTuple):
    """A way to look at a page."""

    name: str
    width: int
    dark: bool = False
    paper: bool = False


VIEWS = (
    View("desk-light", 1400),
    View("desk-dark", 1400, dark=True),
    View("phone-light", 420),
    View("phone-dark", 420, dark=True),
    View("paper", PAPER_WIDTH, paper=True),
)


class Looked(NamedTuple):
    """A page, drawn in all ways."""

    wrong: list[str]
    views: list[list[bytes]]
    """Pictures of each view of a screen, from the top down."""


def screens(browser: Browser, address: str, out: Path, name: str) -> Looked:
    """Draw a page in all ways, and say what is wrong with it."""
    wrong: list[str] = []
    views: list[list[bytes]] = []
    for view in VIEWS:
        browser.open(address, view.width, HEIGHT, view.dark, view.paper)
        found = browser.said(f"{FLAWS}; flaws()")
        wrong += [f"{name}, {view.name}: {flaw}" for flaw in found[:MOST]]
        if view.paper:
            browser.open(address, VIEWS[0].width, HEIGHT, dark=False)
            (out / f"{name}.pdf").write_bytes(browser.printed())
        else:
            height = browser.said("document.documentElement.scrollHeight")
            views.append([])
            for number, top in enumerate(range(0, height, HIGHEST), 1):
                part = f"-{number}" if height > HIGHEST else ""
                picture = browser.picture(view.width, top, min(height - top, HIGHEST))
                (out / f"{name}-{view.name}{part}.png").write_bytes(picture)
                views[-1].append(picture)
    return Looked(wrong, views)


def name_of(page: Path) -> str:
    """Of the pictures of a page: the folder of a run, or the page's own."""
    own = page.parent.name if page.stem == "report" else page.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", own).strip("-")[:40]


def main() -> None:
    """Draw the pages that are named, or all kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fragment", default="", help="state of the page, such as #request=3")
    parser.add_argument(
        "--sheets", action="store_true", help="draw the sheets of all kinds of pages into docs/screens anew"
    )
    asked = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.sheets:
        sheets.clear()
    wrong, drawn = [], []
    with Browser(program) as browser:
        pages = dict.fromkeys(asked.pages, "") or make(asked.out / "pages")
        for page, words in pages.items():
            looked = screens(browser, page.resolve().as_uri() + asked.fragment, asked.out, name_of(page))
            wrong += looked.wrong
            if asked.sheets:
                drawn.append(sheets.draw(browser, name_of(page), words, looked.views))
            sys.stdout.write(f"{page}\n")
    if asked.sheets:
        wrong += sheets.list_all(drawn)
    if wrong:
        sys.exit("wrong:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
