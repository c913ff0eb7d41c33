"""Step logs of real engines, driven through the schedulers; and logs that are damaged, in what they say or how."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simtune.cli import main
from simtune.errors import SimtuneError, SpecError, UsageError
from simtune.validation.replay.scheduler_replay import Resident, replay
from simtune.validation.replay.step_log import read
from tests.engine.plain import PlainEngine, PlainRequest

LOGS = (
    *(f"hf_{name}" for name in ("fifo", "fifo_arrivals", "fifo_kv", "prefill_first", "prefill_first_kv")),
    *(f"vllm_{name}" for name in ("arrivals", "async", "base", "budget64", "kv", "kv_decode", "nochunk", "prefix")),
    *(f"vllm_{name}" for name in ("priority", "seqs16", "spec_k3_a70")),
)
DRAFTS = sorted((Path(__file__).parents[1] / "engine" / "logs").glob("*.gz"))

Line = dict[str, Any]

VLLM: Line = {
    "scheduling_policy": "fcfs",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 16,
    "block_size": 4,
    "free_blocks_at_start": 8,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "num_lookahead_tokens": 0,
    "spec": None,
}


def small() -> list[Line]:
    """Two requests on vLLM's rule, worked out by hand: 6 prompt and 2 output tokens, and 4 and 1."""
    return [
        {
            "format": "steplog/1",
            "log": "small",
            "engine": "vllm",
            "package": "by hand",
            "options": dict(VLLM),
            "n_requests": 2,
            "n_steps": 2,
        },
        {"req": "a", "order": 0, "at_step": 0, "prompt_len": 6, "output_len": 2},
        {"req": "b", "order": 1, "at_step": 0, "prompt_len": 4, "output_len": 1},
        {"step": 0, "sched": {"a": 6, "b": 2}, "admit": {"a": 0, "b": 0}, "free": 5, "running": 2},
        {"step": 1, "sched": {"a": 1, "b": 2}, "finish": ["a", "b"], "free": 5, "running": 2},
    ]


