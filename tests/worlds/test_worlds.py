"""Every past failure again, a few new worlds, and at night a hundred thousand."""

from __future__ import annotations

import pytest

from tests.worlds import worlds

NIGHTLY = 1000


@pytest.mark.parametrize("number", worlds.past())
def test_what_failed_once_holds(number: int) -> None:
    worlds.run(number, 20)


def test_a_few_random_worlds_hold() -> None:
    worlds.run(0, 40)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(NIGHTLY))
def test_random_worlds_hold(number: int) -> None:
    worlds.run(number)
