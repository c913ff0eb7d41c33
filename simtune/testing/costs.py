"""What every cost model owes the simulator: see `simtune.costs.protocol`."""

from __future__ import annotations

from inspect import getattr_static
from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.protocol import StepCosts
from simtune.sim.parts import Costs, OwnCosts
from simtune.testing.policies import many


class CostSuite:
    """Derive from it and set `costs`: an object with the protocol, or a function of seconds."""

    costs: ClassVar[Costs]
    max_num_seqs: ClassVar[int] = 256
    max_model_len: ClassVar[int] = 8192
    """What the costs are asked about, at most."""

    def make(self) -> Costs:
        """The costs; to be overridden where they take work to make."""
        costs = getattr_static(type(self), "costs")  # a function must not become a method
        made: Costs = costs.__func__ if isinstance(costs, staticmethod) else costs
        return made

    @property
    def model(self) -> StepCosts:
        """The costs; whatever they answer is checked to be whole positive ticks."""
        return OwnCosts(self.make())

    def batch(self, data: st.DataObject) -> tuple[int, int]:
        """Sequences that decode, and the tokens they read."""
        num_decodes = data.draw(st.integers(1, self.max_num_seqs))
        return num_decodes, data.draw(st.integers(2 * num_decodes, num_decodes * self.max_model_len))

    @given(st.data())
    @many
    def test_a_pure_decode_step_is_a_step_without_chunks(self, data: st.DataObject) -> None:
        """The first law of the protocol."""
        batch = self.batch(data)
        mixed, (decode, _, _) = self.model.mixed(*batch, [], batch[0]), self.model.decode(*batch)
        assert mixed == decode, f"mixed says {mixed} ticks and decode {decode} for the same step"

    @given(st.data())
    @many
    def test_steps_take_longer_as_the_first_one_says(self, data: st.DataObject) -> None:
        """The second law: all contexts a token longer, and so on, within the span; and the clock always goes on."""
        (num_decodes, context), model = self.batch(data), self.model
        first, slope, span = model.decode(num_decodes, context)
        last = min(span - 1, self.max_model_len - -(-context // num_decodes))
        for k in (0, 1, last, data.draw(st.integers(0, last))):
            if k <= last:
                later = model.decode(num_decodes, context + k * num_decodes)[0]
                assert later == first + k * slope, f"step {k} of a span of {span} takes {later} ticks"
        assert first + slope * last >= 1, "time stands still or goes back within a span"

    @given(st.data())
    @many
    def test_the_same_step_takes_the_same_time(self, data: st.DataObject) -> None:
        """Whatever was asked before."""
        chunk = st.integers(1, self.max_model_len).flatmap(
            lambda end: st.integers(0, end - 1).map(lambda past: (past, end - past))
        )
        batch = data.draw(st.sampled_from([self.batch(data), (0, 0)]))
        parts = data.draw(st.lists(chunk, min_size=int(batch[0] == 0), max_size=4))
        model, samples = self.model, batch[0] + len(parts)
        ticks = model.mixed(*batch, parts, samples)
        if batch[0]:
            model.decode(*batch)
        assert model.mixed(*batch, list(parts), samples) == ticks, "the same step takes another time when asked again"
