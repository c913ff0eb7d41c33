"""A study may fix a decode pool that drafts and search the prefill pool beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

import simtune
from simtune.errors import UsageError

STUDY = """schema: simtune/study@1
name: fixed-drafts
model: llama-3.1-8b
hardware: [{profile: h100-sxm, devices: 2}]
workload: chat
slo: {ttft_s: {p90: 1.0}, tpot_s: {p90: 0.05}}
objective: goodput
fixed:
- name: decode
  role: decode
  instances: 1
  hardware: h100-sxm
  batching: {max_num_seqs: 64, max_num_batched_tokens: 2048}
  speculation:
    drafter: {kind: eagle, method: eagle3, checkpoint: a/head, draft_vocab_size: 32000}
    scheme: {kind: chain, tokens: 3}
    acceptance: eagle3-llama-3.1-8b
search:
  layouts: [prefill-decode]
  tp: [1]
  max_num_seqs: [64]
  max_num_batched_tokens: [2048]
  requests: 100
  confirm: {draws: 0}
"""


def test_a_fixed_decode_pool_may_draft(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    tuned = simtune.optimize(str(path), jobs=1)
    assert [pool.spec.speculation is not None for pool in tuned.deployment.pools] == [False, True]
    assert tuned.idle() == {}
    drafted = tuned.result.drafted
    assert drafted.rounds > 0
    assert 0 < drafted.accepted < drafted.drafts


def test_what_its_speculation_names_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace("eagle3-llama-3.1-8b", "of-nobody"))
    with pytest.raises(UsageError, match="study fixed-drafts, pool decode, speculation: no acceptance is called"):
        simtune.optimize(str(path), jobs=1)
