"""Writes a run's folder during the run; `podium.runs.run` reads it.

    folder = RunFolder(Path("runs/x"), rollouts_megabytes=512)
    folder.begin(resumed_step=None)
    folder.add_metrics(StepMetrics(step=1, values={"reward": 0.5}))

Lines are appended and flushed; a Parquet file is written beside its place and renamed. So a crash leaves at most one
half-written line, which the reader skips. A resumed run cuts the record after its checkpoint; a new run in the folder
of an older one moves that record, its checkpoints, its final model and its evaluations to `earlier-1/`.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from podium.algorithm.advantages import combine
from podium.data.columns import GOLD
from podium.errors import Finding
from podium.records import Completion, Prompt, ScoredGroup, StepMetrics, as_name, last_user_turn
from podium.runs.checkpoint import MODEL_STEP, checkpoints, model_step, record_model_step, step_of, storing
from podium.runs.conversations import branches, drawn_text, written
from podium.runs.redaction import HIDDEN
from podium.runs.run import EVALUATION, FINDINGS, GROWING, METRICS, REPORT, ROLLOUTS, THUMBNAILS, Run, json_object
from podium.runs.thumbnails import name_of, thumbnails

logger = logging.getLogger(__name__)

FILES_TO_JOIN = 64
"""Number of Parquet files of one round each that are merged into one."""

THUMBNAIL_BYTES = 16_000_000
"""Most bytes of thumbnails of a run, about 2,500 photographs: images that come later have none."""

FINAL = (
    *("config.json", "generation_config.json", "model*.safetensors*", "pytorch_model*.bin*", "training_args.bin"),
    *("adapter_config.json", "adapter_model.*", "adapter_digests.json", "ref", "merged", MODEL_STEP),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "*processor_config.json"),
)
"""Files and folders of a final model, as patterns."""

_TEXTS = (
    *("prompt", "question", "completion", "finish", "answer", "turns", "branches", "images"),
    *("program_failed", "program_log"),
)
_TYPES: Mapping[str, pa.DataType] = {
    "step": pa.int32(),
    "policy_step": pa.int32(),
    "prompt_id": pa.int64(),
    "row": pa.int64(),
    "completion_index": pa.int16(),
    "num_prompt_tokens": pa.int32(),
    "num_tokens": pa.int32(),
    "token_digest": pa.int64(),
    "mean_logp": pa.float32(),
    "advantage": pa.float32(),
    "trained": pa.bool_(),
    "contains_answer": pa.bool_(),
    **dict.fromkeys(_TEXTS, pa.string()),
}
"""Types of columns of `rollouts/*.parquet`; `reward` and `reward/<name>` are float64."""

Rows = dict[str, list[Any]]
"""A table as columns of equal length."""


def rollout_rows(
    scored: Sequence[ScoredGroup],
    advantages_PG: Sequence[np.ndarray],
    trained_PG: Sequence[np.ndarray],
    *,
    weights_K: np.ndarray,
    step: int,
    images: bool = True,
) -> list[Rows]:
    """One table a group: a row for each completion, with the columns of the run folder.

    Args:
        scored: groups of a generation round.
        advantages_PG: of the same completions.
        trained_PG: bool, whether they are trained on.
        weights_K: of the reward functions.
        step: the first optimizer step that trains on the round.
        images: whether the images of prompts are recorded, as thumbnails.
    """
    return [
        {
            **{"step": [step] * len(x), **_group_rows(group, weights_K, images=images)},
            **{"advantage": x.tolist(), "trained": y.tolist()},
        }
        for group, x, y in zip(scored, advantages_PG, trained_PG, strict=True)
    ]


def _group_rows(scored: ScoredGroup, weights_K: np.ndarray, *, images: bool) -> Rows:
    """The columns that a group itself determines.

    `prompt` is that of an episode's first request, and `question` its last user turn, without the chat template;
    `answer` the row's own, and `contains_answer` whether the policy wrote it; null where the dataset has no column for
    it. `turns` are those of `conversations.written`, `branches` those of `conversations.branches`; null where the
    completion is one answer, or one sequence. `images` are JPEGs, which the writer replaces by names. `num_tokens` are
    those that the policy drew, in all branches; `token_digest` (CRC-32) tells apart completions of other tokens whose
    text is the same.
    """
    prompt = scored.group.prompt
    completions = scored.group.completions
    own = [completion.in_order[0].prompt or prompt for completion in completions]
    logps = [[logp for sequence in completion.sequences for logp in sequence.logps] for completion in completions]
    failures = [scored.failure(g) for g in range(len(completions))]
    golds = _golds(prompt.columns)
    same = {"prompt_id": prompt.id, "row": prompt.row, "answer": utf8(" or ".join(golds)) or None}
    return {
        **{name: [value] * len(completions) for name, value in same.items()},
        "prompt": [utf8(request.text) for request in own],
        "question": [utf8(last_user_turn(request.content)) for request in own],
        "num_prompt_tokens": [len(request.token_ids) for request in own],
        "policy_step": [completion.policy_step for completion in completions],
        "completion_index": list(range(len(completions))),
        "completion": [utf8(completion.text) for completion in completions],
        "num_tokens": [completion.num_drawn for completion in completions],
        "token_digest": [_digest(completion) for completion in completions],
        "finish": [completion.finish for completion in completions],
        "mean_logp": [float(np.mean(drawn)) if drawn else None for drawn in logps],
        **{f"reward/{name}": nullable(scored.rewards_GK[:, k]) for k, name in enumerate(scored.names_K)},
        "reward": nullable(combine(scored.rewards_GK, weights_K)),
        "contains_answer": [
            any(gold in drawn_text(completion) for gold in golds) if golds else None for completion in completions
        ],
        "turns": [written(completion) for completion in completions],
        "branches": [
            json.dumps(found, default=as_name) if (found := branches(completion)) else None
            for completion in completions
        ],
        "images": _thumbnails(own) if images else [()] * len(own),
        "program_failed": [utf8(how) or None for how, _ in failures],
        "program_log": [utf8(log) or None for _, log in failures],
    }


def _thumbnails(prompts: Sequence[Prompt]) -> list[tuple[bytes, ...]]:
    """Those of each prompt, made once for completions that share it."""
    made = {id(prompt): thumbnails(prompt.content) if prompt.images else () for prompt in prompts}
    return [made[id(prompt)] for prompt in prompts]


def _digest(completion: Completion) -> int:
    """CRC-32 of the tokens of all branches."""
    return zlib.crc32(
        np.concatenate([np.array(sequence.token_ids, np.int64) for sequence in completion.sequences]).tobytes()
    )


def _golds(columns: Mapping[str, Any]) -> list[str]:
    """The row's right answers as short texts, where a column is called so: one, or each item of a list.

    >>> _golds({"answer": ["Rome", "Roma"]}), _golds({"target": 7}), _golds({"answer": "x" * 99})
    (['Rome', 'Roma'], ['7'], [])
    """
    for name in GOLD:
        value = columns.get(name)
        items = value if isinstance(value, (list, tuple)) else [value]
        if items and all(isinstance(item, (str, int, float)) for item in items):
            texts = [str(item).strip() for item in items]
            return [text for text in texts if 0 < len(text) <= 64]
    return []


def utf8(text: str) -> str:
    """Replace lone surrogates, which cannot be written."""
    return text.encode("utf-8", "replace").decode("utf-8")


def nullable(values: np.ndarray) -> list[float | None]:
    """Numbers for a table, NaN as null."""
    return [None if math.isnan(x) else float(x) for x in values.tolist()]


def joined(groups: Sequence[Rows]) -> Rows:
    """Several tables of the same columns as one."""
    return {name: [x for group in groups for x in group[name]] for name in groups[0]} if groups else {}


@dataclass(slots=True)
class RunFolder:
    """The writer, in the main process of a run."""

    folder: Path
    rollouts_megabytes: float = 512
    """All rollouts are recorded up to half of it, then ever fewer groups a step, so that it is never exceeded."""
    clock: Callable[[], float] = time.time
    _bytes: int = field(default=0, init=False)
    _thumbnails: dict[str, int] = field(default_factory=dict, init=False)
    """Bytes of each that is kept, by name."""

    def begin(self, *, resumed_step: int | None) -> None:
        """Cut the record after `resumed_step`; None: start a new one and move an older one away."""
        with storing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if resumed_step is None:
            set_aside(self.folder, [self.folder / name for name in GROWING])
        else:
            self._cut(resumed_step)
        (self.folder / ROLLOUTS).mkdir(exist_ok=True)
        self._bytes = sum(path.stat().st_size for path in (self.folder / ROLLOUTS).glob("*.parquet"))
        self._thumbnails = {name: len(jpeg) for name, jpeg in Run(self.folder).thumbnails.items()}

    def add_metrics(self, metrics: StepMetrics) -> None:
        """Append a line; numbers that are not finite become null."""
        values = {name: float(x) if math.isfinite(x) else None for name, x in metrics.values.items()}
        self._append(METRICS, {"step": metrics.step, "time": round(self.clock(), 3), "values": values})

    def add_finding(self, finding: Finding) -> None:
        self._append(FINDINGS, finding.as_dict())

    def add_rollouts(self, groups: Sequence[Rows]) -> None:
        """Write a generation round as `rollouts/<step>-<n>.parquet`, and thumbnails that are new.

        Beyond the size cap some groups are left out.
        """
        kept = self._sampled(groups)
        if not kept:
            return
        folder = self.folder / ROLLOUTS
        step = int(kept[0]["step"][0])
        number = sum(1 for _ in folder.glob(f"{step:07}-*.parquet"))
        path = folder / f"{step:07}-{number}.parquet"
        rows = joined(kept)
        rows["images"] = [self._stored(images) for images in rows["images"]]
        _write(pa.table({name: pa.array(rows[name], _TYPES.get(name, pa.float64())) for name in rows}), path)
        self._bytes += path.stat().st_size
        singles = sorted(folder.glob("*-?.parquet"))
        if len(singles) >= FILES_TO_JOIN:
            self._bytes += _join(singles, folder / f"{singles[0].stem}-to-{step:07}.parquet")

    def _stored(self, images: Sequence[bytes]) -> str | None:
        """Keep thumbnails that are not there yet; their names as JSON, None without any."""
        for jpeg in images:
            name = name_of(jpeg)
            if name not in self._thumbnails and sum(self._thumbnails.values()) + len(jpeg) <= THUMBNAIL_BYTES:
                self._append(THUMBNAILS, {"jpeg": base64.b64encode(jpeg).decode()})
                self._thumbnails[name] = len(jpeg)
        return json.dumps([name_of(jpeg) for jpeg in images]) if images else None

    def write_json(self, name: str, contents: Mapping[str, Any]) -> None:
        """Write a small JSON file, atomically."""
        self._replace(name, json.dumps(contents, indent=1, default=str))

    def write_yaml(self, name: str, contents: Mapping[str, Any]) -> None:
        """Write a small YAML file, atomically; hidden keys are left out, so that it can be run again."""
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
        """Append one object; after half a line that a crash has left, on a new line."""
        path = self.folder / name
        with storing(path), path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(contents, ensure_ascii=True).encode() + b"\n")

    def _sampled(self, groups: Sequence[Rows]) -> Sequence[Rows]:
        """All groups below half the cap; then a share that shrinks with the remaining space, spread over the round."""
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
                kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_until(line, step)]
                self._replace(name, "".join(f"{line}\n" for line in kept))
        for path in (self.folder / ROLLOUTS).glob("*.parquet"):
            table = pq.read_table(path)
            rows = table.filter(pc.less_equal(table["step"], step))
            if len(rows) == 0:
                path.unlink()
            elif len(rows) < len(table):
                _write(rows, path)


def set_earlier_run_aside(folder: Path, resumed: str | None, model: Any, stages: Sequence[str] = ()) -> None:
    """Set aside what an earlier run has left beyond the checkpoint that this one resumes from; None: all of it.

    Checkpoints are rotated, and resumed, by their steps: those of an earlier run that got further would win. `model` is
    that of this run, `stages` are folders of stages.
    """
    step = json.loads((Path(resumed) / "trainer_state.json").read_text())["global_step"] if resumed else -1
    moved = [checkpoint for checkpoint in checkpoints(folder) if step_of(checkpoint) > step]
    if resumed is None:
        moved += [path for name in (*GROWING, *stages) if (path := folder / name).exists()]
        if not moved:  # there was no run
            return
        moved += [folder / EVALUATION, folder / REPORT]
    else:
        moved += reported(folder)
    known = model_step(folder)
    if known is None or resumed is None or known[1] > step:
        moved += (files := final_model(folder, model))
        if not files and (folder / "config.json").exists():  # the model that this run begins with
            record_model_step(folder, weights=0, training=0)
    set_aside(folder, moved)


def reported(folder: Path) -> list[Path]:
    """List the evaluation after training, its comparison with the one before, and the report."""
    return [*folder.glob(f"{EVALUATION}/after.*"), folder / EVALUATION / "comparison.json", folder / REPORT]


def final_model(folder: Path, model: Any) -> list[Path]:
    """List the files of a final model in a run's folder; none where `model` (a name, a module) came from there."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
    if name and Path(name).expanduser().resolve() == folder.resolve():
        return []
    return [path for pattern in FINAL for path in folder.glob(pattern)]


