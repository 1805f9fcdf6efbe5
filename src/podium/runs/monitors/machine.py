"""The machine under the run: memory that grows, speed that falls, rewards that take most of the time."""

from __future__ import annotations

import numpy as np

from podium.errors import Finding
from podium.runs.monitors.detection import mean, percent, trend
from podium.runs.monitors.history import MetricHistory

WARM_UP = 4
"""Steps in which buffers and caches still grow."""


def memory_creeps(history: MetricHistory) -> Finding | None:
    """M161: memory grows with every step."""
    for name, where in (("health/resident_bytes", "the process"), ("health/device_bytes", "the device")):
        used = history.series(name)[WARM_UP:][-40:]
        if len(used) < 8:
            continue
        per_step, certainty = slope(used)
        grown = per_step * (len(used) - 1)
        # Allocators give back and take again by hundreds of megabytes, so the rise has to be large and sure.
        if trend(used) > 2.6 and certainty > 4 and grown > 0.06 * used[0] and per_step > 4e6:
            return Finding(
                code="M161",
                severity="warning",
                what=f"Memory of {where} grows by {per_step / 1e6:.0f} MB a step: by {grown / 1e9:.2f} to "
                f"{used[-1] / 1e9:.2f} GB in {len(used)} steps.",
                why="Something keeps what each step makes: a reward function or callback that appends to a list, "
                "tensors that are stored with their graph.",
                fix="Look for lists that grow in rewards and callbacks; store numbers (`float(x)`), not tensors.",
            )
    return None


def slope(x: np.ndarray) -> tuple[float, float]:
    """Rise per step of the least-squares line, and how many of its standard errors that is.

    >>> slope(np.array([0.0, 1.0, 2.0, 2.0]))[0]
    0.7
    """
    t = np.arange(len(x)) - (len(x) - 1) / 2
    rise = float((t * x).sum() / (t**2).sum())
    left = x - x.mean() - rise * t
    error = float(np.sqrt((left**2).sum() / max(len(x) - 2, 1) / (t**2).sum()))
    return rise, rise / error if error > 0 else float(np.sign(rise)) * np.inf


def speed_falls(history: MetricHistory) -> Finding | None:
    """M162: tokens a second go down, at the same length of completions."""
    speed = history.series("health/tokens_per_second")[WARM_UP:]
    if len(speed) < 30:
        return None
    early = float(np.median(speed[:10]))
    late = float(np.median(speed[-10:]))
    if late > 0.5 * early or trend(speed) > -3:
        return None
    return Finding(
        code="M162",
        severity="warning",
        what=f"Speed fell from {early:,.0f} to {late:,.0f} tokens a second.",
        why="Completions have become longer, another program uses the machine, or memory is swapped.",
        fix="Compare the time/... metrics of early and late steps; see also M161.",
    )


def slow_reward(history: MetricHistory) -> Finding | None:
    """M163: most of a step is spent in reward functions."""
    rows = [each.values for each in history.steps[-5:]]
    timed = [row for row in rows if "time/reward_seconds" in row and row.get("step_time", 0) > 0]
    seconds = mean(history.series("time/reward_seconds", last=5))
    if len(timed) < 3 or seconds < 0.2:
        return None
    share = float(np.median([row["time/reward_seconds"] / row["step_time"] for row in timed]))
    if not share > 0.4:
        return None
    each = {name: x for name, x in rows[-1].items() if name.startswith("time/reward/")}
    slowest = max(each, key=lambda name: each[name], default="")
    name = slowest.removeprefix("time/reward/").removesuffix("_seconds")
    return Finding(
        code="M163",
        severity="warning",
        what=f"Reward functions take {percent(share)} of a step: {seconds:.1f} s each round"
        + (f", most of it {name} ({each[slowest]:.1f} s)." if each else "."),
        why="They call something slow (a model, a sandbox, the network, `sleep`) one completion after the other.",
        fix="Write the function with `async def`, score all completions in one call, or cache answers that repeat.",
    )
