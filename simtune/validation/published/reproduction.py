"""Running entries: both sides on the same requests, held against the claim, and why they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from simtune.errors import Infeasible, SpecError, UsageError
from simtune.sim.parallel import executor, ordered_map
from simtune.specs.systems import PRIMITIVES, SOURCED, Claim, Measure, Otherwise, PublishedSystem
from simtune.validation.published.collection import Entry
from simtune.validation.published.coverage import HARDWARE, decisive, differing, without_source
from simtune.validation.published.evidence import batched, restated, unchanged
from simtune.validation.published.findings import BatchGain, CardGain, Finding, FindingStatus, FoundInput
from simtune.validation.published.sides import Runner, SideResult, in_words, is_cost

DIGITS = 4
"""Significant digits of what is written: further ones depend on the platform's arithmetic."""

CARDS = ("a100-sxm-80g", "h100-sxm", "b200")
"""Cards on which a gain that costs decide differs."""
BATCHES = (8, 64)
"""Requests at a time with which entries of one request run as well."""


def reproduce(entries: Sequence[Entry], *, hardware: str | None = None, jobs: int | None = None) -> Iterator[Finding]:
    """Yield the findings of some systems, in their order, as they are made.

    `hardware` takes the place of each entry's own; nothing is judged then. Families run in `jobs` processes. An entry
    that cannot be run as it stands, or on that hardware, is a finding of its own, "failed" or "infeasible".
    """
    families = [list(group) for _, group in groupby(entries, key=lambda entry: entry.family.name)]
    with executor(jobs, len(families)) as pool:
        for findings in ordered_map(pool, partial(_family, hardware=hardware), families):
            yield from findings


def _family(entries: Sequence[Entry], hardware: str | None) -> list[Finding]:
    runner = Runner(hardware)
    return [_finding(entry, runner, hardware) for entry in entries]


def _finding(entry: Entry, runner: Runner, hardware: str | None) -> Finding:
    system = entry.system
    if system.variant is None or system.claim is None:
        return _unrun(entry)
    try:
        return _run(entry, runner, hardware)
    except Infeasible as error:
        return _with(entry, "failed" if hardware is None else "infeasible", reason=str(error))
    except (UsageError, SpecError) as error:
        return _with(entry, "failed", reason=str(error))


def _run(entry: Entry, runner: Runner, hardware: str | None) -> Finding:
    """Return the finding of an entry that has two sides. Raises Infeasible, UsageError or SpecError if it cannot be
    run.
    """
    system = entry.system
    sides = {
        name: runner.measure(entry.family, side, system.measure) for name, side in entry.family.sides(system).items()
    }
    variant, base = sides["variant"], sides.get("base")
    if hardware is not None:
        return _compared(entry, variant, base, "elsewhere", _inputs(system, []))
    ends = [[_gain(entry, runner, otherwise) for otherwise in setting.otherwise] for setting in system.inputs]
    inputs = _inputs(system, ends)
    gain, sides_given = _over(system, variant, base)[0], entry.family.sides(system)
    setting = restated(gain, sides_given)
    status = judged(gain, system, inputs, setting)
    cards: tuple[CardGain, ...] = ()
    uncovered: tuple[str, ...] = ()
    if status == "reproduced":
        cards = on_cards(entry)
        status = "counts" if unchanged(cards) else "reproduced"
        uncovered = _uncovered(entry, runner, gain, same_on_cards=status == "counts")
        status = "assumed" if uncovered else status
    probed = [(probe.what, _gain(entry, runner, probe, probe.measure)) for probe in system.probes]
    reasons = [f"{probe_name} {_rounded(gain):g}" for probe_name, gain in probed] if status == "differs" else []
    comparison = _compared(entry, variant, base, status, inputs, reasons)
    return comparison.model_copy(
        update={
            "cards": cards,
            "batches": in_batches(entry, sides_given, runner),
            "restates": setting,
            "uncovered": uncovered,
        }
    )


def _uncovered(entry: Entry, runner: Runner, gain: float, *, same_on_cards: bool) -> tuple[str, ...]:
    """Return the settings of an entry that no input covers and that are not neutral; devices are if the gain is the
    same on all cards.
    """
    paths = without_source(entry.family, entry.system)
    unequal = differing(entry.family, entry.system)
    if same_on_cards:
        paths = tuple(path for path in paths if path in unequal or path.rpartition(".")[2] != HARDWARE)
    gain_of, inside = partial(_gain_of, entry, runner=runner), partial(_inside, system=entry.system)
    equal = [path for path in paths if path not in unequal]
    neutral = {*equal} - {*decisive(equal, entry.family.sides(entry.system), gain, gain_of, inside)}
    return tuple(path for path in paths if path not in neutral)


