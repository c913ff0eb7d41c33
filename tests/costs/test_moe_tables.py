"""Tables of experts and of the exchange of tokens with them: which rows become which operator."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.costs.operators import OPERATORS
from simtune.costs.operators.moe import DEALT
from simtune.costs.tables import Tables, read_tables
from simtune.costs.tables.aiconfigurator_moe import POWER_LAW
from simtune.errors import SpecError, UsageError

EXPERTS = (
    "framework,version,kernel_source,moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size,"
    "moe_ep_size,distribution,latency"
)
EXCHANGE = (
    "framework,version,device,comm_backend,phase,comm_dtype,ep_size,node_num,hidden_size,topk,num_experts,num_tokens,"
    "sms,latency"
)


def read(folder: Path, *lines: str) -> Tables:
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_tables([path])


def experts(dtype: str = "bfloat16", tokens: int = 16, kernel: str = "cutlass", routing: str = "balanced") -> str:
    return f"V,1,{kernel},{dtype},{tokens},1024,4096,2,8,4,2,{routing},2"


def test_experts_are_sharded_by_width_and_dealt_out(tmp_path: Path) -> None:
    table = read(tmp_path, EXPERTS, experts(), experts(routing="power_law_1.2")).operators["moe.bf16"]
    assert {name: column.tolist() for name, column in table.shape.items()} == {
        "tokens": [16],
        "hidden": [1024],
        "intermediate": [1024],
        "experts_per_token": [2],
        "experts": [8],
        "ep": [2],
        "skew": [DEALT],
    }
    assert table.seconds.tolist() == [2e-3]
    assert table.left_out == {"skewed routing": 1}
    assert table.read == 2


def test_skewed_rows_on_one_rank_stand_for_balanced_ones_where_there_are_none(tmp_path: Path) -> None:
    """By format: the first has only skewed rows, the second has both."""
    alone = experts(routing="power_law_1.2").replace(",4,2,power", ",8,1,power")
    rows = [alone, experts(routing="power_law_1.2"), experts("fp8"), experts("fp8", routing="power_law_1.2")]
    found = read(tmp_path, EXPERTS, *rows).operators
    table = found["moe.bf16"]
    assert (table.shape["skew"].tolist(), table.shape["ep"].tolist()) == ([POWER_LAW], [1])
    assert table.left_out == {"skewed routing over several ranks": 1}
    assert OPERATORS["moe"].box(table.shape)["skew"] == (0.0, POWER_LAW), "routing by chance is inside"
    assert found["moe.fp8"].shape["skew"].tolist() == [DEALT]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", "fp8"),
        ("fp8_block", "fp8_block"),
        ("nvfp4", "nvfp4"),
        ("w4a16_mxfp4", "mxfp4"),
        ("w4a8_mxfp4_mxfp8", "mxfp4_mxfp8"),
        ("int4_wo", "int4"),
    ],
)
def test_every_format_has_an_operator_of_its_own(name: str, dtype: str, tmp_path: Path) -> None:
    found = read(tmp_path, EXPERTS, experts(), experts(name)).operators
    assert list(found) == sorted(["moe.bf16", f"moe.{dtype}"])


def test_a_format_of_no_model_here_is_counted(tmp_path: Path) -> None:
    found = read(tmp_path, EXPERTS, experts(), experts("w4a8"), experts("w4a8"))
    assert found.notes == ["table.csv: 2 rows belong to no operator: moe_dtype w4a8"]


def test_experts_without_a_gate_are_left_out_by_name(tmp_path: Path) -> None:
    table = read(tmp_path, EXPERTS, experts(), experts(kernel="moe_torch_flow_nongated")).operators["moe.bf16"]
    assert table.left_out == {"experts without a gate": 1}
    assert table.merged == 0


@pytest.mark.parametrize(
    ("sizes", "kernel", "why"),
    [
        ("2688,1856,6,128", "cutlass", "experts without a gate"),
        ("2048,2688,22,512", "triton", "experts without a gate"),
        ("7168,2048,8,256", "triton", "a router of groups, whose experts are not dealt out"),
        ("7168,2048,8,256", "vllm_fused_moe", None),
        ("7168,2048,8,256", "moe_torch_flow_cutlass", None),
        ("7168,2048,8,384", "triton", None),
    ],
)
def test_rows_that_are_not_what_columns_say_are_left_out(
    sizes: str, kernel: str, why: str | None, tmp_path: Path
) -> None:
    """Nemotron's by its sizes, DeepSeek-V3's where a layer's own router chose, which knows groups of experts."""
    row = experts(kernel=kernel).replace("1024,4096,2,8", sizes)
    table = read(tmp_path, EXPERTS, experts(), row).operators["moe.bf16"]
    assert table.left_out == ({} if why is None else {why: 1})


