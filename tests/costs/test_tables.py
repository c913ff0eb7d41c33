"""Readers of published tables, on tiny tables written by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simtune.costs.operators import OPERATORS
from simtune.costs.operators.moe import DEALT
from simtune.costs.tables import Table, account, designation, read_tables
from simtune.errors import SpecError, UsageError

GEMM = "framework,version,device,gemm_dtype,m,n,k,latency"
ATTENTION = (
    "framework,version,op_name,batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,kv_cache_dtype,"
    "step,window_size,latency"
)
ALL_REDUCE = "framework,version,allreduce_dtype,num_gpus,message_size,latency,backend"
NCCL = "framework,version,op_name,nccl_dtype,num_gpus,message_size,latency"
MLP_TIMES = (
    "input_layernorm",
    "post_attention_layernorm",
    "mlp_act",
    "attn_rope",
    "add",
    "attn_pre_proj",
    "attn_post_proj",
    "mlp_up_proj",
    "mlp_down_proj",
    "emb",
)
MLP = "n_head,n_kv_head,n_embd,n_expanded_embd,use_gated_mlp,num_tokens,num_tensor_parallel_workers," + ",".join(
    f"time_stats.{name}.median" for name in MLP_TIMES
)
HOST = (
    "batch_size,schedule_median,prepare_inputs_launch_median,sampler_launch_median,process_model_outputs_median,"
    "model_execution_e2e_median"
)
VIDUR_ATTENTION = (
    "time_stats.attn_prefill.median,time_stats.attn_decode.median,n_embd,n_q_head,n_kv_head,block_size,"
    "num_tensor_parallel_workers,batch_size,prefill_chunk_size,kv_cache_size,is_prefill"
)


def write(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def shape_of(table: Table) -> dict[str, list[float]]:
    return {name: column.tolist() for name, column in table.shape.items()}


# AIConfigurator


def test_gemm_milliseconds_become_seconds(tmp_path: Path) -> None:
    path = write(tmp_path, "gemm.csv.gz", GEMM, "VLLM,1.0,X1,bfloat16,8,64,32,0.25", "VLLM,1.0,X1,fp8,8,64,32,0.125")
    operators = read_tables([path]).operators
    assert set(operators) == {"gemm.bf16", "gemm.fp8"}
    table = operators["gemm.bf16"]
    assert shape_of(table) == {"m": [8], "n": [64], "k": [32]}
    assert table.seconds.tolist() == [0.25e-3]
    assert (table.software, table.device, table.origin.licence) == ("VLLM 1.0", "X1", "Apache-2.0")


def test_gemms_of_every_format(tmp_path: Path) -> None:
    rows = [
        f"VLLM,1.0,X1,{name},8,64,32,0.25" for name in ("fp8", "fp8_block", "nvfp4", "int8_wo", "int4_wo", "float16")
    ]
    operators = read_tables([write(tmp_path, "gemm.csv", GEMM, *rows)]).operators
    assert set(operators) == {
        *("gemm.bf16", "gemm.fp8", "gemm.fp8_block", "gemm.nvfp4", "gemm.int8_wo", "gemm.int4"),
    }


def test_who_was_timed_with_scales_that_were_known(tmp_path: Path) -> None:
    for engine, known in (("VLLM", True), ("TRTLLM", False), ("SGLang", False)):
        rows = [f"{engine},1.0,X1,{name},8,64,32,0.25" for name in ("bfloat16", "fp8", "nvfp4")]
        operators = read_tables([write(tmp_path, f"{engine}.csv", GEMM, *rows)]).operators
        assert {key for key, table in operators.items() if table.known_scales} == ({"gemm.fp8"} if known else set())


QUANTISE = "framework,version,op_name,m,k,quant_dtype,latency"


def test_finding_the_scales_is_added_to_quantising_where_shapes_meet(tmp_path: Path) -> None:
    write(
        tmp_path,
        "scale_matrix.csv",
        QUANTISE,
        "VLLM,1,scale_matrix,8,64,fp8,0.002",
        "VLLM,1,scale_matrix,16,64,fp8,0.003",
    )
    write(
        tmp_path,
        "computescale.csv",
        QUANTISE,
        "VLLM,1,compute_scale,8,64,fp8,0.001",
        "VLLM,1,compute_scale,32,64,fp8,0.001",
        "VLLM,1,compute_scale,16,64,fp8,0",
    )
    found = read_tables([tmp_path]).operators
    assert set(found) == {"quantise.fp8", "quantise.static.fp8"}
    dynamic = found["quantise.fp8"]
    assert (dynamic.shape["m"].tolist(), dynamic.seconds.tolist()) == ([8], [pytest.approx(3e-6)])
    assert dynamic.files == ("scale_matrix.csv", "computescale.csv")
    assert account(dynamic) == (
        "3 rows read, 1 used; 1 left out: no positive time; 1 left out: no row of scale_matrix at this shape"
    )
    assert found["quantise.static.fp8"].seconds.tolist() == [2e-6, 3e-6]


def test_differences_that_are_mostly_zero_tell_nothing(tmp_path: Path) -> None:
    zeros = [f"SGLang,1,compute_scale,{m},64,fp8,0" for m in (8, 16, 32)]
    path = write(tmp_path, "s.csv", QUANTISE, "SGLang,1,scale_matrix,8,64,fp8,0.002", *zeros)
    found = read_tables([path])
    assert set(found.operators) == {"quantise.static.fp8"}
    assert found.notes == ["s.csv: 3 rows belong to no operator: compute_scale is zero in 3 of 3 rows"]


def test_scales_without_quantising_belong_to_no_operator(tmp_path: Path) -> None:
    row = "VLLM,1.0,X1,bfloat16,8,64,32,0.25"
    paths = [
        write(tmp_path, "computescale.csv", QUANTISE, "VLLM,1.0,compute_scale,8,64,fp8,0.001"),
        write(tmp_path, "gemm.csv", GEMM, row),
    ]
    found = read_tables(paths)
    assert set(found.operators) == {"gemm.bf16"}
    assert found.notes == ["computescale.csv: 1 rows of fp8 belong to no operator: no scale_matrix beside them"]


def engines(folder: Path) -> list[Path]:
    return [
        write(folder, "vllm.csv", GEMM, "VLLM,1,X1,bfloat16,8,64,32,0.25"),
        write(folder, "sglang.csv", GEMM, "SGLang,2,X1,bfloat16,8,64,32,0.5"),
        write(folder, "nccl.csv", NCCL, "TRTLLM,3,all_gather,half,8,1024,0.02"),
    ]


def test_kernels_of_several_engines_are_not_mixed(tmp_path: Path) -> None:
    engines(tmp_path)
    with pytest.raises(UsageError, match=r"sglang in sglang\.csv, vllm in vllm\.csv; choose one with --engine"):
        read_tables([tmp_path])
    found = read_tables([tmp_path], "sglang")
    assert found.operators["gemm.bf16"].seconds.tolist() == [0.5e-3]
    assert found.operators["all_gather.bf16"].software == "NCCL 3", "which is no engine's"
    assert found.notes == ["vllm.csv: passed over, kernels of vllm"]
    with pytest.raises(UsageError, match=r"no table of trtllm's kernels; the tables are of sglang, vllm"):
        read_tables([tmp_path], "trtllm")
    with pytest.raises(UsageError, match=r"--engine orca: there are tables of vllm, trtllm, sglang"):
        read_tables([tmp_path], "orca")


def test_two_releases_of_one_engine_are_not_merged(tmp_path: Path) -> None:
    old = write(tmp_path, "old.csv", GEMM, "VLLM,1,X1,bfloat16,8,64,32,0.25")
    new = write(tmp_path, "new.csv", GEMM, "VLLM,2,X1,bfloat16,8,64,32,0.5", "VLLM,2,X1,bfloat16,16,64,32,0.5")
    table = read_tables([old, new]).operators["gemm.bf16"]
    assert (table.software, len(table)) == ("VLLM 1", 1)
    assert table.left_out == {"of VLLM 2, since another source given before it has it": 2}


def test_attention_lengths_and_windows(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "attention.csv",
        ATTENTION,
        "V,1,context_attention,2,512,8,4,128,bfloat16,bfloat16,0,128,1",
        "V,1,context_attention,2,512,8,4,128,bfloat16,bfloat16,256,0,1",
        "V,1,generation_attention,3,1,8,4,128,bfloat16,fp8,1023,0,1",
        "V,1,generation_attention,3,1,8,4,128,bfloat16,fp8,63,128,1",
        "V,1,generation_attention,3,1,8,4,128,bfloat16,fp8,127,128,1",
        "V,1,encoder_attention,3,1,8,4,128,bfloat16,fp8,63,128,1",
    )
    found = read_tables([path])
    prefill = found.operators["prefill_attention.bf16"]
    assert prefill.shape["tokens"].tolist() == [512, 512]
    assert prefill.shape["context"].tolist() == [512, 768], "the cached prefix counts as context"
    assert prefill.shape["window"].tolist() == [128, 768]
    decode = found.operators["decode_attention.bf16.kv-fp8"]
    assert decode.shape["context"].tolist() == [64, 1024], "cached tokens and the new one"
    assert decode.shape["window"].tolist() == [128, 1024], "a window is another kernel however long it is"
    assert list(decode.left_out.values()) == [1], "as long as the context it could be either kernel's"
    assert found.notes == ["attention.csv: 1 rows belong to no operator: unknown op_name, phase, kernel or model"]


def test_custom_all_reduce_counts_elements_and_keeps_graph_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "all_reduce.csv",
        ALL_REDUCE,
        "V,1,bfloat16,4,1024,0.005,vllm_graph",
        "V,1,bfloat16,4,1024,0.030,vllm_eager",
    )
    table = read_tables([path]).operators["all_reduce.bf16"]
    assert (table.shape["bytes"].tolist(), table.seconds.tolist()) == ([2048], [5e-6])
    assert account(table) == "2 rows read, 1 used; 1 left out: launched eagerly"


def test_an_engine_that_names_no_backend_was_measured_in_a_graph(tmp_path: Path) -> None:
    """TensorRT-LLM's table."""
    header = ALL_REDUCE.replace("backend", "implementation")
    table = read_tables([write(tmp_path, "all_reduce.csv", header, "T,1,bfloat16,8,512,0.003,trtllm")]).operators
    assert shape_of(table["all_reduce.bf16"]) == {"devices": [8], "bytes": [1024]}


