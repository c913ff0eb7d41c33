"""Options that a plan has no setting for: those that change nothing that is simulated, and those that would.

Names are those of the argument parsers of vLLM 0.33 (vllm/engine/arg_utils.py, vllm/entrypoints/openai/cli_args.py),
SGLang 0.5.23 (python/sglang/srt/server_args.py), TensorRT-LLM 1.2 (tensorrt_llm/commands/serve.py, llmapi/llm_args.py),
llama.cpp (tools/server/README.md) and transformers 5.23 (cli/serve.py), with - for _.
"""

from __future__ import annotations

from collections.abc import Mapping

_ADDRESS = "addresses, names and access of the server"
_LOGS = "logs and metrics"
_TEXT = "how text is read and written"
_LOADING = "how weights are loaded"

_ALL: Mapping[str, str] = {
    _ADDRESS: "host port served-model-name api-key root-path ssl-keyfile ssl-certfile ssl-ca-certs nnodes node-rank "
    "master-addr master-port dist-init-addr dist-timeout nccl-port node-ips timeout allowed-origins allowed-methods "
    "allowed-headers namespace endpoint alias rm name",
    _LOGS: "log-level log-requests log-requests-level enable-metrics show-time-cost decode-log-interval "
    "uvicorn-log-level max-log-len otlp-traces-endpoint crash-dump-folder",
    _TEXT: "chat-template tokenizer tokenizer-path tokenizer-mode tool-call-parser reasoning-parser seed random-seed "
    "response-role grammar-backend sampling-backend guided-decoding-backend structured-outputs-config",
    _LOADING: "download-dir load-format revision model-loader-extra-config weight-loader-disable-mmap",
}  # fmt: skip
_ALL_FLAGS: Mapping[str, str] = {
    _LOADING: "trust-remote-code trust-remote-code-allowed",
    _LOGS: "disable-log-requests enable-log-requests disable-log-stats disable-uvicorn-access-log "
    "disable-fastapi-docs enable-server-load-tracking enable-request-id-headers",
    _TEXT: "enable-auto-tool-choice skip-tokenizer-init return-tokens-as-token-ids",
}  # fmt: skip

_IGNORED: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "vllm": (
        {
            _ADDRESS: "data-parallel-address data-parallel-rpc-port data-parallel-size-local "
            "data-parallel-start-rank data-parallel-rank uds middleware",
            _LOGS: "kv-events-config show-hidden-metrics-for-version collect-detailed-traces stat-logger",
            _TEXT: "generation-config override-generation-config chat-template-content-format max-logprobs "
            "mm-processor-cache-gb "
            "allowed-local-media-path media-io-kwargs logits-processors",
            _LOADING: "config-format code-revision tokenizer-revision hf-config-path hf-token "
            "prefix-caching-hash-algo distributed-executor-backend max-parallel-loading-workers",
            "a setting of engines before V1": "swap-space max-seq-len-to-capture preemption-mode max-num-on-the-fly",
            "connectors beside the KV transfer": "connector",
        },
        {
            _ADDRESS: "headless data-parallel-external-lb data-parallel-hybrid-lb disable-frontend-multiprocessing",
            "a setting of engines before V1": "use-v2-block-manager enable-flashinfer-autotune",
            _TEXT: "language-model-only skip-mm-profiling enable-prompt-tokens-details",
            "what a server does when idle": "enable-sleep-mode",
        },
    ),
    "sglang": (
        {
            _ADDRESS: "disaggregation-bootstrap-port disaggregation-ib-device numa-node base-gpu-id gpu-id-step "
            "watchdog-timeout bootstrap-port",
            _LOGS: "collect-tokens-histogram prompt-tokens-buckets gc-warning-threshold-secs",
            _TEXT: "preferred-sampling-params file-storage-path stream-output constrained-json-whitespace-pattern "
            "mm-attention-backend model-impl",
            _LOADING: "weight-version remote-instance-weight-loader-seed-instance-ip",
        },
        {_LOGS: "enable-cache-report enable-request-time-stats-logging", _TEXT: "enable-multimodal skip-server-warmup"},
    ),
    "trtllm": (
        {
            _ADDRESS: "server-role metadata-server-config-file",
            _LOGS: "print-iter-log enable-iter-perf-stats enable-iter-req-stats return-perf-metrics "
            "perf-metrics-max-requests",
            _TEXT: "num-postprocess-workers max-beam-width guided-decoding-backend postprocess-tokenizer-dir",
            "the runtime, of which one is simulated": "backend gpus-per-node enable-autotuner sampler-type",
        },
        {_ADDRESS: "fail-fast-on-attention-window-too-large"},
    ),
    "llamacpp": (
        {
            _TEXT: "n-predict temp top-k top-p min-p repeat-penalty reasoning-format reasoning-budget jinja "
            "chat-template-file chat-template-kwargs mmproj",
            "threads of the host": "threads threads-batch threads-http prio poll numa",
            "kernels, which are those of the profile": "flash-attn",
            _LOGS: "verbosity log-file",
            _LOADING: "hf-file lora-init-without-apply main-gpu device",
        },
        {
            _LOADING: "mlock no-mmap no-warmup mmap warmup",
            _LOGS: "metrics slots no-slots props verbose no-webui log-timestamps log-prefix",
            "on by default": "cont-batching",
        },
    ),
    "transformers": (
        {_TEXT: "default-seed", _LOADING: "device model-timeout cors"},
        {_LOGS: "enable-cors non-blocking"},
    ),
}  # fmt: skip

