"""A wrong spec is answered once, with every problem: place, key, rule, and the word that was meant."""

from __future__ import annotations

import pytest

from simtune.errors import SpecError, UsageError, suggest
from simtune.specs import yamlfile
from simtune.specs.base import override
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.workload import Workload


def lines_of(kind: type[Workload] | type[Plan] | type[Model], text: str) -> list[str]:
    with pytest.raises(SpecError) as error:
        kind.from_text(text, "f.yaml")
    return str(error.value).splitlines()


def test_all_problems_of_a_workload_at_once_in_file_order() -> None:
    text = """\
schema: simtune/workload@1
name: chat
arrivals:
  kind: poisson
  rate_rsp: 4
prompt: {kind: fixed, tokens: 0}
output:
  kind: lognrmal
  mean_tokens: 5
requests: "many"
classes:
  - name: a
    share: -1
    slo: {ttft_s: {p40: 1.0}}
"""
    found = lines_of(Workload, text)
    assert found[:6] == [
        "f.yaml:3:1: arrivals.rate_rps: is required and missing",
        "f.yaml:5:3: arrivals.rate_rsp: unknown key, did you mean rate_rps?",
        "f.yaml:6:23: prompt.tokens: must be greater than or equal to 1 (found 0)",
        "f.yaml:7:1: output: unknown kind 'lognrmal': one of fixed, lognormal, quantiles, trace, "
        "did you mean lognormal?",
        "f.yaml:10:1: requests: must be a valid integer, not the text 'many'",
        "f.yaml:13:5: classes.0.share: must be greater than 0 (found -1)",
    ]
    assert len(found) == 7
    assert found[6].startswith("f.yaml:14:20: classes.0.slo.ttft_s.p40: must match pattern")


def test_rules_between_values_are_told_in_the_field_s_own_words() -> None:
    text = """\
schema: simtune/model@1
name: m
hidden_size: 1e3
vocab_size: 4
max_position: 4
dtype: bfloat16
layers:
  - count: 2
    attention: {kind: full, heads: 5, kv_heads: 2, head_dim: 64}
    feed_forward: {kind: moe, experts: 2, experts_per_token: 4, intermediate_size: 4}
  - count: 2
    attention: {kind: sliding, heads: 4, kv_heads: 2, head_dim: 64}
    feed_forward: {intermediate_size: 4}
"""
    assert lines_of(Model, text) == [
        "f.yaml:3:1: hidden_size: must be a valid integer, not the number 1000.0",
        "f.yaml:6:1: dtype: must be one of fp32, bf16, fp16, not 'bfloat16', did you mean bf16?",
        "f.yaml:9:5: layers.0.attention: heads (5) must be a multiple of kv_heads (2)",
        "f.yaml:10:5: layers.0.feed_forward: experts_per_token (4) exceeds experts (2)",
        "f.yaml:12:5: layers.1.attention.window: is required and missing",
        "f.yaml:13:5: layers.1.feed_forward: needs a `kind`: one of dense, moe, none",
    ]


def test_the_wrong_kind_of_file_is_named_and_its_other_problems_too() -> None:
    text = "schema: simtune/plan@2\nname: p\nmodel: m\npools: []\n"
    assert lines_of(Plan, text) == [
        "f.yaml:1:1: schema: is simtune/plan@2, of a newer simtune; this one reads simtune/plan@1: upgrade simtune, or "
        "write @1, and mend what `simtune check` then names",
        "f.yaml:4:1: pools: must have at least 1 item after validation, not 0",
    ]
    assert lines_of(Plan, "name: p\n")[0] == "f.yaml:1:1: schema: must be simtune/plan@1"
    assert lines_of(Plan, "- 1\n") == ["f.yaml:1:1: a plan spec was expected, not a list"]
    assert lines_of(Plan, "") == ["f.yaml:1:1: a plan spec was expected, not nothing"]


@pytest.mark.parametrize(
    ("levels", "tokens", "told"),
    [
        ("[0, 0.5, 1]", "[1, 2]", "prompt: 3 levels but 2 tokens"),
        ("[0.1, 1]", "[1, 2]", "prompt: levels must run from 0 to 1"),
        ("[0, 0.5, 0.5, 1]", "[1, 2, 3, 4]", "prompt: levels must rise strictly"),
        ("[0, 1]", "[3, 2]", "prompt: tokens must not fall"),
        ("[0, 1]", "[1, .nan]", "prompt.tokens.1: must be a finite number (found nan)"),
        ("[0, 1]", "[1, .inf]", "prompt.tokens.1: must be a finite number (found inf)"),
        ("[0, 1]", "[0.5, 2]", "prompt.tokens.0: must be greater than or equal to 1"),
        ("[0]", "[1]", "prompt.levels: must have at least 2 items"),
    ],
)
def test_a_quantile_table_must_be_one(levels: str, tokens: str, told: str) -> None:
    text = f"""\
schema: simtune/workload@1
name: w
arrivals: {{kind: fixed, rate_rps: 1}}
prompt: {{kind: quantiles, levels: {levels}, tokens: {tokens}}}
output: {{kind: fixed, tokens: 1}}
"""
    assert told in lines_of(Workload, text)[0]


