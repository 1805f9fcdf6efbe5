"""Podium's own engine: it samples from the trainer's modules, so there is no copy of the weights to keep in step."""
