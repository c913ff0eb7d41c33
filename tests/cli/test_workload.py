"""`simtune workload`: what a trace is, cut, and put into a spec that simulates."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import yaml

from tests.cli.conftest import Desk, Said
from tests.specs.test_scrapes import scrape
from tests.workloads.test_servegen import LENGTHS, RATES

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 {9 + i // 120:02}:{i // 2 % 60:02}:{30 * (i % 2):02}.5,{100 + i},{1 + i % 40}\n" for i in range(240)
)


def test_a_trace_is_described_and_fitted(desk: Desk, call: Callable[..., Said]) -> None:
    desk.write("azure.csv", AZURE)
    said = call("workload", "azure.csv", "--out", "load.yaml", "--html", "load.html")
    assert said.code == 0, said
    assert "0.0333 requests/s" in said.out
    spec = yaml.safe_load((desk.folder / "load.yaml").read_text())
    assert spec["requests"] == 240
    page = (desk.folder / "load.html").read_text()
    assert "<script src" not in page
    assert 'id="load-rates"' in page
    assert call("check", "load.yaml").code == 0
    assert "exists; give --force" in desk.refused(call, "workload", "azure.csv", "--out", "load.yaml")


@pytest.mark.parametrize(("file", "name"), [("my bench (1).json", "my-bench-1"), ("\u65e5\u672c.json", "trace")])
def test_files_may_have_any_name(file: str, name: str, desk: Desk, call: Callable[..., Said]) -> None:
    """The name of a spec is made of letters, digits, dots, dashes; that of a file need not be."""
    lists = {"input_lens": [200] * 30, "output_lens": [20] * 30}
    desk.write(file, json.dumps(lists | {"start_times": [0.5 * i for i in range(30)]}))
    said = call("simulate", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", f"./{file}", "--json")
    assert (said.code, said.json["requests"]) == (0, 30)
    assert call("workload", file, "--out", "load.yaml", "--html", "load.html").code == 0
    assert yaml.safe_load((desk.folder / "load.yaml").read_text())["name"] == name


def test_json_without_a_load_is_refused(desk: Desk, call: Callable[..., Said]) -> None:
    desk.write("other.json", json.dumps({"hello": [1, 2]}))
    model = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm")
    refused = desk.refused(call, "simulate", *model, "--workload", "./other.json")
    assert "looks like nothing that a tool known here writes" in refused
    assert "vllm bench serve, aiperf, guidellm" in refused


def test_cuts_are_noted_and_written(desk: Desk, call: Callable[..., Said]) -> None:
    desk.write("azure.csv", AZURE)
    said = call(
        "workload", "azure.csv", "--from", "09:30", "--to", "10:30", "--scale", "2x", "--out", "t.csv", "--json"
    )
    assert (said.code, said.json["requests"], said.json["span_s"]) == (0, 120, 3570 / 2)
    assert said.json["notes"] == [
        "09:30 to 10:30 of 1 days: 120 of 240 requests",
        "rate x 2: 120 of 120 requests",
    ]
    assert len((desk.folder / "t.csv").read_text().splitlines()) == 121
    assert "end the name in .yaml" in desk.refused(call, "workload", "azure.csv", "--out", "t.txt")


def test_benchmark_result_is_simulated_as_recorded(desk: Desk, call: Callable[..., Said]) -> None:
    lists = {"input_lens": [200] * 30, "output_lens": [20] * 30, "errors": [""] * 30}
    totals = {"request_throughput": 2.0, "total_input_tokens": 6000}
    desk.write("bench.json", json.dumps(totals | lists | {"start_times": [0.5 * i for i in range(30)]}))
    model = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm")
    said = call("simulate", *model, "--workload", "bench.json", "--json")
    assert (said.code, said.json["requests"]) == (0, 30)
    cut = call("simulate", *model, "--workload", "bench.json", "--requests", 10)
    assert "note: only the first 10 of 30 requests of bench.json: 4.5 s of 14.5 s" in cut.err
    assert "looks like vllm bench serve" in desk.refused(
        call, "simulate", "--model", "./bench.json", "--hardware", "h100-sxm", "--workload", "chat"
    )


def test_tables_of_servegen_become_a_spec(desk: Desk, call: Callable[..., Said]) -> None:
    (desk.folder / "rates.csv").write_text(RATES)
    (desk.folder / "lengths.csv").write_text(LENGTHS)
    said = call("workload", "rates.csv", "lengths.csv", "--out", "load.yaml")
    assert said.code == 0, said
    assert "3 clients, 4 windows" in said.err
    assert "output tokens, p99" in said.out
    assert desk.simulate(workload="load.yaml").code == 0
    document = call("workload", "rates.csv", "lengths.csv", "--json").json
    assert document["files"] == ["rates.csv", "lengths.csv"]
    assert document["spec"]["arrivals"]["kind"] == "piecewise"
    means = {one["what"]: one for one in document["agreement"]}
    assert means["prompt tokens, mean"]["recorded"] == pytest.approx((9 * 100 + 3 * (0.75 * 500 + 0.25 * 900)) / 12)
    desk.write("azure.csv", AZURE)
    assert (
        "azure.csv: is no table of ServeGen, and others of these files are; read them in separate commands"
        in desk.refused(call, "workload", "rates.csv", "azure.csv")
    )
    assert "without a table of lengths" in desk.refused(call, "workload", "rates.csv")
    assert "which --peak would need" in desk.refused(call, "workload", "rates.csv", "lengths.csv", "--peak", "1m")
    assert "end the name in .yaml" in desk.refused(call, "workload", "rates.csv", "lengths.csv", "--out", "x.csv")


def test_scrapes_of_a_server_become_a_spec_that_simulates(desk: Desk, call: Callable[..., Said]) -> None:
    for count in (50, 250):
        scrape(desk.folder, f"at{count}.prom", [100, 300] * (count // 2), [20] * count)
    asked = ("workload", "at50.prom", "at250.prom")
    assert "with --span 30m, or set --rate" in desk.refused(call, *asked)
    assert "which --peak would need" in desk.refused(call, *asked, "--peak", "1m")
    assert "end the name in .yaml" in desk.refused(call, *asked, "--out", "t.csv")
    said = call(*asked, "--span", "100s", "--out", "load.yaml")
    assert said.code == 0, said
    assert "prompt tokens, mean" in said.out
    assert "TTFT" in said.out
    document = call(*asked, "--span", "100s", "--json").json
    assert document["agreement"][0]["recorded"] == 2.0
    assert document["latencies_s"]["TTFT"]["mean"] == pytest.approx(0.125)
    model = ("--model", "llama-3.1-8b", "--hardware", "h100-sxm")
    assert call("simulate", *model, "--workload", "load.yaml", "--json").json["requests"] == 200
    desk.write("azure.csv", AZURE)
    assert "azure.csv: is no scrape" in desk.refused(call, "workload", "at50.prom", "azure.csv")
    assert "--span goes with scrapes" in desk.refused(call, "workload", "azure.csv", "--span", "1m")
