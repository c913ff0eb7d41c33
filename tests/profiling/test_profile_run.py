"""Runs on a pretended device: what they fit, when they stop, what a crash costs them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from simtune.costs.hardware_profile import build
from simtune.costs.iteration import StepModel
from simtune.costs.tables import read_tables
from simtune.costs.tables.own import MeasuredPoint
from simtune.errors import SimtuneError, UsageError
from simtune.profiling.doubts import doubtful
from simtune.profiling.fitting import VALIDATION, _BestRates
from simtune.profiling.measurement_journal import FILE, Journal, task_of
from simtune.profiling.measurement_plan import Limits, MeasurementTask, plan, work
from simtune.profiling.run import SENTINEL_EVERY, Profiled
from simtune.profiling.timing import Measured
from simtune.specs.hardware import OperatorKind
from simtune.specs.pool import Batching, Pool
from tests.profiling.pretended import BASE, COST_S, IMBALANCE_S, PretendedRig, model, profile

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """A run of 50 s that nothing disturbs. To be looked at, not changed."""
    return profile(PretendedRig(), tmp_path_factory.mktemp("whole") / "p1")


@pytest.fixture(scope="module")
def short_run_and_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profiled, Path]:
    folder = tmp_path_factory.mktemp("short") / "p1"
    return profile(PretendedRig(), folder, budget_s=25), folder


@pytest.fixture
def short_run(short_run_and_folder: tuple[Profiled, Path], tmp_path: Path) -> Profiled:
    """A run of 25 s, whose files lie in `p1` of the test's folder."""
    profiled, folder = short_run_and_folder
    shutil.copytree(folder, tmp_path / "p1")
    return profiled


def lines(folder: Path) -> list[str]:
    return (folder / FILE).read_text().splitlines()


def test_a_run_finds_the_device_it_was_made_on(full_run: Profiled) -> None:
    assert full_run.hardware.name == "p1"
    for key, errors in full_run.summary["validation"].items():
        assert errors["median"] < 0.05, key
        assert full_run.hardware.operators[key].hold_out[0].split == VALIDATION
    assert set(full_run.summary["validation"]) == {"gemm.bf16", "decode_attention.bf16", "prefill_attention.bf16"}
    assert full_run.hardware.operators["gemm.bf16"].base.flops_per_s == pytest.approx(BASE["flops_per_s"], rel=0.3)
    assert full_run.facts.device.flops_per_s["bf16"] <= 1.02 * BASE["flops_per_s"]
    assert full_run.hardware.host.provenance.kind == "measured"
    assert full_run.hardware.operators["decode_attention.bf16"].uneven_s == pytest.approx(IMBALANCE_S, rel=0.01)


def test_links_between_ranks_are_their_fastest_and_their_shortest_message() -> None:
    best = _BestRates(Limits(1e9, 0.02, 2.0**39, 2.0**38, 2.0**36))
    messages: list[tuple[OperatorKind, float, float]] = [
        ("send_recv", 1e3, 2e-6),
        ("send_recv", 1e8, 1e-2),
        ("all_reduce", 1e8, 3e-2),
    ]
    for kind, size, seconds in messages:
        shape = {"bytes": size} if kind == "send_recv" else {"devices": 2, "bytes": size}
        best.take(MeasuredPoint(kind=kind, dtype="bf16", shape=shape, seconds=seconds, spread=0.0))
    moved = work(MeasurementTask("send_recv", "bf16", {"bytes": 1e8}))[1]
    link = best.links["intra_node"]
    assert link.latency_s == 2e-6
    assert link.bytes_per_s == pytest.approx(moved / 1e-2)


def test_a_line_that_was_cut_short_is_measured_again_and_that_is_said(tmp_path: Path) -> None:
    profile(PretendedRig(), tmp_path / "p1", budget_s=20)
    file = tmp_path / "p1" / FILE
    said: list[str] = []
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    rig = PretendedRig()
    profile(rig, tmp_path / "p1", budget_s=25, note=said.append)
    assert f"{file}: the last line was cut short and is removed; its point is measured again" in said
    assert len(file.read_bytes().splitlines()) > len(whole.splitlines())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=rf"{tmp_path}/file/p1: cannot be made \(.*\)"):
        profile(PretendedRig(), tmp_path / "file" / "p1")


