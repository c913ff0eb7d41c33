"""Profile of an unmeasured device, from that of a measured one: the fits of the one on the data sheet of the other.

Rates are scaled by the ratio of the data sheets, of memory, of the link, or of flops in the operator's dtype;
overheads, time per block and the residual process stay. Where the facts state what products attain
(`attained_flops_per_s`), all flops of the dtype are slower by as much as products would exceed it.
`hwprofiles/transfer.yaml` contains the errors of this: of transfers to devices whose tables are known, from each to
each of the others. Within one architecture the error is a few per cent more than that of a fit of the target; across
architectures kernels differ, and 30 measured points are better than a transfer.

An operator that was carried over may be moved once more; the errors of both moves add up as if they were independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from simtune.costs import curve
from simtune.costs.operators import OPERATORS, Chip
from simtune.costs.predict import Z90, Predictor, typical_log_sd
from simtune.errors import UsageError
from simtune.specs.base import COMPUTES_IN, Count, Dtype, NonNegative, Part, Positive, Seq, Spec
from simtune.specs.hardware import Arrays, BaseFit, Facts, Hardware, HoldOut, Host, Interval, Operator, Provenance


class TransferError(Part):
    """|predicted / measured - 1| of one operator of the target, predicted by transfer."""

    median: NonNegative
    p90: NonNegative
    log_p90: NonNegative | None = Field(None, description="of |log(predicted / measured)|; log(1 + p90) if not known")
    max: NonNegative | None = None
    points: Count | None = None


class Pair(Part):
    """A transfer whose target has been measured."""

    source: str
    target: str
    source_architecture: str
    target_architecture: str
    source_memory_bytes_per_s: Positive
    target_memory_bytes_per_s: Positive
    found_by: str
    errors: dict[str, TransferError]


class TransferErrors(Spec):
    """Errors of transfers between devices that were both measured."""

    KIND: ClassVar[str] = "transfer"
    pairs: Seq[Pair]


class Expected(NamedTuple):
    """Expected error of a transfer: its log deviation, and the nearest checked transfer with its error and operator."""

    error: TransferError
    pair: Pair
    key: str
    log_sd: float


def known_errors() -> TransferErrors:
    """Return the checked transfers that come with the package."""
    return TransferErrors.from_file(Path(str(resources.files("simtune") / "hwprofiles" / "transfer.yaml")))


def transfer(profile: Hardware, facts: Facts, errors: TransferErrors | None = None) -> Hardware:
    """Return the profile moved to the device of `facts`, with wider intervals.

    Operators of dtypes that the device has no rate for, or over links it does not have, are left out. Raises
    UsageError if no operator is left, or some were not measured on any device.
    """
    if any(o.provenance.kind == "data-sheet" for o in profile.operators.values()):
        raise UsageError(f"{profile.name}: is itself taken from a data sheet; transfer from a measured profile")
    _check_alike(profile, facts)
    errors = errors or known_errors()
    operators, attained = {}, _attained_shares(profile, facts)
    for key, operator in profile.operators.items():
        ratios = _ratios(operator, profile, facts)
        if ratios is not None:
            ratios = ratios[0] * attained.get(_computes_in(operator), 1.0), ratios[1]
        if ratios is not None:
            operators[key] = _moved(operator, key, profile, facts, ratios, errors)
    if not operators:
        raise UsageError(f"{facts.name}: the facts have no rate for any operator of {profile.name}")
    residuals = [o.residual.array for o in operators.values() if o.residual is not None]
    arrays = {name: profile.arrays[name] for name in profile.arrays if name.rsplit(".", 1)[0] in residuals}
    return Hardware(
        name=facts.name,
        engine=facts.engine,
        device=facts.device,
        links=facts.links,
        host=_host(profile, facts),
        operators=operators,
    ).with_arrays(Arrays(arrays))


def _check_alike(profile: Hardware, facts: Facts) -> None:
    """Raise UsageError if only one of the two has a fact that the work of kernels depends on: the other device would be
    predicted by another rule than the fit's."""
    for name in ("architecture", "cache_bytes"):
        profile_has, facts_have = (getattr(spec.device, name) is not None for spec in (profile, facts))
        if profile_has and not facts_have:
            raise UsageError(f"{facts.name}: {profile.name} was fitted with device.{name}; add it to the facts")
        if facts_have and not profile_has:
            raise UsageError(
                f"{profile.name}: was fitted without device.{name}, which {facts.name} has; leave it out of the facts, "
                f"or fit {profile.name} again with it"
            )


def _ratios(operator: Operator, profile: Hardware, facts: Facts) -> tuple[float, float] | None:
    """Return (flops, bytes) per second of the target over those of the source; None if either lacks such a rate."""
    terms = OPERATORS[operator.kind]
    source_device, target_device = profile.device, facts.device
    bytes_ratio = target_device.memory_bytes_per_s / source_device.memory_bytes_per_s
    if terms.link:
        name = operator.variant if operator.variant in facts.links else "intra_node"
        if name not in profile.links or name not in facts.links:
            return None
        bytes_ratio = facts.links[name].bytes_per_s / profile.links[name].bytes_per_s
    if not terms.computes:
        return 1.0, bytes_ratio
    dtype = _computes_in(operator)
    source, target = (device.flops_per_s.get(dtype) for device in (source_device, target_device))
    return None if source is None or target is None else (target / source, bytes_ratio)


