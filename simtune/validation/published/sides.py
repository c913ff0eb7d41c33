"""A side of a comparison: from settings to one number, and to the parts of its time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.memory import GIB, Memory, kv_capacity
from simtune.costs.other_engines import load_kernels
from simtune.errors import Infeasible, UsageError
from simtune.results.result import Result, statistic_of
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.drafting import Drafting
from simtune.sim.pools import DeployedPool
from simtune.specs.catalog import load_acceptance, load_model
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.systems import (
    LATENCIES,
    HighestRate,
    Measure,
    MemoryHeld,
    OneStep,
    StepSeconds,
    Systems,
    UnderLoad,
    alternatives,
    merged,
    plan_of,
    workload_of,
)
from simtune.workload.requests import RequestStream, build_stream

Parts = Mapping[str, float]
"""Seconds for each output token by part of the step, or bytes by what takes them."""

REST = "drafts, host, waiting"
"""Name of the measured time that is in no part of the target's steps."""


@dataclass(frozen=True)
class SideResult:
    """Result of one side."""

    value: float
    parts: Parts
    unit: str
    note: str = ""
    """Alternative of `best_of` that was best, or a note that the system is saturated."""
    tokens_per_round: float = 1.0
    """Tokens of a round of a request, if it drafts."""
    per: str = "token"
    """Unit that the parts are given for: an output token, or a request."""
    by_formula: Mapping[str, float] = field(default_factory=dict)
    """Results of published formulas for the requests; their ratio between two sides is the gain by the formula."""


class Runner:
    """Measures sides, and each equal side once."""

    def __init__(self, hardware: str | None = None) -> None:
        self._hardware = hardware
        self._deployed: dict[str, Deployment] = {}
        self._measured: dict[str, SideResult] = {}

    def measure(self, family: Systems, side: Mapping[str, Any], measure: Measure) -> SideResult:
        """Measure a side, with all its phases, each with the best of its alternatives."""
        phases = side.get("phases")
        if not phases:
            return self._best(family, side, measure)
        common = {key: value for key, value in side.items() if key not in ("phases", "beside")}
        results = [
            (float(phase.get("times", 1.0)), self._best(family, merged(common, phase.get("setup", {})), measure))
            for phase in phases
        ]
        totals = [times * result.value for times, result in results]
        parts: dict[str, float] = {}
        for times, result in results:
            for part, seconds in result.parts.items():
                parts[part] = parts.get(part, 0.0) + times * seconds
        return SideResult(max(totals) if side.get("beside") else sum(totals), parts, results[0][1].unit)

    def _best(self, family: Systems, side: Mapping[str, Any], measure: Measure) -> SideResult:
        wins = min if is_cost(measure) else max
        results = [self._once(family, alternative, measure) for alternative in alternatives(side)]
        best = wins(results, key=lambda one: one.value)
        if len(results) > 1:
            best = replace(
                best, note=f"{best.note} best of {len(results)}: {_flat(side['best_of'][results.index(best)])}".strip()
            )
        return best

    def _once(self, family: Systems, side: Mapping[str, Any], measure: Measure) -> SideResult:
        key = json.dumps([family.name, side, measure.model_dump()], sort_keys=True)
        if key not in self._measured:
            self._measured[key] = self._run(Side(family, side, self._hardware, self._deployed), measure)
        return self._measured[key]

    def _run(self, side: Side, measure: Measure) -> SideResult:
        if isinstance(measure, MemoryHeld):
            return side.held(measure)
        if isinstance(measure, StepSeconds):
            return side.step(measure)
        return side.highest_rate(measure) if isinstance(measure, HighestRate) else side.under_load(measure)


def _flat(settings: Mapping[str, Any]) -> str:
    """Settings in one line, by the last words of their keys; kinds are left out."""
    words = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            words.append(_flat(value))
        elif key != "kind":
            words.append(f"{key} {value}")
    return ", ".join(words)


def is_cost(measure: Measure) -> bool:
    """True if less of the measure is better."""
    if isinstance(measure, UnderLoad):
        return measure.metric in (*LATENCIES, "duration", "group", "tokens")
    return isinstance(measure, StepSeconds)


