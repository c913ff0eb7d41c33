"""Names from files are text wherever they end up, and no verb talks to anybody that it was not asked to."""

from __future__ import annotations

import html
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simtune.specs.catalog import load_model
from tests.fuzz import corpus

Call = Callable[..., Any]

HOSTILE = "$(touch owned) `touch owned`; touch owned #\"'\\ \n&& touch owned </script><script>alert(1)</script>"


def test_a_launch_script_quotes_what_a_model_is_called(call: Call, desk: Any) -> None:
    model = load_model("llama-3.1-8b").model_copy(update={"hf": HOSTILE})
    desk.write("model.yaml", model.to_yaml())
    assert desk.simulate("--model", "./model.yaml", "--out", "run").code == 0
    desk.write("bin/vllm", '#!/bin/sh\nprintf %s "$2" > told\n').chmod(0o755)
    path = f"{desk.folder / 'bin'}:{os.environ['PATH']}"
    subprocess.run(["sh", "run/engine/launch.sh"], env={"PATH": path}, check=False, timeout=30, capture_output=True)
    assert (desk.folder / "told").read_text() == HOSTILE
    assert not [*desk.folder.rglob("owned")]


def test_a_report_shows_names_as_text(desk: Any) -> None:
    model = load_model("llama-3.1-8b").model_copy(update={"hf": HOSTILE, "source": HOSTILE})
    desk.write("model.yaml", model.to_yaml())
    device = "hardware.device.name='<b>x</b></script><script>alert(1)'"
    assert desk.simulate("--model", "./model.yaml", "--out", "run", "--set", device).code == 0
    page = (desk.folder / "run" / "report.html").read_text()
    assert "<script>alert" not in page
    assert "<b>x</b>" not in page
    assert html.escape("<b>x</b>") in page


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    corpus.write(folder)
    return folder


NEED_A_RUN = ("report", "certify")
VERBS = {case.command[0]: case.command for case in corpus.cases() if case.command[0] not in NEED_A_RUN}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_uses_the_network(
    verb: str, call: Call, files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: object, **__: object) -> None:
        pytest.fail("it uses the network")

    for name in ("connect", "connect_ex", "sendto", "listen"):
        monkeypatch.setattr(socket.socket, name, refused)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refused)
    monkeypatch.chdir(files)
    out = str(tmp_path / "out")
    command = [out if word == "out" else f"{out}.yaml" if word == "out.yaml" else word for word in VERBS[verb]]
    assert call(*command).code in (0, 3)
