"""Kernels of a GPU, measured by `simtune profile`, against the torch engine on it at three loads, graphs on and off.

    python -m benchmarks.validation.torch_gpu --out runs/gpu

Llama-3.1-8B with random weights is profiled; nothing of the engine is fitted. What the host takes to launch the kernels
of a layer is measured on the engine's decoder, without a request. The three loads are then served for real, by the wall
clock. Printed and written to DIR/served.json: predicted and measured means, the repeat noise, and every step.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.validation.loads import METRICS, at_once, errors, three_loads
from simtune.profiling.timing import now
from simtune.results.result import Result
from simtune.sim.deployment import Deployment, deploy
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Hardware
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.specs.research import Research, Runtime
from simtune.validation.servers import torch_engine as engine
from simtune.validation.servers.engine_clocks import WallClock
from simtune.validation.servers.executed_scheduler import MeasuredStep

MODEL = "llama-3.1-8b"
SEATS, MAX_TOKENS, MAX_MODEL_LEN = 32, 512, 2048
PROMPT, OUTPUT = (64, 1024), (32, 192)


def profile(model: Model, out: Path, budget_s: float) -> dict[str, Any]:
    """Measure and fit as `simtune profile --device cuda` does, with the engine's attention; return the summary."""
    from simtune.cli.profile import _write
    from simtune.profiling import run
    from simtune.profiling.rig import TorchRig

    class Rig(TorchRig):
        def prepare(self, chosen: Mapping[str, str] | None = None) -> dict[str, str]:
            kernels = {"decode_attention": "varlen", "prefill_attention": "sdpa.flash"}
            return super().prepare(
                {f"{kind}.{model.dtype}": name for kind, name in kernels.items()} | dict(chosen or {})
            )

    profiled = run.profile(Rig("cuda", [model]), [model], out, budget_s=budget_s, note=print)
    _write(out, profiled)
    return profiled.summary


def launches(model: Model) -> tuple[int, float]:
    """Return the kernels of a layer of the engine's decoder, and the host's seconds to launch each.

    They are the difference between six layers and two, in a step of eight decodes that serves no request.
    """
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    from simtune.validation.servers.cached_decoder import CachedDecoder, _TokenSpan

    ids, positions, rows = torch.arange(8), torch.full((8,), 500), range(8)
    spans = [_TokenSpan(row, row, 500, 1) for row in rows]
    kernels, seconds = [], []
    for layers in (2, 6):
        few = model.model_copy(update={"layers": (model.layers[0].model_copy(update={"count": layers}),)})
        decoder = CachedDecoder(few, seats=8, max_model_len=1024, device="cuda")

        def call(decoder: CachedDecoder = decoder) -> None:
            decoder._forward(ids, positions, spans, [True] * 8)

        begin = now()
        while now() - begin < 2:
            call()  # first calls choose kernels and load them, and clocks rise
        torch.cuda.synchronize()
        with trace(activities=[ProfilerActivity.CUDA]) as traced:
            call()
            torch.cuda.synchronize()
        kernels.append(sum(event.count for event in traced.key_averages()))
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            begin = now()
            call()
            times.append(now() - begin)
        seconds.append(median(times))
    per_layer = round((kernels[1] - kernels[0]) / 4)
    return per_layer, (seconds[1] - seconds[0]) / 4 / per_layer


def check_attention() -> float:
    """Return the error, in norm, of one call for decodes and chunks of uneven contexts against each of them in 32 bits.

    Raise AssertionError if it is more than rounding.
    """
    import torch
    from torch import Tensor

    from simtune.profiling.kernels import Spans, varlen

    heads, kv_heads, d, row = 32, 8, 128, 700
    sequences = [(512, 188), (30, 1), (699, 1), (0, 90), (333, 1)]

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    tokens = [n for _, n in sequences]
    q = torch.randn(sum(tokens), heads, d, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, len(sequences) * row, kv_heads, d, device="cuda", dtype=torch.bfloat16)
    ends = [sum(tokens[:i]) for i in range(len(tokens) + 1)]
    order = [3, 0, 4, 1, 2]
    starts, lengths = integers([row * i for i in (*order, 0)]), integers([past + n for past, n in sequences])
    mine = varlen(q, k, v, Spans(integers(ends), starts, lengths, max(tokens), row)).float()
    reference = torch.empty_like(mine)
    for i, (past, n) in enumerate(sequences):
        at, span = row * order[i], past + n
        keys, values = (x[at : at + span].transpose(0, 1).float().repeat_interleave(4, 0) for x in (k, v))
        scores = q[ends[i] : ends[i + 1]].transpose(0, 1).float() @ keys.transpose(1, 2) * d**-0.5
        seen = torch.ones(n, span, dtype=torch.bool, device="cuda").tril(past)
        attended = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values
        reference[ends[i] : ends[i + 1]] = attended.transpose(0, 1)
    error = float((mine - reference).norm() / reference.norm())
    assert error < 0.01, error
    return error


