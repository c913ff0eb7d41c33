"""The torch engine computes what a model would: the same tokens in whatever batches, chunks and after preemptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.engine import Request
from simtune.errors import UsageError
from simtune.sim.deployment import NO_HARDWARE, Deployment, deploy
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.model import DenseFeedForward, FullAttention, LayerGroup, Model, SlidingAttention
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.testing.clusters import stream_of
from simtune.validation.servers import torch_engine as engine
from simtune.validation.servers.engine_clocks import CLOCKS

torch = pytest.importorskip("torch")

from simtune.validation.servers.cached_decoder import CachedDecoder, greedy  # noqa: E402
from simtune.validation.servers.executed_scheduler import TokenShare  # noqa: E402

PROMPTS, OUTPUTS = (5, 90, 33, 150, 64, 17), (70, 60, 90, 20, 1, 80)


def model(**attention: Any) -> Model:
    kind = SlidingAttention if attention else FullAttention
    group = LayerGroup(
        count=2,
        attention=kind(heads=4, kv_heads=2, head_dim=32, **attention),
        feed_forward=DenseFeedForward(intermediate_size=256),
    )
    return Model(
        name="tiny",
        hidden_size=128,
        vocab_size=512,
        max_position=512,
        layers=(group,),
        dtype="fp32",
        weight_dtype="fp32",
    )


def deployed(its: Model, blocks: int = 60, **pool: Any) -> Deployment:
    settings = {"async_scheduling": False, "kv_cache": KvCache(num_blocks=blocks), "max_model_len": 256, **pool}
    batching = Batching(max_num_seqs=4, max_num_batched_tokens=64)
    pools = (Pool(hardware="unbound", instances=1, batching=batching, **settings),)
    plan = Plan(name="one", model=its.name, pools=pools)
    return deploy(plan, its, NO_HARDWARE, OwnCosts(lambda decodes, context, chunks: 1e-3))


class KeepingDecoder(CachedDecoder):
    """Remembers the texts of requests."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, sample=greedy, **options)
        self.texts: dict[int, list[int]] = {}

    def release(self, request: Request) -> None:
        self.texts[request.id] = list(self.text(request))
        super().release(request)


def texts(blocks: int, **options: Any) -> tuple[dict[int, list[int]], int]:
    its = model()
    decoder = KeepingDecoder(its, seats=4, max_model_len=256, **options)
    stream = stream_of([0.0] * len(PROMPTS), PROMPTS, OUTPUTS)
    measured = engine.serve(deployed(its, blocks), stream, decoder)
    assert measured.result.completed.all()
    return decoder.texts, int(measured.result.outcome.preemptions.sum())


def alone(number: int) -> list[int]:
    """The text of a request that is computed whole, from its first token on, for every token of its answer."""
    text: list[int] = []
    for emitted in range(OUTPUTS[number]):
        decoder = KeepingDecoder(model(), seats=1, max_model_len=256)
        request = Request(number, PROMPTS[number], OUTPUTS[number])
        if text:
            decoder.text(request)[:] = text
        decoder.run([TokenShare(request, 0, PROMPTS[number] + emitted, samples=True)])
        text = list(decoder.text(request))
    return text


def test_batches_chunks_and_preemptions_change_no_token() -> None:
    free, none = texts(60)
    tight, some = texts(17)
    assert (none, some > 0) == (0, True)
    assert free == tight
    assert {number: len(text) for number, text in free.items()} == {
        i: p + o for i, (p, o) in enumerate(zip(PROMPTS, OUTPUTS, strict=True))
    }
    for number in (3, 4):
        assert free[number] == alone(number)


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_grouped", "matmul"])
def test_every_kernel_of_attention_says_the_same(attention: str) -> None:
    assert texts(60, attention=attention) == texts(60)


def test_decodes_may_go_together() -> None:
    assert texts(60, together=True) == texts(60)


def test_times_are_of_both_clocks() -> None:
    its = model()
    stream = stream_of([0.0, 0.001, 0.002], [40, 50, 60], [5, 6, 7])
    for clock in ("cpu", "wall"):
        measured = engine.serve(deployed(its), stream, engine.executor(deployed(its)), clock=CLOCKS[clock]())
        assert (measured.result.ttft_s > 0).all()
        spent = sum(step.cpu_s for step in measured.steps)
        assert 0 < sum(step.execute_cpu_s for step in measured.steps) <= spent
        assert np.isfinite(measured.result.e2el_s).all()


@pytest.mark.parametrize(
    ("pool", "named"),
    [
        ({"async_scheduling": True}, "async_scheduling"),
        ({"instances": 2}, "several pools"),
        ({"kv_cache": KvCache(num_blocks=60, prefix_caching=True)}, "prefix_caching"),
        ({"kv_cache": KvCache(num_blocks=60, preemption="swap")}, "swap"),
    ],
)
def test_plans_it_cannot_run_are_refused(pool: dict[str, Any], named: str) -> None:
    its = model()
    plan = deployed(its).plan
    pools = (plan.pools[0].model_copy(update=pool),)
    wrong = deploy(plan.model_copy(update={"pools": pools}), its, NO_HARDWARE, OwnCosts(lambda b, c, chunks: 1e-3))
    with pytest.raises(UsageError, match=named):
        engine.check(wrong)


def test_models_it_cannot_run_are_refused() -> None:
    with pytest.raises(UsageError, match="full attention"):
        engine.executor(deployed(model(window=64)))
    with pytest.raises(UsageError, match="dtype of activations"):
        engine.executor(deployed(model().model_copy(update={"weight_dtype": "fp8"})))


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried to allocate 520 MiB", "no kernel image is available"])
def test_a_plan_that_does_not_fit_is_refused_and_other_errors_stay_themselves(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: CachedDecoder, *given: Any, **options: Any) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(CachedDecoder, "__init__", fails)
    fits = "out of memory" not in words
    with pytest.raises(
        RuntimeError if fits else UsageError, match=words if fits else "do not fit into cpu; lower max_num"
    ):
        engine.executor(deployed(model()))
