"""The plans a study asks about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from simtune.specs.engine import merged
from simtune.specs.plan import Parallelism, Plan, Pool, RoundRobinRouting
from simtune.specs.speculation import Speculation
from simtune.specs.study import Study


@dataclass(frozen=True, order=True)
class ParallelShape:
    """How GPUs are cut into instances. Candidates of one shape share their compiled costs."""

    tp: int
    pp: int
    instances: int

    @property
    def gpus_per_instance(self) -> int:
        """tp x pp."""
        return self.tp * self.pp

    @property
    def num_gpus(self) -> int:
        """GPUs of all instances."""
        return self.gpus_per_instance * self.instances


@dataclass(frozen=True, order=True)
class Candidate:
    """One point of the search space."""

    shape: ParallelShape
    max_num_seqs: int
    max_num_batched_tokens: int
    drafter: str = ""
    """The label of a drafter of the study; empty for none."""
    speculation: Speculation | None = field(default=None, compare=False)
    """How it drafts, which follows from all else."""

    @property
    def name(self) -> str:
        """E.g. tp2-pp1-x4-s256-t8192, and the drafter's label where it drafts."""
        s = self.shape
        name = f"tp{s.tp}-pp{s.pp}-x{s.instances}-s{self.max_num_seqs}-t{self.max_num_batched_tokens}"
        return f"{name}-{self.drafter}" if self.drafter else name

    def plan(self, study: Study, max_model_len: int, engine: Mapping[str, Any] | None = None) -> Plan:
        """The plan it stands for: one pool of the study's hardware, with the policy and router of all its plans, and
        with the settings of the study's `engine` where these leave something open."""
        own = {
            "hardware": study.hardware.profile,
            "instances": self.shape.instances,
            "parallelism": Parallelism(tp=self.shape.tp, pp=self.shape.pp),
            "batching": {
                "max_num_seqs": self.max_num_seqs,
                "max_num_batched_tokens": self.max_num_batched_tokens,
                **({} if study.batching is None else study.batching.model_dump(exclude_unset=True, exclude_none=True)),
            },
            "max_model_len": max_model_len,
            "speculation": self.speculation,
        }
        settings = {} if engine is None else {"engine": study.engine, **engine}
        pool = Pool.model_validate(merged(own, settings))
        return Plan(name=self.name, model=study.model, pools=(pool,), router=study.router or RoundRobinRouting())


def shapes(study: Study) -> list[ParallelShape]:
    """Every tp x pp that the devices allow, with the instances asked for: by default as many as fit.

    When the fewest GPUs are wanted, every number of instances is a shape of its own.
    """
    devices, search = study.hardware.devices, study.search
    space = set()
    for tp, pp in product(search.tp, search.pp):
        most = devices // (tp * pp)
        if search.instances is not None:
            counts = [n for n in search.instances if n <= most]
        elif study.objective == "gpus":
            counts = list(range(1, most + 1))
        else:
            counts = [most] if most else []
        space |= {ParallelShape(tp, pp, n) for n in counts}
    return sorted(space)


def members(study: Study, shape: ParallelShape) -> list[Candidate]:
    """Every candidate of a shape, in ascending order."""
    search = study.search
    drafters = ("", *(choice.label for choice in study.speculation))
    return sorted(
        Candidate(shape, seqs, tokens, drafter)
        for seqs, tokens, drafter in set(product(search.max_num_seqs, search.max_num_batched_tokens, drafters))
    )
