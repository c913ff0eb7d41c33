"""Simulated against real: replays of engines' step logs, step by step."""
