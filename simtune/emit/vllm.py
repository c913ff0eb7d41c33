"""A plan as vLLM reads it: one settings file per pool, and a script that starts every instance."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, ClassVar, Self

from simtune.emit.adapters import vllm_lora, vllm_lora_refusals, vllm_lora_unsaid
from simtune.emit.dynamo import deployment_file
from simtune.emit.emitter import Emitter, EngineFiles, LaunchArgs, loaded, with_unsaid, written_by
from simtune.emit.experts import placement_refusals, vllm_experts
from simtune.emit.launch import Endpoint, Server, launch_script, router_script
from simtune.emit.option import Option, written
from simtune.emit.releases import ReleaseNumber, release_of, words
from simtune.emit.vllm_releases import (
    NEWEST,
    deals_decodes,
    divides_beside_drafts,
    drafts_since,
    drafts_until,
    hides_pipelines,
    hides_since,
    knows,
    kv_dtype_since,
    options_by_release,
    shares_prefixes,
    splits_steps,
    takes_whole_prompts,
)
from simtune.errors import UsageError, suggest
from simtune.specs import yamlfile
from simtune.specs.autoscaling import Autoscaling
from simtune.specs.cache_tiers import CacheTier
from simtune.specs.drafters import BlockDrafter, Drafter, DraftModel, Eagle, Medusa, Ngram, Suffix
from simtune.specs.model import MlaAttention, Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.preset import GIB
from simtune.specs.schemes import ByBatch, Chain, Scheme
from simtune.specs.speculation import Speculation

_POLICIES = {"vllm-fcfs": "fcfs", "vllm-priority": "priority"}

OPTIONS: dict[str, Option] = {
    "tensor-parallel-size": Option(int, "parallelism.tp"),
    "pipeline-parallel-size": Option(int, "parallelism.pp"),
    "prefill-context-parallel-size": Option(int, "parallelism.prefill_context_parallel", unless=1),
    "decode-context-parallel-size": Option(int, "parallelism.decode_context_parallel"),
    "data-parallel-size": Option(int, "parallelism.attention_dp", unless=1),
    "enable-expert-parallel": Option(bool, "parallelism.expert_parallel", unless=False),
    "all2all-backend": Option(str),
    "enable-eplb": Option(bool),
    "eplb-config": Option(str),
    "enable-elastic-ep": Option(bool),
    "data-parallel-backend": Option(str),
    "enable-dbo": Option(bool, "overlap", {"two_batches": True}),
    "dbo-decode-token-threshold": Option(int),
    "dbo-prefill-token-threshold": Option(int),
    "max-num-seqs": Option(int, "batching.max_num_seqs"),
    "max-num-batched-tokens": Option(int, "batching.max_num_batched_tokens"),
    "max-model-len": Option(int, "max_model_len"),
    "gpu-memory-utilization": Option(float, "kv_cache.memory_utilization"),
    "num-gpu-blocks-override": Option(int, "kv_cache.num_blocks"),
    "block-size": Option(int, "kv_cache.block_size"),
    "quantization": Option(str),
    "kv-cache-dtype": Option(str),
    "scheduling-policy": Option(str, "batching.policy", _POLICIES),
    "watermark": Option(float, "kv_cache.watermark", unless=0.0),
    "enable-chunked-prefill": Option(bool, "batching.chunked_prefill"),
    "enable-prefix-caching": Option(bool, "kv_cache.prefix_caching", stated=True),
    "long-prefill-token-threshold": Option(int, "batching.long_prefill_token_threshold"),
    "long-prefill-token-threshold-adaptive": Option(bool, "batching.long_prefill_token_threshold_adaptive"),
    "prefill-schedule-interval": Option(int, "batching.prefill_schedule_interval"),
    "max-num-active-seqs": Option(int, "batching.max_num_active_seqs"),
    "max-num-queued-reqs": Option(int, "batching.max_num_queued_reqs"),
    "max-num-queued-tokens": Option(int, "batching.max_num_queued_tokens"),
    "scheduler-reserve-full-isl": Option(bool, "batching.scheduler_reserve_full_isl"),
    "disable-cascade-attn": Option(bool, "cascade_attention", {True: False, False: True}),
    "mm-encoder-tp-mode": Option(str, "encoder.tp_mode", unless="weights"),
    "disable-chunked-mm-input": Option(bool, "encoder.disable_chunked_mm_input", unless=False),
    "limit-mm-per-prompt": Option(str),
    "video-pruning-rate": Option(float),
    "stream-interval": Option(int, "stream_interval"),
    "kv-offloading-size": Option(float),
    "enable-lora": Option(bool),
    "max-loras": Option(int),
    "max-lora-rank": Option(int),
    "max-cpu-loras": Option(int),
    "async-scheduling": Option(bool, "async_scheduling"),
    "enforce-eager": Option(bool, "cuda_graphs", {False: True}),
    "kv-transfer-config": Option(str),
    "speculative-config": Option(str),
}
"""The long options of `vllm serve` that are written here, in that order.

