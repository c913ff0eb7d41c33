"""Draws docs/report.png from the report of the quickstart with Chromium: `make picture`.

The picture carries a hash of all that the search went by, which tests/docs compares with the files of today: a study, a
profile or a load that changes asks for a new picture.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from simtune.runs.reading import read_certificate

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "report.png"
STUDY = ROOT / "examples" / "quickstart" / "study.yaml"
KEYWORD = b"simtune inputs"
WIDTH = 1140
SIGNATURE = b"\x89PNG\r\n\x1a\n"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SHOWN = """<style>
main section, main ~ footer { display: none } section:has(#pareto), section:has(#sweep) { display: block }
</style><script>
addEventListener("load", () => document.documentElement.dataset.height = document.querySelector("main").getBoundingClientRect().bottom)
</script></body>"""  # noqa: E501


def inputs_hash(inputs: Mapping[str, str]) -> str:
    """Of the hashes of all inputs by name, as a certificate names them."""
    return hashlib.sha256(json.dumps(dict(sorted(inputs.items()))).encode()).hexdigest()


def chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(type, content) of each chunk of a PNG (ISO/IEC 15948, 5.3). Raises ValueError where it is none."""
    if not png.startswith(SIGNATURE):
        raise ValueError("not a PNG")
    at = len(SIGNATURE)
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        at += size + 12


def marked(png: bytes, text: str) -> bytes:
    """The same picture with a text chunk after its header."""
    content = KEYWORD + b"\0" + text.encode("latin-1")
    known = [*chunks(png)]
    parts = [known[0], (b"tEXt", content), *known[1:]]
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def mark(png: bytes) -> str | None:
    """What `marked` wrote into a picture."""
    texts = [data.partition(b"\0") for kind, data in chunks(png) if kind == b"tEXt"]
    return next((text.decode("latin-1") for keyword, _, text in texts if keyword == KEYWORD), None)


def browse(browser: str, page: Path, scheme: int, *options: str) -> str:
    """What a headless browser says of a page, in a colour scheme: 0 is dark, 1 light."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--virtual-time-budget=8000", f"--blink-settings=preferredColorScheme={scheme}", *options]
    command.append(page.resolve().as_uri())
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def draw(run: Path, browser: str) -> bytes:
    """The head of a run's report, its Pareto front and its goodput, as a PNG."""
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "page.png"
        page.write_text((run / "report.html").read_text("utf-8").replace("</body>", SHOWN), "utf-8")
        found = re.search(
            r'data-height="([\d.]+)"', browse(browser, page, 1, f"--window-size={WIDTH},2000", "--dump-dom")
        )
        if found is None:
            raise RuntimeError(f"{browser} did not say how high the page is")
        height = round(float(found[1])) + 24
        browse(browser, page, 1, f"--window-size={WIDTH},{height}", f"--screenshot={picture}")
        return picture.read_bytes()


def main() -> None:
    """Draw the run that is named."""
    run = Path(sys.argv[1])
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    inputs = read_certificate(run / "certificate.json").inputs
    PICTURE.write_bytes(marked(draw(run, browser), inputs_hash(inputs)))
    sys.stdout.write(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
