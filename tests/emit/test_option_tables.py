"""What starts routers and deployments, word by word against the options that their own sources declare.

Their parsers come with engines that need a GPU image, so the names stand here, each table with where it was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from simtune.emit import ENGINES
from simtune.emit.dynamo import ROUTER_MODES
from tests.emit.test_pools import MODEL, pools_of

ROUTERS = {
    # vllm-project/vllm: tests/v1/kv_connector/nixl_integration/toy_proxy_server.py, parse_args
    "vllm": {
        "--port", "--host", "--prefiller-hosts", "--prefiller-host", "--prefiller-ports", "--prefiller-port",
        "--decoder-hosts", "--decoder-host", "--decoder-ports", "--decoder-port",
    },
    # sgl-project/sglang: PD disaggregation page and test/srt PD servers: sglang_router.launch_router
    "sglang": {"--pd-disaggregation", "--mini-lb", "--policy", "--prefill", "--decode", "--host", "--port"},
}  # fmt: skip
DISAGGREGATED = {
    # NVIDIA/TensorRT-LLM: examples/disaggregated/disagg_config.yaml, what is read of it here
    "": {"hostname", "port", "backend", "context_servers", "generation_servers"},
    "context_servers": {"num_instances", "urls"},
    "generation_servers": {"num_instances", "urls"},
}
DEPLOYMENT = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    # ai-dynamo/dynamo: deploy/cloud/operator/api/v1alpha1/dynamocomponentdeployment_types.go, the json names of
    # DynamoComponentDeploymentSharedSpec; subComponentType came later, as the deployments of its recipes have it
    "service": {
        "annotations", "autoscaling", "compilationCache", "componentType", "dynamoNamespace", "envFromSecret", "envs",
        "extraPodMetadata", "extraPodSpec", "ingress", "labels", "livenessProbe", "multinode", "pvc", "readinessProbe",
        "replicas", "resources", "serviceName", "sharedMemory", "subComponentType",
    },
    "subComponentType": {"prefill", "decode"},
    # ai-dynamo/dynamo: components/src/dynamo/frontend, the choices of --router-mode
    "router-mode": {"round-robin", "random", "kv", "direct"},
}  # fmt: skip


def options(script: str) -> Iterator[str]:
    """Long options of a start line, without its comments."""
    for line in script.splitlines():
        if not line.startswith("#"):
            yield from re.findall(r"(?<![\w/-])--[a-z][a-z-]*", line)


@pytest.mark.parametrize("engine", ROUTERS)
def test_a_router_is_started_with_options_that_it_has(engine: str) -> None:
    script = ENGINES[engine].files(pools_of(engine, prefill=2), MODEL)["engine/router.sh"]
    used = set(options(script))
    assert {"--host", "--port"} < used <= ROUTERS[engine]


def test_trtllm_serve_is_given_keys_that_it_reads() -> None:
    files = ENGINES["tensorrt-llm"].files(pools_of("tensorrt-llm"), MODEL)
    content = yaml.safe_load(files["engine/tensorrt-llm-disaggregated.yaml"])
    assert set(content) <= DISAGGREGATED[""]
    for key in ("context_servers", "generation_servers"):
        assert set(content[key]) <= DISAGGREGATED[key]
        assert content[key]["num_instances"] == len(content[key]["urls"])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_deployment_has_fields_of_its_kind(engine: str) -> None:
    manifest: dict[str, Any] = yaml.safe_load(ENGINES[engine].files(pools_of(engine), MODEL)["engine/dynamo.yaml"])
    assert set(manifest) == DEPLOYMENT[""]
    for service in manifest["spec"]["services"].values():
        assert set(service) <= DEPLOYMENT["service"]
        assert service.get("subComponentType", "prefill") in DEPLOYMENT["subComponentType"]
        assert set(service["extraPodSpec"]) == {"mainContainer"}
        assert set(service["extraPodSpec"]["mainContainer"]) == {"image", "command", "args"}


def test_router_modes_are_dynamos() -> None:
    assert set(ROUTER_MODES.values()) <= DEPLOYMENT["router-mode"]
