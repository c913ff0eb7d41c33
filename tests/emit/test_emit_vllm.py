"""A plan becomes files that vLLM reads and a script that really starts every instance once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simtune.emit.vllm import OPTIONS, Vllm
from simtune.errors import UsageError
from simtune.specs.model import Model, MoeFeedForward
from simtune.specs.plan import Plan

MODEL = Model.from_text(
    """
schema: simtune/model@1
name: tiny
hf: example/Tiny-1B
hidden_size: 2048
vocab_size: 32000
max_position: 8192
layers:
  - count: 16
    attention: {kind: full, heads: 32, kv_heads: 8, head_dim: 64}
    feed_forward: {kind: dense, intermediate_size: 8192}
"""
)
emit = Vllm().files
UNNAMED = MODEL.model_copy(update={"hf": None})


def plan_of(**pool: Any) -> Plan:
    batching = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, **pool.pop("batching", {})}
    return Plan.model_validate(
        {
            "name": "the-plan",
            "model": "tiny",
            "pools": [{"hardware": "h100", "instances": 1, "batching": batching, **pool}],
        }
    )


def settings_of(plan: Plan, model: Model = MODEL) -> dict[str, Any]:
    loaded = yaml.safe_load(emit(plan, model)["engine/vllm-mixed.yaml"])  # the parser vLLM itself uses
    assert isinstance(loaded, dict)
    return loaded


def test_every_knob_of_the_plan_arrives_under_vllms_own_name() -> None:
    plan = plan_of(
        parallelism={"tp": 2, "pp": 4},
        batching={"max_num_seqs": 64, "max_num_batched_tokens": 2048, "chunked_prefill": True},
        kv_cache={
            "dtype": "fp8",
            "block_size": 32,
            "memory_utilization": 0.85,
            "num_blocks": 4321,
            "prefix_caching": False,
        },
        async_scheduling=False,
        max_model_len=4000,
    )
    assert settings_of(plan) == {
        "tensor-parallel-size": 2,
        "pipeline-parallel-size": 4,
        "max-num-seqs": 64,
        "max-num-batched-tokens": 2048,
        "max-model-len": 4000,
        "gpu-memory-utilization": 0.85,
        "num-gpu-blocks-override": 4321,
        "block-size": 32,
        "kv-cache-dtype": "fp8",
        "scheduling-policy": "fcfs",
        "enable-chunked-prefill": True,
        "no-enable-prefix-caching": True,
        "no-async-scheduling": True,
    }


def test_what_the_plan_leaves_open_is_settled_as_the_simulation_settles_it() -> None:
    settings = settings_of(plan_of())
    assert settings["max-model-len"] == MODEL.max_position
    assert settings["kv-cache-dtype"] == "auto"
    assert settings["async-scheduling"] is True
    assert "num-gpu-blocks-override" not in settings


def test_a_cache_that_differs_from_the_checkpoint_s_is_said() -> None:
    """auto is what the checkpoint asks for, where it does."""
    asking = MODEL.model_copy(update={"kv_dtype": "fp8"})
    said = {
        dtype: settings_of(plan_of(kv_cache={"dtype": dtype}), asking)["kv-cache-dtype"]
        for dtype in (None, "fp8", "bf16")
    }
    assert said == {None: "auto", "fp8": "auto", "bf16": "bfloat16"}


def test_experts_on_ranks_and_eager_launches_are_said_only_when_wanted() -> None:
    experts = MODEL.layers[0].model_copy(
        update={"feed_forward": MoeFeedForward(experts=8, experts_per_token=2, intermediate_size=1024)}
    )
    sparse = MODEL.model_copy(update={"layers": (experts,)})
    wanted = plan_of(parallelism={"tp": 2, "expert_parallel": True}, cuda_graphs=False)
    settings = settings_of(wanted, sparse)
    assert settings["enable-expert-parallel"] is True
    assert settings["enforce-eager"] is True
    assert set(settings) - set(settings_of(plan_of(), sparse)) == {"enable-expert-parallel", "enforce-eager"}
    with pytest.raises(UsageError, match=r"parallelism\.expert_parallel: tiny is no mixture of experts"):
        emit(wanted, MODEL)


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2]),
    seqs=st.integers(1, 512),
    tokens=st.integers(8192, 20_000),
    chunked=st.booleans(),
    async_on=st.booleans(),
    dtype=st.sampled_from([None, "bf16", "fp8"]),
    blocks=st.none() | st.integers(1, 10**6),
)
def test_every_key_is_a_known_option_with_a_value_of_its_type(
    tp: int,
    pp: int,
    seqs: int,
    tokens: int,
    chunked: bool,
    async_on: bool,
    dtype: str | None,
    blocks: int | None,
) -> None:
    settings = settings_of(
        plan_of(
            parallelism={"tp": tp, "pp": pp},
            batching={"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "chunked_prefill": chunked},
            kv_cache={"dtype": dtype, "num_blocks": blocks},
            async_scheduling=async_on,
        )
    )
    for key, value in settings.items():
        switch = key.removeprefix("no-")
        assert type(value) is OPTIONS[switch].type
        assert value is not False  # some versions of vLLM drop `option: false` silently
        assert switch == key or OPTIONS[switch].type is bool
        assert key == switch or switch not in settings


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ({"kv_cache": {"dtype": "int8"}}, ["kv_cache.dtype", "int8", "fp8"]),
        (
            {"batching": {"max_num_batched_tokens": 100}},
            ["tokens (100)", "max_num_seqs (256)"],
        ),
        (
            {"batching": {"max_num_batched_tokens": 4096, "chunked_prefill": False}},
            ["chunked_prefill", "4096", "max_model_len (8192)"],
        ),
        ({"parallelism": {"tp": 3}}, ["parallelism.tp", "32 attention heads of tiny"]),
        ({"parallelism": {"pp": 17}}, ["parallelism.pp", "16 layers of tiny"]),
    ],
)
def test_a_plan_vllm_would_refuse_is_refused_here(pool: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        emit(plan_of(**pool), MODEL)
    for word in ["the-plan", "pool mixed", *words]:
        assert word in str(caught.value)


def drafting(drafter: dict[str, Any], scheme: dict[str, Any] | None = None, **pool: Any) -> dict[str, Any]:
    scheme = scheme or {"kind": "chain", "tokens": 3}
    return {"speculation": {"drafter": drafter, "scheme": scheme, "acceptance": "mine"}, **pool}


def test_where_the_scheduler_must_wait_for_drafts_it_is_not_told_to_run_ahead_of_them() -> None:
    ngram = plan_of(**drafting({"kind": "ngram", "lookup_max": 4}))
    assert settings_of(ngram)["no-async-scheduling"] is True
    assert "# vLLM cannot schedule asynchronously with ngram drafts." in emit(ngram, MODEL)["engine/vllm-mixed.yaml"]
    head = plan_of(**drafting({"kind": "eagle", "checkpoint": "org/head"}))
    assert settings_of(head)["async-scheduling"] is True


def test_drafts_that_vllm_would_refuse_or_forget_are_refused_here() -> None:
    small = {"small": MODEL}
    wide = plan_of(**drafting({"kind": "draft_model", "model": "small", "tp": 2}, parallelism={"tp": 4}))
    with pytest.raises(
        UsageError, match=r"speculation\.drafter\.tp: vLLM drafts on 1 GPU or on the target's 4, not on 2"
    ):
        emit(wide, MODEL, draft_models=small)
    for tp in (None, 1, 4):
        emit(
            plan_of(**drafting({"kind": "draft_model", "model": "small", "tp": tp}, parallelism={"tp": 4})),
            MODEL,
            8,
            small,
        )
    by_batch = {"kind": "by_batch", "max_tokens": 3, "ranges": [{"first": 1, "last": 64, "tokens": 3}]}
    head = {"kind": "eagle", "checkpoint": "org/head"}
    emit(plan_of(**drafting(head, by_batch)), MODEL)
    with pytest.raises(UsageError, match="with attention_dp vLLM drops draft lengths by batch size"):
        emit(plan_of(**drafting(head, by_batch, parallelism={"attention_dp": 2})), MODEL)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        emit(plan_of(parallelism={"tp": 3}, kv_cache={"dtype": "fp32"}), MODEL)
    assert len(str(caught.value).splitlines()) == 2


# --- launch.sh, run for real with a `vllm` that writes down how it was called -----------------------------

FAKE_VLLM = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES|$*" >> "$CALLS"
if [ "$6" = "$FAIL_PORT" ]; then
    while [ "$(wc -l < "$CALLS")" -lt 2 ]; do sleep 0.02; done  # until the other instance runs
    exit 3
fi
[ -z "$STAY" ] || exec sleep 60
"""


