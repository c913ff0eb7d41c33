"""The examples, the README and the page of commands are run, not believed."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import simtune
from simtune.cli import VERBS, cli
from simtune.specs.catalog import load_study
from simtune.specs.plan import Plan
from simtune.tuner.space.candidates import space_of
from tests.cli.conftest import Said, call
from tests.cli.conftest import typed as typed_alone

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/study.yaml"))
README, COMMANDS, INPUTS, ACCURACY = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/commands.md", "docs/inputs.md", "docs/accuracy.md")
)


FEW = ["search.requests=200", "search.confirm.draws=0"]


def optimize(example: str, out: Path, *more: str, requests: int = 200) -> None:
    """Run a study, watching fewer requests per simulation to stay quick.

    The quickstart with its own load runs as a user starts it, in processes of its own, and is confirmed on a fresh
    draw; others run in this process, without.
    """
    as_typed = example == "quickstart" and not more
    sets = ("--set", f"search.requests={requests}", "--set", f"search.confirm.draws={int(as_typed)}", *more)
    words = ("optimize", f"examples/{example}/study.yaml", "--out", str(out), *sets)
    with contextlib.chdir(ROOT):
        output = typed_alone(*words) if as_typed else call(*words, "--jobs", "1")
    assert output.code == 0, output.err
    # Progress is for searches of more than 20 s, which a busy machine makes of any.
    assert all(line.startswith(("note: ", "plans: ")) for line in output.err.splitlines()), output.err


def look_at(example: str, run: Path) -> tuple[Plan, list[dict[str, str]], Any]:
    """What holds for the run of any example; its plan, candidates and summary for more."""
    study = load_study(str(ROOT / "examples" / example / "study.yaml"))
    plan = Plan.from_file(run / "plan.yaml")
    summary = json.loads((run / "summary.json").read_text())
    with (run / "candidates.csv").open() as file:
        rows = list(csv.DictReader(file))

    assert {(line["metric"], line["statistic"], line["limit_s"]) for line in summary["slo"]} == set(study.slo.limits())
    assert all(line["met"] and line["value_s"] <= line["limit_s"] for line in summary["slo"])
    assert summary["completed"] == summary["requests"] >= 200
    assert not summary["saturated"]

    searched = study.model_validate({k: v for k, v in summary["study"].items() if k != "schema"}, strict=False)
    assert sorted(row["candidate"] for row in rows) == sorted(c.name for c in space_of(searched).candidates)
    assert all(row["reason"] for row in rows)
    assert [row["candidate"] for row in rows if row["status"] == "chosen"] == [plan.name]
    assert {row["status"] for row in rows} <= {"chosen", "feasible", "infeasible", "pruned", "does_not_fit"}
    for row in rows:
        if row["status"] in ("chosen", "feasible"):
            assert float(row["rate_rps"]) <= float(row["rate_bound_rps"]), row["candidate"]

    chosen, num_gpus = rows[0], plan.num_devices
    (hardware,) = study.hardware
    assert num_gpus <= hardware.devices
    assert summary["offered_rate_rps"] == pytest.approx(float(chosen["rate_rps"]))
    rated = study.objective == "goodput_per_gpu"
    if rated:
        assert summary["objective"]["value"] == pytest.approx(float(chosen["rate_rps"]) / num_gpus)
    else:
        # The search pays for the whole run, the report for the mean number of GPUs at the throughput.
        price = summary["price"]["per_million_output_tokens_usd"]
        assert summary["objective"]["value"] == pytest.approx(price, rel=0.02)
    # Nobody did better than the chosen one by more than the search's own tolerance.
    for row in rows:
        if rated and row["status"] == "feasible":
            per_gpu = float(row["rate_rps"]) / int(row["num_gpus"])
            assert per_gpu <= summary["objective"]["value"] * (1 + study.search.rate_tolerance) * (1 + 1e-9)

    if any(pool.overlap or pool.studied.kv_policy for pool in plan.pools):
        assert "To be built in an engine: " in (run / "engine" / "none.txt").read_text()
        return plan, rows, summary
    engine = yaml.safe_load((run / "engine" / "vllm-mixed.yaml").read_text())
    (pool,) = plan.pools
    assert engine["max-num-batched-tokens"] == pool.batching.max_num_batched_tokens
    assert engine.get("tensor-parallel-size", 1) == pool.parallelism.tp
    return plan, rows, summary


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("adapters", "images", "techniques")))
        for name in EXAMPLES
    ],
)
def test_an_example_with_its_own_load(example: str, tmp_path: Path) -> None:
    optimize(example, tmp_path / "run")
    look_at(example, tmp_path / "run")


@pytest.mark.parametrize(
    ("example", "trace"),
    [
        pytest.param("quickstart", "azure_2023_conv.csv.gz", marks=pytest.mark.slow),
        pytest.param("llama-70b", "azure_2023_conv.csv.gz", marks=pytest.mark.slow),
        ("code-completion", "azure_2023_code.csv.gz"),
    ],
)
def test_an_example_with_a_published_trace(example: str, trace: str, data_dir: Path, tmp_path: Path) -> None:
    file = (data_dir / "traces" / trace).resolve()
    optimize(example, tmp_path / "run", "--set", f"workload={file}")
    look_at(example, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["trace"]["file"] == trace


def test_all_examples_are_tried() -> None:
    assert EXAMPLES == [
        "adapters", "autoscaling", "checkpoints", "closed-loop", "code-completion", "images", "llama-70b",
        "quickstart", "speculation", "techniques",
    ]  # fmt: skip


def test_a_70b_model_does_not_fit_one_gpu(tmp_path: Path) -> None:
    """Also when one GPU is allowed: 70 billion weights of 2 bytes are more than its memory."""
    optimize("llama-70b", tmp_path / "run", "--set", "search.tp=[1, 4, 8]", "--set", "search.pp=[1]")
    plan, rows, summary = look_at("llama-70b", tmp_path / "run")
    single = [row for row in rows if (row["tp"], row["pp"]) == ("1", "1")]
    assert single
    assert all(row["status"] == "does_not_fit" and "GiB per device are missing" in row["reason"] for row in single)
    assert plan.pools[0].parallelism.tp > 1
    memory = summary["memory"]
    assert 70e9 * 2 / plan.pools[0].parallelism.tp < memory["weights_bytes"] < memory["total_bytes"]


def simulate(plan: str, load: str, run: Path, *more: str) -> Said:
    """Simulate an example's plan under its load, a file of an example or a built-in one."""
    load = f"examples/{load}" if "/" in load else load
    with contextlib.chdir(ROOT):
        output = call("simulate", "--plan", f"examples/{plan}", "--workload", load, "--out", str(run), *more)
    assert output.code == 0, output.err
    return output