Named as in the argument parser of the newest release. A bool has a twin `no-<option>`.
"""

_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "medusa", "ngram", "suffix", "dflash", "dspark")
_NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
"""Setting by which prefill and decode instances send KV caches to one another: NIXL, in both roles."""


SERVER = Server(
    name="vllm",
    title="vLLM",
    command="""CUDA_VISIBLE_DEVICES="$2" VLLM_NIXL_SIDE_CHANNEL_PORT="$((NIXL_PORT + $3))" \\
        vllm serve "$MODEL" --config "$here/$1" --port "$((PORT + $3))\"""",
    ports='NIXL_PORT="${NIXL_PORT:-5600}"\n',
    apart=(
        "It must send a prompt to a prefill instance first, and then, with the kv_transfer_params of its answer, to a",
        "decode instance, as the proxy of vLLM's NIXL example does: router.sh starts that.",
    ),
)


def _proxy(placed: list[Endpoint]) -> str:
    """Return the command of the proxy of vLLM's NIXL example, which distributes prompts and outputs in turn."""
    proxy = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
    lines = [f'python "${{VLLM_PROXY:?set VLLM_PROXY to {proxy} of the sources of vLLM}}"']
    for role, word in (("prefill", "prefiller"), ("decode", "decoder")):
        of_role = [endpoint for endpoint in placed if endpoint.pool.role == role]
        hosts = " ".join(f'"${endpoint.host}"' for endpoint in of_role)
        ports = " ".join(f'"$((PORT + {endpoint.number}))"' for endpoint in of_role)
        lines += [f"    --{word}-hosts {hosts}", f"    --{word}-ports {ports}"]
    return " \\\n".join([*lines, '    --host 127.0.0.1 --port "$ROUTER_PORT"'])


# --- drafts -----------------------------------------------------------------------------------------------


def _gib(tier: CacheTier | None, devices: int) -> float | None:
    """Return the size of a tier of an instance in GiB."""
    size = None if tier is None else tier.size(devices)
    return None if size is None else float(f"{size / GIB:.6g}")


def _two_batches(pool: Pool) -> dict[str, Any]:
    """Return the settings of steps that are run as two batches; vLLM splits them only with these exchanges."""
    if pool.overlap != "two_batches":
        return {}
    backend = "deepep_high_throughput" if pool.role == "prefill" else "deepep_low_latency"
    thresholds = pool.overlap_thresholds
    return {
        "all2all_backend": backend,
        "dbo_decode_token_threshold": None if thresholds is None else thresholds.decode_tokens,
        "dbo_prefill_token_threshold": None if thresholds is None else thresholds.prefill_tokens,
    }


def _chain(scheme: Chain) -> LaunchArgs:
    return {"num_speculative_tokens": scheme.tokens}


def _by_batch(scheme: ByBatch) -> LaunchArgs:
    return {
        "num_speculative_tokens": scheme.max_tokens,
        "num_speculative_tokens_per_batch_size": [
            [r.first, r.last, min(r.tokens, scheme.max_tokens)] for r in scheme.ranges
        ],
    }


def _method(drafter: Drafter, checkpoint: str | None) -> LaunchArgs:
    return {"method": drafter.label, **loaded("model", checkpoint)}


def _draft_model(drafter: DraftModel, checkpoint: str | None) -> LaunchArgs:
    parallel = {} if drafter.tp is None else {"draft_tensor_parallel_size": drafter.tp}
    return {**_method(drafter, checkpoint), **parallel}


def _ngram(drafter: Ngram, checkpoint: str | None) -> LaunchArgs:
    lookup = {"prompt_lookup_max": drafter.lookup_max, "prompt_lookup_min": drafter.lookup_min}
    return {**_method(drafter, checkpoint), **lookup}


