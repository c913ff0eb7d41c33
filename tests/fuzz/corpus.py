"""Files of every kind that simtune reads, small and right, and the commands that read them."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """A command, and which of the files it reads is mutated."""

    file: str
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of a report."""
        return f"{self.command[0]} < {self.file}"


MODEL = """\
schema: simtune/model@1
name: small
hidden_size: 2048
vocab_size: 32000
max_position: 8192
layers:
- count: 2
  attention: {kind: full, heads: 32, kv_heads: 8, head_dim: 64}
  feed_forward: {kind: dense, intermediate_size: 8192}
- count: 2
  attention: {kind: sliding, heads: 32, kv_heads: 8, head_dim: 64, window: 1024}
  feed_forward: {kind: dense, intermediate_size: 8192}
"""
WORKLOAD = """\
schema: simtune/workload@1
name: load
source: made up
requests: 20
arrivals: {kind: gamma, rate_rps: 5, cv: 2}
prompt: {kind: lognormal, mean_tokens: 200, sigma: 1, max_tokens: 1000}
output: {kind: quantiles, levels: [0, 0.5, 1], tokens: [1, 20, 60]}
classes:
- {name: a, share: 3, priority: 1, slo: {ttft_s: {p99: 1.0}}}
- {name: b, output: {kind: fixed, tokens: 8}}
shared_prefix: {groups: 3, tokens: 64}
"""
TURNS = """\
schema: simtune/workload@1
name: turns
requests: 20
arrivals: {kind: piecewise, segments: [{for_s: 2, rate_rps: 4}, {for_s: 1, rate_rps: 0}]}
prompt: {kind: trace}
output: {kind: trace}
trace: trace.csv
sessions: {follow: arrivals, concurrent: 3, turns: 2}
"""
PLAN = """\
schema: simtune/plan@1
name: mine
model: ./model.yaml
pools:
- name: p
  role: prefill
  hardware: ./card/profile.yaml
  instances: 2
  batching: {policy: vllm-fcfs, max_num_seqs: 16, max_num_batched_tokens: 512, long_prefill_token_threshold: 256}
  max_model_len: 4096
  kv_cache: {block_size: 16, memory_utilization: 0.9, prefix_caching: true}
- name: d
  role: decode
  hardware: ./card/profile.yaml
  instances: 1
  batching: {max_num_seqs: 16, max_num_batched_tokens: 512}
  max_model_len: 4096
link: {}
router: {kind: prefix_aware, load_weight: 1.0}
events:
- {kind: failure, at_s: 1.0, pool: p, instance: 0, recover_s: 2.0}
"""
DRAFTS = """\
schema: simtune/plan@1
name: drafts
model: ./model.yaml
pools:
- hardware: ./card/profile.yaml
  instances: 1
  parallelism: {tp: 1, pp: 1}
  batching: {policy: vllm-fcfs, max_num_seqs: 8, max_num_batched_tokens: 256}
  max_model_len: 4096
  kv_cache: {num_blocks: 600, preemption: recompute, watermark: 0.01}
  host: {step_s: 0.001, per_sequence_s: 1.0e-05}
  speculation:
    drafter: {kind: ngram, lookup_max: 4}
    acceptance: ./acceptance.yaml
    scheme: {kind: chain, tokens: 3}
"""
STAGED = """\
schema: simtune/plan@1
name: staged
model: ./model.yaml
pools:
- hardware: ./card/profile.yaml
  instances: 2
  batching: {policy: layered-prefill, options: {group_tokens: 64}, max_num_seqs: 8, max_num_batched_tokens: 4096}
  max_model_len: 4096
stages:
- {name: fetch, pool: mixed, instances: 2, seconds: 0.01, seconds_per_token: 0.0001, parts: 2}
- {name: read, pool: mixed, after: [fetch], devices: 1, seconds: 0.02, parts: 2}
- {name: guard, pool: mixed, place: beside, seconds: 0.3}
"""
LENGTHS = """\
schema: simtune/plan@1
name: lengths
model: ./model.yaml
pools:
- name: short
  hardware: ./card/profile.yaml
  instances: 1
  batching: {max_num_seqs: 16, max_num_batched_tokens: 512}
  max_model_len: 4096
- name: long
  hardware: ./card/profile.yaml
  instances: 2
  batching: {policy: sglang, max_num_seqs: 4, max_num_batched_tokens: 1024}
  max_model_len: 4096
router: {kind: by_length, longest: {short: 150}, stale_s: 0.001}
"""
FAMILIES = """\
schema: simtune/workload@1
name: families
requests: 6
arrivals: {kind: poisson, rate_rps: 5}
prompt: {kind: fixed, tokens: 40}
output: {kind: fixed, tokens: 8}
graph:
- {name: plan, from_s: 0.1}
- {name: tries, after: [plan], inherits: plan, count: 4, first: 2,
   output: {kind: lognormal, mean_tokens: 9, sigma: 1, max_tokens: 60}}
- {name: judge, after: [plan], reads: [plan], delay_s: 0.05, prompt: {kind: fixed, tokens: 10}}
"""
JUDGED = """\
schema: simtune/plan@1
name: judged
model: ./model.yaml
pools:
- hardware: ./card/profile.yaml
  instances: 1
  batching: {max_num_seqs: 8, max_num_batched_tokens: 512}
  max_model_len: 8192
"""
STUDY = """\
schema: simtune/study@1
name: tiny
model: ./model.yaml
hardware: {profile: ./card/profile.yaml, devices: 1}
workload: ./load.yaml
slo: {ttft_s: {p99: 5.0}, tpot_s: {p99: 0.2}}
search:
  {tp: [1], pp: [1], max_num_seqs: [16], max_num_batched_tokens: [512], requests: 20, rate_tolerance: 0.2,
   confirm: {draws: 0}}
seed: 3
"""
ACCEPTANCE = """\
schema: simtune/acceptance@1
name: rates
origin: assumed
source: a test
rates: {kind: per_position, conditional: [0.7, 0.6, 0.5, 0.4], standard_error: [0.01, 0.01, 0.02, 0.02]}
drift:
  kind: linear
  over: seconds
  points: [{at: 2.0, rates: {kind: per_position, conditional: [0.5, 0.4, 0.3, 0.2]}}]
conditions:
- {request_class: a, temperature: 0.5, rates: {kind: beta, a: 3.0, b: 2.0}}
"""
ENGINE = """\
schema: simtune/engine@1
name: own
family: vllm
release: "1.0"
pool: {batching: {policy: vllm-fcfs, max_num_seqs: 16, max_num_batched_tokens: 512}, kv_cache: {block_size: 16}}
cases:
- {memory_gib_from: 70, pool: {batching: {max_num_batched_tokens: 1024}}}
sources: {batching.policy: a, batching.max_num_seqs: a, batching.max_num_batched_tokens: a, kv_cache.block_size: a}
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 4, "vocab_size": 32000,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}  # fmt: skip
MOE_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 2,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 32000,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
FACTS = """\
schema: simtune/device@1
name: made-up
engine: none 1.0
device:
  {name: Made-up 1, vendor: nobody, memory_bytes: 8e10, memory_bytes_per_s: 1e12, processors: 10,
   flops_per_s: {bf16: 1e14}, source: made up}
