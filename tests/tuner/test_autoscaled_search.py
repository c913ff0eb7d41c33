"""Autoscaling as a variant of a search: against simulating every plan, against fixed instances, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.errors import Infeasible, SpecError, UsageError
from simtune.results.summary import Distribution
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import KvLink
from simtune.specs.study import Confirmation, HardwareCount, Search, Study
from simtune.specs.workload import Lognormal, Piecewise, Poisson, Segment, Slo, Workload
from simtune.tuner.bounds import attainment_bound, rate_bound
from simtune.tuner.plan_cache import PlanCache, Refused
from simtune.tuner.question import Question
from simtune.tuner.search.best_first import optimize
from simtune.tuner.search.climb import Simulation
from simtune.tuner.space.candidates import Candidate, space_of
from simtune.tuner.trial import Tuned, judged_of
from tests.cli.conftest import call

ROOT = Path(__file__).resolve().parents[2]
MODEL = load_model("llama-3.1-8b")
HARDWARE = load_hardware("l40s")
PER_TOKEN = ("usd_per_million_tokens", "gpu_hours_per_million_tokens")


def workload(**keys: Any) -> Workload:
    """2 requests/s, then 12, then 1: more than one L40S serves within the SLO, and less again."""
    segments = tuple(Segment(for_s=20, rate_rps=rate) for rate in (2, 12, 1))
    load = {
        "requests": 300,
        "arrivals": Piecewise(segments=segments),
        "prompt": Lognormal(mean_tokens=500, sigma=0.7, max_tokens=3000),
        "output": Lognormal(mean_tokens=80, sigma=0.6, max_tokens=500),
    }
    return Workload(name="rush", **{**load, **keys})


def question(*variants: dict[str, Any], load: Workload | None = None, **keys: Any) -> Question:
    search = {
        "confirm": Confirmation(draws=0), "tp": (1,), "pp": (1,), "max_num_seqs": (64,),
        "max_num_batched_tokens": (2048,), "variants": variants, **keys.pop("search", {}),
    }  # fmt: skip
    study: dict[str, Any] = {
        "name": "scaled",
        "model": MODEL.name,
        "hardware": (HardwareCount(profile="l40s", devices=4),),
        "workload": "rush",
        "slo": Slo(ttft_s={"p95": 1.0}, tpot_s={"p95": 0.06}),
        "objective": "usd_per_million_tokens",
        "search": Search(**search),
    }
    return Question(Study(**{**study, **keys}), MODEL, (HARDWARE,), load or workload(), None)


def scaling(draw: np.random.Generator) -> dict[str, Any]:
    """Autoscaling by a rule that is drawn."""
    rules: list[dict[str, Any]] = [
        {"kind": "rate", "requests_per_s": float(draw.uniform(2, 8))},
        {"kind": "target", "watch": "under_way", "load": float(draw.uniform(5, 30))},
        {"kind": "thresholds", "watch": "under_way", "up": float(draw.uniform(10, 40)), "down": 4.0},
        {"kind": "thresholds", "watch": "kv_cache", "up": 0.5, "down": 0.1},
        {"kind": "saturation"},
        {"kind": "sla", "ttft_s": 0.5, "tpot_s": 0.05},
    ]
    least = int(draw.integers(1, 3))
    return {
        "rule": rules[int(draw.integers(len(rules)))],
        "startup_s": float(draw.uniform(0, 4)),
        "every_s": float(draw.uniform(1, 6)),
        "stabilise_s": 5.0,
        "min_instances": least,
        "max_instances": int(draw.integers(least, 5)),
    }


def simulated(q: Question) -> dict[str, tuple[Candidate, float | None]]:
    """Every plan that fits, simulated by itself, with its objective; None if it misses the SLO."""
    candidates = space_of(q.study).candidates
    plan_cache, found = PlanCache(q, candidates), {}
    for candidate in candidates:
        settled = plan_cache.settled(candidate)
        if isinstance(settled, Refused):
            continue
        deployment, stream = q.deploy(settled, plan_cache.max_model_len), plan_cache.stream(settled)
        finding = Simulation(deployment, stream, q.study.slo, None, draws=q.draws).run()
        value = None
        if finding.met:
            judged = judged_of(finding.summary, finding.summary.offered_rate_rps)
            value = q.objective.value(q.facts(settled, stream), judged)
        found[settled.name] = settled, value
    return found


def random_question(seed: int) -> Question:
    draw = np.random.default_rng(seed)
    pairs = seed % 4 == 3
    variants: list[dict[str, Any]] = [{}, *({"name": f"rule-{n}", "autoscaling": scaling(draw)} for n in range(3))]
    search: dict[str, Any] = {"max_num_seqs": (16, 64)}
    keys: dict[str, Any] = {}
    if pairs:
        variants[1] = {"name": "decode-alone", "decode": {"autoscaling": {**scaling(draw), "max_instances": 2}}}
        variants[1]["decode"]["autoscaling"]["min_instances"] = 1
        search |= {"layouts": ("mixed", "prefill-decode"), "max_num_seqs": (64,)}
        keys["link"] = KvLink(path="intra_node")
    objectives = (*PER_TOKEN, "gpus", "e2el", "joules_per_token")
    ttft, tpot = float(draw.uniform(0.4, 3)), float(draw.uniform(0.04, 0.08))
    slo = Slo(ttft_s={"p95": ttft}, tpot_s={"p95": tpot})
    if seed % 8 == 6:
        # Of more instances than four some stand for all, unless they come and go.
        keys["hardware"] = (HardwareCount(profile="l40s", devices=7),)
    return question(*variants, search=search, objective=objectives[seed % 5], slo=slo, seed=seed, **keys)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 40))])
def test_the_chosen_plan_is_the_best_of_all_that_are_simulated(seed: int) -> None:
    q = random_question(seed)
    every = simulated(q)
    met = {name: value for name, (_, value) in every.items() if value is not None}
    assert any(candidate.scales for candidate, _ in every.values())
    try:
        tuned = optimize(q, jobs=1)
    except Infeasible:
        assert not met
        return
    sign = q.objective.sign
    best = max(met.values(), key=lambda value: sign * value)
    assert tuned.value == pytest.approx(best, rel=1e-9), (tuned.chosen.candidate.name, met)
    for row in tuned.rows:
        value = met.get(row.candidate.name)
        if value is not None:
            # A plan that was ruled out without a simulation could still have reached what it does.
            assert row.best is not None
            assert not q.objective.better(value, row.best, 1e-9), row.candidate.name


def test_bounds_leave_an_autoscaled_plan_what_it_reaches() -> None:
    """The limits are the very latencies of the run, so a bound below its rate would be wrong."""
    scaled = 0
    for seed in range(24):
        draw = np.random.default_rng(seed)
        fragment = {"autoscaling": scaling(draw)}
        router = {"router": {"kind": ("round_robin", "least_outstanding", "power_of_two")[seed % 3]}}
        q = question({**fragment, **router}, objective="e2el", seed=seed)
        candidates = space_of(q.study).candidates
        (candidate,) = candidates
        plan_cache = PlanCache(q, candidates)
        settled = plan_cache.settled(candidate)
        assert isinstance(settled, Candidate)
        deployment, stream = plan_cache.deployment(settled), plan_cache.stream(settled)
        result = deployment.simulate(stream)
        scaled += result.summary(noise=False).autoscaling[0].starts > 0
        slo = Slo(
            ttft_s={"p90": float(np.percentile(result.ttft_s, 90)), "mean": float(result.ttft_s.mean())},
            tpot_s={"p90": float(np.nanpercentile(result.tpot_s, 90))},
        )
        offered = stream.offered_rate_rps
        assert offered is not None
        assert rate_bound(deployment, stream, slo).rps >= offered * (1 - 1e-9)
        of_one = Slo(ttft_s={"p50": float(np.median(result.ttft_s))})
        share = deployment.simulate(stream, of_one).slo_attainment
        assert share is not None
        assert attainment_bound(deployment, stream, of_one) >= share
    assert scaled > 8, "instances were started in most of these runs"


def by_variant(tuned: Tuned) -> dict[str, Any]:
    return {row.candidate.decoding.shape.variant: row for row in tuned.rows if row.summary is not None}


def replace_ci(distribution: Distribution) -> Distribution:
    return distribution.model_copy(update={"ci95": None})


@pytest.mark.parametrize("objective", PER_TOKEN)
def test_an_autoscaler_that_never_scales_is_the_fixed_plan(objective: Any) -> None:
    """Under a constant load, with a number of instances that its rule asks for."""
    load = workload(arrivals=Poisson(rate_rps=6.0), requests=1500)
    rule = {"kind": "rate", "requests_per_s": 7.0}
    q = question(
        {"instances": 2},
        {"name": "still", "autoscaling": {"rule": rule, "startup_s": 5, "min_instances": 2, "max_instances": 2}},
        load=load,
        objective=objective,
        router={"kind": "least_outstanding"},
        search={"instances": (2,)},
    )
    tuned = optimize(q, jobs=1)
    fixed, still = (by_variant(tuned)[name] for name in ("instances-2", "still"))
    # The run of the chosen plan has intervals as well.
    latencies = [{m: replace_ci(d) for m, d in row.summary.metrics.items()} for row in (fixed, still)]
    assert latencies[0] == latencies[1]
    assert still.summary.autoscaling[0].mean_instances == 2.0
    values = [q.objective.value(q.facts(row.candidate, q.stream(row.candidate)), row.judged) for row in (fixed, still)]
    # The autoscaled pool is paid for from the beginning of the run, the other one from the first arrival.
    assert values[1] == pytest.approx(values[0], rel=2e-3)
    assert values[1] >= values[0]


def test_cost_is_that_of_the_gpus_held_and_draws_are_whole() -> None:
    rule = {"kind": "rate", "requests_per_s": 4.0}
    scaled = {"autoscaling": {"rule": rule, "every_s": 5, "startup_s": 1, "max_instances": 4}, "name": "rate"}
    confirm = {"confirm": Confirmation(draws=2)}
    q = question({}, scaled, search=confirm, slo=Slo(ttft_s={"p95": 10.0}, tpot_s={"p95": 0.2}))
    tuned = optimize(q, jobs=1)
    chosen = tuned.chosen
    assert chosen.summary is not None
    if chosen.candidate.scales:
        (use,) = chosen.summary.autoscaling
        tokens = int(q.stream(chosen.candidate).output_tokens.sum())
        usd = HARDWARE.device.price_per_hour_usd
        assert usd is not None
        assert tuned.value == pytest.approx(use.gpu_hours * usd / tokens * 1e6)
        assert use.gpu_hours < use.gpu_hours_of_most
    assert tuned.confirmed is not None
    assert tuned.confirmed.requests == q.workload.requests, "a draw is the whole load anew, not 8,000 requests"
    assert len({round(value, 9) for value in tuned.confirmed.values}) == 2


def test_what_one_simulation_tells_is_not_taken_for_autoscaled_plans() -> None:
    """Seats that are never taken tell nothing of a rule that reads a share of the cache."""
    rule = {"kind": "thresholds", "watch": "kv_cache", "up": 0.3, "down": 0.05}
    scaled = {"name": "kv", "autoscaling": {"rule": rule, "every_s": 5, "startup_s": 1, "max_instances": 4}}
    slo = Slo(ttft_s={"p95": 20.0}, tpot_s={"p95": 0.5})
    search = {"max_num_seqs": (256, 512), "instances": (4,)}
    tuned = optimize(question({}, scaled, search=search, slo=slo, objective="e2el"), jobs=1)
    as_others = {row.candidate.scales: bool(row.same_as) for row in tuned.rows if row.same_as or row.candidate.scales}
    assert as_others == {False: True, True: False}
    assert all(row.simulations for row in tuned.rows if row.candidate.scales)


STUDY = """\
schema: simtune/study@1
name: scaled
model: llama-3.1-8b
hardware: {profile: l40s, devices: 4}
workload: load.yaml
slo: {ttft_s: {p95: 1.0}}
objective: gpu_hours_per_million_tokens
"""
SCALED = "autoscaling: {rule: {kind: rate, requests_per_s: 4}, startup_s: 5, max_instances: 4}"


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (
            "{autoscaling: {rule: {kind: rate, requests_per_s: 4}, startup_s: 5}}",
            "search.variants.0.autoscaling: lacks max_instances, which is required",
        ),
        (
            "{autoscaling: {rule: {kind: rate}, startup_s: 5, max_instances: 2}}",
            "search.variants.0.autoscaling.rule: lacks requests_per_s, which is required",
        ),
        (
            "{instances: 5, " + SCALED + "}",
            "search.variants.0.instances: the pool begins with 5, and autoscaling keeps 1 to 4; change either",
        ),
        (
            "{spare: 1, " + SCALED + "}",
            "search.variants.0: autoscaling and spare cannot be combined; write them as two variants",
        ),
        (
            "{local_prefill: {below_tokens: 9}, decode: {" + SCALED + "}}",
            "search.variants.0: autoscaling and local_prefill cannot be combined; write them as two variants",
        ),
    ],
)
def test_fragments_that_make_no_sense_are_refused_with_their_place(variant: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        Study.from_text(STUDY + f"search: {{layouts: [mixed, prefill-decode], variants: [{variant}]}}\n")
    assert message in str(error.value)


def test_a_day_that_is_known_has_no_autoscaler() -> None:
    day = "day: {startup_s: 10, windows: [{hours: 8, rate_rps: 2}]}\n"
    with pytest.raises(
        SpecError, match=r"search\.variants\.1: a day starts and stops replicas by rates that are known"
    ):
        Study.from_text(STUDY + day + f"search: {{variants: [{{}}, {{{SCALED}}}]}}\n")


@pytest.mark.parametrize("objective", ["goodput", "goodput_per_gpu", "pareto"])
def test_objectives_that_search_a_rate_are_refused(objective: Any) -> None:
    q = question({"name": "rate", "autoscaling": scaling(np.random.default_rng(0))}, objective=objective)
    with pytest.raises(UsageError, match=f"variant rate has autoscaling, and objective {objective} looks for a single"):
        optimize(q)


def test_costs_of_a_run_go_without_a_warm_up() -> None:
    q = question({"name": "rate", "autoscaling": scaling(np.random.default_rng(0))})
    warm = replace(q, workload=q.workload.model_copy(update={"warm_up": 20}))
    with pytest.raises(UsageError, match="so usd_per_million_tokens is of the whole run; remove warm_up of workload"):
        optimize(warm)


def test_fragments_that_exclude_each_other_are_not_combined() -> None:
    fragments = f"[{{}}, {{{SCALED}, name: rate}}, {{spare: 1}}, {{overlap: ladder}}]"
    labels = [v.label for v in Study.from_text(STUDY + f"search: {{combine: true, variants: {fragments}}}\n").variants]
    assert "rate-and-overlap-ladder" in labels
    assert not any("rate" in label and "spare" in label for label in labels)


def test_a_certificate_of_autoscaled_plans_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "load.yaml").write_text(workload().to_yaml())
    study = tmp_path / "study.yaml"
    study.write_text(
        STUDY + f"search: {{tp: [1], pp: [1], confirm: {{draws: 1}}, variants: [{{}}, {{{SCALED}, name: rate}}]}}\n"
    )
    run = tmp_path / "run"
    command = ["optimize", str(study), "--out", str(run), "--jobs", "1"]
    # The manifest has the command of the process.
    monkeypatch.setattr("sys.argv", ["simtune", *command])
    assert call(*command).code == 0
    assert call("certify", run).code == 0
    certificate = json.loads((run / "certificate.json").read_text())
    assert "rate" in certificate["variants"]
    best = {plan["plan"]: plan["best"] for plan in certificate["plans"]}
    assert any("rate" in name and value is not None for name, value in best.items())