class Vllm(Emitter):
    """`vllm serve` of one release: its settings files, and within them `--speculative-config`."""

    name = "vllm"
    title = "vLLM"
    options: ClassVar[Mapping[str, type]] = {
        "method": str,
        "model": str,
        "num_speculative_tokens": int,
        "num_speculative_tokens_per_batch_size": list,
        "draft_tensor_parallel_size": int,
        "prompt_lookup_max": int,
        "prompt_lookup_min": int,
        "parallel_drafting": bool,
        "rejection_sample_method": str,
    }
    schemes: ClassVar[Mapping[type[Scheme], Callable[[Any], LaunchArgs]]] = {Chain: _chain, ByBatch: _by_batch}
    drafters: ClassVar[Mapping[type[Drafter], Callable[[Any, str | None], LaunchArgs]]] = {
        DraftModel: _draft_model,
        Eagle: _method,
        Medusa: _method,
        Ngram: _ngram,
        Suffix: _method,
        BlockDrafter: _method,
    }
    takes = "it drafts chains, of one length or by batch size: Schedule.by_batch()"
    quantizations: ClassVar[Mapping[str, str]] = {"fp8": "fp8"}
    policies: ClassVar[Mapping[str, str]] = _POLICIES

    tiers_written = frozenset({"computed"})
    chunk_pipelines = ("fixed",)
    splits_steps = True

    def __init__(self, release: ReleaseNumber = NEWEST) -> None:
        self._release = release
        self.version = words(release)
        self.knows = knows(release)

    def host_tier(self, pool: Pool) -> CacheTier | None:
        """See `Emitter.host_tier`; early releases have none."""
        return super().host_tier(pool) if "tiers" in self.knows else None

    def of(self, engine: str | None) -> Self:
        """See `Emitter.of`."""
        release = release_of(engine, self.name, NEWEST)
        return self if release == self._release else type(self)(release)

    def speculation(self, speculation: Speculation, draft: Model | None = None) -> LaunchArgs:
        """See `Emitter.speculation`; a setting that only later or earlier releases have is refused with the release."""
        settings = super().speculation(speculation, draft)
        for name in (settings["method"], *settings):
            if (since := drafts_since(name)) > self._release:
                raise UsageError(f"vLLM {self.version} has no {name}; it came with vLLM {words(since)}")
            if (until := drafts_until(name)) < self._release:
                raise UsageError(f"vLLM {self.version} has no {name}; vLLM {words(until)} was the last that has it")
        return settings

    def problems(self, settings: LaunchArgs) -> list[str]:
        """See `Emitter.problems`; the words of `method` and the lengths by batch are checked too."""
        problems, vllm = super().problems(settings), f"{self.name} {self.version}"
        if (method := settings.get("method")) not in _METHODS:
            problems.append(f"{vllm} has no method {method}{suggest(str(method), _METHODS)}")
        for entry in settings.get("num_speculative_tokens_per_batch_size", []):
            if len(entry) != 3 or entry[0] > entry[1] or not 0 <= entry[2] <= settings["num_speculative_tokens"]:
                problems.append(f"{vllm}: {entry} is no [first batch, last batch, tokens]")
        return problems

    def schedules(self, pool: Pool) -> bool:
        """True for vLLM's own two policies with preemption by recompute."""
        return pool.batching.policy in self.policies and pool.kv_cache.preemption != "swap"

    def files(
        self, plan: Plan, model: Model, devices_per_node: int = 8, draft_models: Mapping[str, Model] | None = None
    ) -> EngineFiles:
        """`engine/vllm-<pool>.yaml` for each pool, used as `vllm serve MODEL --config FILE`, and `engine/launch.sh`.

        See `Emitter.files`.
        """
        files = self.server_files(plan, model, devices_per_node, draft_models)
        drafts, of = draft_models or {}, {pool.name: self.of(pool.engine) for pool in plan.pools}
        names = written_by(*of.values())
        files["engine/launch.sh"] = launch_script(plan, model, devices_per_node, names, SERVER)
        if plan.pools[0].role != "mixed" and all(p.model_devices <= devices_per_node for p in plan.pools):
            files["engine/router.sh"] = router_script(plan, devices_per_node, names, _proxy)
        files |= deployment_file(
            plan,
            model,
            names,
            ("dynamo.vllm", "--model"),
            lambda p: of[p.name]._settings(p, model, drafts),
            self.left_open,
        )
        return files

    def server_files(
        self, plan: Plan, model: Model, devices_per_node: int = 8, draft_models: Mapping[str, Model] | None = None
    ) -> EngineFiles:
        """`engine/vllm-<pool>.yaml` for each pool. See `Emitter.server_files`."""
        drafts, of = draft_models or {}, {pool.name: self.of(pool.engine) for pool in plan.pools}
        problems = [
            f"{plan.name}: pool {pool.name}: {why}"
            for pool in plan.pools
            for why in of[pool.name].refusals(pool, model, drafts)
        ]
        if problems:
            raise UsageError("\n".join(problems))
        return {
            f"engine/{SERVER.settings_file(p)}": of[p.name]._settings_text(plan, p, model, drafts) for p in plan.pools
        }

    def _speculative_config(self, pool: Pool, drafts: Mapping[str, Model]) -> str | None:
        """Return a pool's speculation as JSON; None if it has none. Raises UsageError if vLLM has no setting for it."""
        if pool.speculation is None:
            return None
        draft = drafts.get(pool.speculation.drafter.own_model or "")
        return json.dumps(self.speculation(pool.speculation, draft))

    def refusals(self, pool: Pool, model: Model, draft_models: Mapping[str, Model]) -> Iterator[str]:
        """See `Emitter.refusals`; in vLLM's own terms."""
        yield from super().refusals(pool, model, draft_models)
        try:
            self._speculative_config(pool, draft_models)
        except UsageError as error:
            yield f"speculation: {error}"
        yield from _drafting_refusals(pool)
        yield from self._async_refusals(pool)
        if pool.batching.policy not in self.policies:
            yield f"batching.policy: vLLM has no {pool.batching.policy}; it has {', '.join(self.policies)}"
        yield from self._memory_refusals(pool, model)
        if not pool.batching.chunked_prefill and not takes_whole_prompts(self._release):
            yield f"batching.chunked_prefill: vLLM {self.version} always cuts prompts; set it to true"
        yield from _batching_refusals(pool, model)
        yield from _parallelism_refusals(pool, model, self._release)
        if pool.cascade_attention and not shares_prefixes(self._release):
            yield f"cascade_attention: vLLM {self.version} has none; take release 0.28, or remove it"
        yield from _encoder_refusals(pool, model, self.knows, self.version)
        yield from placement_refusals(pool, model, self.title)
        yield from vllm_lora_refusals(pool, model, self._release)
        if pool.parallelism.elastic_experts and "enable_elastic_ep" not in self.knows:
            yield f"parallelism.elastic_experts: vLLM {self.version} has none; take release 0.17, or remove it"
        if pool.overlap == "two_batches":
            yield from self._overlap_refusals(pool)

    def unsaid(self, pool: Pool) -> Iterator[str]:
        """See `Emitter.unsaid`; ranks change on request."""
        yield from super().unsaid(pool)
        if pool.parallelism.prompt_groups > 1 and deals_decodes(self._release):
            yield (
                f"parallelism.prefill_context_parallel: vLLM {self.version} decodes each request on one of the groups; "
                "simulated: on all of them"
            )
        yield from vllm_lora_unsaid(pool, self._release)
        if pool.parallelism.elastic_experts:
            yield (
                "parallelism.elastic_experts: ranks are added and removed by POST /scale_elastic_ep; if one fails, the "
                "requests of all are lost"
            )

    def _scaled_by(self, pool: Pool, scaling: Autoscaling) -> str:
        """See `Emitter._scaled_by`."""
        if not scaling.scales_ranks:
            return super()._scaled_by(pool, scaling)
        first, most = scaling.first_ranks, pool.parallelism.attention_dp
        begins = "" if first == most else f", first for {first} of the {most} that it starts with"
        return (
            "vLLM changes the number of ranks on request alone: a program that reads its metrics has to call "
            f"POST /scale_elastic_ep with new_data_parallel_size by the rule{begins}"
        )

    def _async_refusals(self, pool: Pool) -> Iterator[str]:
        if not pool.schedules_async:
            return
        if pool.parallelism.pp > 1 and not hides_pipelines(self._release):
            yield f"async_scheduling: vLLM {self.version} has none over pipeline stages; set it to false"
        if pool.speculation is None:
            return
        method = pool.speculation.drafter.label
        if (since := hides_since(method)) > self._release:
            why = f"has none with {method} drafts, vLLM {words(since)} has"
            yield f"async_scheduling: vLLM {self.version} {why}; set it to false"

    def _overlap_refusals(self, pool: Pool) -> Iterator[str]:
        parallelism = pool.parallelism
        if not splits_steps(self._release):
            yield f"overlap: two batches of vLLM {self.version} were not checked; remove it, or take a later release"
        if not (parallelism.expert_parallel and parallelism.attention_dp > 1 and pool.expert_exchange == "deepep"):
            yield (
                "overlap: vLLM runs two batches only if data-parallel ranks exchange tokens with experts by DeepEP; "
                "set attention_dp above 1, expert_parallel and expert_exchange: deepep, or remove it"
            )

    def _memory_refusals(self, pool: Pool, model: Model) -> Iterator[str]:
        if pool.kv_cache.preemption == "swap":
            yield "kv_cache.preemption: vLLM V1 recomputes what it preempts; it cannot swap"
        word = _kv_cache_dtype(pool, model)
        if word is None:
            yield (
                f"kv_cache.dtype: vLLM cannot keep a {pool.kv_cache.dtype} cache for a {model.dtype} model; "
                f"leave it out ({model.dtype}) or use fp8"
            )
        elif kv_dtype_since(word) > self._release:
            yield f"kv_cache.dtype: vLLM {self.version} has no word for {pool.kv_cache.dtype}; leave it out"

    def _settings_text(self, plan: Plan, pool: Pool, model: Model, drafts: Mapping[str, Model]) -> str:
        use = f"Use: vllm serve MODEL --config {SERVER.settings_file(pool)}"
        comment = f"Plan {plan.name}, pool {pool.name}. {written_by(self)}\n{use}"
        if pool.async_scheduling and not pool.schedules_async:
            assert pool.speculation is not None
            comment += f"\nvLLM cannot schedule asynchronously with {pool.speculation.drafter.kind} drafts."
        return yamlfile.dump(self._settings(pool, model, drafts), with_unsaid(comment, self.unsaid(pool)))

    def _settings(self, pool: Pool, model: Model, drafts: Mapping[str, Model]) -> dict[str, int | float | str | bool]:
        later = {key: None for key in options_by_release() if key not in self.knows}
        if not shares_prefixes(self._release):
            later["disable_cascade_attn"] = None
        settings = written(
            OPTIONS,
            pool,
            max_model_len=_max_model_len(pool, model),
            quantization=self.quantization(pool, model),
            kv_cache_dtype=_kv_cache_dtype(pool, model),
            **_two_batches(pool),
            **vllm_lora(pool),
            **vllm_experts(pool),
            # of all ranks together
            kv_offloading_size=_gib(self.host_tier(pool), pool.model_devices),
            # vLLM refuses the option if it cannot schedule so.
            async_scheduling=pool.schedules_async,
            kv_transfer_config=None if pool.role == "mixed" else _NIXL,
            speculative_config=self._speculative_config(pool, drafts),
            **{"limit_mm_per_prompt": _media_limits(pool), "video_pruning_rate": _pruning_rate(pool, model), **later},
        )
        assert all(isinstance(value, OPTIONS[option].type) for option, value in settings.items())
        # `option: false` is dropped without a word by some vLLM versions; `no-option: true` is understood by all.
        return {f"no-{o}" if v is False else o: True if v is False else v for o, v in settings.items()}


