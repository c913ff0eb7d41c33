"""Plans and drafts as SGLang reads them: its long options without their dashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from simtune.emit.adapters import sglang_lora, sglang_lora_refusals
from simtune.emit.dynamo import deployment_file
from simtune.emit.emitter import EngineFiles, LaunchArgs, loaded, written_by
from simtune.emit.experts import placement_refusals, sglang_experts
from simtune.emit.launch import Endpoint, Server, router_script
from simtune.emit.option import Option, written
from simtune.emit.releases import ReleaseNumber, release_of, words
from simtune.emit.serving import ServingEmitter, own_options
from simtune.specs.cache_tiers import CacheTier
from simtune.specs.drafters import BlockDrafter, Drafter, DraftModel, Eagle, Ngram
from simtune.specs.model import MlaAttention, Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.schemes import Chain, DynamicTree, Scheme
from simtune.specs.speculation import Speculation

_POLICIES = {"sglang": "fcfs"}
_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "dflash": "DFLASH", "dspark": "DSPARK"}

NEWEST: ReleaseNumber = (0, 5, 23)
_ATTENTION_RANKS: ReleaseNumber = (0, 5, 22)
"""First release whose settings files must not contain enable-dp-attention (python/sglang/srt/server_args.py)."""
_PROMPT_GROUPS: ReleaseNumber = (0, 5, 23)
"""First release whose settings of groups that divide prompts were checked; earlier ones have others."""
_EAGER = ("disable-decode-cuda-graph", "disable-prefill-cuda-graph")
_ELASTIC: ReleaseNumber = (0, 5, 23)
"""First release whose settings of elastic experts were checked; earlier ones may have them."""
_GRAPHS_BY_PHASE: ReleaseNumber = (0, 5, 14)
"""First release whose settings files must not contain disable-cuda-graph."""
_DRAFT_TREES = (DraftModel, Eagle)
_OF_A_LOOKUP = (
    "speculative-algorithm",
    "speculative-num-draft-tokens",
    "speculative-ngram-min-bfs-breadth",
    "speculative-ngram-max-bfs-breadth",
)


def _chain(scheme: Chain) -> LaunchArgs:
    return _tree(scheme.tokens, 1, scheme.tokens)


def _dynamic_tree(scheme: DynamicTree) -> LaunchArgs:
    return _tree(scheme.steps, scheme.topk, scheme.tokens)


def _tree(steps: int, topk: int, tokens: int) -> LaunchArgs:
    """SGLang's number of draft tokens counts the root, which needs no drafting."""
    return {
        "speculative-num-steps": steps,
        "speculative-eagle-topk": topk,
        "speculative-num-draft-tokens": tokens + 1,
    }


def _draft_model(drafter: DraftModel, checkpoint: str | None) -> LaunchArgs:
    return {"speculative-algorithm": "STANDALONE", **loaded("speculative-draft-model-path", checkpoint)}


def _part_of_the_target(drafter: Eagle | BlockDrafter, checkpoint: str | None) -> LaunchArgs:
    algorithm = _ALGORITHMS[drafter.method]
    return {"speculative-algorithm": algorithm, **loaded("speculative-draft-model-path", checkpoint)}


def _ngram(drafter: Ngram, checkpoint: str | None) -> LaunchArgs:
    return {
        "speculative-algorithm": "NGRAM",
        "speculative-ngram-min-bfs-breadth": 1,
        "speculative-ngram-max-bfs-breadth": 1,
    }


def _hicache(host: CacheTier | None, ranks: int) -> LaunchArgs:
    """Return the settings of a tier in host memory, whose size SGLang has in gigabytes of each rank."""
    if host is None:
        return {}
    size = host.size(ranks)
    return {
        "enable-hierarchical-cache": True,
        "hicache-ratio": host.device_ratio,
        "hicache-size": None if size is None else max(1, round(size / ranks / 1e9)),
        "hicache-write-policy": "write_through" if host.written == "computed" else "write_back",
    }


def _strategy(model: Model) -> str:
    """Return the word for how prompts are divided: token by token for sparse attention, else in two pieces a group."""
    attention = (group.attention for group in model.layers)
    selects = any(isinstance(layer, MlaAttention) and layer.index_topk is not None for layer in attention)
    return "interleave" if selects else "zigzag"


