"""Sources of the time of steps: which part of it was measured, and how far off the rest may be.

A step is evaluated once more with predictors that record their calls. The share of the step's time that a call
stands for is found by making its answer a little longer: whatever a step model adds, subtracts or takes the maximum of,
the share is what the step gets longer by. A difference of two predictions, as a chunk after a cached past is the
difference of two whole prompts, was never measured, and counts as extrapolated whatever the two are. So does a time
that is multiplied by a ratio of predictions of an unmeasured operator, as the verification of drafts is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from simtune.arrays import Array, Mask
from simtune.costs.encoder import ENCODER, EncoderCosts, Work
from simtune.costs.iteration import HOST, StepModel, StepWork
from simtune.costs.operators import operator_key
from simtune.costs.predict import OUTSIDE, Basis, Predictor, Profile
from simtune.specs.hardware import Hardware, OperatorKind
from simtune.specs.model import Model
from simtune.specs.pool import Pool

_LONGER = 2.0**-20
"""Share by which an answer is made longer: exact in floating point, and far above its rounding."""

_NOTHING = 1e-5
"""A smaller share of a part of a step is rounding, or the part of a ratio that is not linear."""


class WeightedStep(NamedTuple):
    """A step that stands for `weight` seconds (or any unit) of a run."""

    weight: float
    work: StepWork
    width: int = 1
    """Query tokens of each decode: more than one if drafts are verified."""


@dataclass
class KindBasis:
    """Seconds by `Basis` of one kind in a step's breakdown, and the typical log error of its time."""

    seconds: Array = field(default_factory=lambda: np.zeros(len(Basis)))
    other_releases: dict[str, float] = field(default_factory=dict)
    """Seconds of kernels of another release than the one that runs, by software."""
    _weighted_sd: float = 0.0

    def add(self, seconds: float, basis: int, log_sd: float, other_release: str | None = None) -> None:
        """Add `seconds` of a call to its basis."""
        self.seconds[basis] += seconds
        self._weighted_sd += seconds * log_sd
        if other_release is not None:
            self.other_releases[other_release] = self.other_releases.get(other_release, 0.0) + seconds

    def shrink(self, share: float) -> None:
        """Multiply all seconds by a share, as another kind has the rest."""
        self.seconds *= share
        self._weighted_sd *= share
        self.other_releases = {release: share * seconds for release, seconds in self.other_releases.items()}

    @property
    def log_sd(self) -> float:
        """Log error of the time of all calls together: their errors have one cause, so they do not average out."""
        return self._weighted_sd / float(self.seconds.sum())


class AskedCall(NamedTuple):
    """Shape with which a step calls an operator."""

    kind: str
    """The call's kind in the breakdown of the step."""
    operator: str
    """The operator's key in a hardware profile."""
    shape: dict[str, float]
    seconds: float
    """Time that the call stands for, in the unit of the steps' weights."""
    basis: Basis
    log_sd: float
    other_release: str | None = None
    """Software whose kernels were timed, if it is another release of the engine that runs."""


class _OperatorCall(NamedTuple):
    predictor: _Noting
    shape: Mapping[str, ArrayLike]
    seconds: Array


class _Notes:
    """Calls recorded since the last step began; the answer numbered `longer` is made a little longer."""

    def __init__(self) -> None:
        self.calls: list[_OperatorCall] = []
        self.longer: int | None = None

    def begin(self, longer: int | None = None) -> None:
        self.calls, self.longer = [], longer


