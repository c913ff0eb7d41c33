"""Schemes and drafters from outside the package: named by import path, checked, simulated, written and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simtune.api import load_drafting
from simtune.emit import ENGINES, drafting_settings
from simtune.errors import PartError, SpecError
from simtune.sim.deployment import deploy
from simtune.specs import kinds, plugins
from simtune.specs.base import Part
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.drafters import DRAFTERS, Drafter
from simtune.specs.plan import Plan
from simtune.specs.schemes import SCHEMES, Scheme
from simtune.testing.clusters import stream_of

pytestmark = pytest.mark.usefixtures("own_code_allowed")

MODULE = '''
from typing import ClassVar

from simtune.specs.drafters import Drafter
from simtune.specs.schemes import RoundShape, Scheme


class Halved(Scheme):
    """A chain that is half as long from some batch on."""

    tokens: int
    halved_at: int

    words: ClassVar[str] = "chain of {tokens}, half of it from batch {halved_at} on"
    counts_ahead: ClassVar[bool] = True
    varies_with_batch: ClassVar[bool] = True

    @property
    def shape(self) -> RoundShape:
        return RoundShape(depth=self.tokens, width=1, drafts=self.tokens, tree=False)

    def tokens_for(self, batch: int) -> int:
        return self.tokens if batch < self.halved_at else self.tokens // 2


class Copier(Drafter):
    """Copies, like an n-gram lookup."""

    host_s: float

    awaited: ClassVar[bool] = True


class Shapeless(Scheme):
    pass


class Broken(Scheme):
    @property
    def shape(self) -> RoundShape:
        return {}["x"]


class Failing(Halved):
    def tokens_for(self, batch: int) -> int:
        raise KeyError(batch)


class Nothing:
    pass
'''

BY_BATCH = "{kind: by_batch, max_tokens: 3, ranges: [{first: 1, last: 3, tokens: 3}, {first: 4, last: 8, tokens: 1}]}"
HALVED = "{kind: 'own_drafts:Halved', tokens: 3, halved_at: 4}"
NGRAM = "{kind: ngram, lookup_max: 3, host_s: 1.0e-5}"
COPIER = "{kind: 'own_drafts:Copier', host_s: 1.0e-5}"


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_drafts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def plan_text(scheme: str, drafter: str = NGRAM) -> str:
    return f"""schema: simtune/plan@1
name: plan
model: llama-3.1-8b
pools:
  - hardware: h100-sxm
    instances: 1
    batching: {{max_num_seqs: 8, max_num_batched_tokens: 512}}
    max_model_len: 2048
    speculation:
      drafter: {drafter}
      scheme: {scheme}
      acceptance: eagle3-llama-3.1-8b
