"""simtune: which inference schedule should this model run on this hardware under this load?

import simtune
result = simtune.simulate("llama-3.1-8b", "h100-sxm", "chat", rate_rps=8)
tuned = simtune.optimize("study.yaml")
spec = simtune.load("h100-sxm")
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["load", "optimize", "simulate"]

if TYPE_CHECKING:
    from simtune.api import load, optimize, simulate


def __getattr__(name: str) -> Any:
    # Loaded when first used: `simtune --help` must not wait for numpy.
    if name in __all__:
        from simtune import api

        return getattr(api, name)
    raise AttributeError(f"module 'simtune' has no attribute {name!r}")
