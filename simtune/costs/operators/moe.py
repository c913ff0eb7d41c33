"""Mixtures of experts: the experts that a batch activates, the imbalance of ranks, and the grouped product."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.costs.operators.base import OperatorForm, Setting, Shape, Terms, ceil_div, last_wave
from simtune.costs.operators.splits import RANDOM, unseen
from simtune.specs.hardware import Range

DEALT = -1.0
"""Value of `skew` for tokens that are dealt out to the experts in turn: none is visited twice before all others
once."""

_BLOCK = 64
"""Rows of one expert that vLLM's fused kernels multiply at a time unless they were tuned to other numbers."""


def active_experts(tokens: Array, experts: Array, experts_per_token: Array, skew: Array) -> Array:
    """Expected number of distinct experts that `tokens` tokens visit: sum over experts of 1 - (1 - p)^tokens.

    Without skew, tokens routed by chance activate up to 37 % fewer of them than tokens that are dealt out.
    """
    tokens, experts, experts_per_token, skew = np.broadcast_arrays(tokens, experts, experts_per_token, skew)
    by_chance = experts * (1 - (1 - experts_per_token / experts) ** tokens)
    active = np.where(skew == DEALT, np.minimum(tokens * experts_per_token, experts), by_chance)
    for e, k, a in set(zip(experts[skew > 0], experts_per_token[skew > 0], skew[skew > 0], strict=True)):
        rows = (experts == e) & (experts_per_token == k) & (skew == a)
        missed = 1 - visit_probabilities(max(1, round(e)), float(k), float(a))
        powers, where = np.unique(tokens[rows], return_inverse=True)
        active[rows] = np.array([np.sum(1 - missed**t) for t in powers])[where]
    return active


def padded_rows(rows: Array, skew: Array) -> Array:
    """Rows that a kernel multiplies if it multiplies 64 rows of an expert at a time, on average.

    Dealt out, all experts have equally many. By chance they differ by the root of it, which smooths the steps.
    """
    from scipy.special import ndtr

    edge = np.maximum(np.rint(rows / _BLOCK), 1)
    blocks = np.where(
        skew == DEALT, ceil_div(rows, _BLOCK), edge + ndtr((rows - _BLOCK * edge) / np.sqrt(np.maximum(rows, 1)))
    )
    return _BLOCK * blocks


def awakened(tokens: Array, experts: Array, experts_per_token: Array, ep: Array, skew: Array) -> Array:
    """Expected number of experts of one of `ep` ranks that `tokens` tokens visit.

    It is the rank's share of all experts visited, but one expert if the rank has any, and never more than it has.
    """
    local = experts / ep
    awake = active_experts(tokens, experts, experts_per_token, skew) / ep
    return np.minimum(np.maximum(awake, np.minimum(1, local)), local)


@lru_cache(maxsize=256)
def visit_probabilities(experts: int, experts_per_token: float, skew: float) -> Array:
    """Probabilities that a token visits each expert, the busiest first; they add up to experts_per_token.

    A token draws its experts one after the other without repetition, expert i with weight i^-skew (Zipf; 0 is
    uniform). Drawing is a race of exponential clocks that is stopped when k have rung: p = 1 - exp(-weight x
    time), with the time at which k are expected to. The number of distinct experts that follows (8 to 512
    experts, skews up to 1.5, 1 to 256 tokens) is 0.1 % off Monte Carlo at the median and -1 to +3 % at the
    worst; weights cut off at 1 instead are up to 7 % low.
    """
    from scipy.optimize import brentq

    weights = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    if experts_per_token >= experts:
        return np.ones(experts)

    def excess(log_time: float) -> float:
        return float(-np.expm1(-weights * np.exp(log_time)).sum()) - experts_per_token

    highest = np.log(40 * experts) + skew * np.log(experts)
    time = np.exp(brentq(excess, -20.0, highest))
    probabilities: Array = -np.expm1(-weights * time)
    return probabilities


def rank_load(
    tokens: Array, experts: int, experts_per_token: int, ep: int, skew: float, placed: float | None = None
) -> Array:
    """Rows on the busiest of `ep` ranks over the mean: a step of expert parallelism waits for that rank.

    Random routing alone gives about 1 + sqrt(2 ln(ep) / mean), with mean = tokens x k / ep rows a rank. Under skew the
    rank that has the busiest expert has an average share of the others besides it. The two are added; no rank gets more
    than all tokens on every expert it may have. If experts were placed by their load, `placed` is the remaining ratio
    of the busiest rank to the mean, and replaces the first term.
    """
    if ep == 1:
        return np.ones_like(tokens)
    local = experts / ep
    busiest = float(visit_probabilities(experts, experts_per_token, skew)[0])
    companions = (experts_per_token - busiest) / (experts - 1) * (local - 1)
    mean = tokens * experts_per_token / ep
    imbalance = (busiest + companions) * ep / experts_per_token if placed is None else placed
    load = imbalance + np.sqrt(2 * np.log(ep) / mean)
    most = min(local, experts_per_token) * ep / experts_per_token
    capped: Array = np.minimum(load, most)
    return capped


class Received(NamedTuple):
    """Tokens that one rank receives when they are dispatched to experts, which ranks share evenly."""

    tokens: Array
    """Tokens that visit at least one of the rank's experts; each arrives once."""
    experts_per_token: float
    """Experts of the rank that each of these tokens visits on average."""


