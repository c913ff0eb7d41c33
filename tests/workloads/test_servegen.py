"""ServeGen's tables become a spec: rates added up by window, lengths weighted by who sends how much."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from simtune.errors import SpecError, UsageError
from simtune.workload.servegen_fit import fit_servegen, is_servegen_file

RATES = """\
client,window_start_s,rate_rps,cv,iat_dist,iat_param1,iat_param2
a,0,3,1,Gamma,1,1
b,0,1,1,Gamma,1,1
a,600,6,1,Gamma,1,1
b,1800,2,1,Weibull,1,1
c,1800,2,1,Weibull,1,1
"""
LENGTHS = """\
client,window_start_s,field,tokens,prob
a,0,input_tokens,100,1
a,0,output_tokens,10,1
b,0,input_tokens,500,0.75
b,0,input_tokens,900,0.25
b,0,output_tokens,40,1
"""


@pytest.fixture
def tables(tmp_path: Path) -> list[Path]:
    return written(tmp_path, RATES, LENGTHS)


def written(folder: Path, rates: str, lengths: str) -> list[Path]:
    (folder / "rates.csv").write_text(rates)
    (folder / "lengths.csv").write_text(lengths)
    return [folder / "rates.csv", folder / "lengths.csv"]


def test_rates_are_added_up_and_windows_without_any_are_pauses(tables: Sequence[Path]) -> None:
    arrivals = fit_servegen(tables, "x").workload.arrivals
    assert arrivals.kind == "piecewise"
    assert [(s.for_s, s.rate_rps) for s in arrivals.segments] == [(600, 4), (600, 6), (600, 0), (600, 4)]


def test_the_first_window_need_not_begin_at_0(tmp_path: Path) -> None:
    later = [
        text.replace(",1800,", ",4200,").replace(",600,", ",3000,").replace(",0,", ",2400,")
        for text in (RATES, LENGTHS)
    ]
    arrivals = fit_servegen(written(tmp_path, later[0], later[1]), "x").workload.arrivals
    assert arrivals.kind == "piecewise"
    assert [s.rate_rps for s in arrivals.segments] == [4, 6, 0, 4]


def test_lengths_weigh_by_the_requests_of_their_clients(tables: Sequence[Path]) -> None:
    load = fit_servegen(tables, "x")
    said = {a.what: a for a in load.agreements}
    # a sends 3 + 6, b 1 + 2; the lengths of c are not known.
    assert said["prompt tokens, mean"].recorded == pytest.approx((9 * 100 + 3 * (0.75 * 500 + 0.25 * 900)) / 12)
    assert said["output tokens, mean"].recorded == pytest.approx((9 * 10 + 3 * 40) / 12)
    assert (said["prompt tokens, p99"].recorded, said["output tokens, p99"].recorded) == (900, 40)
    for a in load.agreements:
        assert a.recorded is not None
        assert a.drawn == pytest.approx(a.recorded, rel=0.05), a.what
    assert "lengths are of 2 of 3 clients" in load.notes


def test_lengths_hold_from_their_window_on_until_the_client_s_next(tmp_path: Path) -> None:
    """a sends 3 in the window at 0 and 6 in that at 600; the lengths of b are known from 600 on, when it sends 2."""
    later = LENGTHS.replace("b,0,", "b,600,") + "a,600,input_tokens,200,1\na,600,output_tokens,20,1\n"
    said = {a.what: a for a in fit_servegen(written(tmp_path, RATES, later), "x").agreements}
    assert said["output tokens, mean"].recorded == pytest.approx((3 * 10 + 6 * 20 + 2 * 40) / 11)
    assert said["prompt tokens, mean"].recorded == pytest.approx((3 * 100 + 6 * 200 + 2 * 600) / 11)


def test_nothing_is_said_of_lengths_that_are_known_of_all(tmp_path: Path) -> None:
    known = LENGTHS + "c,0,input_tokens,100,1\nc,0,output_tokens,10,1\n"
    assert not any("lengths are of" in note for note in fit_servegen(written(tmp_path, RATES, known), "x").notes)


@pytest.mark.parametrize(
    ("rates", "lengths", "said"),
    [
        (RATES.replace("a,600,6", "a,600,often"), LENGTHS, r"rates\.csv:4: rate_rps: .*not 'often'"),
        (
            RATES,
            LENGTHS.replace("b,0,output_tokens", "b,0,sighs"),
            r"lengths\.csv:6: field: must be one of input_tokens",
        ),
        (RATES, LENGTHS.replace("0.25", "-1"), r"lengths\.csv:5: prob: must be a number of 0 or more"),
    ],
)
def test_a_wrong_cell_is_named(rates: str, lengths: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said):
        fit_servegen(written(tmp_path, rates, lengths), "x")


def test_clients_that_send_nothing_are_no_load(tmp_path: Path) -> None:
    silent = RATES.replace(",3,", ",0,").replace(",6,", ",0,").replace("0,2,1,W", "0,0,1,W").replace("b,0,1,", "b,0,0,")
    with pytest.raises(UsageError, match="no client of these tables sends anything: all rates are 0"):
        fit_servegen(written(tmp_path, silent, LENGTHS), "x")


def test_both_tables_are_needed_and_are_known_by_their_columns(tables: Sequence[Path], tmp_path: Path) -> None:
    for file, lacking in zip(tables, ("lengths", "rates"), strict=True):
        with pytest.raises(UsageError, match=f"without a table of {lacking}"):
            fit_servegen([file], "x")
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    assert [is_servegen_file(path) for path in (*tables, tmp_path / "trace.csv", tmp_path)] == [
        True,
        True,
        False,
        False,
    ]


def test_the_published_tables_are_read(data_dir: Path) -> None:
    files = [data_dir / "traces" / f"servegen_m_small_{what}.csv.gz" for what in ("rates", "lengths")]
    load = fit_servegen(files, "m-small")
    assert load.workload.arrivals.kind == "piecewise"
    assert len(load.workload.arrivals.segments) == 14 * 24 * 6
    assert "lengths are of 6 of 43 clients" in load.notes
    for a in load.agreements:
        assert a.recorded is not None
        assert a.drawn == pytest.approx(a.recorded, rel=0.1), a.what
