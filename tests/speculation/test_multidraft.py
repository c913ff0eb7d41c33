"""Several candidates for one position: exact acceptance of every rule, and that none beats the optimum."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests.oracles import multidraft


def transport_optimum(p: np.ndarray, q: np.ndarray, k: int, replacement: bool) -> float:
    """The best coupling of candidate tuples with the output token, as a linear programme."""
    tuples = []
    if replacement:
        tuples = [(t, float(np.prod(q[list(t)]))) for t in itertools.product(range(len(p)), repeat=k)]
    else:
        for t in itertools.permutations(range(len(p)), k):
            probability, left = 1.0, 1.0
            for x in t:
                probability, left = probability * q[x] / left, left - q[x]
            tuples.append((t, probability))
    n, v = len(tuples), len(p)
    gain = np.array([[-1.0 if y in t else 0.0 for y in range(v)] for t, _ in tuples]).ravel()
    rows = np.kron(np.eye(n), np.ones(v))
    columns = np.kron(np.ones(n), np.eye(v))
    given_mass = [w for _, w in tuples]
    answer = linprog(gain, A_eq=np.vstack([rows, columns]), b_eq=[*given_mass, *p], bounds=(0, None), method="highs")
    assert answer.fun is not None, answer.message
    return -float(answer.fun)


def test_every_rule_by_the_book(oracle_dir: Path) -> None:
    oracle = json.loads((oracle_dir / "multidraft.json").read_text())
    assert len(oracle["rows"]) == 18
    for row in oracle["rows"]:
        # p and q are printed to six places.
        p, q, k = np.array(row["p"]), np.array(row["q"]), row["k"]
        p, q = p / p.sum(), q / q.sum()
        rounded = abs(sum(row["p"]) - 1) > 1e-12 or abs(sum(row["q"]) - 1) > 1e-12
        near: dict[str, Any] = {"abs": 5e-6} if rounded else {"rel": 1e-9}
        assert multidraft.one(p, q) == pytest.approx(row["single"], **near)
        assert multidraft.spec_infer(p, q, k).sum() == pytest.approx(row["specinfer_iid"], **near)
        by_rank = multidraft.without_replacement(p, q, k)
        assert by_rank == pytest.approx(row["rrs_per_rank"], **near)
        assert by_rank.sum() == pytest.approx(row["rrs_no_replacement"], **near)
        taken, rho = multidraft.k_seq(p, q, k)
        assert taken == pytest.approx(row["kseq"], **near)
        assert rho == pytest.approx(row["kseq_rho"], abs=1e-4 if near.get("abs") else 1e-9)
        assert multidraft.greedy(p, q, k).sum() == pytest.approx(row["greedy_topk"], **near)
        for replacement, subsets, transport in (
            (True, "hall_iid", "ot_iid"),
            (False, "hall_no_replacement", "ot_no_replacement"),
        ):
            best = multidraft.optimum(p, q, k, replacement=replacement)
            assert best == pytest.approx(row[subsets], **near)
            if row[transport] is not None:
                assert best == pytest.approx(row[transport], abs=max(1e-7, near.get("abs", 0)))


def test_the_subset_formula_is_the_transport_optimum() -> None:
    rng = np.random.default_rng(7)
    for k in (1, 2, 3):
        p, q = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
        for replacement in (True, False):
            best = multidraft.optimum(p, q, k, replacement=replacement)
            assert best == pytest.approx(transport_optimum(p, q, k, replacement), abs=1e-7)


distributions = st.lists(st.floats(0.01, 1), min_size=4, max_size=4).map(lambda x: np.array(x) / sum(x))


@given(distributions, distributions, st.integers(1, 3))
def test_no_rule_beats_the_optimum_and_more_candidates_help(p: np.ndarray, q: np.ndarray, k: int) -> None:
    with_replacement = multidraft.optimum(p, q, k, replacement=True)
    without = multidraft.optimum(p, q, k, replacement=False)
    assert multidraft.spec_infer(p, q, k).sum() <= with_replacement + 1e-9
    assert multidraft.k_seq(p, q, k)[0] <= with_replacement + 1e-9
    by_rank = multidraft.without_replacement(p, q, k)
    assert by_rank.sum() <= without + 1e-9
    assert by_rank[0] == pytest.approx(multidraft.one(p, q)), "the first candidate knows nothing of the others"
    assert (by_rank >= 0).all()
