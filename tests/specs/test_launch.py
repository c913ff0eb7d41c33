"""Facts of published launch files: what they set for a load, and what outranks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simtune
from simtune.api import load_question, load_specs
from simtune.errors import SpecError, UsageError
from simtune.specs.catalog import load_engine, load_hardware, load_launch, load_model, load_workload, names
from simtune.specs.launch import LoadShape
from simtune.specs.plan import Plan
from simtune.specs.pool import Role
from simtune.specs.workload import ClosedLoop, FixedLength, Poisson, Quantiles, Workload

GPT_OSS = "inferencex-gpt-oss-120b-h200-vllm"
MINIMAX = "inferencex-minimax-m2.5-fp8-b200-vllm"
APART = "inferencex-deepseek-v3-fp8-h100-trtllm-pd"
LONG = LoadShape(users=64, prompt=8192, output=1024)


def closed(users: int, prompt: int = 1024, output: int = 1024) -> Workload:
    return Workload(
        name="closed",
        requests=8,
        arrivals=ClosedLoop(users=users),
        prompt=Quantiles(levels=(0.0, 1.0), tokens=(0.8 * prompt, prompt)),
        output=FixedLength(tokens=output),
    )


@pytest.mark.parametrize("name", names("launch"))
@pytest.mark.parametrize("load", [LONG, LoadShape(None, 300, 100)], ids=["closed", "rate"])
def test_every_launch_file_makes_a_plan_for_the_card_that_it_was_for(name: str, load: LoadShape) -> None:
    launch = load_launch(name)
    model, device = load_model(launch.model), load_hardware(launch.hardware).device
    roles: tuple[Role, ...] = ("prefill", "decode") if launch.disaggregated else ("mixed",)
    pools = []
    for role in roles:
        settings = launch.over(load_engine(launch.engine), load, role).settings(device, model)
        pools.append(
            {
                "hardware": launch.hardware,
                "engine": launch.engine,
                "instances": 1,
                "role": role,
                "name": role,
                **settings,
            }
        )
    link: dict[str, Any] = {"link": {}} if launch.disaggregated else {}
    plan = Plan.model_validate({"name": "p", "model": launch.model, "pools": pools, **link})
    for role, pool in zip(roles, plan.pools, strict=True):
        stated, unknown = launch.settings(load, role)
        assert bool(unknown) <= (load.users is None)
        for key, value in stated.get("kv_cache", {}).items():
            assert getattr(pool.kv_cache, key) == value


def test_prefill_and_decode_pools_have_settings_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(
        "schema: simtune/plan@1\nname: mine\nmodel: deepseek-v3\nlink: {}\npools:\n"
        + "".join(
            f"- {{name: {role}, role: {role}, hardware: h100-sxm, engine: trtllm-1.2, instances: 3,\n"
            "   parallelism: {tp: 16, expert_parallel: true}}\n"
            for role in ("prefill", "decode")
        )
    )
    plan = load_specs(None, None, closed(30), file, like=APART).plan
    assert plan is not None
    prefill, decode = plan.pools
    assert (prefill.batching.max_num_seqs, decode.batching.max_num_seqs) == (2, 8)
    assert (prefill.async_scheduling, decode.async_scheduling) == (False, True)
    assert not prefill.kv_cache.prefix_caching
    assert not decode.kv_cache.prefix_caching
    with pytest.raises(UsageError, match="a launch file of prefill and decode pools; give a plan that has such pools"):
        load_specs(None, None, closed(30), like=APART)


def test_a_file_states_for_which_loads_servers_drafted() -> None:
    load = LoadShape(users=144, prompt=1024, output=1024)
    stated = load_launch("inferencex-deepseek-v3-fp8-h200-trtllm-pd")
    assert (stated.drafting(load), stated.drafting(LoadShape(72, 1024, 1024))) == ("both", "never")
    assert load_launch(APART).drafting(LoadShape(None, 1024, 1024)) is None


def test_settings_follow_the_load() -> None:
    launch = load_launch("inferencex-deepseek-v3-fp8-b200-trtllm")
    assert launch.settings(LONG)[0]["batching"]["max_num_batched_tokens"] == (64 + 8192 + 127) // 64 * 64
    assert launch.settings(LONG)[0]["prompt_launch_s"] == 0
    few = launch.settings(LoadShape(users=4, prompt=1024, output=1024))[0]
    balance = {
        "attention_dp_enable_balance": True,
        "attention_dp_timeout_iters": 60,
        "attention_dp_batching_wait_iters": 0,
    }
    assert few["batching"] == {"max_num_batched_tokens": 8192, "options": balance}
    assert "prompt_launch_s" not in few
    many = launch.settings(LoadShape(users=256, prompt=1024, output=8192))[0]
    assert many["kv_cache"] == {"dtype": "fp8", "memory_utilization": 0.7, "prefix_caching": False}
    rate, unknown = launch.settings(LoadShape(users=None, prompt=1024, output=1024))
    assert rate["batching"] == {"max_num_batched_tokens": 8192, "options": balance}
    assert "those when prompt > 1024 and users >= 64" in unknown


def test_the_longest_request_counts() -> None:
    load, trace = load_workload("chat")
    assert LoadShape.of(load, trace) == LoadShape(None, round(load.prompt.tokens[-1]), round(load.output.tokens[-1]))  # type: ignore[union-attr,index]
    assert LoadShape.of(closed(7), None) == LoadShape(7, 1024, 1024)


def test_without_a_plan_model_card_and_engine_are_those_of_the_launch_file() -> None:
    specs = load_specs(None, None, closed(16), like=GPT_OSS)
    assert (specs.model.name, specs.hardware[0].name) == ("gpt-oss-120b", "h200-sxm")
    assert specs.engine is not None
    pool = simtune.api.set_up(specs).deployment.plan.pools[0]
    assert pool.batching.max_num_seqs == 16
    assert not pool.kv_cache.prefix_caching
    plain = simtune.api.set_up(load_specs("gpt-oss-120b", "h200-sxm", closed(16), engine="vllm-0.14"))
    assert plain.deployment.plan.pools[0].kv_cache.prefix_caching
    assert pool.host == plain.deployment.plan.pools[0].host


PLAN = """\
schema: simtune/plan@1
name: mine
model: minimax-m2.5
pools:
- hardware: b200
  engine: {engine}
  instances: 1
  parallelism: {{tp: 4}}
  kv_cache: {{memory_utilization: 0.7}}
