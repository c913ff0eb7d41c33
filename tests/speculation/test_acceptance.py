"""Acceptance: the spec, the estimators, and the files they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.errors import SpecError, UsageError
from simtune.specs.acceptance import Acceptance, BetaMixture, PerPosition, PerRank
from simtune.specs.catalog import load_acceptance, names
from simtune.tuner.drafting import chain, tree
from simtune.workload import acceptance_estimate as estimate
from simtune.workload.acceptance_logs import read_acceptance
from tests.oracles import chain as exact
from tests.oracles.ranks import from_few_ranks

EXACT = 1e-9


@pytest.fixture(scope="module")
def oracle(oracle_dir: Path) -> Any:
    return json.loads((oracle_dir / "accept_fit.json").read_text())


# --- the spec ---------------------------------------------------------------------------------------------

HEAD = "schema: simtune/acceptance@1\nname: mine\norigin: assumed\nsource: a test\n"


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ("{kind: per_position, conditional: [0.7, 1.2]}", "a.yaml:5:48: rates.conditional.1: must be less than or"),
        ("{kind: per_position, conditional: [-0.1]}", "a.yaml:5:43: rates.conditional.0: must be greater than or"),
        (
            "{kind: per_position, conditional: [0.5], standard_error: [0.1, 0.1]}",
            "a.yaml:5:1: rates: 1 positions but 2 standard errors",
        ),
        (
            "{kind: per_rank, probability: [[0.6, 0.2], [0.6, 0.5]]}",
            "a.yaml:5:25: rates.probability: the ranks at depth 2 add up to 1.1, and at most one candidate is taken",
        ),
        ("{kind: beta, a: 0.0, b: 1.0}", "a.yaml:5:21: rates.a: must be greater than 0"),
        ("{kind: revealed, rate: [0.9, 0.5], share: [0.6, 0.6]}", "the shares add up to 1.2, not to 1"),
        ("{kind: per_postion, conditional: [0.5]}", "did you mean per_position?"),
    ],
)  # fmt: skip
def test_wrong_rates_are_refused(rates: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        Acceptance.from_text(HEAD + f"rates: {rates}\n", "a.yaml")
    assert message in str(refused.value)


def test_rates_of_a_class_and_a_temperature() -> None:
    mine = Acceptance.from_text(
        HEAD
        + """
