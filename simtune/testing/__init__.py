"""Properties that every policy, router and cost model must have, as test classes to derive from.

    from simtune.testing import PolicySuite

    class TestMine(PolicySuite):
        policy = MyPolicy

pytest runs every property on small random worlds. Needs hypothesis; the built-in parts are held to the same suites.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError:
    raise ImportError("simtune.testing needs hypothesis: pip install 'simtune[testing]'") from None

from simtune.testing.costs import CostSuite
from simtune.testing.policies import PolicySuite
from simtune.testing.routers import RouterSuite

__all__ = ["CostSuite", "PolicySuite", "RouterSuite"]
