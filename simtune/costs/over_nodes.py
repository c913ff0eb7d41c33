"""Collectives of tensor-parallel ranks: inside a node as measured there, over several nodes in two levels.

Over nodes each rank shares the work of its node: what one node has of it is summed or gathered inside, and every rank
passes its part on to the rank of the same number in the next node, as a ring. The parts go over the ranks' own links
between nodes, whose times follow from their data sheet; no such collective was measured. On one node the times are
those that were measured.
"""

from __future__ import annotations

from typing import Literal

from simtune.arrays import Array
from simtune.costs.predict import Profile
from simtune.errors import Infeasible


class RankCollective:
    """A sum (all_reduce) or a gathering (all_gather) over `devices` ranks, on nodes of a profile's device.

    Raise Infeasible if the ranks fill no whole number of nodes, and if the profile has no link between nodes.
    """

    def __init__(self, profile: Profile, kind: Literal["all_reduce", "all_gather"], dtype: str, devices: int) -> None:
        per_node = profile.hardware.device.devices_per_node
        self._nodes, self._local = max(1, devices // per_node), min(devices, per_node)
        if devices > per_node and devices % per_node:
            raise Infeasible(
                f"tp {devices} on {profile.hardware.name}: a node has {per_node} devices; use a tp that divides that, "
                "or a multiple of it"
            )
        self._inside = profile.predictor(kind, dtype)
        self._rounds = (2 if kind == "all_reduce" else 1) * (self._nodes - 1)
        self._send = profile.predictor("send_recv", dtype, variant="inter_node") if self._nodes > 1 else None

    def seconds(self, size: Array) -> Array:
        """Seconds for buffers of `size` bytes."""
        if self._send is None:
            return self._inside.seconds(devices=self._local, bytes=size)
        passed_s = self._rounds * self._send.seconds(bytes=size / (self._nodes * self._local))
        if self._local == 1:
            # A node with one rank has nothing to sum or gather.
            return passed_s
        return self._inside.seconds(devices=self._local, bytes=size) + passed_s