def test_nccl_counts_elements_of_every_dtype(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "nccl.csv",
        NCCL,
        "T,2,all_gather,half,8,1024,0.02",
        "T,2,all_gather,int8,8,2048,0.02",
        "T,2,alltoall,half,2,512,0.01",
        "T,2,reduce_scatter,half,2,512,0.01",
        "T,2,all_reduce,half,2,512,0.01",
        "T,2,broadcast,half,2,512,0.01",
    )
    found = read_tables([path])
    assert set(found.operators) == {
        *("all_gather.bf16", "all_gather.int8", "all_to_all.bf16", "reduce_scatter.bf16"),
        "all_reduce.bf16",  # NCCL's stands in where there is no other
    }
    assert found.operators["all_gather.bf16"].shape["bytes"].tolist() == [2048]
    assert found.operators["all_gather.int8"].shape["bytes"].tolist() == [2048]
    assert found.notes == ["nccl.csv: 1 rows belong to no operator: unknown op_name"]


def test_nccl_stands_beside_the_custom_all_reduce(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", ALL_REDUCE, "V,1,bfloat16,4,1024,0.005,vllm_graph")
    write(tmp_path, "b.csv", NCCL, "T,2,all_reduce,half,4,1024,0.02")
    operators = read_tables([tmp_path]).operators
    assert operators["all_reduce.bf16"].seconds.tolist() == [5e-6]
    assert operators["all_reduce.nccl.bf16"].seconds.tolist() == [20e-6]


@pytest.mark.parametrize("name", ["a100_sxm", "h100_sxm"])
@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "reduce_scatter", "all_reduce"])
def test_equal_bytes_take_equal_time_whatever_the_dtype(name: str, kind: str, data_dir: Path) -> None:
    """What tells that message_size counts elements: taken as bytes, half would be twice as slow as int8."""
    found = read_tables([data_dir / "profiles" / "aiconfigurator" / name / "nccl_2.27.3.csv.gz"]).operators
    half, int8 = found[f"{kind}.bf16"], found[f"{kind}.int8"]
    assert half.shape["bytes"].tolist() == int8.shape["bytes"].tolist()
    large = half.shape["bytes"] >= 1 << 24
    ratio = half.seconds[large] / int8.seconds[large]
    assert 0.9 < np.median(ratio) < 1.1


