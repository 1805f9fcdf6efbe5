"""GRPOTrainer, its configuration, and the parts of a training step."""
