"""Profiles completed with operators of another one of the same device: another engine's kernels, or NCCL's."""

from __future__ import annotations

from simtune.costs.tables import designation
from simtune.errors import UsageError
from simtune.specs.hardware import Arrays, Hardware


def filled(hardware: Hardware, other: Hardware) -> Hardware:
    """Return the profile with those operators of the other that it lacks, and its host times if it has none of its own.

    The provenance of each added operator names the engine it was measured with. Raises UsageError if the two are of
    different devices.
    """
    if designation(hardware.device.name) != designation(other.device.name):
        raise UsageError(
            f"{hardware.name} is of {hardware.device.name}, {other.name} of {other.device.name}: operators can be "
            "filled in from a profile of the same device; `--transfer-from` moves a whole profile to another"
        )
    operators = dict(hardware.operators)
    for key, operator in other.operators.items():
        if key not in operators:
            provenance = operator.provenance
            note = "; ".join(filter(None, (f"as in {other.name} ({other.engine})", provenance.note)))
            operators[key] = operator.model_copy(update={"provenance": provenance.model_copy(update={"note": note})})
    added_arrays = {
        o.residual.array for key, o in operators.items() if o.residual is not None and key not in hardware.operators
    }
    arrays = {name: hardware.arrays[name] for name in hardware.arrays}
    arrays |= {name: other.arrays[name] for name in other.arrays if name.rsplit(".", 1)[0] in added_arrays}
    host = other.host if hardware.host.provenance.kind == "assumed" else hardware.host
    return hardware.model_copy(update={"operators": dict(sorted(operators.items())), "host": host}).with_arrays(
        Arrays(arrays)
    )
