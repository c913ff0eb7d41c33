"""The run directory: what `optimize` and `simulate` leave behind.

All files are made first and put into a folder beside the target, which then takes its name: a run directory is there
whole or not at all. Same inputs, same seed, same bytes; the time of day stands in manifest.json only.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from simtune import __version__
from simtune.costs.calibration import words
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.emit import speculation, vllm
from simtune.errors import Infeasible, UsageError
from simtune.report.page import render
from simtune.report.timeline import StepRecord, chrome_trace
from simtune.sim.deployment import Deployment
from simtune.sim.result import Result
from simtune.sim.uncertainty import Uncertainty
from simtune.specs import yamlfile
from simtune.specs.base import Spec
from simtune.specs.model import Model
from simtune.specs.speculation import DraftModel, Speculation
from simtune.specs.traces import Trace
from simtune.tuner.curves import LoadCurve, curves
from simtune.tuner.drafting import Contexts, Draft, described, in_words, schedule
from simtune.tuner.search import UNITS, Trial, Tuned
from simtune.tuner.speculation import Schedule

MANIFEST = "manifest.json"
SUMMARY_SCHEMA = "simtune/summary@1"
CANDIDATE_COLUMNS = (
    "rank", "candidate", "tp", "pp", "instances", "num_gpus", "max_num_seqs", "max_num_batched_tokens", "speculation",
    "status", "reason", "kv_blocks", "rate_bound_rps", "rate_rps", "goodput_rps", "goodput_rps_per_gpu",
    "output_tokens_per_s_per_gpu", "output_tokens_per_s_per_user", "ttft_mean_s", "ttft_p99_s",
    "tpot_mean_s", "tpot_p99_s", "slo_attainment", "saturated", "simulations",
)  # fmt: skip

REQUEST_COLUMNS = (
    "request", "class", "engine_core", "prompt_tokens", "output_tokens", "arrival_s", "scheduled_s", "first_token_s",
    "finish_s", "ttft_s", "tpot_s", "e2el_s", "queue_s", "prefill_s", "transfer_s", "decode_s", "preemptions", "resent",
    "good",
)  # fmt: skip

MAX_NODES = 64
"""Tokens of the largest draft tree that is tried for the report."""

_TREE_ENGINES = {"sglang": speculation.sglang, "tensorrt-llm": speculation.tensorrt_llm}

Files = dict[str, str | bytes]


# --- writing ----------------------------------------------------------------------------------------------


def claim(out: Path, force: bool) -> None:
    """Check, before any work, that a run directory can be written at `out`. Raises UsageError if not.

    A folder that exists is only replaced with `force`, and only if it is empty or an earlier run.
    """
    if out.exists() or out.is_symlink():
        if not out.is_dir():
            raise UsageError(f"{out}: is a file; name a folder for the run")
        if Path.cwd().is_relative_to(out.resolve()) or os.path.ismount(out):
            raise UsageError(f"{out}: is in use and cannot be replaced as a whole; name a folder inside it")
        if any(out.iterdir()):
            if not (out / MANIFEST).is_file():
                raise UsageError(f"{out}: is not empty and no earlier run (it has no {MANIFEST}); name another folder")
            if not force:
                raise UsageError(f"{out}: holds an earlier run; give --force to replace it, or name another folder")
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror}); name a folder you may write to") from None


def write(out: Path, files: Mapping[str, str | bytes]) -> None:
    """Put all files into `out` at once, replacing what `claim` allowed to be replaced. Raises UsageError."""
    parent = out.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=parent))
        try:
            for name, content in files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
                if name.endswith(".sh"):
                    path.chmod(0o755)
            folder.chmod(0o755)
            _take_place(folder, out)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror})") from None


def write_file(path: Path, content: bytes) -> None:
    """Write one file whole or not at all. Raises UsageError."""
    draft = None
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}-", dir=path.absolute().parent, delete=False) as file:
            draft = Path(file.name)
            file.write(content)
        draft.chmod(0o644)
        draft.replace(path)
    except OSError as error:
        if draft is not None:
            draft.unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None


def _take_place(folder: Path, out: Path) -> None:
    """Give `folder` the name `out`; what is there keeps it if that goes wrong, and is removed otherwise."""
    if not out.exists():
        folder.rename(out)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=folder.parent))
    old = aside / "run"
    try:
        out.rename(old)
        folder.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def complete(files: Files, manifest: dict[str, Any]) -> Files:
    """Add the report, drawn from the other files alone, and the manifest."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "run"
        write(draft, files)
        files["report.html"] = render(draft)
    files[MANIFEST] = _json(manifest)
    return files


