"""Prefix caching: snapshots of sequences at block boundaries, so that a prompt's known beginning is not run again."""