def _media_limits(pool: Pool) -> str | None:
    """Return the most items of each kind in one prompt, as vLLM reads them; None if any number is taken."""
    limits = {} if pool.encoder is None else pool.encoder.limit_per_prompt.model_dump(exclude_none=True)
    return json.dumps(limits) if limits else None


def _pruning_rate(pool: Pool, model: Model) -> float | None:
    """Return the share of the embeddings of videos that are dropped; None if all stay, or if the pool takes none."""
    video = None if model.vision is None else model.vision.video
    return None if video is None or pool.encoder is None else video.pruning_rate or None


# --- what vLLM refuses ------------------------------------------------------------------------------------


def _drafting_refusals(pool: Pool) -> Iterator[str]:
    if pool.speculation is None:
        return
    drafter, tp = pool.speculation.drafter, pool.parallelism.tp
    ranks = drafter.ranks(tp)
    if ranks not in (1, tp):
        yield f"speculation.drafter.tp: vLLM drafts on 1 GPU or on the target's {tp}, not on {ranks}"
    if pool.speculation.scheme.varies_with_batch and pool.parallelism.attention_dp > 1:
        yield (
            "speculation.scheme: with attention_dp vLLM drops draft lengths by batch size, "
            "because its ranks would draft unequal lengths; take a chain"
        )


