"""Which curves a page shows: one table, `CHARTS`, and the numbers of a run for every row of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from podium.algorithm.metrics import describe
from podium.runs.run import Run

Column = list[float | None]
"""A number for every logged step, None where there is none."""

Kind = Literal["line", "stacked"]


class Curve(NamedTuple):
    """One line of a chart."""

    name: str
    values: Column
    low: Column | None = None
    high: Column | None = None
    """The band around it."""


class Chart(NamedTuple):
    """One row of `CHARTS`."""

    key: str
    title: str
    caption: str
    form: Literal["number", "share", "seconds"]
    curves: Callable[[Steps], list[Curve]]
    kind: Kind = "line"
    zero: bool = False
    """Whether the axis starts at 0."""


class Steps(NamedTuple):
    """Columns of a run's metrics."""

    steps: list[int]
    columns: Mapping[str, Column]
    config: Mapping[str, Any]
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Lowest and highest reward of a completion."""

    def get(self, name: str) -> Column | None:
        """A column; None when it is not there or has no number in it."""
        column = self.columns.get(name)
        return column if column and any(value is not None for value in column) else None


def columns(run: Run) -> Steps:
    """The metrics of a run, by name."""
    names = dict.fromkeys(name for line in run.history for name in line.values)
    table = {name: [_finite(line.values.get(name)) for line in run.history] for name in names}
    return Steps([line.step for line in run.history], table, run.config)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# ---- curves ----


def combine(function: Callable[..., float], *parts: Sequence[float | None]) -> Column:
    """`function` of the numbers of each step; None where one of them is missing.

    >>> combine(lambda a, b: a - b, [3.0, None], [1.0, 1.0])
    [2.0, None]
    """
    return [None if None in row else function(*row) for row in zip(*parts, strict=True)]


def _named(*pairs: tuple[str, str]) -> Callable[[Steps], list[Curve]]:
    def curves(steps: Steps) -> list[Curve]:
        found = [(label, steps.get(name)) for label, name in pairs]
        return [Curve(label, values) for label, values in found if values is not None]

    return curves


def _reward(steps: Steps) -> list[Curve]:
    mean, spread = steps.get("reward"), steps.get("reward_std")
    if mean is None:
        return []
    if spread is None:
        return [Curve("reward", mean)]
    low = combine(lambda m, s: max(m - s, min(m, steps.bounds[0])), mean, spread)
    high = combine(lambda m, s: min(m + s, max(m, steps.bounds[1])), mean, spread)
    return [Curve("reward", mean, low, high)]


def _by_function(steps: Steps) -> list[Curve]:
    names = [name for name in steps.columns if name.startswith("rewards/") and name.endswith("/mean")]
    curves = [(name.removeprefix("rewards/").removesuffix("/mean"), steps.get(name)) for name in names]
    return [Curve(name, values) for name, values in curves if values is not None]


def _lengths(steps: Steps) -> list[Curve]:
    mean = steps.get("completions/mean_length")
    ended = [value or None for value in steps.get("completions/mean_terminated_length") or []]  # 0: none has ended
    low, high = steps.get("completions/min_length"), steps.get("completions/max_length")
    curves = [Curve("mean", mean, low, high)] if mean is not None else []
    return [*curves, *([Curve("of those that ended", ended)] if any(ended) else [])]


def _clipped(steps: Steps) -> list[Curve]:
    """On policy nothing is clipped, and there is nothing to show."""
    pairs = ("clipped", "clip_ratio/region_mean"), ("above the cap", "cispo_clip_ratio")
    return [curve for curve in _named(*pairs)(steps) if any(curve.values)]


def _weights(steps: Steps) -> list[Curve]:
    names = [name for name in steps.columns if name.startswith("reward_weights/")]
    return _named(*((name.removeprefix("reward_weights/"), name) for name in names))(steps)


def _signal(steps: Steps) -> list[Curve]:
    flat = steps.get("frac_reward_zero_std")
    return [Curve("groups with signal", combine(lambda share: 1 - share, flat))] if flat is not None else []


def _held_out(steps: Steps) -> list[Curve]:
    names = [name for name in steps.columns if name == "eval_reward" or name.startswith("eval_rewards/")]
    wanted = [name for name in names if not name.endswith("/std")]
    short = [name.removeprefix("eval_").removeprefix("rewards/").removesuffix("/mean") for name in wanted]
    found = [(label, steps.get(name)) for label, name in zip(short, wanted, strict=True)]
    return [Curve(label, values) for label, values in found if values is not None]


def _speed(steps: Steps) -> list[Curve]:
    """Tokens of a step over its seconds; a log may stand for several steps."""
    tokens, seconds = steps.get("num_tokens"), steps.get("step_time")
    if tokens is None or seconds is None:
        return []
    before = [0.0, *tokens[:-1]]
    passed = [float(b - a) for a, b in zip([0, *steps.steps[:-1]], steps.steps, strict=True)]
    took = combine(lambda n, s: n * s, passed, seconds)
    speed = combine(lambda now, then, s: (now - then) / s if s > 0 else 0.0, tokens, before, took)
    return [Curve("tokens a second", speed)]


def _time_split(steps: Steps) -> list[Curve]:
    """Seconds of one optimizer step. A round serves `steps_per_generation` micro-steps, `num_iterations` times."""
    micro_steps = int(steps.config.get("gradient_accumulation_steps") or 1)
    served = int(steps.config.get("steps_per_generation") or micro_steps) * int(steps.config.get("num_iterations") or 1)
    rounds = micro_steps / served
    parts = {"sampling": ("generate", rounds), "rewards": ("reward", rounds), "comparing": ("compare", rounds)}
    parts["training"] = ("train", micro_steps)
    curves = []
    for label, (name, times) in parts.items():
        seconds = steps.get(f"time/{name}_seconds")
        if seconds is not None:
            curves.append(Curve(label, [None if value is None else value * times for value in seconds]))
    whole = steps.get("step_time")
    if whole is not None and curves:
        known = [sum(value or 0.0 for value in row) for row in zip(*(curve.values for curve in curves), strict=True)]
        curves.append(Curve("the rest", combine(lambda total, part: max(total - part, 0.0), whole, [*known])))
    return curves


CHARTS: Sequence[Chart] = (
    Chart("reward", "Reward", "Mean weighted sum of all reward functions; the band is one standard deviation.",
          "number", _reward),
    Chart("functions", "Reward by function", "Mean of what each reward function returned.", "number", _by_function),
    Chart("weights", "Reward weights", "Of those that adapt.", "number", _weights, zero=True),
    Chart("signal", "Groups with signal", "Completions in groups whose rewards differ; the others teach nothing.",
          "share", _signal, zero=True),
    Chart("spread", "Reward spread", "Standard deviation of the reward over all completions.", "number",
          _named(("spread", "reward_std")), zero=True),
    Chart("held_out", "Held out during training", "Rewards on prompts that are not trained on.", "number", _held_out),
    Chart("length", "Completion length", "Tokens; the band reaches from the shortest to the longest.", "number",
          _lengths, zero=True),
    Chart("truncated", "Cut off", "Completions that reached the length limit before they ended.", "share",
          _named(("cut off", "completions/clipped_ratio")), zero=True),
    Chart("kl", "KL divergence", "From the reference model, in nats a token.", "number", _named(("KL", "kl"))),
    Chart("entropy", "Entropy", "Of the next-token distribution, in nats. Near 0 the model says one thing only.",
          "number", _named(("entropy", "entropy")), zero=True),
    Chart("gradient", "Gradient norm", "Before clipping.", "number", _named(("gradient norm", "grad_norm")), zero=True),
    Chart("clip", "Clipped ratios", "Tokens whose probability ratio left the clipping range.", "share",
          _clipped, zero=True),
    Chart("rate", "Learning rate", "Of the optimizer.", "number", _named(("learning rate", "learning_rate"))),
    Chart("time", "Where the time goes", "Seconds of one optimizer step.", "seconds", _time_split,
          "stacked", zero=True),
    Chart("speed", "Speed", "Prompt and completion tokens a second.", "number", _speed, zero=True),
)  # fmt: skip

SHOWN = frozenset(
    (
        *("reward", "reward_std", "frac_reward_zero_std", "eval_reward"),
        *("kl", "entropy", "grad_norm", "learning_rate", "clip_ratio/region_mean", "cispo_clip_ratio"),
        *("completions/mean_length", "completions/min_length", "completions/max_length"),
        *("completions/mean_terminated_length", "completions/clipped_ratio"),
        *("step_time", "num_tokens", "epoch"),
    )
)
"""Metrics that `CHARTS` already shows, and `epoch`, which says nothing."""


def charts(run: Run) -> list[dict[str, Any]]:
    """Every chart that has something to show, then every other metric as a chart of its own."""
    rewards = run.rollouts["reward"].dropna() if "reward" in run.rollouts else ()
    bounds = (float(min(rewards)), float(max(rewards))) if len(rewards) else (-math.inf, math.inf)
    steps = columns(run)._replace(bounds=bounds)
    made = [_entry(chart, chart.curves(steps)) for chart in CHARTS]
    others = [name for name in steps.columns if not _shown(name) and steps.get(name) is not None]
    return [entry for entry in made if entry["curves"]] + [_other(name, steps) for name in sorted(others)]


def _shown(name: str) -> bool:
    elsewhere = ("time/", "eval_rewards/", "reward_weights/")
    return name in SHOWN or name.startswith(elsewhere) or _by_function_mean(name)


def _by_function_mean(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/mean")


def _entry(chart: Chart, curves: list[Curve]) -> dict[str, Any]:
    keep = {key: getattr(chart, key) for key in ("key", "title", "caption", "form", "kind", "zero")}
    return {**keep, "curves": [_curve(curve) for curve in curves], "other": False}


def _other(name: str, steps: Steps) -> dict[str, Any]:
    row = describe(name)
    chart = Chart(name, name, row.meaning if row else "", "number", _named((name, name)))
    return {**_entry(chart, chart.curves(steps)), "other": True}


def _curve(curve: Curve) -> dict[str, Any]:
    bands = {"low": curve.low, "high": curve.high}
    shown = {key: _short(values) for key, values in bands.items() if values is not None}
    return {"name": curve.name, "values": _short(curve.values), **shown}


def _short(values: Column) -> Column:
    """Five digits: a curve needs no more, and the page is a third as large. The rounding of a sum that is 0 is 0."""
    return [None if value is None else float(f"{value:.5g}") if abs(value) > 1e-12 else 0.0 for value in values]