def _prompt_group_refusals(pool: Pool, model: Model) -> Iterator[str]:
    """Yield the rules of python/sglang/srt/arg_groups/model_overrides/deepseek_v2.py; models without experts have no
    code for it."""
    for key, is_set in (("speculation", pool.speculation), ("kv_cache.tiers", pool.kv_cache.tiers)):
        if is_set:
            yield f"{key}: SGLang was not checked with it and divided prompts; remove it, or prefill_context_parallel"
    key, p = "parallelism.prefill_context_parallel", pool.parallelism
    latent = any(isinstance(group.attention, MlaAttention) for group in model.layers)
    if not any(group.feed_forward.kind == "moe" for group in model.layers):
        yield f"{key}: SGLang divides prompts of mixtures of experts only, and {model.name} is none; leave it out"
    if latent and not (p.expert_parallel and pool.expert_exchange == "deepep"):
        yield f"{key}: with latent attention SGLang needs expert_parallel and expert_exchange: deepep; set these"
    if latent and _strategy(model) == "zigzag" and p.tp > 1:
        yield f"{key}: with latent attention SGLang has one rank in each group; set parallelism.tp to 1"
    if _strategy(model) == "interleave" and p.tp * p.expert_groups > 8:
        yield f"{key}: with sparse attention SGLang has 8 ranks at most; lower it, tp or attention_dp"


def _router(placed: list[Endpoint]) -> str:
    """Return the router's command with the address of every instance, and the bootstrap port of those that prefill."""
    lines = ["python -m sglang_router.launch_router --pd-disaggregation"]
    for endpoint in placed:
        pool, number = endpoint.pool, endpoint.number
        if pool.role == "mixed":
            continue  # a server that encodes, to which prefill servers send media themselves
        address = f'"http://${endpoint.host}:$((PORT + {number}))"'
        bootstrap = f' "$((${{BOOTSTRAP_PORT:-8998}} + {number}))"' if pool.role == "prefill" else ""
        lines.append(f"    --{pool.role} {address}{bootstrap}")
    return " \\\n".join([*lines, '    --host 127.0.0.1 --port "$ROUTER_PORT"'])