def on_cards(entry: Entry) -> tuple[CardGain, ...]:
    """Return the gains of an entry on three cards; a card on which a side does not fit is left out."""
    gains = ((card, _gain_of(entry, entry.family.sides(entry.system), Runner(card))) for card in CARDS)
    return tuple(CardGain(hardware=card, gain=_rounded(gain)) for card, gain in gains if gain > 0)


def in_batches(entry: Entry, sides: Mapping[str, Mapping[str, Any]], runner: Runner) -> tuple[BatchGain, ...]:
    """Return the gains of an entry of one request at a time with more of them; nothing for other entries."""
    gains = []
    for requests in BATCHES:
        together = {name: batched(side, requests) for name, side in sides.items()}
        if "base" not in together or any(side is None for side in together.values()):
            return ()
        try:
            gain = _gain_of(entry, {name: side for name, side in together.items() if side is not None}, runner)
        except (UsageError, SpecError):
            gain = 0.0
        gains.append(BatchGain(requests=requests, gain=_rounded(gain) or None))
    return tuple(gains)


def _gain(entry: Entry, runner: Runner, otherwise: Otherwise, measure: Measure | None = None) -> float:
    """Return the gain of the variant over the base, with something otherwise; 0, which is in no band, if a side is
    infeasible.
    """
    return _gain_of(entry, entry.family.varied(entry.system, otherwise), runner, measure)


def _gain_of(
    entry: Entry, sides: Mapping[str, Mapping[str, Any]], runner: Runner, measure: Measure | None = None
) -> float:
    """Return the gain between two sides; 0, which is in no band, if a side is infeasible."""
    measured_by = measure or entry.system.measure
    try:
        results = {name: runner.measure(entry.family, side, measured_by) for name, side in sides.items()}
    except Infeasible:
        return 0.0
    return _over(entry.system, results["variant"], results.get("base"))[0]


def _over(system: PublishedSystem, variant: SideResult, base: SideResult | None) -> tuple[float, float]:
    """The gain, and what the variant is held against: the base, or the claimed number."""
    assert system.claim is not None
    reference = base.value if base is not None else system.claim.value
    assert reference is not None, "a claim without a base has a value"
    ratio = variant.value / reference
    gain = 1 / ratio if base is not None and is_cost(system.measure) else ratio
    gain /= _by_formula(system, variant, base)
    if not math.isfinite(gain):
        raise UsageError(f"{system.name}: {variant.value:g} over {reference:g} is no gain; check what its sides serve")
    return gain, reference


def _by_formula(system: PublishedSystem, variant: SideResult, base: SideResult | None) -> float:
    """Return the gain that the claim's formula gives for these requests; 1 if the claim has no formula. Raises
    UsageError if the formula does not hold for such requests.
    """
    assert system.claim is not None
    formula = system.claim.formula
    if formula is None or base is None:
        return 1.0
    if formula not in base.by_formula or formula not in variant.by_formula:
        raise UsageError(f"{system.name}: {formula} says nothing of these requests: more come than are served")
    of_base = base.by_formula[formula]
    return of_base if formula == "padded_tokens" else of_base / variant.by_formula[formula]


def _inputs(system: PublishedSystem, ends: Sequence[Sequence[float]]) -> tuple[FoundInput, ...]:
    """Return all inputs; `ends` are the gains of each input that is varied, empty if nothing is judged."""
    gains = ends or [()] * len(system.inputs)
    varied = [
        FoundInput(
            what=item.what,
            source=item.source,
            where=item.where,
            gains=tuple(_rounded(gain) for gain in at_ends),
            decides=item.source == "second-hand" or not all(_inside(gain, system) for gain in at_ends),
        )
        for item, at_ends in zip(system.inputs, gains, strict=True)
    ]
    guesses = [
        FoundInput(what=guess, source="assumed", where=None, gains=(), decides=True) for guess in system.unpublished
    ]
    return (*varied, *guesses)


def _inside(gain: float, system: PublishedSystem) -> bool:
    """True if a gain, rounded as it is written, is in the band of the claim."""
    assert system.claim is not None
    assert system.claim.band is not None
    low, high = system.claim.band
    return low <= _rounded(gain) <= high


