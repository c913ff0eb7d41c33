"""Starts of servers among commands: which engine is started, with which model and options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from simtune.errors import Problem, SpecError


@dataclass(frozen=True, slots=True)
class Given:
    """Option as a command or a settings file has it."""

    name: str
    """Name without leading dashes, with - for _."""
    value: Any
    """Text, or the plain data of a settings file; True for an option without a value."""
    file: str
    line: int | None

    def problem(self, message: str) -> Problem:
        """Return a problem of this option."""
        return Problem(self.file, message, f"--{self.name}", self.line)


@dataclass(slots=True)
class Launch:
    """Start of one server, or of several that are alike."""

    family: str
    model: str | None
    given: list[Given]
    file: str
    line: int | None
    environment: Mapping[str, str] = field(default_factory=dict)
    branch: str = ""
    conditional: bool = False
    image: str = ""
    role: str | None = None
    instances: int = 1
    pool: str = ""
    follows: bool = False
    """True if the process computes for a server that another process, on the first of several nodes, starts."""

    def value(self, *names: str) -> Any:
        """Return the value of the last option of some names, None if there is none."""
        return next((option.value for option in reversed(self.given) if option.name in names), None)

    def without(self, *names: str) -> list[Given]:
        """Return the options but those of some names."""
        return [option for option in self.given if option.name not in names]


MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "sglang.launch_server": "sglang",
    "tensorrt_llm.commands.serve": "trtllm",
    "dynamo.vllm": "vllm",
    "dynamo.sglang": "sglang",
    "dynamo.trtllm": "trtllm",
}
"""Families of engines by the module that `python -m` runs."""
_SERVES = {"vllm": "vllm", "sglang": "sglang", "transformers": "transformers"}
"""Families by the program whose subcommand `serve` starts a server."""
IMAGES = {
    "vllm-openai": "vllm",
    "ggml-org/llama.cpp": "llamacpp",
    "lmsysorg/sglang": "sglang",
}
"""Families by words in the name of an image whose entry point is the server."""
MODEL_OPTIONS = ("model", "model-path", "model-tag")
_NUMBER = re.compile(r"-\d+(\.\d+)?([eE][-+]?\d+)?")
_SHELLS = ("sh", "bash", "zsh", "dash")


def find_program(words: Sequence[str]) -> tuple[str, int] | None:
    """Return the family of the engine that a command starts, and the place of its first argument; None if it starts
    none. Words before the program (env, nohup, docker run ..., mpirun ...) are passed over.
    """
    for at, word in enumerate(words):
        program, after = PurePosixPath(word).name, tuple(words[at + 1 : at + 2])
        if after == ("serve",) and program in _SERVES:
            return _SERVES[program], at + 2
        if word == "-m" and after and after[0] in MODULES:
            return MODULES[after[0]], at + 2
        if program == "trtllm-serve" and after != ("disaggregated",):
            return "trtllm", at + 1 + (after == ("serve",))
        if program in ("llama-server", "llama-server.exe"):
            return "llamacpp", at + 1
    for at, word in enumerate(words):
        family = family_of_image(word)
        if family is not None and {"docker", "podman"} & set(words[:at]):
            return family, at + 1
    return None


def family_of_image(image: str) -> str | None:
    """Return the family of the engine that an image starts by itself, None for other images."""
    name = image.rpartition("@")[0] or image
    return next((family for words, family in IMAGES.items() if words in name), None)


def inner_script(words: Sequence[str]) -> str | None:
    """Return the text that a command has a shell run (`bash -c TEXT`), None if it has none."""
    for at, word in enumerate(words[:-1]):
        if re.fullmatch(r"-[a-z]*c", word) and at and PurePosixPath(words[at - 1]).name in _SHELLS:
            return words[at + 1]
        if re.fullmatch(r"-[a-z]*c", word) and any(PurePosixPath(w).name in _SHELLS for w in words[:at]):
            return words[at + 1]
    return None


def options_of(
    words: Sequence[str], file: str, line: int | None, canonical: Callable[[str], str], flag: Callable[[str], bool]
) -> tuple[list[str], list[Given]]:
    """Return the words that belong to no option, and the options. `canonical` returns the usual name of an option,
    `flag` is true for the names of options that need no value.
    """
    free: list[str] = []
    options: list[Given] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_option(word):
            free.append(word)
            continue
        name, equals, value = word.partition("=")
        name = canonical(plain(name))
        if equals:
            options.append(Given(name, value, file, line))
            continue
        values: list[str] = []
        while at < len(words) and not _is_option(words[at]):
            if flag(name) and words[at].lower() not in ("true", "false"):
                break
            values.append(words[at])
            at += 1
        options.append(Given(name, " ".join(values) if values else True, file, line))
    return free, options


def _is_option(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and _NUMBER.fullmatch(word) is None


def plain(name: str) -> str:
    """Return the name of an option without leading dashes, with - for _."""
    return name.lstrip("-").replace("_", "-")


def whole_number(option: Given) -> int:
    """Return an option's value as a whole number; 8k and 8K are 8,000 and 8,192. Raises SpecError."""
    text = str(option.value).strip().replace("_", "")
    match = re.fullmatch(r"([-+]?\d{1,18})(?:\.(\d{1,3}))?([kKmMgG]?)", text)
    if match is None or isinstance(option.value, bool) or (match[2] and not match[3]):
        raise SpecError(option.problem(f"{text!r} is no whole number; give one"))
    factor = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[3]]
    return int(float(f"{match[1]}.{match[2] or 0}") * factor) if match[2] else int(match[1]) * factor


def real_number(option: Given) -> float:
    """Return an option's value as a finite number. Raises SpecError."""
    try:
        number = float("nan") if isinstance(option.value, bool) else float(str(option.value))
    except ValueError:
        number = float("nan")
    if not abs(number) < float("inf"):
        raise SpecError(option.problem(f"{option.value!r} is no number; give one"))
    return number


def switch(option: Given) -> bool:
    """Return an option's value as true or false. Raises SpecError."""
    words = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    try:
        return words[str(option.value).lower()]
    except KeyError:
        raise SpecError(option.problem(f"{option.value!r} is neither true nor false")) from None
