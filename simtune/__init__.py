"""simtune: which inference schedule should this model run on this hardware under this load?

import simtune
result = simtune.simulate("chat", model="llama-3.1-8b", hardware="h100-sxm", rate_rps=8)
tuned = simtune.optimize("study.yaml")
spec = simtune.load("h100-sxm")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "simtune.api": ("load", "optimize", "simulate"),
    "simtune.specs.model": ("Model",),
    "simtune.specs.hardware": ("Hardware",),
    "simtune.specs.workload": ("Workload",),
    "simtune.specs.plan": ("Plan",),
    "simtune.specs.pool": ("Batching", "KvCache", "Parallelism", "Pool"),
    "simtune.specs.study": ("Study",),
    "simtune.specs.traces": ("Trace", "read_trace"),
    "simtune.engine": ("Request", "Scheduler"),
    "simtune.engine.policies.listed": ("ListScheduler", "StallFree"),
    "simtune.sim.router": ("LoadAware", "Router"),
    "simtune.results.result": ("Result",),
    "simtune.costs.protocol": ("StepCosts",),
    "simtune.costs.function": ("StepFunction",),
    "simtune.costs.compiled": ("LinearCosts",),
    "simtune.costs.ticks": ("TICKS_PER_SECOND", "to_ticks"),
    "simtune.tuner.space.allocation": ("AllocationAnswer", "Fleet", "InstanceRate", "Nodes", "allocate"),
    "simtune.errors": ("Infeasible", "PartError", "SimtuneError", "SpecError", "UsageError"),
}
"""The public names, by the module that has them."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "TICKS_PER_SECOND",
    "AllocationAnswer",
    "Batching",
    "Fleet",
    "Hardware",
    "Infeasible",
    "InstanceRate",
    "KvCache",
    "LinearCosts",
    "ListScheduler",
    "LoadAware",
    "Model",
    "Nodes",
    "Parallelism",
    "PartError",
    "Plan",
    "Pool",
    "Request",
    "Result",
    "Router",
    "Scheduler",
    "SimtuneError",
    "SpecError",
    "StallFree",
    "StepCosts",
    "StepFunction",
    "Study",
    "Trace",
    "UsageError",
    "Workload",
    "allocate",
    "load",
    "optimize",
    "read_trace",
    "simulate",
    "to_ticks",
]

if TYPE_CHECKING:
    from simtune.api import load, optimize, simulate
    from simtune.costs.compiled import LinearCosts
    from simtune.costs.function import StepFunction
    from simtune.costs.protocol import StepCosts
    from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
    from simtune.engine import Request, Scheduler
    from simtune.engine.policies.listed import ListScheduler, StallFree
    from simtune.errors import Infeasible, PartError, SimtuneError, SpecError, UsageError
    from simtune.results.result import Result
    from simtune.sim.router import LoadAware, Router
    from simtune.specs.hardware import Hardware
    from simtune.specs.model import Model
    from simtune.specs.plan import Plan
    from simtune.specs.pool import Batching, KvCache, Parallelism, Pool
    from simtune.specs.study import Study
    from simtune.specs.traces import Trace, read_trace
    from simtune.specs.workload import Workload
    from simtune.tuner.space.allocation import AllocationAnswer, Fleet, InstanceRate, Nodes, allocate


def __getattr__(name: str) -> Any:
    # Loaded when first used: `simtune --help` must not wait for numpy.
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'simtune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