_KERNELS = "the kernels, which are those of the hardware profile"
_LINKS = "the communication kernels, which are those of the hardware profile"
_PLACEMENT = "the placement of experts"
_OFFLOAD = "which weights lie in host memory"
_TIERS = "the prefix cache, by tiers below GPU memory; write them as kv_cache.tiers, with the rates of their links"
_LORA = "the weights of a step, by adapters"
_MODEL = "the model; change its spec and give it as --model"
_STATES = "the memory of linear attention's states"
_GRAPHS = "which steps have CUDA graphs, and what is fused in them"
_ADMISSION = "which requests are admitted, or in which order"

_REFUSED: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        _KERNELS: "attention-backend attention-config moe-backend kernel-config linear-backend mm-encoder-attn-backend",
        _LINKS: "disable-custom-all-reduce disable-nccl-for-dp-synchronization",
        _PLACEMENT: "num-redundant-experts expert-placement-strategy",
        _OFFLOAD: "cpu-offload-gb offload-group-size offload-num-in-group",
        _LORA: "fully-sharded-loras lora-dtype specialize-active-lora enable-moe-shared-loras",
        _MODEL: "hf-overrides rope-scaling rope-theta task runner convert pooler-config",
        _STATES: "mamba-ssm-cache-dtype mamba-cache-dtype mamba-block-size mamba-cache-mode",
        _GRAPHS: "compilation-config cuda-graph-sizes cudagraph-capture-sizes optimization-level performance-mode",
        _ADMISSION: "max-num-partial-prefills max-long-partial-prefills scheduler-cls "
        "disable-hybrid-kv-cache-manager",
        "how a sequence is divided among ranks": "dcp-kv-cache-interleave-size cp-kv-cache-interleave-size",
        "how many front ends share the requests": "api-server-count",
        "the size of the KV cache; give num-gpu-blocks-override": "kv-cache-memory-bytes",
        "how many tokens a step makes": "num-scheduler-steps",
        "when two batches overlap": "ubatch-size",
    },
    "sglang": {
        _KERNELS: "attention-backend prefill-attention-backend decode-attention-backend moe-runner-backend "
        "fp8-gemm-backend fp4-gemm-backend nsa-prefill-backend nsa-decode-backend speculative-attention-mode "
        "speculative-moe-runner-backend speculative-draft-attention-backend flashinfer-mxfp4-moe-precision "
        "linear-attn-backend disable-shared-experts-fusion",
        _LINKS: "disable-custom-all-reduce enable-nccl-nvls enable-symm-mem enable-mscclpp deepep-mode deepep-config "
        "enable-single-batch-overlap",
        _PLACEMENT: "eplb-algorithm init-expert-location ep-dispatch-algorithm "
        "expert-distribution-recorder-mode moe-dense-tp-size enable-dp-lm-head",
        _OFFLOAD: "cpu-offload-gb offload-group-size",
        _TIERS: "hicache-storage-backend hicache-io-backend hicache-mem-layout enable-lmcache",
        _LORA: "lora-backend enable-lora-overlap-loading lora-eviction-policy lora-drain-wait-threshold",
        _MODEL: "json-model-override-args is-embedding",
        _STATES: "max-mamba-cache-size mamba-ssm-dtype mamba-full-memory-ratio mamba-scheduler-strategy "
        "swa-full-tokens-ratio mamba-track-interval",
        _GRAPHS: "enable-torch-compile torch-compile-max-bs enable-piecewise-cuda-graph "
        "piecewise-cuda-graph-max-tokens disable-cuda-graph-padding cuda-graph-bs disable-piecewise-cuda-graph",
        _ADMISSION: "enable-mixed-chunk scheduler-recv-interval enable-priority-scheduling "
        "prefill-max-requests load-balance-method enable-prefill-delayer schedule-low-priority-values-first",
        "how many tokens a step makes": "num-continuous-decode-steps",
        "how drafts are verified": "speculative-accept-threshold-single speculative-accept-threshold-acc "
        "speculative-token-map speculative-adaptive",
        "how a sequence is divided among ranks": "enable-prefill-context-parallel "
        "enable-nsa-prefill-context-parallel",
        "which kinds of workers share the devices": "disaggregation-decode-tp disaggregation-prefill-pp",
        "which requests are encoded by encoder servers, and which by this one": "enable-adaptive-dispatch-to-encoder",
    },
    "trtllm": {
        _KERNELS: "moe-config attn-backend nvfp4-gemm-config use-low-precision-moe-combine torch-compile-config",
        _LINKS: "allreduce-strategy",
        _ADMISSION: "batch-wait-timeout-ms max-input-len",
        _PLACEMENT: "cluster-size moe-cluster-parallel-size moe-tensor-parallel-size",
        _LORA: "enable-lora",
        _MODEL: "quant-config",
        _TIERS: "kv-cache-config.secondary-offload-min-priority kv-connector-config",
        "what a prefix cache finds": "kv-cache-config.enable-partial-reuse kv-cache-config.copy-on-partial-reuse",
        "the windows of attention": "kv-cache-config.max-attention-window kv-cache-config.sink-token-length",
        _STATES: "kv-cache-config.mamba-ssm-cache-dtype",
    },
    "llamacpp": {
        _OFFLOAD: "cpu-moe n-cpu-moe override-tensor no-kv-offload",
        "drafts, which no plan of llama.cpp has": "model-draft hf-repo-draft draft-max draft-min draft draft-p-min "
        "spec-type",
        _LORA: "lora lora-scaled",
        _TIERS: "cache-ram cache-reuse",
        _MODEL: "rope-scaling rope-freq-base rope-freq-scale yarn-orig-ctx override-kv embedding reranking",
        _ADMISSION: "no-cont-batching swa-full context-shift",
        "which machines share the model": "rpc",
    },
    "transformers": {_KERNELS: "attn-implementation", _MODEL: "quantization", _GRAPHS: "compile"},
}  # fmt: skip


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: meaning for meaning, names in table.items() for name in names.split()}


IGNORED: Mapping[str, Mapping[str, str]] = {
    family: {**_by_name(_ALL), **_by_name(_ALL_FLAGS), **_by_name(valued), **_by_name(flags)}
    for family, (valued, flags) in _IGNORED.items()
}
"""Subjects of options without effect on a simulation, by family of engines and name."""
FLAGS: Mapping[str, frozenset[str]] = {
    family: frozenset({**_by_name(_ALL_FLAGS), **_by_name(flags)}) for family, (_, flags) in _IGNORED.items()
}
"""Ignored options without a value."""
_DRAFTED = {"spec-decoding": "how many tokens are drafted, which an InferenceX config does not state"}
REFUSED: Mapping[str, Mapping[str, str]] = {
    family: {**_by_name(table), **_DRAFTED} for family, table in _REFUSED.items()
}
"""Parts that an option would change and that are not simulated for an engine, by family and name."""
