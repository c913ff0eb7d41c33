"""Judge whether a simulation orders plans correctly: several plans around a chosen one, run for real under one load.

The result is the order, as Kendall's tau-b of predicted and measured mean E2EL, and the cost of the choice: the regret
is how much longer the mean E2EL is with the plan predicted best than with the one that measured best. Both have the
interval of 90 % of bootstrap samples, in which each plan's repeats are drawn with replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from simtune.arrays import Array
from simtune.errors import UsageError
from simtune.specs.base import Count, NonNegative, Positive, Record, Seq
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.schemes import Chain

DECISION_SCHEMA: Literal["simtune/decision@1"] = "simtune/decision@1"
SAMPLES = 2000
LEVEL = 0.9


class PlanOutcome(Record):
    """A plan under the load: mean E2EL, predicted and of every repeat."""

    plan: str
    predicted_s: Positive
    measured_s: Seq[Positive]

    @property
    def middle_s(self) -> float:
        """Median of the repeats, in seconds."""
        return float(np.median(self.measured_s))


class Ranking(Record):
    """Result of several plans under one load."""

    schema_id: Literal["simtune/decision@1"] = Field(alias="schema")
    rate_rps: Positive | None
    repeats: Count
    plans: Seq[PlanOutcome] = Field(description="predicted best first")
    best: str = Field(description="the plan that measured best")
    tau: float | None = Field(description="Kendall's tau-b; null where all are predicted or measured alike")
    tau_low: float | None
    tau_high: float | None
    regret: NonNegative
    regret_low: NonNegative
    regret_high: NonNegative

    @property
    def chosen(self) -> PlanOutcome:
        """Plan that was predicted best."""
        return self.plans[0]


class Turn(NamedTuple):
    """A change of one setting of a pool."""

    words: str
    knob: str
    of: Callable[[Pool], Pool]


def around(plan: Plan, count: int, check: Callable[[Plan], None] = lambda plan: None) -> list[Plan]:
    """Return the plan and its neighbours, `count` in all: one setting of the first pool changed, then two.

    Every setting is changed once before any is changed the other way: seats and token budget by a factor of two, a
    chain of drafts one token shorter or longer (one of a single token: none), prefix caching and chunked prefill on or
    off, whole prompts with a budget that holds the longest. Plans that vLLM refuses are left out, and so are plans for
    which `check` (`Engine.check`) raises UsageError. Raise UsageError if there are fewer than `count`.
    """
    plans = [plan.model_copy(update={"name": f"{plan.name}.chosen"})]
    pool, singles = plan.pools[0], list(_changes(plan.pools[0]))
    sets: list[tuple[Turn, ...]] = [(single,) for single in singles]
    sets += [pair for pair in combinations(singles, 2) if pair[0].knob != pair[1].knob]
    for changes in sets:
        if len(plans) == count:
            break
        neighbour = reduce(lambda changed, change: change.of(changed), changes, pool)
        name, pools = "-".join(change.words for change in changes), (neighbour, *plan.pools[1:])
        if _runs(neighbour) and neighbour not in (present.pools[0] for present in plans):
            neighbour_plan = plan.model_copy(update={"name": f"{plan.name}.{name}", "pools": pools})
            with suppress(UsageError):
                check(neighbour_plan)
                plans.append(neighbour_plan)
    if len(plans) < count:
        raise UsageError(f"--plans {count}: there are only {len(plans)} plans around {plan.name}")
    return plans


def _runs(pool: Pool) -> bool:
    """True if the budget has a token for every seat and, if prompts are not cut, room for the longest prompt."""
    batching = pool.batching
    least = batching.max_num_seqs if batching.chunked_prefill else pool.max_model_len or batching.max_num_seqs
    return batching.max_num_batched_tokens >= max(least, batching.max_num_seqs)


def _changes(pool: Pool) -> Iterator[Turn]:
    """Yield one change of every setting, then the changes the other way."""
    batching, cache = pool.batching, pool.kv_cache
    seats, budget = batching.max_num_seqs, batching.max_num_batched_tokens
    if seats > 1:
        yield _set(f"seats{seats // 2}", "batching", "max_num_seqs", seats // 2)
    yield _set(f"budget{budget // 2}", "batching", "max_num_batched_tokens", max(1, budget // 2))
    longer, shorter = _other_drafts(pool)
    yield from shorter
    yield Turn("no-chunked" if batching.chunked_prefill else "chunked", "chunked_prefill", _other_chunking)
    prefix = "no-prefix" if cache.prefix_caching else "prefix"
    yield _set(prefix, "kv_cache", "prefix_caching", not cache.prefix_caching)
    yield _set(f"seats{2 * seats}", "batching", "max_num_seqs", 2 * seats)
    yield _set(f"budget{2 * budget}", "batching", "max_num_batched_tokens", 2 * budget)
    yield from longer


def _other_drafts(pool: Pool) -> tuple[list[Turn], list[Turn]]:
    """Return a chain one token longer, and one token shorter, which may be no drafts; empty without a chain."""
    if pool.speculation is None or not isinstance(pool.speculation.scheme, Chain):
        return [], []
    tokens = pool.speculation.scheme.tokens
    longer = _set(f"draft{tokens + 1}", "speculation", "scheme", Chain(tokens=tokens + 1))
    if tokens > 1:
        return [longer], [_set(f"draft{tokens - 1}", "speculation", "scheme", Chain(tokens=tokens - 1))]
    return [longer], [Turn("no-draft", "scheme", lambda changed: changed.model_copy(update={"speculation": None}))]


def _set(words: str, part: str, key: str, value: Any) -> Turn:
    def of(pool: Pool) -> Pool:
        return pool.model_copy(update={part: getattr(pool, part).model_copy(update={key: value})})

    return Turn(words, key, of)


def _other_chunking(pool: Pool) -> Pool:
    """Return the pool with prompts in chunks if they were whole, and whole if they were in chunks."""
    batching = pool.batching
    budget = max(batching.max_num_batched_tokens, pool.max_model_len or 0 if batching.chunked_prefill else 0)
    changed = {"chunked_prefill": not batching.chunked_prefill, "max_num_batched_tokens": budget}
    return pool.model_copy(update={"batching": batching.model_copy(update=changed)})


def decide(outcomes: Sequence[PlanOutcome], rate_rps: float | None, seed: int = 0) -> Ranking:
    """Return order and regret with their intervals; of equal predictions the plan named first counts as chosen."""
    ranked = sorted(outcomes, key=lambda outcome: outcome.predicted_s)
    predicted = np.array([outcome.predicted_s for outcome in ranked])
    measured = np.array([outcome.middle_s for outcome in ranked])
    samples = [_sample(ranked, i, seed) for i in range(SAMPLES)]
    taus = [tau for sample in samples if (tau := kendall(predicted, sample)) is not None]
    tau_low, tau_high = _middle(taus) if taus else (None, None)
    regret_low, regret_high = _middle([_regret(sample) for sample in samples])
    return Ranking(
        schema_id=DECISION_SCHEMA,
        rate_rps=rate_rps,
        repeats=min(len(outcome.measured_s) for outcome in ranked),
        plans=tuple(ranked),
        best=ranked[int(measured.argmin())].plan,
        tau=kendall(predicted, measured),
        tau_low=tau_low,
        tau_high=tau_high,
        regret=_regret(measured),
        regret_low=regret_low,
        regret_high=regret_high,
    )


def kendall(x: Array, y: Array) -> float | None:
    """Return Kendall's tau-b: concordant less discordant pairs over the geometric mean of those untied in x and in
    y."""
    first, second = np.triu_indices(len(x), 1)
    a, b = np.sign(x[first] - x[second]), np.sign(y[first] - y[second])
    untied = float(np.count_nonzero(a)) * float(np.count_nonzero(b))
    return float((a * b).sum()) / untied**0.5 if untied else None


def _regret(measured: Array) -> float:
    """Return the regret of the first plan against the best."""
    return float(measured[0] / measured.min() - 1)


def _sample(outcomes: Sequence[PlanOutcome], number: int, seed: int) -> Array:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, number))))
    draws = [generator.choice(np.array(o.measured_s), len(o.measured_s)) for o in outcomes]
    return np.array([np.median(times) for times in draws])


def _middle(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(values, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)