def _computes_in(operator: Operator) -> Dtype:
    return COMPUTES_IN.get(operator.dtype, operator.dtype)


PRODUCTS_ATTAINED = tuple(
    (m, n, k) for m in (32, 32768) for n, k in ((2112, 7168), (3072, 1536), (7168, 2048), (4608, 7168), (7168, 256))
)
"""Products (m, n, k) over which `attained_flops_per_s` is the flops of all by the seconds of all: those of DeepSeek-V3
in AMD's Typical Attained FLOPs (rocm-blogs, October 2026)."""


def attained_flops_per_s(products: Predictor) -> float:
    """Return the FLOP/s that products attain over `PRODUCTS_ATTAINED`."""
    m, n, k = (np.array(column, dtype=np.float64) for column in zip(*PRODUCTS_ATTAINED, strict=True))
    return float(np.sum(2 * m * n * k) / np.sum(products.seconds(m=m, n=n, k=k)))


def _attained_shares(profile: Hardware, facts: Facts) -> dict[Dtype, float]:
    """Return the share of the data sheets' ratio of flops at which products attain what the facts state, by dtype; 1 if
    they attain no more without it."""
    shares = {}
    for dtype, attained_per_s in (facts.device.attained_flops_per_s or {}).items():
        products = profile.operators.get(f"gemm.{dtype}")
        ratios = None if products is None else _ratios(products, profile, facts)
        if products is None or ratios is None:
            continue
        share = 1.0
        for _ in range(_ROUNDS):
            # Vendors time products of inputs that are in the dtype already, tables quantise them first.
            base = _scaled(products, (share * ratios[0], ratios[1])).model_copy(update={"ahead_s": 0.0})
            moved = products.model_copy(update={"base": base})
            predictor = Predictor(moved, facts.device.processors, profile.arrays, Chip.of(facts.device))
            share = min(1.0, share * attained_per_s / attained_flops_per_s(predictor))
        shares[dtype] = share
    return shares


_ROUNDS = 12
"""Rounds to a share: some of the time is not of flops, so that a round ends short of what is stated."""


def _scaled(operator: Operator, ratios: tuple[float, float]) -> BaseFit:
    """Return the base with its rates of flops and bytes scaled."""
    flops_ratio, bytes_ratio = ratios
    return operator.base.model_copy(
        update={
            "flops_per_s": _short(operator.base.flops_per_s * flops_ratio),
            "bytes_per_s": _short(operator.base.bytes_per_s * bytes_ratio),
        }
    )


def _moved(
    operator: Operator,
    key: str,
    profile: Hardware,
    facts: Facts,
    ratios: tuple[float, float],
    errors: TransferErrors,
) -> Operator:
    bytes_ratio = ratios[1]
    expected = _expected_error(key, profile, facts, errors)
    # Nothing was measured on this device: transfers between two measured ones say how far off such a fit is.
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
            "base": _scaled(operator, ratios),
            # a curve along a size cannot be scaled by a rate
            "curves": tuple(curve.stretched(c, bytes_ratio) for c in operator.curves) if _along_bytes(operator) else (),
            "interval": wider(operator, expected.log_sd),
            "hold_out": hold_out,
            "provenance": Provenance(
                kind="transferred",
                source=f"fit of {profile.name} ({operator.provenance.source}) on the data sheet of {facts.device.name}",
                licence=operator.provenance.licence,
                device=operator.provenance.device,
                software=operator.provenance.software,
                points=0,
                note=_note(expected, operator, profile, facts),
            ),
        }
    )


def _along_bytes(operator: Operator) -> bool:
    """True if the operator's curves run over bytes moved, so that a rate scales them."""
    form = OPERATORS[operator.kind].curve
    return form is not None and form.along is None


def wider(operator: Operator, log_sd: float) -> Interval:
    """Return the interval of the source with the error of moving it on top, as if both were independent."""
    before = operator.interval or Interval(method="split", quantile=Z90, log_sd=typical_log_sd(operator))
    carried = _short(float(np.hypot(before.carried_log_sd, log_sd)))
    return before.model_copy(update={"carried_log_sd": carried, "coverage": None})


def _log_sd(error: TransferError) -> float:
    return (np.log1p(error.p90) if error.log_p90 is None else error.log_p90) / Z90


_SPREAD = 0.7
"""Quantile of the errors of similar checked transfers that is taken for this one: of 0.5 to 0.8 this covers 88-93 % of
the rows of each of seven cards left out, from the transfers between the others."""

_STACKED_BYTES_PER_S = 1.9e12
"""Memory stacked beside the processor is faster than this, memory on the board slower, on all cards since 2020 with 80
GB. The two kinds of card differ in more than the rate: caches, and what kernels are tuned for."""


