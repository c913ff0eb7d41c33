"""Published systems, claimed beside simulated: both sides of each run on the same requests."""

from simtune.reproduce.collection import Entry, collection, select
from simtune.reproduce.findings import Finding, Findings, headline
from simtune.reproduce.run import reproduce

__all__ = ["Entry", "Finding", "Findings", "collection", "headline", "reproduce", "select"]
