"""Prefill and decode pools for every engine: their instances, what brings them together, and a Dynamo deployment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from simtune.emit import ENGINES
from simtune.emit.dynamo import kubernetes_name, service_name
from simtune.errors import UsageError
from simtune.specs.catalog import load_model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool

MODEL = load_model("llama-3.1-8b")
POLICIES = {"vllm": "vllm-fcfs", "sglang": "sglang", "tensorrt-llm": "tensorrt-llm"}
# A line at once, for instances may be started at the same time.
FAKE = '#!/bin/sh\nline=$(printf "%s|" "$(basename "$0")" "$@"); printf "%s\\n" "$line" >> "$CALLS"\n'


def pools_of(engine: str, prefill: int = 1, decode: int = 2, tp: int = 2, **more: Any) -> Plan:
    """Prefill instances before decode instances, all on tp GPUs."""
    common = {
        "hardware": "h100-sxm",
        "max_model_len": 4096,
        "parallelism": {"tp": tp},
        "batching": {
            "policy": POLICIES[engine],
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "chunked_prefill": True,
        },
        "kv_cache": {"block_size": 16, "memory_utilization": 0.9, "prefix_caching": False},
    }
    pools = [
        {"name": "front", "role": "prefill", "instances": prefill, **common},
        {"name": "back.end", "role": "decode", "instances": decode, **common},
    ]
    return Plan.model_validate({"name": "Apart.1", "model": "llama-3.1-8b", "pools": pools, "link": {}, **more})


def calls(folder: Path, files: dict[str, str], script: str, commands: tuple[str, ...], **environment: str) -> list[str]:
    """How a script calls commands that only write down how they were called, each as `command|argument|...`."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for command in commands:
        fake = folder / "bin" / command
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(FAKE)
        fake.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", str(folder / "engine" / script)],
        env={"PATH": path, "CALLS": str(folder / "calls"), **environment},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted((folder / "calls").read_text().splitlines())


def test_vllms_proxy_knows_every_instance(tmp_path: Path) -> None:
    files = ENGINES["vllm"].files(pools_of("vllm"), MODEL)
    (call,) = calls(tmp_path, files, "router.sh", ("python",), VLLM_PROXY="/src/my proxy.py", PORT="8100")
    assert call == (
        "python|/src/my proxy.py|--prefiller-hosts|127.0.0.1|--prefiller-ports|8100|"
        "--decoder-hosts|127.0.0.1|127.0.0.1|--decoder-ports|8101|8102|--host|127.0.0.1|--port|9000|"
    )
    settings = yaml.safe_load(files["engine/vllm-front.yaml"])
    assert "NixlConnector" in settings["kv-transfer-config"]


def test_sglang_apart(tmp_path: Path) -> None:
    files = ENGINES["sglang"].files(pools_of("sglang", prefill=2, decode=1), MODEL)
    for pool, role in (("front", "prefill"), ("back.end", "decode")):
        settings = yaml.safe_load(files[f"engine/sglang-{pool}.yaml"])
        assert settings["disaggregation-mode"] == role
        assert settings["disaggregation-transfer-backend"] == "nixl"
    (call,) = calls(tmp_path, files, "router.sh", ("python",), HOST0="10.0.0.7")
    assert call == (
        "python|-m|sglang_router.launch_router|--pd-disaggregation|--prefill|http://10.0.0.7:8000|8998|"
        "--prefill|http://10.0.0.7:8001|8999|--decode|http://10.0.0.7:8002|--host|127.0.0.1|--port|9000|"
    )
    (tmp_path / "calls").unlink()
    started = calls(tmp_path, files, "launch.sh", ("python",), MODEL="/srv/a model; rm -rf x")
    assert [call.split("|")[-3:-1] for call in started] == [
        ["--disaggregation-bootstrap-port", port] for port in ("9000", "8998", "8999")
    ]
    assert all("|--model-path|/srv/a model; rm -rf x|" in call for call in started)


def test_sglangs_groups_with_attention_of_their_own() -> None:
    plan = pools_of("sglang")
    dp = plan.pools[1].model_copy(
        update={
            "parallelism": plan.pools[1].parallelism.model_copy(update={"attention_dp": 2, "expert_parallel": True})
        }
    )
    names = ("tp-size", "attn-dp-size", "dp-size", "enable-dp-attention", "ep-size")
    for engine, said in ((None, (4, 2, None, None, 4)), ("sglang-0.5", (4, None, 2, True, 4))):
        pools = tuple(pool.model_copy(update={"engine": engine}) for pool in (plan.pools[0], dp))
        files = ENGINES["sglang"].files(plan.model_copy(update={"pools": pools}), load_model("mixtral-8x7b"))
        settings = yaml.safe_load(files["engine/sglang-back.end.yaml"])
        assert tuple(settings.get(name) for name in names) == said
        assert f"option names of SGLang {'0.5.23' if engine is None else '0.5.14'}." in files["engine/dynamo.yaml"]


