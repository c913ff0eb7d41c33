"""The ways of KV caches out of prefill instances, as a plan lays links between its pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simtune.sim.core import EngineCore, KvConnector
from simtune.sim.link import TransferLink
from simtune.specs.plan import KvLink


@dataclass(slots=True, frozen=True)
class ForkedConnector:
    """A way out of a prefill instance that depends on the pool it leads to."""

    by_pool: Mapping[str, KvConnector]

    @property
    def links(self) -> Sequence[TransferLink]:
        """Those to all pools."""
        return [connector.link for connector in self.by_pool.values()]

    def towards(self, target: EngineCore) -> KvConnector:
        """The way to the pool of a decode core."""
        return self.by_pool[target.pool]


class Links:
    """Makes the links of a plan: one for each instance that a way leads out of, or one for all that share it."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str, int], TransferLink] = {}

    def out_of(self, core: EngineCore, way: KvLink, bytes_per_s: float) -> TransferLink:
        """The link over which an instance sends. One that is shared has the rate of whoever is first."""
        key = (id(way), "", 0) if way.shared else (id(way), core.pool, core.instance)
        if key not in self._made:
            self._made[key] = TransferLink(bytes_per_s, len(self._made))
        return self._made[key]