# Vidur


def test_vidur_widths_follow_from_the_model(tmp_path: Path) -> None:
    # 8 heads and 2 KV heads of 16 in 128, feed-forward 512, two ranks, times of 10..100 us
    times = ",".join(f"{t / 100:.3f}" for t in range(1, 11))
    path = write(tmp_path, "mlp.csv", MLP, f"8,2,128,512,True,64,2,{times}")
    found = read_tables([path])
    width = {key: table.shape["width"].tolist() for key, table in found.operators.items() if "elementwise" in key}
    assert width == {
        "elementwise.norm.bf16": [2 * 128],
        "elementwise.activation.bf16": [3 * 512 / 2],
        "elementwise.rope.bf16": [2 * (8 / 2 + 2 / 2) * 16],
        "elementwise.add.bf16": [3 * 128],
    }
    norm = found.operators["elementwise.norm.bf16"]
    assert norm.seconds == pytest.approx([15e-6]), "the two norms measure one shape: their median"
    assert (norm.merged, norm.resolution_s) == (1, 0), "too few rows to tell how far they were rounded"
    assert norm.conflicts.shapes == 1
    assert norm.conflicts.worst == pytest.approx(2)
    assert found.operators["elementwise.add.bf16"].seconds == pytest.approx([50e-6])
    assert found.notes == ["mlp.csv: 1 rows belong to no operator: no operator for the embedding"]


def test_vidur_loses_a_column_that_holds_no_times_and_keeps_the_rest(tmp_path: Path) -> None:
    times = [f"{t / 100:.3f}" for t in range(1, 11)]
    times[MLP_TIMES.index("add")] = "fast"
    without = MLP.replace("time_stats.attn_rope.median,", "")
    del times[MLP_TIMES.index("attn_rope")]
    found = read_tables([write(tmp_path, "mlp.csv", without, f"8,2,128,512,True,64,2,{','.join(times)}")])
    assert set(found.operators) == {"elementwise.norm.bf16", "elementwise.activation.bf16", "gemm.bf16"}
    assert [note.removeprefix("mlp.csv: 1 rows belong to no operator: ") for note in found.notes][:2] == [
        "time_stats.attn_rope.median: column is missing",
        "time_stats.add.median: 'fast' is not a number (field 11)",
    ]


