"""Gains on a load of the user's own in order and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from simtune.validation.published.own_gain import LEFT_OUT
from simtune.validation.published.own_load import OwnGain


def undecided(gain: OwnGain) -> bool:
    """True if a side saturates, or may: the gain depends on the length of the run."""
    return gain.gain is not None and gain.reason is not None


def ranked(gains: Iterable[OwnGain]) -> list[OwnGain]:
    """Return gains in order: the greatest first, then those of sides that may not keep up, then those without."""
    return sorted(gains, key=lambda gain: (gain.gain is None, undecided(gain), -(gain.gain or 0.0)))


def interval_in_words(gain: OwnGain) -> str:
    """Return the interval of a gain: from the least to the greatest, or from the least up."""
    if gain.low is None:
        return "-"
    return f"{gain.low:.3g} and more" if gain.high is None else f"{gain.low:.3g} to {gain.high:.3g}"


def left_out_in_words(gains: Iterable[OwnGain]) -> str:
    """Return a line that counts the systems without numbers by the kind of the reason."""
    counted = Counter(gain.left_out for gain in gains if gain.left_out is not None)
    if not counted:
        return "No system is left out."
    kinds = [f"{counted[kind]} ({words})" for kind, words in LEFT_OUT.items() if counted[kind]]
    return f"Left out: {sum(counted.values())} systems: {', '.join(kinds)}."


def pays_in_words(gain: OwnGain) -> str:
    """Return where a technique pays, in a sentence."""
    return f"pays {'; '.join(gain.pays)}" if gain.pays else ""
