"""Evaluation of state formats and windows: output divergence, state error, decays, tasks, and their figures."""
