"""A profile of a whole engine: steps designed to cover what it may do, kept as they come, fitted, and checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from simtune.cli.profile import profile
from simtune.costs.calibration import read_steps
from simtune.costs.engine_steps import read_engine_costs
from simtune.costs.iteration import StepModel
from simtune.errors import SimtuneError, UsageError
from simtune.specs.catalog import load_hardware
from simtune.specs.model import Model
from simtune.specs.pool import Batching, Pool
from simtune.validation.servers import driven_engines, engine_profile, vllm_steps
from simtune.validation.servers.driven_engines import (
    DrivenRequest,
    DrivenTimes,
    EngineSize,
    driver,
    llama_config,
    stream_of,
)
from simtune.validation.servers.engine_profile import (
    HELD_OUT,
    SESSIONS,
    STEPS,
    SUMMARY,
    DesignedSession,
    EngineProfile,
    design,
    profile_engine,
    reference_beside,
)
from tests.validation.driven_engine import PretendedDriver, tiny


class Clock:
    """A second passes whenever it is looked at."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def profiled(out: Path, made: list[PretendedDriver], *, budget_s: float = 1e9, rounds: int = 2) -> EngineProfile:
    def make(reference_s: float | None) -> PretendedDriver:
        made.append(PretendedDriver())
        return made[-1]

    return profile_engine(make, tiny(), out, budget_s=budget_s, rounds=rounds, clock=Clock())


def test_what_was_held_out_is_foretold(tmp_path: Path) -> None:
    made: list[PretendedDriver] = []
    result = profiled(tmp_path, made)
    assert made[0].closed
    assert {p.name for p in tmp_path.iterdir()} == {SESSIONS, STEPS, HELD_OUT, SUMMARY}
    for kind in ("decode", "prefill"):
        errors = result.errors[kind]
        assert errors.steps > 20
        assert errors.median < 0.015
        assert errors.p90 < 0.04
        assert abs(errors.total) < 0.01
    assert result.summary["held_out"]["decode"]["median"] == result.errors["decode"].median
    again = read_engine_costs(tmp_path / STEPS)
    for step in result.held_out[:20]:
        assert again.seconds(step.batch) == pytest.approx(result.costs.seconds(step.batch))
    assert len(read_steps(tmp_path / HELD_OUT).steps) == result.summary["steps_held_out"]


def accepting(session: DesignedSession, tokens: float, seats: int, budget: int, drafts: int) -> list[int]:
    """Decodes of every step without a prompt, where each request gets so many tokens a step."""
    waiting = [[r.prompt_tokens, r.output_tokens] for r in session.requests]
    running: list[list[float]] = []
    pure: list[int] = []
    while waiting or running:
        left, chunks = budget - (1 + drafts) * len(running), 0
        decoding = list(running)
        while waiting and len(running) < seats and left > 0:
            took = min(left, waiting[0][0])
            waiting[0][0], left, chunks = waiting[0][0] - took, left - took, chunks + 1
            if waiting[0][0]:
                break
            running.append([waiting.pop(0)[1] - 1])
        if decoding and not chunks:
            pure.append(len(decoding))
        for request in decoding:
            request[0] -= tokens
        running = [request for request in running if request[0] > 0]
    return pure


@pytest.mark.parametrize("kept", [1.0, 2.5, 4.0])
def test_an_engine_that_drafts_has_all_its_seats_decode_for_some_steps(kept: float) -> None:
    def full(drafts: int) -> int:
        sessions = [s for s in design(8, 128, 512, drafts=drafts) if all(r.at == 0 for r in s.requests)]
        return sum(accepting(session, kept, 8, 128, 3).count(8) for session in sessions)

    assert full(3) >= 5 * 3, "five contexts, three steps of each at least"
    assert full(3) >= full(0)


@pytest.mark.parametrize("size", [(2, 16, 64), (8, 128, 512), (16, 256, 1024)])
@pytest.mark.parametrize("drafts", [0, 3, 8])
def test_no_request_of_a_session_is_too_long(size: tuple[int, int, int], drafts: int) -> None:
    requests = [r for session in design(*size, drafts=drafts) for r in session.requests]
    assert all(r.prompt_tokens + r.output_tokens <= size[2] for r in requests)
    assert all(r.prompt_tokens > 0 and r.output_tokens > 0 for r in requests)


