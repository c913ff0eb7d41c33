"""Replay of step logs: a scheduler is driven through the log of a real engine."""
