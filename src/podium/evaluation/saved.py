"""An evaluation on the disk: NAME.parquet, a row a completion, and NAME.json, its numbers.

    with Writer(path, settings) as writer:
        writer.add(groups)
    saved = Saved.load("a.parquet")
    saved.measured(), saved.texts([3])

Rows are written as they come, into a file beside its place that is renamed when all are there: what breaks off leaves
nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podium.errors import DataError
from podium.evaluation.measured import Measured, alike, key_of, label
from podium.records import ScoredGroup, last_user_turn
from podium.runs.recording import utf8

_KEY = b"podium.evaluation"
_LABEL = "column/"
_REWARD = "reward/"
_COLUMNS: Mapping[str, pa.DataType] = {
    "place": pa.int64(),
    "row": pa.int64(),
    "prompt_key": pa.string(),
    "question": pa.string(),
    "prompt": pa.string(),
    "completion_index": pa.int32(),
    "completion": pa.string(),
    "num_tokens": pa.int32(),
    "finish": pa.string(),
}
"""Besides `reward/<function>` and, for plain columns of the dataset, `column/<name>`. `place` numbers the prompts of
this evaluation, `row` is the prompt's in the dataset, `prompt` what the model saw, `question` its last user turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """With what an evaluation was made: as much as two of them must share to be compared fairly."""

    model: str
    data: str
    names: tuple[str, ...]
    """Reward functions."""
    weights: tuple[float, ...]
    accuracy: str | None
    num_completions: int
    """Of each prompt."""
    greedy: bool
    temperature: float
    max_tokens: int
    seed: int
    engine: str
    products: str
    """Precision of matrix products on a CPU; empty elsewhere."""


class Writer:
    """Writes the completions of one evaluation; a context."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self.settings = settings
        self._unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file: pq.ParquetWriter | None = None
        self._labels: tuple[str, ...] = ()

    def __enter__(self) -> Writer:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self

    def add(self, groups: Sequence[ScoredGroup]) -> None:
        """Some more prompts, in order."""
        if self._file is None:
            self._labels = tuple(dict.fromkeys(name for each in groups for name in each.group.prompt.columns))
            self._file = pq.ParquetWriter(self._unfinished, self._schema(), compression="zstd")
        rows = [row for scored in groups for row in self._rows(scored)]
        self._file.write_table(pa.Table.from_pylist(rows, schema=self._file.schema))

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
            if kind is None:
                os.replace(self._unfinished, self.path)
        self._unfinished.unlink(missing_ok=True)

    def _schema(self) -> pa.Schema:
        fields = dict(_COLUMNS)
        fields |= {f"{_REWARD}{name}": pa.float64() for name in self.settings.names}
        fields |= {f"{_LABEL}{name}": pa.string() for name in self._labels}
        return pa.schema(fields, metadata={_KEY: json.dumps(asdict(self.settings)).encode()})

    def _rows(self, scored: ScoredGroup) -> list[dict[str, Any]]:
        prompt = scored.group.prompt
        common = {
            "place": prompt.id,
            "row": prompt.row,
            "prompt_key": key_of(prompt),
            "question": utf8(last_user_turn(prompt.content)),
            "prompt": utf8(prompt.text),
            **{f"{_LABEL}{name}": _text(prompt.columns.get(name)) for name in self._labels},
        }
        return [
            {
                **common,
                "completion_index": g,
                "completion": utf8(completion.text),
                "num_tokens": len(completion.token_ids),
                "finish": completion.finish,
                **{
                    f"{_REWARD}{name}": None if np.isnan(x) else float(x)
                    for name, x in zip(scored.names_K, scored.rewards_GK[g], strict=True)
                },
            }
            for g, completion in enumerate(scored.group.completions)
        ]


def _text(value: Any) -> str | None:
    text = label(value)
    return None if text is None else utf8(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What was asked, and what a model answered."""

    question: str
    completions: tuple[str, ...]


@dataclass(frozen=True)
class Saved:
    """An evaluation that lies on the disk."""

    path: Path
    settings: Settings

    @classmethod
    def load(cls, name: str | Path) -> Saved:
        """By its Parquet file, or the JSON beside it.

        Raises:
            DataError: not there, or none.
        """
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
        listed = {name: tuple(fields[name]) for name in ("names", "weights")}
        return cls(path=path, settings=Settings(**{**fields, **listed}))

    def measured(self) -> Measured:
        """Its numbers, and what its texts have in common."""
        wanted = [name for name in pq.read_schema(self.path).names if name.startswith((_REWARD, _LABEL))]
        table = pq.read_table(self.path, columns=["prompt_key", "completion", "num_tokens", "finish", *wanted])
        count = self.settings.num_completions
        first = slice(None, None, count)

        def grid(name: str) -> np.ndarray:
            return table[name].to_numpy().reshape(-1, count)

        names = [name.removeprefix(_LABEL) for name in wanted if name.startswith(_LABEL)]
        labels = {name: table[f"{_LABEL}{name}"].to_pylist()[first] for name in names}
        texts = table["completion"].to_pylist()
        return Measured(
            names_K=self.settings.names,
            weights_K=np.array(self.settings.weights),
            accuracy=self.settings.accuracy,
            keys_P=tuple(table["prompt_key"].to_pylist()[first]),
            rewards_PGK=np.stack([grid(f"{_REWARD}{name}") for name in self.settings.names], axis=-1),
            tokens_PG=grid("num_tokens"),
            truncated_PG=grid("finish") == "length",
            labels=labels,
            alike=alike([texts[i : i + count] for i in range(0, len(texts), count)], labels),
        )

    def texts(self, places: Sequence[int]) -> list[Texts]:
        """Of some prompts, by their number in `measured()`."""
        count = self.settings.num_completions
        wanted = {place * count + g for place in places for g in range(count)}
        found: dict[int, tuple[str, str]] = {}
        start = 0
        for batch in pq.ParquetFile(self.path).iter_batches(columns=["question", "completion"]):
            here = sorted(i - start for i in wanted if start <= i < start + len(batch))
            for i, row in zip(here, batch.take(pa.array(here, pa.int64())).to_pylist(), strict=True):
                found[start + i] = (row["question"], row["completion"])
            start += len(batch)
        return [
            Texts(
                question=found[place * count][0],
                completions=tuple(found[place * count + g][1] for g in range(count)),
            )
            for place in places
        ]


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(json.dumps(contents, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
