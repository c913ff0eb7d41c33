"""`simtune reproduce`: what is listed, what a journal keeps, and what a finding stands on."""

from __future__ import annotations

import json

import pytest

import simtune.validation.published
from tests.cli.conftest import Desk, call

FILE = """\
schema: simtune/systems@1
name: mine
title: Mine
setup: {model: llama-3.2-1b, hardware: h100-sxm, pool: {max_model_len: 4096}}
systems:
  - name: one
    title: One
    source: a test
    claim: {says: two at once take less than twice as long, gain: 2, band: [1.05, 4]}
    measure: {kind: step}
    not_modelled: [the weather]
    inputs:
      - {what: the batch, source: published, where: section 1, covers: [model, hardware, step, pool.parallelism]}
      - {what: a context, source: assumed, otherwise: [{base: {step: {context: 32}}}]}
    base: {step: {decodes: 1, context: 64}}
    variant: {step: {decodes: 2, context: 64}, pool: {parallelism: {tp: 2}}}
"""


@pytest.fixture
def own(desk: Desk) -> Desk:
    desk.write("mine.yaml", FILE)
    return desk


def test_the_list_names_systems_and_runs_none(own: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simtune.validation.published, "reproduce", lambda *a, **n: pytest.fail("nothing is to run"))
    said = call("reproduce", "mine.yaml", "medusa", "--list")
    document = call("reproduce", "mine.yaml", "medusa", "--list", "--json").json
    assert {row["system"] for row in document} >= {"medusa"}
    assert said.code == 0
    words = " ".join(said.out.split())
    assert "mine" in words
    assert "two at once take less than twice as long" in words
    assert "Medusa" in words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("reproduce", "mine.yaml", "--hardware", "l40"), None),
        (("reproduce", "mine.yaml", "--hardware", "l400"), "no hardware is called 'l400', did you mean l40?"),
        (("rank", "--hardware", "l400", "--model", "phi-4", "--workload", "chat"), "no hardware is called 'l400'"),
        (("rank", "--hardware", "l40s", "--model", "phi4", "--workload", "chat"), "no model is called 'phi4'"),
    ],
)
def test_hardware_and_models_that_are_not_there_are_refused(
    own: Desk, words: tuple[str, ...], message: str | None
) -> None:
    """Not reported of every system, as what cannot be run there is."""
    said = call(*words, "--jobs", 1, "--quiet")
    assert said.code == (0 if message is None else 2)
    assert message is None or message in said.err
    assert bool(said.out) == (message is None)


def test_finding_names_its_inputs(own: Desk) -> None:
    said = call("reproduce", "mine.yaml", "--jobs", 1, "--quiet")
    assert said.code == 0, said
    assert "1 of 1 reproduced" in said.out
    assert "  published: the batch (section 1)\n" in said.out
    assert "  assumed: a context; otherwise " in said.out
    assert "  not modelled: the weather\n" in said.out


def test_settings_without_a_source_are_listed_and_a_path_of_no_setting_is_refused(own: Desk) -> None:
    own.write("mine.yaml", FILE.replace("step, pool.parallelism]", "step.decodes]"))
    result = call("reproduce", "mine.yaml", "--jobs", 1, "--quiet")
    assert result.code == 0, result
    assert "0 of 1 reproduced" in result.out
    assert "  settings without a source: pool.parallelism.tp, step.context\n" in result.out
    own.write("mine.yaml", FILE.replace("pool.parallelism]", "pool.parallel]"))
    message = own.refused(call, "reproduce", "mine.yaml", "--jobs", 1, "--quiet")
    assert message.startswith("mine.yaml:13:")
    assert (
        "inputs.0.covers.3: no setting of one is called 'pool.parallel', did you mean pool.parallelism.tp?" in message
    )
    assert message.endswith("Correct the path or leave it out")


def test_fitted_inputs_are_stated_and_many_findings_print_a_table_only(own: Desk) -> None:
    one = FILE.partition("systems:\n")[2]
    fitted = one.replace("    not_modelled: [the weather]\n", "    chosen: the batch\n")
    own.write("mine.yaml", FILE.replace(one, fitted))
    said = call("reproduce", "mine.yaml", "--jobs", 1, "--quiet")
    assert said.code == 0, said
    assert "  chosen knowing the claim: the batch\n" in said.out
    assert "not modelled" not in said.out
    many = "".join(one.replace("name: one", f"name: s{i}").replace("title: One", f"title: S{i}") for i in range(40))
    own.write("mine.yaml", FILE.replace(one, many))
    told = call("reproduce", "mine.yaml", "--jobs", 1, "--quiet")
    assert "40 of 40 reproduced" in told.out
    assert "published: the batch" not in told.out


