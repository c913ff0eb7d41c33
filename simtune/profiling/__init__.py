"""Measures the operators of models on this machine with torch, and fits a hardware profile to what it found.

| module | what it knows |
|---|---|
| `timing` | how a call is timed: clocks, samples, medians |
| `plan` | which points are worth measuring, and in which order |
| `journal` | the file of finished points, from which a run goes on |
| `run` | the loop: rounds, sentinels, budget, refits |
| `fitting`, `checks` | from points to a profile, and how far off it is on points that no fit saw |
| `doubts`, `summary` | which points are suspicious; what a run says of itself |
| `rig` | a device as torch sees it; with `operands`, `kernels`, `decoder` and `collectives` all that needs torch |
"""
