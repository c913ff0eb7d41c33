"""What a comparison came to: status, numbers, and the reason where they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from simtune.specs.base import Record, Seq
from simtune.specs.systems import InputSource

FINDINGS_SCHEMA: Literal["simtune/findings@1"] = "simtune/findings@1"

Status = Literal[
    "reproduced", "assumed", "fitted", "differs", "needs", "not a schedule", "elsewhere", "infeasible", "failed"
]

WORDS: dict[Status, str] = {
    "reproduced": "within the band, and nothing that decides it is assumed",
    "assumed": "within the band, decided by what is not published",
    "fitted": "within the band, on inputs chosen knowing the claim",
    "differs": "outside the band",
    "needs": "needs what simtune cannot say yet",
    "not a schedule": "no schedule decides it",
    "elsewhere": "run on other hardware than the claim, and not judged",
    "infeasible": "does not fit on that hardware",
    "failed": "cannot be run as it stands",
}
"""What each status means."""


class FoundInput(Record):
    """An input of an entry, and what comes of it otherwise."""

    what: str
    source: InputSource
    where: str | None
    gains: Seq[float]
    """At the ends of what an assumed input could be instead."""
    decides: bool
    """Whether the band is missed at one of them, or it is not varied though it is assumed."""


class Finding(Record):
    """One system: what it claims, what came out, and what that is called. Gains are above 1 where the variant wins."""

    family: str
    system: str
    title: str
    year: int | None
    source: str
    status: Status
    claim: str | None
    claimed: float | None
    """A gain; or, where the claim is a number of its own, 1."""
    band: Seq[float] | None
    simulated: float | None
    base: float | None
    """What was measured of the base, in the unit of `metric`; the claimed number where the claim is one."""
    variant: float | None
    metric: str | None
    reason: str | None
    """Where it differs: the parts of the time that do; else what is needed, or why nothing is run."""
    inputs: Seq[FoundInput]
    """All that the result stands on, with the sources; those under `assumed` among them."""
    assumed: Seq[str]
    """Those of them that nobody published and that decide the verdict."""
    chosen: str | None
    """What was chosen with the claim or a result in sight."""
    not_modelled: Seq[str]

    @property
    def ran(self) -> bool:
        """Whether both sides were run."""
        return self.simulated is not None


class Findings(Record):
    """A file of findings."""

    schema_: Literal["simtune/findings@1"] = Field(FINDINGS_SCHEMA, alias="schema")
    hardware: str | None
    """What all ran on, where that was asked for."""
    findings: Seq[Finding]

    @classmethod
    def of(cls, findings: Sequence[Finding], hardware: str | None = None) -> Findings:
        """Of a run that has just been made."""
        return cls(schema_=FINDINGS_SCHEMA, hardware=hardware, findings=tuple(findings))


def counts(findings: Sequence[Finding]) -> dict[Status, int]:
    """How many there are of each status, those of none left out."""
    counted = Counter(finding.status for finding in findings)
    return {status: counted[status] for status in WORDS if counted[status]}


def headline(findings: Sequence[Finding]) -> str:
    """One line: how many of the serving systems are reproduced with nothing assumed, are within the band otherwise,
    differ, need something. What is no serving system at all is not counted."""
    of = [finding for finding in findings if finding.family != NOT_SERVING]
    n = Counter(finding.status for finding in of)
    return (
        f"{n['reproduced']} of {len(of)} reproduced, {n['assumed']} more within the band on assumed inputs, "
        f"{n['fitted']} on inputs chosen knowing the claim, {n['differs']} differ, {n['needs']} need what cannot be "
        f"said yet, {n['not a schedule']} claim nothing that a schedule decides"
    )


NOT_SERVING = "not-serving"
"""The family of what was looked at and serves no requests."""