def in_words(measure: Measure) -> str:
    """Return what is measured, for a column of a table."""
    if isinstance(measure, HighestRate):
        return "highest rate, requests/s"
    if isinstance(measure, StepSeconds):
        return "step, s per token"
    if isinstance(measure, MemoryHeld):
        return measure.metric.replace("_", " ") + (", tokens" if measure.metric == "longest_context" else "")
    name = measure.metric.replace("_", " ").replace(" per s", "/s")
    if measure.metric in LATENCIES:
        return f"{measure.statistic} {name.upper() if len(name) == 4 else name}, s"
    return name + (", s" if measure.metric in ("duration", "group") else "")


class Side:
    """A plan under a load, or one step of it."""

    def __init__(
        self, family: Systems, side: Mapping[str, Any], hardware: str | None, deployed: dict[str, Deployment]
    ) -> None:
        self._family, self._deployed = family, deployed
        self._side = side if hardware is None else moved(side, hardware)

    # --- what runs ---

    @cached_property
    def plan(self) -> Plan:
        """Plan of the side."""
        return plan_of(self._side, "side")

    @cached_property
    def model(self) -> Model:
        """Model of the file, or by name."""
        name = str(self._side.get("model"))
        return self._family.own_model(name) or load_model(name)

    @cached_property
    def hardware(self) -> dict[str, Hardware]:
        """Hardware of every pool, by the name of the pool."""
        names = {(pool.hardware, pool.engine): None for pool in self.plan.pools}
        profiles = {name: self.profile(*name) for name in names}
        return {pool.name: profiles[pool.hardware, pool.engine] for pool in self.plan.pools}

    def profile(self, hardware: str, engine: str | None) -> Hardware:
        """Return a profile with the kernels of an engine."""
        return load_kernels(hardware, engine)

    @property
    def pool(self) -> Pool:
        """The only or first one."""
        return self.plan.pools[0]

    @cached_property
    def key(self) -> str:
        """Text that is equal for sides that differ in their load only. Sides of several families share it unless they
        depend on what a family defines.
        """
        defines = self._family.own_model(self.model.name) or any(pool.speculation for pool in self.plan.pools)
        family = self._family.name if defines else None
        return json.dumps([family, self.model.name, self.plan.to_data()], sort_keys=True)

    @cached_property
    def deployment(self) -> Deployment:
        """Deployment that `simulate` runs; the same for all sides of one key."""
        if self.key not in self._deployed:
            drafting = {pool.name: self._drafting(pool) for pool in self.plan.pools if pool.speculation is not None}
            plan = self.plan.model_copy(update={"model": self.model.name})
            self._deployed[self.key] = deploy(plan, self.model, self.hardware, None, drafting=drafting)
        return self._deployed[self.key]

    def _drafting(self, pool: Pool) -> Drafting:
        assert pool.speculation is not None
        name, rates = pool.speculation.drafter.own_model, pool.speculation.acceptance
        model = None if name is None else self.draft_model(name)
        return Drafting(self._family.own_acceptance(rates) or load_acceptance(rates), model)

    def draft_model(self, name: str) -> Model:
        """Return a model that drafts, of the file or by name."""
        return self._family.own_model(name) or load_model(name)

    @cached_property
    def stream(self) -> RequestStream:
        """The requests; the same for both sides unless an order or branches make them others."""
        workload = workload_of(self._side, "side")
        stream = build_stream(workload, None, requests=workload.requests, seed=0)
        if "branches" in self._side:
            stream = grouped(stream, self._side["branches"], self._side.get("finish_first"))
        order = self._side.get("order")
        if order is None:
            return stream
        return at_once(stream, order_of(stream, order, self._side.get("prediction_sigma", 0.35)))

    # --- what is measured ---

    def under_load(self, measure: UnderLoad) -> SideResult:
        """A number of one run."""
        result = self.deployment.simulate(self.stream)
        value = self._value(result, measure)
        gpus = result.num_gpus if measure.per_gpu else 1
        note = "saturated" if result.saturated else ""
        if measure.metric == "ttft":
            seconds = {name: result.values(name) for name in ("queue", "prefill", "transfer")}
            waits = {name: float(values.mean()) for name, values in seconds.items() if len(values)}
            return SideResult(value / gpus, waits, in_words(measure), note, per="request")
        formulas = by_formula(result, self.pool.batching.max_num_seqs)
        parts = self._parts(result)
        return SideResult(value / gpus, parts, in_words(measure), note, per_round(result), by_formula=formulas)

    def _value(self, result: Result, measure: UnderLoad) -> float:
        metric = measure.metric
        if metric in LATENCIES:
            names = result.stream.class_names
            if measure.request_class is not None and measure.request_class not in names:
                raise UsageError(f"no class of requests is called {measure.request_class!r}: {', '.join(names)}")
            of_class = None if measure.request_class is None else names.index(measure.request_class)
            return statistic_of(result.values(metric, of_class), measure.statistic)
        if metric == "duration":
            return result.duration_s
        if metric == "tokens":
            delivered = result.stream.output_tokens[result.completed].sum()
            return float(delivered) + sum(result.outcome.stopped.values())
        if metric == "group":
            graph = result.stream.graph
            size = int(self._side.get("branches", 1)) if graph is None else graph.size
            ends = np.nanmax(result.finish_s.reshape(-1, size), axis=1)
            return float((ends - result.arrival_s.reshape(-1, size).min(axis=1)).mean())
        return float(getattr(result.summary(), metric))

    def highest_rate(self, measure: HighestRate) -> SideResult:
        """Find the highest rate by bisection on a logarithmic scale, with the same requests at every rate."""
        rate = self.highest_rate_of(self.stream, measure)
        result = self.deployment.simulate(self.stream.at_rate(rate))
        gpus = result.num_gpus if measure.per_gpu else 1
        return SideResult(rate / gpus, self._parts(result), in_words(measure))

    def highest_rate_of(self, stream: RequestStream, measure: HighestRate) -> float:
        """Return the highest rate of some requests. Raise Infeasible if the limits are not met at the lowest one."""

        def ok(rate: float) -> bool:
            return meets(self.deployment.simulate(stream.at_rate(rate)), measure)

        rate = bisected(ok, measure.from_rps, measure.to_rps, measure.tolerance)
        if rate is None:
            raise Infeasible(f"the limits are not met at {measure.from_rps:g} requests/s either; lower from_rps")
        return rate

    def step(self, measure: StepSeconds) -> SideResult:
        """Seconds of one step over the tokens that it delivers."""
        spec = OneStep.model_validate(self._side.get("step", {}), strict=False)
        model = StepModel(self.model, self.hardware[self.pool.name], self.pool)
        most = spec.decodes if isinstance(spec.decodes, int) else self._capacity(spec.context)
        decodes = most if measure.within_s is None else self._most_within(model, spec, most, measure.within_s)
        work = _work(spec, decodes)
        if not work.num_seqs:
            raise UsageError("a step of no decodes and no chunks delivers nothing; give step.decodes or step.chunks")
        delivers = spec.delivers or work.num_seqs
        if measure.per_gpu:
            delivers *= self.pool.parallelism.attention_dp / self.pool.devices
        breakdown = model.breakdown(work)
        if measure.only:
            breakdown = {kind: seconds for kind, seconds in breakdown.items() if kind in measure.only}
            seconds = sum(breakdown.values())
        else:
            seconds = model.seconds(work)
        parts = {kind: part / delivers for kind, part in breakdown.items()}
        return SideResult(seconds / delivers, parts, in_words(measure), f"{decodes} decodes" if decodes else "")

    def _most_within(self, model: StepModel, spec: OneStep, most: int, within_s: float) -> int:
        """Return the most decodes, up to `most`, whose step takes no longer than `within_s`."""
        if model.seconds(_work(spec, 1)) > within_s:
            raise Infeasible(f"a step of one decode already takes longer than {within_s:g} s")
        low, high = 1, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if model.seconds(_work(spec, middle)) <= within_s else (low, middle)
        return low

    def _capacity(self, context: float) -> int:
        memory = self._memory(self.pool)
        most = int(memory.num_blocks * memory.block_size / context)
        if most < 1:
            raise Infeasible(f"not one sequence of {context:,.0f} tokens fits")
        return min(self.pool.batching.max_num_seqs, most)

    def held(self, measure: MemoryHeld) -> SideResult:
        """Tokens that fit."""
        pool = self.pool
        if measure.metric == "longest_context":
            value = self._longest(pool)
            pool = pool.model_copy(update={"max_model_len": value})
        else:
            value = 0
        memory = self._memory(pool)
        parts = {
            "weights, GiB": memory.weights_bytes / GIB,
            "everything else, GiB": memory.other_bytes / GIB,
            "KV cache, GiB": memory.kv_bytes / GIB,
            "KV bytes of a token": memory.kv_bytes_per_token,
        }
        return SideResult(value or memory.num_blocks * memory.block_size, parts, in_words(measure))

    def _memory(self, pool: Pool) -> Memory:
        return kv_capacity(self.model, self.hardware[self.pool.name], pool)

    def _longest(self, pool: Pool) -> int:
        """The longest context of one sequence; with chunked_prefill false, prefilled in one step."""

        def fits(tokens: float) -> bool:
            length = round(tokens)
            budget = pool.batching.max_num_batched_tokens if pool.batching.chunked_prefill else length
            batching = pool.batching.model_copy(update={"max_num_seqs": 1, "max_num_batched_tokens": budget})
            try:
                memory = self._memory(pool.model_copy(update={"batching": batching}))
            except Infeasible:
                return False
            return memory.num_blocks * memory.block_size >= length

        most = bisected(fits, 256.0, float(1 << 24), 0.01)
        if most is None:
            raise Infeasible("not even 256 tokens fit")
        return round(most)

    # --- where the time goes ---

    def _parts(self, result: Result) -> Parts:
        """Seconds for each output token: of the target's steps by kind, at the mean batch and the mean lengths, and
        what the run took besides."""
        stream, outputs = result.stream, float(result.stream.output_tokens.mean())
        context = float((stream.prompt_tokens + stream.output_tokens / 2).mean())
        latency = float(result.values("e2el").mean()) / outputs
        parts: dict[str, float] = {}
        for pool in self.deployment.pools:
            for kind, seconds in self._of_pool(pool, result, context, outputs).items():
                parts[kind] = parts.get(kind, 0.0) + seconds
        return {**parts, REST: max(0.0, latency - sum(parts.values()))}

    def _of_pool(self, pool: DeployedPool, result: Result, context: float, outputs: float) -> dict[str, float]:
        model = self.deployment.step_model(pool)
        parts: dict[str, float] = {}
        if pool.spec.role != "decode":
            prompt = round(float(result.stream.prompt_tokens.mean()))
            for kind, seconds in model.breakdown(StepWork(0, 0, ((0, prompt),), 1)).items():
                parts[kind] = seconds / outputs
        if pool.spec.role != "prefill" and outputs > 1:
            tally, drafts = result.drafted, 0
            if pool.spec.speculation is not None and tally.rounds:
                drafts = round(tally.drafts / tally.rounds)
            batch = self._mean_batch(pool, result)
            decoding = verified(model, batch, context, 1 + drafts)
            for kind, seconds in decoding.items():
                parts[kind] = parts.get(kind, 0.0) + seconds / per_round(result) * (1 - 1 / outputs)
        return parts

    def _mean_batch(self, pool: DeployedPool, result: Result) -> int:
        """Requests that decode at a time on one core, by Little's law, at most its seats."""
        decoding = float(np.nansum(result.decode_s)) / max(result.duration_s, 1e-9) / pool.num_cores
        return max(1, min(pool.spec.batching.max_num_seqs, round(decoding)))


