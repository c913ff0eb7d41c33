"""Runs side by side: only what differs, every number beside the first, one colour each, within one offline page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simtune.errors import SpecError
from simtune.report import compare, figures, index, info, labels, side_by_side, thumbnails
from simtune.report.compare import Compared, NamedRun
from simtune.report.side_by_side import NamedFindings, NamedValidation
from simtune.report.sources import contents_of, pages, read_all
from simtune.runs.run_reader import read_run
from simtune.validation.client.measured_run import EngineFacts
from simtune.validation.judge.comparison import Comparison, LoadResult, Validation
from simtune.validation.published import Finding, Findings
from tests.report.test_report_page import Reader, read

RunMaker = Callable[..., Path]
MOST_BYTES = 8_000_000


def price(per_million: float) -> dict[str, Any]:
    known = {"per_hour_usd": 24.0, "per_million_output_tokens_usd": per_million, "source": "a list"}
    return {**known, "per_million_tokens_usd": None, "per_thousand_requests_usd": None}


def pair(make_run: RunMaker, summary: dict[str, Any], **changed: Any) -> list[NamedRun]:
    """The same run twice, the second with a larger batch and other values."""
    plan = json.loads(json.dumps(summary["plan"]))
    plan["pools"][0]["batching"]["max_num_seqs"] = 512
    return [
        NamedRun("today", read_run(make_run(price=price(2.0)))),
        NamedRun("tomorrow", read_run(make_run(price=price(1.5), plan=plan, **changed))),
    ]


def test_plan_differences_list_only_settings_that_differ(make_run: RunMaker, optimized: Any) -> None:
    runs = pair(make_run, optimized[0], seed=7)
    assert compare.plan_differences(runs) == [
        ("seed", ("0", "7")),
        ("pools.0.batching.max_num_seqs", ("256", "512")),
    ]
    assert compare.plan_differences([runs[0], runs[0]]) == []
    busier = NamedRun("busier", read_run(make_run(offered_rate_rps=2 * optimized[0]["offered_rate_rps"])))
    assert [key for key, _ in compare.plan_differences([runs[0], busier])] == ["offered, requests/s"]


def test_runs_under_different_loads_are_warned_of_with_the_keys_that_differ(make_run: RunMaker, optimized: Any) -> None:
    summary = optimized[0]
    runs = pair(make_run, summary)
    assert compare.load_warning(runs) is None, "only the plans differ"
    assert "not under the same load" not in compare.render(Compared(tuple(runs)))
    slo = [{**summary["slo"][0], "limit_s": 0.5}, *summary["slo"][1:]]
    other = NamedRun("other", read_run(make_run(offered_rate_rps=3.0, requests=77, slo=slo, seed=0)))
    warning = compare.load_warning([runs[0], other])
    assert warning is not None
    keys = warning.partition(": ")[2].partition(". ")[0].replace(info.NO_BREAK, " ")
    assert [key.partition(" (")[0] for key in keys.split("; ")] == ["offered, requests/s", "requests", "limits"]
    assert "requests (2,000 beside 77)" in keys
    assert "p99 TTFT ≤ 500 ms" in keys
    page = compare.render(Compared((runs[0], other)))
    assert f'<p class="notice loud">{warning}</p>' in page


def test_numbers_stand_beside_those_of_the_first_run(make_run: RunMaker, optimized: Any) -> None:
    summary, _ = optimized
    ttft = {**summary["metrics"]["ttft"], "p99": summary["metrics"]["ttft"]["p99"] * 0.9, "ci95": {"p99": [0.2, 0.4]}}
    runs = pair(make_run, summary, metrics={**summary["metrics"], "ttft": ttft})
    rows = {row.what: row for row in compare.numbers(runs)}
    assert rows["TTFT p99"].cells[1][1:] == ("200–400", "−10.0 %", "")
    assert rows["TPOT p99"].cells[1].difference == "="
    assert rows["output tokens"].cells[0].difference == ""
    assert rows["output tokens"].cells[1] == ("1.50", "", "−25.0 %", "")
    assert "P(SLO holds)" not in rows  # of neither run worlds were redrawn


def test_probability_of_a_lower_number_follows_from_both_intervals(make_run: RunMaker) -> None:
    def worlds(low: float, high: float) -> dict[str, Any]:
        known = {"worlds": 20, "level": 0.9, "saturated_probability": 0.0, "slo_probability": 1.0}
        return known | {"intervals": {"metrics": {"ttft": {"p99": [low, high]}}}}

    def chance(*intervals: tuple[float, float]) -> str:
        folders = [make_run(uncertainty=worlds(*interval)) for interval in intervals]
        runs = [NamedRun(folder.name, read_run(folder)) for folder in folders]
        rows = {row.what: row for row in compare.numbers(runs)}
        assert rows["TTFT p99"].cells[0].lower == rows["TPOT p99"].cells[1].lower == ""
        return rows["TTFT p99"].cells[1].lower

    assert chance((0.2, 0.4), (0.2, 0.4)) == "P(lower) 50.0 %"
    assert chance((0.2, 0.4), (0.4, 0.8)) == "P(lower) 1.0 %"  # a factor of 2 is 3.29 deviations, of both 2.33
    assert chance((0.4, 0.8), (0.2, 0.4)) == "P(lower) 99.0 %"
    assert chance((0.4, 0.4), (0.5, 0.5)) == "", "both are certain"
    assert chance((0.2, 0.4), (0.0, 0.5)) == "", "the logarithm of nothing is none"
    assert "P(lower)" not in compare.render(Compared((NamedRun("a", read_run(make_run())),) * 2))


def test_compared_numbers_include_power_and_energy(make_run: RunMaker, optimized: Any) -> None:
    duration = optimized[0]["duration_s"]
    measured = [make_run(energy_j=watts * duration, joules_per_token=watts / 1000) for watts in (500.0, 550.0)]
    runs = [NamedRun(str(i), read_run(folder)) for i, folder in enumerate(measured)]
    rows = {row.what: row for row in compare.numbers(runs)}
    assert rows["power"].cells == (("500", "", "", ""), ("550", "", "+10.0 %", ""))
    assert rows["energy"].cells == (("0.500", "", "", ""), ("0.550", "", "+10.0 %", ""))
    shown = {unit: value for _, value, unit in info.key_figures(runs[0].run.summary)}
    assert (shown["W, mean of all GPUs"], shown["J per output token"]) == ("500", "0.500")
    unknown = pair(make_run, optimized[0])
    assert not {"power", "energy"} & {row.what for row in compare.numbers(unknown)}
    assert "power" not in {label for label, _, _ in info.key_figures(unknown[0].run.summary)}


def test_a_saturated_run_has_no_latency_and_no_curve(make_run: RunMaker, optimized: Any) -> None:
    runs = pair(make_run, optimized[0], saturated=True)
    rows = {row.what: row for row in compare.numbers(runs)}
    assert rows["TTFT p99"].cells[1] == ("saturated", "", "", "")
    curves = [trace["name"] for trace in compare.overlays(runs)["ttft"]["data"]]
    assert curves == ["today"]


def test_a_run_keeps_its_colour_through_the_page(make_run: RunMaker, optimized: Any) -> None:
    runs = pair(make_run, optimized[0])
    for name, figure in compare.overlays(runs).items():
        lines = {
            trace["name"]: trace["line"]["color"] for trace in figure["data"] if trace["name"] in ("today", "tomorrow")
        }
        assert lines == {"today": figures.COLOURS[0], "tomorrow": figures.COLOURS[1]}, name
    page = compare.render(Compared(tuple(runs)))
    assert re.findall(r'<i class="dot" style="background: (#\w+)"></i>tomorrow', page) == [figures.COLOURS[1]] * 4


def test_compare_page_of_ten_runs_is_self_contained(make_run: RunMaker) -> None:
    runs = [NamedRun(f"run {i} <b>&", read_run(make_run())) for i in range(10)]
    page = compare.render(Compared(tuple(runs)))
    assert len(page.encode()) < MOST_BYTES
    assert page == compare.render(Compared(tuple(runs)))
    reader = read(page)
    assert reader.headings == ["The runs", "What differs", "Numbers", "Figures"]
    assert not [attrs for tag, attrs in reader.tags if tag == "script" and "src" in attrs]
    assert not [tag for tag, _ in reader.tags if tag in ("link", "b")]
    assert json.loads(reader.scripts["numbers"])["run 3 <b>&"]["GPUs"] == 8


def test_many_runs_have_fewer_points_each(make_run: RunMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 runs were a page of 22 MB."""
    runs = [NamedRun(f"run {i}", read_run(make_run())) for i in range(2)]
    timeline = runs[0].run.summary.timeline
    assert timeline is not None
    monkeypatch.setattr(compare, "MOST_POINTS", len(timeline.t_s))
    lines = compare.overlays(runs)["running"]["data"]
    assert [line["x"] for line in lines] == [list(timeline.t_s[::2])] * 2


