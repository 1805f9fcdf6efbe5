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
        names = dict.fromkeys(name for each in environments for name in each.rewards)
        for name in names:
            values = [each.rewards.get(name, np.nan) for each in environments]
            log_metric(f"agent/{name}", nanmean(np.array(values)))
            log_extra(f"agent/{name}", [each.rewards.get(name) for each in environments])
        log_extra("program seconds", [round(each.seconds, 3) for each in environments])
        if any(each.problem for each in environments):
            log_extra(PROGRAM_FAILED, [each.problem for each in environments])
        if any(each.rejected for each in environments):
            log_extra("program rejected", [each.rejected for each in environments])
        if any(each.log for each in environments):
            log_extra(PROGRAM_LOG, [each.log if each.problem else each.log[-SHORT:] for each in environments])
        instead = [capped if each.capped else failed for each in environments]
        return [other if each.problem else each.reward for each, other in zip(environments, instead, strict=True)]

    return agent
