"""Reward hacking: held-out prompts, held-back rewards, length, phrases, copies, one text for all."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from podium.algorithm.advantages import FLAT
from podium.errors import Finding
from podium.errors.texts import as_lines
from podium.runs.monitors.detection import correlation, mean, percent, slowed, trend, tried_by
from podium.runs.monitors.history import MetricHistory, RoundView
from podium.runs.monitors.signs import (
    CONSTANT,
    LEAST_WORDS,
    SAME_TASK,
    Kind,
    Sign,
    commonest_text,
    copies,
    rows_of,
    signs_in_training,
    words_of,
)

WORDS = re.compile(r"[^\W\d_]{2,}")
LEAST_GROUPS = 8
LEAST_LENGTHS = 4
"""Groups, and different lengths in each, before length is held against a reward: in a group of equals, one odd
completion makes any correlation."""
LEAST_EQUALS = 8
"""Texts that occur more than once, before rewards are called unstable."""


def held_out_falls(history: MetricHistory) -> Finding | None:
    """M151: reward on training prompts rises, on held-out prompts it does not."""
    held_out = history.series("eval_reward")
    reward = history.series("reward")
    if len(held_out) < 4 or len(reward) < 20:
        return None
    gained = mean(reward[-5:]) - mean(reward[:5])
    lost = mean(held_out[:2]) - mean(held_out[-2:])
    if not (gained > 0 and lost > 0) or (lost < 0.1 * gained and trend(held_out) > -1.5) or trend(reward) < 2.5:
        return None
    changes = history.settings.best_kept
    return Finding(
        code="M151",
        severity="warning",
        what=f"The training reward rose by {gained:.3f}, the held-out reward fell by {lost:.3f} over {len(held_out)} "
        "evaluations.",
        why="The policy learns the training prompts, or a weakness of the reward, instead of the task.",
        fix=f"Stop at the best evaluation ({as_lines(changes) or 'load_best_model_at_end: true'}); use more prompts; "
        "read the completions.",
        changes=changes,
    )


def held_back_falls(history: MetricHistory) -> Finding | None:
    """M154: a reward with weight 0, which only watches, falls while the trained one rises."""
    reward = history.series("reward")[-60:]
    if len(reward) < 20 or trend(reward) < 2.5 or not mean(reward[-5:]) > mean(reward[:5]):
        return None
    for name, weight in history.settings.weights.items():
        watched = history.series(f"rewards/{name}/mean", last=60)
        falls = len(watched) >= 20 and mean(watched[-5:]) < mean(watched[:5]) and trend(watched) < -2.5
        if not weight and falls:
            return Finding(
                code="M154",
                severity="warning",
                what=f"The reward rose to {mean(reward[-5:]):.3f}, while {name} (weight 0, only watched) fell from "
                f"{mean(watched[:5]):.3f} to {mean(watched[-5:]):.3f}.",
                why="What is paid for is won at the cost of what is wanted: the usual picture of a hacked reward.",
                fix=f"Give {name} a weight, or repair the reward that rose; read completions with high reward.",
            )
    return None


def pays_for_length(history: MetricHistory) -> Finding | None:
    """M152: within groups, reward is length."""
    rounds = history.rounds[-8:]
    if len(rounds) < 3:
        return None
    characters = [np.array([[len(text) for text in texts_G] for texts_G in view.texts_PG], float) for view in rounds]
    lengths = {"characters": characters, "tokens": [view.tokens_PG for view in rounds]}
    found = {unit: _group_correlations(lengths_PG, rounds) for unit, lengths_PG in lengths.items()}
    telling = {unit: each for unit, each in found.items() if len(each) >= LEAST_GROUPS}
    if not telling:
        return None
    unit, r = max(((unit, float(np.median(each))) for unit, each in telling.items()), key=lambda pair: abs(pair[1]))
    if abs(r) < 0.9:
        return None
    return Finding(
        code="M152",
        severity="warning",
        what=f"Reward is length: in the median of {len(telling[unit])} groups it correlates {r:.2f} with the number of "
        f"{unit}, over {len(rounds)} rounds.",
        why=f"{'Longer' if r > 0 else 'Shorter'} completions are paid whatever they say, so that is what is learnt.",
        fix="Score the content; if length matters, cap it: give nothing beyond what a good answer needs.",
    )


def _group_correlations(x: Sequence[np.ndarray], rounds: Sequence[RoundView]) -> list[float]:
    """Correlation of the reward and of `x`, an array [P, G] a round, in every group that has a spread of both."""
    return [
        correlation(x_G, reward_G)
        for x_PG, view in zip(x, rounds, strict=True)
        for x_G, reward_G, flat in zip(x_PG, view.comparable_PG, view.is_flat_P, strict=True)
        if not flat and len(np.unique(x_G[np.isfinite(reward_G)])) >= LEAST_LENGTHS
    ]


def pays_for_a_phrase(history: MetricHistory) -> Finding | None:
    """M153: within groups, the reward is whether the completion contains a phrase."""
    rounds = history.rounds[-8:]
    if len(rounds) < 4:
        return None
    reward = history.pooled(lambda view: view.within(view.comparable_PG), last=8)
    known = {word for view in rounds for prompt in view.prompts_P for word in _words(prompt)}
    pairs = [[[_pairs(text) for text in texts_G] for texts_G in view.texts_PG] for view in rounds]
    counts = Counter(phrase for pairs_PG in pairs for pairs_G in pairs_PG for each in pairs_G for phrase in each)
    total = sum(len(view.texts) for view in rounds)
    for phrase, count in counts.most_common(10):
        if not 0.1 < count / total < 0.9 or set(phrase.split()) <= known:
            continue
        has = [np.array([[phrase in each for each in pairs_G] for pairs_G in pairs_PG], float) for pairs_PG in pairs]
        r = correlation(np.concatenate([view.within(x) for view, x in zip(rounds, has, strict=True)]), reward)
        if r > 0.8:
            return Finding(
                code="M153",
                severity="warning",
                what=f"Reward is a phrase: '{phrase}', in {percent(count / total)} of completions and in no prompt, "
                f"correlates {r:.2f} with the reward within groups.",
                why="The policy has found words that a reward function or model likes, whatever else is written.",
                fix="Read completions with and without it; make the reward ignore it, or check the answer instead.",
            )
    return None


def differs_on_the_same(history: MetricHistory) -> Finding | None:
    """M157: completions of a prompt that are the same, in text, tokens and replies, got different rewards."""
    for k, name in enumerate(history.names_K if history.has_new_round else ()):
        spread = [x for view in history.rounds for x in _spread_of_equals(view, k)]
        differ = [x for x in spread if x > 1e-6]
        if len(spread) < LEAST_EQUALS or len(differ) < 0.2 * len(spread):
            continue
        size = float(np.ptp(history.rewards(k)))
        return Finding(
            code="M157",
            severity="warning",
            what=f"{name} does not repeat: {len(differ)} of {len(spread)} texts that stand twice or more in a group "
            f"got different rewards, {np.mean(differ):.2g} apart on average (all its rewards span {size:.2g}).",
            why="What is drawn by chance, or depends on the order of a batch, teaches nothing about the text.",
            fix=f"Score one completion twice by hand; take random numbers, times and shared state out of {name}. Of a "
            "judge that samples, take the mean of several verdicts, or temperature 0.",
        )
    return None


def _spread_of_equals(view: RoundView, k: int) -> list[float]:
    """Highest less lowest reward of every completion, and of the replies to it, that a group has more than once.

    In a group of several prompts the completions answer different ones, and none repeats another.
    """
    found = []
    per_group = (view.texts_PG, view.tokens_PG, view.digests_PG, view.turns_PG, view.rewards_PGK[:, :, k])
    for p, (texts_G, tokens_G, digests_G, turns_G, rewards_G) in enumerate(zip(*per_group, strict=True)):
        same: defaultdict[tuple[str, float, int | None, str], list[float]] = defaultdict(list)
        if view.prompts_differ_P[p]:
            continue
        for text, tokens, digest, turns, reward in zip(texts_G, tokens_G, digests_G, turns_G, rewards_G, strict=True):
            if np.isfinite(reward):
                given = str([(turn.message, turn.replies, [call.content for call in turn.calls]) for turn in turns])
                same[text, float(tokens), digest, given].append(float(reward))
        found += [max(values) - min(values) for values in same.values() if len(values) > 1]
    return found


def pays_for_the_prompt(history: MetricHistory) -> Finding | None:
    """M158: within groups, the reward is the share of the prompt that a completion repeats; or the best copy it."""
    rounds = history.rounds[-8:]
    if len(rounds) < 3:
        return None
    copied = [_copied(view) for view in rounds]
    along = _group_correlations(copied, rounds)
    r = float(np.median(along)) if len(along) >= LEAST_GROUPS else 0.0
    _, top = history.extremes
    best = [copy for view in rounds[-3:] for copy in _copies_with(view, top - FLAT)]
    whole = float(np.mean(best)) if len(best) >= LEAST_GROUPS else 0.0
    if r < 0.8 and whole < 0.5:
        return None
    texts = [text for view in rounds for text in view.texts]
    example = max(zip(np.concatenate([x.reshape(-1) for x in copied]), texts, strict=True), key=lambda pair: pair[0])[1]
    said = (
        f"in the median of {len(along)} groups it correlates {r:.2f} with the share of the prompt's words that stand "
        "in the completion"
        if r >= 0.8
        else f"{percent(whole)} of the completions with the highest reward copy it"
    )
    return Finding(
        code="M158",
        severity="warning",
        what=f"Reward is the prompt: {said}, as in {example[:80]!r}.",
        why="Copying the question is the easiest way to such a reward, so that is what is learnt.",
        fix="Take the prompt's own words out before the completion is scored; pay for what the prompt does not hold.",
    )


def _copied(view: RoundView) -> np.ndarray:
    """Share of the words of the question that the completion contains [P, G].

    NaN for questions too short, and for rows whose own answer has half of the words: the task is to copy or rewrite.
    """

    def share(words: set[str], text: str) -> float:
        return len(words & set(text.casefold().split())) / len(words) if words else math.nan

    words_P = [set(question.casefold().split()) for question in view.questions_P]
    for words, answer in zip(words_P, view.answers_P, strict=True):
        if len(words) < LEAST_WORDS or len(words & set((answer or "").casefold().split())) >= SAME_TASK * len(words):
            words.clear()
    return np.array([[share(words, t) for t in texts_G] for words, texts_G in zip(words_P, view.texts_PG, strict=True)])


def _copies_with(view: RoundView, least: float) -> list[bool]:
    """Whether each completion with this reward or more copies its question without adding the answer."""
    cells = zip(view.questions_P, view.answers_P, view.texts_PG, view.reward_PG, strict=True)
    return [
        copies(frozenset(words_of(question)), text, answer)
        for question, answer, texts_G, reward_G in cells
        for text, reward in zip(texts_G, reward_G, strict=True)
        if reward >= least
    ]


def one_for_all(history: MetricHistory) -> Finding | None:
    """M159: one text or few texts for all prompts, or a text that names every answer there is."""
    sign = _sign(history, ("listed", "constant", "few"))
    if sign is None:
        return None
    settings = history.settings
    first = history.first
    if sign.kind == "constant" and first is not None and commonest_text(first.texts)[1] >= CONSTANT:
        changes = settings.more_examples()
        shown = f"worked examples with different answers ({as_lines(changes)})" if changes else "other worked examples"
        fix = f"Put {shown} in front of the prompt, or take a model that is right at times."
        why = "The first round was so already, before any training: no reward has led to it."
        return _found("M159", history, sign, why, fix, changes)
    changes = {} if sign.kind == "listed" else settings.slower(3)
    slower = "" if sign.kind == "listed" else f"{slowed(changes, 3)}. "
    back = "o back to a checkpoint from before (`podium doctor` says since when)."
    if sign.is_answer:
        why = "It is right for some rows, so the reward may be as it should be: the policy answers without reading."
        return _found("M159", history, sign, why, f"{slower}G{back}", changes)
    why = "The policy has found one answer that is paid whatever is asked."
    fix = f"{slower}Make the reward depend on the prompt and accept one answer only; g{back}"
    return _found("M159", history, sign, why, fix, changes)


def form_alone(history: MetricHistory) -> Finding | None:
    """M160: credited completions are a form without content, or a few words again and again."""
    return _found(
        "M160",
        history,
        _sign(history, ("empty", "repeated")),
        why="The reward counts the form, or how often a word occurs, and does not compare what is said.",
        fix="Give the form credit only where the answer in it is compared with the row's as a whole; "
        "`podium rewards test` tries empty forms and repeated answers.",
    )


def not_credited(history: MetricHistory) -> Finding | None:
    """M112: completions whose final answer is the row's get no credit from the reward that tells right from wrong."""
    return _found(
        "M112",
        history,
        _sign(history, ("uncredited",)),
        why="The reward refuses right answers for white space, case, a full stop, or a form that they are not in.",
        fix="Compare after strip() and casefold(), or take the answer out of the text first; if a form is required, "
        "ask for it in `system`, put a worked example in front of the prompt, or name the form with `extract`. "
        f"{tried_by(history.settings, history.names_K)}",
    )


def _sign(history: MetricHistory, kinds: Sequence[Kind]) -> Sign | None:
    """The first sign of these kinds over three rounds, in a step with a round of its own."""
    found = signs_in_training(history) if history.has_new_round else []
    return next((sign for sign in found if sign.kind in kinds), None)


def _found(
    code: str,
    history: MetricHistory,
    sign: Sign | None,
    why: str,
    fix: str,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Finding | None:
    if sign is None:
        return None
    rows = [str(row) for row in rows_of(history, sign)]
    where = ""
    if rows:
        where = f" ({'row' if len(rows) == 1 else 'rows'} {', '.join(rows)})"
    reward = mean(history.series("reward", last=3))
    what = f"{sign.what}{where}, over 3 rounds; the reward is {reward:.3f}."
    return Finding(code=code, severity="warning", what=what, why=why, fix=fix, changes=changes)


def _words(text: str) -> list[str]:
    return [word.lower() for word in WORDS.findall(text)]


def _pairs(text: str) -> set[str]:
    return {f"{a} {b}" for a, b in pairwise(_words(text))}
