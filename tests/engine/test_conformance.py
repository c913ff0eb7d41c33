"""What every policy owes its driver, whatever it decides; and for each policy the one thing it is known for."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.engine import POLICIES, Request, Scheduler, Step, TransformersFifo
from simtune.engine.policies.listed import ListScheduler
from simtune.testing import PolicySuite
from simtune.testing.driver import to_the_end
from tests.engine.small import SMALL

CONSERVE_WORK = {
    "vllm-fcfs",
    "vllm-priority",
    "sarathi",
    "shortest-predicted-first",
    "earliest-deadline-first",
    "dual-queue",
    "skip-join-mlfq",
}
"""Policies that leave nobody waiting who could have come in. The others have their reasons: a batch or a step that is
under way, a margin of free blocks, blocks kept for the longest possible answer."""


def no_excuse(suite: PolicySuite, scheduler: Scheduler, in_step: int) -> bool:
    """Requests of this policy pause without giving up their seat, so that seats taken are no reason to wait."""
    return False


def suite_of(name: str, options: dict[str, Any] | None = None) -> type[PolicySuite]:
    """The suite of a policy of the package, with options of its own."""
    facts: dict[str, Any] = {
        "policy": POLICIES[name],
        "constants": SMALL,
        "pads": name == "static",
        "conserves_work": name in CONSERVE_WORK,
        "options": options or {},
    }
    if name == "skip-join-mlfq":
        facts["idle_seats"] = no_excuse
    suffix = "_with_options" if options else ""
    return type(f"Test_{name.replace('-', '_')}{suffix}", (PolicySuite,), {**facts, "__module__": __name__})


OPTIONS: dict[str, dict[str, Any]] = {
    "sglang": {"enable_mixed_chunk": True, "max_prefill_tokens": 6, "scheduler_recv_interval": 3},
    "tensorrt-llm": {"batch_wait_timeout_iters": 3, "batch_wait_max_tokens_ratio": 0.8},
}
"""Of policies whose steps are repeated otherwise with them."""

globals().update({suite.__name__: suite for suite in map(suite_of, POLICIES)})
globals().update({suite.__name__: suite for suite in (suite_of(*item) for item in OPTIONS.items())})


def made(policy: str, **change: Any) -> Scheduler:
    """A scheduler for small worlds: 4 seats, 40 blocks of 4 tokens, 16 tokens per step."""
    return suite_of(policy)().make(**change)


PROMPTS_ALONE = {"vllm-v0", "sglang"}
"""Policies that keep those who decode waiting while there are prompts to run."""


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in {"static", *PROMPTS_ALONE}])
def test_who_is_computed_elsewhere_decodes_at_once(policy: str) -> None:
    scheduler = made(policy)
    remote, late = Request(1, 7, 5, emitted=1), Request(2, 4, 2, emitted=1)
    assert scheduler.expect(remote)
    assert scheduler.expect(late)
    scheduler.receive(remote)
    assert scheduler.add(Request(0, 8, 3))
    step = scheduler.schedule()
    assert step is not None
    assert (step.num_decodes, step.context_tokens) == (1, 8)


@pytest.mark.parametrize("policy", sorted(PROMPTS_ALONE))
def test_who_is_computed_elsewhere_decodes_after_the_prompts(policy: str) -> None:
    scheduler = made(policy)
    remote = Request(1, 7, 5, emitted=1)
    assert scheduler.expect(remote)
    scheduler.receive(remote)
    assert scheduler.add(Request(0, 8, 3))
    counts = []
    for _ in range(2):
        step = scheduler.schedule()
        assert step is not None
        counts.append((len(step.chunks), step.num_decodes))
        scheduler.complete()
    assert counts == [(1, 0), (0, 2)]


def test_static_batches_take_nobody_from_elsewhere() -> None:
    assert not made("static").expect(Request(0, 7, 5, emitted=1))


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_no_resident_holds_are_waited_for(policy: str) -> None:
    scheduler = made(policy, num_blocks=4, max_num_seqs=2)
    held, next_one = Request(0, 12, 1, hold=True), Request(1, 12, 1)
    assert scheduler.add(held)
    assert to_the_end(scheduler) == [0]
    assert scheduler.kv.free < 4
    assert scheduler.add(next_one)
    assert scheduler.schedule() is None, "blocks are short that no resident holds"
    scheduler.release(held)
    assert to_the_end(scheduler) == [1]
    assert scheduler.kv.free == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_pause_only_where_others_decode(policy: str) -> None:
    """Requests that decode and are not in a step, if others are; a step of prompts alone pauses nobody."""
    scheduler = made(policy, max_num_seqs=4, max_num_batched_tokens=16)
    joining = [[Request(0, 4, 8), Request(1, 4, 8)], [], [Request(2, 9, 3)], [Request(3, 4, 2)]]
    decoding: list[Request] = []
    while joining or scheduler.has_work:
        for request in joining.pop(0) if joining else ():
            assert scheduler.add(request)
        step = scheduler.schedule()
        if step is None:
            continue
        in_step = scheduler.composition()
        absent = [request for request in decoding if request not in in_step and request not in step.preempted]
        assert sorted(request.id for request in step.paused) == (
            sorted(request.id for request in absent) if step.num_decodes else []
        )
        progress = scheduler.complete()
        decoding = [*decoding, *progress.first_token]
        decoding = [r for r in decoding if r not in progress.finished and r not in step.preempted]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_reserved_for_requests_that_have_left(policy: str, caching: bool) -> None:
    if caching and "prefix_caching" not in POLICIES[policy].offers:
        pytest.skip("has no prefix cache")
    scheduler = made(policy, **({"prefix_caching": True} if caching else {}))
    requests = [Request(number, 9, 3, blocks=("a", "b")) for number in range(3)]
    for request in requests:
        assert scheduler.add(request)
    assert scheduler.schedule() is not None
    scheduler.complete()
    scheduler.abort(requests[2])
    to_the_end(scheduler)
    assert [request.reserved_tokens for request in requests] == [0, 0, 0]
    assert scheduler.kv.free == scheduler.kv.total


@pytest.mark.parametrize("policy", POLICIES)
def test_who_comes_after_one_that_is_aborted_is_served_like_the_first(policy: str) -> None:
    """Alone, short of room, or in the middle of its answer: when it has left, nothing of it stays, but in the cache."""
    for steps in (0, 1, 3):
        scheduler, fresh = made(policy), made(policy)
        long, next_one = Request(0, 9, 7), Request(1, 8, 6)
        assert scheduler.add(long)
        for _ in range(steps):
            assert scheduler.schedule() is not None
            scheduler.complete()
        assert scheduler.abort(long)
        assert not scheduler.abort(long), "it is not here any more"
        assert not scheduler.has_work
        assert scheduler.kv.free == scheduler.kv.total
        assert scheduler.add(next_one)
        assert fresh.add(Request(1, 8, 6))
        for _ in range(20):
            one, other = scheduler.schedule(), fresh.schedule()
            assert (one is None) == (other is None)
            if one is None or other is None:
                break
            assert shape_of(one) == shape_of(other)
            scheduler.complete(one.repeat)
            fresh.complete(other.repeat)
        assert next_one.emitted == 6


def shape_of(step: Step) -> tuple[Any, ...]:
    """What a step costs."""
    chunks = [(chunk.past, chunk.tokens, chunk.padding) for chunk in step.chunks]
    return step.num_decodes, step.context_tokens, chunks, step.repeat, step.part


# --- what each is known for: a small world and its steps, worked out by hand ----------------------------------


def story(policy: str, *load: tuple[Any, ...], **change: Any) -> list[dict[int, int]]:
    """The tokens of each request in every step, under 4 seats and 8 tokens per step unless told otherwise.

    Requests are (step of arrival, prompt, output[, priority[, predicted[, deadline]]]).
    """
    made = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 24}
    constants = {name: change.pop(name) for name in list(change) if name.isupper()}
    scheduler = type("Small", (POLICIES[policy],), constants)(**{**made, **change})
    extras = ("priority", "predicted_tokens", "deadline")
    coming = [
        (at, Request(i, p, o, **dict(zip(extras, rest, strict=False)))) for i, (at, p, o, *rest) in enumerate(load)
    ]
    steps: list[dict[int, int]] = []
    while coming or scheduler.has_work:
        while coming and coming[0][0] <= len(steps):
            assert scheduler.add(coming.pop(0)[1])
        assert scheduler.schedule() is not None
        steps.append({request.id: tokens for request, tokens in scheduler.composition().items()})
        scheduler.complete()
    return steps


def test_static_batches_need_a_budget_for_the_longest_prompt_whatever_chunked_prefill_says() -> None:
    with pytest.raises(ValueError, match=r"without chunked prefill max_num_batched_tokens \(8\) must be at least"):
        POLICIES["static"](
            num_blocks=99, block_size=1, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=9, chunked_prefill=True
        )


def test_static_batches_are_padded_and_run_until_the_last_member_is_done() -> None:
    """0 is done after two steps and is computed on; 2 could have its seat, and waits for 1."""
    assert story("static", (0, 2, 2), (0, 4, 4), (0, 3, 1), max_num_seqs=2, max_num_batched_tokens=24) == [
        {0: 4, 1: 4},
        {0: 1, 1: 1},
        {0: 1, 1: 1},
        {0: 1, 1: 1},
        {2: 3},
    ]


def test_a_static_batch_fills_the_budget_to_the_last_token() -> None:
    """Three prompts of 4, 4 and 4 tokens fill 12; a longer one makes all of the batch as wide as itself."""

    def sizes(budget: int, *prompts: int) -> list[int]:
        scheduler = POLICIES["static"](
            num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=12
        )
        for number, prompt in enumerate(prompts):
            assert scheduler.add(Request(number, prompt, 1))
        batches = []
        while (step := scheduler.schedule()) is not None:
            batches.append(len(step.chunks))
            scheduler.complete()
        return batches

    assert sizes(12, 4, 4, 4, 4) == [3, 1]
    assert sizes(13, 4, 4, 4, 4) == [3, 1]
    assert sizes(12, 4, 6, 4) == [2, 1]
    assert sizes(12, 4, 7) == [1, 1]


@pytest.mark.parametrize("policy", ["sarathi", "shortest-predicted-first"])
def test_blocks_that_an_instance_was_to_move_are_lost_with_it(policy: str) -> None:
    """A request whose blocks were to go to host memory before the next step fails with its instance."""
    scheduler = made(policy, preemption="swap")
    assert isinstance(scheduler, ListScheduler)
    victim = Request(0, 8, 8)
    assert scheduler.add(victim)
    assert scheduler.schedule() is not None
    scheduler.complete()
    scheduler.preempt(victim)
    assert scheduler.abandon() == [victim]
    assert scheduler.add(Request(1, 8, 1))
    step = scheduler.schedule()
    assert step is not None
    assert (step.swapped_out_blocks, step.swapped_in_blocks, list(step.preempted)) == (0, 0, [])


def test_who_is_swapped_in_is_admitted_though_it_decodes_at_once() -> None:
    """Two answers that outgrow six blocks: one goes to host memory, and comes back when the other has ended."""
    scheduler = made("vllm-v0", preemption="swap", num_blocks=6)
    assert all(scheduler.add(Request(number, 8, 8)) for number in range(2))
    admitted, decoding = [], []
    while (step := scheduler.schedule()) is not None:
        admitted += [(request.id, request.decoding) for request in step.admitted]
        decoding.append(step.num_decodes)
        scheduler.complete(step.repeat)
    assert admitted == [(0, False), (1, False), (1, True)]
    assert max(decoding) == 2


def test_static_batches_return_all_answers_together() -> None:
    scheduler = POLICIES["static"](
        num_blocks=10, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=16
    )
    requests = [Request(0, 2, 2), Request(1, 4, 4)]
    assert all(scheduler.add(request) for request in requests)
    padded = scheduler.schedule()
    assert padded is not None
    assert [(chunk.past, chunk.tokens, chunk.completes) for chunk in padded.chunks] == [(0, 4, True), (0, 4, True)]
    assert scheduler.kv.free == 10 - 2 * 4, "each has room for max_model_len"
    assert scheduler.complete().first_token == requests
    decode = scheduler.schedule()
    assert decode is not None
    assert (decode.num_decodes, decode.context_tokens, decode.repeat, decode.discarded) == (2, 2 * (4 + 1), 1, 0)
    assert scheduler.complete().finished == []
    padded = scheduler.schedule()
    assert padded is not None
    # The first is complete, and computed on as padding.
    assert (padded.num_decodes, padded.context_tokens, padded.repeat, padded.discarded) == (2, 2 * (5 + 1), 2, 1)
    assert scheduler.complete(2).finished == requests


def test_orca_runs_whole_prompts_with_the_decodes() -> None:
    """1 needs 20 of 23 tokens and comes in at once, before 0 in the step; 2 finds too few left and comes next."""
    steps = story("orca", (0, 4, 3), (1, 20, 1), (1, 20, 1), max_num_batched_tokens=24)
    assert [list(step.items()) for step in steps] == [[(0, 4)], [(1, 20), (0, 1)], [(2, 20), (0, 1)]]


def test_orca_admits_only_as_many_as_could_all_grow_to_the_limit() -> None:
    """12 blocks are two answers of 24 tokens, so the third request waits though a seat is free."""
    steps = story("orca", *[(0, 2, 2)] * 3, num_blocks=12, max_num_batched_tokens=24)
    assert steps == [{0: 2, 1: 2}, {0: 1, 1: 1}, {2: 2}, {2: 1}]


def test_sarathi_never_stalls_a_decode_and_bounds_every_step() -> None:
    """The prompt of 20 is spread over the 7 tokens per step that 0 leaves."""
    assert story("sarathi", (0, 4, 5), (1, 20, 1)) == [{0: 4}, {0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 6}, {0: 1}]


def test_shortest_predicted_first_believes_the_prediction() -> None:
    """1 is predicted short and is long: it goes first all the same; the others follow by prediction."""
    steps = story("shortest-predicted-first", (0, 4, 1, 0, 9), (0, 4, 3, 0, 1), (0, 4, 1, 0, 5), max_num_seqs=1)
    assert steps == [{1: 4}, {1: 1}, {1: 1}, {2: 4}, {0: 4}]


def test_the_nearest_deadline_overtakes_a_prompt_under_way() -> None:
    """1 has a nearer deadline than 0, of whose prompt 12 tokens are missing."""
    steps = story("earliest-deadline-first", (0, 20, 1, 0, 0, 50.0), (1, 6, 2, 0, 0, 10.0))
    assert steps == [{0: 8}, {1: 6, 0: 2}, {1: 1, 0: 7}, {0: 3}]


def test_a_short_prompt_does_not_stand_behind_a_long_one() -> None:
    """Half of the budget is the short queue's: 1 is through at once, 2 in the next step beside the long prompt."""
    steps = story("dual-queue", (0, 20, 1), (1, 4, 1), (1, 4, 1), SHORT_TOKENS=4)
    assert steps == [{0: 8}, {1: 4, 0: 4}, {2: 4, 0: 4}, {0: 4}]
    first_come = story("sarathi", (0, 20, 1), (1, 4, 1), (1, 4, 1))
    assert first_come == [{0: 8}, {0: 8}, {0: 4, 1: 4}, {2: 4}]


