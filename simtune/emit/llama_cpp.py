"""Plans as `llama-server` of llama.cpp reads them: its long options without their dashes.

Names and values are those of `tools/server/README.md` of ggml-org/llama.cpp (commit 00dc8057), which its own parser
writes; `tests/emit/test_llama_cpp.py` holds what is written against that table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from simtune.emit.emitter import EngineFiles, LaunchArgs
from simtune.emit.launch import SETTINGS_AS_OPTIONS, Server
from simtune.emit.option import Option, written
from simtune.emit.serving import ServingEmitter
from simtune.specs.drafters import Drafter
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.schemes import Scheme


class LlamaCpp(ServingEmitter):
    """Options of `llama-server`. It schedules by the preset `llamacpp`, so only plans that name the preset are written
    for it.
    """

    name = "llamacpp"
    title = "llama.cpp"
    version = "server (00dc8057)"
    options: ClassVar[Mapping[str, type]] = {}
    schemes: ClassVar[Mapping[type[Scheme], Callable[[Any], LaunchArgs]]] = {}
    drafters: ClassVar[Mapping[type[Drafter], Callable[[Any, str | None], LaunchArgs]]] = {}
    policies: ClassVar[Mapping[str, str]] = {"vllm-fcfs": "its slots take requests in order"}
    presets = frozenset({"llamacpp"})
    takes = "no drafts are written for it here"
    server = Server(
        name="llamacpp",
        title="llama.cpp",
        command=f"""CUDA_VISIBLE_DEVICES="$2" llama-server --model "$MODEL" --port "$((PORT + $3))" \\
        $({SETTINGS_AS_OPTIONS} "$here/$1")""",
        multi_node="see its RPC backend",
    )
    serving_options: ClassVar[Mapping[str, Option]] = {
        "parallel": Option(int, "batching.max_num_seqs"),
        "batch-size": Option(int, "batching.max_num_batched_tokens"),
        "ubatch-size": Option(int, "batching.max_num_batched_tokens"),
        "ctx-size": Option(int),
        "kv-unified": Option(bool),
        "kv-unified-per-slot": Option(int, "max_model_len"),
        "cache-type-k": Option(str),
        "cache-type-v": Option(str),
        "n-gpu-layers": Option(str),
        "split-mode": Option(str),
        "no-cache-prompt": Option(bool, "kv_cache.prefix_caching", {False: True}, stated=True),
    }
    kv_dtypes: ClassVar[Mapping[str, str]] = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}

    def serving(self, pool: Pool, model: Model) -> LaunchArgs:
        """See `ServingEmitter.serving`. A step is one pass of the model, so the physical batch is the logical one."""
        cache = pool.kv_cache
        longest = model.max_position if pool.max_model_len is None else pool.max_model_len
        dtype = self.kv_dtype(pool, model)
        return written(
            self.serving_options,
            pool,
            ctx_size=None if cache.num_blocks is None else cache.num_blocks * cache.block_size,
            kv_unified=True,
            kv_unified_per_slot=longest,
            cache_type_k=dtype,
            cache_type_v=dtype,
            n_gpu_layers="all",
            split_mode=self._split(pool),
        )

    @staticmethod
    def _split(pool: Pool) -> str:
        """Return how an instance is cut: by layers as a pipeline, or each layer."""
        cut = pool.parallelism
        return "layer" if cut.pp > 1 else "tensor" if cut.tp > 1 else "none"

    def kv_dtype(self, pool: Pool, model: Model) -> str | None:
        """It has no word for the model's own dtype."""
        return self.kv_dtypes.get(pool.kv_cache.dtype or model.kv_dtype or model.dtype)

    def refusals(self, pool: Pool, model: Model, draft_models: Mapping[str, Model]) -> Iterator[str]:
        """Yield the refusals: the engine takes one pool of instances that each prefill and decode, cut in one way."""
        yield from super().refusals(pool, model, draft_models)
        cut = pool.parallelism
        if pool.role != "mixed":
            yield f"role: {self.title} hands no KV cache from one server to another; take a mixed pool"
        if cut.tp > 1 and cut.pp > 1:
            yield f"parallelism: {self.title} cuts a model by layers or each layer, not both; set tp or pp to 1"
        if cut.attention_dp > 1:
            yield f"parallelism.attention_dp: {self.title} has none; set it to 1"
        if cut.expert_parallel:
            yield f"parallelism.expert_parallel: {self.title} has none; leave it out"
        if not pool.batching.chunked_prefill:
            yield f"batching.chunked_prefill: {self.title} always cuts prompts to its batch"

    def unsaid(self, pool: Pool) -> Iterator[str]:
        """Yield the settings that are not written; the engine's memory is sized by its slots."""
        yield from super().unsaid(pool)
        if not pool.cuda_graphs:
            yield "cuda_graphs: its server has no option for them; GGML_CUDA_DISABLE_GRAPHS=1 turns them off"
        if pool.kv_cache.num_blocks is None:
            yield (
                "kv_cache.memory_utilization: the KV cache is made for `parallel` times `kv-unified-per-slot` tokens; "
                "give ctx-size what the device has room for"
            )

    def router_files(self, plan: Plan, devices_per_node: int, names: str) -> EngineFiles:
        """Return no files: the engine has no prefill and decode pools."""
        return {}
