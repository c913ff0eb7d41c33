"""How much memory there is, so that what cannot fit is refused before it starts, with the number."""

from __future__ import annotations

import os

from simtune.errors import UsageError

_SMALL = 64 << 20
"""Bytes that nobody is asked about."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB")


def memory() -> tuple[float, float]:
    """Bytes there are, and bytes free: of this machine, of its control group, and of what this process may map."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    free = _number("/proc/meminfo", "MemAvailable:") * 1024 or total
    allowed = min(_number("/sys/fs/cgroup/memory.max") or total, _mappable(total))
    return min(total, allowed), min(free, allowed)


def need(size: float, what: str, remedy: str) -> None:
    """Raises UsageError where `what` needs more bytes than are free."""
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
    """The number behind a name, or the first; 0 where there is none."""
    try:
        with open(file, encoding="ascii") as stream:
            for line in stream:
                if line.startswith(name):
                    return float(line.removeprefix(name).split()[0])
    except (OSError, ValueError, IndexError):
        pass
    return 0.0


def _mappable(total: float) -> float:
    """The limit of this process's address space, where the system has one."""
    try:
        import resource
    except ImportError:
        return total
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return total if soft == resource.RLIM_INFINITY else float(soft)
