"""Imports go one way, from floor to floor; clocks, chance and argv stay where they belong; --help loads little."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest
from packaging.requirements import Requirement

from tests.docs.reading import ROOT, module_names, modules

GROUND = {"arrays", "errors", "specs"}
LAW: dict[str, set[str]] = {
    "arrays": set(),
    "errors": set(),
    "engine": {"arrays"},
    "specs": {"arrays", "errors"},
    "costs": {"arrays", "errors", "specs"},
    "emit": {"errors", "specs"},
    "profiling": {"arrays", "errors", "specs", "costs"},
    "workload": {"arrays", "errors", "specs", "costs"},
    "results": {"arrays", "errors", "specs", "engine", "costs", "workload"},
    "sim": GROUND | {"engine", "costs", "workload", "results"},
    "testing": GROUND | {"engine", "costs", "workload", "results", "sim"},
    "tuner": GROUND | {"engine", "costs", "emit", "workload", "results", "sim"},
    "api": GROUND | {"engine", "costs", "emit", "workload", "results", "sim", "tuner"},
    "runs": GROUND | {"costs", "emit", "workload", "results", "sim", "tuner", "api"},
    "validation": GROUND
    | {"engine", "costs", "emit", "profiling", "workload", "results", "sim", "tuner", "api", "runs"},
    "report": GROUND | {"costs", "workload", "results", "sim", "tuner", "runs", "validation"},
    "cli": GROUND
    | {
        "engine",
        "costs",
        "profiling",
        "workload",
        "results",
        "sim",
        "emit",
        "report",
        "tuner",
        "runs",
        "api",
        "validation",
    },
}
"""What each floor may import besides itself. The package's own `__version__` is open to all."""

CLOCKS = {"time", "datetime", "sched", "timeit"}
CLOCK_READERS = {
    "simtune.runs.manifest",  # the time of day for manifest.json
    "simtune.specs.folder_lock",  # waits a moment for another host
    "simtune.cli.pace",  # how fast work goes, said on stderr
    "simtune.profiling.timing",  # measuring
    "simtune.validation.client.real_clock",  # the real clock beside the simulated one
    *(f"simtune.validation.servers.{name}" for name in ("engine_clocks", "gauge", "vllm_steps")),
}
MEASURERS = {
    *(f"simtune.profiling.{name}" for name in ("operands", "kernels", "decoder", "rig", "collectives", "torch_device")),
    *(f"simtune.validation.servers.{name}" for name in ("cached_decoder", "decode_graphs", "gauge")),
}  # torch at the top
ADAPTER = "simtune.validation.servers.transformers_engine"  # inside functions
NUMPY_GENERATORS = {"default_rng", "Generator", "Philox", "PCG64", "SeedSequence"}


