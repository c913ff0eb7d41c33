"""Every setting of what is reproduced has a source: which settings there are, who covers them, which are neutral."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from simtune.cli import cli
from simtune.report.published_page import render
from simtune.specs.setting_paths import leaves
from simtune.specs.systems import Systems
from simtune.validation.published import Finding, Findings, reproduce, select
from simtune.validation.published.collection import STORED, Entry, folder
from simtune.validation.published.coverage import CUT, HARDWARE, NEUTRAL, decisive, differing, doubled, without_source

RESULTS = Findings.model_validate(json.loads((folder() / STORED).read_text(encoding="utf-8")))
SOURCE = {"what": "a length", "source": "published", "where": "the paper"}


def entry(**fields: object) -> Entry:
    """An entry of a small model on one H100."""
    system = {
        "name": "one",
        "title": "One",
        "source": "a test",
        "claim": {"says": "x", "gain": 2, "band": [1.05, 20]},
        "variant": {},
        **fields,
    }
    shared = {"model": "llama-3.2-1b", "hardware": "h100-sxm", "pool": {"max_model_len": 4096}}
    family = Systems.model_validate(
        {"name": "mine", "title": "Mine", "setup": shared, "systems": [system]}, strict=False
    )
    return Entry(family, family.systems[0])


def paths(of: Entry) -> set[str]:
    """All paths of an entry."""
    return {setting.path for setting in of.family.settings(of.system)}


def found(**fields: object) -> Finding:
    """The finding of an entry."""
    (finding,) = reproduce([entry(**fields)], jobs=1)
    return finding


def test_settings_are_numbers_and_choices_by_their_keys() -> None:
    settings = {
        "pool": {"batching": {"policy": "static"}, "speculation": {"drafter": {"kind": "self"}}},
        "nodes": [[1], [1, 1]],
        "parts": [{"name": "a", "output": 3}, {"name": "b", "output": 4, "length": {"kind": "fixed", "tokens": 2}}],
    }
    assert list(leaves(settings)) == [
        ("pool.batching.policy", '"static"'),
        ("pool.speculation.drafter.kind", '"self"'),
        ("nodes", "[[1], [1, 1]]"),
        ("parts.output", "3"),
        ("parts.output", "4"),
        ("parts.length.tokens", "2"),
    ]


def test_phases_and_alternatives_have_settings_and_probes_have_none() -> None:
    phases = [{"times": 3, "setup": {"step": {"decodes": 2, "context": 9}}}]
    alternatives = [{"batching": {"max_num_seqs": n}} for n in (1, 4)]
    probe = {"what": "x", "setup": {"pool": {"parallelism": {"tp": 2}}}}
    of = entry(
        measure={"kind": "step"}, variant={"phases": phases, "beside": True, "best_of": alternatives}, probes=[probe]
    )
    assert paths(of) == {
        "model",
        "hardware",
        "pool.max_model_len",
        "pool.batching.max_num_seqs",
        "step.decodes",
        "step.context",
        "phases.times",
        "beside",
    }
    assert {s.value for s in of.family.settings(of.system) if s.path == "pool.batching.max_num_seqs"} == {"1", "4"}


@pytest.mark.parametrize(
    ("measure", "unread"),
    [
        ({"kind": "load"}, {"step.decodes"}),
        ({"kind": "highest_rate", "from_rps": 1, "to_rps": 2}, {"step.decodes", "workload.arrivals.rate_rps"}),
        ({"kind": "step"}, {"workload.arrivals.rate_rps", "workload.prompt"}),
        ({"kind": "memory"}, {"step.decodes", "workload.arrivals.rate_rps", "workload.prompt"}),
    ],
)
def test_what_a_measure_does_not_read_is_no_setting(measure: dict[str, object], unread: set[str]) -> None:
    load = {"arrivals": {"kind": "poisson", "rate_rps": 1}, "prompt": 8}
    of = entry(measure=measure, setup={"workload": load, "step": {"decodes": 1}})
    read = {"step.decodes", "workload.arrivals.rate_rps", "workload.prompt"} - unread
    assert paths(of) == {"model", "hardware", "pool.max_model_len"} | read


@pytest.mark.parametrize("own", [True, False])
def test_lengths_that_all_classes_have_of_their_own_are_no_settings(own: bool) -> None:
    classes = [{"name": "a", "share": 0.5, "prompt": 3, "output": 4}, {"name": "b", "share": 0.5, "output": 4}]
    classes[1] |= {"prompt": 3} if own else {}
    of = entry(setup={"workload": {"prompt": 9, "output": 9, "classes": classes}})
    assert ("workload.prompt" in paths(of)) == (not own)
    assert "workload.output" not in paths(of)


WITH_STEP = {**SOURCE, "covers": ["model", "hardware", "step"]}
STEPS = {"base": {"step": {"decodes": 1, "context": 300}}, "variant": {"step": {"decodes": 8, "context": 600}}}


def uncovered(*inputs: Mapping[str, object]) -> tuple[str, ...]:
    """What these inputs do not cover, of steps of one and of eight decodes."""
    return found(measure={"kind": "step"}, **STEPS, inputs=list(inputs)).uncovered


def test_a_path_covers_all_below_it_and_nothing_beside() -> None:
    assert uncovered({**SOURCE, "covers": ["model"]}) == ("hardware", "step.context", "step.decodes")
    assert uncovered({**SOURCE, "covers": ["model", "step"]}) == ("hardware",)
    assert uncovered({**SOURCE, "covers": ["model", "step.context"]}, {**SOURCE, "covers": ["hardware"]}) == (
        "step.decodes",
    )
    assert uncovered({**SOURCE, "covers": ["model", "hardware", "step"]}) == ()


def test_an_assumed_input_covers_the_values_that_it_varies() -> None:
    """A value of both sides is not covered by an input that varies it on one of them."""
    source = {**SOURCE, "covers": ["model", "hardware", "step.decodes"]}

    def assumed(**otherwise: object) -> dict[str, object]:
        return {"what": "contexts", "source": "assumed", "otherwise": [otherwise]}

    of_base, of_variant = ({side: {"step": {"context": 400}}} for side in ("base", "variant"))
    assert uncovered(source, assumed(**of_base)) == ("step.context",)
    assert uncovered(source, assumed(**of_base), assumed(**of_variant)) == ()
    assert uncovered(source, assumed(**of_base, **of_variant)) == ()


LOAD = {"arrivals": {"kind": "closed_loop", "users": 4}, "requests": 12, "prompt": 40}
COVERS = {**SOURCE, "covers": ["model", "workload.arrivals", "workload.prompt", "workload.output", "hardware"]}


@pytest.mark.parametrize(("seats", "neutral"), [(8, True), (2, False)])
def test_seats_are_neutral_if_nobody_waits_for_one(seats: int, neutral: bool) -> None:
    """The base would take half as long with twice two seats; the variant has answers of half the length."""
    finding = found(
        measure={"kind": "load", "metric": "duration"},
        setup={"workload": LOAD, "pool": {"batching": {"max_num_batched_tokens": 2048}}},
        base={"workload": {"output": 80}, "pool": {"batching": {"max_num_seqs": seats}}},
        variant={"workload": {"output": 40}, "pool": {"batching": {"max_num_seqs": 8}}},
        inputs=[COVERS],
    )
    assert finding.uncovered == (() if neutral else ("pool.batching.max_num_seqs",))
    assert finding.status == ("counts" if neutral else "assumed")


def gains(changed: Mapping[str, float]) -> Any:
    """Gains by the number of decodes of the base, which is doubled, and of the base's switch."""

    def gain_of(sides: Mapping[str, Mapping[str, Any]]) -> float:
        return changed[json.dumps(sides["base"])]

    return gain_of


