"""Gates: conditions on metrics that end a stage of training.

Two forms: a bound that a metric holds for some steps in a row, and a plateau (`flat for 20 steps`). Pure functions of
numbers under names.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podium.algorithm.metrics import describe
from podium.errors import ConfigError
from podium.errors.texts import counted, did_you_mean

HELD_OUT = "eval_"
"""Prefix of metrics from evaluations during training."""

FORMS = "`METRIC >= 0.9`, `METRIC >= 0.9 for 3 steps` (or <=, >, <), or `METRIC flat for 20 steps`"

FEWEST_FLAT = 5
"""Steps below which a plateau cannot be distinguished from chance."""

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_STEPS = r"for\s+(?P<{}>\d+)\s+(?:steps?|evaluations?)"
_GATE = re.compile(
    r"\s*(?P<metric>[^\s<>=]+)\s*"
    rf"(?:(?P<sign>>=|<=|>|<)\s*(?P<bound>{_NUMBER})(?:\s+{_STEPS.format('held')})?|flat\s+{_STEPS.format('flat')})\s*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One condition on one metric."""

    text: str
    """As written."""
    metric: str
    steps: int
    """Number of values in a row; for a metric of evaluations, of evaluations."""
    sign: str | None = None
    """A key of `COMPARISONS`; None: a plateau."""
    bound: float = 0.0

    @property
    def held_out(self) -> bool:
        """Whether evaluations during training measure it."""
        return self.metric.startswith(HELD_OUT)

    def is_met(self, values: Sequence[float]) -> bool:
        """Whether the last of these values, oldest first, meet the gate; NaN never does.

        >>> parse_gate("reward > 1 for 2 steps").is_met([0.5, 1.1, 1.2])
        True
        >>> parse_gate("reward > 1 for 2 steps").is_met([1.1, float("nan"), 1.2])
        False
        """
        last = list(values)[-self.steps :]
        if len(last) < self.steps:
            return False
        if self.sign is None:
            return is_flat(last)
        return all(COMPARISONS[self.sign](value, self.bound) for value in last)


def is_flat(values: Sequence[float]) -> bool:
    """Whether a straight line through the values changes, from first to last, by no more than they scatter around it.

    The scatter is one standard deviation of the residuals. So a noisy metric that still rises needs a rise larger than
    its noise within the window to count as rising.

    >>> is_flat([0.50, 0.52, 0.49, 0.51, 0.50]), is_flat([0.1, 0.2, 0.3, 0.4, 0.5]), is_flat([1.0] * 5)
    (True, False, True)
    """
    y = np.asarray(values, np.float64)
    if not np.isfinite(y).all():
        return False
    x = np.arange(len(y))
    slope, start = np.polyfit(x, y, 1)
    rise = abs(slope) * (len(y) - 1)
    scatter = float(np.sqrt(np.mean((y - start - slope * x) ** 2)))
    return bool(rise <= scatter + 1e-9 * max(1.0, float(np.abs(y).max())))


def parse_gate(text: str) -> Gate:
    """The gate that a text describes.

    Raises:
        ConfigError: it is none of the two forms.

    >>> parse_gate("eval_rewards/answer_correct/mean >= 0.8").held_out
    True
    >>> parse_gate("reward is good")
    Traceback (most recent call last):
    podium.errors.ConfigError: `until: reward is good` is not understood.
      fix: Write `METRIC >= 0.9`, ...
    """
    if (found := _GATE.fullmatch(text)) is None:
        raise ConfigError(
            f"`until: {text}` is not understood.", code="C060", fix=f"Write {FORMS}", text=text, forms=FORMS
        )
    metric = found["metric"]
    sign = found["sign"]
    steps = int(found["held"] or found["flat"] or 1)
    if steps < 1 or (sign is None and steps < FEWEST_FLAT):
        least = 1 if sign else FEWEST_FLAT
        what = f"`until: {text}`: give at least {counted(least, 'step')}"
        raise ConfigError(what, code="C060", fix="until: reward >= 0.9 for 3 steps")
    bound = float(found["bound"]) if sign else 0.0
    return Gate(text=text, metric=metric, steps=steps, sign=sign, bound=bound)


def unknown_metric(gate: Gate, rewards: Collection[str]) -> tuple[str, str] | None:
    """Error message and fix for a gate on a reward that is not there.

    Any other unknown metric may be one that a reward function logs.
    """
    name = gate.metric.removeprefix(HELD_OUT)
    own = name.removeprefix("rewards/").rpartition("/")[0]
    if not name.startswith("rewards/") or (own in rewards and describe(name) is not None):
        return None
    choices = [f"rewards/{reward}/{end}" for reward in rewards for end in ("mean", "std")]
    what = f"there is no metric `{gate.metric}`: the rewards here are {', '.join(rewards)}."
    return what, did_you_mean(name, choices) or f"until: {choices[0]} >= 0.9"


def absent(gate: Gate, values: Mapping[str, float]) -> str:
    """The error message where the first numbers of a run have no such metric."""
    listed = ", ".join(sorted(name for name in values if name.startswith(("reward", HELD_OUT, "completions/mean"))))
    waiting = f"the gate `until: {gate.text}` waits for `{gate.metric}`, which is not logged."
    return " ".join(filter(None, [waiting, did_you_mean(gate.metric, values), f"There are {listed}, ..."]))