def test_equal_run_names_are_numbered() -> None:
    assert compare.distinct(["a", "b", "a"]) == ["a (1)", "b", "a (2)"]


def test_an_index_links_to_every_run(make_run: RunMaker, tmp_path: Path) -> None:
    for _ in range(2):
        make_run(price=price(2.0))
    folders = contents_of(tmp_path)
    assert len(folders) == 2
    assert contents_of(folders[0]) == ()
    page = index.render("runs", read_all(folders), (), pages(folders))
    assert [f'href="{f.name}/report.html"' in page for f in folders] == [True, True]
    row = index.index_row(NamedRun("a b", read_run(folders[0])), "a b/report.html")
    assert row.link == "a%20b/report.html"
    assert dict(zip(index.COLUMNS, row.cells, strict=True))["state"] == "meets its limits"


def test_index_lists_validations_and_reproductions(make_run: RunMaker, tmp_path: Path) -> None:
    make_run()
    validated, listed = tmp_path / "validated", [tmp_path / "then.json", tmp_path / "now.json"]
    validated.mkdir()
    (validated / "validation.json").write_text(json.dumps(validation(0.2).to_data()))
    for file in listed:
        file.write_text(json.dumps(Findings.of([finding(1.2, "differs"), finding(None, "needs")]).to_data()))
    (tmp_path / "now.html").write_text("")
    (tmp_path / "other.json").write_bytes(b"\xff")
    found = contents_of(tmp_path)
    assert len(found) == 4
    assert contents_of(validated) == ()
    page = index.render("all", read_all(found), (), pages(found))
    links = re.findall(r'href="([^"]+)"', page)
    assert sorted(links) == ["now.html", "run0/report.html", "then.json", "validated/validation.html"]
    words = Reader(page).words
    assert "1 run, 1 validation, 2 reproductions" in words
    assert "validated on vllm: not within 10.0 %, at most 20.0 % off" in words
    assert "1 differs, 1 needs" in words
    svg = thumbnails.of_validation(validation(0.2))
    assert svg.count("<circle") == 1
    assert "1 latencies" not in svg


