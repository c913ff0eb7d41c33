"""Basis of a run's numbers: which measurements the times of its own steps rest on (`simtune.costs.basis`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from simtune.arrays import Array
from simtune.costs.adapters import ADAPTERS
from simtune.costs.basis import AskedCall, KindBasis, StepBasis, WeightedStep, encoder_calls
from simtune.costs.encoder import ENCODER
from simtune.costs.iteration import HOST, StepModel, StepWork
from simtune.costs.predict import DATA_SHEET_LOG_SD, Basis
from simtune.costs.protocol import TellingCosts
from simtune.results.outcome import SampledStep
from simtune.results.run_statistics import RunStatistics
from simtune.results.summary import BasisByOperator, BasisShares, CostBasis, OperatorBasis, PoolBasis
from simtune.sim.deployment import Deployment
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.pools import DeployedPool

STEPS = 48
"""Steps of each pool that are examined, evenly spaced in its busy time."""

UNMEASURED = (Basis.EXTRAPOLATED, Basis.CARRIED_OVER, Basis.OTHER_ENGINE, Basis.DATA_SHEET)

WORTH_A_NOTE = 0.1
"""Share of the step time not backed by measurements of such shapes above which a note is shown."""


def pool_bases(
    deployment: Deployment, result: RunStatistics, *, errors: bool = True
) -> dict[str, dict[str, KindBasis]]:
    """Return the basis by pool and kind, weighted by the time of the pool's steps. Without `errors` all log errors are
    0 (`StepBasis.of`).

    Costs from outside the package have one kind, `step`, if they report their basis; pools whose costs do not, and
    those that ran no step, are left out.
    """
    bases: dict[str, dict[str, KindBasis]] = {}
    for pool in deployment.pools:
        steps = [step for core in result.outcome.cores if core.pool == pool.spec.name for step in core.sampled]
        if steps and isinstance(pool.costs, OwnCosts):
            if isinstance(pool.costs.own, TellingCosts):
                bases[pool.spec.name] = {"step": _stated(pool.costs.own, steps)}
        elif steps:
            model = StepBasis(deployment.model, pool.hardware, pool.spec)
            bases[pool.spec.name] = model.of((_weighted(step) for step in evenly(steps, STEPS)), errors=errors)
            _add_beside(bases[pool.spec.name], deployment, pool, result, errors)
    return bases


def _add_beside(
    kinds: dict[str, KindBasis], deployment: Deployment, pool: DeployedPool, result: RunStatistics, errors: bool
) -> None:
    """Add the parts of steps that no sampled step has to the kinds of a pool, by their shares of its time: products of
    LoRA adapters, which no table has, and the vision encoder."""
    shares = _shares_beside(pool.spec.name, result)
    if not shares:
        return
    total_s = float(sum(kind.seconds.sum() for kind in kinds.values()))
    for kind in kinds.values():
        kind.shrink(1 - sum(shares.values()))
    for name, share in shares.items():
        basis = kinds[name] = KindBasis()
        if name == ADAPTERS or pool.encoder is None:
            basis.add(share * total_s, Basis.DATA_SHEET, DATA_SHEET_LOG_SD if errors else 0.0)
            continue
        batches = pool.encoder.costs.batches
        batches = batches[:: -(-len(batches) // STEPS)]
        calls = encoder_calls(deployment.model, pool.hardware, pool.spec, batches, errors=errors)
        scale = share * total_s / sum(call.seconds for call in calls)
        for call in calls:
            basis.add(scale * call.seconds, call.basis, call.log_sd, call.other_release)


def _shares_beside(pool: str, result: RunStatistics) -> dict[str, float]:
    """Return the shares of the busy time of a pool's cores that products of LoRA adapters and its vision encoder take;
    those without time are left out."""
    cores = [core for core in result.outcome.cores if core.pool == pool]
    busy = sum(core.busy for core in cores)
    ticks = {
        ADAPTERS: sum(0 if core.adapters is None else core.adapters.products for core in cores),
        ENCODER: sum(0 if core.encoder is None else core.encoder.ticks for core in cores),
    }
    return {kind: min(1.0, of_kind / busy) for kind, of_kind in ticks.items() if of_kind}


def timed_steps(deployment: Deployment, result: RunStatistics) -> Iterator[tuple[SampledStep, dict[str, float], float]]:
    """Yield steps of a run, each with its seconds by kind, host time that is not hidden among them, and in all;
    pools whose costs come from outside are left out. Products of adapters and the encoder count as much in each step of
    a pool."""
    for pool in deployment.pools:
        steps = [step for core in result.outcome.cores if core.pool == pool.spec.name for step in core.sampled]
        if not steps or isinstance(pool.costs, OwnCosts):
            continue
        model, some = deployment.step_model(pool), evenly(steps, STEPS)
        shares = _shares_beside(pool.spec.name, result)
        beside = sum(shares.values())
        columns = _seconds_by_kind(model, some)
        for at, step in enumerate(some):
            by_kind = {kind: float(seconds[at]) for kind, seconds in columns.items()}
            kernels, work = sum(by_kind.values()), _weighted(step).work
            total = model.with_host_s(max(kernels, model.launches.least_s(work.num_tokens, bool(step.chunks))), work)
            beyond = model.beyond_kernels_s(kernels, work)
            if beyond > 0:
                by_kind[HOST] = beyond
            if 0 < beside < 1:
                by_kind |= {kind: total * share / (1 - beside) for kind, share in shares.items()}
                total /= 1 - beside
            yield step, by_kind, total


def _seconds_by_kind(model: StepModel, steps: Sequence[SampledStep]) -> dict[str, Array]:
    """Return the seconds of each step by kind, computed for all steps at once; decodes attend as in steps without
    chunks."""
    decodes, verified = (np.array([getattr(step, name) for step in steps]) for name in ("num_decodes", "verify_tokens"))
    chunks = [(at, past, new) for at, step in enumerate(steps) for past, new in step.chunks]
    of_step, past, new = np.array(chunks or [(0, 0, 0)], dtype=np.float64).T
    at = of_step.astype(np.int64)
    samples = np.array([step.num_samples for step in steps]) + verified - decodes
    tokens: Array = verified + np.bincount(at, new, len(steps))
    columns = model.linear(tokens)
    if model.differs_with_prompts:
        prompts, with_them = np.array([bool(step.chunks) for step in steps]), model.linear(tokens, prompts=True)
        columns = {kind: np.where(prompts, with_them[kind], seconds) for kind, seconds in columns.items()}
    columns |= {kind: np.where(samples > 0, x, 0.0) for kind, x in model.head(np.maximum(samples, 1)).items()}
    context = np.array([step.context_tokens for step in steps]) / np.maximum(decodes, 1)
    width = max(1, round(float(verified.sum() / max(1, decodes.sum()))))
    attends = model.decode(np.maximum(decodes, 1), np.maximum(context, 1.0), width)
    columns["decode_attention"] = np.where(decodes > 0, attends, 0.0)
    if model.sharing is not None:
        alone = np.bincount(at, new, len(steps)) == 0
        verifying = np.maximum(verified, 1.0)
        saved = model.sharing.saved_s(verifying, np.clip(decodes, 1.0, verifying))
        columns["moe"] = columns["moe"] - np.where(alone, saved, 0.0)
    if chunks:
        columns["prefill_attention"] = model.attention.chunks_s(past, new, at, len(steps))
    return columns


def asked_calls(deployment: Deployment, result: RunStatistics) -> Iterator[tuple[str, AskedCall]]:
    """Yield the name of the hardware and every operator shape that the steps of a run need; pools whose costs come from
    outside are left out."""
    labels = deployment.profile_labels
    for pool in deployment.pools:
        steps = [step for core in result.outcome.cores if core.pool == pool.spec.name for step in core.sampled]
        if steps and not isinstance(pool.costs, OwnCosts):
            model = StepBasis(deployment.model, pool.hardware, pool.spec)
            for call in model.calls(_weighted(step) for step in evenly(steps, STEPS)):
                yield labels[pool.spec.name], call


def _stated(costs: TellingCosts, steps: Sequence[SampledStep]) -> KindBasis:
    """Return the basis that costs from outside report for these steps."""
    account = KindBasis()
    for step in steps:
        basis = costs.basis(step.num_decodes, step.context_tokens, step.chunks)
        account.add(step.ticks, basis, 0.0 if basis == Basis.MEASURED else costs.log_sd)
    return account


def evenly(steps: Sequence[SampledStep], count: int) -> list[SampledStep]:
    """Return at most `count` of the steps, evenly spaced in the time that they stand for."""
    ends = np.cumsum([step.ticks for step in steps])
    if len(steps) <= count:
        return list(steps)
    interval = ends[-1] / count
    at = np.searchsorted(ends, (np.arange(count) + 0.5) * interval)
    return [_standing_for(steps[i], interval) for i in at]


def _standing_for(step: SampledStep, ticks: float) -> SampledStep:
    return SampledStep(
        max(1, round(ticks)),
        step.num_decodes,
        step.context_tokens,
        step.verify_tokens,
        step.num_samples,
        step.chunks,
    )


def _weighted(step: SampledStep) -> WeightedStep:
    work = StepWork(step.num_decodes, step.context_tokens, step.chunks, step.num_samples)
    width = round(step.verify_tokens / step.num_decodes) if step.num_decodes else 1
    return WeightedStep(step.ticks, work, width)


def cost_basis(deployment: Deployment, result: RunStatistics, *, errors: bool = True) -> CostBasis | None:
    """Return the shares of the time of the run's kernels and collectives by basis; None if all costs come from
    outside. Without `errors` all log errors are 0 (`StepBasis.of`)."""
    return basis_of(deployment, pool_bases(deployment, result, errors=errors))


def basis_of(deployment: Deployment, bases: Mapping[str, Mapping[str, KindBasis]]) -> CostBasis | None:
    """Return the sum of the bases of the pools, and each of them if the pools run under several engines; None if no
    time was spent.
    """
    basis = summed(bases.values())
    if basis is None:
        return None
    fields = _fields(basis)
    if deployment.several_engines:
        fields["pools"] = tuple(_pool_shares(deployment, bases))
    return CostBasis(**fields)


def _pool_shares(deployment: Deployment, bases: Mapping[str, Mapping[str, KindBasis]]) -> Iterator[PoolBasis]:
    """Yield the basis of each pool that spent time, with the profile and the engine that it rests on."""
    seconds = {pool: float(sum(basis.seconds.sum() for basis in kinds.values())) for pool, kinds in bases.items()}
    for pool in deployment.pools:
        name = pool.spec.name
        basis = summed([bases.get(name, {})])
        if basis is not None:
            share = _short(seconds[name] / sum(seconds.values()))
            yield PoolBasis(pool=name, profile=deployment.profile_labels[name], share=share, **_fields(basis))


def _fields(basis: BasisByOperator) -> dict[str, Any]:
    return {name: getattr(basis, name) for name in basis.model_fields_set}


def summed(pools: Iterable[Mapping[str, KindBasis]]) -> BasisByOperator | None:
    """Add the bases of several pools up; None if no time was spent."""
    kinds: dict[str, list[KindBasis]] = {}
    for of_pool in pools:
        for kind, basis in of_pool.items():
            kinds.setdefault(kind, []).append(basis)
    seconds = {kind: np.sum([basis.seconds for basis in bases], axis=0) for kind, bases in kinds.items()}
    total = float(sum(of_kind.sum() for of_kind in seconds.values()))
    if total <= 0:
        return None
    releases: dict[str, float] = defaultdict(float)
    for basis in chain.from_iterable(kinds.values()):
        for software, release_s in basis.other_releases.items():
            releases[software] += release_s / total
    shares: dict[str, Any] = _shares(np.sum(list(seconds.values()), axis=0) / total)
    if releases:
        shares["other_releases"] = {software: _short(share) for software, share in sorted(releases.items())}
    return BasisByOperator(
        **shares,
        operators=tuple(
            OperatorBasis(
                operator=kind,
                share=_short(seconds[kind].sum() / total),
                log_sd=_short(max(basis.log_sd for basis in kinds[kind])),
                basis=BasisShares(**_shares(seconds[kind] / seconds[kind].sum())),
            )
            for kind in sorted(seconds, key=lambda kind: -seconds[kind].sum())
        ),
    )


def _shares(shares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> dict[str, float]:
    """Return shares by the field names of `BasisShares`."""
    by_name = {basis.name.lower(): _short(shares[basis]) for basis in Basis}
    return {name: share for name, share in by_name.items() if share or name != Basis.OTHER_ENGINE.name.lower()}


def _short(value: float) -> float:
    """Round to six digits after the point, a hundredth of a per cent; more digits would only look exact."""
    return min(1e9, round(float(value), 6))


def note(basis: CostBasis) -> str | None:
    """Return a note if much of the step time was not measured, else None; it names each pool if `basis` does."""
    release = _release_note(basis)
    if _unmeasured(basis) <= WORTH_A_NOTE:
        return release
    text = f"{_unmeasured(basis):.0%} of the step time rests on no measurement of such shapes: {_parts(basis)}"
    pools = [f"pool {pool.pool} ({pool.profile}): {_parts(pool) or 'all measured'}" for pool in basis.pools]
    return "; ".join([text, *pools, *([] if release is None else [release])])


def _release_note(basis: CostBasis) -> str | None:
    """Return the share of the step time of kernels of another release than the one that runs; None if it is small."""
    share = sum(basis.other_releases.values())
    if share <= WORTH_A_NOTE:
        return None
    return f"{share:.0%} of the step time rests on kernels of another release ({', '.join(basis.other_releases)})"


def _unmeasured(basis: BasisShares) -> float:
    return float(sum(getattr(basis, kind.name.lower()) for kind in UNMEASURED))


def _parts(basis: BasisByOperator) -> str:
    """Return the shares of each unmeasured basis in words, each with the kinds that it concerns most."""
    parts = []
    for kind in UNMEASURED:
        name = kind.name.lower()
        if (share := getattr(basis, name)) < 0.005:
            continue
        most = [o.operator for o in basis.operators if o.share * getattr(o.basis, name) >= 0.01]
        parts.append(f"{share:.0%} {kind.words}" + (f" ({', '.join(most)})" if most else ""))
    return ", ".join(parts)
