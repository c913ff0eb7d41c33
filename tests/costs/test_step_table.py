"""A table of measured steps as a cost model: exact on its rows, never falling between them, told when outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import simtune
from simtune import api
from simtune.cli.simulate import simulate
from simtune.costs.predict import Basis
from simtune.costs.step_table import COLUMNS, StepTable
from simtune.errors import SpecError, UsageError
from simtune.sim.run_basis import cost_basis
from simtune.specs.catalog import load_plan
from simtune.testing import CostSuite

HEADER = "decodes,context_tokens,prefill_tokens,past_tokens,seconds"
LOAD = {"arrival_s": np.arange(20) * 0.05, "prompt_tokens": np.full(20, 300), "output_tokens": np.full(20, 20)}


def truth(decodes: float, context: float, new: float, past: float) -> float:
    """A step of a model bound by its weights, then by its tokens."""
    return max(8e-3, (decodes + new) * 4e-5) + 2e-5 * decodes + 1e-8 * context + 2e-10 * new * (past + new / 2)


def grid() -> np.ndarray:
    rows = {
        (b, b * c, p, past)
        for b in (0, 1, 4, 16, 64)
        for c in (128, 1024, 4096)
        for p in (0, 256, 2048)
        for past in (0, 1024)
        if (b or p) and (p or not past)
    }
    return np.array(sorted(rows), dtype=np.float64)


ROWS = grid()
TABLE = StepTable(ROWS, np.array([truth(*row) for row in ROWS]))


class TestStepTable(CostSuite):
    costs = TABLE


def seconds(decodes: int, context: int, new: int, past: int) -> float:
    return TABLE.seconds(decodes, context, ((past, new),) if new else ())


def test_rows_are_answered_as_they_are() -> None:
    for row in ROWS:
        assert seconds(*(int(x) for x in row)) == truth(*row)
        b, c, p, past = (int(x) for x in row)
        assert TABLE.basis(b, c, ((past, p),) if p else ()) == Basis.MEASURED


def test_time_never_falls_with_any_of_the_four() -> None:
    rng = np.random.default_rng(0)
    high = ROWS.max(axis=0) * 1.3
    for _ in range(400):
        x = np.rint(rng.uniform(0, 1, 4) ** 3 * high)
        x[0] = max(x[0], 1)
        x[2] = max(x[2], 1)
        which = rng.integers(4)
        further = x.copy()
        further[which] += rng.integers(1, 500)
        before, after = (seconds(*(int(v) for v in y)) for y in (x, further))
        assert before <= after * (1 + 1e-9), (x, COLUMNS[which])


def test_near_the_truth_between_rows_and_linear_beyond() -> None:
    rng = np.random.default_rng(1)
    off = []
    for _ in range(200):
        decodes = int(rng.integers(1, 64))
        context = decodes * int(rng.integers(128, 4096))
        off.append(abs(seconds(decodes, context, 0, 0) / truth(decodes, context, 0, 0) - 1))
    assert np.median(off) < 0.02
    assert np.quantile(off, 0.9) < 0.1
    assert TABLE.basis(8, 8 * 1000, ()) == Basis.INTERPOLATED
    assert TABLE.basis(64, 64 * 8192, ()) == Basis.EXTRAPOLATED
    edge, far, farther = (seconds(64, 64 * c, 0, 0) for c in (4096, 8192, 12288))
    assert edge < far < farther
    assert farther - far == pytest.approx(far - edge)
    assert far == pytest.approx(truth(64, 64 * 8192, 0, 0), rel=0.15)


def test_noise_is_smoothed_between_rows_but_kept_on_them() -> None:
    """Repeated rows count by their median; rows that fall where they should rise do not make others jump."""
    noisy = np.array([truth(*row) for row in ROWS]) * np.exp(0.03 * np.random.default_rng(0).standard_normal(len(ROWS)))
    twice, times = np.vstack([ROWS, ROWS, ROWS]), np.concatenate([noisy, 0.9 * noisy, 5 * noisy])
    table = StepTable(twice, times)
    assert table.seconds(4, 4096, ()) == noisy[(ROWS == (4, 4096, 0, 0)).all(axis=1)][0]
    contexts = range(8 * 128, 8 * 4096, 500)
    between = [table.seconds(8, c, ()) for c in contexts]
    assert (np.diff(between) >= -1e-12).all()
    assert np.median(np.abs(np.array(between) / [truth(8, c, 0, 0) for c in contexts] - 1)) < 0.06
    assert 0.005 < table.log_sd < 0.5


def write(folder: Path, text: str) -> Path:
    file = folder / "steps.csv"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decodes,context_tokens,prefill_tokens\n1,2,3\n", r"steps\.csv:1: seconds: column is missing; give the time"),
        ("decodes,seconds\n1,2\n", r"steps\.csv:1: context_tokens: column is missing"),
        ("decodes,context_tokens,seconds,milliseconds\n1,2,3,4\n", "seconds and milliseconds are both present"),
        (f"{HEADER}\n1,10,0,0,0.01\n\n2,20,0,0,nan\n", r"steps\.csv:4: seconds: 'nan': must be a time above 0"),
        (f"{HEADER}\n1,10,0,0,0.01\n2,20,0,0,\n", r"steps\.csv:3: seconds: '': must be a time above 0"),
        (f"{HEADER}\n1,10,0,0,0.01\n2,20,0,0,-0.01\n", r"steps\.csv:3: seconds: '-0.01'"),
        (
            f"{HEADER}\n1,10,0,0,0.01\n-2,20,0,0,0.01\n",
            r"steps\.csv:3: decodes: '-2': must be a whole number of at least 0",
        ),
        (f"{HEADER}\n1,10,0,0,0.01\n2,2.5,0,0,0.01\n", r"steps\.csv:3: context_tokens: '2.5'"),
        (f"{HEADER}\n1,10,0,0,0.01\n0,0,0,0,0.01\n", r"steps\.csv:3: decodes: the step neither decodes nor prefills"),
        (f"{HEADER}\n1,10,0,0,0.01\n0,9,5,0,0.01\n", r"steps\.csv:3: context_tokens: is what decodes read"),
        (f"{HEADER}\n1,10,0,0,8000\n2,20,0,0,9000\n", "the shortest step takes 8,000 s; is the time in another unit"),
        (f"{HEADER}\n1,10,0,0,0.01\n", "has 1 rows; at least 2"),
        (f"{HEADER}\n1,10,0,0,fast\n", r"steps\.csv:2: seconds: 'fast' is not a number"),
    ],
)
def test_bad_tables_are_refused_with_file_line_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        StepTable.read(write(tmp_path, text))


def test_missing_files_and_missing_steps(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file; give a table of whole steps"):
        StepTable.read(tmp_path / "none.csv")
    file = write(tmp_path, "decodes,context_tokens,milliseconds\n1,100,8\n4,4000,9\n")
    table = StepTable.read(file)
    assert table.seconds(4, 4000, ()) == pytest.approx(9e-3)
    with pytest.raises(UsageError, match=r"steps\.csv: no row has prefill_tokens above 0"):
        table.seconds(1, 100, ((0, 50),))


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    lines = [",".join(str(int(x)) for x in row) + f",{float(truth(*row))!r}" for row in ROWS]
    return write(tmp_path, "\n".join([HEADER, *lines]) + "\n")


def test_csv_and_parquet_say_the_same(steps: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    parquet = tmp_path / "steps.parquet"
    pandas.read_csv(steps).to_parquet(parquet)
    assert StepTable.read(parquet).seconds(5, 5000, ((7, 300),)) == StepTable.read(steps).seconds(5, 5000, ((7, 300),))


def test_a_table_drives_the_simulator_by_its_path(steps: Path) -> None:
    by_path = simtune.simulate(LOAD, model="llama-3.1-8b", costs=steps)
    by_name = simtune.simulate(LOAD, model="llama-3.1-8b", hardware="h100-sxm", costs=str(steps))
    by_object = simtune.simulate(LOAD, model="llama-3.1-8b", costs=TABLE)
    assert by_path.completed.all()
    assert by_path.outcome.finish.tolist() == by_object.outcome.finish.tolist() == by_name.outcome.finish.tolist()
    assert by_path.values("tpot").min() > 8e-3


def test_a_plan_names_a_table_beside_it_and_the_run_says_what_it_rests_on(steps: Path) -> None:
    plan = api.set_up(api.load_specs("llama-3.1-8b", "h100-sxm", LOAD)).deployment.plan
    pool = plan.pools[0].model_copy(update={"costs": steps.name})
    file = steps.parent / "plan.yaml"
    file.write_text(plan.model_copy(update={"pools": (pool,)}).to_yaml())
    assert load_plan(str(file)).pools[0].costs == "steps.csv"
    experiment = api.set_up(api.load_specs(None, None, LOAD, str(file)))
    result = experiment.run()
    assert (
        result.outcome.finish.tolist()
        == simtune.simulate(LOAD, model="llama-3.1-8b", costs=TABLE).outcome.finish.tolist()
    )
    basis = cost_basis(experiment.deployment, result)
    assert basis is not None
    assert basis.interpolated > 0.8
    assert [kind.operator for kind in basis.operators] == ["step"]


def test_the_command_takes_a_table(steps: Path, tmp_path: Path) -> None:
    asked = ["--model", "llama-3.1-8b", "--workload", "chat", "--requests", "30", "--costs", str(steps)]
    shown = CliRunner().invoke(simulate, [*asked, "--out", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    assert "step time" in shown.stdout
    assert (tmp_path / "run" / "report.html").exists()
    refused = CliRunner().invoke(simulate, [*asked, "--uncertainty", "20"])
    assert isinstance(refused.exception, UsageError)
    assert "brought from outside" in str(refused.exception)
