"""The documentation site builds without a warning, with every setting and every page in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simtune.specs.catalog import KINDS
from tests.docs.reading import DOCS, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    for document in DOCS.glob("*.md"):
        page = site / ("index.html" if document.stem == "index" else f"{document.stem}/index.html")
        assert page.is_file(), document.name


def test_every_setting_is_listed(site: Path) -> None:
    page = (site / "settings" / "index.html").read_text(encoding="utf-8")
    for kind in ("plan", "study", "workload"):
        for key in KINDS[kind].model_json_schema()["properties"]:
            assert f"<code>{key}</code>" in page, f"{kind}: {key}"


def test_the_functions_of_the_api_are_described(site: Path) -> None:
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("simulate", "optimize", "read_trace", "allocate", "Result", "Scheduler", "UsageError"):
        assert name in page
    assert "Without a plan: one instance" in page, "docstrings are part of the page"
