"""Base of readers: the options of one engine's server as settings of a pool, by the table of the emitter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, get_args

from simtune.emit.emitter import Emitter
from simtune.emit.importing.knowledge import FLAGS, IGNORED, REFUSED
from simtune.emit.importing.launches import Given, Launch, real_number, switch, whole_number
from simtune.emit.importing.pool_draft import PoolDraft, refuse_open
from simtune.emit.option import Option
from simtune.errors import SpecError, suggest
from simtune.specs.base import Dtype
from simtune.specs.input_files import JsonError, parse_json

Special = Callable[[Any, PoolDraft, Launch, Given], None]


class OptionReader:
    """Reads the options of one engine. A class states names that differ from the emitter's, and the options that set
    several keys, or whose meaning depends on others (`special`)."""

    family: ClassVar[str]
    emitter: ClassVar[Emitter]
    options: ClassVar[Mapping[str, Option]]
    """Table of the emitter."""
    aliases: ClassVar[Mapping[str, str]] = {}
    special: ClassVar[Mapping[str, Special]] = {}
    settings_files: ClassVar[tuple[str, ...]] = ("config",)
    """Options that name a file of options."""
    data_files: ClassVar[tuple[str, ...]] = ()
    """Options that name a YAML file of other data, which takes the place of its name."""
    more_flags: ClassVar[frozenset[str]] = frozenset()
    """Options without a value that are in no table."""

    def __init__(self) -> None:
        names = {name.replace("_", "-"): option for name, option in self.options.items()}
        self.table = {name: option for name, option in names.items() if name not in REFUSED[self.family]}

    def canonical(self, name: str) -> str:
        """Return the usual name of an option."""
        return self.aliases.get(name, name)

    def is_flag(self, name: str) -> bool:
        """True for an option that needs no value."""
        bare = name.removeprefix("no-")
        names = FLAGS[self.family] | self.more_flags
        in_table = any(n in self.table and self.table[n].type is bool for n in (name, bare))
        return in_table or name in names or bare in names

    def knows(self, name: str) -> bool:
        """True if an option is in some table."""
        bare = name.removeprefix("no-")
        return any(
            n in table
            for n in (name, bare)
            for table in (self.table, self.special, IGNORED[self.family], REFUSED[self.family])
        )

    def read(self, draft: PoolDraft, launch: Launch) -> None:
        """Put the options of a launch into a draft; collect what is wrong with them."""
        for option in launch.given:
            try:
                self._one(draft, launch, option)
            except SpecError as error:
                draft.problems += error.problems
        try:
            self.finish(draft, launch)
        except SpecError as error:
            draft.problems += error.problems

    def finish(self, draft: PoolDraft, launch: Launch) -> None:
        """Set what depends on several options."""

    def _one(self, draft: PoolDraft, launch: Launch, option: Given) -> None:
        name = option.name
        if name not in self.table and name.startswith("no-") and (bare := name[3:]) in {**self.table, **self.special}:
            option = Given(bare, not switch(option), option.file, option.line)
            name = bare
        special, entry = self.special.get(name), self.table.get(name)
        if special is not None:
            refuse_open(option)
            special(self, draft, launch, option)
        elif entry is not None and entry.key:
            refuse_open(option)
            draft.set(entry.key, self.setting(entry, option))
        elif entry is None:
            self._without_setting(draft, option)

    def setting(self, entry: Option, option: Given) -> Any:
        """Return the value of a setting from that of its option. Raises SpecError."""
        kinds: Mapping[type, Callable[[Given], Any]] = {int: whole_number, float: real_number, bool: switch}
        value = kinds[entry.type](option) if entry.type in kinds else str(option.value)
        try:
            return entry.read(value)
        except KeyError:
            words = ", ".join(str(word) for word in (entry.values or {}).values())
            raise SpecError(option.problem(f"{value}: is not simulated; it can be {words}")) from None

    def _without_setting(self, draft: PoolDraft, option: Given) -> None:
        bare = option.name.removeprefix("no-")
        for name in (option.name, bare):
            if name in IGNORED[self.family]:
                draft.ignore(option, IGNORED[self.family][name])
                return
            if name in REFUSED[self.family]:
                draft.refuse(option, REFUSED[self.family][name])
                return
        candidates = [*self.table, *self.special, *IGNORED[self.family], *REFUSED[self.family]]
        draft.unknown(option, suggest(option.name, candidates))


def json_value(option: Given) -> dict[str, Any]:
    """Return an option's JSON object. Raises SpecError."""
    value = option.value
    if not isinstance(value, dict):
        try:
            value = parse_json(str(value))
        except JsonError as error:
            raise SpecError(option.problem(f"not valid JSON: {error}")) from None
    if not isinstance(value, dict):
        raise SpecError(option.problem('a JSON object was expected: {"key": value, ...}'))
    return value


def set_kv_dtype(draft: PoolDraft, option: Given, words: Mapping[str, str]) -> None:
    """Set the dtype of the KV cache by an engine's word for it; `auto` is that of the checkpoint."""
    usual = draft.model.kv_dtype or draft.model.dtype
    word = str(option.value)
    if word == "auto":
        if draft.get("kv_cache.dtype") not in (None, usual):
            draft.set("kv_cache.dtype", usual)
        return
    if word not in words:
        raise SpecError(option.problem(f"{word}: no such KV cache is simulated; it can be auto, {', '.join(words)}"))
    draft.set("kv_cache.dtype", words[word])


def set_quantization(draft: PoolDraft, option: Given, words: Mapping[str, str]) -> None:
    """Set the dtype to which weights are quantised; a format of the checkpoint changes nothing."""
    word = str(option.value)
    dtypes: tuple[Dtype, ...] = get_args(Dtype)
    dtype = next((dtype for dtype in dtypes if words.get(dtype) == word), None)
    if dtype is not None and draft.model.with_weights(dtype) is not draft.model:
        draft.set("weight_dtype", dtype)
    else:
        draft.ignore(option, f"{word} is the checkpoint's format, and the model's spec states that")


def check_dtype(draft: PoolDraft, option: Given) -> None:
    """Refuse a dtype of activations that is not the model's."""
    names = {"bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32"}
    word = str(option.value)
    if word == "auto" or names.get(word, word) == draft.model.dtype:
        draft.ignore(option, "it is the model's own")
    else:
        draft.refuse(option, f"the dtype of activations, which is {draft.model.dtype} in the model's spec")
