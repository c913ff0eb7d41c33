"""simtune profile: measure and fit this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simtune.cli.numbers import Duration, WholeRange
from simtune.cli.options import json_option, model_option, out_option, quiet_option, vllm_python_option
from simtune.cli.output import print_json, print_table, write_profile
from simtune.errors import UsageError
from simtune.runs.files import hold, write_file

if TYPE_CHECKING:
    from simtune.profiling.checks import Errors
    from simtune.profiling.run import LiveStatus, Profiled
    from simtune.specs.hardware import Hardware
    from simtune.specs.model import Model
    from simtune.validation.judge.added_by_engine import Added
    from simtune.validation.servers.engine_profile import EngineProfile

COMMENT = """Fitted by `simtune profile` to what it measured on one machine; measure again rather than edit this file.
`simtune fit` makes the same operators of the run's measurements.jsonl."""

INSTALL = "simtune profile needs torch, which is not installed: pip install torch (or 'simtune[gpu]')"


def _share(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """5% or 0.05."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d*\.?\d+)(%?)", value)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share < 1:
        raise click.BadParameter(f"{value!r}: write it as 5%")
    return share


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """1,2,4."""
    if not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", value):
        raise click.BadParameter(f"{value[:40]!r}: write it as 1,2,4, each below 100,000")
    return tuple(dict.fromkeys(int(n) for n in value.split(",")))


@click.command()
@click.option("--device", default=None, metavar="cuda[:i]|cpu", help="A GPU if torch finds one, else the processor.")
@model_option.but("references", multiple=True, required=True, help="Model whose shapes to measure; may be repeated.")
@click.option(
    "--budget", type=Duration(20), default="3m", show_default=True, help="Time for everything, fits included."
)
@out_option.but(required=True, help="Folder for measurements and profile.")
@click.option(
    "--tp", "tps", callback=_numbers, default="1", show_default=True, help="Tensor-parallel sizes, e.g. 1,2,4."
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(["fp32", "bf16", "fp16", "fp8", "int8"]),
    help="Dtypes in place of the models' own; may be repeated. fp8 and int8 apply to weights and their inputs.",
)
@click.option(
    "--engine",
    type=click.Choice(["torch", "transformers", "vllm"]),
    default=None,
    help="Engine whose whole steps are measured, in place of operators.",
)
@click.option(
    "--kernels",
    default=None,
    metavar="PROFILE",
    help="With --engine: a profile measured here, which splits its steps into kernels and host.",
)
@vllm_python_option
@click.option(
    "--max-num-seqs",
    type=WholeRange(2, 2**20),
    default=16,
    show_default=True,
    help="With --engine: most sequences of a step.",
)
@click.option(
    "--max-num-batched-tokens",
    type=WholeRange(16, 2**24),
    default=256,
    show_default=True,
    help="With --engine: most tokens of a step.",
)
@click.option(
    "--max-model-len",
    type=WholeRange(64, 2**27),
    default=1024,
    show_default=True,
    help="With --engine: longest prompt and output.",
)
@click.option(
    "--transfers",
    is_flag=True,
    help="With --engine vllm: also measure how long KV caches take from one engine to another.",
)
@click.option("--target", callback=_share, default=None, help="Stop once every hold-out error is within this, e.g. 5%.")
@json_option
@quiet_option
def profile(  # noqa: PLR0913 - one for each option
    device: str | None,
    references: tuple[str, ...],
    budget: float,
    out: Path,
    tps: tuple[int, ...],
    dtypes: tuple[str, ...],
    target: float | None,
    engine: str | None,
    kernels: str | None,
    vllm_python: str | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    transfers: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Measure this machine's operators with torch, and fit a hardware profile to them.

    Writes measurements.jsonl as it goes, then profile.yaml with its arrays, profile.html and summary.json. With
    --engine it drives an engine through designed steps instead, and writes steps.jsonl, a cost model for
    `simtune simulate --costs` and a log for `simtune calibrate`. Give the same command again to go on after an
    interruption: a run that is killed loses one point, or one session, at most.
    """
    if engine is not None:
        sizes = (max_num_seqs, max_num_batched_tokens, max_model_len)
        wrong = {"--target": target, "--tp": tps != (1,) or None, "a second --model": references[1:] or None}
        options = {"device": device or "cpu", **({} if vllm_python is None else {"python": vllm_python})}
        then = partial(_measure_transfers, references[0], dtypes, out, sizes, options) if transfers else None
        return _profile_engine(
            engine, references[0], dtypes, out, sizes, budget, options, kernels, wrong, as_json, then
        )
    _check_alone(kernels, transfers)
    from simtune.profiling.timing import now

    started = now()
    from simtune.profiling import run
    from simtune.specs import catalog

    models = [model for reference in references for model in _in(catalog.load_model(reference), dtypes)]
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file; name a folder")
    try:
        from simtune.profiling.rig import TorchRig
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(INSTALL) from None
    hold(out)
    rig = TorchRig(device, models)
    try:
        with _live(quiet) as (update, note):
            profiled = run.profile(
                rig,
                models,
                out,
                budget_s=budget,
                tps=tps,
                target=target,
                started=started,
                progress=update,
                note=note,
            )
    except KeyboardInterrupt:
        click.echo(f"interrupted; what was measured is in {out}, and the same command goes on from there", err=True)
        return 130
    finally:
        rig.close()
    _write(out, profiled)
    if as_json:
        print_json({"written": str(out / "profile.yaml"), **profiled.summary})
    else:
        _show(profiled, out)
    return 0


def _profile_engine(  # noqa: PLR0913 - one for each option
    engine: str,
    reference: str,
    dtypes: tuple[str, ...],
    out: Path,
    sizes: tuple[int, int, int],
    budget: float,
    options: Mapping[str, str],
    kernels: str | None,
    wrong: Mapping[str, object],
    as_json: bool,
    then: Callable[[], None] | None,
) -> int:
    """Measure whole steps of an engine, then call `then` if given. Raises UsageError, also for options that do not
    apply to engines.
    """
    from simtune.specs import catalog
    from simtune.validation.servers.driven_engines import EngineSize, driver
    from simtune.validation.servers.engine_profile import STEPS, profile_engine

    wrong_options = [name for name, value in wrong.items() if value is not None]
    if wrong_options:
        raise UsageError(f"{' and '.join(wrong_options)} cannot be given with --engine; leave it out")
    if (engine == "vllm") != ("python" in options):
        raise UsageError("--engine vllm needs --vllm-python, the interpreter that has it (`make vllm`); no other does")
    if then is not None and engine != "vllm":
        raise UsageError("--transfers are between two vLLM engines; give it with --engine vllm")
    (model,) = _in(catalog.load_model(reference), dtypes[:1])
    hardware = None if kernels is None else catalog.load_hardware(kernels)
    hold(out)
    try:
        profiled = profile_engine(
            lambda reference_s: driver(engine, model, EngineSize(*sizes), reference_s=reference_s, **options),
            model,
            out,
            budget_s=budget,
        )
        if then is not None:
            then()
    except KeyboardInterrupt:
        click.echo(f"interrupted; what was measured is in {out}, and the same command goes on from there", err=True)
        return 130
    added = [] if hardware is None else _added(profiled, model, hardware, sizes)
    if as_json:
        split = {a.kind: {**a._asdict(), "share": a.share} for a in added}
        print_json({"written": str(out / STEPS), **profiled.summary, **({"added": split} if split else {})})
    else:
        _show_engine(engine, profiled, added, out / STEPS)
    return 0


def _check_alone(kernels: str | None, transfers: bool) -> None:
    """Raise UsageError for options of engines if no engine is named."""
    if kernels is not None:
        raise UsageError("--kernels splits the steps of an engine; give it with --engine")
    if transfers:
        raise UsageError("--transfers are between two vLLM engines; give it with --engine vllm")


def _measure_transfers(
    reference: str, dtypes: tuple[str, ...], out: Path, sizes: tuple[int, int, int], options: Mapping[str, str]
) -> None:
    """Measure the time until a second engine continues with a prompt; print it on stderr."""
    from simtune.costs.kv_transfer_times import fit_transfers, write_transfers
    from simtune.specs import catalog
    from simtune.validation.servers.driven_engines import EngineSize, driver
    from simtune.validation.servers.engine_profile import STEPS, reference_beside
    from simtune.validation.servers.pair import CONNECTOR, EnginePair

    path = out / "transfers.jsonl"
    if path.exists():
        return
    (model,) = _in(catalog.load_model(reference), dtypes[:1])
    of_profile, more = reference_beside(out / STEPS), {"arguments": {"kv_transfer_config": CONNECTOR}, **options}

    def make(reference_s: float | None = of_profile) -> Any:
        return driver("vllm", model, EngineSize(*sizes), reference_s=reference_s, **more)

    pair = EnginePair(make, make)
    try:
        measured = pair.transfers(model)
    finally:
        pair.close()
    fit = fit_transfers(measured, str(path))
    write_file(path, write_transfers(measured, model=model.name, engine="vllm"))
    click.echo(f"transfers: {1e3 * fit.setup_s:.2f} ms and {fit.bytes_per_s / 1e9:.3g} GB/s; wrote {path}", err=True)


def _show_engine(engine: str, profiled: EngineProfile, added: Sequence[Added], steps: Path) -> None:
    summary = profiled.summary
    rows = [
        (kind, f"{e.steps:,}", *(f"{100 * x:.1f}" for x in (e.median, e.p90)), f"{100 * e.total:+.1f}")
        for kind, e in profiled.errors.items()
    ]
    print_table(f"{engine}, {summary['model']}: whole steps that were not fitted", HELD_OUT_COLUMNS, rows)
    if added:
        cells = [(a.kind, f"{a.steps:,}", *(f"{1e3 * x:.3f}" for x in a[2:]), f"{100 * a.share:.1f}") for a in added]
        print_table(f"what {engine} adds to the kernels of the profile", ADDED_COLUMNS, cells)
    click.echo(f"{summary['steps']:,} steps fitted, {summary['spent_s']:.0f} s")
    click.echo(f"wrote {steps}")


def _added(profiled: EngineProfile, model: Model, hardware: Hardware, sizes: tuple[int, int, int]) -> list[Added]:
    """Return the time that the steps of an engine take beyond their kernels."""
    from simtune.costs.iteration import StepModel
    from simtune.specs.pool import Batching, Pool
    from simtune.validation.judge.added_by_engine import added

    seats, tokens, longest = sizes
    pool = Pool(
        hardware=hardware.name,
        instances=1,
        batching=Batching(max_num_seqs=seats, max_num_batched_tokens=tokens),
        max_model_len=longest,
        cuda_graphs=False,
    )
    return added(profiled.fitted, StepModel(model, hardware, pool))


ADDED_COLUMNS = ("steps", "number", "measured ms", "kernels ms", "added per step ms", "per sequence ms", "share %")
HELD_OUT_COLUMNS = ("steps", "number", "median %", "p90 %", "all together %")


def _in(model: Any, dtypes: tuple[str, ...]) -> list[Any]:
    """Return the model in each of these dtypes, with different names if there are several; the model itself if there
    are none.
    """
    models = []
    for dtype in dtypes:
        wide = {"dtype": dtype} if dtype in ("fp32", "bf16", "fp16") else {}
        name = {"name": f"{model.name}-{dtype}"} if len(dtypes) > 1 else {}
        models.append(model.model_copy(update={"weight_dtype": dtype, **wide, **name}))
    return models or [model]


def _write(out: Path, profiled: Profiled) -> None:
    import json

    from simtune.report.measured_page import PredictedTime, render

    write_file(out / "facts.yaml", profiled.facts.to_yaml("What `simtune profile` found out about the device itself."))
    write_profile(out, profiled.hardware, COMMENT)
    write_file(out / "summary.json", json.dumps(profiled.summary, indent=1, sort_keys=True, allow_nan=False) + "\n")
    checks, steps = ([PredictedTime(*check[:4]) for check in group] for group in (profiled.checks, profiled.steps))
    write_file(out / "profile.html", render(profiled.hardware, profiled.points, checks, steps, profiled.summary))


@contextmanager
def _live(quiet: bool) -> Iterator[tuple[Callable[[LiveStatus], None], Callable[[str], None]]]:
    """Yield a function that draws the table on stderr, if that is a terminal, and one that prints a line there."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield (lambda status: None), (lambda words: click.echo(words, err=True))
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield (lambda status: live.update(_table(status))), (lambda words: console.print(words, highlight=False))


def _table(status: LiveStatus) -> Any:
    from rich.table import Table

    table = Table(title=f"{status.phase}, {status.left_s:.0f} s left", title_justify="left")
    for name in ("operator", "points", "planned", "hold-out error, %"):
        table.add_column(name, justify="left" if name == "operator" else "right")
    for row in status.rows:
        error = "" if row.error is None else f"{100 * row.error:.1f}"
        table.add_row(row.operator, f"{row.done:,}", f"{row.planned:,}", error)
    return table


def _show(profiled: Profiled, out: Path) -> None:
    from simtune.profiling.checks import errors_by_operator

    columns = ("", "points", "median %", "p90 %", "max %", "in 90 % interval %")
    print_table(
        f"{profiled.hardware.name}: errors on points measured for checking, inside the measured box",
        columns,
        [_cells(key, errors) for key, errors in errors_by_operator(profiled.checks).items()],
    )
    if profiled.steps:
        print_table(
            "whole steps, predicted by the sum of their operators",
            columns[:-1],
            [_cells(key, errors)[:-1] for key, errors in errors_by_operator(profiled.steps).items()],
        )
    s = profiled.summary
    timers = ", ".join(f"{count:,} by {timer}" for timer, count in s["timers"].items())
    clean = "" if s["clean_share"] is None else f"; {s['clean_share']:.0%} of trial samples were undisturbed"
    click.echo(f"{s['points']:,} points in {s['spent_s']:.0f} s, timed {timers}{clean}")
    if s["throttled"]:
        click.echo("THROTTLED: the clock fell by more than a tenth; long matrix products are slower than they could be")
    click.echo(f"wrote {out / 'profile.yaml'} and {out / 'profile.html'}")


def _cells(key: str, e: Errors) -> tuple[str, ...]:
    return (key, f"{e.points:,}", *(f"{100 * x:.1f}" for x in (e.median, e.p90, e.max)), f"{100 * e.covered:.0f}")