class _Noting(Predictor):
    """A predictor that records its calls, and the key by which it is found in a profile."""

    def __init__(self, predictor: Predictor, hardware: Hardware, notes: _Notes) -> None:
        super().__init__(predictor.operator, hardware.device.processors, hardware.arrays, predictor.chip)
        self._notes = notes
        self._answers: dict[tuple[tuple[str, tuple[int, ...], bytes], ...], Array] = {}
        """Seconds by shape. Steps of one graph ask for the same, and so does each step for every call made longer."""

    @property
    def estimates(self) -> bool:
        """True if the operator of this engine was not measured on this device."""
        operator = self.operator
        return operator.other_engine is not None or operator.provenance.kind not in ("measured", "published-tables")

    def seconds(self, **shape: ArrayLike) -> Array:
        """See `Predictor.seconds`."""
        notes, columns = self._notes, {name: np.asarray(x, dtype=np.float64) for name, x in shape.items()}
        key = tuple((name, x.shape, x.tobytes()) for name, x in columns.items())
        if key not in self._answers:
            self._answers[key] = super().seconds(**shape)
        seconds = self._answers[key].copy()
        if notes.longer == len(notes.calls):
            seconds = seconds * (1 + _LONGER)
        notes.calls.append(_OperatorCall(self, shape, seconds))
        return seconds


class _NotingProfile(Profile):
    """A profile of recording predictors, one for each operator."""

    def __init__(self, hardware: Hardware, notes: _Notes) -> None:
        super().__init__(hardware, in_step=True)
        self._notes = notes
        self._made: dict[str, _Noting] = {}

    def predictor(
        self, kind: OperatorKind, dtype: str, *, kv_dtype: str | None = None, variant: str | None = None
    ) -> Predictor:
        """See `Profile.predictor`."""
        key = operator_key(kind, dtype, kv_dtype, variant)
        if key not in self._made:
            plain = super().predictor(kind, dtype, kv_dtype=kv_dtype, variant=variant)
            self._made[key] = _Noting(plain, self.hardware, self._notes)
        return self._made[key]


class _TimeShare(NamedTuple):
    """Seconds of a step's part that the calls of one operator stand for."""

    kind: str
    call: _OperatorCall
    seconds: Array
    differs: Mask
    """True where the seconds are the rest of a longer call after a shorter one was subtracted, or are scaled by a
    ratio."""


