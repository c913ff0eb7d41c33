"""Commands of load generators for one load: `vllm bench serve`, aiperf and guidellm.

Option names are those of vLLM 0.10 to 0.33, aiperf 0.13 and guidellm 0.8. Each command names its result file after the
plan and the load, so that `simtune validate RUN --from FILE` knows what was run. `$URL` is the server's address and
`$MODEL` the name under which it serves the model.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

RESULTS = "results"
"""Folder that the commands write to."""


@dataclass(frozen=True)
class GeneratedLoad:
    """A load in the terms of load generators: a trace file, or fixed lengths at a rate or by a number of users."""

    name: str
    """Name of the result: of the plan and the load."""
    requests: int
    seed: int
    trace: str | None = None
    """Path of a trace in Mooncake's keys."""
    block_tokens: int | None = None
    """Tokens of a block that the trace names by its content; None if it names none."""
    rate_rps: float | None = None
    users: int | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0


def commands(load: GeneratedLoad) -> dict[str, str]:
    """Return the command of each load generator that can send the load, by its name."""
    if load.trace is not None:
        return {"aiperf": _aiperf(load)}
    return {"vllm bench serve": _vllm(load), "aiperf": _aiperf(load), "guidellm": _guidellm(load)}


def _vllm(load: GeneratedLoad) -> str:
    pace = f"--request-rate {load.rate_rps:g}" if load.users is None else f"--max-concurrency {load.users}"
    return _joined(
        'vllm bench serve --base-url "$URL" --model "$MODEL" --dataset-name random --ignore-eos',
        f"--random-input-len {load.prompt_tokens} --random-output-len {load.output_tokens}",
        f"{pace} --num-prompts {load.requests} --seed {load.seed}",
        f"--save-result --save-detailed --result-dir {RESULTS} --result-filename {shlex.quote(load.name)}.json",
    )


def _aiperf(load: GeneratedLoad) -> str:
    common = 'aiperf profile --url "$URL" --model "$MODEL" --endpoint-type completions --streaming'
    # An answer that ends where the model likes makes another load of every plan.
    lengths = "--extra-inputs ignore_eos:true --use-server-token-count"
    out = f"--random-seed {load.seed} --artifact-dir {RESULTS}/{shlex.quote(load.name)}"
    if load.trace is not None:
        blocks = "" if load.block_tokens is None else f" --isl-block-size {load.block_tokens}"
        trace = f"--input-file {shlex.quote(load.trace)} --custom-dataset-type mooncake_trace --fixed-schedule{blocks}"
        return _joined(common, lengths, trace, out)
    pace = (
        f"--request-rate {load.rate_rps:g} --arrival-pattern poisson"
        if load.users is None
        else f"--concurrency {load.users}"
    )
    size = f"--isl {load.prompt_tokens} --isl-stddev 0 --osl {load.output_tokens} --osl-stddev 0"
    return _joined(common, lengths, size, f"{pace} --request-count {load.requests}", out)


def _guidellm(load: GeneratedLoad) -> str:
    profile = f"kind=poisson,rate={load.rate_rps:g}" if load.users is None else f"kind=concurrent,streams={load.users}"
    return _joined(
        'guidellm run --backend "kind=openai_http,target=$URL,model=$MODEL"',
        f"--profile {profile} --constraint kind=max_requests,count={load.requests}",
        f"--data kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}",
        f"--output kind=json,path={RESULTS}/{shlex.quote(load.name)}.json",
    )


def _joined(*parts: str) -> str:
    return " \\\n    ".join(parts)
