"""A started engine does not outlive who started it: told to stop, killed, or ended by itself."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from simtune.errors import EngineError, UsageError
from simtune.specs.catalog import load_model
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, Pool
from simtune.validation.client.real_clock import pause
from simtune.validation.loads import NamedLoad
from simtune.validation.servers import process_guard
from simtune.validation.servers.served import VllmCommand, VllmEngine, vllm_python
from tests.fake_server import FakeServer
from tests.validation.test_client import stream

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernel and /proc of Linux")

FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(*pids: int) -> bool:
    """Within half a minute."""
    for _ in range(300):
        if not any(map(alive, pids)):
            return True
        pause(0.1)
    return False


def family(log: Path) -> list[int]:
    """The command and its child, once both are there."""
    for _ in range(300):
        words = log.read_text().split()
        if len(words) == 2:
            return [int(word) for word in words]
        pause(0.1)
    raise AssertionError("did not start")


def test_told_to_stop_all_processes_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = process_guard.start([sys.executable, "-c", FAMILY], os.environ, file)
    pids = family(log)
    process_guard.stop(process)
    assert gone(*pids)
    process_guard.stop(process)  # twice does no harm


def test_killed_itself_nothing_is_left(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        "import os, sys, time\nfrom simtune.validation.servers import process_guard as guard\n"
        f"with open({str(log)!r}, 'wb') as file:\n"
        f"    process = guard.start([sys.executable, '-c', {FAMILY!r}], os.environ, file)\n"
        "print(process.pid, flush=True)\ntime.sleep(600)"
    )
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        guarding = int(parent.stdout.readline())
        pids = family(log)
        parent.send_signal(signal.SIGKILL)
    assert gone(guarding, *pids)


def test_a_command_that_ends_takes_its_children_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = process_guard.start(
            [sys.executable, "-c", FAMILY.replace("time.sleep(600)\n", "", 1)], os.environ, file
        )
    pids = family(log)
    with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
        os.kill(pids[0], signal.SIGTERM)
    assert gone(*pids)
    process.wait()
    process_guard.stop(process)


# --- vllm serve, by a script that pretends ----------------------------------------------------------------

PLAN = Plan(
    name="one",
    model="llama-3.2-1b",
    pools=(Pool(hardware="h100-sxm", instances=1, batching=Batching(max_num_seqs=8, max_num_batched_tokens=512)),),
)
PRETENDS = """\
#!{python} -I
import json, os, sys
sys.path.insert(0, {root!r})
at = sys.argv.index
open({said!r}, "w").write(json.dumps([sys.argv[1:], open(sys.argv[at("--config") + 1]).read()]))
from tests.fake_server import FakeServer
if "--breaks" in sys.argv:
    sys.exit("no such kernel image")
with FakeServer(api_key=os.environ["VLLM_API_KEY"], port=int(sys.argv[at("--port") + 1])):
    import time
    time.sleep(600)
"""


@pytest.fixture
def pretending(tmp_path: Path) -> Path:
    root = str(Path(__file__).resolve().parents[2])
    script = tmp_path / "python"
    script.write_text(PRETENDS.format(python=sys.executable, root=root, said=str(tmp_path / "said")))
    script.chmod(0o755)
    (tmp_path / "config.json").write_text("{}")
    return script


def test_vllm_is_started_with_the_plans_settings_and_stopped(pretending: Path) -> None:
    import json

    folder = pretending.parent
    load = NamedLoad("light", stream(3))
    engine = VllmEngine(VllmCommand(str(pretending), folder, ("--dtype=float32",)), load_model("llama-3.2-1b"))
    try:
        first = engine.run(PLAN, load.stream, label="light")
        again = engine.run(PLAN, load.stream, label="light")
        (server,) = engine._servers
        guarding = server.pid
    finally:
        engine.close()
    assert not alive(guarding)
    assert [r.error for run in (first, again) for r in run.requests] == [None] * 6
    assert first.facts.engine.engine == "vllm"
    arguments, settings = json.loads((folder / "said").read_text())
    assert arguments[:4] == ["-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    assert {"--load-format", "dummy", "--skip-tokenizer-init", "--dtype=float32"} <= set(arguments)
    assert "max-num-seqs: 8" in settings
    assert not [word for word in arguments if "key" in word], "the key is told in the environment"


def test_vllm_that_ends_says_why(pretending: Path) -> None:
    engine = VllmEngine(VllmCommand(str(pretending), pretending.parent, ("--breaks",)), load_model("llama-3.2-1b"))
    with pytest.raises(
        EngineError, match=r"vLLM ended before it was ready; it said last:\n(?s:.*)no such kernel image"
    ):
        engine.run(PLAN, stream(3), label="light")
    engine.close()


def test_vllm_that_is_not_ready_in_time_is_ended(pretending: Path) -> None:
    command = VllmCommand(str(pretending), pretending.parent, start_s=0.0)
    engine = VllmEngine(command, load_model("llama-3.2-1b"))
    with pytest.raises(EngineError, match="vLLM was not ready after 0 s; it said last:"):
        engine.run(PLAN, stream(3), label="light")
    assert engine._servers == []
    engine.close()


def test_the_python_that_has_vllm_is_this_one_or_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="vLLM is not installed here; name the Python that has it: --vllm-python PATH"):
        vllm_python(None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert vllm_python(None) == sys.executable


def test_what_cannot_be_started_is_refused(tmp_path: Path, pretending: Path) -> None:
    model = load_model("llama-3.2-1b")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        VllmEngine(VllmCommand("python", tmp_path / "none"), model)
    with pytest.raises(UsageError, match="is no executable Python"):
        vllm_python(str(tmp_path))
    engine = VllmEngine(VllmCommand(str(pretending), pretending.parent), model)
    two = PLAN.model_copy(update={"pools": (PLAN.pools[0].model_copy(update={"instances": 2}),)})
    with pytest.raises(UsageError, match="has several instances"):
        engine.run(two, stream(3), label="light")
    engine.close()


def test_the_fake_server_listens_where_it_is_told() -> None:
    with FakeServer() as first:
        port = first.port
    with FakeServer(port=port) as second:
        assert second.url.endswith(f":{port}")


def test_what_windows_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sessions of processes, and a clock of processor time that is finer than a step."""
    from simtune.errors import SimtuneError
    from simtune.validation.servers import process_guard
    from simtune.validation.servers.engine_clocks import ProcessorClock

    monkeypatch.delattr("os.setsid")
    with (
        (tmp_path / "log").open("wb") as log,
        pytest.raises(SimtuneError, match="on Linux and macOS only; start the eng"),
    ):
        process_guard.start(["never"], {}, log)
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(UsageError, match=r"--clock cpu: Windows counts .* or give --clock wall"):
        ProcessorClock()