def test_vidur_projections_are_products(tmp_path: Path) -> None:
    times = ",".join(f"{t / 100:.3f}" for t in range(1, 11))
    gemm = read_tables([write(tmp_path, "mlp.csv", MLP, f"8,2,128,512,True,64,2,{times}")]).operators["gemm.bf16"]
    seconds = {(n, k): t for n, k, t in zip(gemm.shape["n"], gemm.shape["k"], gemm.seconds, strict=True)}
    assert seconds == pytest.approx(
        {
            ((8 / 2 + 2 * 1) * 16, 128): 60e-6,  # queries and one KV head of each kind on a rank
            (128, 128 / 2): 70e-6,
            (2 * 512 / 2, 128): 80e-6,  # gate and up at once
            (128, 512 / 2): 90e-6,
        }
    )
    assert gemm.shape["m"].tolist() == [64] * 4


def test_vidur_attention_tells_prefill_from_decode(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "attention.csv",
        VIDUR_ATTENTION,
        "0.5,,8192,64,8,16,2,1,128,256,True",
        ",0.1,8192,64,8,16,2,4,0,1023,False",
    )
    operators = read_tables([path]).operators
    assert shape_of(operators["prefill_attention.bf16"]) == {
        **{"batch": [1], "tokens": [128], "context": [384], "heads": [32], "kv_heads": [4], "head_dim": [128]},
        "window": [384],
    }
    decode = operators["decode_attention.bf16"]
    assert (decode.shape["batch"].tolist(), decode.shape["context"].tolist()) == ([4], [1024])
    assert decode.seconds == pytest.approx([100e-6])


def test_vidur_collectives_stay_inside_a_node(tmp_path: Path) -> None:
    for kind in ("all_reduce", "send_recv"):
        write(
            tmp_path,
            f"{kind}.csv",
            f"time_stats.{kind}.median,num_workers,size,devices_per_node",
            "0.05,2,2048,2",
            "0.50,2,2048,1",
        )
    operators = read_tables([tmp_path]).operators
    assert shape_of(operators["all_reduce.bf16"]) == {"devices": [2], "bytes": [2048]}
    assert shape_of(operators["send_recv.bf16"]) == {"bytes": [2048]}
    for table in operators.values():
        assert table.seconds.tolist() == [50e-6]
        assert "1 left out: between nodes" in account(table)


def test_host_time_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    gemm = write(tmp_path, "gemm.csv", GEMM, "V,1,X,bfloat16,8,64,32,1")
    host = write(tmp_path, "host.csv", HOST, "8,0.1,0.2,0.3,0.4,99", "16,0.2,0.3,0.4,0.5,99")
    table = read_tables([gemm, host]).host
    assert table is not None
    assert table.num_seqs.tolist() == [8, 16]
    assert table.seconds == pytest.approx([1.0e-3, 1.4e-3])


# LLMServingSim


def test_first_layout_of_llmservingsim_counts_nanoseconds(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "Llama-3.1-70B_tp4_layers.csv",
        "layer_name,input,kv_cache,tp_size,latency(ns)",
        "q_proj,16,0,4,16000",
        "k_proj,16,0,4,8000",
        "act_fn,16,0,4,4000",
        "attn,16,0,4,6000",
        "embedding,16,0,4,3000",
    )
    found = read_tables([path])
    gemm = found.operators["gemm.bf16"]
    assert dict(zip(gemm.shape["n"], gemm.seconds, strict=True)) == pytest.approx({2048: 16e-6, 256: 8e-6})
    assert gemm.shape["k"].tolist() == [8192, 8192]
    assert found.operators["elementwise.activation.bf16"].shape["width"].tolist() == [2 * 28672 / 4]
    attention = found.operators["prefill_attention.bf16"]
    assert (attention.shape["heads"].tolist(), attention.shape["kv_heads"].tolist()) == ([16], [2])
    assert found.notes == [f"{path.name}: 1 rows belong to no operator: no operator for the layer embedding"]


