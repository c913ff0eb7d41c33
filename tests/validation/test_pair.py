"""Prefill and decode apart, stepped one after the other: what each engine is asked, and what comes of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from simtune.cli.profile import profile
from simtune.costs.kv_transfer_times import fit_transfers, read_transfers
from simtune.errors import EngineError, UsageError
from simtune.specs.plan import KvLink, Plan
from simtune.specs.pool import Batching, KvCache, Pool
from simtune.validation.client.relay import KEEP
from simtune.validation.servers import driven_engines, engine_profile
from simtune.validation.servers.driven_engines import Driven, DrivenRequest, DrivenTimes, DriverClock, EngineSize
from simtune.validation.servers.pair import CONNECTOR, EnginePair, summed
from simtune.validation.servers.stepped_vllm import SteppedVllm, check_plan, engine_arguments
from tests.validation.driven_engine import PretendedDriver, tiny
from tests.validation.test_client import stream

SIZE = EngineSize(4, 64, 256, 16)
TOKEN_S = 0.01
REFERENCE_S = 0.5


class Pretended:
    """An engine that answers every request by itself: a prompt takes a millisecond a token, a token TOKEN_S."""

    def __init__(self, size: EngineSize = SIZE, *, loses: bool = False) -> None:
        self.size, self.loses = size, loses
        self.asked: list[list[DrivenRequest]] = []
        self.closed = False

    def facts(self) -> dict[str, Any]:
        return {"engine": "vllm", "version": "0.32.0", "reference_s": REFERENCE_S}

    def run(self, requests: Sequence[DrivenRequest], clock: DriverClock = "steps", seed: int = 0) -> Driven:
        self.asked.append(list(requests))
        return Driven([], [self._times(number, request) for number, request in enumerate(requests)], preemptions=1)

    def _times(self, number: int, request: DrivenRequest) -> DrivenTimes:
        fetched = bool(request.kv and request.kv.get("do_remote_prefill"))
        if fetched and self.loses:
            return DrivenTimes(request.at, np.nan, request.at)
        first = request.at + (TOKEN_S if fetched else 1e-3 * request.prompt_tokens)
        times = tuple(first + TOKEN_S * i for i in range(request.output_tokens))
        kept = {"do_remote_prefill": True, "of": number} if request.kv == KEEP else None
        return DrivenTimes(request.at, first, times[-1], times, kept)

    def close(self) -> None:
        self.closed = True


def pair(**decode: Any) -> EnginePair:
    return EnginePair(Pretended, lambda _: Pretended(**decode))


def test_prompts_on_one_engine_answers_on_the_other_from_when_they_are_done() -> None:
    both = pair()
    requests = [DrivenRequest(0.0, 20, 4, (5, 6)), DrivenRequest(0.5, 30, 1), DrivenRequest(0.7, 40, 3)]
    driven = both.run(requests, "cpu", 3)
    assert isinstance(both.prefill, Pretended)
    assert isinstance(both.decode, Pretended)
    assert [(r.output_tokens, r.kv) for r in both.prefill.asked[-1]] == [(1, KEEP), (1, None), (1, KEEP)]
    coming = both.decode.asked[-1]
    assert [r.at for r in coming] == pytest.approx([0.02, 0.74])
    assert [r.kv for r in coming] == [{"do_remote_prefill": True, "of": 0}, {"do_remote_prefill": True, "of": 2}]
    assert coming[0].prompt == (5, 6)
    first, second, third = driven.requests
    assert first.times == pytest.approx([0.02, 0.02 + 2 * TOKEN_S, 0.02 + 3 * TOKEN_S, 0.02 + 4 * TOKEN_S])
    assert (first.sent, first.finish) == pytest.approx((0.0, 0.02 + 4 * TOKEN_S))
    assert (second.first_token, second.finish, *second.times) == pytest.approx((0.53, 0.53, 0.53))
    assert len(third.times) == 3
    assert driven.preemptions == 2


def test_a_cache_that_does_not_come_is_an_error_and_no_fast_answer() -> None:
    lost = pair(loses=True)
    assert lost.run([DrivenRequest(0.0, 20, 4)]).requests[0].times == ()
    with pytest.raises(EngineError, match="the KV cache did not come"):
        lost.transfers(tiny())


def test_transfers_are_measured_over_all_lengths() -> None:
    measured = pair().transfers(tiny())
    assert len({m.bytes for m in measured}) >= 5
    fit = fit_transfers(measured)
    assert fit.setup_s == pytest.approx(TOKEN_S)
    assert fit.seconds(max(m.bytes for m in measured)) == pytest.approx(TOKEN_S, rel=1e-3)


def test_queues_of_both_count_together() -> None:
    first, second = [(0.0, 1, 0), (2.0, 3, 1), (4.0, 0, 0)], [(1.0, 2, 0), (2.0, 1, 0), (5.0, 0, 0)]
    assert summed(first, second) == [(0, 1, 0), (1, 3, 0), (2, 4, 1), (4, 1, 0), (5, 0, 0)]
    assert summed([], []) == []


class Dying(Pretended):
    """An engine that starts, and ends at the first session."""

    def run(self, requests: Sequence[DrivenRequest], clock: DriverClock = "steps", seed: int = 0) -> Driven:
        raise EngineError("has ended")


def test_both_are_ended_where_they_do_not_get_to_know_each_other() -> None:
    both = Pretended(), Dying()
    with pytest.raises(EngineError, match="has ended"):
        EnginePair(lambda: both[0], lambda _: both[1])
    assert all(engine.closed for engine in both)


def test_both_are_ended_also_where_the_second_does_not_start() -> None:
    both, first = pair(), Pretended()
    both.close()
    assert isinstance(both.prefill, Pretended)
    assert isinstance(both.decode, Pretended)
    assert both.prefill.closed
    assert both.decode.closed

    def fails(reference_s: float | None) -> Pretended:
        raise EngineError("no room")

    with pytest.raises(EngineError, match="no room"):
        EnginePair(lambda: first, fails)
    assert first.closed


def pool(role: str = "mixed", **more: Any) -> Pool:
    settings: dict[str, Any] = {
        "name": role,
        "role": role,
        "hardware": "cpu-x86-1thread",
        "instances": 1,
        "batching": Batching(max_num_seqs=4, max_num_batched_tokens=64),
        "kv_cache": KvCache(num_blocks=64, block_size=16),
        "max_model_len": 256,
        "async_scheduling": False,
    }
    return Pool(**{**settings, **more})


APART = Plan(name="apart", model="tiny", pools=(pool("prefill"), pool("decode")), link=KvLink())


def test_a_plan_with_two_pools_is_run_on_a_pair() -> None:
    started: list[dict[str, Any]] = []

    def make(size: EngineSize, arguments: Any, reference_s: float | None) -> Pretended:
        started.append({**arguments, "reference_s": reference_s})
        return Pretended(size)

    engine, load = SteppedVllm(tiny(), make), stream(5)
    run = engine.run(APART, load, label="light", seed=2)
    engine.close()
    assert [a["kv_transfer_config"] for a in started] == [CONNECTOR, CONNECTOR]
    assert [a["reference_s"] for a in started] == [None, REFERENCE_S], "both go by one gauge"
    assert [r.error for r in run.requests] == [None] * 5
    assert run.values("ttft") == pytest.approx([0.02] * 5)
    assert run.values("e2el") == pytest.approx([0.02 + 8 * TOKEN_S] * 5)
    assert [len(r.times_s or ()) for r in run.requests] == [8] * 5


def test_an_engine_is_told_how_it_drafts_and_caches() -> None:
    scheme = {"kind": "chain", "tokens": 4}
    drafts = {"drafter": {"kind": "ngram", "lookup_max": 3}, "scheme": scheme, "acceptance": "a"}
    drafting = Pool.model_validate({**pool().model_dump(exclude_unset=True), "speculation": drafts}, strict=False)
    told = engine_arguments(drafting)
    assert told["speculative_config"]["num_speculative_tokens"] == 4
    assert told["num_gpu_blocks_override"] == 64
    plain = engine_arguments(pool(kv_cache=KvCache(block_size=16)))
    assert not {"speculative_config", "num_gpu_blocks_override", "kv_transfer_config"} & plain.keys()


def test_requests_whose_cache_is_lost_are_failures() -> None:
    makes: list[Callable[[EngineSize], Pretended]] = [Pretended, lambda size: Pretended(size, loses=True)]
    engine = SteppedVllm(tiny(), lambda size, *_: makes.pop(0)(size))
    run = engine.run(APART, stream(2), label="light")
    assert [r.error for r in run.requests] == ["ended without a token"] * 2


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ((pool("prefill", instances=2), pool("decode")), "several instances of a kind"),
        ((pool("prefill"), pool("decode", async_scheduling=True)), "async_scheduling"),
        ((pool("mixed", max_model_len=None),), "no max_model_len"),
    ],
)
def test_what_a_pair_cannot_run_is_refused(pools: tuple[Pool, ...], said: str) -> None:
    link = KvLink() if len(pools) > 1 else None
    with pytest.raises(UsageError, match=said):
        check_plan(Plan(name="p", model="tiny", pools=pools, link=link))


@pytest.mark.parametrize("options", [(), ("--engine", "torch")])
def test_transfers_are_measured_of_vllm_alone(options: tuple[str, ...], tmp_path: Path) -> None:
    command = ["--model", "llama-3.2-1b", "--transfers", "--out", str(tmp_path / "out"), *options]
    result = CliRunner().invoke(profile, command, standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert "--transfers are between two vLLM engines" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_transfers_are_kept_beside_the_steps_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    def make(engine: str, model: Any, size: EngineSize, **options: Any) -> PretendedDriver | Pretended:
        started.append(options)
        return Pretended(size) if "arguments" in options else PretendedDriver(size)

    monkeypatch.setattr(driven_engines, "driver", make)
    (tmp_path / "tiny.yaml").write_text(tiny().to_yaml())
    sizes = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256")
    command = ("--model", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "out"), "--budget", "20s", *sizes)
    engine = ("--engine", "vllm", "--vllm-python", "some/python", "--transfers")
    shortly = partial(engine_profile.profile_engine, rounds=1)
    monkeypatch.setattr(engine_profile, "profile_engine", shortly)
    done = CliRunner().invoke(profile, [*command, *engine], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    kept = tmp_path / "out" / "transfers.jsonl"
    fit = fit_transfers(read_transfers(kept), str(kept))
    assert fit.setup_s == pytest.approx(TOKEN_S)
    assert f"transfers: {1e3 * fit.setup_s:.2f} ms" in done.stderr
    assert f"wrote {kept}" in done.stderr
    pairs = [options for options in started if "arguments" in options]
    assert [options["arguments"] for options in pairs] == [{"kv_transfer_config": CONNECTOR}] * 2
    assert all(options["python"] == "some/python" and options["reference_s"] == 0.5 for options in pairs)
    before = kept.read_bytes()
    again = CliRunner().invoke(profile, [*command, *engine], catch_exceptions=False)
    assert "transfers:" not in again.stderr
    assert kept.read_bytes() == before


def test_one_engine_has_no_connector() -> None:
    assert "kv_transfer_config" not in engine_arguments(pool())
