"""A run's folder as the page needs it. Knows files; knows nothing of HTML.

Every part may be missing: a run that has just begun has no metrics, one without rollouts on disk has no completions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import DataError

if TYPE_CHECKING:
    import pandas

FILES = ("metrics.jsonl", "findings.jsonl", "rollouts", "config.yaml", "environment.json", "evaluation", "proof.json")
"""What a report reads of a run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """All that a page shows of one run."""

    folder: Path
    name: str
    metrics: Sequence[Mapping[str, Any]]
    """One `{"step", "time", "values"}` a step, in order; lines of one step are one."""
    findings: Sequence[Mapping[str, Any]]
    rollouts: pandas.DataFrame | None
    """One row a completion; None: none on disk."""
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    evaluations: Mapping[str, Mapping[str, Any]]
    """By file name: `before`, `after`."""
    proof: Any = None

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def read_source(folder: str | Path, *, after_step: int | None = None) -> Source:
    """Read a run's folder.

    Args:
        folder: what `output_dir` was.
        after_step: leave out completions up to this step; None: all of them.

    Raises:
        DataError: the folder is not there, or nothing in it is of a run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(
            f"no folder `{folder}`. Give the folder of a run, its `output_dir`: podium report runs/quickstart"
        )
    if not any((folder / name).exists() for name in FILES):
        raise DataError(f"`{folder}` holds no run: none of {', '.join(FILES)} is in it. Give the run's `output_dir`.")
    return Source(
        folder=folder,
        name=folder.resolve().name,
        metrics=_steps(folder / "metrics.jsonl"),
        findings=list(_lines(folder / "findings.jsonl")),
        rollouts=_rollouts(folder / "rollouts", after_step),
        config=_yaml(folder / "config.yaml"),
        environment=_json(folder / "environment.json") or {},
        evaluations={path.stem: _json(path) or {} for path in sorted((folder / "evaluation").glob("*.json"))},
        proof=_json(folder / "proof.json"),
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects, one a line. The last line of a running run may be half written: it comes with the next reading."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _steps(path: Path) -> list[dict[str, Any]]:
    """The lines of a step put together: training and evaluation log apart."""
    steps: dict[int, dict[str, Any]] = {}
    for line in _lines(path):
        merged = steps.setdefault(
            int(line["step"]), {"step": int(line["step"]), "time": line.get("time"), "values": {}}
        )
        merged["time"] = line.get("time")
        merged["values"] |= {name: _finite(value) for name, value in line.get("values", {}).items()}
    return [steps[step] for step in sorted(steps)]


def _finite(value: Any) -> float | None:
    usable = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if usable else None


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    loaded = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    return loaded if isinstance(loaded, dict) else {}


def _rollouts(folder: Path, after_step: int | None) -> pandas.DataFrame | None:
    import pandas

    files = sorted(folder.glob("*.parquet"))
    filters = None if after_step is None else [("step", ">", after_step)]
    tables = [pandas.read_parquet(file, filters=filters) for file in files]
    tables = [table for table in tables if len(table)]
    if not tables:
        return None
    return pandas.concat(tables, ignore_index=True).sort_values(
        ["step", "prompt_id", "completion_index"], kind="stable"
    )
