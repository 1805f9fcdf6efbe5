"""What a detector sees: the numbers of all steps, the latest generation rounds completion by completion, the settings.

Made from what a run folder holds, so it is the same while a run goes on, after it, and for the log of another trainer
(which has numbers only). Shape letters: P prompts, G completions per prompt, K reward functions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from podium.records import StepMetrics

NGRAM = 4
"""Words in a row that count as a repetition."""

PREFIX = "reward/"


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """A generation round as detectors look at it. What is costly is computed when first asked for, and once."""

    step: int
    names_K: tuple[str, ...]
    prompts_P: tuple[str, ...]
    questions_P: tuple[str, ...]
    """The last user turn of each, without its template; of older records the prompt."""
    answers_P: tuple[str | None, ...]
    """The right answer that the row has; None: it has none."""
    rows_P: tuple[int, ...]
    texts_PG: tuple[tuple[str, ...], ...]
    rewards_PGK: np.ndarray
    """NaN: no opinion."""
    reward_PG: np.ndarray
    advantages_PG: np.ndarray
    tokens_PG: np.ndarray
    truncated_PG: np.ndarray
    contains_answer_PG: np.ndarray
    """1, 0, or NaN where the dataset does not say what is right."""

    @property
    def texts(self) -> list[str]:
        """Of all completions."""
        return [text for texts_G in self.texts_PG for text in texts_G]

    @cached_property
    def is_flat_P(self) -> np.ndarray:
        """bool: all completions of the group have the same reward."""
        spread_P = np.array([np.ptp(x[~np.isnan(x)]) if (~np.isnan(x)).any() else 0.0 for x in self.reward_PG])
        return spread_P < 1e-9

    @cached_property
    def duplicates(self) -> float:
        """Share of completions that say the same as an earlier one of their group: 0 all differ, 1 one text each."""
        repeated = sum(len(texts) - len({_plain(text) for text in texts}) for texts in self.texts_PG)
        possible = sum(len(texts) - 1 for texts in self.texts_PG)
        return repeated / max(possible, 1)

    @cached_property
    def repetition(self) -> float:
        """Mean share of n-grams within a completion that it has said before; short texts do not count."""
        shares = [share for text in self.texts if (share := _repeated(text.split())) is not None]
        return float(np.mean(shares)) if shares else 0.0

    @cached_property
    def characters_PG(self) -> np.ndarray:
        """Length of every completion in characters."""
        return np.array([[len(text) for text in texts_G] for texts_G in self.texts_PG], float)

    @cached_property
    def tags(self) -> Counter[str]:
        """In how many completions each tag such as `<answer>` stands."""
        return Counter(tag for text in self.texts for tag in set(re.findall(r"<[a-z_]{2,20}>", text)))

    def within(self, x_PG: np.ndarray) -> np.ndarray:
        """Distances to the mean of the group, of all completions in one row; NaN stays."""
        known = ~np.isnan(x_PG)
        mean_P1 = np.where(known, x_PG, 0).sum(1, keepdims=True) / np.maximum(known.sum(1, keepdims=True), 1)
        return (x_PG - mean_P1).reshape(-1)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _repeated(words: Sequence[str]) -> float | None:
    if len(words) < 12:
        return None
    grams = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def round_view(columns: Mapping[str, Sequence[Any]]) -> RoundView:
    """A round from its table: the columns of the run folder, the completions of a prompt one after the other."""
    starts = [i for i, number in enumerate(columns["completion_index"]) if i == 0 or number == 0]
    count = min(b - a for a, b in zip(starts, [*starts[1:], len(columns["step"])], strict=True))
    index_PG = np.array([[start + g for g in range(count)] for start in starts])
    names = tuple(name.removeprefix(PREFIX) for name in columns if name.startswith(PREFIX))

    def array(name: str) -> np.ndarray:
        return np.array([_number(x) for x in columns[name]])[index_PG]

    blank = np.full(index_PG.shape, math.nan)
    return RoundView(
        step=int(columns["step"][0]),
        names_K=names,
        prompts_P=tuple(columns["prompt"][start] for start in starts),
        questions_P=tuple(columns.get("question", columns["prompt"])[start] for start in starts),
        answers_P=tuple(columns["answer"][start] if "answer" in columns else None for start in starts),
        rows_P=tuple(int(columns["row"][start]) for start in starts),
        texts_PG=tuple(tuple(columns["completion"][i] for i in index_G) for index_G in index_PG),
        rewards_PGK=np.stack([array(PREFIX + name) for name in names], axis=2)
        if names
        else np.zeros((*blank.shape, 0)),
        reward_PG=array("reward"),
        advantages_PG=array("advantage"),
        tokens_PG=array("num_tokens"),
        truncated_PG=np.array([finish == "length" for finish in columns["finish"]])[index_PG],
        contains_answer_PG=array("contains_answer") if "contains_answer" in columns else blank,
    )


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings that detectors compare with or tell to change; None: not known (the log of another trainer)."""

    learning_rate: float | None = None
    temperature: float | None = None
    num_generations: int | None = None
    max_completion_length: int | None = None
    beta: float | None = None
    adapter: bool = False
    """Whether a LoRA or other adapter is trained instead of all weights."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the reward functions, by name."""
    num_rows: int | None = None
    """Of the training set."""
    adaptive: bool = False
    """Whether weights of rewards change by the step, so that the metric `reward` is no measure of progress."""
    narrowed: tuple[str, ...] = ()
    """Settings that keep sampling from the whole distribution, as `top_k: 1`."""


