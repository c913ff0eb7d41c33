"""The longest context of a batch, kept while members come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simtune.engine import DecodeBatch, Request


@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "step"]), st.integers(1, 50)), max_size=60))
def test_it_is_that_of_the_member_who_has_most(moves: list[tuple[str, int]]) -> None:
    batch, inside = DecodeBatch(16), []
    left: list[Request] = []
    for number, (move, size) in enumerate(moves):
        if move == "join":
            again = left.pop() if left and size % 3 == 0 else Request(number, prompt_tokens=size, output_tokens=10_000)
            again.computed = max(again.computed, size)
            batch.join(again)
            inside.append(again)
        elif inside and move == "leave":
            left.append(inside.pop(size % len(inside)))
            batch.leave(left[-1])
        elif inside:
            batch.advance(size)
        if inside:
            assert batch.longest_context == 1 + max(r.computed + batch.emitted_by(r) - r.emitted for r in inside)
