"""Prompts: exact lengths, the same tokens for the same block names, and nothing else in common."""

from simtune.sim.requests import build_stream
from simtune.specs.workload import FixedLength, Lognormal, Poisson, Sessions, SharedPrefix, Workload
from simtune.validation.prompts import FIRST_TOKEN, Prompts


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
    stream = build_stream(workload(sessions=Sessions(concurrent=2, turns=3)), None, requests=6, seed=1)
    prompts = Prompts(stream, 1000)
    whole = int(stream.prompt_tokens[0]) // stream.block_tokens * stream.block_tokens
    assert whole > 0
    assert common(prompts[0], prompts[2]) >= whole


def test_prompts_depend_on_seed_and_request_alone() -> None:
    long, short = (build_stream(workload(), None, requests=n, seed=1) for n in (9, 4))
    assert [Prompts(long, 1000)[i] for i in range(4)] == [Prompts(short, 1000)[i] for i in range(4)]
    assert Prompts(long, 1000, seed=1)[0] != Prompts(long, 1000, seed=2)[0]
