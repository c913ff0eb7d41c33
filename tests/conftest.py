"""Where the published data and the oracles are, and one way to run the command line."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# Before numpy is loaded: on busy machines the threads of small matrix products only wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The same examples on every machine, and no time limit on shared ones; HYPOTHESIS_PROFILE=explore looks further.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("SIMTUNE_DATA", ROOT.parent / "shared" / "data"))


def _there(path: Path) -> Path:
    if not path.is_dir():
        pytest.skip(f"{path} is absent: set SIMTUNE_DATA to the folder of published data to run this test")
    return path


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of published traces and tables; the test is skipped where it is absent."""
    return _there(DATA)


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    """The folder of checked answers, beside the data; the test is skipped where it is absent."""
    return _there(DATA.parent / "oracles")
