"""Parts brought from outside the package: named by import path, or registered by an installed package.

`package.module:Class` is an import path; the module is looked up in the current folder first, then as Python does. A
package that is installed may register a name instead, in an entry-point group such as `simtune.policies`:

    [project.entry-points."simtune.policies"]
    least-attained = "mypackage.policies:LeastAttained"

A file may come from a stranger, so a module that it names is imported only with permission (`allow_code`): installed
parts, modules that are imported already and the running program need none, since they bring no new code.

Whatever goes wrong in such a part is told as one PartError that names file, line, class and method.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from simtune.errors import PartError, suggest

T = TypeVar("T")

ALLOW_CODE = "SIMTUNE_ALLOW_CODE"
"""Environment variable that gives permission, here and in worker processes."""
IMPORT_PATH = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
EXAMPLE = "package.module:Class"
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def is_import_path(name: str) -> bool:
    """True if a name is an import path of a part."""
    return re.match(IMPORT_PATH, name) is not None


@functools.cache
def registered(group: str) -> Mapping[str, str]:
    """Return the parts that installed packages have registered in an entry-point group: import paths by name, in order
    of the names.
    """
    from importlib import metadata

    return {point.name: point.value for point in sorted(metadata.entry_points(group=group), key=lambda p: p.name)}


def allow_code() -> None:
    """Permit the import of modules that plans and studies name, in this process and in those that it starts."""
    os.environ[ALLOW_CODE] = "1"


def need_permission(reference: str) -> None:
    """Raise PartError if an import path brings code without permission. Nothing is imported."""
    name = reference.partition(":")[0]
    if name in sys.modules or os.environ.get(ALLOW_CODE, "").lower() in ("1", "true", "yes"):
        return
    file = _file_of_module(name)
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or (program is not None and os.path.exists(program) and os.path.samefile(file, program)):
        # There is nothing to import, which `load` reports, or it runs already.
        return
    raise PartError(
        f"{reference} runs the code of {_shown(file)}{_owner_of(file)}; if you trust it, give --allow-code, or set "
        f"{ALLOW_CODE}=1"
    )


def _file_of_module(name: str) -> str | None:
    """Return the file that an import would run first, found without importing the packages that it lies in; None if
    there is none."""
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), places)
        if spec is None:
            return None
        if spec.origin is not None and (depth == len(parts) or os.path.basename(spec.origin) == "__init__.py"):
            return os.path.abspath(spec.origin)
        places = spec.submodule_search_locations
    return None


def _owner_of(file: str) -> str:
    try:
        return f" (owned by {Path(file).owner()})"
    except (NotImplementedError, KeyError, OSError):
        # Systems without owners, and owners without a name.
        return ""


def load(reference: str) -> Any:
    """Return the object at an import path. Raises PartError with the line at which its module fails."""
    name, _, attribute = reference.partition(":")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        # Not removed later, as with `python -m`: a module may import its neighbours when it runs.
        sys.path.insert(0, folder)
    try:
        loaded = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and (name == absent or name.startswith(absent + ".")):
            raise PartError(f"{reference}: there is no module {absent} in {folder} or on the Python path") from None
        raise PartError(f"{reference}: its module cannot be imported: {_import_failure(error)}") from error
    for part in attribute.split("."):
        if not hasattr(loaded, part):
            file = getattr(sys.modules[name], "__file__", None)
            raise PartError(f"{reference}: {_shown(file or name)} has no {part}{suggest(part, vars(loaded))}")
        loaded = getattr(loaded, part)
    return loaded


@dataclass(frozen=True)
class PartKind(Generic[T]):
    """A kind of part: its name, the entry-point group in which it may be registered, the built-in classes, and their
    base class.
    """

    noun: str
    group: str
    built_in: Mapping[str, type[T]]
    base: type[T]

    def names(self) -> list[str]:
        """Names that need no import path: the built-in ones, then the registered ones."""
        return [*self.built_in, *(name for name in registered(self.group) if name not in self.built_in)]

    def find(self, name: str) -> type[T]:
        """Return the class of a name or import path. Raises PartError if there is none that can be used."""
        if name in self.built_in:
            return self.built_in[name]
        reference = registered(self.group).get(name, name)
        if not is_import_path(reference):
            raise PartError(f"no {self.noun} is called {name}; known: {', '.join(self.names())}, or {EXAMPLE}")
        if reference == name:
            need_permission(reference)
        cls = load(reference)
        base = f"{self.base.__module__}.{self.base.__qualname__}"
        if not isinstance(cls, type):
            raise PartError(f"{reference} is no class; a {self.noun} is a class derived from {base}")
        if not issubclass(cls, self.base):
            raise PartError(f"{reference} ({where(cls)}) is no {self.noun}: it is not derived from {base}")
        if undone := sorted(getattr(cls, "__abstractmethods__", ())):
            raise PartError(f"{reference} ({where(cls)}) is not a whole {self.noun}: it lacks {', '.join(undone)}")
        return cls


# --- constructors -----------------------------------------------------------------------------------------


@functools.cache
def keywords(cls: type) -> Mapping[str, bool]:
    """Return the keyword arguments of a class's constructor, and whether each is required; those that it passes on to
    its base classes are included.
    """
    accepted: dict[str, bool] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        for p in parameters:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                accepted.setdefault(p.name, p.default is p.empty)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return accepted


def option_problems(cls: type, options: Collection[str], given: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (option, what is wrong with it) for options that the constructor of a class does not have, that simtune
    sets itself, or that are missing.
    """
    accepted = keywords(cls)
    free = [name for name in accepted if name not in given]
    for name in options:
        if name in given:
            yield name, f"is no option of {cls.__qualname__}: simtune gives it what the plan says elsewhere"
        elif name not in accepted:
            takes = f"it takes {', '.join(free)}" if free else "it takes none"
            yield name, f"unknown option of {cls.__qualname__}{suggest(name, free)}; {takes}"
    for name in free:
        if accepted[name] and name not in options:
            yield name, f"is required by {cls.__qualname__} ({where(cls)}) and missing"


