"""Parts that all specs share: strict pydantic models, and errors that name file, line, key, rule and remedy."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from simtune.errors import Problem, SpecError, UsageError, suggest
from simtune.specs import yamlfile
from simtune.specs.input_files import read_text
from simtune.specs.kinds import OneOf
from simtune.specs.schema_versions import REWRITE, schema_problem

T = TypeVar("T")

Seq = Annotated[tuple[T, ...], Field(strict=False)]
"""A YAML list read into a tuple; its items stay strictly typed."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def spec_name(text: str, otherwise: str) -> str:
    """Return the name of a spec that is nearest to a text, such as a file's name; `otherwise` if the text has no letter
    or digit.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-") or otherwise


def _of_this_world(value: float) -> float:
    """Raise ValueError for a number so small that its inverse is none."""
    if value < _SMALLEST:
        raise ValueError(f"must be at least {_SMALLEST:g} (found {value!r})")
    return value


def _finite(value: Any) -> Any:
    """Raise ValueError if a number in it, at any depth, is none."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"holds {value}, which is no finite number")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _finite(inner)
    return value


Options = Annotated[dict[str, Any], AfterValidator(_finite)]
"""Options of a part from outside the package, as the file gives them."""

_SMALLEST, _LARGEST = 1e-18, 1e24
"""Bounds of measured quantities: from a thousandth of a femtosecond to the operations of all machines in a year."""

Positive = Annotated[float, Field(gt=0, le=_LARGEST), AfterValidator(_of_this_world)]
NonNegative = Annotated[float, Field(ge=0, le=_LARGEST)]
Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=10**15)]
"""A number of anything; types with bounds of their own follow."""
GpuCount = Annotated[int, Field(ge=1, le=100_000)]
"""A number of devices, instances or ranks."""
Tokens = Annotated[int, Field(ge=1, le=10**9)]
"""Tokens of one request, or of what requests share."""
Context = Annotated[int, Field(ge=1, le=2**27)]
"""The longest prompt and output that a model or an engine takes: step costs are tabulated up to it."""
TokensPerStep = Annotated[int, Field(ge=1, le=2**24)]
"""Tokens of one step."""
Seats = Annotated[int, Field(ge=1, le=2**20)]
"""Sequences of one step, requests under way, experts."""
Width = Annotated[int, Field(ge=1, le=10**8)]
"""Heads, layers, and the sizes of matrices and vocabularies."""
Drafts = Annotated[int, Field(ge=1, le=1024)]
"""Tokens that are drafted in one round, and levels and branches of their trees."""
BlockSize = Annotated[int, Field(ge=1, le=2**20)]
"""Tokens of a KV block."""
LARGEST_RATE_RPS = 1e9
Rate = Annotated[float, Field(gt=0, le=LARGEST_RATE_RPS), AfterValidator(_of_this_world)]
"""Requests per second."""
LogSigma = Annotated[float, Field(ge=0, le=20)]
"""A standard deviation of logarithms."""
LONGEST_S = 2.0**22
"""Simulated seconds, 48 days: ticks of 2**-40 s fit 64 bits for twice as long."""
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
"""A moment or a duration of a simulation, in seconds."""
Share = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal[
    "fp32", "bf16", "fp16", "fp8", "fp8_block", "mxfp8", "nvfp4", "nvfp4_wo", "mxfp4", "mxfp4_mxfp8", "int8", "int8_wo",
    "int4",
]  # fmt: skip
"""Format in which values are stored, and which kernels multiply them: `fp8` has a scale per tensor or channel,
`fp8_block` one per 128 x 128 weights, `mxfp8` one per 32, `nvfp4` one per 16, both operands quantised; `mxfp4` is
weight-only (w4a16), `mxfp4_mxfp8` has 8-bit activations; `nvfp4_wo`, `int8_wo` and `int4` are weight-only.
"""
FloatDtype = Literal["fp32", "bf16", "fp16"]

