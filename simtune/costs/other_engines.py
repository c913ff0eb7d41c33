"""Marks operators whose times are those of another engine's kernels than the engine that a plan names.

A profile of one engine is used for another if that engine's kernels were not measured on the card, and single operators
of a profile are borrowed. Such times stay as they are, are named as another engine's, and get wider intervals. Kernels
of libraries that all engines call, such as NCCL's, and those whose tables name no engine, belong to no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from simtune.costs.device_transfer import transfer, wider
from simtune.costs.releases import (
    EngineRelease,
    engine_release,
    release_profiles,
    with_nearest,
    with_release_marked,
)
from simtune.costs.software import engine_of
from simtune.specs.catalog import engine_family, kernels_of, load_hardware, sister_of
from simtune.specs.hardware import Arrays, Facts, Hardware, Operator
from simtune.specs.preset import EngineFamily
from simtune.specs.references import is_path

OTHER_ENGINE_LOG_SD: dict[str, float] = {
    "all_reduce": 0.34, "conv_decode": 0.47, "conv_prefill": 1.79, "decode_attention": 0.68, "delta_decode": 0.18,
    "delta_prefill": 0.92, "dsa_context_block": 1.05, "dsa_decode_block": 0.58, "encoder_attention": 0.29, "gemm": 0.45,
    "mla_context_block": 0.44, "mla_decode": 0.74, "mla_decode_block": 0.4, "mla_prefill": 0.74, "mla_products": 0.08,
    "moe": 0.47, "prefill_attention": 0.76, "quantise": 1.33,
}  # fmt: skip
"""Log error of taking one engine's kernels for another's, by operator kind: the 70 % quantile, over pairs of engines
and three cards (H100, H200, B200), of the 90 % quantile of |log(ratio of their fitted times)| / 1.645. Found by
benchmarks/costs/test_other_engines.py. What two engines' convolutions differ by is mostly what their tables count."""


def for_engine(
    hardware: Hardware, engine: EngineFamily | None = None, release: EngineRelease | None = None
) -> Hardware:
    """Return the profile with operators of other engines than `engine`, and of other releases than `release`, marked
    and their intervals widened.

    Without an engine it is the one that the profile names; without a release all are those that run.
    """
    named_engine = engine or engine_of(hardware.engine)
    if named_engine is None:
        return hardware
    operators = {key: _for_engine(operator, named_engine, release) for key, operator in hardware.operators.items()}
    if all(operators[key] is operator for key, operator in hardware.operators.items()):
        return hardware
    return hardware.model_copy(update={"operators": operators}).with_arrays(hardware.arrays)


def for_preset(hardware: Hardware, engine: str | None) -> Hardware:
    """Return the profile marked for an engine preset, by name or path (`for_engine`)."""
    return for_engine(hardware, engine_family(engine), engine_release(engine))


def _for_engine(operator: Operator, wanted: EngineFamily, release: EngineRelease | None) -> Operator:
    timed = engine_of(operator.provenance.software)
    if timed == wanted and release is not None:
        return with_release_marked(operator, release)
    if timed is None or timed == wanted or operator.other_engine is not None:
        return operator
    log_sd = OTHER_ENGINE_LOG_SD.get(operator.kind, median(OTHER_ENGINE_LOG_SD.values()))
    return operator.model_copy(
        update={"other_engine": operator.provenance.software, "interval": wider(operator, log_sd)}
    )


def load_kernels(hardware: str, engine: str | None, settings: Sequence[str] = ()) -> Hardware:
    """Return the profile with the kernels of an engine preset if there is one; otherwise those of the engine on a
    sister card, carried over, if the recipes name one; otherwise the card's own with every operator of another engine
    marked. Of each operator that was measured in several releases, the nearest to the preset's is taken.

    `hardware` and `engine` are names or paths; `settings` are keys of the profile as `--set` gives them.
    """
    profile, sister = load_hardware(kernels_of(hardware, engine), settings), sister_of(hardware, engine)
    if sister is not None:
        profile = _with_kernels_of(profile, load_hardware(sister))
    release = engine_release(engine)
    if release is not None and not is_path(hardware):
        profile = with_nearest(profile, release_profiles(hardware, release.family), release)
    return for_engine(profile, engine_family(engine), release)


def _with_kernels_of(profile: Hardware, sister: Hardware) -> Hardware:
    """Return the profile with the operators of a sister card carried over; those of libraries that all engines call,
    and those that the sister lacks, stay."""
    facts = Facts(name=profile.name, engine=sister.engine, device=profile.device, links=profile.links)
    carried = transfer(sister, facts)
    replaced = {
        key: operator
        for key, operator in carried.operators.items()
        if key not in profile.operators or engine_of(operator.provenance.software) is not None
    }
    names = {operator.residual.array for operator in replaced.values() if operator.residual is not None}
    unchanged = {
        o.residual.array for key, o in profile.operators.items() if o.residual is not None and key not in replaced
    }
    arrays = {name: profile.arrays[name] for name in profile.arrays if name.rsplit(".", 1)[0] in unchanged}
    arrays |= {name: carried.arrays[name] for name in carried.arrays if name.rsplit(".", 1)[0] in names}
    operators = dict(sorted((profile.operators | replaced).items()))
    return profile.model_copy(update={"engine": sister.engine, "operators": operators}).with_arrays(Arrays(arrays))
