"""OpenAI-compatible servers as engines: one that runs already, or a vLLM that is started with a plan's settings."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simtune.emit import ENGINES
from simtune.errors import EngineError, UsageError
from simtune.specs import yamlfile
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.validation.client.http_exchange import ServerAddress, ask
from simtune.validation.client.load_client import Patience, Traffic, send, served_model
from simtune.validation.client.measured_run import EngineFacts, MeasuredFacts, MeasuredRun
from simtune.validation.client.prometheus import engine_facts
from simtune.validation.client.prompts import Prompts, prompt_seed
from simtune.validation.client.real_clock import now, pause
from simtune.validation.loads import warm_up
from simtune.validation.servers import process_guard
from simtune.validation.servers.ports import free_ports, side_channel
from simtune.workload.requests import RequestStream

SERVED = (["mixed"], ["prefill", "decode"])
"""Roles of the pools that can be started here."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
LOG_LINES = 15
"""Number of the server's last log lines in the error if it does not start."""


class ServerEngine:
    """A server that runs already. It is not configured by the plan; its owner chose the settings."""

    def __init__(
        self,
        server: ServerAddress,
        model: Model,
        patience: Patience | None = None,
        name: str = "server",
        decode: ServerAddress | None = None,
    ) -> None:
        """`model` is the served model, for the vocabulary; `name` is the kind of server. With `decode` this server
        computes prompts, and the other one decodes."""
        self._server, self._model, self._name, self._decode = server, model, name, decode
        self._patience = patience or Patience()
        self._served: str | None = None

    def run(self, plan: Plan, stream: RequestStream, *, label: str, seed: int = 0) -> MeasuredRun:
        """See `Engine.run`."""
        if self._served is None:
            self._served = served_model(self._server)
            self._send(warm_up(stream), prompt_seed(seed, "warm-up"))
        traffic = self._send(stream, seed)
        facts = MeasuredFacts(
            label=label,
            engine=EngineFacts(engine=self._name, version=self._version(), model=self._model.name),
            lateness=traffic.lateness,
            **engine_facts(traffic.readings),
        )
        return MeasuredRun(facts, traffic.requests)

    def check(self, plan: Plan) -> None:
        """Accept any plan: the server is not configured by it."""

    def close(self) -> None:
        """Do nothing: the server is not stopped by simtune."""

    def _send(self, stream: RequestStream, seed: int) -> Traffic:
        assert self._served is not None
        prompts = Prompts(stream, self._model.vocab_size, seed)
        return send(self._server, self._served, stream, prompts, self._patience, self._decode)

    def _version(self) -> str | None:
        """Return the version that vLLM reports; None for servers that report none."""
        with contextlib.suppress(EngineError, ValueError, LookupError, TypeError):
            return str(json.loads(ask(self._server, "/version"))["version"])
        return None


@dataclass(frozen=True)
class VllmCommand:
    """Command and environment with which vLLM is started."""

    python: str
    """Python of the environment in which vLLM is installed."""
    weights: Path
    """Folder with config.json and weights; without weights vLLM uses random ones."""
    arguments: tuple[str, ...] = ()
    """Arguments in addition to the plan's settings, e.g. ("--dtype", "float32")."""
    environment: Mapping[str, str] | None = None
    """Variables in addition to the environment of this process."""
    start_s: float = 600.0
    """Seconds that it may take until it is healthy."""


class VllmServer:
    """A `vllm serve` on a free port of the loopback under a random key, for one pool of a plan.

    It ends with all its processes at `stop`, and when this process ends in whatever way
    (`simtune.validation.servers.process_guard`).
    """

    def __init__(self, command: VllmCommand, settings: str, folder: Path, name: str) -> None:
        """Start it. `settings` is the text of its configuration file, which is stored with its log in `folder`."""
        self._command, self._log = command, folder / f"{name}.log"
        path = folder / f"{name}.yaml"
        path.write_text(settings, encoding="utf-8")
        yamlfile.parse(settings, str(path))
        port, beside = free_ports(2)
        key = os.urandom(16).hex()
        self.address = ServerAddress(f"http://127.0.0.1:{port}", key)
        words = [command.python, "-m", "vllm.entrypoints.cli.main", "serve", str(command.weights.absolute())]
        words += ["--config", str(path), "--host", "127.0.0.1", "--port", str(port), *self._weights_arguments()]
        environment = {
            **os.environ,
            **(command.environment or {}),
            **ENVIRONMENT,
            **side_channel(beside),
            "VLLM_API_KEY": key,
        }
        # PYTHONPATH belongs to this environment, not to vLLM's.
        environment.pop("PYTHONPATH", None)
        with self._log.open("wb") as log:
            self._process = process_guard.start([*words, *command.arguments], environment, log)

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    def wait(self) -> None:
        """Wait until the server is healthy. Raise EngineError if it ends before, or is not healthy within `start_s`."""
        deadline = now() + self._command.start_s
        while now() < deadline:
            if self._process.poll() is not None:
                raise EngineError(f"vLLM ended before it was ready; it said last:\n{self._said()}")
            with contextlib.suppress(EngineError):
                ask(self.address, "/health", 5.0)
                return
            pause(0.25)
        raise EngineError(f"vLLM was not ready after {self._command.start_s:g} s; it said last:\n{self._said()}")

    def stop(self) -> None:
        """End the server with all its processes."""
        process_guard.stop(self._process)

    def _weights_arguments(self) -> Sequence[str]:
        folder = self._command.weights
        arguments = [] if any(folder.glob("*.safetensors")) else ["--load-format", "dummy"]
        tokenized = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
        return arguments if tokenized else [*arguments, "--skip-tokenizer-init"]

    def _said(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:]) or "(nothing)"


