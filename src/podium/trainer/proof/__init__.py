"""Proof on the first batch: invariants of a model, its sampler and its training, checked before the first step.

evidence.py     the run under proof, the plain model, and measurements on the user's model and data
completions.py  checks of completions and rewards
checks.py       checks of models, sampler and steps, and the tables of all checks
first_batch.py  the callback that runs, prints and writes them, and stops the run
"""