def test_of_two_kernels_for_one_shape_one_stands_for_it(tmp_path: Path) -> None:
    """The low-latency one to 128 tokens; where it was not measured the other is kept."""
    rows = [
        *(experts("nvfp4", tokens, kernel) for tokens in (128, 129) for kernel in ("cutlass", "flow_min_latency")),
        experts("nvfp4", 64, "cutlass"),
        experts("bfloat16", 128, "cutlass"),
    ]
    found = read(tmp_path, EXPERTS, *(f"{row[:-1]}{at}" for at, row in enumerate(rows, start=1))).operators
    table = found["moe.nvfp4"]
    assert dict(zip(table.shape["tokens"], table.seconds, strict=True)) == pytest.approx(
        {64: 5e-3, 128: 2e-3, 129: 3e-3}
    )
    assert table.left_out == {"another kernel stands for the shape": 2}
    assert len(found["moe.bf16"]) == 1, "the other format has a low-latency kernel, this one has not"


def exchange(backend: str = "deepep_ll", phase: str = "dispatch", sent: str = "default") -> str:
    return f"V,1,NVIDIA H200,{backend},{phase},{sent},8,1,7168,8,256,64,0,80"


def test_exchanges_are_told_by_phase_and_backend(tmp_path: Path) -> None:
    rows = [exchange(backend, phase) for backend in ("deepep_ll", "deepep_ht") for phase in ("dispatch", "combine")]
    found = read(tmp_path, EXCHANGE, *rows).operators
    assert list(found) == [
        f"moe_{phase}.{backend}.bf16"
        for phase in ("combine", "dispatch")
        for backend in ("high_throughput", "low_latency")
    ]
    table = found["moe_dispatch.low_latency.bf16"]
    assert {name: column.tolist() for name, column in table.shape.items()} == {
        "tokens": [64],
        "row_bytes": [7168 * 2],
        "experts_per_token": [8],
        "experts": [256],
        "ep": [8],
        "nodes": [1],
    }
    assert table.seconds == pytest.approx([80e-6]), "microseconds, unlike all other tables"


def test_other_exchange_kernels_are_counted(tmp_path: Path) -> None:
    other = [exchange("deepep_v2_context"), exchange(sent="fp8"), exchange(phase="notify")]
    found = read(tmp_path, EXCHANGE, exchange(), *other)
    assert len(found.operators) == 1
    assert [note.split(": ", 2)[2] for note in found.notes] == [
        "comm_backend deepep_v2_context, phase dispatch, comm_dtype default",
        "comm_backend deepep_ll, phase dispatch, comm_dtype fp8",
        "comm_backend deepep_ll, phase notify, comm_dtype default",
    ]


def test_tables_that_tell_too_little_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="distribution: column is missing"):
        read(tmp_path, EXPERTS.replace("distribution,", ""), experts().replace("balanced,", ""))
    with pytest.raises(SpecError, match="comm_dtype: column is missing"):
        read(tmp_path, EXCHANGE.replace("comm_dtype,", ""), exchange().replace("default,", ""))
    with pytest.raises(UsageError, match="no table of operator times"):
        read(tmp_path, EXCHANGE, exchange("deepep_v2_context"))


DISPATCHED = EXPERTS.replace("kernel_source", "op_name,kernel_source")


def test_experts_behind_an_exchange_get_the_rows_of_their_rank_or_the_buffer_of_all(tmp_path: Path) -> None:
    """16 experts on 4 ranks, two a token: a token misses a rank if both of its experts are among the twelve others."""

    def row(op_name: str, tokens: int, ms: float, routing: str = "uniform") -> str:
        return f"SGLang,1,{op_name},deepepmoe,fp8_block,{tokens},1024,4096,2,16,1,4,{routing},{ms}"

    found = read(
        tmp_path,
        DISPATCHED,
        row("moe_generation", 60, 2),
        row("moe_generation", 60, 5, "power_law_1.2"),
        row("moe_context", 64, 3),
        row("moe_context", 128, 4),
        row("moe_context", 6400, 30),
    ).operators
    few, many = (found[f"moe.{mode}.fp8_block"] for mode in ("low_latency", "high_throughput"))
    arrived = 1 - 12 * 11 / (16 * 15)
    assert few.shape["tokens"] == pytest.approx([60 * arrived])
    assert few.shape["experts_per_token"] == pytest.approx([2 / 4 / arrived])
    assert (few.seconds.tolist(), few.left_out) == ([2e-3], {"skewed routing": 1})
    assert (many.shape["tokens"].tolist(), many.shape["experts_per_token"].tolist()) == ([6400], [0.5])
    assert (many.seconds.tolist(), many.left_out) == ([3e-2], {"launched by the host": 2})
    assert [table.shape["experts"].tolist() for table in (few, many)] == [[4], [4]]
    assert [table.shape["ep"].tolist() for table in (few, many)] == [[1], [1]]