def _batching_refusals(pool: Pool, model: Model) -> Iterator[str]:
    batching, longest = pool.batching, _max_model_len(pool, model)
    if batching.max_num_batched_tokens < batching.max_num_seqs:
        yield (
            f"batching: vLLM requires max_num_batched_tokens ({batching.max_num_batched_tokens}) "
            f"to be at least max_num_seqs ({batching.max_num_seqs})"
        )
    if not batching.chunked_prefill and batching.max_num_batched_tokens < longest:
        yield (
            f"batching: without chunked_prefill vLLM requires max_num_batched_tokens "
            f"({batching.max_num_batched_tokens}) to be at least max_model_len "
            f"({longest})"
        )


def _encoder_refusals(pool: Pool, model: Model, known_keys: Container[str], version: str) -> Iterator[str]:
    if _pruning_rate(pool, model) is not None and "video_pruning_rate" not in known_keys:
        yield f"model.vision.video.pruning_rate: was not checked in vLLM {version}; take release 0.33, or set it to 0"
    if pool.encoder is not None and pool.encoder.tp_mode == "data" and "mm_encoder_tp_mode" not in known_keys:
        yield f"encoder.tp_mode: data was not checked in vLLM {version}; take release 0.28, or use weights"
    if _media_limits(pool) is not None and "limit_mm_per_prompt" not in known_keys:
        yield f"encoder.limit_per_prompt: was not checked in vLLM {version}; take release 0.28, or remove it"


