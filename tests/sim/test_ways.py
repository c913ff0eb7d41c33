"""Links between pairs of pools: their own times, and their own traffic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.costs.compiled import LinearCosts
from simtune.errors import SpecError
from simtune.results.result import Result
from simtune.sim.deployment import deploy
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.workload import Slo
from simtune.testing.clusters import stream_of
from simtune.tuner.bounds.plans import PlanBounds

BLOCK = 16 * 2 * 32 * 8 * 128 * 2
"""Bytes of a KV block of llama-3.1-8b: keys and values of 32 layers with 8 heads of 128 numbers, 2 bytes each."""


def text_of(links: str, pools: str = "{name: near, role: decode}, {name: far, role: decode}") -> str:
    """One prefill pool and two decode pools, of one instance each."""
    given = "hardware: h100-sxm, instances: 1, max_model_len: 8192, kv_cache: {num_blocks: 4096}"
    batching = "batching: {max_num_seqs: 64, max_num_batched_tokens: 8192}"
    pools = f"{{name: p, role: prefill}}, {pools}".replace("}", f", {given}, {batching}}}")
    return f"schema: simtune/plan@1\nname: pairs\nmodel: llama-3.1-8b\npools: [{pools}]\n{links}\n"


def run(links: str, requests: int = 4, apart_s: float = 100.0) -> Result:
    """Prompts of two blocks, sent to the decode pools in turn."""
    costs = OwnCosts(LinearCosts(step_s=1e-3))
    plan = Plan.from_text(text_of(f"decode_router: {{kind: round_robin}}\n{links}"))
    stream = stream_of((np.arange(requests) * apart_s).tolist(), [32] * requests, [4] * requests)
    return deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"), costs).simulate(stream)


def test_each_pair_has_its_own_time() -> None:
    own = f"bytes_per_s: {BLOCK}, descriptor_s: 0"
    result = run(f"links: [{{from: p, to: near, setup_s: 0.5, {own}}}, {{from: p, to: far, setup_s: 7, {own}}}]")
    assert result.transfer_s == pytest.approx([2.5, 9.0, 2.5, 9.0])
    assert result.outcome.transferred_bytes == 8 * BLOCK


def test_pairs_that_are_not_named_have_the_link_of_all() -> None:
    own, plain = f"bytes_per_s: {BLOCK}, descriptor_s: 0, setup_s: 0", "descriptor_s: 0, setup_s: 0"
    result = run(f"link: {{bytes_per_s: {2 * BLOCK}, {plain}}}\nlinks: [{{from: p, to: far, {own}}}]")
    assert result.transfer_s == pytest.approx([1.0, 2.0, 1.0, 2.0])


def test_equal_links_of_pairs_that_never_meet_are_the_link_of_all() -> None:
    own = f"bytes_per_s: {BLOCK}, descriptor_s: 0, setup_s: 1"
    pairs = f"links: [{{from: p, to: near, {own}}}, {{from: p, to: far, {own}}}]"
    one, several = run(f"link: {{{own}}}", requests=40), run(pairs, requests=40)
    for column in ("scheduled", "first_token", "transferred", "finish", "core"):
        assert getattr(one.outcome, column).tolist() == getattr(several.outcome, column).tolist()


def test_caches_on_different_links_do_not_slow_one_another() -> None:
    own = f"bytes_per_s: {BLOCK}, descriptor_s: 0, setup_s: 0"
    pairs = f"links: [{{from: p, to: near, {own}}}, {{from: p, to: far, {own}}}]"
    together = run(f"link: {{{own}}}", requests=2, apart_s=0.0)
    apart = run(pairs, requests=2, apart_s=0.0)
    assert together.transfer_s == pytest.approx([4.0, 4.0])
    assert apart.transfer_s == pytest.approx([2.0, 2.0])


def test_bounds_hold_without_the_links_of_pairs() -> None:
    plan = Plan.from_text(text_of("links: [{from: p, to: near}, {from: p, to: far}]"))
    deployment = deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"))
    stream = stream_of([0.1 * i for i in range(20)], [500] * 20, [40] * 20)
    bounds, result = PlanBounds(deployment, stream), deployment.simulate(stream)
    assert (bounds.ttft_s <= result.ttft_s).all()
    assert (bounds.ttft_s + bounds.decode_s <= result.e2el_s).all()
    assert (bounds.decode_s > 0).all()
    assert bounds.rate(Slo(ttft_s={"p99": 1.0}, tpot_s={"p99": 0.1})).rps > 10


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("links: [{from: p, to: near}]", "links: no link leads from p to far; add a link, or one for all (`link`)"),
        ("links: [{from: p, to: naer}]", "links.0.to: the link names pool 'naer', which is not there, did you mean"),
        ("links: [{from: far, to: near}]", "links.0.from: pool far is a decode pool; give a prefill pool"),
        ("links: [{from: p, to: p}]", "links.0.to: pool p is a prefill pool; give a decode pool"),
        ("link: {}\nlinks: [{from: p, to: far}, {from: p, to: far}]", "links.1: there are two links from p to far"),
        ("links: [{to: far}]", "links.0.from: is required and missing"),
    ],
)  # fmt: skip
def test_links_that_lead_nowhere_are_refused_with_their_place(links: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        Plan.from_text(text_of(links), "p.yaml")
    assert message in str(error.value)


def test_a_plan_with_links_is_written_and_read_again() -> None:
    plan = Plan.from_text(text_of("link: {}\nlinks: [{from: p, to: far, bytes_per_s: 1e9}]"))
    data: dict[str, Any] = plan.to_data()
    assert data["links"][0]["from"] == "p"
    assert Plan.from_text(plan.to_yaml()) == plan
