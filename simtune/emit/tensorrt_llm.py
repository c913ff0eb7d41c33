"""Plans and drafts as TensorRT-LLM reads them: the YAML of `trtllm-serve`, and its `speculative_config`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from simtune.emit.adapters import trtllm_lora
from simtune.emit.emitter import EngineFiles, LaunchArgs, loaded
from simtune.emit.launch import Server, endpoints
from simtune.emit.option import Option, written
from simtune.emit.serving import ServingEmitter, own_options
from simtune.specs import yamlfile
from simtune.specs.drafters import Drafter, DraftModel, Eagle, Ngram
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.schemes import Chain, DynamicTree, Scheme


def _chain(scheme: Chain) -> LaunchArgs:
    return {"max_draft_len": scheme.tokens}


def _dynamic_tree(scheme: DynamicTree) -> LaunchArgs:
    return {
        "max_draft_len": scheme.steps,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": scheme.topk,
        "max_total_draft_tokens": scheme.tokens,
    }


def _draft_model(drafter: DraftModel, checkpoint: str | None) -> LaunchArgs:
    return {"decoding_type": "Draft_Target", **loaded("speculative_model", checkpoint)}


def _eagle(drafter: Eagle, checkpoint: str | None) -> LaunchArgs:
    kind = "MTP" if drafter.method == "mtp" else "Eagle3"
    return {"decoding_type": kind, **loaded("speculative_model", checkpoint)}


def _ngram(drafter: Ngram, checkpoint: str | None) -> LaunchArgs:
    return {"decoding_type": "NGram", "max_matching_ngram_size": drafter.lookup_max}


class TensorrtLlm(ServingEmitter):
    """The file that `trtllm-serve` reads by `--extra_llm_api_options`."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    version = "commit 0004396, after 1.2.1"
    options: ClassVar[Mapping[str, type]] = {
        "decoding_type": str,
        "max_draft_len": int,
        "speculative_model": str,
        "use_dynamic_tree": bool,
        "dynamic_tree_max_topK": int,
        "max_total_draft_tokens": int,
        "max_matching_ngram_size": int,
    }
    schemes: ClassVar[Mapping[type[Scheme], Callable[[Any], LaunchArgs]]] = {Chain: _chain, DynamicTree: _dynamic_tree}
    drafters: ClassVar[Mapping[type[Drafter], Callable[[Any, str | None], LaunchArgs]]] = {
        DraftModel: _draft_model,
        Eagle: _eagle,
        Ngram: _ngram,
    }
    policies: ClassVar[Mapping[str, str]] = {"tensorrt-llm": "GUARANTEED_NO_EVICT"}
    knows = frozenset({"lora", "lora_targets", "stream_interval"})
    tiers_written = frozenset({"evicted"})
    own_defaults = (
        "kv_cache.prefix_caching",
        "kv_cache.block_size",
        "kv_cache.memory_utilization",
        "batching.chunked_prefill",
    )
    server = Server(
        name="tensorrt-llm",
        title="TensorRT-LLM",
        command="""CUDA_VISIBLE_DEVICES="$2" trtllm-serve "$MODEL" \\
        --extra_llm_api_options "$here/$1" --port "$((PORT + $3))\"""",
        apart=(
            "trtllm-serve disaggregated -c tensorrt-llm-disaggregated.yaml starts TensorRT-LLM's own, once the",
            "instances are up.",
        ),
    )
    serving_options: ClassVar[Mapping[str, Option]] = {
        "tensor_parallel_size": Option(int),
        "pipeline_parallel_size": Option(int, "parallelism.pp"),
        "enable_attention_dp": Option(bool),
        "attention_dp_config": Option(dict),
        "moe_expert_parallel_size": Option(int),
        "max_batch_size": Option(int, "batching.max_num_seqs"),
        "max_num_tokens": Option(int, "batching.max_num_batched_tokens"),
        "max_seq_len": Option(int, "max_model_len"),
        "enable_chunked_prefill": Option(bool, "batching.chunked_prefill", stated=True),
        "disable_overlap_scheduler": Option(bool, "async_scheduling", {False: True}),
        "kv_cache_config": Option(dict),
        "scheduler_config": Option(dict),
        "batch_wait_timeout_iters": Option(int),
        "batch_wait_max_tokens_ratio": Option(float),
        "stream_interval": Option(int, "stream_interval"),
        "lora_config": Option(dict),
        "cuda_graph_config": Option(dict),
        "speculative_config": Option(dict),
        "cache_transceiver_config": Option(dict),
    }
    kv_options: ClassVar[Mapping[str, Option]] = {
        "free_gpu_memory_fraction": Option(float, "kv_cache.memory_utilization", stated=True),
        "tokens_per_block": Option(int, "kv_cache.block_size", stated=True),
        "enable_block_reuse": Option(bool, "kv_cache.prefix_caching", stated=True),
        "dtype": Option(str),
        "host_cache_size": Option(int),
        "max_tokens": Option(int),
    }
    """The keys of `kv_cache_config`."""
    balance_keys = ("enable_balance", "timeout_iters", "batching_wait_iters")
    """The keys of `attention_dp_config`, options of the policy behind `attention_dp_`."""
    kv_dtypes: ClassVar[Mapping[str, str]] = {"fp8": "fp8", "bf16": "bfloat16"}
    takes = "it drafts one chain or one EAGLE-2 tree: Schedule.dynamic_tree()"
    no_drafter = "{title} ({version}): no {drafter} drafter is written here"

    def serving(self, pool: Pool, model: Model) -> LaunchArgs:
        """See `ServingEmitter.serving`. Attention of its own is one rank's, so groups are ranks."""
        p, batching, cache = pool.parallelism, pool.batching, pool.kv_cache
        ranks = p.tp * p.attention_dp
        host = self.host_tier(pool)
        kv_cache = written(
            self.kv_options,
            pool,
            dtype=self.kv_dtype(pool, model),
            host_cache_size=None if host is None else round((host.size(p.devices) or 0.0) / p.devices),
            max_tokens=None if cache.num_blocks is None else cache.num_blocks * cache.block_size,
        )
        chosen = own_options(pool)
        chunking = chosen.get("context_chunking_policy")
        balance = {key: chosen[f"attention_dp_{key}"] for key in self.balance_keys if f"attention_dp_{key}" in chosen}
        graphs = {"enable_padding": True, "max_batch_size": min(batching.max_num_seqs, 512)}
        settings = written(
            self.serving_options,
            pool,
            tensor_parallel_size=ranks,
            enable_attention_dp=p.attention_dp > 1,
            attention_dp_config=balance or None,
            moe_expert_parallel_size=ranks if p.expert_parallel else None,
            # Context servers do not schedule ahead, see `unsaid`.
            disable_overlap_scheduler=not pool.async_scheduling or pool.role == "prefill",
            kv_cache_config=kv_cache,
            scheduler_config={
                "capacity_scheduler_policy": chosen.get("capacity_scheduler_policy", "GUARANTEED_NO_EVICT"),
                **({} if chunking is None else {"context_chunking_policy": chunking}),
            },
            batch_wait_timeout_iters=chosen.get("batch_wait_timeout_iters"),
            batch_wait_max_tokens_ratio=chosen.get("batch_wait_max_tokens_ratio"),
            lora_config=trtllm_lora(pool),
            cuda_graph_config=graphs if pool.cuda_graphs else None,
            cache_transceiver_config=None if pool.role == "mixed" else {"backend": "DEFAULT"},
        )
        # Left out, it captures graphs of its own choice (TorchLlmArgs in tensorrt_llm/llmapi/llm_args.py).
        return settings if pool.cuda_graphs else {**settings, "cuda_graph_config": None}

    def unsaid(self, pool: Pool) -> Iterator[str]:
        """Yield the settings that are not written; context servers do not schedule ahead (examples/disaggregated of the
        sources of TensorRT-LLM).
        """
        yield from super().unsaid(pool)
        if pool.role == "prefill" and pool.async_scheduling:
            yield "async_scheduling: instances that prefill schedule step by step, so prompts take the host's time too"

    def router_files(self, plan: Plan, devices_per_node: int, names: str) -> EngineFiles:
        """The file of `trtllm-serve disaggregated`: which servers prefill (context) and which decode (generation)."""
        placed = endpoints(plan, devices_per_node)
        several = placed[-1].node > 0
        servers = {
            f"{word}_servers": {
                "num_instances": sum(e.pool.role == role for e in placed),
                "urls": [
                    f"{e.host if several else 'localhost'}:{8000 + e.number}" for e in placed if e.pool.role == role
                ],
            }
            for role, word in (("prefill", "context"), ("decode", "generation"))
        }
        comment = f"Plan {plan.name}. {names}\nPorts are those of launch.sh with PORT=8000."
        if several:
            comment += "\nHOST0, HOST1, ... stand for the hosts of the nodes: put their names in."
        text = yamlfile.dump({"hostname": "localhost", "port": 9000, **servers}, comment)
        return {"engine/tensorrt-llm-disaggregated.yaml": text}

    def drafting(self, pool: Pool, draft_models: Mapping[str, Model]) -> LaunchArgs:
        """Under a key of their own."""
        settings = super().drafting(pool, draft_models)
        return {"speculative_config": settings} if settings else {}

    def refusals(self, pool: Pool, model: Model, draft_models: Mapping[str, Model]) -> Iterator[str]:
        """Yield the refusals; groups with attention of their own have one rank each."""
        yield from super().refusals(pool, model, draft_models)
        if pool.parallelism.attention_dp > 1 and pool.parallelism.tp > 1:
            yield f"parallelism.attention_dp: with it {self.title} gives every rank attention of its own; set tp to 1"
        if pool.lora is not None and pool.speculation is not None:
            yield f"lora: {self.title} was not checked with adapters and drafts; remove one of the two"

    def refuses_together(self, drafter: Drafter, scheme: Scheme) -> str:
        """Trees are drafted by its Eagle3, with no more tokens than it has room for."""
        if not isinstance(scheme, DynamicTree):
            return ""
        if not isinstance(drafter, Eagle) or drafter.method == "mtp":
            return "only its Eagle3 drafts trees"
        if scheme.tokens > scheme.topk * scheme.steps:
            return (
                f"its tree of {scheme.tokens} tokens must have between {scheme.steps} and topk x steps = "
                f"{scheme.topk * scheme.steps}"
            )
        return ""

    def drafting_file(self, settings: LaunchArgs, what: str) -> EngineFiles:
        """Return the file with the settings of speculation under a key of their own."""
        return super().drafting_file({"speculative_config": settings}, what)