def set_aside(folder: Path, paths: Iterable[Path]) -> None:
    """Move those of `paths` that exist to `earlier-1/` in the folder, the next time to `earlier-2/`, and so on."""
    old = [path for path in paths if path.exists()]
    if not old:
        return
    target = folder / f"earlier-{1 + sum(1 for path in folder.glob('earlier-*') if path.is_dir())}"
    with storing(target):
        for path in old:
            place = target / EVALUATION if path.parent == folder / EVALUATION else target
            place.mkdir(parents=True, exist_ok=True)
            os.rename(path, place / path.name)
    logger.info("There was a run in %s already: what it left was moved to %s.", folder, target)


def _is_until(line: str, step: int) -> bool:
    """Whether a line is complete and of this step or one before it."""
    contents = json_object(line)
    return bool(contents) and (contents.get("step") or 0) <= step


def _write(table: pa.Table, path: Path) -> None:
    staging = path.with_name(f"{path.name}.tmp")
    with storing(path):
        pq.write_table(table, staging, compression="zstd")
        os.replace(staging, path)


def _join(paths: Sequence[Path], target: Path) -> int:
    """Merge several files into one; the change in bytes."""
    before = sum(path.stat().st_size for path in paths)
    _write(pa.concat_tables([pq.read_table(path) for path in paths], promote_options="permissive"), target)
    for path in paths:
        path.unlink()
    return target.stat().st_size - before
