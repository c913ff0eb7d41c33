"""From a plan to things that run: memory, cost tables and fresh lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simtune.costs.compiled import compile_costs
from simtune.costs.iteration import StepModel
from simtune.costs.memory import Memory, kv_capacity
from simtune.costs.protocol import StepCosts
from simtune.engine import POLICIES
from simtune.errors import Infeasible, UsageError
from simtune.sim.requests import RequestStream
from simtune.sim.result import MissBudget, Result
from simtune.sim.world import Lane, World
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Batching, Parallelism, Plan, Pool
from simtune.specs.workload import Slo

GIB = 2**30


@dataclass(frozen=True)
class Deployment:
    """A plan whose memory adds up, with its step costs compiled. `simulate` may be called many times."""

    plan: Plan
    model: Model
    hardware: Hardware
    memory: Memory
    costs: StepCosts
    max_model_len: int
    _pool: Pool = field(repr=False)

    def lanes(self) -> list[Lane]:
        """Fresh lanes, ordered so that a round robin over them is one over instances first.

        An instance with pp pipeline stages runs pp lanes ("virtual engines"), each with its own batch, its share of
        the seats and of the KV blocks; a lane's step takes the time of all stages. With equal stages the batches
        follow one another through the pipeline without waiting, which is what this assumes.
        """
        pool, batching = self._pool, self._pool.batching
        pp = pool.parallelism.pp
        policy = POLICIES[batching.policy]
        return [
            Lane(
                policy(
                    num_blocks=self.memory.num_blocks // pp,
                    block_size=pool.kv_cache.block_size,
                    max_num_seqs=batching.max_num_seqs // pp,
                    max_num_batched_tokens=batching.max_num_batched_tokens,
                    max_model_len=self.max_model_len,
                    chunked_prefill=batching.chunked_prefill,
                ),
                self.costs,
            )
            for _ in range(pp)
            for _ in range(pool.instances)
        ]

    @property
    def estimated(self) -> list[str]:
        """Operators that no table covers: their times are estimated from the data sheet."""
        return sorted(StepModel(self.model, self.hardware, self._pool).estimated)

    @property
    def num_lanes(self) -> int:
        return self._pool.instances * self._pool.parallelism.pp

    def simulate(
        self,
        stream: RequestStream,
        slo: Slo | None = None,
        *,
        lanes: int | None = None,
        stop_when_lost: bool = False,
        record: bool = False,
    ) -> Result:
        """Run one stream of requests through the deployment. Raises UsageError if no request fits max_model_len.

        `lanes` runs only so many lanes, on their share of an open-loop stream, and lets them stand for all: under round
        robin lanes do not disturb each other and see the same kind of load, so this differs from simulating all of them
        only in how many requests are watched. (In a closed loop they do disturb each other, and all are run.)
        `stop_when_lost` ends the run once a percentile of the SLO cannot be met any more.
        """
        slo, scale, offered_rate_rps = slo or Slo(), 1.0, stream.offered_rate_rps
        simulated = self.lanes()
        if lanes is not None and lanes < len(simulated) and stream.arrival_s is not None:
            scale = len(simulated) / lanes
            stream = stream.share_of(lanes, len(simulated))
            simulated = simulated[:lanes]
        stop_when = MissBudget(stream, slo) if stop_when_lost else None
        outcome = World(simulated, stream, record=record, stop_when=stop_when).run()
        result = Result(stream, outcome, self.plan.num_devices, slo, offered_rate_rps, scale)
        if not result.completed.any():
            raise UsageError(
                f"every request is longer than max_model_len ({self.max_model_len} tokens); raise it in the plan, "
                "or use a model with a longer context"
            )
        return result


def deploy(
    plan: Plan,
    model: Model,
    hardware: Hardware,
    costs: StepCosts | None = None,
    *,
    factors: Mapping[str, float] | None = None,
) -> Deployment:
    """Check that the plan is possible and compile its costs, unless compiled ones are given.

    `factors` multiply the times of operator kinds (`simtune.costs.iteration.KINDS`), to draw a world in which they
    are off. Raises Infeasible, saying what is missing, when the model does not fit or the plan contradicts itself.
    """
    (pool,) = plan.pools
    max_model_len = pool.max_model_len or model.max_position
    memory = check(pool, model, hardware)
    if costs is None:
        given = {} if factors is None else {"factors": factors}
        costs = compile_costs(model, hardware, pool, max_model_len, **given)
    return Deployment(plan, model, hardware, memory, costs, max_model_len, pool)


def check(pool: Pool, model: Model, hardware: Hardware) -> Memory:
    """The memory of one instance of a pool. Raises Infeasible when the engine would refuse the pool's settings."""
    batching, pp = pool.batching, pool.parallelism.pp
    max_model_len = pool.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise Infeasible(
            f"max_model_len ({max_model_len}) exceeds the longest context of {model.name} ({model.max_position})"
        )
    if batching.max_num_seqs < pp:
        raise Infeasible(f"max_num_seqs ({batching.max_num_seqs}) must be at least pp ({pp})")
    if batching.max_num_batched_tokens < batching.max_num_seqs:
        raise Infeasible(
            f"max_num_batched_tokens ({batching.max_num_batched_tokens}) must be at least max_num_seqs "
            f"({batching.max_num_seqs}); vLLM refuses it too"
        )
    if not batching.chunked_prefill and batching.max_num_batched_tokens < max_model_len:
        raise Infeasible(
            f"without chunked prefill max_num_batched_tokens ({batching.max_num_batched_tokens}) must be at least "
            f"max_model_len ({max_model_len})"
        )
    memory = kv_capacity(model, hardware, pool)
    blocks, needed = memory.num_blocks // pp, -(-max_model_len // pool.kv_cache.block_size)
    if blocks < needed:
        missing = (needed - blocks) * pool.kv_cache.block_size * memory.kv_bytes_per_token * pp / GIB
        raise Infeasible(
            f"{model.name} fits {hardware.name} with tp={pool.parallelism.tp} pp={pp}, but its KV cache holds {blocks} "
            f"blocks and one request of max_model_len ({max_model_len}) needs {needed}: {missing:.1f} GiB per device "
            "are missing; raise tp or pp, or lower max_model_len"
        )
    return memory


def vllm_batching(hardware: Hardware) -> Batching:
    """vLLM's own defaults for its server (release 0.32): larger on devices of 70 GiB and more, A100 excepted."""
    large = hardware.device.memory_bytes >= 70 * GIB and "a100" not in hardware.device.name.lower()
    return Batching(max_num_seqs=1024 if large else 256, max_num_batched_tokens=8192 if large else 2048)


def length_limit(model: Model, stream: RequestStream) -> int:
    """A max_model_len for a load: its longest request rounded up to whole 256 tokens, within the model's limit."""
    longest = int((stream.prompt_tokens + stream.output_tokens).max())
    return min(model.max_position, -(-longest // 256) * 256)


def default_plan(model: Model, hardware: Hardware, stream: RequestStream) -> Plan:
    """One instance on the fewest GPUs that fit, with vLLM's defaults. Raises Infeasible when a node is too small."""
    refusal: Infeasible | None = None
    tp = 1
    while tp <= hardware.device.devices_per_node:
        pool = Pool(
            hardware=hardware.name,
            instances=1,
            parallelism=Parallelism(tp=tp),
            batching=vllm_batching(hardware),
            max_model_len=length_limit(model, stream),
        )
        plan = Plan(name="default", model=model.name, pools=(pool,))
        try:
            check(pool, model, hardware)
            return plan
        except Infeasible as error:
            refusal = error
        tp *= 2
    assert refusal is not None
    raise refusal
