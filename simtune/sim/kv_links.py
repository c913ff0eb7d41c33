"""Links over which prefill instances send KV caches, as a plan lays them between its pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simtune.errors import UsageError
from simtune.sim.core import EngineCore, KvConnector
from simtune.sim.link import TransferLink
from simtune.specs.catalog import engine_family
from simtune.specs.plan import FirstToken, KvLink, Plan
from simtune.specs.pool import Pool
from simtune.specs.preset import EngineFamily


def first_token_of(plan: Plan) -> FirstToken:
    """Return where the client's first token comes from in a plan with prefill and decode apart.

    Measured transfers include sampling the token again, so that it comes with the KV cache. Raises UsageError if links
    differ in it.
    """
    prefills, decodes = ([p for p in plan.pools if p.role == role] for role in ("prefill", "decode"))
    sides = {_first_token(plan.way(source.name, target.name), target) for source in prefills for target in decodes}
    if len(sides) > 1:
        raise UsageError(
            f"plan {plan.name}: first tokens come from {' and '.join(sorted(sides))}, by link and decode pool; set "
            "first_token of all links alike"
        )
    return sides.pop()


def _first_token(link: KvLink, pool: Pool) -> FirstToken:
    first_token = link.first_token or ("transfer" if _family(pool) in _SENT_ALONG else "decode")
    return "transfer" if first_token == "decode" and link.costs is not None else first_token


_SENT_ALONG = ("sglang", "trtllm")
"""Engines whose prefill instances send the token that they sampled along with the KV cache: SGLang in its metadata
buffers (srt/disaggregation), TensorRT-LLM as first_gen_tokens of disaggregated_params. vLLM's decode instances sample
it again, behind its own proxy, llm-d's and Dynamo's alike."""


def merges(link: KvLink, pool: Pool) -> bool:
    """True if the engine of a pool sends neighbouring blocks as one piece, as SGLang does with runs of pages
    (group_concurrent_contiguous in srt/disaggregation)."""
    return _family(pool) == "sglang" if link.merged is None else link.merged


BOOTSTRAP_S = 0.1
"""Seconds that two instances of SGLang take to agree on a handover. Measured pools of gpt-oss-120b on H200 needed about
that much more than predicted; pools of DeepSeek-R1 on GB200 with 4 or 8 users, which had no part in it, 0.10 to 0.23 s
where prompts are short or few (benchmarks/serving/pools.py)."""


def bootstrap_s(pool: Pool) -> float:
    """Return the seconds that the engine of a pool takes to agree on a handover with the decode instance."""
    return BOOTSTRAP_S if _family(pool) == "sglang" else 0.0


def _family(pool: Pool) -> EngineFamily | None:
    return engine_family(pool.engine)


@dataclass(slots=True, frozen=True)
class ForkedConnector:
    """Path of KV caches out of a prefill instance, over a link that depends on the target pool."""

    by_pool: Mapping[str, KvConnector]

    @property
    def links(self) -> Sequence[TransferLink]:
        """The links to all pools."""
        return [connector.link for connector in self.by_pool.values()]

    def towards(self, target: EngineCore) -> KvConnector:
        """Return the connector to the pool of a decode core."""
        return self.by_pool[target.pool]


class Links:
    """Factory of the links of a plan: one per sending instance, or data-parallel rank of it, or a single one for all
    that share it."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str, int, int], TransferLink] = {}

    def out_of(self, core: EngineCore, way: KvLink, bytes_per_s: float, *, by_rank: bool = False) -> TransferLink:
        """Return the link over which a core sends: that of its instance or, with `by_rank`, of the core alone. A shared
        link has the rate of the first instance that sends."""
        rank = core.virtual_engine if by_rank else 0
        key = (id(way), "", 0, 0) if way.shared else (id(way), core.pool, core.instance, rank)
        if key not in self._made:
            self._made[key] = TransferLink(bytes_per_s, len(self._made))
        return self._made[key]