@pytest.mark.parametrize("where", ["arrivals", "prompt", "output", "class prompt", "class output"])
def test_whatever_replays_a_trace_needs_one_named(where: str) -> None:
    fixed, trace = "{kind: fixed, tokens: 1}", "{kind: trace}"
    text = f"""\
schema: simtune/workload@1
name: w
arrivals: {trace if where == "arrivals" else "{kind: fixed, rate_rps: 1}"}
prompt: {trace if where == "prompt" else fixed}
output: {trace if where == "output" else fixed}
classes:
  - name: a
    prompt: {trace if where == "class prompt" else fixed}
    output: {trace if where == "class output" else fixed}
"""
    told = ["f.yaml:1:1: kind: trace is used, so `trace` must name the file"]
    assert lines_of(Workload, text) == told
    assert Workload.from_text(text + "trace: t.csv\n").trace == "t.csv"


def test_did_you_mean_speaks_only_when_something_is_close() -> None:
    assert suggest("rate_rsp", ["rate_rps", "cv"]) == ", did you mean rate_rps?"
    assert suggest("colour", ["rate_rps", "cv"]) == ""


# --- --set ------------------------------------------------------------------------------------------------

PLAN = yamlfile.parse(
    """\
schema: simtune/plan@1
name: p
model: llama
pools:
  - hardware: a100
    instances: 1
    batching: {max_num_seqs: 4, max_num_batched_tokens: 512}
""",
    "plan.yaml",
)


def test_settings_change_values_lists_and_new_blocks_before_validation() -> None:
    settings = [
        "pools.0.instances=3",
        "pools.0.kv_cache.block_size=32",
        "name=q",
        "pools.0.batching.max_num_seqs=8",
    ]
    plan = Plan.from_document(override(PLAN, settings))
    pool = plan.pools[0]
    assert (plan.name, pool.instances, pool.kv_cache.block_size, pool.batching.max_num_seqs) == (
        "q",
        3,
        32,
        8,
    )
    assert pool.batching.max_num_batched_tokens == 512
    assert Plan.from_document(PLAN).pools[0].instances == 1  # the parsed file itself is untouched


def test_a_wrong_setting_is_validated_like_the_file() -> None:
    """What came from outside the file is not blamed on a line of it."""
    with pytest.raises(SpecError, match=r"^--set: pools\.0\.batching\.max_num_seqs: must be greater than"):
        Plan.from_document(override(PLAN, ["pools.0.batching.max_num_seqs=0"]))
    with pytest.raises(SpecError, match="instance: unknown key, did you mean instances"):
        Plan.from_document(override(PLAN, ["pools.0.instance=2"]))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("pools.0.instances", "write it as key=value"),
        ("=3", "write it as key=value"),
        ("pools.1.instances=3", "'1' is not an index into a list of 1"),
        ("pools.x.instances=3", "'x' is not an index"),
        ("name.x=3", "'x' cannot be set inside the text 'p'"),
    ],
)
def test_a_setting_that_fits_nowhere_says_so(setting: str, told: str) -> None:
    with pytest.raises(UsageError, match=r"^--set ") as error:
        override(PLAN, [setting])
    assert told in str(error.value)


def test_slots_and_adapters_that_cannot_be_are_answered_with_the_rule() -> None:
    text = """\
schema: simtune/plan@1
name: p
model: llama-3.1-8b
pools:
  - hardware: h100-sxm
    instances: 1
    batching: {max_num_seqs: 4, max_num_batched_tokens: 512}
    lora: {rank: 0, slots: 8}
"""
    (found,) = lines_of(Plan, text)
    assert found == "f.yaml:8:12: pools.0.lora.rank: must be one of 1, 8, 16, 32, 64, 128, 256, 320, 512, not 0"
    (found,) = lines_of(Plan, text.replace("rank: 0, slots: 8", "rank: 8, slots: 8, host_slots: 4"))
    rule = "pools.0.lora.host_slots: 4 is less than slots (8), whose adapters are in host memory too; raise it"
    assert found.endswith(rule)
    load = """\
schema: simtune/workload@1
name: w
arrivals: {kind: closed_loop, users: 1}
prompt: {kind: fixed, tokens: 8}
output: {kind: fixed, tokens: 8}
adapters: {count: 0}
"""
    (found,) = lines_of(Workload, load)
    assert found == "f.yaml:6:12: adapters.count: must be greater than or equal to 1 (found 0)"
    (found,) = lines_of(Workload, load.replace("count: 0", "count: 3, base_share: 1"))
    assert found == "f.yaml:6:22: adapters.base_share: must be less than 1 (found 1)"