def received(tokens: Array, experts: int, experts_per_token: int, ep: int) -> Received:
    """Return the part of `tokens` that one rank receives; each visits experts_per_token different experts, all alike.

    Rows are conserved: over all `ep` ranks tokens * experts_per_token of them arrive.
    """
    local = experts / ep
    visited = np.arange(experts_per_token)
    # probability that none of a token's experts, drawn without repetition, is on the rank
    missed = float(np.prod(np.maximum(0.0, 1 - local / (experts - visited))))
    return Received(tokens * (1 - missed), experts_per_token / ep / (1 - missed))


_TILE = 128  # rows and columns of outputs, about, that a processor computes at a time

_ALIGNED_WIDTH = 16
"""Triton reads several values at a time only from matrices whose rows are a multiple of 16 values apart."""

_FEW_ROWS = 6
"""Rows for every expert of a rank, those of other ranks' experts included, up to which vLLM multiplies 4-bit weights in
a separate kernel (`should_moe_wna16_use_cuda`)."""


def _awake(x: Shape) -> Array:
    """Return `awakened` of calls of these shapes."""
    return awakened(x["tokens"], x["experts"], x["experts_per_token"], x["ep"], x["skew"])


class Moe(OperatorForm):
    """`tokens` tokens through `experts_per_token` of `experts` gated experts, fused, on one of `ep` ranks.

    `intermediate` is the width on one rank; `ep` ranks share the experts among them, evenly loaded. `skew` is
    the Zipf exponent of how often experts are chosen, 0 being all alike, or `DEALT` (`active_experts`). The dtype is
    that of the weights' kernel, as for `Gemm`.

    A row is one expert of one token. Only those of the rank's own experts are multiplied; but every rank that has all
    tokens has a slot for each of their rows, which the sum over experts reads. Kernels of vLLM and SGLang that write
    zeros into the others' slots take longer than that, those of TensorRT-LLM do not: `ep` is a feature of the residual.
    If tokens were dispatched, tokens and experts are those of the rank, and `ep` is 1.
    """

    shape = ("tokens", "hidden", "intermediate", "experts_per_token", "experts", "ep", "skew")
    overhead_s = 20e-6
    block_s = 1e-6
    overlap = 0.5
    joint = ("awake",)
    splits = (RANDOM, unseen("hidden", "intermediate", "experts_per_token", "experts"))
    not_positive: ClassVar = {"skew": (0.0, DEALT)}

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return flops of the rank's rows; weights of the experts they activate, activations, and slots of all rows."""
        return self._terms(x, setting, _awake(x))

    def _terms(self, x: Shape, setting: Setting, awake: Array) -> Terms:
        m, hidden, inter, k, ep = (x[name] for name in ("tokens", "hidden", "intermediate", "experts_per_token", "ep"))
        rows, all_rows = m * k / ep, m * k
        matrices = 3 * hidden * inter
        activation_bytes = 2.0
        return Terms(
            2 * rows * matrices,
            setting.dtype_bytes * awake * matrices
            + activation_bytes * (rows * (6 * inter + 2 * hidden) + (all_rows + 2 * m) * hidden),
            np.maximum(awake, rows / 64) * (2 * inter + hidden) / 128 / setting.processors,
        )

    def features(self, x: Shape, setting: Setting) -> dict[str, Array]:
        """Return sizes, ranks, active experts on one rank, and the features by which kernels are chosen.

        For kernels of 4-bit weights also the padding of an expert's rows; on a GPU the work itself.
        """
        m, e, k, ep, skew = (x[name] for name in ("tokens", "experts", "experts_per_token", "ep", "skew"))
        logs = {name: np.log2(x[name]) for name in ("tokens", "hidden", "intermediate", "experts_per_token", "ep")}
        per_expert = m * k / active_experts(m, e, k, skew)
        four_bit, awake = setting.dtype_bytes < 1, _awake(x)
        logs |= {
            "awake": np.log2(awake),
            "padding": np.log2(padded_rows(per_expert, skew) / per_expert) if four_bit else np.zeros_like(per_expert),
            "odd width": np.where(x["intermediate"] % _ALIGNED_WIDTH, 1.0, 0.0),
            "few rows": np.where(four_bit & (m * k * ep / e <= _FEW_ROWS), 1.0, 0.0),
            "skew": skew,
        }
        return logs | self._work(x, setting, awake) if setting.processors > 1 else logs

    def _work(self, x: Shape, setting: Setting, awake: Array) -> dict[str, Array]:
        """Return flops, bytes, rows of an active expert, tiles of the first product, and the empty part of their last
        wave.

        Sums of other features for the most part; a residual of few rows predicts better with them, see
        benchmarks/costs/test_moe_accuracy.py.
        """
        terms = self._terms(x, setting, awake)
        rows = x["tokens"] * x["experts_per_token"] / x["ep"] / awake
        tiles = awake * ceil_div(rows, _TILE) * ceil_div(2 * x["intermediate"], _TILE)
        return {
            "flops": np.log2(terms.flops),
            "bytes": np.log2(terms.bytes),
            "rows": np.log2(rows),
            "tiles": np.log2(tiles),
            "last wave": last_wave(tiles, setting.processors),
        }

    def box(self, x: Shape) -> dict[str, Range]:
        """Include skew 0: tokens routed by chance belong to those dealt out or skewed, and the terms distinguish
        them."""
        box = super().box(x)
        box["skew"] = (min(box["skew"][0], 0.0), max(box["skew"][1], 0.0))
        return box
