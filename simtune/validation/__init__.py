"""Simulated against real: engines under a load, replays of their step logs, claims of published systems."""