def test_conversations_come_back_from_tiers(tmp_path: Path) -> None:
    """Host and store keep what the devices' caches cannot: most of the tokens that are found come from them."""
    run = tmp_path / "run"
    simulate("cache-tiers/plan.yaml", "cache-tiers/workload.yaml", run, "--requests", "600")
    summary = json.loads((run / "summary.json").read_text())
    host, store = summary["cache_tiers"]
    (found,) = summary["prefix_cache"]
    assert (host["tier"], store["tier"]) == ("host", "store")
    assert 0.5 * found["hit_tokens"] < host["hit_tokens"] + store["hit_tokens"] < found["hit_tokens"]


def test_conversations_come_back_from_the_host_memory_of_vllm(tmp_path: Path) -> None:
    """The connector keeps prompts only: less is found than if all that is computed went there."""
    run = tmp_path / "run"
    simulate("cache-tiers/vllm.yaml", "cache-tiers/workload.yaml", run, "--requests", "600")
    summary = json.loads((run / "summary.json").read_text())
    (host,), (found,) = summary["cache_tiers"], summary["prefix_cache"]
    assert 0.1 * found["hit_tokens"] < host["hit_tokens"] < found["hit_tokens"]


def test_pictures_are_encoded_on_servers_in_front_of_a_pool(tmp_path: Path) -> None:
    """The pool encodes nothing, and three GPUs are paid."""
    run = tmp_path / "run"
    simulate("images/apart.yaml", "images/workload.yaml", run, "--requests", "200", "--audit")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["num_gpus"] == 3
    assert "encoders" not in summary


def test_pictures_are_encoded_once_or_found(tmp_path: Path) -> None:
    """Pictures that come again are found in the encoder's cache, or not reached behind a prefix that is."""
    run = tmp_path / "run"
    simulate("images/plan.yaml", "images/workload.yaml", run, "--requests", "300", "--audit")
    (work,) = json.loads((run / "summary.json").read_text())["encoders"]
    assert 0 < work["cache_hits"] < work["encoded_images"]
    assert 0 < work["busy_share"] < 0.5


