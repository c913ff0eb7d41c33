"""Polls of an engine for new requests, which some engines do every few steps only."""

from __future__ import annotations


class Polls:
    """Count of the steps that decode since the latest poll; the engine polls before every `interval`-th of them, and
    after every other step."""

    def __init__(self, interval: int) -> None:
        """Start with a poll before the first step. Raises ValueError for an interval below 1."""
        if interval < 1:
            raise ValueError(f"scheduler_recv_interval ({interval}) must be at least 1")
        self.interval = self._since = interval

    def restart(self) -> None:
        """Poll before the next step."""
        self._since = self.interval

    def stepped(self, repetitions: int) -> None:
        """Count steps that decoded."""
        self._since += repetitions

    def due(self, decoding: bool) -> bool:
        """Return True, and note it, if the engine polls before the step that is chosen now; `decoding` is True if a
        request decodes."""
        if not decoding:
            self.restart()
        self._since = (self._since - 1) % self.interval + 1
        if self._since < self.interval:
            return False
        self._since = 0
        return True

    @property
    def steps_left(self) -> int:
        """Steps until the next poll, the one that is planned included."""
        return self.interval - self._since % self.interval

    @property
    def is_next(self) -> bool:
        """True if the engine polls before the next step, which is not planned yet."""
        return self._since % self.interval == 0
