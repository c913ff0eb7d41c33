"""Plans of command lines, scripts, compose files, manifests and InferenceX configs; options with no part in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simtune.emit.importing import Imported, ImportRequest, import_plan
from simtune.emit.importing.engine_readers import READERS
from simtune.emit.importing.knowledge import IGNORED, REFUSED
from simtune.errors import SimtuneError, SpecError
from simtune.specs.adapters import Lora
from simtune.specs.encoder import Encoder, MediaLimits
from simtune.specs.pool import Pool

MODEL = "meta-llama/Llama-3.1-8B"
SCRIPT = """#!/usr/bin/env bash
# TP and CONC come from outside.
LEN=$(( ISL + OSL + 20 ))
cat > config.yaml << EOF
async-scheduling: true
no-enable-prefix-caching: true
max-model-len: $LEN
EOF
export PORT=${PORT:-8888}
PYTHONNOUSERSITE=1 nohup vllm serve $MODEL --host 0.0.0.0 --port $PORT \\
  --config config.yaml \\
  --tensor-parallel-size $TP \\
  --max-num-seqs $CONC > server.log 2>&1 &
wait_for_server --port $PORT
run_benchmark --model "$MODEL" --backend vllm
"""
COMPOSE = """
x-common: &common
  image: vllm/vllm-openai:v0.11.0
services:
  llm:
    <<: *common
    environment: [SEATS=64]
    command: --model meta-llama/Llama-3.1-8B --tensor-parallel-size 2 --max-num-seqs ${SEATS}
    deploy: {replicas: 2}
  cache: {image: "redis:7"}
"""
MANIFEST = """
apiVersion: v1
kind: Service
metadata: {name: llm}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: llm}
spec:
  replicas: 3
  template:
    spec:
      containers:
      - name: server
        image: vllm/vllm-openai:v0.14.1
        env: [{name: SEATS, value: "64"}]
        command: [vllm, serve, meta-llama/Llama-3.1-8B]
        args: ["--tensor-parallel-size=2", "--max-num-seqs=$(SEATS)"]
"""
BENCHMARK = """
llama-sglang:
  image: lmsysorg/sglang:v0.5.23-cu129
  model: meta-llama/Llama-3.1-8B
  runner: h100
  precision: bf16
  framework: sglang
  seq-len-configs:
  - isl: 1024
    osl: 1024
    search-space:
    - {tp: 2, conc-start: 4, conc-end: 64}
    - {tp: 4, ep: 4, dp-attn: true, conc-list: [128]}
    - spec-decoding: mtp
      conc-list: [6]
      prefill: {num-worker: 1, tp: 4}
      decode: {num-worker: 2, tp: 8}