"""
LOG = (
    "INFO SpecDecoding metrics: Mean acceptance length: 2.1, Accepted throughput: 10.0 tokens/s, Accepted: 55 tokens, "
)
LOG += "Drafted: 150 tokens, Per-position acceptance rate: 0.700, 0.300, 0.100, Avg Draft acceptance rate: 36.7%\n"
COUNTERS = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model_name="m"} 100.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 70.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 40.0
"""


def _lines(*objects: object) -> str:
    return "".join(json.dumps(item) + "\n" for item in objects)


def texts() -> dict[str, str]:
    """The files that are text, by name."""
    gemm = ["framework,version,device,gemm_dtype,m,n,k,latency"]
    gemm += [
        f"V,1,Made-up 1,bfloat16,{m},{n},{k},{3e-3 + 2e3 * m * n * k / 6e13 + 2e3 * (m * k + n * k + m * n) / 8e11}"
        for m in (1, 64, 1024) for n in (512, 4096) for k in (512, 4096)
    ]  # fmt: skip
    head = {"schema": "simtune/measurements@1", "device": "Made-up 1", "driver": "570.1", "torch": "2.11.0"}
    points = [
        {"kind": "gemm", "dtype": "bf16", "shape": {"m": m, "n": n, "k": k}, "mad": 1e-8, "p10": 2e-6, "p90": 4e-6,
         "n": 9, "seconds": 3e-6 + 2 * m * n * k / 6e13 + 2 * (m * k + n * k + m * n) / 8e11}
        for m in (1, 64, 1024) for n in (512, 4096) for k in (512, 4096)
    ]  # fmt: skip
    steps = [
        {"decodes": n, "context_tokens": 100 * n, "seconds": 2e-3 + 1e-5 * n, "chunks": [[0, 64 * (n % 3)]][: n % 3]}
        for n in range(1, 24)
    ]
    return {
        "model.yaml": MODEL, "load.yaml": WORKLOAD, "turns.yaml": TURNS, "plan.yaml": PLAN, "drafts.yaml": DRAFTS,
        "staged.yaml": STAGED, "lengths.yaml": LENGTHS, "families.yaml": FAMILIES, "judged.yaml": JUDGED,
        "study.yaml": STUDY, "acceptance.yaml": ACCEPTANCE, "engine.yaml": ENGINE, "facts.yaml": FACTS,
        "llama/config.json": json.dumps(CONFIG, indent=1), "moe/config.json": json.dumps(MOE_CONFIG, indent=1),
        "trace.csv": "TIMESTAMP,ContextTokens,GeneratedTokens,note\n"
        + "".join(f"2023-11-16 18:15:{10 + i}.5,{50 * i + 1},{i + 1},x\n" for i in range(12)),
        "own.csv": "arrival_s,prompt_tokens,output_tokens\n"
        + "".join(f"{0.3 * i},{50 * i + 1},{i + 1}\n" for i in range(12)),
        "trace.jsonl": _lines(
            *({"timestamp": 300 * i, "input_length": 600 + i, "output_length": 5, "hash_ids": [0, i]} for i in range(9))
        ),
        "measured.jsonl": _lines(
            {"schema": "simtune/measured@1", "label": "light", "engine": {"engine": "made up"}, "preemptions": 0},
            *(
                {"request": i, "due_s": i / 4, "sent_s": i / 4, "first_token_s": i / 4 + 0.1, "finish_s": i / 4 + 0.3,
                 "prompt_tokens": 30 + i, "output_tokens": 4, "times_s": [i / 4 + 0.1, i / 4 + 0.3]}
                for i in range(9)
            ),
        ),
        "gemm.csv": "\n".join(gemm) + "\n",
        "measurements.jsonl": _lines(head, *points),
        "steps.jsonl": _lines({"schema": "simtune/steps@1", "model": "small", "tp": 1}, *steps),
        "steps.csv": "num_decodes,context_tokens,prefill_tokens,seconds,prefill_chunks,prefill_past,tp\n"
        + "".join(f"{n},{100 * n},{64 * (n % 3)},{2e-3 + 1e-5 * n},{n % 3},0,1\n" for n in range(1, 24)),
        "table.csv": "decodes,context_tokens,prefill_tokens,past_tokens,milliseconds\n"
        + "".join(
            f"{b},{b * c},{p},0,{8 + b * 0.02 + p * 0.04 + b * c * 1e-5}\n"
            for b in (0, 1, 16) for c in (128, 4096) for p in (0, 512) if (b or p) and (b or c < 200)
        ),
        "ranks.csv": "depth,rank,taken,reached\n1,1,60,100\n1,2,20,100\n2,1,30,60\n2,2,12,60\n",
        "topk.csv": "head_index,top_k,accuracy\n0,1,0.6\n0,2,0.7\n1,1,0.4\n1,2,0.5\n",
        "rounds.csv": "accepted,drafted\n1,3\n2,3\n0,3\n3,3\n0,2\n",
        "counters.txt": COUNTERS, "server.log": LOG * 3,
        "bench.json": json.dumps(
            {"spec_decode_num_drafts": 100, "spec_decode_per_position_acceptance_rates": [0.7, 0.4, 0.2]}
        ),
        "sglang.json": json.dumps({"accept_length": 2.4, "internal_states": [{"avg_spec_accept_length": 2.4}]}),
        "aiperf.json": json.dumps({"pooled_spec_decode_acceptance_histogram": {"0": 50, "1": 30, "2": 20}}),
        "responses.jsonl": _lines(
            *({"metrics": {"speculative_decoding": {"acceptance_histogram": [5, 3, n]}}} for n in range(4))
        ),
    }  # fmt: skip


