"""What a load is said to be is what it is, and a spec fitted to what a spec drew comes back to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simtune.arrays import Ints
from simtune.errors import UsageError
from simtune.specs.traces import Trace
from simtune.specs.workload import (
    Arrivals,
    FixedInterval,
    FixedLength,
    Gamma,
    Lognormal,
    Piecewise,
    Poisson,
    Segment,
    Workload,
)
from simtune.workload.length_fit import CLOSE, fit_lengths
from simtune.workload.load import (
    dispersion,
    kolmogorov_distance,
    length_facts,
    load_facts,
    rates_over_time,
    shared_share,
)
from simtune.workload.load_fit import fit_workload
from simtune.workload.requests import build_stream
from simtune.workload.sampling import lengths_at

CHANGING = Piecewise(segments=(Segment(for_s=200, rate_rps=2), Segment(for_s=200, rate_rps=12)))


def drawn(arrivals: Arrivals, count: int = 4000, seed: int = 3) -> Trace:
    lengths = Lognormal(mean_tokens=500, sigma=1.0, max_tokens=8000)
    load = Workload(name="w", arrivals=arrivals, prompt=lengths, output=FixedLength(tokens=64))
    stream = build_stream(load, None, requests=count, seed=seed)
    assert stream.arrival_s is not None
    return Trace("t", "0" * 64, stream.arrival_s - stream.arrival_s[0], stream.prompt_tokens, stream.output_tokens)


@pytest.mark.parametrize("arrivals", [Gamma(rate_rps=5, cv=3.0), CHANGING], ids=["gamma", "piecewise"])
def test_the_kind_of_arrivals_is_found_again(arrivals: Arrivals) -> None:
    fitted = fit_workload(drawn(arrivals), "again")
    assert fitted.workload.arrivals.kind == arrivals.kind
    distances = dict(fitted.arrivals)
    assert min(distances, key=distances.__getitem__) == arrivals.kind
    assert fitted.workload.prompt.kind == "lognormal"
    assert fitted.workload.output == FixedLength(tokens=64)
    assert fitted.lost == ()
    rate = next(a for a in fitted.agreements if a.what == "requests/s")
    assert rate.recorded is not None
    assert rate.drawn == pytest.approx(rate.recorded, rel=0.1)


@pytest.mark.parametrize("jitter", [0.0, 1e-4], ids=["exact", "in ten thousandths"])
def test_even_gaps_are_those_of_a_clock(jitter: float) -> None:
    clock = drawn(FixedInterval(rate_rps=3), 400)
    assert clock.arrival_s is not None
    late = jitter * np.random.default_rng(1).uniform(-1, 1, 400)
    fitted = fit_workload(replace(clock, arrival_s=clock.arrival_s + np.sort(late)), "again")
    assert fitted.workload.arrivals.kind == "fixed"
    assert fitted.fit == "close"
    assert dict(fitted.arrivals)["fixed"] < 0.01 < dict(fitted.arrivals)["poisson"]


def test_gaps_that_are_all_but_even_are_no_clock() -> None:
    fitted = fit_workload(drawn(Gamma(rate_rps=5, cv=0.2)), "again")
    assert fitted.workload.arrivals.kind == "gamma"
    assert fitted.fit == "close"


def test_a_fit_is_judged() -> None:
    trace = drawn(FixedInterval(rate_rps=3), 400)
    assert trace.arrival_s is not None
    pairs = np.repeat(trace.arrival_s[::2], 2)  # two at a time, which no kind of arrivals does
    assert fit_workload(replace(trace, arrival_s=pairs), "pairs").fit == "poor"
    assert fit_workload(Trace("t", "", None, np.array([5, 6]), np.array([1, 2])), "t", rate_rps=2.0).fit is None


def test_poisson_arrivals_are_no_burstier_than_poisson() -> None:
    fitted = fit_workload(drawn(Poisson(rate_rps=5)), "again")
    arrivals = fitted.workload.arrivals
    assert isinstance(arrivals, Poisson) or (isinstance(arrivals, Gamma) and arrivals.cv == pytest.approx(1, abs=0.05))


def test_lengths_without_a_shape_are_kept_by_quantiles_as_closely_as_promised() -> None:
    tokens = np.concatenate([np.full(300, 7), np.full(300, 4000), np.arange(1000, 1400)])
    lengths = fit_lengths(tokens)
    assert lengths.kind == "quantiles"
    assert kolmogorov_distance(tokens, lengths_at(lengths, np.linspace(0, 0.9999, 5000))) < CLOSE


def test_what_a_spec_cannot_keep_is_said() -> None:
    lengths = np.arange(1, 101)
    blocks = tuple((0, i) for i in range(1, 101))
    trace = Trace("t", "", np.arange(100.0), lengths + 31, lengths, blocks, 16, np.arange(100) // 2)
    assert fit_workload(trace, "t").lost == (
        "prompt and output lengths go together (rank correlation 1.00); the spec draws them apart",
        "19.4% of prompt tokens were seen before; the spec shares nothing",
        "50 conversations; the spec has none",
    )


@pytest.mark.parametrize("prompt", [np.full(100, 800), np.arange(100) // 50])
def test_equal_lengths_do_not_go_together_by_their_place_in_the_trace(prompt: Ints) -> None:
    output = np.where(np.arange(100) % 50 < 25, 100, 200)
    assert fit_workload(Trace("t", "", np.arange(100.0), prompt + 1, output), "t").lost == ()


def test_lengths_alone_need_a_rate() -> None:
    trace = Trace("t", "", None, np.array([5, 6]), np.array([1, 2]))
    with pytest.raises(UsageError, match="set one with --rate"):
        fit_workload(trace, "t")
    assert fit_workload(trace, "t", rate_rps=2.0).workload.arrivals == Poisson(rate_rps=2.0)


def test_facts_of_a_small_load() -> None:
    trace = Trace("t", "", np.arange(17.0), np.full(17, 32), np.arange(1, 18), tuple([(0, 1)] * 17), 16)
    facts = load_facts(trace)
    assert (facts.requests, facts.span_s, facts.rate_rps, facts.gap_cv) == (17, 16.0, 1.0, 0.0)
    assert (facts.bin_s, facts.rates_rps) == (8.0, (1.0, 1.125))
    assert sum(facts.output_tokens.counts) == sum(facts.prompt_tokens.counts) == 17
    assert len(facts.output_tokens.edges) == len(facts.output_tokens.counts) + 1
    assert (facts.output_tokens.edges[0], facts.output_tokens.edges[-1]) == (1, 18)
    assert (facts.prompt_tokens.edges, facts.prompt_tokens.counts) == ((32, 33), (17,))
    assert facts.output_tokens.p50 == 9
    assert facts.shared_prompt_share == 16 / 17


def test_a_load_that_does_not_say_when_its_requests_came_has_no_rates() -> None:
    facts = load_facts(Trace("t", "", None, np.array([5, 6]), np.array([1, 2])), users=3)
    assert (facts.span_s, facts.rate_rps, facts.peak_rps, facts.gap_cv) == (None, None, None, None)
    assert (facts.bin_s, facts.rates_rps, facts.users) == (None, (), 3)


def test_sharing_ends_at_the_first_block_that_is_new() -> None:
    assert shared_share([(1, 2), (1, 3), (4, 2)], 10, np.array([20, 20, 20])) == pytest.approx(10 / 60)
    assert shared_share(None, 10, np.array([20])) is None


def test_dispersion_is_one_for_poisson_and_zero_for_a_clock() -> None:
    poisson = drawn(Poisson(rate_rps=5), 20_000).arrival_s
    assert poisson is not None
    assert dispersion(poisson, 5.0) == pytest.approx(1.0, abs=0.15)
    assert dispersion(np.arange(0, 1000, 0.5), 5.0) == pytest.approx(0.0, abs=0.01)
    assert dispersion(np.arange(10.0), 5.0) is None
    rates, width = rates_over_time(np.arange(100.0))
    assert rates.sum() * width == pytest.approx(100)


def test_lengths_are_counted_in_forty_bins() -> None:
    """Bins of short lengths would be narrower than a token, and are joined."""
    assert len(length_facts(np.arange(1000, 100_000)).counts) == 40
    assert len(length_facts(np.array([1, 2, 3, 4])).counts) == 4
