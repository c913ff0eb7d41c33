"""Worlds in which operators are off, drawn once for whatever asks how sure a number or a choice is.

A time model errs in the same direction for all layers, steps and plans that use it, so its error is drawn once per
operator kind (an engine's host is one more) and simulated world, never per call: independent errors would average out
and feign certainty. World i of a seed has the same errors for every plan, in units of their spread, so that plans can
be compared world by world. The spread of a kind is that of the shapes which the plan's own steps need, weighted by
their time (`simtune.sim.run_basis`): wider where they are outside what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from simtune.arrays import Array
from simtune.costs.adapters import ADAPTERS
from simtune.costs.basis import KindBasis
from simtune.costs.encoder import ENCODER
from simtune.costs.engine_steps import EngineSteps
from simtune.costs.host import HostCosts
from simtune.costs.iteration import HOST, KINDS, REDRAWN_KINDS
from simtune.costs.predict import DATA_SHEET_LOG_SD, Profile
from simtune.errors import UsageError
from simtune.results.run_statistics import RunStatistics
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.drafting import Drafting
from simtune.sim.plan_parts import OwnCosts
from simtune.sim.run_basis import pool_bases
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Plan

DECODE_STEPS, PROMPT_STEPS = "steps of decodes", "steps with prompts"
"""Names of the errors of steps whose times are those of an engine's own log, without and with prompt tokens."""
ACCEPTANCE = "acceptance"
"""Name of the error that belongs to no operator kind: that of the acceptance of drafts."""
_PURPOSE = 6  # key of the random streams of `simtune.workload.requests`, continued


_NAMES = (*KINDS, ACCEPTANCE, HOST, DECODE_STEPS, PROMPT_STEPS, ADAPTERS, ENCODER)
"""Errors in the order of their random streams, to which new ones are added at the end."""


def widest(bases: Mapping[str, Mapping[str, KindBasis]]) -> dict[str, float]:
    """Return the standard deviation of the log error of every kind; pools share the error, of the size of the largest
    one."""
    log_sd: dict[str, float] = {}
    for kinds in bases.values():
        for kind, basis in kinds.items():
            log_sd[kind] = max(basis.log_sd, log_sd.get(kind, 0.0))
    return log_sd


def spreads(deployment: Deployment, result: RunStatistics) -> dict[str, float]:
    """Return the standard deviation of the log error of every kind in the steps of a run.

    Pools on different hardware share the error, of the size of the larger one. A kind that took no time has the error
    that is typical of it on this hardware.
    """
    log_sd = widest(pool_bases(deployment, result))
    typical = [Profile(pool.hardware).kind_log_sd() for pool in deployment.pools]
    for kind in KINDS:
        if kind not in log_sd:
            log_sd[kind] = max(sds.get(kind, DATA_SHEET_LOG_SD) for sds in typical)
    if HOST not in log_sd:
        log_sd[HOST] = max(HostCosts.of(pool.spec, pool.hardware).log_sd for pool in deployment.pools)
    return log_sd


class PerturbedWorld(NamedTuple):
    """World in which the times of kinds are off by factors, and the acceptance of drafts by a number of standard
    errors."""

    factors: Mapping[str, float] | None = None
    acceptance_errors: float = 0.0
    step_errors: tuple[float, float] = (0.0, 0.0)
    """Errors of steps of an engine's own log, of decodes alone and with prompts, in standard deviations of each step
    (`simtune.costs.engine_steps`)."""


@dataclass(frozen=True)
class DrawnWorlds:
    """Errors of operator kinds, of the host and of acceptance in each of several worlds, in units of their own spread.

    They are the same for every plan, and more worlds of a seed begin with the same ones.
    """

    errors: Mapping[str, Array]

    @classmethod
    def of(cls, count: int, seed: int) -> DrawnWorlds:
        """Draw `count` worlds."""
        return cls({name: _normal(seed, i, count) for i, name in enumerate(_NAMES)})

    @property
    def acceptance(self) -> Array:
        """Error of the acceptance of drafts in each world, in standard errors."""
        return self.errors[ACCEPTANCE]

    def worlds(self, log_sd: Mapping[str, float]) -> list[PerturbedWorld]:
        """Return the worlds of a plan: factors are lognormal with these standard deviations by kind."""
        kinds = [kind for kind in REDRAWN_KINDS if kind in log_sd]
        return [
            PerturbedWorld(
                {kind: math.exp(log_sd[kind] * float(self.errors[kind][i])) for kind in kinds},
                off,
                (float(self.errors[DECODE_STEPS][i]), float(self.errors[PROMPT_STEPS][i])),
            )
            for i, off in enumerate(self.acceptance.tolist())
        ]

    def stretch(self, shares: Mapping[str, float], log_sd: Mapping[str, float], steady: float = 0.0) -> Array:
        """Return the factor on a time in each world, `shares` of it by kind, and `steady` the share without an
        error."""
        longer = np.full(len(self.acceptance), steady)
        for kind, share in shares.items():
            longer += share * np.exp(log_sd.get(kind, 0.0) * self.errors[kind])
        return longer


def _normal(seed: int, purpose: int, count: int) -> Array:
    # A stream for each kind: more worlds of one kind must not move the draws of another.
    stream = np.random.SeedSequence((seed, _PURPOSE, purpose))
    return np.random.Generator(np.random.Philox(stream)).standard_normal(count)


@dataclass(frozen=True)
class Blueprint:
    """Inputs of a deployment, without its tables: small enough to be sent to a worker process, which deploys them
    again."""

    plan: Plan
    model: Model
    hardware: Mapping[str, Hardware]
    drafting: Mapping[str, Drafting]
    steps: Mapping[str, EngineSteps]
    """Step costs of pools by an engine's own log, by the name of the pool."""

    @classmethod
    def of(cls, deployment: Deployment) -> Blueprint:
        """Return the inputs of a deployment. Raise UsageError if the costs of a pool come from outside and are no log
        of an engine's steps: how far off they are is not known."""
        d = deployment
        brought = {pool.spec.name: pool.costs.own for pool in d.pools if isinstance(pool.costs, OwnCosts)}
        steps = {name: costs for name, costs in brought.items() if isinstance(costs, EngineSteps)}
        if pool_names := [name for name in brought if name not in steps]:
            raise UsageError(
                f"pool {pool_names[0]}: its step costs were brought from outside, and --uncertainty perturbs the times "
                "of operators; leave --uncertainty out, or simulate with the hardware's operators"
            )
        return cls(d.plan, d.model, d.profiles, d.drafting, steps)

    def deploy(self, world: PerturbedWorld) -> Deployment:
        """Return the deployment in a world."""
        drafting = {
            pool: replace(loaded, acceptance=loaded.acceptance.shifted(world.acceptance_errors))
            for pool, loaded in self.drafting.items()
        }
        steps = {pool: OwnCosts(costs.in_world(*world.step_errors)) for pool, costs in self.steps.items()}
        return deploy(
            self.plan, self.model, self.hardware, factors=world.factors, drafting=drafting, costs=steps or None
        )