def test_present_layout_of_llmservingsim_takes_the_model_from_its_meta_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        "bf16/meta.yaml",
        "model: meta-llama/Llama-3.1-8B",
        "variant: bf16",
        "gpu: NVIDIA GeForce RTX 4090",
        "vllm_version: 0.19.0",
        "measurement_iterations: 3",
    )
    dense = ("gate_up_proj,8,250.5", "act_fn,8,3", "layernorm,8,4", "final_layernorm,8,5")
    write(tmp_path, "bf16/tp2/dense.csv", "layer,tokens,time_us", *dense)
    write(tmp_path, "bf16/tp2/per_sequence.csv", "layer,sequences,time_us", "lm_head,4,1100", "sampler,4,27")
    write(
        tmp_path,
        "bf16/tp2/attention.csv",
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us",
        "0,0,3,1023,9",
        "128,256,0,0,12",
        "128,256,3,1023,20",
        "128,256,1,15,14",
        "64,256,3,1023,20",
    )
    skew = ("pure,2,320,512,60,66", "mixed,4,320,512,90,99", "pure,2,512,512,60,66")
    write(tmp_path, "bf16/tp2/skew.csv", "regime,n,kv_mean,kv_big,t_mean_us,t_skew_us", *skew)
    found = read_tables([tmp_path])
    gemm = found.operators["gemm.bf16"]
    rows = sorted(zip(gemm.shape["m"], gemm.shape["n"], gemm.shape["k"], gemm.seconds, strict=True))
    assert rows == [(4, 128256 / 2, 4096, pytest.approx(1100e-6)), (8, 14336, 4096, pytest.approx(250.5e-6))]
    assert found.operators["elementwise.activation.bf16"].shape["width"].tolist() == [3 * 14336 / 2]
    assert shape_of(found.operators["decode_attention.bf16"]) == {
        **{"batch": [3], "context": [1024], "heads": [16], "kv_heads": [4], "head_dim": [128], "window": [1024]},
    }
    prefill = found.operators["prefill_attention.bf16"]
    assert (prefill.shape["tokens"].tolist(), prefill.shape["context"].tolist()) == ([128], [384])
    norm = found.operators["elementwise.norm.bf16"]
    widths = dict(zip(norm.shape["width"].tolist(), norm.seconds, strict=True))
    assert widths == pytest.approx({3 * 4096: 4e-6, 4 * 4096: 5e-6}), "one of two norms has a residual to add"
    mixed = found.operators["mixed_attention.bf16"]
    assert shape_of(mixed) == {
        **{"batch": [3], "tokens": [128], "context": [1024], "heads": [16], "kv_heads": [4], "head_dim": [128]},
        "window": [1024],
    }
    assert mixed.seconds == pytest.approx([8e-6]), "of 20 us the chunk alone takes 12"
    assert mixed.left_out == {
        "less than 20% of the time of the chunk they share a kernel with": 1,
        "no row of the same chunk alone": 1,
    }
    imbalance = found.imbalance
    assert imbalance is not None
    assert imbalance.mixed.tolist() == [False, True]
    assert imbalance.blocks.tolist() == [8, 16]
    assert imbalance.excess_tokens.tolist() == [192, 192]
    assert imbalance.balanced_s == pytest.approx([20e-6, 30e-6]), "the table has sums of three iterations"
    assert imbalance.imbalanced_s == pytest.approx([22e-6, 33e-6])
    assert (gemm.device, gemm.software) == ("NVIDIA GeForce RTX 4090", "vLLM 0.19.0, eager")
    assert [note.split(": ", 1) for note in found.notes] == [
        [
            "per_sequence.csv",
            "1 rows belong to no operator: greedy sampling, which says nothing of sampling with a temperature",
        ],
        ["skew.csv", "1 rows belong to no operator: no positive time or no sequence longer than the mean"],
    ]


def test_llmservingsim_times_experts_of_every_tensor_parallelism(tmp_path: Path) -> None:
    write(tmp_path, "bf16/meta.yaml", "model: mistralai/Mixtral-8x7B-v0.1", "variant: bf16", "gpu: X1")
    write(tmp_path, "bf16/tp1/moe.csv", "tokens,activated_experts,time_us", "1,2,50", "3,6,60", "3,5,55", "64,2,70")
    write(tmp_path, "bf16/tp2/moe.csv", "ep,tokens,activated_experts,time_us", "1,1,2,40", "2,8,4,45")
    write(tmp_path, "bf16/tp2/dense.csv", "layer,tokens,time_us", "qkv_proj,8,20", "gate_up_proj,8,99")
    write(tmp_path, "bf16/tp2/mtp.csv", "layer,sequences,time_us", "lm_head,8,20")
    found = read_tables([tmp_path])
    moe = found.operators["moe.bf16"]
    names = ("tokens", "intermediate", "experts_per_token", "experts", "skew")
    rows = sorted(
        zip(*(moe.shape[name].tolist() for name in names), (1e6 * moe.seconds).round(3).tolist(), strict=True)
    )
    assert rows == [
        (1, 7168, 2, 8, DEALT, 40),
        (1, 14336, 2, 8, DEALT, 50),
        (3, 14336, 2, 8, DEALT, 60),
        (3, 14336, 2, 8, 0.0, 55),
        (8, 7168, 1, 4, DEALT, 45),
    ]
    assert moe.left_out == {"as many experts as neither dealing out nor chance wakes": 1}
    assert shape_of(found.operators["gemm.bf16"]) == {"m": [8], "n": [(4096 + 2 * 1024) / 2], "k": [4096]}
    assert set(found.notes) == {
        "dense.csv: 1 rows belong to no operator: no operator for the layer gate_up_proj",
        "mtp.csv: 1 rows belong to no operator: a drafter's layers, whose sizes the model does not determine",
    }


