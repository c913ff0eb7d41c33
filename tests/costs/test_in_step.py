"""Inside an engine's step keys, values and states come from memory; transfers need the facts that a fit knew."""

from __future__ import annotations

import numpy as np
import pytest

from simtune.costs.device_transfer import transfer
from simtune.costs.iteration import StepModel, StepWork
from simtune.costs.operators import OPERATORS, Chip, Setting
from simtune.costs.predict import Profile
from simtune.errors import UsageError
from simtune.specs.catalog import load_hardware, load_model, names
from simtune.specs.hardware import Facts
from simtune.specs.pool import Batching, Pool

SHAPE = {"batch": 8.0, "context": 1024.0, "heads": 32.0, "kv_heads": 8.0, "head_dim": 128.0, "window": 1e9}


@pytest.mark.parametrize("card", ["rtx-pro-6000", "l40s", "h100-sxm"])
def test_a_step_reads_its_keys_and_values_from_memory(card: str) -> None:
    """32 layers read 8 sequences of 1,024 tokens, 33.5 MB a layer: each fits the cache, all of them do not."""
    hardware, model = load_hardware(card), load_model("llama-3.1-8b")
    pool = Pool(
        name="p",
        role="mixed",
        hardware=card,
        instances=1,
        batching=Batching(max_num_seqs=64, max_num_batched_tokens=2048),
    )
    steps = StepModel(model, hardware, pool)
    for decodes in (8, 32):
        attention_s = steps.breakdown(StepWork(decodes, decodes * 1024, (), decodes))["decode_attention"]
        assert attention_s > 32 * decodes * 1024 * 2 * 8 * 128 * 2 / hardware.device.memory_bytes_per_s
    table, step = (Profile(hardware, in_step=inside).predictor("decode_attention", "bf16") for inside in (False, True))
    assert step.seconds(**SHAPE) > 1.05 * table.seconds(**SHAPE), "a table times one batch again and again"


def test_a_device_whose_cache_is_not_known_is_the_same_in_a_step() -> None:
    hardware = load_hardware("h100-sxm")
    unknown = hardware.device.model_copy(update={"cache_bytes": None})
    plain = hardware.model_copy(update={"device": unknown}).with_arrays(hardware.arrays)
    table, step = (Profile(plain, in_step=inside).predictor("decode_attention", "bf16") for inside in (False, True))
    assert step.seconds(**SHAPE) == table.seconds(**SHAPE)


def test_an_exponential_takes_half_as_long_on_sm_103() -> None:
    """4 (head_dim + X) flops for each query and key that are computed: X is 64, and 32 there."""
    shape = {"batch": 1, "tokens": 4096, "context": 4096, "heads": 8, "kv_heads": 8, "head_dim": 128, "window": 4096}
    x = {name: np.array([float(value)]) for name, value in shape.items()}
    form = OPERATORS["prefill_attention"]
    x = {name: x[name] for name in form.shape}
    flops = [
        float(form.terms(x, Setting.of(148, "bf16", None, Chip(architecture))).flops[0])
        for architecture in ("sm_100", "sm_103")
    ]
    assert flops[1] / flops[0] == pytest.approx((128 + 32) / (128 + 64), rel=0.01)


def test_a_transfer_between_facts_with_and_without_a_field_is_refused() -> None:
    source = load_hardware("h100-sxm")
    for name in ("cache_bytes", "architecture"):
        without = source.device.model_copy(update={name: None})
        lacking = Facts(name="lacking", engine=source.engine, device=without, links=source.links)
        with pytest.raises(UsageError, match=f"h100-sxm was fitted with device.{name}; add it to the facts"):
            transfer(source, lacking)
        unknown = source.model_copy(update={"device": without}).with_arrays(source.arrays)
        own = Facts(name="own", engine=source.engine, device=source.device, links=source.links)
        with pytest.raises(UsageError, match=f"was fitted without device.{name}, which own has; leave it out"):
            transfer(unknown, own)


def test_every_gpu_of_tables_says_how_large_its_cache_is() -> None:
    """Operands of simtune's own measurements rotate through more memory than a cache holds."""
    for name in names("hardware"):
        device = load_hardware(name).device
        assert (device.cache_bytes is None) == ("simtune measured" in device.source), name
