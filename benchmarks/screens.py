"""Pictures of report pages as people see them: `make screens`, or `python -m benchmarks.screens PAGE... --out FOLDER`.

Each page is drawn by Chromium at the width of a desk and of a phone, light and dark, and printed on A4. What is cut or
stands out of its screen, labels over each other, and texts that are too faint (WCAG AA) are named: each is an error.
"""

from __future__ import annotations

import argparse
import html
import re
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.picture import BROWSERS, browse

WIDTHS = {"desk": 1400, "phone": 420}
LEAST_WIDTH = 500
"""Of a window of Chromium; narrower pages are looked at in a frame."""
HIGHEST = 15_000
SCHEMES = {"light": 1, "dark": 0}
FRAME = """<!DOCTYPE html><html><body style="margin:0;background:#888">
<iframe src="{page}" style="border:0;width:{width}px;height:{height}px;display:block"></iframe></body></html>"""
FLAWS = Path(__file__).with_name("screens.js")
"""What is cut, lies over something else, or is too faint, by the page's own account of itself."""
MEASURE = """<script>
{flaws}
addEventListener("load", () => setTimeout(() => {{
  const seen = document.documentElement.scrollHeight + "|" + flaws().slice(0, {most}).join(" ; ");
  parent.postMessage(seen, "*");
  document.documentElement.dataset.seen = seen;
}}, 2500));
</script></body>"""
MOST = 8
"""Flaws of a page that are named."""


def _measured(browser: str, page: Path, width: int, scheme: int) -> tuple[int, str]:
    """(height of a page at a width, what is wrong with it)."""
    measure = MEASURE.format(flaws=FLAWS.read_text("utf-8"), most=MOST)
    with tempfile.TemporaryDirectory() as folder:
        copy, frame = Path(folder) / "page.html", Path(folder) / "frame.html"
        copy.write_text(page.read_text("utf-8").replace("</body>", measure), "utf-8")
        listener = "<script>onmessage = e => document.documentElement.dataset.seen = e.data</script></body>"
        framed = FRAME.format(page="page.html", width=width, height=900).replace("</body>", listener)
        frame.write_text(framed, "utf-8")
        size = f"--window-size={max(width, LEAST_WIDTH)},900"
        seen = re.search(r'data-seen="(\d+)\|([^"]*)"', browse(browser, frame, scheme, size, "--dump-dom"))
    if seen is None:
        raise RuntimeError(f"{browser} did not say how high {page} is")
    return min(int(seen[1]) + 20, HIGHEST), html.unescape(seen[2])


def screens(browser: str, page: Path, out: Path, name: str, fragment: str = "") -> list[str]:
    """Draw a page in all ways; what is wrong with it."""
    cut = []
    for kind, width in WIDTHS.items():
        for scheme, number in SCHEMES.items():
            height, wrong = _measured(browser, page, width, number)
            if wrong:
                cut.append(f"{name} at {width} px, {scheme}: {wrong}")
            with tempfile.TemporaryDirectory() as folder:
                frame = Path(folder) / "frame.html"
                shown = FRAME.format(page=page.resolve().as_uri() + fragment, width=width, height=height)
                frame.write_text(shown, "utf-8")
                picture = out / f"{name}-{kind}-{scheme}.png"
                size = f"--window-size={max(width, LEAST_WIDTH)},{height}"
                browse(browser, frame, number, size, f"--screenshot={picture}")
    browse(browser, page, 1, "--no-pdf-header-footer", f"--print-to-pdf={out / f'{name}.pdf'}")
    return cut


def main() -> None:
    """Draw the pages that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fragment", default="", help="state of the page, such as #request=3")
    asked = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    asked.out.mkdir(parents=True, exist_ok=True)
    cut = []
    for page in asked.pages:
        name = page.parent.name if page.stem in ("report", "index") else page.stem
        cut += screens(browser, page, asked.out, name, asked.fragment)
        sys.stdout.write(f"{page}\n")
    if cut:
        sys.exit("wrong:\n" + "\n".join(cut))


if __name__ == "__main__":
    main()
