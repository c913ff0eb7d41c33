"""Search for the best plans by simulation, best bound first."""
