"""The timeline of a report: what the page carries is what the run kept, and the table says the same in numbers."""

from __future__ import annotations

import base64
import gzip
import json
import re

from simtune.report import swimlanes_page
from simtune.report.page import render
from simtune.runs.run_reader import read_run
from simtune.runs.swimlanes import SWIMLANES_SCHEMA, CoreLane, RequestLife, Swimlanes
from tests.report.test_report_page import RunMaker, read

HOSTILE = "<img src=x onerror=alert(1)> 0"


def made_up(per_span: int = 1, lives: int = 1) -> Swimlanes:
    swimlane = CoreLane(
        instance=HOSTILE, core=0, blocks=100, start_us=(0, 400), length_us=(200, 600), steps=(1, 7),
        prefill_us=(200, 0), mixed_us=(0, 0), draft_us=(0, 0), decode_us=(0, 500), running_low=(1, 1),
        running_high=(1, 3), waiting_low=(0, 0), waiting_high=(0, 2), free_blocks_low=(90, 70),
        free_blocks_high=(90, 80), transfer_us=((100, 200),),
    )  # fmt: skip
    life = RequestLife(
        request=3, prompt_tokens=10, output_tokens=20, swimlane=0, arrival_us=0, scheduled_us=0, first_token_us=200,
        transferred_us=None, finish_us=1000, preempted_us=(), chunks=((0, 0, 200, 10),),
    )  # fmt: skip
    return Swimlanes(
        schema_id=SWIMLANES_SCHEMA, duration_us=1000, steps=8, steps_per_span=per_span, requests=1,
        swimlanes=(swimlane,),
        lives=(life,) * lives,
    )  # fmt: skip


def test_swimlane_table_shares_add_up_to_the_time_of_each_lane() -> None:
    (row,) = swimlanes_page.rows(made_up())
    assert row.cells == ("20.0 %", "0.0 %", "0.0 %", "50.0 %", "30.0 %")
    assert "8 steps in 2 spans; all of 1 requests." in swimlanes_page.note(made_up())
    assert "each of up to 5 neighbours" in swimlanes_page.note(made_up(per_span=5))
    assert "0 of 1 requests: the slowest" in swimlanes_page.note(made_up(lives=0))


def test_swimlane_data_of_the_run_is_embedded_and_escaped(make_run: RunMaker) -> None:
    run = make_run(searched=False)
    (run / "swimlanes.json.gz").write_bytes(made_up().to_bytes())
    page = render(read_run(run))
    reader = read(page)
    assert "Timeline" in reader.headings
    packed = gzip.decompress(base64.b64decode(reader.scripts["swimlane-data"]))
    assert json.loads(packed) == json.loads(gzip.decompress(made_up().to_bytes()))
    assert not [tag for tag, _ in reader.tags if tag == "img"]
    assert HOSTILE in reader.words  # in the table, as text
    labels = [a.get("aria-label") for tag, a in reader.tags if tag == "canvas"]
    assert labels
    assert "Arrow keys" in str(labels[0])


def test_colours_of_the_lanes_are_named_once(make_run: RunMaker) -> None:
    run = make_run(searched=False)
    (run / "swimlanes.json.gz").write_bytes(made_up().to_bytes())
    page = render(read_run(run))
    for kind in ("prefill", "mixed", "draft", "decode", "transfer", "queue"):
        assert len(re.findall(rf"--{kind}: #", page)) == 1
        assert f"kind-{kind}" in page