def test_sessions_cover_seats_budget_and_length() -> None:
    sessions = design(8, 128, 512)
    driver = PretendedDriver(EngineSize(8, 128, 512, 16))
    fitted = [s.batch for session in sessions if session.fitted for s in driver.run(session.requests).steps]
    assert {work.num_decodes for work in fitted if not work.chunks} >= {1, 2, 4, 8}
    assert max(work.num_tokens for work in fitted) == 128
    assert max(past + new for work in fitted for past, new in work.chunks) > 490
    assert max(work.context_tokens / work.num_decodes for work in fitted if work.num_decodes == 8) > 480
    assert sum(work.num_decodes > 0 and bool(work.chunks) for work in fitted) > 20
    assert all(r.prompt_tokens + r.output_tokens <= 512 for session in sessions for r in session.requests)
    assert {session.fitted for session in sessions} == {True, False}


def test_a_run_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    made: list[PretendedDriver] = []
    whole = profiled(tmp_path / "whole", made)
    profiled(tmp_path / "part", made, rounds=1)
    file = tmp_path / "part" / SESSIONS
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-3]) + lines[-3][:20])  # as a kill leaves it
    left = profiled(tmp_path / "part", made)
    assert left.summary["sessions"] == whole.summary["sessions"]
    assert made[2].sessions == 1 + whole.summary["sessions"] - (len(lines) - 4)  # a warm-up, and what was missing


@pytest.mark.parametrize(
    ("line", "said"),
    [('{"round": 0, "session": NaN}', "not valid JSON"), ('{"round": 0}', "is no session"), ("7", "an object was")],
)
def test_a_damaged_session_is_named_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    profiled(tmp_path, [], rounds=1)
    file = tmp_path / SESSIONS
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], f"{line}\n", *lines[1:]]))
    with pytest.raises(SimtuneError, match=rf"{SESSIONS}:2: {said}"):
        profiled(tmp_path, [])


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    profiled(tmp_path, [], rounds=1)
    assert reference_beside(tmp_path / STEPS) == 0.5
    (tmp_path / SUMMARY).write_text("[]")
    with pytest.raises(UsageError, match=rf"{SUMMARY}: has no reference_s"):
        reference_beside(tmp_path / STEPS)


def test_the_budget_ends_it_once_every_session_was_run(tmp_path: Path) -> None:
    made: list[PretendedDriver] = []
    result = profiled(tmp_path, made, budget_s=5, rounds=4)
    assert len(design(4, 64, 256)) <= result.summary["sessions"] <= len(design(4, 64, 256)) + 5


def test_sessions_of_another_model_are_not_mixed(tmp_path: Path) -> None:
    profiled(tmp_path, [])
    other = tiny().model_copy(update={"name": "other"})
    with pytest.raises(UsageError, match="sessions of another model"):
        profile_engine(lambda reference_s: PretendedDriver(), other, tmp_path, budget_s=1, clock=Clock())


def test_engines_and_models_that_cannot_be_driven_are_named() -> None:
    with pytest.raises(UsageError, match="engine sglang: only torch, transformers, vllm"):
        driver("sglang", tiny(), EngineSize())
    with pytest.raises(UsageError, match="cannot be started"):
        driver("vllm", tiny(), EngineSize(), python="/nowhere/python")
    assert llama_config(tiny())["num_key_value_heads"] == 2
    assert len(stream_of(design(4, 64, 256)[0].requests)) == 1


def test_an_engine_that_nobody_waits_for_does_not_start() -> None:
    """Whoever asked was killed while the interpreter was starting: its end of the pipe is closed."""
    read, write = os.pipe()
    os.write(write, b"{}\n")
    os.close(write)
    script = Path(vllm_steps.__file__)
    done = subprocess.run([sys.executable, "-P", str(script)], stdin=read, capture_output=True, check=False)
    os.close(read)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), "it would have looked for vLLM"