def test_the_profile_drives_a_step_and_only_what_cannot_be_measured_is_estimated(full_run: Profiled) -> None:
    pool = Pool(hardware="p1", instances=1, batching=Batching(max_num_seqs=8, max_num_batched_tokens=512))
    assert StepModel(model(), full_run.hardware, pool).estimated == set()


def test_simtune_fit_makes_the_same_operators_of_the_file(short_run: Profiled, tmp_path: Path) -> None:
    again = build(read_tables([tmp_path / "p1" / FILE]), short_run.facts)
    assert again.operators.keys() == short_run.hardware.operators.keys()
    for key, operator in again.operators.items():
        assert operator.base == short_run.hardware.operators[key].base
        assert operator.residual == short_run.hardware.operators[key].residual


@pytest.mark.parametrize("budget_s", [25.0, 60.0])
def test_measuring_stops_when_the_budget_leaves_time_to_fit(tmp_path: Path, budget_s: float) -> None:
    rig = PretendedRig()
    profile(rig, tmp_path / "p1", budget_s=budget_s)
    assert 0.75 * budget_s < rig.spent_s < budget_s


def test_a_target_that_is_met_ends_a_run_early(tmp_path: Path) -> None:
    rig = PretendedRig(noise=0.0)
    profile(rig, tmp_path / "p1", budget_s=1000, target=0.1)
    assert rig.spent_s < 100


def test_points_are_visited_again_while_there_is_time_and_steps_are_not(tmp_path: Path) -> None:
    found = profile(PretendedRig(), tmp_path / "p1", budget_s=90)
    visits = Counter(task_of(p).key for p in found.points if p.role != "sentinel")
    assert max(visits.values()) >= 2
    assert {visits[task_of(p).key] for p in found.points if p.kind == "step"} == {1}
    assert found.summary["visited_again"] == sum(visits.values()) - len(visits)


def test_sentinels_come_at_even_distances(full_run: Profiled) -> None:
    at = [i for i, p in enumerate(full_run.points) if p.role == "sentinel" and p.kind == "gemm"]
    assert at[0] == 0
    assert set(np.diff(at)) == {SENTINEL_EVERY + 2}


# --- going on ---------------------------------------------------------------------------------------------


def test_a_run_stopped_and_resumed_measures_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole" / "p1", tmp_path / "parts" / "p1"
    profile(PretendedRig(), whole, budget_s=40)

    class Stops(PretendedRig):
        def measure(self, task: MeasurementTask) -> Measured:
            if len(self.measured) >= 97:
                raise SimtuneError("the device does not answer any more")
            return super().measure(task)

    for _ in range(3):
        with pytest.raises(SimtuneError, match="does not answer"):
            profile(Stops(), parts, budget_s=40)
    profile(PretendedRig(), parts, budget_s=40)
    assert [point(line) for line in lines(parts)] == [point(line) for line in lines(whole)]


def point(line: str) -> str:
    """A line without what tells the time of day."""
    return json.dumps({key: value for key, value in json.loads(line).items() if key != "at_s"}, sort_keys=True)


def test_killed_five_times_and_resumed_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "profiling" / "pretended.py")]
    slow = {**os.environ, "PYTHONPATH": str(ROOT), "SLOWLY": "1", "OPENBLAS_NUM_THREADS": "1"}
    whole, parts = tmp_path / "whole" / "p1", tmp_path / "parts" / "p1"
    for at in range(5):
        running = subprocess.Popen([*command, str(parts)], env=slow)
        wanted = 60 * (at + 1)
        while running.poll() is None and (not (parts / FILE).exists() or len(lines(parts)) < wanted):
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        if at == 2:  # as if the kill had come in the middle of a write
            text = (parts / FILE).read_bytes()
            (parts / FILE).write_bytes(text[:-7])
    for folder in (parts, whole):
        subprocess.run([*command, str(folder)], env={**slow, "SLOWLY": ""}, check=True)
    assert [point(line) for line in lines(parts)] == [point(line) for line in lines(whole)]


