"""Writes a run's folder while it runs; `podium.runs.run` reads it back.

    folder = RunFolder(Path("runs/x"), rollouts_megabytes=512)
    folder.begin(resumed_step=None)
    folder.add_metrics(StepMetrics(step=1, values={"reward": 0.5}))

Lines are appended and flushed; a Parquet file is written beside its place and renamed. So a crash leaves at most one
half-written line, which the reader skips. A run that is resumed cuts what came after its checkpoint; a run that starts
anew moves an older record, and its checkpoints, to `earlier-1/` instead of mixing with them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from podium.algorithm.advantages import combine
from podium.records import Finding, ScoredGroup, StepMetrics, last_user_turn
from podium.rewards.resolve import GOLD
from podium.runs.checkpoint import checkpoints, step_of, storing
from podium.runs.redaction import HIDDEN
from podium.runs.run import FINDINGS, METRICS, ROLLOUTS

logger = logging.getLogger(__name__)

RECORD = (METRICS, FINDINGS, ROLLOUTS)
"""What grows while a run runs."""

FILES_TO_JOIN = 64
"""So many Parquet files of one round each become one."""

_COLUMNS: Mapping[str, pa.DataType] = {
    "step": pa.int32(),
    "policy_step": pa.int32(),
    "prompt_id": pa.int64(),
    "row": pa.int64(),
    "completion_index": pa.int16(),
    "prompt": pa.string(),
    "question": pa.string(),
    "completion": pa.string(),
    "num_prompt_tokens": pa.int32(),
    "num_tokens": pa.int32(),
    "finish": pa.string(),
    "mean_logp": pa.float32(),
    "reward": pa.float64(),
    "advantage": pa.float32(),
    "trained": pa.bool_(),
    "answer": pa.string(),
    "contains_answer": pa.bool_(),
}
"""Columns of `rollouts/*.parquet` besides `reward/<name>`. `question`: the prompt's last user turn, without
the chat template. `answer`: the row's own, and `contains_answer`: whether it
stands in the completion; null where the dataset has no column for it."""

Rows = dict[str, list[Any]]
"""A table as columns of equal length."""


def rollout_rows(
    scored: Sequence[ScoredGroup],
    advantages_PG: Sequence[np.ndarray],
    trained_PG: Sequence[np.ndarray],
    *,
    weights_K: np.ndarray,
    step: int,
) -> list[Rows]:
    """One table a group: a row for each completion, with the columns of the run folder.

    Args:
        scored: groups of a generation round.
        advantages_PG: of the same completions.
        trained_PG: bool, whether they are trained on.
        weights_K: of the reward functions.
        step: the first optimizer step that trains on the round.
    """
    return [
        _group_rows(group, advantage_G, trained_G, weights_K, step)
        for group, advantage_G, trained_G in zip(scored, advantages_PG, trained_PG, strict=True)
    ]


def _group_rows(
    scored: ScoredGroup, advantage_G: np.ndarray, trained_G: np.ndarray, weights_K: np.ndarray, step: int
) -> Rows:
    prompt, completions = scored.group.prompt, scored.group.completions
    count = len(completions)
    gold = _gold(prompt.columns)
    return {
        "step": [step] * count,
        "policy_step": [completion.policy_step for completion in completions],
        "prompt_id": [prompt.id] * count,
        "row": [prompt.row] * count,
        "completion_index": list(range(count)),
        "prompt": [utf8(prompt.text)] * count,
        "question": [utf8(last_user_turn(prompt.content))] * count,
        "completion": [utf8(completion.text) for completion in completions],
        "num_prompt_tokens": [len(prompt.token_ids)] * count,
        "num_tokens": [len(completion.token_ids) for completion in completions],
        "finish": [completion.finish for completion in completions],
        "mean_logp": [_mean(completion.logps) for completion in completions],
        **{f"reward/{name}": _nullable(scored.rewards_GK[:, k]) for k, name in enumerate(scored.names_K)},
        "reward": _nullable(combine(scored.rewards_GK, weights_K)),
        "advantage": [float(x) for x in advantage_G],
        "trained": [bool(x) for x in trained_G],
        "answer": [None if gold is None else utf8(gold)] * count,
        "contains_answer": [None if gold is None else gold in completion.text for completion in completions],
    }


def _gold(columns: Mapping[str, Any]) -> str | None:
    """The row's right answer as a short text, where a column is called so."""
    found = next((columns[name] for name in GOLD if isinstance(columns.get(name), (str, int, float))), None)
    text = "" if found is None else str(found).strip()
    return text if 0 < len(text) <= 64 else None


def utf8(text: str) -> str:
    """Lone surrogates cannot be written."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _mean(logps: Sequence[float]) -> float | None:
    return float(np.mean(logps)) if len(logps) else None


def _nullable(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(x) else float(x) for x in values.tolist()]


def as_table(rows: Rows) -> pa.Table:
    """Columns in the contract's types."""
    types = {name: _COLUMNS.get(name, pa.float64()) for name in rows}
    return pa.table({name: pa.array(values, types[name]) for name, values in rows.items()})


def joined(groups: Sequence[Rows]) -> Rows:
    """Several tables of the same columns as one."""
    return {name: [x for group in groups for x in group[name]] for name in groups[0]} if groups else {}


