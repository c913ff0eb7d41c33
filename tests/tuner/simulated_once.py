"""Simulations that audits of one question share: each is made once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from simtune.results.result import Result
from simtune.sim.deployment import Deployment
from simtune.workload.requests import RequestStream


@contextmanager
def simulated_once() -> Iterator[None]:
    """Keep the result of every simulation, by plan, requests and arguments, for the audits of one question.

    A simulation depends on nothing else, and a changed certificate leads to the same ones but for what was changed.
    """
    simulate, results = Deployment.simulate, dict[Any, Result]()

    def once(deployment: Deployment, stream: RequestStream, *args: Any, **named: Any) -> Result:
        columns = (stream.arrival_s, stream.prompt_tokens, stream.output_tokens)
        requests = tuple(None if column is None else column.tobytes() for column in columns)
        plan = json.dumps(deployment.plan.to_data(), sort_keys=True)
        key = (plan, requests, stream.users, repr(args), repr(sorted(named.items())))
        if key not in results:
            results[key] = simulate(deployment, stream, *args, **named)
        return results[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deployment, "simulate", once)
        yield
