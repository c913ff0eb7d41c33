"""Run directories as `optimize` and `simulate` write them, from a toy queue so that their numbers agree."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simtune.runs.schema import CandidateRow
from simtune.runs.tables import columns
from simtune.specs.plan import Plan
from simtune.specs.pool import Batching, Parallelism, Pool
from simtune.specs.study import HardwareCount, Search, Study
from simtune.specs.workload import Slo

SLO = {"ttft": 1.0, "tpot": 0.040}
RunMaker = Callable[..., Path]


def _name(tp: int, instances: int, seqs: int) -> str:
    return f"tp{tp}-pp1-x{instances}-s{seqs}-t8192"


def _tpot_s(tp: int, batch: float) -> float:
    return float(0.0075 / tp**0.7 + 1.1e-4 * batch / tp**0.8)


def _at(tp: int, instances: int, seqs: int, rate_rps: float) -> dict[str, float]:
    """A plan under a load: batch by Little's law (200 output tokens), waiting as in an M/M/1 queue."""
    per_instance = rate_rps / instances
    batch = 1.0
    for _ in range(60):
        batch = min(per_instance * 200 * _tpot_s(tp, batch), seqs)
    utilisation = min(per_instance * 200 * _tpot_s(tp, batch) / seqs, 0.999)
    queue_s = 0.02 * utilisation / (1 - utilisation)
    ttft_p99_s, tpot_p99_s = 0.05 / tp + 4.6 * queue_s, 1.25 * _tpot_s(tp, batch)
    late = max(ttft_p99_s / SLO["ttft"], tpot_p99_s / SLO["tpot"])
    attainment = 1 / (1 + 0.01 * late ** (6 if late < 1 else 24))
    return {
        "rate_rps": rate_rps,
        "goodput_rps": rate_rps * attainment,
        "slo_attainment": attainment,
        "ttft_p99_s": ttft_p99_s,
        "tpot_p99_s": tpot_p99_s,
        "saturated": utilisation >= 0.999,
        "per_user": 1 / _tpot_s(tp, batch),
    }


def _capacity(tp: int, instances: int, seqs: int) -> dict[str, float]:
    """The plan at the highest rate, to a hundredth of a request/s, at which 99 % of requests meet the SLO."""
    best = _at(tp, instances, seqs, 0.01)
    low, high = 0.01, 400.0
    while high - low > 0.01:
        middle = (low + high) / 2
        found = _at(tp, instances, seqs, middle)
        in_time = found["ttft_p99_s"] <= SLO["ttft"] and found["tpot_p99_s"] <= SLO["tpot"]
        if in_time and found["slo_attainment"] >= 0.99 and not found["saturated"]:
            best, low = found, middle
        else:
            high = middle
    return best


def _quantiles(p99: float, floor: float, shape: float) -> list[float]:
    """101 quantiles of floor plus a Weibull tail through p99."""
    scale = (p99 - floor) / (-math.log(0.01)) ** shape
    return [floor + scale * (-math.log(1 - min(i / 100, 0.9995))) ** shape for i in range(101)]


def _metric(quantiles: list[float]) -> dict[str, Any]:
    mean = sum(quantiles) / len(quantiles)
    std = math.sqrt(sum((q - mean) ** 2 for q in quantiles) / len(quantiles))
    levels = {f"p{p}": quantiles[p] for p in (50, 90, 95, 99)}
    return {
        "unit": "s",
        "count": 2000,
        "mean": mean,
        "std": std,
        "min": quantiles[0],
        "max": quantiles[-1],
    } | levels


