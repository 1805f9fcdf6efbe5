"""An evaluation on the disk: NAME.parquet, a row a completion, and NAME.json, its numbers.

saved = save(path, settings, parts)
saved = Saved.load("a.parquet")
saved.scores(), saved.texts([(3, 0)])
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from podium.errors import DataError
from podium.errors.texts import quoted
from podium.evaluation.measured import LABEL, Baselines, EvalScores, measured, table_of
from podium.records import ScoredGroup
from podium.runs.recording import RunFolder

_KEY = b"podium.evaluation"
_TEXTS = ("prompt", "place", "row")
"""Columns that `scores` does not read."""

SAMPLING = ("greedy", "temperature", "max_tokens", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of sampling by which one and the same model scores otherwise."""

DIGESTS = {
    "rows": "other rows",
    "prompts": "other prompts of these rows",
    "chat_template": "another chat template, tools or prompt length",
}
"""Fields with digests of what was evaluated, and the words where two of them differ; the first says all."""


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
    """sha256 of each reward function's code, empty where it has none; no entry in files of earlier versions."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    rows: str = ""
    """sha256 of the columns of all rows but their prompts. This and the next two: empty in files of earlier versions,
    and whatever the order of the rows."""
    prompts: str = ""
    """sha256 of the same with the prompts, as `prompt`, `system` and `examples` of a recipe make them."""
    chat_template: str = ""
    """sha256 of the same as the model read it: through its template, with tools, cut to their limit."""
    vocabulary: str = ""
    """sha256 of the tokenizer's: models of another one have a chat template of their own."""

    @property
    def digest(self) -> str:
        """Of all but the names of model and data, for records of comparisons."""
        return sha256({**asdict(self), "model": "", "data": ""})[:16]

    def differing(self, other: EvalSettings) -> list[str]:
        """What makes another evaluation one of something else than another model, with both values where they tell."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in (*DIGESTS, *SAMPLING)}
        found = [name for name in DIGESTS if all(pairs[name]) and pairs[name][0] != pairs[name][1]]
        if found == ["chat_template"] and self.vocabulary != other.vocabulary:
            found = []
        code = zip(self.names, self.code, other.code, strict=False)
        return [
            *(DIGESTS[name] for name in found[:1]),
            *(f"`{name}` {a} and {b}" for name, (a, b) in pairs.items() if name in SAMPLING and a != b),
            *(f"other code of `{name}`" for name, a, b in code if a and b and a != b),
        ]


def sha256(value: Any) -> str:
    """Of a value as JSON; what JSON has no form for as text, without addresses in memory."""
    text = json.dumps(value, skipkeys=True, default=lambda item: re.sub(r" at 0x\w+", "", str(item)))
    return hashlib.sha256(text.encode()).hexdigest()


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
            raise DataError(f"There is no file {path}. `podium eval` writes such files.", path=path)
        try:
            metadata = pq.read_metadata(path).metadata or {}
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{path} is not a Parquet file: {quoted(error)}", code="D030", path=path, error=error
            ) from error
        if _KEY not in metadata:
            raise DataError(f"{path} is a Parquet file, but no evaluation; `podium eval` writes those.", path=path)
        fields = json.loads(metadata[_KEY])
        listed = {name: tuple(fields.get(name, ())) for name in ("names", "weights", "code")}
        return cls(path=path, settings=EvalSettings(**{**fields, **listed}))

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


def save(path: Path, settings: EvalSettings, parts: Iterable[Sequence[ScoredGroup]]) -> Saved:
    """Write some prompts at a time, in order, into a file that is renamed to `path` when all are there.

    Its settings have the digests of what was evaluated.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    file: pq.ParquetWriter | None = None
    labels: list[str] | None = None
    rows: list[str] = []
    prompts: list[str] = []
    read: list[str] = []
    try:
        for groups in parts:
            table = table_of(groups, labels)
            if file is None:
                file = pq.ParquetWriter(unfinished, table.schema, compression="zstd")
                labels = [name.removeprefix(LABEL) for name in table.column_names if name.startswith(LABEL)]
            file.write_table(table)
            for prompt in (scored.group.prompt for scored in groups):
                columns = sorted(prompt.columns.items())
                rows.append(sha256([columns]))
                prompts.append(sha256([columns, prompt.content]))
                read.append(sha256([columns, prompt.content, prompt.text]))
        settings = replace(
            settings, rows=sha256(sorted(rows)), prompts=sha256(sorted(prompts)), chat_template=sha256(sorted(read))
        )
        if file is not None:
            file.add_key_value_metadata({_KEY: json.dumps(asdict(settings)).encode()})
            file.close()
            os.replace(unfinished, path)
    finally:
        if file is not None:
            file.close()
        unfinished.unlink(missing_ok=True)
    return Saved(path=path, settings=settings)


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    """A small file, written whole or not at all."""
    RunFolder(path.parent).write_json(path.name, contents)
