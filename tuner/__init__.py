"""Finding the schedule: enumerate what fits, drop what cannot win, simulate the rest, keep the reasons."""

from simtune.tuner.search import Trial, Tuned, optimize

__all__ = ["Trial", "Tuned", "optimize"]
