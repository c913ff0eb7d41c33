"""Hardware profile: facts of a device, and for each operator a fitted time model with its error."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from simtune.errors import Problem, SpecError
from simtune.specs import yamlfile
from simtune.specs.base import (
    Count,
    Dtype,
    ErrorAt,
    GpuCount,
    Name,
    NonNegative,
    Part,
    Positive,
    Seq,
    Share,
    Spec,
    SpecCheck,
)
from simtune.specs.input_files import read_arrays, read_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

OperatorKind = Literal[
    "gemm",
    "quantise",
    "prefill_attention",
    "decode_attention",
    "mixed_attention",
    "tree_attention",
    "encoder_attention",
    "mla_prefill",
    "mla_decode",
    "mla_products",
    "mla_context_block",
    "mla_decode_block",
    "dsa_context_block",
    "dsa_decode_block",
    "sparse_prefill",
    "sparse_decode",
    "sparse_context_block",
    "sparse_decode_block",
    "linear_prefill",
    "linear_decode",
    "delta_prefill",
    "delta_decode",
    "kda_prefill",
    "kda_decode",
    "conv_prefill",
    "conv_decode",
    "moe",
    "elementwise",
    "hyper_pre",
    "hyper_post",
    "sampling",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "moe_dispatch",
    "moe_combine",
    "send_recv",
    "kv_transfer",
]


Range = Annotated[Seq[float], Field(min_length=2, max_length=2, strict=False)]


class Provenance(Part):
    """Source of numbers."""

    kind: Literal["measured", "published-tables", "transferred", "data-sheet", "assumed"] = Field(
        description="transferred: fitted on another device and moved to this one by the data sheets of the two"
    )
    source: str = Field(description="measurer and method; table names and versions")
    licence: str | None = None
    device: str | None = None
    software: str | None = None
    points: int | None = Field(None, ge=0, description="rows that the fit used")
    note: str | None = None


class DevicePower(Part):
    """Power of a device, in watts."""

    tdp_w: Positive = Field(description="rated maximum of the board")
    idle_w: NonNegative = Field(description="power while no step runs and the model is loaded")
    source: str

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.idle_w > self.tdp_w:
            raise ErrorAt(f"{self.idle_w:g} W is more than the rated maximum, {self.tdp_w:g} W", "idle_w")
        return self


class Device(Part):
    """Data-sheet facts of one device and its price."""

    name: str
    vendor: str
    memory_bytes: Positive = Field(description="memory that an engine can see")
    memory_bytes_per_s: Positive
    architecture: str | None = Field(
        None, description="architecture of its kernels, as compilers name it: sm_90, gfx942"
    )
    processors: GpuCount = Field(description="streaming multiprocessors, or 1 for a CPU")
    cache_bytes: Positive | None = Field(None, description="last cache that all processors share")
    flops_per_s: dict[Dtype, Positive] = Field(description="dense peak in FLOP/s, by dtype")
    attained_flops_per_s: dict[Dtype, Positive] | None = Field(
        None,
        description="FLOP/s that large matrix products of models attain, by dtype, if they attain less than on other "
        "devices with such peaks: a profile that is carried over keeps to them",
    )
    devices_per_node: GpuCount = 8
    power: DevicePower | None = Field(None, description="needed for energy; left out if it is not known")
    price_per_hour_usd: Positive | None = None
    price_source: str | None = None
    source: str


class Link(Part):
    """A path between devices: one direction, per device."""

    bytes_per_s: Positive
    latency_s: NonNegative
    source: str
    stated: Seq[Literal["bytes_per_s", "latency_s"]] | None = Field(
        None,
        description="values that outrank measured tables of collectives: large messages then take bytes_per_s; `--set` "
        "of a link marks what it sets",
    )


class BaseFit(Part):
    """t = overhead + (a^p + b^p)^(1/p) + block * N + ahead * V, with a = flops / flops_per_s, b = bytes / bytes_per_s.

    Flops, bytes, N and V of each operator kind are those of `simtune.costs.operators`.
    """

    flops_per_s: Positive
    bytes_per_s: Positive
    overhead_s: Positive
    block_s: Positive
    overlap_p: Annotated[float, Field(ge=1, le=1000)]
    ahead_s: NonNegative = Field(
        0.0, description="seconds per value for a kernel before the product, such as one that quantises its inputs"
    )


class HoldOut(Part):
    """|predicted/measured - 1| on points the fit did not see."""

    split: str = Field(description="how the points were held back")
    train_points: Count
    test_points: Count
    median: NonNegative
    p90: NonNegative
    max: NonNegative
    coverage: Share | None = Field(None, description="share of the test points inside their 90 % interval")


class Residual(Part):
    """Gaussian process on log(measured / base): Matern-3/2 with one length per feature, and noise.

    Features are those of `simtune.costs.residual`, standardised by `centre` and `spread`. Its points, a user's own or
    centres of other people's, and their weights are the arrays `<array>.points` and `<array>.weights` beside the
    profile.
    """

    features: Annotated[Seq[str], Field(min_length=1)]
    centre: Seq[float]
    spread: Seq[Positive]
    length: Seq[Positive] = Field(description="in standardised units: the farther from data, the more the base counts")
    signal: Positive = Field(description="standard deviation of the log residual far from data")
    noise: Positive = Field(description="standard deviation of the log time of one point")
    clamp: Range = Field(description="smallest and largest correction, as a logarithm")
    points: Count
    array: str

    @model_validator(mode="after")
    def _one_per_feature(self) -> Self:
        if not len(self.features) == len(self.centre) == len(self.spread) == len(self.length):
            raise ValueError("features, centre, spread and length must be of one size")
        return self


class Curve(Part):
    """Seconds along one line of shapes: straight in log-log between knots.

    Beyond the last knot the time is linear, with the slope of the last two; before the first it is constant.
    """

    at: dict[str, float] = Field(default_factory=dict, description="shape parameters that are the same along the curve")
    x: Annotated[Seq[Positive], Field(min_length=2)] = Field(description="bytes moved, or rows of a matrix product")
    seconds: Annotated[Seq[Positive], Field(min_length=2)]

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if len(self.x) != len(self.seconds):
            raise ValueError("x and seconds must be of one size")
        if any(a >= b for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ValueError("x must ascend")
        return self


class Interval(Part):
    """Error interval of a prediction: with 90 % confidence the log error is within quantile x sd.

    The sd is that of the residual process at the shape in question; without a residual it is `log_sd`.
    """

    method: Literal["cross-validation", "leave-one-out", "split"] = Field(
        description="source of the calibration: parts of the points, or each point, predicted from the others; or rows "
        "held back"
    )
    quantile: Positive = Field(description="90 % quantile of |log(measured / predicted)| / sd")
    log_sd: Positive = Field(description="standard deviation of the log error, typical inside the measured box")
    outside: dict[str, Positive] = Field(
        default_factory=dict,
        description="quantile of the log error over sd * (1 + octaves beyond)^0.75, by shape parameter, for shapes "
        "above the measured range; from fits without its largest values",
    )
    carried_log_sd: NonNegative = Field(
        0.0, description="log error of moving an operator from another device, besides that of its fit"
    )
    coverage: Share | None = Field(None, description="share of held-back rows inside their 90 % interval")


class Operator(Part):
    """A fitted operator: kind and dtype, base parameters, curves and residual on top of them, measured box, error
    interval, provenance.
    """

    kind: OperatorKind
    dtype: Dtype
    kv_dtype: Dtype | None = None
    variant: str | None = Field(None, description="which member of a family: norm, activation, rope, add")
    base: BaseFit
    curves: Seq[Curve] = ()
    residual: Residual | None = None
    interval: Interval | None = None
    uneven_s: Positive | None = Field(
        None,
        description="for decode attention that is not split along the context: additional seconds for each token by "
        "which the longest context of a batch exceeds the mean",
    )
    box: dict[str, Range] = Field(description="smallest and largest measured value of each shape parameter")
    joint_box: dict[str, Range] = Field(
        default_factory=dict,
        description="the same of each feature of a residual, the product or ratio of several parameters",
    )
    families: Seq[dict[str, float]] = Field(
        (), description="combinations of these parameters that were measured, if they are few; others are extrapolated"
    )
    hold_out: Seq[HoldOut]
    scales: Literal["known"] | None = Field(
        None,
        description="for products timed with the quantising of their inputs: by known scales; by computed scales "
        "unless given",
    )
    launch_s: Positive | None = Field(
        None,
        description="for a block of kernels whose shorter rows timed their launches: host seconds of launching the "
        "kernels of one call without a CUDA graph",
    )
    other_engine: str | None = Field(
        None, description="software whose kernels were timed, if they are not those of the engine that runs them here"
    )
    other_release: str | None = Field(
        None,
        description="software whose kernels were timed, if it is another release of the engine that runs them here",
    )
    provenance: Provenance

    @property
    def origin(self) -> str:
        """The kind of its provenance, or other-engine if its times are of another engine's kernels."""
        return self.provenance.kind if self.other_engine is None else "other-engine"


