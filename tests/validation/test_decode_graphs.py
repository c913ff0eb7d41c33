"""Steps of decodes alone are replayed padded: each size is captured once, and spare rows take the padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from simtune.validation.servers.decode_graphs import DecodeGraphs, Decodes  # noqa: E402

SEATS = 10


class PretendedGraph:
    """Replays the call that was captured, into the tensor that it returned then."""

    replay: Callable[[], None]


class PretendedCuda:
    """What `DecodeGraphs` uses of torch.cuda, on a processor; counts captures."""

    CUDAGraph = PretendedGraph

    def __init__(self) -> None:
        self.captures = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        patch.setattr(torch.cuda, "Stream", PretendedStream)
        patch.setattr(torch.cuda, "current_stream", PretendedStream)
        for name in ("graph", "stream"):
            patch.setattr(torch.cuda, name, getattr(self, name))

    @contextmanager
    def graph(self, graph: PretendedGraph, pool: object) -> Iterator[None]:
        self.captures += 1
        yield

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield


class PretendedStream:
    def wait_stream(self, stream: object) -> None:
        pass


def test_decodes_are_padded_to_the_next_captured_size(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendedCuda()
    cuda.install(monkeypatch)
    seen: list[Decodes] = []

    def logits(decodes: Decodes) -> Any:
        seen.append(decodes)
        return torch.zeros(len(decodes.ids), 3)

    graphs = DecodeGraphs(logits, SEATS, torch.device("cpu"))
    replayed: list[list[list[int]]] = []
    assert cuda.captures == 0

    def replay() -> None:
        captured = [decodes for decodes in seen if len(decodes.ids) == 8][-1]
        replayed.append([values.tolist() for values in captured])

    monkeypatch.setattr(PretendedGraph, "replay", staticmethod(replay), raising=False)
    assert graphs.run([7, 8, 9, 6, 5], [40, 3, 17, 30, 25], [4, 0, 2, 1, 3]).shape == (5, 3)
    assert cuda.captures == 5, "1, 2, 4, 8 and all seats"
    ids, positions, rows = replayed[0]
    assert (ids[:5], positions[:5], rows[:5]) == ([7, 8, 9, 6, 5], [40, 3, 17, 30, 25], [4, 0, 2, 1, 3])
    assert set(rows[5:]) == {SEATS}, "the row after all seats"
    assert (ids[5:], positions[5:]) == ([0, 0, 0], [0, 0, 0])
    graphs.run([1], [2], [3])
    assert cuda.captures == 5