"""


def line(command: str, **stated: Any) -> Imported:
    return import_plan(ImportRequest("h100-sxm", words=command.split(), **{"engine": "vllm-0.33", **stated}))


def text(source: str, **stated: Any) -> Imported:
    return import_plan(ImportRequest("h100-sxm", source, **stated))


def pool(imported: Imported) -> Pool:
    (only,) = imported.plan.pools
    return only


def refused(source: str, **stated: Any) -> str:
    with pytest.raises(SimtuneError) as error:
        text(source, **{"engine": "vllm-0.33", **stated})
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize(
    ("command", "engine", "tp", "seats"),
    [
        (f"vllm serve {MODEL} -tp 2 --max-num-seqs=64", "vllm@0.21", 2, 64),
        (f"python3 -m vllm.entrypoints.openai.api_server --model {MODEL} -tp=2 --max_num_seqs 64", "vllm-0.10", 2, 64),
        (f"python -m sglang.launch_server --model-path {MODEL} --tp 2 --max-running-requests 64", "sglang-0.5", 2, 64),
        (f"sglang serve {MODEL} --tensor-parallel-size 2 --max-running-requests 64", "sglang-0.5.23", 2, 64),
        (f"mpirun -n 2 trtllm-serve {MODEL} --tp_size 2 --max_batch_size=64 --backend pytorch", "trtllm-1.2", 2, 64),
        (f"env CUDA_VISIBLE_DEVICES=0 llama-server -hf {MODEL} -np 64 -ngl 99 -sm none", "llamacpp", 1, 64),
        (f"transformers serve {MODEL} --continuous-batching --dtype bfloat16", "transformers", 1, 256),
        (f"docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.11.0 --model {MODEL} -tp 2 --max-num-seqs 64",
         None, 2, 64),
    ],
)  # fmt: skip
def test_a_command_line(command: str, engine: str | None, tp: int, seats: int) -> None:
    imported = line(command, engine=engine)
    assert (imported.plan.model, pool(imported).parallelism.tp) == ("llama-3.1-8b", tp)
    assert pool(imported).batching.max_num_seqs == seats
    assert not [note for note in imported.notes if note.startswith("unknown")]


def test_a_script_with_variables_of_its_own_and_from_outside() -> None:
    variables = {"MODEL": MODEL, "TP": "2", "CONC": "64", "ISL": "1024", "OSL": "1024"}
    imported = text(SCRIPT, engine="vllm-0.12", variables=variables)
    server = pool(imported)
    assert (server.parallelism.tp, server.batching.max_num_seqs, server.max_model_len) == (2, 64, 2068)
    assert (server.async_scheduling, server.kv_cache.prefix_caching) == (True, False)
    del variables["TP"]
    assert "--tensor-parallel-size: TP is not set here; give --env TP=VALUE" in refused(SCRIPT, variables=variables)
    assert "names the model ${MODEL}; give --model" in refused(SCRIPT)


@pytest.mark.parametrize(("source", "release"), [(COMPOSE, "vllm-0.11"), (MANIFEST, "vllm-0.14")])
def test_containers(source: str, release: str) -> None:
    server = pool(text(source))
    assert (server.engine, server.parallelism.tp, server.batching.max_num_seqs) == (release, 2, 64)
    assert server.instances == (2 if source is COMPOSE else 3)


SPREAD = """
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: llm}
spec:
  replicas: 3
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec:
        containers:
        - {name: leader, image: "lmsysorg/sglang:v0.5.4", command: COMMAND}
    workerTemplate:
      spec:
        containers:
        - {name: worker, image: "lmsysorg/sglang:v0.5.4", command: COMMAND}
""".replace(
    "COMMAND",
    f"[python3, -m, sglang.launch_server, --model-path, {MODEL}, --tp, '4', --nnodes, '2', --node-rank, $(RANK)]",
)
"""A server on two nodes, three times; workers run the command of their leader."""
NODES = f"""#!/bin/bash
for rank in 0 1; do
  python3 -m sglang.launch_server --model-path {MODEL} --tp 4 --nnodes 2 --node-rank $rank &
