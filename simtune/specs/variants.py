"""Variants of a study's plans: fragments of a pool or of a plan that are merged over every plan of its search.

`search.variants` lists fragments, each a mapping with keys of a pool, of `router`, `decode_router`, `link`,
`local_prefill`, `encoders_apart`, `speculation`, `engine` and `model`, or under `prefill` and `decode` keys of the
pools of that role. The empty fragment stands for the plans as they are without variants. A fragment that sets what a
search has choices for (`DIMENSIONS`) replaces these choices. The `model` of a fragment is another checkpoint of the
study's model, and `score` how well it answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from simtune.errors import suggest
from simtune.specs.base import Count, ErrorAt, Part, Positive, problems_of
from simtune.specs.encoder import EncoderTpMode
from simtune.specs.plan import IN_PLACE, KvLink, LocalPrefill
from simtune.specs.pool import Pool
from simtune.specs.preset import merged
from simtune.specs.routing import Routing
from simtune.specs.shares import ShareOfDevice
from simtune.specs.speculation import DrafterChoice
from simtune.specs.stages import Stage
from simtune.specs.yamlfile import Document

Fragment = dict[str, Any]
Place = tuple[str | int, ...]
Cut = Mapping[str, Any]
"""Parallelism of a pool of the study, by its keys."""

MOST_VARIANTS = 256
"""Most combinations of fragments, each of which multiplies the plans of a search."""
DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "tp": ("parallelism", "tp"),
    "pp": ("parallelism", "pp"),
    "attention_dp": ("parallelism", "attention_dp"),
    "expert_parallel": ("parallelism", "expert_parallel"),
    "weight_dtype": ("weight_dtype",),
    "kv_dtype": ("kv_cache", "dtype"),
    "prefix_caching": ("kv_cache", "prefix_caching"),
    "max_num_seqs": ("batching", "max_num_seqs"),
    "max_num_batched_tokens": ("batching", "max_num_batched_tokens"),
    "instances": ("instances",),
}
"""Choices of a search that a fragment may replace, each with its key in a pool."""
UNSEARCHED: Mapping[str, str] = {
    "role": "search.layouts sets it; write layouts: [prefill-decode], and keys of one role under prefill or decode",
    "hardware": "name every hardware profile under `hardware` of the study",
    "costs": "measured steps are those of a single plan; simulate that plan, or keep its pool in `fixed`",
    "pools": "a search makes the pools; write keys of a pool here",
    "links": "plans of a search have one pool of each role; write link",
    "events": "no bound covers plans with events; add them to the chosen plan and simulate it",
    "stages": "encoder servers are searched as encoders_apart: {devices: 1, instances: 2}; add other stages to the "
    "chosen plan and simulate it",
    "control": "no bound covers instances that change roles; add it to the chosen plan and simulate it",
}
"""Keys of a plan or pool that no fragment may have, each with the reason and the remedy."""
ROLES = ("prefill", "decode")
_OF_PAIRS = (*ROLES, "link", "decode_router", "local_prefill", "share")
"""Keys that change nothing in a plan of mixed pools."""
_EXCLUSIVE = (
    ("autoscaling", "local_prefill"),
    ("autoscaling", "spare"),
    ("autoscaling", "share"),
    ("share", "spare"),
    ("encoders_apart", "encoder"),
    ("encoders_apart", "autoscaling"),
    ("encoders_apart", "share"),
)
"""Keys that no plan has both of."""
_JOINED = "-and-"
_UNNAMED = ("acceptance", "checkpoint", "draft_vocab_size", "score")
_NAMED_BY_VALUE = ("engine", "drafter", "method", "scheme")


class EncodersApart(Part):
    """Servers that encode the media of requests in front of the pool that computes prompts: a stage of the plan."""

    devices: Count = Field(1, description="GPUs of each, of the pool's kind")
    instances: Count = Field(1, description="servers; each encodes the media of one request at a time")
    tp_mode: EncoderTpMode = Field(
        "weights", description="how the GPUs of a server share it: its weights, or the images and videos of a request"
    )
    bytes_per_s: Positive | None = Field(
        None, description="rate at which embeddings go to the pool; that of the link between nodes unless given"
    )

    @property
    def num_gpus(self) -> int:
        """GPUs of all servers."""
        return self.devices * self.instances

    def stage(self, pool: str) -> Stage:
        """Return the stage of a plan, in front of a pool."""
        return Stage(
            name="encode", pool=pool, encoder=self.tp_mode, devices=self.devices, instances=self.instances,
            bytes_per_s=self.bytes_per_s,
        )  # fmt: skip


class PlanFragment(Part):
    """Keys of a plan that a fragment may set."""

    router: Routing | None = None
    decode_router: Routing | None = None
    link: KvLink | None = None
    local_prefill: LocalPrefill | None = None
    encoders_apart: EncodersApart | None = None


class PoolShare(Part):
    """Share that instances of one role have of GPUs on which those of the other role are too."""

    processors: ShareOfDevice
    bandwidth: ShareOfDevice = Field(description="share of the memory bandwidth")
    kv_cache: ShareOfDevice | None = Field(
        None, description="share of the KV cache that both have; that of processors unless given"
    )


class SharedDevices(Part):
    """Prefill and decode instances on the same GPUs, two and two, each pair one process that holds the weights once.

    A number is a share of processors, memory bandwidth and KV cache alike.
    """

    prefill: ShareOfDevice | PoolShare
    decode: ShareOfDevice | PoolShare

    @model_validator(mode="after")
    def _no_more_than_all(self) -> Self:
        for key in PoolShare.model_fields:
            total = sum(getattr(share, key) for share in self.by_role.values())
            if total > 1 + _ROUNDING:
                raise ErrorAt(f"shares of {key} come to {total:g}, more than all; lower one")
        return self

    @property
    def by_role(self) -> dict[str, PoolShare]:
        """Shares of the pools of each role."""
        return {role: _pool_share(getattr(self, role)) for role in ROLES}

    @property
    def settings(self) -> dict[str, Fragment]:
        """Settings of the pools of each role; decode instances are beside those of the prefill pool."""
        shares = {role: share.model_dump() for role, share in self.by_role.items()}
        shares["decode"]["beside"] = "prefill"
        return {role: {"share": share} for role, share in shares.items()}


def _pool_share(share: float | PoolShare) -> PoolShare:
    """Return all three shares."""
    stated = share if isinstance(share, PoolShare) else PoolShare(processors=share, bandwidth=share)
    return stated if stated.kv_cache is not None else stated.model_copy(update={"kv_cache": stated.processors})


class _ShareFragment(Part):
    share: SharedDevices


class _DraftFragment(Part):
    speculation: DrafterChoice


class _Checkpoint(Part):
    model: str
    score: float | None = None


_ROUNDING = 1e-9
_NO_POOL_KEYS = (*UNSEARCHED, "name", "engine", "speculation", "share")
_POOL_KEYS = tuple(key for key in Pool.model_fields if key not in _NO_POOL_KEYS)
_KEYS = ("name", "engine", "model", "score", "speculation", "share", *PlanFragment.model_fields, *ROLES, *_POOL_KEYS)


@dataclass(frozen=True)
class Variant:
    """Changes to every plan of a search."""

    label: str = ""
    """Name of the variant in the names of plans; empty for the plans as they are."""
    engine: str = ""
    """Engine preset in place of the study's, or `none`; empty for the study's."""
    pool: Fragment = field(default_factory=dict)
    """Settings of every pool."""
    by_role: Mapping[str, Fragment] = field(default_factory=dict)
    """Settings of the pools of a role, over those of every pool."""
    plan: PlanFragment = field(default_factory=PlanFragment)
    drafter: DrafterChoice | None = None
    checkpoint: str = ""
    """Model in place of the study's; empty for the study's."""
    score: float | None = None
    """Score of the checkpoint; None for that of the study's model, or if the checkpoint has none."""
    changes_mixed: bool = True
    """False if the variant has a part that changes nothing in a plan of mixed pools."""

    def of_role(self, role: str) -> Fragment:
        """Return the settings of the pools of a role."""
        return merged(self.by_role.get(role, {}), self.pool)

    @property
    def shares(self) -> bool:
        """True if prefill and decode instances of its plans are on the same GPUs."""
        return "share" in self.by_role.get("decode", {})

    @property
    def scales(self) -> bool:
        """True if pools of its plans are autoscaled."""
        return scales({**self.pool, **self.by_role})

    def encoder_devices(self, role: str) -> int:
        """Return the GPUs of encoder servers in front of the pools of a role."""
        apart = self.plan.encoders_apart
        return 0 if apart is None or role == "decode" else apart.num_gpus

    def scored(self, of_study: float | None) -> float | None:
        """Return the score of its model, given that of the study's; None if it has none."""
        return self.score if self.checkpoint else of_study