def test_long_prompts_keep_their_share() -> None:
    """Short prompts that keep coming get half of the budget, and no more while a long one waits."""
    steps = story("dual-queue", (0, 16, 1), *[(0, 4, 1)] * 6, SHORT_TOKENS=4, max_num_seqs=8)
    assert steps == [{1: 4, 0: 4}, {2: 4, 0: 4}, {3: 4, 0: 4}, {4: 4, 0: 4}, {5: 4, 6: 4}]


def test_skip_join_mlfq_lets_newcomers_pass_those_that_used_up_their_quantum() -> None:
    """One seat. With its first token 0 is demoted from level 0 (quantum 1) to level 1 (quantum 2) and pauses for 1.

    2's prompt takes three iterations' worth, so it skips to level 2 and waits until the others are done or come down.
    """
    steps = story("skip-join-mlfq", (0, 2, 6), (1, 2, 2), (1, 6, 1), max_num_seqs=1, PROMPT_TOKENS_PER_ITERATION=2)
    assert steps == [
        {0: 2},  # at level 0
        {1: 2},  # at level 0; 0 stands at level 1
        {0: 1},
        {0: 1},  # and is demoted to level 2, behind 2
        {1: 1},  # at level 1, and done
        {2: 6},
        {0: 1},
        {0: 1},
        {0: 1},
    ]