def test_tensorrt_llm_apart() -> None:
    files = ENGINES["tensorrt-llm"].files(pools_of("tensorrt-llm"), MODEL)
    front, back = (yaml.safe_load(files[f"engine/tensorrt-llm-{pool}.yaml"]) for pool in ("front", "back.end"))
    assert front["cache_transceiver_config"] == back["cache_transceiver_config"] == {"backend": "DEFAULT"}
    assert (front["disable_overlap_scheduler"], back["disable_overlap_scheduler"]) == (True, False)
    assert "# Not said here: async_scheduling: instances that prefill" in files["engine/tensorrt-llm-front.yaml"]
    assert "Not said here" not in files["engine/tensorrt-llm-back.end.yaml"]
    assert yaml.safe_load(files["engine/tensorrt-llm-disaggregated.yaml"]) == {
        "hostname": "localhost",
        "port": 9000,
        "context_servers": {"num_instances": 1, "urls": ["localhost:8000"]},
        "generation_servers": {"num_instances": 2, "urls": ["localhost:8001", "localhost:8002"]},
    }


@pytest.mark.parametrize("engine", POLICIES)
def test_hosts_are_asked_for_where_there_are_several(engine: str) -> None:
    files = ENGINES[engine].files(pools_of(engine, prefill=2, decode=2, tp=4), MODEL, devices_per_node=8)
    if engine == "tensorrt-llm":
        servers = yaml.safe_load(files["engine/tensorrt-llm-disaggregated.yaml"])
        assert servers["context_servers"]["urls"] == ["HOST0:8000", "HOST0:8001"]
        assert servers["generation_servers"]["urls"] == ["HOST1:8000", "HOST1:8001"]
        return
    done = subprocess.run(
        ["sh"], input=files["engine/router.sh"], env={**os.environ, "HOST0": "a"}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "set HOST1 to the host of node 1" in done.stderr


@pytest.mark.parametrize("engine", POLICIES)
def test_one_role_or_an_instance_over_nodes_has_no_router(engine: str) -> None:
    wide = ENGINES[engine].files(pools_of(engine, tp=8), MODEL, devices_per_node=4)
    mixed = Pool.model_validate(
        {**pools_of(engine).pools[0].model_dump(exclude_unset=True), "role": "mixed", "name": "mixed"}
    )
    plan = Plan(name="p", model="llama-3.1-8b", pools=(mixed,))
    for files in (wide, ENGINES[engine].files(plan, MODEL)):
        assert not [name for name in files if "router" in name or "disaggregated" in name]


def test_what_an_engine_is_not_told_is_named() -> None:
    plan = pools_of("sglang")
    stingy = plan.pools[1].model_copy(
        update={"kv_cache": plan.pools[1].kv_cache.model_copy(update={"watermark": 0.05, "other_memory_gib": 2.0})}
    )
    files = ENGINES["sglang"].files(plan.model_copy(update={"pools": (plan.pools[0], stingy)}), MODEL)
    text = files["engine/sglang-back.end.yaml"]
    assert "# Not said here: kv_cache.watermark: 0.05 of the blocks stay free in the plan, and not here." in text
    assert "# Not said here: kv_cache.other_memory_gib: " in text
    assert "Not said" not in files["engine/sglang-front.yaml"]


# --- Dynamo -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "module", "option"), [("vllm", "vllm", "--model"), ("sglang", "sglang", "--model-path")]
)
def test_a_dynamo_deployment_has_a_service_for_each_pool(engine: str, module: str, option: str) -> None:
    files = ENGINES[engine].files(pools_of(engine), MODEL)
    manifest = yaml.safe_load(files["engine/dynamo.yaml"])
    assert (manifest["apiVersion"], manifest["kind"]) == ("nvidia.com/v1alpha1", "DynamoGraphDeployment")
    assert manifest["metadata"] == {"name": "apart-1"}
    services = manifest["spec"]["services"]
    assert list(services) == ["Frontend", "FrontWorker", "BackEndWorker"]
    assert services["Frontend"]["extraPodSpec"]["mainContainer"]["args"] == ["--router-mode", "round-robin"]
    for name, role, replicas in (("FrontWorker", "prefill", 1), ("BackEndWorker", "decode", 2)):
        service = services[name]
        assert (service["componentType"], service["subComponentType"]) == ("worker", role)
        assert (service["replicas"], service["resources"]) == (replicas, {"limits": {"gpu": "2"}})
        container = service["extraPodSpec"]["mainContainer"]
        assert container["command"] == ["python3", "-m", f"dynamo.{engine}"]
        arguments = container["args"]
        assert all(isinstance(argument, str) for argument in arguments)
        assert arguments[:4] == [option, MODEL.hf, "--disaggregation-mode", role]
        assert arguments.count("--disaggregation-mode") == 1
        own = yaml.safe_load(files[f"engine/{engine}-{'front' if role == 'prefill' else 'back.end'}.yaml"])
        assert {a for a in arguments if a.startswith("--")} - {option} == {
            f"--{name}" for name in own if name != "disaggregation-mode"
        } | {"--disaggregation-mode"}
        assert "True" not in arguments
    assert "Not said here" not in files["engine/dynamo.yaml"]


