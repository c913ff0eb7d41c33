"""Files of other kinds that people have at hand are named for what they are, with what can be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Said, call

DATA = Path(__file__).parent / "data" / "f10-wrong-kind"
LLAMA_BENCH = "llama_bench.json: looks like llama-bench's results: it times steps and holds no requests"
ENGINE_LOG = "vllm.log: looks like an engine's log (vLLM): it counts requests and holds none; scrape"


def simulated(file: Path) -> Said:
    return call("simulate", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--workload", file, "-q")


@pytest.mark.parametrize(("name", "said"), [("llama_bench.json", LLAMA_BENCH), ("vllm.log", ENGINE_LOG)])
def test_every_verb_says_what_it_is(name: str, said: str) -> None:
    for result in (call("workload", DATA / name), call("check", DATA / name), simulated(DATA / name)):
        assert result.code == 2
        assert said in result.err
        assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"PAR1\x00\x01", "a Parquet file"),
        ("a.csv", b"PK\x03\x04\x14", "a zip archive or a spreadsheet (.xlsx)"),
        ("a.csv", b"<!DOCTYPE html><html><body>log in</body></html>", "a web page"),
        ("a.jsonl", b'{"n_prompt": 512, "n_gen": 0, "avg_ts": 1.0}\n', "llama-bench's results"),
        ("a.txt", b"[2026-08-01 10:00:00] Decode batch. #running-req: 4, #token: 900", "an engine's log (SGLang)"),
        ("a.json", b'{"avg_latency": 1.0, "latencies": [1.0], "percentiles": {}}', "vllm bench latency's results"),
        ("a.json", b'{"elapsed_time": 1.0, "num_requests": 9, "tokens_per_second": 3}', "vllm bench throughput's"),
    ],
)
def test_more_kinds(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for result in (call("workload", path), simulated(path)):
        assert result.code == 2
        assert f"looks like {said}" in result.err


def test_a_model_given_as_a_load_is_told_from_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    assert "looks like a model's config.json: give it as --model" in simulated(path).err
    assert "num_hidden_layers" in call("check", path).err
