"""An evaluation as arrays: what every reward function said about every completion, and how long each was.

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

from podium.algorithm.advantages import combine
from podium.evaluation.statistics import mean_of_prompt
from podium.records import Prompt, ScoredGroup
from podium.rewards.resolve import GOLD
from podium.runs.monitors.hacking import in_common

RIGHT = 1.0
"""A reward that says right or wrong says right from here on."""

LONGEST_LABEL = 200
"""Characters of a column's value by which prompts can be told apart."""

Labels = Mapping[str, Sequence[str | None]]
"""By column of the dataset, a short text for each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """P prompts with G completions each."""

    names_K: tuple[str, ...]
    weights_K: np.ndarray
    accuracy: str | None
    """The reward function that says right or wrong; None: none does."""
    keys_P: tuple[str, ...]
    """What names a prompt, whatever the model: a digest of its content."""
    rewards_PGK: np.ndarray
    """float64; NaN where a reward function returned None."""
    tokens_PG: np.ndarray
    truncated_PG: np.ndarray
    """bool: cut off at the limit."""
    labels: Labels = field(default_factory=dict)
    alike: str = ""
    """What nearly all completions have in common that they should not; empty: nothing was found."""

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.keys_P)

    @property
    def num_samples(self) -> int:
        """G."""
        return self.tokens_PG.shape[1]

    @property
    def reward_PG(self) -> np.ndarray:
        """Weighted sum of the reward functions."""
        return combine(self.rewards_PGK, self.weights_K)

    @property
    def right_PG(self) -> np.ndarray | None:
        """1 or 0, NaN where the function had no opinion; None where no function says."""
        return None if self.accuracy is None else right(self.by_name(self.accuracy))

    def by_name(self, name: str) -> np.ndarray:
        """Rewards of one function [P, G]."""
        return self.rewards_PGK[:, :, self.names_K.index(name)]

    @property
    def main_PG(self) -> np.ndarray:
        """What a comparison is decided by: right or wrong where that is known, else the reward."""
        found = self.right_PG
        return self.reward_PG if found is None else found

    @property
    def main_P(self) -> np.ndarray:
        """Its mean over the completions of a prompt."""
        return mean_of_prompt(self.main_PG)

    def select(self, places: Sequence[int]) -> Measured:
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


def right(rewards: np.ndarray) -> np.ndarray:
    """1 or 0; NaN where the function had no opinion."""
    return np.where(np.isnan(rewards), np.nan, (rewards >= RIGHT).astype(float))


def measure(groups: Sequence[ScoredGroup], weights_K: np.ndarray, accuracy: str | None) -> Measured:
    """The numbers in scored groups, which all have as many completions."""
    completions = [scored.group.completions for scored in groups]
    return Measured(
        names_K=groups[0].names_K,
        weights_K=np.asarray(weights_K, float),
        accuracy=accuracy,
        keys_P=tuple(key_of(scored.group.prompt) for scored in groups),
        rewards_PGK=np.stack([scored.rewards_GK for scored in groups]),
        tokens_PG=np.array([[len(each.token_ids) for each in group] for group in completions]),
        truncated_PG=np.array([[each.finish == "length" for each in group] for group in completions]),
        labels=(labels := _labels([scored.group.prompt for scored in groups])),
        alike=alike([[each.text for each in group] for group in completions], labels),
    )


def alike(texts_PG: Sequence[Sequence[str]], labels: Labels) -> str:
    """One text for all prompts, or all answers in each, in words; empty: neither."""
    answers = next((labels[name] for name in GOLD if name in labels), ())
    return in_common([texts_PG], [answers]) or ""


def join(parts: Sequence[Measured]) -> Measured:
    """Measurements of one model by the same rewards, one after another."""
    first = parts[0]
    return dataclasses.replace(
        first,
        keys_P=tuple(key for part in parts for key in part.keys_P),
        rewards_PGK=np.concatenate([part.rewards_PGK for part in parts]),
        tokens_PG=np.concatenate([part.tokens_PG for part in parts]),
        truncated_PG=np.concatenate([part.truncated_PG for part in parts]),
        labels={name: [x for part in parts for x in part.labels.get(name, ())] for name in first.labels},
        alike=first.alike if all(part.alike for part in parts) else "",
    )


def key_of(prompt: Prompt) -> str:
    """A digest of what the dataset says, not of what a model's chat template makes of it: equal for two models.

    Columns are part of it: a prompt that occurs twice with two answers is two prompts.
    """
    content = [prompt.content, {name: label(value) for name, value in sorted(prompt.columns.items())}]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _labels(prompts: Sequence[Prompt]) -> Labels:
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return {name: [label(prompt.columns.get(name)) for prompt in prompts] for name in names}


def label(value: Any) -> str | None:
    """A short text for a plain value; None for what is none.

    >>> label(3), label("easy"), label(["a"]), label("x" * 1000)
    ('3', 'easy', None, None)
    """
    if not isinstance(value, (str, int, float)):
        return None
    text = str(value)
    return text if len(text) <= LONGEST_LABEL else None


def accuracy_name(names: Sequence[str]) -> str | None:
    """The reward function that sounds like right or wrong.

    >>> accuracy_name(["answer_format", "answer_correct"]), accuracy_name(["brevity"])
    ('answer_correct', None)
    """
    for word in ("accuracy", "correct", "match", "answer"):
        for name in names:
            if word in name and "format" not in name:
                return name
    return None
