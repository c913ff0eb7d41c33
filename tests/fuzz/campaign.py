"""A campaign: so many numbers, each a command with one mutated file, and what was wrong with its answers.

    python -m tests.fuzz.campaign --inputs 10000 --first 0
    python -m tests.fuzz.campaign --inputs 10000 --first 0 --what options
    python -m tests.fuzz.campaign --inputs 10000 --first 0 --what servers

With options, each number is a command with one or two options that hardly belong there (`tests.fuzz.options`); a number
that is impossible and accepted is wrong too. With servers, each number is a server whose answers are changed at random
(`tests.validation.test_server_fuzz`).

Input n is the same on every machine. It is wrong to end in a traceback, by a signal (no end, too much memory), with
exit code 1, without naming a file or a key, with something else than JSON on stdout, or to leave files behind. A
command that is not done after `CPU_S` is asked once more and given `LONG_S`: a file may ask for a million requests,
and gets them; what does not end then is a hang. How many were long is told.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from simtune.errors import SimtuneError
from simtune.specs.input_files import JsonError, parse_json
from tests.fuzz import corpus, options
from tests.fuzz.forks import CPU_S, LONG_S
from tests.fuzz.mutations import mutate
from tests.validation import test_server_fuzz
from tests.validation.test_bad_servers import peak_mib

ROOT = Path(__file__).resolve().parents[2]
WALL_PER_CPU, SLOWEST = 4.5, 45.0
"""Seconds that may pass for each of the processor's; and beside much other work."""
BUSY_S = 3
"""CPU seconds that a command has used which computes; one that waits for ever has not."""
KEPT = 4000
"""Characters of a message that are looked at."""


_ANSWERS = {"replay": (4,), "certify": (4,), "validate": (1, 4)}
"""Exit codes by which a verb says that something does not hold, or that requests failed; it is written down too."""


@dataclass(frozen=True)
class Answer:
    """What a command left."""

    number: int
    case: corpus.Case
    how: str
    code: int
    out: str
    err: str
    cpu_s: float
    memory: int
    left: tuple[str, ...]
    accepted: tuple[str, ...] = ()
    """Options that were accepted with an impossible value."""
    texts: tuple[str, ...] = ()
    """Beginnings of what was given; a message that has one says what is wrong."""

    @property
    def wrong(self) -> str | None:
        """In a few words, what is wrong with it; None for nothing."""
        if self.code < 0:
            return f"ended by signal {-self.code}"
        if "Traceback" in self.err:
            frames = re.findall(r'File "[^"]*/(?:simtune|tuner)/([^"]+)", line (\d+)', self.err)
            last = next((line for line in reversed(self.err.splitlines()) if re.match(r"\w+(\.\w+)*(Error|\b)", line)
                         and not line.startswith("internal error")), "")  # fmt: skip
            return f"traceback at {':'.join(frames[-1]) if frames else '?'} {last[:100]}"
        if self.code not in (0, 2, 3) and self.code not in _ANSWERS.get(self.case.command[0], ()):
            return f"exit {self.code}: {self.err[:100].strip()}"
        if self.accepted:
            return f"accepted: {', '.join(self.accepted)}"
        if self.left:
            return f"left {', '.join(self.left)}"
        message = self.err + self.out
        if self.code in (2, 3) and not (_names(message) or any(text in message for text in self.texts)):
            return f"names neither file nor key: {self.err[:120].strip()}"
        if self.code == 0 and "--json" in self.case.command:
            try:
                parse_json(self.out)
            except JsonError as error:
                return f"stdout is no JSON: {error}"
        return None


_KEYS = re.compile(
    r"\b[a-z]+(_[a-z0-9]+)+\b|\b[a-z_]+\.[a-z_0-9]+\b|--[a-z]+|workload \S+|model \S+|hardware \S+|plan \S+|class \S+|"
    r"(?:policy|rate|requests|seed) \S+"
)


