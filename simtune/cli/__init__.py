"""The command line: parses, calls the library, prints. One module per verb, imported only when called.

Data goes to stdout, words and progress to stderr, progress only on a terminal. Exit codes: 0 ok, 1 error, 2 bad usage
or spec, 3 no feasible plan or saturated, 4 outside tolerance, 130 interrupted.
"""

from __future__ import annotations

import difflib
import errno
import gc
import importlib
import io
import os
import sys
import traceback
from typing import Any

import click

from simtune import __version__
from simtune.errors import SimtuneError, is_interrupt

VERBS = {
    "new": "Write a study, from six answers.",
    "optimize": "Find the best schedule for a study, and write plan, engine configs and report.",
    "simulate": "Run one plan under one load.",
    "sweep": "Simulate every point of a grid over fields of plan, workload or hardware.",
    "import": "Make a plan of what starts your servers: a command line, a script, a manifest.",
    "explain": "Explain a plan in words.",
    "report": "Draw the report of a run again, or of several side by side.",
    "certify": "Check a search's proof without trusting it.",
    "measure": "Write the runs on a real system that tell the leading plans apart.",
    "reproduce": "Simulate published systems beside what they claim.",
    "rank": "Rank published techniques on your model, hardware and load.",
    "workload": "Describe a trace, cut or scale it, and fit a spec to it.",
    "acceptance": "Estimate how often drafts are kept, from what engines log.",
    "speculate": "Choose how to draft at every batch size and context.",
    "profile": "Measure this machine and fit a hardware profile.",
    "fit": "Fit a hardware profile from published tables.",
    "calibrate": "Correct a hardware profile by an engine's own log.",
    "validate": "Run a plan on a real engine, and compare.",
    "loop": "Profile an engine, find its best plan, run it, compare, refit.",
    "replay": "Compare a scheduler step by step with an engine's log.",
    "weights": "Write random weights for a model, or a pair whose acceptance is chosen.",
    "list": "List built-in models, profiles, loads, presets and parts.",
    "show": "Print a spec, with what follows from it.",
    "check": "Check spec and trace files.",
    "schema": "Print the JSON schema of a kind of spec.",
    "doctor": "Check this installation.",
}
"""Verbs in the order of `--help`: plans, loads and drafts, hardware, real engines, and built-in specs."""

_MODULES = {"import": "import_plan"}
"""Modules of verbs that no Python name may have."""

INTERNAL = (
    "internal error: a mistake in simtune, not in what you asked for; please report the lines above with your command "
    "and files, as CONTRIBUTING.md says"
)


COLLECTED_AFTER = (50_000, 20, 100)
"""New objects after which cycles are collected, and collections of one generation before one of the next."""

READS_CODE = (
    "optimize", "simulate", "sweep", "validate", "check", "explain", "certify", "replay", "loop", "calibrate", "show",
    "report", "speculate", "acceptance", "measure",
)  # fmt: skip
"""Verbs that read plans or studies, which may name code of their own."""


def _allow_code_option() -> click.Option:
    def permit(ctx: click.Context, option: click.Parameter, given: bool) -> None:
        if given:
            from simtune.specs.plugins import allow_code

            allow_code()

    return click.Option(
        ["--allow-code"],
        is_flag=True,
        envvar="SIMTUNE_ALLOW_CODE",
        expose_value=False,
        is_eager=True,
        callback=permit,
        help="Run modules that the files name (module:Class). Only with files that you trust.",
    )


SIMULATES = ("optimize", "simulate", "sweep", "validate", "certify", "loop", "reproduce", "rank", "measure")
"""Verbs that simulate, whose runs can be audited."""


def _audit_option() -> click.Option:
    def switch_on(ctx: click.Context, option: click.Parameter, given: bool) -> None:
        if given:
            os.environ["SIMTUNE_AUDIT"] = "1"

    return click.Option(
        ["--audit"],
        is_flag=True,
        envvar="SIMTUNE_AUDIT",
        expose_value=False,
        callback=switch_on,
        help="Check that every simulation loses no request, token, block, byte or GPU.",
    )


class _Verbs(click.Group):
    """Loads a verb's module when it is called, so that --help stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        # Not `list(VERBS)`: the verb `list` is a module of this package, and hides the function once it is loaded.
        return [*VERBS]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = _MODULES.get(name, name)
        command: click.Command = getattr(importlib.import_module(f"simtune.cli.{module}"), module)
        names = {option.name for option in command.params}
        if name in READS_CODE and "allow_code" not in names:
            command.params.append(_allow_code_option())
        if name in SIMULATES and "audit" not in names:
            command.params.append(_audit_option())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*VERBS.items()])


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SIMTUNE"},
    epilog="Exit codes: 0 ok, 1 error, 2 bad usage or spec, 3 no feasible plan or saturated, 4 outside tolerance, "
    "130 interrupted.",
)
@click.version_option(__version__, prog_name="simtune")
@click.option("--log-json", is_flag=True, help="Progress as JSON lines on stderr, for machines.")
def cli(log_json: bool) -> None:
    """Find the inference schedule for a model on some hardware under some load."""


def main(args: list[str] | None = None) -> Any:
    """Entry point of the `simtune` command."""
    # Before numpy is loaded, here and in worker processes: threads of small matrix products only wait for one another.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # By default the collector runs after every 700 new objects. While modules are imported and plans are made these are
    # nearly all still in use, and a search spent 3 % of its time on looking at them.
    gc.set_threshold(*COLLECTED_AFTER)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a letter shows a replacement instead of failing.
            stream.reconfigure(errors="replace")
    try:
        code = cli.main(args, standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(_report(error))
    finally:
        _unlock()
    sys.exit(code if isinstance(code, int) else 0)


def _unlock() -> None:
    """Let others write what this command had locked; nothing if it locked nothing, which needs no module."""
    locks = sys.modules.get("simtune.specs.folder_lock")
    if locks is not None:
        locks.release()


def _report(error: BaseException) -> int:
    """Print what ended a command on stderr; return the exit code."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.Abort) or is_interrupt(error):
        click.echo("interrupted; what was not finished was not written", err=True)
        return 130
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, SimtuneError):
        click.echo(str(error), err=True)
        return error.exit_code
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        click.echo(f"{str(error.filename)[:40]}...: the name is too long; give a shorter one", err=True)
        return 2
    if isinstance(error, BrokenPipeError):
        sys.stderr.close()
    elif isinstance(error, OSError):
        click.echo(f"cannot go on: {error}", err=True)
    elif isinstance(error, MemoryError):
        click.echo("out of memory; ask for fewer requests or fewer --jobs", err=True)
    else:
        traceback.print_exception(error)
        click.echo(INTERNAL, err=True)
    return 1
