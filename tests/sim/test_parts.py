"""What a plan can name and what there is are the same; what is brought is checked, made and watched."""

from __future__ import annotations

import pickle
from copy import copy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic.fields import FieldInfo

from simtune.costs.compiled import LinearCosts
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.engine import POLICIES
from simtune.engine.policy_traits import SETTINGS_OF
from simtune.errors import PartError, UsageError
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.plan_parts import OwnCosts, make_policy
from simtune.sim.router import ROUTERS, RoundRobin
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.plan import Plan
from simtune.specs.plugins import keywords
from simtune.specs.pool import POLICY_NAMES, Batching, Pool
from simtune.specs.routing import OwnRouting, Routing
from simtune.testing.clusters import stream_of
from simtune.workload.requests import RequestStream

pytestmark = pytest.mark.usefixtures("own_code_allowed")

KINDS = {
    variant.model_fields["kind"].default: variant.model_fields
    for tagged in get_args(get_args(Routing)[0])
    if (variant := get_args(tagged)[0]) is not OwnRouting
}


def test_a_plan_names_the_policies_there_are() -> None:
    assert tuple(POLICIES) == POLICY_NAMES


def test_a_plan_names_the_routers_there_are() -> None:
    assert list(KINDS) == list(ROUTERS)


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_fields_of_a_routing_are_options_of_its_router(kind: str) -> None:
    fields: dict[str, FieldInfo] = {name: field for name, field in KINDS[kind].items() if name != "kind"}
    assert fields.keys() == keywords(ROUTERS[kind]).keys() - {"cores"} - ROUTERS[kind].needs


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_takes_the_settings_of_what_it_offers(name: str) -> None:
    policy = POLICIES[name]
    assert policy.settings() <= keywords(policy).keys()
    told = {setting for settings in SETTINGS_OF.values() for setting in settings}
    assert keywords(policy).keys() & told <= policy.settings() | {
        "watermark_blocks",
        "async_scheduling",
        "hash_block_tokens",
        "prefix_caching",
        "preemption",
        "speculation",
    }  # a base's


def test_a_router_of_ones_own_does_not_deal_in_turn_by_inheritance() -> None:
    """Some of its cores do not stand for all, unless it says so itself."""
    assert RoundRobin.deals_in_turn

    class Mine(RoundRobin):
        pass

    assert not Mine.deals_in_turn


# --- instances that stand for all --------------------------------------------------------------------------


def test_some_instances_stand_for_all_where_they_are_fewer() -> None:
    """Two instances of a core each."""
    deployment, load = deployed(), stream()
    assert [deployment.enough_instances(load, cores) for cores in (1, 2, 3, None)] == [1, None, None, None]
    assert deployed(router={"kind": "least_outstanding"}).enough_instances(load, 1) is None
    assert deployment.enough_instances(replace(load, arrival_s=None, users=3), 1) is None


# --- parts of one's own -----------------------------------------------------------------------------------

NUMBERS = count()

OWN = """
from simtune.engine import Request
from simtune.engine.policies.listed import StallFree
from simtune.sim.router import Router


class Newest(StallFree):
    def __init__(self, *, step: int = 1, **settings):
        super().__init__(**settings)
        if step < 1:
            raise ValueError(f"step is {step}")
        self.step = step

    def key(self, request):
        return -request.id // self.step


class Typo(Newest):
    def key(self, request):
        return request.idd


class Never(Newest):
    def schedule(self):
        return None


class Last(Router):
    needs = frozenset({"seed", "session"})

    def __init__(self, cores, *, seed, session, offset):
        super().__init__(cores)
        self.given = (seed, list(session), offset)

    def choose(self, request, now):
        return max((core for core in self.cores if core.up), key=lambda core: core.number, default=None)


class Nobody(Router):
    def choose(self, request, now):
        return None


class Anybody(Router):
    def choose(self, request, now):
        return 7


class Down(Router):
    def choose(self, request, now):
        self.cores[0].up = False
        return self.cores[0]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module beside which simtune is run."""
    name = f"own_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def deployed(policy: str = "vllm-fcfs", router: dict[str, Any] | None = None, **options: Any) -> Deployment:
    batching = Batching(policy=policy, max_num_seqs=4, max_num_batched_tokens=512, options=options or None)
    pool = Pool(hardware="h100-sxm", instances=2, batching=batching, max_model_len=512)
    plan = Plan.model_validate(
        {"name": "p", "model": "llama-3.1-8b", "pools": [pool], "router": router or {"kind": "round_robin"}},
        strict=False,
    )
    return deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"), LinearCosts(1e-3, 1e-5))


