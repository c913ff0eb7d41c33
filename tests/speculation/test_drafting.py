"""What a round costs with each kind of drafter, and the memory that a drafter takes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from simtune.costs.drafting import RoundModel, draft_memory
from simtune.costs.iteration import StepModel, StepWork
from simtune.errors import Infeasible
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.drafters import BlockDrafter, Drafter, DraftModel, Eagle, Medusa, Ngram, Suffix
from simtune.specs.model import DenseFeedForward
from simtune.specs.pool import Batching, Parallelism, Pool
from simtune.specs.schemes import Chain
from simtune.specs.speculation import Speculation

TARGET = load_model("llama-3.1-8b")
DRAFT = TARGET.model_copy(
    update={"name": "small", "layers": (TARGET.layers[0].model_copy(update={"count": 4}),), "hidden_size": 2048}
)
HARDWARE = load_hardware("h100-sxm")


def pool(**settings: Any) -> Pool:
    batching = Batching(max_num_seqs=256, max_num_batched_tokens=8192)
    return Pool(hardware="h100-sxm", instances=1, batching=batching, **settings)


def costs(drafter: Drafter, **settings: Any) -> RoundModel:
    return RoundModel(TARGET, HARDWARE, pool(**settings), drafter, DRAFT)


def test_without_a_draft_a_round_is_a_decode_step() -> None:
    for settings in ({}, {"async_scheduling": False}, {"async_scheduling": False, "cuda_graphs": False}):
        step = StepModel(TARGET, HARDWARE, pool(**settings))
        rounds = costs(Eagle(), **settings)
        for batch, context in ((1, 100), (32, 1000), (256, 4000)):
            # A decode step reads the token it computes along with the context.
            expected = step.seconds(StepWork(batch, batch * (context + 1), (), batch))
            assert rounds(batch, context, 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("drafter", [DraftModel(model="small"), Eagle(draft_vocab_size=32000)])
def test_draft_steps_follow_one_another(drafter: Drafter) -> None:
    rounds = costs(drafter)
    one, two, three = (rounds.draft_s(8, 1000, depth) for depth in (1, 2, 3))
    assert 0 < one < two < three
    assert three - two == pytest.approx(two - one, rel=0.05)
    assert rounds.draft_s(8, 1000, 0) == 0
    assert rounds.draft_s(8, 1000, 3, width=10) > three, "a tree drafts more tokens a step"
    assert three < rounds.verify_s(8, 1000, 4), "a drafter is smaller than its target"


def test_heads_and_blocks_draft_at_once() -> None:
    medusa = costs(Medusa(heads=4))
    assert medusa.draft_s(8, 1000, 1) == medusa.draft_s(8, 1000, 4) > 0
    assert costs(Medusa(heads=2)).draft_s(8, 1000, 1) == pytest.approx(medusa.draft_s(8, 1000, 1) / 2)
    block = costs(BlockDrafter(layers=5))
    stepwise = costs(Eagle())
    assert block.draft_s(8, 1000, 8) < 8 * stepwise.draft_s(8, 1000, 1)
    drafters = (Medusa(heads=4), BlockDrafter(layers=5), Eagle(), Ngram(lookup_max=3))
    assert [drafter.passes(5) for drafter in drafters] == [1, 1, 5, 0]


def test_copying_costs_host_time_only() -> None:
    for drafter in (Ngram(lookup_max=3, host_s=1e-4), Suffix(host_s=1e-4)):
        rounds = costs(drafter)
        assert rounds.draft_s(8, 1000, 5) == 0
        waiting = costs(drafter, async_scheduling=False)
        assert waiting(8, 1000, 6, 5, 1) == pytest.approx(waiting(8, 1000, 6) + 8e-4)


@pytest.mark.parametrize("drafter", [Ngram(lookup_max=3), Suffix(), Medusa(heads=4)])
def test_the_host_waits_for_drafts_that_must_be_awaited(drafter: Drafter) -> None:
    """Whatever is asked for; without drafts it does not."""
    host = StepModel(TARGET, HARDWARE, pool()).host.seconds(8)
    asynchronous, synchronous = costs(drafter), costs(drafter, async_scheduling=False)
    assert asynchronous(8, 1000, 4, 3, 1) == synchronous(8, 1000, 4, 3, 1)
    assert synchronous(8, 1000, 1) == pytest.approx(asynchronous(8, 1000, 1) + host)
    its = pool(speculation=Speculation(drafter=drafter, scheme=Chain(tokens=3), acceptance="any"))
    assert its.async_scheduling
    assert not its.schedules_async
    batch = StepWork(8, 8008, (), 8)
    assert StepModel(TARGET, HARDWARE, its).seconds(batch) == pytest.approx(synchronous(8, 1000, 1))


def test_a_waiting_host_is_paid_once_a_pass_without_graphs() -> None:
    host = StepModel(TARGET, HARDWARE, pool()).host.seconds(4)
    plain = costs(Eagle(), async_scheduling=False)
    eager = costs(Eagle(), async_scheduling=False, cuda_graphs=False)
    assert plain(4, 1000, 4, 3, 1) == pytest.approx(plain.verify_s(4, 1000, 4) + plain.draft_s(4, 1000, 3) + host)
    gpu = eager.verify_s(4, 1000, 4) + eager.draft_s(4, 1000, 3)
    assert eager(4, 1000, 4, 3, 1) == pytest.approx(gpu + 4 * host)


def test_verifying_more_never_costs_less() -> None:
    """But for the steps of the CUDA graphs' sizes and what fits of kernels leave over: a tenth at most."""
    rounds = costs(Eagle())
    for batch in (1, 16, 256):
        seconds = [rounds.verify_s(batch, 2000, tokens) for tokens in (1, 2, 4, 8, 16, 32)]
        assert all(b > 0.9 * a for a, b in pairwise(seconds))
    assert rounds.verify_s(256, 2000, 8) > 2 * rounds.verify_s(256, 2000, 1), "a large batch pays for every token"
    assert rounds.verify_s(1, 2000, 8) < 1.1 * rounds.verify_s(1, 2000, 1), "a small one has them almost for nothing"