@dataclass(slots=True)
class RunFolder:
    """The writer. One process of a run has one; nothing is read back but to cut it."""

    folder: Path
    rollouts_megabytes: float = 512
    """Rollouts are recorded whole up to half of it, then ever fewer groups a step, so that it is never exceeded."""
    clock: Callable[[], float] = time.time
    _bytes: int = field(default=0, init=False)

    def begin(self, *, resumed_step: int | None) -> None:
        """Cut what was recorded after `resumed_step`; None: start anew, with an older record moved away."""
        with storing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if resumed_step is None:
            set_aside(self.folder, [self.folder / name for name in RECORD])
        else:
            self._cut(resumed_step)
        (self.folder / ROLLOUTS).mkdir(exist_ok=True)
        self._bytes = sum(path.stat().st_size for path in (self.folder / ROLLOUTS).glob("*.parquet"))

    def add_metrics(self, metrics: StepMetrics) -> None:
        """One line; what is not a finite number is null."""
        values = {name: float(x) if math.isfinite(x) else None for name, x in metrics.values.items()}
        self._append(METRICS, {"step": metrics.step, "time": round(self.clock(), 3), "values": values})

    def add_finding(self, finding: Finding) -> None:
        """One line."""
        self._append(FINDINGS, asdict(finding))

    def add_rollouts(self, groups: Sequence[Rows]) -> None:
        """One file for a generation round, `rollouts/<step>-<n>.parquet`; groups are left out beyond the size cap."""
        kept = self._sampled(groups)
        if not kept:
            return
        folder = self.folder / ROLLOUTS
        step = int(kept[0]["step"][0])
        number = sum(1 for _ in folder.glob(f"{step:07}-*.parquet"))
        path = folder / f"{step:07}-{number}.parquet"
        _write(as_table(joined(kept)), path)
        self._bytes += path.stat().st_size
        singles = sorted(folder.glob("*-?.parquet"))
        if len(singles) >= FILES_TO_JOIN:
            self._bytes += _join(singles, folder / f"{singles[0].stem}-to-{step:07}.parquet")

    def write_json(self, name: str, contents: Mapping[str, Any]) -> None:
        """A small file of its own, whole or not at all."""
        self._replace(name, json.dumps(contents, indent=1, default=str))

    def write_yaml(self, name: str, contents: Mapping[str, Any]) -> None:
        """A small file of its own; keys whose value is a secret are left out, so that it can be run again."""
        import yaml

        shown = {key: value for key, value in contents.items() if value != HIDDEN}
        self._replace(name, yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))

    def _replace(self, name: str, text: str) -> None:
        path = self.folder / name
        staging = path.with_name(f"{path.name}.tmp")
        with storing(path):
            path.parent.mkdir(exist_ok=True)
            staging.write_text(text, encoding="utf-8")
            os.replace(staging, path)

    def _append(self, name: str, contents: Mapping[str, Any]) -> None:
        """A crash may have left half a line: the new one starts on a line of its own."""
        path = self.folder / name
        with storing(path), path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(contents, ensure_ascii=True).encode() + b"\n")

    def _sampled(self, groups: Sequence[Rows]) -> Sequence[Rows]:
        """All groups below half the cap; then a share that shrinks with what is left, spread over the round."""
        cap = self.rollouts_megabytes * 1e6
        share = min(1.0, max(0.0, 2 * (1 - self._bytes / cap))) if cap > 0 else 0.0
        count = math.ceil(share * len(groups))
        if share == 0 or count == len(groups):
            return groups if share else ()
        return [groups[i * len(groups) // count] for i in range(count)]

    def _cut(self, step: int) -> None:
        for name in (METRICS, FINDINGS):
            path = self.folder / name
            if path.is_file():
                kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _until(line, step)]
                self._replace(name, "".join(f"{line}\n" for line in kept))
        for path in (self.folder / ROLLOUTS).glob("*.parquet"):
            _cut_rollouts(path, step)


def make_room(folder: Path, resumed: str | None) -> None:
    """Sets aside what an earlier run has left beyond the checkpoint that this one goes on from; None: all of it.

    Checkpoints are rotated, and resumed, by their steps: those of an earlier run that got further would win.
    """
    record = [] if resumed else [folder / name for name in RECORD]
    step = json.loads((Path(resumed) / "trainer_state.json").read_text())["global_step"] if resumed else -1
    set_aside(folder, [*record, *(each for each in checkpoints(folder) if step_of(each) > step)])


def set_aside(folder: Path, paths: Iterable[Path]) -> None:
    """What is there of `paths` goes to `earlier-1/` in the folder, the next time to `earlier-2/`, and so on."""
    old = [path for path in paths if path.exists()]
    if not old:
        return
    target = folder / f"earlier-{1 + sum(1 for path in folder.glob('earlier-*') if path.is_dir())}"
    target.mkdir()
    for path in old:
        os.rename(path, target / path.name)
    logger.info("There was a run in %s already: what it left was moved to %s.", folder, target)


def _until(line: str, step: int) -> bool:
    """Whether a line is whole and of this step or one before it."""
    try:
        return (json.loads(line).get("step") or 0) <= step
    except (ValueError, AttributeError):
        return False


def _cut_rollouts(path: Path, step: int) -> None:
    table = pq.read_table(path)
    kept = table.filter(pc.less_equal(table["step"], step))
    if len(kept) == 0:
        path.unlink()
    elif len(kept) < len(table):
        _write(kept, path)


def _write(table: pa.Table, path: Path) -> None:
    staging = path.with_name(f"{path.name}.tmp")
    with storing(path):
        pq.write_table(table, staging, compression="zstd")
        os.replace(staging, path)


def _join(paths: Sequence[Path], target: Path) -> int:
    """One file in place of several; the change in bytes."""
    before = sum(path.stat().st_size for path in paths)
    _write(pa.concat_tables([pq.read_table(path) for path in paths], promote_options="permissive"), target)
    for path in paths:
        path.unlink()
    return target.stat().st_size - before
