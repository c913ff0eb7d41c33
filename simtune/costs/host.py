"""Host time of a step: whose it is, how far off it may be, and what it rests on.

What a plan states comes first, then what the preset of its engine's release states (presets fill in what a plan leaves
out), then the host times of the hardware profile, which were measured with some engine or with none.
"""

from __future__ import annotations

from dataclasses import dataclass

from simtune.costs.predict import Basis
from simtune.specs.hardware import Hardware
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

    times: HostTimes
    """Times of a step, those of several ranks included if there are several."""
    exposed: HostTimes | None
    """Part of them that asynchronous scheduling does not hide; None if it hides nothing."""
    log_sd: float
    """Typical error of these times, as a logarithm."""
    basis: Basis
    factor: float = 1.0
    """Factor by which all times are off."""

    @classmethod
    def of(cls, pool: Pool, hardware: Hardware, factor: float = 1.0) -> HostCosts:
        """Return the host time that the pool states, or else that of its hardware profile, times `factor`."""
        hidden = HostTimes(step_s=0.0, per_sequence_s=0.0)
        exposed = None if pool.exposed_host == "all" else pool.exposed_host or hidden
        if pool.host is not None:
            times = _of_ranks(pool.host) if pool.parallelism.devices > 1 else pool.host
            # A plan that states times without an origin knows them: they are not redrawn.
            log_sd, basis = (0.0, Basis.MEASURED) if times.origin is None else _OF_ORIGIN[times.origin]
            return cls(times, exposed, log_sd if times.log_sd is None else times.log_sd, basis, factor)
        host = hardware.host
        times = HostTimes(step_s=host.step_s, per_sequence_s=host.per_sequence_s)
        log_sd, basis = _OF_PROFILE.get(host.provenance.kind, (ASSUMED_LOG_SD, Basis.DATA_SHEET))
        return cls(times, exposed, log_sd, basis, factor)

    @property
    def states_drafting(self) -> bool:
        """True if the time of a drafter's passes is stated."""
        return self.times.draft_step_s is not None

    def seconds(self, num_seqs: int) -> float:
        """Seconds of a step with this many sequences."""
        return self.factor * (self.times.step_s + self.times.per_sequence_s * num_seqs)

    def exposed_s(self, num_seqs: int, hides: bool) -> float:
        """Seconds of these that come on top of the GPU's: all, or if scheduling hides the host, what is exposed."""
        if not hides or self.exposed is None:
            return self.seconds(num_seqs)
        return self.factor * (self.exposed.step_s + self.exposed.per_sequence_s * num_seqs)

    def drafting_s(self, num_seqs: int, passes: int) -> float:
        """Seconds of drafts for this many sequences, made in `passes` passes of the drafter, which nothing hides."""
        per_pass_s = (self.times.draft_step_s or 0.0) + (self.times.draft_sequence_s or 0.0) * num_seqs
        return self.factor * passes * per_pass_s


def _of_ranks(times: HostTimes) -> HostTimes:
    """Return the times of an instance of several GPUs."""
    more_s, more_sequence_s = times.ranks_step_s or 0.0, times.ranks_sequence_s or 0.0
    update = {"step_s": times.step_s + more_s, "per_sequence_s": times.per_sequence_s + more_sequence_s}
    return times.model_copy(update=update)
