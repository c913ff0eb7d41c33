"""Draws the pictures of README.md with Chromium, one of each of its three commands: `make picture`.

A picture carries a hash of all that its page was made of, which tests/docs compares with the files of today: a study, a
profile or a load that changes asks for a new one.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from simtune.api import load_question
from simtune.report.hardware_page import render as render_hardware
from simtune.specs.base import Spec
from simtune.specs.catalog import load_hardware, load_model, load_workload
from simtune.tuner.certificate.search_certificate import inputs_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
STUDY = ROOT / "examples" / "quickstart" / "study.yaml"
PROFILE = "cpu-x86-1thread"
"""What `simtune profile` made."""
COMPARED = {"h100": ("h100-sxm",), "2-x-l40s": ("l40s", "--set", "plan.pools.0.parallelism.tp=2")}
MODEL, LOAD, RATE_RPS = "llama-3.1-8b", "chat", 4
KEYWORD = b"simtune inputs"
WIDTH = 1140
SIGNATURE = b"\x89PNG\r\n\x1a\n"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SHOWN = """<style>
main > section, main ~ footer, .as-table {{ display: none }} {sections} {{ display: block }} {hidden} {{ display: none }}
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
    return SIGNATURE + b"".join(chunk(kind, data) for kind, data in parts)


def chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG, with its length and check."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


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


class Picture(NamedTuple):
    """A picture in docs/: what of a page it shows and hides, how the page is made, and hashes of what that goes by."""

    name: str
    sections: str
    hidden: str
    page: Callable[[Path, Path], str]
    inputs: Callable[[], dict[str, str]]


def _profiled(_run: Path, _folder: Path) -> str:
    return render_hardware(load_hardware(PROFILE))


def _searched(run: Path, _folder: Path) -> str:
    return (run / "report.html").read_text("utf-8")


def _compared(_run: Path, folder: Path) -> str:
    common = ["--model", MODEL, "--workload", LOAD, "--rate", str(RATE_RPS)]
    for name, (hardware, *settings) in COMPARED.items():
        _simtune("simulate", *common, "--hardware", hardware, *settings, "--out", str(folder / name))
    _simtune("report", *(str(folder / name) for name in COMPARED), "--out", str(folder / "page.html"))
    return (folder / "page.html").read_text("utf-8")


def _simtune(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "simtune", *arguments], check=True, stdout=subprocess.DEVNULL)


def _hashes(*specs: Spec) -> dict[str, str]:
    return {f"{spec.KIND}:{spec.name}": hashlib.sha256(spec.to_yaml().encode()).hexdigest() for spec in specs}


def _compared_inputs() -> dict[str, str]:
    cards = (load_hardware(hardware) for hardware, *_ in COMPARED.values())
    return _hashes(load_model(MODEL), load_workload(LOAD)[0], *cards)


PICTURES = (
    Picture(
        "profile",
        "section:has(#fit-0), section:has(#rates)",
        "section:has(#fit-0) figure:nth-of-type(n+5)",
        _profiled,
        lambda: _hashes(load_hardware(PROFILE)),
    ),
    Picture(
        "report",
        "section:has(#pareto)",
        "none",
        _searched,
        lambda: inputs_of(load_question(str(STUDY), ())),
    ),
    Picture("compared", "main > section:not(:nth-of-type(2))", "figure:nth-of-type(n+4)", _compared, _compared_inputs),
)


def draw(picture: Picture, run: Path, browser: str) -> bytes:
    """The head of a page and some of its sections, as a PNG."""
    with tempfile.TemporaryDirectory() as folder:
        shown, drawn = Path(folder) / "shown.html", Path(folder) / "page.png"
        html = picture.page(run, Path(folder)).replace(
            "</body>", SHOWN.format(sections=picture.sections, hidden=picture.hidden)
        )
        shown.write_text(html, "utf-8")
        found = re.search(
            r'data-height="([\d.]+)"', browse(browser, shown, 1, f"--window-size={WIDTH},2000", "--dump-dom")
        )
        if found is None:
            raise RuntimeError(f"{browser} did not say how high the page is")
        height = round(float(found[1])) + 24
        browse(browser, shown, 1, f"--window-size={WIDTH},{height}", f"--screenshot={drawn}")
        return drawn.read_bytes()


def main() -> None:
    """Draw all of them; the search is the run that is named."""
    run = Path(sys.argv[1])
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    for picture in PICTURES:
        file = DOCS / f"{picture.name}.png"
        file.write_bytes(marked(draw(picture, run, browser), inputs_hash(picture.inputs())))
        sys.stdout.write(f"{file}: {file.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
