"""Engine presets: the default settings of one release of a serving engine.

A pool of a plan may name an engine. What the plan leaves out then stands in it as that release sets it, for the model
and the device at hand; what the plan says stays. A plan with an engine is filled in where it is read
(`simtune.specs.catalog.load_plan`), so that a written plan has every knob set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from simtune.specs.base import Dtype, ErrorAt, NonNegative, Part, Seq, Spec, problems_of
from simtune.specs.hardware import Device
from simtune.specs.model import Model
from simtune.specs.pool import Pool
from simtune.specs.yamlfile import Document

GIB = 1 << 30
DEFAULT_ENGINE = "vllm-0.24"
"""Engine of a plan that names none: the newest vLLM whose kernels were measured."""

NO_ENGINE = "none"
"""Engine of a pool that no engine can run: kernels are those of the profile, and no engine settings are written."""

EngineFamily = Literal["vllm", "sglang", "trtllm", "transformers", "llamacpp"]


class Case(Part):
    """Settings that depend on the model and the hardware: they replace the preset's own if all conditions hold."""

    memory_gib_from: NonNegative = Field(0.0, description="least memory of a device, in GiB")
    not_devices: Seq[str] = Field((), description="words that a device's name must not contain")
    weights: Seq[Dtype] = Field(
        (), description="dtypes of a checkpoint's weights, of which it must have one; any unless given"
    )
    pp_from: int = Field(1, ge=1, description="least number of pipeline stages")
    pool: dict[str, Any]

    def applies(self, device: Device, model: Model, pp: int) -> bool:
        """True if a model on pp stages of a device is such a case."""
        name = device.name.lower()
        return (
            device.memory_bytes >= self.memory_gib_from * GIB
            and not any(word in name for word in self.not_devices)
            and (not self.weights or model.weight_dtype in self.weights)
            and pp >= self.pp_from
        )


class EnginePreset(Spec):
    """Settings of one release of an engine."""

    KIND: ClassVar[str] = "engine"
    family: EngineFamily = Field(
        description="engine whose kernels are used, if a device has profiles of several engines"
    )
    release: str = Field(description="the release whose settings these are")
    asked: str | None = Field(None, description="name of a family or release that this preset was chosen for")
    pool: dict[str, Any] = Field(description="keys of a plan's pool, as the release sets them")
    cases: Seq[Case] = ()
    sources: dict[str, str] = Field(description="source of each setting, by its keys joined with dots")

    @model_validator(mode="after")
    def _every_setting_has_a_source(self) -> Self:
        keys = {key for settings in (self.pool, *(case.pool for case in self.cases)) for key in _leaves(settings)}
        if unsourced := sorted(keys - self.sources.keys()):
            raise ValueError(f"sources: none for {', '.join(unsourced)}")
        if unknown := sorted(self.sources.keys() - keys):
            raise ValueError(f"sources: there is no setting {', '.join(unknown)}")
        return self

    @model_validator(mode="after")
    def _settings_of_a_pool(self) -> Self:
        check_pool(self.pool, "pool")
        for at, case in enumerate(self.cases):
            check_pool(merged(case.pool, self.pool), "cases", at, "pool")
        return self

    def settings(self, device: Device, model: Model, pp: int = 1) -> dict[str, Any]:
        """The keys of a pool for a model on a device, or on a pipeline of pp of them."""
        settings = self.pool
        for case in self.cases:
            if case.applies(device, model, pp):
                settings = merged(case.pool, settings)
        return settings if self.asked is None else {**settings, "engine": self.name, "engine_asked": self.asked}


_LEAST = {"hardware": "any", "instances": 1, "batching": {"max_num_seqs": 1, "max_num_batched_tokens": 1}}
"""Settings that a pool needs and a preset may leave open."""


def check_pool(settings: Mapping[str, Any], *at: str | int) -> None:
    """Raise ErrorAt for the first key of a preset's settings that no pool has, or whose value none takes."""
    data = merged(settings, _LEAST)
    try:
        Pool.model_validate(data)
    except ValidationError as error:
        problem = problems_of(Pool, error, Document("", data, None))[0]
        key = problem.key.split(".") if problem.key else []
        raise ErrorAt(problem.message, *at, *key) from None


def merged(over: Mapping[str, Any], under: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of both mappings, those of `over` if both have one; inner mappings are merged likewise."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        are_mappings = isinstance(value, Mapping) and isinstance(below, Mapping)
        result[key] = merged(value, below) if are_mappings else value  # type: ignore[arg-type]  # both are mappings
    return result


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key, value in settings.items():
        keys += _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [prefix + key]
    return keys
