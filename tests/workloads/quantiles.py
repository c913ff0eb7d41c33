"""How the shipped workloads chat and code were computed from their traces."""

from __future__ import annotations

import numpy as np

from simtune.arrays import Ints
from simtune.errors import UsageError
from simtune.specs.traces import Trace
from simtune.specs.workload import Lengths, Poisson, Quantiles, Workload

LEVELS = tuple(permille / 1000 for permille in (*range(0, 900, 25), *range(900, 990, 10), *range(990, 1000), 1000))
"""Where `quantile_workload` keeps quantiles: closer together where lengths grow fastest."""


def quantile_workload(trace: Trace, name: str, source: str) -> Workload:
    """Poisson arrivals at the trace's mean rate, prompt and output lengths by their observed quantiles.

    Burstiness and the dependence between prompt and output length are not kept; replay the trace for those.
    Raises UsageError for a trace without a mean rate.
    """
    if trace.rate_rps is None:
        raise UsageError(f"{trace.file}: has no arrival times to take a mean rate from")
    return Workload(
        name=name,
        source=source,
        arrivals=Poisson(rate_rps=trace.rate_rps),
        prompt=_quantiles(trace.prompt_tokens),
        output=_quantiles(trace.output_tokens),
    )


def _quantiles(tokens: Ints) -> Lengths:
    observed = np.quantile(tokens, LEVELS, method="inverted_cdf")  # lengths that occur, not averages of two
    return Quantiles(levels=LEVELS, tokens=tuple(observed.astype(float).tolist()))