# --- contents ---------------------------------------------------------------------------------------------


def of_simulation(
    deployment: Deployment, result: Result, name: str, seed: int, uncertainty: Uncertainty | None = None
) -> Files:
    """plan.yaml, engine/, summary.json, requests.csv and trace.json.gz of one simulated plan."""
    summary = {
        "schema": SUMMARY_SCHEMA,
        "name": name,
        "seed": seed,
        "study": None,
        "objective": None,
        "sweep": None,
        "runners_up": None,
        "uncertainty": uncertainty.to_data() if uncertainty else None,
        **_common(deployment, result),
    }
    return {
        "plan.yaml": deployment.plan.to_yaml("Written by simtune; read by simtune simulate."),
        **_engine_files(deployment),
        "summary.json": _json(summary),
        "requests.csv": _requests_csv(result),
        "trace.json.gz": timeline_file(result),
    }


def speculation_facts(draft: Draft, found: Schedule) -> dict[str, Any]:
    """A schedule for drafts in plain data, with what of it every engine can be told."""
    trees = [(name, settings_of, found.dynamic_tree()) for name, settings_of in _TREE_ENGINES.items()]
    engines = []
    for name, settings_of, projection in [("vllm", speculation.vllm, found.by_batch()), *trees]:
        settings, why = None, "drafting pays nowhere"
        if projection.scheme is not None:
            settings, why = _settings(settings_of, draft.speculation(projection.scheme), draft.drafting.model)
        engines.append(
            {
                "engine": name,
                "scheme": in_words(projection.scheme),
                "gain": projection.gain,
                "loss": projection.loss,
                "settings": settings,
                "why": why,
            }
        )
    return {**described(draft, found), "engines": engines}


def _settings(
    settings_of: Callable[[Speculation, Model | None], dict[str, Any]], wanted: Speculation, model: Model | None
) -> tuple[dict[str, Any] | None, str]:
    """An engine's settings, or None and why there are none."""
    try:
        return settings_of(wanted, model), ""
    except UsageError as error:
        return None, str(error)


def _study_speculation(tuned: Tuned) -> dict[str, Any] | None:
    """The schedule over batch and context of the drafter chosen, or of the study's first where none was."""
    question, candidate = tuned.question, tuned.chosen.candidate
    if not question.drafts:
        return None
    draft = next((d for d in question.drafts if d.choice.label == candidate.drafter), question.drafts[0])
    contexts = Contexts.of(question.stream(candidate.shape))
    (pool,) = tuned.deployment.plan.pools
    try:
        found = schedule(draft, question.model, question.hardware, pool, contexts, MAX_NODES)
    except Infeasible:
        return None
    return speculation_facts(draft, found)


def _under_load(curve: LoadCurve) -> list[dict[str, float]]:
    """What a round of a request yields and wastes, at the rates at which anything was drafted."""
    return [
        {"rate_rps": p.rate_rps, "tokens": p.tokens_per_round, "wasted": p.wasted_per_round}
        for p in curve.points
        if p.tokens_per_round is not None and p.wasted_per_round is not None
    ]


def _other_engines(facts: dict[str, Any]) -> Files:
    """The best single draft for engines that take a tree."""
    files: Files = {}
    for told in facts["engines"]:
        if told["engine"] in _TREE_ENGINES and told["settings"] is not None:
            what = (
                f"{told['scheme'].capitalize()}: the best single draft for this load by the cost model, not simulated."
            )
            files |= _drafting_file(told["engine"], told["settings"], what)
    return files


def _drafting_file(engine: str, settings: dict[str, Any], what: str) -> Files:
    """SGLang reads its options from a file as they are, TensorRT-LLM those of speculation under a key."""
    comment = f"{what}\nWritten by simtune with the names of {engine} {speculation.VERSIONS[engine]}."
    data = {"speculative_config": settings} if engine == "tensorrt-llm" else settings
    return {f"engine/{engine}-speculation.yaml": yamlfile.dump(data, comment)}