class StepBasis:
    """Sources of the time of the steps of one model on the devices of one pool.

    Raises Infeasible as `StepModel` does.
    """

    def __init__(self, model: Model, hardware: Hardware, pool: Pool) -> None:
        self._notes = _Notes()
        self._model = StepModel(model, hardware, pool, profile=_NotingProfile(hardware, self._notes))
        drafts = pool.speculation
        self._passes = 0 if drafts is None else drafts.drafter.passes(drafts.scheme.shape.depth)
        self._slopes: dict[tuple[int, ...], list[dict[str, float]]] = {}
        self._kernels: list[float] = []
        """Seconds of the kernels and collectives of each step."""

    def of(self, steps: Iterable[WeightedStep], *, errors: bool = True) -> dict[str, KindBasis]:
        """Return seconds and log errors by kind (`simtune.costs.iteration.REDRAWN_KINDS`); kinds without time are left
        out. Without `errors` all of these are 0: they take longer than the rest."""
        by_kind: dict[str, KindBasis] = defaultdict(KindBasis)
        steps, host = [*steps], self._model.host
        for call in self.calls(steps, errors=errors):
            by_kind[call.kind].add(call.seconds, call.basis, call.log_sd, call.other_release)
        timed = zip(steps, self._kernels, strict=True)
        beyond = sum(step.weight * self._share_beyond(step, kernels) for step, kernels in timed)
        if beyond > 0:
            by_kind[HOST].add(beyond, host.basis, host.log_sd)
        return dict(by_kind)

    def _share_beyond(self, step: WeightedStep, kernels: float) -> float:
        """Return the share of a step that its kernels do not account for."""
        beyond = self._beyond_s(step, kernels)
        return beyond / (kernels + beyond)

    def _beyond_s(self, step: WeightedStep, kernels: float) -> float:
        """Return the seconds of a step that its kernels do not account for: of the host, which drafts take too."""
        passes = self._passes if step.width > 1 else 0
        return self._model.beyond_kernels_s(kernels, step.work) + self._model.host.drafting_s(
            step.work.num_decodes, passes
        )

    def calls(self, steps: Iterable[WeightedStep], *, errors: bool = True) -> Iterator[AskedCall]:
        """Yield every shape that the steps ask an operator for, with the time that it stands for. Without `errors` no
        log error is computed; it is 0."""
        self._kernels.clear()
        by_predictor: dict[_Noting, list[tuple[float, _TimeShare]]] = defaultdict(list)
        for step in steps:
            shares, total = self._shares(step)
            for share in shares:
                by_predictor[share.call.predictor].append((step.weight / total, share))
        for predictor, of_it in by_predictor.items():
            yield from _asked(predictor, of_it, errors=errors)

    def _shares(self, step: WeightedStep) -> tuple[list[_TimeShare], float]:
        """Return the share of each call of a step, and the seconds of the step, the host's among them."""
        self._notes.begin()
        by_kind = self._seconds(step)
        self._kernels.append(sum(by_kind.values()))
        calls = self._notes.calls
        # Prompts alone are bound by the longest, several by the work of all.
        signature = (step.width, len(step.work.chunks) > 1, *(id(call.predictor) for call in calls))
        if signature not in self._slopes:
            self._slopes[signature] = self._find_slopes(step, by_kind, calls)
        shares = _of_operators(calls, self._slopes[signature])
        answered = {kind: sum(float(share.seconds.sum()) for share in shares if share.kind == kind) for kind in by_kind}
        # What no call accounts for, such as an overhead, is divided among the calls of its kind.
        shares = [
            share._replace(seconds=share.seconds * (by_kind[share.kind] / answered[share.kind])) for share in shares
        ]
        kernels = sum(seconds for kind, seconds in by_kind.items() if answered[kind])
        return shares, kernels + self._beyond_s(step, kernels)

    def _find_slopes(
        self, step: WeightedStep, whole: Mapping[str, float], calls: Sequence[_OperatorCall]
    ) -> list[dict[str, float]]:
        """Return for each call, by kind, the seconds that the kind gets longer by for one second more of the call."""
        of_calls = []
        for i, call in enumerate(calls):
            self._notes.begin(longer=i)
            longer = self._seconds(step)
            second = _LONGER * float(np.sum(call.seconds))
            slopes = {kind: (longer[kind] - whole[kind]) / second for kind in whole}
            of_calls.append(
                {
                    kind: slope
                    for kind, slope in slopes.items()
                    if abs(slope * np.sum(call.seconds)) > _NOTHING * whole[kind]
                }
            )
        return of_calls

    def _seconds(self, step: WeightedStep) -> dict[str, float]:
        """Seconds by kind, verification of drafts included; the time of drafting is not in it."""
        work, model = step.work, self._model
        if step.width == 1 or not work.num_decodes:
            return model.breakdown(work)
        tokens = work.num_tokens + (step.width - 1) * work.num_decodes
        samples = max(1, work.num_samples + (step.width - 1) * work.num_decodes)
        mean = np.array([work.context_tokens / work.num_decodes])
        parts = {
            kind: float(seconds[0]) for kind, seconds in model.linear(np.array([tokens]), bool(work.chunks)).items()
        }
        if model.sharing is not None and not work.chunks:
            decodes = float(work.num_decodes)
            parts["moe"] -= float(model.sharing.saved_s(np.array([tokens * 1.0]), np.array([decodes]))[0])
        parts |= {kind: float(seconds[0]) for kind, seconds in model.head(np.array([samples])).items()}
        parts["decode_attention"] = float(model.decode(work.num_decodes, mean, step.width)[0])
        if work.chunks:
            parts["prefill_attention"] = model.breakdown(StepWork(chunks=work.chunks))["prefill_attention"]
        return parts


