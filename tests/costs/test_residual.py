"""The residual process: its gradients, its leave-one-out formulas, and what it makes of planted residuals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.arrays import Array
from simtune.costs.operators import OPERATORS, Setting
from simtune.costs.operators.moe import DEALT
from simtune.costs.residual import (
    Hyper,
    Process,
    cover,
    fit_process,
    maximin,
    negative_log_posterior,
    pair_squares,
)
from simtune.specs.hardware import OperatorKind


def planted(points: int, noise: float, seed: int = 0) -> tuple[dict[str, Array], Array]:
    """Residuals that wave along `a`, climb a little along `b`, and do not know `c` nor the constant `d`."""
    rng = np.random.default_rng(seed)
    x = {"a": rng.uniform(0, 12, points), "b": rng.uniform(-3, 3, points), "c": rng.uniform(0, 1, points)}
    z = 0.3 * np.sin(x["a"] / 2) + 0.05 * x["b"] + noise * rng.standard_normal(points)
    return x | {"d": np.full(points, 7.0)}, z


def fitted(points: int = 150, noise: float = 0.02) -> Process:
    process = fit_process(*planted(points, noise))
    assert process is not None
    return process


def test_a_planted_residual_is_found() -> None:
    process = fitted()
    assert process.names == ("a", "b", "c"), "a feature that does not vary says nothing"
    others, z = planted(500, 0.0, seed=1)
    off = process.mean(process.standardised(others)) - z
    assert np.sqrt(np.mean(off**2)) < 0.02, "better than one noisy measurement"
    assert process.hyper.noise == pytest.approx(0.02, rel=0.25)
    length = dict(zip(process.names, process.hyper.length, strict=True))
    assert length["a"] < length["b"] < length["c"], "what matters more has the shorter length"


def test_without_residual_there_is_no_correction() -> None:
    x, _ = planted(100, 0.0)
    process = fit_process(x, np.zeros(100))
    assert process is not None
    assert np.abs(process.mean(process.standardised(x))).max() < 1e-6
    assert fit_process({"only": np.ones(100)}, np.zeros(100)) is None


def test_far_from_the_points_the_base_rules() -> None:
    process = fitted()
    far = np.full((1, 3), 400.0)
    assert abs(float(process.mean(far)[0])) < 1e-3
    alone = np.hypot(process.hyper.signal, process.hyper.noise)
    assert process.sd(far)[0] == pytest.approx(alone, rel=1e-3)
    assert process.sd(process.points[:5]).max() < alone / 2


def test_one_outlier_does_not_carry_the_correction_away() -> None:
    x, z = planted(150, 0.02)
    z[3] = 9.0
    process = fit_process(x, z)
    assert process is not None
    assert process.clamp[1] < 0.5
    assert process.mean(process.standardised(x)).max() <= process.clamp[1]


@settings(max_examples=10)
@given(theta=st.lists(st.floats(-1.0, 1.5), min_size=4, max_size=4), noise=st.floats(-4.0, -1.5))
def test_gradients_are_those_of_finite_differences(theta: list[float], noise: float) -> None:
    x, z = planted(40, 0.05)
    squares = pair_squares(np.stack([x["a"] / 4, x["b"], x["c"]], axis=-1))
    at = np.array([*theta, noise])
    _, gradient = negative_log_posterior(at, squares, z)
    step = 1e-5
    for i in range(len(at)):
        above, below = at.copy(), at.copy()
        above[i] += step
        below[i] -= step
        numeric = (negative_log_posterior(above, squares, z)[0] - negative_log_posterior(below, squares, z)[0]) / (
            2 * step
        )
        assert gradient[i] == pytest.approx(numeric, rel=1e-4, abs=1e-4)


def test_left_out_is_what_refits_without_the_point_say() -> None:
    """By brute force: the same kernel on all other points, predicting the one left out."""
    process = fitted(60, 0.05)
    _, z = planted(60, 0.05)
    residual, sd = process.left_out()

    def kernel(a: Array, b: Array) -> Array:
        return process.hyper.kernel((((a[:, None] - b[None]) / process.hyper.length) ** 2).sum(-1))

    for i in range(0, 60, 7):
        others = np.arange(60) != i
        here, rest = process.points[i : i + 1], process.points[others]
        covariance = kernel(rest, rest) + process.hyper.noise**2 * np.eye(59)
        towards = kernel(here, rest)
        mean = towards @ np.linalg.solve(covariance, z[others])
        variance = process.hyper.signal**2 + process.hyper.noise**2 - towards @ np.linalg.solve(covariance, towards.T)
        assert residual[i] == pytest.approx(float(z[i] - mean[0]), rel=1e-6, abs=1e-9)
        assert sd[i] == pytest.approx(float(variance[0, 0]) ** 0.5, rel=1e-6)


def test_centres_in_every_point_are_the_exact_process() -> None:
    x, z = planted(150, 0.02)
    exact = fitted()
    same = exact.condensed(x, z, 150)
    others = exact.standardised(planted(50, 0.0, seed=2)[0])
    assert same.points.shape == exact.points.shape
    assert same.mean(others) == pytest.approx(exact.mean(others), abs=1e-4)


def test_few_centres_say_what_all_points_told_them() -> None:
    """By brute force: the weights solve (noise^2 K_cc + K_cn K_nc) w = K_cn z. A hundred centres of a thousand points
    predict better than the exact process of a hundred of the points.
    """
    x, z = planted(1000, 0.1)
    chosen = cover(x, 100)
    exact = fit_process({name: column[chosen] for name, column in x.items()}, z[chosen])
    assert exact is not None
    few = exact.condensed(x, z, 100)
    assert 80 < len(few.points) <= 100

    def kernel(a: Array, b: Array) -> Array:
        return few.hyper.kernel((((a[:, None] - b[None]) / few.hyper.length) ** 2).sum(-1))

    across = kernel(few.points, few.standardised(x))
    left = few.hyper.noise**2 * kernel(few.points, few.points) + across @ across.T
    assert left @ few.weights == pytest.approx(across @ z, rel=1e-3, abs=1e-3)
    others, true = planted(500, 0.0, seed=1)
    off = [np.sqrt(np.mean((p.mean(p.standardised(others)) - true) ** 2)) for p in (few, exact)]
    assert off[0] < 0.7 * off[1]


def test_an_exact_process_tells_its_residuals_and_centres_do_not() -> None:
    """With as many weights as residuals these are (K + noise^2) w: why other people's rows are condensed."""
    x, z = planted(150, 0.1)
    exact = fit_process(x, z)
    assert exact is not None
    squares = (((exact.points[:, None] - exact.points[None]) / exact.hyper.length) ** 2).sum(-1)
    told = exact.hyper.kernel(squares) @ exact.weights + exact.hyper.noise**2 * exact.weights
    assert told == pytest.approx(z, abs=1e-6)
    few = exact.condensed(x, z, 110)
    assert len(few.points) <= 110
    assert np.std(few.mean(few.standardised(x)) - z) > 0.05, "what they say there is smooth, without the noise"


