"""Measures the operators of models on this machine with torch, and fits a hardware profile to what it found.

| module | what it knows |
|---|---|
| `timing` | how a call is timed: clocks, samples, medians |
| `plan` | which points are worth measuring, and in which order |
| `journal` | the file of finished points, from which a run goes on |
| `run` | rounds, sentinels, budget, refits: everything but torch |
| `rig` | a device as torch sees it; with `operands`, `kernels`, `decoder` and `collectives` all that needs torch |
"""