def _candidates() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for tp, gpus in ((1, 8), (2, 8), (4, 8), (8, 8), (1, 4), (2, 4)):
        for seqs in (32, 64, 128, 256):
            instances = gpus // tp
            at = _capacity(tp, instances, seqs)
            rows.append(
                {
                    "candidate": _name(tp, instances, seqs),
                    "tp": tp,
                    "pp": 1,
                    "instances": instances,
                    "num_gpus": gpus,
                    "max_num_seqs": seqs,
                    "max_num_batched_tokens": 8192,
                    "speculation": "",
                    "status": "feasible",
                    "reason": "",
                    "kv_blocks": 27000 * tp - 7000,
                    "rate_bound_rps": at["rate_rps"] * 1.3,
                    "rate_rps": at["rate_rps"],
                    "goodput_rps": at["goodput_rps"],
                    "goodput_rps_per_gpu": at["goodput_rps"] / gpus,
                    "output_tokens_per_s_per_gpu": at["rate_rps"] * 200 / gpus,
                    "output_tokens_per_s_per_user": at["per_user"],
                    "ttft_mean_s": at["ttft_p99_s"] / 4,
                    "ttft_p99_s": at["ttft_p99_s"],
                    "tpot_mean_s": 1 / at["per_user"],
                    "tpot_p99_s": at["tpot_p99_s"],
                    "slo_attainment": at["slo_attainment"],
                    "saturated": "false",
                    "simulations": 9,
                }
            )
    rows.sort(key=lambda r: (-r["goodput_rps_per_gpu"], r["candidate"]))
    rows[0]["status"] = "chosen"
    known = (
        "candidate",
        "tp",
        "pp",
        "instances",
        "num_gpus",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_blocks",
    )
    for rank, row in enumerate(rows, 1):
        row["rank"] = rank
        if rank > 18:
            row |= {k: "" for k in row if k not in (*known, "rate_bound_rps")}
            row |= {
                "status": "pruned",
                "reason": f"bound {row['rate_bound_rps'] / 8:.2f} requests/s/GPU is below the best",
            }
        elif rank in (7, 12):
            row |= {
                "status": "infeasible",
                "reason": "p99 TTFT 1,240 ms exceeds 1,000 ms",
                "slo_attainment": 0.93,
            }
    rows.append(
        dict.fromkeys(rows[0], "")
        | {k: rows[0][k] for k in known}
        | {"candidate": "tp1-pp2-x4-s512-t8192", "pp": 2, "instances": 4, "kv_blocks": ""}
        | {"status": "does_not_fit", "reason": "weights leave no room for one KV block"}
    )
    return rows


def _breakdown() -> list[dict[str, Any]]:
    steps = []
    for step, tokens, context in (
        ("decode, 32 sequences at 1,400 tokens each", 32, 45_000),
        ("prefill, one prompt of 2,048 tokens", 2048, 2048),
        ("mixed, 64 decodes and a chunk of 1,024 tokens", 1088, 90_000),
    ):
        parts = [
            ("gemm", 4.4e-3 + 2.2e-6 * tokens, "published-tables"),
            (
                "decode_attention" if tokens == 32 else "prefill_attention",
                4e-8 * context + 1e-6 * tokens,
                "published-tables",
            ),
            ("elementwise", 3e-4 + 2e-7 * tokens, "data-sheet"),
            ("host", 4e-4, "assumed"),
        ]
        steps.append({"step": step, "parts": [{"operator": o, "seconds": s, "provenance": p} for o, s, p in parts]})
    return steps


def _timeline() -> dict[str, list[float]]:
    t_s = [float(i) for i in range(240)]
    running = [round(150 * (1 - math.exp(-t / 12)) + 14 * math.sin(t / 5) + 9 * math.sin(t / 1.7)) for t in t_s]
    return {
        "t_s": t_s,
        "running": [max(0.0, float(r)) for r in running],
        "waiting": [float(max(0, round(9 * math.sin(t / 11) ** 9))) for t in t_s],
        "kv_used": [min(1.0, max(0, r) * 1500 / 320_000) for r in running],
    }


def _study() -> Study:
    return Study(
        name="chat-on-h100",
        model="llama-3.1-8b",
        hardware=(HardwareCount(profile="h100-sxm", devices=8),),
        workload="chat",
        slo=Slo(ttft_s={"p99": SLO["ttft"]}, tpot_s={"p99": SLO["tpot"]}),
        search=Search(pp=(1, 2), max_num_seqs=(32, 64, 128, 256)),
    )


