"""The energy of a run by hand, plans with the least of it, and profiles that say nothing of power."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simtune.errors import UsageError
from simtune.results.energy import InstancePower, energy_j
from simtune.results.summary import InstanceUse
from simtune.sim.deployment import deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Hardware
from simtune.specs.plan import Plan
from simtune.specs.study import Confirmation, HardwareCount, Search, Study, StudyLimits
from simtune.specs.workload import Lognormal, Poisson, Slo, Workload
from simtune.tuner.certificate.search_certificate import Audit, certificate_of
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.space.candidates import space_of
from simtune.workload.requests import build_stream
from tests.cli.conftest import STUDY, call

MODEL, HARDWARE = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
LOAD = Workload(
    name="load",
    requests=120,
    arrivals=Poisson(rate_rps=6.0),
    prompt=Lognormal(mean_tokens=600, sigma=0.7, max_tokens=4000),
    output=Lognormal(mean_tokens=80, sigma=0.8, max_tokens=800),
)


def unpowered() -> Hardware:
    return HARDWARE.model_copy(update={"device": HARDWARE.device.model_copy(update={"power": None})})


def question(hardware: Hardware = HARDWARE, instances: tuple[int, ...] | None = None, **given: Any) -> Question:
    study = Study(
        name="study",
        model=MODEL.name,
        hardware=(HardwareCount(profile="h100-sxm", devices=4),),
        workload=LOAD.name,
        slo=Slo(ttft_s={"p99": 1.0}, tpot_s={"p99": 0.03}),
        search=Search(
            instances=instances,
            tp=(1, 2),
            pp=(1,),
            max_num_seqs=(64,),
            max_num_batched_tokens=(2048,),
            confirm=Confirmation(draws=0),
        ),
        **{"objective": "joules_per_token", **given},
    )
    return Question(study, MODEL, (hardware,), LOAD, None)


def test_by_hand() -> None:
    power = {"a": InstancePower(100.0, 700.0, 2), "b": InstancePower(10.0, 110.0, 1)}
    used = (
        InstanceUse(pool="a", instance=0, busy=0.5, requests=1),
        InstanceUse(pool="a", instance=1, busy=0.0, requests=0),
        InstanceUse(pool="b", instance=0, busy=1.0, requests=1),
    )
    assert energy_j(power, used, 10.0) == (400.0 + 100.0 + 110.0) * 10.0
    joined = InstanceUse(pool="b", instance=1, busy=0.25, requests=1)  # idles in the pool that it came from
    assert energy_j(power, (*used, joined), 10.0) == (400.0 + 100.0 + 110.0 + 25.0) * 10.0


def test_a_run_has_the_energy_of_its_instances() -> None:
    pool: dict[str, Any] = {"name": "p", "hardware": "h100-sxm", "instances": 2, "parallelism": {"tp": 2}}
    pool["batching"] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    plan = Plan.model_validate({"name": "plan", "model": MODEL.name, "pools": [pool]})
    result = deploy(plan, MODEL, HARDWARE).simulate(build_stream(LOAD, None, requests=60, seed=1))
    summary, watts = result.summary(), HARDWARE.device.power
    assert watts is not None
    drawn = sum(2 * (watts.idle_w + (watts.tdp_w - watts.idle_w) * one.busy) for one in summary.instances)
    assert summary.energy_j == pytest.approx(drawn * summary.duration_s)
    assert summary.power_w == pytest.approx(drawn)
    assert summary.joules_per_token == pytest.approx(summary.energy_j / result.stream.output_tokens.sum())
    silent = deploy(plan, MODEL, unpowered()).simulate(build_stream(LOAD, None, requests=60, seed=1))
    assert silent.summary().energy_j is None
    assert "energy_j" not in silent.summary().to_data()


def test_the_plan_with_the_least_energy_is_that_of_exhaustive_trial() -> None:
    asked = question()
    tuned = optimize(asked, jobs=1)
    space = space_of(asked.study).candidates
    plan_cache, best = PlanCache(asked, space), []
    for candidate in space:
        settled = plan_cache.settled(candidate)
        assert not isinstance(settled, Refused)
        result = plan_cache.deployment(settled).simulate(asked.stream(settled), asked.study.slo)
        summary = result.summary()
        facts = asked.facts(settled, plan_cache.stream(settled))
        assert summary.joules_per_token is not None
        offered = plan_cache.stream(settled).offered_rate_rps
        assert offered is not None
        assert asked.objective.best(facts, offered, 0.0) <= summary.joules_per_token
        if result.meets_slo:
            best.append(summary.joules_per_token)
    assert tuned.value == min(best)
    assert tuned.chosen.candidate.num_gpus == 1, "what is not needed only idles"
    assert Audit(certificate_of(tuned), asked).run()


def test_a_limit_on_energy_leaves_plans_out() -> None:
    free = optimize(question(instances=(1, 2), objective="e2el"), jobs=1)
    spent = free.chosen.judged.joules_per_token
    assert spent is not None
    limits = StudyLimits(joules_per_token=spent * 0.8)
    bounded = optimize(question(instances=(1, 2), objective="e2el", limits=limits), jobs=1)
    kept = bounded.chosen.judged.joules_per_token
    assert kept is not None
    assert kept <= spent * 0.8
    assert any("joules_per_token" in row.reason for row in bounded.rows)


@pytest.mark.parametrize("given", [{}, {"objective": "goodput", "limits": StudyLimits(joules_per_token=1.0)}])
def test_energy_needs_power(given: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=r"needs power figures, but hardware profile h100-sxm has none; set device\.power"
    ):
        optimize(question(unpowered(), **given), jobs=1)


def test_on_the_command_line(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(STUDY.replace("name: tiny", "name: tiny\nobjective: joules_per_token"))
    said = call("optimize", study, "--out", tmp_path / "run", "--jobs", "1", "--json")
    assert said.code == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert said.json["objective"]["value"] == summary["joules_per_token"] > 0
    assert "joules_per_token" in (tmp_path / "run" / "candidates.csv").read_text().splitlines()[0]
    study.write_text(STUDY.replace("h100-sxm", "b300") + "objective: joules_per_token\n")
    refused = call("optimize", study, "--dry-run")
    assert refused.code == 2
    assert "hardware profile b300 has none; set device.power" in refused.err


def test_stages_draw_what_their_servers_do() -> None:
    """Ten seconds. Two instances of 100 W idle and 700 W at most, one of them busy half of the time; three servers of a
    stage of 50 W and 300 W, busy for 12 s together, and for no more than 30 s."""
    power = {"mixed": InstancePower(100.0, 700.0, 2), "stage x": InstancePower(50.0, 300.0, 3, stage_busy_s=12.0)}
    used = [InstanceUse(pool="mixed", instance=number, busy=0.5 * (not number), requests=1) for number in range(2)]
    assert energy_j(power, used, 10.0) == pytest.approx((100 + 300 + 100) * 10 + 50 * 3 * 10 + 250 * 12)
    always = power | {"stage x": InstancePower(50.0, 300.0, 3, stage_busy_s=99.0)}
    assert energy_j(always, used, 10.0) == pytest.approx((100 + 300 + 100) * 10 + 300 * 3 * 10)
