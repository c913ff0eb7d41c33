"""Published systems: claims beside simulations, both sides of each run on the same requests."""

from simtune.validation.published.collection import Entry, collection, select
from simtune.validation.published.findings import Finding, Findings, headline
from simtune.validation.published.own_gain import own_gains
from simtune.validation.published.own_load import OwnGain, OwnGains, OwnLoad
from simtune.validation.published.own_words import (
    interval_in_words,
    left_out_in_words,
    pays_in_words,
    ranked,
    undecided,
)
from simtune.validation.published.reproduction import reproduce

__all__ = [
    "Entry",
    "Finding",
    "Findings",
    "OwnGain",
    "OwnGains",
    "OwnLoad",
    "collection",
    "headline",
    "interval_in_words",
    "left_out_in_words",
    "own_gains",
    "pays_in_words",
    "ranked",
    "reproduce",
    "select",
    "undecided",
]