TOOLS = ("vllm-bench.json", "guidellm.json", "aiperf.jsonl", "genai-perf.json")
ALSO = (
    "card/profile.yaml", "card/arrays.npz", "log.jsonl", "run/summary.json", "run/candidates.csv",
    "systems.yaml", *TOOLS,
    "swept/points.jsonl", "swept/sweep.csv", "certified/certificate.json", "certified/plan.yaml",
    "validated/validation.json",
)  # fmt: skip
"""Files that are made, not written here."""

_HERE = ("--model", "./model.yaml", "--hardware", "./card/profile.yaml", "--json")
_SIMULATE = ("simulate", *_HERE, "--requests", "20")
_CHECKED = (
    "model.yaml", "load.yaml", "turns.yaml", "plan.yaml", "drafts.yaml", "study.yaml", "acceptance.yaml", "engine.yaml",
    "staged.yaml", "lengths.yaml", "families.yaml", "judged.yaml",
    "facts.yaml", "llama/config.json", "moe/config.json", "trace.csv", "own.csv", "trace.jsonl", "card/profile.yaml",
)  # fmt: skip
_LOGS = (
    "ranks.csv", "topk.csv", "rounds.csv", "counters.txt", "server.log", "bench.json", "sglang.json", "aiperf.json",
    "responses.jsonl",
)  # fmt: skip