def _compared(
    entry: Entry,
    variant: SideResult,
    base: SideResult | None,
    status: FindingStatus,
    inputs: Sequence[FoundInput],
    probed: Sequence[str] = (),
) -> Finding:
    """The two sides, held against the claim unless they were moved to other hardware."""
    system, claim = entry.system, entry.system.claim
    assert claim is not None
    gain, reference = _over(system, variant, base)
    scale = _by_formula(system, variant, base)
    reasons = [difference(gain, claim, variant, base, scale)] if status == "differs" else []
    notes = {"variant": variant.note, "base": base.note if base else ""}
    reasons += [*probed, *([] if system.because is None else [system.because])]
    reasons += [f"{side}: {note}" for side, note in notes.items() if note]
    return _with(
        entry,
        status,
        inputs=inputs,
        simulated=_rounded(gain),
        base=_rounded(reference),
        variant=_rounded(variant.value),
        reason="; ".join(reasons) or None,
    )


def judged(
    gain: float, system: PublishedSystem, inputs: Sequence[FoundInput], setting: str | None = None
) -> FindingStatus:
    """Return the status of a gain: outside the claim's band, or inside it by chosen or restated, by assumed or only by
    published inputs, or in a band that says nothing. `setting` is the one that the gain restates.

    Without an input that has a source nothing covers the settings of the sides: they are assumed.
    """
    if not _inside(gain, system):
        return "differs"
    if system.chosen is not None or setting is not None:
        return "fitted"
    if met_by_no_effect(system):
        return "weak"
    sourced = any(item.source in SOURCED for item in inputs)
    return "reproduced" if sourced and not any(item.decides for item in inputs) else "assumed"


def met_by_no_effect(system: PublishedSystem) -> bool:
    """True if the band is one of a gain, not of a number over a published one, and contains 1."""
    claim = system.claim
    if claim is None or claim.band is None or claim.gain is None:
        return False
    low, high = claim.band
    return low <= 1 <= high


def difference(gain: float, claim: Claim, variant: SideResult, base: SideResult | None, by_formula: float = 1.0) -> str:
    """State by how much a gain misses the band, and the parts of the time that change otherwise than the claim implies.

    The band is of the gain over what a formula makes of it, where the claim has one.
    """
    assert claim.band is not None
    low, high = claim.band
    edge = low if gain < low else high
    words = f"{gain / edge - 1:+.0%} from the band"
    if base is None:
        most = sorted(variant.parts.items(), key=lambda part: -part[1])[:3]
        return f"{words}; it is made of {', '.join(f'{name} {_amount(x)}' for name, x in most)}"
    by_claim = {name: x / (edge * by_formula) for name, x in base.parts.items()}
    names = sorted({*by_claim, *variant.parts})
    excess = {name: variant.parts.get(name, 0.0) - by_claim.get(name, 0.0) for name in names}
    sign = 1 if gain < low else -1
    parts = [
        f"{name} from {_amount(base.parts.get(name, 0.0))} to {_amount(variant.parts.get(name, 0.0))}, "
        f"where the band has {_amount(by_claim.get(name, 0.0))}"
        for name in sorted(names, key=lambda name: -sign * excess[name])[:2]
        if sign * excess[name] > 0
    ]
    if variant.tokens_per_round > 1:
        tokens_needed = variant.tokens_per_round * edge / gain
        parts.append(f"{variant.tokens_per_round:.3g} tokens a round, and the band is met with {tokens_needed:.3g}")
    # No single part explains the difference: compare the totals.
    if not parts:
        ends = (_amount(x) for x in (base.value, variant.value, base.value / (edge * by_formula)))
        parts = ["{} from {} to {}, where the band has {}".format(variant.unit, *ends)]
        return f"{words}; {parts[0]}"
    return f"{words}; per {variant.per} {'; '.join(parts)}"


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
    status: FindingStatus,
    *,
    inputs: Sequence[FoundInput] = (),
    simulated: float | None = None,
    base: float | None = None,
    variant: float | None = None,
    reason: str | None = None,
) -> Finding:
    system, claim = entry.system, entry.system.claim
    relative = claim is not None and (claim.value is not None or claim.formula is not None)
    claimed = None if claim is None else 1.0 if relative else claim.gain
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
        inputs=tuple(inputs),
        assumed=tuple(item.what for item in inputs if item.decides),
        chosen=system.chosen,
        not_modelled=system.not_modelled,
    )
