"""Reading keys of a Hugging Face config.json: aliases, defaults, the language part, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simtune.errors import Problem, SpecError
from simtune.specs.yamlfile import Document

ALIASES = {
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": (
        "num_experts_per_tok",
        "top_k_experts",
        "experts_per_token",
        "num_experts_per_token",
    ),
    "dtype": ("dtype", "torch_dtype"),
    "quantization": ("quantization_config", "compression_config"),
}

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

MOST, MOST_LAYERS = 2**27, 10_000
"""Bounds of any size of a model, and of the number of its layers."""

LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")
"""Keys under which multimodal configs contain that of their language model."""


def language_parts(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the language part of a multimodal config in a list, or an empty list."""
    return [data[key] for key in LANGUAGE_PARTS if isinstance(data.get(key), dict)][:1]


class Config:
    """Reads keys with their aliases, the language part first, and collects what is wrong.

    A key that is absent has the default of its architecture, if there is one. `asked` contains the keys that were read.
    """

    def __init__(self, document: Document, modelopt: Document | None = None) -> None:
        """`modelopt` is the hf_quant_config.json beside the config, if there is one."""
        self.modelopt = modelopt
        self.notes: list[str] = []
        self.data: dict[str, Any] = document.data
        self.part = next((key for key in LANGUAGE_PARTS if isinstance(self.data.get(key), dict)), None)
        self.nested: dict[str, Any] | None = None if self.part is None else self.data[self.part]
        self.document = document
        self.problems: list[Problem] = []
        self.asked: set[str] = set()
        self._own_names: Mapping[str, Sequence[str]] = {}
        self._defaults: Mapping[str, Any] = {}

    def of_architecture(self, own_names: Mapping[str, Sequence[str]], defaults: Mapping[str, Any]) -> None:
        """Read keys under an architecture's own names as well, and fill in what it takes for absent ones."""
        self._own_names, self._defaults = own_names, defaults

    def key(self, *names: str) -> str:
        """Return the first of these names that is in the file, else the first."""
        names = self._all_names(names)
        for part in (self.nested or {}, self.data):
            for name in names:
                if part.get(name) is not None:
                    return name
        return names[0]

    def get(self, *names: str) -> Any:
        """The value under one of these names, or its default; null is as good as absent."""
        name = self.key(*names)
        value = (self.nested or {}).get(name)
        value = self.data.get(name) if value is None else value
        if value is None:
            value = next((self._defaults[n] for n in self._all_names(names) if n in self._defaults), None)
        return value

    def problem(self, key: str, message: str) -> None:
        """Note what is wrong with a key."""
        part = [] if self.part is None or key in self.data else [self.part]
        if any(path[-1] == key for path in self.document.overridden):
            self.problems.append(Problem("--set", message, key))
            return
        line, column = self.document.position([*part, key])
        self.problems.append(Problem(self.document.file, message, ".".join([*part, key]), line, column))

    def raise_if_any(self) -> None:
        """Raise SpecError with all problems, if any were noted."""
        if self.problems:
            raise SpecError(sorted(dict.fromkeys(self.problems), key=lambda p: (p.line or 0, p.column or 0)))

    def count(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """Return a whole number. A wrong or missing one is reported, and the minimum (at least 1) is returned."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        most = MOST_LAYERS if "num_hidden_layers" in names else MOST
        if type(value) is int and minimum <= value <= most:
            return value
        if value is None:
            aliases = f" (also read: {', '.join(names[1:])})" if len(names) > 1 else ""
            self.problem(names[0], f"is required and missing{aliases}")
        else:
            bounds = f"at least {minimum}" if type(value) is not int or value < minimum else f"at most {most}"
            self.problem(self.key(*names), f"must be a whole number of {bounds}, not {value!r}")
        return max(minimum, 1)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a switch. A wrong one is reported, and the default is returned."""
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.problem(name, f"must be true or false, not {value!r}")
        return default

    def switch(self, key: bool | str) -> bool:
        """Return a switch that an architecture always or never has, or that a key of the config sets."""
        return self.flag(key) if isinstance(key, str) else key

    def dtype(self) -> str:
        """Return the dtype of activations. Without the key it is bf16, as engines have it, and a note says so."""
        if self.get(*ALIASES["dtype"]) is None:
            self.notes.append(
                "config.json has no dtype: activations and unquantised weights taken as bf16, as engines do; "
                "--set model.dtype=float16 takes another"
            )
            return "bf16"
        return self.choice("dtype", DTYPES)

    def choice(self, what: str, values: Mapping[str, str]) -> str:
        """Return the meaning of a key that must be one of the words of `values`; note a problem if it is not."""
        names = ALIASES[what]
        value = self.get(*names)
        if isinstance(value, str) and (value in values or value in values.values()):
            return values.get(value, value)
        self.problem(self.key(*names), f"must be one of {', '.join(values)}, not {value!r}")
        return next(iter(values.values()))

    def layer_kinds(self, num_layers: int, known: Sequence[str], name: str = "layer_types") -> list[str] | None:
        """Return one known kind for each layer, None if the config lists none; note a problem for what is wrong."""
        kinds = self.get(name)
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            actual = f"{len(kinds)} kinds" if isinstance(kinds, list) else repr(kinds)
            self.problem(name, f"must be a list of {num_layers} layer kinds, not {actual}")
            return [known[0]] * num_layers
        for kind in sorted({str(kind) for kind in kinds if kind not in known}):
            self.problem(name, f"the layer kind {kind} is not modelled; modelled: {', '.join(known)}")
        return [str(kind) for kind in kinds]

    def layer_numbers(self, name: str) -> list[int] | None:
        """Return a list of layer numbers; None if there is none, or a wrong one, which is reported."""
        numbers = self.get(name)
        if numbers is None or (isinstance(numbers, list) and all(type(n) is int for n in numbers)):
            return numbers
        self.problem(name, f"must be a list of layer numbers, not {numbers!r}")
        return None

    def blocks(self, part: str, num_layers: int) -> list[dict[str, Any]]:
        """Return one part of each layer of `block_configs`, with `no_op` if the layer lacks it; note what is wrong."""
        listed = self.get("block_configs")
        parts = [block.get(part) for block in listed if isinstance(block, dict)] if isinstance(listed, list) else []
        blocks = [block for block in parts if isinstance(block, dict)]
        if len(blocks) != num_layers:
            self.problem("block_configs", f"must be a list of {num_layers} layers with {part}, not of {len(blocks)}")
            return [{"no_op": True}] * num_layers
        for key in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens"):
            if any(block.get(key) for block in blocks):
                self.problem("block_configs", f"{key} of {part}: not modelled")
        return blocks

    def refuse_contradictions(self) -> None:
        """Note aliases of one key that have different values."""
        for names in ALIASES.values():
            part = (
                self.nested if self.nested and any(self.nested.get(name) is not None for name in names) else self.data
            )
            stated = {name: part[name] for name in names if part.get(name) is not None}
            first, *aliases = stated or ("",)
            for alias in aliases:
                if stated[alias] != stated[first]:
                    self.problem(alias, f"{stated[alias]!r} contradicts {first}, which is {stated[first]!r}")

    def _all_names(self, names: Sequence[str]) -> tuple[str, ...]:
        every = tuple(dict.fromkeys(n for name in names for n in (name, *self._own_names.get(name, ()))))
        self.asked.update(every)
        return every