@pytest.mark.parametrize(("patience", "served_at"), [(100, 3), (2, 2)])
def test_skip_join_mlfq_promotes_whoever_was_not_served_for_long(patience: int, served_at: int) -> None:
    """1 skips to level 2 and waits until 0 has come down there after 1 + 2 iterations, or its patience ends before."""
    steps = story(
        "skip-join-mlfq", (0, 1, 9), (0, 3, 1), max_num_seqs=1, PROMPT_TOKENS_PER_ITERATION=1, PATIENCE=patience
    )
    assert [1 in step for step in steps] == [number == served_at for number in range(10)]


def test_an_urgent_prompt_interrupts_a_step_at_a_layer_boundary() -> None:
    """0's prompt runs in three parts. 1 comes during the first and has a step of its own before the second.

    2 is no more urgent than 0: it has to wait until the step is over.
    """
    steps = story("priority-layers", (0, 8, 2, 1), (1, 4, 1, 0), (1, 4, 1, 1), PARTS=3)
    assert steps == [{0: 8}, {1: 4}, {0: 8}, {0: 8}, {0: 1, 2: 4}, {0: 1, 2: 4}, {0: 1, 2: 4}]


def test_a_long_prompt_runs_some_layers_in_each_step_beside_those_that_decode() -> None:
    """1's twelve tokens take three steps of four, in each of which 0 has a token; 2 waits until they are over."""
    steps = story("layered-prefill", (0, 4, 6), (1, 12, 2), (1, 4, 2), group_tokens=4, max_num_batched_tokens=24)
    assert steps == [{0: 4}, {0: 1, 1: 12}, {0: 1, 1: 12}, {0: 1, 1: 12}, {0: 1, 1: 1, 2: 4}, {0: 1, 2: 1}]


