"""A load that is drawn and forgotten as it goes comes to what the same load comes to when all of it is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.api import load_specs, set_up, stream
from simtune.errors import UsageError
from simtune.results.sketch import ERROR, Sketch
from simtune.sim import streamed
from simtune.sim.streamed import StreamedLoad
from simtune.specs.catalog import load_model, load_workload
from simtune.workload.requests import build_stream

CLASSES = """\
schema: simtune/workload@1
name: two
requests: 400
arrivals: {kind: gamma, rate_rps: 6, cv: 2}
prompt: {kind: lognormal, mean_tokens: 200, sigma: 0.8, max_tokens: 2000}
output: {kind: lognormal, mean_tokens: 40, sigma: 0.9, max_tokens: 300}
classes:
  - {name: quick, share: 0.6, priority: 1, slo: {ttft_s: {p90: 0.05}, tpot_s: {mean: 0.02}}}
  - {name: slow, share: 0.4, slo: {e2el_s: {p99: 3}}}
"""
SHARED = """\
schema: simtune/workload@1
name: shared
requests: 300
arrivals: {kind: piecewise, segments: [{for_s: 5, rate_rps: 8}, {for_s: 5, rate_rps: 1}]}
prompt: {kind: fixed, tokens: 300}
output: {kind: fixed, tokens: 20}
shared_prefix: {tokens: 256, groups: 3, block_tokens: 64}
"""
CLOSED = """\
schema: simtune/workload@1
name: closed
requests: 200
arrivals: {kind: closed_loop, users: 5, think_s: 0.1}
prompt: {kind: fixed, tokens: 300}
output: {kind: fixed, tokens: 20}
"""
POOL = (
    "{hardware: h100-sxm, instances: 2, max_model_len: 4096, batching: {max_num_seqs: 16, max_num_batched_tokens: 512}"
)
MIXED = f"pools: [{POOL}, kv_cache: {{prefix_caching: true}}}}]\n"
FAILING = MIXED + "events: [{kind: failure, pool: mixed, instance: 0, at_s: 3, recover_s: 23}]\n"
APART = f"""\
pools:
  - {POOL}, name: p, role: prefill}}
  - {POOL}, name: d, role: decode}}
link: {{path: inter_node}}
"""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "CHUNK", 64)
    monkeypatch.setattr(streamed, "FOLD", 16)


def specs(tmp_path: Path, workload: str, plan: str) -> Any:
    (tmp_path / "w.yaml").write_text(workload)
    (tmp_path / "p.yaml").write_text("schema: simtune/plan@1\nname: p\nmodel: llama-3.1-8b\n" + plan)
    return load_specs(None, None, str(tmp_path / "w.yaml"), str(tmp_path / "p.yaml"))


ENCODING = MIXED.replace("max_model_len: 4096", "max_model_len: 16384, encoder: {}").replace(": 512", ": 4096")
PICTURES = """\
schema: simtune/workload@1
name: pictures
requests: 300
arrivals: {kind: poisson, rate_rps: 7}
prompt: {kind: fixed, tokens: 100}
output: {kind: fixed, tokens: 20}
shared_prefix: {tokens: 64, groups: 2, block_tokens: 16}
images:
  share: 0.8
  per_request: [1, 2]
  sizes: [{width: {levels: [0, 1], pixels: [100, 900]}, height: 300}]
  repeats: {share: 0.5, images: 5}
"""


TINY_TRACE = """\
schema: simtune/workload@1
name: replayed
requests: 201
trace: t.csv
arrivals: {kind: trace}
prompt: {kind: trace}
output: {kind: trace}
"""


def close(ours: Any, theirs: Any, error: float) -> None:
    """Numbers within an error, all else the same; what is not told of a streamed run aside."""
    if isinstance(theirs, dict):
        for key in theirs:
            if key not in ("ci95", "warm_up_requests", "first_token_parts"):
                close(ours[key], theirs[key], error)
    elif isinstance(theirs, (list, tuple)):
        for mine, its in zip(ours, theirs, strict=True):
            close(mine, its, error)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=error, abs=1e-11)
    else:
        assert ours == theirs


@pytest.mark.parametrize("plan", [MIXED, APART, FAILING], ids=["mixed", "apart", "failing"])
@pytest.mark.parametrize("workload", [CLASSES, SHARED, CLOSED], ids=["classes", "shared", "closed"])
def test_it_comes_to_the_same(tmp_path: Path, workload: str, plan: str) -> None:
    given = specs(tmp_path, workload, plan)
    rate = None if workload is CLOSED else 7.0
    whole = set_up(given, rate_rps=rate, seed=3).run().summary()
    _, found = stream(given, rate_rps=rate, seed=3)
    close(found.summary().to_data(), whole.to_data(), 1.01 * ERROR)
    assert found.summary().completed == whole.completed
    assert found.summary().slo_attainment == whole.slo_attainment
    assert found.summary().warm_up_requests is None


ONE_SEAT = """\
pools:
  - {hardware: h100-sxm, instances: 1, max_model_len: 4096, batching: {max_num_seqs: 1, max_num_batched_tokens: 512}}
