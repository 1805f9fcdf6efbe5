"""An evaluation on the disk: NAME.parquet, a row a completion, and NAME.json, its numbers.

save(path, settings, parts)
saved = Saved.load("a.parquet")
saved.scores(), saved.texts([3])
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from podium.errors import DataError
from podium.evaluation.measured import LABEL, Baselines, EvalScores, measured, table_of
from podium.records import ScoredGroup
from podium.runs.recording import RunFolder

_KEY = b"podium.evaluation"
_TEXTS = ("prompt", "place", "row")
"""Columns that `scores` does not read."""


_DECIDING = ("greedy", "temperature", "max_tokens")
"""Settings by which one and the same model scores otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """Settings of an evaluation that two of them must share to be compared fairly."""

    model: str
    data: str
    names: tuple[str, ...]
    """Reward functions."""
    weights: tuple[float, ...]
    accuracy: str | None
    num_completions: int
    """For each prompt."""
    greedy: bool
    temperature: float
    max_tokens: int
    seed: int
    engine: str
    products: str
    """Precision of matrix products on a CPU; empty elsewhere."""
    code: tuple[str, ...] = ()
    """sha256 of each reward function's file, empty where it has none; no entry in files of earlier versions."""


def save(path: Path, settings: EvalSettings, parts: Iterable[Sequence[ScoredGroup]]) -> None:
    """Write some prompts at a time, in order, into a file that is renamed to `path` when all are there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    metadata = {_KEY: json.dumps(asdict(settings)).encode()}
    file: pq.ParquetWriter | None = None
    labels: list[str] | None = None
    try:
        for groups in parts:
            table = table_of(groups, labels).replace_schema_metadata(metadata)
            if file is None:
                file = pq.ParquetWriter(unfinished, table.schema, compression="zstd")
                labels = [name.removeprefix(LABEL) for name in table.column_names if name.startswith(LABEL)]
            file.write_table(table)
        if file is not None:
            file.close()
            os.replace(unfinished, path)
    finally:
        if file is not None:
            file.close()
        unfinished.unlink(missing_ok=True)


@dataclass(frozen=True)
class Saved:
    """An evaluation that lies on the disk."""

    path: Path
    settings: EvalSettings

    @classmethod
    def load(cls, name: str | Path) -> Saved:
        """By its Parquet file, or the JSON beside it. Raises `DataError`."""
        path = Path(name).expanduser().with_suffix(".parquet")
        if not path.is_file():
            raise DataError(f"There is no file {path}. `podium eval` writes such files.")
        try:
            metadata = pq.read_schema(path).metadata or {}
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path} is not a Parquet file: {error}", code="D030") from error
        if _KEY not in metadata:
            raise DataError(f"{path} is a Parquet file, but no evaluation; `podium eval` writes those.")
        fields = json.loads(metadata[_KEY])
        listed = {name: tuple(fields.get(name, ())) for name in ("names", "weights", "code")}
        return cls(path=path, settings=EvalSettings(**{**fields, **listed}))

    def differing(self, other: Saved) -> list[str]:
        """Settings, with both values, that make another evaluation one of something else than another model."""
        ours, theirs = self.settings, other.settings
        pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in _DECIDING}
        found = [f"`{name}` {a} and {b}" for name, (a, b) in pairs.items() if a != b]
        code = zip(ours.names, ours.code, theirs.code, strict=False)
        return found + [f"the code of `{name}` has changed between them" for name, a, b in code if a and b and a != b]

    def scores(self) -> EvalScores:
        """Its numbers."""
        columns = [name for name in pq.read_schema(self.path).names if name not in _TEXTS]
        table = pq.read_table(self.path, columns=columns)
        scores = measured(table, self.settings.weights, self.settings.accuracy)
        return replace(scores, baselines=Baselines.from_json(self._numbers().get("baselines") or {}))

    def _numbers(self) -> dict[str, Any]:
        """The JSON file beside it; nothing where it is not there."""
        try:
            return dict(json.loads(self.path.with_suffix(".json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def texts(self, completions: Sequence[tuple[int, int]]) -> list[tuple[str, str]]:
        """Question and completion, by the number of the prompt in `scores()` and of its completion."""
        rows = [place * self.settings.num_completions + g for place, g in completions]
        table = pq.read_table(self.path, columns=["question", "completion"]).take(pa.array(rows, pa.int64()))
        return list(zip(*(table[name].to_pylist() for name in ("question", "completion")), strict=True))


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    """A small file, written whole or not at all."""
    RunFolder(path.parent).write_json(path.name, contents)