def test_parts_of_a_step_say_which_they_are_and_yield_nothing_before_the_last() -> None:
    scheduler = type("Three", (POLICIES["priority-layers"],), {"PARTS": 3})(
        num_blocks=10, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=16
    )
    request = Request(0, 8, 2)
    assert scheduler.add(request)
    seen = []
    for _ in range(4):
        step = scheduler.schedule()
        assert step is not None
        progress = scheduler.complete()
        seen.append((step.part, [*progress.first_token], [*progress.finished]))
    assert seen == [((0, 3), [], []), ((1, 3), [], []), ((2, 3), [request], []), ((0, 1), [], [request])]


def test_transformers_resets_the_starved_and_then_admits_nobody_until_somebody_is_done() -> None:
    """3 blocks. In step 1 the older decode takes the last one; the newer one is starved, and reset after the step.

    It waits, in spite of a free seat and free blocks, until 0 is done, and computes its prompt and its token anew.
    """
    steps = story("transformers-fifo", (0, 4, 3), (0, 4, 2), num_blocks=3, max_model_len=8)
    assert steps == [{0: 4, 1: 4}, {0: 1}, {0: 1}, {1: 5}]


def test_prefill_first_goes_on_with_a_cut_prompt_before_anybody_decodes() -> None:
    load = ((0, 4, 3), (0, 16, 1))
    assert story("transformers-prefill-first", *load) == [{0: 4, 1: 4}, {1: 8}, {1: 4, 0: 1}, {0: 1}]
    assert story("transformers-fifo", *load) == [{0: 4, 1: 4}, {0: 1, 1: 7}, {0: 1, 1: 5}]


