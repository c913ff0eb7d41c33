"""Memory of this machine, so that work that cannot fit is refused before it starts, with the number."""

from __future__ import annotations

import ctypes
import math
import os

from simtune.errors import UsageError

_SMALL = 64 << 20
"""Bytes below which no check is made."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB")


def memory() -> tuple[float, float]:
    """Bytes there are, and bytes free: of this machine, of its control group, and of what this process may map."""
    total, free = _physical()
    allowed = min(_number("/sys/fs/cgroup/memory.max") or total, _mappable(total))
    return min(total, allowed), min(free, allowed)


def system_value(name: str) -> int | None:
    """Return a value of `os.sysconf`, such as SC_LEVEL3_CACHE_SIZE; None if this system does not have it."""
    try:
        value = os.sysconf(name)
    # Windows has no sysconf, others lack some of its names.
    except (AttributeError, ValueError, OSError):
        return None
    return value if value > 0 else None


def _physical() -> tuple[float, float]:
    """Return bytes of memory and bytes free of this machine; infinity if the system does not report them."""
    page, pages = system_value("SC_PAGE_SIZE"), system_value("SC_PHYS_PAGES")
    if page is None or pages is None:
        return _windows_memory()
    total = float(page * pages)
    return total, _number("/proc/meminfo", "MemAvailable:") * 1024 or total


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def _windows_memory() -> tuple[float, float]:
    library = getattr(ctypes, "windll", None)
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if library is None or not library.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return math.inf, math.inf
    return float(status.total), float(status.free)


def need(size: float, what: str, remedy: str) -> None:
    """Raise UsageError if `what` needs more bytes than are free."""
    if size <= _SMALL:
        return
    _, free = memory()
    if size > free:
        raise UsageError(f"{what} need about {in_words(size)} of memory, and {in_words(free)} are free; {remedy}")


def in_words(size: float) -> str:
    """`440 bytes`, `409.8 TiB`."""
    at = 0
    while size >= 1024 and at < len(_UNITS) - 1:
        size, at = size / 1024, at + 1
    return f"{size:,.{1 if at else 0}f} {_UNITS[at]}"


def _number(file: str, name: str = "") -> float:
    """Return the number of a named line, or the first number; 0 if there is none."""
    try:
        with open(file, encoding="ascii") as stream:
            for line in stream:
                if line.startswith(name):
                    return float(line.removeprefix(name).split()[0])
    except (OSError, ValueError, IndexError):
        pass
    return 0.0


def _mappable(total: float) -> float:
    """Return the limit of this process's address space, if the system has one."""
    try:
        import resource
    except ImportError:
        return total
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return total if soft == resource.RLIM_INFINITY else float(soft)
