"""How servers of measured runs were launched, beyond the defaults of their release: by rule and never by row.

* Public sweeps (InferenceMAX, now SemiAnalysisAI/InferenceX): its launch files in benchmarks/, of about the day of the
  run, by model, engine and card: 70b_*, gptoss_fp4_*, dsr1_fp4_*, dsr1_fp8_*.
  Those of Llama-3.1-70B on vLLM serve nvidia/Llama-3.3-70B-Instruct-FP8 or -FP4, with static scales, on 0.10.2
  (.github/configs/master.yaml).
* Gap analyses (ai-dynamo/aiconfigurator): settings as its generator writes them for a batch of as many requests as
  there are users (src/aiconfigurator/generator: rule_plugin/, config/backend_templates/).

Two numbers no file tells: `SEATS_SHORT` and `WAITING_SHARE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from typing import Any

from simtune.specs.preset import merged

Settings = dict[str, Any]

SEATS_SHORT = {("trtllm", "llama-3.1-8b"): 1}
"""Seats fewer than users, in gap analyses of an engine and model: one request was waiting at all times there (by
Little's law: what first tokens come later than of all at once, times requests per second, is 0.9 to 1.1 in most of 54
runs). Chosen on these runs; no file tells why."""

WAITING_SHARE = 1 / 24
"""Of the users, for each doubling of tp: how many wait for a seat in analyses of SGLang 0.5.6. By Little's law a share
of 0.04 to 0.05 of a request's time, for each doubling, passes before its first token beyond what its prompt takes, with
512 users and whatever the lengths (500 to 2,000 tokens of answer, 13,000 to 19,000 tokens a second, which no queue at
one rate comes to). Chosen on these six runs; no file tells why."""


@dataclass(frozen=True)
class Launch:
    """What a launch file goes by."""

    engine: str
    release: str
    weights: str
    model: str
    hardware: str
    tp: int
    isl: int
    osl: int
    concurrency: int
    sweep: bool
    longest: int
    """Tokens of the longest request that is asked."""

    @property
    def blackwell(self) -> bool:
        return self.hardware == "b200"

    @property
    def thousands(self) -> tuple[int, int]:
        """Lengths as launch files tell cases apart."""
        return self.isl // 1024, self.osl // 1024

    @property
    def max_model_len(self) -> int:
        """As sweeps reckon it; of an analysis the longest request."""
        if self.sweep:
            return self.isl + self.osl + (20 if self.thousands == (1, 1) else 200)
        return self.longest + (0 if self.engine == "trtllm" else 256)


def analysed(launch: Launch) -> Settings:
    """Of a gap analysis."""
    users, batching = launch.concurrency, Settings()
    if launch.engine == "trtllm":
        batching["max_num_seqs"] = users - SEATS_SHORT.get((launch.engine, launch.model), 0)
        # The generator of today writes 1,500 where this has 64, with which two prompts of 1,024 tokens would share a
        # step: on the runs they do not.
        batching["max_num_batched_tokens"] = max(users + launch.isl + 64, launch.max_model_len)
        batching["chunked_prefill"] = False
    elif launch.engine == "vllm":
        batching["max_num_seqs"], batching["max_num_batched_tokens"] = users, users + launch.isl + 1500
    else:
        return _analysed_sglang(launch)
    return {"batching": batching}


def _analysed_sglang(launch: Launch) -> Settings:
    """The client of an analysis asks for no temperature and Dynamo's worker passes none on, so that SGLang samples, by
    torch.multinomial, which waits for the device. Until 0.5.3 a thread of its own did (python/sglang/srt/managers/
    tp_worker_overlap_thread.py, gone with pull request 11210), since then the scheduler's."""
    minor, patch = (int(part) for part in launch.release.split(".")[1:3])
    settings: Settings = {} if (minor, patch) < (5, 4) else {"exposed_host": "all"}
    if (minor, patch) == (5, 6):
        options = {"max_prefill_tokens": launch.isl + 1500, "enable_mixed_chunk": True}
        seats = launch.concurrency - round(WAITING_SHARE * log2(launch.tp) * launch.concurrency)
        settings["batching"] = {"max_num_seqs": seats, "options": options}
    return settings


