"""reasoning-gym's tasks with several attempts and feedback between them: `reasoning_gym:chain_sum?attempts=3`.

Rows of `reasoning-gym:chain_sum` (see `podium.data.gym`) bring their own task; without them `reset` draws one from its
seed. Answers are scored as by the reward `reasoning_gym`, in a sandbox.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podium.agents.plain_text import TextEnvironment
from podium.data.extract import tagged
from podium.data.gym import GymScorer, gym_rows
from podium.errors import AgentError, ConfigError, DataError
from podium.errors.texts import as_line
from podium.isolation.sandbox import choose

_TAGS = "Write your answer in <answer> tags."


class ReasoningGymAttempts(TextEnvironment):
    """A task that may be answered until it is right. The last answer's score is paid, times `discount` per retry."""

    def __init__(
        self, scorer: GymScorer, attempts: int, discount: float, extract: str, settings: dict[str, Any]
    ) -> None:
        self._scorer, self._attempts, self._discount, self._settings = scorer, attempts, discount, settings
        self._hint = f" {_TAGS}" if extract == "answer" else ""

    def reset(self, metadata: Any = None, answer: Any = None, seed: int = 0, **row: Any) -> str | None:
        """The question, where the row has none."""
        self._used = 0
        if metadata is not None:
            known = json.loads(metadata) if isinstance(metadata, str) else dict(metadata)
            self._entry = {"question": "", "answer": answer, "metadata": known}
            return None
        [task] = gym_rows(self._scorer.dataset, **{"seed": seed, **self._settings, "size": 1})
        self._entry = {"question": "", "answer": task["answer"], "metadata": json.loads(task["metadata"])}
        return f"{task['prompt']}{self._hint}"

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        """An attempt. Its feedback names how many are left, and whether the answer was partly right."""
        answer = tagged(text, "answer") if self._hint else text.strip()
        [score] = [0.0] if answer is None else self._scorer([{"answer": answer, "entry": self._entry}])
        if score is None:
            raise AgentError(
                f"reasoning-gym's scorer of `{self._scorer.dataset}` gave no score.", dataset=self._scorer.dataset
            )
        self._used += 1
        left = self._attempts - self._used
        if score >= 1 or not left:
            return None, score * self._discount ** (self._used - 1), True, {"attempts": self._used}
        verdict = "That is partly right." if score > 0 else "That is not right."
        return f"{verdict} You have {left} more attempt{'s' * (left > 1)}.{self._hint}", 0.0, False, {"score": score}


def factory(
    name: str, folder: Path, /, *, attempts: int = 3, discount: float = 1.0, extract: str = "answer", **settings: Any
) -> Callable[[], ReasoningGymAttempts]:
    """Makes environments for a dataset; further arguments are its generator's, or `difficulty`."""
    try:
        gym_rows(name, **{**settings, "size": 1})
    except (ConfigError, DataError) as error:  # whose example is a line for `dataset`
        fix = error.fix if error.facts.get("near") else "environment: reasoning_gym:chain_sum?attempts=3"
        raise ConfigError(error.what, code=error.code, fix=fix) from error
    if type(attempts) is not int or attempts < 1:
        raise ConfigError(f"`attempts` is {attempts}; it must be 1 or more.", fix="attempts: 3", attempts=attempts)
    if extract not in ("answer", "raw"):
        raise ConfigError(
            f"`extract` is {extract}; it is answer or raw.", fix=as_line("extract", "answer"), extract=extract
        )
    scorer = GymScorer(dataset=name, backend=choose("auto"))
    return functools.partial(ReasoningGymAttempts, scorer, attempts, float(discount), extract, settings)
