"""What happens first when two things happen at once."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from simtune.sim.agenda import ARRIVAL, CHANGE, STEP_END, WAKE, Agenda, AgendaEntry

events = st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 3), st.integers(0, 3))


def played(agenda: Agenda) -> list[AgendaEntry]:
    """All events of an agenda, in the order in which they are handled."""
    log: list[AgendaEntry] = []

    def note(phase: int, tick: int, subject: int, version: int) -> None:
        log.append((tick, phase, subject, version))

    agenda.run({phase: partial(note, phase) for phase in range(8)})
    return log


@given(st.lists(st.tuples(events, st.booleans())))
def test_events_come_in_the_order_of_their_key_however_announced(coming: list[tuple[AgendaEntry, bool]]) -> None:
    agenda = Agenda()
    for event, held in coming:
        (agenda.hold if held else agenda.post)(event)
    assert played(agenda) == sorted(event for event, _ in coming)
    assert agenda.handled == len(coming)


def test_at_one_instant_steps_end_first_and_idle_cores_schedule_last() -> None:
    agenda = Agenda()
    for phase in (WAKE, ARRIVAL, CHANGE, STEP_END):
        agenda.post((7, phase, 0, 0))
    agenda.post((6, WAKE, 1, 0))
    assert [event[1] for event in played(agenda)] == [WAKE, STEP_END, CHANGE, ARRIVAL, WAKE]


def test_an_event_that_is_held_is_replaced_and_one_that_is_not_stays_for_its_version_to_tell() -> None:
    agenda = Agenda()
    agenda.hold((9, STEP_END, 3, 1))
    agenda.replace((5, STEP_END, 3, 2))
    assert agenda.has_more_at(5)
    assert not agenda.has_more_at(9)
    agenda.hold(None)
    agenda.replace((4, STEP_END, 3, 3))
    assert played(agenda) == [(4, STEP_END, 3, 3), (5, STEP_END, 3, 2)]


def test_what_stops_is_the_last() -> None:
    agenda, log = Agenda(), []

    def stop(tick: int, subject: int, version: int) -> None:
        log.append(tick)
        agenda.post((tick, WAKE, 0, 0))
        agenda.stop()

    for tick in (3, 4):
        agenda.post((tick, ARRIVAL, 0, 0))
    agenda.run({ARRIVAL: stop})
    assert log == [3]
    assert agenda.handled == 1
    assert (3, WAKE, 0, 0) in agenda.heap, "it is left where it was"