@pytest.mark.parametrize(
    ("side", "path", "other", "gain", "neutral"),
    [
        ({"pool": {"parallelism": {"tp": 2}}}, "pool.parallelism.tp", {"pool": {"parallelism": {"tp": 4}}}, 2.01, True),
        ({"pool": {"parallelism": {"tp": 2}}}, "pool.parallelism.tp", {"pool": {"parallelism": {"tp": 4}}}, 2.1, False),
        ({"pool": {"parallelism": {"tp": 2}}}, "pool.parallelism.tp", {"pool": {"parallelism": {"tp": 4}}}, 0.0, False),
        ({"pool": {"max_model_len": 64}}, "pool.max_model_len", {"pool": {"max_model_len": 128}}, 0.0, True),
        ({"pool": {"max_model_len": 64}}, "pool.max_model_len", {"pool": {"max_model_len": 128}}, 2.1, False),
        ({"workload": {"requests": 4}}, "workload.requests", {"workload": {"requests": 8}}, 2.4, True),
        ({"workload": {"requests": 4}}, "workload.requests", {"workload": {"requests": 8}}, 2.6, False),
        (
            {"pool": {"kv_cache": {"prefix_caching": True}}},
            "pool.kv_cache.prefix_caching",
            {"pool": {"kv_cache": {"prefix_caching": False}}},
            2.0,
            True,
        ),
        (
            {"workload": {"output": {"max_tokens": 5}}, "pool": {"max_model_len": 9}},
            "workload.output.max_tokens",
            {"workload": {"output": {"max_tokens": 10}}, "pool": {"max_model_len": 18}},
            2.0,
            True,
        ),
        ({"workload": {"prompt": 4}}, "workload.prompt", {"workload": {"prompt": 8}}, 2.0, False),
    ],
)
def test_neutral_is_what_keeps_the_gain_when_doubled(
    side: dict[str, object], path: str, other: dict[str, object], gain: float, neutral: bool
) -> None:
    """A gain of 2, in a band from 1.5 to 2.5; a gain of 0 is of a side that does not fit."""
    changed = {json.dumps(other): gain}
    left_over = decisive([path], {"base": side}, 2.0, gains(changed), lambda x: 1.5 <= x <= 2.5)
    assert left_over == (() if neutral else (path,))


