"""Finding the schedule: enumerate what fits, drop what cannot win, simulate the rest, keep the reasons."""

from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.trial import Trial, Tuned

__all__ = ["Question", "Trial", "Tuned", "optimize"]
