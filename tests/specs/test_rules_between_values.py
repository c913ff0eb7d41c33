"""Values that are right alone and wrong together: the message names the key at fault and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from simtune.errors import SpecError, UsageError
from simtune.runs.schema import Timeline
from simtune.specs.acceptance import Acceptance, PerRank, Revealed
from simtune.specs.hardware import Calibration, Curve, Residual
from simtune.specs.model import LayerGroup, MlaAttention, NoAttention, NoFeedForward
from simtune.specs.plan import MOST_GPUS, Plan
from simtune.specs.preset import EnginePreset
from simtune.specs.study import Study
from simtune.specs.trace_cut import duration_s
from simtune.specs.workload import Workload

PLAN = """\
schema: simtune/plan@1
name: p
model: llama-3.1-8b
"""
POOL = "{hardware: h100-sxm, instances: 1, batching: {max_num_seqs: 8, max_num_batched_tokens: 512}"
APART = f"link: {{}}\npools: [{POOL}, name: a, role: prefill}}, {POOL}, name: b, role: decode}}]\n"

STUDY = """\
schema: simtune/study@1
name: s
model: llama-3.1-8b
hardware: {profile: h100-sxm, devices: 2}
workload: chat
slo: {ttft_s: {p99: 1.0}}
"""
LOAD = """\
schema: simtune/workload@1
name: w
requests: 10
arrivals: {kind: poisson, rate_rps: 1}
prompt: {kind: fixed, tokens: 8}
output: {kind: fixed, tokens: 8}
"""

RATES = """\
schema: simtune/acceptance@1
name: a
origin: assumed
source: made up
rates: {kind: per_position, conditional: [0.5]}
"""


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        (
            Plan,
            f"{PLAN}pools: [{POOL}}}, {POOL.replace('instances: 1', 'instances: 100000')}, name: big, "
            "parallelism: {tp: 16}}]",
            f"pools.1.instances: 1,600,001 GPUs in all, at most {MOST_GPUS:,}",
        ),
        (
            Plan,
            f"{PLAN}{APART}router: {{kind: round_robin, weights: {{b: 2}}}}",
            "router.weights.b: the router gives a weight to pool b, and router sends new requests: name it in "
            "decode_router, or leave it out",
        ),
        (
            Plan,
            f"{PLAN}{APART}decode_router: {{kind: round_robin, weights: {{a: 2}}}}",
            "decode_router.weights.a: the router gives a weight to pool a, and decode_router sends those whose prompt "
            "is done: name it in router, or leave it out",
        ),
        (
            Plan,
            f"{PLAN}pools: [{POOL}}}]\nstages: [{{name: see, pool: mixed, parts: 2, seconds: 0.1}}, "
            "{name: hear, pool: mixed, parts: 3, seconds: 0.1, after: [see]}]",
            "stages.1.parts: see has 2 parts; give hear as many",
        ),
        (
            Study,
            f"{STUDY}search: {{layouts: [prefill-decode], prefill: {{gpus: [l40s]}}}}",
            "search.prefill.gpus.0: the study has no 'l40s'; expected one of 'h100-sxm'",
        ),
        (
            Study,
            f"{STUDY}search: {{layouts: [prefill-decode]}}\n"
            f"fixed: [{POOL.replace('h100-sxm', 'l40s')}, role: decode}}]",
            "fixed.0.hardware: l40s is no hardware of the study; list it there, with all its devices",
        ),
        (
            Study,
            f"{STUDY}search: {{layouts: [prefill-decode]}}\n"
            f"fixed: [{POOL}, role: decode, autoscaling: "
            "{rule: {kind: saturation}, startup_s: 1, max_instances: 4}}]",
            "fixed.0.autoscaling: instances of a fixed pool do not come and go; remove it, or search it as a variant",
        ),
        (
            Study,
            f"{STUDY}constraints: ['router.tp == 1']",
            "'router.tp == 1': there is no pool 'router'; pools: mixed, prefill, decode",
        ),
        (Study, f"{STUDY}constraints: ['mixed.colour == 1']", "'mixed.colour == 1': a pool has no 'colour'"),
        (
            Plan,
            f"{PLAN}pools: [{POOL}, name: a}}, {POOL}, name: a}}]",
            "pools must have different names: a, a",
        ),
        (
            Study,
            STUDY.replace("{profile: h100-sxm, devices: 2}", "[{profile: a, devices: 2}, {profile: a, devices: 1}]"),
            "hardware: profiles must differ: a, a; add up the devices of each",
        ),
        (
            Study,
            f"{STUDY}constraints: ['tp == (lambda: 1)']",
            "only comparisons, and, or, not, + - * / // %, numbers, texts and lists are understood here",
        ),
        (
            Workload,
            f"{LOAD}graph: [{{name: a, after: [b]}}, {{name: b, after: [a]}}]",
            "graph.0.after: a waits for itself: the graph is cyclic; take one of these out",
        ),
        (
            Workload,
            f"{LOAD}shared_prefix: {{tokens: 64, groups: 2, block_tokens: 16}}\nsessions: {{follow: arrivals, "
            "concurrent: 2, turns: 2, block_tokens: 32}",
            "sessions.block_tokens: must be that of shared_prefix (16), not 32",
        ),
        (
            Acceptance,
            f"{RATES}conditions: [{{rates: {{kind: per_position, conditional: [0.5]}}}}]",
            "give a request_class, a temperature or both; what holds for all stands in `rates`",
        ),
        (
            Workload,
            f"{LOAD}classes: [{{name: a, share: 1}}, {{name: b, share: 1}}, {{name: a, share: 1}}]",
            "classes: class names must differ: a, b, a",
        ),
        (
            Workload,
            f"{LOAD}graph: [{{name: a}}, {{name: b, inherits: a}}]",
            "graph.1.inherits: b does not wait for a; name it under after",
        ),
        (
            Workload,
            f"{LOAD}graph: [{{name: a, count: 2}}, {{name: b, count: 3, after: [a], inherits: a}}]",
            "graph.1.count: a has 2 texts to go on from, not 3",
        ),
    ],
)
def test_the_key_at_fault_is_named(kind: Any, text: str, told: str) -> None:
    with pytest.raises(SpecError) as error:
        kind.from_text(text, "f.yaml")
    said = str(error.value)
    assert said.startswith("f.yaml:")
    assert "\n" not in said
    assert told in said


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Revealed(rate=(0.5, 0.9), share=(1.0,)), "2 rates but 1 shares"),
        (lambda: Revealed(rate=(0.5, 0.9), share=(0.5, 0.4)), "the shares add up to 0.9, not to 1"),
        (
            lambda: PerRank(probability=((0.5, 0.2),), standard_error=((0.1,),)),
            "standard_error must have the shape of probability",
        ),
        (
            lambda: LayerGroup(count=1, attention=NoAttention(), feed_forward=NoFeedForward()),
            "attention and feed_forward are both none; give the layer one of them, or leave it out",
        ),
        (lambda: Calibration(model="m", tp=1, pp=1, source="log"), "needs decode or prefill"),
        (
            lambda: MlaAttention(
                heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, index_topk=64
            ),
            "index_topk, index_heads and index_head_dim go together; give all three, or none",
        ),
        (
            lambda: Timeline(t_s=(0.0, 1.0), running=(1.0, 1.0), waiting=(0.0,), kv_used=(0.0, 0.0)),
            "t_s, running, waiting and kv_used must be equally long",
        ),
        (
            lambda: EnginePreset(name="e", family="vllm", release="1", pool={"max_model_len": 8}, sources={}),
            "sources: none for max_model_len",
        ),
        (
            lambda: EnginePreset(name="e", family="vllm", release="1", pool={}, sources={"max_model_len": "docs"}),
            "sources: there is no setting max_model_len",
        ),
        (lambda: Curve(x=(1.0, 2.0, 3.0), seconds=(1.0, 2.0)), "x and seconds must be of one size"),
        (lambda: Curve(x=(2.0, 2.0), seconds=(1.0, 2.0)), "x must ascend"),
        (
            lambda: Residual(
                features=("m", "n"), centre=(0.0,), spread=(1.0, 1.0), length=(1.0, 1.0), signal=1.0, noise=0.1,
                clamp=(-1.0, 1.0), points=1, array="a",
            ),
            "features, centre, spread and length must be of one size",
        ),
    ],
)  # fmt: skip
def test_columns_of_a_profile_are_of_one_size(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.parametrize("text", ["soon", "10 weeks", "-5s", "0s", "1:30"])
def test_a_time_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"write a time as 90s, 30m, 1\.5h or 2d"):
        duration_s(text, "--from")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("250ms", 0.25), ("1.5h", 5400), ("2d", 172800), ("7", 7)])
def test_times(text: str, seconds: float) -> None:
    assert duration_s(text, "--from") == seconds
