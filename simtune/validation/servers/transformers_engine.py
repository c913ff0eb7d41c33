"""transformers' continuous batching in this process, with a folder of weights and the scheduler of a plan.

Its manager works in a thread of its own, which sleeps and wakes by the wall clock. Here the same three calls of a step
(prepare, generate, update) are made one after the other, so that either clock can time them; everything between two
tokens, scheduling and sampling included, is the engine's. Written for release 5.23, whose parts of these names are not
public.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simtune.costs.calibration import TimedStep
from simtune.costs.iteration import StepWork
from simtune.costs.ticks import TICKS_PER_SECOND, to_ticks
from simtune.errors import EngineError, UsageError
from simtune.sim.agenda import NEVER, Agenda
from simtune.sim.deployment import Deployment
from simtune.sim.source import RequestSource
from simtune.specs.plan import Plan
from simtune.validation.client.measured_run import Clock, EngineFacts, MeasuredFacts, MeasuredRun
from simtune.validation.client.prompts import Prompts
from simtune.validation.loads import warm_up
from simtune.validation.servers.engine_clocks import CLOCKS, EngineClock, processor_s
from simtune.validation.servers.in_process import TokenTimes, check_clock, queue_samples, redeployed, version_of
from simtune.validation.servers.server import SYNCHRONOUS_ONLY
from simtune.workload.requests import RequestStream

INSTALL = "the transformers engine needs transformers and torch, which are missing: pip install transformers torch"
SCHEDULERS = {"transformers-fifo": "fifo", "transformers-prefill-first": "prefill_first"}
"""transformers' names of the policies that it has."""


def check_plan(deployment: Deployment) -> None:
    """Raise UsageError if the plan has settings that one synchronous instance does not support."""
    pool = deployment.pools[0].spec
    wrong = {
        "several pools or instances": deployment.num_cores > 1 or deployment.plan.pools[0].devices > 1,
        "speculation": pool.speculation is not None,
        "weight_dtype": pool.weight_dtype is not None,
        SYNCHRONOUS_ONLY: pool.schedules_async,
        f"batching.policy {pool.batching.policy} (name {' or '.join(SCHEDULERS)})": (
            pool.batching.policy not in SCHEDULERS
        ),
    }
    has = [name for name, present in wrong.items() if present]
    if has:
        raise UsageError(f"plan {deployment.plan.name}: the transformers engine has no {', '.join(has)}")


def check_installed() -> None:
    """Raise UsageError if transformers or torch is not installed."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise UsageError(INSTALL)


class TransformersEngine:
    """See `simtune.validation.servers.server.Engine`. Every run begins with an empty cache."""

    def __init__(
        self,
        deployment: Deployment,
        weights: Path,
        *,
        device: str = "cpu",
        clock: Clock = "cpu",
        clocks: Mapping[str, Callable[[], EngineClock]] = CLOCKS,
    ) -> None:
        """`weights` is the folder of the served model.

        Raise UsageError for a plan that `check_plan` refuses, for a folder without weights, and if transformers is not
        installed.
        """
        check_plan(deployment)
        check_clock(device, clock)
        check_installed()
        if not (weights / "config.json").is_file():
            raise UsageError(f"{weights}: has no config.json; `simtune weights MODEL --out DIR` makes a folder")
        self._deployment, self._weights, self._device = deployment, weights, device
        self._clock, self._make_clock = clock, clocks[clock]
        self._model: Any = None

    def run(self, plan: Plan, stream: RequestStream, *, label: str, seed: int = 0) -> MeasuredRun:
        """See `Engine.run`. Raise EngineError if transformers gives up."""
        deployment = redeployed(plan, self._deployment)
        check_plan(deployment)
        if self._model is None:
            self._model = load(self._weights, self._device)
            self._session(deployment, warm_up(stream), seed).run()
        session = self._session(deployment, stream, seed)
        times, arrival = session.run()
        facts = MeasuredFacts(
            label=label,
            engine=EngineFacts(
                engine="transformers",
                version=version_of("transformers"),
                model=deployment.model.name,
                device=self._device,
            ),
            clock=self._clock,
            queues=queue_samples(session.queues),
        )
        return times.measured(stream, arrival, facts)

    def check(self, plan: Plan) -> None:
        """See `Engine.check`."""
        check_plan(redeployed(plan, self._deployment))

    def close(self) -> None:
        """Release the weights."""
        self._model = None

    def _session(self, deployment: Deployment, stream: RequestStream, seed: int) -> Session:
        prompts = Prompts(stream, self._deployment.model.vocab_size, seed)
        return Session(manager_of(self._model, deployment), deployment, stream, prompts, self._make_clock())


def load(weights: Path, device: str) -> Any:
    """Return the model in a folder, on one thread. Raise UsageError if it cannot be loaded."""
    import torch
    from transformers import AutoModelForCausalLM

    # Threads that wait for shared cores only spin.
    torch.set_num_threads(1)
    try:
        return AutoModelForCausalLM.from_pretrained(weights, dtype="auto", local_files_only=True).to(device).eval()
    except (OSError, ValueError) as error:
        raise UsageError(f"{weights}: transformers cannot load it: {error}") from None


def manager_of(model: Any, deployment: Deployment) -> Any:
    """Return a manager with the plan's settings by transformers' own names, not started."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pool = deployment.pools[0]
    spec, batching = pool.spec, pool.spec.batching
    config = ContinuousBatchingConfig(
        page_size=spec.kv_cache.block_size,
        num_blocks=pool.memory.num_blocks,
        max_batch_tokens=batching.max_num_batched_tokens,
        max_requests_per_batch=batching.max_num_seqs,
        allow_block_sharing=spec.kv_cache.prefix_caching,
        scheduler_type=SCHEDULERS[str(batching.policy)],
        safety_margin=batching.safety_margin,
        use_async_batching=False,
        use_cuda_graph=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    return model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)


