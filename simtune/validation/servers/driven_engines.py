"""Engines that are driven step by step to measure whole steps: in process, or in another interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from simtune.costs.calibration import TimedStep
from simtune.costs.iteration import StepWork
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.errors import SimtuneError, UsageError
from simtune.sim.deployment import NO_HARDWARE, Deployment, deploy
from simtune.sim.plan_parts import OwnCosts
from simtune.specs.model import DenseFeedForward, FullAttention, Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Policy, Pool
from simtune.validation.client.prompts import Prompts
from simtune.validation.servers import torch_engine, transformers_engine
from simtune.validation.servers.engine_clocks import EngineClock, ProcessorClock, WallClock, processor_s, wall_s
from simtune.validation.servers.executed_scheduler import EngineLoop, Executor, TokenShare
from simtune.validation.servers.in_process import version_of
from simtune.validation.servers.ports import free_ports, side_channel
from simtune.validation.servers.random_weights import write_weights
from simtune.workload.requests import RequestStream

DriverClock = Literal["steps", "cpu", "wall"]


class EngineSize(NamedTuple):
    """Settings that bound an engine's steps."""

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    max_model_len: int = 1024
    block_size: int = 16


class DrivenRequest(NamedTuple):
    """A request of a session: its arrival, by the session's clock, and its lengths."""

    at: float
    prompt_tokens: int
    output_tokens: int
    prompt: tuple[int, ...] = ()
    """Token ids of the prompt; drawn if empty."""
    kv: Mapping[str, Any] | None = None
    """Parameters of its KV cache (`kv_transfer_params`), if another engine computes or fetches it."""


class DrivenTimes(NamedTuple):
    """Times of a request, by the same clock."""

    sent: float
    first_token: float
    finish: float
    times: tuple[float, ...] = ()
    """Times of all its tokens, if the engine reports them; tokens that arrive together have one time."""
    kept: Mapping[str, Any] | None = None
    """Parameters of the KV cache that the engine keeps for another one."""


class Verified(NamedTuple):
    """Results of drafting."""

    rounds: int
    """Verifications of one request."""
    draft_tokens: int
    accepted_tokens: int
    delivered_tokens: int
    """Tokens delivered by these verifications; the last of an output may be cut at its length."""


class Driven(NamedTuple):
    """A session that was run."""

    steps: list[TimedStep]
    requests: list[DrivenTimes]
    drafts: Verified | None = None
    """None if nothing drafts."""
    hit_tokens: int = 0
    """Prompt tokens that were in the prefix cache."""
    preemptions: int = 0
    queues: Sequence[tuple[float, float, float]] = ()
    """(time, running, waiting) by the session's clock, if the engine reports them."""


class StepDriver(Protocol):
    """An engine that runs sessions."""

    size: EngineSize

    def facts(self) -> dict[str, Any]:
        """Return facts about the engine.

        These are engine, version, device, reference_s of its gauge, num_blocks of its KV cache, and, if it drafts,
        draft_tokens that it verifies at once.
        """
        ...

    def run(self, requests: Sequence[DrivenRequest], clock: DriverClock = "steps", seed: int = 0) -> Driven:
        """Run one session, from an empty engine to an empty engine.

        By the clock `steps` a request arrives after the number of steps in `at`. Times of steps are processor time
        divided by its slowness, or wall time with the clock `wall`.
        """
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...


def driver(engine: str, model: Model, size: EngineSize, **options: Any) -> StepDriver:
    """Return the driver of an engine by its name. Raise UsageError for an unknown engine, or if it is not installed."""
    if engine not in DRIVERS:
        raise UsageError(f"engine {engine}: only {', '.join(DRIVERS)} can be driven step by step")
    step_driver: StepDriver = DRIVERS[engine](model, size, **options)
    return step_driver


# --- in process -------------------------------------------------------------------------------------------


