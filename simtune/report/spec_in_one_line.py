"""Summary of a spec or a trace in one line, which shows that a file was understood as it was meant."""

from __future__ import annotations

from functools import singledispatch

import numpy as np

from simtune.arrays import Ints
from simtune.costs.predict import load_residuals
from simtune.errors import plural
from simtune.report.models import facts
from simtune.specs.base import Spec
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.plan_words import of_plan
from simtune.specs.study import Study
from simtune.specs.traces import Trace
from simtune.specs.workload import Workload
from simtune.workload.requests import build_stream

_DRAWN = 10_000
"""Requests of a workload from which its lengths are estimated."""


def understood(spec: Spec, trace: Trace | None = None) -> str:
    """Return a spec in words, without a line break. Raises SpecError if the arrays of a profile do not fit it."""
    return _words(spec) if not isinstance(spec, Workload) else _load(spec, trace)


@singledispatch
def _words(spec: Spec) -> str:
    return f"{spec.KIND} {spec.name}"


@_words.register
def _model(model: Model) -> str:
    notes = [f"note: {note}" for note in model.notes]
    return f"model {model.name}: " + "; ".join([*(f"{fact} {how_much}" for fact, how_much in facts(model)), *notes])


@_words.register
def _hardware(hardware: Hardware) -> str:
    arrays = load_residuals(hardware)
    return (
        f"hardware {hardware.name}: {hardware.device.name}, {len(hardware.operators)} operators, {arrays} with arrays"
    )


@_words.register
def _plan(plan: Plan) -> str:
    policies = ", ".join(dict.fromkeys(pool.batching.policy for pool in plan.pools))
    hardware = ", ".join(dict.fromkeys(pool.hardware for pool in plan.pools))
    gpus = plural(plan.num_devices, "GPU")
    return f"plan {plan.name}: {plan.model} on {gpus} ({hardware}): {of_plan(plan).words()}, {policies}"


@_words.register
def _study(study: Study) -> str:
    return f"study {study.name}: {study.objective} of {study.model} under {study.workload}"


def _load(workload: Workload, trace: Trace | None) -> str:
    """Requests, arrivals and lengths; what of the trace was not read."""
    words = []
    if trace is not None and trace.arrival_s is None:
        words.append("no arrival times")
        prompt, output = trace.prompt_tokens, trace.output_tokens
    else:
        stream = build_stream(workload, trace, requests=min(workload.requests, _DRAWN), seed=0)
        rate = stream.target_rate_rps
        words.append(f"{stream.users:,} users" if rate is None and stream.users else f"{rate or 0:.3g} requests/s")
        if workload.max_in_flight is not None:
            words.append(f"at most {workload.max_in_flight:,} under way")
        prompt, output = stream.prompt_tokens, stream.output_tokens
        if stream.hash_ids is not None:
            words.append("prompts share prefixes")
    unit = "requests"
    if workload.sends_families or (trace is not None and trace.turns is not None):
        unit = "families" if workload.graph else "sessions"
    words += [_lengths("prompt", prompt), _lengths("output", output)]
    if trace is not None and trace.ignored:
        words.append(f"columns ignored: {', '.join(trace.ignored)}")
    return f"workload {workload.name}: {workload.requests:,} {unit}, " + ", ".join(words)


def _lengths(what: str, tokens: Ints) -> str:
    p50, p99 = np.quantile(tokens, [0.5, 0.99], method="higher")
    return f"{what} tokens p50 {p50:,} p99 {p99:,}"
