"""What pytest leaves alone here."""

collect_ignore = ["gloo_podium_worker.py", "interpreted_vllm.py"]
"""Modules of vLLM's processes, whose imports are theirs; `--doctest-modules` would import them."""
