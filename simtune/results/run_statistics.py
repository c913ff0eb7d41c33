"""Statistics and verdicts of a run that follow from counts and latencies, whether these are kept as columns or sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from simtune.arrays import Ints
from simtune.engine import Tally
from simtune.errors import UsageError
from simtune.results.energy import Power, energy_of
from simtune.results.outcome import Outcome
from simtune.results.steady import Steadiness, needed_for, steadiness
from simtune.results.summary import Distribution, FirstTokenParts, HeldBack, Metric, SimulationSummary, SloLimit
from simtune.results.summing import cache_uses, changed_ranks, instances, rejections, scaling, verifications
from simtune.specs.workload import Slo
from simtune.workload.requests import RequestStream

METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2el", "queue", "prefill", "transfer", "decode")
PERCENTILES = ("p50", "p90", "p95", "p99")
"""Percentiles of a summary."""
InSystem = tuple[Ints, Ints, int]
"""Requests in the system, and requests waiting, as sampled arrivals find them, and the number of all arrivals."""


class Sums(NamedTuple):
    """Sums over the requests of a run; tokens are those of requests that were answered in the time that counts."""

    prompt_tokens: int
    output_tokens: int
    preemptions: int
    resent: int
    answered: Sequence[int]
    """Requests that each core answered, those of the warm-up included."""
    finished: int
    """Requests that were answered in the time that counts: from the first arrival after the warm-up."""
    all_output_tokens: int
    """Output tokens of all answered requests, those of the warm-up included."""


class RunStatistics(ABC):
    """Statistics of a run. A derived class keeps the requests, as columns or as sums and sketches."""

    outcome: Outcome
    num_gpus: int
    slo: Slo
    offered_rate_rps: float | None
    scale: float
    power: Power | None
    searched_users: int | None = None
    """Users of a closed loop, if a search chose their number."""

    # --- what a derived class knows ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def head(self) -> RequestStream:
        """Requests, or the first of them: their classes, and the SLOs of these."""

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Number of requests."""

    @abstractmethod
    def num_completed(self, request_class: int | None = None) -> int:
        """Return the number of requests that were answered to the end, of one class or of all."""

    def num_judged(self, request_class: int | None = None) -> int:
        """Return the number of requests that were answered to the end after the warm-up, of one class or of all."""
        return self.num_completed(request_class)

    @abstractmethod
    def num_rejected(self, request_class: int | None = None) -> int:
        """Return the number of requests that full queues rejected, of one class or of all."""

    @property
    def num_rejected_judged(self) -> int:
        """Rejected requests that are not of the warm-up."""
        return self.num_rejected()

    @property
    @abstractmethod
    def num_good(self) -> int:
        """Requests that were answered within every limit that applies to them."""

    @property
    @abstractmethod
    def sums(self) -> Sums:
        """Sums over requests."""

    @property
    @abstractmethod
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last finish; 0 if nothing finished."""

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last finish, warm-up included: that in which instances were busy."""
        return self.duration_s

    @property
    @abstractmethod
    def lifetimes(self) -> float | None:
        """Time in which requests arrive, over the mean end-to-end latency; None if they have no rate or none ends."""

    @abstractmethod
    def in_system(self) -> InSystem | None:
        """Return the requests in the system at arrivals; None for a load that no deployment keeps up with or not."""

    @abstractmethod
    def statistic(self, metric: str, statistic: str, request_class: int | None = None) -> float | None:
        """Return `mean` or a percentile such as `p99` of one of METRICS; None if no request has a value."""

    @abstractmethod
    def distributions(self, noise: bool) -> dict[Metric, Distribution]:
        """Return the distribution of every metric."""

    @property
    @abstractmethod
    def warm_up_requests(self) -> int | None:
        """Requests after which TTFT has settled; None if that is not seen."""

    @property
    def held_back(self) -> HeldBack | None:
        """Times for which a client that limits requests under way held some back; None without such a client."""
        return None

    def first_token_parts(self) -> tuple[FirstTokenParts, ...]:
        """Return the mean parts of the TTFT of all requests and of the slowest; empty if requests are not kept."""
        return ()

    # --- what follows -----------------------------------------------------------------------------------------

    def objectives(self) -> list[tuple[int | None, str | None, Slo]]:
        """Return (class index, class name, SLO): see `objectives`."""
        return objectives(self.head, self.slo)

    @property
    def refused(self) -> int:
        """Requests that exceed max_model_len; 0 for a run that was stopped early, where the number is not known."""
        return 0 if self.outcome.aborted else self.outcome.refused

    @property
    def unserved(self) -> int:
        """Requests left when no instance was up any more to serve them; 0 for a run that was stopped early."""
        if self.outcome.aborted:
            return 0
        return self.num_requests - self.num_completed() - self.refused - self.num_rejected() - len(self.outcome.stopped)

    @cached_property
    def steadiness(self) -> Steadiness | None:
        """Verdict on whether the deployment keeps up with the load (`simtune.results.steady`).

        None if the question does not apply: to a closed loop, whose users wait; to a client that holds requests back;
        to a batch, to requests that all come at once, and to a run that was stopped early. Requests left when no
        instance is up make any system saturated.
        """
        if self.unserved:
            return "saturated"
        in_system = self.in_system()
        return None if in_system is None else steadiness(*in_system)

    @property
    def saturated(self) -> bool:
        """True if requests certainly pile up."""
        return self.steadiness == "saturated"

    @cached_property
    def too_few_for(self) -> tuple[str, ...]:
        """Percentiles of the summary and of the SLO for which too few requests ended."""
        short = {p: None for p in PERCENTILES if self.num_judged() < needed_for(p)}
        for index, name, slo in self.objectives():
            of_class, count = "" if name is None else f" of class {name}", self.num_judged(index)
            short |= {f"{s}{of_class}": None for _, s, _ in slo.limits() if count < needed_for(s)}
        return tuple(short)

    @cached_property
    def limits(self) -> list[SloLimit]:
        """All lines of the SLO, the run's own and those of classes that have one, with their values."""
        lines = []
        for index, name, slo in self.objectives():
            for metric, statistic, limit in slo.limits():
                # Latencies of a saturated system grow with the length of the run, so it has no value.
                value = None if self.saturated else self.statistic(metric, statistic, index)
                met = value is not None and value <= limit
                lines.append(
                    SloLimit(
                        request_class=name, metric=metric, statistic=statistic, limit_s=limit, value_s=value, met=met
                    )
                )
        return lines

    @property
    def meets_slo(self) -> bool:
        """True if all lines hold, nothing was refused or rejected, and the run was neither saturated nor stopped."""
        if self.outcome.aborted or self.saturated or self.refused or self.num_rejected():
            return False
        return self.attains and all(limit.met for limit in self.limits)

    @property
    def attains(self) -> bool:
        """True if as many of the requests are within all limits at once as the SLO demands."""
        return self.slo.attainment is None or (self.slo_attainment or 0.0) >= self.slo.attainment

    @property
    def slo_attainment(self) -> float | None:
        """Share of the finished and the rejected requests answered within every limit that applies to them."""
        judged = self.num_judged() + self.num_rejected_judged
        return self.num_good / judged if judged else None

    @property
    def goodput_rps(self) -> float | None:
        """Requests per second answered within their limits: for a stable system the offered rate times the attainment,
        for any other one the number of such requests over the duration."""
        if self.offered_rate_rps is not None and self.steadiness == "stable":
            return self.offered_rate_rps * (self.slo_attainment or 0.0)
        if self.head.warm_up:
            # Of what finished in the time that counts, as many are good as of those that count.
            rate, judged = self._per_second(self.sums.finished), self.num_judged()
            return None if rate is None else rate * (self.num_good / judged if judged else 0.0)
        return self._per_second(self.num_good)

    @property
    def output_tokens_per_s(self) -> float | None:
        """Output tokens per second of the requests that count; None if the run has no duration."""
        return self._per_second(self.sums.output_tokens)

    @cached_property
    def drafted(self) -> Tally:
        """Tally of all verifications; zeros if no pool drafts."""
        tallies = [core.drafting for core in self.outcome.cores]
        return Tally(*(sum(column) for column in zip(*tallies, strict=True)))

    def _per_second(self, count: int) -> float | None:
        """Return the rate of `count` events in the simulated cores, on the whole deployment."""
        return count * self.scale / self.duration_s if self.duration_s > 0 else None

    def summary(self, *, noise: bool = True) -> SimulationSummary:
        """Return the statistics of the run; None stands for a number that does not exist or is unbounded. Without
        `noise` intervals are left out, which take longer than all the rest."""
        sums, output_rate, gpus = self.sums, self.output_tokens_per_s, self.num_gpus - self.outcome.mean_free_gpus
        metrics = self.distributions(noise and not self.saturated)
        tpot_s = metrics["tpot"].mean
        core_use = instances(self.outcome.cores, sums.answered, self.span_s, self.outcome.scaled)
        energy = energy_of(self.power, core_use, self.span_s, sums.all_output_tokens, self.scale)
        return SimulationSummary(
            requests=self.num_requests,
            completed=self.num_completed(),
            refused=self.refused,
            unserved=self.unserved,
            preemptions=sums.preemptions,
            duration_s=self.duration_s,
            saturated=self.saturated,
            steadiness=self.steadiness,
            lifetimes=self.lifetimes,
            too_few_for=self.too_few_for,
            offered_rate_rps=self.offered_rate_rps,
            request_throughput_rps=self._per_second(sums.finished),
            goodput_rps=self.goodput_rps,
            slo_attainment=self.slo_attainment,
            output_tokens_per_s=output_rate,
            total_tokens_per_s=self._per_second(sums.output_tokens + sums.prompt_tokens),
            output_tokens_per_s_per_gpu=None if output_rate is None else output_rate / gpus,
            output_tokens_per_s_per_user=1 / tpot_s if tpot_s else None,
            num_gpus=self.num_gpus,
            metrics=metrics,
            warm_up_requests=self.warm_up_requests,
            resent=sums.resent,
            transferred_bytes=self.outcome.transferred_bytes,
            instances=core_use,
            slo=tuple(self.limits),
            **self._where_it_applies(),
            **energy,
        )

    def _where_it_applies(self) -> dict[str, Any]:
        """Return the fields that not all runs have; the others are left out of the file."""
        outcome, limited = self.outcome, self.outcome.rejected is not None
        fields: dict[str, Any] = {
            "autoscaling": tuple(map(scaling, outcome.scaled)),
            "rank_changes": tuple(map(changed_ranks, outcome.rank_turns)),
            **cache_uses(outcome.cores),
            "speculation": verifications(self.drafted) if self.drafted.rounds else None,
            "held_back": self.held_back,
            "rejections": rejections(self.num_rejected, self.head.class_names, self.num_requests) if limited else None,
            "first_token_parts": self.first_token_parts(),
            "users": self.searched_users,
        }
        return {name: value for name, value in fields.items() if value} | self.outcome.controlled


def objectives(stream: RequestStream, slo: Slo) -> list[tuple[int | None, str | None, Slo]]:
    """Return (class index, class name, SLO): one entry for all requests, or one per class if classes have their own.

    Raises UsageError for a limit of families if the requests are none.
    """
    set_slos = [limits for limits in (slo, *stream.slos) if limits is not None]
    if stream.families is None:
        for name in (name for name in ("family_s", "family_active_s") if any(getattr(x, name) for x in set_slos)):
            raise UsageError(
                f"slo.{name} limits families of a request graph or sessions, and this load has none; leave it out"
            )
    if all(class_slo is None for class_slo in stream.slos):
        return [(None, None, slo)]
    return [
        (index, name, slo if class_slo is None else class_slo)
        for index, (name, class_slo) in enumerate(zip(stream.class_names, stream.slos, strict=True))
    ]
