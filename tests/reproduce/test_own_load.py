"""Published systems on a load of one's own: gain, interval over assumed inputs, and where it breaks even."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simtune.errors import UsageError
from simtune.specs.workload import ClosedLoop, FixedLength, Poisson, Workload
from simtune.validation.published import OwnGain, OwnLoad, own_gains, select
from simtune.validation.published.own_load import NO_GAIN, OwnPoint, crossing

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
    assert (slower.low, slower.high) == (min(item.gains), max(item.gains))
    assert slower.variant > 12 * 0.05


def test_lengths_and_seats_are_those_of_the_load_unless_they_tell_the_sides_apart(gains: dict[str, OwnGain]) -> None:
    """Prompts of 600 tokens are longer than the published max_model_len, and served."""
    assert gains["slower-host"].reason is None
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
    assert gains["step"].reason == "its sides differ in the published step or load alone"
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
