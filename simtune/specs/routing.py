"""Routing: which router a plan names, and its options. Fields besides `kind` are options of the router of that name in
`simtune.sim.router`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from simtune.specs import plugins
from simtune.specs.base import Count, NonNegative, Options, Part, Positive, Seconds
from simtune.specs.part_names import PartName

ROUTER_GROUP = "simtune.routers"


class RoundRobinRouting(Part):
    """Route to one instance after the other; pools may get unequal shares by weight."""

    kind: Literal["round_robin"] = "round_robin"
    weights: dict[str, Positive] = Field({}, description="share of each pool by name, per instance; 1 unless given")


class _StaleRouting(Part):
    stale_s: Seconds = Field(0.0, description="age in seconds of the router's knowledge of the instances")


class LeastOutstandingRouting(_StaleRouting):
    """The instance with the fewest requests under way."""

    kind: Literal["least_outstanding"] = "least_outstanding"


class LeastTokensRouting(_StaleRouting):
    """Route to the instance whose requests under way have the fewest prompt tokens, which its KV cache must hold."""

    kind: Literal["least_tokens"] = "least_tokens"


class ByLengthRouting(_StaleRouting):
    """Prompts go to the pools for their length: of these the instance with the fewest prompt tokens under way."""

    kind: Literal["by_length"] = "by_length"
    longest: dict[str, Count] = Field(
        {}, description="most prompt tokens of a pool's requests, by name; a pool that is left out takes the longest"
    )


class PowerOfTwoRouting(_StaleRouting):
    """Route to the instance with fewer requests under way, of two drawn at random."""

    kind: Literal["power_of_two"] = "power_of_two"


class SessionAffinityRouting(Part):
    """Requests of one session go to one instance, by rendezvous hashing."""

    kind: Literal["session_affinity"] = "session_affinity"


class PrefixAwareRouting(_StaleRouting):
    """The instance with the least work: prompt tokens it would have to compute, plus those it has under way.

    What an instance has cached is what the router sent it, at least the latest `memory_tokens` of it.
    """

    kind: Literal["prefix_aware"] = "prefix_aware"
    load_weight: NonNegative = Field(1.0, description="weight of a token under way over one that is to be computed")
    memory_tokens: Annotated[Count, Field(le=10**12)] = Field(
        1_000_000, description="prompt tokens per instance that the router remembers"
    )


class OwnRouting(Part):
    """A router that is not built in: a class by its import path, or by the name a package registered it under."""

    TAG: ClassVar[str] = plugins.EXAMPLE
    kind: Annotated[str, PartName(ROUTER_GROUP)]
    options: Options = Field({}, description="arguments of its constructor")


def _routing_tag(value: Any) -> str | None:
    """Return the tag of the class below that reads a router."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return OwnRouting.TAG if PartName(ROUTER_GROUP).knows(kind) else kind


Routing = Annotated[
    Annotated[RoundRobinRouting, Tag("round_robin")]
    | Annotated[LeastOutstandingRouting, Tag("least_outstanding")]
    | Annotated[LeastTokensRouting, Tag("least_tokens")]
    | Annotated[ByLengthRouting, Tag("by_length")]
    | Annotated[PowerOfTwoRouting, Tag("power_of_two")]
    | Annotated[SessionAffinityRouting, Tag("session_affinity")]
    | Annotated[PrefixAwareRouting, Tag("prefix_aware")]
    | Annotated[OwnRouting, Tag(OwnRouting.TAG)],
    Discriminator(_routing_tag),
]
