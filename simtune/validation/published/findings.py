"""Result of a comparison: status, numbers, and the reason if they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from simtune.specs.base import Record, Seq
from simtune.specs.systems import InputSource

FINDINGS_SCHEMA: Literal["simtune/findings@2"] = "simtune/findings@2"

FindingStatus = Literal[
    "reproduced", "counts", "assumed", "fitted", "weak", "differs", "needs", "not a schedule", "elsewhere",
    "infeasible", "failed",
]  # fmt: skip

WORDS: dict[FindingStatus, str] = {
    "reproduced": "within the band, by costs that differ between cards, and nothing that decides it is assumed",
    "counts": "within the band, and the same on every card: counts of tokens or requests, not costs",
    "assumed": "within the band, decided by what is not published, or with settings that no source covers",
    "fitted": "within the band, on inputs chosen knowing the claim, or on one that is the result itself",
    "weak": "within a band that no effect would meet as well",
    "differs": "outside the band",
    "needs": "needs what simtune cannot say yet",
    "not a schedule": "no schedule decides it",
    "elsewhere": "run on other hardware than the claim, and not judged",
    "infeasible": "does not fit on that hardware",
    "failed": "cannot be run as it stands",
}
"""Meaning of each status."""


class FoundInput(Record):
    """An input of an entry, and the gains with other values of it."""

    what: str
    source: InputSource
    where: str | None
    gains: Seq[float]
    """Gains at the ends of the range that an assumed input could have."""
    decides: bool
    """True if a gain is outside the band at one of the ends, or if the input is second-hand, or assumed and not
    varied."""


class CardGain(Record):
    """Gain of an entry on another card."""

    hardware: str
    gain: float


class BatchGain(Record):
    """Gain of an entry of one request at a time with more of them."""

    requests: int
    gain: float | None
    """None if a side does not fit, or cannot be run so."""


class Finding(Record):
    """Comparison of a system with its claim: claim, results and status. Gains are above 1 if the variant wins."""

    family: str
    system: str
    title: str
    year: int | None
    source: str
    status: FindingStatus
    claim: str | None
    claimed: float | None
    """Simulated gain; or 1 if the claim is a number of its own."""
    band: Seq[float] | None
    simulated: float | None
    base: float | None
    """Measured value of the base, in the unit of `metric`; the claimed number if the claim is a number."""
    variant: float | None
    metric: str | None
    reason: str | None
    """Parts of the time that differ, if the result differs; else what is needed, or why nothing is run."""
    inputs: Seq[FoundInput]
    """Inputs on which the result rests, with the sources; those under `assumed` among them."""
    assumed: Seq[str]
    """Inputs that are not published and that decide the verdict."""
    cards: Seq[CardGain] = ()
    """Gains on three cards, which decide between reproduced and counts."""
    batches: Seq[BatchGain] = ()
    """Gains with 8 and 64 requests at a time, if the entry has one at a time."""
    uncovered: Seq[str] = ()
    """Settings without a source that can change the gain, if the entry would be reproduced or counts otherwise."""
    restates: str | None = None
    """Setting of the variant that is the simulated gain itself."""
    chosen: str | None
    """Inputs that were chosen with the claim or a result in sight."""
    not_modelled: Seq[str]

    @property
    def ran(self) -> bool:
        """True if both sides were run."""
        return self.simulated is not None


class Findings(Record):
    """A file of findings."""

    schema_: Literal["simtune/findings@2"] = Field(FINDINGS_SCHEMA, alias="schema")
    hardware: str | None
    """Hardware on which all systems ran, if the user named it."""
    findings: Seq[Finding]

    @classmethod
    def of(cls, findings: Sequence[Finding], hardware: str | None = None) -> Findings:
        """Return the findings of a run that has just been made."""
        return cls(schema_=FINDINGS_SCHEMA, hardware=hardware, findings=tuple(findings))


def counts(findings: Sequence[Finding]) -> dict[FindingStatus, int]:
    """Return the number of findings of each status, without entries that are no serving system; a status that no
    finding has is left out.
    """
    counted = Counter(finding.status for finding in findings if finding.family != NOT_SERVING)
    return {status: counted[status] for status in WORDS if counted[status]}


def headline(findings: Sequence[Finding]) -> str:
    """Return a line with the numbers of serving systems that are reproduced, are within the band otherwise, differ, or
    need something. Entries that are no serving system are not counted.
    """
    of = [finding for finding in findings if finding.family != NOT_SERVING]
    n = Counter(finding.status for finding in of)
    return (
        f"{n['reproduced']} of {len(of)} reproduced, {n['counts']} more by counts alone, {n['assumed']} within the "
        f"band on assumed inputs, {n['fitted']} on inputs chosen knowing the claim, {n['weak']} in a band that no "
        f"effect would meet as well, {n['differs']} differ, {n['needs']} need what cannot be said yet, "
        f"{n['not a schedule']} claim nothing that a schedule decides"
    )


NOT_SERVING = "not-serving"
"""The family of what was looked at and serves no requests."""