"""


def simulated(text: str) -> list[list[int]]:
    plan = Plan.from_text(text)
    deployment = deploy(plan, load_model(plan.model), load_hardware("h100-sxm"), drafting=load_drafting(plan))
    stream = stream_of([0.02 * i for i in range(40)], [100] * 40, [60] * 40)
    outcome = deployment.simulate(stream).outcome
    assert outcome.finish.min() > 0
    return [outcome.first_token.tolist(), outcome.finish.tolist()]


def test_one_that_does_as_one_of_the_package_comes_to_the_same() -> None:
    expected = simulated(plan_text(BY_BATCH))
    assert simulated(plan_text(HALVED)) == expected
    assert simulated(plan_text(HALVED, COPIER)) == expected


def test_it_is_written_and_read_again() -> None:
    plan = Plan.from_text(plan_text(HALVED, COPIER))
    assert Plan.from_text(plan.to_yaml()) == plan
    speculation = plan.pools[0].speculation
    assert speculation is not None
    assert speculation.scheme.model_dump() == {"kind": "own_drafts:Halved", "tokens": 3, "halved_at": 4}
    assert (speculation.scheme.in_words(), speculation.scheme.in_short()) == (
        "chain of 3, half of it from batch 4 on",
        "≤3",
    )
    assert type(speculation).model_validate(dict(speculation)) == speculation, "as an object too"


def test_no_engine_is_told_of_it() -> None:
    speculation = Plan.from_text(plan_text(HALVED)).pools[0].speculation
    assert speculation is not None
    for emitter in ENGINES.values():
        settings, why = drafting_settings(emitter, speculation)
        assert settings is None
        assert f"{emitter.title} has no setting for a own_drafts:Halved scheme" in why
    copying = Plan.from_text(plan_text(BY_BATCH, COPIER)).pools[0].speculation
    assert copying is not None
    settings, why = drafting_settings(ENGINES["vllm"], copying)
    assert (settings, why) == (None, "vLLM 0.33 has no own_drafts:Copier drafter")


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (
            "{kind: 'own_draft:Halved'}",
            "11:7: pools.0.speculation.scheme: own_draft:Halved: there is no module",
        ),
        ("{kind: 'own_drafts:Halve'}", r"own_drafts:Halve: \S+own_drafts.py has no Halve"),
        (
            "{kind: 'own_drafts:Nothing'}",
            r"own_drafts:Nothing \(\S+own_drafts.py:\d+\) is no scheme: it is not derived from simtune.specs.schemes",
        ),
        (
            "{kind: 'own_drafts:Copier'}",
            r"own_drafts:Copier \(\S+own_drafts.py:\d+\) is no scheme: it is not derived from simtune.specs.schemes",
        ),
        ("{kind: 'own_drafts:Shapeless'}", r"own_drafts:Shapeless \(\S+\) is not a whole scheme: it lacks shape"),
        ("{kind: 'own_drafts:Halved', tokens: 3}", "pools.0.speculation.scheme.halved_at: is required and missing"),
        ("{kind: 'own_drafts:Halved', tokens: x, halved_at: 4}", "11:43: pools.0.speculation.scheme.tokens: must be a"),
        ("{kind: 'own_drafts:Halved', tokens: 3, halved_at: 4, more: 1}", "speculation.scheme.more: unknown key"),
        (
            "{kind: 'own_drafts:Broken'}",
            r"scheme own_drafts:Broken failed in Broken.shape \(\S+own_drafts.py:\d+\): KeyError",
        ),
        ("{kind: chains, tokens: 3}", "unknown kind 'chains': .*, did you mean chain?"),
        ("{kind: chain, token: 3}", "unknown key, did you mean tokens?"),
    ],
)
def test_what_is_wrong_is_said_at_its_place(scheme: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Plan.from_text(plan_text(scheme))


def test_one_that_fails_in_a_run_is_named_with_its_method() -> None:
    text = plan_text(HALVED.replace("Halved", "Failing"))
    with pytest.raises(
        PartError, match=r"scheme own_drafts:Failing failed in Failing.tokens_for \(\S+\): KeyError: \d"
    ):
        simulated(text)


def test_installed_packages_register_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "registered", lambda group: {"halved": "x"} if group == "simtune.schemes" else {})
    monkeypatch.setattr(plugins, "registered", lambda group: {"halved": "own_drafts:Halved"})
    named = Plan.from_text(plan_text(HALVED.replace("'own_drafts:Halved'", "halved")))
    assert type(named.pools[0].speculation.scheme).__name__ == "Halved"  # type: ignore[union-attr]
    assert Plan.from_text(named.to_yaml()) == named


def subclasses(base: type[Part]) -> set[type[Any]]:
    own = {c for c in base.__subclasses__() if c.__module__.startswith("simtune.")}
    return own | {c for one in own for c in subclasses(one)}


def test_the_registries_know_all_classes_of_the_package_by_their_kind() -> None:
    for base, registry in ((Scheme, SCHEMES), (Drafter, DRAFTERS)):
        concrete = {c for c in subclasses(base) if "kind" in c.__annotations__}
        assert concrete == set(registry.values())
        assert {kind: c.model_fields["kind"].default for kind, c in registry.items()} == {k: k for k in registry}
