"""The top of a page: a verdict in one sentence, and a handful of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from podium.errors import SEVERITIES
from podium.runs.monitors import ends
from podium.runs.monitors.detection import percent, trend
from podium.runs.run import Run

if TYPE_CHECKING:
    from pandas import DataFrame

Level = Literal["good", "note", "warning", "error"]

WORDS: Mapping[Level, str] = {
    "good": "No findings",
    "note": "Notes only",
    "warning": "Worth a look",
    "error": "Needs attention",
}
SIGNIFICANT = 2.576
"""Beyond this z, which chance exceeds once in a hundred times, a trend is called one."""


def summary(run: Run) -> dict[str, Any]:
    """Verdict, headline, times and numbers of a run."""
    latest = (run.parts[-1].run if run.parts else run).series
    severities = [finding.severity for finding in run.reported]
    level = worst(severities if run.history else ["note", *severities])
    return {
        "level": level,
        "word": WORDS[level] if run.history else "Nothing recorded",
        "headline": _headline(run, latest),
        "last_step": run.history[-1].step if run.history else 0,
        "max_steps": _max_steps(run),
        "model": Path(run.model).name if Path(run.model).is_absolute() else run.model,
        "seconds": _duration(run),
        "numbers": numbers(run, latest),
    }


def worst(severities: Iterable[str]) -> Level:
    """The gravest severity.

    >>> worst(["note", "warning"])
    'warning'
    """
    found = set(severities)
    return next((level for level in SEVERITIES if level in found), "good")


def _headline(run: Run, latest: DataFrame) -> str:
    """On held-out prompts, if they were sampled before and after; else about the training reward of the latest stage,
    since the stages before it had other rewards.
    """
    compared = run.comparison
    if run.verdict and compared.get("main"):
        word = run.verdict.partition(":")[0]
        a = compared["main"]["a"]
        b = compared["main"]["b"]
        form = percent if compared.get("metric") == "accuracy" else "{:.2f}".format
        return f"{word}: held-out {compared.get('metric')} {form(a)} before, {form(b)} after.".replace(" %", "\u00a0%")
    stage = f"Stage {len(run.parts)}, {run.parts[-1].name}: " if run.parts else ""
    return f"{stage}{headline(latest)}"


def headline(frame: DataFrame) -> str:
    """The course of the reward, in a sentence.

    >>> import pandas as pd
    >>> headline(pd.DataFrame({"reward": [i / 40 for i in range(40)]}))
    'Reward rose from 0.04 to 0.94 (means of the first and last 4 steps).'
    >>> headline(pd.DataFrame({"reward": [0.5, 0.5]}, index=[1, 2]))
    'Reward is 0.50 after 2 steps: too early to tell.'
    """
    values = frame["reward"].dropna().to_numpy() if "reward" in frame else np.zeros(0)
    if not len(values):
        return "No reward has been logged yet."
    if len(values) < 8:
        return f"Reward is {values[-1]:.2f} after {frame.index[-1]} steps: too early to tell."
    start, end, count = ends(values)
    z = trend(values)
    verb = "has no clear trend:"
    if z > SIGNIFICANT and end > start:
        verb = "rose"
    elif z < -SIGNIFICANT and end < start:
        verb = "fell"
    return f"Reward {verb} from {_fixed(start)} to {_fixed(end)} (means of the first and last {count} steps)."


def _fixed(value: float) -> str:
    """
    >>> _fixed(-1.4e-17)
    '0.00'
    """
    return f"{round(value, 2) + 0.0:.2f}"


def numbers(run: Run, frame: DataFrame) -> list[dict[str, str]]:
    """The tiles under the verdict: each a label, a value and a word beside it."""
    tiles = [_accuracy(run.evaluations)]
    for label, name, form in TILES:
        if name in frame:
            start, end, _ = ends(frame[name])
            tiles.append({"label": label, "value": form(end), "detail": f"from {form(start)}"})
    if "step_time" in frame:
        seconds = f"{frame['step_time'].median():.1f}"
        tiles.append({"label": "Seconds a step", "value": seconds, "detail": "median"})
    return [tile for tile in tiles if tile]


TILES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("Reward", "reward", _fixed),
    ("Groups with signal", "frac_reward_zero_std", lambda flat: percent(1 - flat)),
    ("Cut off", "completions/clipped_ratio", percent),
    ("Mean length", "completions/mean_length", "{:.0f}".format),
    ("KL", "kl", "{:.3f}".format),
    ("Entropy", "entropy", "{:.2f}".format),
)
"""Label, metric, form of the means of its first and last steps."""


def _accuracy(evaluations: Mapping[str, Mapping[str, Any]]) -> dict[str, str] | None:
    before, after = (evaluations.get(when, {}).get("accuracy") for when in ("before", "after"))
    if not before or not after:
        return None
    known = after.get("low") is not None and after.get("high") is not None
    interval = f"{100 * after['low']:.0f} to {percent(after['high'])}, " if known else ""
    detail = f"{interval}before {percent(before['value'])}"
    return {"label": "Held-out accuracy", "value": percent(after["value"]), "detail": detail}


def _max_steps(run: Run) -> int | None:
    """Steps in all; a stage that has ended took as many as it did."""
    if run.parts and run.has_ended:
        return run.parts[-1].last_step
    wanted = run.config.get("max_steps")
    return wanted if isinstance(wanted, int) and wanted > 0 else None


def _duration(run: Run) -> float | None:
    """Seconds from the first log to the last, and those of the first step: a mean one where they were not measured."""
    times = run.metrics["time"].dropna().tolist()
    if not times:
        return None
    since = times[-1] - times[0]
    first = run.history[0].values.get("step_time", math.nan)
    return since + (since / max(len(times) - 1, 1) if math.isnan(first) else first)