def test_a_process_comes_back_from_its_spec_and_arrays() -> None:
    process = fitted()
    spec, arrays = process.spec("gemm.bf16")
    again = Process.load(spec, arrays["gemm.bf16.points"], arrays["gemm.bf16.weights"])
    x = again.standardised(planted(50, 0.0, seed=2)[0])
    assert again.mean(x).tolist() == process.mean(x).tolist()
    assert again.sd(x) == pytest.approx(process.sd(x), rel=1e-12)
    with pytest.raises(ValueError, match="150 points and 3 features"):
        Process.load(spec, arrays["gemm.bf16.points"][1:], arrays["gemm.bf16.weights"])


def test_maximin_takes_the_corners_before_the_crowd() -> None:
    rng = np.random.default_rng(0)
    crowd = rng.normal(0, 0.05, (200, 2))
    corners = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    chosen = maximin(np.vstack([crowd, corners]), 5)
    assert set(chosen[1:].tolist()) == {200, 201, 202, 203}
    assert len(set(maximin(crowd, 50).tolist())) == 50
    in_thousands = {"x": np.append(crowd[:, 0], 1.0) * 1000, "y": np.append(crowd[:, 1], 1.0)}
    assert 200 in cover(in_thousands, 3), "features count alike whatever their units"


@pytest.mark.parametrize("kind", OPERATORS)
def test_every_kind_has_finite_features(kind: OperatorKind) -> None:
    setting = Setting.of(132, "bf16", "bf16")
    for value in (1.0, 64.0):
        shape = {name: np.array([value, 4 * value]) for name in OPERATORS[kind].shape}
        found = OPERATORS[kind].features(shape, setting)
        assert found
        for name, column in found.items():
            assert np.isfinite(column).all(), name


