"""Published systems on a load of one's own: gain, interval over assumed inputs, and where it breaks even."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.errors import UsageError
from simtune.specs.workload import ClosedLoop, FixedLength, Poisson, Workload
from simtune.validation.published import OwnGain, OwnLoad, own_gains, select
from simtune.validation.published.own_gain import NO_GAIN, crossing, ratio, traced
from simtune.validation.published.own_load import OwnPoint
from simtune.validation.published.own_needs import needs_of
from simtune.validation.published.own_runs import OwnRun, OwnRuns, RunLoad, highest_near

FILE = """\
schema: simtune/systems@1
name: mine
title: Mine
setup:
  model: llama-3.2-1b
  hardware: h100-sxm
  workload: {prompt: 100, output: 4}
  pool: {max_model_len: 512, batching: {max_num_seqs: 1}}
systems:
  - name: slower-host
    title: A slower host
    source: a test
    claim: {says: less, gain: 0.5, band: [0.1, 1]}
    inputs:
      - what: the time of the host
        source: assumed
        otherwise:
          - {variant: {pool: {host: {step_s: 0.2}}}}
          - {variant: {pool: {host: {step_s: 0.0001}}}}
    variant: {pool: {async_scheduling: false, host: {step_s: 0.05, per_sequence_s: 0.0}}}
  - name: seats
    title: More seats
    source: a test
    claim: {says: more, gain: 2, band: [1, 4]}
    base: {pool: {batching: {max_num_seqs: 1}}}
    variant: {pool: {batching: {max_num_seqs: 64}}}
  - name: step
    title: A step
    source: a test
    claim: {says: less, gain: 2, band: [1, 4]}
    measure: {kind: step}
    base: {step: {decodes: 1, context: 64}}
    variant: {step: {decodes: 2, context: 64}}
  - name: branches
    title: Branches
    source: a test
    claim: {says: less, gain: 2, band: [1, 4]}
    setup: {workload: {requests: 4, arrivals: {kind: poisson, rate_rps: 1}}}
    base: {branches: 2}
    variant: {branches: 4}
  - name: too-large
    title: Too large
    source: a test
    claim: {says: less, gain: 2, band: [1, 4]}
    variant: {pool: {kv_cache: {memory_utilization: 0.01}}}
"""
LOAD = Workload(
    name="load",
    requests=12,
    arrivals=Poisson(rate_rps=4.0),
    prompt=FixedLength(tokens=600),
    output=FixedLength(tokens=12),
)


def own(**given: float) -> OwnLoad:
    return OwnLoad("llama-3.2-1b", "l40s", LOAD, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def gains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OwnGain]:
    file = tmp_path_factory.mktemp("own") / "mine.yaml"
    file.write_text(FILE)
    return {gain.system: gain for gain in own_gains(select([str(file)]), own())}


def test_a_gain_is_of_latency_under_the_load_with_the_ends_of_assumed_inputs(gains: dict[str, OwnGain]) -> None:
    slower = gains["slower-host"]
    assert slower.metric == "mean E2EL, s"
    assert slower.base is not None
    assert slower.variant is not None
    assert slower.gain == pytest.approx(slower.base / slower.variant)
    (item,) = slower.inputs
    assert item.gains[0] < (slower.gain or 0) < item.gains[1]
    assert slower.low is not None
    assert slower.high is not None
    assert slower.low <= min(item.gains) < max(item.gains) <= slower.high
    assert slower.variant > 12 * 0.05


def test_lengths_and_seats_are_those_of_the_load_unless_they_tell_the_sides_apart(gains: dict[str, OwnGain]) -> None:
    """Prompts of 600 tokens are longer than the published max_model_len, and served."""
    assert gains["slower-host"].gain is not None
    seats = gains["seats"]
    assert seats.gain is not None
    assert seats.gain > 1
    points = {point.at: point.gain for point in seats.by_users}
    assert points[1.0] == pytest.approx(1.0)
    assert points[64.0] is not None
    assert points[64.0] > 2
    assert any(text.startswith("from ") and text.endswith(" users") for text in seats.pays)


def test_an_entry_that_is_no_plan_under_a_load_has_a_reason(gains: dict[str, OwnGain]) -> None:
    assert gains["step"].gain is None
    assert gains["step"].reason == "its sides differ in the published step, load or model alone"
    assert gains["step"].left_out == "alike"
    assert gains["branches"].reason == "its sides are no plans under an ordinary load (branches)"
    assert "memory_utilization" in (gains["too-large"].reason or "")


def test_limits_ask_for_the_highest_rate(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(FILE)
    chosen = [entry for entry in select([str(file)]) if entry.system.name == "seats"]
    many = replace(own(ttft_s=0.2), workload=LOAD.model_copy(update={"requests": 200}))
    (gain,) = own_gains(chosen, many)
    assert gain.reason is None
    assert gain.metric == "highest rate, requests/s"
    assert gain.base is not None
    assert gain.variant is not None
    assert gain.gain == pytest.approx(gain.variant / gain.base)
    assert gain.variant > 1.2 * gain.base
    (short,) = own_gains(chosen, own(ttft_s=1.0))
    assert short.reason == "the limits are kept at 271.5 requests/s too; give the load more requests"
    users = LOAD.model_copy(update={"arrivals": ClosedLoop(users=2)})
    with pytest.raises(UsageError, match="closed loop, which has no rate"):
        list(own_gains(chosen, OwnLoad("llama-3.2-1b", "l40s", users, ttft_s=1.0)))


def points(*gains: float | None) -> list[OwnPoint]:
    return [OwnPoint(at=4.0**i, gain=gain) for i, gain in enumerate(gains)]


def test_where_a_gain_turns_is_between_the_points() -> None:
    assert crossing(points(1.2, 1.1), "users") == "from 1 to 4 users throughout"
    assert crossing(points(1.0, NO_GAIN), "users") == "nowhere from 1 to 4 users"
    assert crossing(points(NO_GAIN - 0.5, NO_GAIN + 0.5), "users") == "from 2 users"
    assert crossing(points(NO_GAIN + 0.5, NO_GAIN - 0.5, 2.0, None), "users").startswith("below 2 users, from ")
    assert crossing(points(None), "users") == "at no number of users that fits"


# --- runs -------------------------------------------------------------------------------------------------


def run_of(e2el_s: list[float]) -> OwnRun:
    return OwnRun(np.array(e2el_s), "keeps up", 1.0, None)


def test_error_of_a_gain_is_of_pairs_of_requests() -> None:
    """A variant that takes half of each request's time has no error, however the requests differ."""
    times = np.linspace(1, 5, 40)
    halved = ratio(run_of(list(times)), run_of(list(times / 2)))
    assert halved.gain == pytest.approx(2)
    assert halved.error == pytest.approx(0, abs=1e-12)
    noise = np.random.default_rng(0).uniform(0.4, 0.6, 40)
    unequal = ratio(run_of(list(times)), run_of(list(times * noise)))
    assert unequal.error is not None
    assert 0.02 < unequal.error < 0.5
    assert ratio(run_of([1.0, 2.0]), run_of([1.0, 1.0])).error is None
    with pytest.raises(UsageError, match="no request ends on both sides"):
        ratio(run_of([np.nan, 1.0]), run_of([1.0, np.nan]))


