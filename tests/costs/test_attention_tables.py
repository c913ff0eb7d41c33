"""Readers of AIConfigurator's tables of attention in all its kinds, on rows written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.costs.tables import Tables, read_tables
from simtune.costs.tables.aiconfigurator_attention import FORMATS
from simtune.errors import SpecError

SOFTWARE = "framework,version,device,"
BLOCK = SOFTWARE + (
    "op_name,kernel_source,model,mla_dtype,kv_cache_dtype,gemm_type,num_heads,batch_size,isl,tp_size,step,latency"
)
KERNEL = SOFTWARE + "op_name,mla_dtype,kv_cache_dtype,num_heads,batch_size,isl,tp_size,step,latency"
PRODUCTS = SOFTWARE + "op_name,bmm_dtype,num_tokens,num_heads,latency"
ENCODER = SOFTWARE + "op_name,batch_size,isl,num_heads,head_dim,attn_dtype,latency"
DELTA = SOFTWARE + (
    "op_name,kernel_source,phase,batch_size,seq_len,num_k_heads,head_k_dim,num_v_heads,head_v_dim,d_conv,latency"
)
MAMBA = SOFTWARE + "op_name,kernel_source,phase,batch_size,seq_len,d_state,d_conv,nheads,head_dim,n_groups,latency"
V = "VLLM,1.0,X1,"


def read(folder: Path, *lines: str) -> Tables:
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_tables([path])


def only(found: Tables, key: str) -> tuple[dict[str, list[float]], list[float]]:
    table = found.operators[key]
    return {name: column.tolist() for name, column in table.shape.items()}, table.seconds.tolist()


def test_blocks_take_their_sizes_from_the_model(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        BLOCK,
        V + "mla_context_module,A,deepseek-ai/DeepSeek-V3,bfloat16,bfloat16,bfloat16,16,2,512,1,128,3",
        V + "mla_generation_module,A,deepseek-ai/DeepSeek-V3,bfloat16,fp8,fp8_block,128,4,1,1,1023,0.5",
    )
    shape, seconds = only(found, "mla_context_block.bf16")
    assert seconds == [3e-3]
    sizes = {"hidden": [7168], "q_rank": [1536], "latent": [512], "rope": [64], "nope": [128], "v_dim": [128]}
    assert shape == {"batch": [2], "tokens": [512], "context": [640], "heads": [16], **sizes}
    shape, seconds = only(found, "mla_decode_block.fp8_block.kv-fp8")
    assert shape == {"batch": [4], "context": [1024], "heads": [128], **sizes}
    assert seconds == [0.5e-3]
    assert found.notes == []


def test_sparse_blocks_that_skip_the_indexer_have_none(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        BLOCK,
        V + "dsa_context_module,A,deepseek-ai/DeepSeek-V3.2,bfloat16,bfloat16,nvfp4,16,2,512,1,0,3",
        V + "dsa_generation_module,A,zai-org/GLM-5,bfloat16,bfloat16,bfloat16,16,2,1,1,99,1",
        V + "dsa_generation_module_skip_indexer,A,zai-org/GLM-5.2-FP8,bfloat16,bfloat16,bfloat16,8,2,1,1,99,1",
    )
    context, _ = only(found, "dsa_context_block.nvfp4.kv-bf16")
    assert (context["index_heads"], context["index_dim"], context["topk"]) == ([64], [128], [2048])
    decode, _ = only(found, "dsa_decode_block.bf16")
    assert sorted(decode["index_heads"]) == [0, 32]
    assert set(decode["hidden"]) == {6144}
    assert (decode["nope"], decode["v_dim"]) == ([192, 192], [256, 256])
    assert "tokens" not in decode
    assert not found.operators["dsa_decode_block.bf16"].left_out


def test_a_block_of_a_model_nobody_knows_belongs_to_no_operator(tmp_path: Path) -> None:
    row = ",bfloat16,bfloat16,bfloat16,16,2,512,1,0,3"
    found = read(
        tmp_path,
        BLOCK,
        V + "mla_context_module,A,deepseek-ai/DeepSeek-V3" + row,
        V + "mla_context_module,A,nobody/Unknown" + row,
        V + "kda_context_module,A,deepseek-ai/DeepSeek-V3" + row,
        V + "mla_context_module,A,deepseek-ai/DeepSeek-V3,bfloat16,bfloat16,int3,16,2,512,1,0,3",
    )
    assert len(found.operators["mla_context_block.bf16"]) == 1
    assert found.notes == [
        "table.csv: 2 rows belong to no operator: unknown op_name, phase, kernel or model",
        "table.csv: 1 rows belong to no operator: gemm_type int3, kv_cache_dtype bfloat16",
    ]


def test_latent_kernels_alone(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        KERNEL,
        V + "mla_context,bfloat16,fp8,16,2,512,8,0,3",
        V + "mla_context,bfloat16,fp8,16,2,512,8,64,3",
        V + "mla_generation,bfloat16,bfloat16,16,4,1,8,1023,0.5",
    )
    table = found.operators["mla_prefill.bf16.kv-fp8"]
    assert table.left_out == {"after a cached past": 1}
    prefill, _ = only(found, "mla_prefill.bf16.kv-fp8")
    assert prefill == {"batch": [2], "tokens": [512], "heads": [16], "qk_dim": [192], "v_dim": [128]}
    decode, _ = only(found, "mla_decode.bf16")
    assert decode == {"batch": [4], "context": [1024], "heads": [16], "latent": [512], "rope": [64]}


def test_absorbing_products_before_and_behind_attention(tmp_path: Path) -> None:
    found = read(tmp_path, PRODUCTS, V + "mla_gen_pre,bfloat16,8,16,1", V + "mla_gen_post,bfloat16,9,16,2")
    shape, seconds = only(found, "mla_products.bf16")
    assert shape == {"tokens": [8, 9], "heads": [16, 16], "n": [512, 128], "k": [128, 512]}
    assert seconds == [1e-3, 2e-3]


def test_encoders_are_told_from_decoders_by_what_they_lack(tmp_path: Path) -> None:
    found = read(tmp_path, ENCODER, V + "encoder_attention,2,576,16,72,bfloat16,0.25")
    shape, seconds = only(found, "encoder_attention.bf16")
    assert shape == {"batch": [2], "tokens": [576], "heads": [16], "head_dim": [72]}
    assert seconds == [0.25e-3]


def test_delta_nets_are_a_rule_and_a_convolution(tmp_path: Path) -> None:
    sizes = "4,128,8,64,4"
    found = read(
        tmp_path,
        DELTA,
        V + f"gdn,chunk_gated_delta_rule_triton,context,2,300,{sizes},1",
        V + f"gdn,fused_recurrent_gated_delta_rule_packed_decode,generation,5,1,{sizes},2",
        V + f"gdn,causal_conv1d_fn,context,2,300,{sizes},3",
        V + f"gdn,causal_conv1d_update,generation,5,1,{sizes},4",
        V + f"gdn,another_kernel,generation,5,1,{sizes},4",
    )
    heads = {"heads": [8], "key_heads": [4], "key_dim": [128], "value_dim": [64]}
    assert only(found, "delta_prefill.bf16.kv-fp32") == ({"batch": [2], "tokens": [300], **heads}, [1e-3])
    assert only(found, "delta_decode.bf16.kv-fp32") == ({"batch": [5], **heads}, [2e-3])
    channels = 2 * 4 * 128 + 8 * 64
    shape = {"batch": [2], "tokens": [300], "channels": [channels], "width": [4]}
    assert only(found, "conv_prefill.bf16") == (shape, [3e-3])
    assert only(found, "conv_decode.bf16") == ({"batch": [5], "channels": [channels], "width": [4]}, [4e-3])
    assert found.notes == ["table.csv: 1 rows belong to no operator: unknown op_name, phase, kernel or model"]


def test_mamba_convolves_heads_and_groups(tmp_path: Path) -> None:
    found = read(tmp_path, MAMBA, V + "mamba2,causal_conv1d_fn,context,2,300,128,4,64,64,8,1")
    shape, _ = only(found, "conv_prefill.bf16")
    assert shape["channels"] == [64 * 64 + 2 * 8 * 128]


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="column is missing") as error:
        read(tmp_path, PRODUCTS.replace("num_heads", "heads"), V + "mla_gen_pre,bfloat16,8,16,1")
    assert "num_heads" in str(error.value)


def test_every_format_has_a_reader_of_its_own() -> None:
    assert len(set(FORMATS.values())) == len(FORMATS)


def softmax(kernel: str, batch: int, latency_ms: float, head_dim: int = 128, window: int = 0) -> str:
    return V + f"generation_attention,{kernel},bfloat16,bfloat16,{batch},1,63,8,1,{head_dim},{window},{latency_ms}"


def test_where_kernels_share_shapes_the_rarer_one_is_left_out(tmp_path: Path) -> None:
    """All of its rows of that head_dim, those on shapes of its own too; not where it is the only one, and a window of
    the context's length is no shape without one."""
    found = read(
        tmp_path,
        SOFTWARE + "op_name,kernel_source,attn_dtype,kv_cache_dtype,batch_size,isl,step,num_heads,num_key_value_heads,"
        "head_dim,window_size,latency",
        *(softmax("common", batch, batch) for batch in (1, 2, 3)),
        *(softmax("rare", batch, 100) for batch in (3, 4)),
        softmax("rare", 5, 5, head_dim=192),
        softmax("rare", 1, 7, window=32),
    )
    table = found.operators["decode_attention.bf16"]
    assert table.left_out == {"another kernel stands for the shape": 2}
    assert sorted(table.seconds) == pytest.approx([1e-3, 2e-3, 3e-3, 5e-3, 7e-3])
