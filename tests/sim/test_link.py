"""Transfers share a link equally, in whole ticks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.sim.link import TransferLink

SECOND = TICKS_PER_SECOND


def ends(link: TransferLink) -> list[tuple[int, int]]:
    """(transfer, tick) of all that are under way, when nobody joins any more."""
    log = []
    while (tick := link.next_end()) is not None:
        done = link.ended(tick)
        assert done, "an announced end ends something"
        log += [(transfer, tick) for transfer in done]
    return log


def test_one_transfer_has_the_link_to_itself() -> None:
    link = TransferLink(bytes_per_s=100.0)
    link.join(0, 7, 300)
    assert ends(link) == [(7, 3 * SECOND)]


def test_two_transfers_get_half_each_and_the_rest_is_for_the_longer_one() -> None:
    link = TransferLink(bytes_per_s=100.0)
    link.join(0, 1, 100)
    link.join(0, 2, 300)
    assert ends(link) == [(1, 2 * SECOND), (2, 4 * SECOND)]  # 200 bytes are left at 2 s


def test_one_that_joins_later_slows_the_first() -> None:
    link = TransferLink(bytes_per_s=100.0)
    link.join(0, 1, 200)
    assert link.next_end() == 2 * SECOND
    before = link.version
    link.join(SECOND, 2, 50)
    assert link.version != before
    assert ends(link) == [(2, 2 * SECOND), (1, round(2.5 * SECOND))]


def test_one_that_is_cancelled_leaves_its_share_to_the_others() -> None:
    link = TransferLink(bytes_per_s=100.0)
    link.join(0, 1, 200)
    link.join(0, 2, 200)
    link.cancel(2 * SECOND, 1)
    assert 1 not in link
    assert ends(link) == [(2, 3 * SECOND)]
    link.join(5 * SECOND, 1, 100)  # it may come again
    assert ends(link) == [(1, 6 * SECOND)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10**9)), min_size=1, max_size=12),
    st.sampled_from([1e9, 4.5e11, 3.3e10]),
)
def test_the_link_is_never_idle_and_nobody_waits_for_bytes_that_were_sent(
    coming: list[tuple[int, int]], bytes_per_s: float
) -> None:
    """All of one busy period takes the time of all its bytes, up to one tick per event."""
    link, gap = TransferLink(bytes_per_s), TICKS_PER_SECOND // 1_000_000
    left = {i: size for i, (_, size) in enumerate(coming)}
    joins = sorted((at * gap, i) for i, (at, _) in enumerate(coming))
    busy_since = joins[0][0]
    sent = now = 0
    while left:
        end = link.next_end()
        if joins and (end is None or joins[0][0] < end):
            now, i = joins.pop(0)
            if end is None:
                busy_since, sent = now, 0
            link.join(now, i, coming[i][1])
            sent += coming[i][1]
        else:
            assert end is not None
            assert end >= now
            now = end
            for i in link.ended(now):
                del left[i]
            if link.next_end() is None:
                assert now - busy_since == pytest.approx(
                    sent / bytes_per_s * TICKS_PER_SECOND, abs=3 * len(coming) ** 2
                )
