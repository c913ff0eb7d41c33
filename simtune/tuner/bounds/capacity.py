"""An upper bound on the load that a plan can sustain: a necessary condition, safe to prune with.

Capacity (its terms are those of Li, Dai and Peng, arXiv 2504.07347, for tokens, and of Nie, Si and Zhou, arXiv
2605.04595, for memory). A request of P prompt and O output tokens keeps its core busy, averaged over the
load and whatever the schedule, for at least

    w = c0 * I + c1 * E[P + n] + c2 * E[g] + E[prefill attention of P] + E[O] * head + E[encoding of its media]

    n = O - 1 decode steps, g = nP + n(n+1)/2 context tokens read over them,
    I = max(E[n] / max_num_seqs, E[P + n] / max_num_batched_tokens, E[g] / KV tokens)   iterations per request

where c0 + c1*m is any line below the step time as a function of the tokens m in the step, and c2 any number below the
decode attention time per context token. More requests per second than cores / w pile up without end.

With a prefix cache P leaves out what may be found in it, but for its attention to what is computed, and g / KV tokens
what others may share.

With drafts of at most K tokens a verification emits no more than K + 1: of its n decode steps a request keeps at least
n / (K + 1), and of the context tokens g at least (g - n K / 2) / (K + 1), as if each round read no more than its first
token does. The tokens it emits are still computed, each of them once or more; what drafting takes comes on top.
Replicas of a target that verify in turn (DSI) count as if each was a core that shares prompts too.

Ranks that come and go make steps on several numbers of ranks, each with tables of its own. The parts of w above are
then the least of all these tables, and the cores those of all ranks: no mix of numbers does better.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simtune.arrays import Array
from simtune.costs.bounds import BoundsOfAll
from simtune.costs.compiled import StepTables
from simtune.sim.pools import DeployedPool
from simtune.tuner.bounds.bounded_requests import BoundLoad
from simtune.workload.requests import RequestStream


class Capacity:
    """Capacity of cores with the given costs under the load of `stream`; requests beyond max_model_len cost nothing.

    With `caches` a prefix cache may have what other requests of the stream begin with as well. `fewer_ranks`
    are the tables of the other numbers of ranks on which steps may run, and `encoding_s` the seconds of each request in
    which its media are encoded in steps.
    """

    def __init__(
        self,
        tables: StepTables,
        stream: RequestStream,
        max_model_len: int,
        *,
        caches: bool = False,
        fewer_ranks: Sequence[StepTables] = (),
        encoding_s: Array | float = 0.0,
    ) -> None:
        load = BoundLoad(stream, max_model_len)
        hits = load.could_hit if caches else np.zeros(len(stream), dtype=np.int64)
        self._decodes = load.mean(load.decodes)
        self._tokens = load.mean(load.prompt - hits + load.decodes)
        self._context = load.mean(load.context)
        self._private = load.mean(load.private) if caches else self._context
        costs = BoundsOfAll([tables, *fewer_ranks])
        self._lines = costs.linear_minorants()
        self._context_s = costs.context_cost_s()
        prefill_s = costs.prefill_cost_s(stream.prompt_tokens, hits)
        self._other_s = load.mean(prefill_s + encoding_s) + load.mean(load.decodes + 1) * costs.head_cost_s()

    def rps(self, pool: DeployedPool) -> float:
        """Return the requests per second that no schedule on the cores of a pool can exceed."""
        batching, pp = pool.spec.batching, pool.spec.parallelism.pp
        kv_tokens = pool.memory.num_blocks // pp * pool.spec.kv_cache.block_size
        shape = None if pool.spec.speculation is None else pool.spec.speculation.scheme.shape
        drafts, replicas = (0, 1) if shape is None else (shape.depth, max(1, shape.replicas))
        decodes = self._decodes / (drafts + 1)
        context, private = (
            max(0.0, tokens - self._decodes * drafts / 2) / (drafts + 1) for tokens in (self._context, self._private)
        )
        iterations = max(
            decodes / (batching.max_num_seqs // pp),
            self._tokens / batching.max_num_batched_tokens,
            private / kv_tokens,
        )
        linear_s = max(c0 * iterations + c1 * self._tokens for c0, c1 in self._lines)
        return replicas * pool.most_cores / (linear_s + self._context_s * context + self._other_s)
