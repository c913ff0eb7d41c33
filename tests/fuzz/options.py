"""Mutated options: a right command of every verb with one or two options whose values hardly belong there.

The options are read from the command line itself, so that a new one is tried too.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from random import Random

import click

_LOAD = ("--model", "./model.yaml", "--hardware", "./card/profile.yaml", "--workload", "./load.yaml")
BASES: tuple[tuple[str, ...], ...] = (
    ("new", "new.yaml", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--devices", "2", "--workload", "chat"),
    ("optimize", "study.yaml", "--out", "out", "--jobs", "1", "--json"),
    ("optimize", "study.yaml", "--dry-run", "--json"),
    ("simulate", *_LOAD, "--requests", "20", "--json"),
    ("simulate", "--plan", "plan.yaml", "--workload", "./load.yaml", "--requests", "20", "--out", "out", "--json"),
    ("sweep", *_LOAD, "--requests", "20", "--over", "rate=2,4", "--jobs", "1", "--out", "out", "--json"),
    ("import", "vllm serve Qwen/Qwen3-8B --max-num-seqs 8", "--hardware", "h100-sxm", "--json"),
    ("explain", "plan.yaml", "--json"),
    ("report", "run", "--out", "out.html", "--json"),
    ("certify", "certified", "--study", "study.yaml", "--json"),
    ("reproduce", "systems.yaml", "--jobs", "1", "--quiet", "--json"),
    ("reproduce", "--list", "--json"),
    ("workload", "trace.csv", "--json"),
    ("workload", "own.csv", "--out", "out.jsonl", "--json"),
    ("acceptance", "rounds.csv", "--out", "out.yaml", "--draft-tokens", "3", "--json"),
    ("speculate", *_LOAD[:4], "--acceptance", "./acceptance.yaml", "--drafter", "{kind: ngram, lookup_max: 4}"),
    ("fit", "gemm.csv", "--facts", "facts.yaml", "--out", "out", "--quiet", "--json"),
    ("calibrate", "./card", "--measured", "steps.csv", *_LOAD[:2], "--tp", "1", "--out", "out", "--json"),
    ("validate", "judged.yaml", "--from", "measured.jsonl", "--out", "out", "--uncertainty", "0", "--quiet", "--json"),
    ("replay", "log.jsonl", "--json"),
    ("list", "models", "--json"),
    ("show", "./model.yaml", "--json"),
    ("check", "plan.yaml", "--json"),
    ("schema", "plan"),
    ("doctor", "--json"),
)  # fmt: skip
NUMBERS = (
    "0", "-1", "1", "2", "3", "0.5", "1.5", "nan", "NaN", "inf", "-inf", "1e400", "1e-400", "1e-17", "9" * 30,
    "9" * 5000, "", " ", "1,2", "1_0", "½", "٣", "0x10", "1e3", "1e9", "true", "1 0", "10s", "1h", "-0", "2147483648",
    "1:2",
)  # fmt: skip
IMPOSSIBLE = ("nan", "NaN", "inf", "-inf", "1e400", "-1", "", " ", "½", "0x10", "true", "1 0", "9" * 30, "9" * 5000)
"""Values that no option that takes a number can mean."""
PATHS = (
    "", " ", "missing.yaml", "missing/deep/er", ".", "..", "run", "own.csv", "plan.yaml", "model.yaml", "pipe",
    "/dev/null", "/dev/zero", "/proc/self/mem", "a\nb", "x" * 300, "x" * 5000, "~", "$(id)", "-", "--", "é.yaml",
    "out/", "own.csv/x",
)  # fmt: skip
WORDS = (
    "", " ", "x", "=", "a=", "=b", "a=b", "a=b=c", "seed=nan", "workload.requests=-1", "rate=", "rate=0:0:0",
    "rate=1:9:0", "rate=1,,2", "rate=nan", "rate=1:1e9:1e-9", "hardware=h100-sxm,", "slo.ttft_s={p99: .nan}", "{", "[]",
    "{kind: x}", "&a *a", "module:Class", "os:system", "\u2028", "null", "0", "-1", "nan", "x" * 5000, "<b>", "%s{0}",
    "llama-3.1-8b", "chat", "h100-sxm", "vllm", "vllm@0", "vllm@99", "vllm@", "@", "mixed", "2023-11-16", "10:00",
    "25:61", "1h", "-1h",
)  # fmt: skip
Command = tuple[str, ...]


@cache
def verbs() -> dict[str, list[click.Parameter]]:
    """The options and arguments of every verb of the bases."""
    from simtune.cli import cli

    context = click.Context(cli)
    found = {}
    for verb in dict.fromkeys(base[0] for base in BASES):
        command = cli.get_command(context, verb)
        assert command is not None
        found[verb] = command.params
    return found


def is_number(parameter: click.Parameter) -> bool:
    """True if an option takes one number."""
    return isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType)


def _value(random: Random, parameter: click.Parameter) -> str:
    """Something that hardly belongs there; mostly of the kind of the option."""
    own: Command = WORDS
    if is_number(parameter) or parameter.type.name == "duration":
        own = NUMBERS
    elif isinstance(parameter.type, click.Path):
        own = PATHS
    return random.choice(own if random.random() < 0.85 else (*NUMBERS, *PATHS, *WORDS))


def mutated(number: int) -> tuple[Command, str]:
    """Return the command of a number, and what is odd about it."""
    random = Random(f"options {number}")
    command = list(random.choice(BASES))
    parameters, odd = verbs()[command[0]], []
    for _ in range(random.choice((1, 1, 1, 2))):
        parameter = random.choice(parameters)
        if isinstance(parameter, click.Argument):
            at = 1 if len(command) > 1 else 0
            text = _value(random, parameter)
            command[at : at + 1] = [text] if at else [command[0], text]
            odd.append(f"{parameter.name} {text[:40]!r}")
            continue
        name = random.choice(parameter.opts)
        if getattr(parameter, "is_flag", False):
            command += [name]
            odd.append(name)
            continue
        text = _value(random, parameter)
        if name in command:
            command[command.index(name) + 1] = text
        else:
            command += [name] if random.random() < 0.03 else [name, text]
        odd.append(f"{name} {text[:40]!r}")
    return tuple(command), ", ".join(odd)


def impossible(command: Command) -> list[str]:
    """Return the options of a command that take a number and are given something that is none, or no such one."""
    numeric = {name for parameter in verbs()[command[0]] if is_number(parameter) for name in parameter.opts}
    given = [(name, text) for name, text in pairwise(command) if name in numeric and text in IMPOSSIBLE]
    return [f"{command[0]} {name} {text[:40]!r}" for name, text in given]
