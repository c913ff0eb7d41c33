"""Operators that move bytes between devices: collectives, point to point, and the transfer of a KV cache."""

from __future__ import annotations

import numpy as np

from simtune.costs.operators.base import CurveForm, OperatorForm, Setting, Shape, Terms
from simtune.costs.operators.splits import EVERY_SECOND, RANDOM, above


class AllReduce(OperatorForm):
    """Sum of `bytes` bytes over `devices` devices, moving the bytes of a ring. A block is one further device."""

    shape = ("devices", "bytes")
    overhead_s = 6e-6
    block_s = 1e-6
    overlap = 0.5
    computes = False
    link = True
    curve = CurveForm(shared=("devices",))
    splits = (EVERY_SECOND, above("devices", 4, "devices"))

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """2 (n - 1) / n of the buffer over the link, and a block for each further device."""
        n, size = x["devices"], x["bytes"]
        return Terms(np.zeros_like(size), 2 * (n - 1) / n * size, n - 1)


class OnePass(AllReduce):
    """All-gather, reduce-scatter and all-to-all: half an all-reduce, so half its bytes move.

    `bytes` is the size of all that is gathered (the output of a rank), scattered (its input), or sent by one rank
    to all ranks, itself included.
    """

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return (n - 1) / n of the buffer over the link, and a block for each further device."""
        n, size = x["devices"], x["bytes"]
        return Terms(np.zeros_like(size), (n - 1) / n * size, n - 1)


class ExpertExchange(OperatorForm):
    """`tokens` tokens of each of `ep` ranks on `nodes` nodes, `row_bytes` bytes wide, to `experts_per_token` of
    `experts` experts, or back from there. It has no blocks.

    Every expert gets its own copy, as in DeepEP's low-latency kernels; on one node those that leave the rank cross the
    link, on several those that leave the node. The variant is the kernels' name, `low_latency` or `high_throughput`, or
    the link between nodes if the kernels were not measured.
    """

    shape = ("tokens", "row_bytes", "experts_per_token", "experts", "ep", "nodes")
    overhead_s = 10e-6
    block_s = 1e-6
    overlap = 0.5
    computes = False
    link = True
    starts_with_latency = True
    splits = (RANDOM, above("tokens", 8192, "tokens"))

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """Return a copy for each expert beyond the rank, or beyond the node if there are several."""
        away = 1 - 1 / np.where(x["nodes"] > 1, x["nodes"], x["ep"])
        moved = x["tokens"] * x["experts_per_token"] * x["row_bytes"] * away
        return Terms(np.zeros_like(moved), moved, np.zeros_like(moved))


class SendRecv(OperatorForm):
    """`bytes` bytes from one device to another. It has no blocks."""

    shape = ("bytes",)
    overhead_s = 10e-6
    block_s = 1e-6
    overlap = 0.5
    computes = False
    link = True
    starts_with_latency = True
    curve = CurveForm()

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """All bytes over the link, once."""
        return Terms(np.zeros_like(x["bytes"]), x["bytes"], np.zeros_like(x["bytes"]))


class KvTransferForm(OperatorForm):
    """A KV cache of `bytes` bytes to another instance, in `descriptors` pieces. A block is one descriptor.

    Setting up takes milliseconds (3 ms for NIXL, vllm issue 23780) and every descriptor 0.3 to 3 us; unless it
    is packed there are blocks x layers x 2 of them, and they cost more than the link.
    """

    shape = ("descriptors", "bytes")
    overhead_s = 3e-3
    block_s = 1e-6
    overlap = 0.5
    computes = False
    link = True

    def terms(self, x: Shape, setting: Setting) -> Terms:
        """All bytes over the link, once, and a block for each descriptor."""
        return Terms(np.zeros_like(x["bytes"]), x["bytes"], x["descriptors"])
