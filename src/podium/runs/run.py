"""Reads a run's folder: `Run.load("runs/quickstart")`.

    metrics.jsonl  findings.jsonl  rollouts/*.parquet  config.yaml  environment.json  proof.json  reward_test.json
    evaluation/*.json

Any file may be missing, and the run may still be going on: a half-written line is left out. A run in stages has a
folder like this for every stage and `stages.json` beside them; it reads as one run whose steps are numbered through.
`podium.runs.recording` writes the folder; this module only reads, and needs neither torch nor a model.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import SEVERITIES, DataError, Finding
from podium.records import StepMetrics

if TYPE_CHECKING:
    import pandas as pd

METRICS = "metrics.jsonl"
FINDINGS = "findings.jsonl"
ROLLOUTS = "rollouts"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
_KINDS = {**dict.fromkeys(("settings", "model", "reward_weights", "agents"), dict), "checks": list}
"""Kinds of values in `environment.json` and `proof.json`; one that is damaged counts as missing."""
REWARD_TEST = "reward_test.json"
PROOF = "proof.json"
EVALUATION = "evaluation"
STAGES = "stages.json"
REPORT = "report.html"

GROWING = (METRICS, FINDINGS, ROLLOUTS)
"""Files that are appended to at every step."""

RECORD = (*GROWING, CONFIG, ENVIRONMENT, PROOF, REWARD_TEST, EVALUATION, STAGES)
"""Files and folders of a run."""

GROUP_KEY = ("step", "prompt_id")
"""Columns of `Run.rollouts` that name a group: the completions of one prompt that were compared with each other."""

SHOWN = 5
"""Findings in a notebook's summary of a run."""

ROLLOUT_KEY = (*GROUP_KEY, "completion_index")

CUMULATIVE = ("num_tokens",)
"""Metrics that count from the beginning of a stage: over the whole run they are summed."""


@dataclass(frozen=True)
class Stage:
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
        """Number of its last step in the run."""
        return self.offset + (self.run.history[-1].step if self.run.history else 0)


@dataclass(frozen=True)
class Run:
    """The record of a run so far. Each member is read once, when first used: load again to see more.

    >>> Run.load("nowhere")
    Traceback (most recent call last):
    podium.errors.DataError: There is no folder nowhere.
      fix: Give the output_dir of a run, as runs/quickstart.
    """

    folder: Path

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """The run in `folder`. Raises `DataError` for a folder without a record."""
        path = Path(folder)
        if not path.is_dir():
            raise DataError(
                f"There is no folder {path}.", fix="Give the output_dir of a run, as runs/quickstart.", path=path
            )
        if not any((path / name).exists() for name in RECORD):
            record = ", ".join(RECORD[:3])
            raise DataError(
                f"{path} is not the folder of a run: it has none of {record}, ...",
                fix="Give the output_dir of a run; `podium doctor` also reads TRL's trainer_state.json.",
                path=path,
                record=record,
            )
        return cls(folder=path)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @cached_property
    def parts(self) -> tuple[Stage, ...]:
        """The stages that have begun, in order; empty for a run without stages."""
        stages: list[Stage] = []
        offset = 0
        for entry in self._stage_entries:
            folder = self.folder / entry["folder"]
            if not folder.is_dir():
                break
            stages.append(Stage(name=entry["name"], kind=entry["type"], run=Run(folder=folder), offset=offset))
            offset = max(stages[-1].last_step, offset + (entry.get("steps") or 0))
        return tuple(stages)

    @cached_property
    def _stage_entries(self) -> list[dict[str, Any]]:
        """Valid entries of `stages.json`, of ended and of later stages; folders outside of the run are invalid."""
        entries = _json(self.folder / STAGES).get("stages")
        return [entry for entry in entries if _is_stage(entry)] if isinstance(entries, list) else []

    @property
    def has_ended(self) -> bool:
        """Whether every stage has ended; True for a run without stages."""
        return all(entry.get("ended_by") for entry in self._stage_entries)

    @cached_property
    def history(self) -> tuple[StepMetrics, ...]:
        """One record a step, in order. A null (not a finite number) becomes NaN."""
        if self.parts:
            return tuple(_renumbered(self.parts))
        values: dict[int, dict[str, float]] = {}
        for line in _steps(self.folder / METRICS):
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
            offset + int(line["step"]): line.get("time", math.nan) for offset, path in files for line in _steps(path)
        }
        rows = [{"step": each.step, "time": times[each.step], **each.values} for each in self.history]
        return pd.DataFrame(rows, columns=None if rows else ["step", "time"])

    @cached_property
    def findings(self) -> pd.DataFrame:
        """One row a finding: the fields of `Finding`."""
        import pandas as pd

        columns = list(Finding.__dataclass_fields__)
        if self.parts:
            return _stacked([(part.run.findings, part.offset) for part in self.parts], ["step"], columns)
        rows = [{name: line.get(name) for name in columns} for line in _lines(self.folder / FINDINGS)]
        for row in rows:
            for name in ("changes", "facts"):  # earlier versions had none
                row[name] = row[name] if isinstance(row[name], dict) else {}
            row |= {name: str(row[name] or "") for name in ("code", "what", "why", "fix", "where")}
            row["severity"] = row["severity"] if row["severity"] in SEVERITIES else "note"
        return pd.DataFrame(rows, columns=columns)

    @cached_property
    def rollouts(self) -> pd.DataFrame:
        """One row a completion. `GROUP_KEY` names its group; the same prompt has the same `prompt` (and `row`) in every
        step, while `prompt_id` only numbers the prompts of a generation round.
        """
        import pandas as pd

        if self.parts:
            recorded = [(part.run.rollouts, part.offset) for part in self.parts]
            return _stacked(recorded, ["step", "policy_step"], list(ROLLOUT_KEY))
        frames = list(_frames(self.folder / ROLLOUTS))
        if not frames:
            return pd.DataFrame(columns=list(ROLLOUT_KEY))
        # A file and the ones it was merged from may exist together for a moment.
        rows = pd.concat(frames, ignore_index=True).drop_duplicates(list(ROLLOUT_KEY))
        return rows.sort_values(list(ROLLOUT_KEY), ignore_index=True)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every setting of the run: those of the recipe or script, and the resolved values of all others."""
        bounds: list[Any] = [entry.get("max_steps") for entry in self._stage_entries]
        total = {}
        if bounds:
            total["max_steps"] = sum(bounds) if all(bounds) else -1
        return {**self.environment.get("settings", {}), **self.given, **total}

    @cached_property
    def given(self) -> dict[str, Any]:
        """The recipe with its flags, or a script's settings that differ from the defaults."""
        import yaml

        path = self.folder / CONFIG
        try:
            given = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise DataError(
                f"{path} cannot be read: {' '.join(str(error).split())}.",
                fix="Restore it, or remove it: the record is readable without.",
                path=path,
                error=" ".join(str(error).split()),
            ) from error
        return given if isinstance(given, dict) else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, hardware, git commit, digests of rewards and data, resolved settings (of the latest stage)."""
        return self._latest(ENVIRONMENT)

    @cached_property
    def proof(self) -> dict[str, Any]:
        """Result of the proof on the first batch (of the latest stage)."""
        return self._latest(PROOF)

    def _latest(self, name: str) -> dict[str, Any]:
        folders = [*(part.run.folder for part in reversed(self.parts)), self.folder]
        found = next((found for folder in folders if (found := _json(folder / name))), {})
        sound: dict[str, Any] = {
            key: value for key, value in found.items() if isinstance(value, _KINDS.get(key, object))
        }
        if "checks" in sound:
            sound["checks"] = [check for check in sound["checks"] if isinstance(check, dict)]
        return sound

    @cached_property
    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Held-out results by name: `before`, `after`, their `comparison`, and what `podium eval` has added."""
        return {path.stem: _json(path) for path in sorted((self.folder / EVALUATION).glob("*.json"))}

    def _repr_html_(self) -> str:
        """For notebooks: verdict, reward curve, the gravest findings, best and worst of the last completions."""
        from podium.runs.html import render

        rewards = [each.values["reward"] for each in self.history if "reward" in each.values]
        findings = sorted(self.findings.to_dict("records"), key=lambda row: SEVERITIES.index(row["severity"]))
        return render(
            "run.html",
            name=self.name,
            steps=self.history[-1].step if self.history else 0,
            verdict=self.evaluations.get("comparison", {}).get("verdict", ""),
            rewards=rewards,
            findings=findings[:SHOWN],
            more=len(findings) - SHOWN,
            completions=best_and_worst(self.rollouts),
        )


