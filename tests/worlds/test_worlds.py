"""Every past failure again, a few new worlds, and at night a hundred thousand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import plans, worlds

NIGHTLY = 1000
STORED = (132, 69, 24)
"""Plans of three fragments, of an autoscaled pool that drafts, and of one that does not."""
FEATURES = {
    "sessions", "families", "prefix caching", "tiers", "drafts", "apart", "local prefill", "control", "events",
    "autoscaling", "fragments", "combined fragments", "fixed pools", "drafts of a study", "draft rules",
    "started", "drained", "scaled ranks",
    "stages", "pipelines", "followed chunks", "dynamic chunks", "attention_dp", "cp",
    "decode_context_parallel", "prefill_context_parallel",
    "prompt groups and drafts", "prompt groups and tiers", "async", "swap", "messages", "preempted", "resent",
    "adapters", "adapters and drafts", "adapters apart", "adapters in pipelines", "images", "spares", "ahead", "ranks",
}  # fmt: skip
"""Features that drawn plans must have between them."""


@pytest.mark.parametrize("number", worlds.past())
def test_what_failed_once_holds(number: int) -> None:
    worlds.run_clusters(number, 20)


@pytest.mark.parametrize("number", plans.past())
def test_a_plan_that_failed_once_holds(number: int) -> None:
    plans.check_world(plans.made(plans.past()[number]), f"plan {number}")


def test_a_stored_plan_is_the_one_that_was_drawn(tmp_path: Path) -> None:
    for number in STORED:
        world = plans.drawn(number)
        file = tmp_path / "plans.jsonl"
        file.write_text(plans.stored(number, "why") + "\n")
        again = plans.made(plans.past(file)[number])
        assert again.deployment.plan == world.deployment.plan
        ends = [plans.check_world(of, "plan").outcome for of in (again, world)]
        assert ends[0] is not None
        assert ends[1] is not None
        assert ends[0].finish.tolist() == ends[1].finish.tolist()


def test_a_few_random_clusters_hold() -> None:
    worlds.run_clusters(0, 40)


def test_a_few_random_plans_hold() -> None:
    for number in range(6):
        plans.check(number)


@pytest.mark.slow
def test_every_feature_is_drawn() -> None:
    drawn = [plans.features(plans.check(number)) for number in range(550)]
    assert set().union(*drawn) >= FEATURES


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plans.SAME, "a number", lambda outcome: id(outcome))
    with pytest.raises(AssertionError, match="plan 0: a number differs between single steps"):
        plans.check(0)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(NIGHTLY))
def test_random_worlds_hold(number: int) -> None:
    worlds.run(number)


@pytest.mark.slow
def test_a_campaign_goes_on(tmp_path: Path) -> None:
    journal = tmp_path / "worlds.txt"
    journal.write_text("0 ok\n1 failed\n")
    command = [sys.executable, "-m", "tests.worlds.worlds", "--worlds", "200", "--journal", str(journal)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, "200 worlds" in ended.stdout, "[1]" in ended.stdout) == (1, True, True)
