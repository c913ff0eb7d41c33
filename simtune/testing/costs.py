"""Suite of the laws that every cost model must keep for the simulator: see `simtune.costs.protocol`."""

from __future__ import annotations

from inspect import getattr_static
from itertools import accumulate
from operator import index
from typing import ClassVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.protocol import ImbalanceCosts, RoundCosts, StepCosts
from simtune.sim.plan_parts import Costs, OwnCosts
from simtune.testing.policies import many


class CostSuite:
    """Derive from it and set `costs`: an object with the protocol, or a function of seconds."""

    costs: ClassVar[Costs]
    max_num_seqs: ClassVar[int] = 256
    max_model_len: ClassVar[int] = 8192
    max_num_batched_tokens: ClassVar[int] = 8192
    """Largest inputs of the costs in the tests."""

    def make(self) -> Costs:
        """Return the costs; to be overridden if they take work to make."""
        # A function must not become a method.
        costs = getattr_static(type(self), "costs")
        model: Costs = costs.__func__ if isinstance(costs, staticmethod) else costs
        return model

    @property
    def model(self) -> StepCosts:
        """Return the costs, wrapped to check that every answer is in whole positive ticks."""
        return OwnCosts(self.make())

    def batch(self, data: st.DataObject) -> tuple[int, int]:
        """Draw the number of sequences that decode, and the tokens they read."""
        num_decodes = data.draw(st.integers(1, self.max_num_seqs))
        return num_decodes, data.draw(st.integers(2 * num_decodes, num_decodes * self.max_model_len))

    @given(st.data())
    @many
    def test_a_pure_decode_step_is_a_step_without_chunks(self, data: st.DataObject) -> None:
        """Check the first law of the protocol."""
        batch = self.batch(data)
        mixed, (decode, _, _) = self.model.mixed(*batch, [], batch[0]), self.model.decode(*batch)
        assert mixed == decode, f"mixed returns {mixed} ticks and decode {decode} for the same step"

    @given(st.data())
    @many
    def test_steps_take_longer_as_the_first_one_says(self, data: st.DataObject) -> None:
        """Check the second law: all contexts a token longer, and so on, within the span; and time always advances."""
        (num_decodes, context), model = self.batch(data), self.model
        first, slope, span = model.decode(num_decodes, context)
        last = min(span - 1, self.max_model_len - -(-context // num_decodes))
        for k in (0, 1, last, data.draw(st.integers(0, last))):
            if k <= last:
                later = model.decode(num_decodes, context + k * num_decodes)[0]
                assert later == first + k * slope, f"step {k} of a span of {span} takes {later} ticks"
        assert first + slope * last >= 1, "a step within a span takes less than 1 tick"

    @given(st.data())
    @many
    def test_the_same_step_takes_the_same_time(self, data: st.DataObject) -> None:
        """Check that the time does not depend on previous calls."""
        batch = data.draw(st.sampled_from([self.batch(data), (0, 0)]))
        parts, budget = [], self.max_num_batched_tokens - batch[0]
        for _ in range(data.draw(st.integers(int(batch[0] == 0), min(4, self.max_num_seqs - batch[0])))):
            if budget:
                new = data.draw(st.integers(1, min(budget, self.max_model_len)))
                parts.append((data.draw(st.integers(0, self.max_model_len - new)), new))
                budget -= new
        model, samples = self.model, batch[0] + len(parts)
        ticks = model.mixed(*batch, parts, samples)
        if batch[0]:
            model.decode(*batch)
        assert model.mixed(*batch, list(parts), samples) == ticks, "a repeated call of mixed returns other ticks"

    @given(st.data())
    @many
    def test_load_imbalance_stays_while_nobody_comes_or_goes(self, data: st.DataObject) -> None:
        """Check costs with load imbalance: all contexts grow alike, so the ticks on top must not change."""
        costs = self.make()
        if not isinstance(costs, ImbalanceCosts) or costs.balanced:
            return
        num_decodes = data.draw(st.integers(1, self.max_num_seqs))
        longest = data.draw(st.integers(2, self.max_model_len // 2))
        context = data.draw(st.integers(longest + num_decodes - 1, longest * num_decodes))
        steps, with_chunks = data.draw(st.integers(0, self.max_model_len // 2)), data.draw(st.booleans())
        ticks = costs.imbalance(num_decodes, context, longest, with_chunks)
        assert index(ticks) >= 0, "imbalance makes a step shorter"
        later = costs.imbalance(num_decodes, context + steps * num_decodes, longest + steps, with_chunks)
        assert later == ticks, f"imbalance adds {ticks} ticks to a step and {later} to the same {steps} steps later"

    @given(st.data())
    @many
    def test_rounds_end_when_one_after_the_other_does(self, data: st.DataObject) -> None:
        """Check costs with drafts: the law of `RoundCosts`."""
        costs = self.make()
        if not isinstance(costs, RoundCosts):
            return
        num_decodes, depth = data.draw(st.integers(1, self.max_num_seqs)), data.draw(st.integers(1, 4))
        verified = num_decodes * (1 + depth)
        most = num_decodes * (self.max_model_len - 1 - depth)
        computed = sorted(data.draw(st.lists(st.integers(num_decodes, most), min_size=1, max_size=6)))
        ticks = [costs.round(num_decodes, verified, depth, context + verified) for context in computed]
        ends = [index(end) for end in costs.rounds(num_decodes, verified, depth, np.array(computed))]
        assert min(ticks) >= 1, "a round takes less than 1 tick"
        assert ends == list(accumulate(ticks)), "rounds() differs from the sums of round()"
