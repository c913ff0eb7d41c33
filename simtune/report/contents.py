"""Table of contents of a page: links to its headings, which work without JavaScript."""

from __future__ import annotations

import re

HEADING = re.compile(r"<h2(?: id=\"(?P<id>[^\"]+)\")?>(?P<text>.*?)</h2>", re.DOTALL)
BODY = "</head>\n<body>"
HEADER_END = "</header>\n"
FEWEST = 2
"""Headings of a page from which on it gets a table of contents."""


def with_contents(page: str) -> str:
    """Return a page with an id on every heading, and links to all of them behind its header.

    A page without a header, or with a single heading, is returned as it is.
    """
    head, body, text = page.partition(BODY)
    header, end, main = text.partition(HEADER_END)
    titles: list[tuple[str, str]] = []

    def numbered(heading: re.Match[str]) -> str:
        anchor = heading["id"] or f"section-{len(titles) + 1}"
        titles.append((anchor, heading["text"]))
        return f'<h2 id="{anchor}">{heading["text"]}</h2>'

    main = HEADING.sub(numbered, main)
    if not end or len(titles) < FEWEST:
        return page
    links = "".join(f'<li><a href="#{anchor}">{title}</a></li>' for anchor, title in titles)
    contents = f'<nav class="contents" aria-label="Contents"><ol>{links}</ol></nav>\n'
    return f"{head}{body}{header}{end}{contents}{main}"