def cases() -> list[Case]:
    """Every verb that reads files, with every kind of file that it reads."""
    found = [Case(file, ("check", "--json", file)) for file in _CHECKED]
    found += [Case(file, ("show", f"./{file}", "--json")) for file in _CHECKED if "trace" not in file]
    found += [Case(f, (*_SIMULATE, "--workload", f"./{f}")) for f in ("load.yaml", "turns.yaml", "own.csv")]
    found += [Case(f, (*_SIMULATE, "--workload", f)) for f in ("trace.csv", "trace.jsonl")]
    found += [Case("trace.csv", (*_SIMULATE, "--workload", "./turns.yaml"))]
    found += [Case(f, (*_SIMULATE, "--workload", "./load.yaml")) for f in ("model.yaml", "card/profile.yaml")]
    found += [Case("card/arrays.npz", (*_SIMULATE, "--workload", "./load.yaml"))]
    found += [Case("card/arrays.npz", ("check", "--json", "card/profile.yaml"))]
    found += [Case("engine.yaml", (*_SIMULATE, "--workload", "./load.yaml", "--engine", "./engine.yaml"))]
    found += [Case("table.csv", (*_SIMULATE, "--workload", "./load.yaml", "--costs", "table.csv"))]
    found += [Case("families.yaml", (*_SIMULATE, "--workload", "./families.yaml"))]
    found += [Case("load.yaml", (*_SIMULATE, "--workload", "./load.yaml", "--stream"))]
    found += [Case("load.yaml", (*_SIMULATE, "--workload", "./load.yaml", "--uncertainty", "20"))]
    for plan in ("plan.yaml", "drafts.yaml", "staged.yaml", "lengths.yaml"):
        load = ("--plan", plan, "--workload", "./load.yaml", "--requests", "20")
        command = ("simulate", *load, "--out", "out", "--json")
        found += [Case(plan, command), Case("model.yaml", command), Case("acceptance.yaml", command)]
        found += [Case(plan, ("explain", plan))]
    sweep = ("sweep", *_HERE, "--workload", "./load.yaml", "--requests", "20", "--over", "rate=2,4", "--jobs", "1")
    found += [Case(f, sweep) for f in ("load.yaml", "model.yaml")]
    found += [Case(f, ("workload", f, "--json")) for f in ("trace.csv", "own.csv", "trace.jsonl")]
    for config in ("llama", "moe"):
        on_config = (
            "simulate",
            "--model",
            f"./{config}",
            "--hardware",
            "h100-sxm",
            "--workload",
            "./load.yaml",
            "--json",
        )
        found.append(Case(f"{config}/config.json", on_config))
    optimize = ("optimize", "study.yaml", "--out", "out", "--jobs", "1", "--json")
    found += [Case(f, optimize) for f in ("study.yaml", "study.yaml", "load.yaml", "model.yaml")]
    found += [Case("study.yaml", (*optimize, "--dry-run"))]
    found += [Case(f, ("acceptance", f, "--out", "out.yaml", "--draft-tokens", "3", "--json")) for f in _LOGS]
    found += [
        Case(
            "acceptance.yaml",
            ("speculate", *_HERE, "--acceptance", "./acceptance.yaml", "--drafter", "{kind: ngram, lookup_max: 4}"),
        )
    ]
    found += [
        Case(f, ("fit", f, "--facts", "facts.yaml", "--out", "out", "--quiet", "--json"))
        for f in ("gemm.csv", "measurements.jsonl")
    ]
    found += [Case("facts.yaml", ("fit", "gemm.csv", "--facts", "facts.yaml", "--out", "out", "--quiet", "--json"))]
    found += [
        Case(
            f,
            ("calibrate", "./card", "--measured", f, "--model", "./model.yaml", "--tp", "1", "--out", "out", "--json"),
        )
        for f in ("steps.jsonl", "steps.csv")
    ]
    found += [Case("log.jsonl", ("replay", "log.jsonl", "--json"))]
    found += [Case(f, ("report", "run")) for f in ("run/summary.json", "run/candidates.csv")]
    return found + _of_outputs()  # fmt: skip


