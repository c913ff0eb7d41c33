"""The file of finished points: what survives a crash, and what is refused."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import pytest

from simtune.costs.tables import own
from simtune.errors import SimtuneError, SpecError, UsageError
from simtune.profiling.measurement_journal import FILE, Journal, task_of
from simtune.profiling.measurement_plan import MeasurementTask

HEADER = {"device": "Pretended P1", "torch": "0.0", "plan": "abc"}
TASK = MeasurementTask("gemm", "bf16", {"m": 8, "n": 64, "k": 64})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Journal.create(tmp_path / FILE, HEADER) as journal:
        for m in (1, 2, 3):
            journal.record(MeasurementTask("gemm", "bf16", {"m": m, "n": 64, "k": 64}), seconds=1e-3 * m, mad=1e-6)
    return tmp_path / FILE


def test_what_was_recorded_is_read_back(path: Path) -> None:
    journal, said = Journal.resume(path)
    assert said is None
    assert [p.seconds for p in journal.points] == [1e-3, 2e-3, 3e-3]
    assert task_of(journal.points[0]).key == MeasurementTask("gemm", "bf16", {"m": 1, "n": 64, "k": 64}).key


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_last_line_cut_short_is_repaired_and_said(path: Path, cut: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    journal, said = Journal.resume(path)
    assert said is not None
    with journal:
        if len(journal.points) == 2:
            assert "cut short" in said
            journal.record(MeasurementTask("gemm", "bf16", {"m": 3, "n": 64, "k": 64}), seconds=3e-3, mad=1e-6)
    assert path.read_bytes() == whole


def test_damage_elsewhere_is_not_repaired(path: Path) -> None:
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]))
    with pytest.raises(SpecError, match=r"jsonl:2:\d+: not valid JSON"):
        Journal.resume(path)


def test_another_devices_file_is_refused(path: Path) -> None:
    journal, _ = Journal.resume(path)
    journal.must_be(device="Pretended P1", plan="abc")
    with pytest.raises(UsageError, match=r"with device \"Pretended P1\", this run has \"NVIDIA H200\".*--out"):
        journal.must_be(device="NVIDIA H200")


def test_a_full_disk_is_said_and_the_points_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    journal, _ = Journal.resume(path)
    monkeypatch.setattr(Path, "open", lambda *_, **__: Full())
    with pytest.raises(SimtuneError, match=r"No space left on device.*3 points are kept.*same command"):
        journal.record(TASK, seconds=1e-3)
    monkeypatch.undo()
    assert len(Journal.resume(path)[0].points) == 3


def test_simtune_fit_reads_the_file_and_accounts_for_every_line(path: Path) -> None:
    with Journal.resume(path)[0] as journal:
        journal.record(MeasurementTask("gemm", "bf16", {"m": 2, "n": 64, "k": 64}), seconds=9e-3)  # a second visit
        journal.record(MeasurementTask("gemm", "bf16", {"m": 5, "n": 64, "k": 64}, role="validation"), seconds=1e-3)
        journal.record(MeasurementTask("gemm", "bf16", {"m": 4, "n": 64, "k": 64}, role="sentinel"), seconds=1e-3)
        journal.record(MeasurementTask("gemm", "bf16", {"m": 9, "n": 64, "k": 64}), seconds=1e-3, mad=1e-4)
        journal.record(MeasurementTask("gemm", "bf16", {"m": 7, "n": 64, "k": 64}), failed="out of memory")
        journal.record(MeasurementTask("host", "bf16", {"sequences": 4}), seconds=2e-5)
        journal.record(MeasurementTask("copy", "bf16", {"bytes": 4096}, variant="in_memory"), seconds=1e-6)
    found = own.read(path)
    (gemm,) = found.tables
    assert dict(zip(gemm.shape["m"].tolist(), gemm.seconds.tolist(), strict=True)) == {1: 1e-3, 2: 2e-3, 3: 3e-3}
    assert gemm.merged == 1
    assert gemm.left_out == {"spread of more than 5 %": 1, "kept for checking the fit": 1, "sentinels": 1}
    assert found.unused == {"failed: out of memory": 1, "copy, measured for comparison": 1}
    assert found.hosts[0].seconds.tolist() == [2e-5]


def test_a_point_tells_a_time_or_why_it_has_none(path: Path) -> None:
    point = {"kind": "gemm", "dtype": "bf16", "shape": {"m": 1, "n": 1, "k": 1}}
    with path.open("a") as file:
        file.write(json.dumps(point) + "\n")
    with pytest.raises(SpecError, match=r"jsonl:5: .*give either seconds or failed, with the reason"):
        own.read(path)