DTYPE_BYTES: dict[str, float] = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_block": 1, "int8": 1, "int8_wo": 1,
    "mxfp8": 1.03125, "nvfp4": 0.5625, "nvfp4_wo": 0.5625, "mxfp4": 0.53125, "mxfp4_mxfp8": 0.53125, "int4": 0.53,
}  # fmt: skip
"""Bytes per value. 4-bit values come in groups that share a scale: of 8 bits for 16 values (nvfp4) or 32 (mxfp4), of 16
bits and a zero point for 128 (int4)."""

COMPUTES_IN: dict[str, Dtype] = {
    "int4": "bf16", "int8_wo": "bf16", "mxfp4": "bf16", "nvfp4_wo": "bf16", "fp8_block": "fp8", "mxfp8": "fp8",
    "mxfp4_mxfp8": "fp8",
}  # fmt: skip
"""Data-sheet rate at which a format's kernels run, if the format has no rate of its own: weight-only formats are
unpacked and multiplied in 16 bits.
"""

ACTIVATION_BYTES: dict[str, float] = {
    "fp8": 1, "fp8_block": 1, "mxfp8": 1.03125, "int8": 1, "nvfp4": 0.5625, "mxfp4_mxfp8": 1.03125,
}  # fmt: skip
"""Bytes per activation that a product of the format reads, if activations are quantised; 16 bits for other formats."""


class Part(BaseModel):
    """A block inside a spec: immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True, defer_build=True
    )


SpecCheck = Callable[[Any], Iterable[tuple[Sequence[str | int], str]]]
"""(key, what is wrong) for what a spec names and only the floors above can look at."""


class Record(BaseModel):
    """A block of a file that simtune writes and reads again: immutable, no silent conversions, no NaN.

    A field without a default is always written, as null if there is no such number. A field with a default is written
    only if it was set. Unknown keys are ignored: a later release may add some.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", strict=True, allow_inf_nan=False, populate_by_name=True, defer_build=True
    )
    MAY_LACK: ClassVar[frozenset[str]] = frozenset()
    """Columns of a table that are written only if a row has a value for them."""

    def to_data(self) -> dict[str, Any]:
        """Plain data by the names in the file."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class Spec(Part):
    """A file of its own. `KIND` is the word in `schema: simtune/<kind>@1`."""

    KIND: ClassVar[str]
    name: Name

    @classmethod
    def schema_id(cls) -> str:
        """Value of `schema` in the files of this kind."""
        return f"simtune/{cls.KIND}@1"

    @classmethod
    def from_document(cls, document: yamlfile.Document, check: SpecCheck | None = None) -> Self:
        """Validate parsed YAML; problems that `check` finds in a spec that is valid by itself are reported in the same
        way. Raises SpecError with every problem of the file at once.
        """
        data = document.data
        if not isinstance(data, dict):
            raise SpecError(Problem(document.file, f"a {cls.KIND} spec was expected, not {_kind_of(data)}", "", 1, 1))
        data = dict(data)
        problems = []
        schema = data.pop("schema", None)
        if schema != cls.schema_id():
            line, column = document.position(["schema"])
            message = schema_problem(schema, cls.schema_id(), REWRITE)
            problems.append(Problem(document.file, message, "schema", line, column))
        try:
            spec = cls.model_validate(data)
        except ValidationError as error:
            problems += problems_of(cls, error, document)
        else:
            wrong = check(spec) if check is not None else ()
            problems += [_problem(document, at, message, missing=True) for at, message in wrong]
        if problems:
            raise SpecError(sorted(problems, key=lambda p: (p.line or 0, p.column or 0)))
        return spec

    @classmethod
    def from_text(cls, text: str, file: str = "<text>") -> Self:
        """Parse and validate; `file` is the name that problems are reported under. Raises SpecError."""
        return cls.from_document(yamlfile.parse(text, file))

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read and validate. Raises UsageError if the file cannot be read, SpecError for what is wrong in it."""
        return cls.from_text(read_text(path), str(path))

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """JSON schema of the file, whose first key states its kind and version."""
        document = handler.resolve_ref_schema(handler(core_schema))
        document["properties"] = {"schema": {"const": cls.schema_id()}, **document["properties"]}
        document["required"] = ["schema", *document["required"]]
        return document

    def to_data(self) -> dict[str, Any]:
        """Plain data as it would be written to YAML: schema first, settings left at None omitted."""
        return {"schema": self.schema_id(), **self.model_dump(mode="json", by_alias=True, exclude_none=True)}

    def to_yaml(self, comment: str = "") -> str:
        """The text of its file, with `comment` at the top; `from_text` reads back the same spec."""
        return yamlfile.dump(self.to_data(), comment)