class VllmEngine:
    """`vllm serve` with the settings that are emitted for a plan.

    One instance of a plan with one pool, or one of a prefill and one of a decode pool, between which vLLM's connector
    sends KV caches; started at the first run of a plan and stopped at `close`, and at another plan.
    """

    def __init__(
        self,
        command: VllmCommand,
        model: Model,
        patience: Patience | None = None,
        draft_models: Mapping[str, Model] | None = None,
    ) -> None:
        """`draft_models` are by the names in plans. Raise UsageError if the folder has no model to serve."""
        if not (command.weights / "config.json").is_file():
            raise UsageError(f"{command.weights}: has no config.json; `simtune weights MODEL --out DIR` makes a folder")
        self._command, self._model, self._patience = command, model, patience
        self._draft_models = dict(draft_models or {})
        self._plan: Plan | None = None
        self._servers: list[VllmServer] = []
        self._inner: ServerEngine | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="simtune-vllm-")

    def run(self, plan: Plan, stream: RequestStream, *, label: str, seed: int = 0) -> MeasuredRun:
        """See `Engine.run`. Raise EngineError if vLLM does not start or has ended, with the last lines of its log."""
        if plan != self._plan:
            self._stop()
            self._inner, self._plan = self._started(plan), plan
        assert self._inner is not None
        return self._inner.run(plan, stream, label=label, seed=seed)

    def check(self, plan: Plan) -> None:
        """See `Engine.check`."""
        self._settings(plan)

    def close(self) -> None:
        """Stop the servers and all their processes."""
        self._stop()
        self._folder.cleanup()

    def _started(self, plan: Plan) -> ServerEngine:
        settings = self._settings(plan)
        for name, text in settings.items():
            self._servers.append(VllmServer(self._command, text, Path(self._folder.name), name))
        try:
            for server in self._servers:
                server.wait()
        except EngineError:
            self._stop()
            raise
        first, *decode = (server.address for server in self._servers)
        return ServerEngine(first, self._model, self._patience, "vllm", *decode)

    def _settings(self, plan: Plan) -> dict[str, str]:
        """Return the texts of the servers' configuration files, by pool, in the order of a request's path.

        Raise UsageError for plans of several instances, and for settings that vLLM does not have.
        """
        pools = sorted(plan.pools, key=lambda pool: pool.role != "prefill")
        if any(pool.instances != 1 for pool in pools) or [p.role for p in pools] not in SERVED:
            raise UsageError(
                f"plan {plan.name}: has several instances of a kind; start them behind a router and give its address "
                "as --engine"
            )
        files = ENGINES["vllm"].files(plan, self._model, plan.num_devices, self._draft_models)
        return {pool.name: files[f"engine/vllm-{pool.name}.yaml"] for pool in pools}

    def _stop(self) -> None:
        for server in self._servers:
            server.stop()
        self._servers, self._plan, self._inner = [], None, None


def vllm_python(given: str | None) -> str:
    """Return the Python that has vLLM: `given`, the environment variable VLLM_PYTHON, or this one.

    Raise UsageError if there is none.
    """
    path = given or os.environ.get("VLLM_PYTHON")
    if path is None:
        from importlib.util import find_spec

        if find_spec("vllm") is None:
            raise UsageError("vLLM is not installed here; name the Python that has it: --vllm-python PATH")
        return sys.executable
    if not os.access(path, os.X_OK) or os.path.isdir(path):
        raise UsageError(f"--vllm-python {path}: is no executable Python")
    return path
