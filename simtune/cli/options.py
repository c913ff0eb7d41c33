"""Options that several verbs have, each declared once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

from simtune.cli.names import HARDWARE, LAUNCH, MODEL, WORKLOAD
from simtune.cli.numbers import JOBS, REQUESTS, SEED
from simtune.cli.paths import PATH, TEXT

F = TypeVar("F", bound=Callable[..., Any])


class SharedOption:
    """Decorator that adds an option to a verb: `@model_option`, or with other words `@model_option.but(help=...)`."""

    def __init__(self, *names: str, **declared: Any) -> None:
        self._names, self._declared = names, declared

    def __call__(self, verb: F) -> F:
        """Add the option to a verb."""
        return click.option(*self._names, **self._declared)(verb)

    def but(self, *names: str, **changed: Any) -> SharedOption:
        """Return the option with some of its declaration changed; `names` are those of its parameter."""
        return SharedOption(self._names[0], *(names or self._names[1:]), **(self._declared | changed))


model_option = SharedOption(
    "--model", type=MODEL, help="Name, spec, or Hugging Face config.json; the plan's own if not given."
)
hardware_option = SharedOption(
    "--hardware", type=HARDWARE, help="Name of a profile, or its folder; the plan's own if not given."
)
workload_option = SharedOption(
    "--workload", type=WORKLOAD, help="Name, spec, trace, or a log of a load generator or gateway."
)
plan_option = SharedOption("--plan", type=TEXT, help="plan.yaml; without it one instance on the fewest GPUs that fit.")
like_option = SharedOption(
    "--like",
    type=LAUNCH,
    help="Name or file of a published launch file's facts, in place of the engine's defaults: `simtune list launches`.",
)
requests_option = SharedOption(
    "--requests", type=REQUESTS, help="Requests to simulate, instead of the workload's own number."
)
seed_option = SharedOption("--seed", type=SEED, default=None, help="Seed of all random streams.")
jobs_option = SharedOption("--jobs", type=JOBS, help="Processes; one per core by default.")
set_option = SharedOption(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a field, e.g. workload.arrivals.rate_rps=8.",
)
out_option = SharedOption("--out", type=PATH, help="Run directory to write.")
html_option = SharedOption("--html", type=PATH, metavar="FILE", help="Write one page with figures.")
vllm_python_option = SharedOption(
    "--vllm-python", metavar="FILE", help="With --engine vllm: the Python interpreter with vLLM."
)
force_option = SharedOption("--force", is_flag=True, help="Replace an earlier run in the output folder.")
quiet_option = SharedOption("--quiet", "-q", is_flag=True, help="No progress on stderr.")
json_option = SharedOption(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout instead of a table."
)


def as_option(parameter: str = "model") -> Callable[[F], F]:
    """Add --as: the architecture that the model of a parameter is read as, whatever its config.json states."""

    def decorate(verb: F) -> F:
        @click.option(
            "--as",
            "architecture",
            metavar="ARCHITECTURE",
            help="Read config.json as this architecture, on your own word, e.g. LlamaForCausalLM.",
        )
        @functools.wraps(verb)
        def stated(*args: Any, architecture: str | None, **parameters: Any) -> Any:
            if architecture is not None:
                if parameters[parameter] is None:
                    raise click.BadParameter("give the model whose config.json it is: --model", param_hint="--as")
                parameters[parameter] = f"{parameters[parameter]} as {architecture}"
            return verb(*args, **parameters)

        return cast(F, stated)

    return decorate