# --- what went wrong, and where ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Brought:
    """A class or function from outside the package, under the name that the user gave."""

    noun: str
    name: str
    what: type | Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.noun} {self.name} ({where(self.what)})"

    @property
    def files(self) -> set[str]:
        """Files that contain its code: those of the class and its bases that are not simtune's."""
        files = {_file_of(part) for part in getattr(self.what, "__mro__", (self.what,))}
        return {file for file in files if file is not None and not file.startswith(_HERE)}


def blame(error: BaseException, parts: Sequence[Brought]) -> PartError:
    """Return an error of a run with parts from outside in words that name the part, its method and the line.

    The line is the last one in the files of a part, and the part that of whose class an object was at work; where no
    line is a part's own, what it left behind cannot be gone on with.
    """
    frames = list(_frames(error.__traceback__))[::-1]
    of_parts = [frame for frame in frames if any(frame.file in part.files for part in parts)]
    at = (of_parts or frames)[0]
    place = f"{at.method} ({_shown(at.file)}:{at.line}): {described(error)}"
    for frame in of_parts or frames:
        for part in parts:
            if isinstance(part.what, type) and isinstance(frame.owner, part.what):
                if of_parts:
                    return PartError(f"{part.noun} {part.name} failed in {place}")
                return PartError(f"{part} broke a rule that was found broken in {place}; test it with simtune.testing")
    if of_parts:
        part = next(part for part in parts if at.file in part.files)
        return PartError(f"{part.noun} {part.name} failed in {place}")
    either = " or ".join(map(str, parts))
    return PartError(f"{either} left behind what cannot be gone on with in {place}; test it with simtune.testing")


def where(part: type | Callable[..., Any]) -> str:
    """The file and line of a class or function."""
    file = _file_of(part)
    if file is None:
        return str(getattr(part, "__module__", type(part).__module__))
    try:
        return f"{_shown(file)}:{inspect.getsourcelines(part)[1]}"
    except (OSError, TypeError):
        return _shown(file)


def _file_of(part: type | Callable[..., Any]) -> str | None:
    try:
        return os.path.abspath(inspect.getfile(part))
    except (OSError, TypeError):
        return None


class _Frame(NamedTuple):
    """A call that an error came through."""

    file: str
    line: int
    method: str
    owner: object
    """Object whose method it was, if any."""


def _frames(trace: TracebackType | None) -> Iterator[_Frame]:
    """Yield the frames from the outermost call to the one that raised."""
    while trace is not None:
        code, owner = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        yield _Frame(os.path.abspath(code.co_filename), trace.tb_lineno, code.co_qualname, owner)
        trace = trace.tb_next


def _import_failure(error: BaseException) -> str:
    """The last line before the import machinery and other packages come in, and the error."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_shown(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    lines = [f for f in lines if not f.filename.startswith(_HERE)]
    of_user = [f for f in lines if "site-packages" not in f.filename] or lines
    place = f"{_shown(of_user[-1].filename)}:{of_user[-1].lineno}: " if of_user else ""
    return place + described(error)


def described(error: BaseException) -> str:
    """Return the kind of an error and its text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shown(file: str) -> str:
    """Return a file as the user would write it: relative if it is in the current folder or below."""
    folder = os.getcwd() + os.sep
    return file.removeprefix(folder)