def test_what_differs_between_the_sides_is_not_neutral() -> None:
    """Four GPUs give nearly the gain of two over one, which comes from there being more than one."""
    step = {"measure": {"kind": "step"}, "setup": {"step": {"decodes": 1, "context": 64}}, "inputs": [WITH_STEP]}
    two = {"pool": {"parallelism": {"tp": 2}}}
    assert found(**step, variant=two).uncovered == ("pool.parallelism.tp",)
    of = entry(**step, base=two, variant=two)
    assert differing(of.family, of.system) == set()


def test_cards_that_differ_between_the_sides_are_not_neutral() -> None:
    load = {"arrivals": {"kind": "closed_loop", "users": 1}, "requests": 2, "prompt": 64}
    tokens = {"measure": {"kind": "load", "metric": "tokens"}, "inputs": [{**SOURCE, "covers": ["model", "workload"]}]}
    sides: dict[str, dict[str, object]] = {
        side: {"workload": {**load, "output": output}} for side, output in (("base", 30), ("variant", 17))
    }
    assert found(**tokens, **sides).status == "counts"
    sides["base"]["hardware"] = "b200"
    assert found(**tokens, **sides).uncovered == ("hardware",)


def test_a_setting_is_doubled_wherever_it_stands() -> None:
    fields = {"batching": {"max_num_seqs": 3}}
    side = {
        "pool": fields,
        "pools": [fields],
        "best_of": [fields, {}],
        "phases": [{"times": 2, "setup": {"pool": fields}}],
        "workload": {"classes": [{"prompt": {"max_tokens": 7}}]},
    }
    twice = {"batching": {"max_num_seqs": 6}}
    assert doubled(side, ["pool.batching.max_num_seqs", "workload.classes.prompt.max_tokens"]) == {
        "pool": twice,
        "pools": [twice],
        "best_of": [twice, {}],
        "phases": [{"times": 2, "setup": {"pool": twice}}],
        "workload": {"classes": [{"prompt": {"max_tokens": 14}}]},
    }


def test_the_stored_results_have_a_source_for_every_setting() -> None:
    """What is not covered is neutral, or the card of what is counted; what fell has a setting that is not."""
    for finding, stored in zip(RESULTS.findings, select([]), strict=True):
        if finding.status not in ("reproduced", "counts") and not finding.uncovered:
            continue
        bare = set(without_source(stored.family, stored.system))
        assert set(finding.uncovered) <= bare, finding.system
        candidates = {path for path in bare if path in NEUTRAL or path.endswith((f".{CUT}", HARDWARE))}
        candidates -= differing(stored.family, stored.system)
        assert bare - candidates <= set(finding.uncovered), finding.system
        assert bool(finding.uncovered) == (finding.status == "assumed"), finding.system
        if finding.status == "reproduced":
            assert HARDWARE not in bare, finding.system


def test_what_has_no_source_is_listed(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["reproduce", "mustdrop", "--jobs", "1"])
    assert "  settings without a source: hardware, model\n" in result.output
    listed = [finding for finding in RESULTS.findings if finding.uncovered]
    assert listed
    page = render(RESULTS, select([]))
    assert page.count("Settings without a source:") == len(listed)
    assert all(f"Settings without a source: {', '.join(finding.uncovered)}." in page for finding in listed)
