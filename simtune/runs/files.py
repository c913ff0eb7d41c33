"""Writes files completely or not at all: first beside their place, then under their name."""

from __future__ import annotations

import errno
import glob
import gzip
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Literal

from simtune.errors import UsageError
from simtune.specs.folder_lock import lock, renew

MANIFEST = "manifest.json"
"""File that marks a folder as a run directory of simtune."""

SUMMARY_SCHEMA: Literal["simtune/summary@2"] = "simtune/summary@2"
"""Schema of summary.json, and of what `simtune simulate --json` prints."""

FRONT = "front.json"
"""File that a search for a front writes in place of a certificate."""

JOURNAL = "journal.jsonl"
"""The file of a search that is under way, or was killed."""

Files = dict[str, str | bytes]

_PART = re.compile(r"part-[a-z0-9_]{8}")
"""Ending of the names of files that are being written, after `.NAME.`."""


def claim(out: Path, force: bool, resume: bool = False) -> None:
    """Check, before any work, that a run directory can be written at `out`. Raises UsageError if not.

    A folder that exists is only replaced with `force`, and only if it is empty or an earlier run; with `resume` also
    where it holds a search to go on with.
    """
    if out.exists() or out.is_symlink():
        if not out.is_dir():
            raise UsageError(f"{out}: is a file; name a folder for the run")
        if Path.cwd().is_relative_to(out.resolve()) or os.path.ismount(out):
            raise UsageError(f"{out}: is in use and cannot be replaced as a whole; name a folder inside it")
    alone(out)
    if out.exists() and any(out.iterdir()):
        _may_replace(out, force, resume)
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(prefix=_prefix(out), dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror}); name a folder you may write to") from None


def alone(out: Path) -> None:
    """Keep others from writing `out` until this process ends, and remove what one that was killed left half-written.
    Raises UsageError if another writes it."""
    lock(out)
    _clear(out)


def hold(out: Path) -> None:
    """Make a folder that is written into while work goes on, keep others from it until this process ends, and remove
    files that a killed process left half-written in it.

    Raises UsageError if it is a file, cannot be made, or is another process's.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file; name a folder")
    lock(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        clear_within(out)
        with tempfile.TemporaryDirectory(prefix=_prefix(out), dir=out):
            pass
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror}); name a folder you may write to") from None


def _prefix(path: Path) -> str:
    return f".{path.name}.part-"


def _part(path: Path) -> Path:
    """Return where `path` is written first. It is named before it is made: an interrupt between the two leaves no file
    that is never removed.
    """
    return path.absolute().with_name(f"{_prefix(path)}{os.urandom(4).hex()}")


def clear_within(out: Path) -> None:
    """Remove what a process that was killed left half-written in a folder that it held, and in folders of that, unless
    another process is writing it."""
    for pattern in (".*.part-*", "*/.*.part-*", "*/*/.*.part-*"):
        for path in sorted(out.glob(pattern)):
            name, _, ending = path.name[1:].rpartition(".")
            if name and _PART.fullmatch(ending) and not path.is_symlink():
                with suppress(OSError, UsageError):
                    lock(path.with_name(name))
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _clear(out: Path) -> None:
    """Remove files that a killed process left half-written beside `out`; an earlier run that it had set aside is put
    back. No other process writes `out` meanwhile.
    """
    parent, begins = out.absolute().parent, f".{out.name}."
    for path in sorted(parent.glob(f"{glob.escape(begins)}part-*")):
        if not _PART.fullmatch(path.name.removeprefix(begins)) or path.is_symlink():
            continue
        with suppress(OSError):
            if (path / _ASIDE).is_dir() and not out.exists():
                (path / _ASIDE).rename(out)
            shutil.rmtree(path) if path.is_dir() else path.unlink()


_ASIDE = ".earlier"
"""The name of an earlier run while another takes its place."""


def _may_replace(out: Path, force: bool, resume: bool) -> None:
    """Raise UsageError for a folder that is no run, or one that no flag allows to replace."""
    journal = (out / JOURNAL).is_file()
    if not (out / MANIFEST).is_file() and not journal:
        raise UsageError(f"{out}: is not empty and no earlier run (it has no {MANIFEST}); name another folder")
    if journal and not (force or resume):
        raise UsageError(f"{out}: holds a search that was not finished; give --resume to go on, or --force")
    if not (force or (resume and journal)):
        raise UsageError(f"{out}: holds an earlier run; give --force to replace it, or name another folder")


def write(out: Path, files: Mapping[str, str | bytes]) -> None:
    """Put all files into `out` at once, replacing what `claim` allowed to be replaced. Raises UsageError."""
    with whole(out) as folder:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_encoded(content))
            if name.endswith(".sh"):
                path.chmod(0o755)


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `out` at the end. If anything fails, it is removed, and the
    earlier folder stays. Raises UsageError if files cannot be written.
    """
    parent = out.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = _part(out)
        try:
            folder.mkdir(0o700)
            yield folder
            folder.chmod(0o755)
            renew(out.absolute())
            _take_place(folder, out)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise _unwritten(out, error) from None


def write_file(path: Path, content: str | bytes) -> None:
    """Write one file, replacing what is there. Raises UsageError, also in place of a device or a pipe."""
    parent = path.absolute().parent
    renew(path.absolute())
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UsageError(f"{path}: is no regular file and would be lost; name another file")
        parent.mkdir(parents=True, exist_ok=True)
        part = _part(path)
        try:
            with part.open("xb") as file:
                file.write(_encoded(content))
            part.chmod(0o644)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritten(path, error) from None


def _unwritten(path: Path, error: OSError) -> UsageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "make room and give the same command again" if full else "name a place you may write to"
    return UsageError(f"{path}: cannot be written ({error.strerror}); {remedy}")


def packed(parts: Iterable[str]) -> bytes:
    """A text as gzip data that are the same wherever they are made: no time, and no system (RFC 1952, OS = 255), which
    Python 3.13 leaves out and earlier releases name."""
    raw = BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0) as file:
        file.writelines(part.encode() for part in parts)
    raw.getbuffer()[9] = 0xFF
    return raw.getvalue()


def _encoded(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _take_place(folder: Path, out: Path) -> None:
    """Give `folder` the name `out`; an earlier folder of that name is restored if that fails, and removed otherwise."""
    if not out.exists():
        folder.rename(out)
        return
    aside = _part(out)
    old = aside / _ASIDE
    try:
        aside.mkdir(0o700)
        out.rename(old)
        folder.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