def _was_slow(ended: dict[str, Any]) -> bool:
    """True if a command was ended by the clock while it computed: other processes had the processor."""
    return bool(ended["code"] == -signal.SIGALRM and ended["cpu_s"] > BUSY_S)


def _names(message: str) -> bool:
    """Whether a message names a file of the corpus, a key or an option."""
    files = (*corpus.texts(), *corpus.ALSO)
    return any(Path(file).name in message for file in files) or _KEYS.search(message) is not None


class Desk:
    """A folder with the corpus in it, and the warm process that runs commands there."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self._process = folder, process
        self._clean = folder.parent / "clean"

    def ask(
        self, command: tuple[str, ...], warm: bool = False, cpu_s: int = CPU_S, wall_per_cpu: float = WALL_PER_CPU
    ) -> dict[str, Any]:
        """Run a command to its end, or to that of its seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"folder": str(self.folder), "command": list(command), "warm": warm, "cpu_s": cpu_s}
        job["wall_s"] = round(wall_per_cpu * cpu_s)
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def prepare(self) -> None:
        """Write the corpus, and load everything that its commands need."""
        corpus.write(self.folder)
        for command in dict.fromkeys(case.command for case in corpus.cases()):
            if command[0] == "report":
                continue
            answer = self.ask(command, warm=True)
            assert answer["code"] in (0, 3), (command, answer)
            if command[0] == "optimize" and "--dry-run" not in command:
                shutil.copytree(self.folder / "out", self.folder / "certified")
                shutil.move(self.folder / "out", self.folder / "run")
            if command[0] == "validate" and "measured.jsonl" in command:
                shutil.move(self.folder / "out", self.folder / "validated")
            for made in ("out", "out.yaml"):
                path = self.folder / made
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for file in (self.folder / "run").iterdir():
            if file.name not in ("summary.json", "candidates.csv"):
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        (self.folder / "run" / "manifest.json").write_text("{}")
        assert self.ask(("report", "run"), warm=True)["code"] == 0
        (self.folder / "run" / "report.html").unlink()
        shutil.copytree(self.folder, self._clean)

    def answer(self, number: int) -> Answer:
        """Of input `number`."""
        case, how = self._mutated(number)
        before = {path.name for path in self.folder.iterdir()}
        ended = self.ask(case.command)
        if ended["code"] < 0 and (_was_slow(ended) or ended["cpu_s"] > CPU_S - 1):
            self._mutated(number)
            ended = self.ask(case.command, cpu_s=LONG_S)
        out, err = ((self.folder / name).read_text("utf-8", "replace")[-KEPT * 100 :] for name in ("stdout", "stderr"))
        answers = (0, 3, *_ANSWERS.get(case.command[0], ()))
        made = {"stdout", "stderr"} | ({"out", "out.yaml"} if ended["code"] in answers else set())
        left = {path.name for path in self.folder.iterdir()} - before - made
        return Answer(number, case, how, ended["code"], out, err, ended["cpu_s"], ended["memory"], tuple(sorted(left)))

    def answer_options(self, number: int) -> Answer:
        """Return how the command with the options of number `number` ends."""
        self._renew()
        command, odd = options.mutated(number)
        before = {path.name for path in self.folder.iterdir()}
        ended = self.ask(command)
        if _was_slow(ended):
            self._renew()
            ended = self.ask(command, wall_per_cpu=SLOWEST)
        if ended["code"] < 0 and ended["cpu_s"] > CPU_S - 1:
            self._renew()
            ended = self.ask(command, cpu_s=LONG_S)
        out, err = ((self.folder / name).read_text("utf-8", "replace")[-KEPT * 100 :] for name in ("stdout", "stderr"))
        left = {path.name for path in self.folder.iterdir()} - before - {"stdout", "stderr"}
        if ended["code"] in (0, 3, *_ANSWERS.get(command[0], ())):
            left = {name for name in left if name.startswith(".")}
        case = corpus.Case("options", command)
        accepted = tuple(options.impossible(command)) if ended["code"] == 0 else ()
        usage = (ended["code"], out, err, ended["cpu_s"], ended["memory"])
        texts = tuple(word.rstrip("/")[:20] for word in command[1:] if word.strip("/ "))
        return Answer(number, case, odd, *usage, tuple(sorted(left)), accepted, texts)

    def _renew(self) -> None:
        """Put the corpus back in its folder."""
        shutil.rmtree(self.folder)
        shutil.copytree(self._clean, self.folder)

    def _mutated(self, number: int) -> tuple[corpus.Case, str]:
        """The corpus anew with input `number`'s mutation in it; its command, and what was done to the file."""
        random = Random(number)
        case = random.choice(corpus.cases())
        self._renew()
        return case, mutate(self.folder / case.file, random)


