"""What a page says first: a verdict in one sentence, and a handful of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from podium.runs.monitors import ends
from podium.runs.report.series import Column, Steps, columns
from podium.runs.run import Run

Level = Literal["good", "note", "warning", "error"]

WORDS: Mapping[Level, str] = {
    "good": "No findings",
    "note": "Notes only",
    "warning": "Worth a look",
    "error": "Needs attention",
}
SIGNIFICANT = 0.01
"""Below this probability of chance, a trend is called one."""


def summary(run: Run) -> dict[str, Any]:
    """Verdict, headline, times and numbers of a run."""
    steps = columns(run)
    latest = columns(run.parts[-1].run) if run.parts else steps
    level = worst(run.findings["severity"] if steps.steps else ["note", *run.findings["severity"]])
    return {
        "level": level,
        "word": WORDS[level] if steps.steps else "Nothing recorded",
        "headline": _headline(run, steps),
        "last_step": steps.steps[-1] if steps.steps else 0,
        "max_steps": _max_steps(run),
        "model": _model(run),
        "seconds": _duration(run),
        "numbers": numbers(run, latest),
    }


def worst(severities: Iterable[str]) -> Level:
    """The gravest severity that was said.

    >>> worst(["note", "warning"])
    'warning'
    """
    said = set(severities)
    order: tuple[Level, ...] = ("error", "warning", "note")
    return next((level for level in order if level in said), "good")


def _headline(run: Run, steps: Steps) -> str:
    """Of held-out prompts, where they were looked at before and after; else of the training reward.

    Of a run in stages that of the latest: the stages before it had other rewards.
    """
    compared = run.evaluations.get("comparison", {})
    if compared.get("verdict") and compared.get("main"):
        word, a, b = str(compared["verdict"]).partition(":")[0], compared["main"]["a"], compared["main"]["b"]
        form = share if compared.get("metric") == "accuracy" else "{:.2f}".format
        return f"{word}: held-out {compared.get('metric')} {form(a)} before, {form(b)} after.".replace(" %", "\u00a0%")
    if not run.parts:
        return headline(steps)
    part = run.parts[-1]
    return f"Stage {len(run.parts)}, {part.name}: {headline(columns(part.run))}"


def headline(steps: Steps) -> str:
    """What became of the reward, in a sentence.

    >>> headline(Steps(list(range(40)), {"reward": [i / 40 for i in range(40)]}, {}))
    'Reward rose from 0.04 to 0.94 (means of the first and last 4 steps).'
    >>> headline(Steps([1, 2], {"reward": [0.5, 0.5]}, {}))
    'Reward is 0.50 after 2 steps: too early to tell.'
    """
    values = [value for value in steps.get("reward") or [] if value is not None]
    if not values:
        return "No reward has been logged yet."
    if len(values) < 8:
        return f"Reward is {values[-1]:.2f} after {steps.steps[-1]} steps: too early to tell."
    start, end, count = ends(values)
    verb = {1: "rose", -1: "fell", 0: "has no clear trend:"}[trend(values)]
    return f"Reward {verb} from {_fixed(start)} to {_fixed(end)} (means of the first and last {count} steps)."


def _fixed(value: float) -> str:
    """
    >>> _fixed(-1.4e-17)
    '0.00'
    """
    return f"{round(value, 2) + 0.0:.2f}"


def trend(values: Sequence[float]) -> int:
    """1 up, -1 down, 0 none that chance could not make: Kendall's rank test against the step.

    >>> trend([0.1 * i for i in range(12)]), trend([1.0] * 12)
    (1, 0)
    """
    from scipy.stats import kendalltau

    if max(values) == min(values):
        return 0
    result = kendalltau(range(len(values)), values)
    return 0 if not result.pvalue < SIGNIFICANT else (1 if result.statistic > 0 else -1)


# ---- numbers ----


def numbers(run: Run, steps: Steps) -> list[dict[str, str]]:
    """The tiles under the verdict: each a label, a value and a word beside it."""
    signal = [None if flat is None else 1 - flat for flat in steps.get("frac_reward_zero_std") or []]
    tiles = [
        _accuracy(run.evaluations),
        _start_to_end("Reward", steps.get("reward"), _fixed),
        _start_to_end("Groups with signal", signal, share),
        _start_to_end("Cut off", steps.get("completions/clipped_ratio"), share),
        _start_to_end("Mean length", steps.get("completions/mean_length"), "{:.0f}".format),
        _start_to_end("KL", steps.get("kl"), "{:.3f}".format),
        _start_to_end("Entropy", steps.get("entropy"), "{:.2f}".format),
        _median("Seconds a step", steps.get("step_time"), "{:.1f}".format),
    ]
    return [tile for tile in tiles if tile]


def _start_to_end(label: str, column: Column | None, form: Callable[[float], str]) -> dict[str, str] | None:
    values = [value for value in column or [] if value is not None]
    if not values:
        return None
    start, end, _ = ends(values)
    return {"label": label, "value": form(end), "detail": f"from {form(start)}"}


def _median(label: str, column: Column | None, form: Callable[[float], str]) -> dict[str, str] | None:
    values = [value for value in column or [] if value is not None]
    return {"label": label, "value": form(median(values)), "detail": "median"} if values else None


def _accuracy(evaluations: Mapping[str, Mapping[str, Any]]) -> dict[str, str] | None:
    before, after = (evaluations.get(when, {}).get("accuracy") for when in ("before", "after"))
    if not before or not after:
        return None
    known = after.get("low") is not None and after.get("high") is not None
    interval = f"{100 * after['low']:.0f} to {share(after['high'])}, " if known else ""
    return {
        "label": "Held-out accuracy",
        "value": share(after["value"]),
        "detail": f"{interval}before {share(before['value'])}",
    }


def share(value: float) -> str:
    """
    >>> share(0.8)
    '80 %'
    """
    return f"{100 * value:.0f} %"


def _model(run: Run) -> str:
    """A hub id as it is; of a folder its name."""
    model = str(run.config.get("model") or run.config.get("model_name_or_path") or "")
    return Path(model).name if Path(model).is_absolute() else model


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
