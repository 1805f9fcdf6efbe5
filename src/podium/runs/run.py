"""Reads a run's folder: `Run.load("runs/quickstart")`.

    metrics.jsonl  findings.jsonl  rollouts/*.parquet  thumbnails.jsonl  config.yaml  environment.json  proof.json
    reward_test.json  evaluation/*.json

Any file may be missing, and the run may still be going on: a half-written line is left out. A run in stages has a
folder like this for every stage and `stages.json` beside them; it reads as one run whose steps are numbered through.
`podium.runs.recording` writes the folder; this module only reads, and needs neither torch nor a model. All that shows a
run (`doctor`, `cure`, `report`, `watch`, notebooks) asks this record, so a file is parsed here and nowhere else.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podium.errors import SEVERITIES, DataError, Finding, gravest_first
from podium.records import StepMetrics
from podium.runs.thumbnails import name_of

if TYPE_CHECKING:
    import pandas as pd

    from podium.runs.rounds import RecordedRounds

METRICS = "metrics.jsonl"
FINDINGS = "findings.jsonl"
ROLLOUTS = "rollouts"
THUMBNAILS = "thumbnails.jsonl"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
_KINDS = {**dict.fromkeys(("settings", "model", "reward_weights", "agents"), dict), "checks": list}
"""Kinds of values in `environment.json` and `proof.json`; one that is damaged counts as missing."""
REWARD_TEST = "reward_test.json"
PROOF = "proof.json"
EVALUATION = "evaluation"
STAGES = "stages.json"
REPORT = "report.html"

GROWING = (METRICS, FINDINGS, ROLLOUTS, THUMBNAILS)
"""Files that are appended to at every step."""

RECORD = (*GROWING, CONFIG, ENVIRONMENT, PROOF, REWARD_TEST, EVALUATION, STAGES)
"""Files and folders of a run."""

SHOWN = 5
"""Findings in a notebook's summary of a run."""

SOLVED = 0.95
"""Held-out accuracy, under a verdict of "better", from which nothing needs to be changed."""