_FAMILY = {"sm_103": "sm_100", "sm_121": "sm_120"}
"""Architectures that run the kernels of another one, as compilers' family targets have it (sm_100f, sm_120f)."""


def _likeness(source: tuple[str | None, float], target: tuple[str | None, float]) -> int:
    """Return 0 if two devices, each (architecture, memory rate), share an architecture, 1 if the kind of memory, else
    2."""
    if source[0] is not None and _FAMILY.get(source[0], source[0]) == _FAMILY.get(target[0] or "", target[0]):
        return 0
    return 1 if (source[1] > _STACKED_BYTES_PER_S) == (target[1] > _STACKED_BYTES_PER_S) else 2


def _expected_error(key: str, profile: Hardware, facts: Facts, errors: TransferErrors) -> Expected:
    """Return the expected error of the transfer of an operator. Raises UsageError if no transfer of its kind was
    checked.

    This very transfer is taken if it was checked; else similar ones: within one architecture, across two with one kind
    of memory, or across both; of the operator, or of others of its kind, or of matrix products if nothing else was
    checked. Within one architecture the usual error there is the least that is expected. To another vendor, whose
    kernels are different, no transfer was checked: the worst is expected.
    """
    source_device, target_device = profile.device, facts.device
    names = (key, profile.operators[key].kind, "gemm")
    exact = [pair for pair in errors.pairs if (pair.source, pair.target) == (profile.name, facts.name)]
    if this := _checked((key,), exact):
        return this[0]
    likeness = _likeness(
        (source_device.architecture, source_device.memory_bytes_per_s),
        (target_device.architecture, target_device.memory_bytes_per_s),
    )
    alike = None if source_device.vendor != target_device.vendor else _of_like_pairs(names, likeness, errors)
    if alike is not None:
        return alike
    any_pair = _checked(names, errors.pairs)
    if not any_pair:
        raise UsageError(f"{errors.name}: no checked transfer of {key} or its kind, so its error is unknown")
    return max(any_pair, key=lambda expected: expected.log_sd)


def _of_like_pairs(names: Sequence[str], likeness: int, errors: TransferErrors) -> Expected | None:
    """Return the expected error by pairs of this likeness, or of the nearest one that was checked; None if none was."""
    for level in sorted(range(3), key=lambda level: (level < likeness, abs(level - likeness))):
        pairs = [pair for pair in errors.pairs if _of_pair(pair) == level]
        checked = _checked(names if level == 0 else names[:2], pairs)
        if checked:
            spread = float(np.quantile([expected.log_sd for expected in checked], _SPREAD))
            if level == 0:
                usual = [_log_sd(error) for pair in pairs for error in pair.errors.values()]
                spread = max(spread, float(np.median(usual)))
            return min(checked, key=lambda expected: abs(expected.log_sd - spread))._replace(log_sd=spread)
    return None


def _of_pair(pair: Pair) -> int:
    source = pair.source_architecture, pair.source_memory_bytes_per_s
    return _likeness(source, (pair.target_architecture, pair.target_memory_bytes_per_s))


def _checked(names: Sequence[str], pairs: Sequence[Pair]) -> list[Expected]:
    """Return the errors in these pairs of the first of these operators or kinds that any pair has."""
    for name in names:
        matches = [(pair, key) for pair in pairs for key in pair.errors if key == name or key.startswith(f"{name}.")]
        if matches:
            return [Expected(pair.errors[key], pair, key, _log_sd(pair.errors[key])) for pair, key in matches]
    return []


def _note(expected: Expected, operator: Operator, profile: Hardware, facts: Facts) -> str:
    error, pair = expected.error, expected.pair
    rates = profile.device.memory_bytes_per_s, facts.device.memory_bytes_per_s
    within = _likeness((profile.device.architecture, rates[0]), (facts.device.architecture, rates[1])) == 0
    where = "within one architecture" if within else "across architectures"
    if profile.device.vendor != facts.device.vendor:
        where = "to another vendor, whose kernels are others; no such transfer was checked"
    attained = _computes_in(operator) in (facts.device.attained_flops_per_s or {})
    scaled = "the ratio of the data sheets" + ", flops by what products attain" * attained
    return (
        f"transferred from {profile.name} {where}: rates scaled by {scaled}, overheads and "
        f"residual kept; the nearest transfer that was checked, of {expected.key} from {pair.source} to {pair.target}, "
        f"is {100 * error.median:.0f} % off at the median and {100 * error.p90:.0f} % at the 90th percentile "
        f"({pair.found_by})"
    )


def _host(profile: Hardware, facts: Facts) -> Host:
    note = "; ".join(filter(None, (f"as in {profile.name}", profile.host.provenance.note, facts.host_note)))
    return profile.host.model_copy(update={"provenance": profile.host.provenance.model_copy(update={"note": note})})


def _short(value: float) -> float:
    return float(f"{value:.6g}")
