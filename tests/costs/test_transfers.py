"""Transfers that were measured: fitted, written and read, and used by a plan with two pools."""

from pathlib import Path

import numpy as np
import pytest

import simtune
from simtune.arrays import Array
from simtune.costs.kv_transfer_times import MeasuredTransfer, fit_transfers, read_transfers, write_transfers
from simtune.errors import SpecError
from simtune.sim.wiring import transfer_terms
from simtune.specs.catalog import load_model
from simtune.specs.plan import KvLink

SIZES = [131072 * blocks for blocks in (1, 2, 4, 8, 16)]


def taken(setup_s: float, rate: float) -> list[MeasuredTransfer]:
    """Three of each size, the last of which was held up."""
    rng = np.random.default_rng(0)
    times = [(size, setup_s + size / rate) for size in SIZES]
    return [MeasuredTransfer(size, s * factor) for size, s in times for factor in (1, 1 + 0.01 * rng.uniform(-1, 1), 9)]


def test_setup_and_rate_are_found_and_hiccups_are_not() -> None:
    fit = fit_transfers(taken(4e-3, 5e8))
    assert fit.setup_s == pytest.approx(4e-3, rel=0.03)
    assert fit.bytes_per_s == pytest.approx(5e8, rel=0.05)
    assert fit.seconds(SIZES[0]) == pytest.approx(4e-3 + SIZES[0] / 5e8, rel=0.02)


def test_times_that_do_not_grow_with_the_size_are_all_setup() -> None:
    fit = fit_transfers([MeasuredTransfer(size, 2e-3) for size in SIZES])
    assert fit.setup_s == pytest.approx(2e-3)
    assert fit.seconds(SIZES[-1]) == pytest.approx(2e-3, rel=1e-5)


def test_a_log_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "transfers.jsonl"
    path.write_text(write_transfers(taken(4e-3, 5e8), model="m"))
    assert read_transfers(path) == taken(4e-3, 5e8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"schema": "simtune/steps@1"}\n', r"transfers\.jsonl:1: schema: must be simtune/transfers@1"),
        ('{"schema": "simtune/transfers@1"}\n{"bytes": 0, "seconds": 1}\n', r"transfers\.jsonl:2: must have bytes"),
        ('{"schema": "simtune/transfers@1"}\n{"bytes": 5, "seconds": "1"}\n', r"transfers\.jsonl:2: must have bytes"),
        ('{"schema": "simtune/transfers@1"}\n{"bytes": true, "seconds": 1}\n', r"transfers\.jsonl:2: must have bytes"),
        ('{"schema": "simtune/transfers@1"}\n{"bytes": 5, "seconds": 1e300}\n', r"transfers\.jsonl:2: must have bytes"),
    ],
)
def test_what_is_no_log_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "transfers.jsonl"
    path.write_text(text)
    with pytest.raises(SpecError, match=said):
        read_transfers(path)


def test_too_few_sizes_are_refused() -> None:
    with pytest.raises(SpecError, match="of 2 sizes; at least 3"):
        fit_transfers([MeasuredTransfer(size, 1e-3) for size in (1, 2)])


PLAN = """\
schema: simtune/plan@1
name: apart
model: llama-3.1-8b
pools:
- name: prefill
  role: prefill
  hardware: h100-sxm
  instances: 1
  batching: {max_num_seqs: 64, max_num_batched_tokens: 4096}
- name: decode
  role: decode
  hardware: h100-sxm
  instances: 1
  batching: {max_num_seqs: 64, max_num_batched_tokens: 4096}
link: {costs: transfers.jsonl}
"""


@pytest.mark.parametrize("link", ["link: {", "links:\n- {from: prefill, to: decode, "])
def test_a_plan_takes_them_from_the_file_beside_it(link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.replace("link: {", link))
    (tmp_path / "transfers.jsonl").write_text(write_transfers(MeasuredTransfer(size, 0.25) for size in SIZES))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def e2el_s() -> Array:
        result = simtune.simulate("chat", plan="../plan.yaml", rate_rps=0.01, requests=12)
        return result.values("e2el")[np.asarray(result.stream.output_tokens) > 1]

    slow = e2el_s()
    (tmp_path / "transfers.jsonl").write_text(write_transfers(MeasuredTransfer(size, 0.05) for size in SIZES))
    assert np.median(slow - e2el_s()) == pytest.approx(0.2, rel=0.05)


def test_what_the_plan_says_itself_goes_before(tmp_path: Path) -> None:
    path = tmp_path / "transfers.jsonl"
    path.write_text(write_transfers(taken(4e-3, 5e8)))
    link = KvLink(costs=str(path), setup_s=1.0)
    terms = transfer_terms([], None, link)  # type: ignore[arg-type]
    assert terms.setup_s == 1.0
    assert terms.bytes_per_s == pytest.approx(5e8, rel=0.05)
    assert terms.block_s == 0.0


def test_pieces_that_the_plan_counts_come_on_top(tmp_path: Path) -> None:
    path = tmp_path / "transfers.jsonl"
    path.write_text(write_transfers(taken(4e-3, 5e8)))
    model = load_model("llama-3.1-8b")
    for packed, pieces in ((True, 1), (False, 2 * model.num_layers)):
        link = KvLink(costs=str(path), descriptor_s=1e-6, packed=packed)
        assert transfer_terms([model], None, link).block_s == pytest.approx(pieces * 1e-6)  # type: ignore[arg-type]
