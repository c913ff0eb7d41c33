"""The package's own cost models are held to the suite that a user's is."""

from __future__ import annotations

import functools

from simtune.costs.compiled import LinearCosts, compile_costs
from simtune.costs.protocol import StepCosts
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.pool import Batching, Pool
from simtune.testing import CostSuite
from simtune.testing.clusters import ImbalancedCosts


@functools.cache
def compiled(model: str) -> StepCosts:
    batching = Batching(max_num_seqs=64, max_num_batched_tokens=2048)
    pool = Pool(hardware="h100-sxm", instances=1, batching=batching, max_model_len=2048)
    return compile_costs(load_model(model), load_hardware("h100-sxm"), pool, 2048)


class TestLinear(CostSuite):
    costs = LinearCosts(step_s=5e-3, per_token_s=1e-5, per_context_s=1e-8, per_pair_s=1e-11)


class TestCompiled(CostSuite):
    max_num_seqs, max_model_len, max_num_batched_tokens = 64, 2048, 2048

    def make(self) -> StepCosts:
        return compiled("llama-3.1-8b")


class TestCompiledWithExperts(TestCompiled):
    def make(self) -> StepCosts:
        return compiled("mixtral-8x7b")


class TestImbalanced(CostSuite):
    costs = ImbalancedCosts(step_s=5e-3)