def _parallelism_refusals(pool: Pool, model: Model, release: ReleaseNumber) -> Iterator[str]:
    tp, pp = pool.parallelism.tp, pool.parallelism.pp
    for heads in sorted({group.attention.heads for group in model.layers}):
        if heads % tp:
            yield f"parallelism.tp: {tp} does not divide the {heads} attention heads of {model.name}"
    if pp > model.num_layers:
        yield f"parallelism.pp: {pp} stages for the {model.num_layers} layers of {model.name}"
    if pool.parallelism.expert_parallel and not any(group.feed_forward.kind == "moe" for group in model.layers):
        yield f"parallelism.expert_parallel: {model.name} is no mixture of experts"
    if pool.parallelism.prompt_groups > 1:
        yield from _prompt_group_refusals(pool, model, release)


def _prompt_group_refusals(pool: Pool, model: Model, release: ReleaseNumber) -> Iterator[str]:
    """Yield the rules of `PCPManager.validate_config` in vllm/v1/worker/gpu/pcp_manager.py."""
    if pool.speculation is not None and not divides_beside_drafts(release):
        yield f"speculation: vLLM {words(release)} divides no prompts beside drafts; take release 0.32, or remove it"
    latent = [group.attention for group in model.layers if isinstance(group.attention, MlaAttention)]
    if len(latent) < len(model.layers):
        yield (
            "parallelism.prefill_context_parallel: vLLM divides prompts of latent attention only, and "
            f"{model.name} has other kinds; leave it out"
        )
    elif pool.cuda_graphs and any(layer.index_topk is not None for layer in latent):
        yield "cuda_graphs: vLLM divides prompts of sparse attention without graphs only; set it to false"


def _kv_cache_dtype(pool: Pool, model: Model) -> str | None:
    """Return vLLM's word for the dtype of the KV cache, None if it has none."""
    dtype = pool.kv_cache.dtype
    if dtype is None or dtype == (model.kv_dtype or model.dtype):
        return "auto"
    # Where the checkpoint asks for another.
    if dtype == model.dtype == "bf16":
        return "bfloat16"
    return dtype if dtype == "fp8" else None


def _max_model_len(pool: Pool, model: Model) -> int:
    return model.max_position if pool.max_model_len is None else pool.max_model_len
