"""A run's folder, read back: `Run.load("runs/quickstart")`.

    metrics.jsonl  findings.jsonl  rollouts/*.parquet  config.yaml  environment.json  proof.json  evaluation/*.json

Any part may be missing, and the run may still be going on: a line that is half written is left out. A run in stages has
a folder like this for every stage and `stages.json` beside them; it reads as one, its steps numbered through.
`podium.runs.recording` writes the folder; this module only reads, and needs neither torch nor a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import DataError
from podium.records import Finding, StepMetrics

if TYPE_CHECKING:
    import pandas as pd

METRICS = "metrics.jsonl"
FINDINGS = "findings.jsonl"
ROLLOUTS = "rollouts"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
PROOF = "proof.json"
EVALUATION = "evaluation"
STAGES = "stages.json"

RECORD = (METRICS, FINDINGS, ROLLOUTS, CONFIG, ENVIRONMENT, PROOF, EVALUATION, STAGES)

COUNTED = ("num_tokens",)
"""Metrics that count up from the beginning of a stage: in the run as a whole they go on."""

GROUP_KEY = ("step", "prompt_id")
"""Columns of `Run.rollouts` that name a group: the completions of one prompt that were compared with each other."""

ROLLOUT_KEY = (*GROUP_KEY, "completion_index")


@dataclass(frozen=True)
class Part:
    """A stage of a run, as far as it has come."""

    name: str
    kind: str
    """`grpo` or `sft`."""
    run: Run
    """Its own folder, whose steps begin at 1."""
    offset: int
    """Steps of the run before it."""

    @property
    def last_step(self) -> int:
        """Of the run."""
        return self.offset + (self.run.history[-1].step if self.run.history else 0)


@dataclass(frozen=True)
class Run:
    """What a run has recorded so far. Parts are read when first asked for, and then kept: load again to see more.

    >>> Run.load("nowhere")
    Traceback (most recent call last):
    podium.errors.DataError: There is no folder nowhere.
      fix: Give the output_dir of a run, as runs/quickstart.
    """

    folder: Path

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """The run in `folder`. Raises `DataError` where nothing of a run lies there."""
        path = Path(folder)
        if not path.is_dir():
            raise DataError(f"There is no folder {path}.", fix="Give the output_dir of a run, as runs/quickstart.")
        if not any((path / name).exists() for name in RECORD):
            raise DataError(
                f"{path} is not the folder of a run: it has none of {', '.join(RECORD[:3])}, ...",
                fix="Give the output_dir of a run; `podium doctor` also reads logs of other trainers by their file.",
            )
        return cls(folder=path)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The stages that have begun, in order; none: a run without stages."""
        parts: list[Part] = []
        offset = 0
        for entry in _stage_entries(self.folder):
            folder = self.folder / entry["folder"]
            if not folder.is_dir():
                break
            part = Part(name=entry["name"], kind=entry["type"], run=Run(folder=folder), offset=offset)
            parts.append(part)
            offset = max(part.last_step, offset + (entry.get("steps") or 0))
        return tuple(parts)

    @property
    def has_ended(self) -> bool:
        """Of a run in stages: whether each of them has."""
        return all(entry.get("ended_by") for entry in _stage_entries(self.folder))

    @cached_property
    def history(self) -> tuple[StepMetrics, ...]:
        """One record a step, in order. What was null (not a finite number) is NaN."""
        if self.parts:
            return tuple(_through(self.parts))
        values: dict[int, dict[str, float]] = {}
        for line in _lines(self.folder / METRICS):
            values.setdefault(int(line["step"]), {}).update(
                {name: math.nan if value is None else float(value) for name, value in line["values"].items()}
            )
        return tuple(StepMetrics(step=step, values=values[step]) for step in sorted(values))

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row a step: `step`, `time` (unix seconds) and a column for every metric."""
        import pandas as pd

        files = [(part.offset, part.run.folder / METRICS) for part in self.parts] or [(0, self.folder / METRICS)]
        times = {
            offset + int(line["step"]): line.get("time", math.nan) for offset, path in files for line in _lines(path)
        }
        rows = [{"step": each.step, "time": times[each.step], **each.values} for each in self.history]
        return pd.DataFrame(rows, columns=None if rows else ["step", "time"])

    @cached_property
    def findings(self) -> pd.DataFrame:
        """One row for everything that was said: the fields of `Finding`."""
        import pandas as pd

        columns = list(Finding.__dataclass_fields__)
        if self.parts:
            return _joined([(part.run.findings, part.offset) for part in self.parts], ["step"], columns)
        rows = [{name: line.get(name) for name in columns} for line in _lines(self.folder / FINDINGS)]
        return pd.DataFrame(rows, columns=columns)

    @cached_property
    def rollouts(self) -> pd.DataFrame:
        """One row a completion. `GROUP_KEY` names its group; the same prompt has the same `prompt` (and `row`) in every
        step, while `prompt_id` only numbers the prompts of a generation round.
        """
        import pandas as pd

        if self.parts:
            recorded = [(part.run.rollouts, part.offset) for part in self.parts]
            return _joined(recorded, ["step", "policy_step"], list(ROLLOUT_KEY))
        frames = list(_frames(self.folder / ROLLOUTS))
        if not frames:
            return pd.DataFrame(columns=list(ROLLOUT_KEY))
        joined = pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
        # A file and the ones it was made of may be there together for a moment.
        return joined.drop_duplicates(list(ROLLOUT_KEY)).sort_values(list(ROLLOUT_KEY), ignore_index=True)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every setting of the run: the recipe or script's own over the values they resolved to."""
        bounds: list[Any] = [entry.get("max_steps") for entry in _stage_entries(self.folder)]
        whole = {"max_steps": sum(bounds) if all(bounds) else -1} if bounds else {}
        return {**self.environment.get("settings", {}), **self.given, **whole}

    @cached_property
    def given(self) -> dict[str, Any]:
        """The recipe with its flags, or of a script the settings that are not the defaults."""
        import yaml

        path = self.folder / CONFIG
        given = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
        return given if isinstance(given, dict) else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, hardware, git commit, digests of rewards and data, resolved settings; of the latest stage."""
        return self._latest(ENVIRONMENT)

    @cached_property
    def proof(self) -> dict[str, Any]:
        """What the proof on the first batch found; of the latest stage."""
        return self._latest(PROOF)

    def _latest(self, name: str) -> dict[str, Any]:
        folders = [*(part.run.folder for part in reversed(self.parts)), self.folder]
        return next((found for folder in folders if (found := _json(folder / name))), {})

    @cached_property
    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Held-out results by name: `before`, `after`, their `comparison`, and what `podium eval` has added."""
        return {path.stem: _json(path) for path in sorted((self.folder / EVALUATION).glob("*.json"))}


