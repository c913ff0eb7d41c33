"""A schedule for drafts in plain data, for reports and JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from simtune.specs.acceptance import Rates
from simtune.specs.schemes import Scheme
from simtune.specs.trees import weight
from simtune.tuner.drafting.chain import expected_tokens
from simtune.tuner.drafting.choose import Schedule
from simtune.tuner.drafting.study_drafters import Draft


def described(draft: Draft, chosen: Schedule) -> dict[str, Any]:
    """Return plain data of a schedule: the best setting of every cell, gains, the chain of each batch size, and the
    draft of the cell that gains most."""
    cells = [[chosen.best(b, c) for c in chosen.contexts] for b in chosen.batches]
    fixed, fixed_gain = chosen.fixed()
    gains = np.where(chosen.shares > 0, chosen.gains(), 0)
    row, column = np.unravel_index(int(gains.argmax()), gains.shape)
    return {
        "drafter": draft.choice.label,
        "acceptance": {"name": draft.drafting.acceptance.name, "origin": draft.drafting.acceptance.origin},
        "batches": list(chosen.batches),
        "contexts": list(chosen.contexts),
        "cells": [
            [
                {
                    "scheme": s.in_words(),
                    "short": s.in_short(),
                    "off": s.scheme is None,
                    "gain": gain,
                    "occurs": share > 0,
                }
                for (s, gain), share in zip(row, shares, strict=True)
            ]
            for row, shares in zip(cells, chosen.shares.tolist(), strict=True)
        ],
        "chain_lengths": chosen.chain_lengths().tolist(),
        "gain": chosen.gain,
        "fixed": {"scheme": fixed.in_words(), "gain": fixed_gain},
        "by_batch": _by_batch(draft, chosen),
        "draft": {
            "batch": chosen.batches[row],
            "context": chosen.contexts[column],
            "nodes": _nodes(cells[row][column][0].scheme, draft.drafting.acceptance.rates),
        },
    }


def _by_batch(draft: Draft, chosen: Schedule) -> list[dict[str, Any]]:
    """Return for each batch size the tokens that a round of vLLM's chain yields and wastes, per sequence."""
    scheme = chosen.by_batch().scheme
    rows = []
    for batch in chosen.batches:
        length = 0 if scheme is None else scheme.tokens_for(batch)
        tokens = expected_tokens(draft.drafting.acceptance.rates.chain(length))
        rows.append({"batch": batch, "draft_tokens": length, "tokens": tokens, "wasted": length + 1 - tokens})
    return rows


def _nodes(scheme: Scheme | None, rates: Rates) -> list[dict[str, Any]]:
    """Return the drafted tokens, each by the ranks along its path, with the probability that the target takes it."""
    if scheme is None:
        return []
    ranks = rates.ranks(scheme.shape.depth)
    nodes = sorted(scheme.tree(ranks))
    return [{"path": list(node), "probability": weight(node, ranks)} for node in nodes]