def test_llmservingsim_of_later_releases_tells_how_far_chunks_look_back(tmp_path: Path) -> None:
    write(tmp_path, "bf16/meta.yaml", "model: meta-llama/Llama-3.1-8B", "variant: bf16")
    header = "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us"
    rows = (
        "attention,128,320,0,0,1,12",
        "attention,0,0,3,1023,1,9",
        "attention,0,0,3,1023,4,11",
        "attention,0,0,0,0,1,2",
        "indexer,0,0,3,8,1,9",
    )
    found = read_tables([write(tmp_path, "bf16/tp1/attention.csv", header, *rows)])
    prefill = found.operators["prefill_attention.bf16"]
    assert (prefill.shape["tokens"].tolist(), prefill.shape["context"].tolist()) == ([128], [256 + 128])
    assert found.operators["decode_attention.bf16"].seconds.tolist() == pytest.approx([9e-6])
    assert [table.left_out for table in found.operators.values()] == [{}, {}], "no row is counted twice"
    assert found.notes == [
        "attention.csv: 2 rows belong to no operator: an indexer, or several query tokens a sequence",
        "attention.csv: 1 rows belong to no operator: an empty batch",
    ]


def test_layers_of_nobody_are_refused(tmp_path: Path) -> None:
    rows = ("layer,tokens,time_us", "o_proj,8,250")
    with pytest.raises(SpecError, match=r"whose layers are these\? .*llama-3\.1-8b"):
        read_tables([write(tmp_path, "tp1/dense.csv", *rows)])
    with pytest.raises(SpecError, match=r"on how many ranks\?"):
        read_tables([write(tmp_path, "Llama-3.1-8B_dense.csv", *rows)])
    with pytest.raises(SpecError, match="only models with one kind of layer, of full attention"):
        read_tables([write(tmp_path, "DeepSeek-V3_tp1_dense.csv", *rows)])
    write(tmp_path, "q/meta.yaml", "model: meta-llama/Llama-3.1-8B", "variant: fp8")
    with pytest.raises(SpecError, match=r"meta\.yaml: variant: only bf16 and fp16"):
        read_tables([write(tmp_path, "q/tp1_dense.csv", *rows)])


# simtune's own measurements

HEADER = {"schema": "simtune/measurements@1", "device": "NVIDIA H200", "driver": "570.1", "torch": "2.11.0"}
POINT = {"kind": "gemm", "dtype": "bf16", "shape": {"m": 8, "n": 64, "k": 32}, "seconds": 1e-5, "mad": 1e-8}


def measurements(folder: Path, *lines: dict[str, Any] | str) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path = folder / "measurements.jsonl"
    path.write_text(text)
    return path


def test_own_measurements_are_measured(tmp_path: Path) -> None:
    noisy = POINT | {"shape": {"m": 16, "n": 64, "k": 32}, "mad": 2e-6}
    rope = {
        "kind": "elementwise",
        "dtype": "bf16",
        "variant": "rope",
        "shape": {"rows": 4, "width": 8},
        "seconds": 1e-6,
    }
    path = measurements(tmp_path, HEADER, POINT | {"kernel": "nvjet", "n": 9}, noisy, rope, '{"kind": "ge')
    found = read_tables([path])
    gemm = found.operators["gemm.bf16"]
    assert (gemm.origin.kind, gemm.origin.licence) == ("measured", None)
    assert (gemm.device, gemm.software) == ("NVIDIA H200", "torch 2.11.0, driver 570.1; kernels nvjet")
    assert account(gemm) == "2 rows read, 1 used; 1 left out: spread of more than 5 %"
    assert found.operators["elementwise.rope.bf16"].seconds.tolist() == [1e-6]
    assert found.notes == ["measurements.jsonl: 1 rows belong to no operator: a last line cut short"]


