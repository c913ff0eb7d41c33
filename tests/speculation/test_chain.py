"""Chains: closed forms, the cut last round, the best length, and when to stop drafting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.tuner.drafting import chain
from tests.oracles import chain as exact
from tests.oracles.chain import Stopping

EXACT = 1e-9
MONTE_CARLO = 0.01


@pytest.fixture(scope="module")
def oracle(oracle_dir: Path) -> Any:
    return json.loads((oracle_dir / "spec_chain.json").read_text())


def test_tokens_per_round(oracle: Any) -> None:
    for row in oracle["omega_iid"]:
        tokens = chain.expected_tokens(exact.iid(row["alpha"], row["gamma"]))
        assert tokens == pytest.approx(row["omega"], rel=EXACT)
        assert tokens == pytest.approx(row["mc"], rel=MONTE_CARLO)
    row = oracle["omega_positional"]
    assert chain.expected_tokens(row["av"]) == pytest.approx(row["omega"], rel=EXACT)
    assert exact.accepted_pmf(row["av"]) == pytest.approx(row["pmf_accepted"], rel=EXACT)
    row = oracle["omega_beta_mixture"]
    rising = exact.beta(row["a"], row["b"], row["gamma"])
    assert rising == pytest.approx(row["conditional_acceptance"], rel=EXACT)
    assert chain.expected_tokens(rising) == pytest.approx(row["omega"], rel=EXACT)
    pooled = exact.iid(row["a"] / (row["a"] + row["b"]), row["gamma"])
    assert chain.expected_tokens(pooled) < row["omega"], "the mean acceptance understates a mixture"


def speedup(acceptance: float, length: int, draft: float) -> float:
    return chain.expected_tokens(exact.iid(acceptance, length)) / (1 + length * draft)


def test_the_speedups_leviathan_printed(oracle: Any) -> None:
    for row in oracle["leviathan_table"]:
        assert speedup(row["alpha"], row["gamma"], row["c"]) == pytest.approx(row["speedup"], rel=EXACT)
    for acceptance, length, printed in ((0.75, 7, 3.2), (0.62, 7, 2.3), (0.65, 5, 2.4), (0.53, 5, 1.9)):
        assert round(speedup(acceptance, length, 0.02), 1) == printed


def test_the_best_length(oracle: Any) -> None:
    for row in oracle["best_gamma"]:
        length, rate = exact.best_length(exact.iid(row["alpha"], 64), 1 + row["c"] * np.arange(65))
        assert length == row["gamma"]
        assert rate == pytest.approx(row["speedup"], rel=EXACT)


def test_the_marginal_rule_is_the_enumeration(oracle: Any) -> None:
    assert oracle["marginal_rule_mismatches"] == 0
    for acceptance in np.linspace(0.05, 0.95, 19):
        for draft in np.linspace(0.01, 0.9, 30):
            drafts = exact.iid(acceptance, 64)
            assert exact.marginal_length(drafts, draft, 1.0) == exact.best_length(drafts, 1 + draft * np.arange(65))[0]


@given(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=8),
    st.floats(0.001, 2),
    st.floats(0.1, 5),
)
def test_the_marginal_rule_holds_at_any_acceptances(drafts: list[float], draft_s: float, target_s: float) -> None:
    length = exact.marginal_length(drafts, draft_s, target_s)
    seconds = target_s + draft_s * np.arange(len(drafts) + 1)
    _, best = exact.best_length(drafts, seconds)
    assert chain.expected_tokens(drafts[:length]) / seconds[length] == pytest.approx(best, rel=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 7), st.floats(0, 1))
def test_more_acceptance_or_a_longer_draft_never_yields_less(drafts: list[float], at: int, more: float) -> None:
    better = list(drafts)
    better[at % len(drafts)] = max(more, better[at % len(drafts)])
    assert chain.expected_tokens(better) >= chain.expected_tokens(drafts)
    assert chain.expected_tokens([*drafts, more]) >= chain.expected_tokens(drafts)
    pmf = exact.accepted_pmf(drafts)
    assert pmf.sum() == pytest.approx(1)
    assert 1 + pmf @ np.arange(len(pmf)) == pytest.approx(chain.expected_tokens(drafts))


def test_the_last_round_is_cut(oracle: Any) -> None:
    for row in oracle["dsi"]:
        seconds = exact.mean_seconds(row["N"], exact.iid(row["alpha"], 5), row["td"], row["tt"])
        assert seconds == pytest.approx(row["sd_gamma5"], rel=EXACT)
        assert seconds == pytest.approx(row["sd_gamma5_mc"], rel=MONTE_CARLO)
    # Two tokens: one draft at most, kept with .9; otherwise a second round without a draft.
    assert exact.mean_seconds(2, [0.9, 0.5], 0.1, 1.0) == pytest.approx(1.1 + 0.1 * 1.0)
    assert exact.mean_seconds(1, [0.9, 0.5], 0.1, 1.0) == 1.0


def test_a_batch_on_a_roofline(oracle: Any) -> None:
    case = oracle["batch_roofline"]

    def step_s(batch: int, tokens: int, context: int, model: dict[str, float]) -> float:
        memory = (model["w_bytes"] + batch * context * model["kv_bytes"]) / model["bw"]
        compute = batch * tokens * (2 * model["params"] + 4 * model["attn_dim"] * context) / model["flops"]
        return model["fixed"] + max(memory, compute)

    for row in case["rows"]:
        batch, context = row["batch"], row["ctx"]
        draft = step_s(batch, 1, context, case["draft"])
        seconds = [k * draft + step_s(batch, k + 1, context, case["target"]) for k in range(9)]
        length, rate = exact.best_length(exact.iid(case["alpha"], 8), seconds)
        assert length == row["best_k"]
        assert rate * seconds[0] == pytest.approx(row["speedup"], rel=EXACT)
    case = oracle["smartspec_goodput"]
    drafts = [exact.iid(a, k) for a, k in zip(case["alphas"], case["ks"], strict=True)]
    assert exact.goodput(drafts, case["t_draft"], case["t_target"]) == pytest.approx(case["goodput"], rel=EXACT)


# --- when to stop -----------------------------------------------------------------------------------------


def stopping(row: Any) -> Stopping:
    return Stopping(row["types"], row["probs"], row["td"] + row["dv"], row["tt"], 12)


def test_looking_one_step_ahead_is_the_best_rule(oracle: Any) -> None:
    for row in oracle["stopping"]:
        case = stopping(row)
        survive, rate = case.look_ahead()
        assert survive == pytest.approx(row["threshold_on_survival"], rel=EXACT)
        assert 1 - survive == pytest.approx(row["threshold_on_rejection_prob"], rel=EXACT)
        assert rate == pytest.approx(row["rate_opt"], rel=EXACT)
        assert case.optimum() == pytest.approx(row["rate_opt"], rel=EXACT)
        assert case.tokens_per_s(survive) == pytest.approx(row["rate_threshold_rule"], rel=EXACT)
        grid = max(case.tokens_per_s(h) for h in np.linspace(0, 1, 401))
        assert grid == pytest.approx(row["rate_best_threshold_grid"], rel=EXACT)
        mean = float(np.dot(row["types"], row["probs"]))
        _, fixed = exact.best_length(exact.iid(mean, 12), case.target_s + case.draft_s * np.arange(13))
        assert fixed == pytest.approx(row["rate_best_fixed_length"], rel=EXACT)


@given(
    st.lists(st.tuples(st.floats(0.05, 1), st.floats(0.1, 1)), min_size=1, max_size=3),
    st.floats(0.01, 1),
    st.integers(1, 6),
)
def test_no_rule_beats_looking_one_step_ahead(kinds: list[tuple[float, float]], draft_s: float, longest: int) -> None:
    total = sum(s for _, s in kinds)
    case = Stopping([a for a, _ in kinds], [s / total for _, s in kinds], draft_s, 1.0, longest)
    _, rate = case.look_ahead()
    assert rate == pytest.approx(case.optimum(), rel=1e-9)
    assert all(case.tokens_per_s(h) <= rate * (1 + 1e-9) for h in (0.1, 0.3, 0.5, 0.8))


def test_what_a_threshold_drafts() -> None:
    drafted = chain.stopped([0.9, 0.5], [0.5, 0.5], 2, 0.45)
    # .9 and .5 pass at once; after .9 both .81 and .45 do, after .5 only .45 does.
    assert drafted.at_least == pytest.approx([1.0, 0.75])
    assert drafted.accepted == pytest.approx(0.7 + 0.25 * (0.81 + 0.45 + 0.45))
    by_request = chain.stopped_by_request([0.9, 0.5], [0.5, 0.5], 2, 0.45)
    assert by_request.at_least == pytest.approx([1.0, 0.5])
    assert by_request.accepted == pytest.approx(0.7 + 0.5 * 0.81)
