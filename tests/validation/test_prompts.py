"""Prompts: exact lengths, the same tokens for the same block names, and nothing else in common."""

from dataclasses import replace

import numpy as np
import pytest

from simtune.errors import UsageError
from simtune.specs.workload import FixedLength, Lognormal, Poisson, Sessions, SharedPrefix, Workload
from simtune.validation.client.prompts import FIRST_TOKEN, Prompts
from simtune.workload.requests import build_stream


def workload(**more: object) -> Workload:
    return Workload(
        name="w",
        arrivals=Poisson(rate_rps=1.0),
        prompt=Lognormal(mean_tokens=70, sigma=0.8, max_tokens=500),
        output=FixedLength(tokens=8),
        **more,  # type: ignore[arg-type]
    )


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_prompts_share_what_the_workload_says_and_no_more() -> None:
    stream = build_stream(workload(shared_prefix=SharedPrefix(groups=2, tokens=32)), None, requests=12, seed=1)
    prompts = Prompts(stream, 100_000, seed=5)
    assert stream.hash_ids is not None
    for i in range(12):
        assert len(prompts[i]) == stream.prompt_tokens[i]
        assert min(prompts[i]) >= FIRST_TOKEN
        assert max(prompts[i]) < 100_000
        for j in range(i):
            named = common(list(stream.hash_ids[i]), list(stream.hash_ids[j])) * stream.block_tokens
            assert common(prompts[i], prompts[j]) == named


def test_turns_of_a_conversation_begin_with_those_before() -> None:
    stream = build_stream(
        workload(sessions=Sessions(follow="arrivals", concurrent=2, turns=3)), None, requests=6, seed=1
    )
    prompts = Prompts(stream, 1000)
    whole = int(stream.prompt_tokens[0]) // stream.block_tokens * stream.block_tokens
    assert whole > 0
    assert common(prompts[0], prompts[2]) >= whole


def test_a_vocabulary_of_special_tokens_alone_makes_no_prompts() -> None:
    stream = build_stream(workload(), None, requests=1, seed=1)
    with pytest.raises(UsageError, match=f"a vocabulary of {FIRST_TOKEN} has no tokens to make prompts of"):
        Prompts(stream, FIRST_TOKEN)
    assert set(Prompts(stream, FIRST_TOKEN + 1)[0]) == {FIRST_TOKEN}


def test_a_prompt_that_ends_within_what_is_shared_is_the_beginning_of_it() -> None:
    whole = build_stream(workload(shared_prefix=SharedPrefix(groups=1, tokens=64)), None, requests=2, seed=1)
    ids = tuple(tuple(range(9)) for _ in range(2))
    stream = replace(whole, hash_ids=ids, prompt_tokens=np.array([5, whole.block_tokens + 1]))
    first, second = Prompts(stream, 1000)[0], Prompts(stream, 1000)[1]
    assert (len(first), len(second)) == (5, whole.block_tokens + 1)
    assert second[:5] == first


def test_prompts_depend_on_seed_and_request_alone() -> None:
    long, short = (build_stream(workload(), None, requests=n, seed=1) for n in (9, 4))
    assert [Prompts(long, 1000)[i] for i in range(4)] == [Prompts(short, 1000)[i] for i in range(4)]
    assert Prompts(long, 1000, seed=1)[0] != Prompts(long, 1000, seed=2)[0]