"""


def test_what_a_plan_says_outranks_the_launch_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(PLAN.format(engine="vllm-0.24"))
    specs = load_specs(None, None, closed(32), file, like=MINIMAX)
    assert specs.plan is not None
    (pool,) = specs.plan.pools
    assert pool.kv_cache.memory_utilization == 0.7
    assert (pool.kv_cache.dtype, pool.batching.max_num_batched_tokens, pool.stream_interval) == ("fp8", 2048, 20)
    assert pool.engine == "vllm-0.24"


def test_a_study_has_the_settings_where_it_searches_nothing() -> None:
    study = Path("examples/quickstart/study.yaml")
    plain, like = load_question(study), load_question(study, like=GPT_OSS)
    assert (plain.study.engine, like.study.engine) == (None, "vllm-0.14")
    assert like.engine is not None
    assert like.engine.settings(like.hardware[0].device, like.model)["kv_cache"]["memory_utilization"] == 0.9


def test_refusals_say_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another engine; leave the engine out"):
        load_specs(None, None, closed(4), engine="sglang-0.5", like=GPT_OSS)
    file = tmp_path / "plan.yaml"
    file.write_text(
        PLAN.format(engine="none").replace(
            "kv_cache", "batching: {max_num_seqs: 8, max_num_batched_tokens: 99}\n  kv_cache"
        )
    )
    with pytest.raises(UsageError, match=r"write engine: vllm-0\.19 in its pools"):
        load_specs(None, None, closed(4), file, like=MINIMAX)
    with pytest.raises(UsageError, match="no launch is called"):
        load_launch("inferencex")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("pool: {batching: {max_num_seqs: {of_load: clients}}}", "there is no setting 'clients'; names are users"),
        ("pool: {batching: {max_num_seqs: {of_load: users / 0}}}", "division by zero"),
        ("pool: {batching: {max_seqs: 3}}", "max_seqs"),
        ("pool: {}\ncases: [{when: users >, pool: {}}]", "is no expression"),
        ("pool: {}\ncases: [{when: tp > 4, pool: {}}]", "there is no setting 'tp'"),
        ("pool: {}\ndecode: {batching: {max_seqs: 3}}", "max_seqs"),
        ("pool: {}\ncases: [{when: users > 4, prefill: {kv_cache: {dtype: of_load}}}]", "prefill.kv_cache.dtype"),
        ("pool: {}\ndrafts: sometimes", "drafts"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_its_line(line: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    head = "schema: simtune/launch@1\nname: mine\nmodel: m\nweights: bf16\nhardware: h\nengine: vllm-0.24\nsource: me\n"
    file.write_text(head + line + "\n")
    with pytest.raises(SpecError, match=problem) as caught:
        load_launch(str(file))
    assert "mine.yaml:" in str(caught.value)


def test_a_rate_says_nothing_of_users() -> None:
    load = closed(4).model_copy(update={"arrivals": Poisson(rate_rps=1.0)})
    assert LoadShape.of(load, None).users is None