def _engine_files(deployment: Deployment) -> Files:
    """Settings for vLLM; none where a policy is not its own, or it cannot draft or swap as the plan does.

    Then those of the engines that can, as far as drafting goes.
    """
    for pool in deployment.pools:
        if pool.spec.batching.policy not in vllm.SCHEDULING_POLICY or pool.spec.kv_cache.preemption == "swap":
            return {}
    drafting = [(p.spec.speculation, p.drafting.model) for p in deployment.pools if p.spec.speculation and p.drafting]
    if not all(_settings(speculation.vllm, *each)[0] for each in drafting):
        files: Files = {}
        for name, settings_of in _TREE_ENGINES.items():
            settings, _ = _settings(settings_of, *drafting[0])
            if settings is not None:
                files |= _drafting_file(name, settings, "The drafts of the plan, which vLLM cannot be told.")
        return files
    models = {s.drafter.model: model for s, model in drafting if isinstance(s.drafter, DraftModel) and model}
    return {**vllm.emit(deployment.plan, deployment.model, deployment.hardware.device.devices_per_node, models)}


def of_study(tuned: Tuned, *, jobs: int | None = None) -> Files:
    """The same for the chosen plan of a study, with all candidates, the runners-up and the goodput curves."""
    question = tuned.question
    study = question.study
    files = of_simulation(tuned.deployment, tuned.result, study.name, study.seed)
    chosen, *others = curves(tuned, jobs=jobs)
    facts = _study_speculation(tuned)
    if facts is not None and tuned.chosen.candidate.speculation is not None:
        files |= _other_engines(facts)
    summary = {
        "schema": SUMMARY_SCHEMA,
        "name": study.name,
        "seed": study.seed,
        "study": study.to_data(),
        "interrupted": tuned.interrupted,
        "objective": {"name": study.objective, "unit": UNITS[study.objective], "value": tuned.value},
        "sweep": [
            {"candidate": curve.candidate, **asdict(point)} for curve in (chosen, *others) for point in curve.points
        ]
        or None,
        "runners_up": [
            {
                "candidate": curve.candidate,
                "ttft_quantiles_s": curve.ttft_quantiles_s,
                "tpot_quantiles_s": curve.tpot_quantiles_s,
            }
            for curve in others
        ],
        **({} if facts is None else {"draft_schedule": {**facts, "load": _under_load(chosen)}}),
        **_common(tuned.deployment, tuned.result),
    }
    files["summary.json"] = _json(summary)
    files["candidates.csv"] = _candidates_csv(tuned.rows)
    return files


def manifest(command: Sequence[str], inputs: Sequence[Spec], trace: Trace | None, seed: int) -> dict[str, Any]:
    """What is needed to do it again: versions, command, hashes of all inputs as they were understood."""
    packages = ("click", "jinja2", "numpy", "plotly", "pydantic", "pyyaml", "rich", "scipy")
    hashes = {f"{spec.KIND}:{spec.name}": hashlib.sha256(spec.to_yaml().encode()).hexdigest() for spec in inputs}
    return {
        "schema": "simtune/manifest@1",
        "simtune": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: metadata.version(name) for name in packages},
        "command": list(command),
        "seed": seed,
        "inputs": hashes,
        "trace": {"file": Path(trace.file).name, "sha256": trace.sha256} if trace else None,
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _common(deployment: Deployment, result: Result) -> dict[str, Any]:
    memory, hardware = deployment.memory, deployment.hardware
    return {
        **result.summary(),
        "plan": deployment.plan.to_data(),
        "model": deployment.model.name,
        "hardware": {
            "name": hardware.name,
            "engine": hardware.engine,
            "device": hardware.device.name,
            "validated": None,
            "estimated": deployment.estimated,
            "corrected": words(hardware.calibration) if hardware.calibration else None,
            "operators": [
                {
                    "key": key,
                    "median": operator.hold_out[0].median if operator.hold_out else None,
                    "p90": operator.hold_out[0].p90 if operator.hold_out else None,
                    "max": operator.hold_out[0].max if operator.hold_out else None,
                    "provenance": operator.provenance.kind,
                    "source": operator.provenance.source,
                }
                for key, operator in hardware.operators.items()
            ],
        },
        "memory": {
            "total_bytes": memory.total_bytes,
            "weights_bytes": memory.weights_bytes,
            "kv_bytes": memory.kv_bytes,
            "other_bytes": memory.other_bytes,
            "kv_bytes_per_token": memory.kv_bytes_per_token,
            "num_blocks": memory.num_blocks,
        },
        "breakdown": _breakdown(deployment, result),
        "timeline": _timeline(result),
        "pool_timelines": [{"pool": pool.spec.name, **_timeline(result, pool.spec.name)} for pool in deployment.pools]
        if len(deployment.pools) > 1
        else None,
    }


