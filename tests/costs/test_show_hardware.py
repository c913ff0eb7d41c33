"""`simtune show` of a hardware profile, in words and as a page."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from simtune.cli.show import show
from simtune.costs.operators import OPERATORS
from simtune.errors import UsageError
from simtune.report.hardware_page import error_figure, fits, headline, line_figure, rates, render
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Hardware


@pytest.fixture(scope="module")
def a100() -> Hardware:
    return load_hardware("a100-sxm-80g")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(show, list(arguments))


def test_words_name_facts_errors_intervals_and_provenance() -> None:
    printed = run("a100-sxm-80g").stdout
    for words in ("sm_80", "2.04 TB/s", "NVLink 3", "2.00 USD (an example", "1.21 ms a step"):
        assert words in printed
    assert "unseen (n, k)" in printed
    assert re.search(r"gemm\.bf16 .* × or ÷ 1\.\d\d .* \d+\.\d%/\d+\.\d%", printed)
    assert re.search(r"source: AIConfigurator .*gemm_perf.* \(Apache-2\.0\)", printed)
    assert re.search(r"gemm\.bf16: [\d,]+ rows read, [\d,]+ used", printed)


def test_a_transferred_profile_says_whose_fit_it_is() -> None:
    printed = run("l4").stdout
    assert "transferred" in printed
    assert "transferred from l40s within one architecture" in printed


def test_lines_stay_inside_the_box_and_the_band_around_them(a100: Hardware) -> None:
    for fit in fits(a100):
        low, high = a100.operators[fit.key].box[fit.along]
        for line in fit.lines:
            x, seconds, below, above = (np.array(v) for v in line[1:])
            assert low <= x.min() < x.max() <= high, fit.key
            assert (below < seconds).all(), fit.key
            assert (seconds < above).all(), fit.key


def test_every_kind_can_be_drawn(a100: Hardware) -> None:
    """A kind no slice is written for is drawn along its widest parameter."""
    gemm = a100.operators["gemm.bf16"]
    for kind, terms in OPERATORS.items():
        strange = gemm.model_copy(
            update={
                "kind": kind,
                "curves": (),
                "residual": None,
                "joint_box": {},
                "families": (),
                "box": {name: (1.0, 64.0) for name in terms.shape if name != "skew"} | {"tokens": (1.0, 4096.0)}
                if "tokens" in terms.shape
                else dict.fromkeys(terms.shape, (1.0, 64.0)),
            }
        )
        profile = a100.model_copy(update={"operators": {f"{kind}.bf16": strange}})
        (fit,) = fits(profile)
        assert line_figure(fit)["data"], kind


def test_rates_are_shares_of_the_data_sheet(a100: Hardware) -> None:
    found = {rate.key: rate for rate in rates(a100)}
    gemm = found["gemm.bf16"]
    assert gemm.flops == a100.operators["gemm.bf16"].base.flops_per_s / 3.12e14
    assert found["all_gather.bf16"].flops is None
    assert found["all_gather.bf16"].bytes == a100.operators["all_gather.bf16"].base.bytes_per_s / 3e11


def test_errors_are_drawn_where_there_are_any(a100: Hardware) -> None:
    figure = error_figure(a100)
    assert figure is not None
    assert len(figure["data"][0]["y"]) == sum(len(o.hold_out) for o in a100.operators.values())
    silent = {key: o.model_copy(update={"hold_out": ()}) for key, o in a100.operators.items()}
    assert error_figure(a100.model_copy(update={"operators": silent})) is None


def test_the_page_stands_alone_and_is_the_same_each_time(tmp_path: Path, a100: Hardware) -> None:
    page = tmp_path / "page.html"
    assert run("a100-sxm-80g", "--html", str(page)).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert text == render(load_hardware("a100-sxm-80g"))
    assert headline(a100) in text
    without_script = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.search(r'(src|href)="[^#]', without_script), "nothing is loaded from elsewhere"
    for key in a100.operators:
        assert key in without_script
    assert "This device was not measured" not in text
    assert "This device was not measured" in render(load_hardware("b200"))


def test_what_a_profile_names_is_escaped(a100: Hardware) -> None:
    device = a100.device.model_copy(update={"name": "<script>alert(1)</script>"})
    assert "<script>alert(1)" not in render(a100.model_copy(update={"device": device}))


def test_a_page_is_not_overwritten_and_only_of_hardware(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    refused = run("a100-sxm-80g", "--html", str(page))
    assert isinstance(refused.exception, UsageError)
    assert page.read_text() == "mine"
    assert run("a100-sxm-80g", "--html", str(page), "--force").exit_code == 0
    assert isinstance(run("llama-3.1-8b", "--html", str(tmp_path / "b.html")).exception, UsageError)
