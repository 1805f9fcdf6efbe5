"""An evaluation as it is measured and kept: sampled groups in, numbers with 95 % intervals over prompts out.

    held_out = keep(path, settings, parts, scoring)
    held_out.summary.accuracy, held_out.scores, held_out.saved

`podium eval`, `podium compare` and the evaluations before and after a training all come through `keep`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from podium.algorithm.metrics import right
from podium.evaluation.baselines import MOST_PROMPTS, Scoring, baselines
from podium.evaluation.measured import Baselines, EvalScores
from podium.evaluation.saved import EvalSettings, Saved, save
from podium.evaluation.statistics import Interval, mean_interval, mean_of_prompt, pass_at_k, share_interval
from podium.records import Prompt, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSummary:
    """One evaluation: P prompts, several completions each."""

    num_prompts: int
    num_completions: int
    """Over all prompts."""
    reward: Interval
    """Weighted sum of the reward functions."""
    means: Mapping[str, Interval]
    """By reward function."""
    accuracy: Interval | None
    """Share of completions that are right, which is pass@1; None: no reward function tells right from wrong."""
    pass_at: Mapping[int, Interval]
    """By k: chance that one of k completions is right."""
    format: Mapping[str, Interval]
    """Share of completions that a reward function called after a format gives its full mark, 1."""
    mean_tokens: Interval
    """Tokens of a completion."""
    truncated: Interval
    """Share of completions cut off at the limit."""


def summarize(scores: EvalScores, *, k: int | None = None) -> EvalSummary:
    """Means and shares over prompts. Shares have Wilson's intervals, other means the bootstrap's.

    Args:
        k: of a pass@k that is wanted besides those of powers of two.
    """
    count = scores.num_samples
    right_PG = scores.right_PG
    wanted = () if right_PG is None else sorted({*counts_up_to(count), k or 1})
    return EvalSummary(
        num_prompts=scores.num_prompts,
        num_completions=scores.tokens_PG.size,
        reward=_mean(scores.reward_PG),
        means={name: _mean(scores.by_name(name)) for name in scores.names_K},
        accuracy=None if right_PG is None else _share(right_PG),
        pass_at={k: share_interval(pass_at_k(right_PG, k), count) for k in wanted if right_PG is not None},
        format={name: _share(right(scores.by_name(name))) for name in scores.names_K if "format" in name},
        mean_tokens=_mean(scores.tokens_PG.astype(float)),
        truncated=_share(scores.truncated_PG.astype(float)),
    )


def counts_up_to(count: int) -> list[int]:
    """Powers of two, and the count itself.

    >>> counts_up_to(6), counts_up_to(1)
    ([1, 2, 4, 6], [1])
    """
    return sorted({2**i for i in range(count.bit_length()) if 2**i <= count} | {count})


def _mean(values_PG: np.ndarray) -> Interval:
    return mean_interval(mean_of_prompt(values_PG))


def _share(values_PG: np.ndarray) -> Interval:
    return share_interval(mean_of_prompt(values_PG), values_PG.shape[1])


def numbers(record: Any) -> Any:
    """A record of numbers as JSON values, NaN as null."""
    return json.loads(json.dumps(asdict(record)), parse_constant=lambda _: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """An evaluation that was measured and written."""

    saved: Saved
    scores: EvalScores
    summary: EvalSummary

    @property
    def contents(self) -> dict[str, Any]:
        """For the JSON file of an evaluation: numbers, signs in the completions, baselines."""
        signs = [sign.what for sign in self.scores.signs]
        return {**numbers(self.summary), "signs": signs, "baselines": self.scores.baselines.to_json(self.scores.metric)}


def keep(
    path: Path,
    settings: EvalSettings,
    parts: Iterable[Sequence[ScoredGroup]],
    scoring: Scoring | None,
    *,
    k: int | None = None,
) -> HeldOut:
    """Write scored groups to `path` (Parquet) as they come, and measure them.

    Args:
        scoring: the rewards, for baselines on the same prompts; None: without baselines.
        k: of a pass@k that is wanted besides those of powers of two.
    """
    prompts: list[Prompt] = []

    def noted() -> Iterator[Sequence[ScoredGroup]]:
        for groups in parts:
            prompts.extend(scored.group.prompt for scored in itertools.islice(groups, MOST_PROMPTS - len(prompts)))
            yield groups

    saved = save(path, settings, noted())
    found = Baselines() if scoring is None else baselines(prompts, scoring)
    scores = replace(saved.scores(), baselines=found)
    return HeldOut(saved=saved, scores=scores, summary=summarize(scores, k=k))
