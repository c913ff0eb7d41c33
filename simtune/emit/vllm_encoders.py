"""Stages that encode media as vLLM runs them: servers that produce embeddings (`--ec-transfer-config`), in front of
servers that consume them, with the proxy of vLLM's example before both.

Options and roles are those of vllm/config/ec_transfer.py (release 0.33), servers and proxy those of
examples/disaggregated/disaggregated_encoder: embeddings go through a folder that all servers share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from simtune.emit.emitter import EngineFiles, written_by
from simtune.emit.encoder_servers import EncoderServers, encoder_stage, role_refusals
from simtune.emit.launch import Endpoint, launch_script, router_script
from simtune.emit.releases import ReleaseNumber, words
from simtune.emit.vllm import SERVER, Vllm
from simtune.emit.vllm_releases import NEWEST
from simtune.errors import UsageError
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool

_SINCE: ReleaseNumber = (0, 33)
FOLDER = "/tmp/ec_cache"
"""Folder through which embeddings go."""
_APART = ("It must send items to servers that encode first, as the proxy of vLLM's example does: router.sh starts it.",)
_PROXY = "examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py"


def _transfer(role: str) -> str:
    """Return the setting of servers of a role."""
    more = {"shared_storage_path": FOLDER}
    return json.dumps({"ec_connector": "ECExampleConnector", "ec_role": role, "ec_connector_extra_config": more})


class EncodingVllm(Vllm):
    """vLLM with encoders on servers of their own."""

    def __init__(self, servers: EncoderServers, release: ReleaseNumber = NEWEST) -> None:
        """Write for these servers that encode, and those of the other pools."""
        super().__init__(release)
        self._servers, self._encoders = servers, servers.pool.name

    def of(self, engine: str | None) -> Self:
        """See `Emitter.of`."""
        return type(self)(self._servers, Vllm().of(engine)._release)

    def _settings(self, pool: Pool, model: Model, drafts: Mapping[str, Model]) -> dict[str, int | float | str | bool]:
        if pool.name == self._encoders:
            return self._encoding(pool)
        settings = super()._settings(pool, model, drafts)
        consumes: dict[str, Any] = {} if pool.role == "decode" else {"ec-transfer-config": _transfer("ec_consumer")}
        return {**settings, **consumes, "enable-request-id-headers": True}

    def _encoding(self, pool: Pool) -> dict[str, int | float | str | bool]:
        """Return the settings of servers that encode: those of the example, with the token budget of the pool."""
        by_item: dict[str, Any] = {"mm-encoder-tp-mode": "data"} if self._servers.stage.encoder == "data" else {}
        return {
            "tensor-parallel-size": pool.parallelism.tp,
            "max-num-batched-tokens": pool.batching.max_num_batched_tokens,
            "gpu-memory-utilization": 0.01,
            "no-enable-prefix-caching": True,
            "enforce-eager": True,
            **by_item,
            "ec-transfer-config": _transfer("ec_producer"),
            "enable-request-id-headers": True,
        }

    def refusals(self, pool: Pool, model: Model, draft_models: Mapping[str, Model]) -> Iterator[str]:
        """See `Emitter.refusals`."""
        if pool.name != self._encoders:
            yield from super().refusals(pool, model, draft_models)
        elif self._release < _SINCE:
            yield f"vLLM {self.version} was not checked with servers that encode; take release {words(_SINCE)}"

    def unsaid(self, pool: Pool) -> Iterator[str]:
        """See `Emitter.unsaid`; and how vLLM's servers differ from a stage."""
        if pool.name != self._encoders:
            yield from super().unsaid(pool)
            return
        yield "stages: each item is a request of its own here, to the servers in turn"
        yield "stages: items of several requests may be encoded together here"
        yield f"stages: embeddings go through {FOLDER}, which all servers have to share"
        if self._servers.stage.bytes_per_s is not None:
            yield "stages.bytes_per_s: that folder determines it"


class VllmServers(Vllm):
    """vLLM, also with encoders on servers of their own."""

    def takes_stages(self, plan: Plan) -> bool:
        """See `Emitter.takes_stages`."""
        return not plan.stages or encoder_stage(plan) is not None

    def files(
        self, plan: Plan, model: Model, devices_per_node: int = 8, draft_models: Mapping[str, Model] | None = None
    ) -> EngineFiles:
        """See `Vllm.files`."""
        if not plan.stages:
            return super().files(plan, model, devices_per_node, draft_models)
        servers, started = _checked(plan, model, devices_per_node)
        emitter = EncodingVllm(servers).of(servers.taking[0].engine)
        names = written_by(*(emitter.of(pool.engine) for pool in started.pools))
        server = SERVER._replace(apart=_APART)
        return {
            **emitter.server_files(started, model, devices_per_node, draft_models),
            "engine/launch.sh": launch_script(started, model, devices_per_node, names, server),
            "engine/router.sh": router_script(started, devices_per_node, names, lambda placed: _proxy(placed, servers)),
        }

    def server_files(
        self, plan: Plan, model: Model, devices_per_node: int = 8, draft_models: Mapping[str, Model] | None = None
    ) -> EngineFiles:
        """See `Emitter.server_files`."""
        if not plan.stages:
            return super().server_files(plan, model, devices_per_node, draft_models)
        servers, started = _checked(plan, model, devices_per_node)
        emitter = EncodingVllm(servers).of(servers.taking[0].engine)
        return emitter.server_files(started, model, devices_per_node, draft_models)


def _checked(plan: Plan, model: Model, devices_per_node: int) -> tuple[EncoderServers, Plan]:
    """Return the servers of the stage of a plan, and the plan with their pool. Raises UsageError, with every reason, if
    vLLM would refuse them."""
    if problems := [*_refusals(plan, model)]:
        raise UsageError("\n".join(problems))
    stage = encoder_stage(plan)
    assert stage is not None
    return EncoderServers.of(plan, stage, devices_per_node)


def _refusals(plan: Plan, model: Model) -> Iterator[str]:
    """Yield the reasons why vLLM would not run the stage of a plan in front of its pools."""
    stage = encoder_stage(plan)
    assert stage is not None
    yield from role_refusals(plan, stage)
    where = f"{plan.name}: stage {stage.name}"
    if stage.devices > 1:
        yield f"{where}: vLLM was checked with one GPU for each server that encodes; set devices to 1"
    if not model.towers.kinds:
        yield f"{where}: {model.name} reads no media; remove the stage"


def _proxy(placed: Sequence[Endpoint], servers: EncoderServers) -> str:
    """Return the command of the proxy of vLLM's example, which distributes items, prompts and outputs in turn."""

    def urls(role: str) -> str:
        chosen = [e for e in placed if (e.pool is servers.pool) == (role == "encode")]
        of_role = [e for e in chosen if role == "encode" or e.pool.role == role]
        return ",".join(f"http://${e.host}:$((PORT + {e.number}))" for e in of_role)

    mixed = servers.taking[0].role == "mixed"
    return " \\\n".join(
        [
            f'python "${{VLLM_PROXY:?set VLLM_PROXY to {_PROXY} of the sources of vLLM}}"',
            f'    --encode-servers-urls "{urls("encode")}"',
            f'    --prefill-servers-urls "{"disable" if mixed else urls("prefill")}"',
            f'    --decode-servers-urls "{urls("mixed" if mixed else "decode")}"',
            '    --host 127.0.0.1 --port "$ROUTER_PORT"',
        ]
    )
