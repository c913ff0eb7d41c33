"""Launches of kernels without a CUDA graph: no step is shorter than those of its own."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from simtune.specs.model import Model
from simtune.specs.pool import Pool

LAUNCH_S = 7.5e-6
"""Seconds of one kernel launch without a CUDA graph. Assumed: 5-10 us are usual when Python launches kernels."""


def largest_graph(pool: Pool, prompts: bool) -> float:
    """Return the tokens of the largest step with a CUDA graph, without prompts or with them; infinite without a limit,
    0 without graphs."""
    if not pool.cuda_graphs:
        return 0.0
    return inf if pool.graph_sizes is None else float(pool.graph_sizes.largest(pool.batching.max_num_seqs, prompts))


def _each_s(model: Model, pool: Pool, kernels: int) -> float:
    """Seconds of launching `kernels` one by one, or the pool's own number of kernels if it has a runtime; 0 under
    graphs."""
    if pool.cuda_graphs:
        return 0.0
    if pool.studied.runtime is None:
        return LAUNCH_S * kernels
    return pool.studied.runtime.kernels_per_layer * model.num_layers * pool.studied.runtime.launch_s


@dataclass(frozen=True, slots=True)
class Launches:
    """Seconds of launching the kernels of a step."""

    floors_s: tuple[float, float]
    """Least seconds of a step that is no larger than the largest graph, without and with prompts."""
    largest_graphs: tuple[float, float]
    """Tokens of the largest step with a graph, without and with prompts."""
    large_s: float
    """Least seconds of a larger step."""

    @classmethod
    def of(
        cls, model: Model, pool: Pool, kernels: int, factor: float, offloaded_s: float, attention_s: float = 0.0
    ) -> Launches:
        """Return the launches of a model whose step has `kernels` kernels, `factor` times as long as stated; what the
        host sends and computes meanwhile takes `offloaded_s`, and launching attention over prompts at least
        `attention_s`."""
        layers_s = factor * model.num_layers
        plain_s = max(factor * _each_s(model, pool, kernels), offloaded_s)
        prompts_s = max(plain_s, layers_s * (pool.prompt_launch_s or 0.0), factor * attention_s)
        large_s = layers_s * pool.graph_sizes.launch_s if pool.cuda_graphs and pool.graph_sizes is not None else 0.0
        return cls((plain_s, prompts_s), (largest_graph(pool, False), largest_graph(pool, True)), large_s)

    @property
    def largest_graph(self) -> float:
        """Tokens of the largest step with a graph."""
        return self.largest_graphs[False]

    def launched_s(self, num_tokens: float, prompts: bool) -> float:
        """Seconds of launching the kernels of a step one by one that no graph holds; 0 of a step with a graph."""
        return 0.0 if num_tokens <= self.largest_graphs[prompts] else self.large_s

    def least_s(self, num_tokens: float, prompts: bool) -> float:
        """Seconds of which no step of this many tokens is shorter."""
        return max(self.floors_s[prompts], self.launched_s(num_tokens, prompts))
