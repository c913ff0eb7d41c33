"""What the time of steps rests on: every call is found, with the share of the step that it stands for."""

from __future__ import annotations

import numpy as np
import pytest

from simtune.costs.basis import StepBasis, WeightedStep
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.predict import DATA_SHEET_LOG_SD, OUTSIDE, Basis, Profile
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.hardware import Hardware, Interval, Provenance
from tests.costs.made_up import hardware, model, moe, pool

FITTED = Provenance(kind="published-tables", source="made up")
DECODES = StepWork(4, 400, (), 4)


def fitted(**log_sd: float) -> Hardware:
    """The made-up device with operators that are fitted, each kind with a log error of its own."""
    device = hardware()
    operators = {
        key: o.model_copy(
            update={
                "provenance": FITTED,
                "interval": Interval(method="split", quantile=1.645, log_sd=log_sd.get(o.kind, 0.1)),
            }
        )
        for key, o in device.operators.items()
    }
    return device.model_copy(update={"operators": operators})


def test_the_shares_are_those_of_the_breakdown() -> None:
    device, small, where = fitted(), model(feed_forward=moe(shared=16)), pool(tp=2)
    for work in (DECODES, StepWork(4, 400, ((0, 30), (16, 20)), 5), StepWork(0, 0, ((0, 64),), 1)):
        parts = StepModel(small, device, where).breakdown(work)
        found = StepBasis(small, device, where).of([WeightedStep(3.0, work)])
        total = sum(parts.values())
        shares = {kind: float(basis.seconds.sum()) / 3.0 for kind, basis in found.items()}
        assert shares == pytest.approx({kind: seconds / total for kind, seconds in parts.items()}, rel=1e-3)


def test_each_kind_has_the_error_of_its_operators() -> None:
    """The head is a product, and a gathering of logits that nobody measured."""
    found = StepBasis(model(), fitted(gemm=0.02, decode_attention=0.3), pool(tp=2)).of([WeightedStep(1.0, DECODES)])
    assert found["gemm"].log_sd == pytest.approx(0.02)
    assert found["decode_attention"].log_sd == pytest.approx(0.3)
    assert 0.02 < found["head"].log_sd < DATA_SHEET_LOG_SD
    assert found["sampling"].log_sd == pytest.approx(DATA_SHEET_LOG_SD)
    assert found["sampling"].seconds[Basis.DATA_SHEET] == found["sampling"].seconds.sum() > 0
    assert found["gemm"].seconds[Basis.INTERPOLATED] == found["gemm"].seconds.sum() > 0


def test_what_is_noted_is_what_the_profile_says_of_its_chip() -> None:
    """The kernels of attention, and with them how sure their times are, follow from the architecture."""
    device, llama = load_hardware("h100-sxm"), load_model("llama-3.1-8b")
    work = StepWork(64, 64 * 1000, (), 64)
    (call,) = {
        call.operator: call
        for call in StepBasis(llama, device, pool()).calls([WeightedStep(1.0, work)])
        if call.kind == "decode_attention"
    }.values()
    said = Profile(device, in_step=True).predictor("decode_attention", "bf16").log_sd(**call.shape)
    assert call.log_sd == pytest.approx(float(said), rel=1e-6)


def test_longer_steps_weigh_more() -> None:
    """The box ends at 100 tokens of context for each decode; half of the time is spent beyond it."""
    device = fitted()
    key = "decode_attention.bf16"
    inside = device.operators[key].model_copy(update={"box": {"context": (1.0, 100.0)}})
    device = device.model_copy(update={"operators": {**device.operators, key: inside}})
    steps = [WeightedStep(1.0, DECODES), WeightedStep(3.0, StepWork(4, 4000, (), 4))]
    alone = [StepBasis(model(), device, pool()).of([step])["decode_attention"] for step in steps]
    both = StepBasis(model(), device, pool()).of(steps)["decode_attention"]
    assert both.seconds == pytest.approx(alone[0].seconds + alone[1].seconds)
    assert alone[0].seconds[Basis.EXTRAPOLATED] == 0 == alone[1].seconds[Basis.INTERPOLATED]
    assert alone[0].log_sd < both.log_sd < alone[1].log_sd


def test_a_chunk_after_a_cached_past_was_never_measured() -> None:
    """It is the difference of two whole prompts, each of them well inside."""
    whole, after = (
        StepBasis(model(), fitted(), pool()).of([WeightedStep(1.0, StepWork(chunks=chunks, num_samples=1))])
        for chunks in (((0, 64),), ((64, 64),))
    )
    assert whole["prefill_attention"].seconds[Basis.EXTRAPOLATED] == 0
    assert after["prefill_attention"].seconds[Basis.INTERPOLATED] == 0
    assert after["prefill_attention"].log_sd == pytest.approx(OUTSIDE * whole["prefill_attention"].log_sd)


def test_drafts_are_verified_at_their_width() -> None:
    """How much longer a wider decode takes is a ratio off the data sheet, unless somebody measured it."""
    device = fitted()
    one, four = (StepBasis(model(), device, pool()).of([WeightedStep(1.0, DECODES, w)]) for w in (1, 4))
    assert np.sum([basis.seconds.sum() for basis in four.values()]) == pytest.approx(1.0)
    assert one["decode_attention"].seconds[Basis.EXTRAPOLATED] == 0
    assert four["decode_attention"].seconds[Basis.INTERPOLATED] == 0
    assert four["decode_attention"].log_sd == pytest.approx(OUTSIDE * one["decode_attention"].log_sd)
    tree = device.operators["decode_attention.bf16"].model_copy(update={"kind": "tree_attention"})
    device = device.model_copy(update={"operators": {**device.operators, "tree_attention.bf16": tree}})
    known = StepBasis(model(), device, pool()).of([WeightedStep(1.0, DECODES, 4)])
    assert known["decode_attention"].seconds[Basis.EXTRAPOLATED] == 0
