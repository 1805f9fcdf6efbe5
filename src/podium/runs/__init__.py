"""A run's folder, written and read: recording, checkpoints, findings, reports, what is shipped."""