class Host(Part):
    """Time the engine's host side needs per step: fixed, and per running sequence."""

    step_s: NonNegative
    per_sequence_s: NonNegative
    provenance: Provenance


class Correction(Part):
    """step time = scale * (kernels and collectives) + offset_s, for one kind of step; the host is in the offset.

    Errors are |predicted/measured - 1| of the profile before the correction, and of each half of the steps by a
    correction fitted to the other half.
    """

    scale: Positive
    offset_s: NonNegative
    steps: Count = Field(description="number of measured steps that were fitted")
    median_before: NonNegative
    p90_before: NonNegative
    median_after: NonNegative
    p90_after: NonNegative


class Calibration(Part):
    """Correction by an engine's own log of the steps of one model, cut one way. Host times do not count for the steps
    that it corrects.
    """

    model: str
    tp: GpuCount
    pp: GpuCount
    source: str = Field(description="source of the steps: the log")
    decode: Correction | None = Field(None, description="correction of steps with decodes only")
    prefill: Correction | None = Field(
        None, description="correction of steps with prompt tokens, with or without decodes"
    )

    @model_validator(mode="after")
    def _corrects(self) -> Self:
        if self.decode is None and self.prefill is None:
            raise ValueError("needs decode or prefill")
        return self


class ValidatedLoad(Part):
    """Errors of the means of one load: predicted / measured - 1."""

    load: str
    rate_rps: Positive | None = None
    requests: Count
    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