class Sglang(ServingEmitter):
    """Options of `python -m sglang.launch_server`, which reads them from a file by `--config`."""

    name = "sglang"
    title = "SGLang"
    options: ClassVar[Mapping[str, type]] = {
        "speculative-algorithm": str,
        "speculative-draft-model-path": str,
        "speculative-num-steps": int,
        "speculative-eagle-topk": int,
        "speculative-num-draft-tokens": int,
        "speculative-adaptive": bool,
        "speculative-ngram-min-bfs-breadth": int,
        "speculative-ngram-max-bfs-breadth": int,
    }
    schemes: ClassVar[Mapping[type[Scheme], Callable[[Any], LaunchArgs]]] = {Chain: _chain, DynamicTree: _dynamic_tree}
    drafters: ClassVar[Mapping[type[Drafter], Callable[[Any, str | None], LaunchArgs]]] = {
        DraftModel: _draft_model,
        Eagle: _part_of_the_target,
        BlockDrafter: _part_of_the_target,
        Ngram: _ngram,
    }
    policies: ClassVar[Mapping[str, str]] = _POLICIES
    knows = frozenset({"enable_eplb", "lora", "max_queued_requests", "stream_interval"})
    chunk_pipelines = ("fixed", "dynamic")
    tiers_written = frozenset({"computed", "evicted"})
    tier_ratios = True
    own_defaults = ("kv_cache.prefix_caching", "kv_cache.block_size", "kv_cache.memory_utilization")
    server = Server(
        name="sglang",
        title="SGLang",
        command="""CUDA_VISIBLE_DEVICES="$2" python -m sglang.launch_server --model-path "$MODEL" \\
        --config "$here/$1" --port "$((PORT + $3))\"""",
        ports='BOOTSTRAP_PORT="${BOOTSTRAP_PORT:-8998}"\n',
        apart=("router.sh starts SGLang's own, which brings prefill and decode instances together.",),
        apart_options=' --disaggregation-bootstrap-port "$((BOOTSTRAP_PORT + $3))"',
    )
    serving_options: ClassVar[Mapping[str, Option]] = {
        "tp-size": Option(int),
        "pp-size": Option(int, "parallelism.pp"),
        "dp-size": Option(int),
        "enable-dp-attention": Option(bool),
        "attn-dp-size": Option(int),
        "enable-prefill-cp": Option(bool),
        "attn-cp-size": Option(int, "parallelism.prefill_context_parallel", unless=1),
        "cp-strategy": Option(str),
        "ep-size": Option(int),
        "moe-a2a-backend": Option(str),
        "enable-eplb": Option(bool),
        "ep-num-redundant-experts": Option(int),
        "elastic-ep-backend": Option(str),
        "max-running-requests": Option(int, "batching.max_num_seqs"),
        "max-queued-requests": Option(int, "batching.max_queued_requests"),
        "chunked-prefill-size": Option(int),
        "enable-dynamic-chunking": Option(bool, "batching.chunk_pipeline", {"dynamic": True}),
        "max-prefill-tokens": Option(int),
        "context-length": Option(int, "max_model_len"),
        "mem-fraction-static": Option(float, "kv_cache.memory_utilization", stated=True),
        "max-total-tokens": Option(int),
        "page-size": Option(int, "kv_cache.block_size", stated=True),
        "quantization": Option(str),
        "kv-cache-dtype": Option(str),
        "schedule-policy": Option(str, "batching.policy", _POLICIES),
        "schedule-conservativeness": Option(float),
        "disable-radix-cache": Option(bool, "kv_cache.prefix_caching", {False: True}, stated=True),
        "disable-overlap-schedule": Option(bool, "async_scheduling", {False: True}),
        "stream-interval": Option(int, "stream_interval"),
        "enable-hierarchical-cache": Option(bool),
        "hicache-ratio": Option(float),
        "hicache-size": Option(int),
        "hicache-write-policy": Option(str),
        "enable-lora": Option(bool),
        "max-loras-per-batch": Option(int),
        "max-lora-rank": Option(int),
        "max-loaded-loras": Option(int),
        "lora-target-modules": Option(str),
        "disable-cuda-graph": Option(bool),
        "disable-decode-cuda-graph": Option(bool),
        "disable-prefill-cuda-graph": Option(bool),
        "enable-pdmux": Option(bool),
        "sm-group-num": Option(int),
        "pdmux-config-path": Option(str),
        "disaggregation-mode": Option(str, "role", unless="mixed"),
        "disaggregation-transfer-backend": Option(str),
    }
    quantizations: ClassVar[Mapping[str, str]] = {"fp8": "fp8"}
    kv_dtypes: ClassVar[Mapping[str, str]] = {"fp8": "fp8_e4m3", "bf16": "bf16"}
    takes = "it drafts one chain or one EAGLE-2 tree for all loads: Schedule.dynamic_tree()"

    def __init__(self, release: ReleaseNumber = NEWEST) -> None:
        self._release = release
        self.version = words(release)
        self.knows = type(self).knows | (
            {"prefill_context_parallel_size"} if release >= _PROMPT_GROUPS else frozenset()
        )

    def of(self, engine: str | None) -> Self:
        """See `Emitter.of`."""
        release = release_of(engine, self.name, NEWEST)
        return self if release == self._release else type(self)(release)

    def serving(self, pool: Pool, model: Model) -> LaunchArgs:
        """See `ServingEmitter.serving`. Its tp counts the ranks of all groups with attention of their own."""
        p, batching, cache = pool.parallelism, pool.batching, pool.kv_cache
        blocks = cache.num_blocks
        return written(
            self.serving_options,
            pool,
            tp_size=p.tp * p.expert_groups,
            enable_prefill_cp=True if p.prompt_groups > 1 else None,
            cp_strategy=_strategy(model) if p.prompt_groups > 1 else None,
            **{name.replace("-", "_"): value for name, value in self._groups(p.attention_dp).items()},
            ep_size=p.tp * p.expert_groups if p.expert_parallel else None,
            # -1 turns chunking off; max-prefill-tokens then bounds the prompts of a step.
            chunked_prefill_size=batching.max_num_batched_tokens if batching.chunked_prefill else -1,
            max_prefill_tokens=None if batching.chunked_prefill else batching.max_num_batched_tokens,
            max_total_tokens=None if blocks is None else blocks * cache.block_size,
            quantization=self.quantization(pool, model),
            kv_cache_dtype=self.kv_dtype(pool, model),
            schedule_conservativeness=own_options(pool).get("schedule_conservativeness"),
            **sglang_lora(pool),
            **sglang_experts(pool),
            **{name.replace("-", "_"): value for name, value in _hicache(self.host_tier(pool), p.devices).items()},
            **{name.replace("-", "_"): True for name in (() if pool.cuda_graphs else self._eager)},
            disaggregation_transfer_backend=None if pool.role == "mixed" else "nixl",
        )

    def refusals(self, pool: Pool, model: Model, draft_models: Mapping[str, Model]) -> Iterator[str]:
        """See `Emitter.refusals`."""
        yield from super().refusals(pool, model, draft_models)
        yield from placement_refusals(pool, model, self.title)
        yield from sglang_lora_refusals(pool)
        if pool.parallelism.elastic_experts and self.of(pool.engine)._release < _ELASTIC:
            release = self.of(pool.engine).version
            yield f"parallelism.elastic_experts: SGLang {release} was not checked; take release 0.5.23, or remove it"
        if pool.parallelism.elastic_experts and pool.expert_exchange != "deepep":
            yield (
                "parallelism.elastic_experts: SGLang goes on with fewer ranks if tokens are sent to the ranks of their "
                "experts; set expert_exchange to deepep, or remove it"
            )
        if pool.parallelism.prompt_groups > 1 and "prefill_context_parallel_size" in self.knows:
            yield from _prompt_group_refusals(pool, model)

    @property
    def _eager(self) -> tuple[str, ...]:
        """Flags without which graphs are captured."""
        return _EAGER if self._release >= _GRAPHS_BY_PHASE else ("disable-cuda-graph",)

    def unsaid(self, pool: Pool) -> Iterator[str]:
        """See `Emitter.unsaid`; the smooth factor of dynamic chunks is set in the environment."""
        yield from super().unsaid(pool)
        if pool.parallelism.elastic_experts:
            yield (
                "parallelism.elastic_experts: ranks may fail and come back (--elastic-ep-join-mode recover); none is "
                "removed on request"
            )
        if (factor := own_options(pool).get("smooth_factor")) is not None:
            yield f"batching.options.smooth_factor: set SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR to {factor:g}"

    def _groups(self, attention_dp: int) -> LaunchArgs:
        """Return the settings of groups of ranks with attention of their own."""
        if attention_dp == 1:
            return {}
        if self._release >= _ATTENTION_RANKS:
            return {"attn-dp-size": attention_dp}
        return {"dp-size": attention_dp, "enable-dp-attention": True}

    def files(
        self, plan: Plan, model: Model, devices_per_node: int = 8, draft_models: Mapping[str, Model] | None = None
    ) -> EngineFiles:
        """See `ServingEmitter.files`; and a deployment by NVIDIA Dynamo."""
        drafts, of = draft_models or {}, {pool.name: self.of(pool.engine) for pool in plan.pools}
        files = super().files(plan, model, devices_per_node, draft_models)
        return files | deployment_file(
            plan,
            model,
            written_by(*of.values()),
            ("dynamo.sglang", "--model-path"),
            lambda pool: {**of[pool.name].serving(pool, model), **self.drafting(pool, drafts)},
            self.left_open,
        )

    def router_files(self, plan: Plan, devices_per_node: int, names: str) -> EngineFiles:
        """`engine/router.sh`, which starts its router (docs.sglang.ai, PD disaggregation)."""
        return {"engine/router.sh": router_script(plan, devices_per_node, names, _router)}

    def speculation(self, speculation: Speculation, draft: Model | None = None) -> LaunchArgs:
        """See `Emitter.speculation`; the settings of a lookup have no steps."""
        settings = super().speculation(speculation, draft)
        if settings["speculative-algorithm"] == "NGRAM":
            return {option: settings[option] for option in _OF_A_LOOKUP}
        return settings

    def refuses_together(self, drafter: Drafter, scheme: Scheme) -> str:
        """Only heads that draft step by step, and draft models, draft trees."""
        if not scheme.shape.tree or type(drafter) in _DRAFT_TREES:
            return ""
        return f"a {drafter.kind} drafter drafts a chain"
