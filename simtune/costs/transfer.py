"""A profile of a device that nobody measured, from one that somebody did: the fit of the one on the data sheet of the
other.

Rates are scaled by the ratio of the data sheets, of memory, of the link, or of flops in the operator's dtype;
overheads, time per block and the residual process stay. How far off that is, `hwprofiles/transfer.yaml` says: found by
transferring to a device whose tables are known. Within one architecture it is a few per cent more than a fit of its
own; across architectures kernels differ, and 30 measured points are better than a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from simtune.costs.operators import OPERATORS
from simtune.costs.predict import Z90, typical_log_sd
from simtune.costs.profile import Facts
from simtune.errors import UsageError
from simtune.specs.base import COMPUTES_IN, Count, NonNegative, Part, Positive, Seq, Spec
from simtune.specs.hardware import Arrays, Curve, Hardware, HoldOut, Host, Interval, Operator, Provenance


class TransferError(Part):
    """|predicted / measured - 1| of one operator of the target, predicted by transfer."""

    median: NonNegative
    p90: NonNegative
    max: NonNegative | None = None
    points: Count | None = None


class Pair(Part):
    """A transfer whose target has been measured."""

    source: str
    target: str
    source_architecture: str
    target_architecture: str
    target_memory_bytes_per_s: Positive
    found_by: str
    errors: dict[str, TransferError]


class TransferErrors(Spec):
    """How far off transfers were where it could be checked."""

    KIND: ClassVar[str] = "transfer"
    pairs: Seq[Pair]


class Expected(NamedTuple):
    """What is known of the error of a transfer: the error, and the pair and operator it was seen on."""

    error: TransferError
    pair: Pair
    key: str


def known_errors() -> TransferErrors:
    """The checked transfers that come with the package."""
    return TransferErrors.from_file(Path(str(resources.files("simtune") / "hwprofiles" / "transfer.yaml")))


def transfer(profile: Hardware, facts: Facts, errors: TransferErrors | None = None) -> Hardware:
    """The profile moved to the device of `facts`, with wider intervals. Operators of dtypes that the device has no
    rate for, or over links it does not have, are left out.

    Raises UsageError where no operator is left, or the profile is itself a transfer.
    """
    if any(o.provenance.kind in ("transferred", "data-sheet") for o in profile.operators.values()):
        raise UsageError(f"{profile.name}: is itself taken from a data sheet; transfer from a measured profile")
    errors = errors or known_errors()
    operators = {}
    for key, operator in profile.operators.items():
        ratios = _ratios(operator, profile, facts)
        if ratios is not None:
            operators[key] = _moved(operator, key, profile, facts, ratios, errors)
    if not operators:
        raise UsageError(f"{facts.name}: the facts have no rate for any operator of {profile.name}")
    kept = [o.residual.array for o in operators.values() if o.residual is not None]
    arrays = {name: profile.arrays[name] for name in profile.arrays if name.rsplit(".", 1)[0] in kept}
    return Hardware(
        name=facts.name,
        engine=facts.engine,
        device=facts.device,
        links=facts.links,
        host=_host(profile, facts),
        operators=operators,
    ).with_arrays(Arrays(arrays))


def _ratios(operator: Operator, profile: Hardware, facts: Facts) -> tuple[float, float] | None:
    """(flops, bytes) per second of the target over those of the source; None where the target has no such rate."""
    terms = OPERATORS[operator.kind]
    here, there = profile.device, facts.device
    bytes_ratio = there.memory_bytes_per_s / here.memory_bytes_per_s
    if terms.link:
        name = operator.variant if operator.variant in facts.links else "intra_node"
        if name not in profile.links or name not in facts.links:
            return None
        bytes_ratio = facts.links[name].bytes_per_s / profile.links[name].bytes_per_s
    if not terms.computes:
        return 1.0, bytes_ratio
    dtype = COMPUTES_IN.get(operator.dtype, operator.dtype)
    source, target = (device.flops_per_s.get(dtype) for device in (here, there))
    return None if source is None or target is None else (target / source, bytes_ratio)


def _moved(
    operator: Operator,
    key: str,
    profile: Hardware,
    facts: Facts,
    ratios: tuple[float, float],
    errors: TransferErrors,
) -> Operator:
    flops_ratio, bytes_ratio = ratios
    base = operator.base.model_copy(
        update={
            "flops_per_s": _short(operator.base.flops_per_s * flops_ratio),
            "bytes_per_s": _short(operator.base.bytes_per_s * bytes_ratio),
        }
    )
    expected = _expected_error(key, profile, facts, errors)
    hold_out: tuple[HoldOut, ...] = ()
    if expected.error.max is not None and expected.error.points is not None:
        hold_out = (
            HoldOut(
                split=f"transfer of {expected.key} from {expected.pair.source} to {expected.pair.target}",
                train_points=operator.provenance.points or 1,
                test_points=expected.error.points,
                median=expected.error.median,
                p90=expected.error.p90,
                max=expected.error.max,
            ),
        )
    return operator.model_copy(
        update={
            "base": base,
            "curves": tuple(_stretched(c, bytes_ratio) for c in operator.curves) if _along_bytes(operator) else (),
            "interval": _wider(operator, expected.error),
            "hold_out": hold_out,
            "provenance": Provenance(
                kind="transferred",
                source=f"fit of {profile.name} ({operator.provenance.source}) on the data sheet of {facts.device.name}",
                licence=operator.provenance.licence,
                device=operator.provenance.device,
                software=operator.provenance.software,
                points=0,
                note=_note(expected, profile, facts),
            ),
        }
    )


def _along_bytes(operator: Operator) -> bool:
    """Whether its curves run over bytes moved, so that a rate scales them."""
    curve = OPERATORS[operator.kind].curve
    return curve is not None and curve.along is None


def _stretched(curve: Curve, bytes_ratio: float) -> Curve:
    """The same times for bytes_ratio times the bytes: the rate is scaled and the floor stays."""
    return curve.model_copy(update={"x": tuple(_short(x * bytes_ratio) for x in curve.x)})


def _wider(operator: Operator, error: TransferError) -> Interval:
    """The interval of the source, combined with the p90 of the transfer as if both errors were independent."""
    log_sd = typical_log_sd(operator)
    combined = float(np.hypot(log_sd, np.log1p(error.p90) / Z90))
    before = operator.interval or Interval(method="split", quantile=Z90, log_sd=log_sd)
    quantile = _short(before.quantile * combined / log_sd)
    return before.model_copy(update={"quantile": quantile, "log_sd": _short(combined), "coverage": None})


def _expected_error(key: str, profile: Hardware, facts: Facts, errors: TransferErrors) -> Expected:
    """The checked transfer that comes nearest. Raises UsageError where none was checked of this or a like operator.

    Of this very transfer or others between the same architectures, if one was checked. Else of a transfer across
    architectures: the one whose target's memory is nearest in speed, from this architecture if there is one; to
    another vendor, whose kernels are others, the worst.

    An operator that was never checked is taken to err like others of its kind, or like a GEMM; within one architecture
    like a GEMM at once, since the kernels are the same.
    """
    here, there = profile.device.architecture, facts.device.architecture
    names = (key, profile.operators[key].kind, "gemm")
    same = [p for p in errors.pairs if (p.source_architecture, p.target_architecture) == (here, there)]
    exact = [p for p in same if p.target == facts.name]
    checked = _checked(names if here == there else names[:2], (exact, same))
    if checked:
        return max(checked, key=_p90)
    across = [p for p in errors.pairs if p.source_architecture != p.target_architecture]
    from_here = [p for p in across if p.source_architecture == here]
    checked = _checked(names, (from_here, across))
    if not checked:
        raise UsageError(f"{errors.name}: no pair tells how far off a transfer of {key} is")
    if profile.device.vendor != facts.device.vendor:
        return max(checked, key=_p90)

    def distance(expected: Expected) -> tuple[float, float]:
        ratio = expected.pair.target_memory_bytes_per_s / facts.device.memory_bytes_per_s
        return abs(float(np.log(ratio))), -expected.error.p90

    return min(checked, key=distance)


def _checked(names: Sequence[str], groups: Sequence[Sequence[Pair]]) -> list[Expected]:
    """What the first group of pairs that knows the first of these operators or kinds says of it; else the next."""
    for name in names:
        for pairs in groups:
            errors = [(pair, key) for pair in pairs for key in pair.errors if key == name or key.startswith(f"{name}.")]
            if errors:
                return [Expected(pair.errors[key], pair, key) for pair, key in errors]
    return []


def _p90(expected: Expected) -> float:
    return expected.error.p90


def _note(expected: Expected, profile: Hardware, facts: Facts) -> str:
    error, pair = expected.error, expected.pair
    within = profile.device.architecture is not None and profile.device.architecture == facts.device.architecture
    where = "within one architecture" if within else "across architectures"
    if profile.device.vendor != facts.device.vendor:
        where = "to another vendor, whose kernels are others; no such transfer was checked"
    return (
        f"transferred from {profile.name} {where}: rates scaled by the ratio of the data sheets, overheads and "
        f"residual kept; the nearest transfer that was checked, of {expected.key} from {pair.source} to {pair.target}, "
        f"is {100 * error.median:.0f} % off at the median and {100 * error.p90:.0f} % at the 90th percentile "
        f"({pair.found_by})"
    )


def _host(profile: Hardware, facts: Facts) -> Host:
    note = "; ".join(filter(None, (f"as in {profile.name}", profile.host.provenance.note, facts.host_note)))
    return profile.host.model_copy(update={"provenance": profile.host.provenance.model_copy(update={"note": note})})


def _short(value: float) -> float:
    return float(f"{value:.6g}")