class ValidationNote(Part):
    """A model that a real engine ran on the device, predicted with this profile."""

    engine: str
    version: str | None = None
    date: str
    model: str
    plan: str
    clock: str = Field(description="wall, or cpu: the engine's own processor time")
    within: bool = Field(description="share of the tolerance, or of twice the repeats' noise")
    tolerance: Positive
    loads: Annotated[Seq[ValidatedLoad], Field(min_length=1)]

    @property
    def subject(self) -> tuple[str, ...]:
        """Engine, model, plan and clock that were validated: a later validation of the same replaces an earlier one."""
        return self.engine, self.model, self.plan, self.clock

    def __str__(self) -> str:
        """Return a line: model, engine, date, the worst error of each mean, and the verdict."""
        errors = []
        for metric in ("ttft", "tpot", "e2el"):
            values = [value for load in self.loads if (value := getattr(load, metric)) is not None]
            if values:
                errors.append(f"{metric.upper()} {max(values, key=abs):+.1%}")
        engine = " ".join(filter(None, (self.engine, self.version)))
        verdict = "within" if self.within else "outside"
        loads = ", ".join(load.load for load in self.loads)
        return (
            f"{self.model} with {engine}, {self.date}: means at worst {', '.join(errors)} over {loads} "
            f"({verdict} {self.tolerance:.0%}, {self.clock} clock)"
        )


ARRAYS = "arrays.npz"
_LARGEST = 1e12
"""Standardised shapes and weights of a residual are below a million."""