class ErrorAt(ValueError):
    """Raised by a validator of a whole block if one key of it must be changed; `at` is the path to that key."""

    def __init__(self, message: str, *at: str | int) -> None:
        super().__init__(message)
        self.at = at


def override(document: yamlfile.Document, settings: Sequence[str]) -> yamlfile.Document:
    """Apply `key.sub=value` settings (values are YAML) to a parsed file. Raises UsageError for a bad setting."""
    data = document.data
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {setting}: write it as key=value, for example --set arrivals.rate_rps=8")
        data = _with(data, key.split("."), yamlfile.scalar(text), setting)
    keys = tuple(tuple(setting.partition("=")[0].split(".")) for setting in settings)
    return replace(document, data=data, overridden=document.overridden + keys)


def _with(data: Any, path: Sequence[str], value: Any, setting: str) -> Any:
    if not path:
        return value
    head, tail = path[0], path[1:]
    if isinstance(data, list):
        if not head.isdigit() or int(head) >= len(data):
            raise UsageError(f"--set {setting}: {head!r} is not an index into a list of {len(data)}")
        return [_with(x, tail, value, setting) if i == int(head) else x for i, x in enumerate(data)]
    if isinstance(data, dict):
        return {**data, head: _with(data.get(head, {}), tail, value, setting)}
    raise UsageError(f"--set {setting}: {head!r} cannot be set inside {_kind_of(data)}")


def _kind_of(value: Any) -> str:
    if value is None:
        return "nothing"
    return {dict: "a mapping", list: "a list", str: f"the text {value!r}", bool: f"{str(value).lower()}"}.get(
        type(value), f"the number {value!r}"
    )


def problems_of(model: type[BaseModel], error: ValidationError, document: yamlfile.Document) -> list[Problem]:
    """Return what pydantic rejected as problems in plain words, each with its place in the file."""
    problems = []
    for item in error.errors(include_url=False):
        at = getattr(item.get("ctx", {}).get("error"), "at", ())
        loc = [part for part in (*item["loc"], *at) if part != "[key]"]
        if item["type"] == "too_short" and len(item["input"]) > item["ctx"]["actual_length"]:
            # Pydantic counts only valid items; the invalid ones have reports of their own.
            continue
        problems.append(_problem(document, loc, _message(model, item), missing=item["type"] == "missing"))
    return problems


def _problem(document: yamlfile.Document, loc: Sequence[str | int], message: str, missing: bool = False) -> Problem:
    """A problem at a location of a document; if its last part is `missing`, it is named all the same."""
    keys = _keys_of_file(loc, document.data, missing)
    if any(tuple(keys[: len(path)]) == path for path in document.overridden):
        return Problem("--set", message, ".".join(keys))
    return Problem(document.file, message, ".".join(keys), *document.position(loc))


def _keys_of_file(loc: Sequence[str | int], data: Any, missing: bool) -> list[str]:
    """The keys of the file that lead to `loc`, without the tags of unions that pydantic puts between them.

    If the last key is `missing`, it is in no mapping of the file, and it is kept.
    """
    keys, node = [], data
    for at, part in enumerate(loc):
        last_and_missing = missing and at == len(loc) - 1
        if isinstance(node, dict) and part not in node and not last_and_missing:
            continue
        keys.append(str(part))
        valid_parts = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        node = node[part] if part in valid_parts else None
    return keys


_A_BLOCK = re.compile(r"a valid dictionary( or (an )?(instance|object) .*)?$")