def test_decode_attention_with_a_window_is_another_kernel_however_long_it_is() -> None:
    def windowed(context: float) -> float:
        sizes = {"batch": 4, "context": context, "heads": 8, "kv_heads": 2, "head_dim": 64, "window": 128}
        shape = {name: np.array([float(size)]) for name, size in sizes.items()}
        return float(OPERATORS["decode_attention"].features(shape, Setting.of(132, "bf16", "bf16"))["windowed"][0])

    assert [windowed(context) for context in (64, 128, 129, 4096)] == [1, 0, 1, 1]


def test_what_fused_experts_depend_on_besides_their_size() -> None:
    def found(name: str, dtype: str = "bf16", **other: float) -> float:
        sizes = {"tokens": 64, "hidden": 4096, "intermediate": 1024, "experts_per_token": 8, "experts": 128, "ep": 1}
        shape = {key: np.array([float(size)]) for key, size in (sizes | {"skew": DEALT} | other).items()}
        return float(OPERATORS["moe"].features(shape, Setting.of(132, dtype, None))[name][0])

    assert found("awake", tokens=8) == 6, "64 of 128 experts"
    assert found("awake", tokens=8, ep=4) == 4, "a quarter of them on each of four ranks"
    assert found("awake", tokens=8, skew=0) < 6, "chance sends some tokens to one expert"
    assert [found("padding", "int4", tokens=t) for t in (512, 1024, 1536)] == [1, 0, pytest.approx(np.log2(128 / 96))]
    assert found("padding") == 0, "8- and 16-bit kernels are tuned to the rows there are"
    assert [found("odd width", intermediate=i) for i in (1024, 464, 232)] == [0, 0, 1]
    assert [found("few rows", "int4", tokens=t) for t in (96, 97)] == [1, 0]
    assert found("few rows", "int4", ep=2) == 0, "each rank holds the rows of all, and half of the experts"
    assert found("few rows") == 0, "a kernel for 4-bit weights"
    assert found("flops") == pytest.approx(np.log2(2 * 64 * 8 * 3 * 4096 * 1024))
    assert found("rows") == 2, "512 rows on 128 experts"
    assert found("rows", ep=4) == 2, "a quarter of the rows on a quarter of the experts"
    assert found("tiles") == 11, "of 128 experts, each one of 128 rows and 16 of 128 columns"
    assert found("last wave") == pytest.approx(np.log2(16 * 132 / 2048))
    with pytest.raises(KeyError):  # a single processor has no waves to fill
        OPERATORS["moe"].features({name: np.ones(1) for name in OPERATORS["moe"].shape}, Setting.of(1, "bf16", None))[
            "tiles"
        ]


def test_the_kernel_is_matern() -> None:
    """(1 + sqrt(3) r) exp(-sqrt(3) r), by hand at r = 0, 1 and 2."""
    kernel = Hyper(np.ones(1), 2.0, 0.1).kernel(np.array([0.0, 1.0, 4.0]))
    root = 3**0.5
    assert kernel == pytest.approx([4.0, 4 * (1 + root) * np.exp(-root), 4 * (1 + 2 * root) * np.exp(-2 * root)])