rates: {kind: beta, a: 4.0, b: 1.0}
conditions:
- {request_class: code, rates: {kind: per_position, conditional: [0.9]}}
- {temperature: 1.0, rates: {kind: per_position, conditional: [0.5]}}
- {request_class: code, temperature: 1.0, rates: {kind: per_position, conditional: [0.6]}}
"""
    )

    def first(request_class: str | None, temperature: float | None) -> float:
        return mine.rates_for(request_class, temperature).chain(1)[0]

    assert first(None, None) == first("chat", 0.0) == 0.8
    assert first("code", None) == first("code", 0.0) == 0.9
    assert first("chat", 1.0) == 0.5
    assert first("code", 1.0) == 0.6
    assert Acceptance.from_text(mine.to_yaml()) == mine
    with pytest.raises(SpecError, match="two conditions are for the same"):
        Acceptance.from_text(
            HEAD + "rates: {kind: beta, a: 1.0, b: 1.0}\nconditions:\n"
            "- {temperature: 1.0, rates: {kind: beta, a: 1.0, b: 1.0}}\n"
            "- {temperature: 1.0, rates: {kind: beta, a: 2.0, b: 1.0}}\n"
        )


def test_ranks_out_of_order_are_kept_and_noticed() -> None:
    noisy = Acceptance.from_text(HEAD + "rates: {kind: per_rank, probability: [[0.5, 0.02, 0.3]]}\n")
    assert noisy.rates.ranks(1) == ((0.5, 0.02, 0.3),)
    assert "a later rank is likelier" in noisy.notices()[0]
    assert load_acceptance("medusa-vicuna-7b").notices() == []


@pytest.mark.parametrize("name", names("acceptance"))
def test_a_preset_says_what_it_is(name: str) -> None:
    preset = load_acceptance(name)
    assert preset.name == name
    assert preset.origin == "published"
    assert preset.target is not None


def test_presets_hold_what_was_published(oracle_dir: Path, data_dir: Path) -> None:
    published = json.loads((oracle_dir / "spec_published.json").read_text())
    for row in published["vllm_eagle3"][:2]:
        model = row["model"].split(" ")[0].lower()
        rates = load_acceptance(f"eagle3-{model}").rates
        assert rates.chain(3) == pytest.approx(row["conditional"], abs=1e-4)
        assert chain.expected_tokens(rates.chain(3)) == pytest.approx(row["recomputed_length"], abs=1e-6)
        assert chain.expected_tokens(rates.chain(3)) == pytest.approx(row["stated_length"], abs=0.02)
    for model in ("7b", "13b"):
        read = read_acceptance(
            [data_dir / "spec_decode" / "medusa_head_topk_accuracy.csv"], model=f"vicuna-{model}-v1.3"
        ).rates
        for mine, theirs in zip(load_acceptance(f"medusa-vicuna-{model}").rates.ranks(4), read.ranks(4), strict=True):
            assert mine == pytest.approx(theirs, abs=5.1e-5)


def test_medusa_heads_predict_what_spec_bench_measured(data_dir: Path) -> None:
    table = data_dir / "spec_decode" / "medusa_head_topk_accuracy.csv"
    ranks = read_acceptance([table], model="vicuna-7b-v1.3").rates.ranks(4)
    generated = 1 + tree.expected_accepted(tree.greedy(ranks, 63), ranks)
    rows = (data_dir / "spec_decode" / "spec_bench_vicuna7b.csv").read_text().splitlines()
    measured = [float(r.split(",")[-1]) for r in rows if ",Medusa,all,mean_accepted_tokens_per_step," in r]
    assert measured == [2.32, 2.31]
    assert all(generated == pytest.approx(m, rel=0.05) for m in measured)


# --- the estimators ---------------------------------------------------------------------------------------


def test_from_counts(oracle: Any) -> None:
    case = oracle["positional_from_hist"]
    found = estimate.from_histogram(case["hist"])
    assert found.conditional == pytest.approx(case["a"], rel=EXACT)
    assert found.standard_error == pytest.approx(case["se"], rel=EXACT)
    assert chain.expected_tokens(found.conditional) == pytest.approx(case["mean_tokens"], rel=EXACT)
    case = oracle["positional_from_counters"]
    found = estimate.from_counters(case["drafts"], case["per_pos"])
    assert found.conditional == pytest.approx(case["a"], rel=EXACT)
    assert chain.expected_tokens(found.conditional) == pytest.approx(case["mean_tokens"], rel=EXACT)


def test_from_a_mean_length(oracle: Any) -> None:
    for row in oracle["alpha_from_length"]:
        found = estimate.from_mean_length(row["L"], row["gamma"])
        assert found.conditional == pytest.approx([row["alpha"]] * row["gamma"], rel=EXACT)
    assert estimate.from_mean_length(1.0, 3).conditional == (0.0, 0.0, 0.0)
    for impossible in (0.9, 4.1):
        with pytest.raises(ValueError, match="impossible with 3 draft tokens"):
            estimate.from_mean_length(impossible, 3)


def test_the_error_of_a_mean_length_is_that_of_simulations() -> None:
    rng = np.random.default_rng(3)
    true, window, rounds = 0.7, 4, 400
    kept = np.minimum(rng.geometric(1 - true, (400, rounds)) - 1, window)
    fits = [estimate.from_mean_length(1 + float(k.mean()), window, rounds) for k in kept]
    errors = [f.standard_error[0] for f in fits if f.standard_error]
    assert np.std([f.conditional[0] for f in fits]) == pytest.approx(np.mean(errors), rel=0.15)


def test_varying_windows(oracle: Any) -> None:
    true = oracle["kaplan_meier"]["true"]
    rng = np.random.default_rng(4)
    windows = rng.integers(1, 5, 40000)
    kept = (rng.random((40000, 4)) < np.array(true)).cumprod(axis=1).sum(axis=1)
    rounds = list(zip(np.minimum(kept, windows).tolist(), windows.tolist(), strict=True))
    found = estimate.from_windows(rounds)
    assert found.standard_error is not None
    for rate, a, error, fitted in zip(
        found.conditional, true, found.standard_error, oracle["kaplan_meier"]["fit"], strict=True
    ):
        assert abs(rate - a) < 3 * error
        assert abs(fitted - a) < 3 * error, "and so was the reference"
    naive = [sum(k >= j for k, _ in rounds) / sum(k >= j - 1 for k, _ in rounds) for j in range(1, 5)]
    assert naive[1:] == pytest.approx(oracle["kaplan_meier"]["naive_ratio"][1:], abs=0.02)
    assert all(low < a - 0.15 for low, a in zip(naive[1:], true[1:], strict=True))


def test_requests_that_differ(oracle: Any) -> None:
    case = oracle["beta_fit"]
    a, b = case["true"]
    rng = np.random.default_rng(4)
    histograms = []
    for _ in range(1500):
        own = rng.beta(a, b)
        histograms.append(np.bincount(np.minimum(rng.geometric(1 - own, 40) - 1, 5), minlength=6).tolist())
    found = estimate.from_requests(histograms)
    assert found.standard_error is not None
    assert abs(found.a - a) < 3 * found.standard_error[0]
    assert abs(found.b - b) < 3 * found.standard_error[1]
    assert abs(case["fit"][0] - a) < 3 * found.standard_error[0]
    assert found.chain(3)[2] > found.chain(3)[0], "conditional acceptance rises"


def test_a_short_list_of_ranks_continues_as_a_power(oracle: Any) -> None:
    case = oracle["zipf_rank_fit"]
    p1, s, errors = from_few_ranks(case["counts"], case["misses"])
    assert p1 == pytest.approx(case["fit"][0], abs=1e-5)
    assert s == pytest.approx(case["fit"][1], abs=1e-4)
    assert abs(p1 - case["true"][0]) < 3 * errors[0]
    assert abs(s - case["true"][1]) < 3 * errors[1]
    assert errors[0] == pytest.approx(np.sqrt(p1 * (1 - p1) / 20000), rel=0.2), "about that of a binomial share"


def test_ranks() -> None:
    found = estimate.from_ranks([[60, 20], [30]], [[100, 100], [60]])
    assert found.probability == ((0.6, 0.2), (0.5,))
    assert found.standard_error is not None
    assert found.standard_error[1][0] == pytest.approx(np.sqrt(0.25 / 60))
    assert estimate.from_top_k([[0.5, 0.75], [0.25]]).probability == ((0.5, 0.25), (0.25,))


@pytest.mark.parametrize(
    ("counting", "message"),
    [
        (lambda: estimate.from_counters(100, [70, 80]), "position 2 was accepted 80 times and the one before 70"),
        (lambda: estimate.from_counters(100, [170]), "position 1 was accepted 170 times and the one before 100"),
        (lambda: estimate.from_counters(0, [0]), "no round that drafted anything"),
        (lambda: estimate.from_histogram({0: 5, 4: 2}, 3), "rounds that accepted 4 draft tokens cannot have drafted 3"),
        (lambda: estimate.from_histogram({0: -5}), "none of them negative"),
        (lambda: estimate.from_windows([(3, 2)]), "cannot accept more draft tokens than it drafted"),
        (lambda: estimate.from_windows([(0, 0)]), "no round drafted a token"),
        (lambda: estimate.from_requests([[1, 2]]), "at least two requests"),
        (lambda: estimate.from_ranks([[5]], [[4]]), "depth 1: candidates taken more often"),
        (lambda: estimate.from_top_k([[0.5, 0.4]]), "depth 1: accuracy falls"),
        (lambda: from_few_ranks([0, 0], 3), "some candidate must have been taken"),
        (
            lambda: estimate.difference({"drafts": 10}, {"drafts": 9}),
            "drafts falls from 10 to 9: the engine was restarted",
        ),
        (lambda: estimate.difference({"drafts": 10, "x": 1}, {"drafts": 11}), "x is counted in the first reading"),
    ],
)  # fmt: skip
def test_impossible_counts_are_refused(counting: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        counting()


@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=5))
def test_counters_and_histogram_say_the_same(rates: list[float]) -> None:
    alive = 1e6 * np.concatenate([[1.0], chain.survival(rates)])
    by_counter = estimate.from_counters(alive[0], alive[1:].tolist())
    by_histogram = estimate.from_histogram((1e6 * exact.accepted_pmf(rates)).tolist())
    assert by_counter.conditional == pytest.approx(rates)
    assert by_histogram.conditional == pytest.approx(rates)


def test_positions_that_nobody_reached_are_unknown() -> None:
    found = estimate.from_counters(10, [5, 0, 0])
    assert found.conditional == (0.5, 0.0), "the third was never tried"


# --- the files --------------------------------------------------------------------------------------------

PROMETHEUS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {0}.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {1}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {2}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {3}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {4}.0
"""


