"""How well a plan could do at the very best: what may prune, and what a certificate says. See `docs/tuning.md`."""

from simtune.tuner.bounds.capacity import Capacity
from simtune.tuner.bounds.plans import PlanBounds, RateBound, attainment_bound, rate_bound

__all__ = ["Capacity", "PlanBounds", "RateBound", "attainment_bound", "rate_bound"]
