"""Made-up runs for all tests here."""

from tests.runs.made_up import make_run, optimized

__all__ = ["make_run", "optimized"]