class Session:
    """A stream of requests through one manager, step by step."""

    def __init__(
        self,
        manager: Any,
        deployment: Deployment,
        stream: RequestStream,
        prompts: Prompts,
        clock: EngineClock,
        *,
        seconds: Callable[[], float] = processor_s,
        stepped: Callable[[], None] = lambda: None,
    ) -> None:
        """The manager is used up by the session. `seconds` times steps, and `stepped` is called after each."""
        self._manager = manager
        self._processor = manager.batch_processor = manager._create_batch_processor()
        self._agenda = Agenda()
        self._source = RequestSource(stream, self._agenda)
        self._texts = [prompts[number] for number in range(len(stream))]
        self._clock, self._max_model_len = clock, deployment.max_model_len
        self._seconds, self._stepped = seconds, stepped
        self._times = TokenTimes(len(stream))
        self.steps: list[TimedStep] = []
        self.queues: list[tuple[float, int, int]] = []

    def run(self) -> tuple[TokenTimes, list[int]]:
        """Return the times of tokens, and the tick at which each request arrived. Raise EngineError if transformers
        gives up."""
        self._source.begin()
        try:
            while True:
                slow = self._clock.gauge(0)
                self._arrive(to_ticks(self._clock.now()))
                if not self._step(slow):
                    self._note_queues(self._clock.now())
                    upcoming = self._agenda.heap[0]
                    if upcoming == NEVER:
                        return self._times, list(self._source.arrival)
                    self._clock.wait_until(upcoming[0] / TICKS_PER_SECOND)
        except RuntimeError as error:
            raise EngineError(f"transformers gave up: {error}") from error
        finally:
            self._manager.destroy()

    def _arrive(self, now: int) -> None:
        heap = self._agenda.heap
        while heap[0][0] <= now:
            at, _, number, _ = heappop(heap)
            request = self._source.arrive(number)
            if request.prompt_tokens + request.output_tokens > self._max_model_len:
                self._source.answered(at)
                continue
            self._manager.add_request(
                self._texts[number], request_id=str(number), max_new_tokens=request.output_tokens, streaming=True
            )

    def _note_queues(self, at_s: float) -> None:
        scheduler = self._processor.scheduler
        self.queues.append((at_s, len(scheduler.active_requests), len(scheduler.waiting_requests)))

    def _step(self, slow: float) -> bool:
        """Run one step. Return False if there is nothing to do."""
        begin, at_s = self._seconds(), self._clock.now()
        if not self._processor.prepare_next_batch():
            return False
        self._note_queues(at_s)
        work = _work(self._processor.inputs_and_outputs.requests_in_batch)
        self._manager._generation_step()
        self._processor.update_batch()
        self._stepped()
        now, came = self._clock.now(), self._manager.output_router.output_queue
        while not came.empty():
            output = came.get()
            if output.error is not None:
                raise RuntimeError(output.error)
            self._times.came(int(output.request_id), now)
            if output.is_finished():
                self._source.answered(to_ticks(now))
        self.steps.append(TimedStep(work, (self._seconds() - begin) / slow))
        return True


def _work(batch: Sequence[Any]) -> StepWork:
    """Return the work of a step; the position of a request has already advanced by the step."""
    decodes, chunks = [], []
    for scheduled in batch:
        new = scheduled.query_length
        past = scheduled.state.position_offset - new
        if past >= len(scheduled.state.initial_tokens):
            decodes.append(past + 1)
        else:
            chunks.append((past, new))
    sampled = sum(bool(scheduled.has_new_token) for scheduled in batch)
    return StepWork(len(decodes), sum(decodes), tuple(chunks), sampled, max(decodes, default=0))
