"""Measures the operators of models on this machine with torch, and fits a hardware profile to what it found.

| module | content |
|---|---|
| `timing` | timing of one call: timers, samples, medians |
| `plan` | selection and order of the points to measure |
| `journal` | file of finished points, from which a run continues |
| `run` | the loop: rounds, sentinels, budget, refits |
| `fitting`, `checks` | from points to a profile, and how far off it is on points that no fit saw |
| `doubts`, `summary` | selection of suspicious points; summary of a run |
| `rig` | a device as torch sees it; with `operands`, `kernels`, `decoder` and `collectives` all that needs torch |
"""
