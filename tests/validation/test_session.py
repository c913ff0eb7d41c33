"""Runs of a validation: every one has prompts of its own, and what was run is not run again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simtune.errors import EngineError, UsageError
from simtune.specs.folder_lock import release
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, Pool
from simtune.validation.client.measured_run import EngineFacts, MeasuredFacts, MeasuredRequest, MeasuredRun
from simtune.validation.client.prompts import Prompts, prompt_seed
from simtune.validation.loads import NamedLoad
from simtune.validation.session import Round, ValidationFolder, run_loads, run_plans
from simtune.workload.requests import RequestStream
from tests.validation.test_client import stream

POOL = Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=8, max_num_batched_tokens=512))
PLAN = Plan(name="one", model="llama-3.2-1b", pools=(POOL,))
LOADS = [NamedLoad("light", stream(3)), NamedLoad("knee", stream(3))]
HOW = Round(repeats=2, most_late=1.0, seed=4)


class Noting:
    """An engine that notes what it was to run."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, str, int]] = []

    def run(self, plan: Plan, stream: RequestStream, *, label: str, seed: int = 0) -> MeasuredRun:
        self.runs.append((plan.name, label, seed))
        times: dict[str, Any] = {"due_s": 0.0, "sent_s": 0.0, "first_token_s": 1.0, "finish_s": 2.0}
        request = MeasuredRequest(request=0, prompt_tokens=20, output_tokens=8, **times)
        return MeasuredRun(MeasuredFacts(label=label, engine=EngineFacts(engine="noting")), (request,))

    def check(self, plan: Plan) -> None:
        """It runs anything."""

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def folder(tmp_path: Path) -> ValidationFolder:
    return ValidationFolder(tmp_path / "out", {"asked": 1}, force=False)


def test_a_folder_goes_on_for_the_same_question_only(tmp_path: Path) -> None:
    """Killed at any moment it has both the files by which it goes on, or is as it was."""
    out = tmp_path / "out"
    ValidationFolder(out, {"asked": 1}, force=False)
    (out / "mine").touch()
    ValidationFolder(out, {"asked": 1}, force=False)
    with pytest.raises(UsageError, match="holds a validation of another plan"):
        ValidationFolder(out, {"asked": 2}, force=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            ValidationFolder(out, {"asked": 2}, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "mine", "question.json"]
    (out / "question.json").write_text("[")
    with pytest.raises(UsageError, match="holds a validation of another plan"):
        ValidationFolder(out, {"asked": 1}, force=False)
    ValidationFolder(out, {"asked": 1}, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "question.json"]
    release()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_no_two_runs_of_loads_have_the_same_prompts(folder: ValidationFolder) -> None:
    engine = Noting()
    run_loads(engine, PLAN, LOADS, HOW, folder, lambda *said: None)
    assert [label for _, label, _ in engine.runs] == ["light", "light", "knee", "knee"]
    seeds = [seed for *_, seed in engine.runs]
    prompts = [tuple(Prompts(LOADS[0].stream, 50_000, seed)[0]) for seed in seeds]
    assert len(set(prompts)) == len(prompts) == 4
    assert len({prompt[0] for prompt in prompts}) == 4, "not even shared prefixes"


def test_a_run_that_is_there_is_not_run_again_and_the_others_keep_their_prompts(folder: ValidationFolder) -> None:
    whole, rest = Noting(), Noting()
    run_loads(whole, PLAN, LOADS, Round(1, 1.0, 4), folder, lambda *said: None)
    run_loads(rest, PLAN, LOADS, HOW, folder, lambda *said: None)
    assert [label for _, label, _ in rest.runs] == ["light", "knee"]
    assert not {seed for *_, seed in rest.runs} & {seed for *_, seed in whole.runs}


def test_all_plans_get_the_same_prompts_other_ones_in_every_repeat(folder: ValidationFolder) -> None:
    engine, other = Noting(), PLAN.model_copy(update={"name": "other"})
    tried = [(plan, NamedLoad(plan.name, stream(3))) for plan in (PLAN, other)]
    run_plans(engine, tried, HOW, folder, lambda *said: None)
    assert [name for name, *_ in engine.runs] == ["one", "one", "other", "other"]
    seeds = [seed for *_, seed in engine.runs]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_an_order_of_plans_that_did_not_serve_the_same_is_none(folder: ValidationFolder) -> None:
    class Failing(Noting):
        def run(self, plan: Plan, stream: RequestStream, *, label: str, seed: int = 0) -> MeasuredRun:
            run = super().run(plan, stream, label=label, seed=seed)
            return replace(
                run, requests=tuple(one.model_copy(update={"error": "out of blocks"}) for one in run.requests)
            )

    with pytest.raises(EngineError, match="plan one: 1 requests failed, the first because: out of blocks"):
        run_plans(Failing(), [(PLAN, LOADS[0])], HOW, folder, lambda *said: None)


def test_seeds_of_prompts_depend_on_both_names() -> None:
    seeds = {prompt_seed(seed, name) for seed in (0, 1) for name in ("light 0", "light 1", "warm-up")}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
