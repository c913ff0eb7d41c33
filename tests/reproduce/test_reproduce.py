"""Both sides of a claim: what is measured, how it is judged, what the stored results and the README say."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.reproduced import LINE, readme_line
from simtune.cli import cli
from simtune.costs.iteration import StepModel, StepWork
from simtune.errors import UsageError
from simtune.report.published_page import families, gains_figure, render
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.pool import Pool
from simtune.specs.systems import StepSeconds, Systems, merged, plan_of, workload_of
from simtune.validation.published import Findings, headline, reproduce, select
from simtune.validation.published.collection import STORED, Entry, folder
from simtune.validation.published.evidence import batched, restated, unchanged
from simtune.validation.published.findings import NOT_SERVING
from simtune.validation.published.reproduction import CARDS
from simtune.validation.published.sides import Runner, bisected, grouped, order_of
from simtune.workload.requests import build_stream

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Findings.model_validate(json.loads((folder() / STORED).read_text(encoding="utf-8")))
QUICK = ("sarathi", "pearl", "lserve", "hydragen", "fastkv", "first-finish-search", "medusa", "stream2llm", "dms")


def entry(**fields: object) -> Entry:
    """An entry of a small model on one H100."""
    system = {
        "name": "one",
        "title": "One",
        "source": "a test",
        "claim": {"says": "x", "gain": 2, "band": [1.05, 4]},
        "variant": {},
        **fields,
    }
    shared = {"model": "llama-3.2-1b", "hardware": "h100-sxm", "pool": {"max_model_len": 4096}}
    family = Systems.model_validate(
        {"name": "mine", "title": "Mine", "setup": shared, "systems": [system]}, strict=False
    )
    return Entry(family, family.systems[0])


def test_the_stored_results_are_of_this_collection() -> None:
    assert [finding.system for finding in RESULTS.findings] == [entry.system.name for entry in select([])]
    for finding, one in zip(RESULTS.findings, select([]), strict=True):
        if finding.ran:
            told = [one.what for one in one.system.inputs]
            assert [found.what for found in finding.inputs] == [*told, *one.system.unpublished]
            assert set(one.system.unpublished) <= set(finding.assumed) <= {*told, *one.system.unpublished}
        assert finding.chosen == one.system.chosen
        assert finding.ran == (one.system.variant is not None)
        if finding.simulated is not None and finding.band is not None:
            inside = finding.band[0] <= finding.simulated <= finding.band[1]
            assert (finding.status == "differs") == (not inside)
            assert (finding.status == "fitted") == (inside and bool(finding.chosen or finding.restates))
            assert not finding.assumed or finding.status in ("assumed", "fitted", "weak", "differs")
            assert not finding.uncovered or finding.status == "assumed"
            assert (finding.status == "reproduced") <= (not unchanged(finding.cards))


def test_the_readme_says_what_the_results_say() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert LINE.search(readme)[0] == readme_line(RESULTS.findings)  # type: ignore[index]


def test_every_difference_has_a_measured_reason() -> None:
    for finding in RESULTS.findings:
        if finding.status == "differs":
            assert finding.reason is not None
            assert "from the band" in finding.reason, finding.system
        elif finding.status in ("needs", "not a schedule"):
            assert finding.reason, finding.system


def test_some_systems_come_out_as_they_are_stored() -> None:
    stored = {finding.system: finding for finding in RESULTS.findings}
    again = list(reproduce(select(QUICK), jobs=1))
    assert {finding.system for finding in again} == set(QUICK)
    for finding in again:
        assert finding.status == stored[finding.system].status
        before = stored[finding.system].simulated
        assert finding.simulated == (None if before is None else pytest.approx(before, rel=2e-3))


def test_on_other_hardware_nothing_is_judged() -> None:
    (there,) = reproduce(select(["sarathi"]), hardware="h100-sxm", jobs=1)
    (here,) = reproduce(select(["sarathi"]), jobs=1)
    assert (there.status, here.status) == ("elsewhere", "assumed")
    assert there.base > here.base  # type: ignore[operator]
    (small,) = reproduce(select(["sarathi"]), hardware="rtx-4090", jobs=1)
    assert small.status == "infeasible"
    assert "missing" in small.reason  # type: ignore[operator]


def test_the_same_result_from_any_number_of_processes() -> None:
    entries = select(["overlap", "prefix"])
    assert list(reproduce(entries, jobs=2)) == list(reproduce(entries, jobs=1))


def test_a_side_that_does_not_fit_is_told_with_its_name() -> None:
    too_large = entry(setup={"model": "llama-2-70b"}, measure={"kind": "memory"})
    (finding,) = reproduce([too_large], jobs=1)
    assert (finding.family, finding.system, finding.status) == ("mine", "one", "failed")
    assert "GiB per device are missing" in (finding.reason or "")


def test_phases_are_added_up_and_beside_one_another_the_longest_counts() -> None:
    step = {"step": {"decodes": 1, "context": 512}}
    runner = Runner()
    one = entry(measure={"kind": "step"}, variant=step)
    phases = [{"times": 0.25, "setup": step}, {"times": 2.0, "setup": {"step": {"decodes": 1, "context": 2048}}}]
    several = entry(measure={"kind": "step"}, variant={"phases": phases})
    beside = entry(measure={"kind": "step"}, variant={"phases": phases, "beside": True})
    values = [
        runner.measure(e.family, e.family.sides(e.system)["variant"], e.system.measure) for e in (one, several, beside)
    ]
    pool = Pool.model_validate(
        {"hardware": "h100-sxm", "instances": 1, "batching": {"max_num_seqs": 256, "max_num_batched_tokens": 8192}},
        strict=False,
    )
    model = StepModel(load_model("llama-3.2-1b"), load_hardware("h100-sxm"), pool)
    short, long = (model.seconds(StepWork(1, context, (), 1)) for context in (512, 2048))
    assert values[0].value == short
    assert values[1].value == pytest.approx(0.25 * short + 2 * long, rel=1e-12)
    assert values[2].value == pytest.approx(2 * long, rel=1e-12)


def test_the_best_of_several_counts() -> None:
    tried = [{"batching": {"max_num_seqs": n}} for n in (1, 4, 2)]
    load = {"arrivals": {"kind": "closed_loop", "users": 4}, "requests": 8, "prompt": 64, "output": 64}
    one = entry(setup={"workload": load}, variant={"best_of": tried})
    (finding,) = reproduce([one], jobs=1)
    assert finding.reason is not None
    assert "variant: best of 3: max_num_seqs 4" in finding.reason


def test_a_number_of_its_own_is_held_against_the_claimed_one() -> None:
    load = {"arrivals": {"kind": "closed_loop", "users": 1}, "requests": 2, "prompt": 64, "output": 64}
    own = entry(setup={"workload": load}, claim={"says": "100 tokens/s", "value": 100, "band": [0.9, 1.1]})
    (finding,) = reproduce([own], jobs=1)
    assert finding.base == 100
    assert finding.claimed == 1
    assert finding.simulated == pytest.approx(finding.variant / 100, rel=1e-3)  # type: ignore[operator]
    assert finding.status == "differs"


ALONE = {"policy": "static", "max_num_seqs": 1, "max_num_batched_tokens": 4096, "chunked_prefill": False}


def test_a_formula_says_what_gain_is_claimed() -> None:
    """M/D/1: the mean wait is rate x service^2 / (2 (1 - rate x service))."""
    load = {"arrivals": {"kind": "poisson", "rate_rps": 0.5}, "requests": 1500, "prompt": 32}
    by_formula = entry(
        measure={"kind": "load", "metric": "queue"},
        claim={"says": "x", "formula": "pollaczek_khinchine", "band": [0.9, 1.1]},
        setup={"workload": load, "pool": {"batching": ALONE}},
        base={"workload": {"output": 600}},
        variant={"workload": {"output": 300}},
    )
    (finding,) = reproduce([by_formula], jobs=1)
    assert finding.status == "assumed"
    assert finding.claimed == 1
    runner, sides = Runner(), by_formula.family.sides(by_formula.system)
    done = {name: runner.measure(by_formula.family, side, by_formula.system.measure) for name, side in sides.items()}
    stream = build_stream(workload_of(sides["base"], "base"), None, requests=1500, seed=0)
    rate = 1499 / (stream.arrival_s[-1] - stream.arrival_s[0])  # type: ignore[index]
    wait = done["base"].by_formula["pollaczek_khinchine"]
    service = (np.sqrt((2 * wait * rate) ** 2 + 8 * wait * rate) - 2 * wait * rate) / (2 * rate)
    assert done["base"].value == pytest.approx(wait, rel=0.1)
    assert 0.9 < service / (600 * runner.measure(*_one_decode(by_formula)).value) < 1.1


def _one_decode(of: Entry) -> tuple[Systems, dict[str, object], StepSeconds]:
    side = of.family.sides(of.system)["base"]
    return of.family, {**side, "step": {"decodes": 1, "context": 332}}, StepSeconds()


def test_a_step_of_nothing_is_told() -> None:
    nothing = entry(setup={"step": {"context": 512}}, measure={"kind": "step"})
    (finding,) = reproduce([nothing], jobs=1)
    assert finding.status == "failed"
    assert "a step of no decodes and no chunks delivers nothing" in (finding.reason or "")


def test_a_formula_that_does_not_hold_is_told() -> None:
    load = {"arrivals": {"kind": "poisson", "rate_rps": 5}, "requests": 200, "prompt": 32, "output": 600}
    overloaded = entry(
        measure={"kind": "load", "metric": "queue"},
        claim={"says": "x", "formula": "pollaczek_khinchine", "band": [0.9, 1.1]},
        setup={"workload": load, "pool": {"batching": ALONE}},
    )
    for hardware in (None, "l4"):
        finding, other = reproduce(
            [overloaded, entry(measure={"kind": "step"}, **ONE_AND_TWO)], hardware=hardware, jobs=1
        )
        assert (finding.status, finding.simulated) == ("failed", None)
        assert "pollaczek_khinchine says nothing of these requests" in (finding.reason or "")
        assert other.simulated is not None, "the others are run all the same"


def test_a_difference_is_probed_and_what_is_no_difference_is_not() -> None:
    probe = {"what": "with a context of 65,536 in the base", "base": {"step": {"context": 65536}}}
    for band, said in (([4, 6], True), ([1, 4], False)):
        claim = {"says": "x", "gain": band[0], "band": band}
        (finding,) = reproduce([entry(measure=STEP, claim=claim, probes=[probe], **ONE_AND_TWO)], jobs=1)
        assert ("with a context of 65,536 in the base" in (finding.reason or "")) == said


def test_as_many_decodes_as_a_step_allows() -> None:
    """And no more; seconds of all GPUs over the tokens of all groups."""
    step = {"decodes": 64, "context": 512}
    most = entry(measure={"kind": "step", "within_s": 0.003, "per_gpu": True}, variant={"step": step})
    side = most.family.sides(most.system)["variant"]
    result = Runner().measure(most.family, side, most.system.measure)
    decodes = int(result.note.split()[0])
    model = StepModel(load_model("llama-3.2-1b"), load_hardware("h100-sxm"), plan_of(side, "x").pools[0])
    assert model.seconds(StepWork(decodes, decodes * 512, (), decodes)) <= 0.003
    assert decodes == 64 or model.seconds(StepWork(decodes + 1, (decodes + 1) * 512, (), decodes + 1)) > 0.003
    assert result.value == pytest.approx(model.seconds(StepWork(decodes, decodes * 512, (), decodes)) / decodes)


STEP = {"kind": "step"}
ONE = {"step": {"decodes": 1, "context": 64}}
ONE_AND_TWO = {"base": ONE, "variant": {**ONE, "pool": {"parallelism": {"tp": 2}}}}
"""On one GPU and on two: 1.39 on A100, 1.15 on H100, 1.0 on B200."""


def guessed(*contexts: int) -> dict[str, object]:
    """An input that could be otherwise: the base has contexts of so many tokens."""
    ends = [{"base": {"step": {"context": context}}} for context in contexts]
    return {"inputs": [{"what": "a context", "source": "assumed", "otherwise": ends}]}


SOURCE = {"what": "a length", "source": "published", "where": "the paper"}
PUBLISHED = {"inputs": [{**SOURCE, "covers": ["model", "hardware", "step", "pool.parallelism"]}]}
UNCOVERED = {"inputs": [{**SOURCE, "covers": ["model", "hardware", "step.decodes"]}]}
SECOND_HAND = {"inputs": [*PUBLISHED["inputs"], {"what": "a card", "source": "second-hand", "where": "a summary"}]}
NEAR = {"inputs": [*PUBLISHED["inputs"], *guessed(32, 128)["inputs"]]}  # type: ignore[misc]
FAR = {"inputs": [*PUBLISHED["inputs"], *guessed(32, 1_000_000)["inputs"]]}  # type: ignore[misc]
BAND = {"gain": 2, "band": [1.05, 4]}


@pytest.mark.parametrize(
    ("fields", "claim", "status"),
    [
        (PUBLISHED, BAND, "reproduced"),
        (NEAR, BAND, "reproduced"),
        (FAR, BAND, "assumed"),
        (guessed(32, 128), BAND, "assumed"),
        (SECOND_HAND, BAND, "assumed"),
        (UNCOVERED, BAND, "assumed"),
        ({**NEAR, "chosen": "the context"}, BAND, "fitted"),
        (guessed(1_000_000), {"gain": 5, "band": [4, 6]}, "differs"),
        ({}, BAND, "assumed"),
        ({**PUBLISHED, "assumed": ["an input"]}, BAND, "assumed"),
        (PUBLISHED, {"gain": 2, "band": [1, 4]}, "weak"),
        (PUBLISHED, {"band": [1.05, 4]}, "assumed"),
        ({"chosen": "the context"}, {"gain": 2, "band": [1, 4]}, "fitted"),
        ({"chosen": "the context", "assumed": ["an input"]}, {"band": [1, 4]}, "fitted"),
        ({"chosen": "the context"}, {"gain": 5, "band": [4, 6]}, "differs"),
        ({"assumed": ["an input"]}, {"gain": 5, "band": [4, 6]}, "differs"),
    ],
)
def test_reproduced_is_only_what_assumes_nothing(
    fields: dict[str, object], claim: dict[str, object], status: str
) -> None:
    """Two GPUs take less time than one; what is chosen weighs more than what is assumed."""
    (finding,) = reproduce([entry(measure=STEP, claim={"says": "x", **claim}, **ONE_AND_TWO, **fields)], jobs=1)
    assert finding.status == status
    assert ("a band: no figure is published" in finding.assumed) == ("gain" not in claim)
    assert all(one.decides == (one.what in finding.assumed) for one in finding.inputs)
    assert finding.chosen == fields.get("chosen")
    assert [batch.requests for batch in finding.batches] == [8, 64]
    assert finding.uncovered == (("pool.parallelism.tp", "step.context") if fields == UNCOVERED else ())
    tried = status == "reproduced" or finding.uncovered
    assert [card.hardware for card in finding.cards] == (list(CARDS) if tried else [])


def test_a_gain_that_is_the_same_on_three_cards_is_counts() -> None:
    """Tokens are the same, whatever they cost."""
    load = {"arrivals": {"kind": "closed_loop", "users": 1}, "requests": 2, "prompt": 64}
    measure = {"kind": "load", "metric": "tokens"}
    sides = {"base": {"workload": {"output": 30}}, "variant": {"workload": {"output": 17}}}
    covers = {"inputs": [{**SOURCE, "covers": ["model", "workload"]}]}
    (finding,) = reproduce([entry(measure=measure, setup={"workload": load}, **sides, **covers)], jobs=1)
    assert finding.status == "counts", "on every card: the card needs no source"
    assert {card.gain for card in finding.cards} == {1.765}


@pytest.mark.parametrize(
    ("gain", "base", "variant", "setting"),
    [
        (8.53, {"step": {"delivers": 1}}, {"step": {"delivers": 8.53}}, "step.delivers 8.53"),
        (8.0, {}, {"kept": 0.125}, "kept 0.125"),
        (1.596, {}, {"chunks": [[0, 0.3735]]}, "chunks[0][1] 0.3735"),
        (8.3, {}, {"kept": 0.125}, None),
        (8.0, {"kept": 0.125}, {"kept": 0.125}, None),
        (1.0, {}, {"kept": 1}, None),
        (1.0, {}, {"kept": True}, None),
    ],
)
def test_a_gain_that_is_a_setting_restates_it(
    gain: float, base: dict[str, object], variant: dict[str, object], setting: str | None
) -> None:
    assert restated(gain, {"base": base, "variant": variant}) == setting


def test_entries_of_one_request_run_with_more_at_a_time() -> None:
    alone = {"workload": {"arrivals": {"kind": "closed_loop", "users": 1}}, "pool": {"batching": {"max_num_seqs": 1}}}
    together = batched(alone, 8)
    assert together is not None
    assert together["workload"] == {"arrivals": {"kind": "closed_loop", "users": 8}, "requests": 8}
    assert together["pool"]["batching"]["max_num_seqs"] == 8
    assert batched({"workload": {"arrivals": {"kind": "poisson", "rate_rps": 1}}}, 8) is None
    assert batched({"step": {"decodes": 1}}, 64) == {"step": {"decodes": 64}}
    assert batched({"step": {"chunks": [[0, 9]]}}, 64) is None
    assert batched({"phases": []}, 64) is None


def test_no_input_of_a_summary_is_published() -> None:
    """A summary that a language model or anyone but the authors wrote is no publication."""
    for one in select([]):
        for item in one.system.inputs:
            if item.source in ("published", "derived", "substitute"):
                assert not re.search("llm-paper-summary|notes on it", item.where or ""), (one.system.name, item.what)


def test_what_cannot_be_done_otherwise_is_in_no_band() -> None:
    """One assumption under which a side does not come off at all is not the end of the run, nor a gain."""
    measure = {"kind": "step", "within_s": 0.003}
    (finding,) = reproduce([entry(measure=measure, **ONE_AND_TWO, **guessed(32, 100_000_000))], jobs=1)
    assert finding.status == "assumed"
    assert finding.inputs[0].gains[1] == 0 < finding.inputs[0].gains[0]


def test_the_line_counts_what_is_fitted_apart() -> None:
    """Each of the serving systems once, and none of the others."""
    of = [finding for finding in RESULTS.findings if finding.family != NOT_SERVING]
    number = [int(n) for n in re.findall(r"\d+", headline(RESULTS.findings))]
    assert number[1] == len(of) == number[0] + sum(number[2:])
    assert number[0] == sum(f.status == "reproduced" and not f.assumed and not f.chosen for f in of)
    assert number[1:2] + number[2:4] == [len(of), *(sum(f.status == s for f in of) for s in ("counts", "assumed"))]
    assert number[4] == sum(f.status == "fitted" for f in of) > 0


def test_bisection_finds_the_last_that_is_ok() -> None:
    asked: list[float] = []

    def ok(x: float) -> bool:
        asked.append(x)
        return x <= 7

    found_at = bisected(ok, 1, 64, 0.01)
    assert found_at is not None
    assert 7 / 1.01 <= found_at <= 7
    assert bisected(lambda x: False, 1, 64, 0.01) is None
    assert bisected(lambda x: True, 1, 64, 0.01) == 64
    assert len(asked) < 20


def test_branches_stop_at_the_shortest_but_so_many() -> None:
    """Against the order statistics of what was drawn."""
    load = workload_of(
        {
            "workload": {
                "arrivals": {"kind": "poisson", "rate_rps": 1.0},
                "requests": 4000,
                "prompt": 10,
                "output": {"kind": "lognormal", "mean_tokens": 5000, "sigma": 0.5, "max_tokens": 100000},
            }
        },
        "w",
    )
    drawn = build_stream(load, None, requests=4000, seed=0)
    cut = grouped(drawn, 8, 3)
    longest = cut.output_tokens.reshape(-1, 8).max(axis=1)
    assert (longest == np.sort(drawn.output_tokens.reshape(-1, 8), axis=1)[:, 2]).all()
    # E[min] / E[max] and 8 E[min] / sum of eight lognormals of shape 0.5, by simulation of 200,000 groups.
    first = grouped(drawn, 8, 1).output_tokens
    longest_of_all = drawn.output_tokens.reshape(-1, 8).max(axis=1)
    assert first.reshape(-1, 8).max(axis=1).mean() / longest_of_all.mean() == pytest.approx(0.240, rel=0.05)
    assert first.sum() / drawn.output_tokens.sum() == pytest.approx(0.453, rel=0.05)
    with pytest.raises(UsageError, match="finish_first 9: a group has 8 branches only"):
        grouped(drawn, 8, 9)
    with pytest.raises(UsageError, match="ask for a multiple"):
        grouped(drawn, 7, None)


def test_orders_are_those_of_lengths_and_prefixes() -> None:
    fields = {
        "prompt": 100,
        "output": {"kind": "lognormal", "mean_tokens": 50, "sigma": 1.0, "max_tokens": 999},
        "requests": 60,
        "shared_prefix": {"groups": 5, "tokens": 64},
    }
    load = workload_of({"workload": fields}, "w")
    stream = build_stream(load, None, requests=60, seed=0)
    assert (np.diff(stream.output_tokens[order_of(stream, "output", 0.3)]) >= 0).all()
    assert stream.session is not None
    assert (np.diff(stream.session[order_of(stream, "prefix", 0.3)]) >= 0).all()
    guessed = order_of(stream, "predicted", 0.3)
    assert sorted(guessed.tolist()) == list(range(60))
    assert (guessed != order_of(stream, "output", 0.3)).any()


def test_the_command_prints_a_table_json_and_one_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    asked = ["reproduce", "dms", "parallelspec", "specmquant", "--jobs", "1"]
    done = CliRunner().invoke(cli, [*asked, "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert "0 of 3 reproduced, 0 more by counts alone, 0 within the band on assumed inputs, 1 on inputs" in done.output
    assert "in a band that no effect would meet as well, 1 differ, 1 need" in done.output
    assert "chosen knowing the claim: the published share of the cache goes in" in done.output
    assert "ParallelSpec: +" in done.output
    assert "settings without a source" not in done.output
    text = page.read_text(encoding="utf-8")
    assert "system-parallelspec" in text
    assert "<script src" not in text
    as_json = CliRunner().invoke(cli, [*asked, "--json"])
    document = json.loads(as_json.output)
    assert document["schema"] == "simtune/findings@2"
    assert [f["status"] for f in document["findings"]] == ["fitted", "differs", "needs"]
    with pytest.raises(UsageError, match="exists already"):
        CliRunner().invoke(cli, [*asked, "--html", str(page)], catch_exceptions=False)


def test_the_figure_shows_bands_claims_and_dots() -> None:
    sections = families(RESULTS, select([]))
    assert sum(len(section.rows) for section in sections) == 191
    shown = [row for section in sections for row in section.compared]
    assert len(shown) == sum(finding.ran for finding in RESULTS.findings)
    (trees,) = (section for section in sections if section.name == "trees")
    figure = gains_figure(trees.compared)
    bars, claims, *dots = figure["data"]
    assert [low + width for low, width in zip(bars["base"], bars["x"], strict=True)] == pytest.approx(
        [c.high for c in trees.compared]
    )
    assert len(claims["x"]) == sum(c.claimed is not None for c in trees.compared)
    assert sum(len(dot["x"]) for dot in dots) == len(trees.compared)
    assert figure["layout"]["xaxis"]["type"] == "log"
    assert {dot["name"] for dot in dots} == {f"simulated: {c.status}" for c in trees.compared}
    assert render(RESULTS, select([])) == render(RESULTS, select([]))


def test_an_axis_has_ticks_for_a_narrow_screen() -> None:
    for section in families(RESULTS, select([])):
        if section.compared:
            ticks = gains_figure(section.compared)["layout"]["xaxis"]["tickvals"]
            assert 2 <= len(ticks) <= 9, section.name
            assert all(low < high for low, high in pairwise(ticks))


def test_the_page_says_what_was_chosen_and_names_its_dots() -> None:
    page = render(RESULTS, select([]))
    for status in ("reproduced", "counts", "assumed", "fitted", "differs"):
        assert f"</i>{status}</li>" in page
    assert "</i>elsewhere</li>" not in page
    assert page.count("Chosen knowing the claim:") == sum(f.chosen is not None for f in RESULTS.findings)


@pytest.mark.parametrize("drafter", ["llama-68m", "llama-2-7b"])
def test_more_replicas_of_dsi_are_never_slower(drafter: str) -> None:
    """Whether the drafter is much quicker than the target, or so slow that one replica keeps up with it."""
    (dsi,) = select(["dsi"])
    whole = {key: value for key, value in dsi.family.sides(dsi.system)["variant"].items() if key != "best_of"}
    runner, speeds = Runner(), []
    for replicas in (1, 2, 3, 4, 7):
        speculation = {
            "drafter": {"kind": "draft_model", "model": drafter, "tp": 1},
            "scheme": {"kind": "dsi", "tokens": 2, "replicas": replicas},
            "acceptance": "eight-tenths",
        }
        side = merged(whole, {"pool": {"speculation": speculation}})
        speeds.append(runner.measure(dsi.family, side, dsi.system.measure).value)
    assert all(more >= 0.999 * fewer for fewer, more in pairwise(speeds)), speeds
    assert (speeds[-1] > 2 * speeds[0]) == (drafter == "llama-68m")
