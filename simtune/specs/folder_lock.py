"""Locks that keep two commands from writing one folder, also from two containers or two hosts that share it.

A lock is a file `.NAME.lock` beside the folder. Two things hold it:

- *An exclusive lock of the operating system* (`flock`, on Windows `msvcrt.locking`), which ends with its process,
  however that ends. It reaches all containers of one machine, and other hosts where the file system passes it on (NFS,
  CephFS).
- *A lease* for file systems that do not: the file names host and process, and its age, by the file system's own clock,
  is the time since that process last wrote something. One of another host is taken over when it is older than
  `LEASE_S`.

A process whose lock was taken over finds that out before it next writes, and stops.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simtune.errors import UsageError

LEASE_S = 900.0
"""Age in seconds from which the lock of another host counts as abandoned."""

_SETTLE_S = 0.2
"""Seconds after which a process that took over a lock looks whether another did so in the same moment."""

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""Errors of file systems that have no locks."""


@dataclass
class _Lock:
    """A lock of this process: an open file, whose text only this process has."""

    file: Path
    descriptor: int
    text: bytes
    process: int = field(default_factory=os.getpid)
    new_folders: list[Path] = field(default_factory=list)
    """Folders made for it, outermost first."""


_LOCKS: dict[Path, _Lock] = {}
"""Locks of this process, by folder."""


def lock(folder: Path) -> None:
    """Keep others from writing `folder`, which may not exist yet, until this process ends or calls `release`.

    Raises UsageError if another process has it, with its host and number, or if no file can be written beside it.
    """
    if folder.absolute() in _LOCKS:
        return
    place = folder.resolve()
    try:
        new_folders = _make(place.parent)
        _LOCKS[folder.absolute()] = _claimed(folder, place.with_name(f".{place.name}.lock"), new_folders)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror}); name a folder you may write to") from None


def renew(path: Path) -> None:
    """State that the process that has the lock of `path`, or of a folder it lies in, still works; nothing without one.
    Raises UsageError if another host has taken the lock over.
    """
    for place in (path, *path.parents):
        claimed = _LOCKS.get(place)
        if claimed is not None and claimed.process == os.getpid():
            if _read(claimed.file) != claimed.text:
                raise UsageError(
                    f"{place}: {_owner(_read(claimed.file))} took it over, since this process wrote nothing for "
                    f"{LEASE_S / 60:g} minutes; what is written there is kept: give the same command again when "
                    "that one ends"
                )
            with contextlib.suppress(OSError):
                os.utime(claimed.file)


def release() -> None:
    """Let others have all folders that this process has locked."""
    for folder, claimed in list(_LOCKS.items()):
        del _LOCKS[folder]
        if claimed.process != os.getpid():
            continue
        # Only its own file: another host may have taken it over. It goes before the lock ends where the system lets it.
        with contextlib.suppress(OSError):
            if _read(claimed.file) == claimed.text:
                if sys.platform == "win32":
                    os.close(claimed.descriptor)
                claimed.file.unlink()
        with contextlib.suppress(OSError):
            os.close(claimed.descriptor)
        with contextlib.suppress(OSError):
            for parent in reversed(claimed.new_folders):
                parent.rmdir()


atexit.register(release)


def _make(folder: Path) -> list[Path]:
    absent = []
    while not folder.exists():
        absent.append(folder)
        folder = folder.parent
    for parent in reversed(absent):
        parent.mkdir(exist_ok=True)
    return absent[::-1]


def _claimed(folder: Path, file: Path, new_folders: list[Path]) -> _Lock:
    """Return the lock of a folder, newly claimed. Raises UsageError if another process has it, else OSError."""
    owner = {"host": socket.gethostname(), "process": os.getpid(), "machine": _machine(), "key": os.urandom(8).hex()}
    text = json.dumps(owner).encode()
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            exclusive = _exclusive(descriptor)
            if exclusive is not False and not _same(descriptor, file):
                # Its owner removed it between the two calls.
                os.close(descriptor)
                continue
            before, age_s = _read(file), _age_s(file)
            if exclusive is False or (before and not _abandoned(before, age_s, exclusive)):
                raise _refusal(folder, file, before, age_s, exclusive)
            _write(descriptor, file, text)
            if before or exclusive is None:
                time.sleep(_SETTLE_S)
                if _read(file) != text:
                    raise _refusal(folder, file, _read(file), 0.0, exclusive)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        return _Lock(file, descriptor, text, new_folders=new_folders)


def _write(descriptor: int, file: Path, text: bytes) -> None:
    """Write the text of a lock. On a full disk nothing of it is left, which would hold the folder."""
    os.truncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        if os.write(descriptor, text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.truncate(descriptor, 0)
        with contextlib.suppress(OSError):
            file.unlink()
        raise


def _abandoned(before: bytes, age_s: float, exclusive: bool | None) -> bool:
    """Return whether a lock file that is not locked by the system is of a process that has ended."""
    same = exclusive and _facts(before).get("machine") == _machine()
    return bool(same) or age_s > LEASE_S


def _refusal(folder: Path, file: Path, before: bytes, age_s: float, exclusive: bool | None) -> UsageError:
    if exclusive is False:
        remedy = "wait for it, or name another folder"
    else:
        wait_s = max(0.0, LEASE_S - age_s)
        remedy = (
            f"wait for it, or name another folder; if it was killed, remove {file} or wait {wait_s / 60:.0f} minutes"
        )
    return UsageError(f"{folder}: another simtune is writing it ({_owner(before)}); {remedy}")


def _owner(text: bytes) -> str:
    facts = _facts(text)
    if "host" not in facts:
        return "which one is not stated"
    return f"process {facts['process']} on host {facts['host']}"


def _facts(text: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(text)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) and {"host", "process"} <= set(facts) else {}


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _machine() -> str:
    """Return what all containers of one running machine share; the host's name where no such thing is known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _age_s(file: Path) -> float:
    """Return seconds since a file was touched, by the clock of its file system: hosts may disagree about the time."""
    with tempfile.NamedTemporaryFile(prefix=f"{file.name}.", dir=file.parent) as now:
        return os.stat(now.name).st_mtime - file.stat().st_mtime


def _same(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False


def _exclusive(descriptor: int) -> bool | None:
    """Lock an open file for this process; return False if another has it, None if the file system has no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, 1 << 20, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in _NO_LOCKS else False
    return True