# --- networks and memory ----------------------------------------------------------------------------------


def test_the_network_that_drafts() -> None:
    eagle = Eagle(draft_vocab_size=32000).network(TARGET)
    assert eagle is not None
    assert (eagle.num_layers, eagle.vocab_size, eagle.hidden_size) == (1, 32000, 4096)
    block = BlockDrafter(layers=5).network(TARGET)
    assert block is not None
    assert block.num_layers == 5
    assert Ngram(lookup_max=2).network(TARGET) is None
    other = DRAFT.model_copy(update={"vocab_size": 1000})
    with pytest.raises(Infeasible, match="draft model small: its vocabulary of 1000 is not the 128256"):
        RoundModel(TARGET, HARDWARE, pool(), DraftModel(model="small"), other)


def test_the_memory_of_a_drafter() -> None:
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    kv = 2 * 2 * 8 * 128
    memory = draft_memory(Eagle(), TARGET, pool())
    assert memory.weights_bytes == pytest.approx(2 * (layer + 2 * 4096 * 4096), rel=1e-3)
    assert memory.kv_bytes_per_token == kv
    reduced = draft_memory(Eagle(draft_vocab_size=32000), TARGET, pool())
    assert reduced.weights_bytes - memory.weights_bytes == pytest.approx(2 * 32000 * 4096)
    halved = draft_memory(Eagle(), TARGET, pool(parallelism=Parallelism(tp=2)))
    assert halved.kv_bytes_per_token == kv / 2
    medusa = draft_memory(Medusa(heads=4), TARGET, pool())
    assert medusa == (4 * 2 * 4096 * (4096 + 128256), 0.0)
    assert draft_memory(Suffix(), TARGET, pool()) == (0.0, 0.0)
    own = draft_memory(DraftModel(model="small"), TARGET, pool(), DRAFT)
    assert own.kv_bytes_per_token == 4 * kv
    assert own.weights_bytes > 2 * 2 * 128256 * 2048, "with an embedding and a head of its own"


@pytest.mark.parametrize(("name", "width"), [("qwen3-30b-a3b", 6144), ("deepseek-v3", 18432), ("llama-3.1-8b", 14336)])
def test_heads_of_mixtures_of_experts_are_dense(name: str, width: int) -> None:
    """As wide as the experts that one token visits: 8 x 768, and 9 x 2,048; those of dense targets like the target."""
    target = load_model(name)
    for drafter in (Eagle(), Eagle(method="eagle"), BlockDrafter(layers=3)):
        network = drafter.network(target)
        assert network is not None
        (group,) = network.layers
        assert group.attention == target.layers[-1].attention
        assert isinstance(group.feed_forward, DenseFeedForward)
        assert group.feed_forward.intermediate_size == width
    mtp = Eagle(method="mtp").network(target)
    assert mtp.layers[0].feed_forward == target.layers[-1].feed_forward
    given = Eagle(intermediate_size=24576).network(target).layers[0].feed_forward
    assert isinstance(given, DenseFeedForward)
    assert given.intermediate_size == 24576


def test_an_mtp_head_has_no_width_of_its_own() -> None:
    with pytest.raises(ValueError, match="an mtp head is a layer like the target's last"):
        Eagle(method="mtp", intermediate_size=1024)
