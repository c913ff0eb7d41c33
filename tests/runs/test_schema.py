"""The schema of a run: what is computed is what is written is what is read, and every number says what it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from simtune.api import Experiment, load_draft, load_specs, set_up
from simtune.results.result import Result
from simtune.results.summary import SimulationSummary, Uncertainty, is_uncertain
from simtune.runs.contents import Contents, of_simulation
from simtune.runs.engine_files import speculation_facts
from simtune.runs.manifest import manifest
from simtune.runs.request_columns import requests_table
from simtune.runs.run_reader import read_run, read_summary
from simtune.runs.schema import CandidateRow, DraftSchedule, Manifest, RequestRow, Summary
from simtune.runs.tables import columns, read_csv, to_csv
from simtune.sim.deployment import vllm_batching
from simtune.specs.base import Record
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.drafters import Eagle
from simtune.specs.pool import Pool
from simtune.specs.speculation import DrafterChoice
from simtune.tuner.drafting import DraftContexts, schedule

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
HALF_SURE = Uncertainty(
    worlds=20, level=0.9, saturated_probability=0.0, slo_probability=0.5, intervals={"duration_s": [1.0, None]}
)


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    """Several pools that draft and keep what prompts share, so that nothing is left out."""
    return set_up(load_specs(None, None, str(GOLDEN / "workload.yaml"), str(GOLDEN / "plans" / "chains.yaml")))


@pytest.fixture(scope="module")
def result(experiment: Experiment) -> Result:
    return experiment.run(record=True)


@pytest.fixture(scope="module")
def contents(experiment: Experiment, result: Result) -> Contents:
    return of_simulation(experiment.deployment, result, "chains", 0, HALF_SURE)


@pytest.fixture(scope="module")
def files(experiment: Experiment, contents: Contents) -> dict[str, str | bytes]:
    return contents.complete("<page>", manifest(("simtune", "simulate"), (experiment.workload,), experiment.trace, 0))


def text_of(files: dict[str, str | bytes], name: str, folder: Path) -> Path:
    path, text = folder / name, files[name]
    assert isinstance(text, str)
    path.write_text(text)
    return path


def test_the_summary_that_is_computed_is_the_one_that_is_read(
    contents: Contents, files: dict[str, str | bytes], tmp_path: Path
) -> None:
    summary = read_summary(text_of(files, "summary.json", tmp_path))
    assert summary == contents.run.summary
    assert summary.speculation
    assert summary.prefix_cache
    assert summary.uncertainty == HALF_SURE


def test_the_requests_that_are_computed_are_those_that_are_read(
    result: Result, files: dict[str, str | bytes], tmp_path: Path
) -> None:
    rows = [row.to_data() for row in read_csv(text_of(files, "requests.csv", tmp_path), RequestRow)]
    table = requests_table(result)
    assert {name: [row[name] for row in rows] for name in table} == table
    assert set(rows[0]) - set(table) == {"family_s", "family_active_s", "held_s", "front_end_s", "delivery_s"}, (
        "no request graph, no cap, no front end, no first token from a decode instance"
    )


def test_candidates_are_written_as_they_are_read(make_run: Callable[..., Path], tmp_path: Path) -> None:
    candidates = read_run(make_run()).candidates
    (tmp_path / "again.csv").write_text(
        to_csv(columns(CandidateRow), ([*row.model_dump().values()] for row in candidates))
    )
    assert read_csv(tmp_path / "again.csv", CandidateRow) == candidates


def test_the_manifest_can_be_read(files: dict[str, str | bytes]) -> None:
    found = Manifest.model_validate(json.loads(files["manifest.json"]))
    assert (found.command, found.seed, list(found.inputs)) == (("simtune", "simulate"), 0, ["workload:golden"])


def test_every_number_of_a_draft_schedule_is_declared() -> None:
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
    choice = DrafterChoice(drafter=Eagle(checkpoint="org/head"), acceptance="eagle3-llama-3.1-8b")
    draft = load_draft(choice, model)
    pool = Pool(hardware=hardware.name, instances=1, batching=vllm_batching(hardware))
    facts = speculation_facts(draft, schedule(draft, model, hardware, pool, DraftContexts.even((512, 4096)), 8))
    declared = DraftSchedule.model_validate(facts).to_data()
    assert json.loads(json.dumps(declared)) == json.loads(json.dumps(facts))


# --- what is stated of each field -------------------------------------------------------------------------


def parts(annotation: Any) -> Iterator[type[Record]]:
    """The records within a type."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        yield annotation
    for argument in get_args(annotation):
        yield from parts(argument)


def leaves(annotation: Any) -> Iterator[Any]:
    """The plain types that a type is made of."""
    yield annotation
    for argument in get_args(annotation):
        yield from leaves(argument)


def numbers(record: type[Record], path: str = "") -> Iterator[tuple[str, bool]]:
    """Every number in a record and its parts, and whether it is uncertain."""
    for name, field in record.model_fields.items():
        below = list(parts(field.annotation))
        if {int, float} & {*leaves(field.annotation)}:
            yield path + name, is_uncertain(record, name)
        for part in below:
            yield from numbers(part, f"{path}{name}.")


def test_all_that_worlds_could_change_has_an_interval() -> None:
    """Only what is given, counted before anything ran, drawn over time, or speaks of this run's own noise has none."""
    certain = {name for name, uncertain in numbers(SimulationSummary) if not uncertain}
    assert certain == {
        "requests", "users", "num_gpus", "offered_rate_rps", "held_back.max_in_flight", "warm_up_requests",
        "metrics.count", "metrics.ci95", "first_token_parts.slowest",
        "slo.limit_s", "instances.instance", "instances.requests",
        "autoscaling.at_s", "autoscaling.accepting", "autoscaling.holding",
        "rank_changes.at_s", "rank_changes.instance", "rank_changes.ranks", "rank_changes.pause_s",
    }  # fmt: skip
    assert sum(uncertain for _, uncertain in numbers(SimulationSummary)) > 30


@pytest.mark.parametrize("row", [CandidateRow, RequestRow])
def test_every_column_says_what_it_means_and_in_what_unit(row: type[Record]) -> None:
    described = row.model_json_schema()["properties"]
    assert list(described) == list(columns(row))
    for name, column in described.items():
        assert column["description"], name
        if name.endswith("_s"):
            assert column["unit"] == "s"
        if name.endswith("_rps"):
            assert column["unit"] == "requests/s"


def test_the_json_schema_tells_what_is_uncertain() -> None:
    described = Summary.model_json_schema()
    assert described["properties"]["goodput_rps"]["uncertain"] is True
    assert "uncertain" not in described["properties"]["num_gpus"]
    assert described["properties"]["schema"]["const"] == "simtune/summary@2"
    assert described["$defs"]["Plan"]["properties"]["schema"] == {"const": "simtune/plan@1"}
