"""Audit of a run that is over: nothing was lost and nothing came from nowhere.

With SIMTUNE_AUDIT=1 (`--audit`) every simulation is checked at its end, in worker processes too. The loop itself is the
same. A violation is a mistake in simtune, so it is no error for the user: it is raised as AuditError, after the run has
been written to a folder from which it can be repeated.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import Tally
from simtune.results.energy import energy_j
from simtune.results.outcome import Outcome, PoolInstances
from simtune.results.result import Result
from simtune.results.summing import instances
from simtune.sim.core import EngineCore
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.trace_turns import TraceTurns
from simtune.specs.trace_write import trace_text
from simtune.specs.traces import Trace
from simtune.specs.yamlfile import dump
from simtune.workload.requests import RequestStream

AUDIT = "SIMTUNE_AUDIT"
"""Environment variable that switches the audit on."""


class AuditError(AssertionError):
    """A law of conservation that a run violates."""


def wanted() -> bool:
    """True if simulations are to be audited."""
    return os.environ.get(AUDIT, "").lower() in ("1", "true", "yes")


def audit(plan: Plan, model: Model, cores: Sequence[EngineCore], result: Result) -> None:
    """Check a run. Raise AuditError, after writing how to repeat it, if it violates a law."""
    problems = list(violations(plan, cores, result))
    if problems:
        folder = _written(plan, model, result.stream, problems)
        raise AuditError(f"{'; '.join(problems)}. {folder} has what repeats it: its README")


def violations(plan: Plan, cores: Sequence[EngineCore], result: Result) -> Iterator[str]:
    """Yield the laws that a run violates, in words."""
    outcome, stream = result.outcome, result.stream
    broken = [
        *_of_requests(outcome, stream),
        *_of_time(outcome),
        *(() if plan.events or plan.control is not None else _of_use(cores)),
        *_of_tokens(plan, outcome, stream),
        *_of_transfers(outcome),
        *(() if outcome.aborted or result.unserved else _of_blocks(cores)),
        *_of_gpus(plan, result),
        *_of_instances(plan, outcome),
    ]
    # Energy follows from all the others.
    yield from broken or _of_energy(plan, result)


def _of_requests(outcome: Outcome, stream: RequestStream) -> Iterator[str]:
    """Every request has one end."""
    finished = outcome.finish >= 0
    never = outcome.arrival < 0
    if (finished & never).any():
        yield f"{int((finished & never).sum()):,} requests were answered that never arrived"
    answered_and_stopped = [number for number in outcome.stopped if finished[number]]
    if answered_and_stopped:
        yield f"requests {answered_and_stopped[:5]} were answered and stopped"
    rejected = 0 if outcome.rejected is None else len(outcome.rejected)
    ends = int(finished.sum()) + outcome.refused + rejected + len(outcome.stopped)
    if ends > len(stream):
        yield f"{ends:,} requests ended of {len(stream):,}"


def _of_time(outcome: Outcome) -> Iterator[str]:
    """Events of a request are in order."""
    finished = outcome.finish >= 0
    order = [("arrival", outcome.arrival), ("scheduled", outcome.scheduled), ("first token", outcome.first_token)]
    for (earlier, begin), (later, end) in zip(order, [*order[1:], ("finish", outcome.finish)], strict=True):
        late = finished & (begin > end)
        if late.any():
            number = int(np.flatnonzero(late)[0])
            yield f"{earlier} after {later}, of {int(late.sum()):,} requests, the first of them {number}"


def _of_use(cores: Sequence[EngineCore]) -> Iterator[str]:
    """No core is busy for longer than until its last step ended: steps of one core do not overlap."""
    for core in cores:
        if not 0 <= core.busy <= max(core.ended, 0):
            yield f"core {core.number} of pool {core.pool} was busy for {core.busy:,} ticks of {core.ended:,}"


def _message_tokens(plan: Plan) -> int | None:
    """Return the tokens of each message, None if pools differ."""
    sizes = {pool.message_tokens for pool in plan.pools if pool.role != "prefill"}
    return sizes.pop() if len(sizes) == 1 else None


def _of_tokens(plan: Plan, outcome: Outcome, stream: RequestStream) -> Iterator[str]:
    """Every message of an answer is counted once, and the times between messages are what passed between them."""
    drafted = any(core.drafting != Tally() for core in outcome.cores)
    once = not outcome.resent.any() and not outcome.stopped and (outcome.finish >= 0).all()
    size = _message_tokens(plan)
    if drafted or outcome.aborted or not once or not len(outcome.intervals) or size is None:
        return
    first, slope, steps, decodes = outcome.intervals.T
    between = int((steps * decodes).sum())
    wanted_messages = int((-(-(stream.output_tokens - 1) // size)).sum())
    passed = int((outcome.finish - outcome.first_token).sum())
    counted = int(((steps * first + slope * (steps * (steps - 1) // 2)) * decodes).sum())
    # Which of several that wait is preempted is not looked up, so that their times are not exact.
    share = 0.0
    if abs(between - wanted_messages) > share * wanted_messages:
        yield f"{between:,} messages followed first tokens, and answers have {wanted_messages:,} more"
    # Static batches return all answers at their end; stages come before, beside or after the engine.
    late_answers = plan.stages or any(pool.batching.policy == "static" for pool in plan.pools)
    if not late_answers and abs(counted - passed) > share * passed:
        yield f"{counted:,} ticks lie between tokens, and {passed:,} between first and last ones"


def _of_transfers(outcome: Outcome) -> Iterator[str]:
    """Bytes move if and only if a KV cache was sent, after its prompt and before the end of its request."""
    sent = outcome.transferred >= 0
    if outcome.transferred_bytes < 0 or (outcome.transferred_bytes > 0) < sent.any():
        yield f"{int(sent.sum()):,} KV caches were sent in {outcome.transferred_bytes:,} bytes"
    once = sent & (outcome.resent == 0) & (outcome.finish >= 0)
    early = once & ((outcome.prompt_done > outcome.transferred) | (outcome.transferred > outcome.finish))
    if early.any():
        yield f"{int(early.sum()):,} KV caches arrived before their prompts were done, or after the answers"


def _of_blocks(cores: Sequence[EngineCore]) -> Iterator[str]:
    """A core that has served all its requests holds no block and has no work."""
    for core in cores:
        kv = core.scheduler.kv
        if kv.free != kv.total:
            yield f"core {core.number} of pool {core.pool} still holds {kv.total - kv.free:,} of {kv.total:,} blocks"
        if core.has_work or core.holding:
            yield f"core {core.number} of pool {core.pool} still has work"


def _of_gpus(plan: Plan, result: Result) -> Iterator[str]:
    """All GPUs of the plan are simulated, and paid for."""
    if result.num_gpus != plan.num_devices:
        yield f"{result.num_gpus} GPUs are paid, and the plan has {plan.num_devices}"
    places = {(core.pool, core.instance) for core in result.outcome.cores}
    for pool in plan.pools:
        simulated = sum(name == pool.name for name, _ in places) * result.scale
        instances = pool.most_instances - pool.spare
        if not plan.events and plan.control is None and abs(simulated - instances) > 1e-9 * instances:
            yield f"pool {pool.name} has {instances} instances, and {simulated:g} were simulated"


def _of_instances(plan: Plan, outcome: Outcome) -> Iterator[str]:
    """Autoscaled pools stay within their limits, and run steps only on GPUs that they hold."""
    for of in outcome.scaled:
        units = "ranks" if of.ranks else "instances"
        yield from _of_counts(plan.pool(of.pool), of, units)
        ticks = [*(tick for tick, _, _ in of.counts[1:]), of.end]
        under_counts = sum(
            holding * (until - since) for (since, _, holding), until in zip(of.counts, ticks, strict=True)
        )
        if of.end > 0 and under_counts != sum(of.held_ticks):
            yield f"{units} of pool {of.pool} hold GPUs for {sum(of.held_ticks):,} ticks, counted {under_counts:,}"
        for core in outcome.cores:
            place = core.instance * of.ranks + core.virtual_engine if of.ranks else core.instance
            if core.pool == of.pool and core.busy > of.held_ticks[place]:
                rank = f"rank {core.virtual_engine} of " if of.ranks else ""
                yield f"{rank}instance {core.instance} of pool {of.pool} runs steps on GPUs that it does not hold"


def _of_counts(pool: Pool, of: PoolInstances, units: str) -> Iterator[str]:
    """Numbers of instances, or of ranks, are within the limits of the pool."""
    scaling, most = pool.autoscaling, len(of.held_ticks)
    assert scaling is not None
    least = scaling.min_instances if scaling.min_ranks is None else scaling.min_ranks * most // of.ranks
    for tick, accepting, holding in of.counts:
        if not least <= accepting <= holding <= most:
            yield f"pool {of.pool} has {accepting} {units} on the GPUs of {holding} at tick {tick:,}"


def _of_energy(plan: Plan, result: Result) -> Iterator[str]:
    """GPUs are powered for the whole run: each takes its idle power at least, and its rated one at most."""
    if result.power is None or plan.events or plan.control is not None or plan.autoscales:
        return
    cores = instances(result.outcome.cores, result.sums.answered, result.span_s)
    joules = energy_j(result.power, cores, result.span_s) * result.scale
    least, most = (
        sum(watts * of.instances for of, watts in zip(result.power.values(), rated, strict=True)) * result.span_s
        for rated in ([of.idle_w for of in result.power.values()], [of.tdp_w for of in result.power.values()])
    )
    if not least * (1 - 1e-9) <= joules <= most * (1 + 1e-9):
        yield f"the run takes {joules:g} J, and its GPUs {least:g} to {most:g}"


def _written(plan: Plan, model: Model, stream: RequestStream, problems: Sequence[str]) -> Path:
    """Write plan, model and requests of a run to a new folder, and how to repeat it."""
    arrays = [column.tobytes() for column in (stream.prompt_tokens, stream.output_tokens)]
    digest = hashlib.sha256(b"".join([plan.to_yaml().encode(), *arrays])).hexdigest()[:12]
    folder = Path(f"simtune-audit-{digest}")
    folder.mkdir(exist_ok=True)
    trace = Trace(
        "requests.jsonl",
        digest,
        arrival_s=stream.arrival_s if stream.due_s is None else stream.due_s,
        prompt_tokens=stream.prompt_tokens,
        output_tokens=stream.output_tokens,
        hash_ids=None if stream.hash_ids is None else tuple(stream.hash_ids),
        session=stream.session,
        turns=None
        if stream.turns is None
        else TraceTurns(stream.turns.first, stream.turns.after, stream.turns.pause / TICKS_PER_SECOND),
        block_tokens=stream.block_tokens,
        adapter=stream.adapter,
    )
    (folder / "plan.yaml").write_text(plan.to_yaml(), encoding="utf-8")
    (folder / "model.yaml").write_text(model.to_yaml(), encoding="utf-8")
    (folder / "requests.jsonl").write_text(trace_text(trace, "requests.jsonl"))
    arrivals: dict[str, object] = {"kind": "trace"}
    if stream.due_s is not None:
        arrivals["max_in_flight"] = stream.users
    elif stream.users is not None:
        arrivals = {"kind": "closed_loop", "users": stream.users, "think_s": stream.think_s}
    load = {"schema": "simtune/workload@1", "name": "audited", "trace": "requests.jsonl", "requests": stream.arrivals}
    lengths = {"kind": "trace"}
    (folder / "workload.yaml").write_text(dump(load | {"arrivals": arrivals, "prompt": lengths, "output": lengths}))
    command = (
        f"simtune simulate --plan {folder}/plan.yaml --model {folder}/model.yaml --workload {folder}/workload.yaml"
    )
    media = (
        [] if stream.media is None else ["", "Images, videos and recordings are not in it: their tokens are text here."]
    )
    lines = [
        "This run violates a law of conservation; please report the folder.",
        "",
        *problems,
        *media,
        "",
        f"{command} --audit",
    ]
    (folder / "README").write_text("\n".join(lines) + "\n")
    return folder
