"""How good a policy is on prompts it was not trained on."""

from podium.evaluation.held_out import (
    HeldOut,
    Interval,
    accuracy_name,
    mean_interval,
    numbers,
    share_interval,
    summarize,
)

__all__ = ["HeldOut", "Interval", "accuracy_name", "mean_interval", "numbers", "share_interval", "summarize"]
