"""Proof on the first batch: what must hold of a model, its sampler and its training, shown before the first step.

records.py    Check and Proof
plain.py      log-probabilities and gradients as anyone would compute them: one row, one forward, no shortcuts
evidence.py   what is measured on the user's model and data
checks.py     the table of checks: Evidence -> Check
first_batch.py  when they run, what is printed and written, what stops the run
"""