def test_transformers_keeps_a_margin_of_free_blocks() -> None:
    """10 blocks, of which 0 takes 9: under a margin of 15 % nobody may join those that decode."""
    load = ((0, 36, 2), (1, 2, 1))
    tight = {"num_blocks": 10, "max_model_len": 40, "max_num_batched_tokens": 40}
    assert story("transformers-fifo", *load, **tight) == [{0: 36}, {0: 1}, {1: 2}]


def test_vllm_of_2023_stops_everybody_for_a_prompt() -> None:
    """1 comes while 0 decodes, and its prompt has a step of its own; 2 does not fit beside it and has the next."""
    steps = story("vllm-v0", (0, 4, 4), (2, 6, 2), (2, 20, 1), max_num_batched_tokens=24)
    assert steps == [{0: 4}, {0: 1}, {1: 6}, {2: 20}, {0: 1, 1: 1}, {0: 1}]


def test_prompts_of_a_step_of_vllm_of_2023_count_as_the_longest_of_them() -> None:
    """4 + 9 + 9 tokens are 22, and 3 x 9 are 27: under a budget of 24 the third prompt waits for the next step."""
    steps = story("vllm-v0", (0, 4, 1), (0, 9, 1), (0, 9, 1), max_num_batched_tokens=24)
    assert steps == [{0: 4, 1: 9}, {2: 9}]


