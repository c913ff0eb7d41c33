"""simtune validate: a plan on a real engine, predicted beside measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.numbers import LARGEST_RATE, SMALLEST, TRIALS, WORLDS, RealRange, WholeRange
from simtune.cli.options import (
    as_option,
    force_option,
    hardware_option,
    json_option,
    model_option,
    out_option,
    quiet_option,
    requests_option,
    seed_option,
    set_option,
    vllm_python_option,
    workload_option,
)
from simtune.cli.output import (
    command_line,
    milliseconds,
    note_basis,
    number,
    print_json,
    print_table,
    progress,
    split_settings,
)
from simtune.cli.paths import PATH, TEXT
from simtune.errors import UsageError, suggest

if TYPE_CHECKING:
    from simtune.api import Experiment
    from simtune.runs.schema import Manifest
    from simtune.specs.plan import Plan
    from simtune.validation.client.load_client import Patience
    from simtune.validation.client.measured_run import Clock, MeasuredRun
    from simtune.validation.judge.comparison import Validation
    from simtune.validation.judge.decision import Ranking
    from simtune.validation.loads import NamedLoad
    from simtune.validation.servers.server import Engine
    from simtune.validation.session import ValidationFolder


@dataclass(frozen=True)
class EngineChoice:
    """Options of the engine."""

    name: str
    api_key: str | None
    silence_s: float
    request_s: float
    response_mib: float | None
    weights: Path | None
    vllm_python: str | None
    arguments: tuple[str, ...]
    device: str | None = None
    clock: Clock | None = None

    @property
    def patience(self) -> Patience:
        """Return how long, and for how much of a response, the client waits."""
        from simtune.validation.client.http_exchange import ResponseCaps
        from simtune.validation.client.load_client import Patience

        caps = ResponseCaps() if self.response_mib is None else ResponseCaps(stream=int(self.response_mib * 1024**2))
        return Patience(self.silence_s, self.request_s, caps=caps)

    @property
    def hardware(self) -> tuple[str, Clock]:
        """Return the device of an engine in process, and the clock that times it: processor time if the device is the
        processor.
        """
        device = self.device or "cpu"
        return device, self.clock or ("cpu" if device == "cpu" else "wall")


def _vllm(choice: EngineChoice, experiment: Experiment) -> Engine:
    from simtune.runs.engine_files import draft_models
    from simtune.validation.servers.served import VllmCommand, VllmEngine, vllm_python

    if choice.clock is not None:
        return _stepped_vllm(choice, experiment)
    if choice.weights is None:
        raise UsageError("--engine vllm: name the folder that it is to serve, --weights DIR (see `simtune weights`)")
    command = VllmCommand(vllm_python(choice.vllm_python), choice.weights, choice.arguments)
    return VllmEngine(command, experiment.deployment.model, choice.patience, draft_models(experiment.deployment))


def _stepped_vllm(choice: EngineChoice, experiment: Experiment) -> Engine:
    from simtune.runs.engine_files import draft_models
    from simtune.validation.servers.driven_engines import EngineSize, StepDriver, driver
    from simtune.validation.servers.engine_profile import reference_beside
    from simtune.validation.servers.served import vllm_python
    from simtune.validation.servers.stepped_vllm import SteppedVllm

    if choice.clock != "cpu" or choice.arguments:
        raise UsageError(
            "--engine vllm --clock cpu: steps it without a server; leave --engine-arg and other clocks out"
        )
    d, python = experiment.deployment, vllm_python(choice.vllm_python)
    costs = d.plan.pools[0].costs
    of_profile = None if costs is None else reference_beside(Path(costs))

    def make(size: EngineSize, arguments: Mapping[str, object], reference_s: float | None) -> StepDriver:
        options = {"python": python, "weights": choice.weights, "reference_s": of_profile or reference_s}
        return driver("vllm", d.model, size, arguments=arguments, **options)

    return SteppedVllm(d.model, make, draft_models(d))


def _server(choice: EngineChoice, experiment: Experiment) -> Engine:
    from simtune.validation.client.http_exchange import ServerAddress
    from simtune.validation.servers.served import ServerEngine

    server = ServerAddress(choice.name, choice.api_key)
    return ServerEngine(server, experiment.deployment.model, choice.patience)


def _torch(choice: EngineChoice, experiment: Experiment) -> Engine:
    from simtune.validation.servers.torch_engine import TorchEngine

    device, clock = choice.hardware
    return TorchEngine(experiment.deployment, device=device, clock=clock)


def _transformers(choice: EngineChoice, experiment: Experiment) -> Engine:
    from simtune.validation.servers.transformers_engine import TransformersEngine

    if choice.weights is None:
        raise UsageError("--engine transformers: name the folder to serve, --weights DIR (see `simtune weights`)")
    device, clock = choice.hardware
    return TransformersEngine(experiment.deployment, choice.weights, device=device, clock=clock)


ENGINES: dict[str, Callable[[EngineChoice, Experiment], Engine]] = {
    "vllm": _vllm,
    "torch": _torch,
    "transformers": _transformers,
}
"""Engines that are started, by name; anything with :// is the address of one that runs."""

