"""Requests and continuous batching: pure Python, knows slots by number only."""