def test_residents_that_transformers_resets_in_one_step_return_in_order_of_admission() -> None:
    """Four residents fill eight blocks and need one more each; of those reset the one admitted first returns first."""
    engine = TransformersFifo(
        num_blocks=8, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=32, safety_margin=0.0
    )
    for number in range(4):
        engine.add(Request(number, 8, 8))
    reset: list[int] = []
    while not reset:
        step = engine.schedule()
        assert step is not None
        reset = [request.id for request in step.preempted]
        engine.complete()
    assert len(reset) > 1
    assert reset == sorted(reset)
    assert [request.id for request in engine.waiting] == reset


def test_tensorrt_llm_keeps_room_for_whole_answers_or_pauses() -> None:
    """Four blocks. Reserved for 8 tokens of answer, one request is all there is room for; else the last is paused."""
    load = ((0, 8, 6), (0, 4, 6))
    memory: dict[str, Any] = {"num_blocks": 4, "max_model_len": 16, "max_new_tokens": 8}
    in_turn = story("tensorrt-llm", *load, **memory)
    assert in_turn == [{0: 8}, *[{0: 1}] * 5, {1: 4}, *[{1: 1}] * 5]
    memory |= {"num_blocks": 4, "capacity_scheduler_policy": "MAX_UTILIZATION"}
    together = story("tensorrt-llm", *load, **memory)
    assert together == [{0: 8}, {0: 1, 1: 4}, *[{0: 1}] * 4, {1: 5}, *[{1: 1}] * 4]


def test_tensorrt_llm_without_chunks_takes_whole_prompts_until_one_does_not_fit() -> None:
    """Of 24 tokens a third prompt of 10 finds 4 left; beside the first two, which decode then, it fits."""
    steps = story("tensorrt-llm", *[(0, 10, 2)] * 3, chunked_prefill=False, max_num_batched_tokens=24)
    assert steps == [{0: 10, 1: 10}, {0: 1, 1: 1, 2: 10}, {2: 1}]


def test_tensorrt_llm_may_give_prompts_equal_progress() -> None:
    steps = story("tensorrt-llm", (0, 12, 1), (0, 12, 1), context_chunking_policy="EQUAL_PROGRESS")
    assert steps == [{0: 4, 1: 4}, {0: 4, 1: 4}, {0: 4, 1: 4}]


def test_sglang_expects_less_with_every_step_that_decodes() -> None:
    """From 0.7 to 0.098 in four steps here; the step of the prompt is none, and an engine left alone begins anew."""
    scheduler = type("Small", (POLICIES["sglang"],), {"DECAY_STEPS": 4})(
        num_blocks=100, block_size=4, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=24
    )
    assert scheduler.add(Request(0, 4, 8))
    ratios = []
    while scheduler.has_work:
        ratios.append(scheduler.new_token_ratio)
        assert scheduler.schedule() is not None
        scheduler.complete()
    assert ratios == pytest.approx([0.7, 0.7, 0.5495, 0.399, 0.2485, 0.098, 0.098, 0.098])
    assert scheduler.new_token_ratio == 0.7


