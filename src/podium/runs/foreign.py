"""Other trainers' logs as a history of steps: TRL's `trainer_state.json`, CSV, JSON Lines, what a console showed.

Only numbers are read. A name that is in no table stays as it is.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from podium.errors import DataError
from podium.records import StepMetrics

NAMES: Mapping[str, str] = {
    # verl
    "critic/rewards/mean": "reward",
    "critic/score/mean": "reward",
    "actor/entropy": "entropy",
    "actor/entropy_loss": "entropy",
    "actor/kl_loss": "kl",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/pg_loss": "loss",
    "actor/pg_clipfrac": "clip_ratio/region_mean",
    "response_length/mean": "completions/mean_length",
    "response_length/max": "completions/max_length",
    "response_length/min": "completions/min_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
    "timing_s/step": "step_time",
    "timing_s/gen": "time/generate_seconds",
    "timing_s/reward": "time/reward_seconds",
    "perf/throughput": "health/tokens_per_second",
    "training/rollout_probs_diff_mean": "health/probability_gap",
    # TRL before 1.0
    "completion_length": "completions/mean_length",
    "completions/mean_clipped": "completions/clipped_ratio",
    "clip_ratio": "clip_ratio/region_mean",
    # trackers prefix what the Trainer logs
    "train/global_step": "step",
    "_step": "step",
    "global_step": "step",
}
"""Another name -> ours."""

GIGABYTES: Mapping[str, str] = {
    "perf/max_memory_allocated_gb": "health/device_bytes",
    "perf/cpu_memory_used_gb": "health/resident_bytes",
}
"""Names in gigabytes -> ours in bytes."""

LogLine = Mapping[str, Any]


def read_log(path: Path) -> tuple[StepMetrics, ...]:
    """The steps of a log, oldest first. Raises `DataError` for a file that is none."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError("runs.no_log_known", path=path, readers=READERS)
    try:
        lines = list(reader(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError("runs.cannot_read_log", path=path, error=error) from error
    history = as_history(lines)
    if not history:
        raise DataError("runs.no_line_numbers", path=path)
    return history


def as_history(lines: Iterable[LogLine]) -> tuple[StepMetrics, ...]:
    """One record a step, from all lines of the step; without a step, lines are numbered.

    >>> as_history([{"step": 3, "data": {"critic/rewards/mean": 0.5, "actor/lr": 1e-6}}])
    (StepMetrics(step=3, values={'reward': 0.5, 'learning_rate': 1e-06}),)
    """
    steps: dict[int, dict[str, float]] = {}
    for number, line in enumerate(lines, start=1):
        values = _renamed({**line, **line["data"]} if isinstance(line.get("data"), dict) else line)
        step = values.pop("step", float(number))
        values = {name: value for name, value in values.items() if name not in ("epoch", "total_flos")}
        if values and "train_runtime" not in values and math.isfinite(step):
            steps.setdefault(int(step), {}).update(values)
    return tuple(StepMetrics(step=step, values=steps[step]) for step in sorted(steps))


def _renamed(line: LogLine) -> dict[str, float]:
    """The numbers of a line, under our names. Null is NaN, as JSON has no other way to write it."""
    named: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, str, type(None))):
            continue
        try:
            number = math.nan if value is None else float(value)
        except ValueError:
            continue
        plain = name.removeprefix("train/")
        if name in GIGABYTES:
            named[GIGABYTES[name]] = number * 1e9
        elif name.startswith("val-core/") and "/mean@" in name:
            named["eval_reward"] = number
        else:
            named[NAMES.get(name, NAMES.get(plain, plain.replace("eval/", "eval_", 1)))] = number
    return named


def _trainer_state(text: str) -> Iterable[LogLine]:
    contents = json.loads(text)
    return contents["log_history"] if isinstance(contents, dict) else contents


def _json_lines(text: str) -> Iterable[LogLine]:
    """Podium's own lines keep their numbers in `values`. A half-written last line is left out."""
    for line in text.splitlines():
        try:
            contents = json.loads(line)
        except ValueError:
            continue
        if isinstance(contents, dict):
            inner = contents.get("values")
            yield {"step": contents.get("step"), **inner} if isinstance(inner, dict) else contents


def _csv(text: str) -> Iterable[LogLine]:
    for line in csv.DictReader(text.splitlines(keepends=True)):
        yield {name: value for name, value in line.items() if name and value not in ("", None)}


_DICT = re.compile(r"\{'[^{}]*\}")
_PAIR = re.compile(r"'([^']+)': '?([^',}\s]+)'?")
_VERL = re.compile(r"\bstep:\d+ - .*")


def _console(text: str) -> Iterable[LogLine]:
    """Read the lines of TRL and Unsloth (`{'loss': '0.1', ..., 'epoch': '0.5'}`) and verl (`step:1 - actor/lr:1e-06`).

    The former do not name their step, so lines are numbered.

    >>> list(_console("  3%|#  | 1/4 [00:01]{'loss': 0.1, 'kl': nan, 'epoch': '0.5'}\\nWARNING: {'a': 1}"))
    [{'step': 1, 'loss': '0.1', 'kl': 'nan', 'epoch': '0.5'}]
    >>> list(_console("(TaskRunner pid=7) step:2 - critic/score/mean:0.25 - actor/lr:np.float64(1e-06)"))
    [{'step': '2', 'critic/score/mean': '0.25', 'actor/lr': '1e-06'}]
    """
    step = 0
    for line in text.replace("\r", "\n").splitlines():
        for found in _DICT.findall(line):
            values = dict(_PAIR.findall(found))
            if "epoch" in values:
                step += not any(name.startswith("eval_") for name in values)
                yield {"step": step, **values}
        for found in _VERL.findall(line):
            pairs = (part.strip().rpartition(":") for part in found.split(" - "))
            yield {name: value.removeprefix("np.float64(").rstrip(")") for name, _, value in pairs if name}


READERS: Mapping[str, Callable[[str], Iterable[LogLine]]] = {
    ".json": _trainer_state,
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".log": _console,
    ".txt": _console,
    ".out": _console,
}
"""By the file's ending."""