def _work(spec: OneStep, decodes: int) -> StepWork:
    chunks = [(past, new) for past, new in spec.chunks]
    if decodes and spec.shared_prefix and spec.shared_prefix >= spec.context:
        raise UsageError(
            f"setup.step.shared_prefix {spec.shared_prefix:,} is all of the context of {spec.context:,.0f} tokens: "
            "every decode has tokens of its own; give a shorter shared_prefix or a longer context"
        )
    return StepWork(
        decodes, round(decodes * spec.context), chunks, decodes + len(chunks), shared_tokens=spec.shared_prefix
    )


def per_round(result: Result) -> float:
    """Return the tokens that a round of a request delivers, if it drafts; else one."""
    tally = result.drafted
    return 1 + tally.accepted / tally.rounds if tally.rounds else 1.0


def by_formula(result: Result, seats: int) -> dict[str, float]:
    """Return the padded tokens of batches of `seats` prompts over their real tokens, and the mean wait of an M/G/1
    queue (Pollaczek, Khinchine).

    Real tokens stand for a side whose batches are not padded: the formula's gain is of a padded base over its tokens.
    """
    prompts = result.stream.prompt_tokens
    longest = np.maximum.reduceat(prompts, np.arange(0, len(prompts), seats))
    sizes = np.diff([*range(0, len(prompts), seats), len(prompts)])
    formulas = {"padded_tokens": float((longest * sizes).sum() / prompts.sum())}
    service, arrival = result.e2el_s - result.queue_s, result.arrival_s
    if len(arrival) > 1 and arrival[-1] > arrival[0]:
        rate = (len(arrival) - 1) / float(arrival[-1] - arrival[0])
        busy = rate * float(np.nanmean(service))
        if busy < 1:
            formulas["pollaczek_khinchine"] = rate * float(np.nanmean(service**2)) / (2 * (1 - busy))
    return formulas