def write(lines: list[Line], path: Path) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def copy(source: Path, target: Path, change: Any) -> tuple[int, Path]:
    """A copy of a log with `change` made to the first step that it accepts, and the number of that step."""
    with gzip.open(source, "rt") as file:
        lines = [json.loads(line) for line in file]
    number = next(line["step"] for line in lines[len(lines) // 2 :] if "step" in line and change(line))
    with gzip.open(target, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return number, target


def typed(*args: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["replay", *map(str, args)])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


# --- equal, or not ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOGS)
def test_every_step_of_every_log_is_equal(name: str, data_dir: Path) -> None:
    log = read(data_dir / "steplogs" / f"{name}.jsonl.gz")
    found = replay(log)
    assert found.parting is None
    assert found.equal == found.steps == log.header.n_steps


@pytest.mark.parametrize("path", DRAFTS, ids=lambda path: path.name.split(".")[0])
def test_drafts_and_asynchronous_scheduling_are_replayed_together(path: Path) -> None:
    found = replay(read(path))
    assert found.parting is None
    assert found.equal == found.steps > 0


@pytest.mark.parametrize(
    ("options", "parts_at"),
    [({"long_prefill_token_threshold": 3}, 0), ({"scheduler_reserve_full_isl": False}, 1), ({"watermark": 0.6}, 0)],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_of_the_header_reach_the_scheduler(options: Line, parts_at: int, tmp_path: Path) -> None:
    """The log of the plain engine with the option is followed to its end, and parts where it is not told of it."""
    lines = logged(options)
    found = replay(read(write(lines, tmp_path / "log.jsonl")))
    assert found.parting is None
    lines[0] = lines[0] | {"options": without(lines[0]["options"], *options)}
    parting = replay(read(write(lines, tmp_path / "log.jsonl"))).parting
    assert parting is not None
    assert parting.step == parts_at


def logged(options: Line) -> list[Line]:
    """The two small requests, and a third that hardly fits beside them, on the plain engine with these options."""
    header, first, second, *_ = small()
    third = {"req": "c", "order": 2, "at_step": 1, "prompt_len": 12, "output_len": 3}
    settings = header["options"] = VLLM | {"max_num_seqs": 3, "free_blocks_at_start": 5} | options
    engine = PlainEngine(
        settings["free_blocks_at_start"],
        settings["block_size"],
        settings["max_num_seqs"],
        settings["max_num_batched_tokens"],
        max_model_len=settings["max_model_len"],
        watermark=int(settings.get("watermark", 0) * (settings["free_blocks_at_start"] + 1)),
        threshold=settings.get("long_prefill_token_threshold", 0),
        reserve_full_isl=settings.get("scheduler_reserve_full_isl", True),
    )
    lines = [first, second, third]
    steps: list[Line] = []
    done = 0
    while done < len(lines):
        for number, line in enumerate(lines):
            if line["at_step"] == len(steps):
                engine.add(PlainRequest(number, line["prompt_len"], line["output_len"]))
        given = engine.step()
        steps.append(
            {
                "step": len(steps),
                "sched": {"abc"[i]: n for i, n in given.scheduled.items()},
                "admit": {"abc"[i]: n for i, n in given.admitted.items()},
                "preempt": ["abc"[i] for i in given.preempted],
                "finish": ["abc"[i] for i in given.finished],
                "free": given.free,
                "running": given.running,
                "waiting": given.waiting,
            }
        )
        done += len(given.finished)
    return [header | {"n_requests": 3, "n_steps": len(steps)}, *lines, *steps]


def one_token_more(step: Line) -> bool:
    request = next(reversed(step["sched"]))
    step["sched"][request] += 1
    return True


def other_order(step: Line) -> bool:
    if len(step["sched"]) < 2:
        return False
    step["sched"] = dict(reversed(step["sched"].items()))
    return True


def one_block_less(step: Line) -> bool:
    step["free"] -= 1
    return bool(step["free"] >= 0)


def nobody_finishes(step: Line) -> bool:
    return step.pop("finish", None) is not None


def nobody_is_preempted(step: Line) -> bool:
    return step.pop("preempt", step.pop("reset_after", None)) is not None


@pytest.mark.parametrize("name", ["vllm_kv_decode", "hf_prefill_first_kv"])
@pytest.mark.parametrize(
    ("damage", "seen_in"),
    [
        (one_token_more, "scheduled"),
        (other_order, "scheduled"),
        (one_block_less, "free_blocks"),
        (nobody_finishes, "finished"),
        (nobody_is_preempted, "preempted"),
    ],
)
def test_a_damaged_step_is_found(name: str, damage: Any, seen_in: str, data_dir: Path, tmp_path: Path) -> None:
    number, damaged = copy(data_dir / "steplogs" / f"{name}.jsonl.gz", tmp_path / "damaged.jsonl.gz", damage)
    found = replay(read(damaged))
    assert found.parting is not None
    assert (found.parting.step, found.equal) == (number, number)
    assert seen_in in found.parting.different


def test_the_state_before_the_parting(tmp_path: Path) -> None:
    lines = small()
    lines[4]["sched"]["b"] = 1
    parting = replay(read(write(lines, tmp_path / "log.jsonl"))).parting
    assert parting is not None
    assert parting.logged is not None
    assert parting.simulated is not None
    assert (parting.step, parting.different) == (1, ("scheduled",))
    assert parting.logged.scheduled == (("a", 1), ("b", 1))
    assert parting.simulated.scheduled == (("a", 1), ("b", 2))
    assert parting.before.running == (Resident("a", 6, 1), Resident("b", 2, 0))
    assert (parting.before.waiting, parting.before.free_blocks) == ((), 5)


def test_a_log_that_ends_too_early_parts_at_its_end(tmp_path: Path) -> None:
    lines = small()[:-1]
    lines[0]["n_steps"] = 1
    parting = replay(read(write(lines, tmp_path / "log.jsonl"))).parting
    assert parting is not None
    assert (parting.step, parting.logged) == (1, None)


def test_a_log_that_goes_on_too_long_parts_after_the_last_step(tmp_path: Path) -> None:
    lines = [*small(), {"step": 2, "sched": {"a": 1}, "free": 5, "running": 1}]
    lines[0]["n_steps"] = 3
    parting = replay(read(write(lines, tmp_path / "log.jsonl"))).parting
    assert parting is not None
    assert (parting.step, parting.simulated) == (2, None)


def test_another_policy_is_compared_by_what_it_schedules(tmp_path: Path) -> None:
    """Sarathi takes the blocks of a whole prompt at once, vLLM those of its chunk; nothing else differs here."""
    lines = small()
    lines[0]["options"]["max_num_batched_tokens"] = 7
    lines[3] |= {"sched": {"a": 6, "b": 1}}
    lines[4] |= {"sched": {"a": 1, "b": 3}}
    log = read(write(lines, tmp_path / "log.jsonl"))
    found = replay(log, "sarathi")
    assert (found.policy, found.parting) == ("sarathi", None)
    with pytest.raises(UsageError, match="unknown policy 'sarati', did you mean sarathi"):
        replay(log, "sarati")
    with pytest.raises(SpecError, match="orca refuses these settings: without chunked prefill"):
        replay(log, "orca")


# --- the command ------------------------------------------------------------------------------------------


def test_replay_sums_up_and_tells_where_a_schedule_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = small()
    lines[4]["sched"]["b"] = 1
    good, bad = write(small(), tmp_path / "good.jsonl"), write(lines, tmp_path / "bad.jsonl")
    assert typed(good) == 0
    assert capsys.readouterr().out == f"{good}: vllm, vllm-fcfs: 2 steps, all equal\n"
    assert typed(good, bad) == 4
    out = capsys.readouterr().out
    assert f"{good}: vllm, vllm-fcfs: 2 steps, all equal\n" in out
    assert f"{bad}: vllm, vllm-fcfs: 2 steps, parts at step 1, 1 equal before\n" in out
    assert "before: 5 blocks free" in out
    assert "running 2 (tokens computed, delivered): a (6, 1), b (2, 0)" in out
    assert "waiting 0: -" in out
    (row,) = [line for line in out.splitlines() if "place 2" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["place 2", "b: 1", "b: 2"]


def test_replay_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = small()
    lines[3]["free"] = 4
    path = write(lines, tmp_path / "log.jsonl")
    assert typed(path, "--json") == 4
    document = json.loads(capsys.readouterr().out)
    assert document["equal"] is False
    (found,) = document["replays"]
    assert (found["file"], found["policy"], found["steps"], found["equal"]) == (str(path), "vllm-fcfs", 2, 0)
    assert found["parting"]["different"] == ["free_blocks"]
    assert (found["parting"]["logged"]["free_blocks"], found["parting"]["simulated"]["free_blocks"]) == (4, 5)
    assert typed(write(small(), path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["replays"][0]["parting"] is None


def test_replay_of_a_bad_file_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(tmp_path / "none.jsonl") == 2
    assert capsys.readouterr().err == f"{tmp_path / 'none.jsonl'}: no such file\n"


# --- files that are no step logs --------------------------------------------------------------------------


def without(line: Line, *keys: str) -> Line:
    return {key: value for key, value in line.items() if key not in keys}


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        (0, {"format": "steplog/2"}, ":1: format: must be steplog/1, not steplog/2"),
        (0, {"format": None}, ":1: format: must be steplog/1; is this a step log?"),
        (0, {"engine": "sglang"}, ":1: engine: must be 'vllm' or 'transformers-cb', not 'sglang'"),
        (0, {"n_steps": 3}, ":5: n_steps: the file ends after 2 of 3 steps; it is cut off"),
        (0, {"n_requests": 5}, ":5: n_requests: the file ends after 2 of 5 requests; it is cut off"),
        (0, {"options": without(VLLM, "block_size")}, ":1: options.block_size: is required and missing"),
        (
            0,
            {"options": VLLM | {"max_long_partial_prefills": 2}},
            ":1: options.max_long_partial_prefills: 2 is not mod",
        ),
        (0, {"options": VLLM | {"watermark": -0.1}}, ":1: options.watermark: must be greater than or equal to 0"),
        (0, {"options": VLLM | {"free_blocks_at_start": 3}}, "one request of max_model_len"),
        (1, {"prompt_len": 20}, ":2: prompt_len: 20 prompt and 2 output tokens exceed max_model_len (16)"),
        (1, {"prompt_len": 0}, ":2: prompt_len: must be greater than or equal to 1, not 0"),
        (1, {"at_step": 1}, ":3: at_step: arrives before the request above it"),
        (2, {"req": "a"}, ":3: req: request 'a' is there twice"),
        (3, {"shed": {}}, ":4: shed: unknown key"),
        (3, {"sched": {"a": 6, "c": 2}}, ":4: sched: request 'c' has not arrived by step 0"),
        (4, {"step": 0}, ":5: step: step 0 comes after step 0"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(line: int, changed: Line, message: str, tmp_path: Path) -> None:
    lines = small()
    lines[line] |= changed
    path = write(lines, tmp_path / "log.jsonl")
    with pytest.raises(SimtuneError) as error:
        replay(read(path))
    assert error.value.exit_code == 2
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))


def test_missing_fields_are_all_told_at_once(tmp_path: Path) -> None:
    lines = small()
    lines[1] = without(lines[1], "order", "output_len")
    lines[3] = without(lines[3], "sched")
    with pytest.raises(SpecError) as error:
        read(write(lines, tmp_path / "log.jsonl"))
    assert [(problem.line, problem.key) for problem in error.value.problems][:3] == [
        (2, "order"),
        (2, "output_len"),
        (4, "sched"),
    ]


def test_a_request_after_the_steps_is_out_of_place(tmp_path: Path) -> None:
    header, a, b, first, *rest = small()
    first["sched"], first["admit"] = {"a": 6}, {"a": 0}
    with pytest.raises(SpecError, match=":4: req: comes after a step"):
        read(write([header, a, first, b, *rest], tmp_path / "log.jsonl"))


@pytest.mark.parametrize("keep", [0.3, 0.99])
def test_a_truncated_file_is_called_so(keep: float, tmp_path: Path) -> None:
    text = "".join(json.dumps(line) + "\n" for line in small())
    plain, packed = tmp_path / "log.jsonl", tmp_path / "log.jsonl.gz"
    plain.write_text(text[: int(keep * len(text))])
    with pytest.raises(SpecError, match="cut off"):
        read(plain)
    whole = gzip.compress(text.encode())
    packed.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(SpecError, match="the gzip data end too early"):
        read(packed)


def test_other_things_than_logs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("")
    with pytest.raises(SpecError, match="is empty"):
        read(path)
    path.write_text("[1, 2]\n")
    with pytest.raises(SpecError, match=":1: must be a JSON object"):
        read(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not a UTF-8 text file"):
        read(path)
