"""Rewards that weigh how long a completion is, and how much of it repeats. All of them are TRL's.

Each function here makes a reward function of its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from podium.rewards.text import as_chat


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """DAPO's length penalty (arXiv:2503.14476, equation 13): 0, then falling to -1 over the last tokens.

    Up to `max_completion_len - soft_punish_cache` tokens cost nothing; `max_completion_len` tokens and more cost 1.

    >>> soft_overlong = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    >>> soft_overlong(completion_ids=[[1] * 80, [1] * 90, [1] * 101])
    [0.0, -0.5, -1.0]
    """
    from trl import rewards

    return rewards.get_soft_overlong_punishment(max_completion_len, soft_punish_cache)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    r"""`accuracy_reward` scaled by length along a cosine (arXiv:2502.03373, appendix C.1): short and right is best.

    `max_len` is in tokens. TRL's takes chat completions only, this one plain text too.

    >>> cosine = get_cosine_scaled_reward(max_len=100)
    >>> cosine(completions=[r"\boxed{4}", r"\boxed{5}"], solution=["4", "4"], completion_ids=[[1] * 50, [1] * 50])
    [0.75, -0.75]
    """
    from trl import rewards

    scaled = rewards.get_cosine_scaled_reward(
        max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct
    )

    def cosine_scaled_reward(
        completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[float | None]:
        return scaled([as_chat(each) for each in completions], solution, completion_ids)

    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """`max_penalty` times the share of n-grams of token ids that are repetitions (arXiv:2502.03373, appendix C.2).

    >>> repetition = get_repetition_penalty_reward(ngram_size=2)
    >>> repetition(completion_ids=[[1, 2, 3, 4], [1, 2, 1, 2, 1]])
    [0.0, -0.5]
    """
    from trl import rewards

    return rewards.get_repetition_penalty_reward(ngram_size, max_penalty)
