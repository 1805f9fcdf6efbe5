"""An evaluation as arrays: the reward of every function for every completion, and how long each was.

    scores = measured(table_of(groups), weights_K, accuracy="answer_correct")

Texts are left out, so that thousands of prompts fit. Shape letters: P prompts, G completions per prompt, K reward
functions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from podium.algorithm.advantages import combine
from podium.algorithm.metrics import right
from podium.data.columns import GOLD
from podium.evaluation.statistics import Difference, mean_of_prompt, paired_difference
from podium.records import Prompt, ScoredGroup, as_name, last_user_turn
from podium.runs.conversations import whole_text
from podium.runs.monitors.signs import JudgedTexts, Sign, credited, signs
from podium.runs.recording import nullable, utf8

LONGEST_LABEL = 200
"""Characters of a column's value by which prompts can be told apart."""

LABEL = "column/"
REWARD = "reward/"
_COLUMNS: Mapping[str, pa.DataType] = {
    **dict.fromkeys(("place", "row"), pa.int64()),
    **dict.fromkeys(("prompt_key", "question", "prompt"), pa.string()),
    "completion_index": pa.int32(),
    "completion": pa.string(),
    "num_tokens": pa.int32(),
    "finish": pa.string(),
}
"""Besides `reward/<function>` and, for plain columns of the dataset, `column/<name>`. `place` numbers the prompts of
this evaluation, `row` is the prompt's in the dataset, `prompt` what the model saw, `question` its last user turn."""

Labels = Mapping[str, Sequence[str | None]]
"""By column of the dataset, a short text for each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One completion, or the question itself, for every prompt."""

    name: str
    text: str
    """The completion; empty for the question copied."""
    values: Mapping[str, float]
    """By the prompt's key: 1 or 0 where a reward tells right from wrong, else the reward."""

    @property
    def mean(self) -> float:
        """Over the prompts that have a value."""
        known = [value for value in self.values.values() if not math.isnan(value)]
        return float(np.mean(known)) if known else math.nan

    def __str__(self) -> str:
        shown = f" {self.text[:40]!r}" if self.text else ""
        return f"{self.name}{shown} {self.mean:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """All baselines of an evaluation."""

    scored: tuple[Baseline, ...] = ()
    skipped: str = ""
    """The reason why there are none."""

    def line(self, metric: str) -> str:
        """All of them in a sentence."""
        if self.skipped:
            return f"Baselines were not computed: {self.skipped}."
        return f"{metric.capitalize()} without a model: {', '.join(map(str, self.scored))}." if self.scored else ""

    def strongest(self, keys_P: Sequence[str], main_P: np.ndarray) -> tuple[Baseline, Difference] | None:
        """The highest baseline, and how far a model is above it on the same prompts; None without baselines."""
        known = [baseline for baseline in self.scored if not math.isnan(baseline.mean)]
        if not known:
            return None
        best = max(known, key=lambda baseline: baseline.mean)
        values_P = np.array([best.values.get(key, np.nan) for key in keys_P])
        return best, paired_difference(values_P, main_P)

    def to_json(self, metric: str) -> dict[str, Any]:
        """For the file of an evaluation; `from_json` reads it."""
        scored = [{"name": b.name, "text": b.text, "mean": b.mean, "values": b.values} for b in self.scored]
        return {"each": scored, "skipped": self.skipped, "line": self.line(metric)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Baselines:
        """The baselines in the file of an evaluation; none where it has none."""
        rows = found.get("each", ())
        scored = tuple(Baseline(name=row["name"], text=row["text"], values=row["values"]) for row in rows)
        return cls(scored=scored, skipped=str(found.get("skipped", "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalScores:
    """P prompts with G completions each."""

    names_K: tuple[str, ...]
    weights_K: np.ndarray
    accuracy: str | None
    """The reward function that tells right from wrong; None: there is none."""
    keys_P: tuple[str, ...]
    """A digest of each prompt's content, the same for every model."""
    rewards_PGK: np.ndarray
    """float64; NaN where a reward function returned None."""
    tokens_PG: np.ndarray
    truncated_PG: np.ndarray
    """bool: cut off at the limit."""
    labels: Labels = field(default_factory=dict)
    signs: tuple[Sign, ...] = ()
    """Signs in the texts that a reward is hacked, or too strict."""
    baselines: Baselines = Baselines()

    @property
    def metric(self) -> Literal["accuracy", "reward"]:
        """The name of the numbers that decide a comparison."""
        return "reward" if self.accuracy is None else "accuracy"

    @property
    def num_prompts(self) -> int:
        return len(self.keys_P)

    @property
    def num_samples(self) -> int:
        return self.tokens_PG.shape[1]

    @property
    def reward_PG(self) -> np.ndarray:
        """Weighted sum of the reward functions."""
        return combine(self.rewards_PGK, self.weights_K)

    @property
    def right_PG(self) -> np.ndarray | None:
        """1 or 0, NaN where the function returned None; None without such a function."""
        return None if self.accuracy is None else right(self.by_name(self.accuracy))

    def by_name(self, name: str) -> np.ndarray:
        """Rewards of one function [P, G]."""
        return self.rewards_PGK[:, :, self.names_K.index(name)]

    @property
    def main_PG(self) -> np.ndarray:
        """The numbers that decide a comparison: right or wrong where that is known, else the reward."""
        right_PG = self.right_PG
        return self.reward_PG if right_PG is None else right_PG

    @property
    def main_P(self) -> np.ndarray:
        """Their mean over the completions of a prompt."""
        return mean_of_prompt(self.main_PG)

    def select(self, places: Sequence[int]) -> EvalScores:
        """These prompts, in this order."""
        index = np.asarray(places, int)
        return dataclasses.replace(
            self,
            keys_P=tuple(self.keys_P[i] for i in index),
            rewards_PGK=self.rewards_PGK[index],
            tokens_PG=self.tokens_PG[index],
            truncated_PG=self.truncated_PG[index],
            labels={name: [values[i] for i in index] for name, values in self.labels.items()},
        )