IN_PROCESS = ("torch", "transformers")
"""Engines that run in this process, on a device and by a clock of choice."""


def make_engine(choice: EngineChoice, experiment: Experiment) -> Engine:
    """Make the engine that was chosen. Raises UsageError."""
    stepped = choice.name == "vllm" and choice.device is None
    if choice.name not in IN_PROCESS and (choice.device or choice.clock) and not stepped:
        raise UsageError(f"--device and --clock are of engines in this process: --engine {' or '.join(IN_PROCESS)}")
    if "://" in choice.name:
        return _server(choice, experiment)
    if choice.name not in ENGINES:
        engine_names = ", ".join(ENGINES)
        raise UsageError(
            f"--engine {choice.name}: is neither an address (http://HOST:PORT) nor one of {engine_names}"
            f"{suggest(choice.name, ENGINES)}"
        )
    return ENGINES[choice.name](choice, experiment)


@click.command()
@click.argument("plan_file", metavar="PLAN", type=TEXT)
@workload_option.but(help="Load to send; not needed with --from.")
@click.option(
    "--engine",
    default=None,
    help="http://HOST:PORT of an OpenAI server, or one to start: vllm, torch, transformers.",
)
@out_option.but(help="Folder to write; runs that it contains are kept. RUN-measure for a run of optimize.")
@click.option(
    "--from",
    "measured_files",
    type=PATH,
    multiple=True,
    help="Judge a measured run: of simtune, of `vllm bench serve --save-detailed`, of aiperf or of guidellm.",
)
@model_option.but(help="Model in place of the plan's.")
@hardware_option.but(help="Hardware profile in place of the plan's.")
@requests_option.but(help="Number of requests, instead of the workload's own.")
@click.option("--repeat", type=TRIALS, default=3, show_default=True, help="Runs of every load.")
@click.option("--rates", default=None, help="Requests per second, e.g. 2,4,8; fractions of the knee otherwise.")
@click.option(
    "--plans",
    type=WholeRange(2, 10_000),
    default=None,
    help="Run K plans around PLAN, or around the plan that optimize chose.",
)
@click.option("--tolerance", type=RealRange(above=0, most=1e6), default=0.1, show_default=True)
@click.option(
    "--max-lateness",
    type=RealRange(most=1e6),
    default=0.01,
    show_default=True,
    help="Share of the mean TPOT: a client that sends later than this is not judged by.",
)
@click.option(
    "--uncertainty",
    "worlds",
    type=WholeRange(0, WORLDS),
    default=20,
    show_default=True,
    help="Number of redrawn worlds.",
)
@click.option(
    "--timeout",
    type=RealRange(above=0, most=1e7),
    default=120.0,
    help="Seconds without a byte after which a request fails.",
)
@click.option(
    "--request-timeout",
    type=RealRange(above=0, most=1e7),
    default=3600.0,
    show_default=True,
    help="Seconds after which a request fails that is not complete.",
)
@click.option(
    "--max-response",
    type=RealRange(above=0, most=1e6),
    default=None,
    help="MiB of one answer after which a request fails; 1 and 1 for 256 tokens unless given.",
)
@click.option("--api-key", default=None, envvar="OPENAI_API_KEY", help="API key of the server.")
@click.option("--weights", type=PATH, default=None, help="Folder that a started engine serves.")
@vllm_python_option
@click.option("--engine-arg", multiple=True, help="Further argument of a started engine, e.g. --dtype=float32.")
@click.option("--device", default=None, help="Device of an engine in this process: cpu unless given, or e.g. cuda.")
@click.option(
    "--clock",
    type=click.Choice(["cpu", "wall"]),
    default=None,
    help="Clock of an engine in this process; cpu: vllm without a server, too.",
)
@click.option(
    "--export", type=click.Choice(["vllm", "aiperf"]), multiple=True, help="Also write runs in the format of this tool."
)
@click.option("--record", type=PATH, default=None, help="Hardware profile in which to note the result.")
@seed_option
@set_option
@force_option
@quiet_option
@json_option
@as_option()
def validate(  # noqa: PLR0913 - one for each option
    plan_file: str,
    workload: str | None,
    engine: str | None,
    out: Path | None,
    measured_files: tuple[Path, ...],
    model: str | None,
    hardware: str | None,
    requests: int | None,
    repeat: int,
    rates: str | None,
    plans: int | None,
    tolerance: float,
    max_lateness: float,
    worlds: int,
    timeout: float,
    request_timeout: float,
    max_response: float | None,
    api_key: str | None,
    weights: Path | None,
    vllm_python: str | None,
    engine_arg: tuple[str, ...],
    device: str | None,
    clock: Clock | None,
    export: tuple[str, ...],
    record: Path | None,
    seed: int | None,
    settings: tuple[str, ...],
    force: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Run PLAN on a real engine and compare predictions with measurements.

    Exits with 4 if they differ by more than the tolerance and twice the noise of the repeats, with 1 if requests failed
    or the client was too late to judge by. A run directory of `optimize` with --from: after `simtune measure`, which of
    its leading plans is best now.
    """
    if measured_files and (Path(plan_file) / "certificate.json").is_file():
        from simtune.cli.measure import tighten

        return tighten(Path(plan_file), measured_files, out, as_json)
    out = _checked(engine, workload, measured_files, out)
    if record is not None:
        _profile_folder(record)
    waits = (timeout, request_timeout, max_response)
    choice = EngineChoice(engine or "", api_key, *waits, weights, vllm_python, engine_arg, device, clock)
    options = _Asked(repeat, _rates(rates), tolerance, max_lateness, worlds, seed or 0, export, force, quiet)
    by_spec = split_settings(settings, ("model", "hardware", "workload", "plan"))
    specs = _Given(plan_file, model, hardware, workload, requests, by_spec, relayed=engine in ENGINES)
    if plans is not None:
        return _decide(specs, plans, choice, options, out, as_json)
    experiment = specs.experiment(options.seed)
    if measured_files:
        validation = _judge_files(experiment, measured_files, options, out, given=workload is not None)
    else:
        validation = _run(experiment, choice, options, out)
    if record is not None:
        _record(record, validation, out)
    if as_json:
        print_json(validation.to_data())
    else:
        _print(validation, out)
    return 1 if any(load.failed for load in validation.loads) else 0 if validation.within else 4


def _checked(engine: str | None, workload: str | None, measured_files: tuple[Path, ...], out: Path | None) -> Path:
    """Return the folder to write. Raises UsageError if options are missing."""
    if out is None:
        raise UsageError("name the folder to write: --out")
    if (engine is None) == (not measured_files):
        raise UsageError(
            f"name what to compare with: --engine http://HOST:PORT, --engine {'|'.join(ENGINES)}, or --from FILE"
        )
    if workload is None and not measured_files:
        raise UsageError("name the load to send: --workload")
    return out


@dataclass(frozen=True)
class _Given:
    """References and settings from which the specs are loaded."""

    plan: str
    model: str | None
    hardware: str | None
    workload: str | None
    requests: int | None
    settings: dict[str, list[str]]
    relayed: bool
    """True if simtune's own client is in front of prefill and decode servers; it takes the prefill server's token."""

    def in_run_directory(self) -> _Given:
        """Return the paths with the chosen plan of a run directory, if the plan is one."""
        plan = Path(self.plan) / "plan.yaml"
        return replace(self, plan=str(plan)) if plan.is_file() else self

    def experiment(self, seed: int, plan: Plan | None = None) -> Experiment:
        """The plan, or another of the same pools in its place, under the load."""
        from simtune.api import load_specs, set_up

        # Without a load of its own a measured run brings one; until then any will do.
        specs = load_specs(self.model, self.hardware, self.workload or "chat", self.plan, self.settings)
        chosen = specs.plan if plan is None else plan
        if self.relayed and chosen is not None:
            chosen = _with_prefill_token(chosen)
        return set_up(replace(specs, plan=chosen), requests=self.requests, seed=seed)


def _with_prefill_token(plan: Plan) -> Plan:
    """Return the plan with the first token from the prefill instance, unless its links set another source."""
    first = {"first_token": "prefill"}
    link = plan.link
    if link is not None and link.first_token is None:
        link = link.model_copy(update=first)
    links = plan.links and tuple(
        pool_link if pool_link.first_token else pool_link.model_copy(update=first) for pool_link in plan.links
    )
    return plan.model_copy(update={"link": link, "links": links})


@dataclass(frozen=True)
class _Asked:
    """Options of how a validation is run and judged."""

    repeats: int
    rates: tuple[float, ...]
    tolerance: float
    most_late: float
    worlds: int
    seed: int
    export: tuple[str, ...]
    force: bool
    quiet: bool


def _rates(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(SMALLEST <= rate <= LARGEST_RATE for rate in rates):
        raise UsageError(
            f"--rates {text}: write requests per second with commas between, at most {LARGEST_RATE:.0e}, for example "
            "2,4,8"
        )
    return tuple(dict.fromkeys(rates))


def _identity(choice: EngineChoice) -> list[object]:
    """Return the settings of the engine that its times depend on."""
    return [choice.name, str(choice.weights), *choice.arguments, choice.device, choice.clock]


def _folder(experiment: Experiment, asked: _Asked, what: list[object], out: Path) -> ValidationFolder:
    from simtune.validation.session import ValidationFolder

    d = experiment.deployment
    specs = [d.plan.to_data(), d.model.to_data(), experiment.workload.to_data(), len(experiment.stream)]
    trace = None if experiment.trace is None else experiment.trace.sha256
    question = {"specs": specs, "trace": trace, "seed": asked.seed, "rates": asked.rates, "engine": what}
    return ValidationFolder(out, question, asked.force)


def _run(experiment: Experiment, choice: EngineChoice, asked: _Asked, out: Path) -> Validation:
    """Run every load and judge."""
    from contextlib import closing

    from simtune.validation.loads import loads
    from simtune.validation.session import Round, run_loads

    all_loads = loads(experiment.deployment, experiment.stream, asked.rates, asked.seed)
    how = Round(asked.repeats, asked.most_late, asked.seed)
    with closing(make_engine(choice, experiment)) as engine, progress("runs", asked.quiet) as update:
        engine.check(experiment.deployment.plan)
        folder = _folder(experiment, asked, _identity(choice), out)
        runs = run_loads(engine, experiment.deployment.plan, all_loads, how, folder, update)
    return _judged(experiment, [load for load in all_loads if load.label in runs], runs, asked, folder)


def _judge_files(
    experiment: Experiment, files: tuple[Path, ...], asked: _Asked, out: Path, *, given: bool
) -> Validation:
    """Judge runs that were measured; each is simulated with its own requests at its own times."""
    from simtune.validation.client.measured_formats import read_run
    from simtune.validation.session import as_loads

    runs = [read_run(path) for path in files]
    all_loads, by_label = as_loads(runs, experiment.stream if given else None)
    folder = _folder(experiment, asked, [run.to_text() for run in runs], out)
    return _judged(experiment, all_loads, by_label, asked, folder)


def _judged(
    experiment: Experiment,
    wanted: list[NamedLoad],
    runs: dict[str, list[MeasuredRun]],
    asked: _Asked,
    folder: ValidationFolder,
) -> Validation:
    """Simulate every load, compare, and write the folder."""
    from simtune.report.validation_page import curves, render
    from simtune.runs.engine_files import plan_file
    from simtune.runs.request_columns import requests_csv
    from simtune.runs.timeline import sampled
    from simtune.sim.run_basis import cost_basis
    from simtune.validation.judge.prediction import predict, validation_of

    d, load_curves, files = experiment.deployment, [], {}
    results = []
    for load in wanted:
        predicted = predict(d, load, asked.worlds, asked.seed)
        results.append((load, runs[load.label], predicted))
        load_curves.append(curves(load.label, predicted.result, runs[load.label], sampled(predicted.result)))
        files[f"predicted/{load.label}.csv"] = requests_csv(predicted.result)
        for repeat, run in enumerate(runs[load.label]):
            for tool in asked.export:
                folder.export(tool, load, repeat, run)
    note_basis(cost_basis(d, results[0][2].result, errors=False))
    validation = validation_of(d, results, asked.tolerance)
    page = {"validation.html": render(validation, load_curves)}
    folder.keep({"plan.yaml": plan_file(experiment.plan, "Validated by simtune.", folder.path), **files, **page})
    folder.keep_records("validation.json", validation, _manifest(experiment, asked))
    return validation


def _record(target: Path, validation: Validation, out: Path) -> None:
    """Note the result in a hardware profile."""
    import json

    from simtune.cli.output import write_profile
    from simtune.specs import catalog
    from simtune.validation.judge.profile_note import recorded

    folder = _profile_folder(target)
    hardware = catalog.load_hardware(str(folder / "profile.yaml"))
    date = str(json.loads((out / "manifest.json").read_text("utf-8"))["written"])[:10]
    write_profile(folder, recorded(hardware, validation, date), "Validated by simtune; fitted as its operators say.")
    click.echo(f"noted in {folder / 'profile.yaml'}", err=True)


def _profile_folder(target: Path) -> Path:
    """Return the folder of a profile in which a note may be written. Raises UsageError if there is none."""
    folder = target if target.is_dir() else target.parent
    if not (folder / "profile.yaml").is_file():
        raise UsageError(f"--record {target}: holds no profile.yaml; copy the profile to a folder of yours first")
    return folder


def _print(v: Validation, out: Path) -> None:
    from simtune.report.validation_page import headline, rows, warnings

    columns = ("what", "predicted", "90 % interval", "measured", "noise", "error", "verdict")
    for load in v.loads:
        rate = "" if load.rate_rps is None else f", {load.rate_rps:.3g} requests/s"
        print_table(f"{load.label}{rate}: {load.requests} requests, {load.repeats} runs", columns, rows(load))
    for words in warnings(v):
        click.echo(words, err=True)
    click.echo(headline(v))
    click.echo(f"report: {out / 'validation.html'}")


def _manifest(experiment: Experiment, asked: _Asked) -> Manifest:
    from simtune.runs.manifest import manifest

    d = experiment.deployment
    inputs = (d.model, *d.profiles.values(), experiment.workload, d.plan)
    return manifest(command_line(), inputs, experiment.trace, asked.seed)


def _decide(given: _Given, count: int, choice: EngineChoice, asked: _Asked, out: Path, as_json: bool) -> int:
    """Run several plans around the chosen one for real: did the simulation order them rightly?"""
    from contextlib import closing

    from simtune.validation.judge.decision import PlanOutcome, around, decide
    from simtune.validation.loads import knee_rps, loads
    from simtune.validation.session import Round, run_plans

    if choice.name not in ENGINES:
        raise UsageError("--plans starts an engine for every plan; name one that can be started: --engine vllm")
    specs = given.in_run_directory()
    chosen = specs.experiment(asked.seed)
    rates = asked.rates or (0.9 * knee_rps(chosen.deployment, chosen.stream, asked.seed),)
    (load,) = loads(chosen.deployment, chosen.stream, rates[:1], asked.seed)
    how = Round(asked.repeats, asked.most_late, asked.seed)
    with closing(make_engine(choice, chosen)) as engine, progress("runs", asked.quiet) as update:
        engine.check(chosen.deployment.plan)
        trials = [
            (specs.experiment(asked.seed, plan).deployment, load._replace(label=plan.name))
            for plan in around(chosen.deployment.plan, count, engine.check)
        ]
        # Before any is run: what cannot be simulated is said at once.
        predicted = [
            d.simulate(trial_load.stream, seed=asked.seed).statistic("e2el", "mean") for d, trial_load in trials
        ]
        folder = _folder(chosen, asked, [count, *_identity(choice)], out)
        runs = run_plans(engine, [(d.plan, trial_load) for d, trial_load in trials], how, folder, update)
    outcomes = []
    for (deployment, trial_load), seconds in zip(trials, predicted, strict=True):
        measured = [run.statistic("e2el", "mean") for run in runs[trial_load.label]]
        outcomes.append(
            PlanOutcome(plan=trial_load.label, predicted_s=seconds or 0.0, measured_s=tuple(filter(None, measured)))
        )
        folder.keep({f"plans/{trial_load.label}.yaml": deployment.plan.to_yaml("Run by simtune validate.")})
    decision = decide(outcomes, load.rate_rps, asked.seed)
    folder.keep_records("decision.json", decision, _manifest(chosen, asked))
    if as_json:
        print_json(decision.to_data())
    else:
        _print_decision(decision)
    return 4 if decision.regret_low > asked.tolerance else 0


def _print_decision(decision: Ranking) -> None:
    rows = [
        (
            p.plan,
            *(milliseconds(s) for s in (p.predicted_s, p.middle_s, min(p.measured_s), max(p.measured_s))),
            "measured best" if p.plan == decision.best else "",
        )
        for p in decision.plans
    ]
    columns = ("plan", "predicted ms", "measured ms", "least", "most", "")
    print_table("mean E2EL, predicted best first", columns, rows)
    low, high = (number(x) for x in (decision.tau_low, decision.tau_high))
    click.echo(f"Kendall's tau {number(decision.tau)} (90 %: {low} to {high})")
    click.echo(f"regret {decision.regret:.1%} (90 %: {decision.regret_low:.1%} to {decision.regret_high:.1%})")
