"""Upper bounds on what a plan can achieve, used to prune a search and to certify its result. See `docs/tuning.md`."""

from simtune.tuner.bounds.capacity import Capacity
from simtune.tuner.bounds.plans import PlanBounds, RateBound, attainment_bound, rate_bound

__all__ = ["Capacity", "PlanBounds", "RateBound", "attainment_bound", "rate_bound"]
