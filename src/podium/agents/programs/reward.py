"""The reward that programs have returned, as a reward function beside those of the recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podium.agents.programs.report import Result
from podium.algorithm.metrics import nanmean
from podium.records import PROGRAM_FAILED, PROGRAM_LOG

Values = list[float | None]

NAME = "agent"
"""Of the reward function, in metrics and tables."""

SHORT = 1000
"""Characters of the output of a program that has not failed that are recorded, its last ones."""


def program_reward(*, failed: float | None, capped: float | None) -> Callable[..., Values]:
    """A reward function that gives what each program has returned.

    Entries of dicts become metrics; why programs failed, and the end of their output, are recorded beside completions.
    See `agents.table.program_reward`.
    """

    def agent(environments: Sequence[Result], log_extra: Any, log_metric: Any, **kwargs: Any) -> Values:
        names = dict.fromkeys(name for environment in environments for name in environment.rewards)
        for name in names:
            values = [environment.rewards.get(name, np.nan) for environment in environments]
            log_metric(f"agent/{name}", nanmean(np.array(values)))
            log_extra(f"agent/{name}", [environment.rewards.get(name) for environment in environments])
        log_extra("program seconds", [round(environment.seconds, 3) for environment in environments])
        if any(environment.problem for environment in environments):
            log_extra(PROGRAM_FAILED, [environment.problem for environment in environments])
        if any(environment.rejected for environment in environments):
            log_extra("program rejected", [environment.rejected for environment in environments])
        if any(environment.log for environment in environments):
            log_extra(
                PROGRAM_LOG,
                [environment.log if environment.problem else environment.log[-SHORT:] for environment in environments],
            )
        instead = [capped if environment.capped else failed for environment in environments]
        return [other if result.problem else result.reward for result, other in zip(environments, instead, strict=True)]

    return agent