class Arrays(Mapping[str, "NDArray[Any]"]):
    """Named numeric arrays that cannot be written to, given or read from an .npz file when first needed.

    Nothing is ever unpickled from the file. Raises SpecError naming the file if it cannot be read. Pickling for another
    process reads the file first.
    """

    def __init__(
        self, content: Mapping[str, NDArray[Any]] | None = None, path: Path | None = None, digest: str | None = None
    ) -> None:
        """`digest` is the SHA-256 of the file, if it is known."""
        self._path, self._digest = path, digest
        self.derived: dict[Any, Any] = {}
        """Objects that were made of the arrays, by their specs, for all who read the same profile."""
        self._content = None if content is None else {name: _frozen(array) for name, array in content.items()}

    def reopened(self) -> Arrays:
        """The same, to be read anew from their file if they came from one."""
        return Arrays(self._content if self._path is None else None, self._path, self._digest)

    def _read(self) -> dict[str, NDArray[Any]]:
        if self._content is None:
            assert self._path is not None
            if not self._path.exists():
                self._content = {}
                return self._content
            data = read_bytes(self._path)
            if self._digest is not None and hashlib.sha256(data).hexdigest() != self._digest:
                message = "is not the file its profile.yaml was written with; copy both, or fit again"
                raise SpecError(Problem(str(self._path), message))
            content = read_arrays(self._path, data)
            self._content = {name: _frozen(self._finite(name, array)) for name, array in content.items()}
        return self._content

    def _finite(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Return the array. Raises SpecError if it contains anything but real numbers of a size that fits do."""
        import numpy as np

        if array.dtype.kind != "f" or not (np.abs(array) < _LARGEST).all():
            message = f"array {name} holds something else than numbers below {_LARGEST:g}; fit the profile again"
            raise SpecError(Problem(str(self._path), message))
        return array

    def __getitem__(self, name: str) -> NDArray[Any]:
        array = self._read().get(name)
        if array is None:
            where = self._path or ARRAYS
            raise SpecError(Problem(str(where), f"array {name} is missing: copy the file along with its profile.yaml"))
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __str__(self) -> str:
        return str(self._path or ARRAYS)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Arrays):
            return NotImplemented
        arrays, other_arrays = self._read(), other._read()
        return arrays.keys() == other_arrays.keys() and all(
            array.shape == other_arrays[name].shape and bool((array == other_arrays[name]).all())
            for name, array in arrays.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[Arrays], tuple[dict[str, NDArray[Any]]]]:
        return Arrays, (self._read(),)

    def to_bytes(self) -> bytes:
        """The .npz file: the same bytes for the same arrays."""
        import numpy as np

        file = io.BytesIO()
        np.savez(file, **dict(sorted(self._read().items())))  # type: ignore[arg-type]  # the names are the arrays'
        return file.getvalue()


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array = array.copy()
    array.flags.writeable = False
    return array


class Facts(Spec):
    """Facts about a device that tables cannot tell: the part of a hardware profile that is not fitted."""

    KIND: ClassVar[str] = "device"
    engine: str = Field(description="engine and version whose kernels the tables describe")
    device: Device
    links: dict[Name, Link] = Field(default_factory=dict, description="intra_node, inter_node, host")
    host_note: str | None = Field(None, description="note on the host's table, such as another machine")


class Hardware(Spec):
    """A device type as the cost model sees it."""

    KIND: ClassVar[str] = "hardware"
    engine: str = Field(description="engine and version whose kernels the operators describe")
    device: Device
    links: dict[Name, Link] = Field(default_factory=dict, description="intra_node, inter_node, host")
    host: Host
    calibration: Calibration | None = None
    operators: dict[str, Operator]
    arrays_sha256: str | None = Field(None, description=f"of the {ARRAYS} that belongs to it")
    validations: Seq[ValidationNote] | None = Field(None, description="results of validations on real engines")

    _arrays: Arrays = PrivateAttr(default_factory=lambda: Arrays({}))

    @classmethod
    def from_document(cls, document: yamlfile.Document, check: SpecCheck | None = None) -> Self:
        """Read the profile, see `Spec`; the arrays stay in arrays.npz beside the file until one is used."""
        hardware = super().from_document(document, check)
        return hardware.with_arrays(Arrays(path=Path(document.file).with_name(ARRAYS), digest=hardware.arrays_sha256))

    @property
    def arrays(self) -> Arrays:
        """Points and weights of the residuals; see `Residual`."""
        return self._arrays

    def reopened(self) -> Self:
        """A copy that reads its arrays anew when they are needed."""
        return self.with_arrays(self._arrays.reopened())

    def with_arrays(self, arrays: Arrays) -> Self:
        """A copy with these arrays."""
        copy = self.model_copy()
        copy._arrays = arrays
        return copy
