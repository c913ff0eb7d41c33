"""Predictors: which part of an operator answers, arrays beside the profile, and what errors say."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.arrays import Array
from simtune.cli.output import write_profile
from simtune.costs.beyond import BEYOND, BEYOND_FP8_CACHE, GROWTH, common_errors, widening_beyond
from simtune.costs.predict import DATA_SHEET_LOG_SD, OUTSIDE, Basis, Predictor, Profile, octaves, typical_log_sd
from simtune.errors import SpecError
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Arrays, Curve, Hardware, HoldOut, Interval, Operator, Provenance, Residual
from tests.costs.made_up import hardware, operator

POINTS = np.linspace(-1.5, 1.5, 16)


def residual(height: float = 0.2) -> tuple[Residual, dict[str, Array]]:
    """A correction of about `height` on m from 2^2 to 2^8, nothing far from there."""
    spec = Residual(
        features=("m",),
        centre=(5.0,),
        spread=(2.0,),
        length=(0.5,),
        signal=0.2,
        noise=0.02,
        clamp=(-0.3, 0.3),
        points=16,
        array="gemm.bf16",
    )
    r = np.sqrt(3) * np.abs(POINTS[:, None] - POINTS) / 0.5
    covariance = 0.04 * (1 + r) * np.exp(-r) + 0.0004 * np.eye(16)
    return spec, {"gemm.bf16.points": POINTS[:, None], "gemm.bf16.weights": np.linalg.solve(covariance, 16 * [height])}


def corrected(**changes: object) -> Operator:
    spec, _ = residual()
    interval = Interval(method="split", quantile=2.0, log_sd=0.05)
    box = {"m": (4.0, 256.0), "n": (64.0, 64.0), "k": (32.0, 32.0)}
    return operator("gemm").model_copy(update={"residual": spec, "interval": interval, "box": box, **changes})


def test_the_correction_holds_among_its_points_and_fades_beyond() -> None:
    plain, trusted = Predictor(operator("gemm"), 8), Predictor(corrected(), 8, residual()[1])
    m = np.array([4, 32, 256, 2.0**20])
    log_ratio = np.log(trusted.seconds(m=m, n=64, k=32) / plain.seconds(m=m, n=64, k=32))
    assert log_ratio[:3] == pytest.approx([0.2] * 3, abs=0.02)
    assert abs(log_ratio[3]) < 1e-3
    edge = trusted.seconds(m=np.array([255.9, 256.0, 256.1]), n=64, k=32)
    assert np.ptp(np.log(edge)) < 2e-3, "there is no step where the measured box ends"
    assert trusted.inside(m=m, n=64, k=32).tolist() == [True, True, True, False]


def test_octaves_beyond_a_limit_count_from_one() -> None:
    assert octaves(8.0, 2.0) == 2
    assert octaves(8.0, 1.0) == octaves(8.0, 0.25) == 3
    assert octaves(2.0, 8.0) == octaves(0.5, 0.25) == 0


def test_shapes_broadcast() -> None:
    gemm = Predictor(corrected(), 8, residual()[1])
    grid = gemm.seconds(m=np.array([[4.0], [32.0]]), n=64, k=np.array([32.0, 64.0, 128.0]))
    assert grid.shape == (2, 3)
    assert grid[1, 2] == gemm.seconds(m=32, n=64, k=128)
    assert gemm.log_sd(m=np.array([[4.0], [32.0]]), n=64, k=np.array([32.0, 64.0])).shape == (2, 2)


def test_a_call_without_work_takes_its_overhead() -> None:
    gemm = Predictor(corrected(), 8, residual()[1])
    assert gemm.seconds(m=0, n=0, k=0) == gemm.overhead_s


def test_an_exact_curve_wins_over_the_general_fit() -> None:
    line = Curve(at={"n": 64.0, "k": 32.0}, x=(1.0, 4.0), seconds=(1e-3, 2e-3))
    gemm = Predictor(corrected(curves=(line,)), 8, residual()[1])
    general = Predictor(corrected(), 8, residual()[1])
    n = np.array([64.0, 65.0])
    assert gemm.seconds(m=2, n=n, k=32).tolist() == pytest.approx(
        [np.sqrt(2) * 1e-3, float(general.seconds(m=2, n=65, k=32))]
    )


def test_collectives_follow_the_curve_of_their_group() -> None:
    """Over the bytes a ring moves: 2 (n - 1) / n of the buffer."""
    two = Curve(at={"devices": 2.0}, x=(1e3, 1e6), seconds=(1e-5, 2e-5))
    four = Curve(at={"devices": 4.0}, x=(1e3, 1e6), seconds=(3e-5, 6e-5))
    box = {"devices": (2.0, 8.0), "bytes": (1e3, 1e6)}
    all_reduce = Predictor(operator("all_reduce").model_copy(update={"curves": (two, four), "box": box}), 8)
    devices, size = np.array([2, 4, 8]), np.array([1e6, 1e6 / 1.5, 1e6 / 1.75])
    beyond = 6e-5 * 3**0.5  # four take three times as long as two: half of that, in logarithms, goes on
    assert all_reduce.seconds(devices=devices, bytes=size) == pytest.approx([2e-5, 6e-5, beyond])
    assert all_reduce.inside(devices=devices, bytes=size).tolist() == [True, True, False], "nobody measured eight"


def test_a_parameter_that_calls_do_not_have_is_refused() -> None:
    for changes, said in (
        ({"box": {"kind": (1.0, 2.0)}}, "profile.yaml: operators: box: gemm has no kind; it has m, n, k"),
        ({"families": ({"rows": 8.0},)}, "profile.yaml: operators: families: gemm has no rows"),
        ({"curves": (Curve(at={"n": 64.0}, x=(1.0, 4.0), seconds=(1e-3, 2e-3)),)}, "a curve of gemm is at no k"),
        ({"joint_box": {"width": (1.0, 2.0)}}, "profile.yaml: operators: joint_box: gemm has no feature width; it has"),
        (
            {"residual": residual()[0].model_copy(update={"features": ("0x10",)})},
            "profile.yaml: operators: residual: features: gemm has no feature 0x10; it has",
        ),
    ):
        with pytest.raises(SpecError, match=said):
            Predictor(operator("gemm").model_copy(update=changes), 8)


def test_the_error_widens_outside_the_box() -> None:
    gemm = Predictor(corrected(), 1, residual()[1])
    inside, edge, outside = gemm.log_sd(m=np.array([32.0, 256.0, 257.0]), n=64, k=32)
    assert 0.02 < inside < 0.06
    assert outside == pytest.approx(OUTSIDE * edge, rel=0.05)
    low, high = gemm.interval(m=32, n=64, k=32)
    seconds = gemm.seconds(m=32, n=64, k=32)
    assert low < seconds < high
    assert high / seconds == pytest.approx(seconds / low)
    assert np.log(high / seconds) == pytest.approx(1.645 * inside, rel=1e-3)
    wider = gemm.interval(level=0.99, m=32, n=64, k=32)
    assert wider[0] < low < high < wider[1]


def test_beyond_the_box_the_common_error_of_gpus_counts_and_grows_with_each_octave() -> None:
    """Of the parameter that is farthest outside; a CPU has that of its own table, or 1.5 times the width inside."""
    operator = corrected()
    interval = operator.interval
    assert interval is not None
    gpu, cpu = (Predictor(operator, processors, residual()[1]) for processors in (8, 1))
    far: dict[str, Any] = {"m": np.array([512.0, 2048.0]), "n": 64, "k": 32}
    ratio = gpu.log_sd(**far) / cpu.log_sd(**far)
    common = BEYOND["gemm"]["m"] / interval.quantile / OUTSIDE
    assert ratio == pytest.approx(common * np.array([2.0, 4.0]))
    alone = interval.model_copy(update={"outside": {"m": 3.0}})
    factor = widening_beyond(operator, alone, "m", np.array([1.0]), gpu=False)
    assert factor == pytest.approx(3 / interval.quantile * 2**GROWTH)
    assert widening_beyond(operator, interval, "m", np.array([1.0]), gpu=False) is None


def test_an_fp8_cache_has_common_errors_of_its_own_where_the_kind_has_a_cache() -> None:
    attention = operator("mla_context_block").model_copy(update={"kv_dtype": "bf16"})
    assert common_errors(attention) == BEYOND["mla_context_block"]
    assert common_errors(attention.model_copy(update={"kv_dtype": "fp8"})) == BEYOND_FP8_CACHE["mla_context_block"]
    assert common_errors(operator("gemm").model_copy(update={"kv_dtype": None})) == BEYOND["gemm"]
    assert all(BEYOND_FP8_CACHE[kind].keys() == BEYOND[kind].keys() for kind in BEYOND_FP8_CACHE)


def test_errors_without_an_interval() -> None:
    """From a hold-out if there is one; from the study of data sheets if there is nothing."""
    held = HoldOut(split="random", train_points=10, test_points=10, median=0.05, p90=0.2, max=0.5)
    assert typical_log_sd(operator("gemm").model_copy(update={"hold_out": (held,)})) == pytest.approx(0.111, abs=1e-3)
    assert Predictor(operator("gemm"), 8).log_sd(m=1, n=2, k=3) == DATA_SHEET_LOG_SD


def test_collectives_that_nobody_measured_err_like_a_data_sheet() -> None:
    """Those of groups of another size, and those of another device."""
    line = Curve(at={"devices": 2.0}, x=(1e3, 1e6), seconds=(1e-5, 1e-4))
    interval = Interval(method="split", quantile=1.645, log_sd=0.02)
    known = operator("all_reduce").model_copy(
        update={"curves": (line,), "interval": interval, "provenance": Provenance(kind="measured", source="me")}
    )
    sd = Predictor(known, 8).log_sd(devices=np.array([2, 4]), bytes=1e4)
    assert sd.tolist() == pytest.approx([0.02, DATA_SHEET_LOG_SD])
    moved = known.model_copy(update={"provenance": Provenance(kind="transferred", source="a sister")})
    assert Predictor(moved, 8).log_sd(devices=2, bytes=1e4) == DATA_SHEET_LOG_SD


def test_one_error_per_kind() -> None:
    device = hardware()
    operators = {
        "gemm.bf16": corrected(interval=Interval(method="split", quantile=1.0, log_sd=0.04)),
        "gemm.fp8": corrected(dtype="fp8", interval=Interval(method="split", quantile=1.0, log_sd=0.08)),
    }
    found = Profile(device.model_copy(update={"operators": {**device.operators, **operators}})).kind_log_sd()
    assert found["gemm"] == found["head"] == pytest.approx(0.06), "the median of its operators"
    assert found["moe"] == found["send"] == found["sampling"] == DATA_SHEET_LOG_SD
    assert found["mla_decode"] == found["all_gather"] == DATA_SHEET_LOG_SD, "nobody measured them: never without error"


def test_what_a_time_rests_on() -> None:
    """A knot of a user's own curve or a point of the process was measured; the rest lies among or outside them."""
    line = Curve(at={"n": 64.0, "k": 32.0}, x=(1.0, 4.0), seconds=(1e-3, 2e-3))
    mine = Provenance(kind="measured", source="me")
    own = corrected(curves=(line,), provenance=mine, box={"m": (1.0, 256.0), "n": (32.0, 64.0), "k": (32.0, 32.0)})
    gemm = Predictor(own, 8, residual()[1])
    at_point = float(2 ** (5 + 2 * POINTS[3]))
    m, n = np.array([4.0, 3.0, at_point, 100.0, 300.0]), np.array([64.0, 64.0, 48.0, 48.0, 48.0])
    expected = [Basis.MEASURED, Basis.INTERPOLATED, Basis.MEASURED, Basis.INTERPOLATED, Basis.EXTRAPOLATED]
    assert gemm.basis(m=m, n=n, k=32).tolist() == expected
    for origin, basis in (
        (Provenance(kind="transferred", source="a sheet"), Basis.CARRIED_OVER),
        (Provenance(kind="data-sheet", source="a sheet"), Basis.DATA_SHEET),
    ):
        moved = own.model_copy(update={"provenance": origin})
        assert set(Predictor(moved, 8, residual()[1]).basis(m=m, n=n, k=32).tolist()) == {basis}
    theirs = own.model_copy(update={"provenance": Provenance(kind="published-tables", source="them")})
    assert Basis.MEASURED not in Predictor(theirs, 8, residual()[1]).basis(m=m, n=n, k=32), "their rows are not kept"


