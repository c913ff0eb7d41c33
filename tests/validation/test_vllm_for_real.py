"""With a real vLLM, whose interpreter VLLM_PYTHON names (`make vllm`): what its driver says, and killed loops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from simtune.specs.model import DenseFeedForward, FullAttention, LayerGroup, Model
from simtune.validation.servers.driven_engines import DrivenRequest, EngineSize, driver
from simtune.validation.servers.pair import CONNECTOR, EnginePair
from simtune.validation.servers.random_weights import rigged_pair

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no interpreter with vLLM")]
ROOT = Path(__file__).parents[2]

STUDY = """\
schema: simtune/study@1
name: killed
model: ./model.yaml
hardware: {profile: cpu-x86-1thread, devices: 1}
workload: ./workload.yaml
slo:
  ttft_s: {p99: 20.0}
  tpot_s: {p99: 2.5}
search:
  tp: [1]
  pp: [1]
  max_num_seqs: [2, 4]
  max_num_batched_tokens: [32]
"""
WORKLOAD = """\
schema: simtune/workload@1
name: short
requests: 100
arrivals: {kind: poisson, rate_rps: 4}
prompt: {kind: lognormal, mean_tokens: 30, sigma: 0.4, max_tokens: 64}
output: {kind: lognormal, mean_tokens: 8, sigma: 0.4, max_tokens: 16}
"""


def model(layers: int = 2, dtype: str = "fp32") -> Model:
    group = LayerGroup(
        count=layers,
        attention=FullAttention(heads=4, kv_heads=2, head_dim=64),
        feed_forward=DenseFeedForward(intermediate_size=512),
    )
    sizes = {"hidden_size": 256, "vocab_size": 1024, "max_position": 2048, "tie_embeddings": False}
    return Model.model_validate(
        {"name": f"made-{layers}", **sizes, "layers": (group,), "dtype": dtype, "weight_dtype": dtype}
    )


@pytest.fixture
def started() -> Iterator[Callable[..., Any]]:
    """Starts drivers and ends them."""
    drivers: list[Any] = []

    def start(**options: Any) -> Any:
        drivers.append(driver("vllm", model(), EngineSize(4, 64, 256, 32), python=PYTHON, **options))
        return drivers[-1]

    yield start
    for each in drivers:
        each.close()


def test_every_token_is_in_a_step(started: Callable[..., Any]) -> None:
    engine = started(arguments={"enable_prefix_caching": True})
    prompt = tuple(range(3, 103))
    driven = engine.run([DrivenRequest(0, 100, 5, prompt), DrivenRequest(20, 100, 3, prompt)])
    assert driven.hit_tokens == 96, "three blocks of 32"
    new = sum(tokens for step in driven.steps for _, tokens in step.batch.chunks)
    assert new == 2 * 100 - 96
    assert sum(step.batch.num_decodes for step in driven.steps) == 4 + 2
    assert all(step.seconds > 0 for step in driven.steps)
    assert [len(times.times) for times in driven.requests] == [5, 3]
    assert driven.drafts is None


def test_drafts_are_counted(started: Callable[..., Any], tmp_path: Path) -> None:
    share = rigged_pair(model(), model(1), tmp_path, 0.7)
    drafts = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    engine = started(weights=tmp_path / "target", arguments={"speculative_config": drafts})
    driven = engine.run([DrivenRequest(i, 40, 60) for i in range(12)])
    counts = driven.drafts
    assert counts.draft_tokens == 3 * counts.rounds
    assert 1 + counts.accepted_tokens / counts.rounds == pytest.approx((1 - share**4) / (1 - share), rel=0.06)
    assert counts.delivered_tokens <= counts.rounds + counts.accepted_tokens
    assert max(step.batch.draft_tokens for step in driven.steps) == 3 * 4


def has_nixl() -> bool:
    return bool(PYTHON) and not subprocess.run([PYTHON, "-c", "import nixl"], capture_output=True).returncode


@pytest.mark.skipif(not has_nixl(), reason="the environment of vLLM has no nixl")
def test_a_decode_engine_goes_on_with_what_another_has_computed() -> None:
    def start(reference_s: float | None = None) -> Any:
        options = {"python": PYTHON, "reference_s": reference_s, "arguments": {"kv_transfer_config": CONNECTOR}}
        return driver("vllm", model(), EngineSize(4, 64, 256, 32), **options)

    pair = EnginePair(start, start)
    try:
        driven = pair.run([DrivenRequest(0, 100, 5), DrivenRequest(0, 33, 1), DrivenRequest(0.01, 64, 3)])
        measured = pair.transfers(model())
    finally:
        pair.close()
    assert [len(times.times) for times in driven.requests] == [5, 1, 3]
    assert all(times.sent < times.first_token <= times.finish for times in driven.requests)
    prompts = sorted(tokens for step in driven.steps for _, tokens in step.batch.chunks)
    assert sum(prompts) == 100 + 33 + 64 + 2, "the last token of a prompt that was fetched is computed once more"
    assert len({m.bytes for m in measured}) == 6
    assert all(m.seconds > 0 for m in measured)


MARK = "SIMTUNE_KILLED_LOOP"
LAST = "in the comparison"


def engines(mark: str) -> list[int]:
    """Processes that step a vLLM with this mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stepping = b"vllm_steps.py" in (entry / "cmdline").read_bytes()
                marked = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes()
            except OSError:
                continue
            found += [int(entry.name)] * (stepping and marked)
    return found


def stages(out: Path) -> list[str]:
    state = out / "state.json"
    return list(json.loads(state.read_text())["done"]) if state.exists() else []


def sessions(out: Path) -> int:
    file = out / "profile" / "sessions.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def test_a_loop_that_is_killed_in_any_stage_goes_on_and_leaves_no_engine(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(model(dtype="bf16").to_yaml())
    (tmp_path / "study.yaml").write_text(STUDY)
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    out, mark = tmp_path / "out", str(tmp_path)
    command = [sys.executable, "-m", "simtune", "loop", "study.yaml", "--out", "out", "--engine", "vllm"]
    command += ["--vllm-python", PYTHON, "--budget", "1", "--rounds", "1", "--requests", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: mark}

    def begun() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)

    moments: dict[str, Callable[[], bool]] = {
        "while the engine of the profile starts": lambda: bool(engines(mark)),
        "in the profile": lambda: sessions(out) > 10,
        "in the search, or as the replay starts": lambda: "profile" in stages(out),
        "in the replay": lambda: "optimize 1" in stages(out) and bool(engines(mark)),
        LAST: lambda: "replay 1" in stages(out),
    }
    for moment, has_come in moments.items():
        done, kept = stages(out), sessions(out)
        loop = begun()
        while not has_come() and loop.poll() is None:
            time.sleep(0.02)
        # Of the last stage, which is short, a busy machine may not let us see more than the end.
        assert loop.poll() in ((None, 0, 4) if moment == LAST else (None,)), f"ended before it could be killed {moment}"
        with suppress(ProcessLookupError):
            loop.send_signal(signal.SIGKILL)
        loop.wait()
        deadline = time.monotonic() + 60
        while engines(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not engines(mark), f"an engine is left over, killed {moment}"
        assert stages(out)[: len(done)] == done
        assert sessions(out) >= kept
    assert begun().wait() in (0, 4)
    assert stages(out) == ["profile", "optimize 1", "replay 1", "compare 1"]
    assert not engines(mark)
