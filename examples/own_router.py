"""A router of one's own, for a proxy that sees no answers: `python own_router.py` compares it with round robin."""

import simtune


class LeastSentLately(simtune.Router):
    """The instance that was sent the fewest prompt tokens; half of them are forgotten every `half_life_s`."""

    def __init__(self, cores, *, half_life_s: float = 1.0) -> None:
        super().__init__(cores)
        self.half_life = simtune.to_ticks(half_life_s)
        self.sent = [0.0] * len(self.cores)
        self.then = 0

    def choose(self, request: simtune.Request, now: int):
        """The core for a request at tick `now`, one that is up; None when all are down."""
        kept = 0.5 ** ((now - self.then) / self.half_life)
        self.sent, self.then = [tokens * kept for tokens in self.sent], now
        up = [at for at, core in enumerate(self.cores) if core.up]
        if not up:
            return None
        best = min(up, key=self.sent.__getitem__)
        self.sent[best] += request.prompt_tokens
        return self.cores[best]


if __name__ == "__main__":
    batching = simtune.Batching(max_num_seqs=64, max_num_batched_tokens=2048)
    pool = simtune.Pool(hardware="h100-sxm", instances=4, batching=batching, max_model_len=8192)
    for kind in ("round_robin", "own_router:LeastSentLately"):
        plan = {"name": "p", "model": "llama-3.1-8b", "pools": [pool], "router": {"kind": kind}}
        result = simtune.simulate("chat", plan=simtune.Plan.model_validate(plan), rate_rps=50, requests=2000)
        ttft = result.summary().metrics["ttft"]
        print(f"{kind:26} TTFT p50 {ttft.p50 * 1e3:.1f} ms, p99 {ttft.p99 * 1e3:.1f} ms")
