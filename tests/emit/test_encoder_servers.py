"""Servers of SGLang that only encode: what the script starts, what is refused in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from simtune.emit import engine_files, why_none
from simtune.emit.importing import Imported, ImportRequest, import_plan
from simtune.errors import SpecError, UsageError
from simtune.specs.catalog import load_model
from tests.emit.test_import_round_trip import plan_of
from tests.emit.test_pools import calls

SEES = "qwen2.5-vl-7b"
STAGE: dict[str, Any] = {"encoder": "weights", "devices": 1, "instances": 3}
ENCODES = "python -m sglang.launch_server --model-path Qwen/Qwen2.5-VL-7B-Instruct --encoder-only --port 30001"
SERVES = "python -m sglang.launch_server --model-path Qwen/Qwen2.5-VL-7B-Instruct --language-only --port 30000"


def files(folder: Path, stage: dict[str, Any], model: str = SEES, **pool: Any) -> dict[str, str]:
    plan = plan_of(folder, "sglang-0.5.23", {"instances": 1, **pool}, model=model, stage=stage)
    return engine_files(plan, load_model(model), 8, {})


def imported(*commands: str, lenient: bool = False) -> Imported:
    text = "\n".join(commands)
    return import_plan(ImportRequest("h100-sxm", text, engine="sglang-0.5.23", lenient=lenient))


def test_the_script_starts_every_server_with_the_addresses_of_those_that_encode(tmp_path: Path) -> None:
    emitted = files(tmp_path, STAGE, instances=2, parallelism={"tp": 2})
    settings = {name: yaml.safe_load(text) for name, text in emitted.items() if name.endswith(".yaml")}
    assert settings["engine/sglang-see.yaml"] == {"encoder-only": True, "tp-size": 1}
    assert settings["engine/sglang-mixed.yaml"]["language-only"] is True
    started = calls(tmp_path, emitted, "launch.sh", ("python",), PORT="9000")
    encoders = [call for call in started if "sglang-see.yaml" in call]
    servers = [call for call in started if "sglang-mixed.yaml" in call]
    assert len(started) == 5
    assert [port in call for call, port in zip(sorted(encoders), ("9000", "9001", "9002"), strict=True)] == [True] * 3
    urls = "|--encoder-urls|http://127.0.0.1:9000|http://127.0.0.1:9001|http://127.0.0.1:9002"
    assert len(servers) == 2
    assert all(urls in call for call in servers)
    assert not any("encoder-urls" in call for call in encoders)


def test_images_are_divided_by_an_option_of_the_command(tmp_path: Path) -> None:
    """SGLang 0.5.23 refuses it in a file of settings."""
    started = calls(tmp_path, files(tmp_path, {**STAGE, "encoder": "data"}), "launch.sh", ("python",))
    assert ["--mm-enable-dp-encoder" in call for call in sorted(started)] == ["see" in call for call in sorted(started)]


def test_servers_on_several_nodes_are_named_by_their_hosts(tmp_path: Path) -> None:
    """Eight servers fill the first node, so the last two and the pool are on the second one."""
    emitted = files(tmp_path, {**STAGE, "instances": 10}, parallelism={"tp": 2})
    more = {"PORT": "9000", "HOST0": "a", "HOST1": "b"}
    for node in ("0", "1"):
        (tmp_path / node).mkdir()
    first, second = (
        calls(tmp_path / node, emitted, "launch.sh", ("python",), NODE=node, **more) for node in ("0", "1")
    )
    assert [len([call for call in started if "sglang-see.yaml" in call]) for started in (first, second)] == [8, 2]
    (server,) = [call for call in second if "sglang-mixed.yaml" in call]
    urls = [f"http://a:{port}" for port in range(9000, 9008)] + ["http://b:9000", "http://b:9001"]
    assert "|--encoder-urls|" + "|".join(urls) in server
    assert "run it on 2 hosts, each with its NODE" in emitted["engine/launch.sh"]
    assert "and the plan 12" in emitted["engine/launch.sh"]


PD: list[dict[str, Any]] = [
    {"name": role, "role": role, "instances": count} for role, count in (("prefill", 2), ("decode", 3))
]


def test_prefill_servers_beside_decode_servers_are_given_the_addresses(tmp_path: Path) -> None:
    """The router knows prefill and decode servers alone: the former send media to those that encode."""
    plan = plan_of(tmp_path, "sglang-0.5.23", *PD, model=SEES, stage={**STAGE, "instances": 1, "pool": "prefill"})
    emitted = engine_files(plan, load_model(SEES), 8, {})
    settings = {name: yaml.safe_load(text) for name, text in emitted.items() if name.endswith(".yaml")}
    assert settings["engine/sglang-see.yaml"] == {"encoder-only": True, "tp-size": 1}
    assert settings["engine/sglang-prefill.yaml"]["language-only"] is True
    assert settings["engine/sglang-prefill.yaml"]["disaggregation-mode"] == "prefill"
    assert "language-only" not in settings["engine/sglang-decode.yaml"]
    started = calls(tmp_path, emitted, "launch.sh", ("python",), PORT="9000")
    assert len(started) == 6
    with_urls = [call for call in started if "|--encoder-urls|http://127.0.0.1:9005" in call]
    assert len(with_urls) == 2
    assert all("sglang-prefill.yaml" in call for call in with_urls)
    router = emitted["engine/router.sh"]
    assert (router.count("--prefill "), router.count("--decode "), "mixed" in router) == (2, 3, False)


def test_pools_of_other_roles_are_refused(tmp_path: Path) -> None:
    pools = [*PD, {**PD[1], "name": "slow"}]
    plan = plan_of(tmp_path, "sglang-0.5.23", *pools, model=SEES, stage={**STAGE, "pool": "prefill"})
    with pytest.raises(UsageError, match="or of one prefill pool with one decode pool; start the others by hand"):
        engine_files(plan, load_model(SEES), 8, {})


def test_a_rate_of_its_own_is_said_to_be_left_out(tmp_path: Path) -> None:
    emitted = files(tmp_path, {**STAGE, "bytes_per_s": 1e10})
    assert "# Not said here: stages.bytes_per_s: the network determines it." in emitted["engine/sglang-see.yaml"]


@pytest.mark.parametrize(
    ("stage", "model", "pool", "why"),
    [
        (
            STAGE,
            "gemma-3-27b",
            {},
            "SGLang has encoder servers for the vision models of Qwen and Kimi, and gemma-3-27b",
        ),
    ],
)
def test_what_sglang_would_not_run_is_refused(
    tmp_path: Path, stage: dict[str, Any], model: str, pool: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        files(tmp_path, stage, model, **pool)


@pytest.mark.parametrize("engine", ["vllm-0.33", "sglang-0.5.23"])
def test_other_stages_have_no_servers(tmp_path: Path, engine: str) -> None:
    plan = plan_of(tmp_path, engine, {}, model=SEES, stage={"seconds": 0.1})
    assert engine_files(plan, load_model(SEES), 8, {}) == {}
    assert "stages" in why_none(plan)


def test_decode_servers_encode_nothing_and_are_read_so() -> None:
    plan = imported(
        f"{ENCODES} --tp 2",
        f"{SERVES} --encoder-urls http://a:30001 --disaggregation-mode prefill --port 30010",
        f"{SERVES.replace('--language-only ', '')} --disaggregation-mode decode --port 30020",
    ).plan
    (stage,) = plan.stages or ()
    assert [pool.role for pool in plan.pools] == ["prefill", "decode"]
    assert (stage.pool, stage.devices) == (plan.pools[0].name, 2)


def test_a_script_of_ones_own_is_read() -> None:
    plan = imported(
        f"{ENCODES} --tp 2 --mm-enable-dp-encoder --trust-remote-code",
        f"{SERVES} --encoder-urls http://a:30001 http://b:30002 --encoder-transfer-backend zmq_to_scheduler --tp 4",
    ).plan
    (stage,), (pool,) = plan.stages or (), plan.pools
    assert (stage.encoder, stage.devices, stage.instances, stage.pool) == ("data", 2, 1, pool.name)
    assert pool.parallelism.tp == 4


@pytest.mark.parametrize(
    ("commands", "why"),
    [
        ([ENCODES], r"starts servers that only encode; put those in that take their embeddings \(--language-only\)"),
        ([ENCODES, SERVES.replace("--language-only ", "")], "this one encodes too; give it --language-only"),
        ([SERVES], "takes embeddings of servers that are not started here"),
        ([ENCODES, f"{ENCODES} --tp 2", SERVES], "servers that encode differ in their ranks"),
        ([f"{ENCODES} --enable-prefix-mm-cache", SERVES], "a stage encodes every item; remove it, or give --lenient"),
    ],
)
def test_half_a_deployment_is_refused(commands: list[str], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        imported(*commands)


def test_a_cache_of_embeddings_is_left_out_on_request() -> None:
    notes = imported(f"{ENCODES} --enable-prefix-mm-cache", SERVES, lenient=True).notes
    assert any("--enable-prefix-mm-cache" in note for note in notes)


def test_requests_that_are_encoded_by_other_rules_are_named(tmp_path: Path) -> None:
    """SGLang 0.5.23 sends all requests with media to encoder servers unless it is set, and builds encoders anyway."""
    option = "--enable-adaptive-dispatch-to-encoder"
    plan = plan_of(tmp_path, "sglang-0.5.23", *PD, model=SEES, stage={**STAGE, "instances": 1, "pool": "prefill"})
    emitted = engine_files(plan, load_model(SEES), 8, {})
    for name, is_named in (("see", False), ("prefill", True), ("decode", False)):
        text = emitted[f"engine/sglang-{name}.yaml"]
        assert ("SGLANG_ENCODER_DISPATCH_MIN_ITEMS" in text) is is_named
        assert ("the encoder is built here too" in text) is is_named
        assert option[2:] not in yaml.safe_load(text)
    with pytest.raises(SpecError, match="it changes which requests are encoded by encoder servers, and which by this"):
        imported(ENCODES, f"{SERVES} {option}")
    notes = imported(ENCODES, f"{SERVES} {option} --tp 4", lenient=True)
    assert any(option in note for note in notes.notes)
    assert notes.plan.pools[0].parallelism.tp == 4


# --- vLLM -------------------------------------------------------------------------------------------------

PRODUCES = "vllm serve Qwen/Qwen2.5-VL-7B-Instruct --port 8001 --ec-transfer-config "
PRODUCER, CONSUMER = (
    f'{{"ec_connector": "ECExampleConnector", "ec_role": "{role}", '
    '"ec_connector_extra_config": {"shared_storage_path": "/tmp/ec_cache"}}'
    for role in ("ec_producer", "ec_consumer")
)


def test_servers_of_vllm_share_a_folder_of_embeddings(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "vllm-0.33", {"instances": 2}, model=SEES, stage={**STAGE, "instances": 2})
    emitted = engine_files(plan, load_model(SEES), 8, {})
    encode, mixed = (yaml.safe_load(emitted[f"engine/vllm-{name}.yaml"]) for name in ("see", "mixed"))
    assert (encode["ec-transfer-config"], mixed["ec-transfer-config"]) == (PRODUCER, CONSUMER)
    assert encode["gpu-memory-utilization"] == 0.01
    assert "which all servers have to share" in emitted["engine/vllm-see.yaml"]
    assert "mm-encoder-tp-mode" not in encode
    (call,) = calls(tmp_path, emitted, "router.sh", ("python",), VLLM_PROXY="/src/proxy.py", PORT="8100")
    urls = "|--encode-servers-urls|http://127.0.0.1:8100,http://127.0.0.1:8101|--prefill-servers-urls|disable|"
    assert urls + "--decode-servers-urls|http://127.0.0.1:8102,http://127.0.0.1:8103" in call


def test_prefill_servers_of_vllm_take_the_embeddings(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "vllm-0.33", *PD, model=SEES, stage={**STAGE, "instances": 1, "pool": "prefill"})
    emitted = engine_files(plan, load_model(SEES), 8, {})
    consumes = {
        name: "ec-transfer-config" in emitted[f"engine/vllm-{name}.yaml"] for name in ("see", "prefill", "decode")
    }
    assert consumes == {"see": True, "prefill": True, "decode": False}
    (call,) = calls(tmp_path, emitted, "router.sh", ("python",), VLLM_PROXY="/src/proxy.py", PORT="8100")
    assert "|--prefill-servers-urls|http://127.0.0.1:8100,http://127.0.0.1:8101|" in call
    assert "|--encode-servers-urls|http://127.0.0.1:8105|" in call


@pytest.mark.parametrize(
    ("engine", "stage", "why"),
    [
        ("vllm-0.24", STAGE, "vLLM 0.24 was not checked with servers that encode; take release 0.33"),
        ("vllm-0.33", {**STAGE, "devices": 2}, "checked with one GPU for each server that encodes; set devices to 1"),
    ],
)
def test_what_vllm_was_not_checked_with_is_refused(tmp_path: Path, engine: str, stage: Any, why: str) -> None:
    plan = plan_of(tmp_path, engine, {}, model=SEES, stage=stage)
    with pytest.raises(UsageError, match=why):
        engine_files(plan, load_model(SEES), 8, {})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (PRODUCER, "put those in that take their embeddings \\(ec_consumer in --ec-transfer-config\\)"),
        (CONSUMER, "takes embeddings of servers that are not started here; put those in \\(ec_producer in"),
    ],
)
def test_half_a_deployment_of_vllm_is_refused(config: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        import_plan(ImportRequest("h100-sxm", f"{PRODUCES}'{config}'", engine="vllm-0.33"))