"""


@pytest.mark.parametrize(
    ("arrivals", "requests", "saturated"),
    [
        ("{kind: fixed, rate_rps: 1000}", 40, True),
        ("{kind: fixed, rate_rps: 1000}", 38, False),  # nineteen of a second half are too few to tell
        ("{kind: closed_loop, users: 60, think_s: 0}", 60, False),
    ],
)
def test_what_piles_up_is_said_as_of_the_whole(tmp_path: Path, arrivals: str, requests: int, saturated: bool) -> None:
    text = CLOSED.replace("{kind: closed_loop, users: 5, think_s: 0.1}", arrivals)
    given = specs(tmp_path, text, ONE_SEAT)
    whole = set_up(given, requests=requests).run()
    assert whole.summary().saturated is stream(given, requests=requests)[1].saturated is saturated


def test_what_is_in_the_system_is_all_that_is_kept(tmp_path: Path) -> None:
    kept: list[int] = []
    fold = streamed.StreamRecorder.fold

    class Watched(streamed.StreamRecorder):
        def fold(self, numbers: Any) -> None:
            fold(self, numbers)
            assert self.source is not None
            kept.append(len(self.first_token) + len(self.source.arrival) + len(self.source._prompt))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "StreamRecorder", Watched)
        stream(specs(tmp_path, CLASSES, MIXED), rate_rps=2.0, requests=2000)
    assert len(kept) > 50
    assert max(kept) < 60, "a few requests are under way at any time"


TRACE = """\
{"timestamp": 0, "input_length": 513, "output_length": 4, "hash_ids": [0, 1]}
{"timestamp": 700, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 900, "input_length": 700, "output_length": 6, "hash_ids": [0, 3]}
"""


@pytest.mark.parametrize("text", ["chat", CLASSES, SHARED, TRACE], ids=["chat", "classes", "shared", "trace"])
def test_requests_are_those_of_the_whole_stream(text: str, tmp_path: Path) -> None:
    file = tmp_path / ("t.jsonl" if text is TRACE else "w.yaml")
    file.write_text(text)
    spec, trace = load_workload("chat" if text == "chat" else str(file))
    whole = build_stream(spec, trace, requests=1000, seed=5)
    chunks = list(StreamedLoad(spec, trace, requests=1000, seed=5).chunks())
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "class_index", "priority"):
        assert np.concatenate([getattr(chunk, name) for chunk in chunks]).tolist() == getattr(whole, name).tolist()
    if whole.hash_ids is not None:
        assert [row for chunk in chunks for row in chunk.hash_ids or ()] == list(whole.hash_ids)


def test_what_needs_all_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs data of all requests in advance"):
        stream(specs(tmp_path, SHARED, MIXED + "router: {kind: session_affinity}\n"))
    with pytest.raises(UsageError, match=r"plan .*: its stages see all requests at once; leave --stream out"):
        stream(specs(tmp_path, SHARED, MIXED + "stages: [{name: see, pool: mixed, seconds: 0.1}]\n"))
    turns = CLASSES.partition("classes:")[0] + "sessions: {follow: arrivals, concurrent: 3, turns: 4}\n"
    with pytest.raises(UsageError, match="turns of a conversation"):
        stream(specs(tmp_path, turns, MIXED))


def test_a_sketch_is_as_near_as_it_says() -> None:
    rng = np.random.default_rng(1)
    for values in (rng.lognormal(20, 3, 5000), rng.pareto(0.5, 5000) * 1e9, np.full(7, 3e12), np.array([0.0, 5.0])):
        sketch = Sketch()
        for part in np.array_split(values, 7):
            sketch.add(part)
        told = sketch.distribution()
        for percent in (0, 1, 50, 90, 99, 100):
            assert sketch.percentile_s(percent) == pytest.approx(np.percentile(values, percent) / 2**40, rel=ERROR)
        assert told.count == len(values)
        assert (told.mean, told.std) == pytest.approx((values.mean() / 2**40, values.std() / 2**40), rel=1e-9)
        assert (told.min, told.max) == (values.min() / 2**40, values.max() / 2**40)
    weighted = Sketch()
    weighted.add(np.array([1.0, 8.0]), np.array([3, 1]))
    assert (weighted.count, weighted.mean_s * 2**40) == (4, 2.75)


def test_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from simtune.cli import main

    given = ["simulate", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", "chat", "--requests", "300"]
    with pytest.raises(SystemExit) as done:
        main([*given, "--stream"])
    assert done.value.code == 0
    assert "TTFT" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        main([*given, "--stream", "--out", str(tmp_path / "run")])
    assert done.value.code == 2
    assert "--stream keeps no requests, which --out would need" in capsys.readouterr().err


@pytest.mark.parametrize("of_trace", [False, True], ids=["drawn", "replayed"])
def test_media_come_to_the_same(tmp_path: Path, of_trace: bool) -> None:
    """Names of blocks, items that come again and the largest item are those of the load, not of a part of it."""
    workload = PICTURES
    if of_trace:
        rows = [f"{0.2 * i},90,20,{'640x300#a' if i > 200 else f'{100 + i}x300'}" for i in range(299)]
        rows.append("59.8,80,20,2000x1500#a 640x300#a")
        (tmp_path / "t.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,images", *rows]))
        workload = TINY_TRACE.replace("201", "450")
    given = replace(specs(tmp_path, workload, ENCODING), model=load_model("qwen2.5-vl-7b"))
    experiment = set_up(given, seed=3)
    assert experiment.stream.media is not None
    whole = experiment.run().summary()
    _, found = stream(given, seed=3)
    assert whole.encoders
    assert whole.encoders[0].encoded_images < len(experiment.stream.media), "those that come again are found"
    assert found.summary().encoders == whole.encoders
    close(found.summary().to_data(), whole.to_data(), 1.01 * ERROR)


def test_media_that_an_instance_rejects_are_refused_wherever_they_come(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,images\n" + "0,90,20,640x300\n" * 200 + "0,90,20,640x300 640x300\n"
    )
    given = specs(tmp_path, TINY_TRACE, ENCODING.replace("encoder: {}", "encoder: {limit_per_prompt: {image: 1}}"))
    with pytest.raises(UsageError, match="takes 1 images in one prompt, and the load has up to 2"):
        stream(replace(given, model=load_model("qwen2.5-vl-7b")))
    with pytest.raises(UsageError, match="states no vision encoder"):
        stream(given)
