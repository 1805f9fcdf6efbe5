"""Estimates of a run before it starts: memory from the model's config alone, time from a short measurement."""
