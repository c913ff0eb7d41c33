"""A sweep over rates with a plot: `python sweep_with_plot.py` writes sweep.html, which opens offline."""

import plotly.graph_objects as go

import simtune

RATES = (5, 10, 15, 20, 25)


def sweep(hardware: str) -> list[float]:
    """TPOT p99 in ms of one instance at every rate."""
    results = [
        simtune.simulate("chat", model="llama-3.1-8b", hardware=hardware, rate_rps=rate, requests=800) for rate in RATES
    ]
    return [1e3 * result.summary().metrics["tpot"].p99 for result in results]


if __name__ == "__main__":
    figure = go.Figure(layout={"xaxis_title": "requests/s", "yaxis_title": "TPOT p99, ms"})
    for hardware in ("h100-sxm", "h200-sxm"):
        tpot_ms = sweep(hardware)
        figure.add_trace(go.Scatter(x=RATES, y=tpot_ms, name=hardware))
        print(hardware, *(f"{x:.1f}" for x in tpot_ms))
    figure.write_html("sweep.html")
