"""One replica over several devices: collectives of its ranks, their processes, and the session that drives them all."""
