"""simtune validate against a server that only pretends: files, verdicts, failures, resuming, records."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_server import FakeServer
from tests.validation.test_guard import PRETENDS
from tests.validation.test_vllm_steps import PRETENDED

WORKLOAD = """\
schema: simtune/workload@1
name: short
requests: 6
arrivals: {kind: poisson, rate_rps: 4}
prompt: {kind: fixed, tokens: 30}
output: {kind: fixed, tokens: 6}
"""
PLAN = """\
schema: simtune/plan@1
name: one
model: llama-3.1-8b
pools:
  - hardware: h100-sxm
    instances: 1
    max_model_len: 4096
    batching: {max_num_seqs: 8, max_num_batched_tokens: 512}
"""


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "load.yaml").write_text(WORKLOAD)
    return tmp_path


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(first_token_s=0.005, token_s=0.002) as server:
        yield server


Call = Callable[..., Any]
USUAL = ("--out", "out", "--uncertainty", 0, "--max-lateness", 1e6, "--quiet")


def validate(call: Call, server: FakeServer, *more: object) -> Any:
    loads = ("--workload", "load.yaml", "--rates", "30,60", "--repeat", 2)
    return call("validate", "plan.yaml", *loads, "--engine", server.url, *USUAL, *more)


def test_validation_writes_predicted_and_measured_values(call: Call, at: Path, server: FakeServer) -> None:
    said = validate(call, server, "--tolerance", 1e6, "--export", "vllm", "--export", "aiperf")
    assert said.code == 0, said
    assert "predictions are within" in said.out
    names = {str(path.relative_to(at / "out")) for path in (at / "out").rglob("*") if path.is_file()}
    runs = {f"{load}-{repeat}" for load in ("30-rps", "60-rps") for repeat in (0, 1)}
    assert names == {
        *("manifest.json", "question.json", "plan.yaml", "validation.json", "validation.html"),
        *(f"measured/{run}.jsonl" for run in runs),
        *(f"vllm/{run}.json" for run in runs),
        *(f"aiperf/{run}.jsonl" for run in runs),
        *("predicted/30-rps.csv", "predicted/60-rps.csv"),
    }
    validation = json.loads((at / "out" / "validation.json").read_text())
    assert validation["schema"] == "simtune/validation@1"
    assert [load["repeats"] for load in validation["loads"]] == [2, 2]
    judged = said.json if said.out.startswith("{") else validation
    assert {c["metric"] for c in judged["loads"][0]["comparisons"]} >= {"ttft", "tpot", "itl", "e2el", "preemptions"}


def test_exit_code_is_4_outside_the_tolerance(call: Call, at: Path, server: FakeServer) -> None:
    said = validate(call, server, "--tolerance", 1e-9, "--repeat", 1, "--json")
    assert said.code == 4
    assert said.json["within"] is False


def test_a_finished_load_is_not_run_again(call: Call, at: Path, server: FakeServer) -> None:
    first = validate(call, server, "--tolerance", 1e6)
    sent = len(server.requests)
    (at / "out" / "measured" / "60-rps-1.jsonl").unlink()
    assert validate(call, server, "--tolerance", 1e6).code == first.code == 0
    assert len(server.requests) - sent == 4 + 6, "a warm-up of four and one load of six"
    other = call("validate", "plan.yaml", "--workload", "load.yaml", "--rates", "9", "--engine", server.url, *USUAL)
    assert other.code == 2
    assert "holds a validation of another plan, load or engine" in other.err


def test_failed_requests_are_named_and_the_rest_is_kept(call: Call, at: Path) -> None:
    with FakeServer(misbehaves={6: "500", 8: "close"}) as server:  # the first four are the warm-up
        said = validate(call, server, "--tolerance", 1e6)
    assert said.code == 1
    assert "2 requests failed: " in said.err
    assert "answered 500" in said.err
    assert "the connection was closed, after 3 of 6 tokens" in said.err
    assert [path.name for path in (at / "out" / "refused").iterdir()] == ["30-rps-0.jsonl"]
    assert not (at / "out" / "measured").exists()
    with FakeServer() as server:
        pass
    dead = validate(call, server, "--force")
    assert dead.code == 1
    assert "cannot be reached" in dead.err


def test_validation_with_a_late_client_is_not_judged(call: Call, at: Path, server: FakeServer) -> None:
    said = validate(call, server, "--max-lateness", 0)
    assert said.code == 1
    assert "the client itself was late" in said.err
    assert not (at / "out" / "validation.json").exists()
    assert (at / "out" / "refused" / "30-rps-0.jsonl").is_file()


def test_validation_judges_existing_measurements(call: Call, at: Path, server: FakeServer) -> None:
    assert validate(call, server, "--tolerance", 1e6, "--export", "vllm").code == 0
    files = ("--from", "out/measured/30-rps-0.jsonl", "--from", "out/vllm/60-rps-0.json")
    said = call("validate", "plan.yaml", *files, "--out", "judged", "--tolerance", 1e6, "--json")
    assert said.code == 0, said
    assert [load["label"] for load in said.json["loads"]] == ["30-rps", "60-rps-0"]
    assert said.json["loads"][0]["requests"] == 6


def test_a_profile_says_that_it_was_validated(call: Call, at: Path, server: FakeServer) -> None:
    from simtune.specs import catalog

    source = Path(str(catalog.load_hardware("h100-sxm").arrays._path)).parent
    shutil.copytree(source, at / "mine")
    never = call("show", "./mine/profile.yaml")
    assert "validated: never" in never.out
    said = validate(call, server, "--tolerance", 1e6, "--hardware", "./mine/profile.yaml", "--record", "mine")
    assert said.code == 0, said
    shown = call("show", "./mine/profile.yaml")
    assert "validated: llama-3.1-8b with server, 20" in shown.out
    base = ("--plan", "plan.yaml", "--hardware", "./mine/profile.yaml", "--workload", "load.yaml")
    assert call("simulate", *base, "--out", "run").code in (0, 3)
    page = (at / "run" / "report.html").read_text()
    assert "Never validated" not in page
    assert "Validated: llama-3.1-8b with server" in page


def test_plans_around_one_are_run_for_real(call: Call, at: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    python, weights = at / "python", at / "weights"
    python.write_text(PRETENDS.format(python=sys.executable, root=root, said=str(at / "said")))
    python.chmod(0o755)
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    mine = at / "mine.yaml"  # a model of one's own, which no catalogue knows by name
    shipped = (Path(root) / "simtune/models/llama-3.2-1b.yaml").read_text()
    mine.write_text(shipped.replace("name: llama-3.2-1b", "name: mine"))
    (at / "run").mkdir()
    (at / "run" / "plan.yaml").write_text(PLAN.replace("llama-3.1-8b", str(mine)))
    engine = ("--engine", "vllm", "--weights", weights, "--vllm-python", python)
    loads = ("--workload", "load.yaml", "--rates", "40", "--repeat", 2, "--plans", 3)
    said = call("validate", "run", *loads, *engine, *USUAL, "--tolerance", 1e6, "--json")
    assert said.code == 0, said
    decision = json.loads((at / "out" / "decision.json").read_text())
    assert said.json == decision
    assert {p["plan"] for p in decision["plans"]} == {"one.chosen", "one.seats4", "one.budget256"}
    assert all(len(p["measured_s"]) == 2 for p in decision["plans"])
    assert {path.name for path in (at / "out" / "plans").iterdir()} == {f"{p['plan']}.yaml" for p in decision["plans"]}
    told = call("validate", "run", *loads, *engine, *USUAL, "--tolerance", 1e6)
    assert told.code == 0, told
    assert all(p["plan"] in told.out for p in decision["plans"])
    assert f"regret {decision['regret']:.1%}" in told.out
    refused = call("validate", "run", *loads, "--engine", "http://127.0.0.1:1", *USUAL)
    assert refused.code == 2
    assert "starts an engine for every plan" in refused.err
    shared = (at / "load.yaml").read_text() + "shared_prefix: {groups: 2, tokens: 9, block_tokens: 9}\n"
    (at / "shared.yaml").write_text(shared)
    (at / "said").write_text("")
    unlike = call("validate", "run", *loads[2:], "--workload", "shared.yaml", "--plans", 9, *engine, *USUAL, "--force")
    assert unlike.code == 2
    assert "multiple of the KV block size" in unlike.err
    assert not (at / "said").read_text(), "nothing is run for what cannot be foretold"


def test_vllm_is_stepped_by_its_own_processor_time(call: Call, at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can be worked out by hand: requests do not wait for one another."""
    path = os.pathsep.join(filter(None, [str(PRETENDED), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    plan = PLAN.replace("max_model_len: 4096", "max_model_len: 4096\n    async_scheduling: false")
    (at / "plan.yaml").write_text(plan)
    engine = ("--engine", "vllm", "--clock", "cpu", "--vllm-python", sys.executable)
    loads = ("--workload", "load.yaml", "--rates", "40", "--repeat", 1, "--tolerance", 1e6)
    said = call("validate", "plan.yaml", *loads, *engine, *USUAL, "--json")
    assert said.code in (0, 4), said
    (run,) = (at / "out").rglob("*.jsonl")
    facts, *rows = map(json.loads, run.read_text().splitlines())
    assert facts["engine"]["version"] == "0.pretended"
    assert facts["clock"] == "cpu"
    assert [(row["prompt_tokens"], row["output_tokens"], row["error"]) for row in rows] == [(30, 6, None)] * 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "name what to compare with"),
        (("--engine", "http://127.0.0.1:1"), "name the load to send"),
        (("--engine", "vlm", "--workload", "load.yaml"), "did you mean vllm?"),
        (("--engine", "vllm", "--workload", "load.yaml"), "--weights DIR"),
        (
            ("--engine", "torch", "--workload", "load.yaml"),
            "has no async_scheduling (set `async_scheduling: false` in the pool",
        ),
        (("--engine", "vllm", "--workload", "load.yaml", "--device", "cpu"), "of engines in this process"),
        (("--engine", "vllm", "--workload", "load.yaml", "--clock", "wall"), "steps it without a server"),
        (("--engine", "transformers", "--workload", "load.yaml"), "--engine transformers: name the folder to serve"),
        (
            ("--engine", "vllm", "--workload", "load.yaml", "--clock", "cpu", "--engine-arg=--dtype=float32"),
            "leave --engine-arg and other clocks out",
        ),
        (("--engine", "localhost:1", "--workload", "load.yaml"), "is neither an address"),
        (("--engine", "http://127.0.0.1:1", "--workload", "load.yaml", "--rates", "2,x"), "--rates 2,x: write"),
        (("--from", "nothing.json", "--record", "nowhere"), "--record nowhere: holds no profile.yaml"),
        (("--from", "nothing.json"), "nothing.json: no such file"),
    ],
)
def test_validation_refuses_impossible_runs_first(call: Call, at: Path, options: Any, said: str) -> None:
    done = call("validate", "plan.yaml", "--out", "out", *options)
    assert (done.code, done.out) == (2, ""), done
    assert said in done.err
    assert not (at / "out").exists()
