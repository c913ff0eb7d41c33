"""Matrix products of whole models under tensor parallelism, from tables that no shipped profile is fitted on."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simtune.costs.tables import Origin, Table

ORIGIN = Origin("published", "see the data's own README")


class Product(NamedTuple):
    m: int
    n: int
    k: int
    tp: int
    seconds: float


def vidur(folder: Path) -> Iterator[Product]:
    for path in sorted(folder.glob("*_mlp.csv.gz")):
        for r in _rows(path):
            heads, kv, hidden, wide = (int(r[k]) for k in ("n_head", "n_kv_head", "n_embd", "n_expanded_embd"))
            m, tp = int(r["num_tokens"]), int(r["num_tensor_parallel_workers"])
            products = {
                "attn_pre_proj": ((heads + 2 * kv) * hidden // heads // tp, hidden),
                "attn_post_proj": (hidden, hidden // tp),
                "mlp_up_proj": (2 * wide // tp, hidden),
                "mlp_down_proj": (hidden, wide // tp),
            }
            for name, (n, k) in products.items():
                median_ms = r[f"time_stats.{name}.median"]
                if median_ms and float(median_ms) > 0:
                    yield Product(m, n, k, tp, float(median_ms) * 1e-3)


def llmservingsim(folder: Path) -> Iterator[Product]:
    for name, tp, hidden, wide, kv in (("8B", 1, 4096, 14336, 8), ("70B", 4, 8192, 28672, 8)):
        products = {
            "q_proj": (hidden // tp, hidden),
            "k_proj": (kv * 128 // tp, hidden),
            "o_proj": (hidden, hidden // tp),
            "gate_proj": (wide // tp, hidden),
            "down_proj": (hidden, wide // tp),
        }
        for r in _rows(folder / f"Llama-3.1-{name}_tp{tp}_layers.csv.gz"):
            if r["layer_name"] in products:
                yield Product(int(r["input"]), *products[r["layer_name"]], tp, int(r["latency(ns)"]) * 1e-9)


def gemm_table(products: Iterable[Product], name: str) -> Table:
    """A row for every shape; of repeated ones the last."""
    found = {product[:3]: product.seconds for product in products}
    shapes = np.array(list(found), dtype=np.float64)
    shape = dict(zip("mnk", shapes.T, strict=True))
    return Table("gemm", "bf16", shape, np.array(list(found.values())), ORIGIN, (name,))


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        yield from csv.DictReader(file)
