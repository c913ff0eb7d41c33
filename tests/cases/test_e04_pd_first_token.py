"""Behind the router that is emitted, the first token of a prefill/decode pair comes from the decode side."""

from __future__ import annotations

from pathlib import Path

import pytest

from simtune.api import load_specs, set_up
from simtune.results.result import Result
from simtune.sim.kv_links import BOOTSTRAP_S

DATA = Path(__file__).parent / "data" / "e04-pd-first-token"


def run(plan: str, *settings: str) -> Result:
    given = {"plan": list(settings)}
    return set_up(load_specs(None, None, str(DATA / "load.yaml"), str(DATA / plan), given)).run()


def test_the_first_token_comes_after_the_cache_has_been_sent_and_a_step_of_the_decode_engine() -> None:
    together, apart = run("together.yaml"), run("apart.yaml")
    sent_s = 250 * 2 * 32 * 8 * 128 * 2 * 16 / 50e9
    step_s = together.tpot_s.mean()
    assert apart.ttft_s.mean() > together.ttft_s.mean() + sent_s + 0.95 * step_s
    assert apart.ttft_s.mean() == pytest.approx(together.ttft_s.mean() + apart.transfer_s.mean() + step_s, rel=0.02)
    assert apart.tpot_s.mean() == pytest.approx(step_s, rel=0.01), "the transfer is not in TPOT"
    parts = sum(getattr(apart, f"{part}_s") for part in ("queue", "prefill", "transfer", "decode"))
    assert parts == pytest.approx(apart.e2el_s)


def test_a_router_that_answers_from_the_prefill_side_can_be_stated() -> None:
    together, apart = run("together.yaml"), run("apart.yaml", "link.first_token=prefill")
    assert apart.ttft_s.tolist() == together.ttft_s.tolist()
    assert apart.tpot_s.mean() > 1.03 * together.tpot_s.mean()


def test_a_token_that_is_sent_along_comes_with_the_cache() -> None:
    first, again = (run("apart.yaml", f"link.first_token={mode}") for mode in ("transfer", "decode"))
    assert first.outcome.first_token.tolist() == first.outcome.transferred.tolist()
    assert (again.ttft_s - first.ttft_s).mean() == pytest.approx(first.tpot_s.mean(), rel=0.05)
    assert first.e2el_s.mean() < again.e2el_s.mean()


def test_sglang_sends_the_token_along_and_runs_of_pages_as_one_piece() -> None:
    engine = [f"pools.{i}.engine=sglang-0.5" for i in range(2)]
    blocks = [f"pools.{i}.kv_cache.block_size=1" for i in range(2)]
    runs, pages = (run("apart.yaml", *engine, *blocks, f"link.merged={merged}") for merged in ("true", "false"))
    default = run("apart.yaml", *engine, *blocks)
    assert default.transfer_s.tolist() == runs.transfer_s.tolist()
    assert default.outcome.first_token.tolist() == default.outcome.transferred.tolist()
    assert pages.transfer_s.mean() > 0.25
    assert runs.transfer_s.mean() == pytest.approx(BOOTSTRAP_S, abs=0.02), "which the instances take to agree on it"
    assert run("apart.yaml", *engine, *blocks, "link.setup_s=0").transfer_s.mean() < 0.02
