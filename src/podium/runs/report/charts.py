"""The curves of a page: one table, `CHARTS`, and the numbers of a run for every row of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from podium.algorithm.metrics import describe
from podium.runs.run import Run

if TYPE_CHECKING:
    from pandas import DataFrame, Series


class Curve(NamedTuple):
    """One line of a chart."""

    name: str
    values: Series
    low: Series | None = None
    high: Series | None = None
    """The band around it."""


Curves = Callable[["DataFrame", Run], list[Curve]]
"""From the metrics of a run and the run itself."""


class Chart(NamedTuple):
    """One row of `CHARTS`."""

    key: str
    title: str
    caption: str
    form: Literal["number", "share", "seconds"]
    curves: Curves
    kind: Literal["line", "stacked"] = "line"
    zero: bool = False
    """Whether the axis starts at 0."""


def _named(names: Mapping[str, str]) -> Curves:
    """Curves by label and metric."""
    return lambda frame, run: [Curve(label, frame[name]) for label, name in names.items() if name in frame]


def _matching(pattern: str) -> Curves:
    """A curve for every metric that matches, labelled by the group of the pattern."""

    def curves(frame: DataFrame, run: Run) -> list[Curve]:
        return [Curve(match[1], frame[name]) for name in frame if (match := re.fullmatch(pattern, str(name)))]

    return curves


def _reward(frame: DataFrame, run: Run) -> list[Curve]:
    if "reward" not in frame or "reward_std" not in frame:
        return _named({"reward": "reward"})(frame, run)
    mean = frame["reward"]
    spread = frame["reward_std"]
    rewards = run.rollouts["reward"].dropna() if "reward" in run.rollouts else ()
    lowest, highest = (min(rewards), max(rewards)) if len(rewards) else (-math.inf, math.inf)
    low = np.maximum(mean - spread, np.minimum(mean, lowest))
    return [Curve("reward", mean, low, np.minimum(mean + spread, np.maximum(mean, highest)))]


def _lengths(frame: DataFrame, run: Run) -> list[Curve]:
    low = frame.get("completions/min_length")
    high = frame.get("completions/max_length")
    curves = [Curve(*curve[:2], low, high) for curve in _named({"mean": "completions/mean_length"})(frame, run)]
    ended = frame.get("completions/mean_terminated_length")
    if ended is not None and ended.any():
        curves.append(Curve("of those that ended", ended.replace(0.0, np.nan)))  # 0: none has ended
    return curves


def _clipped(frame: DataFrame, run: Run) -> list[Curve]:
    """Nothing where no ratio was clipped, as in all on-policy training."""
    named = _named({"clipped": "clip_ratio/region_mean", "above the cap": "cispo_clip_ratio"})
    return [curve for curve in named(frame, run) if curve.values.any()]


def _signal(frame: DataFrame, run: Run) -> list[Curve]:
    named = _named({"groups with signal": "frac_reward_zero_std"})
    return [Curve(name, 1 - flat) for name, flat, *_ in named(frame, run)]


def _speed(frame: DataFrame, run: Run) -> list[Curve]:
    """Tokens of a step over its seconds; a log may stand for several steps."""
    if "num_tokens" not in frame or "step_time" not in frame:
        return []
    tokens = frame["num_tokens"]
    took = frame["step_time"] * np.diff(frame.index, prepend=0)
    return [Curve("tokens a second", ((tokens - tokens.shift(fill_value=0.0)) / took).mask(took <= 0, 0.0))]


def _time_split(frame: DataFrame, run: Run) -> list[Curve]:
    """Seconds of one optimizer step. A round serves `steps_per_generation` micro-steps, `num_iterations` times."""
    micro_steps = int(run.config.get("gradient_accumulation_steps") or 1)
    served = int(run.config.get("steps_per_generation") or micro_steps) * int(run.config.get("num_iterations") or 1)
    words = {"sampling": "generate", "rewards": "reward", "comparing": "compare", "training": "train"}
    named = _named({label: f"time/{word}_seconds" for label, word in words.items()})
    curves = [
        Curve(name, seconds * (micro_steps if name == "training" else micro_steps / served))
        for name, seconds, *_ in named(frame, run)
    ]
    if "step_time" in frame and curves:
        known = sum(curve.values.fillna(0.0) for curve in curves)
        curves.append(Curve("the rest", (frame["step_time"] - known).clip(lower=0.0)))
    return curves


CHARTS: Sequence[Chart] = (
    Chart("reward", "Reward", "Mean weighted sum of all reward functions; the band is one standard deviation.",
          "number", _reward),
    Chart("functions", "Reward by function", "Mean of what each reward function returned.", "number",
          _matching(r"rewards/(.+)/mean")),
    Chart("weights", "Reward weights", "Of those that adapt.", "number", _matching(r"reward_weights/(.+)"), zero=True),
    Chart("signal", "Groups with signal", "Completions in groups whose rewards differ; the others teach nothing.",
          "share", _signal, zero=True),
    Chart("spread", "Reward spread", "Standard deviation of the reward over all completions.", "number",
          _named({"spread": "reward_std"}), zero=True),
    Chart("held_out", "Held out during training", "Rewards on prompts that are not trained on.", "number",
          _matching(r"eval_(?:(?=reward$)|rewards/)(?!.*/std$)(.+?)(?:/mean)?")),
    Chart("length", "Completion length", "Tokens; the band reaches from the shortest to the longest.", "number",
          _lengths, zero=True),
    Chart("truncated", "Cut off", "Completions that reached the length limit before they ended.", "share",
          _named({"cut off": "completions/clipped_ratio"}), zero=True),
    Chart("kl", "KL divergence", "From the reference model, in nats a token.", "number", _named({"KL": "kl"})),
    Chart("entropy", "Entropy", "Of the next-token distribution, in nats. Near 0 the model says one thing only.",
          "number", _named({"entropy": "entropy"}), zero=True),
    Chart("gradient", "Gradient norm", "Before clipping.", "number", _named({"gradient norm": "grad_norm"}), zero=True),
    Chart("clip", "Clipped ratios", "Tokens whose probability ratio left the clipping range.", "share",
          _clipped, zero=True),
    Chart("rate", "Learning rate", "Of the optimizer.", "number", _named({"learning rate": "learning_rate"})),
    Chart("time", "Where the time goes", "Seconds of one optimizer step.", "seconds", _time_split,
          "stacked", zero=True),
    Chart("speed", "Speed", "Prompt and completion tokens a second.", "number", _speed, zero=True),
)  # fmt: skip

SHOWN = re.compile(
    r"reward|reward_std|frac_reward_zero_std|eval_reward|kl|entropy|grad_norm|learning_rate|step_time|num_tokens|epoch"
    r"|clip_ratio/region_mean|cispo_clip_ratio|completions/((mean|min|max|mean_terminated)_length|clipped_ratio)"
    r"|(time|eval_rewards|reward_weights)/.*|rewards/.*/mean"
)
"""Metrics that `CHARTS` already shows, and `epoch`, which carries no information."""


def charts(run: Run) -> list[dict[str, Any]]:
    """Every chart that has something to show, then every other metric as a chart of its own."""
    frame = run.series
    others = [_other(name) for name in sorted(map(str, frame)) if not SHOWN.fullmatch(name)]
    made = [
        {**chart._asdict(), "curves": [_curve(curve) for curve in chart.curves(frame, run)], "other": other}
        for table, other in ((CHARTS, False), (others, True))
        for chart in table
    ]
    return [chart for chart in made if chart["curves"]]


def _other(name: str) -> Chart:
    row = describe(name)
    return Chart(name, name, row.meaning if row else "", "number", _named({name: name}))


def _curve(curve: Curve) -> dict[str, Any]:
    return {key: x if isinstance(x, str) else _short(x) for key, x in curve._asdict().items() if x is not None}


def _short(values: Series) -> list[float | None]:
    """Five digits: a curve needs no more, and the page is a third as large. The rounding error of a sum of 0 is 0."""
    rounded = np.where(np.abs(values) <= 1e-12, 0.0, values).tolist()  # NaN stays
    return [None if math.isnan(x) else float(f"{x:.5g}") for x in rounded]
