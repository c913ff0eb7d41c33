"""CPU of whole searches, from the start of the command to the report, on the cases of AIConfigurator's documentation.

    python -m pytest benchmarks/tuner/test_whole_commands.py -m benchmark_only -s
    AICONFIGURATOR=/path/to/bin/aiconfigurator python -m pytest ... (release 0.12, in turns with it)

One process. A unit is ten million turns of `s += i * i`, measured before and after. Limits are on means, prompts have
4,000 tokens, prefill and decode pools are searched beside mixed ones. The fourth case is ended after BUDGET.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import children_s, unit_s
from benchmarks.results import Recorder

pytestmark = pytest.mark.benchmark_only

STUDIES = Path(__file__).parent / "aiconfigurator"
BUDGET = "600s"
ARGUMENTS = {
    "llama8": "--backend vllm --model-path meta-llama/Meta-Llama-3.1-70B --total-gpus 8 --osl 500 --ttft 1000 "
    "--tpot 25",
    "qwen8": "--backend vllm --model-path Qwen/Qwen3-32B --total-gpus 8 --osl 500 --ttft 300 --tpot 10",
    "qwen16": "--backend vllm --model-path Qwen/Qwen3-32B --total-gpus 16 --osl 500 --ttft 1000 --tpot 20",
    "deepseek32": "--backend trtllm --model-path deepseek-ai/DeepSeek-V3 --total-gpus 32 --osl 1000 --ttft 2000 "
    "--tpot 30 --nextn 1 --nextn-accepted 0.85",
}
"""Arguments of `aiconfigurator cli default --system h200_sxm --isl 4000` for the same question."""


def units_of(command: list[str]) -> float:
    """Run a command; return its CPU in units of now."""
    before, begun = unit_s(), children_s()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return (children_s() - begun) / ((before + unit_s()) / 2)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_whole_command(name: str, record: Recorder, tmp_path: Path) -> None:
    out = tmp_path / "run"
    main = "import sys; from simtune.cli import main; sys.exit(main())"
    study = [str(STUDIES / f"{name}.yaml"), "--jobs", "1", "--quiet", "--budget", BUDGET, "--out", str(out)]
    units = units_of([sys.executable, "-c", main, "optimize", *study])
    answer = json.loads((out / "summary.json").read_text())
    objective = answer["objective"]
    record(f"{name}: whole command", units, "units", "lower")
    record(f"{name}: gap", objective["gap"], "of the value", "lower")
    print(f"{name}: {units:.1f} units, {objective['value']:.4g} {objective['unit']}, gap {objective['gap']:.1%}")
    if program := os.environ.get("AICONFIGURATOR"):
        usual = ["cli", "default", "--no-color", "--system", "h200_sxm", "--isl", "4000"]
        theirs = units_of([program, *usual, *ARGUMENTS[name].split()])
        record(f"{name}: over AIConfigurator's", units / theirs, "of its CPU", "lower")
        print(f"{name}: aiconfigurator {theirs:.1f} units, {units / theirs:.2f} of it")
