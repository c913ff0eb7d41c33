"""Judging: what a simulation said against what was measured, with the noise of repeats; no clock is asked."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from simtune.api import deploy_plan, load_specs, set_up
from simtune.errors import EngineError, UsageError
from simtune.report import figures
from simtune.report.validation_page import curves, render, rows, warnings
from simtune.results.result import Result
from simtune.specs.hardware import Hardware
from simtune.specs.workload import ClosedLoop, FixedLength, Lognormal, Poisson, Workload
from simtune.validation.client.measured_formats import read_run, to_aiperf, to_vllm_bench
from simtune.validation.client.measured_run import (
    MEASURED_METRICS,
    EngineFacts,
    Lateness,
    MeasuredDrafts,
    MeasuredFacts,
    MeasuredRequest,
    MeasuredRun,
)
from simtune.validation.judge.comparison import Validation, check_client
from simtune.validation.judge.prediction import predict, validation_of
from simtune.validation.judge.profile_note import recorded
from simtune.validation.loads import FRACTIONS, KNEE_SLOWDOWN, NamedLoad, knee_rps, loads
from simtune.validation.session import as_loads
from simtune.workload.requests import build_stream

WORKLOAD = Workload(
    name="w",
    arrivals=Poisson(rate_rps=4.0),
    prompt=Lognormal(mean_tokens=300, sigma=0.6, max_tokens=2000),
    output=FixedLength(tokens=20),
)
EXPERIMENT = set_up(load_specs("llama-3.1-8b", "h100-sxm", WORKLOAD), requests=40, seed=3)
DEPLOYMENT = EXPERIMENT.deployment


def as_measured(result: Result, stretch: float = 1.0, label: str = "light", **facts: object) -> MeasuredRun:
    """A run that took `stretch` times as long as simulated, token by token evenly."""
    rows = []
    for i, tokens in enumerate(result.stream.output_tokens.tolist()):
        sent = float(result.arrival_s[i])
        first, last = (sent + stretch * float(x[i]) for x in (result.ttft_s, result.e2el_s))
        rows.append(
            MeasuredRequest(
                request=i,
                due_s=sent,
                sent_s=sent,
                first_token_s=first,
                finish_s=last,
                prompt_tokens=int(result.stream.prompt_tokens[i]),
                output_tokens=tokens,
                times_s=tuple(np.linspace(first, last, tokens).tolist()),
            )
        )
    engine = EngineFacts(engine="vllm", version="0.32.0")
    return MeasuredRun(MeasuredFacts(label=label, engine=engine, **facts), tuple(rows))  # type: ignore[arg-type]


LOAD = NamedLoad("light", EXPERIMENT.stream)
PREDICTED = predict(DEPLOYMENT, LOAD, 4, seed=3)


def judged(*runs: MeasuredRun, tolerance: float = 0.1) -> Validation:
    return validation_of(DEPLOYMENT, [(LOAD, runs, PREDICTED)], tolerance)


def test_what_took_as_long_as_predicted_is_within_any_tolerance() -> None:
    validation = judged(as_measured(PREDICTED.result), tolerance=1e-6)
    assert validation.within
    (load,) = validation.loads
    assert (load.requests, load.repeats, load.failed) == (40, 1, 0)
    for metric in ("ttft", "tpot", "e2el"):
        for statistic in ("mean", "p50", "p90", "p99"):
            assert load.error(metric, statistic) == pytest.approx(0.0, abs=1e-9)
    assert load.error("request_throughput_rps", "") == pytest.approx(0.0, abs=1e-9)
    e2el = next(c for c in load.comparisons if c.name == "E2EL mean")
    assert e2el.low is not None
    assert e2el.high is not None
    assert e2el.low < e2el.high


def test_what_took_longer_is_outside_unless_repeats_differ_as_much() -> None:
    slow = judged(as_measured(PREDICTED.result, 1.25))
    assert not slow.within
    assert slow.loads[0].error("e2el") == pytest.approx(1 / 1.25 - 1)
    noisy = judged(*(as_measured(PREDICTED.result, x) for x in (1.05, 1.25, 1.45)))
    (e2el,) = (c for c in noisy.loads[0].comparisons if c.name == "E2EL mean")
    assert e2el.noise == pytest.approx(0.2 / 1.25), "half the range of the repeats over their median"
    assert e2el.error == pytest.approx(1 / 1.25 - 1)
    assert noisy.within, "20 % off is within twice the noise of 16 %"
    assert not warnings(noisy)
    (load,) = judged(*(as_measured(PREDICTED.result, x) for x in (0.7, 1.3))).loads
    wild = noisy.model_copy(update={"loads": (load,)})
    assert "light: repeats of TTFT mean differ by ± 30%, so that the verdict says little" in warnings(wild)[0]


def test_what_an_engine_counts_is_compared_where_it_tells() -> None:
    drafts = MeasuredDrafts(rounds=100, draft_tokens=300, accepted_tokens=150)
    told = judged(as_measured(PREDICTED.result, preemptions=3, drafts=drafts))
    shown = {c.name: (c.predicted, c.measured) for c in told.loads[0].comparisons}
    assert shown["preemptions"] == (0.0, 3.0)
    assert shown["acceptance"] == (None, 0.5)
    assert shown["tokens per round"] == (None, 2.5)
    assert not {"preemptions", "acceptance"} & {
        c.name for c in judged(as_measured(PREDICTED.result)).loads[0].comparisons
    }


def test_failed_requests_are_counted_by_name_and_left_out_of_the_numbers() -> None:
    run = as_measured(PREDICTED.result)
    broken = [r.model_copy(update={"error": "answered 500: x", "finish_s": None}) for r in run.requests[:2]]
    validation = judged(MeasuredRun(run.facts, (*broken, *run.requests[2:])))
    assert validation.loads[0].failures == {"answered 500: x": 2}
    assert "light: 2 requests failed: answered 500: x (2)" in render(validation, ())


def test_a_late_client_is_not_judged_by() -> None:
    late = Lateness(send_p50_s=0, send_p99_s=0.001, send_max_s=1, loop_p99_s=0.002, loop_max_s=1)
    run = as_measured(PREDICTED.result, lateness=late)
    tpot = run.statistic("tpot", "mean")
    assert tpot is not None
    check_client(run, most_late=0.0021 / tpot)
    with pytest.raises(EngineError, match=r"the client itself was late by 2\.00 ms .* nothing is judged"):
        check_client(run, most_late=0.0019 / tpot)
    check_client(as_measured(PREDICTED.result), most_late=0.0)  # fed in process: there is no client
    at_once = [r.model_copy(update={"first_token_s": r.finish_s}) for r in run.requests]
    with pytest.raises(EngineError, match=r"late by 2\.00 ms .* beyond any share of the mean TPOT of 0\.00 ms"):
        check_client(MeasuredRun(run.facts, tuple(at_once)), most_late=1e6)


def test_the_page_shows_every_load_and_loads_nothing() -> None:
    run = as_measured(PREDICTED.result, 1.25)
    validation = judged(run)
    page = render(validation, [curves("light", PREDICTED.result, [run], None)])
    assert page == render(validation, [curves("light", PREDICTED.result, [run], None)])
    drawn = re.findall(r"<figure>\s*<div", page)
    assert len(drawn) == page.count("plotly-graph-div") > 1  # what prints whole is in a figure
    assert "NOT within 10%" in page
    assert 'id="load-0-ttft"' in page
    assert "<script src" not in page
    assert "<link" not in page
    table = {row[0]: row for row in rows(validation.loads[0])}
    assert table["E2EL mean, ms"][5:] == ("-20.0%", "outside")
    assert table["E2EL p99, ms"][6] == ""


# --- loads ------------------------------------------------------------------------------------------------


def test_a_load_of_a_hostile_name_stays_text() -> None:
    hostile = "<img src=x onerror=alert(1)>\"'&"
    run = as_measured(PREDICTED.result, label=hostile)
    load = NamedLoad(hostile, EXPERIMENT.stream)
    page = render(
        validation_of(DEPLOYMENT, [(load, [run], predict(DEPLOYMENT, load, 0, seed=3))], 0.1),
        [curves(hostile, PREDICTED.result, [run], None)],
    )
    assert "<img src=x" not in page
    assert 'id="load-0-ttft"' in page
    with pytest.raises(ValueError, match="cannot be the id of a figure"):
        figures.fragment({"data": []}, hostile, 300)


def test_loads_are_fractions_of_the_knee_where_latency_doubles() -> None:
    knee = knee_rps(DEPLOYMENT, EXPERIMENT.stream, 3)

    def e2el(rate: float) -> float:
        value = DEPLOYMENT.simulate(EXPERIMENT.stream.at_rate(rate), seed=3).statistic("e2el", "mean")
        assert value is not None
        return value

    alone = e2el(0.01)
    assert e2el(knee) <= KNEE_SLOWDOWN * alone * 1.001
    assert e2el(1.05 * knee) >= KNEE_SLOWDOWN * alone * 0.95
    wanted = loads(DEPLOYMENT, EXPERIMENT.stream, seed=3)
    assert {load.label: load.rate_rps for load in wanted} == pytest.approx({k: f * knee for k, f in FRACTIONS.items()})
    assert [load.label for load in loads(DEPLOYMENT, EXPERIMENT.stream, (2.0, 0.5))] == ["2-rps", "0.5-rps"]


def test_requests_that_the_plan_refuses_have_no_knee() -> None:
    short = DEPLOYMENT.pools[0].spec.model_copy(update={"max_model_len": 400})
    deployment = deploy_plan(DEPLOYMENT.plan.model_copy(update={"pools": (short,)}))
    with pytest.raises(UsageError, match=r"requests exceed max_model_len; validate with a workload that fits"):
        knee_rps(deployment, EXPERIMENT.stream)


def test_a_closed_loop_is_one_load() -> None:
    closed = WORKLOAD.model_copy(update={"arrivals": ClosedLoop(users=3)})
    stream = build_stream(closed, None, requests=5, seed=0)
    assert [(x.label, x.rate_rps) for x in loads(DEPLOYMENT, stream)] == [("closed-loop", None)]
    with pytest.raises(UsageError, match="no request rate"):
        loads(DEPLOYMENT, stream, (1.0,))


# --- files of other tools ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text_of"), [("vllm.json", to_vllm_bench), ("aiperf.jsonl", to_aiperf)])
def test_runs_of_other_tools_say_the_same(tmp_path: Path, name: str, text_of) -> None:  # type: ignore[no-untyped-def]
    run = as_measured(PREDICTED.result, 1.1)
    broken = run.requests[5].model_copy(
        update={"error": "it broke", "first_token_s": None, "finish_s": None, "times_s": (), "output_tokens": 0}
    )
    run = MeasuredRun(run.facts, (*run.requests[:5], broken, *run.requests[6:]))
    (tmp_path / name).write_text(text_of(run))
    again = read_run(tmp_path / name)
    assert [r.error for r in again.requests] == [r.error for r in run.requests]
    assert again.prompt_tokens.tolist() == run.prompt_tokens.tolist()
    assert again.output_tokens.tolist() == run.output_tokens.tolist()
    for metric in MEASURED_METRICS:
        assert again.values(metric) == pytest.approx(run.values(metric), abs=1e-8)
    assert again.sent_s == pytest.approx(run.sent_s - run.sent_s[0], abs=1e-8)


AIPERF = (
    '{"metadata": {"request_start_ns": 1000000000}, "metrics": {"time_to_first_token": {"value": 5.0}, '
    '"request_latency": {"value": 9.0}, "input_sequence_length": {"value": 3}, "output_sequence_length": {"value": 8}}}'
)


def test_a_benchmark_of_guidellm_is_read_request_by_request(tmp_path: Path) -> None:
    data = json.loads((Path(__file__).parents[1] / "specs" / "tools" / "guidellm.json").read_text())
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="contains 2 benchmarks; pass a file with one"):
        read_run(path)
    benchmark = data["benchmarks"][0]
    broken = json.loads(json.dumps(benchmark["requests"]["successful"][-1]))
    broken["info"]["error"] = "refused"
    benchmark["requests"]["errored"] = [broken]
    path.write_text(json.dumps({"benchmarks": [benchmark]}))
    run = read_run(path)
    stated = benchmark["metrics"]["time_to_first_token_ms"]["successful"]
    assert run.statistic("ttft", "mean") == pytest.approx(stated["mean"] / 1e3, rel=1e-3)
    assert [r.error for r in run.failed] == ["refused"]
    assert len(run.requests) == 7


def test_what_other_tools_say_of_failures_is_kept(tmp_path: Path) -> None:
    silent = AIPERF.replace('"time_to_first_token": {"value": 5.0}, ', "")
    failed = silent.replace('"metrics"', '"error": {"type": "Timeout"}, "metrics"')
    words = silent.replace('"metrics"', '"error": "refused", "metrics"')
    (tmp_path / "runs").write_text("\n".join([AIPERF, "", silent, failed, words]))
    run = read_run(tmp_path / "runs")
    assert [r.error for r in run.requests] == [None, "no tokens came", "Timeout", "refused"]
    assert [(r.first_token_s, r.finish_s) for r in run.requests[:2]] == [
        (pytest.approx(0.005), pytest.approx(0.009)),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"request_latency": {"avg": 1}}', "contains aggregates only; pass the profile_export.jsonl"),
        ('{"total_input_tokens": 5, "completed": 1}', "--save-detailed"),
        ('{"some": "thing"}', "unknown format; expected a run of simtune"),
        ("not json at all", "unknown format; expected a run of simtune"),
        ('{"metadata": {}, "metrics": {}}', "is cut off or of another version"),
        ('{"metadata": {}, "metrics": {}}\n\nhalf', "is cut off or of another version"),
        (AIPERF + "\n\n{half", r"file:3: not a JSON object; the file may be cut off"),
        (AIPERF.replace('"value": 8', '"value": -8'), r"file: output_tokens: Input should be greater than or equal"),
        ('{"metadata": 7, "metrics": {}}', "is cut off or of another version"),
        ('{"metadata": {"benchmark_phase": "warmup"}, "metrics": {}}', "no requests of the profiling phase"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(Exception, match=said) as error:
        read_run(tmp_path / "file")
    assert getattr(error.value, "exit_code", None) == 2


def test_measured_runs_are_simulated_at_their_own_times() -> None:
    run = as_measured(PREDICTED.result)
    (load,), by_label = as_loads([run], EXPERIMENT.stream)
    assert load.stream.arrival_s == pytest.approx(run.sent_s)
    again = predict(DEPLOYMENT, load, 0, seed=3)
    assert validation_of(DEPLOYMENT, [(load, by_label["light"], again)], 1e-6).within
    (plain,), _ = as_loads([run], None)
    assert plain.stream.prompt_tokens.tolist() == run.prompt_tokens.tolist()


def test_a_profile_remembers_its_validations() -> None:
    validation = judged(as_measured(PREDICTED.result, 1.25))
    once = recorded(DEPLOYMENT.hardware, validation, "2026-01-02")
    twice = recorded(once, judged(as_measured(PREDICTED.result, 1.05)), "2026-01-03")
    assert twice.validations is not None
    (note,) = twice.validations
    words = "means at worst TTFT -4.8%, TPOT -4.8%, E2EL -4.8% over light (within 10%, wall clock)"
    assert str(note) == f"llama-3.1-8b with vllm 0.32.0, 2026-01-03: {words}"
    assert Hardware.from_text(twice.to_yaml()).validations == twice.validations
