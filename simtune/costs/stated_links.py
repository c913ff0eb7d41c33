"""Operators between devices under a link whose rate is stated: the statement outranks the table.

Times of small messages stay as measured. Large ones follow the stated rate: a curve keeps its times and takes them for
stated / measured times the bytes, the measured rate being that of its largest message; an operator without curves takes
the stated rate in place of the fitted one. The result counts as carried over, since the table is of another link.
"""

from __future__ import annotations

from simtune.costs import curve
from simtune.costs.operators import OPERATORS
from simtune.errors import UsageError
from simtune.specs.hardware import Hardware, Operator


def under_stated_link(operator: Operator, hardware: Hardware) -> Operator:
    """Return the operator as it is on the link that the hardware states, or unchanged if nothing is stated of it.

    Raises UsageError for a stated latency: a table contains the latency of its calls, and no rule says which part.
    """
    if not OPERATORS[operator.kind].link:
        return operator
    name = operator.variant if operator.variant in hardware.links else "intra_node"
    link = hardware.links.get(name)
    stated = () if link is None else link.stated or ()
    if "latency_s" in stated:
        raise UsageError(
            f"hardware {hardware.name}: links.{name}.latency_s is stated, but {operator.kind} was measured there, its "
            "latency included; state bytes_per_s only, or fit a profile from a table of that link"
        )
    if link is None or not stated:
        return operator
    curves = tuple(curve.stretched(c, link.bytes_per_s * c.seconds[-1] / c.x[-1]) for c in operator.curves)
    provenance = operator.provenance.model_copy(
        update={
            "kind": "transferred",
            "note": f"large messages at the stated {link.bytes_per_s / 1e9:g} GB/s of links.{name}, "
            f"not at the measured rate; {operator.provenance.note or 'no note'}",
        }
    )
    base = operator.base.model_copy(update={"bytes_per_s": link.bytes_per_s})
    return operator.model_copy(update={"base": base, "curves": curves, "provenance": provenance})
