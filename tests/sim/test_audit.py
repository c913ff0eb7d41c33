"""The audit of a run: every law is checked by breaking it, and a violation leaves what repeats the run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.results.result import Result
from simtune.sim.audit import AUDIT, AuditError, audit, violations
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.wiring import wire
from simtune.specs.catalog import load_hardware, load_model, load_workload
from simtune.specs.plan import Plan
from simtune.specs.workload import Slo
from simtune.testing.clusters import stream_of
from simtune.workload.media import RequestMedia
from tests.cli.conftest import call


def deployment() -> Deployment:
    pool = {"hardware": "h100-sxm", "max_model_len": 2048}
    batching = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    pools = [
        pool | {"name": "p", "role": "prefill", "batching": batching, "instances": 1},
        pool | {"name": "d", "role": "decode", "batching": batching, "instances": 2},
    ]
    plan = Plan.model_validate(
        {"name": "audited", "model": "llama-3.1-8b", "pools": pools, "link": {"path": "intra_node"}}
    )
    return deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"))


@pytest.fixture(scope="module")
def over() -> tuple[Deployment, Any, Result]:
    """A run that is over: deployment, cores and result."""
    deployed = deployment()
    stream = stream_of(np.arange(40) * 0.01, np.full(40, 300), np.full(40, 20))
    result = deployed.simulate(stream)
    wiring = wire(deployed.plan, deployed.model, deployed.pools, stream, Slo(), 0, None)
    wiring.world(stream).run()
    return deployed, wiring.cores, result


def broken(result: Result, **columns: Any) -> Result:
    return dataclasses.replace(result, outcome=dataclasses.replace(result.outcome, **columns))


def moved(column: Any, number: int, to: int) -> Any:
    column = column.copy()
    column[number] = to
    return column


def test_energy_lies_between_idle_and_rated_power(
    over: tuple[Deployment, Any, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed, cores, result = over
    assert result.power is not None
    for times, joules in ((0.0, "0"), (1e6, "[0-9.e+]+")):
        energy = result.summary(noise=False).energy_j
        assert energy is not None
        monkeypatch.setattr("simtune.sim.audit.energy_j", lambda *_, much=times * energy: much)
        (problem,) = violations(deployed.plan, cores, result)
        assert re.match(rf"the run takes {joules} J, and its GPUs", problem)


def test_a_run_keeps_all_laws(over: tuple[Deployment, Any, Result]) -> None:
    deployed, cores, result = over
    assert list(violations(deployed.plan, cores, result)) == []
    assert result.outcome.transferred_bytes > 0


@pytest.mark.parametrize(
    ("law", "change"),
    [
        ("answered that never arrived", lambda o: {"arrival": moved(o.arrival, 3, -1)}),
        ("were answered and stopped", lambda o: {"stopped": {5: 1}}),
        ("41 requests ended of 40", lambda o: {"refused": 1}),
        (
            "arrival after scheduled, of 1 requests, the first of them 7",
            lambda o: {"arrival": moved(o.arrival, 7, 1 << 60)},
        ),
        ("first token after finish", lambda o: {"first_token": moved(o.first_token, 2, 1 << 60)}),
        (
            "ticks lie between tokens, and",
            lambda o: {"intervals": np.add(o.intervals, [1, 0, 0, 0])},
        ),
        ("messages followed first tokens, and answers have 760 more", lambda o: {"intervals": o.intervals[1:]}),
        ("40 KV caches were sent in 0 bytes", lambda o: {"transferred_bytes": 0}),
        ("KV caches arrived before their prompts were done", lambda o: {"transferred": moved(o.transferred, 1, 0)}),
        ("instances, and 1 were simulated", lambda o: {"cores": o.cores[:2]}),
    ],
)
def test_every_law_is_checked(over: tuple[Deployment, Any, Result], law: str, change: Any) -> None:
    deployed, cores, result = over
    said = list(violations(deployed.plan, cores, broken(result, **change(result.outcome))))
    assert any(law in line for line in said), said


def test_blocks_that_are_left_and_gpus_that_nobody_pays_are_seen(over: tuple[Deployment, Any, Result]) -> None:
    deployed, cores, result = over
    said = list(violations(deployed.plan, cores, dataclasses.replace(result, num_gpus=2)))
    assert said == ["2 GPUs are paid, and the plan has 3"]
    stream = stream_of(np.arange(4) * 0.01, np.full(4, 300), np.full(4, 20))
    wiring = wire(deployed.plan, deployed.model, deployed.pools, stream, Slo(), 0, None)
    wiring.world(stream, stop_when=lambda *request: True).run()
    said = list(violations(deployed.plan, wiring.cores, result))
    assert any("still holds" in line for line in said), said
    assert any("still has work" in line for line in said), said
    wiring.cores[0].busy = 1 << 61
    assert any("was busy for" in line for line in violations(deployed.plan, wiring.cores, result))


def test_a_violation_leaves_what_repeats_the_run(
    over: tuple[Deployment, Any, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(AUDIT, "0")
    deployed, cores, result = over
    with pytest.raises(AuditError, match="GPUs are paid"):
        audit(deployed.plan, deployed.model, cores, dataclasses.replace(result, num_gpus=2))
    (folder,) = tmp_path.iterdir()
    *_, command = (folder / "README").read_text().strip().splitlines()
    assert command.startswith("simtune simulate --plan ")
    assert call(*command.split()[1:], "--json").json["completed"] == 40


def test_what_repeats_a_run_says_that_media_are_not_in_it(
    over: tuple[Deployment, Any, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    deployed, cores, result = over
    number = len(result.stream)
    media = RequestMedia(
        begin=np.concatenate([[0], np.ones(number, dtype=np.int64)]),
        kind=np.zeros(1, dtype=np.int64),
        name=np.zeros(1, dtype=np.int64),
        repeated=np.zeros(1, dtype=np.bool_),
        size=np.array([[64.0, 64.0, 0.0]]),
        start=np.zeros(1, dtype=np.int64),
        shape=np.array([[1, 16, 4, 4]]),
        sized=True,
    )
    stream = dataclasses.replace(result.stream, media=media)
    with pytest.raises(AuditError):
        audit(deployed.plan, deployed.model, cores, dataclasses.replace(result, stream=stream, num_gpus=2))
    (folder,) = tmp_path.iterdir()
    assert "Images, videos and recordings are not in it: their tokens are text here." in (folder / "README").read_text()


def test_every_simulation_is_audited_where_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUDIT, "1")
    monkeypatch.setattr("simtune.sim.audit.violations", lambda *run: iter(["a law"]))
    monkeypatch.setattr("simtune.sim.audit._written", lambda *run: Path("folder"))
    stream = stream_of([0.0], [300], [20])
    with pytest.raises(AuditError, match="a law"):
        deployment().simulate(stream)
    monkeypatch.setenv(AUDIT, "0")
    assert deployment().simulate(stream).completed.all()


def test_a_load_that_holds_requests_back_is_repeated_as_one(
    over: tuple[Deployment, Any, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    deployed, cores, result = over
    due_s = result.stream.arrival_s
    capped = dataclasses.replace(result.stream, arrival_s=None, due_s=due_s, users=3)
    with pytest.raises(AuditError):
        audit(deployed.plan, deployed.model, cores, dataclasses.replace(result, stream=capped, num_gpus=2))
    (folder,) = tmp_path.iterdir()
    again, trace = load_workload(str(folder / "workload.yaml"))
    assert again.max_in_flight == 3
    assert trace is not None
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == pytest.approx((due_s - due_s[0]).tolist() if due_s is not None else [])