def test_on_other_hardware_the_profile_is_named_and_nothing_counted(own: Desk) -> None:
    there = call("reproduce", "mine.yaml", "--hardware", "l40s", "--jobs", 1, "--quiet")
    assert there.code == 0
    assert "elsewhere" in there.out
    assert "reproduced" not in there.out
    as_json = call("reproduce", "mine.yaml", "--hardware", "l40s", "--jobs", 1, "--quiet", "--json")
    assert as_json.json["hardware"] == "l40s"


def test_a_journal_keeps_findings_until_what_they_depend_on_changes(own: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("reproduce", "mine.yaml", "--journal", "kept.jsonl", "--jobs", 1, "--quiet", "--json")
    first = call(*command)
    kept = (own.folder / "kept.jsonl").read_text()
    assert [json.loads(line)["row"][0]["system"] for line in kept.splitlines()] == ["one"]
    ran: list[int] = []
    run = simtune.validation.published.reproduce

    def counted(entries: list[object], **named: object) -> object:
        ran.append(len(entries))
        return run(entries, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(simtune.validation.published, "reproduce", counted)
    assert call(*command).out == first.out
    assert ran == [0], "all of it was in the journal"
    assert (own.folder / "kept.jsonl").read_text() == kept
    own.write("mine.yaml", FILE.replace("decodes: 2", "decodes: 3"))
    assert call(*command).out != first.out
    there = call(*command, "--hardware", "l40s")
    assert there.json["findings"][0]["status"] == "elsewhere"
    assert ran == [0, 1, 1], "another question, and other hardware, are run"


def test_existing_page_is_not_overwritten(own: Desk) -> None:
    own.write("page.html", "mine")
    said = own.refused(call, "reproduce", "mine.yaml", "--html", "page.html", "--quiet")
    assert said == "page.html: exists already; give --force to replace it"
    assert call("reproduce", "mine.yaml", "--html", "page.html", "--force", "--quiet", "--jobs", 1).code == 0
    assert "two at once take less" in (own.folder / "page.html").read_text()


TWO = (
    FILE
    + """\
  - name: two
    title: Two
    source: a test
    claim: {says: nothing at once, gain: 2, band: [1.05, 4]}
    measure: {kind: step}
    base: {step: {context: 64}}
    variant: {step: {decodes: 2, context: 64}, pool: {parallelism: {tp: 2}}}
"""
)


def test_a_system_that_cannot_be_run_is_a_finding_beside_the_others(desk: Desk) -> None:
    desk.write("mine.yaml", TWO)
    said = call("reproduce", "mine.yaml", "--jobs", 1, "--json", "-q")
    assert said.code == 2
    assert said.err == "mine: two: cannot be run: " + said.json["findings"][1]["reason"] + "\n"
    assert [finding["status"] for finding in said.json["findings"]] == ["reproduced", "failed"]
    elsewhere = call("reproduce", "mine.yaml", "--hardware", "l4", "--jobs", 1, "-q")
    assert elsewhere.code == 0
    assert "mine: two: cannot be run: " in elsewhere.err
    assert "elsewhere" in elsewhere.out


def test_on_a_load_of_ones_own_a_gain_has_an_interval_and_where_it_pays(own: Desk) -> None:
    one = FILE[FILE.index("  - name: one") :]
    slower = """\
  - name: slower
    title: Slower
    source: a test
    claim: {says: less, gain: 0.9, band: [0.1, 1]}
    setup: {workload: {prompt: 100, output: 10}}
    variant: {pool: {async_scheduling: false}}
"""
    own.write("mine.yaml", FILE.replace(one, slower))
    own.write("load.yaml", LOAD)
    where = ("--model", "llama-3.2-1b", "--hardware", "l40s", "--workload", "load.yaml", "--quiet")
    said = call("reproduce", "mine.yaml", *where)
    assert said.code == 0, said.err
    assert "over assumed inputs" in " ".join(said.out.split())
    assert "Slower: pays nowhere from 1 to 64 users" in said.out
    as_json = call("reproduce", "mine.yaml", *where, "--json").json
    gain = as_json["gains"][0]
    assert gain["low"] == gain["gain"] == gain["high"] <= 1
    assert [point["at"] for point in gain["by_users"]] == [1, 8, 64]
    message = own.refused(call, "reproduce", "mine.yaml", "--model", "llama-3.2-1b", "--quiet")
    assert "needs --model, --hardware and --workload" in message


LOAD = """\
schema: simtune/workload@1
name: load
requests: 8
arrivals: {kind: poisson, rate_rps: 2}
prompt: {kind: fixed, tokens: 100}
output: {kind: fixed, tokens: 10}
"""
