"""README's commands run as they stand there: against a stub of a server, with README's own plan and load."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from simtune.api import deploy_plan, load_specs, set_up
from simtune.specs.base import LONGEST_S
from simtune.validation.loads import FRACTIONS, KNEE_SLOWDOWN, knee_rps, loads
from simtune.workload.requests import RequestStream
from tests.cli.conftest import call
from tests.fake_server import FakeServer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("simtune ")
]
"""Of simtune itself."""


def of_verb(verb: str) -> list[str]:
    (command,) = [command for command in COMMANDS if command.split()[1] == verb]
    return shlex.split(command)[1:]


def test_a_load_whose_requests_would_take_months_one_by_one_has_a_knee() -> None:
    """1,000 requests a thousand times as far apart as one takes come later than a simulation may last."""
    specs = load_specs("llama-3.1-8b", "h100-sxm", "chat", None, {"workload": ["output={kind: fixed, tokens: 1000}"]})
    experiment = set_up(specs, requests=1_000)
    stream, deployment = experiment.stream, experiment.deployment
    knee = knee_rps(deployment, stream)

    def e2el(requests: RequestStream, rate: float) -> float:
        value = deployment.simulate(requests.at_rate(rate)).statistic("e2el", "mean")
        assert value is not None
        return value

    alone = e2el(stream.kept(np.arange(len(stream)) < 30), 0.001)
    assert len(stream) * 1_000 * alone > LONGEST_S
    assert e2el(stream, knee) <= KNEE_SLOWDOWN * alone * 1.03
    assert e2el(stream, 1.05 * knee) >= KNEE_SLOWDOWN * alone * 0.95


def test_a_few_requests_tell_what_all_take_alone() -> None:
    """Lengths of chat vary by their mean; a few spread over them are within 5 % of all."""
    from simtune.validation.loads import _few

    stream = set_up(load_specs("llama-3.1-8b", "h100-sxm", "chat"), requests=8_000).stream
    few = _few(stream)
    assert len(few) == 48
    assert few.output_tokens.mean() == pytest.approx(stream.output_tokens.mean(), rel=0.05)
    assert few.arrival_s is not None
    assert np.all(np.diff(few.arrival_s) >= 0)


def test_every_verb_of_the_readme_is_run_below() -> None:
    assert {command.split()[1] for command in COMMANDS} == {"profile", "optimize", "report", "validate"}


@pytest.mark.slow
def test_the_commands_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`profile` is run in tests/profiling, on a pretended device. Of the load 60 requests are sent, once, so that it
    ends soon; at what rates is found with all of its 8,000."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for verb in ("optimize", "report"):
        said = call(*of_verb(verb), *(["-q"] if verb == "optimize" else []))
        assert said.code == 0, said.err
    words = of_verb("validate")
    experiment = set_up(load_specs(None, None, words[words.index("--workload") + 1], words[1]))
    wanted = loads(deploy_plan(words[1]), experiment.stream)
    assert [load.label for load in wanted] == [*FRACTIONS]
    with FakeServer(first_token_s=0.05, token_s=0.02) as server:
        words[words.index("--engine") + 1] = server.url
        said = call(*words, "--requests", 60, "--repeat", 1, "--uncertainty", 0, "--max-lateness", 1_000, "-q")
    assert said.code in (0, 4), said.err  # the stub is no H100
    assert len(server.requests) > 3 * 60
    assert (tmp_path / "runs" / "validated" / "validation.html").exists()
