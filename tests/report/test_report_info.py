"""What the report says, before any of it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.report import figures, info
from simtune.report.page import render
from simtune.results.summary import SloLimit
from simtune.runs.run_reader import read_run
from simtune.runs.schema import CandidateRow, Run
from simtune.specs.plan_words import in_words
from simtune.specs.study import HardwareCount, Search, Study
from simtune.specs.workload import Slo

RunMaker = Callable[..., Path]


def candidate(name: str = "c", **known: Any) -> CandidateRow:
    numbers = {
        "tp": 1,
        "pp": 1,
        "instances": 1,
        "num_gpus": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    }
    blank: dict[str, Any] = dict.fromkeys(CandidateRow.model_fields)
    return CandidateRow(**(blank | numbers | {"candidate": name, "status": "feasible", "reason": ""} | known))


def at(x: float, y: float, **known: Any) -> CandidateRow:
    known = {"output_tokens_per_s_per_user": x, "output_tokens_per_s_per_gpu": y} | known
    return candidate(f"({x},{y})", **known)


# --- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3.1, "3.10"),
        (24.76, "24.8"),
        (1340.4, "1,340"),
        (0.0412, "0.0412"),
        (8192, "8,192"),
        (7, "7"),
        (None, "–"),
    ],
)
def test_numbers_keep_three_digits_and_whole_ones_stay_whole(value: float | None, text: str) -> None:
    assert info.number(value) == text


def test_latencies_leave_in_milliseconds() -> None:
    assert info.ms(0.61) == "610"
    assert info.ms(1.24) == "1,240"
    assert info.ms(None) == "–"


def test_percent_is_never_rounded_up_to_100() -> None:
    assert info.percent(0.9912) == "99.1 %"
    assert info.percent(1.0) == "100.0 %"
    assert info.percent(0.99999) == "> 99.9 %"


# --- the headline -----------------------------------------------------------------------------------------


def sentence(run: Path) -> str:
    return info.headline(read_run(run)).replace(info.NO_BREAK, " ")


def test_the_headline_names_plan_result_share_per_gpu_and_limits(make_run: RunMaker) -> None:
    run = make_run(goodput_rps=23.1, offered_rate_rps=24.8, num_gpus=8)
    chosen = info.chosen_name(read_run(run))
    assert sentence(run) == (
        f"{in_words(chosen)}: llama-3.1-8b serves 24.8 requests/s, 3.10 per GPU, "
        "within p99 TTFT ≤ 1,000 ms and p99 TPOT ≤ 40 ms."
    )


def test_the_headline_of_a_given_load_is_its_goodput(make_run: RunMaker) -> None:
    run = make_run(goodput_rps=23.1, offered_rate_rps=24.8, num_gpus=8, objective=None)
    assert "serves 23.1 requests/s, 2.89 per GPU, " in sentence(run)


def test_headline_of_a_saturated_plan_states_overload(make_run: RunMaker) -> None:
    run = make_run(saturated=True, offered_rate_rps=40.0, request_throughput_rps=31.2)
    assert sentence(run).endswith("cannot keep up with 40.0 requests/s: it finishes 31.2 a second.")
    labels = [label for label, _, _ in info.key_figures(read_run(run).summary)]
    assert not [label for label in labels if "TTFT" in label or "TPOT" in label]


def test_a_missed_limit_is_the_headline(make_run: RunMaker) -> None:
    slo = [
        {
            "metric": "ttft",
            "statistic": "p99",
            "limit_s": 1.0,
            "value_s": 1.34,
            "met": False,
            "class": "chat",
        },
        {"metric": "tpot", "statistic": "mean", "limit_s": 0.04, "value_s": 0.03, "met": True, "class": None},
    ]
    run = make_run(searched=False, slo=slo, offered_rate_rps=20.0)
    assert sentence(run).endswith("misses p99 TTFT ≤ 1,000 ms for chat (it reaches 1,340 ms) at 20.0 requests/s.")


def test_headline_without_limits_states_throughput(make_run: RunMaker) -> None:
    run = make_run(searched=False, slo=[], request_throughput_rps=16.0, num_gpus=8)
    assert sentence(run).endswith("serves 16.0 requests/s, 2.00 per GPU, with no latency limit set.")


def test_headline_of_autoscaled_pools_counts_the_gpus_that_they_hold(make_run: RunMaker) -> None:
    scaled = {
        "pool": "mixed", "hours": 2.0, "mean_instances": 1.0, "fewest": 1, "most": 2, "starts": 1, "drains": 1,
        "gpu_hours": 8.0, "gpu_hours_of_most": 16.0, "at_s": [0.0], "accepting": [1], "holding": [1],
    }  # fmt: skip
    run = make_run(searched=False, slo=[], request_throughput_rps=16.0, num_gpus=8, autoscaling=[scaled])
    assert "serves 16.0 requests/s, 4.00 per GPU, " in sentence(run)


def test_the_objective_in_seconds_is_shown_in_milliseconds(make_run: RunMaker) -> None:
    run = make_run(objective={"name": "e2el", "unit": "s", "value": 4.2})
    assert info.key_figures(read_run(run).summary)[0] == ("mean E2EL", "4,200", "ms")


def test_settings_keep_the_keys_of_their_file() -> None:
    hardware = (HardwareCount(profile="h100-sxm", devices=8),)
    search = Search(tp=(1, 2), requests=None)
    study = Study(name="s", model="m", hardware=hardware, workload="w", slo=Slo(ttft_s={"p99": 1.0}), search=search)
    rows = info.settings(study)
    assert rows[:3] == [("name", "s"), ("model", "m"), ("hardware.devices", "8")]
    assert ("search.tp", "1, 2") in rows
    assert ("slo.e2el_s", "none") in rows
    assert "search.requests" not in dict(rows)


def test_settings_of_lists_are_numbered_and_switches_are_words(make_run: RunMaker) -> None:
    rows = dict(info.settings(read_run(make_run()).summary.plan))
    assert rows["pools.0.async_scheduling"] == "true"
    assert rows["pools.0.batching.max_num_batched_tokens"] == "8192"


def test_settings_and_latencies_are_ordered_after_reading_sorted_json(make_run: RunMaker, optimized: Any) -> None:
    backwards = {key: dict(sorted(optimized[0][key].items())) for key in ("study", "metrics")}
    summary = read_run(make_run(**backwards)).summary
    assert summary.study
    keys = list(dict.fromkeys(key.split(".")[0] for key, _ in info.settings(summary.study)))
    assert keys == ["name", "model", "hardware", "workload", "slo", "objective", "limits", "search", "seed"]
    assert [row[0] for row in info.latency_rows(summary)] == ["TTFT", "TPOT", "E2EL", "Queueing"]


# --- candidates -------------------------------------------------------------------------------------------


def test_the_pareto_front_of_a_hand_made_set() -> None:
    best_gpu, best_user, between = at(10, 100), at(50, 20), at(30, 60)
    beaten, equal_in_one = at(29, 59), at(30, 50)
    missed = at(60, 200, status="infeasible", reason="p99 TTFT 1,240 ms exceeds 1,000 ms")
    pruned = candidate("pruned", status="pruned")
    found = info.pareto([beaten, best_user, missed, pruned, best_gpu, equal_in_one, between])
    assert [p.candidate for p in found.front] == [best_gpu, between, best_user]
    assert {p.candidate for p in found.dominated} == {beaten, equal_in_one}
    assert [p.candidate for p in found.infeasible] == [missed]
    assert found.unknown == 1


def test_two_equal_candidates_are_both_on_the_front() -> None:
    assert len(info.pareto([at(10, 10), at(10, 10), at(5, 5)]).front) == 2


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=25))
def test_pareto_front_equals_brute_force(points: list[tuple[int, int]]) -> None:
    found = info.pareto([at(x, y) for x, y in points])
    undominated = [(x, y) for x, y in points if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)]
    assert sorted((p.x, p.y) for p in found.front) == sorted(undominated)
    assert len(found.front) + len(found.dominated) == len(points)
    assert [p.x for p in found.front] == sorted(p.x for p in found.front)


def test_runners_up_are_ranked_and_say_why_they_lost(make_run: RunMaker) -> None:
    run = read_run(make_run())
    rows = info.runners_up(run)
    assert rows[0].candidate.status == "chosen"
    assert [r.candidate.status for r in rows[1:]] == ["feasible"] * 6
    ranks = [r.candidate.rank or 0 for r in rows]
    assert ranks == sorted(ranks)
    best, loser = rows[0].candidate, rows[-1]
    assert best.goodput_rps_per_gpu
    assert loser.candidate.goodput_rps_per_gpu
    worse = 100 * (1 - loser.candidate.goodput_rps_per_gpu / best.goodput_rps_per_gpu)
    assert loser.why == f"{worse:.1f} % less goodput per GPU"


def test_reason_of_the_search_takes_precedence(make_run: RunMaker) -> None:
    summary = read_run(make_run()).summary
    best = candidate("best", goodput_rps_per_gpu=2.0)
    assert info.why_lost(candidate(reason="p99 TTFT too long"), best, summary) == "p99 TTFT too long"
    assert info.why_lost(candidate(goodput_rps_per_gpu=1.5), best, summary) == "25.0 % less goodput per GPU"
    assert info.why_lost(candidate(goodput_rps_per_gpu=2.0), best, summary) == "no better in goodput per GPU"
    assert info.why_lost(candidate(), best, summary) == "goodput per GPU not known"


def test_more_gpus_lose_if_the_objective_is_gpus(make_run: RunMaker) -> None:
    summary = read_run(make_run(objective={"name": "gpus", "unit": "GPUs", "value": 4.0})).summary
    assert info.why_lost(candidate(num_gpus=6), candidate(num_gpus=4), summary) == "50.0 % more GPUs"


def test_candidates_are_counted_by_fate() -> None:
    rows = [candidate(status="chosen"), *[candidate(status="pruned")] * 3, candidate(status="does_not_fit")]
    assert info.status_counts(rows) == "5 candidates: 1 chosen, 3 pruned, 1 do not fit in memory"


# --- curves -----------------------------------------------------------------------------------------------


def test_knee_is_the_last_rate_with_goodput_near_the_offered_rate() -> None:
    calm = [False] * 5
    assert info.knee([1, 2, 3, 4, 5], [1, 2, 2.9, 3, 1], calm) == 2
    assert info.knee([1, 2, 3], [1, 2, 3], calm[:3]) == 2
    assert info.knee([1, 2, 3], [1, 2, 3], [False, True, False]) == 0
    assert info.knee([1, 2, 3], [0.5, 2, 3], calm[:3]) is None  # no knee behind the first fall of a curve
    assert info.knee([], [], []) is None


def test_curves_rise_in_rate_and_the_chosen_plan_comes_first(make_run: RunMaker) -> None:
    def point(name: str, rate: float, goodput: float) -> dict[str, Any]:
        known = {
            "slo_attainment": goodput / rate,
            "saturated": goodput < rate,
        } | dict.fromkeys(("ttft_p99_s", "tpot_p99_s", "tokens_per_round", "wasted_per_round"))
        return {"candidate": name, "rate_rps": rate, "goodput_rps": goodput} | known

    chosen = info.chosen_name(read_run(make_run()))
    run = read_run(
        make_run(sweep=[point("b", 2.0, 1.0), point(chosen, 4.0, 4.0), point("b", 1.0, 1.0)], runners_up=None)
    )
    curves = info.sweep_curves(run)
    assert [c.candidate for c in curves] == [chosen, "b"]
    assert curves[1] == info.GoodputCurve("b", (1.0, 2.0), (1.0, 1.0), (1.0, 0.5), (False, True), 0)


def test_a_plan_has_one_colour_in_all_figures(make_run: RunMaker) -> None:
    run = read_run(make_run())
    series = info.series(run)
    assert series[info.chosen_name(run)] == 0
    in_sweep = {
        t["name"]: t["line"]["color"]
        for t in figures.sweep_figure(info.sweep_curves(run), series)["data"]
        if "line" in t
    }
    for cdf in info.cdfs(run):
        for trace in figures.cdf_figure(cdf, series)["data"]:
            if trace["name"] in series:
                assert in_sweep[trace["name"]] == trace["line"]["color"]


def test_a_cdf_is_in_milliseconds_with_the_limits_of_its_own_metric(make_run: RunMaker) -> None:
    values = [i / 1000 for i in range(1, 102)]
    slo = [
        {"metric": "ttft", "statistic": "p99.9", "limit_s": 0.2, "value_s": 0.1, "met": True, "class": None},
        {"metric": "ttft", "statistic": "mean", "limit_s": 0.1, "value_s": 0.05, "met": True, "class": None},
        {"metric": "e2el", "statistic": "p50", "limit_s": 9.0, "value_s": 1.0, "met": True, "class": None},
    ]
    run = read_run(make_run(quantiles={"ttft_s": values, "tpot_s": values, "e2el_s": values}, runners_up=None, slo=slo))
    ttft, tpot = info.cdfs(run)
    assert ttft.curves == ((info.chosen_name(run), tuple(v * 1e3 for v in values)),)
    assert [(x.ms, x.level) for x in ttft.limits] == [(200.0, pytest.approx(0.999)), (100.0, None)]
    assert tpot.limits == ()
    assert not ttft.logarithmic
    drawn = figures.cdf_figure(ttft, info.series(run))["data"]
    assert (drawn[0]["x"][50], drawn[0]["y"][50]) == (51.0, 50.0)
    assert drawn[1]["y"] == [0, pytest.approx(99.9), 100]


def test_a_long_tail_gets_a_logarithmic_axis_unless_a_zero_forbids_it(make_run: RunMaker) -> None:
    tail = [0.01] * 90 + [1.0] * 11
    run = read_run(make_run(quantiles={"ttft_s": tail, "tpot_s": [0.0, *tail[1:]], "e2el_s": tail}, runners_up=None))
    ttft, tpot = info.cdfs(run)
    assert (ttft.logarithmic, tpot.logarithmic) == (True, False)


def test_one_token_answers_have_no_tpot_and_so_no_curve(make_run: RunMaker) -> None:
    run = read_run(make_run(quantiles={"ttft_s": [0.1, 0.2], "tpot_s": [], "e2el_s": [0.1, 0.2]}, runners_up=None))
    assert [cdf.title for cdf in info.cdfs(run)] == ["TTFT"]


# --- time and memory --------------------------------------------------------------------------------------


def test_cost_basis_has_shares_rows_and_note(make_run: RunMaker) -> None:
    none = dict.fromkeys(("measured", "interpolated", "extrapolated", "carried_over", "data_sheet"), 0.0)
    whole = none | {"interpolated": 0.75, "extrapolated": 0.25}
    gemm = {"operator": "gemm", "share": 0.75, "log_sd": 0.1, "basis": none | {"interpolated": 1.0}}
    head = {"operator": "head", "share": 0.25, "log_sd": 0.2, "basis": none | {"extrapolated": 1.0}}
    run = read_run(make_run(cost_basis=whole | {"operators": [gemm, head]}))
    basis = info.cost_basis(run.summary)
    assert basis is not None
    assert [words for words, _ in basis.shares] == [
        "measured",
        "interpolated",
        "extrapolated",
        "carried over",
        "kernels of another engine",
        "data sheet",
    ]
    assert basis.rows == (
        ("gemm", "75.0 %", "× or ÷ 1.18", "–", "100.0 %", "–", "–", "–", "–"),
        ("head", "25.0 %", "× or ÷ 1.39", "–", "–", "100.0 %", "–", "–", "–"),
    )
    page = render(run)
    assert "25% of the step time rests on no measurement of such shapes: 25% extrapolated (head)" in page
    assert "What the step time rests on" not in render(read_run(make_run(cost_basis=None)))


def test_a_breakdown_keeps_every_millisecond_and_splits_by_provenance(make_run: RunMaker) -> None:
    steps = [
        {
            "step": "decode",
            "parts": [
                {"operator": "gemm", "seconds": 0.004, "provenance": "published-tables"},
                {"operator": "host", "seconds": 0.001, "provenance": "assumed"},
            ],
        },
        {"step": "prefill", "parts": [{"operator": "gemm", "seconds": 0.010, "provenance": "data-sheet"}]},
    ]
    found = info.breakdown(read_run(make_run(breakdown=steps)).summary)
    assert found.labels == ("decode: 5.00 ms", "prefill: 10.0 ms")
    assert found.layers == (
        info.Layer("gemm", "published-tables", (4.0, 0)),
        info.Layer("host", "assumed", (1.0, 0)),
        info.Layer("gemm", "data-sheet", (0, 10.0)),
    )
    bars = figures.breakdown_figure(found)["data"]
    assert bars[0]["marker"]["color"] == bars[2]["marker"]["color"] != bars[1]["marker"]["color"]
    assert [bool(bar["marker"]["pattern"]["shape"]) for bar in bars] == [
        False,
        True,
        True,
    ]  # hatched: not measured


def test_memory_parts_fill_the_device(make_run: RunMaker) -> None:
    found = info.memory(read_run(make_run()).summary)
    assert found
    assert sum(share for _, _, share in found.parts) == pytest.approx(1)
    assert found.parts[0][:2] == ("weights", "15.0 GiB")
    assert found.holds.startswith("27,699 KV blocks, about 443,187 tokens")


def test_a_cache_larger_than_the_device_leaves_nothing_free(make_run: RunMaker) -> None:
    gib = 2**30
    memory = {
        "total_bytes": 10.0 * gib,
        "weights_bytes": 6.0 * gib,
        "kv_bytes": 5.0 * gib,
        "other_bytes": 0.0,
    }
    found = info.memory(read_run(make_run(memory=memory | {"kv_bytes_per_token": 100.0, "num_blocks": 9})).summary)
    assert found
    assert [name for name, _, _ in found.parts] == ["weights", "KV cache", "activations and other"]


def test_limit_is_formatted_with_statistic_metric_and_milliseconds() -> None:
    slo = SloLimit(request_class=None, metric="tpot", statistic="p99", limit_s=0.0405, value_s=None, met=False)
    assert info.limit(slo).replace(info.NO_BREAK, " ") == "p99 TPOT ≤ 40.5 ms"


def every_figure(run: Run) -> list[dict[str, Any]]:
    s, series = run.summary, info.series(run)
    assert s.timeline
    return [
        figures.pareto_figure(info.pareto(run.candidates)),
        figures.sweep_figure(info.sweep_curves(run), series),
        *(figures.cdf_figure(cdf, series) for cdf in info.cdfs(run)),
        figures.breakdown_figure(info.breakdown(s)),
        figures.timeline_figure(s.timeline),
    ]


def test_legend_of_the_front_names_servers_in_words() -> None:
    rows = [
        at(10.0, 50.0),
        at(20.0, 40.0, tp=2),
        at(30.0, 30.0, tp=2, pp=2),
        at(40.0, 20.0, tp=4, prefill="p.tp1-pp1-x1-s8-t2048"),
        at(50.0, 10.0, attention_dp=8, expert_parallel=True),
    ]
    shown = [trace["name"] for trace in figures.pareto_figure(info.pareto(rows))["data"] if trace.get("showlegend")]
    assert shown == [
        "servers of 1 GPU",
        "servers of 8 GPUs (dp 8, expert parallel)",
        "servers of 2 GPUs",
        "servers of 4 GPUs (tp 2, pp 2)",
        "decode servers of 4 GPUs",
    ]


def test_figures_have_only_properties_that_plotly_accepts(make_run: RunMaker) -> None:
    from plotly.graph_objects import Figure

    drawn = every_figure(read_run(make_run()))
    assert len(drawn) == 6
    for figure in drawn:
        Figure(figure)  # raises ValueError for a property or value it does not know


def test_a_logarithmic_axis_has_few_round_numbers() -> None:
    assert figures.log_axis("ms", [5.8, 70.0])["tickvals"] == [10, 20, 50]
    assert "tickvals" not in figures.log_axis("ms", [0.1, 0.9])
    assert "tickvals" not in figures.log_axis("ms", [])
