"""Runs of several stages: the loop over them, and their trainers."""
