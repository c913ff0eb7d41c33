"""Choosing how to speculate: lengths of chains, shapes of trees, when to stop, when not to draft at all."""

from simtune.tuner.speculation.choose import Projection, RoundCost, Schedule, choose

__all__ = ["Projection", "RoundCost", "Schedule", "choose"]
