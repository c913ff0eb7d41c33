"""Media that a spec draws into sessions whose turns follow answers: a turn adds items, later turns read them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from simtune.arrays import Ints
from simtune.specs.workload import SharedPrefix
from simtune.workload.media import RequestMedia, with_sound_within
from simtune.workload.session_draws import FIRST, Layout


def text_before_items(layout: Layout, prompt_tokens: Ints, added: Ints, prefix: SharedPrefix | None) -> Ints:
    """Return the tokens of text before the items that each turn adds: all text before the `added` tokens of the turn,
    and in the first turn of a session the whole blocks of the prefix that sessions share."""
    before: Ints = prompt_tokens - added
    if prefix is not None:
        blocks = np.minimum(prefix.tokens // prefix.block_tokens, added // prefix.block_tokens)
        before = before + np.where(np.array(layout.kind) == FIRST, blocks * prefix.block_tokens, 0)
    return before


def in_contexts(of_turns: RequestMedia, continues: Sequence[int], text_before: Ints) -> RequestMedia:
    """Return all items in the prompt of each turn, given those that each turn adds behind `text_before` tokens of text.

    `continues` are the turns whose text each turn continues, and whose items it reads again; -1 if it begins anew. An
    item that is read again counts as repeated.
    """
    begin = of_turns.begin.tolist()
    contexts: list[list[int]] = []
    for turn, parent in enumerate(continues):
        contexts.append([*(contexts[parent] if parent >= 0 else ()), *range(begin[turn], begin[turn + 1])])
    counts = np.array([len(context) for context in contexts], dtype=np.int64)
    at = np.fromiter(chain.from_iterable(contexts), dtype=np.int64, count=int(counts.sum()))
    media = of_turns.items_at(np.concatenate([[0], np.cumsum(counts)]), at)
    repeated = media.repeated | (np.bincount(at, minlength=len(of_turns))[at] > 1)
    if not media.sized:
        return replace(media, repeated=repeated)
    tokens_before = np.concatenate([[0], np.cumsum(media.shape[:, 3])])
    text = np.repeat(text_before, of_turns.per_request)[at]
    start = tokens_before[:-1] - np.repeat(tokens_before[media.begin[:-1]], counts) + text
    return with_sound_within(replace(media, repeated=repeated, start=start))
