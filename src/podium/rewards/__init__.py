"""Rewards: the boundary that calls them, and a library of them."""

from podium.rewards.resolve import (
    Reward,
    check_rewards,
    load_reward_models,
    resolve_rewards,
    resolve_weights,
)
from podium.rewards.score import score

__all__ = ["Reward", "check_rewards", "load_reward_models", "resolve_rewards", "resolve_weights", "score"]
