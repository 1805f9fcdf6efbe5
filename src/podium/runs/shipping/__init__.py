"""A run's result for use elsewhere: one plain model folder with its card, a server, the hub."""
