"""What is installed is what stands in the tree: nothing missing, nothing more, no name beside simtune."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "simtune"
LINKS = {name: Path("simtune", name) for name in ("hwprofiles", "models", "tuner", "workloads")} | {
    "examples/systems": Path("..", "simtune", "systems")
}
"""Links for people who look at the top level; nothing reads through them."""
KEPT = {".py", ".yaml", ".json", ".csv", ".npz", ".j2", ".typed"}
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "tests", "benchmarks", "*.egg-info")


def tree(package: Path) -> dict[str, bytes]:
    """Return the content of every file of the package, by its path in site-packages."""
    found = {}
    for path in package.rglob("*"):
        name = str(Path("simtune", path.relative_to(package)))
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("."):
            found[name] = path.read_bytes()
    return found


def not_source(folder: str, names: list[str]) -> set[str]:
    """What a copy leaves out; `runs` in the root are results, `simtune/runs` is a package."""
    return NOT_SOURCE(folder, names) | ({"runs"} if Path(folder) == ROOT else set())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist, each built from a copy of the tree, so that nothing of earlier builds gets in."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=not_source)
    setuptools = int(metadata.version("setuptools").split(".")[0])
    how = ["--no-isolation"] if setuptools >= 77 else []  # isolated: fetched for the build alone
    done = subprocess.run(
        [sys.executable, "-m", "build", *how, "--sdist", "--wheel", "--outdir", folder / "dist", folder / "source"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> dict[str, bytes]:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_package_holds_no_links() -> None:
    assert [path for path in PACKAGE.rglob("*") if path.is_symlink()] == []


def test_links_of_the_top_level_lead_into_the_package() -> None:
    links = {name: ROOT / name for name in LINKS if (ROOT / name).is_symlink()}
    if not links:
        pytest.skip("this checkout has no links (core.symlinks=false, or an archive without them)")
    assert {name: link.readlink() for name, link in links.items()} == LINKS
    assert [name for name, link in links.items() if not link.is_dir()] == []


def test_the_tree_holds_only_kinds_of_files_that_are_shipped() -> None:
    assert {Path(name).suffix for name in tree(PACKAGE)} <= KEPT


def test_the_wheel_is_the_tree(wheel: dict[str, bytes]) -> None:
    installed = {name: content for name, content in wheel.items() if not name.split("/")[0].endswith(".dist-info")}
    expected = tree(PACKAGE)
    assert sorted(installed) == sorted(expected)
    assert [name for name in expected if installed[name] != expected[name]] == []
    # The comparison above would also pass on two empty sets.
    assert {"simtune/py.typed", "simtune/cli/optimize.py", "simtune/runs/schema.py",
            "simtune/tuner/search/best_first.py", "simtune/workloads/chat.yaml",
            "simtune/hwprofiles/h100-sxm/profile.yaml", "simtune/report/report.html.j2"} <= set(installed)  # fmt: skip


def test_the_wheel_brings_no_other_top_level_name(wheel: dict[str, bytes]) -> None:
    version = next(name.split("-")[1].removesuffix(".dist") for name in wheel if ".dist-info/" in name)
    assert {name.split("/")[0] for name in wheel} == {"simtune", f"simtune-{version}.dist-info"}
    assert wheel[f"simtune-{version}.dist-info/top_level.txt"] == b"simtune\n"
    assert b"simtune = simtune.cli:main" in wheel[f"simtune-{version}.dist-info/entry_points.txt"]
    assert wheel[f"simtune-{version}.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_holds_what_the_wheel_is_made_of(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    packed = {}
    with tarfile.open(path) as archive:
        for member in archive:  # in the archive's order: a step back would unpack everything again
            assert member.isfile() or member.isdir(), "links would dangle"
            if member.isfile():
                file = archive.extractfile(member)
                assert file is not None
                packed[member.name.split("/", 1)[1]] = file.read()
    for name, content in tree(PACKAGE).items():
        assert packed.get(name) == content, name
    assert {"pyproject.toml", "README.md", "LICENSE"} <= set(packed)


def test_an_installed_wheel_works_away_from_the_tree(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
    script = (
        "import sys; sys.path.insert(0, 'site'); import simtune.tuner; from importlib.resources import files\n"
        "print(simtune.tuner.__file__); print(simtune.load('chat').name, simtune.load('h100-sxm').name)\n"
        "print((files('simtune.report') / 'report.html.j2').is_file())\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "site/simtune/tuner/__init__.py"), "chat h100-sxm", "True"]
