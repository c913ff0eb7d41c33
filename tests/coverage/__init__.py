"""Lines and branches of simtune that the tests reach, counted in every process that they start."""