def _breakdown(deployment: Deployment, result: Result) -> list[dict[str, Any]]:
    """Where the time of a typical decode step goes, and of one that also carries a full budget of prompt tokens.

    Typical is the mean over simulated time of the pool's decode batch, at the requests' mean context.
    """
    cores, stream, several = result.outcome.cores, result.stream, len(deployment.pools) > 1
    context = round(float((stream.prompt_tokens + stream.output_tokens / 2).mean()))
    longest = int(stream.prompt_tokens.max())
    found = []
    for pool in deployment.pools:
        busy = [r for r in result.outcome.records if r.num_decodes and cores[r.core].pool == pool.spec.name]
        weight = sum(r.end - r.start for r in busy)
        decodes = max(1, round(sum(r.num_decodes * (r.end - r.start) for r in busy) / weight)) if weight else 1
        budget = pool.spec.batching.max_num_batched_tokens
        steps: list[tuple[str, StepWork]] = []
        if pool.spec.role == "prefill":
            tokens = min(budget, longest)
            steps.append((f"prefill: {tokens:,} prompt tokens", StepWork(0, 0, ((0, tokens),), 1)))
        else:
            label = f"decode: {decodes:,} sequences at {context:,} tokens"
            steps.append((label, StepWork(decodes, decodes * context, (), decodes)))
        room = min(budget - decodes, longest)
        if pool.spec.role == "mixed" and room > 0:
            label = f"mixed: the same and {room:,} prompt tokens"
            steps.append((label, StepWork(decodes, decodes * context, ((0, room),), decodes)))
        step_model = StepModel(deployment.model, pool.hardware, pool.spec)
        provenance: dict[str, str] = {o.kind: o.provenance.kind for o in pool.hardware.operators.values()}
        provenance |= {"head": provenance.get("gemm", "assumed")}
        provenance |= {key.split(".")[0]: "data-sheet" for key in step_model.estimated}
        found += [
            {
                "step": f"pool {pool.spec.name}, {label}" if several else label,
                "parts": [
                    {"operator": kind, "seconds": seconds, "provenance": provenance.get(kind, "assumed")}
                    for kind, seconds in step_model.breakdown(batch).items()
                ],
            }
            for label, batch in steps
        ]
    return found


def _timeline(result: Result, pool: str | None = None, points: int = 400) -> dict[str, list[float]]:
    """Running, waiting and KV use of the whole deployment or of one pool, sampled at even times."""
    cores = [i for i, core in enumerate(result.outcome.cores) if pool in (None, core.pool)]
    by_core: dict[int, list[Any]] = {core: [] for core in cores}
    for record in result.outcome.records:
        if record.core in by_core:
            by_core[record.core].append(record)
    if not result.outcome.records:
        return {"t_s": [], "running": [], "waiting": [], "kv_used": []}
    grid = np.linspace(0, max(r.end for r in result.outcome.records), points)
    running, waiting, used = np.zeros(points), np.zeros(points), np.zeros(points)
    for core, mine in by_core.items():
        if not mine:
            continue
        at = np.searchsorted([r.start for r in mine], grid, side="right") - 1
        inside = (at >= 0) & (grid < np.array([r.end for r in mine])[at])
        running += np.where(inside, np.array([r.running for r in mine])[at], 0)
        waiting += np.where(inside, np.array([r.waiting for r in mine])[at], 0)
        used += np.where(inside, 1 - np.array([r.free_blocks for r in mine])[at] / result.outcome.cores[core].blocks, 0)
    return {
        "t_s": (grid / TICKS_PER_SECOND).tolist(),
        "running": running.tolist(),
        "waiting": waiting.tolist(),
        "kv_used": (used / len(cores)).tolist(),
    }


