"""The suites find what they are there to find: each of these parts breaks one rule."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import Phase, is_hypothesis_test, settings

from simtune import LinearCosts, PartError, Request, Router, StallFree, StepFunction
from simtune.engine.policies.listed import ScheduledTokens
from simtune.sim.core import EngineCore
from simtune.testing import CostSuite, PolicySuite, RouterSuite
from simtune.testing.clusters import ImbalancedCosts


def quickly(suite: PolicySuite | RouterSuite | CostSuite, test: str) -> None:
    """Run a test of a suite without looking for the smallest example."""
    function = getattr(type(suite), test)
    if not is_hypothesis_test(function):
        function(suite)
        return
    usual = function._hypothesis_internal_use_settings
    try:
        function._hypothesis_internal_use_settings = settings(usual, phases=[Phase.generate], max_examples=300)
        function(suite)
    finally:
        function._hypothesis_internal_use_settings = usual


# --- policies ---------------------------------------------------------------------------------------------


class Greedy(StallFree):
    """Gives prompts more than the token budget."""

    def serve_prompts(self, plan: ScheduledTokens, budget: int, admitting: bool) -> None:
        super().serve_prompts(plan, budget + 5, admitting)


class Crowded(StallFree):
    """Has one seat more than it should."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.max_num_seqs += 1
        self.seats = self.max_num_seqs - 1

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        self.max_num_seqs = self.seats + 1
        plan = super().choose(preempted)
        self.max_num_seqs = self.seats
        return plan


class Leaking(StallFree):
    """Forgets the blocks of those it preempts."""

    def preempt(self, victim: Request) -> None:
        free = self.kv.free
        super().preempt(victim)
        self.kv.free = free


class Clairvoyant(StallFree):
    """Knows which answer will be the shortest."""

    def key(self, request: Request) -> int:
        return request.output_tokens


class Jumpy(StallFree):
    """Says that its steps can be repeated, and lets the newest go without in every other one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.turn = itertools.count()

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        plan = super().choose(preempted)
        if next(self.turn) % 2 and len(plan) > 1:
            plan.popitem()
        return plan

    def steady_steps(self, decoding: list[Request]) -> int:
        return self.max_model_len


class Forgetful(StallFree):
    """Loses a request that has to wait."""

    def choose(self, preempted: list[Request]) -> ScheduledTokens:
        plan = super().choose(preempted)
        if self.waiting:
            self.waiting.pop()
        return plan


class Hoarding(StallFree):
    """Keeps the memory of what was lost with its instance."""

    def abandon(self) -> list[Request]:
        lost = super().abandon()
        self.kv.free -= 1
        return lost


LAWS = "test_all_laws_hold_and_jumps_equal_single_steps"


@pytest.mark.parametrize(
    ("policy", "test", "finding"),
    [
        (Greedy, LAWS, "more tokens than max_num_batched_tokens"),
        (Crowded, LAWS, "more requests than max_num_seqs"),
        # a policy that leaks all blocks in one step runs nothing, which is found before the blocks are counted
        (Leaking, LAWS, "blocks are lost or doubled|returned None with .* requests waiting"),
        (Clairvoyant, LAWS, "Clairvoyant.key reads the output length"),
        (Jumpy, LAWS, "differs between jumps and single steps"),
        (Forgetful, LAWS, "requests are lost or doubled"),
        (Hoarding, "test_an_instance_that_is_lost_is_as_new", "blocks are still taken"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_found_out(policy: type[StallFree], test: str, finding: str) -> None:
    suite = type("Suite", (PolicySuite,), {"policy": policy})()
    with pytest.raises(AssertionError, match=finding):
        quickly(suite, test)


def test_who_goes_by_the_length_by_another_way_is_found_out() -> None:
    """A policy that is told lengths behind the requests' back."""
    lengths: dict[int, int] = {}

    class Informed(StallFree):
        def add(self, request: Request) -> bool:
            lengths[request.id] = request._true  # type: ignore[attr-defined]
            return super().add(request)

        def key(self, request: Request) -> int:
            return lengths[request.id]

    suite = type("Suite", (PolicySuite,), {"policy": Informed})()
    with pytest.raises(AssertionError, match="depends on the length of"):
        quickly(suite, "test_a_longer_answer_changes_nothing_before_the_shorter_one_ends")


# --- routers ----------------------------------------------------------------------------------------------


class First(Router):
    """Whether it is up or not."""

    def choose(self, request: Request, now: int) -> EngineCore | None:
        return self.cores[0]


class Last(Router):
    def choose(self, request: Request, now: int) -> EngineCore | None:
        return next((core for core in reversed(self.cores) if core.up), None)


