"""Step costs: operators fitted, composed into iterations, compiled into tables; memory; uncertainty."""
