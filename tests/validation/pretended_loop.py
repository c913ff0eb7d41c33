"""The closed loop on an engine that only pretends: `python pretended_loop.py FOLDER STAGE` is killed in that stage."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from simtune.api import load_question
from simtune.tuner.trial import Tuned
from simtune.validation.closed_loop import LoopRound, LoopSettings, TuningLoop
from simtune.validation.servers.driven_engines import EngineSize
from tests.validation.driven_engine import PretendedDriver

STUDY = Path(__file__).parents[2] / "examples" / "closed-loop" / "study.yaml"
SETTINGS = LoopSettings(budget_s=0.1, rounds=2, repeats=2, requests=12)


def write_run(tuned: Tuned, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.yaml").write_text(tuned.deployment.plan.to_yaml())


def loop(
    out: Path, make: Callable[[EngineSize, float | None], PretendedDriver], settings: LoopSettings = SETTINGS
) -> list[LoopRound]:
    search = [
        "search.requests=60",
        "search.confirm.draws=0",
        "search.max_num_seqs=[4]",
        "search.max_num_batched_tokens=[64]",
    ]
    question = load_question(str(STUDY), search)
    return TuningLoop(question, out, make, settings=settings, write_run=write_run).run()


class Killed(PretendedDriver):
    """Ends its process by force after so many sessions."""

    after = 0

    def run(self, *arguments: object, **options: object) -> object:  # type: ignore[override]
        if self.sessions == self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(*arguments, **options)  # type: ignore[arg-type]


def killed_in(stage: str) -> Callable[[EngineSize, float | None], PretendedDriver]:
    made: list[PretendedDriver] = []

    def make(size: EngineSize, reference_s: float | None) -> PretendedDriver:
        engine = Killed(size)
        engine.after = {"profile": 9, "replay": 2}[stage] if len(made) == (stage == "replay") else -1
        made.append(engine)
        return engine

    return make


if __name__ == "__main__":
    loop(Path(sys.argv[1]), killed_in(sys.argv[2]))
