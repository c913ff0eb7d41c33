"""Results of a real system tighten the answer of a search, change it, or contradict it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simtune.errors import UsageError
from simtune.sim.deployment import Deployment
from simtune.sim.drawn_worlds import DrawnWorlds
from simtune.tuner.doubt.leaders import PlanErrors, faster
from simtune.tuner.space.expressible import space_for
from simtune.validation.measured_answer import MeasuredAnswer, measured_answer
from simtune.validation.next_measurement import (
    MEASURE_SCHEMA,
    LeadingPlan,
    NextMeasurement,
    RunToMake,
    predicted_means,
    script,
)
from simtune.workload.requests import RequestStream, build_stream
from tests.tuner.test_search import LOAD, question

WORLDS, NOISE = 200, 0.03
A, B = "tp1-pp1-x1-s64-t2048", "tp1-pp1-x1-s8-t2048"


@pytest.fixture(scope="module")
def server() -> Deployment:
    q = question(tp=(1,), max_num_seqs=(64,), max_num_batched_tokens=(2048,), devices=1)
    (candidate,) = space_for(q).candidates
    return q.deploy(candidate, 4096)


@pytest.fixture(scope="module")
def record() -> NextMeasurement:
    """Two plans of values that are as long in doubt as the plans by themselves."""
    errors = PlanErrors(DrawnWorlds.of(WORLDS, 0), 0, 0.1)
    plans = [
        LeadingPlan(
            name=name,
            gpus=1,
            parts=1,
            value=value,
            log_values=tuple((np.log(value) - errors.of_plan(number)).tolist()),
            own_errors=tuple(errors.of_plan(number).tolist()),
            log_sd={},
        )
        for number, (name, value) in enumerate(((A, 10.0), (B, 9.5)))
    ]
    return NextMeasurement(
        schema_id=MEASURE_SCHEMA, study="s", study_file=None, unit="requests/s", digest="", seed=0, worlds=WORLDS,
        noise=NOISE, right=0.6, rival=B, plans=tuple(plans), runs=(),
    )  # fmt: skip


def stream() -> RequestStream:
    return build_stream(LOAD, None, requests=40, seed=3).at_rate(2.0)


def measured(folder: Path, name: str, server: Deployment, factor: float, error: str = "") -> Path:
    """Write what `vllm bench serve` would, of a system on which everything takes `factor` times as long."""
    sent = stream()
    result = server.simulate(faster(sent, np.log(factor)))
    gaps = factor * np.nan_to_num(result.tpot_s)
    assert sent.arrival_s is not None
    data = {
        "total_input_tokens": 1,
        "input_lens": sent.prompt_tokens.tolist(),
        "output_lens": sent.output_tokens.tolist(),
        "start_times": sent.arrival_s.tolist(),
        "ttfts": (factor * result.ttft_s).tolist(),
        "itls": [[gap] * (n - 1) for gap, n in zip(gaps.tolist(), sent.output_tokens.tolist(), strict=True)],
        "errors": [error, *[""] * (len(sent) - 1)],
    }
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def answer(record: NextMeasurement, server: Deployment, *files: Path) -> MeasuredAnswer:
    return measured_answer(record, {A: server, B: server}, files)


def test_results_as_predicted_tighten_the_answer(record: NextMeasurement, server: Deployment, tmp_path: Path) -> None:
    files = [measured(tmp_path, f"{A}.rate-90.json", server, 1.0), measured(tmp_path / B, "x.json", server, 1.0)]
    said = answer(record, server, *files)
    assert (said.best, said.contradicted, said.moved) == (A, False, True)
    assert [run.plan for run in said.runs] == [A, B], "by the file, by the folder"
    assert {mean.verdict for run in said.runs for mean in run.means} == {"within"}
    first = said.plans[0]
    (low, high), (low_now, high_now) = first.before, first.after
    assert low is not None and high is not None and low_now is not None and high_now is not None  # noqa: PT018
    assert low < low_now < 10.0 < high_now < high
    assert high_now - low_now < 0.6 * (high - low)
    assert "is still the best plan" in said.lines()[-1]


def test_a_slower_plan_is_replaced(record: NextMeasurement, server: Deployment, tmp_path: Path) -> None:
    files = [measured(tmp_path, f"{A}.a.json", server, 1.15), measured(tmp_path, f"{B}.a.json", server, 0.97)]
    said = answer(record, server, *files)
    assert (said.chosen, said.best, said.contradicted) == (A, B, False)
    assert said.plans[1].best_after > 0.95 > said.plans[1].best_before
    assert "is now the best plan" in said.lines()[-1]


def test_results_that_contradict_every_interval_move_nothing(
    record: NextMeasurement, server: Deployment, tmp_path: Path
) -> None:
    said = answer(record, server, measured(tmp_path, f"{A}.a.json", server, 4.0))
    assert (said.best, said.contradicted, said.moved) == (A, True, False)
    assert all(plan.before == plan.after for plan in said.plans)
    assert {mean.verdict for run in said.runs for mean in run.means} == {"contradicts"}
    assert said.lines()[0].startswith("every run contradicts the prediction")


def test_a_run_that_contradicts_is_left_out_of_others(
    record: NextMeasurement, server: Deployment, tmp_path: Path
) -> None:
    good, bad = measured(tmp_path, f"{A}.a.json", server, 1.0), measured(tmp_path, f"{B}.b.json", server, 4.0)
    said = answer(record, server, good, bad)
    assert said.plans[0].after == answer(record, server, good).plans[0].after
    assert f"{B}.b.json: contradicts" in said.lines()[0]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("bench.json", "", rf"call it PLAN.LOAD.json, PLAN one of {A}, {B}"),
        (f"{A}.a.json", "refused", r"1 of 40 requests failed \(refused\); measure again"),
    ],
)
def test_results_that_cannot_be_used_are_refused(
    record: NextMeasurement, server: Deployment, tmp_path: Path, name: str, error: str, words: str
) -> None:
    path = measured(tmp_path, name, server, 1.0, error)
    with pytest.raises(UsageError, match=words):
        answer(record, server, path)


def test_the_script_runs_the_loads_of_one_plan(record: NextMeasurement) -> None:
    made = RunToMake(
        name=f"{A}.rate-90", plan=A, load="rate-90", requests=10, rate_rps=2.0, users=None, prompt_tokens=8,
        output_tokens=9, predicted=predicted_means({"tpot": np.log(np.array([0.01, 0.02, 0.03]))}), right_after=0.9,
        commands={"vllm bench serve": "vllm bench serve one", "aiperf": "aiperf two"},
    )  # fmt: skip
    filled = record.model_copy(update={"runs": (made,)})
    text = script(filled)
    assert f"{A})\n    # rate-90: prompts of 8 and outputs of 9 tokens, 2 requests/s, 10 requests\n" in text
    assert "vllm bench serve one" in text
    assert "aiperf two" not in text
    assert filled.lines() == [
        "60% sure of the chosen plan against 1 server of 1 GPU, 8 seats, 2,048 tokens a step; expected after 1 run 90%"
    ]