def imports(module: ast.Module) -> Iterator[str]:
    """Full names of all that is imported, at the top or inside functions: `from a.b import c` is a.b.c."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor(name: str) -> str:
    """`simtune.costs.tables` stands on the floor `costs`."""
    return name.split(".")[1]


def test_every_floor_is_under_the_law() -> None:
    floors = {floor(name) for name in modules() if "." in name} - {"__main__"}
    assert floors == set(LAW)


@pytest.mark.parametrize("name", sorted(name for name in module_names() if "." in name and name != "simtune.__main__"))
def test_imports_go_one_way(name: str) -> None:
    allowed = LAW[floor(name)] | {floor(name), "__version__"}
    imported = list(imports(modules()[name]))
    inside = [full_name for full_name in imported if full_name.split(".")[0] == "simtune"]
    assert [full_name for full_name in inside if floor(full_name) not in allowed] == []
    assert not [full_name for full_name in imported if full_name.split(".")[0] in ("tuner", "tests")]


def test_no_imports_run_in_a_circle() -> None:
    """Those under TYPE_CHECKING and inside functions included. CycleError names the modules of a circle."""
    known = module_names()
    graph = {
        name: {full if full in known else full.rpartition(".")[0] for full in imports(module)} - {"simtune"}
        for name, module in modules().items()
    }
    TopologicalSorter(graph).prepare()


def test_only_the_manifest_the_profiler_and_real_engines_know_a_clock() -> None:
    readers = {name for name, module in modules().items() if {i.split(".")[0] for i in imports(module)} & CLOCKS}
    assert readers == CLOCK_READERS


def test_durations_are_told_by_clocks_that_nobody_sets() -> None:
    """The time of day may be set: only the manifest has it, and stamps of the kernel while nobody did."""
    asked = {
        name
        for name, module in modules().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node).startswith(("time.", "datetime."))
        and node.attr in ("time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime")
    }
    assert asked == {"simtune.runs.manifest", "simtune.validation.client.real_clock"}


def test_chance_comes_from_seeded_generators_only() -> None:
    for name, module in modules().items():
        heads = {found.split(".")[0] for found in imports(module)}
        assert not heads & {"random", "secrets", "uuid"}, name
        assert not [
            i for i in imports(module) if i.startswith("numpy.random") and i.split(".")[-1] not in NUMPY_GENERATORS
        ]
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("np.random", "numpy.random"):
                assert node.attr in NUMPY_GENERATORS, f"{name}: np.random.{node.attr} is the global generator"
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("default_rng", "SeedSequence")):
                assert node.args or node.keywords, f"{name}: a generator without a seed"


def test_torch_and_other_heavy_company_stay_out() -> None:
    for name, module in modules().items():
        heads = {found.split(".")[0] for found in imports(module)}
        assert not heads & {"sklearn", "pickle"}, name
        assert "pandas" not in heads or name == "simtune.results.frames", (
            name
        )  # inside a function, for those who have it
        assert "torch" not in heads or name in {*MEASURERS, ADAPTER}, name
        assert "transformers" not in heads or name == ADAPTER, name


def test_what_windows_lacks_stays_in_its_helpers() -> None:
    """`vllm_steps` runs beside vLLM, on Linux only."""
    absent = ("sysconf", "fork", "setsid", "sched_getaffinity", "sched_setaffinity", "getppid", "getuid", "killpg")
    users = {
        name
        for name, module in modules().items()
        for node in ast.walk(module)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in {f"os.{attribute}" for attribute in absent})
        or (isinstance(node, ast.Import) and {alias.name for alias in node.names} & {"resource", "fcntl", "pwd"})
    }
    assert users == {
        "simtune.specs.room",
        "simtune.sim.parallel",  # where sys.platform is linux
        "simtune.specs.folder_lock",  # where sys.platform is not win32
        "simtune.validation.servers.vllm_steps",
    }


def test_hypothesis_is_for_those_who_test_only() -> None:
    users = {
        floor(name)
        for name, module in modules().items()
        if "hypothesis" in {found.split(".")[0] for found in imports(module)}
    }
    assert users == {"testing"}


def test_what_every_installation_brings_is_imported() -> None:
    """A dependency that only tests import belongs to the extra `dev`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {Requirement(line).name.lower() for line in project["dependencies"]}
    heads = {name.split(".")[0] for module in modules().values() for name in imports(module)}
    assert {"yaml" if name == "pyyaml" else name for name in names} - heads == set()
    assert "simpy" not in heads


def test_the_library_never_reads_argv() -> None:
    readers = {
        floor(name)
        for name, module in modules().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.argv"
    }
    assert readers <= {"cli"}


@pytest.mark.parametrize(
    "asked", ["--help", "--version", "optimise", "list --help", "optimize --help", "simulate --help"]
)
def test_help_loads_nothing_heavy(asked: str) -> None:
    """Start-up time is a matter of what is imported, and that can be told without a watch."""
    script = (
        "import sys\nfrom simtune.cli import main\n"
        f"try:\n    main({asked.split()!r})\nexcept SystemExit:\n    pass\n"
        "print('LOADED', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.rpartition("LOADED ")[2].split())
    assert "click" in loaded
    assert not loaded & {"numpy", "pydantic", "yaml", "rich", "scipy", "plotly", "jinja2", "multiprocessing"}
