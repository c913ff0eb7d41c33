"""Plans in words: servers, GPUs and settings, from a plan or from the code name that a search gives it.

`p.tp2-pp1-x2-s64-t8192_d.tp4-pp1-x1-s256-t8192` is "2 prefill servers of 2 GPUs with 64 seats, 1 decode server of
4 GPUs with 256 seats, 8,192 tokens a step". The code name stays the identifier in files.
`simtune.tuner.space.candidates` makes code names; the patterns here read them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from simtune.errors import plural
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool

_POOL = (
    r"(?:(?P<role{n}>[pd])\.)?(?:(?P<gpu{n}>[A-Za-z0-9.-]+?)-)?tp(?P<tp{n}>\d+)-pp(?P<pp{n}>\d+)"
    r"(?:-dp(?P<dp{n}>\d+))?(?:-cp(?P<cp{n}>\d+))?(?:-pcp(?P<pcp{n}>\d+))?(?:-ffn(?P<ffn{n}>\d+))?(?:-spare(?P<spare{n}>\d+))?(?:-enc(?P<encoders{n}>\d+))?(?P<ep{n}>-ep)?(?:-w-(?P<weights{n}>[a-z0-9_]+))?(?:-kv-(?P<kv{n}>[a-z0-9_]+))?"
    r"(?:-len(?P<length{n}>\d+))?(?:-v-(?P<variant{n}>[A-Za-z0-9.-]+?))?"
    r"-x(?P<instances{n}>\d+)-s(?P<seats{n}>\d+)-t(?P<budget{n}>\d+)"
    r"(?P<caching{n}>-cached|-uncached)?(?:-(?!router\d+$)(?P<drafter{n}>.+?))?"
)
_NAME = re.compile(_POOL.format(n=1) + f"(?:_{_POOL.format(n=2)})?" + r"(?:-router(?P<router>\d+))?")
_TOKEN = re.compile(r"[^\s,;]*tp\d+-pp\d+[^\s,;]*[^\s,;:.]")
Keep = Callable[[str, int], bool]
_ROLES = {"p": "prefill", "d": "decode"}
MIXED = "mixed"
SETTINGS = ("seats", "budget", "caching", "weights", "kv", "length", "drafter", "ranks", "variant")
"""Keys of the settings of a pool, in the order in which they are stated."""
ABSENT = {
    "caching": "prefix cache as the engine sets it",
    "weights": "weights as in the checkpoint",
    "kv": "KV cache in the usual format",
    "length": "lengths as the load needs them",
    "drafter": "no drafts",
    "variant": "no variant",
    "router": "router 1",
}
"""Words for a setting that a plan leaves open, beside plans that do not."""


@dataclass(frozen=True)
class PoolWords:
    """Pool in words: the servers, then each setting by its key."""

    role: str
    servers: str
    gpus: int
    settings: Mapping[str, str]

    @property
    def label(self) -> str:
        """Short name of the pool beside another one."""
        return self.servers if self.role == MIXED else self.role


@dataclass(frozen=True)
class PlanWords:
    """Plan in words, pool by pool."""

    pools: tuple[PoolWords, ...]
    router: str = ""

    @property
    def gpus(self) -> int:
        """Number of GPUs of all pools."""
        return sum(pool.gpus for pool in self.pools)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return what the words say under a key: one text if all pools share it, else a text for each pool."""
        if key == "router":
            return (self.router,)
        texts = tuple(pool.servers if key == "servers" else pool.settings.get(key, "") for pool in self.pools)
        return texts[:1] if len(set(texts)) == 1 else texts

    def text(self, key: str, pool: int) -> str:
        """Return what the words say under a key of one pool."""
        return self.texts(key)[pool if len(self.texts(key)) > 1 else 0]

    def words(self, keep: Keep = lambda key, pool: True, absent: Mapping[str, str] | None = None) -> str:
        """Return the plan in words, as far as `keep` is true of a key and the number of a pool.

        A setting that all pools share is stated once, at the end. `absent` are the texts of settings that the plan
        leaves open.
        """
        shared = [key for key in (*SETTINGS, "router") if self._is_shared(key, keep)]
        heads = (self._head(i, shared, keep) for i in range(len(self.pools)))
        ends = (self.text(key, 0) or (absent or {}).get(key, "") for key in shared)
        return ", ".join(filter(None, [*heads, *ends]))

    def _is_shared(self, key: str, keep: Keep) -> bool:
        """True if all pools have the same text under a key that is kept for all of them."""
        return len(self.texts(key)) == 1 and all(keep(key, i) for i in range(len(self.pools)))

    def _head(self, i: int, shared: Sequence[str], keep: Keep) -> str:
        """Return the words of a pool: its servers, and the settings that other pools do not share."""
        apart = [key for key in SETTINGS if key not in shared and keep(key, i)]
        settings = _listed([text for key in apart if (text := self.text(key, i))])
        servers = keep("servers", i)
        if not settings:
            return self.pools[i].servers if servers else ""
        return f"{self.pools[i].servers if servers else self.pools[i].label} with {settings}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# --- sources of words -------------------------------------------------------------------------------------


