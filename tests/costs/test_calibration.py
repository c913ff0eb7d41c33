"""Two numbers from an engine's own log: `simtune calibrate`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import simtune
from simtune.cli.calibrate import calibrate as command
from simtune.costs.calibration import FEWEST, Log, TimedStep, calibrate, read_log, two_numbers
from simtune.costs.iteration import StepModel, StepWork
from simtune.errors import SimtuneError, SpecError, UsageError
from simtune.report.hardware_page import facts
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Hardware
from tests.costs.made_up import calibrated, hardware, model, pool

CORRECTED = "corrected by an engine's own log"
DECODES = [(n, n * context) for n in (1, 4, 16, 60) for context in (10, 100, 1000)]
PROMPTS = [((0, n),) for n in (5, 50, 500)] + [((past, n), (0, 20)) for past in (64, 640) for n in (5, 50, 400)]


def batches() -> list[StepWork]:
    return [StepWork(n, context, (), n) for n, context in DECODES] + [
        StepWork(n, 30 * n, chunks, n + len(chunks)) for n in (0, 7) for chunks in PROMPTS
    ]


def engine_s(batch: StepWork) -> float:
    """What a made-up engine takes: 1.4 x kernels + 3 ms for decode steps, 0.9 x kernels + 5 ms with prompt tokens."""
    gpu_s = StepModel(model(), hardware(), pool()).gpu_s(batch)
    return 0.9 * gpu_s + 5e-3 if batch.chunks else 1.4 * gpu_s + 3e-3


def write_lines(path: Path, header: dict[str, Any], lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))
    return path


def own_log(path: Path, **header: Any) -> Path:
    lines = [
        {
            "decodes": b.num_decodes,
            "context_tokens": b.context_tokens,
            "chunks": [list(chunk) for chunk in b.chunks],
            "seconds": engine_s(b),
        }
        for b in batches()
    ]
    return write_lines(path, {"schema": "simtune/steps@1", **header}, lines)


class TestFit:
    def test_finds_what_the_engine_adds(self, tmp_path: Path) -> None:
        path = own_log(tmp_path / "steps.jsonl", model="tiny", tp=1, device="Made-up 1")
        log = read_log(path, model(), hardware(host_step_s=1.0), 1)
        found = calibrate(model(), hardware(host_step_s=1.0), pool(), log, path)
        assert found.decode is not None
        assert found.prefill is not None
        assert (found.decode.scale, found.decode.offset_s) == pytest.approx((1.4, 3e-3), rel=1e-3)
        assert (found.prefill.scale, found.prefill.offset_s) == pytest.approx((0.9, 5e-3), rel=1e-3)
        assert found.decode.steps == len(DECODES)
        assert found.decode.median_after < 1e-3 < 0.2 < found.decode.median_before
        corrected = hardware(host_step_s=1.0).model_copy(update={"calibration": found})
        step_model = StepModel(model(), corrected, pool(asynchronous=False))
        for batch in batches():
            assert step_model.seconds(batch) == pytest.approx(engine_s(batch), rel=2e-3), "the host is in the offset"

    def test_a_second_calibration_starts_from_the_kernels_again(self, tmp_path: Path) -> None:
        path = own_log(tmp_path / "steps.jsonl")
        log = read_log(path, model(), hardware(), 1)
        again = calibrated(hardware(), decode=(7.0, 1.0), prefill=(7.0, 1.0))
        assert calibrate(model(), again, pool(), log, path) == calibrate(model(), hardware(), pool(), log, path)

    @given(scale=st.floats(0.2, 5), offset_s=st.floats(1e-6, 0.1), seed=st.integers(0, 99))
    def test_two_numbers_shrug_off_outliers(self, scale: float, offset_s: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        predicted = np.geomspace(1e-3, 1.0, 60)
        measured = (scale * predicted + offset_s) * np.exp(rng.normal(0, 0.01, 60))
        measured[rng.permutation(60)[:6]] *= 20
        a, b = two_numbers(predicted, measured)
        assert np.median(np.abs((a * predicted + b) / measured - 1)) < 0.03

    def test_errors_are_those_of_the_other_half(self) -> None:
        """Noisy times: both numbers follow the noise of the half they are fitted on."""
        rng = np.random.default_rng(0)
        steps = [TimedStep(b, engine_s(b) * float(np.exp(rng.normal(0, 0.3)))) for b in batches() if not b.chunks]
        found = calibrate(model(), hardware(), pool(), Log(steps), Path("noise.csv")).decode
        assert found is not None
        predicted = np.array([StepModel(model(), hardware(), pool()).gpu_s(step.batch) for step in steps])
        measured = np.array([step.seconds for step in steps])
        seen = np.abs((found.scale * predicted + found.offset_s) / measured - 1)
        assert np.median(seen) < found.median_after

    def test_too_few_steps_of_a_kind_leave_it_alone(self) -> None:
        steps = [TimedStep(b, engine_s(b)) for b in batches() if not b.chunks or b.num_decodes == 0]
        few = [s for s in steps if s.kind == "prefill"][: FEWEST - 1]
        found = calibrate(
            model(), hardware(), pool(), Log([s for s in steps if s.kind == "decode"] + few), Path("x.csv")
        )
        assert found.prefill is None
        step_model = StepModel(model(), hardware(host_step_s=1.0).model_copy(update={"calibration": found}), pool())
        assert step_model.seconds(few[0].batch) == 1.0, "its host still counts"
        with pytest.raises(SpecError, match=r"x\.csv.*at least 8 .* the log has 7 prefill"):
            calibrate(model(), hardware(), pool(), Log(few), Path("x.csv"))

    @pytest.mark.parametrize(
        ("factor", "words"), [(1e3, "another device"), (1e-3, "another unit"), (1e-30, "another unit")]
    )
    def test_another_unit_or_device_is_refused(self, factor: float, words: str) -> None:
        steps = [TimedStep(b, factor * engine_s(b)) for b in batches() if not b.chunks]
        with pytest.raises(SpecError, match=rf"ms\.csv: decode steps would be scaled by .*{words}"):
            calibrate(model(), hardware(), pool(), Log(steps), Path("ms.csv"))

    def test_steps_that_all_take_the_same_say_nothing_of_larger_ones(self) -> None:
        steps = [TimedStep(b, 0.01) for b in batches() if not b.chunks]
        with pytest.raises(SpecError, match="take the same whatever is in them"):
            calibrate(model(), hardware(), pool(), Log(steps), Path("flat.csv"))

    def test_what_two_numbers_do_not_describe_is_refused(self) -> None:
        wild = np.geomspace(1e-5, 1e-1, 12)[np.random.default_rng(3).permutation(12)]
        steps = [TimedStep(StepWork(n, c, (), n), float(s)) for (n, c), s in zip(DECODES, wild, strict=True)]
        with pytest.raises(SpecError, match="off at the median: a scale and an offset do not describe"):
            calibrate(model(), hardware(), pool(), Log(steps), Path("wild.csv"))


class TestLogs:
    def test_csv_cuts_prefill_tokens_into_chunks(self, tmp_path: Path) -> None:
        path = tmp_path / "steps.csv"
        path.write_text(
            "num_decodes,context_tokens,prefill_tokens,seconds,prefill_chunks,prefill_past,tp\n"
            "3,300,0,0.5,0,0,1\n0,0,11,0.5,2,64,1\n0,0,0,0.5,0,0,1\n2,20,,0.5,1,0,1\n"
        )
        log = read_log(path, model(), hardware(), 1)
        assert [step.batch for step in log.steps] == [
            StepWork(3, 300, (), 3),
            StepWork(0, 0, ((64, 6), (64, 5)), 2),
        ]
        assert log.left_out == {"no time or no tokens": 1, "a value is missing or negative": 1}
        with pytest.raises(SpecError, match="tp: the log is of 1, not of 2"):
            read_log(path, model(), hardware(), 2)

    def test_a_log_of_something_else_is_refused(self, tmp_path: Path) -> None:
        for header, words in (
            ({"model": "other"}, "model: the log is of other, not of tiny"),
            ({"tp": 2}, "tp: the log is of 2"),
            ({"device": "NVIDIA H100 80GB HBM3"}, "device: the log is of NVIDIA H100"),
        ):
            with pytest.raises(SpecError, match=words):
                read_log(own_log(tmp_path / "steps.jsonl", **header), model(), hardware(), 1)

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ({"decodes": 1, "context_tokens": 5}, "positive seconds"),
            ({"decodes": 0, "seconds": 1.0}, "one of decodes and chunks"),
            ({"chunks": [[0]], "seconds": 1.0}, "chunks as"),
            ({"chunks": [[0, 4]], "second": 1.0}, "is not a step"),
            ({"decodes": 3, "context_tokens": 0, "seconds": 1.0}, "context_tokens: cannot be 0 for 3 decodes"),
            ({"decodes": 1.5, "context_tokens": 9, "seconds": 1.0}, "draft_tokens as counts"),
            ({"decodes": 1, "context_tokens": 9, "seconds": 1e300}, "seconds: is not the time of a step: 1e.300 s"),
            (
                {"decodes": 1, "context_tokens": 10**15, "seconds": 1.0},
                "is not a step: a count of 1,000,000,000,000,000 exceeds",
            ),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, line: dict[str, Any], words: str) -> None:
        path = write_lines(tmp_path / "steps.jsonl", {"schema": "simtune/steps@1"}, [line])
        with pytest.raises(SpecError, match=rf"steps\.jsonl:2: .*{words}"):
            read_log(path, model(), hardware(), 1)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{", "not valid JSON"),
            ("[]", "an object"),
            ('{"schema": "x"}', "simtune/steps@1"),
            ("", "simtune/steps@1"),
        ],
    )
    def test_a_file_of_another_kind_is_named(self, tmp_path: Path, text: str, words: str) -> None:
        path = tmp_path / "steps.jsonl"
        path.write_text(text)
        with pytest.raises(SpecError, match=words):
            read_log(path, model(), hardware(), 1)

    def test_a_csv_without_its_columns_names_them(self, tmp_path: Path) -> None:
        path = tmp_path / "steps.csv"
        path.write_text("num_decodes,prefill_tokens,seconds\n1,0,0.1\n")
        with pytest.raises(SpecError, match="context_tokens: column is missing"):
            read_log(path, model(), hardware(), 1)

    def test_a_step_log_is_followed_through_preemption(self, tmp_path: Path) -> None:
        """Request a: prompt of 5 in two chunks, one token, thrown out, and computed again with what it had said."""
        shape = {"layers": 2, "hidden": 64, "vocab": 256}
        lines = [
            {"req": "a", "prompt_len": 5, "output_len": 9},
            {"req": "b", "prompt_len": 2, "output_len": 9},
            {"step": 0, "sched": {"a": 4, "b": 2}, "admit": {"a": 0, "b": 0}, "cpu": [0.5, 0.25]},
            {"step": 1, "sched": {"a": 1, "b": 1}, "cpu": 0.5},
            {"step": 2, "sched": {"a": 1, "b": 1}, "cpu": 0.5},
            {"step": 3, "sched": {"b": 1}, "preempt": ["a"], "cpu": 0.5},
            {"step": 4, "sched": {"b": 1, "a": 6}, "admit": {"a": 1}},
            {"step": 5, "sched": {"b": 1, "a": 1}, "cpu": 0.5},
        ]
        path = write_lines(tmp_path / "log.jsonl", {"format": "steplog/1", "model": shape}, lines)
        log = read_log(path, model(), hardware(), 1)
        assert log.steps == [
            TimedStep(StepWork(0, 0, ((0, 4), (0, 2)), 1), 0.75),
            TimedStep(StepWork(1, 3, ((4, 1),), 2), 0.5),
            TimedStep(StepWork(2, 6 + 4, (), 2), 0.5),
            TimedStep(StepWork(1, 5, (), 1), 0.5),
            TimedStep(StepWork(2, 7 + 8, (), 2), 0.5),
        ]
        assert log.left_out == {"no time": 1}
        with pytest.raises(SpecError, match=r"layers 2|2 layers, hidden size 64 and vocabulary 256, not of tiny"):
            read_log(path, model(layers=3), hardware(), 1)

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ({"sched": {"b": 1}, "cpu": 0.5}, "KeyError('b')"),
            ({"sched": {"a": -1}, "cpu": 0.5}, "TypeError('-1 is no count of tokens')"),
            ({"sched": 4}, "AttributeError"),
            ({"req": "b"}, "KeyError('prompt_len')"),
        ],
    )
    def test_a_line_that_is_none_of_a_step_log_is_named(self, tmp_path: Path, line: dict[str, Any], why: str) -> None:
        header = {"format": "steplog/1", "model": {"layers": 2, "hidden": 64, "vocab": 256}}
        path = write_lines(tmp_path / "log.jsonl", header, [{"req": "a", "prompt_len": 4}, line])
        with pytest.raises(SpecError) as error:
            read_log(path, model(), hardware(), 1)
        assert str(error.value).startswith(f"{path}:3: is not a line of a steplog/1: {why}")

    @pytest.mark.parametrize("name", ["vllm_base", "vllm_kv_decode", "hf_prefill_first_kv"])
    def test_published_step_logs_are_understood(self, name: str, data_dir: Path) -> None:
        """Contexts follow from the counts alone; transformers logs how many KV positions its decodes at least read."""
        path = data_dir / "steplogs" / f"{name}.jsonl.gz"
        like = model(layers=4, hidden=256, vocab=1024)
        log = read_log(path, like, hardware(), 1)
        with gzip.open(path, "rt") as file:
            steps = [line for line in map(json.loads, file) if "sched" in line]
        assert len(log.steps) == len(steps)
        for step, line in zip(log.steps, steps, strict=True):
            assert step.batch.num_tokens == sum(line["sched"].values())
            assert all(past >= 0 for past, _ in step.batch.chunks)
            assert step.batch.num_samples <= len(line["sched"]) or step.batch.num_samples == 1
        decodes = sum(step.batch.num_decodes for step in log.steps)
        assert decodes > 0.8 * sum(1 for line in steps for tokens in line["sched"].values() if tokens == 1)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments])


class TestCommand:
    def test_splitwise_is_three_per_cent_off_after_it(self, tmp_path: Path, data_dir: Path) -> None:
        log, out = data_dir / "iteration/splitwise_llama2_70b_a100_h100.csv.gz", tmp_path / "out"
        result = run("h100-sxm", "--measured", log, "--model", "llama-2-70b", "--tp", 2, "--out", out)
        assert result.exit_code == 0, result.output
        profile = load_hardware(str(out))
        found = profile.calibration
        assert found is not None
        assert found.decode is not None
        assert found.prefill is not None
        assert max(found.decode.median_after, found.prefill.median_after) < 0.03 < found.decode.median_before
        plain = load_hardware("h100-sxm")
        assert profile.model_copy(update={"calibration": None}) == plain
        assert profile.arrays == plain.arrays
        assert "llama-2-70b at tp 2" in dict(facts(profile))[CORRECTED]
        assert CORRECTED not in dict(facts(plain))
        assert "calibration" not in plain.to_yaml()
        slow, fast = (
            simtune.simulate("chat", model="llama-2-70b", hardware=p, rate_rps=0.5, requests=40)
            for p in (str(out), "h100-sxm")
        )
        slow_s, fast_s = slow.statistic("tpot", "mean"), fast.statistic("tpot", "mean")
        assert slow_s is not None
        assert fast_s is not None
        assert slow_s > 1.2 * fast_s

    def test_in_place_only_when_told_so(self, tmp_path: Path) -> None:
        folder, log = tmp_path / "mine", own_log(tmp_path / "steps.jsonl")
        folder.mkdir()
        (folder / "profile.yaml").write_text(hardware().to_yaml())
        (tmp_path / "tiny.yaml").write_text(model().to_yaml())
        asked = (folder, "--measured", log, "--model", tmp_path / "tiny.yaml")
        refused = run(*asked)
        assert isinstance(refused.exception, UsageError)
        assert "--out" in str(refused.exception)
        assert Hardware.from_file(folder / "profile.yaml").calibration is None
        result = run(*asked, "--force", "--json")
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)["calibration"]
        assert told["decode"]["scale"] == pytest.approx(1.4, rel=1e-3)
        found = Hardware.from_file(folder / "profile.yaml").calibration
        assert found is not None
        assert found.model_dump(mode="json", exclude_none=True) == told
        assert "decode steps x 1.4 + 3 ms" in dict(facts(Hardware.from_file(folder / "profile.yaml")))[CORRECTED]

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("h100-sxm",), "give --out"),
            (("h100-sxm", "--force"), "give --out"),
            (("h100-sxm", "--out", "OUT"), "name the model"),
            (("h100-sxm", "--out", "OUT", "--model", "llama-3.1-8b"), "2 layers"),
        ],
    )
    def test_refusals_write_nothing(self, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
        header = {"format": "steplog/1", "model": {"layers": 2, "hidden": 64, "vocab": 256}}
        log, out = write_lines(tmp_path / "log.jsonl", header, []), tmp_path / "out"
        result = run(*(str(out) if a == "OUT" else a for a in arguments), "--measured", log)
        assert isinstance(result.exception, SimtuneError)
        assert words in str(result.exception)
        assert not out.exists()