def write(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_prometheus_counters_are_differenced(tmp_path: Path) -> None:
    before = write(tmp_path, "before.prom", PROMETHEUS.format(100, 200, 150, 90, 60))
    after = write(tmp_path, "after.prom", PROMETHEUS.format(1100, 2200, 1270, 790, 480))
    rates, source = read_acceptance([before, after])
    assert rates.chain(2) == pytest.approx((0.7, 0.6))
    assert source == "vLLM counters between before.prom and after.prom"
    assert read_acceptance([after]).rates.chain(1) == pytest.approx((790 / 1100,))
    with pytest.raises(SpecError, match=r"before\.prom: spec_decode_num_drafts falls from 1100 to 100"):
        read_acceptance([after, before])
    twice = write(tmp_path, "twice.prom", after.read_text() + after.read_text().replace('engine="0"', 'engine="1"'))
    assert read_acceptance([twice]).rates.chain(2) == pytest.approx(read_acceptance([after]).rates.chain(2))


def test_log_lines(tmp_path: Path) -> None:
    line = (
        "INFO SpecDecoding metrics: Mean acceptance length: {}, Accepted throughput: 1.0 tokens/s, "
        "Drafted throughput: 2.0 tokens/s, Accepted: {} tokens, Drafted: {} tokens, "
        "Per-position acceptance rate: {}, Avg Draft acceptance rate: 50.0%\n"
    )
    log = line.format(2.2, 120, 200, "0.800, 0.400") + "noise\n" + line.format(1.9, 270, 600, "0.600, 0.300")
    rates, source = read_acceptance([write(tmp_path, "server.log", log)])
    assert rates.chain(2) == pytest.approx(((80 + 180) / 400, (40 + 90) / (80 + 180)))
    assert source == "log lines of vLLM, server.log"


def test_results_of_benchmarks(tmp_path: Path) -> None:
    bench = {"spec_decode_num_drafts": 1000, "spec_decode_per_position_acceptance_rates": [0.7, 0.52, 0.4]}
    found = read_acceptance([write(tmp_path, "bench.json", bench)]).rates
    assert found == estimate.from_counters(1000, [700, 520, 400])
    histogram = {"pooled_spec_decode_acceptance_histogram": {"0": 150, "1": 187, "2": 663}}
    found = read_acceptance([write(tmp_path, "aiperf.json", histogram)]).rates
    assert found == estimate.from_histogram([150, 187, 663])
    assert len(read_acceptance([tmp_path / "aiperf.json"], draft_tokens=3).rates.chain(9)) == 3
    for name, data in (
        ("bench-sglang.json", {"accept_length": 2.4}),
        ("info.json", {"internal_states": [{"avg_spec_accept_length": 2.4}]}),
    ):
        path = write(tmp_path, name, data)
        assert read_acceptance([path], draft_tokens=3).rates == estimate.from_mean_length(2.4, 3)
        with pytest.raises(UsageError, match="give --draft-tokens"):
            read_acceptance([path])
        with pytest.raises(SpecError, match="impossible with 1 draft tokens"):
            read_acceptance([path], draft_tokens=1)


def test_requests_one_by_one(tmp_path: Path) -> None:
    histograms = [[1, 2, 17], [9, 5, 6], [4, 6, 10]]
    lines = [{"metrics": {"speculative_decoding": {"acceptance_histogram": h}}} for h in histograms]
    path = write(tmp_path, "responses.jsonl", "\n".join(map(json.dumps, lines)))
    rates, source = read_acceptance([path])
    assert isinstance(rates, BetaMixture)
    assert source == "vLLM's metrics of 3 requests, responses.jsonl"
    with pytest.raises(SpecError, match=r"responses\.jsonl:2:2: not valid JSON"):
        read_acceptance([write(tmp_path, "responses.jsonl", json.dumps(lines[0]) + "\n{broken")])


def test_tables(tmp_path: Path, data_dir: Path) -> None:
    counts = write(tmp_path, "ranks.csv", "depth,rank,taken,reached\n1,2,20,100\n1,1,60,100\n2,1,30,60\n")
    assert read_acceptance([counts]).rates == estimate.from_ranks([[60, 20], [30]], [[100, 100], [60]])
    rounds = write(tmp_path, "rounds.csv", "accepted,drafted\n1,1\n2,3\n0,3\n")
    found = read_acceptance([rounds]).rates
    assert isinstance(found, PerPosition)
    assert found.conditional == pytest.approx((2 / 3, 1.0, 0.0))
    table = data_dir / "spec_decode" / "medusa_head_topk_accuracy.csv"
    with pytest.raises(UsageError, match=r"several models, choose one with --model: vicuna-13b-v1\.3, vicuna-7b-v1\.3"):
        read_acceptance([table])
    with pytest.raises(UsageError, match="no model llama in it"):
        read_acceptance([table], model="llama")
    assert isinstance(read_acceptance([table], model="vicuna-7b-v1.3").rates, PerRank)
    with pytest.raises(SpecError, match=r"ranks\.csv: malformed: could not convert string to float: 'many'"):
        read_acceptance([write(tmp_path, "ranks.csv", "depth,rank,taken,reached\n1,1,many,100\n")])


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, content in (("a.json", "{}"), ("b.csv", "x,y\n1,2\n"), ("c.json", "[1]"), ("d.csv", "")):
        with pytest.raises(SpecError, match="no acceptance found; known formats are"):
            read_acceptance([write(tmp_path, name, content)])
    for facts, why in (
        ({"spec_decode_per_position_acceptance_rates": [0.5]}, "spec_decode_num_drafts is missing"),
        ({"accept_length": [2.0]}, "float"),
        ({"pooled_spec_decode_acceptance_histogram": {"many": 1}}, "many"),
    ):
        with pytest.raises(SpecError, match=f"malformed: .*{why}"):
            read_acceptance([write(tmp_path, "odd.json", facts)], draft_tokens=3)
    with pytest.raises(SpecError, match="taken: depth 1: candidates taken more often"):
        read_acceptance([write(tmp_path, "odd.csv", "depth,rank,taken,reached\n1,1,9,4\n")])
    with pytest.raises(SpecError, match=r"odd\.csv:2: has 1 values, the header names 2"):
        read_acceptance([write(tmp_path, "odd.csv", "accepted,drafted\n1\n")])
    with pytest.raises(SpecError, match=r"odd\.txt: malformed: could not convert .*'400-0'"):
        read_acceptance([write(tmp_path, "odd.txt", 'vllm:spec_decode_num_drafts_total{x="m"} 400-0\n')])
    with pytest.raises(UsageError, match="no such file"):
        read_acceptance([tmp_path / "nothing.json"])
    with pytest.raises(UsageError, match="before and after a run"):
        read_acceptance([tmp_path / "a.json", tmp_path / "b.csv"])
    with pytest.raises(SpecError, match="are both needed"):
        read_acceptance([write(tmp_path, "half.prom", "vllm:spec_decode_num_drafts_total 5.0\n")])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from simtune.cli import main

    bench = {"spec_decode_num_drafts": 1000, "spec_decode_per_position_acceptance_rates": [0.7, 0.52]}
    write(tmp_path, "bench.json", bench)
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            main(["acceptance", *args])
        printed = capsys.readouterr()
        code = done.value.code
        assert isinstance(code, int)
        return code, printed.out, printed.err

    code, out, err = run("bench.json", "--out", "mine.yaml")
    assert (code, err) == (0, "wrote mine.yaml\n")
    assert "0.7429" in out
    written = Acceptance.from_file(tmp_path / "mine.yaml")
    assert (written.name, written.origin) == ("mine", "measured")
    assert written.rates == estimate.from_counters(1000, [700, 520])
    code, _, err = run("bench.json", "--out", "mine.yaml")
    assert (code, err) == (2, "mine.yaml: exists already; give --force to replace it\n")
    code, out, _ = run("bench.json", "--out", "mine.yaml", "--force", "--json")
    assert (code, json.loads(out)["acceptance"]["rates"]["kind"]) == (0, "per_position")
    bench["spec_decode_per_position_acceptance_rates"] = [0.5, 0.52]
    write(tmp_path, "bench.json", bench)
    code, _, err = run("bench.json", "--out", "other.yaml")
    assert code == 2
    assert "position 2 was accepted 520 times" in err
    assert not (tmp_path / "other.yaml").exists()
