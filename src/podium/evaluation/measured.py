"""An evaluation as arrays: the reward of every function for every completion, and how long each was.

    measured = measure(groups, weights_K, accuracy="answer_correct")

Texts are left out, so that thousands of prompts fit. Shape letters: P prompts, G completions per prompt, K reward
functions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from podium.algorithm.advantages import combine
from podium.algorithm.metrics import right
from podium.data.columns import GOLD
from podium.evaluation.statistics import mean_of_prompt
from podium.records import Prompt, ScoredGroup, last_user_turn
from podium.runs.monitors.hacking import in_common
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
    alike: str = ""
    """A sign of a hacked reward that nearly all completions share; empty: none."""

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
        found = self.right_PG
        return self.reward_PG if found is None else found

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


def measure(groups: Sequence[ScoredGroup], weights_K: Sequence[float] | np.ndarray, accuracy: str | None) -> EvalScores:
    """The numbers in scored groups, which all have as many completions."""
    return measured(table_of(groups), weights_K, accuracy)


def table_of(groups: Sequence[ScoredGroup], labels: Sequence[str] | None = None) -> pa.Table:
    """A row for each completion; `labels`: columns of the dataset, None for all."""
    if labels is None:
        labels = list(dict.fromkeys(name for scored in groups for name in scored.group.prompt.columns))
    rewards = dict.fromkeys((f"{REWARD}{name}" for name in groups[0].names_K), pa.float64())
    types = {**_COLUMNS, **rewards, **dict.fromkeys((f"{LABEL}{name}" for name in labels), pa.string())}
    rows = [row for scored in groups for row in _rows(scored, labels)]
    return pa.Table.from_pylist(rows, schema=pa.schema(types))


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
            "completion": utf8(completion.text),
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
    return EvalScores(
        names_K=tuple(names(REWARD)),
        weights_K=np.asarray(weights_K, float),
        accuracy=accuracy,
        keys_P=tuple(table["prompt_key"].to_pylist()[::count]),
        rewards_PGK=np.stack([grid(f"{REWARD}{name}") for name in names(REWARD)], axis=-1),
        tokens_PG=grid("num_tokens"),
        truncated_PG=grid("finish") == "length",
        labels=labels,
        alike=alike(grid("completion").tolist(), labels),
    )


def alike(texts_PG: Sequence[Sequence[str]], labels: Labels) -> str:
    """One text for all prompts, or all answers in each, in words; empty: neither."""
    answers = next((labels[name] for name in GOLD if name in labels), ())
    return in_common([texts_PG], [answers]) or ""


def key_of(prompt: Prompt) -> str:
    """A digest of the row's content before any chat template: equal for two models.

    Columns are part of it: a prompt that occurs twice with two answers is two prompts.
    """
    content = [prompt.content, {name: label(value) for name, value in sorted(prompt.columns.items())}]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def label(value: Any) -> str | None:
    """A plain value as a short text; None for any other value.

    >>> label(3), label("easy"), label(["a"]), label("x" * 1000)
    ('3', 'easy', None, None)
    """
    if not isinstance(value, (str, int, float)):
        return None
    text = utf8(str(value))
    return text if len(text) <= LONGEST_LABEL else None
