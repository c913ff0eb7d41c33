"""Fit of a compact distribution to the lengths of prompts or answers."""

from __future__ import annotations

import numpy as np

from simtune.arrays import Ints
from simtune.specs.workload import FixedLength, Lengths, Lognormal, Quantiles
from simtune.workload.load import kolmogorov_distance
from simtune.workload.sampling import lengths_at

TAIL = (0.98, 0.99, 0.999, 1.0)
STEPS = (10, 20, 40, 80)
CLOSE = 0.02
"""Share of requests by which lengths may be off: the shortest description within it is chosen."""


def fit_lengths(tokens: Ints) -> Lengths:
    """Return a fixed length, a lognormal if it is close, else quantiles."""
    if tokens.min() == tokens.max():
        return FixedLength(tokens=int(tokens[0]))
    sigma = max(float(np.log(tokens).std()), 1e-6)
    lengths: Lengths = Lognormal(mean_tokens=float(tokens.mean()), sigma=sigma, max_tokens=int(tokens.max()))
    evenly = (np.arange(len(tokens)) + 0.5) / len(tokens)
    for steps in STEPS:
        if kolmogorov_distance(tokens, lengths_at(lengths, evenly)) <= CLOSE:
            break
        levels = (*(i / steps for i in range(steps) if i / steps < TAIL[0]), *TAIL)
        observed = np.quantile(tokens, levels, method="inverted_cdf")
        lengths = Quantiles(levels=levels, tokens=tuple(observed.astype(float).tolist()))
    return lengths
