"""Memory of this machine, read where the system reports it."""

from __future__ import annotations

import ctypes
import math
import os
from typing import Any

import pytest

from simtune.specs import room


def test_free_memory_is_part_of_all_memory() -> None:
    total, free = room.memory()
    assert 0 < free <= total < math.inf


def test_a_system_without_sysconf_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no os.sysconf; where nothing else reports the memory either, nothing is refused."""
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr(room, "_number", lambda *place: 0.0)
    monkeypatch.setattr(room, "_mappable", lambda total: total)
    assert room.system_value("SC_PAGE_SIZE") is None
    assert room.memory() == (math.inf, math.inf)
    room.need(1e15, "a million requests", "ask for fewer")


def test_windows_reports_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        @staticmethod
        def GlobalMemoryStatusEx(pointer: Any) -> int:
            pointer._obj.total, pointer._obj.free = 16 << 30, 9 << 30
            return 1

    class Library:
        kernel32 = Kernel

    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr(ctypes, "windll", Library, raising=False)
    assert room._windows_memory() == (float(16 << 30), float(9 << 30))
