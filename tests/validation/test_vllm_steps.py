"""vLLM step by step, with a vLLM that can be worked out by hand in its place."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simtune.costs.calibration import TimedStep
from simtune.costs.iteration import StepWork
from simtune.errors import SimtuneError, UsageError
from simtune.validation.servers import gauge, vllm_steps
from simtune.validation.servers.driven_engines import DrivenRequest, EngineSize, VllmDriver, llama_config
from simtune.validation.servers.vllm_steps import SteppedEngine
from tests.validation.driven_engine import tiny

PRETENDED = Path(__file__).with_name("pretended_vllm")
SIZE = EngineSize(4, 8, 256, 16)
SLOW = 2.0


class Steady:
    """A gauge of a machine that is half as fast as it was."""

    def __init__(self, reference_s: float | None) -> None:
        self.reference_s = reference_s or 0.5

    def __call__(self) -> float:
        return SLOW


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM and torch are those of the folder; real ones come back afterwards, with all their modules: torch cannot be
    imported twice."""

    def loaded() -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("vllm", "torch")}

    real = loaded()
    for name in real:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(PRETENDED))
    yield
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(real)


def engine(monkeypatch: pytest.MonkeyPatch, **given: Any) -> SteppedEngine:
    monkeypatch.setattr(vllm_steps, "_gauge", lambda: Steady)
    return SteppedEngine({"model": "m", "vocab": 100, "engine": {"max_num_batched_tokens": 8, **given}})


def step(
    decodes: int = 0, context: int = 0, drafts: int = 0, chunks: tuple[tuple[int, int], ...] = ()
) -> dict[str, Any]:
    return {
        "decodes": decodes,
        "context_tokens": context,
        "draft_tokens": drafts,
        "chunks": [list(chunk) for chunk in chunks],
    }


