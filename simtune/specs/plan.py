"""Plan: a deployment with every knob set. `optimize` writes it, `simulate` and `validate` read it."""

from __future__ import annotations

from itertools import product
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simtune.errors import suggest
from simtune.specs.autoscaling import check_plan_scales
from simtune.specs.base import ErrorAt, NonNegative, Part, Positive, Seq, Spec
from simtune.specs.plan_events import Event, Failure, Switch, check_events
from simtune.specs.pool import Pool
from simtune.specs.role_control import RoleControl, check_control
from simtune.specs.routing import ByLengthRouting, RoundRobinRouting, Routing
from simtune.specs.shares import check_shares
from simtune.specs.stages import Stage, check_stages

MOST_GPUS = 1_000_000
"""Most GPUs of a deployment."""


FirstToken = Literal["prefill", "transfer", "decode"]
"""Stage that delivers the client's first token if prefill and decode are apart."""


class KvLink(Part):
    """The way of a KV cache from a prefill to a decode instance.

    Rates are those of the prefill hardware's link `path`, over all GPUs of the instance, unless given or measured.
    """

    path: str = "inter_node"
    bytes_per_s: Positive | None = Field(None, description="rate of one prefill instance, all its GPUs together")
    setup_s: NonNegative | None = Field(
        None,
        description="seconds before the first byte of a transfer; unless given the profile's, and with SGLang another "
        "0.1, in which the instances agree on it",
    )
    descriptor_s: NonNegative | None = Field(
        None, description="seconds for each piece of memory; there are blocks x layers x 2 of them"
    )
    packed: bool = Field(False, description="one piece per block instead")
    layerwise: bool = Field(False, description="each layer is sent while the next is computed")
    costs: str | None = Field(
        None, description="measured transfers in place of the link's rates: a log of `simtune profile --transfers`"
    )
    first_token: FirstToken | None = Field(
        None,
        description="source of the client's first token: the prefill instance, as its prompt is done; the decode "
        "instance as the KV cache has arrived (transfer: the token is sent along); or its first step, which "
        "samples the token again (decode). Unless given, that of the router that is emitted: transfer with "
        "SGLang and TensorRT-LLM, otherwise decode",
    )
    merged: bool | None = Field(
        None,
        description="neighbouring blocks are sent as one piece, so that pieces are counted per request, not per block; "
        "true with SGLang unless given",
    )
    shared: bool = Field(False, description="true: all prefill instances share one link; false: each has its own")

    @model_validator(mode="after")
    def _measured_or_rated(self) -> Self:
        if self.costs is not None:
            if self.path != KvLink.model_fields["path"].default:
                raise ErrorAt(
                    "cannot be combined with costs, whose measured transfers replace the link's rates; remove one "
                    "of the two",
                    "path",
                )
            if self.packed and self.descriptor_s is None:
                raise ErrorAt(
                    "a measured transfer has its pieces in it; give descriptor_s, or leave this out", "packed"
                )
        return self


class LocalPrefill(Part):
    """Prompts that decode instances compute themselves, though there are prefill instances: conditional disaggregation.

    The decode router chooses the decode instance. Prompt tokens in its prefix cache need not be computed.
    """

    below_tokens: Annotated[int, Field(ge=0, le=2**40)] = Field(
        description="prompts with fewer tokens to compute than this are computed by the decode instance; 0: none"
    )
    below_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="of these, only prompts of which a smaller share than this is to be computed; all of them unless "
        "given",
    )
    queue_above: Annotated[int, Field(ge=0, le=2**40)] | None = Field(
        None,
        description="also prompts of any length while more requests than this wait at every prefill instance",
    )

    @property
    def keeps_any(self) -> bool:
        """True if a decode instance may compute a prompt."""
        return self.below_tokens > 0 or self.queue_above is not None


IN_PLACE = KvLink(bytes_per_s=1e18, setup_s=0.0, descriptor_s=0.0, first_token="prefill")
"""Link between pools whose instances are one process on the same GPUs: a KV cache stays where it is."""


class PairLink(KvLink):
    """The way from one prefill pool to one decode pool, in place of the one between all."""

    source: str = Field(alias="from", description="name of the prefill pool")
    to: str = Field(description="name of the decode pool")


