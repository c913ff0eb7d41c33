"""How likely each request of a stream keeps at least so many drafts."""

from __future__ import annotations

import numpy as np

from simtune.arrays import Array, Ints, Mask
from simtune.errors import Infeasible
from simtune.sim.drafting.uniform import uniform
from simtune.sim.requests import RequestStream
from simtune.specs.acceptance import Acceptance, BetaMixture
from simtune.specs.schemes import Scheme

_EQUAL = 1e-12
"""Survivals are products in some order; nearer than this they are the same."""
_OWN = -1
"""Purpose of the numbers that requests draw their own acceptance by."""


class Survival:
    """P(at least d drafts are kept) of the requests of a stream under one scheme, d = 1 ... `depth`.

    It is that of a request's class; where that is a distribution over requests, each is given an acceptance of its own
    by the quantile of a number that belongs to it. Raises Infeasible where the scheme drafts what the acceptance does
    not know.
    """

    def __init__(self, scheme: Scheme, acceptance: Acceptance, stream: RequestStream, seed: int) -> None:
        self.depth = scheme.shape.depth
        self.class_of = stream.class_index  # of each request
        self.rates = [acceptance.rates_for(name) for name in stream.class_names]
        try:
            self._of_class = np.array([scheme.survival(rates) for rates in self.rates])
        except ValueError as error:
            raise Infeasible(f"acceptance {acceptance.name}: {error}; draft less, or measure more") from None
        self._own = self._own_acceptance(seed, len(stream))

    def columns(self, requests: Ints) -> Array:
        """(requests, depth)."""
        classes = self.class_of[requests]
        columns: Array = self._of_class[classes]
        for index, rates in enumerate(self.rates):
            if isinstance(rates, BetaMixture):
                of_class = classes == index
                own = self._own[requests[of_class]]
                columns[of_class] = own[:, None] ** np.arange(1, self.depth + 1)
        return columns

    def drafts_above(self, least: float, requests: Ints) -> Ints:
        """After how many drafts the survival falls below `least`."""
        drafts: Ints = at_least(self.columns(requests), least).sum(axis=1)
        return drafts

    def _own_acceptance(self, seed: int, n: int) -> Array:
        """Of requests whose class has a distribution of them."""
        own = np.zeros(n)
        for index, rates in enumerate(self.rates):
            if isinstance(rates, BetaMixture):
                from scipy.special import betaincinv

                of_class = np.flatnonzero(self.class_of == index)
                quantiles = uniform(seed, of_class, np.zeros_like(of_class), _OWN)
                own[of_class] = betaincinv(rates.a, rates.b, quantiles)
        return own


def at_least(survival: Array, least: float) -> Mask:
    """Where survivals are not below `least`."""
    return survival >= least - _EQUAL