def test_thumbnails_share_one_axis_and_are_small(make_run: RunMaker) -> None:
    slow = {name: [20 * x for x in values] for name, values in read_run(make_run()).summary.quantiles or ()}
    settled, slower, lost = (
        read_run(make_run(**changes)).summary for changes in ({}, {"quantiles": slow}, {"saturated": True})
    )
    span = thumbnails.e2el_span([settled, slower, lost])
    assert span is not None
    ends = []
    for s in (settled, slower):
        svg = thumbnails.of_run(s, span)
        assert len(svg) < 1000
        (line,) = re.findall(r'points="([^"]+)"', svg)
        places = [tuple(map(float, place.split(","))) for place in line.split()]
        assert places == sorted(places, key=lambda p: p[0])
        assert [p[1] for p in places] == sorted((p[1] for p in places), reverse=True)  # y grows downwards in an SVG
        ends.append((places[0][0], places[-1][0]))
    assert ends[0][0] == thumbnails.MARGIN
    assert ends[1][1] == thumbnails.WIDTH - thumbnails.MARGIN
    assert ends[0][1] < ends[1][1]
    assert thumbnails.of_run(lost, span) == ""
    assert "&lt;b&gt;" in thumbnails.drawn([(0, 0), (1, 1)], "<b>")


@pytest.mark.parametrize(("relative", "shown"), [(0.0004, "="), (0.1234, "+12.3 %"), (-0.5, "−50.0 %")])
def test_relative_difference_is_formatted_with_sign(relative: float, shown: str) -> None:
    assert compare.difference(relative) == shown


# --- validations and published systems --------------------------------------------------------------------

HOSTILE = "<img src=x>"


def validation(error: float, label: str = HOSTILE) -> Validation:
    ttft = Comparison(
        metric="ttft", statistic="mean", unit="s", predicted=0.1 * (1 + error), low=None, high=None, measured=0.1,
        noise=0.01, error=error, within=abs(error) < 0.1,
    )  # fmt: skip
    load = LoadResult(
        label=label, rate_rps=2.0, requests=10, repeats=3, failed=0, failures={}, saturated=False,
        lateness_p99_s=None, comparisons=(ttft,),
    )  # fmt: skip
    return Validation(
        schema_id="simtune/validation@1", name="p", model="m", hardware="h", device="d",
        engine=EngineFacts(engine="vllm", version="1"), clock="wall", tolerance=0.1, loads=(load,),
        within=abs(error) < 0.1,
    )  # fmt: skip


def finding(simulated: float | None, status: str) -> Finding:
    return Finding.model_validate(
        {"family": "f", "system": "s", "title": HOSTILE, "year": 2024, "source": "x", "status": status, "claim": "c"}
        | {"claimed": 2.0, "band": [1.5, 2.5], "simulated": simulated, "base": 1.0, "variant": 2.0, "metric": "ttft"}
        | {"reason": None, "inputs": [], "assumed": [], "chosen": None, "not_modelled": []}
    )


