"""Plans that a study makes of a drawn plan and fragments: by the functions by which a search makes its candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from simtune.errors import Infeasible, UsageError
from simtune.specs.plan import Plan
from simtune.specs.speculation import Speculation
from simtune.specs.study import Study
from simtune.specs.variants import combined
from simtune.tuner.space.candidates import Candidate, PoolShape, candidates

Block = dict[str, Any]
DEVICES = 1024
"""GPUs of a study, more than any drawn plan has."""
OF_STUDY = ("name", "role", "hardware", "instances", "parallelism", "max_model_len")
"""Settings of a pool that a study states itself; the others are those of its engine."""
SHARE = 0.25
"""Probability that a plan of which a study could be made comes from one."""


FIXED = 0.3
"""Probability that a study of prefill and decode pools fixes one of them as a whole."""


class Varied(NamedTuple):
    """A plan of a study, and the number of fragments in it."""

    plan: Plan
    fragments: int


Draws = Mapping[str, Callable[[Random], Block]]
"""Functions that draw a `pool`, `router`, `link` with what belongs to it, by these names."""


def varied(plan: Block, longest: int, draws: Draws) -> Varied | None:
    """Return a plan of a study whose base is the drawn `plan`; None if no study is made of it. Which it is depends on
    the plan alone, so that all other plans keep their numbers.

    Raises what a study or a plan raises that is refused.
    """
    random = Random(f"fragments {plan}")
    pools = plan["pools"]
    apart = len(pools) > 1 and pools[0]["role"] == "prefill"
    unsearched = len(pools) > 1 and not apart
    if random.random() > SHARE or unsearched or not plan.keys().isdisjoint(("events", "control", "stages")):
        return None
    fragments, combine = _fragments(random, apart, draws), random.random() < 0.6
    block = _study(plan, apart, fragments, combine=combine)
    fixing = Random(f"fixed pools {plan}")
    if apart and fixing.random() < FIXED:
        fixed = fixing.choice(pools)
        block["fixed"] = [fixed]
        del block["search"][fixed["role"]]
    speculation = pools[-1].get("speculation")
    if speculation is not None:
        _draft(Random(f"drafts {plan}"), block, fragments, {"name": "drawn", **speculation}, pools[-1]["role"])
    study = Study.model_validate(block, strict=False)
    by_role = {
        pool["role"]: {key: pool[key] for key in pool if key not in (*OF_STUDY, "speculation")} for pool in pools
    }
    every = [_drafting(candidate, speculation) for candidate in candidates(study)]
    random.shuffle(every)
    numbers = {variant.label: len(parts) for variant, parts in zip(study.variants, _parts(study), strict=True)}
    refused = "no candidate of the study"
    for candidate in every:
        try:
            variants = [pool.shape.variant for pool in candidate.pools if pool.fixed is None]
            return Varied(_plan(candidate, study, longest, by_role), numbers[variants[-1]])
        except Infeasible as error:
            refused = str(error)
    raise UsageError(refused)


def _draft(random: Random, block: Block, fragments: list[Block], choice: Block, role: str) -> None:
    """Let a study try a drafter: in one of its fragments, or on every plan."""
    free = [fragment for fragment in fragments if fragment]
    if free and random.random() < 0.5:
        random.choice(free)["speculation"] = choice
        return
    block["speculation"] = [choice]
    # Mixed pools are tried with and without every drafter.
    if role in block["search"]:
        block["search"][role]["drafters"] = ["drawn"]


def _drafting(candidate: Candidate, speculation: Block | None) -> Candidate:
    """Return the candidate whose pools with the label of a drafter draft as the drawn plan does."""
    if speculation is None:
        return candidate
    scheme = Speculation.model_validate(speculation, strict=False)
    pools = (replace(pool, speculation=scheme) if pool.drafter else pool for pool in candidate.pools)
    return replace(candidate, pools=tuple(pools))


def _parts(study: Study) -> list[tuple[Block, ...]]:
    return combined(study.search.variants, bool(study.search.combine))


def _plan(candidate: Candidate, study: Study, longest: int, by_role: Mapping[str, Block]) -> Plan:
    def settings(shape: PoolShape) -> Block:
        return by_role[shape.role]

    return candidate.plan(study, longest, settings)


def _study(plan: Block, apart: bool, fragments: list[Block], *, combine: bool) -> Block:
    pools = plan["pools"]
    search: Block = {"layouts": ["prefill-decode" if apart else "mixed"], "variants": fragments, "combine": combine}
    for pool in pools:
        choices = {key: [pool["batching"][key]] for key in ("max_num_seqs", "max_num_batched_tokens")}
        cut = {"tp": 1, "pp": 1, "attention_dp": 1, "expert_parallel": False} | pool["parallelism"]
        choices |= {key: [cut[key]] for key in ("tp", "pp", "attention_dp", "expert_parallel")}
        choices["instances"] = [pool["instances"]]
        search |= {pool["role"]: choices} if apart else choices
    study: Block = {
        "name": "drawn",
        "model": plan["model"],
        "hardware": {"profile": pools[0]["hardware"], "devices": DEVICES},
        "workload": "drawn",
        "slo": {"ttft_s": {"p99": 1.0}},
        "search": search,
        "router": {key: value for key, value in plan["router"].items() if key != "longest"},
    }
    return study | {key: plan[key] for key in ("decode_router", "link") if key in plan}


def _fragments(random: Random, apart: bool, draws: Draws) -> list[Block]:
    """Return one to four fragments, each of keys of a pool, of one role or of the plan."""
    fragments: list[Block] = [{}] if random.random() < 0.3 else []
    for number in range(random.randint(1, 3)):
        keys = random.choice(
            (
                ("batching",),
                ("batching", "kv_cache"),
                ("kv_cache",),
                ("parallelism",),
                ("async_scheduling",),
                ("stream_interval",),
                ("instances",),
            )
        )
        pool = draws["pool"](random) | {"instances": random.randint(1, 3)}
        fragment = {key: pool[key] for key in keys}
        way = random.random()
        if apart and way < 0.4:
            fragment = {random.choice(("prefill", "decode")): fragment}
        elif apart and way < 0.7:
            link = draws["link"](random)
            key = random.choice(list(link))
            fragment = {key: link[key]}
        elif way < 0.5:
            router = {key: value for key, value in draws["router"](random).items() if key != "longest"}
            fragment = {"router": router} if random.random() < 0.5 else {**fragment, "router": router}
        if random.random() < 0.5:
            fragment["name"] = "abc"[number]
        fragments.append(fragment)
    return fragments