def best_and_worst(rollouts: pd.DataFrame) -> list[tuple[str, float, str]]:
    """Best and worst completion of the last step: label, reward, and the beginning of the text."""
    last = rollouts[rollouts["step"] == rollouts["step"].max()] if len(rollouts) else rollouts
    rows = last.sort_values("reward").to_dict("records") if len(last) else []
    ends = (("best", rows[-1]), ("worst", rows[0])) if rows else ()
    return [(word, float(row["reward"]), str(row["completion"])[:300]) for word, row in ends]


def _is_stage(entry: Any) -> bool:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "folder", "type")):
        return False
    inside = not entry["folder"].startswith(".") and Path(entry["folder"]).name == entry["folder"]
    return inside and all(isinstance(entry.get(key), int | None) for key in ("steps", "max_steps"))


def _renumbered(stages: tuple[Stage, ...]) -> Iterator[StepMetrics]:
    """The steps of all stages, numbered through, with cumulative metrics summed."""
    counts: dict[str, float] = {}
    for stage in stages:
        before = dict(counts)
        for each in stage.run.history:
            totals = {name: before.get(name, 0.0) + each.values[name] for name in CUMULATIVE if name in each.values}
            counts |= totals
            yield StepMetrics(step=stage.offset + each.step, values={**each.values, **totals})


def _stacked(frames: list[tuple[pd.DataFrame, int]], counted: list[str], columns: list[str]) -> pd.DataFrame:
    """The tables of all stages below each other, with the steps before each stage added to the `counted` columns."""
    import pandas as pd

    moved = [
        frame.assign(**{name: frame[name] + offset for name in counted if name in frame})
        for frame, offset in frames
        if not frame.empty
    ]
    return pd.concat(moved, ignore_index=True) if moved else pd.DataFrame(columns=columns)


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSON Lines file; incomplete lines (being written, or after a crash) are left out."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from filter(None, map(json_object, file))


def _steps(path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of a file of metrics that have a step and numbers; others are left out."""
    for line in _lines(path):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            values = {str(name): None if x is None else float(x) for name, x in line["values"].items()}
            yield {**line, "step": int(float(line["step"])), "values": values}


def _json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return json_object(path.read_text(encoding="utf-8", errors="replace"))
    return {}


def json_object(text: str) -> dict[str, Any]:
    """The object in a JSON text; empty if there is none."""
    try:
        value = json.loads(text)
        if "\\ud" in text.casefold():  # half of a surrogate pair, which is no text
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _frames(folder: Path) -> Iterator[pd.DataFrame]:
    """The readable Parquet files of a folder; one that vanishes meanwhile has been merged into another."""
    import pandas as pd
    import pyarrow

    for path in sorted(folder.glob("*.parquet")):
        with contextlib.suppress(OSError, pyarrow.ArrowInvalid):
            yield pd.read_parquet(path)
