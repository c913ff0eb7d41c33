"""Comparison of simulations with reality: engines under a load, replays of step logs, claims of published systems."""
