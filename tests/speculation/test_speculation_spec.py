"""The speculation block of a pool: schemes that make sense, and vLLM's rules for lengths by batch."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from simtune.specs.drafters import Drafter, DraftModel, Eagle, Medusa, Ngram
from simtune.specs.pool import Batching, Parallelism, Pool
from simtune.specs.schemes import BatchRange, ByBatch, Chain, Dsi, DynamicTree, Frontier, Pearl, StaticTree
from simtune.specs.speculation import DrafterChoice, Speculation


def by_batch(*ranges: tuple[int, int, int], most: int = 3) -> ByBatch:
    return ByBatch(max_tokens=most, ranges=tuple(BatchRange(first=a, last=b, tokens=k) for a, b, k in ranges))


def test_gaps_inherit_and_long_drafts_are_cut() -> None:
    scheme = by_batch((1, 16, 5), (64, 128, 2), (256, 4096, 0))
    assert [scheme.tokens_for(b) for b in (1, 16, 17, 63, 64, 128, 200, 256, 9999)] == [3, 3, 3, 3, 2, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(2, 4, 1)], "must begin at a batch of 1, not 2"),
        ([(1, 4, 2), (4, 8, 1)], "ranges must ascend without overlap: 4-8 comes after 4"),
        ([(1, 4, 2), (9, 8, 1)], "9-8 comes after 4"),
    ],
)
def test_ranges_that_make_no_sense(ranges: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        by_batch(*ranges)


def test_trees() -> None:
    assert StaticTree(nodes=((1,), (2,), (2, 3))).nodes[-1] == (2, 3), "any node set, siblings may be missing"
    with pytest.raises(ValidationError, match=r"node \[2, 1\] has no parent \[2\]"):
        StaticTree(nodes=((1,), (2, 1)))
    with pytest.raises(ValidationError, match="is listed twice"):
        StaticTree(nodes=((1,), (1,)))
    assert DynamicTree(steps=3, topk=1, tokens=3).tokens == 3
    with pytest.raises(ValidationError, match=r"tokens \(22\) must lie between steps \(3\) and the 10 nodes"):
        DynamicTree(steps=3, topk=2, tokens=22)
    with pytest.raises(ValidationError, match=r"tokens \(2\) must lie between steps \(3\)"):
        DynamicTree(steps=3, topk=4, tokens=2)


def test_read_from_a_plan() -> None:
    read = Speculation.model_validate(
        {"drafter": {"kind": "ngram", "lookup_max": 4}, "scheme": {"kind": "chain", "tokens": 3}, "acceptance": "mine"}
    )
    assert read == Speculation(drafter=Ngram(lookup_max=4), scheme=Chain(tokens=3), acceptance="mine")
    with pytest.raises(ValidationError, match=r"lookup_min \(5\) exceeds lookup_max \(4\)"):
        Ngram(lookup_min=5, lookup_max=4)


@pytest.mark.parametrize("drafter", [Eagle(), Medusa(heads=4), Ngram(lookup_max=4)])
def test_only_a_model_of_its_own_drafts_while_the_target_verifies(drafter: Drafter) -> None:
    message = f"takes a model of its own; drafter {drafter.kind} has none: take a draft_model, or a chain"
    with pytest.raises(ValidationError, match=message):
        Speculation(drafter=drafter, scheme=Pearl(tokens=4), acceptance="mine")
    with pytest.raises(ValidationError, match=message):
        DrafterChoice(drafter=drafter, scheme=Pearl(tokens=4), acceptance="mine")
    with pytest.raises(ValidationError, match=f"scheme dsi .* drafter {drafter.kind} has none"):
        Speculation(drafter=drafter, scheme=Dsi(tokens=4, replicas=2), acceptance="mine")
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        Pearl(tokens=1)


def test_chunks() -> None:
    def frontier(tokens: int = 7, chunks: int = 3, draft: float = 0.25, verify: float = 0.75) -> Frontier:
        return Frontier(tokens=tokens, chunks=chunks, draft_share=draft, verify_share=verify)

    assert [frontier(tokens=k).sizes for k in (3, 7, 8)] == [(1, 1, 1), (3, 2, 2), (3, 3, 2)]
    with pytest.raises(ValidationError, match="2 tokens cannot be cut into 3 chunks"):
        frontier(tokens=2)
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        frontier(chunks=1)
    with pytest.raises(ValidationError, match=r"draft_share \(0.5\) and verify_share \(0.75\) .* exceed 1 together"):
        frontier(draft=0.5)
    for drafter in (Medusa(heads=7), Ngram(lookup_max=4)):
        message = f"makes one after the other; drafter {drafter.kind} does not: take a draft_model or eagle, or a chain"
        with pytest.raises(ValidationError, match=message):
            Speculation(drafter=drafter, scheme=frontier(), acceptance="mine")


def test_a_drafter_beside_the_target_has_gpus_of_its_own() -> None:
    def devices(parallelism: Parallelism, tp: int | None = None, replicas: int = 1) -> int:
        drafter = DraftModel(model="llama-3.2-1b", tp=tp)
        scheme = Pearl(tokens=4) if replicas == 1 else Dsi(tokens=4, replicas=replicas)
        beside = Speculation(drafter=drafter, scheme=scheme, acceptance="mine")
        batching = Batching(max_num_seqs=8, max_num_batched_tokens=512)
        pool = Pool(hardware="h100-sxm", instances=3, batching=batching, speculation=beside, parallelism=parallelism)
        return pool.devices

    assert devices(Parallelism(tp=4)) == 8
    assert devices(Parallelism(tp=4), 1) == 5
    assert devices(Parallelism(tp=4), 1, replicas=3) == 3 * 4 + 1
    for parallelism in (Parallelism(pp=2), Parallelism(attention_dp=2)):
        with pytest.raises(ValidationError, match=r"drafts for one batch at a time, and .* makes 2 of them"):
            devices(parallelism)
