"""Readers of each engine's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from simtune.emit.importing import adapters_read, division_read, drafts_read, experts_read, tiers_read
from simtune.emit.importing.launches import Given, Launch, plain, real_number, switch, whole_number
from simtune.emit.importing.pool_draft import PoolDraft, refuse_open
from simtune.emit.importing.reader import (
    OptionReader,
    Special,
    check_dtype,
    json_value,
    set_kv_dtype,
    set_quantization,
)
from simtune.emit.llama_cpp import LlamaCpp
from simtune.emit.option import Option
from simtune.emit.sglang import Sglang
from simtune.emit.tensorrt_llm import TensorrtLlm
from simtune.emit.transformers import Transformers
from simtune.emit.vllm import OPTIONS, Vllm
from simtune.errors import SpecError
from simtune.specs.model import MlaAttention
from simtune.specs.tower import MEDIA_KINDS

_FP8 = {"fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
_BF16 = {"bfloat16": "bf16", "bf16": "bf16"}


def _setting(key: str, value: Any) -> Special:
    """Return a reader that sets a key to a value if the option is on."""

    def read(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
        if switch(option):
            draft.set(key, value)

    return read


def _words(key: str, words: Mapping[str, Any], changes: str) -> Special:
    """Return a reader that sets a key by a word, and refuses other words."""

    def read(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
        word = str(option.value)
        if word not in words:
            draft.refuse(option, changes)
        elif words[word] is not None:
            draft.set(key, words[word])
        else:
            draft.ignore(option, "it is the default")

    return read


def _of_draft(read: Callable[[PoolDraft, Given], None]) -> Special:
    return lambda reader, draft, launch, option: read(draft, option)


def _quantization(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    set_quantization(draft, option, reader.emitter.quantizations)


# --- vLLM -------------------------------------------------------------------------------------------------


def _vllm_length(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    if str(option.value) in ("auto", "-1"):
        draft.ignore(option, "the model's limit holds")
    elif (longest := whole_number(option)) != draft.model.max_position:
        draft.set("max_model_len", longest)


def _vllm_async(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    draft.set("async_scheduling", switch(option))


def _vllm_data_parallel(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    ranks = whole_number(option)
    if draft.model_has_experts:
        draft.set("parallelism.attention_dp", ranks)
    else:
        launch.instances *= ranks
        draft.assume(f"--{option.name} {ranks} of a model without experts makes {ranks} instances for each server")


def _vllm_transfer(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    transfer = json_value(option)
    connector = str(transfer.get("kv_connector"))
    if connector not in ("NixlConnector", "P2pNcclConnector", "MooncakeConnector"):
        draft.refuse(option, f"the KV cache, by {connector}: tiers below GPU memory")
        return
    role = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(transfer.get("kv_role")), launch.role)
    if role is None:
        raise SpecError(
            option.problem(
                "which instances prefill is in their router's command; import router.sh beside this script, or give "
                "--role POOL=prefill and --role POOL=decode"
            )
        )
    draft.set("role", role)


def _vllm_drafts(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    drafts_read.read_vllm(draft, option, json_value(option))


def _vllm_graphs(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    most = whole_number(option)
    if draft.get("graph_sizes.launch_s") is None:
        draft.refuse(option, "which steps have CUDA graphs; no preset of this release states what others take")
    else:
        draft.set("graph_sizes.most_with_prompts", draft.get("graph_sizes.most"))
        draft.set("graph_sizes.most", most)
        draft.set("graph_sizes.per_seat", None)


def _vllm_offloading(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    if str(option.value) == "native":
        draft.ignore(option, "it is the default")
    else:
        draft.refuse(option, "the prefix cache below GPU memory, by a cache of its own; write its kv_cache.tiers")


def _threshold(key: str) -> Special:
    """Return a reader of a number of tokens from which on a step is split, which has no effect unless steps are."""

    def read(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
        if launch.value("enable-dbo") is None:
            draft.ignore(option, "steps are not split without enable-dbo")
        else:
            draft.set(f"overlap_thresholds.{key}", whole_number(option))

    return read


def _later(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    """Leave an option to `finish`, which reads it with others."""


def _encoder_setting(key: str, values: Sequence[Any]) -> Special:
    """Return a reader of a setting of encoders of media, which matters only if the model states one."""

    def read(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
        if not draft.model.towers.kinds:
            draft.ignore(option, _TEXT_ONLY)
        elif option.value in values:
            draft.set(f"encoder.{key}", option.value)
        else:
            draft.refuse(option, f"a vision encoder by {option.value}")

    return read


_TEXT_ONLY = "the model states no vision encoder and no audio encoder, so only text is simulated"


def _media_limits(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    """Read the most items of each kind in one prompt."""
    limits = json_value(option)
    if not draft.model.towers.kinds:
        draft.ignore(option, _TEXT_ONLY)
        return
    for kind, limit in limits.items():
        # vLLM reads sizes of the dummy item too, with which it only measures memory
        count = limit.get("count") if isinstance(limit, dict) else limit
        if kind not in MEDIA_KINDS or type(count) is not int or count < 0:
            raise SpecError(option.problem(f"expected counts of {', '.join(MEDIA_KINDS)}, not {kind}: {limit!r}"))
        draft.set(f"encoder.limit_per_prompt.{kind}", count)


def _pruning_rate(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    """Leave out the share of embeddings of videos that are dropped, which is one of the model here."""
    vision, rate = draft.model.vision, real_number(option)
    video = None if vision is None else vision.video
    if video is None:
        draft.ignore(option, "the model reads no videos here")
    elif video.pruning_rate != rate:
        draft.ignore(
            option, f"it is one of the model here; set it there: --set model.vision.video.pruning_rate={rate:g}"
        )


def _processor_settings(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    """Leave out a setting of the processor, and name the keys of the model that have its effect."""
    if not draft.model.towers.kinds:
        draft.ignore(option, _TEXT_ONLY)
        return
    draft.ignore(
        option,
        "the sizes of images and videos are those of the model; set them there, as in "
        "--set model.vision.sizing.max_pixels=1003520 or --set model.vision.video.fps=1",
    )


class VllmReader(OptionReader):
    """Reads options of `vllm serve`."""

    family = "vllm"
    emitter = Vllm()
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    aliases: ClassVar[Mapping[str, str]] = {
        "tp": "tensor-parallel-size",
        "pp": "pipeline-parallel-size",
        "dp": "data-parallel-size",
        "ep": "enable-expert-parallel",
        "q": "quantization",
        "O": "optimization-level",
        "O0": "optimization-level",
        "O1": "optimization-level",
        "O2": "optimization-level",
        "O3": "optimization-level",
        "cc": "compilation-config",
        "sc": "speculative-config",
        "ac": "attention-config",
        "asc": "api-server-count",
        "n": "nnodes",
        "r": "node-rank",
        "dcp": "decode-context-parallel-size",
        "pcp": "prefill-context-parallel-size",
        "dpl": "data-parallel-size-local",
        "dpa": "data-parallel-address",
        "dpn": "data-parallel-rank",
        "dpr": "data-parallel-start-rank",
        "dpp": "data-parallel-rpc-port",
        "dpb": "data-parallel-backend",
    }
    special: ClassVar[Mapping[str, Special]] = {
        "max-model-len": _vllm_length,
        "async-scheduling": _vllm_async,
        "data-parallel-size": _vllm_data_parallel,
        "quantization": _quantization,
        "dtype": _of_draft(check_dtype),
        "kv-cache-dtype": _of_draft(lambda draft, option: set_kv_dtype(draft, option, {**_FP8, **_BF16})),
        "kv-transfer-config": _vllm_transfer,
        "speculative-config": _vllm_drafts,
        "max-cudagraph-capture-size": _vllm_graphs,
        "enable-dbo": _setting("overlap", "two_batches"),
        "kv-offloading-size": _of_draft(tiers_read.read_vllm),
        **dict.fromkeys((*adapters_read.VLLM, *experts_read.VLLM), _later),
        "kv-offloading-backend": _vllm_offloading,
        "data-parallel-backend": _of_draft(
            lambda draft, option: draft.ignore(option, "the ranks are the same, whatever starts them")
        ),
        "dbo-decode-token-threshold": _threshold("decode_tokens"),
        "dbo-prefill-token-threshold": _threshold("prefill_tokens"),
        "all2all-backend": _words(
            "expert_exchange",
            {
                "deepep_high_throughput": "deepep",
                "deepep_low_latency": "deepep",
                "naive": "all_gather",
                "allgather_reducescatter": "all_gather",
            },
            "how tokens come to experts",
        ),
        "mm-encoder-tp-mode": _encoder_setting("tp_mode", ("weights", "data")),
        "disable-chunked-mm-input": _encoder_setting("disable_chunked_mm_input", (True, False)),
        "limit-mm-per-prompt": _media_limits,
        "video-pruning-rate": _pruning_rate,
        "mm-processor-kwargs": _processor_settings,
        "disaggregation-mode": _words("role", {"agg": None, "prefill": "prefill", "decode": "decode"}, "roles"),
    }
    more_flags = frozenset(
        {"enable-dbo", "enable-lora", "enable-eplb", "enable-elastic-ep", "disable-custom-all-reduce"}
    )

    def finish(self, draft: PoolDraft, launch: Launch) -> None:
        """Read slots of adapters, and leave asynchronous scheduling to the preset if drafts must be awaited: vLLM
        refuses it with them."""
        adapters_read.read_lora(draft, launch, adapters_read.VLLM, slots=1, rank=16)
        experts_read.read_placement(draft, launch, experts_read.VLLM)
        drafts = draft.data.get("speculation", {"drafter": {"kind": ""}})
        awaited = drafts["drafter"]["kind"] in ("medusa", "ngram", "suffix")
        if awaited and draft.data.get("async_scheduling") is False:
            del draft.data["async_scheduling"]
        if launch.role is not None and "role" not in draft.data and launch.value("kv-transfer-config") is not None:
            draft.set("role", launch.role)


# --- SGLang -----------------------------------------------------------------------------------------------

_SGLANG_LATER = (
    "tp-size", "dp-size", "attn-dp-size", "enable-dp-attention", "ep-size", "chunked-prefill-size",
    "attn-cp-size", "enable-prefill-cp", "cp-strategy",
    "max-prefill-tokens", "max-total-tokens", "disable-cuda-graph", "disable-decode-cuda-graph",
    "disable-prefill-cuda-graph", "disaggregation-transfer-backend", "moe-a2a-backend", "cuda-graph-max-bs",
    "enable-pdmux", "pdmux-config-path", "sm-group-num",
)  # fmt: skip


def _sglang_conservativeness(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    draft.set("batching.options.schedule_conservativeness", real_number(option))


def _sglang_drafts(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    prefix = "speculative-"
    settings = {entry.name.removeprefix(prefix): entry for entry in launch.given if entry.name.startswith(prefix)}
    drafts_read.read_sglang(draft, option, settings)


class SglangReader(OptionReader):
    """Reads options of `python -m sglang.launch_server`."""

    family = "sglang"
    data_files = ("pdmux-config-path",)
    emitter = Sglang()
    options: ClassVar[Mapping[str, Option]] = Sglang.serving_options
    aliases: ClassVar[Mapping[str, str]] = {
        "tensor-parallel-size": "tp-size",
        "tp": "tp-size",
        "pipeline-parallel-size": "pp-size",
        "pp": "pp-size",
        "data-parallel-size": "dp-size",
        "dp": "dp-size",
        "attention-data-parallel-size": "attn-dp-size",
        "attention-context-parallel-size": "attn-cp-size",
        "expert-parallel-size": "ep-size",
        "ep": "ep-size",
        "moe-ep-size": "ep-size",
        "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
        "model": "model-path",
    }
    special: ClassVar[Mapping[str, Special]] = {
        **dict.fromkeys((*_SGLANG_LATER, *tiers_read.HICACHE, *adapters_read.SGLANG, *experts_read.SGLANG), _later),
        "quantization": _quantization,
        "dtype": _of_draft(check_dtype),
        "kv-cache-dtype": _of_draft(lambda draft, option: set_kv_dtype(draft, option, {**_FP8, **_BF16})),
        "schedule-conservativeness": _sglang_conservativeness,
        "enable-dynamic-chunking": _setting("batching.chunk_pipeline", "dynamic"),
        "enable-two-batch-overlap": _setting("overlap", "two_batches"),
        "enable-flashinfer-allreduce-fusion": _setting("fused", ["norm"]),
        "disaggregation-mode": _words(
            "role", {"null": None, "agg": None, "prefill": "prefill", "decode": "decode"}, "roles"
        ),
        "speculative-algorithm": _sglang_drafts,
        **dict.fromkeys(
            [
                "speculative-draft-model-path",
                "speculative-num-steps",
                "speculative-eagle-topk",
                "speculative-num-draft-tokens",
                "speculative-ngram-min-bfs-breadth",
                "speculative-ngram-max-bfs-breadth",
                "speculative-ngram-max-trie-depth",
            ],
            _later,
        ),
    }
    more_flags = frozenset(
        {"enable-two-batch-overlap", "enable-flashinfer-allreduce-fusion", "enable-mixed-chunk", "enable-torch-compile"}
        | {"enable-hierarchical-cache", "enable-eplb", "enable-lora", "enable-symm-mem", "enable-dp-lm-head"}
        | {"disable-custom-all-reduce", "enable-nccl-nvls", "speculative-adaptive", "enable-single-batch-overlap"}
        | {"enable-adaptive-dispatch-to-encoder"}
    )

    def finish(self, draft: PoolDraft, launch: Launch) -> None:
        """Read ranks, chunks, memory and graphs, each of which takes several options."""
        by_name = {option.name: option for option in launch.given if option.name in _SGLANG_LATER}
        for option in by_name.values():
            refuse_open(option)
        self._ranks(draft, launch, by_name)
        chunk, most = by_name.get("chunked-prefill-size"), by_name.get("max-prefill-tokens")
        if chunk is not None and whole_number(chunk) > 0:
            draft.set("batching.max_num_batched_tokens", whole_number(chunk))
        elif chunk is not None:
            draft.set("batching.chunked_prefill", False)
            draft.set("batching.max_num_batched_tokens", 16384 if most is None else whole_number(most))
        if (chunk is None or whole_number(chunk) > 0) and most is not None:
            draft.ignore(most, "a step has at most one chunk of prompts")
        if "max-total-tokens" in by_name:
            tokens = whole_number(by_name["max-total-tokens"])
            draft.set("kv_cache.num_blocks", tokens // (draft.get("kv_cache.block_size") or 1))
        self._graphs(draft, launch, by_name)
        draft.division = division_read.read(draft, by_name)
        tiers_read.read_sglang(draft, {x.name: x for x in launch.given if x.name in tiers_read.HICACHE})
        adapters_read.read_lora(draft, launch, adapters_read.SGLANG, slots=8, rank=None)
        experts_read.read_placement(draft, launch, experts_read.SGLANG)

    @staticmethod
    def _ranks(draft: PoolDraft, launch: Launch, by_name: Mapping[str, Given]) -> None:
        ranks = whole_number(by_name["tp-size"]) if "tp-size" in by_name else 1
        groups = next((whole_number(by_name[name]) for name in ("attn-dp-size", "dp-size") if name in by_name), 1)
        attention = "attn-dp-size" in by_name or (
            "enable-dp-attention" in by_name and switch(by_name["enable-dp-attention"])
        )
        if attention and groups > 1:
            if ranks % groups:
                raise SpecError(launch.given[0].problem(f"{groups} groups do not divide {ranks} ranks"))
            draft.set("parallelism.attention_dp", groups)
        elif groups > 1:
            launch.instances *= groups
            draft.assume(f"--dp-size {groups} without enable-dp-attention makes {groups} instances for each server")
        of_group = ranks // groups if attention else ranks
        draft.set("parallelism.tp", of_group // _sglang_prompt_groups(draft, by_name, of_group))
        _sglang_experts(draft, by_name, ranks)

    @staticmethod
    def _graphs(draft: PoolDraft, launch: Launch, by_name: Mapping[str, Given]) -> None:
        off = [
            name for name in by_name if name.startswith("disable-") and name.endswith("graph") and switch(by_name[name])
        ]
        if "disable-cuda-graph" in off or len(off) > 1:
            draft.set("cuda_graphs", False)
        elif off:
            draft.refuse(by_name[off[0]], "which steps have CUDA graphs")
        largest = by_name.get("cuda-graph-max-bs")
        if largest is not None and whole_number(largest) >= (draft.get("batching.max_num_seqs") or 0):
            draft.ignore(largest, "all batches have a graph")
        elif largest is not None:
            draft.refuse(largest, "which steps have CUDA graphs")


# --- TensorRT-LLM -----------------------------------------------------------------------------------------


def _nested(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    """Read the keys of kv_cache_config."""
    table = {name.replace("_", "-"): entry for name, entry in TensorrtLlm.kv_options.items()}
    for key, value in json_value(option).items():
        name = plain(str(key))
        inner = Given(f"{option.name}.{name}", value, option.file, option.line)
        if name in table and table[name].key:
            draft.set(table[name].key, reader.setting(table[name], inner))
        elif name == "dtype":
            set_kv_dtype(draft, inner, {**_FP8, **_BF16})
        elif name == "host-cache-size":
            tiers_read.read_trtllm(draft, inner)
        elif name == "max-tokens":
            draft.set("kv_cache.num_blocks", whole_number(inner))
        else:
            reader._without_setting(draft, inner)


def _capacity(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    for key, value in json_value(option).items():
        name = str(key)
        if name not in ("capacity_scheduler_policy", "context_chunking_policy"):
            draft.unknown(Given(f"{option.name}.{name}", value, option.file, option.line))
        elif value is not None:
            draft.set(f"batching.options.{name}", value)


def _balance(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    """Read the keys of attention_dp_config."""
    for key, value in json_value(option).items():
        inner = Given(f"{option.name}.{plain(str(key))}", value, option.file, option.line)
        if key not in TensorrtLlm.balance_keys:
            draft.unknown(inner)
        else:
            read = switch if key == "enable_balance" else whole_number
            draft.set(f"batching.options.attention_dp_{key}", read(inner))


def _batch_wait(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    name = option.name.replace("-", "_")
    draft.set(f"batching.options.{name}", reader.setting(TensorrtLlm.serving_options[name], option))


def _trt_graphs(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    if option.value is None or str(option.value) == "null":
        draft.set("cuda_graphs", False)
        return
    draft.set("cuda_graphs", True)
    largest = json_value(option).get("max_batch_size")
    seats = next((whole_number(x) for x in launch.given if x.name == "max-batch-size"), 0)
    seats = seats or draft.get("batching.max_num_seqs") or 0
    inner = Given(f"{option.name}.max-batch-size", largest, option.file, option.line)
    if largest is not None and whole_number(inner) < min(seats, 512):
        draft.refuse(inner, "which steps have CUDA graphs")


def _trt_drafts(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    drafts_read.read_trtllm(draft, option, json_value(option))


def _trt_lora(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    if option.value is not None:
        adapters_read.read_trtllm(draft, option, json_value(option))


def _trt_overlap(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    """Context servers never schedule ahead, whatever the plan."""
    if launch.role != "prefill" or not switch(option):
        draft.set("async_scheduling", not switch(option))


def _trt_transfer(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    if option.value is None:
        return
    if launch.role is None:
        raise SpecError(
            option.problem(
                "which servers prefill is in the file of `trtllm-serve disaggregated`; put it beside this script, or "
                "give --role POOL=prefill and --role POOL=decode"
            )
        )
    draft.set("role", launch.role)


class TensorrtLlmReader(OptionReader):
    """Reads options of `trtllm-serve`, and its YAML."""

    family = "trtllm"
    emitter = TensorrtLlm()
    options: ClassVar[Mapping[str, Option]] = TensorrtLlm.serving_options
    settings_files = ("extra-llm-api-options", "config")
    aliases: ClassVar[Mapping[str, str]] = {
        "tp-size": "tensor-parallel-size",
        "pp-size": "pipeline-parallel-size",
        "ep-size": "moe-expert-parallel-size",
        "kv-cache-free-gpu-memory-fraction": "free-gpu-memory-fraction",
        "enable-chunked-context": "enable-chunked-prefill",
    }
    special: ClassVar[Mapping[str, Special]] = {
        **dict.fromkeys(["tensor-parallel-size", "enable-attention-dp", "moe-expert-parallel-size"], _later),
        "kv-cache-config": _nested,
        "free-gpu-memory-fraction": lambda reader, draft, launch, option: draft.set(
            "kv_cache.memory_utilization", reader.setting(TensorrtLlm.kv_options["free_gpu_memory_fraction"], option)
        ),
        "scheduler-config": _capacity,
        "attention-dp-config": _balance,
        **dict.fromkeys(["batch-wait-timeout-iters", "batch-wait-max-tokens-ratio"], _batch_wait),
        "cuda-graph-config": _trt_graphs,
        "speculative-config": _trt_drafts,
        "lora-config": _trt_lora,
        "disable-overlap-scheduler": _trt_overlap,
        "cache-transceiver-config": _trt_transfer,
        "kv-cache-dtype": _of_draft(lambda draft, option: set_kv_dtype(draft, option, {**_FP8, **_BF16})),
        "dtype": _of_draft(check_dtype),
        "disaggregation-mode": _words(
            "role", {"agg": None, "prefill_and_decode": None, "prefill": "prefill", "decode": "decode"}, "roles"
        ),
    }

    def finish(self, draft: PoolDraft, launch: Launch) -> None:
        """Read ranks: with attention data parallelism each of them has requests of its own."""
        by_name = {option.name: option for option in launch.given}
        for option in by_name.values():
            refuse_open(option) if option.name in ("tensor-parallel-size", "moe-expert-parallel-size") else None
        ranks = whole_number(by_name["tensor-parallel-size"]) if "tensor-parallel-size" in by_name else 1
        attention = "enable-attention-dp" in by_name and switch(by_name["enable-attention-dp"])
        draft.set("parallelism.tp", 1 if attention else ranks)
        if attention and ranks > 1:
            draft.set("parallelism.attention_dp", ranks)
        blocks = draft.data.get("kv_cache", {}).get("num_blocks")
        if blocks is not None:
            draft.set("kv_cache.num_blocks", blocks // (draft.get("kv_cache.block_size") or 1))
        experts = by_name.get("moe-expert-parallel-size")
        if experts is not None and experts.value is not None:
            _trtllm_experts(draft, experts, ranks)


# --- llama.cpp and transformers ---------------------------------------------------------------------------


def _all_layers(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    word = str(option.value)
    if word in ("all", "-1", "auto") or (word.isdigit() and int(word[:9]) > draft.model.num_layers):
        draft.ignore(option, "all layers are on the devices")
    else:
        draft.refuse(option, "which layers the devices compute")


def _llama_dtype(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    words = {word: dtype for dtype, word in LlamaCpp.kv_dtypes.items()}
    if words.get(str(option.value)) != (draft.model.kv_dtype or draft.model.dtype):
        set_kv_dtype(draft, option, words)


class LlamaCppReader(OptionReader):
    """Reads options of `llama-server`."""

    family = "llamacpp"
    emitter = LlamaCpp()
    options: ClassVar[Mapping[str, Option]] = LlamaCpp.serving_options
    aliases: ClassVar[Mapping[str, str]] = {
        "m": "model", "hf": "model", "hfr": "model", "hf-repo": "model", "c": "ctx-size", "np": "parallel",
        "b": "batch-size", "ub": "ubatch-size", "ngl": "n-gpu-layers", "gpu-layers": "n-gpu-layers",
        "sm": "split-mode", "ts": "tensor-split", "fa": "flash-attn", "t": "threads", "tb": "threads-batch",
        "ctk": "cache-type-k", "ctv": "cache-type-v", "kvu": "kv-unified", "cb": "cont-batching",
        "nocb": "no-cont-batching", "a": "alias", "n": "n-predict", "predict": "n-predict", "v": "verbose",
        "md": "model-draft", "dev": "device", "mg": "main-gpu", "hff": "hf-file", "cmoe": "cpu-moe",
        "ncmoe": "n-cpu-moe", "ot": "override-tensor", "nkvo": "no-kv-offload", "cram": "cache-ram", "mm": "mmproj",
    }  # fmt: skip
    special: ClassVar[Mapping[str, Special]] = {
        **dict.fromkeys(
            ["ctx-size", "kv-unified", "kv-unified-per-slot", "split-mode", "batch-size", "tensor-split"], _later
        ),
        "n-gpu-layers": _all_layers,
        "cache-type-k": _llama_dtype,
        "cache-type-v": _llama_dtype,
    }
    more_flags = frozenset({"no-cont-batching", "cpu-moe", "no-kv-offload", "embedding", "reranking", "swa-full"})

    def finish(self, draft: PoolDraft, launch: Launch) -> None:
        """Read the batch, the slots' memory, and how the model is cut over the devices that the server sees."""
        by_name = {option.name: option for option in launch.given}
        for name in ("ctx-size", "batch-size", "kv-unified-per-slot", "split-mode"):
            refuse_open(by_name[name]) if name in by_name else None
        if "batch-size" in by_name and "ubatch-size" not in by_name:
            draft.set("batching.max_num_batched_tokens", whole_number(by_name["batch-size"]))
        if "kv-unified-per-slot" in by_name:
            longest = whole_number(by_name["kv-unified-per-slot"])
            draft.set("max_model_len", longest) if longest != draft.model.max_position else None
        if "ctx-size" in by_name and (tokens := whole_number(by_name["ctx-size"])):
            draft.set("kv_cache.num_blocks", tokens // (draft.get("kv_cache.block_size") or 1))
            if not {"kv-unified", "kv-unified-per-slot"} & by_name.keys():
                draft.set("max_model_len", max(tokens // (draft.get("batching.max_num_seqs") or 1) - 1, 1))
        self._cut(draft, launch, by_name)

    @staticmethod
    def _cut(draft: PoolDraft, launch: Launch, by_name: Mapping[str, Given]) -> None:
        visible = launch.environment.get("CUDA_VISIBLE_DEVICES", "")
        devices = len([device for device in visible.split(",") if device.strip()]) or 1
        split = by_name.get("split-mode")
        word = "layer" if split is None else str(split.value)
        if not visible and word != "none":
            draft.assume("the server has one device; CUDA_VISIBLE_DEVICES=0,1,... before it states others")
        if "tensor-split" in by_name and len(set(str(by_name["tensor-split"].value).replace(",", " ").split())) > 1:
            draft.refuse(by_name["tensor-split"], "how much of the model each device has")
        if word in ("row", "tensor"):
            draft.set("parallelism.tp", devices)
        elif word == "layer":
            draft.set("parallelism.pp", devices)


def _continuous(reader: OptionReader, draft: PoolDraft, launch: Launch, option: Given) -> None:
    """`finish` reads it."""


class TransformersReader(OptionReader):
    """Reads options of `transformers serve`."""

    family = "transformers"
    emitter = Transformers()
    options: ClassVar[Mapping[str, Option]] = Transformers.serving_options
    aliases: ClassVar[Mapping[str, str]] = {"force-model": "model"}
    special: ClassVar[Mapping[str, Special]] = {
        "continuous-batching": _continuous,
        "dtype": _of_draft(check_dtype),
    }

    def finish(self, draft: PoolDraft, launch: Launch) -> None:
        """Refuse a server without continuous batching."""
        by_name = {option.name: option for option in launch.given}
        option = by_name.get("continuous-batching", Given("continuous-batching", False, launch.file, launch.line))
        if not switch(option):
            draft.refuse(option, "how requests share steps: without it they are answered one after the other")


def _sglang_prompt_groups(draft: PoolDraft, by_name: Mapping[str, Given], ranks: int) -> int:
    """Return the groups of ranks that divide prompts, and set them; with latent attention SGLang chooses them."""
    size, switched, strategy = (by_name.get(name) for name in ("attn-cp-size", "enable-prefill-cp", "cp-strategy"))
    stated = 1 if size is None else whole_number(size)
    if switched is None or not switch(switched):
        if size is not None and stated > 1:
            draft.refuse(size, "how a sequence is divided among ranks, without enable-prefill-cp")
        return 1
    latent = [group.attention for group in draft.model.layers if isinstance(group.attention, MlaAttention)]
    selects = strategy is not None and str(strategy.value) == "interleave" and stated > 1
    groups = ranks if latent and not selects else stated
    if ranks % groups:
        raise SpecError(switched.problem(f"{groups} groups that divide prompts do not divide {ranks} ranks"))
    if groups > 1:
        draft.set("parallelism.prefill_context_parallel", groups)
    return groups


def _sglang_experts(draft: PoolDraft, by_name: Mapping[str, Given], ranks: int) -> None:
    exchange = by_name.get("moe-a2a-backend")
    whole_experts = whole_number(by_name["ep-size"]) if "ep-size" in by_name else 1
    if exchange is not None and str(exchange.value) in ("deepep", "mooncake"):
        draft.set("expert_exchange", "deepep")
        whole_experts = ranks
    elif exchange is not None and str(exchange.value) != "none":
        draft.refuse(exchange, "how tokens come to experts")
    if whole_experts not in (1, ranks):
        draft.refuse(by_name["ep-size"], "the placement of experts: on some ranks, with slices of each")
    elif whole_experts > 1 or ("ep-size" in by_name and ranks == 1 and draft.model_has_experts):
        draft.set("parallelism.expert_parallel", True)


def _trtllm_experts(draft: PoolDraft, experts: Given, ranks: int) -> None:
    if whole_number(experts) not in (-1, 1, ranks):
        draft.refuse(experts, "the placement of experts: on some ranks, with slices of each")
    elif whole_number(experts) == ranks and (ranks > 1 or draft.model_has_experts):
        draft.set("parallelism.expert_parallel", True)


READERS: Mapping[str, OptionReader] = {
    reader.family: reader
    for reader in (VllmReader(), SglangReader(), TensorrtLlmReader(), LlamaCppReader(), TransformersReader())
}
"""Reader of each family of engines."""
