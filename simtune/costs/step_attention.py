"""Time of attention in all layers of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.context_parallel import ContextRanks, across_ranks
from simtune.costs.decode_context import over_decode_ranks
from simtune.costs.layers import AttentionCosts, under_policy
from simtune.costs.predict import Profile
from simtune.costs.prefill_context import over_prompt_groups
from simtune.costs.step_calls import EqualLayers, equal_layers
from simtune.specs.model import Model
from simtune.specs.pool import Pool


@dataclass(frozen=True)
class StepAttention:
    """Seconds of attention in all layers; `decode_factor` and `prefill_factor` multiply those of their kind."""

    layers: Sequence[tuple[int, AttentionCosts]]
    """Costs of a layer, with the number of layers that have them."""
    decode_factor: float = 1.0
    prefill_factor: float = 1.0

    @classmethod
    def of(
        cls,
        model: Model,
        pool: Pool,
        layers: Sequence[EqualLayers],
        profile: Profile,
        decode_factor: float,
        prefill_factor: float,
    ) -> StepAttention:
        """Return the attention of a model under the pool's policy for the cache, over the ranks that share a
        sequence."""
        kv_dtype = pool.kv_cache.dtype or model.kv_dtype or model.dtype
        with_numbers = []
        for number, equal in enumerate(layers):
            costs = equal.attention.costs(profile, model.dtype, kv_dtype)
            # First what a rank keeps of the cache, then its share of the ranks: both scale the same bytes.
            costs = under_policy(costs, pool.studied.kv_policy, kv_dtype)
            if pool.parallelism.context_ranks > 1:
                ranks = ContextRanks.of(pool, profile, model.dtype, kv_dtype)
                costs = across_ranks(costs, equal.attention, ranks)
            if (shared := pool.parallelism.decode_ranks) > 1 and equal.attention.values_per_token:
                group = equal_layers(model, pool.parallelism.tp // shared)[number].attention
                of_group = under_policy(group.costs(profile, model.dtype, kv_dtype), pool.studied.kv_policy, kv_dtype)
                costs = over_decode_ranks(costs, of_group, group.output_width, shared, profile, model.dtype)
            if (groups := pool.parallelism.prompt_groups) > 1 and equal.attention.values_per_token:
                costs = over_prompt_groups(costs, groups)
            with_numbers.append((equal.number, costs))
        return cls(with_numbers, decode_factor, prefill_factor)

    @property
    def mixes(self) -> bool:
        """True if decodes take another time in steps with prefill chunks."""
        return any(costs.mixed is not None for _, costs in self.layers)

    @cached_property
    def prefill_call_s(self) -> float:
        """Seconds of attention to the prefill chunks of a step, however many there are, besides their shares of
        `prefill` and their `past`: one call of the kernels takes all of them."""
        return self.prefill_factor * sum(layers * costs.overhead_s for layers, costs in self.layers)

    @property
    def launch_s(self) -> float:
        """Host seconds of launching the attention of a step with prompts, in all layers."""
        return sum(layers * costs.launch_s for layers, costs in self.layers)

    def decode(self, num_decodes: int | Array, context: Array, width: int, chunk: int) -> Array:
        """Return the seconds of decode attention with `width` query tokens for each sequence, in a step whose longest
        prefill chunk has `chunk` tokens."""
        total = np.zeros_like(context)
        for layers, costs in self.layers:
            if chunk and costs.mixed is not None:
                total += layers * costs.mixed(num_decodes, context, chunk)
            else:
                total += layers * costs.decode(num_decodes, context, width)
        return self.decode_factor * total

    def imbalance_s(self, num_decodes: Array, with_chunks: bool) -> Array:
        """Return the additional seconds for each token by which the longest context of the decodes exceeds the mean."""
        total = np.zeros(num_decodes.shape)
        for layers, costs in self.layers:
            total += layers * costs.imbalance_s(num_decodes, with_chunks)
        return self.decode_factor * total

    def prefill(self, num_tokens: Array) -> Array:
        """Return the seconds of causal attention over prompts of these lengths, without `prefill_call_s`.

        A chunk of t tokens after p cached ones takes prefill(p + t) - prefill(p) + past(p) if it is alone.
        """
        return self.prompts(num_tokens)[0]

    def prompts(self, num_tokens: Array) -> tuple[Array, Array]:
        """Return the seconds of `prefill`, and those of each prompt in one call with enough others to fill the device,
        which are at most as many."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        alone, among = np.zeros_like(tokens), np.zeros_like(tokens)
        for layers, costs in self.layers:
            seconds = costs.prefill(tokens)
            alone += layers * seconds
            filling = costs.among(tokens)
            # Formulas that are linear in the number of prompts are equal but for rounding: then both are of one call.
            among += layers * np.where(filling < 0.99 * seconds, filling, seconds)
        return self.prefill_factor * alone, self.prefill_factor * among

    def past(self, num_tokens: Array) -> Array:
        """Return the seconds that a chunk spends on `num_tokens` cached tokens before it attends to them.

        Latent attention expands their keys and values again; other kinds have nothing to do.
        """
        tokens = np.asarray(num_tokens, dtype=np.float64)
        total = np.zeros_like(tokens)
        for layers, costs in self.layers:
            total += layers * costs.past(tokens)
        return self.prefill_factor * total

    def chunks_s(self, past: Array, new: Array, step: Ints, steps: int) -> Array:
        """Return the seconds of attention to prefill chunks of `new` tokens after `past` cached ones, in each of
        `steps` steps; chunk i is in step `step[i]`.

        Chunks of a step are in one call: it takes what they take that fill the device together, and no less than the
        longest of them alone.
        """
        repeated, until, before = self.past(past), self.prompts(past + new), self.prompts(past)
        alone, among = (end - start + repeated for end, start in zip(until, before, strict=True))
        together, longest = np.bincount(step, among, steps), np.zeros(steps)
        np.maximum.at(longest, step, alone)
        has_chunks = np.bincount(step, new, steps) > 0
        return np.where(has_chunks, np.maximum(together, longest) + self.prefill_call_s, 0.0)

    def shared_s(self, tokens: int, num_decodes: int) -> float:
        """Return the seconds in which one token of each decode attends to `tokens` tokens that all share, as a chunk
        would."""
        through = self.prefill(np.array([tokens + num_decodes, tokens], dtype=np.float64))
        return float(through[0] - through[1]) + self.prefill_call_s
