"""Every kind of page that simtune writes, small, each with plain names and with names that would break it.

    python -m benchmarks.pages FOLDER

They are made by simtune's own commands, for `make screens` to look at. Hostile names are as long as a name can be
without a place to break, markup, right to left, and signs beyond the first plane of Unicode.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from simtune.specs.catalog import load_hardware, load_model

ROOT = Path(__file__).resolve().parents[1]
LONG = "x" * 120
"""The name of a spec: letters, digits, dots and dashes are allowed."""
MARKUP = "<script>alert(1)<&\"'b>"
TURNED = "\u05d0\u05d1\u05d2 \u0645\u0631\u062d\u0628\u0627"
SIGNS = "\U0001f680\U0001f468\u200d\U0001f4bb"
HOSTILE = (f"{MARKUP} {TURNED}", f"{SIGNS} {'y' * 110}", LONG)
"""Names of files and folders."""
DEVICE = f"{MARKUP} {TURNED} {SIGNS} {'z' * 60}"
DRAFTS = ("--drafter", "eagle3", "--acceptance", "eagle3-llama-3.1-8b")
ONE_CARD = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat")
SHORT = ("--requests", "400")


def simtune(*arguments: str, may: tuple[int, ...] = (0,)) -> None:
    """A command, which may end with these codes."""
    done = subprocess.run([sys.executable, "-m", "simtune", *arguments], check=False, stdout=subprocess.DEVNULL)
    if done.returncode not in may:
        raise RuntimeError(f"simtune {' '.join(arguments)}: exit code {done.returncode}")


def study(folder: Path, name: str, **changed: object) -> str:
    """The study of the examples, changed and with fewer requests, as a file."""
    asked = yaml.safe_load((ROOT / "examples" / "quickstart" / "study.yaml").read_text("utf-8"))
    small = {
        "tp": [1, 2],
        "pp": [1],
        "max_num_seqs": [128, 256],
        "max_num_batched_tokens": [1024, 2048],
        "requests": 1000,
    }
    asked |= {"name": name, "hardware": {"profile": "h100-sxm", "devices": 2}, "search": small}
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(asked | changed), "utf-8")
    return str(file)


def bench(folder: Path) -> str:
    """What `vllm bench serve --save-detailed` would leave of a server with even steps."""
    lengths = [(200 + 37 * i % 900, 40 + 11 * i % 160) for i in range(60)]
    file = folder / f"{HOSTILE[0]}.json"
    document = {
        "backend": "vllm",
        "num_prompts": len(lengths),
        "input_lens": [prompt for prompt, _ in lengths],
        "output_lens": [output for _, output in lengths],
        "start_times": [0.3 * i for i in range(len(lengths))],
        "ttfts": [0.02 + 2e-5 * prompt for prompt, _ in lengths],
        "itls": [[0.009] * (output - 1) for _, output in lengths],
        "errors": [""] * len(lengths),
    }
    file.write_text(json.dumps(document), "utf-8")
    return str(file)


def searched(out: Path) -> None:
    """A search with worlds, a day and limits that bind; and one of long names, with drafts."""
    day = {"startup_s": 180, "windows": [{"hours": 14, "rate_rps": 3}, {"hours": 10, "rate_rps": 20}]}
    simtune("optimize", study(out, "plain", day=day), "--worlds", "20", "--out", str(out / "search"))
    drafter = {"kind": "eagle", "method": "eagle3", "draft_vocab_size": 32000, "checkpoint": DEVICE}
    drafts = [{"drafter": drafter, "acceptance": "eagle3-llama-3.1-8b"}]
    model = load_model("llama-3.1-8b")
    spec = out / "model.yaml"
    spec.write_text(model.model_copy(update={"name": LONG, "hf": DEVICE}).to_yaml(), "utf-8")
    small = {"tp": [1], "pp": [1], "max_num_seqs": [128], "max_num_batched_tokens": [2048, 8192], "requests": 600}
    hostile = study(out, LONG, speculation=drafts, model=f"./{spec.name}", search=small)
    simtune("optimize", hostile, "--out", str(out / "search-hostile"))


def fronts(out: Path) -> None:
    """The front of a study, with prefill and decode pools beside mixed ones."""
    small = {
        "tp": [1],
        "pp": [1],
        "max_num_seqs": [64, 256],
        "max_num_batched_tokens": [2048],
        "requests": 400,
        "front": 5,
    }
    asked = study(out, "front", objective="pareto", search=small | {"layouts": ["mixed", "prefill-decode"]})
    simtune("optimize", asked, "--out", str(out / "front"))


def simulated(out: Path) -> None:
    """Runs of one plan: on one card, of two pools, saturated, and under a trace of a hostile name."""
    simtune("simulate", *ONE_CARD, *SHORT, "--rate", "12", "--uncertainty", "20", "--out", str(out / "one"))
    apart = str(ROOT / "examples" / "prefill-decode" / "plan.yaml")
    simtune("simulate", "--plan", apart, "--workload", "chat", "--rate", "12", *SHORT, "--out", str(out / "pools"))
    simtune("simulate", *ONE_CARD, *SHORT, "--rate", "200", "--out", str(out / "saturated"), may=(3,))
    profile = out / "profile"
    card = load_hardware("l40s")
    shutil.copytree(ROOT / "simtune/hwprofiles" / "l40s", profile)
    text = (profile / "profile.yaml").read_text("utf-8")
    named = text.replace(card.device.name, json.dumps(DEVICE, ensure_ascii=False), 1)
    if named == text:
        raise RuntimeError(f"{card.device.name} does not stand in the profile")
    (profile / "profile.yaml").write_text(named, "utf-8")
    hostile = ("--model", "llama-3.1-8b", "--hardware", str(profile), "--workload", bench(out))
    for name in HOSTILE:
        simtune("simulate", *hostile, "--out", str(out / name))
    simtune("show", str(profile), "--html", str(out / "profile-hostile.html"))


def measured(out: Path) -> None:
    """A validation, judged of a log."""
    options = ("--from", bench(out), "--uncertainty", "0", "--tolerance", "0.1")
    simtune("validate", str(out / "one" / "plan.yaml"), *options, "--out", str(out / "validation"), may=(0, 1, 4))


def published(out: Path) -> None:
    """A family of published systems, as a page and to stand beside others; and three of them on a load."""
    simtune("reproduce", "batching", "--html", str(out / "systems.html"))
    simtune("reproduce", "iso", "amphista", "layered-prefill", *ONE_CARD, "--html", str(out / "own-load.html"))
    found = subprocess.run(
        [sys.executable, "-m", "simtune", "reproduce", "batching", "--json"],
        check=False,
        capture_output=True,
        text=True,
    )
    (out / "systems.json").write_text(found.stdout, "utf-8")


def small(out: Path) -> None:
    """Pages of verbs with `--html`, and a sweep."""
    simtune("show", "h100-sxm", "--html", str(out / "profile.html"))
    simtune("workload", bench(out), "--html", str(out / "load.html"))
    simtune("speculate", *ONE_CARD[:4], *DRAFTS, "--html", str(out / "drafts.html"))
    cards = ("--over", "hardware=h100-sxm,l40s,l4", "--over", "rate=2:10:4")
    simtune(
        "sweep",
        "--model",
        "llama-3.1-8b",
        "--workload",
        "chat",
        *cards,
        "--requests",
        "200",
        "--out",
        str(out / "sweep"),
    )


def together(out: Path) -> None:
    """Several runs in one page, two and all kinds; and the index of the folder."""
    simtune("report", str(out / "one"), str(out / "search"), "--out", str(out / "compared.html"))
    names = ["search", "search-hostile", "front", "one", "pools", "saturated", *HOSTILE, "validation", "systems.json"]
    simtune("report", *(str(out / name) for name in names), "--out", str(out / "compared-all.html"))
    simtune("report", str(out), "--out", str(out / "index.html"))


KINDS: tuple[Callable[[Path], None], ...] = (searched, fronts, simulated, measured, published, small, together)
PAGES = {
    "search/report.html": "a search with worlds, a day and limits that bind",
    "search-hostile/report.html": "a search of long names, with drafts",
    "front/report.html": "a front, with prefill and decode pools beside mixed ones",
    "one/report.html": "a simulated plan, with worlds",
    "pools/report.html": "a simulated plan of a prefill and a decode pool",
    "saturated/report.html": "a plan under more load than it serves",
    f"{HOSTILE[0]}/report.html": "a simulated plan, all names hostile",
    "validation/validation.html": "a prediction beside the log of a server",
    "systems.html": "a family of published systems",
    "profile.html": "a hardware profile",
    "profile-hostile.html": "a hardware profile of a hostile name",
    "load.html": "a trace, and the spec fitted to it",
    "drafts.html": "a schedule of drafts",
    "sweep/sweep.html": "a sweep over cards and rates",
    "compared.html": "a simulated plan beside a search",
    "compared-all.html": "runs of all kinds beside each other",
    "index.html": "the index of a folder of runs",
}
"""Of a folder, after `make`: every kind of page, and what it is."""


def make(out: Path) -> dict[Path, str]:
    """All pages, in a new folder, and what they are."""
    out.mkdir(parents=True)
    for kind in KINDS:
        kind(out)
        sys.stderr.write(f"made: {kind.__name__}\n")
    return {out / page: words for page, words in PAGES.items()}


def main() -> None:
    """Make them in the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for page in make(parser.parse_args().folder):
        sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    main()
