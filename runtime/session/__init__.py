"""Sessions: run steps of a model over slots."""
