"""The computations of GRPO: advantages, losses, metrics."""