def _pool_words(  # noqa: PLR0913 - one for each fact
    *,
    role: str,
    gpu: str,
    instances: int,
    spare: int,
    devices: int,
    parallelism: Mapping[str, int],
    expert_parallel: bool,
    feed_forward: int,
    seats: int,
    budget: int,
    more_settings: Mapping[str, str],
    encoders: int = 0,
) -> PoolWords:
    """Return the words of a pool; `gpu` is empty if all pools are on the same kind of GPU, and `encoders` are the GPUs
    of servers that encode in front of it."""
    size = _of_gpus(gpu, devices, parallelism, expert_parallel, feed_forward)
    servers = f"{plural(instances, _server(role))} {size}" + (f" and {spare} to stand by" if spare else "")
    servers += f" behind {plural(encoders, 'GPU')} for encoders" if encoders else ""
    settings = {"seats": plural(seats, "seat"), "budget": f"{plural(budget, 'token')} a step", **more_settings}
    return PoolWords(role, servers, (instances + spare) * devices + encoders, settings)


def _server(role: str) -> str:
    return "server" if role == MIXED else f"{role} server"


def _of_gpus(
    gpu: str, devices: int, parallelism: Mapping[str, int], expert_parallel: bool, feed_forward: int = 0
) -> str:
    """Return the GPUs of a server, and how they share the work: `of 8 GPUs (tp 4, pp 2)`."""
    cuts = [f"{key} {ranks}" for key, ranks in parallelism.items() if ranks > 1]
    # Tensor parallelism alone is what "of 2 GPUs" means; any other division is named.
    ways = cuts if len(cuts) > 1 or parallelism.get("tp", 1) != devices else []
    ways = [*ways, *["expert parallel"] * expert_parallel, *[f"{feed_forward} for experts"] * bool(feed_forward)]
    return f"of {plural(devices, f'{gpu} GPU'.strip())}" + (f" ({', '.join(ways)})" if ways else "")


def kind_of_server(role: str, parallelism: Mapping[str, int], expert_parallel: bool) -> str:
    """Return the words for all servers of a role and a division: `decode servers of 8 GPUs (tp 4, pp 2)`."""
    return f"{_server(role)}s {_of_gpus('', math.prod(parallelism.values()), parallelism, expert_parallel)}"