def test_the_command_profiles_the_torch_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = tmp_path / "tiny.yaml"
    model.write_text(tiny().to_yaml())
    arguments = ["--model", str(model), "--engine", "torch", "--dtype", "fp32", "--budget", "20s"]
    sizes = ["--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--max-model-len", "64"]
    done = CliRunner().invoke(profile, [*arguments, *sizes, "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["engine"] == "torch"
    assert summary["held_out"]["decode"]["steps"] > 10
    assert read_engine_costs(tmp_path / "out" / STEPS).decode(2, 100)[0] > 0


@pytest.mark.skipif(find_spec("transformers") is None or find_spec("torch") is None, reason="needs transformers")
def test_transformers_is_driven_as_it_schedules() -> None:
    whole = tiny().model_copy(update={"dtype": "fp32", "weight_dtype": "fp32"})
    its = driver("transformers", whole, EngineSize(4, 64, 256))
    assert its.facts()["num_blocks"] == 64
    requests = [DrivenRequest(0, 100, 4), DrivenRequest(1, 30, 3)]
    done = its.run(requests)
    works = [(s.batch.num_decodes, s.batch.context_tokens, s.batch.chunks) for s in done.steps]
    assert works == [
        (0, 0, ((0, 64),)),
        (0, 0, ((64, 36), (0, 28))),
        (1, 101, ((28, 2),)),
        (2, 133, ()),
        (2, 135, ()),
    ]
    assert done.requests == [DrivenTimes(0, 2, 5), DrivenTimes(1, 3, 5)]
    assert all(step.seconds > 0 for step in done.steps)
    for clock in ("cpu", "wall"):
        timed = its.run(requests, clock).requests
        assert all(times.sent < times.first_token < times.finish for times in timed)
    its.close()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--engine", "vllm"], "needs --vllm-python"),
        (["--engine", "torch", "--vllm-python", "x"], "no other does"),
        (["--engine", "torch", "--target", "5%"], "--target cannot be given"),
        (["--kernels", "h100-sxm"], "give it with --engine"),
    ],
)
def test_options_that_do_not_go_together(extra: list[str], words: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(profile, ["--model", "llama-3.1-8b", "--out", str(tmp_path / "o"), *extra])
    assert words in str(done.exception)


# --- the command, with an engine that only pretends -------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[PretendedDriver]:
    made: list[PretendedDriver] = []

    def make(engine: str, model: Model, size: EngineSize, **options: object) -> PretendedDriver:
        made.append(PretendedDriver(size))
        return made[-1]

    monkeypatch.setattr(driven_engines, "driver", make)
    monkeypatch.setattr(engine_profile, "profile_engine", partial(profile_engine, rounds=2))
    return made


def profile_pretended(tmp_path: Path, *more: str) -> Result:
    (tmp_path / "tiny.yaml").write_text(tiny().to_yaml())
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256"]
    command = [
        "--model",
        str(tmp_path / "tiny.yaml"),
        "--engine",
        "torch",
        *sizes,
        "--out",
        str(tmp_path / "out"),
        *more,
    ]
    return CliRunner().invoke(profile, command, standalone_mode=False)


def test_the_command_shows_what_was_not_fitted(pretended: list[PretendedDriver], tmp_path: Path) -> None:
    done = profile_pretended(tmp_path)
    summary = json.loads((tmp_path / "out" / SUMMARY).read_text())
    words = " ".join(done.stdout.split())
    assert "torch, tiny: whole steps that were not fitted" in words
    for kind, errors in summary["held_out"].items():
        assert f"{kind} {errors['steps']} " in words.replace("│", "").replace("  ", " ")
    assert f"{summary['steps']:,} steps fitted" in words
    assert "adds to the kernels" not in words
    assert pretended[0].closed


def test_kernels_split_what_a_step_takes(pretended: list[PretendedDriver], tmp_path: Path) -> None:
    """Against a sum over the very steps: measured time less what the profile's kernels take."""
    done = profile_pretended(tmp_path, "--kernels", "h100-sxm", "--json")
    split = json.loads(done.stdout)["added"]
    batching = Batching(max_num_seqs=4, max_num_batched_tokens=64)
    pool = Pool(hardware="h100-sxm", instances=1, batching=batching, max_model_len=256, cuda_graphs=False)
    kernels = StepModel(tiny(), load_hardware("h100-sxm"), pool)
    steps = [step for step in read_steps(tmp_path / "out" / STEPS).steps if step.kind == "decode"]
    assert split["decode"]["steps"] == len(steps)
    measured = sum(step.seconds for step in steps)
    summed = sum(sum(kernels.breakdown(step.batch).values()) for step in steps)
    assert split["decode"]["share"] == pytest.approx(1 - summed / measured)
    assert split["decode"]["measured_s"] == pytest.approx(measured / len(steps))
    shown = profile_pretended(tmp_path, "--kernels", "h100-sxm")
    assert "what torch adds to the kernels of the profile" in " ".join(shown.stdout.split())


def test_an_interrupted_command_says_what_is_kept(
    pretended: list[PretendedDriver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: PretendedDriver, *arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PretendedDriver, "run", interrupted)
    done = profile_pretended(tmp_path)
    assert done.return_value == 130
    assert "the same command goes on from there" in done.stderr
    assert pretended[0].closed