def test_servers_that_encode_are_searched_beside_those_that_do_it_in_their_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    optimize("images", run, requests=80)
    certificate = json.loads((run / "certificate.json").read_text())
    assert certificate["variants"] == ["", "one-apart", "two-apart"]
    plans = {plan["plan"]: plan["num_gpus"] for plan in certificate["plans"]}
    assert {name: gpus for name, gpus in plans.items() if "-x3-" in name or "x4" in name} == {
        "tp1-pp1-x4-s64-t4096": 4,
        "tp1-pp1-enc1-v-one-apart-x3-s64-t4096": 4,
    }


def test_clips_and_voice_messages_are_encoded(tmp_path: Path) -> None:
    """Clips of the set are found; every voice message is new."""
    clips, voice, turns, shown = (tmp_path / name for name in ("clips", "voice", "turns", "shown"))
    simulate("media/plan.yaml", "media/workload.yaml", clips, "--requests", "200", "--audit")
    simulate("media/speech-plan.yaml", "media/speech.yaml", voice, "--requests", "200", "--audit")
    simulate("media/plan.yaml", "media/turns.yaml", turns, "--requests", "30", "--audit")
    simulate("media/plan.yaml", "media/sessions.yaml", shown, "--audit")
    (of_clips,), (of_voice,), (of_turns,), (of_shown,) = (
        json.loads((run / "summary.json").read_text())["encoders"] for run in (clips, voice, turns, shown)
    )
    turns_shown = json.loads((shown / "summary.json").read_text())["requests"]
    assert 0.4 < of_shown["encoded_images"] / turns_shown < 0.6, "half of the turns show a picture, encoded once"
    assert of_clips["encoded_images"] > 60
    assert of_clips["cache_hits"] > 0
    assert (of_voice["encoded_images"], of_voice["cache_hits"]) == (200, 0)
    assert of_turns["encoded_images"] == 30, "a chart, a logo and a clip in each of ten rounds"


def test_a_day_is_followed_by_starting_instances(tmp_path: Path) -> None:
    """The first requests are those of the night: one instance of four is enough for them, and is all that is paid."""
    run = tmp_path / "run"
    said = simulate(
        "autoscaling/plan.yaml",
        "autoscaling/workload.yaml",
        run,
        "--requests",
        "2800",
        "--audit",
        "--set",
        "workload.arrivals.segments=[{for_s: 400, rate_rps: 1}, {for_s: 600, rate_rps: 6}]",
    )
    assert "autoscaling of pool mixed      1 to 2 instances" in said.out
    summary = json.loads((run / "summary.json").read_text())
    (scaling,) = summary["autoscaling"]
    assert (scaling["accepting"], scaling["holding"]) == ([1, 1, 2], [1, 2, 2])
    assert scaling["at_s"] == [0.0, 540.0, 720.0], "the look at 540 s is the first after the night, at which 6/s came"
    assert summary["price"]["run_usd"] < 0.5 * summary["price"]["run_usd_of_most"]
    page = (run / "report.html").read_text()
    assert re.search("<h2[^>]*>Autoscaling</h2>", page)
    assert "The GPUs held cost" in page


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("plan", [(40.0, 7, 10.0), (100.0, 8, 10.0)]),
        # 40 experts of 3 x 7168 x 2048 bytes in each of 58 layers, of which 216 of 256 were not there.
        ("scale", [(0.0, 7, 0.0), (60.0, 8, 58 * 40 * 3 * 7168 * 2048 * 216 / 256 / 450e9)]),
    ],
)
def test_ranks_fail_and_join(name: str, changes: list[tuple[float, int, float]]) -> None:
    """Nobody is lost with a rank, and its requests are sent again."""
    with contextlib.chdir(ROOT):
        output = call(
            "simulate", "--plan", f"examples/elastic-experts/{name}.yaml", "--workload", "chat", "--rate", "6",
            "--requests", "800", "--audit", "--json",
        )  # fmt: skip
    assert output.code == 0, output.err
    summary = output.json
    assert summary["completed"] == summary["requests"] == 800
    found = summary["rank_changes"]
    assert [(change["at_s"], change["ranks"]) for change in found] == [change[:2] for change in changes]
    assert [change["pause_s"] for change in found] == pytest.approx([change[2] for change in changes])
    assert sum(change["resent"] for change in found) == summary["resent"]
    assert (summary["resent"] > 0) == (name == "plan")