@lru_cache(maxsize=4096)
def of_name(name: str) -> PlanWords | None:
    """Return the words of a code name; None if the name is not one."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    pools = tuple(_of_match(match.groupdict(), n) for n in (1, 2) if match[f"tp{n}"])
    return PlanWords(pools, f"router {match['router']}" if match["router"] else "")


def _of_match(fields: Mapping[str, str | None], n: int) -> PoolWords:
    parallelism = {key: int(fields[f"{key}{n}"] or 1) for key in ("tp", "pp", "dp", "cp", "pcp")}
    feed_forward = int(fields[f"ffn{n}"] or 0)
    return _pool_words(
        role=_ROLES.get(fields[f"role{n}"] or "", MIXED),
        gpu=fields[f"gpu{n}"] or "",
        instances=int(fields[f"instances{n}"] or 1),
        spare=int(fields[f"spare{n}"] or 0),
        devices=math.prod(parallelism.values()) + feed_forward,
        parallelism=parallelism,
        feed_forward=feed_forward,
        expert_parallel=bool(fields[f"ep{n}"]),
        seats=int(fields[f"seats{n}"] or 1),
        budget=int(fields[f"budget{n}"] or 1),
        more_settings=_more_settings(fields, n),
        encoders=int(fields[f"encoders{n}"] or 0),
    )


def _more_settings(fields: Mapping[str, str | None], n: int) -> dict[str, str]:
    """Return the words of the settings that a code name has only if they are searched."""
    caching, weights, kv, drafter = (fields[f"{key}{n}"] for key in ("caching", "weights", "kv", "drafter"))
    length, variant = fields[f"length{n}"], fields[f"variant{n}"]
    more_settings = {
        "caching": {None: "", "-cached": "prefix cache on", "-uncached": "prefix cache off"}[caching],
        "weights": f"{weights} weights" if weights else "",
        "kv": f"{kv} KV cache" if kv else "",
        "length": f"requests of up to {int(length):,} tokens" if length else "",
        "drafter": f"drafts of {drafter}" if drafter else "",
        "variant": f"variant {variant.replace('-and-', ' and ')}" if variant else "",
    }
    return {key: words for key, words in more_settings.items() if words}


def of_plan(plan: Plan) -> PlanWords:
    """Return the words of a plan: those of its code name, or what its pools contain.

    A code name does not count GPUs that drafters have for themselves; the pools do.
    """
    words, several = of_name(plan.name), len({pool.hardware for pool in plan.pools}) > 1
    if words is not None and words.gpus == plan.num_devices and not plan.autoscales:
        return words
    encoders = {stage.pool: stage.instances * stage.devices for stage in plan.stages or () if stage.encoder}
    return PlanWords(tuple(_of_pool(pool, several, encoders.get(pool.name, 0)) for pool in plan.pools))


def _of_pool(pool: Pool, several_kinds: bool, encoders: int) -> PoolWords:
    p, batching, drafts = pool.parallelism, pool.batching, pool.speculation
    more_settings = {
        "weights": f"{pool.weight_dtype} weights" if pool.weight_dtype else "",
        "kv": f"{pool.kv_cache.dtype} KV cache" if pool.kv_cache.dtype else "",
        "drafter": "" if drafts is None else f"drafts of {drafts.drafter.label}",
        "ranks": _ranks(pool),
    }
    words = _pool_words(
        role=pool.role,
        gpu=pool.hardware if several_kinds else "",
        instances=pool.most_instances - pool.spare,
        spare=pool.spare,
        devices=pool.devices,
        parallelism={"tp": p.tp, "pp": p.pp, "dp": p.attention_dp, "cp": p.cp or 1, "pcp": p.prompt_groups},
        expert_parallel=p.expert_parallel,
        feed_forward=0 if pool.studied.afd is None else pool.studied.afd.ffn_devices,
        seats=batching.max_num_seqs,
        budget=batching.max_num_batched_tokens,
        more_settings={key: words for key, words in more_settings.items() if words},
        encoders=encoders,
    )
    least = pool.most_instances
    if pool.autoscaling is not None and not pool.autoscaling.scales_ranks:
        least = pool.autoscaling.min_instances
    return words if least == pool.most_instances else replace(words, servers=f"{least} to {words.servers}")


def _ranks(pool: Pool) -> str:
    """Return the words for the ranks of a pool's instances; empty unless they come and go."""
    if pool.autoscaling is None or pool.autoscaling.min_ranks is None:
        return ""
    return f"{pool.autoscaling.min_ranks} to {plural(pool.parallelism.attention_dp, 'rank')} by load"


# --- one name, many names, names inside sentences ---------------------------------------------------------


def in_words(name: str) -> str:
    """Return the plan of a code name in words; any other name unchanged."""
    words = of_name(name)
    return name if words is None else words.words()


def _differ(plans: Sequence[PlanWords]) -> Keep:
    """Return a function that is true of a key and the number of a pool if some plan says something else there."""
    alike = len({tuple(pool.role for pool in plan.pools) for plan in plans}) == 1

    @cache
    def differs(key: str, pool: int) -> bool:
        if alike and key != "router":
            return len({plan.text(key, pool) for plan in plans}) > 1
        return len({plan.texts(key) for plan in plans}) > 1

    return differs


def _read(names: Sequence[str]) -> dict[str, PlanWords]:
    return {name: plan for name in names if (plan := of_name(name)) is not None}


def differing(names: Sequence[str]) -> dict[str, str]:
    """Return for each name of a list what only some of its plans have; everything if the list has one plan.

    Names that are no code names stay as they are.
    """
    plans = _read(names)
    keep = _differ([*plans.values()])
    words = {name: plan.words(keep, ABSENT) if len(plans) > 1 else plan.words() for name, plan in plans.items()}
    return {name: words.get(name, name) for name in names}


def shared(names: Sequence[str]) -> str:
    """Return in words what all plans of a list have, which `differing` leaves out; empty if there is nothing."""
    plans = [*_read(names).values()]
    differs = _differ(plans)
    return plans[0].words(lambda key, pool: not differs(key, pool)) if len(plans) > 1 else ""


def sentence_in_words(text: str, own: str = "", chosen: str = "") -> str:
    """Return a sentence of a search with its code names in words.

    `own` is the plan that the sentence is about, so of other plans only the difference is stated; `chosen` is called
    the chosen plan.
    """

    def replaced(match: re.Match[str]) -> str:
        name = match[0]
        if of_name(name) is None:
            return name
        if name == chosen and name != own:
            return "the chosen plan"
        if name != own and of_name(own) is not None:
            return f"the plan with {differing([own, name])[name]}"
        return in_words(name)

    return _TOKEN.sub(replaced, text)


def chosen_releases(plan: Plan) -> list[str]:
    """Return a note for each pool whose engine preset was chosen for a family, or for a release without one."""
    return list(
        dict.fromkeys(f"engine {p.engine_asked}: preset {p.engine} is used" for p in plan.pools if p.engine_asked)
    )