def stream(sessions: bool = True) -> RequestStream:
    n = 40
    requests = stream_of([0.001 * i for i in range(n)], [50] * n, [20] * n)
    return replace(requests, session=np.arange(n) % 3) if sessions else requests


def test_a_policy_of_ones_own_runs_with_its_options(own: str) -> None:
    deployment = deployed(f"{own}:Newest", step=2)
    (core, _) = deployment.pools[0].cores(2, None)
    assert type(core.scheduler).__name__ == "Newest"
    assert core.scheduler.step == 2  # type: ignore[attr-defined]
    result = deployment.simulate(stream())
    assert result.completed.all()
    stepped = deployment.simulate(stream(), single_steps=True)
    assert stepped.outcome.finish.tolist() == result.outcome.finish.tolist()
    first_come = deployed("sarathi").simulate(stream())
    assert first_come.outcome.scheduled.tolist() != result.outcome.scheduled.tolist()


def test_a_router_of_ones_own_is_given_what_it_needs_and_its_options(own: str) -> None:
    deployment = deployed(router={"kind": f"{own}:Last", "options": {"offset": 3}})
    assert not deployment.cores_apart
    result = deployment.simulate(stream(), seed=5)
    assert result.completed.all()
    assert set(result.outcome.core.tolist()) == {1}
    with pytest.raises(UsageError, match=f"the {own}:Last router needs sessions, and the workload has none"):
        deployment.simulate(stream(sessions=False))


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (
            "{own}:Newest",
            {"stepp": 1},
            "plan p: pools.0.batching.options.stepp: unknown option of Newest, did you mean",
        ),
        (
            "{own}:Newest",
            {"num_blocks": 1},
            "pools.0.batching.options.num_blocks: is no option of Newest: simtune gives",
        ),
        (
            "{own}:Last",
            {},
            "pools.0.batching.policy: {own}:Last ({own}.py:28) is no policy: it is not derived from simtu",
        ),
        ("{own}:Newst", {}, "pools.0.batching.policy: {own}:Newst: {own}.py has no Newst, did you mean Newest?"),
        ("vllm-fcfs", {"step": 1}, "pools.0.batching.options.step: unknown option of VllmFcfs; it takes none"),
        ("nowhere:Newest", {}, "pools.0.batching.policy: nowhere:Newest: there is no module nowhere in "),
    ],
)
def test_a_policy_that_cannot_be_had(own: str, policy: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PartError) as caught:
        deployed(policy.format(own=own), **options)
    assert message.format(own=own) in str(caught.value)


def test_a_policy_of_the_package_blames_options_where_there_are_any() -> None:
    limits: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
    plain = Batching(policy="sglang", **limits)
    optional = Batching(policy="sglang", options={"schedule_conservativeness": 1.0}, **limits)
    settings = {"num_blocks": 0, "block_size": 1, "max_model_len": 1, **limits}
    with pytest.raises(ValueError, match=r"^total \(0\)"):
        make_policy(plain, settings)
    with pytest.raises(UsageError, match=r"batching.options of policy sglang: .*total \(0\)"):
        make_policy(optional, settings)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        ({"kind": "{own}:Last"}, "router.options.offset: is required by Last ({own}.py:28) and missing"),
        ({"kind": "{own}:Newest"}, "router.kind: {own}:Newest ({own}.py:7) is no router: it is not derived from"),
        ({"kind": "{own}:Last", "options": {"seed": 1, "offset": 1}}, "router.options.seed: is no option of Last"),
    ],
)
def test_a_router_that_cannot_be_had(own: str, router: dict[str, Any], message: str) -> None:
    with pytest.raises(PartError) as caught:
        deployed(router={**router, "kind": router["kind"].format(own=own)})
    assert message.format(own=own) in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (
            "Newest",
            {"step": 0},
            "policy {own}:Newest ({own}.py:7) cannot be created with the plan's options: ValueError: ste",
        ),
        ("Typo", {}, "policy {own}:Typo failed in Typo.key ({own}.py:20): AttributeError: 'Request' object has no"),
        (
            "Never",
            {},
            "policy {own}:Never ({own}.py:23): Never.schedule() returned None with 20 requests waiting",
        ),
    ],
)
def test_a_policy_that_fails(own: str, policy: str, options: dict[str, Any], message: str) -> None:
    deployment = deployed(f"{own}:{policy}", **options)
    with pytest.raises(PartError) as caught:
        deployment.simulate(stream())
    assert message.format(own=own) in str(caught.value)


