"""simtune replay: does a scheduler decide as the engine did that wrote this log?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from simtune.cli.options import json_option
from simtune.cli.output import print_json, print_table
from simtune.cli.paths import PATH

if TYPE_CHECKING:
    from simtune.validation.replay.scheduler_replay import Decision, Parting, Replay, State

SHOWN = 12
"""Most names of a list, and rows of a table, that are printed."""


@click.command()
@click.argument("steplogs", nargs=-1, required=True, type=PATH, metavar="STEPLOG...")
@click.option("--policy", default=None, help="Scheduling policy in place of that of the log's engine.")
@json_option
def replay(steplogs: tuple[Path, ...], policy: str | None, as_json: bool) -> int:
    """Drive the scheduler through each STEPLOG of a real engine, and compare every step.

    Exits with 4 if a schedule differs from its log, and prints the step, both decisions, and the state before.
    """
    from dataclasses import asdict

    from simtune.validation.replay.scheduler_replay import replay as drive
    from simtune.validation.replay.step_log import read

    replays = [drive(log, policy) for log in [read(path) for path in steplogs]]
    equal = all(run.parting is None for run in replays)
    if as_json:
        print_json({"equal": equal, "replays": [asdict(run) for run in replays]})
    else:
        for run in replays:
            click.echo(_summary(run))
            if run.parting is not None:
                _show(run.parting)
    return 0 if equal else 4


def _summary(run: Replay) -> str:
    end = "all equal" if run.parting is None else f"parts at step {run.parting.step}, {run.equal} equal before"
    return f"{run.file}: {run.engine}, {run.policy}: {run.steps} steps, {end}"


def _show(parting: Parting) -> None:
    click.echo(_before(parting.before))
    logged, simulated = parting.logged, parting.simulated
    if logged is None or simulated is None:
        click.echo("  the log ends here, the scheduler goes on" if logged is None else "  the scheduler runs nothing")
        return
    rows: list[tuple[str, ...]] = [
        (name.replace("_", " "), _shown(logged, name), _shown(simulated, name))
        for name in parting.different
        if name != "scheduled"
    ]
    if "scheduled" in parting.different:
        sides = _places(logged.scheduled), _places(simulated.scheduled)
        places = [i for i in range(max(map(len, sides))) if sides[0][i : i + 1] != sides[1][i : i + 1]]
        rows += [(f"place {i + 1}", *("".join(side[i : i + 1]) or "-" for side in sides)) for i in places[:SHOWN]]
        if len(places) > SHOWN:
            rows.append((f"and {len(places) - SHOWN} places more", "", ""))
    print_table(f"Step {parting.step}: what differs", ("", "logged", "simulated"), rows)


def _places(scheduled: tuple[tuple[str, int], ...]) -> list[str]:
    return [f"{request}: {tokens}" for request, tokens in scheduled]


def _shown(decision: Decision, name: str) -> str:
    value = getattr(decision, name)
    if isinstance(value, int):
        return str(value)
    return _first([item if isinstance(item, str) else f"{item[0]} (cached {item[1]})" for item in value])


def _before(state: State) -> str:
    running = [f"{r.request} ({r.computed_tokens}, {r.emitted_tokens})" for r in state.running]
    return (
        f"  before: {state.free_blocks} blocks free\n"
        f"  running {len(running)} (tokens computed, delivered): {_first(running)}\n"
        f"  waiting {len(state.waiting)}: {_first(list(state.waiting))}"
    )


def _first(words: list[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more or "-"