def _of_outputs() -> list[Case]:
    """Verbs that read what other tools and other verbs wrote."""
    parts = ("--part", "1")
    found = [Case(f, ("workload", f, *(parts if f == "guidellm.json" else ()), "--json")) for f in TOOLS]
    found += [Case(f, (*_SIMULATE, "--workload", f)) for f in TOOLS if f != "guidellm.json"]
    judged = ("--out", "out", "--uncertainty", "0", "--tolerance", "1e6", "--quiet", "--json")
    for file in ("vllm-bench.json", "measured.jsonl"):
        found.append(Case(file, ("validate", "judged.yaml", "--from", file, *judged)))
    found.append(Case("judged.yaml", ("validate", "judged.yaml", "--from", "measured.jsonl", *judged)))
    sweep = ("sweep", *_HERE, "--workload", "./load.yaml", "--requests", "20", "--over", "rate=2,4", "--jobs", "1")
    found.append(Case("swept/points.jsonl", (*sweep, "--out", "swept")))
    found.append(Case("swept/sweep.csv", ("report", "swept")))
    certify = ("certify", "certified", "--study", "study.yaml", "--json")
    found += [Case(f, certify) for f in ("certified/certificate.json", "certified/plan.yaml", "study.yaml")]
    found.append(Case("validated/validation.json", ("report", "validated", "run", "--json")))
    found.append(Case("systems.yaml", ("reproduce", "systems.yaml", "--jobs", "1", "--quiet", "--json")))
    return found


def write(folder: Path) -> None:
    """All files that do not come from a run; `run` is made by a study of theirs."""
    for name, text in texts().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copytree(ROOT / "simtune/hwprofiles" / "rtx-4090", folder / "card", dirs_exist_ok=True)
    shutil.copy(ROOT / "simtune" / "systems" / "experts.yaml", folder / "systems.yaml")
    for name in TOOLS:
        shutil.copy(ROOT / "tests" / "specs" / "tools" / name, folder / name)
    profile = yaml.safe_load((folder / "card" / "profile.yaml").read_text())
    profile.pop("arrays_sha256", None)  # so that what is in the arrays is looked at
    profile["links"] = {
        name: {"bytes_per_s": 1e10, "latency_s": 1e-5, "source": "none"} for name in ("inter_node", "host")
    }
    (folder / "card" / "profile.yaml").write_text(yaml.safe_dump(profile))
    with gzip.open(ROOT / "tests" / "engine" / "logs" / "vllm_async_prefix_kv.jsonl.gz", "rt") as log:
        (folder / "log.jsonl").write_text(log.read())