Outcome = Literal["solved", "with warnings", "no better", "better or not known"]

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
        rows = [{"step": line.step, "time": times[line.step], **line.values} for line in self.history]
        return pd.DataFrame(rows, columns=None if rows else ["step", "time"])

    @cached_property
    def series(self) -> pd.DataFrame:
        """The metrics by step, NaN where one is not a finite number; metrics without any number are left out."""
        import numpy as np

        frame = self.metrics.set_index("step").drop(columns="time").astype(float)
        return frame.where(np.isfinite(frame)).dropna(axis=1, how="all")

    @cached_property
    def reported(self) -> tuple[Finding, ...]:
        """The findings that were recorded, in their order; what is damaged in one is left out."""
        if not self.parts:
            return tuple(map(_finding, _lines(self.folder / FINDINGS)))
        return tuple(
            replace(finding, step=None if finding.step is None else finding.step + part.offset)
            for part in self.parts
            for finding in part.run.reported
        )

    @cached_property
    def findings(self) -> pd.DataFrame:
        """One row a finding: the fields of `Finding`."""
        import pandas as pd

        return pd.DataFrame(map(asdict, self.reported), columns=list(Finding.__dataclass_fields__))

    @cached_property
    def rounds(self) -> RecordedRounds:
        """Completions by generation round, read file by file; none of the stages below this folder."""
        from podium.runs.rounds import RecordedRounds

        return RecordedRounds(self.folder / ROLLOUTS)

    @cached_property
    def rollouts(self) -> pd.DataFrame:
        """One row a completion, by `step`, `prompt_id` and `completion_index`.

        The first two name its group: the completions of one prompt that were compared with each other. The same prompt
        has the same `prompt` (and `row`) in every step, while `prompt_id` only numbers the prompts of a generation
        round.
        """
        import pandas as pd

        from podium.runs.rounds import ROLLOUT_KEY, frame_of, recorded_files

        if self.parts:
            moved = [
                frame.assign(step=frame["step"] + part.offset, policy_step=frame["policy_step"] + part.offset)
                for part in self.parts
                if not (frame := part.run.rollouts).empty
            ]
            return pd.concat(moved, ignore_index=True) if moved else pd.DataFrame(columns=list(ROLLOUT_KEY))
        frames = [frame for path in recorded_files(self.folder / ROLLOUTS) if (frame := frame_of(path)) is not None]
        if not frames:
            return pd.DataFrame(columns=list(ROLLOUT_KEY))
        # A file and the ones it was merged from may exist together for a moment.
        rows = pd.concat(frames, ignore_index=True).drop_duplicates(list(ROLLOUT_KEY))
        return rows.sort_values(list(ROLLOUT_KEY), ignore_index=True)

    @cached_property
    def thumbnails(self) -> dict[str, bytes]:
        """JPEGs of images in prompts, by the names that the column `images` of `rollouts` has for them."""
        if self.parts:
            return {name: jpeg for part in self.parts for name, jpeg in part.run.thumbnails.items()}
        found: dict[str, bytes] = {}
        for line in _lines(self.folder / THUMBNAILS):
            encoded = line.get("jpeg")
            if isinstance(encoded, str):
                with contextlib.suppress(ValueError):  # a damaged line has no picture
                    jpeg = base64.b64decode(encoded, validate=True)
                    found[name_of(jpeg)] = jpeg
        return found

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

    @property
    def comparison(self) -> Mapping[str, Any]:
        """Held-out results before and after training, compared; empty where there are not both."""
        return self.evaluations.get("comparison", {})

    @property
    def verdict(self) -> str:
        """The sentence of that comparison; empty without one."""
        return str(self.comparison.get("verdict") or "")

    @property
    def outcome(self) -> Outcome:
        """What the record asks of its user.

        A model that is better, and right in nearly all held-out completions, needs no change, whatever was noted on
        the way.
        """
        compared = self.comparison
        accuracy = compared.get("main", {}).get("b") if compared.get("metric") == "accuracy" else None
        if compared.get("is_better") and (accuracy or 0.0) >= SOLVED:
            return "solved"
        if any(finding.severity != "note" for finding in self.reported):
            return "with warnings"
        return "no better" if compared.get("is_better") is False else "better or not known"

    @property
    def model(self) -> str:
        """The name or folder of the model that training started from; empty where none is recorded."""
        return str(self.given.get("model") or self.given.get("model_name_or_path") or "")

    def _repr_html_(self) -> str:
        """For notebooks: verdict, reward curve, the gravest findings, best and worst of the last completions."""
        from podium.runs.html import render

        rewards = [line.values["reward"] for line in self.history if "reward" in line.values]
        findings = gravest_first(self.reported)
        return render(
            "run.html",
            name=self.name,
            steps=self.history[-1].step if self.history else 0,
            verdict=self.verdict,
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


def names_data(settings: Mapping[str, Any]) -> bool:
    """Whether settings name a dataset, as those of a recipe do."""
    return not {"dataset", "datasets", "dataset_name"}.isdisjoint(settings)


def _finding(line: Mapping[str, Any]) -> Finding:
    """A recorded finding; earlier versions had neither facts nor changes."""
    texts = {name: str(line.get(name) or "") for name in ("code", "what", "why", "fix", "where")}
    step = line.get("step")
    severity = line.get("severity")
    changes = line.get("changes")
    facts = line.get("facts")
    return Finding(
        **texts,
        severity=severity if severity in SEVERITIES else "note",
        step=int(step) if isinstance(step, int | float) and math.isfinite(step) else None,
        changes=changes if isinstance(changes, dict) else {},
        facts=facts if isinstance(facts, dict) else {},
        settings=tuple(line.get("settings") or ()),
    )


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
        for line in stage.run.history:
            totals = {name: before.get(name, 0.0) + line.values[name] for name in CUMULATIVE if name in line.values}
            counts |= totals
            yield StepMetrics(step=stage.offset + line.step, values={**line.values, **totals})


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