def _message(model: type[BaseModel], item: Any) -> str:
    kind, value = item["type"], item["input"]
    if kind == "extra_forbidden":
        known_keys = _keys_at(model, item["loc"][:-1])
        hint = suggest(str(item["loc"][-1]), known_keys)
        return (
            f"unknown key{hint}"
            if hint or not known_keys
            else f"unknown key; known here: {', '.join(sorted(known_keys))}"
        )
    if kind == "missing":
        return "is required and missing"
    if kind == "union_tag_not_found":
        return f"needs a `kind`: one of {item['ctx'].get('expected_tags', '') or _tags(model, item['loc'])}"
    if kind == "union_tag_invalid":
        expected = [t.strip(" '") for t in item["ctx"]["expected_tags"].split(",")]
        return (
            f"unknown kind {item['ctx']['tag']!r}: one of {', '.join(expected)}{suggest(item['ctx']['tag'], expected)}"
        )
    if kind == "literal_error":
        expected = [t.strip(" '") for t in item["ctx"]["expected"].replace(" or ", ",").split(",")]
        return f"must be one of {', '.join(expected)}, not {value!r}{suggest(str(value), expected)}"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    message = str(item["msg"]).replace("Input should", "must").replace("valid tuple", "list")
    message = message.replace("String should", "must").replace("Tuple should", "must")
    message = _A_BLOCK.sub("a mapping", message)
    if kind.endswith("_type") or kind in ("string_pattern_mismatch",):
        return f"{message}, not {_kind_of(value)}"
    return f"{message} (found {value!r})" if not isinstance(value, (dict, list)) else message


def _tags(model: type[BaseModel], loc: Sequence[str | int]) -> str:
    return ", ".join(sorted(tag for variant in _types_at(model, loc) for tag in _kind_tags(variant)))


def _keys_at(model: type[BaseModel], loc: Sequence[str | int]) -> set[str]:
    keys: set[str] = set()
    for block in _types_at(model, loc):
        keys |= {field.alias or name for name, field in block.model_fields.items()}
    return keys


def _types_at(model: type[BaseModel], loc: Sequence[str | int]) -> list[type[BaseModel]]:
    """Return the spec blocks that may be at `loc`, following the annotations and the tags pydantic puts into loc."""
    annotations: list[Any] = [model]
    for part in loc:
        variants = [variant for annotation in annotations for variant in _variants(annotation)]
        annotations = [inner for variant in variants for inner in _inside(variant, part)]
    variants = [variant for annotation in annotations for variant in _variants(annotation)]
    return [variant for variant in variants if _is_block(variant)]


def _inside(annotation: Any, part: str | int) -> list[Any]:
    """The annotations that `part` of a location leads to from this one."""
    if _is_block(annotation):
        chosen = [annotation] if part in _kind_tags(annotation) else []
        fields = annotation.model_fields.items()
        return chosen + [
            Annotated[field.annotation, None, *field.metadata] for name, field in fields if part in (name, field.alias)
        ]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return [arguments[-1]]
    return [arguments[0]] if origin in (tuple, list) else []


def _is_block(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _variants(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        one_of = next((m for m in metadata if isinstance(m, OneOf)), None)
        return list(one_of.known) if one_of else _variants(inner)
    if origin in (Union, types.UnionType):
        return [v for a in get_args(annotation) for v in _variants(a)]
    return [annotation]


def _kind_tags(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the tags of a variant: its `TAG` if it has one, else the values of its `kind`."""
    tag = getattr(model, "TAG", None)
    field = model.model_fields.get("kind")
    return (tag,) if tag is not None else get_args(field.annotation) if field is not None else ()


def check_quantiles(levels: Sequence[float], values: Sequence[float], name: str) -> None:
    """Raise ValueError unless levels run from 0 to 1 and rise strictly, and the values do not fall."""
    if len(levels) != len(values):
        raise ValueError(f"{len(levels)} levels but {len(values)} {name}")
    if levels[0] != 0 or levels[-1] != 1:
        raise ValueError("levels must run from 0 to 1")
    if any(not a < b for a, b in pairwise(levels)):
        raise ValueError("levels must rise strictly")
    if any(not a <= b for a, b in pairwise(values)):
        raise ValueError(f"{name} must not fall")