def table_of(groups: Sequence[ScoredGroup], labels: Sequence[str] | None = None) -> pa.Table:
    """A row for each completion; `labels`: columns of the dataset, None for all."""
    if labels is None:
        labels = list(dict.fromkeys(name for scored in groups for name in scored.group.prompt.columns))
    rewards = dict.fromkeys((f"{REWARD}{name}" for name in groups[0].names_K), pa.float64())
    types = {**_COLUMNS, **rewards, **dict.fromkeys((f"{LABEL}{name}" for name in labels), pa.string())}
    return pa.Table.from_pylist([row for scored in groups for row in _rows(scored, labels)], schema=pa.schema(types))


def _rows(scored: ScoredGroup, labels: Sequence[str]) -> list[dict[str, Any]]:
    prompt = scored.group.prompt
    common = {
        "place": prompt.id,
        "row": prompt.row,
        "prompt_key": key_of(prompt),
        "question": utf8(last_user_turn(prompt.content)),
        "prompt": utf8(prompt.text),
        **{f"{LABEL}{name}": label(prompt.columns.get(name)) for name in labels},
    }
    rewards_K = {f"{REWARD}{name}": nullable(scored.rewards_GK[:, k]) for k, name in enumerate(scored.names_K)}
    return [
        {
            **common,
            "completion_index": g,
            "completion": utf8(whole_text(completion)),
            "num_tokens": len(completion.token_ids),
            "finish": completion.finish,
            **{name: rewards_G[g] for name, rewards_G in rewards_K.items()},
        }
        for g, completion in enumerate(scored.group.completions)
    ]


def measured(table: pa.Table, weights_K: Sequence[float] | np.ndarray, accuracy: str | None) -> EvalScores:
    """The numbers of a table as `table_of` makes it, and the sign that its texts share."""
    count = pc.max(table["completion_index"]).as_py() + 1

    def names(prefix: str) -> list[str]:
        return [name.removeprefix(prefix) for name in table.column_names if name.startswith(prefix)]

    def grid(name: str) -> np.ndarray:
        return table[name].to_numpy().reshape(-1, count)

    labels = {name: table[f"{LABEL}{name}"].to_pylist()[::count] for name in names(LABEL)}
    scores = EvalScores(
        names_K=tuple(names(REWARD)),
        weights_K=np.asarray(weights_K, float),
        accuracy=accuracy,
        keys_P=tuple(table["prompt_key"].to_pylist()[::count]),
        rewards_PGK=np.stack([grid(f"{REWARD}{name}") for name in names(REWARD)], axis=-1),
        tokens_PG=grid("num_tokens"),
        truncated_PG=grid("finish") == "length",
        labels=labels,
    )
    return dataclasses.replace(scores, signs=tuple(signs(_sample(scores, table))))


def _sample(scores: EvalScores, table: pa.Table) -> JudgedTexts:
    golds = next((scores.labels[name] for name in GOLD if name in scores.labels), [None] * scores.num_prompts)
    return JudgedTexts(
        texts=table["completion"].to_pylist(),
        questions=table["question"].to_pylist(),
        answers=[gold for gold in golds for _ in range(scores.num_samples)],
        paid=credited(scores.main_PG.reshape(-1), judged=scores.accuracy is not None).tolist(),
        judged=scores.accuracy is not None,
    )


def key_of(prompt: Prompt) -> str:
    """A digest of the row's content before any chat template: equal for two models.

    Columns are part of it: a prompt that occurs twice with two answers is two prompts.
    """
    plain = {name: value if isinstance(value, _PLAIN) else None for name, value in prompt.columns.items()}
    content = [prompt.content, {name: label(value) for name, value in sorted(plain.items())}]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=as_name).encode()).hexdigest()[:16]


_PLAIN = (str, int, float)


def label(value: Any) -> str | None:
    """A value as a short text, lists and objects as JSON; None for null, and for a long one.

    >>> label(3), label("easy"), label(["a", "b"]), label("x" * 1000)
    ('3', 'easy', '["a", "b"]', None)
    """
    if value is None:
        return None
    text = utf8(str(value) if isinstance(value, _PLAIN) else json.dumps(value, ensure_ascii=False, default=as_name))
    return text if len(text) <= LONGEST_LABEL else None
