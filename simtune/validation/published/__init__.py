"""Published systems: claims beside simulations, both sides of each run on the same requests."""

from simtune.validation.published.collection import Entry, collection, select
from simtune.validation.published.findings import Finding, Findings, headline
from simtune.validation.published.own_gain import own_gains
from simtune.validation.published.own_load import OwnGain, OwnGains, OwnLoad
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
    "own_gains",
    "reproduce",
    "select",
]
