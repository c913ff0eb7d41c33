"""One mutated file: in its structure where it has one, in its bytes, or in what kind of file it is."""

from __future__ import annotations

import contextlib
import copy
import csv
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml

Tree = Any

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 1000, 65_537, 10**6, 10**9, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**30, 10**400, -(10**12), 0.5,
    -0.0, 1.5, 1e-300, 5e-324, 1e-9, 1e9, 1e15, 1e300, 1.7e308, float("inf"), float("-inf"), float("nan"), 99999999999,
)  # fmt: skip
WORDS: tuple[Any, ...] = (
    "", " ", "x", "NaN", "inf", "1e9", "0x10", "-", ".", "..", "../../etc/passwd", "/dev/zero", "a/b", "$(id)", "a\nb",
    "a\0b", "\ud7ff\u2028", "no", "null", "<b>&", "%s%n{0}", "x" * 5000, "1" * 5000, "module:Class", "os:system", "~",
    "fixed", "trace", "beta", "chain", "tree", "poisson", "vllm-fcfs", "bf16", "fp8",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"kind": "x"}, {"": 0}, [0] * 2000)


def value(random: Random, old: Tree = None) -> Tree:
    """Something that hardly belongs anywhere; mostly of the kind that was there, so that it comes past the schema."""
    kind = random.random()
    if isinstance(old, bool) or old is None:
        pass
    elif isinstance(old, int) and kind < 0.8:
        return random.choice([number for number in NUMBERS if isinstance(number, int)])
    elif isinstance(old, float) and kind < 0.8:
        return random.choice([number for number in NUMBERS if isinstance(number, float)])
    elif isinstance(old, str) and kind < 0.6:
        return random.choice(WORDS)
    kind = random.random()
    if kind < 0.6:
        return random.choice(NUMBERS)
    if kind < 0.8:
        return random.choice(WORDS)
    if kind < 0.97:
        return copy.deepcopy(random.choice(OTHERS))
    nested: Tree = 1
    for _ in range(random.choice((50, 190, 210, 900))):
        nested = [nested]
    return nested