@contextmanager
def desk() -> Iterator[Desk]:
    """A desk in a folder of its own, put away at the end."""
    environment = {key: text for key, text in os.environ.items() if not key.startswith("SIMTUNE_")}
    environment |= {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forks.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        try:
            (Path(folder) / "desk").mkdir()
            found = Desk(Path(folder) / "desk", process)
            found.prepare()
            yield found
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait()
            process.stdout.close()


def servers(numbers: Iterable[int], seconds: float) -> int:
    """Try the servers of some numbers, for at most `seconds`, and print how the client took them wrongly, by kind."""
    begun, tried = time.monotonic(), 0
    wrong: dict[str, list[int]] = {}
    for number in numbers:
        if time.monotonic() - begun > seconds:
            break
        words, tried = test_server_fuzz.judged(number), tried + 1
        if words is not None:
            wrong.setdefault(words, []).append(number)
            print(f"{number}: {words}", flush=True)
        if tried % 500 == 0:
            print(f"{tried:,} in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    count = sum(map(len, wrong.values()))
    print(f"\n{tried:,} servers; at most {peak_mib():,.0f} MiB; {count} wrong in {len(wrong)} ways")
    for words, numbers_of in sorted(wrong.items()):
        print(f"{len(numbers_of):5}  {words}  e.g. {numbers_of[:4]}")
    return 1 if wrong else 0


def main() -> int:
    """Run a campaign, and print what was wrong by kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further input after these")
    parser.add_argument("--what", choices=("files", "options", "servers"), default="files")
    given = parser.parse_args()
    if given.what == "servers":
        return servers(range(given.first, given.first + given.inputs), given.seconds)
    begun = time.monotonic()
    codes: Counter[int] = Counter()
    wrong: dict[str, list[Answer]] = {}
    most, long = [0.0, 0], 0
    with desk() as at:
        for number in range(given.first, given.first + given.inputs):
            if time.monotonic() - begun > given.seconds:
                break
            answer = at.answer(number) if given.what == "files" else at.answer_options(number)
            codes[answer.code] += 1
            if codes.total() % 500 == 0:
                print(f"{codes.total():,} in {time.monotonic() - begun:.0f} s", file=sys.stderr)
            if answer.cpu_s > CPU_S:
                long += 1
                print(f"{number}: {answer.case.name} ({answer.how}): {answer.cpu_s:.0f} s", flush=True)
            most = [max(most[0], answer.cpu_s), max(most[1], answer.memory)]
            if answer.wrong is not None:
                wrong.setdefault(answer.wrong, []).append(answer)
                if len(wrong[answer.wrong]) == 1:
                    print(f"{number}: {answer.case.name} ({answer.how}): {answer.wrong}", flush=True)
    print(f"\n{codes.total():,} inputs; exit codes {dict(sorted(codes.items()))}; at most {most[0]:.1f} s "
          f"({long} above {CPU_S}) and {most[1] / 2**20:,.0f} MiB; "
          f"{sum(map(len, wrong.values()))} wrong in {len(wrong)} ways")  # fmt: skip
    for words, answers in sorted(wrong.items(), key=lambda item: -len(item[1])):
        print(f"{len(answers):5}  {words}  e.g. {[a.number for a in answers[:4]]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SimtuneError as error:
        sys.exit(str(error))