def test_sglang_admits_by_what_it_guesses_and_retracts_who_delivered_least() -> None:
    """Six blocks. A careful engine runs one after the other; a bold one lets the second in, and has to retract it."""
    load, memory = ((0, 8, 12), (0, 8, 12)), {"num_blocks": 6, "max_new_tokens": 16}
    careful = story("sglang", *load, **memory, schedule_conservativeness=1.5)
    assert careful == [{0: 8}, *[{0: 1}] * 11, {1: 8}, *[{1: 1}] * 11]
    short = ((0, 8, 6), (0, 8, 6))
    bold = story("sglang", *short, **memory | {"max_new_tokens": 6}, schedule_conservativeness=0.1)
    assert bold == [{0: 8}, {1: 8}, *[{0: 1, 1: 1}] * 4, {0: 1}, {1: 8}, {1: 5}]


def test_sglang_looks_for_newcomers_now_and_then() -> None:
    """1 comes while 0 decodes, and is seen before the fourth step that decodes."""
    steps = story("sglang", (0, 4, 6), (2, 4, 1), scheduler_recv_interval=4, max_new_tokens=8)
    assert steps == [{0: 4}, {0: 1}, {0: 1}, {0: 1}, {0: 1}, {1: 4}, {0: 1}]


def test_sglang_may_decode_beside_prompts() -> None:
    steps = story("sglang", (0, 4, 4), (2, 9, 2), enable_mixed_chunk=True, max_new_tokens=8)
    assert steps == [{0: 4}, {0: 1}, {1: 4, 0: 1}, {1: 5, 0: 1}, {1: 1}]


def test_sglang_ends_a_step_of_prompts_where_they_are_many() -> None:
    steps = story("sglang", (0, 3, 1), (0, 2, 1), (0, 1, 1), max_prefill_tokens=4, max_new_tokens=8)
    assert steps == [{0: 3, 1: 2}, {2: 1}]


def test_tensorrt_llm_may_hold_prompts_back_for_more_to_come() -> None:
    """1 waits three steps; 3 makes enough tokens of it and 2 at once."""
    waits = {"batch_wait_timeout_iters": 3, "batch_wait_max_tokens_ratio": 0.9, "max_new_tokens": 8}
    alone = story("tensorrt-llm", (0, 4, 8), (2, 4, 1), **waits)
    assert alone == [{0: 4}, *[{0: 1}] * 4, {0: 1, 1: 4}, *[{0: 1}] * 2]
    many = story("tensorrt-llm", (0, 4, 5), (2, 4, 1), (3, 3, 1), **waits)
    assert many == [{0: 4}, {0: 1}, {0: 1}, {0: 1, 1: 4, 2: 3}, {0: 1}]


def test_tensorrt_llm_holds_each_prompt_back_anew() -> None:
    """Both 1 and 2 wait three steps beside a decode."""
    waits = {"batch_wait_timeout_iters": 3, "batch_wait_max_tokens_ratio": 0.9, "max_new_tokens": 12}
    steps = story("tensorrt-llm", (0, 4, 12), (2, 4, 1), (7, 4, 1), **waits)
    served = [number for number, step in enumerate(steps) if 1 in step or 2 in step]
    assert served == [5, 10]


@pytest.mark.parametrize("policy", ["tensorrt-llm", "sglang"])
def test_under_overlap_a_newcomer_waits_for_the_step_that_was_dispatched(policy: str) -> None:
    scheduler = made(policy, async_scheduling=True)
    first, second = Request(0, 4, 8), Request(1, 4, 1)
    assert scheduler.add(first)
    assert scheduler.schedule() is not None
    assert scheduler.add_late(second, 1)
    assert (scheduler.num_waiting, scheduler.has_work) == (1, True)
    steps = []
    for _ in range(2):
        scheduler.complete()
        assert scheduler.schedule() is not None
        steps.append({request.id for request in scheduler.composition()})
    assert steps[0] == {0}
    assert 1 in steps[1]
