"""A day: replicas against trial one by one, GPU-hours by hand, and days that cannot be."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.columns import trace_of
from simtune.specs.study import Confirmation, Day, DayWindow, HardwareCount, Search, Study
from simtune.specs.workload import FixedLength, Poisson, Slo, TraceArrivals, TraceLengths, Workload
from simtune.tuner.question import SAMPLED_CORES, Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.climb import Simulation
from simtune.tuner.search.day import DayPlan, day_of, replica_of, windows_of
from simtune.tuner.space.candidates import Candidate
from simtune.tuner.trial import Tuned
from tests.cli.conftest import STUDY, call, typed

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
LOAD = Workload(
    name="load",
    requests=120,
    arrivals=Poisson(rate_rps=6.0),
    prompt=FixedLength(tokens=900),
    output=FixedLength(tokens=120),
)
DAY = Day(
    startup_s=360.0,
    windows=tuple(DayWindow(hours=hours, rate_rps=rate) for hours, rate in ((8, 4), (10, 75), (5, 30), (1, 0))),
)


def question(day: Day | None = DAY, load: Workload = LOAD, trace: Any = None, **given: Any) -> Question:
    study = Study(
        name="study",
        model=MODEL.name,
        hardware=(HardwareCount(profile="h100-sxm", devices=given.pop("devices", 6)),),
        workload=load.name,
        slo=Slo(ttft_s={"p99": 0.5}, tpot_s={"p99": 0.012}),
        day=day,
        search=Search(
            **{
                "tp": (1,),
                "pp": (1,),
                "max_num_seqs": (64,),
                "max_num_batched_tokens": (2048,),
                "confirm": Confirmation(draws=0),
                **given,
            },
        ),
    )
    return Question(study, MODEL, (HARDWARE,), load, trace)


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return optimize(question(), jobs=1)


@pytest.fixture(scope="module")
def day(tuned: Tuned) -> DayPlan:
    made = day_of(tuned, jobs=1)
    assert made is not None
    return made


def served(asked: Question, candidate: Candidate, instances: int, rate: float, length: int) -> bool:
    (pool,) = candidate.pools
    scaled = candidate.with_pools([type(pool)(pool.shape, instances, pool.max_num_seqs, pool.max_num_batched_tokens)])
    deployment = asked.deploy(scaled, length)
    stream = asked.stream(scaled)
    return Simulation(deployment, stream, asked.study.slo, rate, SAMPLED_CORES, asked.draws).run().met


def test_each_window_has_the_fewest_replicas_that_serve_it(tuned: Tuned, day: DayPlan) -> None:
    asked, length = tuned.question, tuned.deployment.max_model_len
    assert [hour.rate_rps for hour in day.hours] == [4, 75, 30, 0]
    for hour in day.hours[:3]:
        assert hour.meets_slo
        tried = [n for n in range(1, 7) if served(asked, tuned.chosen.candidate, n, hour.rate_rps, length)]
        assert hour.replicas == tried[0]
        assert hour.simulations >= 1
    assert day.hours[3].replicas == day.hours[3].simulations == 0
    assert day.hours[1].replicas > day.hours[2].replicas > 0


def test_gpu_hours_by_hand(day: DayPlan) -> None:
    a, b, c = (hour.replicas for hour in day.hours[:3])
    starts = a + (b - a)  # from none to a as the day begins again, then to b; c and none are fewer
    assert day.startup_gpu_hours == pytest.approx(starts * 360 / 3600)
    assert day.gpu_hours == pytest.approx(8 * a + 10 * b + 5 * c + day.startup_gpu_hours)
    assert day.peak_gpu_hours == b * 24
    assert day.saved == pytest.approx(1 - day.gpu_hours / day.peak_gpu_hours)
    price = HARDWARE.device.price_per_hour_usd
    assert price is not None
    assert day.usd == pytest.approx(day.gpu_hours * price)
    assert "GPU-hours" in day.lines()[0]


def test_what_all_devices_do_not_serve_is_said(tuned: Tuned) -> None:
    too_much = Day(startup_s=0.0, windows=(DayWindow(hours=1, rate_rps=2), DayWindow(hours=1, rate_rps=500)))
    made = day_of(optimize(question(too_much), jobs=1), jobs=1)
    assert made is not None
    assert [hour.meets_slo for hour in made.hours] == [True, False]
    assert made.hours[1].gpus == 6
    assert "from hour 1 500 requests/s are more than 6 GPUs can serve within the SLO" in made.lines()[1]


def test_a_replica_of_prefill_and_decode_pools_keeps_their_ratio() -> None:
    asked = question(layouts=("prefill-decode",), prefill={"instances": (4,)}, decode={"instances": (2,)})
    tuned = optimize(asked, jobs=1)
    assert [pool.instances for pool in replica_of(tuned.chosen.candidate).pools] == [2, 1]
    made = day_of(tuned, jobs=1)
    assert made is not None
    assert made.gpus_per_replica == 3
    assert all(hour.gpus % 3 == 0 for hour in made.hours)


def test_a_trace_is_cut_into_windows() -> None:
    times = np.concatenate([np.arange(0, 3600, 60.0), np.arange(3600, 7200, 2.0), [10_800.0]])
    columns = {
        "arrival_s": times,
        "prompt_tokens": np.where(times < 3600, 100, 900),
        "output_tokens": np.full(len(times), 60),
    }
    trace = trace_of(columns)
    load = LOAD.model_copy(
        update={"arrivals": TraceArrivals(), "prompt": TraceLengths(), "output": TraceLengths(), "trace": trace.file}
    )
    day = Day(startup_s=60.0, trace_window_h=1.0)
    windows = windows_of(day, trace)
    assert [round(window.rate_rps * 3600) for window in windows] == [60, 1800, 0, 1]
    made = day_of(optimize(question(day, load, trace), jobs=1), jobs=1)
    assert made is not None
    assert [hour.replicas for hour in made.hours] == [1, 1, 0, 1]
    ttft = [hour.ttft_p99_s for hour in made.hours[:2]]
    assert ttft[0] is not None
    assert ttft[1] is not None
    assert ttft[0] < ttft[1], "prompts are those of the window"


def test_two_processes_say_the_same(tuned: Tuned, day: DayPlan) -> None:
    assert day_of(tuned, jobs=2) == day


WRONG = {
    "day: {startup_s: 60}": "name either windows, or trace_window_h",
    "day: {startup_s: 60, windows: [{hours: 1, rate_rps: 0}]}": "at least one window must have a rate above zero",
    "day: {startup_s: 7200, windows: [{hours: 1, rate_rps: 1}]}": "is longer than the shortest window (1 h)",
    "day: {startup_s: 60, windows: [{hours: 1, rate_rps: -1}]}": "day.windows.0.rate_rps: must be greater",
    "day: {startup_s: 60, trace_window_h: 1}": "workload chat replays none; give windows",
}


@pytest.mark.parametrize("text", WRONG)
def test_days_that_cannot_be(tmp_path: Path, text: str) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(STUDY + text + "\n")
    said = call("optimize", study, "--dry-run")
    assert said.code == 2
    assert WRONG[text] in said.err


def test_on_the_command_line(tmp_path: Path) -> None:
    study, out = tmp_path / "study.yaml", tmp_path / "run"
    windows = "[{hours: 12, rate_rps: 3}, {hours: 12, rate_rps: 40}]"
    study.write_text(STUDY.replace("tp: [1, 2]", "tp: [1]") + f"day: {{startup_s: 120, windows: {windows}}}\n")
    said = typed("optimize", study, "--out", out, "--jobs", "1")
    assert said.code == 0
    assert "1 to 2 replicas" in said.out
    rows = list(csv.DictReader((out / "day.csv").read_text().splitlines()))
    summary = json.loads((out / "summary.json").read_text())
    assert [row["replicas"] for row in rows] == ["1", "2"]
    assert [hour["replicas"] for hour in summary["day"]["hours"]] == [1, 2]
    assert ">A day</h2>" in (out / "report.html").read_text()
    assert call("certify", out).code == 0


def test_the_money_that_a_day_saves_is_said_if_prices_are_known(day: DayPlan) -> None:
    priced = day.model_copy(update={"usd": 30.0, "peak_usd": 48.5})
    assert priced.lines()[0].endswith(f"{day.saved:.1%} saved, 18.50 of 48.50 USD")
    for unknown in ({"usd": None}, {"peak_usd": None}, {"usd": None, "peak_usd": None}):
        assert priced.model_copy(update=unknown).lines()[0].endswith(f"{day.saved:.1%} saved")
