"""Estimation of the probability that a target accepts what a drafter proposes, from counts and logs of engines."""
