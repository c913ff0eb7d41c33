"""The margin with which plans are judged if a study asks for confidence: how much longer their steps may take.

A search that stops where the SLO is just kept has a probability of about a half that it is kept where the profile is
off. With `slo: {confidence: 0.9}` every plan is judged as if all its operators took so much longer that 90 % of the
drawn worlds (`simtune.sim.drawn_worlds`) take no longer. In a world, each kind of operator is off by an error of its
own, so a step of which kind k is the share w_k takes

    sum_k w_k exp(s_k z_k)

times as long as predicted, s_k the standard deviation of the kind's error and z_k standard normal. Steps that decode
and steps with prompts have other shares; the margin is the quantile of the longer of both, so it is no less than either
needs. Bounds are those of plans that are slower by the margin, and hold for them as without it. The probability that
the chosen plan then has is stated from its own steps (`simtune.tuner.doubt.slo_probability`).
"""

from __future__ import annotations

import numpy as np

from simtune.costs.basis import StepBasis, WeightedStep
from simtune.costs.iteration import StepWork
from simtune.sim.drawn_worlds import DrawnWorlds
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.pool import Pool
from simtune.workload.requests import RequestStream

MEAN_OF = 1000
"""Requests whose mean lengths stand for those of the load."""
WORLDS = 1000
"""Drawn to find a quantile; none is simulated."""


def margin(
    confidence: float,
    model: Model,
    hardware: Hardware,
    pool: Pool,
    stream: RequestStream,
    num_blocks: int | None,
    seed: int,
) -> float:
    """Return the factor on operator times that a share `confidence` of worlds do not exceed; at least 1.

    `num_blocks` are the KV blocks of an instance, if they are known: no more requests decode together than they hold.
    """
    basis = StepBasis(model, hardware, pool)
    drawn_worlds = DrawnWorlds.of(WORLDS, seed)
    longer = np.ones(WORLDS)
    for work in _typical_steps(pool, stream, num_blocks):
        kinds = basis.of([WeightedStep(1.0, work)])
        total = sum(float(kind.seconds.sum()) for kind in kinds.values())
        # Host time has no error in a world, and no share here: the margin is on operators alone.
        shares = {name: float(kind.seconds.sum()) / total for name, kind in kinds.items()}
        longer = np.maximum(longer, drawn_worlds.stretch(shares, {name: kind.log_sd for name, kind in kinds.items()}))
    return float(np.quantile(longer, confidence))


def _typical_steps(pool: Pool, stream: RequestStream, num_blocks: int | None) -> list[StepWork]:
    """Return a step that decodes on half of the seats, and one with a prompt, by the mean lengths of requests."""
    prompt, output = float(stream.prompt_tokens.mean()), float(stream.output_tokens.mean())
    context = round(prompt + output / 2)
    seats = pool.batching.max_num_seqs
    if num_blocks is not None:
        seats = min(seats, num_blocks * pool.kv_cache.block_size // max(context, 1))
    # Half of the seats: at the highest rate within an SLO batches are seldom full.
    decodes = max(1, seats // 2)
    chunk = max(1, min(pool.batching.max_num_batched_tokens, round(prompt)))
    return [
        StepWork(num_decodes=decodes, context_tokens=decodes * context, num_samples=decodes),
        StepWork(chunks=[(0, chunk)], num_samples=1),
    ]
