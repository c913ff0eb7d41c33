"""Commands of load generators: the load that is meant, and a result named after plan and load."""

from __future__ import annotations

import shlex

import pytest

from simtune.emit.load_generators import GeneratedLoad, commands


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def option(command: str, name: str) -> str:
    parts = words(command)
    return parts[parts.index(name) + 1]


def test_fixed_lengths_at_a_rate_are_sent_by_all_generators() -> None:
    made = commands(GeneratedLoad("p.rate-90", 900, 3, rate_rps=15.6, prompt_tokens=1237, output_tokens=205))
    vllm, aiperf, guidellm = (made[name] for name in ("vllm bench serve", "aiperf", "guidellm"))
    assert (option(vllm, "--request-rate"), option(vllm, "--num-prompts"), option(vllm, "--seed")) == (
        "15.6",
        "900",
        "3",
    )
    assert (option(vllm, "--random-input-len"), option(vllm, "--random-output-len")) == ("1237", "205")
    assert "--save-detailed" in words(vllm), "requests one by one, or nothing can be judged"
    assert option(vllm, "--result-filename") == "p.rate-90.json"
    assert (option(aiperf, "--isl"), option(aiperf, "--osl"), option(aiperf, "--arrival-pattern")) == (
        "1237",
        "205",
        "poisson",
    )
    assert option(aiperf, "--artifact-dir") == "results/p.rate-90"
    assert option(guidellm, "--profile") == "kind=poisson,rate=15.6"
    assert option(guidellm, "--data") == "kind=synthetic_text,prompt_tokens=1237,output_tokens=205"
    assert option(guidellm, "--output") == "kind=json,path=results/p.rate-90.json"


def test_users_wait_for_their_answers() -> None:
    made = commands(GeneratedLoad("p.users-80", 400, 0, users=24, prompt_tokens=8, output_tokens=9))
    assert option(made["vllm bench serve"], "--max-concurrency") == "24"
    assert "--request-rate" not in words(made["vllm bench serve"])
    assert option(made["aiperf"], "--concurrency") == "24"
    assert option(made["guidellm"], "--profile") == "kind=concurrent,streams=24"


@pytest.mark.parametrize(("block_tokens", "blocks"), [(None, False), (512, True)])
def test_a_trace_is_replayed_by_the_generator_that_can(block_tokens: int | None, blocks: bool) -> None:
    load = GeneratedLoad("p.trace-100", 10, 0, trace="loads/p.trace-100.jsonl", block_tokens=block_tokens, rate_rps=2)
    ((name, command),) = commands(load).items()
    assert name == "aiperf"
    assert option(command, "--input-file") == "loads/p.trace-100.jsonl"
    assert "--fixed-schedule" in words(command)
    assert ("--isl-block-size" in words(command)) == blocks
