"""What pytest leaves alone here."""

collect_ignore = ["gloo_podium_worker.py"]
"""A module of vLLM's workers, whose imports are theirs; `--doctest-modules` would import it."""
