"""Stages that encode media as SGLang runs them: servers with encoders alone (`--encoder-only`), in front of servers
with the language model alone (`--language-only`), which are given the addresses of the first.

Options and rules are those of sgl-project/sglang, python/sglang/srt/server_args.py (release 0.5.14) and
arg_groups/pd_disaggregation_hook.py (0.5.23), `handle_encoder_disaggregation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from simtune.emit.emitter import EngineFiles, LaunchArgs
from simtune.emit.launch import endpoints
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


class EncodingSglang(Sglang):
    """SGLang with encoders on servers of their own."""

    options: ClassVar[Mapping[str, type]] = {
        **Sglang.options,
        "encoder-only": bool,
        "language-only": bool,
    }

    def __init__(self, plan: Plan, release: ReleaseNumber = NEWEST) -> None:
        """`plan` has its servers that encode as its first pool."""
        super().__init__(release)
        self._plan, self._encoders = plan, plan.pools[0].name
        (stage,) = plan.stages or ()
        self._stage = stage
        urls = " ".join(
            f"http://127.0.0.1:$((PORT + {endpoint.number}))"
            for endpoint in endpoints(plan, plan.num_devices)
            if endpoint.pool.name == self._encoders
        )
        shared = Sglang.server
        more = {shared.settings_file(pool): ' "--encoder-urls $encoders"' for pool in plan.pools[1:]}
        if stage.encoder == "data":
            # release 0.5.23 does not read it from a file of settings
            more[shared.settings_file(plan.pools[0])] = " --mm-enable-dp-encoder"
        self.server = shared._replace(  # type: ignore[misc]  # of this plan alone
            command=f"{shared.command} ${{4:-}}",
            ports=f'{shared.ports}encoders="{urls}"\n',
            more=more,
        )

    def of(self, engine: str | None) -> EncodingSglang:
        """See `Emitter.of`."""
        return EncodingSglang(self._plan, Sglang().of(engine)._release)

    def serving(self, pool: Pool, model: Model) -> LaunchArgs:
        """See `ServingEmitter.serving`."""
        if pool.name != self._encoders:
            return {**super().serving(pool, model), "language-only": True}
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
            return
        yield "stages: the items of one request are divided among all servers here"
        yield "stages: items of several requests may be encoded together here"
        if self._stage.bytes_per_s is not None:
            yield "stages.bytes_per_s: the network determines it"


def encoder_files(
    plan: Plan, model: Model, devices_per_node: int, draft_models: Mapping[str, Model] | None
) -> EngineFiles:
    """Return the files with which SGLang runs a plan whose stage encodes media. Raises UsageError, with every reason,
    if it would refuse them."""
    stage = encoder_stage(plan)
    assert stage is not None
    if problems := [*refusals(plan, model, stage, devices_per_node)]:
        raise UsageError("\n".join(problems))
    changes: dict[str, Any] = {"name": stage.name, "instances": stage.instances, "spare": 0, "autoscaling": None}
    changes["parallelism"] = Parallelism(tp=stage.devices)
    encoders = plan.pools[0].model_copy(update={**changes, "speculation": None, "lora": None})
    servers = plan.model_copy(update={"pools": (encoders, *plan.pools)})
    emitter = EncodingSglang(servers).of(plan.pools[0].engine)
    return ServingEmitter.files(emitter, servers, model, devices_per_node, draft_models)


def refusals(plan: Plan, model: Model, stage: Stage, devices_per_node: int) -> Iterator[str]:
    """Yield the reasons why SGLang would not run the stage of a plan beside its pool."""
    where, vision = f"{plan.name}: stage {stage.name}", model.vision
    if any(pool.name == stage.name for pool in plan.pools):
        yield f"{where}: its settings and those of the pool would be one file; give the stage another name"
    if len(plan.pools) > 1 or plan.pools[0].role != "mixed":
        yield f"{where}: encoder servers are written in front of one pool with role mixed; start the others by hand"
    elif plan.num_devices > devices_per_node:
        yield (
            f"{where}: the plan has {plan.num_devices} devices and a node {devices_per_node}, and a plan does not name "
            "hosts; lower the instances, or start servers by hand with --encoder-urls"
        )
    if vision is None or vision.sizing.kind not in _SIZINGS:
        yield (
            f"{where}: SGLang has encoder servers for the vision models of Qwen and Kimi, and {model.name} is none of "
            "them; remove the stage"
        )
