"""What speculation costs: a round of drafting and verifying, and the memory a drafter takes.

In a round every sequence of the batch drafts some tokens and the target verifies them in one step, together
with the token that follows what is already certain:

    T_gpu = verify(B x q tokens) + drafting

    draft model, head    a first step over the tokens the last round verified, then one step per level
    Medusa               all heads at once, however many levels
    n-gram, suffix       nothing on the GPU; host_s per sequence before the step, which nothing hides
    block drafter        one step over all draft tokens of a sequence

The host prepares a round once; asynchronous engines hide it behind the GPU, T = max(T_gpu, T_host), others add it,
as for any step (`simtune.costs.iteration`). Every draft step is a CUDA graph of its own, whose launch is not counted;
where there are neither graphs nor asynchronous scheduling, the host prepares every pass of the drafter like a step.
Drafters run on the tensor-parallel ranks of the target and on one pipeline stage.

Known leanings. To the fast side: building and re-ranking a dynamic tree, rejection sampling beyond one pass over
the logits of every verified token. To the slow side: engines may pack ragged drafts tighter than the padded first
step of a draft that is counted here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from simtune.costs.iteration import StepModel
from simtune.costs.memory import kv_bytes_per_token, weights_bytes
from simtune.costs.predict import Profile
from simtune.errors import Infeasible
from simtune.specs.base import DTYPE_BYTES
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Parallelism, Pool
from simtune.specs.speculation import BlockDrafter, Drafter, DraftModel, Eagle, Medusa, awaited


def drafting_model(drafter: Drafter, target: Model, draft: Model | None = None) -> Model | None:
    """The network that drafts, as a model; None where nothing or only extra heads run on the GPU.

    A head is the last layer of the target once more; a block drafter several of them. `draft` is the model that a
    `draft_model` names. Raises Infeasible where its vocabulary is not the target's.
    """
    if isinstance(drafter, DraftModel):
        assert draft is not None, "a draft_model needs its model"
        if draft.vocab_size != target.vocab_size:
            raise Infeasible(
                f"draft model {draft.name}: its vocabulary of {draft.vocab_size} is not the {target.vocab_size} of "
                f"{target.name}; its tokens would mean something else to the target"
            )
        return draft
    if isinstance(drafter, Eagle):
        layers, vocab = 1, drafter.draft_vocab_size or target.vocab_size
    elif isinstance(drafter, BlockDrafter):
        layers, vocab = drafter.layers, target.vocab_size
    else:
        return None
    group = target.layers[-1].model_copy(update={"count": layers})
    return target.model_copy(
        update={"name": f"{target.name}-{drafter.kind}", "layers": (group,), "vocab_size": vocab, "hf": None}
    )


class DraftMemory(NamedTuple):
    """On each rank of the target."""

    weights_bytes: float
    kv_bytes_per_token: float


def draft_memory(drafter: Drafter, target: Model, pool: Pool, draft: Model | None = None) -> DraftMemory:
    """What a drafter takes of the target's memory, embedding and head shared with the target where they are its."""
    parallelism = drafting_parallelism(drafter, pool)
    network = drafting_model(drafter, target, draft)
    plain, matrix = DTYPE_BYTES[target.dtype], DTYPE_BYTES[target.weight_dtype]
    hidden, tp = target.hidden_size, parallelism.tp
    if network is None:
        heads = drafter.heads if isinstance(drafter, Medusa) else 0
        return DraftMemory(heads * plain * hidden * (hidden + -(-target.vocab_size // tp)), 0.0)
    weights = weights_bytes(network, parallelism, 0)
    if not isinstance(drafter, DraftModel):
        shared = network.model_copy(update={"tie_embeddings": True})
        weights = weights_bytes(shared, parallelism, 0) - plain * hidden * -(-network.vocab_size // tp)
        if isinstance(drafter, Eagle):
            weights += matrix * 2 * hidden * hidden
            if drafter.draft_vocab_size is not None:
                weights += plain * hidden * -(-drafter.draft_vocab_size // tp)
    kv_dtype = pool.kv_cache.dtype or network.dtype
    return DraftMemory(weights, kv_bytes_per_token(network, parallelism, 0, kv_dtype))


def drafting_parallelism(drafter: Drafter, pool: Pool) -> Parallelism:
    """Of the drafter, on one pipeline stage."""
    own = drafter.tp if isinstance(drafter, DraftModel) else None
    return Parallelism(tp=own or pool.parallelism.tp, expert_parallel=False)


class RoundCosts:
    """Seconds of the rounds of one target, drafter and pool; see the module. `draft` as in `drafting_model`.

    Raises Infeasible where the target or the draft model cannot be sharded, or the profile cannot tell a time.
    """

    def __init__(
        self, target: Model, hardware: Hardware, pool: Pool, drafter: Drafter, draft: Model | None = None
    ) -> None:
        self._pool, self._drafter = pool, drafter
        self._target = StepModel(target, hardware, pool)
        network = drafting_model(drafter, target, draft)
        self._draft: StepModel | None = None
        self._join: Callable[[float], float] = lambda rows: 0.0
        self._heads: Callable[[float], float] = lambda rows: 0.0
        profile = Profile(hardware)
        gemm, hidden = profile.predictor("gemm", target.dtype), target.hidden_size
        if network is not None:
            draft_pool = pool.model_copy(update={"parallelism": drafting_parallelism(drafter, pool)})
            self._draft = StepModel(network, hardware, draft_pool)
        if isinstance(drafter, Eagle):
            # Joins the embedding of a token to the hidden state it was drafted from. EAGLE-3 instead joins three
            # hidden states once and has a wider attention input: about as much.
            self._join = cache(lambda rows: float(gemm.seconds(m=rows, n=hidden, k=2 * hidden)))
        if isinstance(drafter, Medusa):
            heads, vocab = drafter.heads, -(-target.vocab_size // pool.parallelism.tp)
            self._heads = cache(
                lambda rows: (
                    heads * float(gemm.seconds(m=rows, n=hidden, k=hidden) + gemm.seconds(m=rows, n=vocab, k=hidden))
                )
            )
        self._rows = cache(self._rows_s)
        self._attention = cache(self._attention_s)

    @property
    def estimated(self) -> set[str]:
        """Operators that no fit covers, by their keys in a profile."""
        return self._target.estimated | (self._draft.estimated if self._draft else set())

    def __call__(
        self, batch: int, context: int, verify_tokens: int, draft_depth: int = 0, draft_width: int = 1
    ) -> float:
        """Seconds of a round of `batch` sequences with `context` tokens each.

        `verify_tokens` of each sequence go through the target, the one that is certain included; `draft_depth`
        levels of at most `draft_width` tokens a sequence were drafted. Without drafting it is a decode step.
        """
        gpu = self.verify_s(batch, context, verify_tokens) + self.draft_s(batch, context, draft_depth, draft_width)
        correction = self._target.correction(with_chunks=False)
        host = self._target.host_s(batch)
        hides = self._pool.async_scheduling and not (draft_depth and awaited(self._drafter))
        if not self._pool.cuda_graphs and not hides:
            host *= 1 + self.passes(draft_depth)
        if correction is not None:
            seconds = correction.scale * gpu + correction.offset_s
        else:
            seconds = max(gpu, host) if hides else gpu + host
        return seconds + (batch * getattr(self._drafter, "host_s", 0.0) if draft_depth else 0.0)

    def passes(self, depth: int) -> int:
        """Forward passes in turn that draft so many levels."""
        if depth == 0 or (self._draft is None and not isinstance(self._drafter, Medusa)):
            return 0
        return depth if isinstance(self._drafter, DraftModel | Eagle) else 1

    def verify_s(self, batch: int, context: int, tokens: int) -> float:
        """GPU seconds of the target's step."""
        return self._step_s(self._target, batch, context + tokens, tokens, tokens)

    def draft_s(self, batch: int, context: int, depth: int, width: int = 1) -> float:
        """GPU seconds of drafting."""
        if depth == 0:
            return 0.0
        if self._draft is None:
            return self._heads(batch)
        if isinstance(self._drafter, BlockDrafter):
            return self._step_s(self._draft, batch, context + depth, depth, depth)
        # Engines pad what the last round verified to the longest path that it may have kept.
        seconds = self._step_s(self._draft, batch, context + depth, depth + 1, 1) + self._join(batch * (depth + 1))
        if depth > 1:
            further = self._step_s(self._draft, batch, context + depth, width, width) + self._join(batch * width)
            seconds += (depth - 1) * further
        return seconds

    def _step_s(self, model: StepModel, batch: int, context: int, tokens: int, samples: int) -> float:
        gpu = self._rows(model, batch * tokens, batch * samples) + self._attention(model, batch, context, tokens)
        return max(gpu, model.launch_s)

    def _rows_s(self, model: StepModel, tokens: int, samples: int) -> float:
        """What depends on the numbers of tokens only."""
        parts = [*model.linear(np.array([tokens])).values(), *model.head(np.array([samples])).values()]
        return float(sum(part[0] for part in parts))

    def _attention_s(self, model: StepModel, batch: int, context: int, width: int) -> float:
        return float(model.decode(batch, np.array([context]), width)[0])
