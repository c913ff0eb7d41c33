"""simtune import: plan on stdout or in a file, notes on stderr, one message for what cannot be read."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simtune.specs.catalog import load_plan
from tests.cli.conftest import Desk, Said

LINE = ("vllm", "serve", "meta-llama/Llama-3.1-8B", "--port", "1", "-tp", "2")
STATED = ("--hardware", "h100-sxm", "--engine", "vllm-0.33")


def test_a_command_line_becomes_a_plan(call: Callable[..., Said], desk: Desk) -> None:
    said = call("import", *STATED, "--out", "mine/plan.yaml", "--", *LINE)
    assert (said.code, said.out) == (0, ""), said
    assert "note: ignored: --port: addresses" in said.err
    assert "next: simtune simulate --plan mine/plan.yaml" in said.err
    assert load_plan("mine/plan.yaml").pools[0].parallelism.tp == 2
    assert call("check", "mine/plan.yaml").code == 0
    assert "exists already; give --force" in desk.refused(
        call, "import", *STATED, "--out", "mine/plan.yaml", "--", *LINE
    )
    assert call("import", *STATED, "--out", "mine/plan.yaml", "--force", "--", *LINE).code == 0


def test_a_file_stdin_and_a_command_line_give_one_plan(
    call: Callable[..., Said], desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.write("run.sh", f"T=2\n{' '.join(LINE[:-1])} ${{T}}\n")
    stated = (*STATED, "--name", "p")
    of_file = call("import", "run.sh", *stated)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((desk.folder / "run.sh").read_bytes())))
    of_stdin = call("import", "-", *stated)
    assert of_file.out == of_stdin.out == call("import", *stated, "--", *LINE).out
    assert of_file.out.startswith("# ignored: --port")
    document = call("import", "run.sh", *stated, "--json").json
    assert document["plan"]["pools"][0]["parallelism"] == {"tp": 2}
    assert document["notes"] == ["ignored: --port: addresses, names and access of the server"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm serve x --num-redundant-experts 4", "run.sh:1: --num-redundant-experts: is not simulated"),
        ("vllm serve 'x", "run.sh:1: a quoted text has no end; close it"),
        ("\nvllm serve x --block-size $B", "run.sh:2: --block-size: B is not set here; give --env B=VALUE"),
        ("vllm serve x --block-size $(cat /etc/passwd)", "run.sh:1: --block-size: a command's output is not known"),
    ],
)
def test_what_cannot_be_read_is_refused(call: Callable[..., Said], desk: Desk, text: str, message: str) -> None:
    desk.write("run.sh", text)
    assert message in desk.refused(call, "import", "run.sh", *STATED, "--model", "llama-3.1-8b")


def test_what_the_user_states_must_be_pairs(call: Callable[..., Said], desk: Desk) -> None:
    assert "--env TP: must be NAME=VALUE" in desk.refused(call, "import", *STATED, "--env", "TP", "--", *LINE)
    assert "no such file" in desk.refused(call, "import", str(Path("none.sh")), *STATED)
    too_long = io.TextIOWrapper(io.BytesIO(b"x" * (5 << 20)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", too_long)
        assert "stdin: is longer than" in desk.refused(call, "import", "-", *STATED)
