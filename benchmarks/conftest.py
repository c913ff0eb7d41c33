"""Benchmarks find the published data as the tests do."""

from tests.conftest import data_dir

__all__ = ["data_dir"]
