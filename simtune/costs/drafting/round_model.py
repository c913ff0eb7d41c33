"""Time of a round of drafting and verifying, in seconds.

In a round every sequence of the batch drafts some tokens and the target verifies them in one step, together
with the token that follows what is already certain:

    T_gpu = verify(B x q tokens) + drafting

    draft model, head    a first step over the tokens the last round verified, then one step per draft in turn
    Medusa               all heads at once, however deep
    n-gram, suffix       nothing on the GPU; host_s per sequence before the step, which nothing hides
    block drafter        one step over all draft tokens of a sequence

The host prepares a round once; asynchronous engines hide it behind the GPU, T = max(T_gpu, T_host), others add it,
as for any step (`simtune.costs.iteration`). What it does for each pass of the drafter is never hidden: the time that
the engine's release states (`draft_step_s`), or else, without graphs and asynchronous scheduling, that of a step.
Drafters run on the tensor-parallel ranks of the target and on one pipeline stage.

Known biases. To the fast side: building and re-ranking a dynamic tree, rejection sampling beyond one pass over
the logits of every verified token. To the slow side: engines may pack ragged drafts tighter than the padded first
step of a draft that is counted here.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from simtune.costs.drafting.draft_memory import drafting_pool
from simtune.costs.iteration import StepModel
from simtune.costs.predict import Profile
from simtune.specs.drafters import Drafter
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Pool


class RoundModel:
    """Seconds of the rounds of one target, drafter and pool; see the module. `draft` is the model that a draft model
    names.

    Raises Infeasible if the target or the draft model cannot be sharded, or the profile cannot predict a time.
    """

    def __init__(
        self, target: Model, hardware: Hardware, pool: Pool, drafter: Drafter, draft: Model | None = None
    ) -> None:
        self._pool, self._drafter = pool, drafter
        self._target = StepModel(target, hardware, pool)
        self._hidden, self._vocab = target.hidden_size, -(-target.vocab_size // pool.parallelism.tp)
        self._gemm = Profile(hardware).predictor("gemm", target.dtype)
        network = drafter.network(target, draft)
        self._draft: StepModel | None = None
        if network is not None:
            draft_pool = drafting_pool(drafter, pool)
            self._draft = StepModel(network, hardware, draft_pool)
        self._joining = cache(self._joining_s)
        self._heads = cache(self._heads_s)
        self._rows = cache(self._rows_s)
        self._attention = cache(self._attention_s)
        self._shared = cache(self._shared_s)

    def __call__(
        self, batch: int, context: int, verify_tokens: int, draft_depth: int = 0, draft_width: int = 1
    ) -> float:
        """Seconds of a round of `batch` sequences with `context` tokens each.

        `verify_tokens` of each sequence go through the target, the one that is certain included; `draft_depth`
        drafts in turn, of at most `draft_width` tokens a sequence each, were made. Without any it is a decode step.
        """
        gpu = self.verify_s(batch, context, verify_tokens) + self.draft_s(batch, context, draft_depth, draft_width)
        correction = self._target.correction(with_chunks=False)
        host = self._target.host.seconds(batch)
        hides = self._pool.async_scheduling and not (draft_depth and self._pool.awaits(self._drafter))
        passes = self._drafter.passes(draft_depth)
        if not self._target.host.states_drafting and not self._pool.cuda_graphs and not hides:
            host *= 1 + passes
        if correction is not None:
            seconds = correction.scale * gpu + correction.offset_s
        else:
            seconds = max(gpu + (self._target.host.exposed_s(batch, hides=True) if hides else host), host)
            seconds += self._target.host.drafting_s(batch, passes)
        return seconds + (batch * self._drafter.host_cost_s if draft_depth else 0.0)

    def verify_s(self, batch: int, context: int, tokens: int) -> float:
        """GPU seconds of the target's step."""
        return self._step_s(self._target, batch, context + tokens, tokens, tokens)

    def draft_s(self, batch: int, context: int, depth: int, width: int = 1) -> float:
        """GPU seconds of drafting."""
        if depth == 0:
            return 0.0
        if self._draft is None:
            return self._heads(batch)
        if self._drafter.at_once:
            return self._step_s(self._draft, batch, context + depth, depth, depth)
        # Engines pad the tokens that the last round verified to the longest path that may have been accepted.
        seconds = self._step_s(self._draft, batch, context + depth, depth + 1, 1) + self.join_s(batch * (depth + 1))
        if depth > 1:
            further = self._step_s(self._draft, batch, context + depth, width, width) + self.join_s(batch * width)
            seconds += (depth - 1) * further
        return seconds

    def join_s(self, rows: int) -> float:
        """GPU seconds of joining embeddings to the hidden states they were drafted from; 0 if the drafter does not."""
        return self._joining(rows) if self._drafter.joins_hidden_states else 0.0

    def _joining_s(self, rows: int) -> float:
        # EAGLE-3 instead joins three hidden states once and has a wider attention input: about as much.
        return float(self._gemm.seconds(m=rows, n=self._hidden, k=2 * self._hidden))

    def _heads_s(self, rows: int) -> float:
        """GPU seconds of all parallel heads."""
        heads = self._drafter.parallel_heads
        if not heads:
            return 0.0
        hidden_s = self._gemm.seconds(m=rows, n=self._hidden, k=self._hidden)
        return heads * float(hidden_s + self._gemm.seconds(m=rows, n=self._vocab, k=self._hidden))

    def _step_s(self, model: StepModel, batch: int, context: int, tokens: int, samples: int) -> float:
        gpu = self._rows(model, batch * tokens, batch * samples) + self._attention(model, batch, context, tokens)
        if model.sharing is not None and tokens > 1:
            gpu -= self._shared(model, batch * tokens, batch)
        return max(gpu, model.launches.least_s(batch * tokens, False))

    def _rows_s(self, model: StepModel, tokens: int, samples: int) -> float:
        """Seconds of the calls that depend only on the numbers of tokens."""
        parts = [*model.linear(np.array([tokens])).values(), *model.head(np.array([samples])).values()]
        return float(sum(part[0] for part in parts))

    def _shared_s(self, model: StepModel, tokens: int, sequences: int) -> float:
        assert model.sharing is not None
        return float(model.sharing.saved_s(np.array([float(tokens)]), np.array([float(sequences)]))[0])

    def _attention_s(self, model: StepModel, batch: int, context: int, width: int) -> float:
        return float(model.decode(batch, np.array([context]), width)[0])
