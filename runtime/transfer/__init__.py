"""Requests in files: what an engine needs to go on with one, written atomically and checked when read."""