done
"""
RANKS = f"""#!/bin/bash
vllm serve {MODEL} -tp 2 -dp 2 -dpl 1 &
vllm serve {MODEL} -tp 2 -dp 2 -dpl 1 --headless --data-parallel-start-rank 1 &
"""


@pytest.mark.parametrize(
    ("source", "engine", "num_gpus"),
    [(SPREAD, None, 12), (NODES, "sglang-0.5", 4), (RANKS, "vllm-0.24", 4)],
    ids=["LeaderWorkerSet", "node-rank", "headless"],
)
def test_processes_on_further_nodes_are_of_the_server_on_the_first(
    source: str, engine: str | None, num_gpus: int
) -> None:
    imported = text(source, engine=engine)
    assert pool(imported).instances * pool(imported).parallelism.tp == num_gpus
    assert any("further nodes" in note for note in imported.notes)


def test_a_process_on_a_further_node_alone_stands_for_its_server() -> None:
    command = f"python3 -m sglang.launch_server --model-path {MODEL} --tp 4 --nnodes 2 --node-rank 1"
    assert pool(line(command, engine="sglang-0.5")).parallelism.tp == 4


def test_a_shell_in_a_container() -> None:
    shell = MANIFEST.replace("[vllm, serve, meta-llama/Llama-3.1-8B]", "[/bin/sh, -c]").replace(
        '["--tensor-parallel-size=2", "--max-num-seqs=$(SEATS)"]',
        f'["exec vllm serve {MODEL} -tp 2 --max-num-seqs $SEATS"]',
    )
    assert text(shell).plan == text(MANIFEST).plan


def test_a_benchmark_config() -> None:
    assert "has 3 points; give --entry with one of llama-sglang:1 (1024 in, 1024 out, tp 2)" in refused(
        BENCHMARK, engine=None
    )
    assert "did you mean llama-sglang" in refused(BENCHMARK, entry="lama-sglang")
    assert pool(text(BENCHMARK, entry="llama-sglang:1")).parallelism.tp == 2
    second = text(BENCHMARK, entry="llama-sglang:2", model="mixtral-8x7b")
    cut = pool(second).parallelism
    assert (cut.tp, cut.attention_dp, cut.expert_parallel, pool(second).engine) == (1, 4, True, "sglang-0.5.23")
    assert "--spec-decoding: is not simulated; it changes how many tokens are drafted" in refused(
        BENCHMARK, entry="llama-sglang:3", engine=None
    )
    apart = text(BENCHMARK, entry="llama-sglang:3", lenient=True).plan
    assert [(p.role, p.instances, p.parallelism.tp) for p in apart.pools] == [("prefill", 1, 4), ("decode", 2, 8)]


def test_every_option_is_read_ignored_refused_or_unknown() -> None:
    command = f"vllm serve {MODEL} --port 1 --host x --frobnicate 3 --max-num-seq 4 --seed 1"
    notes = line(command).notes
    assert "ignored: --port, --host: addresses, names and access of the server" in notes
    assert "unknown: --frobnicate, --max-num-seq, did you mean max-num-seqs?" in notes
    assert line(command).text.startswith("# ignored: ")


def test_what_cannot_be_simulated_is_refused_by_name() -> None:
    command = f"vllm serve {MODEL} --fully-sharded-loras --cpu-offload-gb 4"
    message = refused(command)
    assert "line:1: --fully-sharded-loras: is not simulated; it changes the weights of a step, by adapters" in message
    assert "--cpu-offload-gb" in message
    notes = line(command, lenient=True).notes
    assert "not simulated: --cpu-offload-gb: it changes which weights lie in host memory" in notes


@pytest.mark.parametrize("family", READERS)
def test_no_option_is_in_two_tables(family: str) -> None:
    reader = READERS[family]
    tables = (set(reader.table), set(IGNORED[family]), set(REFUSED[family]))
    assert not tables[0] & tables[1]
    assert not tables[0] & tables[2]
    assert not tables[1] & tables[2]
    assert not set(reader.special) & (tables[1] | tables[2])


def test_groups_of_ranks() -> None:
    experts = "deepseek-v3"
    vllm = pool(line("vllm serve x -dp 8 -ep", model=experts)).parallelism
    assert (vllm.tp, vllm.attention_dp, vllm.expert_parallel) == (1, 8, True)
    dense = line(f"vllm serve {MODEL} -dp 4")
    assert (pool(dense).instances, pool(dense).parallelism.attention_dp) == (4, 1)
    assert "assumed: --data-parallel-size 4 of a model without experts makes 4 instances for each server" in dense.notes
    server = "python -m sglang.launch_server --model-path x --tp 8 --dp 2"
    assert pool(line(server, model=experts, engine="sglang")).instances == 2
    attention = pool(line(f"{server} --enable-dp-attention", model=experts, engine="sglang"))
    assert (attention.parallelism.tp, attention.parallelism.attention_dp, attention.instances) == (4, 2, 1)
    trt = pool(line("trtllm-serve x --tp_size 8 --ep_size 8 --enable_attention_dp", model=experts, engine="trtllm"))
    assert (trt.parallelism.tp, trt.parallelism.attention_dp, trt.parallelism.expert_parallel) == (1, 8, True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("echo hello\n", "starts no server of an engine that simtune reads"),
        ("", "starts no server"),
        (f"vllm serve {MODEL} --max-num-seqs many", ":1: --max-num-seqs: 'many' is no whole number"),
        (f"\n\nvllm serve {MODEL} --gpu-memory-utilization nan", ":3: --gpu-memory-utilization: 'nan' is no number"),
        (f"vllm serve {MODEL} --kv-cache-dtype int3", "no such KV cache is simulated; it can be auto, fp8"),
        (f"vllm serve {MODEL} --speculative-config '{{'", "--speculative-config: not valid JSON"),
        (f"vllm serve {MODEL} --tensor-parallel-size 99999999999999999999", "is no whole number"),
        (f"vllm serve {MODEL} --max-num-seqs 0", "pools.0.batching.max_num_seqs"),
        (f"vllm serve {MODEL} --config /etc/passwd", "no such file in a file that is imported with it"),
        (f"vllm serve {MODEL}\nsglang serve {MODEL}", ":2: starts sglang beside vllm"),
        (f"sglang serve {MODEL}", "is of vllm, and command line starts sglang"),
        (f"if x; then vllm serve {MODEL}; else vllm serve other; fi", "is started under a condition that is not known"),
        ("services: [1, 2]\n", "is no compose file"),
        ("services: {a: {command: vllm serve 'x}}\n", "a quoted text has no end"),
        ("services: {a: {command: [vllm}}\n", "not valid YAML"),
        ("a: &a [*a]\n", "contains itself"),
        ("- 1\n- 2\n", "starts no server"),
        ("---\n" * 200, "more than 100 documents"),
        ("${A" * 50_000, "has no end"),
        ("$(" * 50_000, "has no end"),
        ("${A:-" * 3_000 + "}" * 3_000, "defaults are nested deeper"),
        ("x" * (1 << 21), "is longer than"),
    ],
)  # fmt: skip
def test_hostile_texts_get_one_message(source: str, message: str) -> None:
    assert message in refused(source)


def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "outside.yaml").write_text("max-num-seqs: 3\n")
    for name in ("../outside.yaml", str(tmp_path / "outside.yaml"), "missing.yaml"):
        source = f"vllm serve {MODEL} --config {name}"
        assert "no such file in the folder" in refused(source, folder=tmp_path / "inner", file="a.sh")
    (tmp_path / "inner" / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    assert "no such file" in refused(f"vllm serve {MODEL} --config link.yaml", folder=tmp_path / "inner")
    source = f"vllm serve {MODEL} --config outside.yaml"
    assert pool(text(source, folder=tmp_path, engine="vllm-0.33")).batching.max_num_seqs == 3


@pytest.mark.parametrize(
    ("command", "engine", "message"),
    [
        (
            "sglang serve x --schedule-conservativeness much",
            "sglang",
            "--schedule-conservativeness: 'much' is no number",
        ),
        ("sglang serve x --dp 2 --enable-dp-attention", "sglang", "2 groups do not divide 1 ranks"),
        ('trtllm-serve x --cuda_graph_config {"max_batch_size":"a"}', "trtllm", "'a' is no whole number"),
        ('trtllm-serve x --attention_dp_config {"enable_balance":"so"}', "trtllm", "'so' is neither true nor false"),
    ],
)
def test_values_of_several_options_are_checked(command: str, engine: str, message: str) -> None:
    with pytest.raises(SimtuneError, match=message):
        line(command, engine=engine, model="llama-3.1-8b")


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"engine": None}, "which release of vllm runs is not in it; give --engine vllm@RELEASE, or one of vllm-0.10"),
        ({"hardware": None}, "no launch line states the card; give --hardware NAME"),
        ({"model": None}, "did you mean llama-3.1-8b?; give --model NAME"),
    ],
)
def test_what_is_not_stated_is_asked_for(stated: dict[str, Any], message: str) -> None:
    request = {"hardware": "h100-sxm", "engine": "vllm-0.33", "model": "llama-3.1-8b", **stated}
    with pytest.raises(SimtuneError) as error:
        import_plan(ImportRequest(words=["vllm", "serve", "org/Llama-3.1-8B"], **request))
    assert message in str(error.value)


def lora_of(command: str, engine: str = "vllm-0.33") -> Lora:
    lora = pool(line(command, engine=engine)).lora
    assert lora is not None
    return lora


def test_an_acceptance_that_is_not_there_is_refused() -> None:
    drafts = "--speculative-config.method ngram --speculative-config.num_speculative_tokens 4"
    with pytest.raises(SimtuneError, match="no acceptance is called 'ngram'"):
        line(f"vllm serve {MODEL} {drafts}", acceptance="ngram")


def test_slots_for_adapters_are_read() -> None:
    serve = f"vllm serve {MODEL} --enable-lora"
    usual = lora_of(serve)
    assert (usual.rank, usual.slots, usual.host_slots, usual.targets) == (16, 1, None, "all")
    read = lora_of(f"{serve} --max-loras 4 --max-lora-rank 64 --max-cpu-loras 40 --lora-modules a=/x b=/y")
    assert (read.rank, read.slots, read.host_slots) == (64, 4, 40)
    assert lora_of(f"{serve} --lora-target-modules q_proj k_proj v_proj o_proj").targets == "attention"
    assert lora_of(f"{serve} --lora-target-modules qkv_proj o_proj").targets == "attention"
    assert "which matrices adapters change" in refused(f"{serve} --lora-target-modules q_proj")
    assert "--max-lora-rank: 24: no such rank is simulated; it can be 1, 8" in refused(f"{serve} --max-lora-rank 24")
    without = line(f"vllm serve {MODEL} --max-loras 4")
    assert without.plan.pools[0].lora is None
    assert "ignored: --max-loras: there are no adapters without enable-lora" in without.notes


def test_slots_for_adapters_of_sglang_are_read() -> None:
    launch = f"python -m sglang.launch_server --model-path {MODEL}"
    options = "--lora-paths a=/x --max-lora-rank 32 --max-loaded-loras 9 --lora-target-modules all"
    read = lora_of(f"{launch} {options}", "sglang-0.5.23")
    assert (read.rank, read.slots, read.host_slots, read.targets) == (32, 8, 9, "all")
    assert "the rank of the adapters is not known here; give --max-lora-rank" in refused(
        f"{launch} --enable-lora", engine="sglang-0.5.23"
    )


def test_the_encoder_of_a_model_that_states_one() -> None:
    """For another model only its text is served here."""
    shown = line("vllm serve Qwen/Qwen2.5-VL-7B-Instruct --mm-encoder-tp-mode data --disable-chunked-mm-input")
    assert shown.plan.pools[0].encoder == Encoder(tp_mode="data", disable_chunked_mm_input=True)
    assert line("vllm serve Qwen/Qwen2.5-VL-7B-Instruct").plan.pools[0].encoder is None
    served = "vllm serve Qwen/Qwen2.5-VL-7B-Instruct"
    limited = line(f'{served} --limit-mm-per-prompt {{"image":{{"count":4}},"video":0}}')
    assert limited.plan.pools[0].encoder == Encoder(limit_per_prompt=MediaLimits(image=4, video=0))
    sized = line(f'{served} --mm-processor-kwargs {{"max_pixels":1003520}}')
    assert any("set model.vision.sizing.max_pixels=1003520" in note for note in sized.notes)
    with pytest.raises(SpecError, match="expected counts of image, video, audio, not smell: 3"):
        line(f'{served} --limit-mm-per-prompt {{"smell":3}}')
    text = line("vllm serve meta-llama/Llama-3.1-8B --mm-encoder-tp-mode data")
    assert text.plan.pools[0].encoder is None
    assert any("states no vision encoder" in note for note in text.notes)
