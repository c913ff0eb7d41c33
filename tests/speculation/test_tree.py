"""Trees: their value, and that greedy, dynamic programme, integer programme and brute force agree where they must."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.programs import drafts
from simtune.errors import Infeasible
from simtune.specs.trees import Node, Ranks, depth_of, dynamic, weight, width_of
from simtune.tuner.drafting import tree
from tests.oracles import tree as exact

EXACT = 1e-9
SOLVER = 1e-6


@pytest.fixture(scope="module")
def oracle(oracle_dir: Path) -> Any:
    return json.loads((oracle_dir / "spec_tree.json").read_text())


def every_tree(ranks: Ranks, size: int, widths: Sequence[int] | None = None) -> Iterator[tuple[Node, ...]]:
    """All trees of up to `size` nodes in which every node stands with its parent and the siblings before it."""
    nodes = sorted(drafts.every_node(ranks))

    def grow(start: int, chosen: list[Node]) -> Iterator[tuple[Node, ...]]:
        yield tuple(chosen)
        if len(chosen) == size:
            return
        for at in range(start, len(nodes)):
            node = nodes[at]
            parent, sibling = node[:-1], (*node[:-1], node[-1] - 1)
            if (parent and parent not in chosen) or (node[-1] > 1 and sibling not in chosen):
                continue
            if widths and sum(len(n) == len(node) for n in chosen) >= widths[len(node) - 1]:
                continue
            yield from grow(at + 1, [*chosen, node])

    yield from grow(0, [])


def brute_force(ranks: Ranks, size: int, widths: Sequence[int] | None = None) -> float:
    return max(tree.expected_accepted(nodes, ranks) for nodes in every_tree(ranks, size, widths))


def some_ranks(rng: np.random.Generator, depth: int, branch: int) -> list[list[float]]:
    return [sorted(rng.dirichlet(np.ones(branch + 1))[:branch].tolist(), reverse=True) for _ in range(depth)]


# --- one tree ---------------------------------------------------------------------------------------------


def test_the_value_of_a_tree(oracle: Any) -> None:
    case = oracle["static_tree"]
    nodes = [tuple(node) for node in case["tree"]]
    accepted = tree.expected_accepted(nodes, case["P"])
    assert accepted == pytest.approx(case["expected_accepted"], rel=EXACT)
    assert 1 + accepted == pytest.approx(case["expected_generated"], rel=EXACT)
    assert accepted == pytest.approx(case["mc"], rel=0.01)
    pmf = exact.accepted_pmf(nodes, case["P"])
    assert pmf.sum() == pytest.approx(1)
    assert pmf @ np.arange(len(pmf)) == pytest.approx(accepted)
    assert pmf[0] == pytest.approx(1 - 0.6 - 0.2 - 0.1)
    assert (depth_of(nodes), width_of(nodes)) == (3, 3)
    assert (depth_of([]), width_of([])) == (0, 0)


def test_greedy_is_brute_force_where_ranks_fall(oracle: Any) -> None:
    assert oracle["greedy_vs_bruteforce"]["mismatches"] == 0
    rng = np.random.default_rng(5)
    for case in range(150):
        depth, branch, size = ((2, 3, 4), (3, 2, 5), (3, 3, 5), (3, 2, 6))[case % 4]
        ranks = some_ranks(rng, depth, branch)
        best = brute_force(ranks, size)
        assert tree.expected_accepted(tree.greedy(ranks, size), ranks) == pytest.approx(best, abs=EXACT)


def test_greedy_is_the_dynamic_programme_where_ranks_fall(oracle: Any) -> None:
    assert oracle["greedy_vs_sequoia_dp_monotone"]["mismatches"] == 0
    rng = np.random.default_rng(6)
    for _ in range(20):
        (row,) = some_ranks(rng, 1, 6)
        for depth in (1, 2, 5):
            ranks = [row] * depth
            trees = tree.best_trees(ranks, 23)
            order = tree.greedy(ranks, 23)
            assert len(trees) == len(order) + 1, "all sizes that depth and ranks can fill"
            for size, nodes in enumerate(trees):
                assert len(nodes) == size
                best = tree.expected_accepted(nodes, ranks)
                assert tree.expected_accepted(order[:size], ranks) == pytest.approx(best, abs=EXACT)


def test_the_dynamic_programme_takes_ranks_as_they_come(oracle: Any) -> None:
    case = oracle["nonmonotone_ranks"]
    ranks = [case["p"]] * 3
    assert not tree.falling(ranks)
    programme = [1 + tree.expected_accepted(nodes, ranks) for nodes in tree.best_trees(ranks, 5)]
    assert programme == pytest.approx(case["dp"], rel=EXACT)
    assert programme == pytest.approx(case["brute"], rel=EXACT)
    greedy = [1 + tree.expected_accepted(tree.greedy(ranks, n), ranks) for n in range(6)]
    assert greedy == pytest.approx(case["greedy"], rel=EXACT)
    assert greedy[4] < programme[4] - 0.1, "a light early rank hides a heavy later one"
    assert [1 + brute_force(ranks, n) for n in range(6)] == pytest.approx(case["brute"], rel=EXACT)


@given(st.lists(st.lists(st.floats(0, 0.3), min_size=1, max_size=3), min_size=1, max_size=3), st.integers(0, 4))
def test_the_dynamic_programme_is_brute_force_at_any_ranks(ranks: list[list[float]], size: int) -> None:
    trees = tree.best_trees(ranks, size)
    best = max(tree.expected_accepted(nodes, ranks) for nodes in trees)
    assert best == pytest.approx(brute_force(ranks, size), abs=EXACT)
    for nodes in trees:
        for node in nodes:
            assert len(node) == 1 or node[:-1] in nodes
            assert node[-1] == 1 or (*node[:-1], node[-1] - 1) in nodes


def test_smoothing_pools_neighbours() -> None:
    assert exact.smoothed([[0.5, 0.02, 0.3], [0.4, 0.2]]) == [[0.5, 0.16, 0.16], [0.4, 0.2]]


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=1, max_size=3))
def test_smoothed_ranks_fall_and_keep_their_sums(ranks: list[list[float]]) -> None:
    smooth = exact.smoothed(ranks)
    assert all(a >= b - 1e-12 for row in smooth for a, b in pairwise(row))
    assert [sum(row) for row in smooth] == pytest.approx([sum(row) for row in ranks])
    if tree.falling(ranks):
        assert smooth == [pytest.approx(row) for row in ranks]


def test_the_value_grows_ever_slower(oracle: Any) -> None:
    case = oracle["size_scaling"]
    ranks = [case["p"]] * 20
    order = tree.greedy(ranks, 255)
    for row in case["rows"]:
        generated = 1 + tree.expected_accepted(order[: row["budget"] - 1], ranks)
        assert generated == pytest.approx(row["generated"], rel=EXACT)
    gains = [weight(node, ranks) for node in order]
    assert gains == sorted(gains, reverse=True), "concave in the number of nodes"


def test_the_size_follows_the_hardware(oracle: Any) -> None:
    case = oracle["hardware_aware"]
    verify = {int(n): t for n, t in case["verify"].items()}
    best = exact.hardware_aware([case["p"]] * 9, case["draft_time"], verify)
    assert best.seconds_per_token == pytest.approx(case["best"]["time_per_token"], rel=EXACT)
    assert len(best.nodes) + 1 == case["best"]["nodes_incl_root"]
    assert depth_of(best.nodes) == case["best"]["depth"]
    assert best.generated == pytest.approx(case["best"]["generated"], rel=EXACT)
    assert verify[1] / best.seconds_per_token == pytest.approx(case["speedup"], rel=EXACT)


def test_a_confident_drafter_knows_at_least_what_its_ranks_say() -> None:
    ranks = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.4, 0.2, 0.1]]
    assert dynamic(ranks, steps=3, topk=1, tokens=3) == [(1,), (1, 1), (1, 1, 1)], "topk 1 is a chain"
    wide = dynamic(ranks, steps=3, topk=3, tokens=8)
    best = tree.expected_accepted(tree.greedy(ranks, 8), ranks)
    assert tree.expected_accepted(wide, ranks) == pytest.approx(best, abs=EXACT), "three a level is wide enough here"
    narrow = dynamic(ranks, steps=3, topk=2, tokens=8)
    assert tree.expected_accepted(narrow, ranks) < best
    assert all(len(node) == 1 or node[:-1] in wide for node in wide)


# --- published trees --------------------------------------------------------------------------------------


def test_published_anchors(oracle_dir: Path) -> None:
    oracle = json.loads((oracle_dir / "spec_published.json").read_text())
    for model in ("medusa_vicuna-7b", "medusa_vicuna-33b"):
        ranks = oracle[model]["per_rank"]
        order = tree.greedy(ranks, 63)
        for row in oracle[model]["greedy"]:
            generated = 1 + tree.expected_accepted(order[: row["nodes"]], ranks)
            assert generated == pytest.approx(row["generated"], abs=1e-6)
        chain = [(1,) * d for d in range(1, 5)]
        assert 1 + tree.expected_accepted(chain, ranks) == pytest.approx(oracle[model]["chain4"], abs=1e-6)


def test_the_sequoia_demo_is_a_chain_of_four(oracle_dir: Path, data_dir: Path) -> None:
    oracle = json.loads((oracle_dir / "spec_published.json").read_text())["sequoia_demo"]
    lines = (data_dir / "spec_decode" / "sequoia_acceptance_rate_vector.csv").read_text().split()[1:]
    p = [round(float(line.split(",")[1]), 5) for line in lines[1:33]]
    trees = tree.best_trees([p] * 9, 31)
    for size, generated in oracle["dp_values"].items():
        assert 1 + tree.expected_accepted(trees[int(size) - 1], [p] * 9) == pytest.approx(generated, abs=1e-6)
    greedy = tree.greedy([p] * 9, 31)
    for size, generated in oracle["greedy_values"].items():
        nodes = greedy[: int(size) - 1]
        assert 1 + tree.expected_accepted(nodes, [p] * 9) == pytest.approx(generated, abs=1e-6)
    best = exact.hardware_aware([p] * 9, 0.3, {1: 10, 2: 10, 4: 10, 8: 12, 16: 14, 32: 18})
    assert best.nodes == [(1,), (1, 1), (1, 1, 1)], "with the root, the four nodes in a row that the demo ships"
    assert best.seconds_per_token == pytest.approx(oracle["best_time"], abs=1e-6)


# --- a whole batch ----------------------------------------------------------------------------------------


def total(chosen: list[list[Node]], requests: Sequence[Ranks]) -> float:
    return sum(tree.expected_accepted(nodes, ranks) for nodes, ranks in zip(chosen, requests, strict=True))


def test_one_budget_for_a_batch(oracle: Any) -> None:
    case = oracle["batch_instance"]
    requests = case["trees"]
    nodes = [drafts.every_node(ranks) for ranks in requests]
    for row in case["rows"]:
        merged = exact.share_budget(requests, row["N"])
        assert merged is not None
        assert total(merged, requests) == pytest.approx(row["greedy"], abs=EXACT)
        assert [len(n) for n in merged] == row["nodes_per_request"]
        assert total(drafts.select(nodes, row["N"]), requests) == pytest.approx(row["best"], abs=SOLVER)
        promised = exact.share_budget(requests, row["N"], [0.5] * 3)
        if row["min_half_best"] is None:
            assert promised is None
            with pytest.raises(Infeasible, match="no trees of 3 draft tokens"):
                drafts.select(nodes, row["N"], minima=[0.5] * 3)
        else:
            assert promised is not None
            assert total(promised, requests) == pytest.approx(row["min_half_greedy"], abs=EXACT)
            solved = drafts.select(nodes, row["N"], minima=[0.5] * 3)
            assert total(solved, requests) == pytest.approx(row["min_half_best"], abs=SOLVER)
        narrow = drafts.select(nodes, row["N"], widths=[2, 1])
        assert total(narrow, requests) == pytest.approx(row["width_2_1_best"], abs=SOLVER)


def test_merging_greedy_orders_is_the_integer_programme(oracle: Any) -> None:
    assert oracle["batch_greedy_vs_ilp"]["mismatches"] == oracle["batch_greedy_vs_ilp"]["with_minima_mismatches"] == 0
    rng = np.random.default_rng(8)
    refused = 0
    for case in range(10):
        requests = [some_ranks(rng, 2, 3) for _ in range(3)]
        nodes = [drafts.every_node(ranks) for ranks in requests]
        size = (5, 8, 11)[case % 3]
        merged = exact.share_budget(requests, size)
        assert merged is not None
        assert total(merged, requests) == pytest.approx(total(drafts.select(nodes, size), requests), abs=SOLVER)
        minima = rng.choice([0.0, 0.3, 0.6, 1.0], 3).tolist()
        promised = exact.share_budget(requests, size, minima)
        if promised is None:
            refused += 1
            with pytest.raises(Infeasible):
                drafts.select(nodes, size, minima=minima)
        else:
            solved = drafts.select(nodes, size, minima=minima)
            assert total(promised, requests) == pytest.approx(total(solved, requests), abs=SOLVER)
            assert all(
                tree.expected_accepted(n, ranks) >= least - EXACT
                for n, ranks, least in zip(promised, requests, minima, strict=True)
            )
    assert 0 < refused < 10, "some promises can be kept and some cannot"


def test_tokens_per_second_of_a_batch(oracle: Any) -> None:
    case = oracle["throughput_objective"]
    verify = [10 + 0.35 * max(0, m - 8) for m in range(40)]
    best = exact.best_throughput(oracle["batch_instance"]["trees"], case["t_draft_per_level"], verify)
    assert best.tokens_per_s == pytest.approx(case["best_rate"], rel=EXACT)
    assert (best.depth, best.num_nodes) == (case["depth"], case["nodes"])
    dear = exact.best_throughput(oracle["batch_instance"]["trees"], 100.0, verify)
    assert (dear.depth, dear.num_nodes, dear.tokens_per_s) == (0, 0, 3 / 10)


# --- where greedy is not exact ----------------------------------------------------------------------------


def test_widths_are_no_matter_where_weights_are_ranks(oracle: Any) -> None:
    assert oracle["width_quota_positional"]["greedy_suboptimal"] == 0
    rng = np.random.default_rng(9)
    for _ in range(60):
        ranks = some_ranks(rng, 3, 3)
        widths, size = rng.integers(1, 4, 3).tolist(), int(rng.integers(4, 7))
        narrow = exact.greedy_within(ranks, size, widths)
        assert all(sum(len(n) == d for n in narrow) <= w for d, w in enumerate(widths, start=1))
        best = brute_force(ranks, size, widths)
        assert tree.expected_accepted(narrow, ranks) == pytest.approx(best, abs=EXACT)


def test_widths_matter_where_weights_know_the_context(oracle: Any) -> None:
    case = oracle["width_quota_counterexample"]
    weights = {tuple(json.loads(f"[{key.strip('(,)')}]")): w for key, w in case["weights"].items()}
    (nodes,) = drafts.select([weights], case["budget"], widths=[case["quota_depth1"], 2], in_rank_order=False)
    assert sum(weights[n] for n in nodes) == pytest.approx(case["optimum"], abs=SOLVER)
    heaviest = max((n for n in weights if len(n) == 1), key=weights.__getitem__)
    greedy = weights[heaviest] + weights[(*heaviest, 1)]
    assert greedy == pytest.approx(case["greedy"])


def test_unequal_costs_make_it_a_knapsack(oracle: Any) -> None:
    case = oracle["heterogeneous_cost"]
    requests, costs = case["trees"], case["cost"]
    nodes = [drafts.every_node(ranks) for ranks in requests]
    lost = 0
    for row in case["rows"]:
        solved = total(drafts.select(nodes, row["N"], costs=costs), requests)
        assert solved == pytest.approx(row["ilp"], abs=SOLVER)
        by_ratio = sorted(
            (-w / cost, i, k, w)
            for i, (ranks, cost) in enumerate(zip(requests, costs, strict=True))
            for k, w in enumerate(weight(n, ranks) for n in tree.greedy(ranks, 9))
        )
        left, value = row["N"], 0.0
        for _, i, _, w in by_ratio:
            if costs[i] > left:
                break
            left, value = left - costs[i], value + w
        assert value == pytest.approx(row["ratio_greedy"], abs=EXACT)
        lost += value < solved - 0.1
    assert lost >= 3
