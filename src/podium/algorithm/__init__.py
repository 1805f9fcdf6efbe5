"""What GRPO computes: advantages, losses, metrics."""
