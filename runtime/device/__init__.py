"""Sampling, acceptance and drafts in torch operations of static shape: a whole decode step can be captured."""