@given(best=st.floats(0.001, 1000), start=st.floats(0.01, 100), leap=st.sampled_from([1.3, 2.0]))
def test_highest_rate_is_found_from_any_start(best: float, start: float, leap: float) -> None:
    rate = highest_near(lambda rate: rate <= best, start, (0.01, 100), leap, 0.05)
    if best < 0.01:
        assert rate is None
    else:
        assert rate is not None
        assert rate <= min(best, 100) <= rate * 1.0501


def test_points_are_added_where_the_gain_passes_one() -> None:
    asked: list[float] = []

    def gain_at(users: float) -> float:
        asked.append(users)
        return 2.0 if users < 20 else 0.5

    assert [point.at for point in traced((1, 8, 64), gain_at, whole=True)] == [1, 8, 23, 64]
    assert asked == [1, 8, 64, 23]


FAMILIES = """\
schema: simtune/systems@1
name: {name}
title: Mine
setup: {{model: llama-2-7b, hardware: a100-sxm-80g, workload: {{prompt: 8, output: 8}}}}
systems:
  - name: {name}-drafts
    title: Drafts
    source: a test
    claim: {{says: more, gain: 2, band: [1, 4]}}
    base: {{}}
    variant:
      pool:
        batching: {{chunked_prefill: false}}
        speculation: {{drafter: {{kind: draft_model, model: {draft}}}, scheme: {{kind: chain, tokens: 2}},
          acceptance: eagle3-llama-3.1-8b}}
"""


def test_equal_sides_of_two_families_run_once_and_a_draft_model_is_one_of_its_size(tmp_path: Path) -> None:
    """llama-2-7b has another vocabulary than the target and takes 4,096 tokens; prompts are not cut."""
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        file.write_text(FAMILIES.format(name=file.stem, draft="llama-2-7b"))
    long = LOAD.model_copy(update={"prompt": FixedLength(tokens=9000), "requests": 2})
    runs = OwnRuns(OwnLoad("llama-3.1-8b", "h100-sxm", long))
    ran = []
    for family, system in select(list(map(str, files))):
        sides = runs.adapted(family.sides(system))
        for name in ("base", "variant"):
            runs.run(family, sides[name][0], RunLoad(2))
            ran.append(len(runs._runs))
        variant = runs.side(family, sides["variant"][0], RunLoad(2))
        assert variant.draft_model("llama-2-7b").vocab_size == variant.model.vocab_size
        assert variant.plan.pools[0].batching.max_num_batched_tokens == 9216
        (need,) = needs_of(runs.side(family, sides["base"][0], RunLoad(2)), variant)
        assert need == "a draft model of 7.5 B parameters with the vocabulary of llama-3.1-8b"
    assert ran == [1, 2, 2, 3], "drafts may be a family's own, a base without drafts is not"


def test_a_model_that_is_too_large_for_the_published_gpus_gets_as_many_as_it_needs() -> None:
    runs = OwnRuns(OwnLoad("llama-3.3-70b", "h100-sxm", LOAD))
    sides = runs.adapted({"base": {"pool": {"parallelism": {"pp": 2}}}, "variant": {"pools": [{"name": "a"}]}})
    assert sides["base"][0]["pool"]["parallelism"] == {"pp": 2}
    assert sides["variant"][0]["pools"][0]["parallelism"] == {"tp": 2}