class StepClock:
    """Clock that counts steps."""

    def __init__(self, slowness: EngineClock) -> None:
        self._slowness, self._at = slowness, 0.0

    def stepped(self) -> None:
        """Count a step."""
        self._at += 1

    def now(self) -> float:
        """Return the steps run, and those waited for."""
        return self._at

    def wait_until(self, at_s: float) -> None:
        """Skip to a step."""
        self._at = max(self._at, at_s)

    def gauge(self, tokens: int) -> float:
        """See `EngineClock`."""
        return self._slowness.gauge(tokens)


class CountedExecutor:
    """An executor whose steps a clock counts."""

    def __init__(self, executor: Executor, clock: StepClock) -> None:
        self._executor, self._clock = executor, clock

    def run(self, shares: Sequence[TokenShare]) -> None:
        """Run the executor, and count the step."""
        self._executor.run(shares)
        self._clock.stepped()

    def release(self, request: Any) -> None:
        """Release the request in the executor."""
        self._executor.release(request)


class TorchDriver:
    """Driver of the torch engine."""

    def __init__(
        self, model: Model, size: EngineSize, *, device: str = "cpu", reference_s: float | None = None, **options: Any
    ) -> None:
        """`options` are those of `CachedDecoder`; `reference_s` is that of an earlier run's gauge."""
        self.size = size
        self._deployment = deployment_of(model, size)
        self._executor = torch_engine.executor(self._deployment, device, **options)
        import simtune.validation.servers.gauge as gauge

        self._gauge = gauge.Gauge(reference_s)

    def facts(self) -> dict[str, Any]:
        """See `StepDriver`."""
        blocks = self._deployment.pools[0].memory.num_blocks
        return {"engine": "torch", "reference_s": self._gauge.reference_s, "num_blocks": blocks}

    def run(self, requests: Sequence[DrivenRequest], clock: DriverClock = "steps", seed: int = 0) -> Driven:
        """See `StepDriver`. Token ids are drawn from the numbers of requests alone."""
        stream = stream_of(requests)
        core, executor = self._deployment.pools[0].cores(1, None)[0], self._executor
        steady = ProcessorClock(self._gauge)
        ticking: EngineClock = WallClock() if clock == "wall" else steady
        if clock == "steps":
            ticking = counting = StepClock(steady)
            executor = CountedExecutor(executor, counting)
        served = EngineLoop(core.scheduler, executor, ticking, stream).run()
        o, ticks = served.outcome, float(1 << 40)
        columns = np.stack([o.arrival, o.first_token, o.finish], axis=-1) / ticks
        steps = [step.timed("wall" if clock == "wall" else "cpu") for step in served.steps]
        return Driven(steps, [DrivenTimes(*row) for row in columns.tolist()])

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def deployment_of(model: Model, size: EngineSize, policy: Policy = "vllm-fcfs") -> Deployment:
    """Return one instance with a policy's batching and room for the longest request on every seat."""
    blocks = 1 + size.max_num_seqs * -(-size.max_model_len // size.block_size)
    pool = Pool(
        hardware=NO_HARDWARE.name,
        instances=1,
        batching=Batching(
            policy=policy, max_num_seqs=size.max_num_seqs, max_num_batched_tokens=size.max_num_batched_tokens
        ),
        kv_cache=KvCache(num_blocks=blocks, block_size=size.block_size),
        max_model_len=size.max_model_len,
        async_scheduling=False,
        cuda_graphs=False,
    )
    return deploy(Plan(name="driven", model=model.name, pools=(pool,)), model, NO_HARDWARE, OwnCosts(_no_time))


def _no_time(num_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
    return 1e-6


def stream_of(requests: Sequence[DrivenRequest]) -> RequestStream:
    """Return the requests of a session as a stream of a simulation, in order of arrival."""
    zero = np.zeros(len(requests), dtype=np.int64)
    return RequestStream(
        arrival_s=np.array([r.at for r in requests], dtype=np.float64),
        prompt_tokens=np.array([r.prompt_tokens for r in requests], dtype=np.int64),
        output_tokens=np.array([r.output_tokens for r in requests], dtype=np.int64),
        class_index=zero,
        priority=zero,
        class_names=("default",),
        slos=(None,),
    )


def requests_of(stream: RequestStream, prompts: Prompts | None = None) -> list[DrivenRequest]:
    """Return the requests of an open-loop stream, with their prompts if given. Raise UsageError for a closed loop."""
    if stream.arrival_s is None:
        raise UsageError("an engine in process is fed by arrival times; give the workload arrivals of a rate")
    columns = (stream.arrival_s.tolist(), stream.prompt_tokens.tolist(), stream.output_tokens.tolist())
    return [
        DrivenRequest(*row, () if prompts is None else tuple(prompts[i]))
        for i, row in enumerate(zip(*columns, strict=True))
    ]


class TransformersDriver:
    """Driver of transformers' continuous batching, with random weights of the model."""

    def __init__(
        self,
        model: Model,
        size: EngineSize,
        *,
        device: str = "cpu",
        reference_s: float | None = None,
        policy: Policy = "transformers-fifo",
    ) -> None:
        """`reference_s` is that of an earlier run's gauge.

        Raise UsageError if transformers is not installed, or if no weights can be made for the model.
        """
        transformers_engine.check_installed()
        self.size, self._vocab = size, model.vocab_size
        self._deployment = deployment_of(model, size, policy)
        with tempfile.TemporaryDirectory(prefix="simtune-weights-") as folder:
            self._model = transformers_engine.load(write_weights(model, Path(folder) / "weights"), device)
        import simtune.validation.servers.gauge as gauge

        self._gauge = gauge.Gauge(reference_s)

    def facts(self) -> dict[str, Any]:
        """See `StepDriver`."""
        return {
            "engine": "transformers",
            "version": version_of("transformers"),
            "reference_s": self._gauge.reference_s,
            "num_blocks": self._deployment.pools[0].memory.num_blocks,
        }

    def run(self, requests: Sequence[DrivenRequest], clock: DriverClock = "steps", seed: int = 0) -> Driven:
        """See `StepDriver`."""
        stream, steady = stream_of(requests), ProcessorClock(self._gauge)
        counting = StepClock(steady)
        clocks: dict[DriverClock, EngineClock] = {"steps": counting, "cpu": steady, "wall": WallClock()}
        session = transformers_engine.Session(
            transformers_engine.manager_of(self._model, self._deployment),
            self._deployment,
            stream,
            Prompts(stream, self._vocab, seed),
            clocks[clock],
            seconds=wall_s if clock == "wall" else processor_s,
            stepped=counting.stepped,
        )
        times, arrival = session.run()
        first_and_last = times.first_and_last()
        driven = [DrivenTimes(at / TICKS_PER_SECOND, *ends) for at, ends in zip(arrival, first_and_last, strict=True)]
        return Driven(session.steps, driven)

    def close(self) -> None:
        """Release the weights."""
        self._model = None


# --- in another interpreter -------------------------------------------------------------------------------

BLOCK_OF = 32
"""Granularity of vLLM 0.32's block size on processors, in tokens: sizes are rounded up to a multiple."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class VllmDriver:
    """Driver of vLLM in an interpreter of its own, which runs `simtune.validation.servers.vllm_steps`."""

    def __init__(
        self,
        model: Model,
        size: EngineSize,
        *,
        python: str,
        device: str = "cpu",
        reference_s: float | None = None,
        arguments: Mapping[str, Any] | None = None,
        weights: Path | None = None,
    ) -> None:
        """`python` is the interpreter that has vLLM, `arguments` are further ones of its EngineArgs, `weights` is the
        folder to load; without it weights are random. Raise UsageError if it cannot be started, and SimtuneError if it
        ends early.
        """
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="simtune-vllm-")
        if weights is None:
            (Path(self._folder.name) / "config.json").write_text(json.dumps(llama_config(model)), encoding="utf-8")
        engine = {
            "dtype": _DTYPES[model.dtype],
            "max_model_len": size.max_model_len,
            "max_num_seqs": size.max_num_seqs,
            "max_num_batched_tokens": size.max_num_batched_tokens,
            "enable_prefix_caching": False,
            "block_size": -(-size.block_size // BLOCK_OF) * BLOCK_OF if device == "cpu" else size.block_size,
            **({} if weights is None else {"load_format": "auto"}),
            **(arguments or {}),
        }
        folder = self._folder.name if weights is None else str(weights.absolute())
        settings = {"model": folder, "vocab": model.vocab_size, "engine": engine, "reference_s": reference_s}
        script = Path(__file__).with_name("vllm_steps.py")
        self._log = (Path(self._folder.name) / "log").open("w+", encoding="utf-8")
        try:
            self._process = subprocess.Popen(
                [python, "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, **side_channel(*free_ports(1))},
            )
        except OSError as error:
            self._log.close()
            self._folder.cleanup()
            raise UsageError(f"{python}: cannot be started ({error.strerror}); name an interpreter with vLLM") from None
        self._facts = self._ask(settings)
        speculative = (arguments or {}).get("speculative_config")
        self._drafts = {} if speculative is None else {"draft_tokens": int(speculative["num_speculative_tokens"])}

    def facts(self) -> dict[str, Any]:
        """See `StepDriver`."""
        return {"engine": "vllm", **self._facts, **self._drafts}

    def run(self, requests: Sequence[DrivenRequest], clock: DriverClock = "steps", seed: int = 0) -> Driven:
        """See `StepDriver`. Raise SimtuneError if the engine ends."""
        answer = self._ask({"clock": clock, "seed": seed, "requests": requests})
        seconds = "wall_s" if clock == "wall" else "cpu_s"
        steps = [TimedStep(_work(step), step[seconds]) for step in answer["steps"]]
        drafts = Verified(*answer["drafts"])
        times = [DrivenTimes(sent, first, last, tuple(all_), kv) for sent, first, last, all_, kv in answer["requests"]]
        counts = answer["found"], answer["preemptions"], [tuple(row) for row in answer["queues"]]
        return Driven(steps, times, drafts if drafts.rounds else None, *counts)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # The missing answer below leads to the error with the engine's last line.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            last = self._log.read().strip().splitlines()[-1:] or ["no word"]
            self.close()
            raise SimtuneError(f"vllm: the engine has ended: {last[0]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the engine's process."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()


DRIVERS: dict[str, Any] = {"torch": TorchDriver, "transformers": TransformersDriver, "vllm": VllmDriver}


def _work(step: Mapping[str, Any]) -> StepWork:
    chunks = tuple((past, new) for past, new in step["chunks"])
    decodes, drafts = step["decodes"], step["draft_tokens"]
    return StepWork(decodes, step["context_tokens"], chunks, decodes + len(chunks), draft_tokens=drafts)


def llama_config(model: Model) -> dict[str, Any]:
    """Return the config.json of a model of plain layers, as engines read it. Raise UsageError for other models."""
    group = model.layers[0]
    attention, feed_forward = group.attention, group.feed_forward
    softmax = isinstance(attention, FullAttention) and attention.like_llama and model.residual is None
    plain = softmax and isinstance(feed_forward, DenseFeedForward) and len(model.layers) == 1
    if not plain:
        raise UsageError(
            f"{model.name}: only models of equal layers of full attention and dense feed-forward are made up"
        )
    assert isinstance(attention, FullAttention)
    assert isinstance(feed_forward, DenseFeedForward)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": feed_forward.intermediate_size,
        "num_hidden_layers": group.count,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": _DTYPES[model.dtype],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
