"""Two tiers of tests: quick (`make test`) and full (`make check`), told apart by durations that were measured.

`make durations` measures every test and writes `durations.json`. A test that took `FULL_S` CPU-seconds or more belongs
to the full tier. Of a file whose tests all did, the shortest stays in the quick tier; the marker `quick` keeps others.
A test without a stored duration is quick.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FULL_S = 0.26
"""CPU-seconds from which on a test belongs to the full tier."""

LONGEST_QUICK_S = 5.0
"""CPU-seconds that no test of the quick tier may take."""

UNIT_S = 0.75
"""CPU-seconds of ten million turns of `s += i * i` on a quiet machine; durations are scaled to it."""

LONG_BESIDES = frozenset(
    {
        # The time of processes that are killed is not counted.
        "tests/kills/test_kills.py::test_a_killed_verb_goes_on",
        "tests/coverage/test_counting.py::test_what_no_run_is_to_reach_does_not_count",
        # A fixture of the file takes it, which another test pays for when all are measured.
        "tests/fuzz/test_fuzz.py::test_what_was_once_wrong_is_answered",
        "tests/docs/test_site.py::test_every_document_is_a_page",
        "tests/docs/test_site.py::test_every_setting_is_listed",
        "tests/docs/test_site.py::test_the_functions_of_the_api_are_described",
        "tests/tuner/test_classes.py::test_worths_that_prove_nothing_rule_nothing_out",
        "tests/tuner/test_certificate.py::test_certify_refuses",
        "tests/tuner/test_front.py::test_whatever_is_changed_is_refused",
        "tests/profiling/test_profile_run.py::test_sentinels_come_at_even_distances",
        "tests/tuner/test_margin.py::test_more_confidence_is_a_lower_rate_that_more_worlds_keep",
        "tests/package/test_wheel.py::test_the_wheel_brings_no_other_top_level_name",
        "tests/validation/test_closed_loop.py::test_a_folder_is_one_studys",
    }
)
"""Functions of the full tier that take longer than their stored duration."""

STORED = Path(__file__).with_name("durations.json")


@cache
def stored() -> dict[str, Any]:
    """Return the document that `measure.store` writes.

    `durations`: CPU-seconds of tests, those of `KEPT_S` or more; `files`: number of tests of each file; `shortest`: see
    there; `tests` and `cpu_s`: number and CPU-seconds of all tests.
    """
    document: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return document


def is_full(test: str, marked_quick: bool) -> bool:
    """Return True if a test, named as pytest does, belongs to the full tier alone."""
    if marked_quick:
        return False
    if test.partition("[")[0] in LONG_BESIDES:
        return True
    if test in stored()["shortest"]:
        return False
    return float(stored()["durations"].get(test, 0.0)) >= FULL_S


def tests_by_file(durations: dict[str, float]) -> dict[str, list[str]]:
    """Return the tests of each file."""
    files: dict[str, list[str]] = {}
    for test in durations:
        files.setdefault(test.partition("::")[0], []).append(test)
    return files


def shortest(durations: dict[str, float]) -> list[str]:
    """Return the shortest test of each file in which no test is shorter than `FULL_S`."""
    files = tests_by_file(durations).values()
    found = [min(tests, key=lambda test: (durations[test], test)) for tests in files]
    return sorted(test for test in found if FULL_S <= durations[test] <= LONGEST_QUICK_S)
