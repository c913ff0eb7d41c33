"""Doubt about the answer of a search: probability of the SLO, worlds in which costs are off, robust choices."""