def check_graphs(executor: Any) -> float:
    """Return the error, in norm, of logits from a graph against the same step launched kernel by kernel.

    Raise AssertionError if it is more than rounding.
    """
    import torch

    from simtune.validation.servers.cached_decoder import _TokenSpan

    rows, positions, ids = list(range(5)), [40, 3, 17, 30, 25], [7, 100, 2000, 5, 64]
    spans = [_TokenSpan(row, at, past, 1) for at, (row, past) in enumerate(zip(rows, positions, strict=True))]
    replayed = executor._graphs.run(ids, positions, rows).float().clone()
    launched = executor._forward(torch.tensor(ids), torch.tensor(positions), spans, [True] * 5)
    assert launched is not None
    error = float((replayed - launched.float()).norm() / launched.float().norm())
    assert error < 0.05, error
    return error


def deployed(model: Model, hardware: Hardware, graphs: bool, kernels: int, launch_s: float) -> Deployment:
    """Return one instance; without graphs all steps, with them steps with prompts are launched kernel by kernel."""
    launched: dict[str, Any] = (
        {"prompt_launch_s": kernels * launch_s}
        if graphs
        else {"research": Research(runtime=Runtime(kernels_per_layer=kernels, kernel_floor_s=0.0, launch_s=launch_s))}
    )
    pool = Pool(
        hardware=hardware.name,
        instances=1,
        batching=Batching(max_num_seqs=SEATS, max_num_batched_tokens=MAX_TOKENS),
        kv_cache=KvCache(num_blocks=SEATS * MAX_MODEL_LEN // 16),
        max_model_len=MAX_MODEL_LEN,
        async_scheduling=False,
        cuda_graphs=graphs,
        **launched,
    )
    return deploy(Plan(name="torch", model=model.name, pools=(pool,)), model, hardware)


def _row(step: MeasuredStep) -> tuple[Any, ...]:
    work = step.work
    return work.num_decodes, work.context_tokens, work.chunks, work.num_samples, step.cpu_s, step.wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", type=Path, help="profile of an earlier run; the GPU is not profiled again")
    parser.add_argument("--budget", type=float, default=180, help="seconds of profile")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    model = load_model(MODEL)
    if given.profile is None:
        given.profile = given.out / "profile"
        print(json.dumps(profile(model, given.profile, given.budget), indent=1))
    print(f"attention off by {check_attention():.2e}")
    kernels, launch_s = launches(model)
    print(f"{kernels} kernels a layer, {1e6 * launch_s:.2f} us each to launch")
    hardware = load_hardware(str(given.profile))
    document: dict[str, Any] = {"kernels_per_layer": kernels, "launch_s": launch_s, "served": []}
    loads = None
    for graphs in (True, False):
        deployment = deployed(model, hardware, graphs, kernels, launch_s)
        loads = loads or three_loads(deployment, at_once(given.requests, 0, PROMPT, OUTPUT), 1)
        executor = engine.executor(deployment, "cuda")
        engine.serve(deployment, at_once(8, 5, PROMPT, (8, 32)), executor, clock=WallClock())
        if graphs:
            print(f"graphs off by {check_graphs(executor):.2e}")
        for name, stream in loads.items():
            predicted, measured, steps = deployment.simulate(stream), list[Result](), []
            for _ in range(given.repeats):
                serving = engine.serve(deployment, stream, executor, clock=WallClock())
                measured.append(serving.result)
                steps += [_row(step) for step in serving.steps]
            table = errors(predicted, measured)
            for metric in METRICS:
                said, seen, error, noise = table[metric]
                print(
                    f"{'graphs' if graphs else 'eager':7}{name:9} {metric:5} {1e3 * said:8.1f} ms, measured "
                    f"{1e3 * seen:8.1f}: {error:+.1%} ± {noise:.1%}",
                    flush=True,
                )
            document["served"].append({"graphs": graphs, "load": name, "means": table, "steps": steps})
        del executor
        gc.collect()  # it and its graphs refer to each other
    (given.out / "served.json").write_text(json.dumps(document))


if __name__ == "__main__":
    main()
