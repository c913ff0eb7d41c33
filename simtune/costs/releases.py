"""Kernels by release of an engine: of each operator, a plan gets the release that is nearest to its engine's.

A profile is fitted on the tables of one release; those of another one on the same card stand in `hwprofiles/releases`.
Kernels of another release than the one that runs are named, and get wider intervals. Only engines whose kernels
published tables name by release have any: vLLM, SGLang and TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from statistics import median
from typing import NamedTuple

from simtune.costs.device_transfer import wider
from simtune.costs.software import Release, engine_of, release_of_software, release_text, releases_in
from simtune.specs.catalog import FOLDERS, load_engine, load_hardware
from simtune.specs.hardware import Arrays, Hardware, Operator
from simtune.specs.preset import NO_ENGINE, EngineFamily

BY_RELEASE: dict[EngineFamily, str] = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
"""Names of the engines whose kernels tables name by release."""

RELEASE_LOG_SD: dict[str, float] = {
    "all_reduce": 0.226, "conv_decode": 0.087, "conv_prefill": 0.047, "decode_attention": 0.022,
    "delta_decode": 0.021, "delta_prefill": 0.021, "dsa_context_block": 0.021, "dsa_decode_block": 0.021,
    "encoder_attention": 0.021, "gemm": 0.046, "hyper_post": 0.021, "hyper_pre": 0.021, "kda_decode": 0.261,
    "kda_prefill": 0.091, "mla_context_block": 0.418, "mla_decode_block": 0.426, "mla_products": 0.131, "moe": 0.166,
    "prefill_attention": 0.021, "quantise": 0.021,
}  # fmt: skip
"""Log error of taking one release's kernels for another's, by operator kind: the 60 % quantile, over profiles of one
release of an engine on tables of another, of what their 90 % intervals lack to hold 90 % of the rows. Both are of one
card, or of two of one architecture, to the second of which the profile is carried over. None is less than 0.021, the
30 % quantile of all kinds on one card: intervals of what is carried over hide less. Found by
benchmarks/costs/test_releases.py."""


class EngineRelease(NamedTuple):
    """Engine that runs, with the releases that its preset stands for."""

    family: EngineFamily
    releases: tuple[Release, ...]

    def runs(self, release: Release) -> bool:
        """True if kernels of this release are those that run, or the release is unknown."""
        return not release or any(release[: len(own_release)] == own_release for own_release in self.releases)

    def distance(self, release: Release) -> tuple[tuple[int, ...], ...]:
        """Return a key by which nearer releases come first; of those equally near, the one that differs least."""
        return min(_distance(own_release, release) for own_release in self.releases)


def _distance(wanted: Release, release: Release) -> tuple[tuple[int, ...], ...]:
    padded = (*release, *(0 for _ in wanted))
    first = tuple(abs(a - b) for a, b in zip(wanted, padded, strict=False))
    # Releases before the wanted one are nearer the later they are, releases after it the earlier they are.
    sign = -1 if release < wanted else 1
    return first, tuple(sign * number for number in release)


def engine_release(engine: str | None) -> EngineRelease | None:
    """Return the release of an engine preset, by name or path; None for no engine, and one without kernels by
    release."""
    if engine is None or engine == NO_ENGINE:
        return None
    preset = load_engine(engine)
    # `vllm@0.31` means that release, whose settings are those of an earlier preset.
    releases = releases_in((preset.asked or "").partition("@")[2]) or releases_in(preset.release)
    return EngineRelease(preset.family, releases) if releases and preset.family in BY_RELEASE else None


def release_profiles(hardware: str, family: EngineFamily) -> list[Hardware]:
    """Return the profiles of a built-in card with kernels of further releases of an engine."""
    folder = Path(str(resources.files("simtune") / FOLDERS["hardware"] / "releases"))
    beginning = f"{hardware.removesuffix(f'-{family}')}-{family}-"
    paths = sorted(path for path in folder.glob(f"{beginning}*") if path.name[len(beginning) :][:1].isdigit())
    return [load_hardware(str(path)) for path in paths]


def with_nearest(profile: Hardware, further: Sequence[Hardware], engine: EngineRelease) -> Hardware:
    """Return the profile in which an operator of another release stands for its own where it is nearer to the one that
    runs, or where the profile has none of this engine that was measured on the card."""
    operators, arrays = dict(profile.operators), {name: profile.arrays[name] for name in profile.arrays}
    for profile_of_release in further:
        for key, operator in profile_of_release.operators.items():
            present = operators.get(key)
            if present is not None and _rank(present, engine) <= _rank(operator, engine):
                continue
            operators[key] = operator
            if operator.residual is not None:
                array = operator.residual.array
                arrays |= {
                    f"{array}.{part}": profile_of_release.arrays[f"{array}.{part}"] for part in ("points", "weights")
                }
    if operators == profile.operators:
        return profile
    ordered = dict(sorted(operators.items()))
    return profile.model_copy(update={"operators": ordered}).with_arrays(Arrays(arrays))


def _rank(operator: Operator, engine: EngineRelease) -> tuple[bool, bool, tuple[tuple[int, ...], ...]]:
    """Return a key by which better kernels come first: of the engine, measured on the card, near its release."""
    provenance = operator.provenance
    release = release_of_software(provenance.software)
    # Without a release in its table an operator is of the release that the profile was made for, the first.
    distance = engine.distance(release) if release else ()
    return engine_of(provenance.software) != engine.family, provenance.kind == "transferred", distance


def with_release_marked(operator: Operator, engine: EngineRelease) -> Operator:
    """Return an operator of another release of the engine with its software named and its interval widened; any other
    as it is."""
    software = operator.provenance.software
    if operator.other_release is not None or engine_of(software) != engine.family:
        return operator
    if engine.runs(release_of_software(software)):
        return operator
    log_sd = RELEASE_LOG_SD.get(operator.kind, median(RELEASE_LOG_SD.values()))
    name = f"{BY_RELEASE[engine.family]} {release_text(software)}"
    return operator.model_copy(update={"other_release": name, "interval": wider(operator, log_sd)})
