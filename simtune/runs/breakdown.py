"""Time of a pool's typical steps, by operator and by the source of each operator's numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simtune.costs.iteration import StepModel, StepWork
from simtune.results.result import Result
from simtune.runs.schema import StepPart, StepTime
from simtune.sim.deployment import Deployment
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.pool import Pool

SUREST_FIRST = ("measured", "published-tables", "transferred", "other-engine", "data-sheet", "assumed")
DIGITS = 9
"""Significant digits of a part's seconds: further ones depend on how wide the processor's registers are."""


def step_times(deployment: Deployment, result: Result) -> tuple[StepTime, ...]:
    """A typical decode step of each pool, and one that also carries a full budget of prompt tokens.

    Typical is the mean over simulated time of the pool's decode batch, at the requests' mean context.
    """
    stream, several = result.stream, len(deployment.pools) > 1
    context = round(float((stream.prompt_tokens + stream.output_tokens / 2).mean()))
    longest = int(stream.prompt_tokens.max())
    steps = []
    for pool in deployment.pools:
        if isinstance(pool.costs, OwnCosts):
            # The parts of such steps are not known.
            continue
        model = deployment.step_model(pool)
        provenance = _provenance(model)
        for label, batch in _typical(pool.spec, _decode_batch(result, pool.spec.name), context, longest):
            parts = tuple(
                StepPart(
                    operator=kind, seconds=float(f"{seconds:.{DIGITS}g}"), provenance=provenance.get(kind, "assumed")
                )
                for kind, seconds in model.breakdown(batch).items()
            )
            steps.append(StepTime(step=f"pool {pool.spec.name}, {label}" if several else label, parts=parts))
    return tuple(steps)


def _typical(pool: Pool, decodes: int, context: int, longest: int) -> Iterator[tuple[str, StepWork]]:
    """Yield the typical steps of a pool, in words and in numbers."""
    budget = pool.batching.max_num_batched_tokens
    if pool.role == "prefill":
        tokens = min(budget, longest)
        yield f"prefill: {tokens:,} prompt tokens", StepWork(0, 0, ((0, tokens),), 1)
        return
    yield f"decode: {decodes:,} sequences at {context:,} tokens", StepWork(decodes, decodes * context, (), decodes)
    room = min(budget - decodes, longest)
    if pool.role == "mixed" and room > 0:
        batch = StepWork(decodes, decodes * context, ((0, room),), decodes)
        yield f"mixed: the same and {room:,} prompt tokens", batch


def _decode_batch(result: Result, pool: str) -> int:
    """Return the mean number of decodes in a step of the pool, weighted by the steps' time; 1 if nothing decodes."""
    records = result.outcome.records
    of_pool = np.array([core.pool == pool for core in result.outcome.cores])
    decodes = records.column("num_decodes")
    decoding = (decodes > 0) & of_pool[records.column("core")]
    decodes, lasted = decodes[decoding], (records.column("end") - records.column("start"))[decoding]
    # Exact sums: ticks times decodes of a long run are beyond 64 bits.
    ticks = int(lasted.sum())
    weighted = sum(int(lasted[decodes == number].sum()) * number for number in np.unique(decodes).tolist())
    return max(1, round(weighted / ticks)) if ticks else 1


def _provenance(model: StepModel) -> dict[str, str]:
    """Return the origin of each operator kind's numbers; the output head is a matrix product like others.

    If steps call several operators of a kind, such as products in two number formats, it is the least sure origin.
    """
    kinds: dict[str, str] = {}
    for operator in model.fitted.values():
        kinds[operator.kind] = max(kinds.get(operator.kind, SUREST_FIRST[0]), operator.origin, key=SUREST_FIRST.index)
    kinds["head"] = kinds.get("gemm", "assumed")
    return kinds | {key.split(".")[0]: "data-sheet" for key in model.estimated}
