"""The step benchmark: whole decode and verify steps of a model, both state caches, against their byte floor."""