def test_a_model_path_is_one_argument_whatever_is_in_it() -> None:
    hostile = "x'; rm -rf ~ #\"$(id)"
    files = ENGINES["vllm"].files(pools_of("vllm"), MODEL.model_copy(update={"hf": hostile}))
    services = yaml.safe_load(files["engine/dynamo.yaml"])["spec"]["services"]
    assert services["FrontWorker"]["extraPodSpec"]["mainContainer"]["args"][1] == hostile


def test_what_dynamo_is_not_told_is_named() -> None:
    plan = pools_of(
        "vllm",
        router={"kind": "least_tokens"},
        decode_router={"kind": "least_outstanding"},
        link={"layerwise": True},
        events=[{"kind": "failure", "at_s": 1.0, "pool": "front", "instance": 0}],
    )
    text = ENGINES["vllm"].files(plan, MODEL.model_copy(update={"hf": None}))["engine/dynamo.yaml"]
    unsaid = [line.split(": ")[1] for line in text.splitlines() if line.startswith("# Not said here: ")]
    assert unsaid == ["router", "decode_router", "link", "events", "model"]


def test_routers_that_dynamo_has_are_named() -> None:
    text = ENGINES["vllm"].files(pools_of("vllm", router={"kind": "prefix_aware"}), MODEL)["engine/dynamo.yaml"]
    assert yaml.safe_load(text)["spec"]["services"]["Frontend"]["extraPodSpec"]["mainContainer"]["args"][1] == "kv"


def test_names_are_those_of_kubernetes() -> None:
    assert kubernetes_name("Llama_3.1--70B.") == "llama-3-1-70b"
    assert kubernetes_name("_" * 9) == "plan"
    assert len(kubernetes_name("a" * 100)) == 63
    assert service_name(pools_of("vllm").pools[1]) == "BackEndWorker"


@pytest.mark.parametrize("engine", sorted(POLICIES.keys() - {"sglang"}))
def test_shares_of_a_gpu_are_refused_by_name(engine: str) -> None:
    plan = pools_of(engine).model_dump(mode="json", exclude_none=True)
    plan["pools"][0] |= {"instances": 2, "share": {"processors": 0.5, "bandwidth": 0.5}}
    plan["pools"][1]["share"] = {"processors": 0.5, "bandwidth": 0.5, "beside": "front"}
    for pool in plan["pools"]:
        pool["kv_cache"]["memory_utilization"] = 0.45
    with pytest.raises(UsageError, match=r"pool back\.end: share: .* has no setting for shares of a GPU"):
        ENGINES[engine].files(Plan.model_validate(plan, strict=False), MODEL)


@pytest.mark.parametrize(("kind", "given"), [("prefix_aware", True), ("round_robin", False)])
def test_dynamo_leaves_prompts_to_decode_instances(kind: str, given: bool) -> None:
    plan = pools_of("vllm", local_prefill={"below_tokens": 2048, "below_share": 0.7}, router={"kind": kind})
    text = ENGINES["vllm"].files(plan, MODEL)["engine/dynamo.yaml"]
    services = yaml.safe_load(text)["spec"]["services"]
    front, prefill, decode = (service["extraPodSpec"]["mainContainer"]["args"] for service in services.values())
    assert ("--router-conditional-disagg" in front) is given
    assert ("--enable-conditional-disagg" in decode) is given
    assert "--enable-conditional-disagg" not in prefill
    assert ("local_prefill: Dynamo's router goes by what decode instances have cached" in text) is not given
    if given:
        bounding = json.loads(front[front.index("--router-conditional-disagg-config") + 1])
        assert bounding == {"policy": "isl_bounding", "eff_isl_threshold": 2048, "eff_isl_ratio_threshold": 0.7}
