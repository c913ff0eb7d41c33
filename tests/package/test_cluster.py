"""A Dask cluster does the work of processes: the same bytes, whoever is lost, and clear words where there is none."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simtune.cli import main
from simtune.cli.optimize import _workers
from simtune.errors import UsageError
from simtune.sim.parallel import DaskCluster, connected, executor, ordered_map

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

STUDY = """\
schema: simtune/study@1
name: tiny
model: llama-3.1-8b
hardware: {profile: h100-sxm, devices: 2}
workload: chat
slo: {ttft_s: {p99: 1.0}, tpot_s: {p99: 0.030}}
search: {tp: [1, 2], pp: [1], max_num_seqs: [64], max_num_batched_tokens: [2048], requests: 100, confirm: {draws: 0}}
"""


def dask() -> Any:
    return pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def two() -> Iterator[DaskCluster]:
    dask()
    with connected("local:2") as cluster:
        yield cluster


def square(number: int) -> int:
    return number * number


def refuse(number: int) -> int:
    if number == 2:
        raise UsageError("two is refused")
    return number


def die_once(task: tuple[int, str]) -> int:
    """The worker that first gets the third task is killed in it."""
    number, mark = task
    if number == 3 and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def die(task: tuple[int, int]) -> int:
    number, parent = task
    if number == 1 and os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_results_come_in_order(two: DaskCluster) -> None:
    with executor(two, 8) as pool:
        assert [*ordered_map(pool, square, range(20))] == [n * n for n in range(20)]
        assert pool is not None
        assert pool.submit(square, 7).result(20) == 49


def test_an_error_of_a_task_comes_back_as_itself(two: DaskCluster) -> None:
    with executor(two, 8) as pool, pytest.raises(UsageError, match="two is refused"):
        list(ordered_map(pool, refuse, range(4)))


def test_only_loopback_listens(two: DaskCluster) -> None:
    import psutil

    here = psutil.Process()
    listening = [
        connection.laddr.ip
        for process in (here, *here.children(recursive=True))
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert set(listening) == {"127.0.0.1"}


def test_a_lost_worker_costs_only_its_tasks(
    two: DaskCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with executor(two, 8) as pool:
        tasks = [(n, str(tmp_path / "killed")) for n in range(8)]
        assert [*ordered_map(pool, die_once, tasks)] == [n * n for n in range(8)]
    assert (tmp_path / "killed").exists()
    assert "going on with one process" not in capfd.readouterr().err


def test_what_kills_every_worker_is_done_here(capfd: pytest.CaptureFixture[str]) -> None:
    dask()
    with connected("local:1") as one, executor(one, 4) as pool:
        assert [*ordered_map(pool, die, [(n, os.getpid()) for n in range(3)])] == [0, 1, 4]
    assert "killed by one task, probably out of memory; going on with one process" in capfd.readouterr().err


def run(folder: Path, *more: str) -> dict[str, bytes]:
    """The files of a search, but the manifest, which tells the time."""
    (folder / "study.yaml").write_text(STUDY)
    with pytest.raises(SystemExit) as ended:
        main(["optimize", str(folder / "study.yaml"), "--out", str(folder / "run"), "--quiet", *more])
    assert ended.value.code == 0
    out = folder / "run"
    return {
        str(f.relative_to(out)): f.read_bytes() for f in out.rglob("*") if f.is_file() and f.name != "manifest.json"
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return run(tmp_path_factory.mktemp("alone"), "--jobs", "1")


def test_the_same_bytes_as_processes(alone: dict[str, bytes], tmp_path: Path) -> None:
    dask()
    assert run(tmp_path, "--cluster", "local:2") == alone


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A cluster of somebody else's: a scheduler and two workers, processes of their own."""
    dask()
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def start(*args: str) -> subprocess.Popen[bytes]:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [sys.executable, "-m", *args, "--no-dashboard"]
        return subprocess.Popen(command, env=env, cwd=tmp_path, **quiet)  # type: ignore[call-overload, no-any-return]

    port = address.rpartition(":")[2]
    processes = [start("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", port)]
    for _ in range(2):
        processes.append(
            start("distributed.cli.dask_worker", address, "--no-nanny", "--nthreads", "1", "--host", "127.0.0.1")
        )
    try:
        with dask().Client(address, timeout=30) as client:
            client.wait_for_workers(2, timeout=60)
        yield address, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_worker_killed_in_the_middle(
    alone: dict[str, bytes], scheduler: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    """Killed as soon as it works: finished by the other, to the same bytes."""
    address, processes = scheduler
    victim = processes[-1]
    watcher = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(1.5); os.kill({victim.pid}, 9)"])
    assert run(tmp_path, "--cluster", address) == alone
    watcher.wait()
    assert victim.wait(10) == -9


def test_an_address_that_does_not_answer() -> None:
    dask()
    for where, why in (
        ("tcp://127.0.0.1:9", r"no Dask scheduler answers there within 0\.3 s"),
        ("nonsense://x:1", "no Dask scheduler answers there"),
        ("local:none", "write local:N"),
    ):
        with pytest.raises(UsageError, match=why), connected(where, 0.3):
            pass


def test_it_goes_on_alone_only_if_asked(alone: dict[str, bytes], tmp_path: Path, capsys: Any) -> None:
    dask()
    (tmp_path / "study.yaml").write_text(STUDY)
    command = ["optimize", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "run"), "--jobs", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--cluster", "local:0"])
    assert ended.value.code == 2
    assert "write local:N" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert run(tmp_path, "--jobs", "1", "--cluster", "local:0", "--cluster-fallback") == alone
    assert "going on without it" in capsys.readouterr().err


def test_workers_with_another_release_are_refused(monkeypatch: pytest.MonkeyPatch, two: DaskCluster) -> None:
    from simtune.sim import parallel

    monkeypatch.setattr(parallel, "__version__", "0.0.9")
    with pytest.raises(UsageError, match=r"has simtune [0-9.]+, and this is 0\.0\.9"):
        parallel._check_workers(two._client, "tcp://somewhere:1", 5.0)


@pytest.mark.skipif(importlib.util.find_spec("distributed") is not None, reason="Dask is installed")
def test_without_dask_it_is_named() -> None:
    with pytest.raises(UsageError, match=r"pip install 'simtune\[cluster\]'"), connected("local:2"):
        pass


def test_without_a_cluster_it_is_said_or_gone_on_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether Dask is not installed or the cluster is none."""
    with pytest.raises(UsageError, match="--cluster local:0: "), _workers("local:0", False, 3):
        pass
    with _workers("local:0", True, 3) as workers:
        assert workers == 3
    assert capsys.readouterr().err.startswith("note: --cluster local:0: ")
    with _workers(None, False, 2) as workers:
        assert workers == 2