@pytest.mark.parametrize(
    ("router", "answer"),
    [
        ("Nobody", "None although cores are up"),
        ("Anybody", "7, which is not one of"),
        ("Down", "core 0, which is down"),
    ],
)
def test_a_router_that_chooses_what_it_may_not(own: str, router: str, answer: str) -> None:
    deployment = deployed(router={"kind": f"{own}:{router}"})
    with pytest.raises(PartError, match=rf"router {own}:{router} \({own}.py:\d+\): {router}.choose returned {answer}"):
        deployment.simulate(stream())


# --- costs of one's own -----------------------------------------------------------------------------------


class Seconds:
    """What is most easily got wrong."""

    def decode(self, num_decodes: int, context_tokens: int) -> tuple[float, float, int]:
        return 0.01, 0.0, 1

    def mixed(self, num_decodes: int, context_tokens: int, chunks: Any, num_samples: int) -> float:
        return 0.01


class Standing(LinearCosts):
    """Time stands still."""

    def mixed(self, *args: Any) -> int:
        return 0


def test_answers_of_costs_are_whole_positive_ticks() -> None:
    with pytest.raises(
        PartError, match=r"cost model Seconds \(.*test_parts.py:\d+\): Seconds.decode returned \(0.01, 0.0"
    ):
        OwnCosts(Seconds()).decode(1, 1)  # type: ignore[arg-type]
    with pytest.raises(PartError, match=r"Seconds.mixed returned 0.01, expected a whole number of ticks"):
        OwnCosts(Seconds()).mixed(1, 1, (), 1)  # type: ignore[arg-type]
    with pytest.raises(PartError, match=r"Standing.mixed returned 0, expected at least one tick"):
        OwnCosts(Standing(1e-3)).mixed(1, 1, (), 1)
    with pytest.raises(PartError, match=r"cost model object \(builtins\) has no method decode"):
        OwnCosts(object())  # type: ignore[arg-type]
    assert OwnCosts(LinearCosts(1e-3)).decode(3, 5) == LinearCosts(1e-3).decode(3, 5)
    assert OwnCosts(LinearCosts(1 / TICKS_PER_SECOND)).mixed(1, 1, (), 1) == 1


def test_costs_of_ones_own_have_what_else_they_have_and_can_be_copied() -> None:
    costs = OwnCosts(LinearCosts(1e-3, per_depth_s=0.25))
    for same in (costs, copy(costs), pickle.loads(pickle.dumps(costs))):
        assert same.per_depth_s == 0.25
        assert same.own == costs.own
        with pytest.raises(AttributeError, match="'LinearCosts' object has no attribute 'depth_s'"):
            _ = same.depth_s


@pytest.mark.parametrize("answer", [(1, 0, 1), (1, -1, 1), (5, -4, 2), (5, -4, 9)])
def test_one_tick_is_enough_for_a_step(answer: tuple[int, int, int]) -> None:
    class Given(LinearCosts):
        def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
            return answer

    assert OwnCosts(Given(1e-3)).decode(1, 1) == answer


@pytest.mark.parametrize("answer", [(0, 1, 2), (1, 0, 0), (5, -5, 2), (5, -5, 9)])
def test_no_step_takes_less_than_a_tick(answer: tuple[int, int, int]) -> None:
    class Given(LinearCosts):
        def decode(self, num_decodes: int, context_tokens: int) -> tuple[int, int, int]:
            return answer

    with pytest.raises(PartError, match=r"decode returned .*, expected at least one tick for every step"):
        OwnCosts(Given(1e-3)).decode(1, 1)


def test_costs_that_nobody_brought_are_not_looked_at() -> None:
    """An error of the package's own keeps its traceback."""

    class Broken(LinearCosts):
        def mixed(self, *args: Any) -> int:
            raise ZeroDivisionError

    plan = deployed().plan
    broken = deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"), Broken(1e-3))
    with pytest.raises(ZeroDivisionError):
        broken.simulate(stream())
    brought = deploy(plan, load_model("llama-3.1-8b"), load_hardware("h100-sxm"), OwnCosts(Broken(1e-3)))
    with pytest.raises(
        PartError, match=r"cost model .*Broken failed in .*Broken.mixed \(.*test_parts.py:\d+\): ZeroDiv"
    ):
        brought.simulate(stream())
