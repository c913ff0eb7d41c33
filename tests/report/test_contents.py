"""Table of contents: links to all headings of a page, without JavaScript, on every kind of page."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from simtune.report.contents import with_contents
from simtune.report.page import render
from simtune.runs.run_reader import read_run
from tests.report.test_report_page import Reader, own_part

PAGE = "<head>\n</head>\n<body>\n<header>\n</header>\n<main>\n{}</main>\n</body>"


def test_every_heading_has_a_link_that_leads_to_it(make_run: Any) -> None:
    page = own_part(render(read_run(make_run())))
    (contents,) = re.findall(r'<nav class="contents".*?</nav>', page)
    links = dict(re.findall(r'href="#([^"]+)">(.*?)</a>', contents))
    assert [*links.values()] == Reader(page).headings
    assert len(links) == len({*links})
    for anchor in links:
        assert page.count(f' id="{anchor}"') == 1
    assert 'href="#warnings"' in contents, "an id that a template sets is kept"


def test_a_page_with_a_single_heading_has_no_contents() -> None:
    for page in (PAGE.format("<h2>alone</h2>\n"), "<section><h2>a</h2><h2>b</h2></section>"):
        assert with_contents(page) == page
    assert with_contents(PAGE.format("<h2>a</h2>\n<h2>b &amp; c</h2>\n")).count("<li>") == 2


def test_the_frame_of_every_template_can_have_contents() -> None:
    """A page whose frame is written otherwise would be left without contents, unseen."""
    templates = [
        file for file in Path(str(files("simtune.report"))).glob("*.j2") if "<body>" in file.read_text("utf-8")
    ]
    assert len(templates) > 8
    for file in templates:
        text = file.read_text("utf-8")
        assert "</head>\n<body>" in text
        assert text.count("</header>\n") == 1
        assert not re.findall(r"<h2 (?!id=\"[^\"]*\">)", text), file.name
