"""What a run made, to be used elsewhere: one plain model folder with its card, a server, the hub."""
