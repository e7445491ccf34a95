"""Checkpoints on disk: configurations, quantised matrices and named tensors, validated. No torch here."""