def swept(launch: Launch) -> Settings:
    """Of a public sweep."""
    return SWEPT[launch.engine](launch)


def _vllm(launch: Launch) -> Settings:
    settings: Settings = {
        "async_scheduling": True,
        "batching": {"max_num_batched_tokens": 8192},
        "kv_cache": {"memory_utilization": 0.9, "prefix_caching": False},
    }
    if launch.blackwell:
        settings |= {"fused": ["norm"]}
    elif launch.model == "gpt-oss-120b":  # VLLM_MXFP4_USE_MARLIN
        settings |= {"expert_flops_per_s": MARLIN_FLOPS_PER_S}
    if launch.model == "llama-3.1-70b":
        settings = merged({"kv_cache": {"dtype": "fp8"}}, settings)
        if launch.blackwell:
            # FULL_DECODE_ONLY; enable_attn_fusion, but not enable_fusion, which V1 left off in 2025
            # (vllm/config/compilation.py), and +quant_fp8 keeps the compiler from fusing it.
            settings |= {"prompt_launch_s": PROMPT_LAUNCH_S, "fused": ["norm", "attention"], "quantising": "apart"}
    return settings


PROMPT_LAUNCH_S = 0.0007
"""Of a layer launched kernel by kernel: as of TensorRT-LLM's."""

MARLIN_FLOPS_PER_S = 2.03e14
"""Of Marlin's 4-bit experts on H100 and H200: fitted on that kernel's rows of their moe_perf tables (vLLM 0.24; 896
experts of another model, 61 balanced rows each: 2.02e14 and 2.03e14)."""

TRITON_LAUNCH_S = 0.0025
"""Of a layer whose experts are TensorRT-LLM's Triton kernels. Chosen on first tokens of its runs on H200."""

SYMMETRIC_LAUNCH_S = 0.0074
"""Of a layer of SGLang with --enable-symm-mem before its pull request 12524 (November 2025), that looked through the
memory pool at each allocation. Chosen so that first tokens with 4, 8 and 16 users come out right in the mean."""


def _sglang(launch: Launch) -> Settings:
    polls = {"scheduler_recv_interval": 30 if launch.concurrency >= 16 else 10}
    settings: Settings = {
        "fused": ["norm"],
        "kv_cache": {"dtype": "fp8", "memory_utilization": 0.85},
        "batching": {"max_num_seqs": 256, "max_num_batched_tokens": 16384, "options": polls},
    }
    return settings if launch.release else settings | {"prompt_launch_s": SYMMETRIC_LAUNCH_S}  # those are of 2025


def _trtllm(launch: Launch) -> Settings:
    batching: Settings = {"chunked_prefill": True}
    settings: Settings = {"batching": batching}
    if launch.model == "llama-3.1-70b":
        of_b200_fp8 = launch.blackwell and launch.weights == "fp8"
        batching["max_num_batched_tokens"] = 16384 if of_b200_fp8 else launch.max_model_len
        if launch.thousands == (1, 1) and launch.tp < 8:
            batching["options"] = {"batch_wait_max_tokens_ratio": 0.9, "batch_wait_timeout_iters": 20}
    elif launch.model == "gpt-oss-120b":
        batching["max_num_batched_tokens"] = 20000
        batching["max_num_seqs"] = 512 if launch.blackwell else launch.concurrency
        settings |= {"kv_cache": {"dtype": "fp8"}} if launch.blackwell else {"prompt_launch_s": TRITON_LAUNCH_S}
    else:
        batching["max_num_batched_tokens"] = max(8192, -(-(launch.concurrency + launch.isl + 64) // 64) * 64)
    return settings


SWEPT: dict[str, Callable[[Launch], Settings]] = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}