def _plan(row: dict[str, Any]) -> Plan:
    pool = Pool(
        hardware="h100-sxm",
        instances=row["instances"],
        parallelism=Parallelism(tp=row["tp"]),
        batching=Batching(max_num_seqs=row["max_num_seqs"], max_num_batched_tokens=8192),
    )
    return Plan(name="chat-on-h100", model="llama-3.1-8b", pools=(pool,))


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    best = rows[0]
    at = _capacity(best["tp"], best["instances"], best["max_num_seqs"])
    ttft, tpot = _quantiles(at["ttft_p99_s"], 0.03, 1.6), _quantiles(at["tpot_p99_s"], 0.008, 0.4)
    e2el = [a + 200 * b for a, b in zip(ttft, tpot, strict=True)]
    sweep, runners_up = [], []
    for row in [r for r in rows if r["status"] in ("chosen", "feasible")][:4]:
        for share in (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.05, 1.1, 1.2, 1.35):
            point = _at(row["tp"], row["instances"], row["max_num_seqs"], row["rate_rps"] * share)
            drafting = dict.fromkeys(("tokens_per_round", "wasted_per_round"))
            known = {k: v for k, v in point.items() if k != "per_user"}
            sweep.append({"candidate": row["candidate"]} | known | drafting)
        if row is not best:
            runners_up.append(
                {
                    "candidate": row["candidate"],
                    "ttft_quantiles_s": _quantiles(row["ttft_p99_s"], 0.02, 1.4),
                    "tpot_quantiles_s": _quantiles(row["tpot_p99_s"], 0.006, 0.5),
                }
            )
    return {
        "schema": "simtune/summary@2",
        "name": "chat-on-h100",
        "study": _study().to_data(),
        "plan": _plan(best).to_data(),
        "model": "llama-3.1-8b",
        "hardware": {
            "name": "h100-sxm",
            "engine": "vLLM 0.14.0",
            "device": "NVIDIA H100 SXM",
            "operators": [
                {
                    "key": key,
                    "median": median,
                    "p90": 3.1 * median,
                    "max": 9 * median,
                    "provenance": "published-tables",
                    "source": "a table of measured kernels, version 1",
                }
                for key, median in (
                    ("gemm.bf16", 0.021),
                    ("prefill_attention.bf16", 0.034),
                    ("decode_attention.bf16", 0.027),
                )
            ]
            + [
                {
                    "key": "elementwise.bf16",
                    "median": None,
                    "p90": None,
                    "max": None,
                    "provenance": "data-sheet",
                    "source": "memory bandwidth of the data sheet",
                }
            ],
            "estimated": [],
            "corrected": None,
            "validated": None,
        },
        "objective": {
            "name": "goodput_per_gpu",
            "unit": "requests/s/GPU",
            "value": at["goodput_rps"] / best["num_gpus"],
        },
        "slo": [
            {
                "metric": metric,
                "statistic": "p99",
                "limit_s": SLO[metric],
                "value_s": at[f"{metric}_p99_s"],
                "met": at[f"{metric}_p99_s"] <= SLO[metric],
                "class": None,
            }
            for metric in ("ttft", "tpot")
        ],
        "metrics": {
            "ttft": _metric(ttft),
            "tpot": _metric(tpot),
            "e2el": _metric(e2el),
            "queue": _metric([q * 0.4 for q in ttft]),
        },
        "offered_rate_rps": at["rate_rps"],
        "request_throughput_rps": at["rate_rps"] * 0.998,
        "goodput_rps": at["goodput_rps"],
        "slo_attainment": at["slo_attainment"],
        "output_tokens_per_s": at["rate_rps"] * 200,
        "total_tokens_per_s": at["rate_rps"] * 1600,
        "output_tokens_per_s_per_gpu": at["rate_rps"] * 200 / best["num_gpus"],
        "output_tokens_per_s_per_user": at["per_user"],
        "num_gpus": best["num_gpus"],
        "requests": 2000,
        "completed": 2000,
        "refused": 0,
        "unserved": 0,
        "resent": 0,
        "transferred_bytes": 0,
        "warm_up_requests": 100,
        "instances": [{"pool": "mixed", "instance": 0, "busy": 0.9, "requests": 2000}],
        "preemptions": 0,
        "saturated": False,
        "duration_s": 240.0,
        "seed": 0,
        "memory": {
            "total_bytes": 79.6 * 2**30,
            "weights_bytes": 15.0 * 2**30,
            "kv_bytes": 54.1 * 2**30,
            "other_bytes": 4.1 * 2**30,
            "kv_bytes_per_token": 131072.0,
            "num_blocks": 27699,
        },
        "sweep": sweep,
        "runners_up": runners_up,
        "quantiles": {"ttft_s": ttft, "tpot_s": tpot, "e2el_s": e2el},
        "breakdown": _breakdown(),
        "timeline": _timeline(),
        "pool_timelines": None,
    }


@pytest.fixture(scope="session")
def optimized() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and candidates of an optimize run; copy before changing."""
    rows = _candidates()
    return _summary(rows), rows


@pytest.fixture
def make_run(tmp_path: Path, optimized: tuple[dict[str, Any], list[dict[str, Any]]]) -> RunMaker:
    """`make_run(searched=True, **changed)`: a run directory, of a search or of one simulated plan.

    `changed` replaces top-level values of the summary; `candidates` replaces the rows of the table.
    """

    def make(searched: bool = True, candidates: list[dict[str, Any]] | None = None, **changed: Any) -> Path:
        summary, rows = optimized
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        alone = {} if searched else dict.fromkeys(("study", "objective", "sweep", "runners_up"))
        text = json.dumps({**summary, **alone, **changed}, indent=1, allow_nan=False)
        (folder / "summary.json").write_text(text, encoding="utf-8")
        if searched:
            with (folder / "candidates.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns(CandidateRow), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows if candidates is None else candidates)
        return folder

    return make
