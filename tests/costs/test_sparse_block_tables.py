"""Tables of whole blocks of sparse attention, of streams and of DeepEP: readers, and the layers that find the fits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.launches import Launches
from simtune.costs.layers import attention_layer
from simtune.costs.operators import OPERATORS, operator_key
from simtune.costs.predict import Profile
from simtune.costs.selections import block_shape, block_sparse, compressed
from simtune.costs.tables import Tables, read_tables
from simtune.specs import yamlfile
from simtune.specs.hardware import BaseFit, Hardware, Operator, OperatorKind, Provenance
from simtune.specs.hf import from_config
from simtune.specs.model import BlockSparseAttention, CompressedAttention, HyperConnections, Model
from tests.costs.made_up import hardware, model, pool
from tests.costs.test_new_families import CSA, HCA, MSA, POOLED, WINDOW, of
from tests.specs.published.new_families import NEW_FAMILIES

SOFTWARE = "framework,version,device,"
BLOCK = SOFTWARE + (
    "op_name,kernel_source,model,mla_dtype,kv_cache_dtype,gemm_type,num_heads,batch_size,isl,tp_size,step"
)
V = "VLLM,1.0,X1,"
RANKS = 4


def read(folder: Path, *lines: str) -> Tables:
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_tables([path])


def served(name: str) -> Model:
    return from_config(yamlfile.parse(json.dumps(NEW_FAMILIES[name].config), "config.json"), name)


def test_blocks_of_deepseek_v4_are_those_of_the_layers_that_look_them_up(tmp_path: Path) -> None:
    """Rows count the heads of a rank (SGLang) or of the model (others): both are the same block."""
    row = "A,deepseek-ai/DeepSeek-V4-Pro,bfloat16,fp8_e4m3,fp8_block,{},2,512,4,1024,{},3"
    found = read(
        tmp_path,
        BLOCK + ",compress_ratio,latency",
        V + "dsv4_csa_context_module," + row.format(32, 4),
        V + "dsv4_csa_context_module," + row.format(128, 4),
        V + "dsv4_hca_generation_module," + row.format(32, 128),
        V + "dsv4_paged_mqa_logits_module," + row.format(64, 4),
    )
    assert found.notes == [
        "table.csv: 1 rows belong to no operator: unknown op_name or model, or a single kernel of a block"
    ]
    context = found.operators["sparse_context_block.csa.fp8_block.kv-fp8"]
    assert (len(context), context.merged, context.seconds.tolist()) == (1, 1, [3e-3])
    assert (context.shape["tokens"].tolist(), context.shape["context"].tolist()) == ([512], [1536])
    v4 = served("DeepSeek-V4-Pro")
    for variant, kind in (("csa", "sparse_context_block"), ("hca", "sparse_decode_block")):
        table = found.operators[f"{kind}.{variant}.fp8_block.kv-fp8"]
        attention = next(
            group.attention
            for group in v4.layers
            if isinstance(group.attention, CompressedAttention)
            and bool(group.attention.index_topk) == (variant == "csa")
        )
        products = attention_layer(v4, attention, RANKS).products
        expected = block_shape(compressed(attention, attention.heads // RANKS), products)
        assert {name: column.tolist() for name, column in table.shape.items() if name in expected} == {
            name: [value] for name, value in expected.items()
        }


def test_blocks_of_minimax_m3_have_a_kv_head_for_16(tmp_path: Path) -> None:
    row = "msa_context_module,A,MiniMaxAI/MiniMax-M3,bfloat16,fp8,nvfp4,{},2,512,1,0,3"
    found = read(tmp_path, BLOCK + ",latency", *(V + row.format(heads) for heads in (64, 32, 1)))
    table = found.operators["sparse_context_block.msa.nvfp4.kv-fp8"]
    assert table.shape["kv_heads"].tolist() == table.shape["index_heads"].tolist() == [1, 2, 4]
    m3 = served("MiniMax-M3")
    attention = next(group.attention for group in m3.layers if isinstance(group.attention, BlockSparseAttention))
    products = attention_layer(m3, attention, 1).products
    expected = block_shape(block_sparse(attention, 64, 4, 4), products)
    assert {name: table.shape[name].tolist()[-1] for name in expected} == expected


def test_blocks_of_glm_state_their_geometry_and_their_engine(tmp_path: Path) -> None:
    geometry: dict[str, object] = {
        "num_heads": 16,
        "tp_size": 4,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "head_dim": 256,
    }
    geometry |= {"value_head_dim": 256, "hidden_size": 4096, "layer_kind": "sparse_mla", "kv_cache_dtype": "fp8"}
    geometry |= {"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128, "index_pool": 4}
    geometry |= {"projection_quant_mode": "bfloat16", "is_context": True}

    def line(g: dict[str, object]) -> str:
        quoted = json.dumps(g).replace('"', '""')
        return f'"{quoted}",2,1024,512,3,vllm0.31.0|Glm5NextMLAAttention,real_kv'

    found = read(
        tmp_path,
        "geometry,batch_size,prefix,x,latency,kernel_source,kv_seed_regime",
        line(geometry),
        line(geometry | {"is_context": False}),
        line(geometry | {"layer_kind": "kda"}),
    )
    assert found.notes == ["table.csv: 1 rows belong to no operator: another kind of layer"]
    context, decode = (found.operators[f"sparse_{kind}_block.pooled.bf16.kv-fp8"] for kind in ("context", "decode"))
    assert context.engine == "vllm"
    assert (context.shape["tokens"].tolist(), context.shape["context"].tolist()) == ([512], [1536])
    assert decode.shape["context"].tolist() == [1536]
    glm = served("GLM-5.3-Flash")
    attention = next(group.attention for group in glm.layers if group.attention.kind == "mla")
    products = attention_layer(glm, attention, 4).products
    assert context.shape["weights"].tolist() == [sum(n * k for n, k in products)]


def test_delta_rules_by_channel(tmp_path: Path) -> None:
    columns = (
        "op_name,kernel_source,phase,batch_size,seq_len,num_k_heads,head_k_dim,num_v_heads,head_v_dim,d_conv,latency"
    )
    found = read(
        tmp_path,
        SOFTWARE + columns,
        V + "kda,flashkda_fwd,context,2,300,8,128,8,128,4,1",
        V + "kda,fused_recurrent_kda,generation,5,1,8,128,8,128,4,2",
        V + "kda,causal_conv1d_update,generation,5,1,8,128,8,128,4,3",
    )
    assert found.notes == []
    assert found.operators["kda_prefill.bf16.kv-fp32"].shape["tokens"].tolist() == [300]
    assert found.operators["kda_decode.bf16.kv-fp32"].seconds.tolist() == [2e-3]
    assert found.operators["conv_decode.bf16"].seconds.tolist() == [3e-3]


def test_calls_that_are_not_of_the_operator_stand_for_none_of_it(tmp_path: Path) -> None:
    columns = (
        "op_name,kernel_source,phase,batch_size,seq_len,num_k_heads,head_k_dim,num_v_heads,head_v_dim,d_conv,latency"
    )
    older, newer, heads = "SGLang,0.5.16,X1,", "SGLang,0.5.17,X1,", ",8,128,8,128,4,"
    rows_of = {
        "a.csv": (
            older + "kda,causal_conv1d_fn_qkv3,context,2,300" + heads + "9",
            older + "kda,fused_kda_decode_mtp_dspark,verify,5,8" + heads + "7",
            older + "kda,kda_fused_decode,generation,5,1" + heads + "2",
        ),
        "b.csv": (newer + "gdn,causal_conv1d_fn,context,2,300" + heads + "3",),
    }
    for name, rows in rows_of.items():
        (tmp_path / name).write_text("\n".join((SOFTWARE + columns, *rows)) + "\n")
    found = read_tables([tmp_path / "a.csv", tmp_path / "b.csv"]).operators
    decode, convolution = found["kda_decode.bf16.kv-fp32"], found["conv_prefill.bf16"]
    assert decode.seconds.tolist() == [2e-3]
    assert decode.left_out == {"several tokens of a sequence, whose drafts are verified": 1}
    assert (convolution.seconds.tolist(), str(convolution.software)[-6:]) == ([3e-3], "0.5.17")
    assert convolution.left_out == {"three convolutions, of queries, keys and values, in one time": 1}


def test_streams_are_counted_by_sublayer(tmp_path: Path) -> None:
    columns = "op_name,kernel_source,num_tokens,num_sites,hc_mult,hidden_size,latency"
    rows = (V + f"{name},A,8,{sites},4,4096,3" for name, sites in (("pre", 2), ("post", 1), ("expand", 1)))
    found = read(tmp_path, SOFTWARE + columns, *rows)
    assert found.operators["hyper_pre.bf16"].seconds.tolist() == [1.5e-3]
    assert found.operators["hyper_post.bf16"].shape == {"tokens": [8], "streams": [4], "hidden": [4096]}
    assert found.notes == ["table.csv: 1 rows belong to no operator: neither before nor after a sublayer"]


@pytest.mark.parametrize(("device", "ranks"), [("NVIDIA H200", 8), ("NVIDIA GB300", 4)])
def test_deep_ep_dispatches_8_bits_with_low_latency(tmp_path: Path, device: str, ranks: int) -> None:
    start = "sglang,1.0," + device
    shape = "node_num,hidden_size,num_token,num_topk,num_experts"
    found = read(
        tmp_path,
        SOFTWARE + shape + ",combine_avg_t_us,dispatch_avg_t_us",
        start + ",1,2048,16,8,256,20,10",
    )
    dispatch, combine = (found.operators[f"moe_{phase}.low_latency.bf16"] for phase in ("dispatch", "combine"))
    assert (dispatch.seconds.tolist(), combine.seconds.tolist()) == (pytest.approx([1e-5]), pytest.approx([2e-5]))
    assert (dispatch.shape["row_bytes"].tolist(), combine.shape["row_bytes"].tolist()) == ([2112], [4096])
    assert dispatch.shape["ep"].tolist() == [ranks]
    found = read(
        tmp_path,
        SOFTWARE + shape + ",dispatch_sms,dispatch_transmit_us,combine_sms,combine_transmit_us",
        start + ",1,2048,16,8,256,20,30,20,40",
        start + ",1,2048,16,8,256,4,300,4,400",
    )
    slower = found.operators["moe_dispatch.high_throughput.bf16"]
    assert (slower.seconds.tolist(), slower.left_out) == (pytest.approx([3e-5]), {"on other than 20 processors": 1})
    combine = found.operators["moe_combine.high_throughput.bf16"]
    assert combine.seconds.tolist() == pytest.approx([4e-5])
    assert (slower.shape["row_bytes"].tolist(), combine.shape["row_bytes"].tolist()) == ([4096], [4096])


def with_fits(*keys: tuple[OperatorKind, str | None], launch_s: float | None = None) -> Hardware:
    """A profile in which these operators take what their base says, in bf16."""
    base = BaseFit(flops_per_s=1e14, bytes_per_s=1e12, overhead_s=1e-3, block_s=1e-9, overlap_p=2)
    made = hardware()
    fits = {
        operator_key(kind, "bf16", None, variant): Operator(
            kind=kind,
            dtype="bf16",
            variant=variant,
            base=base,
            box=dict.fromkeys(OPERATORS[kind].shape, (1.0, 1000000.0)),
            hold_out=(),
            launch_s=launch_s,
            provenance=Provenance(kind="published-tables", source="made up"),
        )
        for kind, variant in keys
    }
    return made.model_copy(update={"operators": made.operators | fits}).with_arrays(made.arrays)


@pytest.mark.parametrize(("variant", "attention"), [("csa", CSA), ("hca", HCA), ("msa", MSA), ("pooled", POOLED)])
def test_a_measured_block_stands_for_its_products_too(variant: str, attention: CompressedAttention) -> None:
    fitted = with_fits(("sparse_context_block", variant), ("sparse_decode_block", variant), launch_s=5e-3)
    step, plain = (StepModel(of(attention), h, pool()) for h in (fitted, hardware()))
    work = StepWork(4, 4 * 1000, ((0, 512),), 5)
    layers = of(attention).num_layers
    assert step.breakdown(StepWork(4, 4 * 1000, (), 4))["decode_attention"] > 0.9 * layers * 1e-3
    assert step.breakdown(work)["gemm"] <= plain.breakdown(work)["gemm"]
    assert not {key for key in step.estimated if key.startswith("sparse")}
    # no step with prompts is shorter than launching its blocks
    assert step.gpu_s(StepWork(0, 0, ((0, 1),), 1)) >= layers * 5e-3
    assert step.gpu_s(StepWork(1, 10, (), 1)) < layers * 5e-3
    costs = attention_layer(of(attention), attention, 1).costs(Profile(fitted), "bf16", "bf16")
    assert costs.products is not None
    one, three = (
        costs.decode(4, np.array([1000.0]), width) + costs.products(np.array([4.0 * width])) for width in (1, 3)
    )
    assert three[0] >= one[0]


def test_a_window_alone_has_no_table() -> None:
    fitted = with_fits(("sparse_context_block", "csa"), ("sparse_decode_block", "csa"))
    assert "sparse_decode.bf16" in StepModel(of(WINDOW), fitted, pool()).estimated


def test_measured_streams_replace_the_data_sheet() -> None:
    joined = model().model_copy(update={"residual": HyperConnections(streams=4)})
    fitted, work = with_fits(("hyper_pre", None), ("hyper_post", None)), StepWork(8, 8000, (), 8)
    sublayers = sum(group.count * group.sublayers for group in joined.layers)
    longer = StepModel(joined, fitted, pool()).breakdown(work)["elementwise"]
    longer -= StepModel(model(), hardware(), pool()).breakdown(work)["elementwise"]
    assert longer == pytest.approx(2 * sublayers * 1e-3, rel=0.01)


def test_launching_attention_bounds_steps_with_prompts() -> None:
    launches = Launches.of(model(), pool(), 100, 2.0, 0.0, attention_s=0.01)
    assert launches.floors_s == (0.0, 0.02)