class Plan(Spec):
    """A deployment with every knob set."""

    KIND: ClassVar[str] = "plan"
    model: str
    pools: Annotated[Seq[Pool], Field(min_length=1, strict=False)]
    router: Routing = RoundRobinRouting()
    decode_router: Routing | None = Field(
        None, description="router that chooses the decode instance; least_tokens unless given"
    )
    link: KvLink | None = Field(None, description="link between prefill and decode instances")
    links: Annotated[Seq[PairLink], Field(strict=False)] | None = Field(
        None, description="links between single pairs of pools; other pairs have the link above"
    )
    local_prefill: LocalPrefill | None = Field(
        None,
        description="prompts that decode instances compute themselves; prefill instances compute all unless given",
    )
    events: Annotated[Seq[Event], Field(strict=False)] = ()
    stages: Annotated[Seq[Stage], Field(strict=False)] | None = Field(
        None, description="services that requests go through before a pool, or beside it"
    )
    control: RoleControl | None = Field(
        None,
        description="lets instances of the prefill and the decode pool take the other role; none does unless given",
    )

    @property
    def num_devices(self) -> int:
        """GPUs of all pools and stages, of autoscaled pools those of the most instances."""
        of_stages = sum(stage.instances * stage.devices for stage in self.stages or ())
        return of_stages + sum(
            p.most_instances * p.devices for p in self.pools if p.share is None or p.share.beside is None
        )

    @property
    def autoscales(self) -> bool:
        """True if instances of a pool come and go with its load."""
        return any(pool.autoscaling is not None for pool in self.pools)

    @property
    def prefills_locally(self) -> bool:
        """True if decode instances may compute prompts themselves."""
        return self.local_prefill is not None and self.local_prefill.keeps_any

    def pool(self, name: str) -> Pool:
        """The pool of a name that is there."""
        return next(pool for pool in self.pools if pool.name == name)

    @model_validator(mode="after")
    def _distinct_pool_names(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError(f"pools must have different names: {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _stages_lead_somewhere(self) -> Self:
        check_stages(self.stages or (), [(pool.name, pool.role) for pool in self.pools])
        return self

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        for i, pool in enumerate(self.pools):
            if pool.share is not None and pool.share.beside is not None:
                self._named(pool.share.beside, "it is to be beside", "pools", i, "share", "beside")
        check_shares(self.pools)
        return self

    @model_validator(mode="after")
    def _front_ends_alike(self) -> Self:
        """Raise ErrorAt if only some pools have a front end: requests take the front end that is free first, before
        they are routed.
        """
        has_front_end = [pool.front_end is not None for pool in self.pools if pool.role != "decode"]
        if any(has_front_end) and not all(has_front_end):
            without = next(p.name for p in self.pools if p.role != "decode" and p.front_end is None)
            raise ErrorAt(
                f"pool {without} has no front_end, and requests pass one before they are routed; give one to all pools "
                "that take new requests, of 0 seconds where there is none",
                "pools",
            )
        return self

    @model_validator(mode="after")
    def _equal_instances_controlled(self) -> Self:
        if self.control is not None and self.local_prefill is not None:
            raise ErrorAt("cannot be combined with control, whose instances change roles; remove one", "local_prefill")
        if self.control is not None:
            check_control(self.control, self.pools, bool(self.events))
        return self

    @model_validator(mode="after")
    def _scales_alone(self) -> Self:
        check_plan_scales(self.pools, [key for key in ("events", "control", "local_prefill") if getattr(self, key)])
        return self

    @model_validator(mode="after")
    def _spares_replace_failed_instances(self) -> Self:
        for i, pool in enumerate(self.pools):
            if pool.spare and self.control is not None:
                raise ErrorAt("cannot be combined with control of the plan; remove one", "pools", i, "spare")
            for j, event in enumerate(self.events):
                if (
                    pool.spare
                    and not isinstance(event, Failure)
                    and pool.name in (event.pool, getattr(event, "to", ""))
                ):
                    raise ErrorAt(
                        f"cannot be combined with spare of pool {pool.name}, which replaces what fails; remove one",
                        "events",
                        j,
                    )
        return self

    @model_validator(mode="after")
    def _of_some_size(self) -> Self:
        if self.num_devices > MOST_GPUS:
            largest = max(range(len(self.pools)), key=lambda i: self.pools[i].most_instances * self.pools[i].devices)
            raise ErrorAt(f"{self.num_devices:,} GPUs in all, at most {MOST_GPUS:,}", "pools", largest, "instances")
        return self

    @model_validator(mode="after")
    def _roles_complete(self) -> Self:
        roles = {pool.role for pool in self.pools}
        if "mixed" in roles and len(roles) > 1:
            raise ValueError("pools are either all mixed, or prefill and decode; found both kinds")
        if roles in ({"prefill"}, {"decode"}):
            (role,) = roles
            other_role = "decode" if role == "prefill" else "prefill"
            raise ValueError(f"a {role} pool needs a {other_role} pool beside it; add one, or make the role mixed")
        if roles == {"prefill", "decode"} and self.link is None and self.links is None:
            raise ValueError(
                "prefill and decode pools need a link between them; write `link: {}` for the hardware's inter_node link"
            )
        return self

    @model_validator(mode="after")
    def _pools_apart_to_join(self) -> Self:
        for key in ("link", "links", "decode_router", "local_prefill"):
            if all(pool.role == "mixed" for pool in self.pools) and getattr(self, key) is not None:
                raise ErrorAt(
                    "has no effect if all pools are mixed; remove it, or give pools the roles prefill and decode",
                    key,
                )
        return self

    @model_validator(mode="after")
    def _links_between_pools(self) -> Self:
        pairs: set[tuple[str, str]] = set()
        for i, link in enumerate(self.links or ()):
            for key, name, role in (("from", link.source, "prefill"), ("to", link.to, "decode")):
                self._named(name, "the link names", "links", i, key)
                if self.pool(name).role != role:
                    raise ErrorAt(f"pool {name} is a {self.pool(name).role} pool; give a {role} pool", "links", i, key)
            if (link.source, link.to) in pairs:
                raise ErrorAt(f"there are two links from {link.source} to {link.to}; leave one out", "links", i)
            pairs.add((link.source, link.to))
        return self

    @model_validator(mode="after")
    def _every_pair_linked_once(self) -> Self:
        pairs = {(link.source, link.to) for link in self.links or ()}
        names_by_role = ([p.name for p in self.pools if p.role == role] for role in ("prefill", "decode"))
        without = [pair for pair in product(*names_by_role) if pair not in pairs]
        if self.links is not None and self.link is None and without:
            source, to = without[0]
            raise ErrorAt(f"no link leads from {source} to {to}; add a link, or one for all (`link`)", "links")
        if self.link is not None and pairs and not without:
            raise ErrorAt(
                "every pair of pools has a link of its own in `links`, so `link` is not used; remove it", "link"
            )
        return self

    def way(self, source: str, to: str) -> KvLink:
        """The link from a prefill to a decode pool."""
        kv_link = next((link for link in self.links or () if (link.source, link.to) == (source, to)), self.link)
        assert kv_link is not None
        return kv_link

    @model_validator(mode="after")
    def _pools_of_routers(self) -> Self:
        for key, router in (("router", self.router), ("decode_router", self.decode_router)):
            if isinstance(router, RoundRobinRouting):
                for name in router.weights:
                    self._chosen(name, "the router gives a weight to", key, "weights", name)
            elif isinstance(router, ByLengthRouting):
                for name in router.longest:
                    self._chosen(name, "the router gives prompts up to a length to", key, "longest", name)
        return self

    def _chosen(self, name: str, who: str, key: str, *at: str) -> None:
        """Raise ErrorAt if a router (`key`) names a pool that is not there, or not among those it chooses from."""
        self._named(name, who, key, *at)
        role = self.pool(name).role
        if (role == "decode") != (key == "decode_router") and role != "mixed":
            requests = "new requests" if key == "router" else "those whose prompt is done"
            right_key = "decode_router" if key == "router" else "router"
            raise ErrorAt(
                f"{who} pool {name}, and {key} sends {requests}: name it in {right_key}, or leave it out", key, *at
            )

    @model_validator(mode="after")
    def _events_possible(self) -> Self:
        for i, event in enumerate(self.events):
            self._named(event.pool, f"the {event.kind} names", "events", i, "pool")
            if isinstance(event, Switch):
                self._named(event.to, "the switch names", "events", i, "to")
        check_events(self.events, {pool.name: pool for pool in self.pools})
        return self

    def _named(self, name: str, who: str, *at: str | int) -> None:
        names = [pool.name for pool in self.pools]
        if name not in names:
            message = f"{who} pool {name!r}, which is not there{suggest(name, names)}; pools: {', '.join(names)}"
            raise ErrorAt(message, *at)