def settings_of(environment: Mapping[str, Any]) -> RunSettings:
    """From `environment.json`."""
    given = environment.get("settings", {})
    names = ("learning_rate", "temperature", "num_generations", "max_completion_length", "beta")
    known = {name: given[name] for name in names if isinstance(given.get(name), (int, float))}
    model = environment.get("model", {})
    drawn = {**given, **(given.get("generation_kwargs") or {})}
    narrow = {
        "do_sample": drawn.get("do_sample") is False,
        "top_k": 0 < (drawn.get("top_k") or 0) < 20,
        "top_p": (drawn.get("top_p") or 1.0) < 0.9,
        "min_p": (drawn.get("min_p") or 0.0) > 0.1,
    }
    return RunSettings(
        **known,
        adapter=bool(model.get("adapter")),
        weights=dict(environment.get("reward_weights", {})),
        num_rows=environment.get("data", {}).get("rows"),
        adaptive=bool(given.get("adaptive_rewards")),
        narrowed=tuple(f"{name}: {str(drawn[name]).lower()}" for name, narrows in narrow.items() if narrows),
    )


def fixed_reward(history: Sequence[StepMetrics], weights: Mapping[str, float]) -> np.ndarray:
    """The reward with the weights as they were given, of every step that has each part: what adaptive weights hide.

    >>> fixed_reward([StepMetrics(step=1, values={"rewards/a/mean": 0.5, "reward": 9.0})], {"a": 2.0}).tolist()
    [1.0]
    """
    names = {f"rewards/{name}/mean": weight for name, weight in weights.items()}
    rows = [each.values for each in history if names and all(name in each.values for name in names)]
    return np.array([sum(weight * row[name] for name, weight in names.items() if weight) for row in rows], float)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricHistory:
    """What every detector is called with, at every step."""

    history: Sequence[StepMetrics]
    """All steps so far, the last is now."""
    rounds: Sequence[RoundView] = ()
    """The latest generation rounds, the last is the newest. Empty for logs of numbers."""
    visits: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By question: the group's lowest and highest reward at each visit, `low, high, low, high, ...`."""
    extremes: tuple[float, float] = (math.nan, math.nan)
    """The lowest and the highest reward that any completion has had so far; NaN for logs of numbers."""
    settings: RunSettings = field(default_factory=RunSettings)

    @property
    def step(self) -> int:
        """Now."""
        return self.history[-1].step

    def series(self, name: str, last: int | None = None) -> np.ndarray:
        """A metric over the steps that have it, oldest first; NaN where it was not finite."""
        rows = self.history if last is None else self.history[-last:]
        if name == "reward" and self.settings.adaptive:
            return fixed_reward(rows, self.settings.weights)
        return np.array([each.values[name] for each in rows if name in each.values], float)

    def fresh(self) -> bool:
        """Whether this step drew a new generation round."""
        return bool(self.rounds) and self.rounds[-1].step == self.step