def _step_records(result: Result) -> list[StepRecord]:
    cores = result.outcome.cores
    return [
        StepRecord(
            instance=f"{cores[r.core].pool} {cores[r.core].instance}",
            core=cores[r.core].virtual_engine,
            start_s=r.start / TICKS_PER_SECOND,
            end_s=r.end / TICKS_PER_SECOND,
            steps=r.steps,
            num_decodes=r.num_decodes,
            prefill_tokens=r.prefill_tokens,
            running=r.running,
            waiting=r.waiting,
            free_blocks=r.free_blocks,
        )
        for r in result.outcome.records
    ]


def _candidates_csv(rows: Sequence[Trial]) -> str:
    table = []
    for rank, row in enumerate(rows, start=1):
        shape, drafts, goodput = row.candidate.shape, row.candidate.speculation, row.number("goodput_rps")
        cells: dict[str, object] = {
            "rank": rank,
            "candidate": row.candidate.name,
            "tp": shape.tp,
            "pp": shape.pp,
            "instances": shape.instances,
            "num_gpus": shape.num_gpus,
            "max_num_seqs": row.candidate.max_num_seqs,
            "max_num_batched_tokens": row.candidate.max_num_batched_tokens,
            "speculation": None if drafts is None else f"{row.candidate.drafter}: {in_words(drafts.scheme)}",
            "status": row.status,
            "reason": row.reason,
            "kv_blocks": row.kv_blocks,
            "rate_bound_rps": row.rate_bound_rps,
            "rate_rps": row.rate_rps,
            "goodput_rps_per_gpu": None if goodput is None else goodput / shape.num_gpus,
            "ttft_mean_s": row.statistic("ttft", "mean"),
            "ttft_p99_s": row.statistic("ttft", "p99"),
            "tpot_mean_s": row.statistic("tpot", "mean"),
            "tpot_p99_s": row.statistic("tpot", "p99"),
            "simulations": row.simulations,
        }
        table.append([cells.get(column, row.summary.get(column)) for column in CANDIDATE_COLUMNS])
    return _csv(CANDIDATE_COLUMNS, table)


def requests_table(result: Result) -> dict[str, list[Any]]:
    """Every request, column by column in order of REQUEST_COLUMNS; None where a time never came."""
    stream, outcome = result.stream, result.outcome
    columns: list[list[Any]] = [
        list(range(len(stream))),
        [stream.class_names[i] for i in stream.class_index.tolist()],
        outcome.core.tolist(),
        stream.prompt_tokens.tolist(),
        stream.output_tokens.tolist(),
    ]
    times = (
        result.arrival_s, result.scheduled_s, result.first_token_s, result.finish_s,
        result.ttft_s, result.tpot_s, result.e2el_s,
        result.queue_s, result.prefill_s, result.transfer_s, result.decode_s,
    )  # fmt: skip
    columns += [[None if x != x else x for x in column.tolist()] for column in times]
    columns += [outcome.preemptions.tolist(), outcome.resent.tolist(), result.good.tolist()]
    return dict(zip(REQUEST_COLUMNS, columns, strict=True))


def _requests_csv(result: Result) -> str:
    table = requests_table(result)
    return _csv(tuple(table), list(zip(*table.values(), strict=True)))


def requests_file(name: str, result: Result) -> bytes:
    """The requests as the file's ending says: .csv, .jsonl or .parquet. Raises UsageError for any other ending."""
    if name.endswith(".csv"):
        return _requests_csv(result).encode()
    table = requests_table(result)
    if name.endswith(".jsonl"):
        rows = (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))
        return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    if name.endswith(".parquet"):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UsageError(f"{name}: Parquet needs pyarrow; pip install 'simtune[parquet]', or name a .csv") from None
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(table), sink)
        return sink.getvalue()
    raise UsageError(f"{name}: end the name in .csv, .jsonl or .parquet")


def timeline_file(result: Result, window_s: tuple[float, float] | None = None) -> bytes:
    """The simulated steps for ui.perfetto.dev, gzipped; only those that touch the window, where one is given."""
    records = _step_records(result)
    if window_s is not None:
        records = [r for r in records if r.end_s > window_s[0] and r.start_s < window_s[1]]
    return chrome_trace(records)


def _csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """CSV with exact floats, true/false, and nothing where a number does not exist."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([str(x).lower() if isinstance(x, bool) else x for x in row])
    return text.getvalue()


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
