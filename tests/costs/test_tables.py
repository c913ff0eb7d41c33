"""Readers of published tables, on tiny tables written by hand."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from simtune.costs.tables import read_tables
from simtune.errors import SpecError, UsageError

GEMM = "framework,version,device,gemm_dtype,m,n,k,latency"
ATTENTION = (
    "framework,version,op_name,batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,kv_cache_dtype,"
    "step,window_size,latency"
)
MOE = (
    "framework,version,moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size,moe_ep_size,"
    "distribution,latency"
)
ALL_REDUCE = "framework,version,allreduce_dtype,num_gpus,message_size,latency,backend"
MLP_TIMES = ("input_layernorm", "post_attention_layernorm", "mlp_act", "attn_rope", "add")
MLP = "n_head,n_kv_head,n_embd,n_expanded_embd,use_gated_mlp,num_tokens,num_tensor_parallel_workers," + ",".join(
    f"time_stats.{name}.median" for name in MLP_TIMES
)
HOST = (
    "batch_size,schedule_median,prepare_inputs_launch_median,sampler_launch_median,process_model_outputs_median,"
    "model_execution_e2e_median"
)


def write(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def test_gemm_milliseconds_become_seconds(tmp_path: Path) -> None:
    path = write(tmp_path, "gemm.csv.gz", GEMM, "VLLM,1.0,X,bfloat16,8,64,32,0.25", "VLLM,1.0,X,fp8,8,64,32,0.125")
    operators = read_tables([path]).operators
    assert set(operators) == {"gemm.bf16", "gemm.fp8"}
    table = operators["gemm.bf16"]
    assert {name: column.tolist() for name, column in table.shape.items()} == {"m": [8], "n": [64], "k": [32]}
    assert table.seconds.tolist() == [0.25e-3]
    assert (table.software, table.device, table.origin.licence) == ("VLLM 1.0", "X", "Apache-2.0")


def test_attention_lengths_and_windows(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "attention.csv",
        ATTENTION,
        "V,1,context_attention,2,512,8,4,128,bfloat16,bfloat16,0,128,1",
        "V,1,context_attention,2,512,8,4,128,bfloat16,bfloat16,256,0,1",  # over a cached prefix
        "V,1,generation_attention,3,1,8,4,128,bfloat16,fp8,1023,0,1",
        "V,1,generation_attention,3,1,8,4,128,bfloat16,fp8,63,128,1",
    )
    found = read_tables([path])
    prefill = found.operators["prefill_attention.bf16"]
    assert (prefill.shape["tokens"].tolist(), prefill.shape["window"].tolist()) == ([512], [128])
    decode = found.operators["decode_attention.bf16.kv-fp8"]
    assert decode.shape["context"].tolist() == [64, 1024], "cached tokens and the new one"
    assert decode.shape["window"].tolist() == [64, 1024], "a window longer than the context is none"
    assert found.notes == ["attention.csv: 1 rows left out: prefill over a cached prefix"]


def test_moe_is_sharded_by_width_and_balanced(tmp_path: Path) -> None:
    row = "V,1,bfloat16,16,1024,4096,2,8,4,2"
    path = write(tmp_path, "moe.csv", MOE, f"{row},balanced,2", f"{row},power_law_1.2,3")
    found = read_tables([path])
    table = found.operators["moe.bf16"]
    assert table.shape["intermediate"].tolist() == [1024]
    assert table.shape["ep"].tolist() == [2]
    assert table.seconds.tolist() == [2e-3]
    assert found.notes == ["moe.csv: 1 rows left out: skewed routing"]


def test_all_reduce_counts_elements_and_keeps_graph_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "all_reduce.csv",
        ALL_REDUCE,
        "V,1,bfloat16,4,1024,0.005,vllm_graph",
        "V,1,bfloat16,4,1024,0.030,vllm_eager",
    )
    table = read_tables([path]).operators["all_reduce.bf16"]
    assert (table.shape["bytes"].tolist(), table.seconds.tolist()) == ([2048], [5e-6])


def test_vidur_widths_follow_from_the_model(tmp_path: Path) -> None:
    # 8 heads and 2 KV heads of 16 in 128, feed-forward 512, two ranks, times of 10..50 us
    path = write(tmp_path, "mlp.csv", MLP, "8,2,128,512,True,64,2,0.010,0.020,0.030,0.040,0.050")
    operators = read_tables([path]).operators
    width = {key.split(".")[1]: table.shape["width"].tolist() for key, table in operators.items()}
    assert width == {
        "norm": [2 * 128],
        "activation": [3 * 512 / 2],
        "rope": [2 * (8 / 2 + 2 / 2) * 16],
        "add": [3 * 128],
    }
    norm = operators["elementwise.norm.bf16"]
    assert norm.seconds == pytest.approx([15e-6]), "the two norms measure one shape: their median"
    assert (norm.merged, norm.resolution_s) == (1, 1e-6)
    assert operators["elementwise.add.bf16"].seconds == pytest.approx([50e-6])


def test_host_time_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    gemm = write(tmp_path, "gemm.csv", GEMM, "V,1,X,bfloat16,8,64,32,1")
    host = write(tmp_path, "host.csv", HOST, "8,0.1,0.2,0.3,0.4,99", "16,0.2,0.3,0.4,0.5,99")
    table = read_tables([gemm, host]).host
    assert table is not None
    assert table.num_seqs.tolist() == [8, 16]
    assert table.seconds == pytest.approx([1.0e-3, 1.4e-3])


def test_repeated_shapes_count_once_with_their_median(tmp_path: Path) -> None:
    rows = [f"V,1,X,bfloat16,8,64,32,{latency}" for latency in (1, 2, 900)]
    first = write(tmp_path, "a.csv", GEMM, *rows, "V,1,X,bfloat16,16,64,32,7")
    second = write(tmp_path, "b.csv", GEMM, "V,1,X,bfloat16,8,64,32,4")
    table = read_tables([first, second]).operators["gemm.bf16"]
    assert table.shape["m"].tolist() == [8, 16]
    assert table.seconds == pytest.approx([3e-3, 7e-3])
    assert table.merged == 3
    assert table.files == ("a.csv", "b.csv")


def test_rows_without_a_time_are_counted(tmp_path: Path) -> None:
    rows = [f"V,1,X,bfloat16,{m},64,32,{t}" for m, t in enumerate(("0.0", "-1", "nan", "", "inf", "2"), start=1)]
    table = read_tables([write(tmp_path, "gemm.csv", GEMM, *rows)]).operators["gemm.bf16"]
    assert table.left_out == 5
    assert table.shape["m"].tolist() == [6]


def test_dtypes_without_a_model_are_noted(tmp_path: Path) -> None:
    path = write(tmp_path, "gemm.csv", GEMM, "V,1,X,fp8_block,8,64,32,1", "V,1,X,bfloat16,8,64,32,1")
    found = read_tables([path])
    assert set(found.operators) == {"gemm.bf16"}
    assert found.notes == ["gemm.csv: 1 rows left out: gemm_dtype fp8_block"]


def test_a_folder_is_searched_and_strangers_are_noted(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep", "gemm.csv.gz", GEMM, "V,1,X,bfloat16,8,64,32,1")
    write(tmp_path, "other.csv", "a,b", "1,2")
    write(tmp_path, "notes.txt", "not a table")
    found = read_tables([tmp_path])
    assert set(found.operators) == {"gemm.bf16"}
    assert found.notes == ["other.csv: passed over, not a known table"]


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
        (("a,b", "1,2"), "not a known table"),
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
    with pytest.raises(SpecError, match="cannot be read as a CSV table"):
        read_tables([broken])


def test_a_hundred_thousand_rows(data_dir: Path) -> None:
    path = data_dir / "profiles" / "aiconfigurator" / "h100_sxm" / "vllm_0.19.0_gemm_perf.csv.gz"
    found = read_tables([path])
    assert len(found.operators["gemm.bf16"]) == len(found.operators["gemm.fp8"]) == 35742
    assert np.isfinite(found.operators["gemm.bf16"].seconds).all()
    assert found.notes == [f"{path.name}: 29519 rows left out: gemm_dtype fp8_block"]
