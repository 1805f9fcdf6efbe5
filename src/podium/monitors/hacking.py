"""Is the reward earned, or only collected? Held-out prompts, held-back rewards, length, phrases."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from podium.monitors.sight import RoundView, Sight
from podium.monitors.symptom import Symptom, correlation, mean, percent, trend

WORDS = re.compile(r"[^\W\d_]{2,}")


def held_out_falls(sight: Sight) -> Symptom | None:
    """M151: reward on training prompts rises, on held-out prompts it does not."""
    held_out = sight.series("eval_reward")
    reward = sight.series("reward")
    if len(held_out) < 4 or len(reward) < 20 or trend(reward) < 2.5:
        return None
    gained, lost = mean(reward[-5:]) - mean(reward[:5]), mean(held_out[:2]) - mean(held_out[-2:])
    if lost < 0 or (lost < 0.1 * gained and trend(held_out) > -1.5):
        return None
    return Symptom(
        severity="warning",
        what=f"The training reward rose by {gained:.3f}, the held-out reward fell by {lost:.3f} over {len(held_out)} "
        "evaluations.",
        why="The policy learns the training prompts, or a weakness of the reward, instead of the task.",
        fix="Stop at the best evaluation (load_best_model_at_end: true); use more prompts; read the completions.",
    )


def held_back_falls(sight: Sight) -> Symptom | None:
    """M154: a reward with weight 0, which only watches, falls while the trained one rises."""
    reward = sight.series("reward")
    if len(reward) < 20 or trend(reward[-60:]) < 2.5:
        return None
    for name, weight in sight.settings.weights.items():
        watched = sight.series(f"rewards/{name}/mean", last=60)
        if not weight and len(watched) >= 20 and trend(watched) < -2.5:
            return Symptom(
                severity="warning",
                what=f"The reward rose to {mean(reward[-5:]):.3f}, while {name} (weight 0, only watched) fell from "
                f"{mean(watched[:5]):.3f} to {mean(watched[-5:]):.3f}.",
                why="What is paid for is won at the cost of what is wanted: the usual picture of a hacked reward.",
                fix=f"Give {name} a weight, or repair the reward that rose; read completions with high reward.",
            )
    return None


LEAST_GROUPS, LEAST_LENGTHS = 8, 4
"""Groups, and different lengths in each, before length is held against a reward: in a group of equals, one odd
completion makes any correlation.
"""


def pays_for_length(sight: Sight) -> Symptom | None:
    """M152: within groups, reward is length."""
    rounds = sight.rounds[-8:]
    if len(rounds) < 3 or np.mean(np.concatenate([view.truncated_PG.reshape(-1) for view in rounds])) > 0.95:
        return None
    found = {
        "characters": _along([(view.characters_PG, view) for view in rounds]),
        "tokens": _along([(view.tokens_PG, view) for view in rounds]),
    }
    telling = {unit: each for unit, each in found.items() if len(each) >= LEAST_GROUPS}
    if not telling:
        return None
    unit, r = max(((unit, float(np.median(each))) for unit, each in telling.items()), key=lambda pair: abs(pair[1]))
    if abs(r) < 0.9:
        return None
    return Symptom(
        severity="error" if abs(r) > 0.95 else "warning",
        what=f"Reward is length: in the median of {len(telling[unit])} groups it correlates {r:.2f} with the number of "
        f"{unit}, over {len(rounds)} rounds.",
        why=f"{'Longer' if r > 0 else 'Shorter'} completions are paid whatever they say, so that is what is learnt.",
        fix="Score the content; if length matters, cap it: give nothing beyond what a good answer needs.",
    )


def _along(rounds: Sequence[tuple[np.ndarray, RoundView]]) -> list[float]:
    """The correlation of reward and length in every group that has a spread of both."""
    return [
        correlation(length_G, reward_G)
        for length_PG, view in rounds
        for length_G, reward_G, flat in zip(length_PG, view.reward_PG, view.is_flat_P, strict=True)
        if not flat and len(np.unique(length_G)) >= LEAST_LENGTHS
    ]


def pays_for_a_phrase(sight: Sight) -> Symptom | None:
    """M153: within groups, reward is whether a phrase stands in the completion."""
    rounds = sight.rounds[-8:]
    if len(rounds) < 4:
        return None
    reward = np.concatenate([view.within(view.reward_PG) for view in rounds])
    known = {word for view in rounds for prompt in view.prompts_P for word in _words(prompt)}
    counts = Counter(phrase for view in rounds for text in view.texts for phrase in set(_pairs(text)))
    total = sum(len(view.texts) for view in rounds)
    for phrase, count in counts.most_common(10):
        if not 0.1 < count / total < 0.9 or set(phrase.split()) <= known:
            continue
        has = np.concatenate(
            [
                view.within(np.array([[phrase in set(_pairs(t)) for t in g] for g in view.texts_PG], float))
                for view in rounds
            ]
        )
        r = correlation(has, reward)
        if r > 0.8:
            return Symptom(
                severity="warning",
                what=f"Reward is a phrase: '{phrase}', in {percent(count / total)} of completions and in no prompt, "
                f"correlates {r:.2f} with the reward within groups.",
                why="The policy has found words that a reward function or model likes, whatever else is written.",
                fix="Read completions with and without it; make the reward ignore it, or check the answer instead.",
            )
    return None


def _words(text: str) -> list[str]:
    return [word.lower() for word in WORDS.findall(text)]


def _pairs(text: str) -> list[str]:
    words = _words(text)
    return [f"{a} {b}" for a, b in itertools.pairwise(words)]
