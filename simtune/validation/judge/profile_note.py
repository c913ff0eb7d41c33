"""The note of a validation in the hardware profile that it judged."""

from __future__ import annotations

from simtune.specs.hardware import Hardware, ValidatedLoad, ValidationNote
from simtune.validation.judge.comparison import Validation


def recorded(hardware: Hardware, validation: Validation, date: str) -> Hardware:
    """Return the profile with the validation noted, replacing an earlier one of the same model, plan and engine."""
    note = ValidationNote(
        engine=validation.engine.engine,
        version=validation.engine.version,
        date=date,
        model=validation.model,
        plan=validation.name,
        clock=validation.clock,
        within=validation.within,
        tolerance=validation.tolerance,
        loads=tuple(
            ValidatedLoad(
                load=load.label,
                rate_rps=load.rate_rps,
                requests=load.requests * load.repeats,
                ttft=load.error("ttft"),
                tpot=load.error("tpot"),
                e2el=load.error("e2el"),
            )
            for load in validation.loads
            if not load.failed
        ),
    )
    earlier = [n for n in hardware.validations or () if n.subject != note.subject]
    return hardware.model_copy(update={"validations": (*earlier, note)}).with_arrays(hardware.arrays)
