"""Costs of one's own, with what is known of a card: `python own_cost_model.py` simulates a chat load with them."""

from collections.abc import Sequence

import simtune


class Bandwidth:
    """Weights and KV cache are read once in a step, then its tokens are computed. Times are whole ticks."""

    def __init__(self, weights_bytes: float, kv_bytes: float, flops: float, bytes_per_s: float, flops_per_s: float):
        self.weights = simtune.to_ticks(weights_bytes / bytes_per_s)
        self.context_token = simtune.to_ticks(kv_bytes / bytes_per_s)
        self.new_token = simtune.to_ticks(flops / flops_per_s)

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        """(ticks of the next step, ticks each further step takes longer, steps for which that holds)."""
        ticks = self.mixed(num_decodes, context_tokens, (), num_decodes)
        return ticks, self.context_token * num_decodes, 1 << 60

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        """Ticks of a step with chunks (past tokens, new tokens) of prompts."""
        read = context_tokens + sum(past for past, _ in chunks)
        computed = num_decodes + sum(new for _, new in chunks)
        return self.weights + self.context_token * read + self.new_token * computed


def seconds(num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
    """The same as a function: shorter to write, and slower to simulate."""
    read = context_tokens + sum(past for past, _ in chunks)
    computed = num_decodes + sum(new for _, new in chunks)
    return (16e9 + 131072 * read) / 3e12 + 16e9 * computed / 6e14


H100 = Bandwidth(weights_bytes=16e9, kv_bytes=131072, flops=16e9, bytes_per_s=3e12, flops_per_s=6e14)

if __name__ == "__main__":
    for costs in (H100, seconds):
        result = simtune.simulate("chat", model="llama-3.1-8b", costs=costs, rate_rps=20, requests=1000)
        metrics = result.summary().metrics
        print(f"TTFT p99 {metrics['ttft'].p99 * 1e3:.1f} ms, TPOT p99 {metrics['tpot'].p99 * 1e3:.2f} ms")
