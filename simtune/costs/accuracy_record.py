"""Errors of predictions on measured serving runs that others published: how far off simtune was on a card, an engine, a
kind of model and a number format.

The file is written by `python -m benchmarks.serving.record`, with plain engine presets and nothing fitted to the runs.
It has errors, predicted over measured less 1, and not the measurements.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from simtune.errors import plural
from simtune.specs.base import Record, Seq
from simtune.specs.catalog import engine_family
from simtune.specs.model import Model, MoeFeedForward

RECORD = Path(str(files("simtune.costs"))) / "accuracy.json"
Kind = Literal["dense", "moe"]
KIND_NAMES: dict[Kind, str] = {"dense": "dense models", "moe": "mixtures of experts"}


class AccuracyCell(Record):
    """Errors of the runs of one model in one format on one card under one engine release."""

    model: str
    kind: Kind
    hardware: str
    engine: str = Field(description="family: vllm, sglang, trtllm")
    preset: str
    format: str = Field(description="of the experts' weights, or of all weights")
    tpot: Seq[float] = Field(description="errors of mean TPOT, predicted / measured - 1")
    ttft: Seq[float] = Field(description="errors of mean TTFT")
    refused: int = Field(description="runs that were measured and that simtune refuses")


@dataclass(frozen=True)
class Accuracy:
    """Errors of a group of runs: median and 90th percentile of their size, as shares."""

    runs: int
    refused: int
    tpot: tuple[float, float]
    ttft: tuple[float, float]
    models: tuple[str, ...]

    @property
    def words(self) -> str:
        """The accuracy as it is printed: `24 runs: TPOT 5.1/14 %, TTFT 20/55 % (median/p90)`."""
        of_tpot, of_ttft = (f"{100 * median:.3g}/{100 * p90:.3g} %" for median, p90 in (self.tpot, self.ttft))
        return f"{plural(self.runs, 'run')} of {', '.join(self.models)}: TPOT {of_tpot}, TTFT {of_ttft} (median/p90)"


class AccuracyRecord(Record):
    """Errors of all runs."""

    schema_: Literal["simtune/accuracy-record@1"] = Field(alias="schema")
    simtune: str = Field(description="release that predicted")
    cells: Seq[AccuracyCell]

    def accuracy(self, **group: str) -> Accuracy | None:
        """Return the accuracy over the runs whose cells have the values, as `hardware="h200-sxm", kind="moe"`; None if
        there are none."""
        cells = [cell for cell in self.cells if all(getattr(cell, key) == value for key, value in group.items())]
        tpot, ttft = ([abs(x) for cell in cells for x in getattr(cell, name)] for name in ("tpot", "ttft"))
        if not tpot:
            return None
        return Accuracy(
            runs=len(tpot),
            refused=sum(cell.refused for cell in cells),
            tpot=(float(np.median(tpot)), float(np.quantile(tpot, 0.9))),
            ttft=(float(np.median(ttft)), float(np.quantile(ttft, 0.9))),
            models=tuple(sorted({cell.model for cell in cells})),
        )

    def words(self, hardware: str, engine: str | None, kind: Kind, number_format: str) -> str:
        """Return how far off predictions were on runs like a deployment: of its card, engine, kind of model and format
        if there are any, else of the first of these groups that has runs: any format, any engine, any card."""
        exact = {"hardware": hardware, "engine": engine, "kind": kind, "format": number_format}
        name = f"{hardware}, {engine or 'no engine'}, {KIND_NAMES[kind]} in {number_format}"
        accuracy = None if engine is None else self.accuracy(**exact)  # type: ignore[arg-type]
        if accuracy is not None:
            return f"{name}: {accuracy.words}"
        for wider in (("hardware", "engine", "kind"), ("hardware", "kind"), ("kind",)):
            wider_group = {key: exact[key] for key in wider}
            accuracy = None if None in wider_group.values() else self.accuracy(**wider_group)  # type: ignore[arg-type]
            if accuracy is not None:
                words = ", ".join(KIND_NAMES[kind] if key == "kind" else str(wider_group[key]) for key in wider)
                return f"{name}: none of this kind; {words}: {accuracy.words}"
        return f"{name}: none of this kind"

    def of_card(self, hardware: str) -> Iterator[tuple[str, Accuracy]]:
        """Yield `engine, kind, format` and the accuracy of every group of runs on a card."""
        groups = sorted({(c.engine, c.kind, c.format) for c in self.cells if c.hardware == hardware})
        for engine, kind, number_format in groups:
            accuracy = self.accuracy(hardware=hardware, engine=engine, kind=kind, format=number_format)
            if accuracy is not None:
                yield f"{engine}, {KIND_NAMES[kind]}, {number_format}", accuracy


@cache
def accuracy_record() -> AccuracyRecord:
    """Return the record that comes with simtune."""
    return AccuracyRecord.model_validate(json.loads(RECORD.read_text(encoding="utf-8")), strict=False)


def base_name(hardware: str) -> str:
    """Return the name of a card whose profile has the kernels of another engine: `h100-sxm` for `h100-sxm-sglang`."""
    for engine in ("sglang", "trtllm"):
        hardware = hardware.removesuffix(f"-{engine}")
    return hardware


def number_format(model: Model) -> str:
    """Return the format of the experts' weights, of all weights if a model has no experts."""
    return (model.expert_dtype or model.weight_dtype) if kind_of(model) == "moe" else model.weight_dtype


def kind_of(model: Model) -> Kind:
    """Return `moe` for a model that has layers with experts."""
    return "moe" if any(isinstance(group.feed_forward, MoeFeedForward) for group in model.layers) else "dense"


def published_runs(hardware: str, engine: str | None, model: Model) -> str:
    """Return how far off predictions were on published runs like a deployment; `engine` is a preset's name."""
    family = engine_family(engine)
    return accuracy_record().words(base_name(hardware), family, kind_of(model), number_format(model))
