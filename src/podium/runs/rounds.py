"""Generation rounds of a recorded run, read file by file when they are asked for, so that a long run fits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from podium.runs.monitors.history import Visit

if TYPE_CHECKING:
    import pandas as pd

ROLLOUT_KEY = ("step", "prompt_id", "completion_index")
"""Columns that name a completion; the first two name its group."""

Columns = Mapping[str, Sequence[Any]]
"""Completions, by the columns of the run folder."""


class RecordedRounds(Mapping[int, Sequence[Columns]]):
    """The tables of a run's rounds, by the step that they were drawn for.

    Of the rows of all steps only the columns that `visits` needs are held; a round is read when its step is asked for,
    with those of its file. Ask in the order of steps.

    Attributes:
        visits: by step, every group that has a reward.
        has_turns: whether some completion has turns.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: that of a run's rollouts."""
        self.has_turns = False
        self._files: dict[int, list[Path]] = {}
        self._opened: dict[Path, pa.Table] = {}
        light = [table for path in recorded_files(folder) for table in self._light(path)]
        self.visits: Mapping[int, list[Visit]] = _visits(pa.concat_tables(light)) if light else {}

    def _light(self, path: Path) -> Iterator[pa.Table]:
        """The columns for `visits`; nothing of a file that cannot be read, or was merged into another meanwhile."""
        try:
            with pq.ParquetFile(path) as file:
                names = file.schema_arrow.names
                question = "question" if "question" in names else "prompt"
                table = file.read(columns=[*ROLLOUT_KEY, question, "reward"])
                self.has_turns |= "turns" in names and _has_values(file.metadata, names.index("turns"))
        except (OSError, pa.ArrowInvalid):
            return
        for step in pc.unique(table["step"]).to_pylist():
            self._files.setdefault(step, []).append(path)
        yield table.select([*ROLLOUT_KEY, question, "reward"]).rename_columns([*ROLLOUT_KEY, "question", "reward"])

    def __getitem__(self, step: int) -> Sequence[Columns]:
        tables = [table.filter(pc.equal(table["step"], step)) for table in map(self._open, self._files[step])]
        rows = pa.concat_tables(tables, promote_options="permissive").sort_by(
            [(name, "ascending") for name in ROLLOUT_KEY]
        )
        columns: Columns = rows.to_pydict()
        keys = list(zip(*(columns[name] for name in ROLLOUT_KEY), strict=True))
        new = [place for place, key in enumerate(keys) if place == 0 or key != keys[place - 1]]
        return [columns if len(new) == len(keys) else {name: [x[i] for i in new] for name, x in columns.items()}]

    def _open(self, path: Path) -> pa.Table:
        """The rows of a file; the two files that were read last are kept."""
        if path not in self._opened:
            for old in [*self._opened][:-1]:
                del self._opened[old]
            self._opened[path] = pq.read_table(path)
        return self._opened[path]

    def __contains__(self, step: object) -> bool:
        return step in self._files

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._files))

    def __len__(self) -> int:
        return len(self._files)


def recorded_files(folder: Path) -> list[Path]:
    """The files of a folder of rollouts, in the order of their steps."""
    return sorted(folder.glob("*.parquet"))


def frame_of(path: Path) -> pd.DataFrame | None:
    """The completions of a file; None where a crash has cut it short, or it has been merged into another meanwhile."""
    try:
        return pq.read_table(path).to_pandas()
    except (OSError, pa.ArrowInvalid):
        return None


def _has_values(metadata: pq.FileMetaData, column: int) -> bool:
    statistics = [metadata.row_group(number).column(column).statistics for number in range(metadata.num_row_groups)]
    return any(known is None or known.num_values for known in statistics)


def _visits(rows: pa.Table) -> dict[int, list[Visit]]:
    """The groups of all rows, by step."""
    single = rows.group_by([*ROLLOUT_KEY], use_threads=False).aggregate([("question", "first"), ("reward", "first")])
    single = single.rename_columns({"question_first": "question", "reward_first": "reward"})
    groups = single.group_by(["step", "prompt_id"], use_threads=False)
    table = groups.aggregate([("question", "first"), ("reward", "min"), ("reward", "max")])
    found: dict[int, list[Visit]] = {}
    names = ("step", "question_first", "reward_min", "reward_max")
    for step, question, low, high in zip(*(table[name].to_pylist() for name in names), strict=True):
        if low is not None:
            found.setdefault(step, []).append(Visit(question, low, high))
    return found
