"""Running entries: both sides on the same requests, held against the claim, and why they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

from simtune.errors import Infeasible, UsageError
from simtune.parallel import executor, ordered_map
from simtune.reproduce.collection import Entry
from simtune.reproduce.findings import Finding, Status
from simtune.reproduce.sides import Runner, SideResult, in_words, is_cost
from simtune.specs.systems import PRIMITIVES, Claim, PublishedSystem

DIGITS = 4
"""Significant digits of what is written: further ones depend on the platform's arithmetic."""


def reproduce(entries: Sequence[Entry], *, hardware: str | None = None, jobs: int | None = None) -> Iterator[Finding]:
    """The findings of some systems, in their order, as they are made.

    `hardware` takes the place of each entry's own; nothing is judged then. Families run in `jobs` processes. Raises
    UsageError, naming the entry, where one cannot be run as it stands.
    """
    families = [list(group) for _, group in groupby(entries, key=lambda entry: entry.family.name)]
    with executor(jobs, len(families)) as pool:
        for made in ordered_map(pool, partial(_family, hardware=hardware), families):
            yield from made


def _family(entries: Sequence[Entry], hardware: str | None) -> list[Finding]:
    runner = Runner(hardware)
    return [_finding(entry, runner, hardware) for entry in entries]


def _finding(entry: Entry, runner: Runner, hardware: str | None) -> Finding:
    system = entry.system
    if system.variant is None or system.claim is None:
        return _unrun(entry)
    try:
        sides = {
            name: runner.measure(entry.family, side, system.measure)
            for name, side in entry.family.sides(system).items()
        }
    except Infeasible as error:
        if hardware is None:
            raise UsageError(f"{entry.family.name}: {system.name}: {error}") from None
        return _with(entry, "infeasible", reason=str(error))
    variant, base = sides["variant"], sides.get("base")
    return _compared(entry, system.claim, variant, base, moved=hardware is not None)


def _compared(entry: Entry, claim: Claim, variant: SideResult, base: SideResult | None, *, moved: bool) -> Finding:
    """The two sides, held against the claim unless they were moved to other hardware."""
    system = entry.system
    reference = base.value if base is not None else claim.value
    assert reference is not None, "a claim without a base has a value"
    ratio = variant.value / reference
    gain = 1 / ratio if base is not None and is_cost(system.measure) else ratio
    status: Status = "elsewhere" if moved else judged(gain, system)
    reasons = [difference(gain, claim, variant, base)] if status == "differs" else []
    notes = {"variant": variant.note, "base": base.note if base else ""}
    reasons += [] if system.because is None else [system.because]
    reasons += [f"{side}: {note}" for side, note in notes.items() if note]
    return _with(
        entry,
        status,
        simulated=_rounded(gain),
        base=_rounded(reference),
        variant=_rounded(variant.value),
        reason="; ".join(reasons) or None,
    )


def judged(gain: float, system: PublishedSystem) -> Status:
    """What a gain is called beside the claim's band, rounded as it is written; within it by how much was published."""
    assert system.claim is not None
    assert system.claim.band is not None
    low, high = system.claim.band
    if not low <= _rounded(gain) <= high:
        return "differs"
    if system.chosen is not None:
        return "fitted"
    return "assumed" if system.unpublished else "reproduced"


def difference(gain: float, claim: Claim, variant: SideResult, base: SideResult | None) -> str:
    """By how much it misses the band, and the parts of the time that change otherwise than the claim would have it."""
    assert claim.band is not None
    low, high = claim.band
    edge = low if gain < low else high
    words = f"{gain / edge - 1:+.0%} from the band"
    if base is None:
        most = sorted(variant.parts.items(), key=lambda part: -part[1])[:3]
        return f"{words}; it is made of {', '.join(f'{name} {_amount(x)}' for name, x in most)}"
    wanted = {name: x / edge for name, x in base.parts.items()}
    names = sorted({*wanted, *variant.parts})
    excess = {name: variant.parts.get(name, 0.0) - wanted.get(name, 0.0) for name in names}
    sign = 1 if gain < low else -1
    parts = [
        f"{name} from {_amount(base.parts.get(name, 0.0))} to {_amount(variant.parts.get(name, 0.0))}, "
        f"where the band has {_amount(wanted.get(name, 0.0))}"
        for name in sorted(names, key=lambda name: -sign * excess[name])[:2]
        if sign * excess[name] > 0
    ]
    if variant.tokens_per_round > 1:
        needed = variant.tokens_per_round * edge / gain
        parts.append(f"{variant.tokens_per_round:.3g} tokens a round, and the band is met with {needed:.3g}")
    return f"{words}; per token {'; '.join(parts)}" if parts else words


def _amount(x: float) -> str:
    """Seconds as milliseconds or microseconds, anything larger as it is."""
    if x >= 1:
        return f"{x:,.4g}"
    return f"{x * 1e3:.3g} ms" if x >= 1e-3 else f"{x * 1e6:.3g} us"


def _rounded(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")


def _unrun(entry: Entry) -> Finding:
    system = entry.system
    if system.not_a_schedule is not None:
        return _with(entry, "not a schedule", reason=system.not_a_schedule)
    return _with(entry, "needs", reason="; ".join(f"{name}: {PRIMITIVES[name]}" for name in system.needs))


def _with(
    entry: Entry,
    status: Status,
    *,
    simulated: float | None = None,
    base: float | None = None,
    variant: float | None = None,
    reason: str | None = None,
) -> Finding:
    system, claim = entry.system, entry.system.claim
    claimed = None if claim is None else 1.0 if claim.value is not None else claim.gain
    return Finding(
        family=entry.family.name,
        system=system.name,
        title=system.title,
        year=system.year,
        source=system.source,
        status=status,
        claim=None if claim is None else claim.says,
        claimed=claimed,
        band=None if claim is None or system.variant is None else claim.band,
        simulated=simulated,
        base=base,
        variant=variant,
        metric=in_words(system.measure) if system.variant is not None else None,
        reason=reason,
        assumed=system.unpublished,
        chosen=system.chosen,
        not_modelled=system.not_modelled,
    )