def test_a_finished_run_given_again_measures_nothing_more(short_run: Profiled, tmp_path: Path) -> None:
    rig, said = PretendedRig(), list[str]()
    again = profile(rig, tmp_path / "p1", budget_s=25, note=said.append)
    assert rig.measured == []
    assert again.hardware == short_run.hardware
    assert any("going on after" in words for words in said)


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize(
    "other", [{"name": "Pretended P2"}, {"model": model(hidden=512)}, {"seed": 1}, {"tps": (1, 2)}]
)
def test_measurements_of_something_else_are_refused(tmp_path: Path, other: dict[str, object]) -> None:
    before = lines(tmp_path / "p1")
    rig = PretendedRig(**{"name": other.pop("name")} if "name" in other else {})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="they are not mixed: name another folder"):
        profile(rig, tmp_path / "p1", budget_s=25, **other)
    assert lines(tmp_path / "p1") == before


# --- trouble ----------------------------------------------------------------------------------------------


def test_a_shape_that_does_not_fit_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    class Small(PretendedRig):
        def measure(self, task: MeasurementTask) -> Measured:
            if task.shape.get("context", 0) > 4000 and task.role != "validation":
                self.spent_s += COST_S
                raise MemoryError
            return super().measure(task)

    found = profile(Small(), tmp_path / "p1")
    failed = [p for p in found.points if p.failed]
    assert {p.failed for p in failed} == {"out of memory"}
    assert found.summary["failed"] == len(failed) > 3
    assert found.hardware.operators["decode_attention.bf16"].box["context"][1] <= 4000


def test_too_few_points_are_said_to_be_too_few(tmp_path: Path) -> None:
    class Slow(PretendedRig):
        def measure(self, task: MeasurementTask) -> Measured:
            self.spent_s += 30
            return super().measure(task)

    rig = Slow()
    limits = rig.limits(0.02, 1.0)
    # one point is measured, and of some orders it is a product, which is enough
    seed = next(n for n in range(20) if plan([model()], (1,), limits, rig.copies, n).tasks[0].kind != "gemm")
    with pytest.raises(UsageError, match=r"too few points.*--budget"):
        profile(rig, tmp_path / "p1", budget_s=20, seed=seed)
    assert len(lines(tmp_path / "p1")) > 1


def test_what_is_off_the_fit_or_before_a_moved_sentinel_is_doubted_and_measured_again_first(tmp_path: Path) -> None:
    rig = PretendedRig(noise=0.0)
    tasks: list[MeasurementTask] = []

    def disturb(task: MeasurementTask) -> float:
        if task.role == "sentinel":
            return 1.1 if len(rig.measured) in (127, 128) else 1.0  # those after three windows
        tasks.append(task)
        products = [t for t in tasks if t.kind == "gemm" and t.role == "fit"]
        return 6.0 if products == [task] else 1.0  # the first one

    rig.disturb = disturb
    profile(rig, tmp_path / "p1")
    found = doubtful(Journal.resume(tmp_path / "p1" / FILE)[0])
    keys = [t.key for t in tasks]
    assert next(t.key for t in tasks if t.kind == "gemm" and t.role == "fit") in found
    assert set(keys[2 * SENTINEL_EVERY : 3 * SENTINEL_EVERY]) <= found
    assert len(found) < 0.4 * len(set(keys))
    again = [key for i, key in enumerate(keys) if key in keys[:i]]
    first = found & set(again)
    assert len(first) > 30
    assert set(again[: len(first)]) == first


def test_a_throttled_clock_is_told(short_run: Profiled, tmp_path: Path) -> None:
    class Hot(PretendedRig):
        def condition(self) -> dict[str, float]:
            return {"clock_mhz": 1000.0 if self.spent_s < 10 else 850.0}

    assert not short_run.summary["throttled"]
    assert profile(Hot(), tmp_path / "hot", budget_s=25).summary["throttled"]


def test_what_disturbs_the_device_is_said(tmp_path: Path) -> None:
    rig, said = PretendedRig(), list[str]()
    rig.warning = "Pretended P1: another process holds 3.0 GiB of its memory; times may be too long"
    profile(rig, tmp_path / "p1", budget_s=25, note=said.append)
    assert rig.warning in said


def test_limits_come_from_the_header_when_a_run_goes_on(short_run: Profiled, tmp_path: Path) -> None:
    class Faster(PretendedRig):
        def limits(self, call_s: float, scale: float) -> Limits:
            return Limits(9e9, 1.0, 2e12, 2e12, 1e12)

    again = profile(Faster(), tmp_path / "p1", budget_s=30)
    assert again.summary["plan"] == short_run.summary["plan"]
    assert len(again.points) > len(short_run.points)