class Whimsical(Router):
    """Goes by how often any of them was asked."""

    asked = itertools.count()

    def choose(self, request: Request, now: int) -> EngineCore | None:
        up = [core for core in self.cores if core.up]
        return up[next(self.asked) % len(up)] if up else None


class Lazy(Router):
    def choose(self, request: Request, now: int) -> EngineCore | None:
        return None


class Reader(Router):
    def choose(self, request: Request, now: int) -> EngineCore | None:
        up = [core for core in self.cores if core.up]
        return up[request.output_tokens % len(up)] if up else None


CHOICES = "test_only_cores_that_are_up_are_chosen_and_always_the_same"


@pytest.mark.parametrize(
    ("router", "test", "finding"),
    [
        (First, CHOICES, "core 0 is down"),
        (Last, "test_ties", "not the first of equal cores is chosen"),
        (Whimsical, CHOICES, "a repeated story has other choices"),
        (Lazy, CHOICES, "returned None although cores are up"),
        (Reader, CHOICES, "Reader.choose reads the output length"),
    ],
)
def test_a_router_that_breaks_a_rule_is_found_out(router: type[Router], test: str, finding: str) -> None:
    suite = type("Suite", (RouterSuite,), {"router": router})()
    with pytest.raises(AssertionError, match=finding):
        quickly(suite, test)


# --- costs ------------------------------------------------------------------------------------------------


class Sampling(LinearCosts):
    """Takes the sampling into account in one of two places."""

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        return super().mixed(num_decodes, context_tokens, chunks, num_samples) + num_samples


class Bent(LinearCosts):
    """Its time bends within the span that it states."""

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        first, slope, span = super().decode(num_decodes, context_tokens)
        return first + context_tokens**2 // 1000, slope, span

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], num_samples: int) -> int:
        return self.decode(num_decodes, context_tokens)[0] + len(chunks)


class Falling(LinearCosts):
    """Falls below nothing."""

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
        return max(1, 10**6 - context_tokens), -num_decodes, 1 << 60


class Tired(LinearCosts):
    """Takes longer the more it is asked."""

    asked: Iterator[int]

    def __init__(self) -> None:
        super().__init__(1e-3)
        object.__setattr__(self, "asked", itertools.count())

    def mixed(self, *args: Any) -> int:
        return super().mixed(*args) + next(self.asked)


class Tilting(ImbalancedCosts):
    """Takes longer the longer the contexts are, under the name of imbalance."""

    def imbalance(self, num_decodes: int, context_tokens: int, longest_context: int, with_chunks: bool) -> int:
        return longest_context


class Sprinting(LinearCosts):
    """Is faster in many rounds than in each of them."""

    def rounds(self, num_decodes: int, verify_tokens: int, depth: int, computed: Any) -> list[int]:
        return [end - 1 for end in super().rounds(num_decodes, verify_tokens, depth, computed)]


@pytest.mark.parametrize(
    ("costs", "test", "finding"),
    [
        (Sampling(1e-3), "test_a_pure_decode_step_is_a_step_without_chunks", "mixed returns .* for the same step"),
        (Bent(1e-3), "test_steps_take_longer_as_the_first_one_says", "of a span of"),
        (
            Falling(1e-3),
            "test_steps_take_longer_as_the_first_one_says",
            "of a span of|at least one tick for every step",
        ),
        (Tilting(1e-3), "test_load_imbalance_stays_while_nobody_comes_or_goes", "imbalance adds"),
        (Sprinting(1e-3), "test_rounds_end_when_one_after_the_other_does", "differs from the sums of round"),
        (Tired(), "test_the_same_step_takes_the_same_time", "a repeated call of mixed returns other ticks"),
    ],
)
def test_costs_that_break_a_rule_are_found_out(costs: LinearCosts, test: str, finding: str) -> None:
    suite = type("Suite", (CostSuite,), {"costs": costs})()
    with pytest.raises((AssertionError, PartError), match=finding):
        quickly(suite, test)


class TestLinear(CostSuite):
    costs = LinearCosts(1e-3, 1e-5, 1e-8, 1e-10)


class TestFunction(CostSuite):
    """A function given as such."""

    def costs(num_decodes, context_tokens, chunks):  # type: ignore[no-untyped-def]
        return 1e-3 + 1e-9 * context_tokens + 1e-6 * sum(tokens for _, tokens in chunks)


class TestStepFunction(CostSuite):
    costs = StepFunction(lambda num_decodes, context_tokens, chunks: 1e-3 * (1 + num_decodes))


# --- without hypothesis -----------------------------------------------------------------------------------


def test_without_hypothesis_it_is_said_what_is_missing() -> None:
    script = "import sys\nsys.modules['hypothesis'] = None\nimport simtune\nimport simtune.testing"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("ImportError: simtune.testing needs hypothesis: pip install 'simtune[testing]'\n")
