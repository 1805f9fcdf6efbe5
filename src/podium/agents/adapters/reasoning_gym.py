"""reasoning-gym's tasks with several attempts and feedback between them: `reasoning_gym:chain_sum?attempts=3`.

Rows of `reasoning-gym:chain_sum` (see `podium.data.gym`) bring their own task; without them `reset` draws one from its
seed. Answers are scored as by the reward `reasoning_gym`, in a sandbox.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podium.agents.plain_text import TextEnvironment
from podium.data.gym import gym_rows
from podium.errors import AgentError, ConfigError, as_line
from podium.rewards.gym import ReasoningGym

_TAGS = "Write your answer in <answer> tags."


class ReasoningGymAttempts(TextEnvironment):
    """A task that may be answered until it is right. The last answer's score is paid, times `discount` per retry."""

    def __init__(self, scorer: ReasoningGym, attempts: int, discount: float, settings: dict[str, Any]) -> None:
        self._scorer, self._attempts, self._discount, self._settings = scorer, attempts, discount, settings
        self._task: dict[str, Any] = {}

    def reset(self, metadata: Any = None, answer: Any = None, seed: int = 0, **row: Any) -> str | None:
        """The question, where the row has none."""
        self._used = 0
        if metadata is not None:
            self._task = {"metadata": metadata, "answer": answer}
            return None
        [self._task] = gym_rows(self._scorer.dataset, **{"seed": seed, **self._settings, "size": 1})
        return f"{self._task['prompt']}\n{_TAGS}" if self._scorer.extract == "answer" else str(self._task["prompt"])

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        """An attempt. Its feedback names how many are left, and whether the answer was partly right."""
        [score] = self._scorer([text], [self._task["metadata"]], [self._task["answer"]])
        if score is None:
            raise AgentError(f"reasoning-gym's scorer of `{self._scorer.dataset}` gave no score.")
        self._used += 1
        left = self._attempts - self._used
        if score >= 1 or not left:
            return None, score * self._discount ** (self._used - 1), True, {"attempts": self._used}
        verdict = "That is partly right." if score > 0 else "That is not right."
        hint = f" {_TAGS}" if self._scorer.extract == "answer" else ""
        return f"{verdict} You have {left} more attempt{'s' * (left > 1)}.{hint}", 0.0, False, {"score": score}


def factory(
    name: str, folder: Path, /, *, attempts: int = 3, discount: float = 1.0, extract: str = "answer", **settings: Any
) -> Callable[[], ReasoningGymAttempts]:
    """Makes environments for a dataset; further arguments are its generator's, or `difficulty`."""
    gym_rows(name, **{**settings, "size": 1})  # a wrong argument is an error here
    if type(attempts) is not int or attempts < 1:
        raise ConfigError(f"`attempts` is {attempts}; it must be 1 or more.", fix=as_line("attempts", 3))
    scorer = ReasoningGym(dataset=name, extract=extract)  # type: ignore[arg-type]  # it is checked there
    return functools.partial(ReasoningGymAttempts, scorer, attempts, float(discount), settings)