def of_steps(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What they computed, without the times they took."""
    for one in answer["steps"]:
        assert one["wall_s"] >= 0
        assert one["cpu_s"] >= 0
    return [{key: value for key, value in one.items() if not key.endswith("_s")} for one in answer["steps"]]


@pytest.mark.usefixtures("pretended")
def test_steps_are_told_by_what_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    its = engine(monkeypatch)
    assert its.facts == {"version": "0.pretended", "num_blocks": 77, "reference_s": 0.5}
    session = {"clock": "steps", "seed": 3, "requests": [[10, 3, 1, [5, 6, 7], None], [0, 12, 3, [], None]]}
    answer = its.run(session)
    assert of_steps(answer) == [
        step(chunks=((0, 8),)),
        step(chunks=((8, 4),)),
        step(decodes=1, context=13),
        step(decodes=1, context=14),
        step(chunks=((0, 3),)),
    ]
    assert answer["requests"] == [[10.0, 11.0, 11.0, [11.0], None], [0, 2.0, 4.0, [2.0, 3.0, 4.0], None]]
    assert answer["queues"] == [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 1, 0), (4, 0, 0), (10, 1, 0), (11, 0, 0)]
    assert (answer["drafts"], answer["found"], answer["preemptions"]) == ([0, 0, 0, 0], 0, 0)


@pytest.mark.usefixtures("pretended")
def test_drafts_that_are_verified_kept_and_cut_off_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    its = engine(monkeypatch, speculative_config={"num_speculative_tokens": 3})
    answer = its.run({"clock": "steps", "seed": 0, "requests": [[0, 5, 4, [], None]]})
    assert of_steps(answer) == [step(chunks=((0, 5),)), step(1, 9, 3), step(1, 11, 3)]
    # One token of the prompt's step, two of a round, and one of the second, where the answer ends.
    assert answer["drafts"] == [2, 6, 2, 3]
    again = its.run({"clock": "steps", "seed": 0, "requests": [[0, 5, 1, [], None]]})
    assert again["drafts"] == [0, 0, 0, 0]


@pytest.mark.usefixtures("pretended")
def test_caches_that_come_late_and_requests_that_are_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    its = engine(monkeypatch, max_num_batched_tokens=99, kv_transfer_config={"kv_connector": "NixlConnector"})
    answer = its.run({"clock": "steps", "seed": 0, "requests": [[0, 6, 2, [], {"remote": 1}], [0, 99, 2, [], None]]})
    assert of_steps(answer)[0] == step(chunks=((0, 99),))
    assert answer["found"] == 5, "all of the prompt but its last token"
    assert answer["preemptions"] == 1
    assert [kept for *_, kept in answer["requests"]] == [{"kept": 6}, None]
    alone = its.run({"clock": "steps", "seed": 0, "requests": [[0, 6, 1, [], {"remote": 1}]]})
    assert len(alone["steps"]) == 1, "a step in which nothing is computed is none"
    assert alone["requests"] == [[0, 2.0, 2.0, [2.0], {"kept": 6}]]


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("clock", ["cpu", "wall"])
def test_by_time_requests_come_when_they_are_due(monkeypatch: pytest.MonkeyPatch, clock: str) -> None:
    its = engine(monkeypatch)
    answer = its.run({"clock": clock, "seed": 0, "requests": [[0.0, 3, 2, [], None], [0.02, 3, 1, [], None]]})
    for (at, *_), (sent, first, last, times, _) in zip(((0.0,), (0.02,)), answer["requests"], strict=True):
        assert at <= sent <= first <= last
        assert (times[0], times[-1]) == (first, last)
        if clock == "cpu":
            assert sent == at, "what it takes to put requests in does not count"
    assert len(answer["steps"]) == 3


@pytest.mark.parametrize(("cores", "of_rest"), [({0}, {1, 2}), ({0, 1, 2}, {0, 1, 2})])
def test_the_thread_that_computes_keeps_its_cores_and_no_other_has_them_where_there_are_more(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], of_rest: set[int]
) -> None:
    own, sent = os.getpid(), dict[int, set[int]]()
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(os, "listdir", lambda folder: [str(own), "17", "18"])
    monkeypatch.setattr(os, "sched_setaffinity", sent.__setitem__, raising=False)
    vllm_steps._keep(cores)
    assert sent == {own: cores, 17: of_rest, 18: of_rest}


@pytest.mark.usefixtures("pretended")
def test_the_gauge_says_how_many_times_as_long_things_take(monkeypatch: pytest.MonkeyPatch) -> None:
    many_rows = [8.0] * 3
    took = iter([9.0, *(1.0 + i for i in range(gauge.FIRST)), *many_rows, 10.0, 20.0, 40.0])
    monkeypatch.setattr(gauge.Gauge, "_seconds", lambda self, x: next(took))
    its = gauge.Gauge()
    assert its.reference_s == 5.0, "the median, after one that does not count"
    assert [its() for _ in range(2 * gauge.EVERY + 1)] == [2.0] * gauge.EVERY + [3.0] * gauge.EVERY + [4.0]
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(PRETENDED))
    assert gauge.Gauge(0.25).reference_s == 0.25


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    path = os.pathsep.join(filter(None, [str(PRETENDED), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)

    def make(**arguments: Any) -> VllmDriver:
        return VllmDriver(tiny(), SIZE, python=sys.executable, reference_s=1.0, arguments=arguments)

    return make


def test_it_is_driven_in_an_interpreter_of_its_own(driver: Any) -> None:
    its = driver(speculative_config={"num_speculative_tokens": 3})
    facts = its.facts()
    assert facts == {
        "engine": "vllm",
        "version": "0.pretended",
        "num_blocks": 77,
        "reference_s": 1.0,
        "draft_tokens": 3,
    }
    done = its.run([DrivenRequest(0, 5, 4), DrivenRequest(20, 3, 1)])
    assert [one.batch for one in done.steps] == [
        StepWork(0, 0, ((0, 5),), 1),
        StepWork(1, 9, (), 1, draft_tokens=3),
        StepWork(1, 11, (), 1, draft_tokens=3),
        StepWork(0, 0, ((0, 3),), 1),
    ]
    assert all(isinstance(one, TimedStep) and one.seconds >= 0 for one in done.steps)
    assert done.drafts == (2, 6, 2, 3)
    assert [(one.sent, one.first_token, one.finish) for one in done.requests] == [(0, 1, 3), (20, 21, 21)]
    its.close()
    its.close()


def test_an_engine_that_ends_says_its_last_word(driver: Any) -> None:
    with pytest.raises(SimtuneError, match="vllm: the engine has ended: ValueError: breaks as it was told to"):
        driver(breaks=True)


def test_an_interpreter_that_is_none_is_named(tmp_path: Path) -> None:
    nothing = tmp_path / "python"
    with pytest.raises(UsageError, match=f"{nothing}: cannot be started .*; name an interpreter with vLLM"):
        VllmDriver(tiny(), SIZE, python=str(nothing))


def test_only_plain_layers_are_made_up() -> None:
    config = llama_config(tiny())
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (128, 2, 32)
    (group,) = tiny().layers
    with pytest.raises(UsageError, match="tiny: only models of equal layers of full attention and dense feed-forward"):
        llama_config(tiny().model_copy(update={"layers": (group, group)}))


def test_nothing_of_simtune_is_needed_there() -> None:
    source = Path(str(vllm_steps.__file__)).read_text()
    assert "from simtune" not in source
    assert "import simtune" not in source
