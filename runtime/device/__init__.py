"""Sampling, acceptance and drafting as torch operations of static shape, so that a whole decode step can be captured."""
