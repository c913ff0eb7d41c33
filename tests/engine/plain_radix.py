"""A radix tree of tokens written the plain way: a table of texts, searched from end to end for every question."""

from __future__ import annotations

from dataclasses import dataclass

Text = tuple[int, ...]


@dataclass
class Node:
    """The end of a text in the table: its tokens from `start` on."""

    start: int
    used: int
    locks: int = 0


class PlainRadix:
    """Pages of texts, found by their tokens, evicted by whole leaves that were used least recently."""

    def __init__(self, total: int, page: int) -> None:
        self.page, self.blank, self.clock = page, total, 0
        self.nodes: dict[Text, Node] = {}
        self.ends: dict[int, Text] = {}  # the locked text of each request

    @property
    def free(self) -> int:
        """Blank pages, and those that nobody holds."""
        idle = sum(len(text) - node.start for text, node in self.nodes.items() if not node.locks)
        return self.blank + idle // self.page

    def find(self, tokens: Text) -> int:
        """The number of tokens found; all that was found is used."""
        self.clock += 1
        stop, at = len(tokens) // self.page * self.page, 0
        while at < stop:
            for text, node in self.nodes.items():
                common = 0
                while common < min(len(text), stop) and text[common] == tokens[common]:
                    common += 1
                common -= common % self.page
                if node.start == at and common > at:
                    break
            else:
                break
            node.used = self.clock
            if common < len(text):
                self.nodes[text[:common]] = Node(at, self.clock, node.locks)
                node.start = common
                return common
            at = common
        return at

    def lock(self, text: Text, by: int) -> None:
        """Lock (1) or unlock (-1) a text."""
        for end, node in self.nodes.items():
            if text[: len(end)] == end:
                node.locks += by

    def hold(self, number: int, tokens: Text, found: int) -> None:
        """Let a request lock what it has found."""
        self.find(tokens[:found])
        self.ends[number] = tokens[:found]
        self.lock(tokens[:found], 1)

    def enter(self, number: int, tokens: Text, prompt: int) -> None:
        """Enter the tokens that a request has computed; pages that are there already come free."""
        stop, before = len(tokens) // self.page * self.page, self.ends.get(number, ())
        if stop <= len(before):
            return
        present = self.find(tokens)
        if present < stop:
            self.clock += 1
            self.nodes[tokens[:stop]] = Node(present, self.clock)
        self.blank += max(0, present - len(before)) // self.page
        self.lock(tokens[:stop], 1)
        self.lock(before, -1)
        self.ends[number] = tokens[:stop]
        if prompt // self.page * self.page < stop:
            self.find(tokens[:prompt])

    def leave(self, number: int, pages: int) -> None:
        """Free the pages of a request: those of its own, and the locks of the others."""
        text = self.ends.pop(number, ())
        self.blank += pages - len(text) // self.page
        self.lock(text, -1)

    def take(self, pages: int) -> None:
        """Take free pages, blank ones first."""
        self.blank -= pages
        while self.blank < 0:
            inner = {text[: node.start] for text, node in self.nodes.items()}
            leaf = min(
                (text for text, node in self.nodes.items() if not node.locks and text not in inner),
                key=lambda text: self.nodes[text].used,
            )
            self.blank += (len(leaf) - self.nodes.pop(leaf).start) // self.page