def _stage_entries(folder: Path) -> list[dict[str, Any]]:
    """The lines of `stages.json`, done or still to come; what is none, or leads out of the folder, is left out."""
    entries = _json(folder / STAGES).get("stages")
    return [entry for entry in entries if _is_entry(entry)] if isinstance(entries, list) else []


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "folder", "type")):
        return False
    inside = not entry["folder"].startswith(".") and Path(entry["folder"]).name == entry["folder"]
    return inside and all(isinstance(entry.get(key), int | None) for key in ("steps", "max_steps"))


def _through(parts: tuple[Part, ...]) -> Iterator[StepMetrics]:
    """The steps of all stages, numbered through; what counts up goes on."""
    counts: dict[str, float] = {}
    for part in parts:
        before = dict(counts)
        for each in part.run.history:
            counted = {name: before.get(name, 0.0) + each.values[name] for name in COUNTED if name in each.values}
            counts |= counted
            yield StepMetrics(step=part.offset + each.step, values={**each.values, **counted})


def _joined(frames: list[tuple[pd.DataFrame, int]], counted: list[str], columns: list[str]) -> pd.DataFrame:
    """The tables of all stages below each other, with the steps before each stage added to the `counted` columns."""
    import pandas as pd

    moved = [
        frame.assign(**{name: frame[name] + offset for name in counted if name in frame})
        for frame, offset in frames
        if not frame.empty
    ]
    return pd.concat(moved, ignore_index=True) if moved else pd.DataFrame(columns=columns)


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSON Lines file; what is no whole object (a line being written, a crash) is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _frames(folder: Path) -> Iterator[pd.DataFrame]:
    """The whole Parquet files of a folder; one that vanishes meanwhile has been joined into another."""
    import pandas as pd
    import pyarrow

    for path in sorted(folder.glob("*.parquet")):
        try:
            yield pd.read_parquet(path)
        except (OSError, pyarrow.ArrowInvalid):
            continue
