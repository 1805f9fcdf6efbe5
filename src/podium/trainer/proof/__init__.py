"""Proof on the first batch: invariants of a model, its sampler and its training, checked before the first step.

records.py      the run under proof, Check and Proof
plain.py        log-probabilities and gradients computed plainly: one row, one forward, no shortcuts
evidence.py     measurements on the user's model and data
checks.py       checks of models, sampler and steps
completions.py  checks of completions and rewards
first_batch.py  the callback that runs, prints and writes them, and stops the run
"""
