"""Engines that really run: the simulator's own schedulers under a real clock, and those of others."""