def _of_operators(calls: Sequence[_OperatorCall], slopes: Sequence[Mapping[str, float]]) -> list[_TimeShare]:
    """Return the shares of the calls of a step, those of each operator together."""
    by_operator: dict[tuple[str, int], list[tuple[float, _OperatorCall]]] = defaultdict(list)
    for call, by_kind in zip(calls, slopes, strict=True):
        work = call.predictor.works(**call.shape)
        # a call without work only subtracts an overhead
        if work.any():
            working = call._replace(seconds=np.where(work, call.seconds, 0.0))
            for kind, slope in by_kind.items():
                by_operator[kind, id(call.predictor)].append((slope, working))
    net = {(kind, number): _net(kind, of_it) for (kind, number), of_it in by_operator.items()}
    ratios = {key[0] for key, shares in net.items() if not shares and by_operator[key][0][1].predictor.estimates}
    return [
        share._replace(differs=np.ones_like(share.differs)) if share.kind in ratios else share
        for shares in net.values()
        for share in shares
    ]


def _net(kind: str, calls: Sequence[tuple[float, _OperatorCall]]) -> list[_TimeShare]:
    """Return the net shares of calls of one operator that are added and subtracted: the longer ones stand for the rest.

    Calls for equally many chunks belong to the same chunks, from each of which something is subtracted or not.
    """
    alike = len({call.seconds.size for _, call in calls}) == 1
    combine = np.ravel if alike else np.sum
    added = sum(np.asarray(combine(slope * call.seconds)) for slope, call in calls if slope > 0)
    subtracted = sum(np.asarray(combine(-slope * call.seconds)) for slope, call in calls if slope < 0)
    added, subtracted = np.asarray(added), np.asarray(subtracted)
    remaining = 1 - subtracted / np.where(added > 0, added, 1.0)
    remaining[remaining < _NOTHING] = 0.0
    if not remaining.any():
        return []
    return [
        _TimeShare(
            kind, call, remaining * slope * np.ravel(call.seconds), np.broadcast_to(subtracted > 0, call.seconds.size)
        )
        for slope, call in calls
        if slope > 0
    ]


def encoder_calls(
    model: Model, hardware: Hardware, pool: Pool, batches: Iterable[Sequence[Work]], *, errors: bool = True
) -> list[AskedCall]:
    """Return the shapes that encoders of media ask operators for, given the items of some steps; each stands for the
    seconds of one call, as nearly all are made once in each layer."""
    notes = _Notes()
    costs = EncoderCosts(model, hardware, pool, profile=_NotingProfile(hardware, notes))
    for batch in batches:
        costs.seconds(batch)
    by_predictor: dict[_Noting, list[tuple[float, _TimeShare]]] = defaultdict(list)
    for noted in notes.calls:
        seconds = np.atleast_1d(noted.seconds)
        call = noted._replace(seconds=seconds)
        share = _TimeShare(ENCODER, call, seconds, np.zeros(seconds.shape, dtype=bool))
        by_predictor[call.predictor].append((1.0, share))
    return [call for predictor, of_it in by_predictor.items() for call in _asked(predictor, of_it, errors=errors)]


def _asked(predictor: _Noting, shares: Sequence[tuple[float, _TimeShare]], *, errors: bool) -> Iterator[AskedCall]:
    """Yield the calls of one operator; all shapes are predicted in one call, since each call is slow."""
    flat = [{n: np.broadcast_to(x, s.call.seconds.shape).ravel() for n, x in s.call.shape.items()} for _, s in shares]
    shape = {name: np.concatenate([columns[name] for columns in flat]) for name in flat[0]}
    basis = predictor.basis(**shape)
    log_sd = predictor.log_sd(**shape) if errors else np.zeros(basis.shape)
    operator = predictor.operator
    key = operator_key(operator.kind, operator.dtype, operator.kv_dtype, operator.variant)
    at = -1
    for weight, share in shares:
        for seconds, differs in zip(weight * share.seconds, share.differs, strict=True):
            at += 1
            rests_on, sd = Basis(int(basis[at])), float(log_sd[at])
            if seconds <= 0:
                continue
            if differs and rests_on < Basis.EXTRAPOLATED:
                rests_on, sd = Basis.EXTRAPOLATED, OUTSIDE * sd
            point = {name: float(column[at]) for name, column in shape.items()}
            yield AskedCall(share.kind, key, point, float(seconds), rests_on, sd, operator.other_release)
