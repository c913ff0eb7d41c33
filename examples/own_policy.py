"""A policy of one's own, least attained service: `python own_policy.py` compares it with first come, first served."""

import simtune


class LeastAttainedService(simtune.StallFree):
    """Who was served least comes first, in classes of `quantum` tokens; who was served most is preempted first."""

    def __init__(self, *, quantum: int = 1, **settings) -> None:
        super().__init__(**settings)
        self.quantum = quantum

    def key(self, request: simtune.Request) -> int:
        """Smallest first; equals by arrival."""
        return request.emitted // self.quantum


def plan(policy: str, **options: int) -> simtune.Plan:
    """One instance with little memory, so that requests are preempted."""
    batching = simtune.Batching(policy=policy, options=options or None, max_num_seqs=64, max_num_batched_tokens=2048)
    pool = simtune.Pool(
        hardware="h100-sxm",
        instances=1,
        batching=batching,
        kv_cache=simtune.KvCache(num_blocks=1500),
        max_model_len=8192,
    )
    return simtune.Plan(name=policy.split(":")[0], model="llama-3.1-8b", pools=(pool,))


if __name__ == "__main__":
    for tried in (plan("sarathi"), plan("own_policy:LeastAttainedService", quantum=64)):
        result = simtune.simulate("chat", plan=tried, rate_rps=7, requests=500)
        summary = result.summary()
        e2el = summary.metrics["e2el"]
        print(f"{tried.name:10} {summary.preemptions} preempted, E2EL p50 {e2el.p50:.2f} s, p99 {e2el.p99:.2f} s")
