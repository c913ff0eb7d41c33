"""The sentences of a report follow from its numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simtune.report import info, verdict
from simtune.report.page import render
from simtune.runs.contents import priced
from simtune.runs.engine_files import launch_of
from simtune.runs.run_reader import read_run
from simtune.runs.schema import Run

RunMaker = Callable[..., Path]


def candidates(run: Run, **changed: Any) -> Run:
    """The run with these columns of its first loser replaced."""
    chosen, loser, *others = run.candidates
    return run._replace(candidates=(chosen, loser.model_copy(update=changed), *others))


def test_bottleneck_is_one_sentence(make_run: RunMaker, optimized: Any) -> None:
    summary, _ = optimized
    e2el = summary["metrics"]["e2el"]
    decode = {**e2el, "mean": 0.9 * e2el["mean"]}
    queue = {**e2el, "mean": 0.1 * e2el["mean"]}
    run = read_run(make_run(metrics={**summary["metrics"], "decode": decode, "queue": queue}))
    sentence = verdict.bottleneck(run.summary)
    assert sentence is not None
    assert "; 90% of a request's time is decode; " in sentence
    assert run.summary.breakdown is not None
    gemm, total = 4.4e-3 + 2.2e-6 * 32, sum(p.seconds for p in run.summary.breakdown[0].parts)
    assert f"{gemm / total:.0%} of a decode, 32 sequences at 1,400 tokens each step is matrix products" in sentence
    used = summary["timeline"]["kv_used"]
    assert f"the KV cache is {sum(used) / len(used):.0%} full on average, {max(used):.0%} at most" in sentence
    assert sentence.endswith(".")
    assert sentence in render(run).replace("&#39;", "'")


@pytest.mark.parametrize(
    ("value_s", "words"),
    [
        (0.0399, "A limit binds: p99 TPOT ≤ 40 ms (it reaches 39.9 ms)"),
        (0.05, "A limit is missed: p99 TPOT ≤ 40 ms (it reaches 50.0 ms)"),
        (0.02, "No limit binds: the nearest, p99 TPOT ≤ 40 ms, is 50.0 % used"),
    ],
)
def test_the_limit_that_binds_is_named(make_run: RunMaker, value_s: float, words: str) -> None:
    line = {"class": None, "metric": "tpot", "statistic": "p99", "limit_s": 0.04}
    run = read_run(make_run(slo=[{**line, "value_s": value_s, "met": value_s <= 0.04}]))
    assert words in (verdict.bottleneck(run.summary) or "").replace(info.NO_BREAK, " ")


AGAINST = "prefill/decode against mixed:"
PAIR = (
    {"family": "prefill/decode", "plan": "p", "reached": 8.2, "at_most": 9.0},
    {"family": "mixed", "plan": "m", "reached": 5.0, "at_most": 6.0},
)


@pytest.mark.parametrize(
    ("rival", "words"),
    [
        (
            {},
            f"{AGAINST} 1.64 x, the best plan of each; at least 1.37 x, by what no mixed plan exceeds",
        ),
        (
            {"plan": "", "reached": None},
            f"{AGAINST} at least 1.37 x, by what no mixed plan exceeds; none was found to meet the SLO",
        ),
        (
            {"plan": "", "reached": None, "at_most": 10.25},
            f"{AGAINST} a mixed plan that is up to 1.25 x better is not ruled out; none was found to meet the SLO",
        ),
        (
            {"plan": "", "reached": None, "at_most": None},
            "prefill/decode against mixed: no mixed plan of this space fits and can meet the SLO",
        ),
    ],
)
def test_families_are_put_against_each_other_in_words(make_run: RunMaker, rival: dict[str, Any], words: str) -> None:
    run = read_run(make_run(families=[PAIR[0], PAIR[1] | rival]))
    assert verdict.families_in_words(run.summary) == words
    assert f"What it gives.</strong> P{words[1:]}." in render(run)
    assert verdict.families_in_words(read_run(make_run()).summary) is None


def test_less_is_better_where_the_objective_is_a_cost(make_run: RunMaker, optimized: Any) -> None:
    objective = {**optimized[0]["objective"], "name": "usd_per_million_tokens"}
    cheap = [PAIR[0] | {"reached": 2.0, "at_most": 1.5}, PAIR[1] | {"reached": 3.0, "at_most": 2.5}]
    words = verdict.families_in_words(read_run(make_run(objective=objective, families=cheap)).summary)
    assert words is not None
    assert "1.50 x, the best plan of each; at least 1.25 x" in words


def test_the_price_of_output_is_at_the_top(make_run: RunMaker) -> None:
    price = {
        "per_hour_usd": 20.0, "per_million_output_tokens_usd": 0.25, "per_million_tokens_usd": 0.1,
        "per_thousand_requests_usd": 0.5, "source": "list",
    }  # fmt: skip
    run = read_run(make_run(price=price))
    words = "0.250 USD per million output tokens at this load; all GPUs cost 20.0 USD per hour"
    assert verdict.price_in_words(run.summary) == words
    page = render(run)
    assert page.index(words) < page.index("In numbers")
    assert verdict.price_in_words(read_run(make_run(price=None)).summary) is None


def test_a_saturated_run_shows_no_latency(make_run: RunMaker) -> None:
    run = read_run(make_run(saturated=True))
    assert info.latency_rows(run.summary) == []
    assert info.cdfs(run) == []
    assert "Requests come faster than they are served" in (verdict.bottleneck(run.summary) or "")
    assert "No latency is given" in render(run)


def test_a_value_at_the_edge_of_the_search_is_noted(make_run: RunMaker) -> None:
    run = read_run(make_run())
    chosen = run.candidates[0]
    assert chosen.max_num_seqs == 256
    assert verdict.edges(run) == ["max_num_seqs 256 is the largest of those tried (32, 64, 128, 256)"]
    assert verdict.edges(candidates(run, max_num_seqs=512)) == []
    assert verdict.edges(run._replace(candidates=())) == []


def test_plans_with_equal_results_are_called_equal(make_run: RunMaker) -> None:
    run = read_run(make_run())
    chosen = run.candidates[0]
    twin = chosen.model_copy(update={"max_num_seqs": 128, "status": "feasible", "reason": "", "rank": 2})
    assert info.why_lost(twin, chosen, run.summary) == "the same in every number: max_num_seqs never binds"
    slower = twin.model_copy(update={"ttft_p99_s": 0.9})
    assert info.why_lost(slower, chosen, run.summary) == "no better in goodput per GPU"


def test_stopped_simulations_are_drawn_apart(make_run: RunMaker) -> None:
    run = read_run(make_run())
    missed = [c for c in run.candidates if c.status == "infeasible"]
    stopped = tuple(c.model_copy(update={"finished": c is not missed[0]}) for c in run.candidates)
    points = info.pareto(stopped)
    assert [p.candidate.candidate for p in points.unfinished] == [missed[0].candidate]
    assert len(points.infeasible) == len(missed) - 1


def test_prices_follow_from_throughput(make_run: RunMaker) -> None:
    row = read_run(make_run()).candidates[0]
    rate = row.output_tokens_per_s_per_gpu
    assert rate is not None
    assert priced(row, 3.6 * row.num_gpus).usd_per_million_output_tokens == pytest.approx(1000 / rate)
    assert priced(row, None).usd_per_million_output_tokens is None


def test_a_command_to_copy_names_every_setting() -> None:
    settings = "tensor-parallel-size: 2\nno-enable-prefix-caching: true\nspeculative-config: {method: ngram}\n"
    files = {"engine/launch.sh": "#!/bin/sh\n", "engine/vllm-mixed.yaml": settings}
    flags = """--tensor-parallel-size 2 --no-enable-prefix-caching --speculative-config '{"method": "ngram"}'"""
    assert launch_of(dict(files), "org/m") == f"vllm serve org/m {flags}"
    assert launch_of(dict(files), "a b; c") == f"vllm serve 'a b; c' {flags}"
    assert launch_of({"engine/launch.sh": "#!/bin/sh\n"}, None) == "#!/bin/sh\n"
    assert launch_of({"engine/none.txt": "why"}, None) is None