def launch(
    folder: Path, plan: Plan, model: Model = MODEL, shell: str = "sh", **environment: str
) -> tuple[int, list[str], str]:
    """Exit code, sorted calls of vllm as `devices|arguments`, and what went to stderr."""
    for name, text in emit(plan, model).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    fake = folder / "bin" / "vllm"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(FAKE_VLLM)
    fake.chmod(0o755)
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [shell, str(folder / "engine" / "launch.sh")],
        env={"PATH": path, "CALLS": str(calls), "FAIL_PORT": "", "STAY": "", **environment},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return done.returncode, sorted(calls.read_text().splitlines()) if calls.exists() else [], done.stderr


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_script_starts_each_instance_on_its_own_devices_and_port(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not on this machine")
    code, calls, _ = launch(tmp_path, plan_of(instances=4, parallelism={"tp": 2}), shell=shell)
    config = tmp_path / "engine" / "vllm-mixed.yaml"
    assert code == 0
    assert calls == [
        f"{devices}|serve example/Tiny-1B --config {config} --port {port}"
        for devices, port in [("0,1", 8000), ("2,3", 8001), ("4,5", 8002), ("6,7", 8003)]
    ]


def test_model_and_port_come_from_the_environment_when_set(tmp_path: Path) -> None:
    _, calls, _ = launch(tmp_path, plan_of(), MODEL="/srv/my model", PORT="9100")
    assert calls == [f"0|serve /srv/my model --config {tmp_path}/engine/vllm-mixed.yaml --port 9100"]


def test_a_model_without_an_address_must_be_named_by_the_user(tmp_path: Path) -> None:
    code, calls, stderr = launch(tmp_path, plan_of(), UNNAMED)
    assert (code != 0, calls) == (True, [])
    assert "set MODEL to what vLLM should load as tiny" in stderr
    code, calls, _ = launch(tmp_path, plan_of(), UNNAMED, MODEL="here")
    assert code == 0
    assert calls[0].startswith("0|serve here ")


def test_a_hostile_model_address_is_only_ever_text(tmp_path: Path) -> None:
    hostile = """a"b'c $(touch pwned) `touch pwned`"""
    code, calls, _ = launch(tmp_path, plan_of(), MODEL.model_copy(update={"hf": hostile}))
    assert code == 0
    assert calls[0].startswith(f"0|serve {hostile} --config")
    assert not Path("pwned").exists()


def test_more_devices_than_one_node_become_numbered_nodes_that_share_nothing(tmp_path: Path) -> None:
    plan = plan_of(instances=5, parallelism={"tp": 4})
    assert "a node has 8 devices\n#        and the plan 20" in emit(plan, MODEL)["engine/launch.sh"]
    started = []
    for node in range(3):
        code, calls, _ = launch(tmp_path, plan, NODE=str(node))
        assert code == 0
        devices = [d for call in calls for d in call.split("|")[0].split(",")]
        assert len(set(devices)) == len(devices) <= 8
        started.append(len(calls))
    assert started == [2, 2, 1]
    code, calls, stderr = launch(tmp_path, plan)
    assert (code != 0, calls) == (True, [])
    assert "set NODE" in stderr
    code, calls, stderr = launch(tmp_path, plan, NODE="3")
    assert (code, calls) == (2, [])
    assert "NODE must be 0 to 2" in stderr


def test_an_instance_wider_than_a_node_is_not_guessed_at(tmp_path: Path) -> None:
    code, calls, stderr = launch(tmp_path, plan_of(parallelism={"tp": 8, "pp": 2}))
    assert (code, calls) == (1, [])
    assert "spans nodes" in stderr
    assert "needs 16 devices" in (tmp_path / "engine" / "launch.sh").read_text()


def test_when_one_instance_fails_the_script_fails_and_leaves_none_behind(tmp_path: Path) -> None:
    code, calls, _ = launch(tmp_path, plan_of(instances=2), FAIL_PORT="8000", STAY="yes")
    assert code == 3  # within the time limit: the other instance, which would stay a minute, was stopped
    assert len(calls) == 2


@given(
    instances=st.integers(1, 20),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 3]),
    per_node=st.integers(1, 16),
)
def test_no_device_is_used_twice_and_no_instance_lost(instances: int, tp: int, pp: int, per_node: int) -> None:
    script = emit(plan_of(instances=instances, parallelism={"tp": tp, "pp": pp}), MODEL, per_node)["engine/launch.sh"]
    starts = [line.split() for line in script.splitlines() if line.strip().startswith("start vllm-")]
    if tp * pp > per_node:
        assert starts == []
        return
    assert len(starts) == instances
    for node in script.split(";;"):
        visible = [int(d) for line in node.splitlines() if "start vllm-" in line for d in line.split()[2].split(",")]
        assert len(set(visible)) == len(visible)
        assert all(0 <= d < per_node for d in visible)


def test_the_files_say_whose_option_names_they_use_and_do_not_change_by_themselves() -> None:
    once, twice = emit(plan_of(instances=3), MODEL), emit(plan_of(instances=3), MODEL)
    assert once == twice
    assert all(f"vLLM {Vllm().version}" in text and "the-plan" in text for text in once.values())
    assert once["engine/launch.sh"].startswith("#!/bin/sh\n")
    check = subprocess.run(["sh", "-n"], input=once["engine/launch.sh"], text=True, check=False)
    assert check.returncode == 0
