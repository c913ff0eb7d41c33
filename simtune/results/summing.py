"""Sums of columns and engine cores for the numbers of a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from simtune.arrays import Array
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Tally
from simtune.engine.adapters import AdapterTally
from simtune.results.outcome import EncoderUse, EngineCoreUse, PoolInstances, RankTurn
from simtune.results.statistics import TokenIntervals, batch_means
from simtune.results.summary import (
    AdapterUse,
    CacheTierUse,
    ChangedRanks,
    ClassRejections,
    Distribution,
    EncoderWork,
    FirstTokenParts,
    HeldBack,
    InstanceUse,
    PoolScaling,
    PrefixCacheUse,
    Rejections,
    Verifications,
)
from simtune.specs.base import Record

FEWEST_SLOWEST = 10
"""Fewest requests of which the slowest share is a group of its own."""


def held_back(held_s: Array, most: int) -> HeldBack | None:
    """Return how long a client that has at most `most` requests under way held its requests back; None if it sent
    none."""
    seconds = held_s[np.isfinite(held_s)]
    if not len(seconds):
        return None
    return HeldBack(
        max_in_flight=most,
        share=float((seconds > 0).mean()),
        mean_s=float(seconds.mean()),
        p99_s=float(np.percentile(seconds, 99)),
        max_s=float(seconds.max()),
    )


def slowest(parts: Array) -> tuple[FirstTokenParts, ...]:
    """Return mean parts of TTFTs, `parts` (5, requests) in seconds: of all requests, and of the slowest tenth and
    hundredth if they are ten or more."""
    order = np.argsort(-parts.sum(axis=0), kind="stable")
    groups = []
    for share in (1.0, 0.1, 0.01):
        number = round(share * len(order))
        if number and (share == 1.0 or number >= FEWEST_SLOWEST):
            # Rounding of ticks to seconds may leave -1e-18.
            front_end, queue, prefill, handover, delivery = np.maximum(
                0.0, parts[:, order[:number]].mean(axis=1)
            ).tolist()
            groups.append(
                FirstTokenParts(
                    slowest=share, requests=number, front_end_s=front_end, queue_s=queue, prefill_s=prefill,
                    handover_s=handover, delivery_s=delivery,
                )
            )  # fmt: skip
    return tuple(groups)


def distribution(values: Array, noise: bool = True) -> Distribution:
    """Return the distribution of latencies in seconds, in order of arrival. Without `noise` it has no confidence
    intervals, which mean nothing for latencies that never settle."""
    if not len(values):
        return Distribution(unit="s", count=0)
    p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
    return Distribution(
        unit="s",
        count=len(values),
        mean=float(values.mean()),
        std=float(values.std()),
        min=float(values.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(values.max()),
        ci95={s: ci for s in ("mean", "p50", "p90", "p95", "p99") if (ci := batch_means(values, s))} if noise else None,
    )


def between_tokens(itl: TokenIntervals | None) -> Distribution:
    """Return the distribution of the times between tokens; without deviation and minimum, because single times are not
    kept."""
    if itl is None:
        return Distribution(unit="s", count=0)
    p50, p90, p95, p99 = (itl.quantile_s(p / 100) for p in (50, 90, 95, 99))
    return Distribution(
        unit="s", count=itl.count, mean=itl.mean_s(), p50=p50, p90=p90, p95=p95, p99=p99, max=itl.max_s()
    )


def quantiles(values: Array) -> tuple[float, ...]:
    """Return the 101 quantiles at 0, 1, ..., 100 %; empty if there are no values."""
    return tuple(np.percentile(values, np.arange(101)).tolist()) if len(values) else ()


def rejections(count: Callable[[int | None], int], names: Sequence[str], requests: int) -> Rejections:
    """Return the requests of `requests` that servers rejected; `count` returns those of one class, or of all."""
    total = count(None)
    by_class = (ClassRejections(request_class=name, requests=count(i)) for i, name in enumerate(names))
    return Rejections(
        requests=total, share=total / requests, **({"classes": tuple(by_class)} if len(names) > 1 else {})
    )


def verifications(tally: Tally) -> Verifications:
    """Return the totals of a tally with at least one verification."""
    rounds, drafts, accepted, tokens = tally
    return Verifications(
        rounds=rounds,
        tokens_per_round=tokens / rounds,
        draft_tokens=drafts,
        accepted_tokens=accepted,
        acceptance=accepted / drafts if drafts else None,
        wasted_tokens=drafts + rounds - tokens,
        wasted_share=(drafts + rounds - tokens) / (drafts + rounds),
    )


def prefix_cache(cores: Sequence[EngineCoreUse]) -> tuple[PrefixCacheUse, ...]:
    """Return the cache use of each pool that looked prompt tokens up."""
    tokens: dict[str, list[int]] = {}
    for core in cores:
        counts = tokens.setdefault(core.pool, [0, 0])
        counts[0] += core.queried_tokens
        counts[1] += core.hit_tokens
    return tuple(
        PrefixCacheUse(pool=pool, queried_tokens=queried, hit_tokens=hit, hit_rate=hit / queried)
        for pool, (queried, hit) in tokens.items()
        if queried
    )


def cache_tiers(cores: Sequence[EngineCoreUse]) -> tuple[CacheTierUse, ...]:
    """Return the use of each tier below the prefix cache of a pool that looked prompt tokens up."""
    queried: Counter[str] = Counter()
    hits: dict[tuple[str, str], int] = {}
    for core in cores:
        queried[core.pool] += core.queried_tokens
        for tier, tokens in core.tier_tokens:
            hits[core.pool, tier] = hits.get((core.pool, tier), 0) + tokens
    return tuple(
        CacheTierUse(pool=pool, tier=tier, hit_tokens=tokens, hit_rate=tokens / queried[pool])
        for (pool, tier), tokens in hits.items()
        if queried[pool]
    )


def cache_uses(cores: Sequence[EngineCoreUse]) -> dict[str, tuple[Record, ...]]:
    """Return the use of prefix caches, of the tiers below them, of adapters and encoders, by their names in a
    summary."""
    return {
        "prefix_cache": prefix_cache(cores),
        "cache_tiers": cache_tiers(cores),
        "adapters": adapters(cores),
        "encoders": encoders(cores),
    }


def adapters(cores: Sequence[EngineCoreUse]) -> tuple[AdapterUse, ...]:
    """Return the use of LoRA adapters of each pool that has slots for them."""
    tallies: dict[str, list[AdapterTally]] = {}
    for core in cores:
        if core.adapters is not None:
            tallies.setdefault(core.pool, []).append(core.adapters)
    sums = {pool: AdapterTally(*map(sum, zip(*of_cores, strict=True))) for pool, of_cores in tallies.items()}
    return tuple(
        AdapterUse(
            pool=pool,
            requests=total.requests,
            hits=total.hits,
            hit_rate=total.hits / total.requests if total.requests else None,
            loads_from_host=total.from_host,
            loads_from_storage=total.from_storage,
            waited_s=total.waited / TICKS_PER_SECOND,
        )
        for pool, total in sums.items()
    )


def scaling(of: PoolInstances) -> PoolScaling:
    """Return the instances of an autoscaled pool over a run, or the ranks of its instances."""
    hours = max(0, of.end) / TICKS_PER_SECOND / 3600.0
    at, accepting, holding = zip(*of.counts, strict=True)
    return PoolScaling(
        pool=of.pool,
        hours=hours,
        mean_instances=of.mean / (of.ranks or 1),
        **({"mean_ranks": of.mean} if of.ranks else {}),
        fewest=min(holding),
        most=max(holding),
        starts=of.starts,
        drains=of.drains,
        gpu_hours=of.devices * of.mean * hours,
        gpu_hours_of_most=of.devices * len(of.held_ticks) * hours,
        at_s=tuple(tick / TICKS_PER_SECOND for tick in at),
        accepting=accepting,
        holding=holding,
    )


def changed_ranks(turn: RankTurn) -> ChangedRanks:
    """Return a change of ranks in seconds."""
    return ChangedRanks(
        pool=turn.pool,
        instance=turn.instance,
        at_s=turn.at / TICKS_PER_SECOND,
        ranks=turn.ranks,
        pause_s=turn.pause / TICKS_PER_SECOND,
        resent=turn.lost,
    )


def encoders(cores: Sequence[EngineCoreUse]) -> tuple[EncoderWork, ...]:
    """Return the work of the encoders of each pool that encoded or found any item."""
    by_pool: dict[str, list[tuple[EncoderUse, int]]] = {}
    for core in cores:
        if core.encoder is not None:
            by_pool.setdefault(core.pool, []).append((core.encoder, core.busy))
    work = []
    for pool, of_cores in by_pool.items():
        encoded, hits, ticks = (sum(use[i] for use, _ in of_cores) for i in range(3))
        busy = sum(busy for _, busy in of_cores)
        if encoded or hits:
            work.append(
                EncoderWork(
                    pool=pool,
                    encoded_images=encoded,
                    cache_hits=hits,
                    encoder_s=ticks / TICKS_PER_SECOND,
                    busy_share=min(1.0, ticks / busy) if busy else 0.0,
                )
            )
    return tuple(work)


def instances(
    cores: Sequence[EngineCoreUse],
    answered: Sequence[int],
    duration_s: float,
    scaled: Sequence[PoolInstances] = (),
) -> tuple[InstanceUse, ...]:
    """Return the use of every simulated instance; it is as busy as its busiest core. `answered` are the requests that
    each core answered, `scaled` the autoscaled pools."""
    held_by_instance = {
        (of.pool, instance): _held(of, instance, duration_s)
        for of in scaled
        for instance in range(len(of.held_ticks) // (of.ranks or 1))
    }
    busy: dict[tuple[str, int], float] = {}
    requests: Counter[tuple[str, int]] = Counter()
    for core, finished in zip(cores, answered, strict=True):
        key, busy_s = (core.pool, core.instance), core.busy / TICKS_PER_SECOND
        busy[key] = max(busy.get(key, 0.0), busy_s / duration_s if duration_s else 0.0)
        requests[key] += finished
    return tuple(
        InstanceUse(
            pool=pool,
            instance=number,
            busy=share,
            requests=requests[pool, number],
            **held_by_instance.get((pool, number), {}),
        )
        for (pool, number), share in busy.items()
    )


def _held(of: PoolInstances, instance: int, duration_s: float) -> dict[str, float]:
    """Return the share of the time in which an instance of an autoscaled pool held its GPUs; if its ranks come and go,
    also the share of the time of all its GPUs in which they ran steps."""
    ranks = of.ranks or 1
    ticks = sum(of.held_ticks[instance * ranks : (instance + 1) * ranks])
    shares = {"held": ticks / (ranks * of.end) if of.end > 0 else 0.0}
    if of.ranks:
        busy_s = of.busy_ticks[instance] / ranks / TICKS_PER_SECOND
        shares["busy_gpus"] = busy_s / duration_s if duration_s else 0.0
    return shares