def scales(fragment: Fragment) -> bool:
    """True if a fragment autoscales pools: of every role, or of one."""
    parts = (fragment, *(fragment.get(role) for role in ROLES))
    return any(isinstance(part, Mapping) and part.get("autoscaling") is not None for part in parts)


def at_path(fragment: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the value at the keys of a path; None if there is none."""
    value: Any = fragment
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


# --- names ------------------------------------------------------------------------------------------------


def label_of(fragment: Fragment) -> str:
    """Return the name of a fragment: the one that it states, or else its settings in words."""
    if "name" in fragment:
        return str(fragment["name"])
    words = [_leaf_words(path, value) for path, value in _leaves(fragment) if path[-1] not in _UNNAMED]
    return word("-".join(words))


def word(text: str) -> str:
    """Return a text as it may be written in the name of a plan."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")


def _leaf_words(path: tuple[str, ...], value: Any) -> str:
    role = f"{path[0]}-" if path[0] in ROLES and len(path) > 1 else ""
    key = path[-2] if path[-1] == "kind" and len(path) > 1 else path[-1]
    if value is True:
        return f"{role}{key}"
    if value is False or value is None:
        return f"{role}no-{key}"
    text = "-".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    if key == "model":
        return _file_label(text)
    return f"{role}{text}" if key in _NAMED_BY_VALUE else f"{role}{key}-{text}"


