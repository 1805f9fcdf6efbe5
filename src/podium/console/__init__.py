"""Output around a run, of the command line and of the trainer in Python: tables, findings, held-out numbers."""