def test_a_line_of_host_times_needs_two_numbers_of_sequences_noisy_or_not(tmp_path: Path) -> None:
    def host(sequences: int, seconds: float, mad: float) -> dict[str, Any]:
        shape = {"sequences": sequences}
        return {"kind": "host", "dtype": "bf16", "shape": shape, "seconds": seconds, "mad": mad}

    alone, noisy, quiet = host(64, 1e-3, 1e-6), host(1, 1e-4, 8e-6), host(4, 2e-4, 1e-6)
    for points, sequences in (((alone, noisy), [1, 64]), ((alone, noisy, quiet), [4, 64])):
        table = read_tables([measurements(tmp_path, HEADER, POINT, *points)]).host
        assert table is not None
        assert sorted(table.num_seqs.tolist()) == sequences


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (({"schema": "simtune/plan@1"},), r"jsonl:1: schema: must be simtune/measurements@1, found 'simtune/plan@1'"),
        (({"schema": "simtune/measurements@1"}, POINT), r"jsonl:1: device: is missing"),
        ((HEADER, "{]", POINT), r"jsonl:2:2: not valid JSON"),
        ((HEADER, POINT | {"kind": "gem"}), r"jsonl:2: kind: "),
        ((HEADER, POINT | {"shape": {"m": 8}}), r"jsonl:2: shape: of gemm must name m, n, k; it names m"),
        ((HEADER, POINT | {"seconds": "fast"}), r"jsonl:2: seconds: must be a valid number"),
    ],
)
def test_malformed_measurements_say_where(tmp_path: Path, lines: tuple[dict[str, Any] | str, ...], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        read_tables([measurements(tmp_path, *lines)])


# Parquet


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    from pyarrow import parquet

    columns = {"gemm_dtype": ["bfloat16", "fp8"], "m": [8, 16], "n": [64, 64], "k": [32, 32], "latency": [0.25, None]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "gemm_perf.parquet")
    found = read_tables([tmp_path])
    assert shape_of(found.operators["gemm.bf16"]) == {"m": [8], "n": [64], "k": [32]}
    assert found.notes == ["gemm.fp8: no row can be used: 1 rows read, 0 used; 1 left out: no positive time"]
    (tmp_path / "gemm_perf.parquet").write_bytes(b"no parquet")
    with pytest.raises(SpecError, match="cannot be read as a Parquet table"):
        read_tables([tmp_path])


@pytest.mark.usefixtures("no_pyarrow")
def test_parquet_without_its_extra_names_it(tmp_path: Path) -> None:
    path = tmp_path / "gemm_perf.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"gemm_perf\.parquet: .*pip install 'simtune\[parquet\]'"):
        read_tables([path])


# What is common


def test_repeated_shapes_count_once_and_contradictions_are_told(tmp_path: Path) -> None:
    rows = [f"V,1,X,bfloat16,8,64,32,{latency}" for latency in (1, 2, 900)]
    steady = [f"V,1,X,bfloat16,16,64,32,{latency}" for latency in (7, 7.5)]
    first = write(tmp_path, "a.csv", GEMM, *rows, *steady)
    second = write(tmp_path, "b.csv", GEMM, "V,1,X,bfloat16,8,64,32,4")
    table = read_tables([first, second]).operators["gemm.bf16"]
    assert table.shape["m"].tolist() == [8, 16]
    assert table.seconds == pytest.approx([3e-3, 7.25e-3])
    assert table.files == ("a.csv", "b.csv")
    assert account(table) == (
        "6 rows read, 2 used; 4 merged with another row of the same shape (median); 1 shapes have times that differ by "
        "more than 10 %, the worst by a factor of 900"
    )


def test_of_two_collections_the_first_given_is_taken(tmp_path: Path) -> None:
    ours = write(tmp_path, "gemm.csv", GEMM, "V,1,X,bfloat16,8,64,32,1")
    times = ",".join(f"{t / 100:.3f}" for t in range(1, 11))
    theirs = write(tmp_path, "mlp.csv", MLP, f"8,2,128,512,True,64,2,{times}")
    first, second = (read_tables(order).operators["gemm.bf16"] for order in ([ours, theirs], [theirs, ours]))
    assert first.origin.name.startswith("AIConfigurator")
    assert account(first).endswith(
        "4 left out: of Vidur (microsoft/vidur), since another source given before it has it"
    )
    assert second.origin.name.startswith("Vidur")
    assert sum(second.left_out.values()) == 1


def test_rows_without_a_time_are_counted(tmp_path: Path) -> None:
    rows = [f"V,1,X,bfloat16,{m},64,32,{t}" for m, t in enumerate(("0.0", "-1", "nan", "", "inf", "2"), start=1)]
    table = read_tables([write(tmp_path, "gemm.csv", GEMM, *rows, "V,1,X,bfloat16,,64,32,1")]).operators["gemm.bf16"]
    assert table.left_out == {"no positive time": 5, "no positive shape": 1}
    assert table.shape["m"].tolist() == [6]
    assert table.read == 7


@pytest.mark.parametrize(
    ("step_us", "halves", "resolution_s"),
    [(1.0, 0, 1e-6), (1.0, 6, 1e-6), (10.0, 0, 1e-5), (0.1, 0, 1e-7), (1.0, 10, 0.0), (0.037, 0, 0.0)],
)
def test_how_far_times_were_rounded_is_measured(
    step_us: float, halves: int, resolution_s: float, tmp_path: Path
) -> None:
    """A median of an even number of rounded times lies between two steps now and then."""
    times = [(m + 3 + (0.537 if m < halves else 0)) * step_us / 1000 for m in range(30)]
    rows = [f"V,1,X,bfloat16,{m + 1},64,32,{time!r}" for m, time in enumerate(times)]
    found = read_tables([write(tmp_path, "a.csv", GEMM, *rows)])
    assert found.operators["gemm.bf16"].resolution_s == resolution_s


def test_rounding_of_published_tables(data_dir: Path) -> None:
    vidur = read_tables([data_dir / "profiles/vidur/a100"]).operators
    assert vidur["gemm.bf16"].resolution_s == vidur["decode_attention.bf16"].resolution_s == 1e-6
    eager = read_tables([data_dir / "profiles/llmservingsim/h100/Llama-3.1-70B_tp4_attention.csv.gz"]).operators
    assert eager["decode_attention.bf16"].resolution_s == 0, "the same layout, not rounded"


def test_dtypes_without_a_model_are_noted(tmp_path: Path) -> None:
    path = write(tmp_path, "gemm.csv", GEMM, "V,1,X,w2a16,8,64,32,1", "V,1,X,bfloat16,8,64,32,1")
    found = read_tables([path])
    assert set(found.operators) == {"gemm.bf16"}
    assert found.notes == ["gemm.csv: 1 rows belong to no operator: gemm_dtype w2a16"]


def test_a_folder_is_searched_and_strangers_are_noted(tmp_path: Path) -> None:
    write(tmp_path, "deep/gemm.csv.gz", GEMM, "V,1,X,bfloat16,8,64,32,1")
    write(tmp_path, "other.csv", "a,b", "1,2")
    write(tmp_path, "notes.txt", "not a table")
    found = read_tables([tmp_path])
    assert set(found.operators) == {"gemm.bf16"}
    assert found.notes == ["other.csv: passed over, not a known table"]


def test_tables_of_two_devices_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", GEMM, "V,1,NVIDIA A100-SXM4-80GB,bfloat16,8,64,32,1")
    write(tmp_path, "b.csv", GEMM, "V,1,NVIDIA H100 80GB HBM3,bfloat16,8,64,32,1")
    with pytest.raises(UsageError, match=r"gemm\.bf16: tables of several devices: .* in a\.csv, .* in b\.csv"):
        read_tables([tmp_path])
    both = write(tmp_path, "c.csv", GEMM, "V,1,NVIDIA A100,bfloat16,8,64,32,1", "V,1,NVIDIA H100,bfloat16,8,64,32,1")
    with pytest.raises(SpecError, match=r"c\.csv: device: holds rows of several devices \(NVIDIA A100, NVIDIA H100\)"):
        read_tables([both])


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 SXM5 80GB", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Intel Xeon", "INTEL XEON"),
        ("h100-80gb", "H100"),
        ("h100-80gb-pcap", "H100 PCAP"),
    ],
)
def test_a_device_is_known_by_its_chip(name: str, chip: str) -> None:
    assert designation(name) == chip


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            (GEMM, "V,1,X,bfloat16,8,64,32,1", "V,1,X,bfloat16,8,many,32,1"),
            r"gemm\.csv:3: n: 'many' is not a number",
        ),
        ((GEMM, "", "V,1,X,bfloat16,8,64,32,fast"), r"gemm\.csv:3: latency: 'fast' is not a number"),
        ((GEMM, "V,1,X,bfloat16,8,64,32"), r"gemm\.csv:2: has 7 values, the header names 8"),
        (("gemm_dtype,m,n,latency", "bfloat16,8,64,1"), r"gemm\.csv:1: k: column is missing"),
        (("gemm_dtype,m,n,k", "bfloat16,8,64,2"), r"gemm\.csv:1: latency: column is missing"),
        (("a,b", "1,2"), r"not a known table: one with the column gemm_dtype \(AIConfigurator\)"),
        ((), "not a known table"),
    ],
)
def test_malformed_tables_say_where(tmp_path: Path, lines: tuple[str, ...], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        read_tables([write(tmp_path, "gemm.csv", *lines)])


def test_unreadable_sources_say_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        read_tables([tmp_path / "absent.csv"])
    with pytest.raises(UsageError, match="no table of operator times"):
        read_tables([tmp_path])
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(b"this is not gzip")
    with pytest.raises(SpecError, match="is not gzip-compressed"):
        read_tables([broken])


def test_a_hundred_thousand_rows(data_dir: Path) -> None:
    path = data_dir / "profiles" / "aiconfigurator" / "h100_sxm" / "vllm_0.19.0_gemm_perf.csv.gz"
    found = read_tables([path])
    assert len(found.operators["gemm.bf16"]) == len(found.operators["gemm.fp8"]) == 35742
    assert np.isfinite(found.operators["gemm.bf16"].seconds).all()
    assert found.operators["gemm.fp8_block"].read == 29519
    assert found.notes == []


@pytest.mark.parametrize("source", ["aiconfigurator/a100_sxm", "vidur/a100", "vidur/h100", "llmservingsim/rtx4090"])
def test_every_row_of_the_published_tables_is_accounted_for(source: str, data_dir: Path) -> None:
    for key, table in read_tables([data_dir / "profiles" / source]).operators.items():
        assert len(table) + table.merged + sum(table.left_out.values()) == table.read
        assert set(table.shape) == set(OPERATORS[table.kind].shape), key
        assert all(np.isfinite(x).all() for x in table.shape.values()), key