def verified(model: StepModel, batch: int, context: float, width: int) -> dict[str, float]:
    """Return seconds by kind of a step in which `batch` sequences have `width` tokens each."""
    tokens = np.array([batch * width])
    parts = {kind: float(seconds[0]) for kind, seconds in (model.linear(tokens) | model.head(tokens)).items()}
    parts["decode_attention"] = float(model.decode(batch, np.array([context]), width)[0])
    return parts


def moved(side: Mapping[str, Any], hardware: str) -> dict[str, Any]:
    """The same side with all its pools on other hardware."""
    pools = [{key: value for key, value in pool.items() if key != "hardware"} for pool in side.get("pools", ())]
    pool = {key: value for key, value in side.get("pool", {}).items() if key != "hardware"}
    return {**side, "hardware": hardware, "pool": pool, **({"pools": pools} if pools else {})}


def bisected(ok: Callable[[float], bool], low: float, high: float, tolerance: float) -> float | None:
    """Return the highest x that is still ok, within a relative tolerance; None if `low` is not."""
    if not ok(low):
        return None
    if ok(high):
        return high
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        if ok(middle):
            low = middle
        else:
            high = middle
    return low


def meets(result: Result, measure: HighestRate) -> bool:
    """True if a result meets the limits of a measure."""
    if result.saturated:
        return False
    limits = [(name, getattr(measure, f"{name}_s")) for name in ("ttft", "tpot", "e2el")]
    if all(limit is None for _, limit in limits):
        return all(limit.met for limit in result.limits)
    good = np.ones(len(result.stream), dtype=bool)
    for name, limit in limits:
        if limit is not None:
            good &= np.nan_to_num(getattr(result, f"{name}_s"), nan=0.0) <= limit
    return bool(good.mean() >= measure.share)