def test_compare_page_puts_validations_side_by_side() -> None:
    pair = [NamedValidation("one", validation(0.2)), NamedValidation("two", validation(-0.05))]
    (row,) = side_by_side.errors(pair)
    assert row == (f"{HOSTILE}: TTFT mean", (("+20.0 %", True), ("−5.0 %", False)))
    apart = [pair[0], NamedValidation("two", validation(0.0, label="other"))]
    assert [cell for row in side_by_side.errors(apart) for cell, _ in row.cells] == ["+20.0 %", "–", "–", "+0.0 %"]
    colours = [trace.get("marker", {}).get("color") for trace in side_by_side.errors_figure(pair, 3)["data"]]
    assert colours == [figures.COLOURS[3], figures.COLOURS[4], None]


def test_compare_page_puts_published_systems_side_by_side() -> None:
    lists = [
        NamedFindings("then", Findings.of([finding(1.2, "differs")])),
        NamedFindings("now", Findings.of([finding(2.0, "assumed")])),
    ]
    assert side_by_side.gains(lists) == [(HOSTILE, (("1.20 differs", True), ("2.00 assumed", False)))]
    assert side_by_side.gains([NamedFindings("none", Findings.of([finding(None, "needs")]))]) == []


def test_compare_page_mixes_runs_validations_and_reproductions(make_run: RunMaker, tmp_path: Path) -> None:
    run, other, listed = make_run(), tmp_path / "validated", tmp_path / "systems.json"
    other.mkdir()
    (other / "validation.json").write_text(json.dumps(validation(0.2).to_data()))
    listed.write_text(json.dumps(Findings.of([finding(1.2, "differs")]).to_data()))
    compared = read_all([listed, run, other])
    assert compared.names == [run.name, "validated", "systems.json"]
    reader = read(compare.render(compared))
    assert reader.headings == [
        "The runs", "What differs", "Numbers", "Predicted over measured", "Published systems", "Figures",
    ]  # fmt: skip
    assert "predictions are not within" in reader.words or "outside" in reader.words
    assert not [tag for tag, _ in reader.tags if tag == "img"]
    assert reader.words.count(HOSTILE) >= 2
    alone = read(compare.render(read_all([other])))
    assert alone.headings == ["The runs", "Predicted over measured", "Figures"]
    listed.write_text("{}")
    with pytest.raises(SpecError, match="must be simtune/findings@2"):
        read_all([listed])


def test_validation_has_a_notebook_representation() -> None:
    one = validation(0.2)
    assert "+20.0%, outside" in one._repr_html_()
    assert "<img" not in one._repr_html_()
    (cloud,) = one.figures()["scatter"].data
    assert (cloud.x, cloud.y) == ((100.0,), (120.0,))
    pytest.importorskip("pyarrow")
    assert one.to_arrow().column("error").to_pylist() == [0.2]


def test_series_colours_are_distinct() -> None:
    assert len({figures.series_colour(i) for i in range(24)}) == 24


def test_labels_keep_quotes_and_cut_long_names_in_the_middle() -> None:
    assert labels.escape("""<b>"a" & 'b'""") == """&lt;b&gt;"a" &amp; 'b'"""
    assert labels.briefs(["a" * 40]) == {"a" * 40: "a" * 40}
    long = "a" * 40 + "<" + "b" * 40
    assert labels.briefs([long])[long] == "a" * 19 + "…" + "b" * 20


@pytest.mark.parametrize(
    "names",
    [
        ["run-" + "x" * 50 + end for end in ("-2048", "-8192")],
        [f"{'begin' * 10}{middle}{'end' * 20}" for middle in ("one", "two", "one more", "")],
        [f"{'x' * 60}{i:04}{'y' * 60}{i % 7}" for i in range(60)],
    ],
)
def test_long_names_in_a_legend_never_look_alike(names: list[str]) -> None:
    short = labels.briefs(names)
    assert len({*short.values()}) == len(names)
    assert all(len(label) <= labels.LONGEST + len(" (60)") for label in short.values())


def test_plans_in_a_legend_are_not_cut_and_say_only_what_differs() -> None:
    name = "p.tp2-pp1-x2-s{}-t8192_d.tp4-pp1-x1-s256-t{}"
    few, many = name.format(64, 2048), name.format(128, 8192)
    assert labels.plan_labels([few, many], chosen=few) == {
        few: "prefill with 64 seats, decode with 2,048 tokens<br>a step (chosen)",
        many: "prefill with 128 seats, decode with 8,192 tokens<br>a step",
    }
    assert labels.plan_labels(["<b>"]) == {"<b>": "&lt;b&gt;"}


def test_narrow_logarithmic_axis_has_tick_labels() -> None:
    assert figures.log_ticks(1, 1000) == [1, 3, 10, 30, 100, 300, 1000]
    assert figures.log_ticks(107, 274) == [150, 200, 250]
    assert figures.log_ticks(40, 41) == [40, 41]
