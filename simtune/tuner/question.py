"""A study with all named inputs loaded, and the settings that follow from it for each candidate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from simtune.costs.protocol import StepCosts
from simtune.results.result import WHOLE, Result
from simtune.sim.deployment import Deployment, deploy, max_model_len_for
from simtune.sim.drafting import Drafting
from simtune.sim.plan_parts import ROUTER
from simtune.specs.base import Dtype
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.preset import EnginePreset
from simtune.specs.references import is_path
from simtune.specs.study import Study
from simtune.specs.traces import Trace
from simtune.specs.workload import Workload
from simtune.tuner.candidate_costs import ShareKey, idle_j_per_token, of_all, parts_of_load, run_hours, shared_hardware
from simtune.tuner.doubt.draw_spread import DrawSpread
from simtune.tuner.drafting import Draft
from simtune.tuner.objectives import OBJECTIVES, Limit, Objective, PlanFacts
from simtune.tuner.search.draws import MOST_REQUESTS, DrawnLengths, LoadDraws
from simtune.tuner.space.candidates import Candidate, PoolChoice, PoolShape
from simtune.workload.requests import RequestStream
from simtune.workload.trace_media import media_kinds

CAPACITY_REQUESTS = 8000
"""Least number of requests whose mean lengths a capacity is of."""
SAMPLED_FAMILIES = 200
"""Families that are drawn to find how many requests they have on average."""
SAMPLED_CORES = 4
"""Cores that are simulated during the search, if a deployment has more; the chosen plan is confirmed on all cores."""


@dataclass(frozen=True)
class StudyEngine:
    """An engine among several of a study."""

    preset: EnginePreset | None
    """None for no engine."""
    hardware: tuple[Hardware, ...]
    """Hardware profiles with the kernels of the engine, in the order of the study."""


@dataclass(frozen=True)
class Question:
    """A study with all named inputs loaded. Sent to worker processes."""

    study: Study
    model: Model
    hardware: tuple[Hardware, ...]
    """Hardware profiles, in the order of the study."""
    workload: Workload
    trace: Trace | None
    drafts: tuple[Draft, ...] = ()
    """Drafters of the study."""
    fixed_drafting: Mapping[str, Drafting] = field(default_factory=dict)
    """Acceptance and draft model of the speculation of fixed pools, by the name of the pool."""
    engine: EnginePreset | None = None
    """Engine preset with the settings that the search leaves open, if the study names one."""
    engines: Mapping[str, StudyEngine] = field(default_factory=dict)
    """Engines of variants by the name that the study gives."""
    checkpoints: Mapping[str, Model] = field(default_factory=dict)
    """Models of variants by the name that the study gives."""
    fixed_hardware: Mapping[str, Hardware] = field(default_factory=dict)
    """Hardware of fixed pools with the kernels of their engine, if it is another one than the study's, by the name of
    the pool."""

    @property
    def requests(self) -> int:
        """Requests of a simulation, by the study or else by the workload."""
        return self.study.search.requests or self.workload.requests

    @property
    def objective(self) -> Objective:
        """Objective of the study."""
        return OBJECTIVES[self.study.objective]

    @property
    def limits(self) -> list[Limit]:
        """Limits of the study on other objectives."""
        return list(Limit.of(self.study.limits))

    @cached_property
    def draw_spread(self) -> DrawSpread:
        """Spread of the highest rates within the SLO between draws of the requests."""
        return DrawSpread.of(self.workload.slos(self.study.slo))

    @property
    def searches_rate(self) -> bool:
        """True if the objective is a rate, which the search varies; otherwise the load is the workload's."""
        return self.objective.searches_rate

    @property
    def searches_users(self) -> bool:
        """True if the objective is a number of users, which the search varies."""
        return self.objective.searches_users

    @cached_property
    def scales(self) -> bool:
        """True if the study has plans whose instances come and go with the load."""
        return any(variant.scales for variant in self.study.variants)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the drafters, and '' for no drafter; empty if the study has no drafters."""
        return ("", *(draft.choice.label for draft in self.drafts)) if self.drafts else ()

    @property
    def profiles(self) -> dict[str, Hardware]:
        """Hardware by the name that the study gives."""
        return {entry.profile: hardware for entry, hardware in zip(self.study.hardware, self.hardware, strict=True)}

    def model_of(self, shape: PoolShape) -> Model:
        """Return the model of pools of a shape: the checkpoint of their variant, or the study's."""
        return self.checkpoints[shape.checkpoint] if shape.checkpoint else self.model

    @property
    def models(self) -> tuple[Model, ...]:
        """The model of the study, and those of its variants."""
        return self.model, *self.checkpoints.values()

    def hardware_of(self, choice: PoolChoice) -> Hardware:
        """Return the hardware of a pool, with the kernels of its engine."""
        fixed = None if choice.fixed is None else self.fixed_hardware.get(choice.fixed.name)
        return fixed or self._profile(choice.shape)

    def shared_hardware(self, choice: PoolChoice) -> Hardware:
        """Return the hardware of a pool: the share of it that the variant of the pool sets, if it sets one.

        Raise Infeasible if nothing is known of shares of the hardware.
        """
        return shared_hardware(choice, self.hardware_of(choice), self._shared)

    @cached_property
    def _shared(self) -> dict[ShareKey, Hardware]:
        """Shares of hardware that were computed."""
        return {}

    def _profile(self, shape: PoolShape) -> Hardware:
        """Return the hardware of pools of a shape, with the kernels of their engine."""
        if not shape.engine:
            return self.profiles[shape.gpu]
        profiles = [entry.profile for entry in self.study.hardware]
        return self.engines[shape.engine].hardware[profiles.index(shape.gpu)]

    def cores_apart(self, candidate: Candidate) -> bool:
        """Return True if some cores of a wide deployment can stand for all: not for a batch, whose busiest core ends
        it, nor for families, whose requests are spread over cores."""
        load = self.workload
        if candidate.scales or len(candidate.pools) > 1 or load.waits_for_answers or self.sends_families or load.batch:
            return False
        return ROUTER.find(candidate.routing(self.study).kind).deals_in_turn

    def num_requests(self, candidate: Candidate, requests: int | None = None) -> int:
        """Return the requests of all instances such that the simulated ones receive `requests`, by default those of the
        study."""
        requests = self.requests if requests is None else requests
        if not self.cores_apart(candidate):
            return requests
        return -(-requests * candidate.pools[0].instances // self.simulated_instances(candidate))

    def simulated_instances(self, candidate: Candidate) -> int:
        """Return the number of instances of its first pool that are simulated during the search."""
        pool = candidate.pools[0]
        if not self.cores_apart(candidate):
            return pool.instances
        return min(pool.instances, -(-SAMPLED_CORES // (pool.shape.pp * pool.shape.attention_dp)))

    def stream(self, candidate: Candidate, rate_rps: float | None = None, requests: int | None = None) -> RequestStream:
        """Return the requests for a candidate, of which `requests` are simulated; by default as many as the study asks
        for."""
        stream = self.draws.stream(self.num_requests(candidate, requests))
        return stream if rate_rps is None else stream.at_rate(rate_rps)

    def capacity_stream(self, candidate: Candidate) -> RequestStream:
        """Return the requests that the capacity of a candidate is of: enough for their mean lengths to be those of the
        load, as runs are made longer than the study's own number; of a batch all that there are."""
        requests = self.num_requests(candidate)
        return self.draws.stream(requests if self.workload.batch else max(requests, CAPACITY_REQUESTS))

    @property
    def sends_families(self) -> bool:
        """True if every arrival is a family of requests: of a graph, or a session whose turns follow answers."""
        return self.workload.sends_families or (self.trace is not None and self.trace.turns is not None)

    def arrivals(self, requests: int) -> int:
        """Return the arrivals that bring a number of simulated requests: fewer than these if families arrive."""
        if not self.sends_families:
            return requests
        sample = self.draws.stream(SAMPLED_FAMILIES)
        return max(1, requests * sample.arrivals // len(sample))

    @property
    def draws(self) -> LoadDraws:
        """Draws of the requests, of any number of requests."""
        return LoadDraws(self.workload, self.trace, self.study.seed, self.model.towers)

    def length_limit(self, candidates: Iterable[Candidate]) -> int:
        """Return a max_model_len for all requests that may be simulated: of every draw, as long as a run may become."""
        lengths = self._longest_draws(candidates)
        return max(max_model_len_for(model, *of_draw) for of_draw in lengths for model in self.models)

    def longest_request(self, candidates: Iterable[Candidate]) -> int:
        """Return the tokens of the longest request that may be simulated, prompt and output."""
        return max(longest for _, longest in self._longest_draws(candidates))

    def _longest_draws(self, candidates: Iterable[Candidate]) -> list[tuple[int, int]]:
        widest = max(candidates, key=self.num_requests)
        return self._drawn_lengths.of(max(self.num_requests(widest), self.num_requests(widest, MOST_REQUESTS)))

    @cached_property
    def _drawn_lengths(self) -> DrawnLengths:
        return DrawnLengths(self.draws, 1 + self.study.search.confirm.draws)

    def settings_of(self, shape: PoolShape) -> Mapping[str, Any]:
        """Return the settings that pools of a hardware profile, a dtype of weights and a number of stages have in
        common.

        These are the name of the profile, or of the variant with the kernels of the study's engine, and the settings of
        that engine.
        """
        hardware, name = self._profile(shape), shape.engine or self.study.single_engine
        settings: dict[str, Any] = {"hardware": shape.gpu if is_path(shape.gpu) else hardware.name}
        settings |= {"encoder": {}} if shape.encodes and media_kinds(self.workload, self.trace) else {}
        preset = self.engines[shape.engine].preset if shape.engine else self.engine
        if preset is None:
            return settings if name is None else {**settings, "engine": name}
        served = self.model_of(shape).with_weights(cast(Dtype, shape.weight_dtype) or None)
        return {**settings, "engine": name, **preset.settings(hardware.device, served, shape.pp)}

    def plan(self, candidate: Candidate, max_model_len: int) -> Plan:
        """Return the plan of a candidate."""
        return candidate.plan(self.study, max_model_len, self.settings_of)

    def draft(self, label: str) -> Draft | None:
        """Return the drafter of a label; None if there is none."""
        return next((draft for draft in self.drafts if draft.choice.label == label), None)

    def drafting(self, candidate: Candidate) -> dict[str, Drafting]:
        """Return acceptance and draft model of each pool that speculates, by the name of the pool."""
        drafting_by_pool: dict[str, Drafting] = {}
        for pool in candidate.pools:
            if (drafting := self.drafting_of(pool)) is not None:
                drafting_by_pool[pool.pool_name if pool.fixed is None else pool.fixed.name] = drafting
        return drafting_by_pool

    def drafting_of(self, pool: PoolChoice) -> Drafting | None:
        """Return acceptance and draft model of a pool: of its drafter, or of the speculation it is fixed with."""
        if pool.fixed is not None:
            return self.fixed_drafting.get(pool.fixed.name)
        draft = self.draft(pool.drafter)
        return None if draft is None else draft.drafting

    def deploy(
        self, candidate: Candidate, max_model_len: int, costs: Mapping[str, StepCosts] | None = None
    ) -> Deployment:
        """Return the candidate ready to be simulated; `costs` are step costs by the name of the pool, if they are
        known."""
        plan, drafting = self.plan(candidate, max_model_len), self.drafting(candidate)
        pools = zip(plan.pools, candidate.pools, strict=True)
        hardware = {pool.name: self.hardware_of(choice) for pool, choice in pools}
        return deploy(plan, self.model_of(candidate.decoding.shape), hardware, costs, drafting=drafting)

    def facts(self, candidate: Candidate, stream: RequestStream) -> PlanFacts:
        """Return the facts about a candidate that objectives need."""
        parts = parts_of_load(stream, self.simulated_instances(candidate), candidate.pools[0].instances)
        return PlanFacts(
            candidate.num_gpus,
            self.usd_per_hour(candidate),
            float(stream.output_tokens.sum()) / stream.arrivals,
            stream.batch or not bool(stream.needed.all()),
            idle_j_per_token(candidate, self.profiles, parts, stream.offered_rate_rps),
            run_hours(candidate, self.profiles, parts) if self.scales else None,
        )

    def usd_per_hour(self, candidate: Candidate) -> float | None:
        """Return the price of all GPUs, each at the price of its kind; None if one of them has no price."""
        prices = [self.profiles[pool.shape.gpu].device.price_per_hour_usd for pool in candidate.pools]
        return of_all(prices, [pool.devices for pool in candidate.pools])

    def watch(
        self, candidate: Candidate, deployment: Deployment, rate_rps: float | None, requests: int | None = None
    ) -> Result:
        """Simulate a candidate under its load, or at another rate, to the end; some cores stand for all if they can.

        With `requests` the load is shorter: the beginning of its own.
        """
        stream = self.stream(candidate, rate_rps, requests)
        return deployment.simulate(stream, self.study.slo, cores=SAMPLED_CORES)

    def judge(self, candidate: Candidate, deployment: Deployment, rate_rps: float | None) -> Result:
        """Simulate a candidate as `watch` does, until it cannot meet the SLO any more."""
        stream = self.stream(candidate, rate_rps)
        return deployment.simulate(stream, self.study.slo, cores=SAMPLED_CORES, until_lost=WHOLE)
