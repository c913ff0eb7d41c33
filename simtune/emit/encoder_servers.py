"""Stages that encode media as SGLang runs them: servers with encoders alone (`--encoder-only`), in front of servers
with the language model alone (`--language-only`), which are given the addresses of the first. Beside prefill and decode
pools these are the prefill servers (docs.sglang.io, EPD disaggregation).

Options and rules are those of sgl-project/sglang, python/sglang/srt/server_args.py (release 0.5.14) and
arg_groups/pd_disaggregation_hook.py (0.5.23), `handle_encoder_disaggregation`. Every request with media is sent to the
servers that encode, unless `--enable-adaptive-dispatch-to-encoder` is given: then those with fewer items of all kinds
than `SGLANG_ENCODER_DISPATCH_MIN_ITEMS`, 2 unless set, are encoded by the server that answers
(managers/tokenizer_manager.py, `_handle_epd_disaggregation_encode_request` and `_should_dispatch_to_encoder`). It is
not written, since servers of SGLang that encode in their own steps are not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from simtune.emit.emitter import EngineFiles, LaunchArgs
from simtune.emit.launch import Endpoint, endpoints
from simtune.emit.releases import ReleaseNumber
from simtune.emit.serving import ServingEmitter
from simtune.emit.sglang import NEWEST, Sglang
from simtune.errors import UsageError
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Parallelism, Pool
from simtune.specs.stages import Stage

_SIZINGS = ("native", "padded")
"""Rules for images of the families for which SGLang has encoder servers: Qwen's and Kimi's."""


def encoder_stage(plan: Plan) -> Stage | None:
    """Return the stage of a plan that servers of SGLang can be: the only one, which encodes media and does nothing
    else; None if there is none."""
    stages = plan.stages or ()
    if len(stages) != 1 or stages[0].encoder is None or stages[0].seconds or stages[0].seconds_per_token:
        return None
    return stages[0]


class EncoderServers(NamedTuple):
    """Servers that encode, as the pool that the script starts, beside the pools whose prompts need them."""

    stage: Stage
    pool: Pool
    taking: tuple[Pool, ...]
    """Pools that are given the addresses of the servers."""
    addresses: str
    """Shell text that sets the variable with the addresses."""

    @classmethod
    def of(cls, plan: Plan, stage: Stage, devices_per_node: int) -> tuple[EncoderServers, Plan]:
        """Return the servers of a stage of a plan, and the plan with their pool in place of the stage: the first one,
        or the last one beside prefill and decode pools, whose script starts with theirs."""
        taking = tuple(pool for pool in plan.pools if pool.role != "decode")
        changes: dict[str, Any] = {"name": stage.name, "instances": stage.instances, "spare": 0, "autoscaling": None}
        changes |= {"role": "mixed", "parallelism": Parallelism(tp=stage.devices), "speculation": None, "lora": None}
        pool = taking[0].model_copy(update=changes)
        pools = (pool, *plan.pools) if plan.pools[0].role == "mixed" else (*plan.pools, pool)
        started = plan.model_copy(update={"pools": pools, "stages": None})
        return cls(stage, pool, taking, _addresses(endpoints(started, devices_per_node), pool)), started


def _addresses(placed: Sequence[Endpoint], encoders: Pool) -> str:
    """Return shell text that sets `encoders` to the addresses of the servers that encode. Their hosts have to be given
    if the plan is on several nodes."""
    servers = [endpoint for endpoint in placed if endpoint.pool is encoders]
    if placed[-1].node == 0:
        urls = [f"http://127.0.0.1:$((PORT + {endpoint.number}))" for endpoint in servers]
        return f'encoders="{" ".join(urls)}"\n'
    urls = [f"http://${endpoint.host}:$((PORT + {endpoint.number}))" for endpoint in servers]
    hosts = [f': "${{{host}:?set {host} to the host of node {host[4:]}, where servers encode}}"\n'
             for host in dict.fromkeys(endpoint.host for endpoint in servers)]  # fmt: skip
    return "".join(hosts) + f'encoders="{" ".join(urls)}"\n'


class EncodingSglang(Sglang):
    """SGLang with encoders on servers of their own."""

    options: ClassVar[Mapping[str, type]] = {
        **Sglang.options,
        "encoder-only": bool,
        "language-only": bool,
    }

    def __init__(self, servers: EncoderServers, release: ReleaseNumber = NEWEST) -> None:
        """Write for these servers that encode, and those of the other pools."""
        super().__init__(release)
        self._servers, self._encoders = servers, servers.pool.name
        shared = Sglang.server
        more = {shared.settings_file(pool): ' "--encoder-urls $encoders"' for pool in servers.taking}
        if servers.stage.encoder == "data":
            # release 0.5.23 does not read it from a file of settings
            more[shared.settings_file(servers.pool)] = " --mm-enable-dp-encoder"
        self.server = shared._replace(  # type: ignore[misc]  # of this plan alone
            command=f"{shared.command} ${{4:-}}", ports=f"{shared.ports}{servers.addresses}", more=more
        )

    def of(self, engine: str | None) -> EncodingSglang:
        """See `Emitter.of`."""
        return EncodingSglang(self._servers, Sglang().of(engine)._release)

    def serving(self, pool: Pool, model: Model) -> LaunchArgs:
        """See `ServingEmitter.serving`."""
        if pool.name != self._encoders:
            return super().serving(pool, model) | ({} if pool.role == "decode" else {"language-only": True})
        return {"encoder-only": True, "tp-size": pool.parallelism.tp}

    def drafting(self, pool: Pool, draft_models: Mapping[str, Model]) -> LaunchArgs:
        """See `ServingEmitter.drafting`; servers that encode draft nothing."""
        return {} if pool.name == self._encoders else super().drafting(pool, draft_models)

    def refusals(self, pool: Pool, model: Model, draft_models: Mapping[str, Model]) -> Iterator[str]:
        """See `Emitter.refusals`."""
        if pool.name != self._encoders:
            yield from super().refusals(pool, model, draft_models)

    def unsaid(self, pool: Pool) -> Iterator[str]:
        """See `Emitter.unsaid`; and how SGLang's servers differ from a stage."""
        if pool.name != self._encoders:
            yield from super().unsaid(pool)
            if pool.role != "decode":
                yield (
                    "enable-adaptive-dispatch-to-encoder: all media are encoded by the encoder servers; with it "
                    "requests with fewer items than SGLANG_ENCODER_DISPATCH_MIN_ITEMS (2) would be encoded here"
                )
                # models/qwen2_5_vl.py, qwen3_vl.py and kimi_vl.py build it before they look at language_only
                yield "stages: the encoder is built here too, and its weights take memory of the KV blocks"
            return
        yield "stages: the items of one request are divided among all servers here"
        yield "stages: items of several requests may be encoded together here"
        if self._servers.stage.bytes_per_s is not None:
            yield "stages.bytes_per_s: the network determines it"


