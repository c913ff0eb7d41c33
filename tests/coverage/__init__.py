"""Lines and branches of simtune and tuner that the tests reach, counted in every process that they start."""
