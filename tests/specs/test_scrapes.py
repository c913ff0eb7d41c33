"""Scrapes of vLLM's metrics: read, told apart, subtracted, made a load, and refused by what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from simtune.errors import SpecError, UsageError
from simtune.specs.scrapes import OUTPUT, PROMPT, TTFT, Histogram, intervals, read_scrape
from simtune.specs.traces import read_trace
from simtune.specs.workload import Piecewise, Poisson
from simtune.workload.requests import build_stream
from simtune.workload.scrape_fit import ScrapedLoad, fit_scrapes

EDGES = [m * 10.0**e for e in range(5) for m in (1, 2, 5)]
"""As vLLM has them up to the longest request."""
TTFT_EDGES = [0.001, 0.01, 0.1, 1.0, 10.0]
LABELS = 'engine="0",model_name="meta-llama/Llama \\"3\\""'


def histogram(name: str, edges: Sequence[float], values: Sequence[float], labels: str = LABELS, at: str = "") -> str:
    below = [*(sum(v <= edge for v in values) for edge in edges), len(values)]
    lines = [f"# HELP {name} Histogram of something.", f"# TYPE {name} histogram"]
    named = zip([*map(str, edges), "+Inf"], below, strict=True)
    lines += [f'{name}_bucket{{le="{edge}",{labels}}} {float(count)}{at}' for edge, count in named]
    return "\n".join(
        [*lines, f"{name}_count{{{labels}}} {len(values)}{at}", f"{name}_sum{{{labels}}} {sum(values)}{at}"]
    )


def requests(count: int, seed: int = 0) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(seed)
    prompt = np.clip(rng.lognormal(6, 1, count), 1, 40_000).astype(int)
    return prompt.tolist(), rng.integers(1, 400, count).tolist()


def scrape(folder: Path, name: str, prompt: Sequence[int], output: Sequence[int], at_ms: int | None = None) -> Path:
    at = "" if at_ms is None else f" {at_ms}"
    counters = [
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.",
        f"process_start_time_seconds 1.77e+09{at}",
        f'vllm:request_success_total{{finished_reason="stop",{LABELS}}} {len(prompt)}{at}',
        f"vllm:prompt_tokens_total{{{LABELS}}} {sum(prompt)}{at}",
        f"vllm:generation_tokens_total{{{LABELS}}} {sum(output)}{at}",
    ]
    waits = [0.05 * (1 + i % 4) for i in range(len(prompt))]
    parts = [histogram(PROMPT, EDGES, prompt, at=at), histogram(OUTPUT, EDGES, output, at=at)]
    path = folder / name
    path.write_text("\n".join([*counters, *parts, histogram(TTFT, TTFT_EDGES, waits, at=at), ""]))
    return path


def test_lengths_have_the_mean_and_the_shares_that_the_server_counted(tmp_path: Path) -> None:
    prompt, output = requests(3000)
    load = fit_scrapes([read_scrape(scrape(tmp_path, "a", prompt, output))], "a", span_s=600.0)
    assert load.workload.arrivals == Poisson(rate_rps=5.0)
    assert load.workload.requests == 3000
    stream = build_stream(load.workload, None, requests=40_000, seed=1)
    for true, drawn in ((prompt, stream.prompt_tokens), (output, stream.output_tokens)):
        assert drawn.mean() == pytest.approx(np.mean(true), rel=0.03)
        for edge in EDGES:
            assert (drawn <= edge).mean() == pytest.approx(np.mean(np.array(true) <= edge), abs=0.01)
    for a in load.agreements:
        assert a.recorded is not None
        assert a.drawn == pytest.approx(a.recorded, rel=0.03, abs=0.01), a.what
    assert load.notes == ("read as a scrape of vLLM: rates are of answers",)
    ((metric, (mean, median, p99)),) = load.latencies
    assert metric == "TTFT"
    assert mean == pytest.approx(0.125)
    assert median is not None
    assert 0.05 < median < 0.2
    assert p99 is not None
    assert p99 <= 1.0


def test_what_came_between_scrapes_is_a_rate_for_each_interval(tmp_path: Path) -> None:
    prompt, output = requests(600)
    counts = ((0, 0), (60_000, 100), (120_000, 600))
    files = [scrape(tmp_path, f"s{at}", prompt[:n], output[:n], 1_770_000_000_000 + at) for at, n in counts]
    scrapes = [read_scrape(path) for path in reversed(files)]  # put in order by their own clock
    load = fit_scrapes(scrapes, "day")
    assert isinstance(load.workload.arrivals, Piecewise)
    segments = load.workload.arrivals.segments
    assert [s.for_s for s in segments] == [60.0, 60.0]
    assert [s.rate_rps for s in segments] == pytest.approx([100 / 60, 500 / 60])
    assert fit_scrapes(scrapes[:2], "half").agreements[0].recorded == pytest.approx(500 / 60)
    given = fit_scrapes(scrapes, "given", rate_rps=2.0)
    assert given.workload.arrivals == Poisson(rate_rps=2.0)


def test_a_server_that_began_anew_loses_only_what_it_lost(tmp_path: Path) -> None:
    prompt, output = requests(300)
    pieces = [(prompt, output), (prompt[:40], output[:40])]
    files = [scrape(tmp_path, f"{i}", *piece, 1000 * (i + 1)) for i, piece in enumerate(pieces)]
    scrapes = [read_scrape(path) for path in files]
    (between,) = intervals(scrapes)
    assert (between.anew, between.histograms[PROMPT].count, between.seconds) == (True, 40, 1.0)
    assert any("began anew 1 times" in note for note in fit_scrapes(scrapes, "a").notes)


def test_engines_are_added_up_and_seconds_of_openmetrics_are_seconds(tmp_path: Path) -> None:
    one, two = 'engine="0",model_name="m"', 'engine="1",model_name="n"'
    parts = [histogram(name, EDGES, [3, 30], labels, " 12.5") for name in (PROMPT, OUTPUT) for labels in (one, two)]
    path = tmp_path / "m.txt"
    path.write_text("\n".join([*parts, "# EOF", ""]))
    read = read_scrape(path)
    assert (read.histograms[PROMPT].count, read.histograms[PROMPT].total) == (4, 66)
    assert (read.time_s, read.models) == (12.5, ("m", "n"))
    assert any("2 models are added up: m, n" in note for note in fit_scrapes([read], "m", rate_rps=1).notes)


def test_tokens_of_requests_that_have_not_ended_are_told(tmp_path: Path) -> None:
    path = scrape(tmp_path, "a", [100] * 10, [10] * 10)

    def notes(prompt_tokens: int) -> list[str]:
        other = tmp_path / "b"
        other.write_text(path.read_text().replace(f"}} {sum([100] * 10)}\n", f"}} {prompt_tokens}\n", 1))
        return [note for note in fit_scrapes([read_scrape(other)], "b", rate_rps=1).notes if "not all of" in note]

    assert notes(1049) == []
    assert notes(1060) == [
        "vllm:prompt_tokens_total is 1,060, and requests that ended had 1,000: not all of them ended"
    ]


def test_quantiles_are_those_of_prometheus() -> None:
    known = Histogram((1.0, 2.0, 4.0, float("inf")), (0.0, 4.0, 8.0, 10.0), 30.0)
    assert [known.quantile(level) for level in (0.2, 0.4, 0.6, 0.99)] == [1.5, 2.0, 3.0, 4.0]
    assert known.mean == 3.0
    assert Histogram((1.0, float("inf")), (0.0, 0.0), 0.0).quantile(0.5) is None


def refused(path: Path) -> str:
    with pytest.raises(SpecError) as error:
        read_scrape(path)
    return str(error.value).removeprefix(str(path))


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    good_file = scrape(tmp_path, "good", *requests(50))
    good = good_file.read_text()
    path = tmp_path / "bad"
    lines = good.splitlines()

    def wrong(text: str) -> str:
        path.write_text(text)
        return refused(path)

    assert wrong(good.replace(OUTPUT, "vllm:other")) == (
        f": {OUTPUT}: this histogram is missing; found: vllm:other, {PROMPT}, {TTFT}"
    )
    assert wrong("# TYPE x counter\nx 1\n").endswith("without any metric of vLLM; theirs begin with vllm:")
    assert wrong(good + "half a line").startswith(f":{len(lines) + 1}: is no sample of a scrape")
    assert "must be a number, not many" in wrong(good.replace(f"{LABELS}}} 50", f"{LABELS}}} many", 1))
    assert 'the bucket le="+Inf" is missing' in wrong("\n".join(x for x in lines if "+Inf" not in x))
    assert f"{PROMPT}_sum: is missing" in wrong("\n".join(x for x in lines if f"{PROMPT}_sum" not in x))
    assert "a bucket needs its upper edge, le" in wrong(good.replace('le="1.0",', "", 1))
    falling = good.replace(f'{PROMPT}_bucket{{le="1.0",{LABELS}}} 0.0', f'{PROMPT}_bucket{{le="1.0",{LABELS}}} 99')
    assert "the counts of its buckets must not fall" in wrong(falling)
    negative = good.replace(f'{PROMPT}_bucket{{le="1.0",{LABELS}}} 0.0', f'{PROMPT}_bucket{{le="1.0",{LABELS}}} -1')
    assert "must be a count, not -1" in wrong(negative)
    alone = "\n".join(x for x in lines if not x.startswith(f"{PROMPT}_bucket") or "+Inf" in x)
    assert f'{PROMPT}: has no bucket but le="+Inf"' in wrong(alone)
    path.write_text(good.replace(f'{PROMPT}_bucket{{le="1.0",', f'{PROMPT}_bucket{{le="1.5",'))
    with pytest.raises(
        SpecError, match=f"{path}: {PROMPT}: has other buckets than {good_file}; read them in separate commands"
    ):
        intervals([read_scrape(good_file), read_scrape(path)])


def test_without_a_time_a_rate_is_asked_for(tmp_path: Path) -> None:
    prompt, output = requests(80)
    first, second = (read_scrape(scrape(tmp_path, f"s{n}", prompt[:n], output[:n])) for n in (20, 80))
    with pytest.raises(UsageError, match="since the server began with --span 30m, or set --rate"):
        fit_scrapes([first], "a")
    with pytest.raises(UsageError, match="between the first and the last scrape"):
        fit_scrapes([first, second], "a")
    with pytest.raises(UsageError, match="no request ended"):
        fit_scrapes([first, first], "a", span_s=60.0)
    load: ScrapedLoad = fit_scrapes([first, second], "a", span_s=60.0)
    assert load.workload.arrivals == Poisson(rate_rps=1.0)
    with pytest.raises(SpecError, match="counts requests and holds none; make a load of it: simtune workload"):
        read_trace(Path(first.file))