def encoder_files(
    plan: Plan, model: Model, devices_per_node: int, draft_models: Mapping[str, Model] | None
) -> EngineFiles:
    """Return the files with which SGLang runs a plan whose stage encodes media. Raises UsageError, with every reason,
    if it would refuse them."""
    stage = encoder_stage(plan)
    assert stage is not None
    if problems := [*refusals(plan, model, stage)]:
        raise UsageError("\n".join(problems))
    servers, started = EncoderServers.of(plan, stage, devices_per_node)
    emitter = EncodingSglang(servers).of(servers.taking[0].engine)
    return ServingEmitter.files(emitter, started, model, devices_per_node, draft_models)


def refusals(plan: Plan, model: Model, stage: Stage) -> Iterator[str]:
    """Yield the reasons why SGLang would not run the stage of a plan in front of its pools."""
    yield from role_refusals(plan, stage)
    vision = model.vision
    if vision is None or vision.sizing.kind not in _SIZINGS:
        yield (
            f"{plan.name}: stage {stage.name}: SGLang has encoder servers for the vision models of Qwen and Kimi, and "
            f"{model.name} is none of them; remove the stage"
        )


def role_refusals(plan: Plan, stage: Stage) -> Iterator[str]:
    """Yield the reasons why servers that encode cannot be written for a stage beside the pools of a plan."""
    where = f"{plan.name}: stage {stage.name}"
    if any(pool.name == stage.name for pool in plan.pools):
        yield f"{where}: its settings and those of the pool would be one file; give the stage another name"
    if sorted(pool.role for pool in plan.pools) not in (["mixed"], ["decode", "prefill"]):
        yield (
            f"{where}: encoder servers are written in front of one pool with role mixed, or of one prefill pool with "
            "one decode pool; start the others by hand"
        )