def test_the_box_is_joint() -> None:
    """What is within the range of every parameter may be outside of what they were together."""
    attention = operator("prefill_attention", kv_dtype="bf16").model_copy(
        update={
            "provenance": Provenance(kind="published-tables", source="them"),
            "residual": None,
            "box": {"tokens": (1.0, 4096.0), "context": (1.0, 4096.0)},
            "joint_box": {"context": (0.0, 0.0), "window": (0.0, 0.0)},
        }
    )
    prefill = Predictor(attention, 8)
    shape = {"batch": 1, "tokens": 512, "heads": 8, "kv_heads": 8, "head_dim": 64}
    assert prefill.inside(**shape, context=512, window=512)
    assert not prefill.inside(**shape, context=2048, window=2048), "a chunk after a cached past, of whole prompts only"
    assert not prefill.inside(**shape, context=512, window=128), "no window was measured"


def test_the_products_of_one_model_do_not_vouch_for_another() -> None:
    few = corrected(
        provenance=Provenance(kind="published-tables", source="them"),
        box={"m": (4.0, 256.0), "n": (32.0, 128.0), "k": (32.0, 128.0)},
        families=({"n": 32.0, "k": 128.0}, {"n": 128.0, "k": 32.0}),
    )
    gemm = Predictor(few, 8, residual()[1])
    assert gemm.inside(m=8, n=np.array([32, 128, 64]), k=np.array([128, 32, 64])).tolist() == [True, True, False]
    assert gemm.log_sd(m=8, n=64, k=64) > gemm.log_sd(m=8, n=32, k=128)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile with a residual in a folder, as `simtune fit` leaves it."""
    device = hardware()
    device = device.model_copy(update={"operators": {**device.operators, "gemm.bf16": corrected()}})
    (tmp_path / "profile.yaml").write_text(device.to_yaml())
    (tmp_path / "arrays.npz").write_bytes(Arrays(residual()[1]).to_bytes())
    return tmp_path / "profile.yaml"


def predicted(device: Hardware) -> float:
    return float(Profile(device).predictor("gemm", "bf16").seconds(m=32, n=64, k=32))


def test_arrays_travel_with_the_profile(profile: Path) -> None:
    loaded = load_hardware(str(profile))
    expected = float(Predictor(corrected(), 8, residual()[1]).seconds(m=32, n=64, k=32))
    assert predicted(loaded) == expected
    untouched = pickle.dumps(load_hardware(str(profile)))
    (profile.parent / "arrays.npz").unlink()
    assert predicted(pickle.loads(untouched)) == expected, "another process needs no file"
    assert pickle.loads(untouched) == loaded
    with pytest.raises(ValueError, match="read-only"):
        loaded.arrays["gemm.bf16.weights"][0] = 1.0


def test_the_same_arrays_are_the_same_bytes() -> None:
    arrays = residual()[1]
    assert Arrays(arrays).to_bytes() == Arrays(dict(reversed(arrays.items()))).to_bytes()


def test_arrays_that_are_missing_or_not_theirs(profile: Path) -> None:
    file = profile.parent / "arrays.npz"
    file.write_bytes(b"not an archive")
    with pytest.raises(SpecError, match=r"arrays\.npz: cannot be read"):
        predicted(load_hardware(str(profile)))
    np.savez(file, **{"gemm.bf16.points": np.array([object()])}, allow_pickle=True)
    with pytest.raises(SpecError, match=r"arrays\.npz: cannot be read"):
        predicted(load_hardware(str(profile)))
    shortened: dict[str, Any] = {name: array[1:] for name, array in residual()[1].items()}
    np.savez(file, **shortened)
    with pytest.raises(SpecError, match="16 points and 1 features"):
        predicted(load_hardware(str(profile)))
    file.unlink()
    with pytest.raises(SpecError, match=r"gemm\.bf16\.points is missing: copy the file along"):
        predicted(load_hardware(str(profile)))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_arrays_that_hold_no_numbers_of_a_fit_are_refused(value: float, tmp_path: Path) -> None:
    _, arrays = residual()
    name = next(iter(arrays))
    spoilt = arrays[name].copy()
    spoilt.flat[0] = value
    (tmp_path / "arrays.npz").write_bytes(Arrays({**arrays, name: spoilt}).to_bytes())
    with pytest.raises(SpecError, match=rf"arrays\.npz: array {name} holds something else than numbers"):
        Arrays(path=tmp_path / "arrays.npz")[name]


def test_another_devices_arrays_are_refused(tmp_path: Path) -> None:
    """A profile is bound to its arrays by their hash."""
    write_profile(tmp_path / "a", load_hardware("h100-sxm"), "")
    write_profile(tmp_path / "b", load_hardware("rtx-4090"), "")
    assert len(load_hardware(f"{tmp_path}/a").arrays)
    (tmp_path / "a" / "arrays.npz").write_bytes((tmp_path / "b" / "arrays.npz").read_bytes())
    with pytest.raises(SpecError, match=r"arrays\.npz: is not the file its profile\.yaml was written with"):
        len(load_hardware(f"{tmp_path}/a").arrays)
