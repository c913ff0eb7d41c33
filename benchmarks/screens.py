"""Pictures of report pages as people see them: `make screens`, or `python -m benchmarks.screens PAGE... --out FOLDER`.

Each page is drawn by Chromium at the width of a desk and of a phone, light and dark, and printed on A4. What stands out
of its screen on a phone is named: a table or a figure that is cut is an error.
"""

from __future__ import annotations

import argparse
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
MEASURE = """<script>
addEventListener("load", () => setTimeout(() => {
  const wide = document.documentElement.clientWidth, out = [];
  for (const e of document.querySelectorAll("body *")) {
    const box = e.getBoundingClientRect();
    const hidden = e.closest("svg, canvas, script, style, .js-plotly-plot, details:not([open])");
    if (!hidden && box.width && box.right > wide + 1) out.push(e.tagName + "." + e.className);
  }
  parent.postMessage([document.documentElement.scrollHeight, out.slice(0, 5).join(" ")], "*");
  document.documentElement.dataset.seen = document.documentElement.scrollHeight + "|" + out.slice(0, 5).join(" ");
}, 2500));
</script></body>"""


def _measured(browser: str, page: Path, width: int) -> tuple[int, str]:
    """(height of a page at a width, what of it stands out to the right)."""
    with tempfile.TemporaryDirectory() as folder:
        copy, frame = Path(folder) / "page.html", Path(folder) / "frame.html"
        copy.write_text(page.read_text("utf-8").replace("</body>", MEASURE), "utf-8")
        listener = "<script>onmessage = e => document.documentElement.dataset.seen = e.data.join('|')</script></body>"
        framed = FRAME.format(page="page.html", width=width, height=900).replace("</body>", listener)
        frame.write_text(framed, "utf-8")
        seen = re.search(
            r'data-seen="(\d+)\|([^"]*)"', browse(browser, frame, 1, f"--window-size={max(width, LEAST_WIDTH)},900",
                                                 "--dump-dom")
        )  # fmt: skip
    if seen is None:
        raise RuntimeError(f"{browser} did not say how high {page} is")
    return min(int(seen[1]) + 20, HIGHEST), seen[2]


def screens(browser: str, page: Path, out: Path, name: str, fragment: str = "") -> list[str]:
    """Draw a page in all ways; what is cut."""
    cut = []
    for kind, width in WIDTHS.items():
        height, beyond = _measured(browser, page, width)
        if beyond:
            cut.append(f"{name} at {width} px: {beyond}")
        with tempfile.TemporaryDirectory() as folder:
            frame = Path(folder) / "frame.html"
            frame.write_text(FRAME.format(page=page.resolve().as_uri() + fragment, width=width, height=height), "utf-8")
            for scheme, number in SCHEMES.items():
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
        sys.exit("cut:\n" + "\n".join(cut))


if __name__ == "__main__":
    main()
