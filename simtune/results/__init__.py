"""Results of a simulation: what happened to each request, statistics of it, and the summary of a run."""
