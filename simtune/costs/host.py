"""Host time of a step: whose it is, how far off it may be, and what it rests on.

What a plan states comes first, then what the preset of its engine's release states (presets fill in what a plan leaves
out), then the host times of the hardware profile, which were measured with some engine or with none.
"""

from __future__ import annotations

from dataclasses import dataclass

from simtune.costs.predict import Basis
from simtune.specs.hardware import Hardware, Host
from simtune.specs.pool import HostTimes, Pool

PUBLISHED_LOG_SD = 0.5
"""Log error of a published table of host times under an engine release that it does not name: Vidur's has 1.4 times
what a run of vLLM 0.11 shows of a step with one sequence, and 2.2 times of a step with 128 (log 0.3 to 0.8)."""

MEASURED_LOG_SD = 0.1
"""Log error of host times that a profile measured on its own machine. Assumed: as of small operators there."""

ASSUMED_LOG_SD = 0.7
"""Log error of assumed host times: half or twice as much in two of three cases."""

SYNCHRONOUS_STEP_S, SYNCHRONOUS_SEQUENCE_S = 0.0009, 16e-6
"""Host time of vLLM 0.11, for profiles without a table of host times; the preset vllm-0.11 has its source."""

_OF_PROFILE = {
    "measured": (MEASURED_LOG_SD, Basis.INTERPOLATED),
    "published-tables": (PUBLISHED_LOG_SD, Basis.CARRIED_OVER),
    "transferred": (PUBLISHED_LOG_SD, Basis.CARRIED_OVER),
}
_OF_ORIGIN = {
    "measured": (MEASURED_LOG_SD, Basis.INTERPOLATED),
    "other release": (PUBLISHED_LOG_SD, Basis.CARRIED_OVER),
    "assumed": (ASSUMED_LOG_SD, Basis.DATA_SHEET),
}


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Host time of the steps of a pool in seconds."""

    step_s: float
    per_sequence_s: float
    draft_step_s: float | None
    """Seconds of each pass of a drafter, which nothing hides; None if not stated."""
    draft_sequence_s: float
    log_sd: float
    """Typical error of these times, as a logarithm."""
    basis: Basis

    @classmethod
    def of(cls, pool: Pool, hardware: Hardware) -> HostCosts:
        """Return the host time that the pool states, or else that of its hardware profile."""
        if pool.host is not None:
            return cls._stated(pool.host, several=pool.parallelism.devices > 1)
        return cls._of_profile(hardware.host)

    @classmethod
    def _stated(cls, host: HostTimes, several: bool) -> HostCosts:
        # A plan that states times without an origin knows them: they are not redrawn.
        log_sd, basis = (0.0, Basis.MEASURED) if host.origin is None else _OF_ORIGIN[host.origin]
        if host.log_sd is not None:
            log_sd = host.log_sd
        step_s, per_sequence_s = host.step_s, host.per_sequence_s
        if several:
            step_s += host.ranks_step_s or 0.0
            per_sequence_s += host.ranks_sequence_s or 0.0
        return cls(step_s, per_sequence_s, host.draft_step_s, host.draft_sequence_s or 0.0, log_sd, basis)

    @classmethod
    def _of_profile(cls, host: Host) -> HostCosts:
        log_sd, basis = _OF_PROFILE.get(host.provenance.kind, (ASSUMED_LOG_SD, Basis.DATA_SHEET))
        return cls(host.step_s, host.per_sequence_s, None, 0.0, log_sd, basis)

    def seconds(self, num_seqs: int) -> float:
        """Seconds of a step with this many sequences."""
        return self.step_s + self.per_sequence_s * num_seqs

    def drafting_s(self, num_seqs: int, passes: int) -> float:
        """Seconds of drafts for this many sequences, made in `passes` passes of the drafter."""
        return passes * ((self.draft_step_s or 0.0) + self.draft_sequence_s * num_seqs)
