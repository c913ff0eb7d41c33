"""Speculative decoding in simulated time: how many drafts are accepted, and the drafting terms of a pool's
schedulers."""

from simtune.sim.drafting.draft_lengths import SharedBudget, StopLengths
from simtune.sim.drafting.pool_terms import Drafting, check_drafting, drafter_share, drafting_terms
from simtune.sim.drafting.sampler import AcceptanceSampler
from simtune.sim.drafting.target_replicas import useful_replicas
from simtune.sim.drafting.uniform import uniform

__all__ = [
    "AcceptanceSampler",
    "Drafting",
    "SharedBudget",
    "StopLengths",
    "check_drafting",
    "drafter_share",
    "drafting_terms",
    "uniform",
    "useful_replicas",
]
