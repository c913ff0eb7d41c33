"""Tokens per verification of vLLM with a draft model, measured and predicted. Needs vLLM 0.32; its CPU build will do.

make bench        or        python -m pytest benchmarks/speculation -m benchmark_only -s

A prompt's own step delivers the first token without drafts; the rest of the answer comes from verifications, of which
the last may accept more than is still wanted.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.results import Recorder
from simtune.tuner.drafting import chain
from tests.oracles import chain as exact
from tests.oracles import rigged

pytestmark = [pytest.mark.benchmark_only, pytest.mark.filterwarnings("ignore")]

VOCABULARY, LENGTH, PROMPT, REQUESTS, DRAFTS = 4003, 61, 8, 64, 3
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def run(folder: Path, rig: rigged.RiggedPair, starts: list[int]) -> tuple[list[list[int]], dict[str, int]]:
    """Answers of LENGTH tokens to prompts that end in `starts`, and vLLM's own counts."""
    import vllm  # type: ignore[import-not-found, unused-ignore]

    names = {"target": rigged.llama(rig.target, 128, 2, seed=1), "draft": rigged.llama(rig.draft, 64, 1, seed=2)}
    for name, model in names.items():
        model.save_pretrained(folder / name)
    engine = vllm.LLM(
        model=str(folder / "target"),
        speculative_config={
            "method": "draft_model",
            "model": str(folder / "draft"),
            "num_speculative_tokens": DRAFTS,
        },
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=2048,  # room for all drafts of all requests
        block_size=32,
        disable_log_stats=False,
    )
    rng = np.random.default_rng(0)
    prompts = [[*rng.integers(rigged.RESERVED, VOCABULARY, PROMPT - 1).tolist(), start] for start in starts]
    # Sampling at other temperatures gives wrong tokens with a draft model in vLLM's 0.32 build for CPUs.
    sampling = vllm.SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    own = [m for m in engine.get_metrics() if m.labels.get("model_name") == str(folder / "target")]
    counts = {name: sum(m.value for m in own if m.name == f"vllm:spec_decode_num_{name}") for name in COUNTERS}
    return [list(output.outputs[0].token_ids) for output in outputs], counts


def test_tokens_per_verify(tmp_path: Path, quiet: None, record: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed; its tokens per verification are not compared")
    lines, worst = [], 0.0
    for acceptance in (0.5, 0.7, 0.9):
        rig = rigged.rig(VOCABULARY, acceptance, seed=0)
        starts = rig.starts(LENGTH).tolist()[:REQUESTS]
        begin = time.thread_time()
        answers, counts = run(tmp_path / str(acceptance), rig, starts)
        assert answers == [rig.walk(start, LENGTH).tolist() for start in starts]
        cpu_s = time.thread_time() - begin
        measured = (LENGTH - 1) * len(starts) / counts["drafts"]
        realised = sum(rigged.rounds(rig.agreement(start, LENGTH)[1:], DRAFTS) for start in starts)
        conditional = exact.iid(acceptance, DRAFTS)
        predicted = (LENGTH - 1) / exact.mean_seconds(LENGTH - 1, conditional, draft_s=0, target_s=1)
        uncut = chain.expected_tokens(conditional)
        worst = max(worst, abs(predicted / measured - 1))
        lines.append(
            f"{acceptance:10.2f} {counts['drafts']:9.0f} {realised:9} {measured:9.3f} {predicted:9.3f} "
            f"{predicted / measured - 1:+7.1%} {uncut:9.3f} {uncut / measured - 1:+7.1%} {cpu_s:7.1f}"
        )
        assert counts["drafts"] == realised
        assert counts["draft_tokens"] == DRAFTS * realised
    with capsys.disabled():
        print(f"\n{len(starts)} answers of {LENGTH} tokens, {DRAFTS} draft tokens a round")
        print(f"{'':10} {'verifications':>19} {'tokens per verification':^45}")
        print("acceptance      vLLM agreement      vLLM  cut last     off     whole     off   CPU s")
        print("\n".join(lines))
    record("tokens per verification, worst", 100 * worst, "% off", "lower")
    assert worst <= 0.03