def test_ranks_come_and_go_with_the_load() -> None:
    """14 requests/s need five ranks of 3 each; the look at 120 s is the first that reads this rate."""
    segments = "[{for_s: 60, rate_rps: 4}, {for_s: 120, rate_rps: 14}, {for_s: 200, rate_rps: 3}]"
    with contextlib.chdir(ROOT):
        output = call(
            "simulate", "--plan", "examples/elastic-experts/by-load.yaml", "--workload", "chat", "--requests", "2400",
            "--set", f"workload.arrivals={{kind: piecewise, segments: {segments}}}", "--audit", "--json",
        )  # fmt: skip
    assert output.code == 0, output.err
    summary = output.json
    assert (summary["completed"], summary["resent"]) == (2400, 0)
    first, last = summary["rank_changes"]
    assert (first["at_s"], first["ranks"], first["pause_s"]) == (180.0, 5, 5.0)
    assert (last["at_s"] >= 240.0, last["ranks"]) == (True, 2)
    (scaling,) = summary["autoscaling"]
    assert scaling["accepting"] == [2, 2, 5, 2, 2]
    assert scaling["holding"] == [2, 5, 5, 5, 2]
    ends_s = [*scaling["at_s"][1:], scaling["hours"] * 3600]
    held_s = sum(
        ranks * (end_s - at_s) for ranks, at_s, end_s in zip(scaling["holding"], scaling["at_s"], ends_s, strict=True)
    )
    assert scaling["gpu_hours"] == pytest.approx(held_s / 3600)


@pytest.mark.slow
def test_a_rule_that_follows_the_load_costs_less_than_fixed_instances(tmp_path: Path) -> None:
    """One instance misses the SLO in the rush, and two that are always there are paid for at night."""
    optimize("autoscaling", tmp_path / "run", requests=9000)
    plan, rows, summary = look_at("autoscaling", tmp_path / "run")
    (scaling,) = summary["autoscaling"]
    assert "-v-rate-" in plan.name
    assert plan.pools[0].autoscaling is not None
    assert 0.25 < scaling["gpu_hours"] / scaling["gpu_hours_of_most"] < 0.5
    fixed = [row for row in rows if "-v-" not in row["candidate"]]
    assert len(fixed) == 4
    assert all(row["status"] in ("infeasible", "pruned") for row in fixed)


def test_prompts_and_decodes_share_a_gpu(tmp_path: Path) -> None:
    """One GPU is paid for, and one server of SGLang is started, whose streams have 48 and 84 processors."""
    run = tmp_path / "run"
    simulate("shared-gpus/plan.yaml", "chat", run, "--requests", "200", "--rate", "4", "--audit")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["num_gpus"] == 1
    assert {use["pool"] for use in summary["instances"]} == {"prefill", "decode"}
    assert yaml.safe_load((run / "engine" / "pdmux.yaml").read_text())["manual_divisions"] == [[48, 84, 0]]


def test_agents_find_their_text_again(tmp_path: Path) -> None:
    """Nine of ten prompt tokens are found, and sessions take longer than requests of them are under way."""
    run = tmp_path / "run"
    simulate("agents/plan.yaml", "agents/workload.yaml", run, "--requests", "18")
    summary = json.loads((run / "summary.json").read_text())
    (found,) = summary["prefix_cache"]
    assert found["hit_rate"] > 0.9
    family, active = (summary["metrics"][name] for name in ("family", "family_active"))
    assert family["count"] == active["count"] == 6
    assert active["mean"] < 0.8 * family["mean"]


def test_groups_that_divide_prompts_shorten_them(tmp_path: Path) -> None:
    """Half as many groups have half as many GPUs, and take longer for the same prompts."""
    prefill_ms = []
    for groups in (8, 16):
        cut = ("--set", f"plan.pools.0.parallelism.prefill_context_parallel={groups}")
        run = tmp_path / str(groups)
        simulate("divided-prompts/plan.yaml", "chat", run, "--rate", "0.5", "--requests", "40", *cut)
        summary = json.loads((run / "summary.json").read_text())
        assert summary["num_gpus"] == groups + 16
        prefill_ms.append(summary["metrics"]["prefill"]["mean"])
    assert prefill_ms[1] < prefill_ms[0]