# --- requests that are arranged ---------------------------------------------------------------------------


def order_of(stream: RequestStream, order: str, sigma: float) -> Ints:
    """The numbers of the requests in an order."""
    if order == "arrival":
        return np.arange(len(stream))
    if order == "prefix":
        if stream.session is None:
            raise UsageError("order prefix is of requests that share prefixes: give the workload a shared_prefix")
        return np.argsort(stream.session, kind="stable")
    tokens: Array | Ints = stream.output_tokens if order == "output" else stream.predicted_tokens(sigma, 0)
    return np.argsort(tokens, kind="stable")


def at_once(stream: RequestStream, order: Ints) -> RequestStream:
    """The same requests in another order, all there at the beginning, a microsecond apart."""
    blocks = None if stream.hash_ids is None else tuple(stream.hash_ids[i] for i in order.tolist())
    return replace(
        stream,
        arrival_s=np.arange(len(stream), dtype=np.float64) * 1e-6,
        prompt_tokens=stream.prompt_tokens[order],
        output_tokens=stream.output_tokens[order],
        class_index=stream.class_index[order],
        priority=stream.priority[order],
        hash_ids=blocks,
        session=None if stream.session is None else stream.session[order],
        adapter=None if stream.adapter is None else stream.adapter[order],
        users=None,
        due_s=None,
    )


def grouped(stream: RequestStream, size: int, finish_first: int | None) -> RequestStream:
    """Return the stream in groups of `size` requests, which arrive with their first; if `finish_first` is set, all of a
    group stop when that many have finished.

    What a group stops at is known from the start: its branches run side by side, one token each per step, so that the
    n-th to finish is the n-th shortest.
    """
    if len(stream) % size:
        raise UsageError(f"{len(stream)} requests do not make groups of {size}: ask for a multiple")
    if finish_first is not None and finish_first > size:
        raise UsageError(f"finish_first {finish_first}: a group has {size} branches only")
    outputs = stream.output_tokens.reshape(-1, size)
    if finish_first is not None:
        stop = np.sort(outputs, axis=1)[:, finish_first - 1 : finish_first]
        outputs = np.minimum(outputs, stop)
    arrivals = stream.arrival_s
    if arrivals is None:
        raise UsageError("branches arrive together, and users of a closed loop do not: use other arrivals")
    together: Array = arrivals[np.arange(len(arrivals)) // size * size]
    return replace(
        stream,
        arrival_s=together,
        prompt_tokens=np.repeat(stream.prompt_tokens[::size], size),
        output_tokens=outputs.reshape(-1),
    )