def _places(tree: Tree) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree."""
    found = []
    stack = [tree]
    while stack:
        item = stack.pop()
        for key in item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ():
            found.append((item, key))
            stack.append(item[key])
    return found


def _replace(tree: Tree, at: Any, key: Any, random: Random) -> None:
    at[key] = value(random, at[key])


def _scale(tree: Tree, at: Any, key: Any, random: Random) -> None:
    old = at[key]
    with contextlib.suppress(OverflowError):
        if isinstance(old, (int, float)) and not isinstance(old, bool):
            at[key] = old * random.choice(
                (-1, 0, 2, 3, 10, 1000, 10**6, 10**9)
                if isinstance(old, int)
                else (0.1, 3.0, 1e3, 1e-3, 1e9, 1e-9, 1e20)
            )
        else:
            at[key] = value(random)


def _remove(tree: Tree, at: Any, key: Any, random: Random) -> None:
    del at[key]


def _rename(tree: Tree, at: Any, key: Any, random: Random) -> None:
    if isinstance(at, dict):
        at[random.choice((f"{key}s", key[:-1], key.upper(), "", "schema", "kind"))] = at.pop(key)


def _wrap(tree: Tree, at: Any, key: Any, random: Random) -> None:
    at[key] = random.choice(([at[key]], {"x": at[key]}, [at[key]] * 3, str(at[key])))


def _repeat(tree: Tree, at: Any, key: Any, random: Random) -> None:
    if isinstance(at[key], list) and at[key]:
        at[key] = at[key] * random.choice((2, 10, 300))


def _elsewhere(tree: Tree, at: Any, key: Any, random: Random) -> None:
    other, its = random.choice(_places(tree))
    with contextlib.suppress(RecursionError):  # what an earlier change nested too deep for it
        at[key] = copy.deepcopy(other[its])


_ON_TREES: tuple[Callable[[Tree, Any, Any, Random], None], ...] = (
    _replace, _replace, _replace, _scale, _scale, _remove, _rename, _wrap, _repeat, _elsewhere,
)  # fmt: skip


def mutated_tree(tree: Tree, random: Random) -> Tree:
    """A copy with one to three changes."""
    tree = {"": copy.deepcopy(tree)}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at, key = random.choice(_places(tree))
        if at is tree and random.random() < 0.9:
            continue
        random.choice(_ON_TREES)(tree, at, key, random)
        if "" not in tree:
            return None
    return tree[""]


def _of_yaml(raw: bytes, random: Random) -> bytes:
    if random.random() < 0.1:
        lines = raw.decode().split("\n")
        lines.insert(random.randrange(len(lines)), random.choice(lines))
        return "\n".join(lines).encode()
    if random.random() < 0.03:
        return _bomb() + raw
    tree = mutated_tree(yaml.load(raw, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), random)
    try:
        return yaml.safe_dump(tree, default_flow_style=None).encode()
    except RecursionError:
        return json.dumps(tree).encode()


def _bomb() -> bytes:
    lines = ["b0: &b0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9)}]" for i in range(1, 10)]
    return "\n".join([*lines, ""]).encode()


def _of_json(raw: bytes, random: Random) -> bytes:
    text = json.dumps(mutated_tree(json.loads(raw), random))
    if random.random() < 0.05:
        text = text.replace("{", '{"hidden_size": 1, "hidden_size": 2, ', 1)
    return text.encode()


def _of_lines(raw: bytes, random: Random) -> bytes:
    lines = raw.decode().splitlines()
    at = random.randrange(len(lines)) if random.random() < 0.6 else 0
    kind = random.random()
    if kind < 0.7:
        lines[at] = json.dumps(mutated_tree(json.loads(lines[at]), random))
    elif kind < 0.8:
        del lines[at]
    elif kind < 0.9:
        lines.insert(random.randrange(len(lines) + 1), lines[at])
    else:
        lines[at] = lines[at][: random.randrange(len(lines[at]))]
    return ("\n".join(lines) + "\n").encode()


def _of_csv(raw: bytes, random: Random) -> bytes:
    rows = list(csv.reader(io.StringIO(raw.decode())))
    for _ in range(random.choice((1, 1, 2))):
        at = random.randrange(len(rows))
        if not rows[at]:
            continue
        column, kind = random.randrange(len(rows[at])), random.random()
        if kind < 0.55:
            rows[at][column] = str(value(random, 1.5 if at else "x"))
        elif kind < 0.65:
            rows = [[cell for i, cell in enumerate(row) if i != column] for row in rows]
        elif kind < 0.75:
            rows = [[*row, row[column]] if column < len(row) else row for row in rows]
        elif kind < 0.85:
            rows[at] = rows[at][:column]
        elif kind < 0.9:
            rows[at][column] = "x" * 200_000
        elif kind < 0.95:
            rows = rows[:1] + rows[1:] * random.choice((0, 2, 50))
        else:
            odd = str(random.choice(NUMBERS))
            rows[1:] = [[odd if i == column else cell for i, cell in enumerate(row)] for row in rows[1:]]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "replace")


def _of_arrays(raw: bytes, random: Random) -> bytes:
    with np.load(io.BytesIO(raw)) as file, np.errstate(all="ignore"):
        arrays = {name: file[name].copy() for name in file.files}
    name = random.choice(sorted(arrays))
    array, kind = arrays[name], random.random()
    if kind < 0.5 and array.size:
        array.flat[random.randrange(array.size)] = random.choice((np.nan, np.inf, 1e30, 1e-40, -1, 0, 1e9))
    elif kind < 0.6:
        arrays[name] = array.astype(random.choice(("O", "i8", "f2", "c16", "U5", "bool", ">f8")))
    elif kind < 0.7:
        arrays[name] = array[..., None] if random.random() < 0.5 else array[:-1]
    elif kind < 0.8:
        del arrays[name]
    elif kind < 0.9:
        arrays[name] = np.zeros((random.choice((0, 1, 10**6)), *array.shape[1:]), array.dtype)
    else:
        arrays = {key: x * random.choice((0, -1, 1e9)) for key, x in arrays.items()}
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def mutated_bytes(raw: bytes, random: Random) -> bytes:
    """A copy with bytes changed, cut, doubled or put in, or packed."""
    kind = random.random()
    at = random.randrange(len(raw) + 1)
    to = min(len(raw), at + random.choice((1, 2, 8, 64, 1000)))
    if kind < 0.35:
        odd = bytes(random.choice((0, 9, 10, 34, 44, 45, 48, 57, 58, 91, 123, 125, 128, 255)) for _ in range(to - at))
        return raw[:at] + odd + raw[to:]
    if kind < 0.5:
        return raw[:at]
    if kind < 0.65:
        return raw[:at] + raw[to:]
    if kind < 0.8:
        return raw[:at] + raw[at:to] * random.choice((2, 3, 100)) + raw[to:]
    if kind < 0.9:
        return random.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\x1f\x8b", b"{", b"[" * 5000, b"%")) + raw
    packed = gzip.compress(raw)
    return random.choice((packed, packed[:at], packed + packed, gzip.compress(b"0" * (400 << 20), 1), b""))


_BY_SUFFIX: dict[str, Callable[[bytes, Random], bytes]] = {
    ".yaml": _of_yaml,
    ".json": _of_json,
    ".jsonl": _of_lines,
    ".csv": _of_csv,
    ".npz": _of_arrays,
}


def mutate(path: Path, random: Random) -> str:
    """Put something else in the place of a file; in a word, what."""
    raw = path.read_bytes()
    kind = random.random()
    if kind < 0.02:
        path.unlink()
        odd = random.choice(("pipe", "zero", "folder", "nothing", "itself"))
        if odd == "pipe":
            os.mkfifo(path)
        elif odd == "folder":
            path.mkdir()
        elif odd != "nothing":
            path.symlink_to("/dev/zero" if odd == "zero" else path.name)
        return odd
    by_structure = _BY_SUFFIX.get(path.suffix)
    if by_structure is not None and kind < 0.85:
        path.write_bytes(by_structure(raw, random))
        return "structure"
    path.write_bytes(mutated_bytes(raw, random))
    return "bytes"