def test_prefill_and_decode_apart_with_a_failure(tmp_path: Path) -> None:
    """The plan that docs/inputs.md simulates: nobody is lost with the instance, and all that is sent arrives."""
    run = tmp_path / "run"
    said = simulate("prefill-decode/plan.yaml", "chat", run, "--rate", "12", "--requests", "1200")
    # Progress is for searches of more than 20 s, which a busy machine makes of any.
    assert all(line.startswith(("note: ", "plans: ")) for line in said.err.splitlines()), said.err
    plan, summary = Plan.from_file(run / "plan.yaml"), json.loads((run / "summary.json").read_text())
    assert {pool.role for pool in plan.pools} == {"prefill", "decode"}
    assert [event.kind for event in plan.events] == ["failure"]
    assert summary["completed"] == summary["requests"] == 1200
    assert not summary["saturated"]
    with (run / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    blocks = [-(-int(row["prompt_tokens"]) // 16) for row in rows if row["transfer_s"]]
    # 16 tokens x keys and values x 32 layers x 8 heads x 128 numbers x 2 bytes
    if not summary["resent"]:
        assert summary["transferred_bytes"] == sum(blocks) * 16 * 2 * 32 * 8 * 128 * 2
    parts = ("queue_s", "prefill_s", "transfer_s", "decode_s")
    for row in rows:
        assert sum(float(row[part] or 0) for part in parts) == pytest.approx(float(row["e2el_s"]))
    page = (run / "report.html").read_text()
    assert "<h1>2 prefill servers of 1 GPU with 64 seats and 8,192 tokens a step, 1 decode server of " in page
    for pool in plan.pools:
        assert (run / "engine" / f"vllm-{pool.name}.yaml").is_file()
        assert f'id="timeline-{pool.name}"' in page
    assert 'id="instances"' in page
    assert {x["pool"] for x in summary["instances"]} == {"prefill", "decode"}


# --- README and the pages that it begins with ---------------------------------------------------------------


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def typed(text: str, tool: str) -> list[str]:
    """Commands of the shell blocks that begin with `tool`. That they are understood is tested in tests/docs."""
    return [line for block in blocks(text, "sh") for line in block.splitlines() if line.startswith(tool + " ")]


def mentioned(text: str) -> list[str]:
    """`simtune ...` within the text."""
    return re.findall(r"`(simtune [^`]+)`", text)


@pytest.mark.parametrize("line", [line for text in (README, COMMANDS, INPUTS, ACCURACY) for line in mentioned(text)])
def test_a_command_in_passing_exists(line: str) -> None:
    verb, *args = shlex.split(line)[1:]
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None, f"there is no verb {verb}"
    options = {option for parameter in command.params for option in parameter.opts}
    assert {arg for arg in args if arg.startswith("--")} <= options


def test_the_readme_is_short_and_shows_the_commands_that_matter() -> None:
    assert len(README.splitlines()) < 150
    assert [shlex.split(line)[1] for line in typed(README, "simtune")] == ["profile", "optimize", "report", "validate"]


def test_the_page_of_commands_shows_every_verb() -> None:
    assert {shlex.split(line)[1] for line in (*typed(COMMANDS, "simtune"), *mentioned(COMMANDS))} == set(VERBS)


@pytest.mark.slow
def test_the_commands_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkout in which nothing was run before; not those of the README that need torch or a server."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    first = [line for line in typed(README, "simtune") if line.split()[1] not in ("profile", "validate")]
    for line in dict.fromkeys((*first, *typed(COMMANDS, "simtune"))):
        typed_words = [sys.executable, "-m", *shlex.split(line, comments=True)]
        said = subprocess.run(typed_words, capture_output=True, text=True, check=False)
        assert said.returncode == 0, (line, said.stderr)


def test_the_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {line.split()[1] for line in typed(README, "make")} | set(re.findall(r"`make ([a-z]+)`", README))
    assert {"demo", "test"} <= named <= targets


def test_the_python_of_the_page_of_commands_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, with fewer requests, no confirmation and one process."""
    simulate, optimize = simtune.simulate, simtune.optimize
    monkeypatch.setattr(simtune, "simulate", lambda *a, **n: simulate(*a, **n, requests=200), raising=False)
    monkeypatch.setattr(simtune, "optimize", lambda *a, **n: optimize(*a, **n, jobs=1, settings=FEW), raising=False)
    monkeypatch.chdir(ROOT)
    (source,) = blocks(COMMANDS, "python")
    names: dict[str, Any] = {}
    exec(compile(source, "docs/commands.md", "exec"), names)
    assert len(names["result"].ttft_s) == 200
    assert names["tuned"].value > 0