def _leaves(settings: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in settings.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


# --- variants of a study ----------------------------------------------------------------------------------


def variants_of(
    fragments: Sequence[Fragment] | None, *, combine: bool = False, engines: Sequence[str] = ()
) -> list[Variant]:
    """Return the variants that fragments span, under each of several engines.

    With `combine` these are all combinations of fragments that do not set the same key, the empty combination only if
    an empty fragment is listed. A fragment with an engine of its own is under that engine alone.
    """
    variants = []
    for parts in combined(fragments, combine):
        if not engines or any("engine" in part for part in parts):
            variants.append(_joined(parts))
        else:
            variants += [_joined([{"engine": engine, "name": _file_label(engine)}, *parts]) for engine in engines]
    return variants


def combined(fragments: Sequence[Fragment] | None, combine: bool) -> list[tuple[Fragment, ...]]:
    """Return each fragment alone, or all combinations of fragments that do not set the same key; without fragments the
    plans as they are.
    """
    if not fragments:
        return [()]
    if not combine:
        return [(fragment,) if fragment else () for fragment in fragments]
    parts = [fragment for fragment in fragments if fragment]
    return [tuple(parts[i] for i in chosen) for chosen in _compatible(parts) if chosen or {} in fragments]


def _compatible(parts: Sequence[Fragment]) -> list[tuple[int, ...]]:
    """Return all sets of fragments that do not set the same key, by their numbers, or a few more than MOST_VARIANTS."""
    conflicts = {(i, j) for i, j in combinations(range(len(parts)), 2) if _conflict(parts[i], parts[j])}
    sets: list[tuple[int, ...]] = [()]
    # Sets grow while the list is gone through, so that conflicting fragments are never combined further.
    for chosen in sets:
        if len(sets) > MOST_VARIANTS + 1:
            break
        first = chosen[-1] + 1 if chosen else 0
        sets += [(*chosen, j) for j in range(first, len(parts)) if not any((i, j) in conflicts for i in chosen)]
    return sets


def _conflict(first: Fragment, second: Fragment) -> bool:
    """True if two fragments set the same key, or one a block of which the other sets a key."""
    if any(_excluded(first, second)):
        return True
    paths = [[path for path, _ in _leaves(fragment) if path != ("name",)] for fragment in (first, second)]
    return any(a[: len(b)] == b or b[: len(a)] == a for a in paths[0] for b in paths[1])


def _excluded(*fragments: Fragment) -> Iterator[tuple[str, str]]:
    """Yield keys of these fragments together, also under a role, that no plan has both of."""
    parts = [part for fragment in fragments for part in (fragment, *map(fragment.get, ROLES))]
    keys = {key for part in parts if isinstance(part, Mapping) for key in part}
    yield from (pair for pair in _EXCLUSIVE if keys.issuperset(pair))


def _file_label(reference: str) -> str:
    """Return a name, or that of a file without folder and suffix, as it may be written in the name of a plan."""
    return word(re.sub(r"\.(ya?ml|json)$", "", reference.split("/")[-1]))


def _joined(parts: Sequence[Fragment]) -> Variant:
    fragment: Fragment = {}
    for part in parts:
        fragment = merged(part, fragment)
    drafters = [_drafter(part) for part in parts if "speculation" in part]
    if "share" in fragment:
        fragment = _on_shared_devices(fragment)
    return Variant(
        label=_JOINED.join(map(label_of, parts)),
        engine=str(fragment.get("engine", "")),
        pool={key: fragment[key] for key in _POOL_KEYS if key in fragment},
        by_role={role: fragment[role] for role in ROLES if role in fragment},
        plan=PlanFragment.model_validate({key: fragment[key] for key in PlanFragment.model_fields if key in fragment}),
        drafter=drafters[-1] if drafters else None,
        checkpoint=str(fragment.get("model", "")),
        score=fragment.get("score"),
        changes_mixed="share" not in fragment
        and all(any(key not in (*_OF_PAIRS, "name") for key in part) for part in parts),
    )


def _on_shared_devices(fragment: Fragment) -> Fragment:
    """Return a fragment with the shares of each role among its settings; KV caches stay where they are unless it has a
    link."""
    shares = _ShareFragment.model_validate({"share": fragment["share"]}).share.settings
    by_role = {role: merged(settings, fragment.get(role, {})) for role, settings in shares.items()}
    return {"link": IN_PLACE, **fragment, **by_role}


def _drafter(fragment: Fragment) -> DrafterChoice:
    """Return the drafter of a fragment, by the fragment's name unless it has a name of its own."""
    choice = _DraftFragment.model_validate({"speculation": fragment["speculation"]}).speculation
    return choice if choice.name is not None else choice.model_copy(update={"name": word(label_of(fragment))})


# --- checks -----------------------------------------------------------------------------------------------


def check_fragments(
    fragments: Sequence[Fragment], *, combine: bool, pairs: bool, cuts: Sequence[Cut], taken: Iterable[str] = ()
) -> None:
    """Raise ErrorAt for the first fragment that no plan of a study could have; its place begins with the number of the
    fragment.

    `pairs` is True if the study has plans with prefill and decode pools, `cuts` are the parallelisms that it searches,
    `taken` are labels of its drafters.
    """
    labels: dict[str, int] = {}
    for number, fragment in enumerate(fragments):
        _check_keys(fragment, number, pairs=pairs)
        _check_pools(fragment, number, cuts)
        _check_part(PlanFragment, {k: fragment[k] for k in PlanFragment.model_fields if k in fragment}, number)
        if "score" in fragment and "model" not in fragment:
            of_study = "or the score of the study's model into the study"
            raise ErrorAt(f"is of a checkpoint; write its `model` beside it, {of_study}", number, "score")
        if "share" in fragment:
            _check_part(_ShareFragment, {"share": fragment["share"]}, number)
        if "model" in fragment:
            _check_part(_Checkpoint, {k: fragment[k] for k in _Checkpoint.model_fields if k in fragment}, number)
        label = label_of(fragment)
        if "speculation" in fragment:
            _check_part(_DraftFragment, {"speculation": fragment["speculation"]}, number)
            if _drafter(fragment).label in taken:
                raise ErrorAt(
                    f"a drafter of the study is called {_drafter(fragment).label} too; give one another name",
                    number,
                    "speculation",
                )
        if label in labels:
            raise ErrorAt(f"is called {label or 'nothing'}, as variant {labels[label] + 1} is; give it a name", number)
        labels[label] = number
    if len(combined(fragments, combine)) > MOST_VARIANTS:
        raise ErrorAt(f"have more than {MOST_VARIANTS} combinations; list fewer, or remove combine")


def _check_keys(fragment: Fragment, number: int, *, pairs: bool) -> None:
    for key in fragment:
        if key in UNSEARCHED:
            raise ErrorAt(f"cannot be searched as a variant: {UNSEARCHED[key]}", number, key)
        if key not in _KEYS:
            raise ErrorAt(
                f"unknown key{suggest(key, _KEYS) or '; keys of a pool or a plan are known here'}", number, key
            )
        if key in _OF_PAIRS and not pairs:
            raise ErrorAt(
                "has no effect if all plans have only mixed pools; write layouts: [prefill-decode] (or both) under "
                "search, or remove it",
                number,
                key,
            )
    for first, second in _excluded(fragment):
        raise ErrorAt(f"{first} and {second} cannot be combined; write them as two variants", number)
    name = fragment.get("name", "variant")
    if not isinstance(name, str) or word(name) != name or not name:
        raise ErrorAt(f"must consist of letters, digits, dots and hyphens, not {name!r}", number, "name")
    if not isinstance(fragment.get("engine", ""), str):
        raise ErrorAt("must be an engine preset, by name or file, or none", number, "engine")


def _check_pools(fragment: Fragment, number: int, cuts: Sequence[Cut]) -> None:
    """Raise ErrorAt if no pool of the study could have the settings of a fragment."""
    pool = {key: fragment[key] for key in _POOL_KEYS if key in fragment}
    _check_pool(pool, cuts, number)
    for role in ROLES:
        of_role = fragment.get(role, {})
        if not isinstance(of_role, Mapping):
            raise ErrorAt(f"must be a mapping with keys of the {role} pool", number, role)
        for key in of_role:
            if key in UNSEARCHED:
                raise ErrorAt(f"cannot be searched as a variant: {UNSEARCHED[key]}", number, role, key)
            if key == "share":
                example = "share: {prefill: 0.4, decode: 0.6}"
                raise ErrorAt(f"is of both pools; write {example} beside {role}", number, role, key)
            if key not in _POOL_KEYS:
                hint = suggest(key, _POOL_KEYS) or "; keys of a pool are known here"
                raise ErrorAt(f"unknown key{hint}", number, role, key)
        _check_pool(merged(of_role, pool), cuts, number, role)


def _check_pool(settings: Fragment, cuts: Sequence[Cut], *at: str | int) -> None:
    """Raise ErrorAt with the first problem of these settings if no parallelism of the study allows them."""
    first: tuple[str, list[str | int]] | None = None
    for cut in cuts:
        batching = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
        # An autoscaled pool begins with its fewest instances unless the fragment states a number.
        begin = at_path(settings, ("autoscaling", "min_instances"))
        instances = begin if isinstance(begin, int) else 1
        data = merged(settings, {"hardware": "any", "instances": instances, "parallelism": cut, "batching": batching})
        try:
            Pool.model_validate(data)
            return
        except ValidationError as error:
            first = first or _problem(Pool, error, data)
    assert first is not None
    message, key = first
    raise ErrorAt(message, *at, *key)


def _check_part(part: type[Part], data: Fragment, number: int) -> None:
    try:
        part.model_validate(data)
    except ValidationError as error:
        message, key = _problem(part, error, data)
        raise ErrorAt(message, number, *key) from None


def _problem(part: type[Part], error: ValidationError, data: Fragment) -> tuple[str, list[str | int]]:
    """Return the first problem, and the keys that lead to it; of a missing key the block that lacks it."""
    problems = problems_of(part, error, Document("", data, None))
    # A misspelt key is also missing: the spelling is the problem.
    problem = next((p for p in problems if p.message.startswith("unknown key")), problems[0])
    keys: list[str | int] = [int(key) if key.isdigit() else key for key in problem.key.split(".") if key]
    if problem.message == "is required and missing":
        return f"lacks {keys[-1]}, which is required", keys[:-1]
    return problem.message, keys
