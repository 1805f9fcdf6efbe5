"""Wrong answers in the dataset: completions are compared with the answers of all rows of the latest rounds.

A completion's answer is in its tags or box; else it is the last number, where answers are numbers, else the whole text.
Nearness is the distance of numbers, or the similarity of texts. It is ranked among the answers of all rows, so a model
that cannot do a task, but guesses near, fits its rows, and one that gives every prompt the same answer shows nothing.
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from podium.data.extract import last_number
from podium.errors import Finding
from podium.runs.monitors.detection import percent, some
from podium.runs.monitors.history import MetricHistory, RoundView
from podium.runs.monitors.signs import marked_answer, plain

LEAST_PROMPTS = 32
MOST_PROMPTS = 128
"""Prompts below which a match by chance is not told from one, and those that are compared, each with each."""
FEW_ANSWERS = 8
"""Distinct answers, such as labels, up to which all of `MOST_PROMPTS` are compared: a model that does not know the task
yet agrees with itself about which label a text calls for, and is no nearer to the right one for it."""
AGREES = 0.5
FITS = 0.2
"""Share of the best possible match: how far completions must agree about a prompt, and what is no fit to its answer."""
CONSENSUS = 0.85
"""Share of a group that has to say the same."""
LEAST_LEARNT = 8
LEAST_SUSPECTS = 5
SURE_SHARE = 0.2
"""Share of suspected among suspected and learnt prompts from which on it is a warning. In a healthy run of additions at
most 0.18 were mistakes that the model made every time."""
LEARNT_SHARE = 0.75
"""Share of the prompts not suspected that must be learnt: a model that is still learning errs by itself, and agrees
with itself about it. Of 30 % wrong answers planted in real runs, 0.81 and 0.85 of the others were learnt when it was
reported; in a quickstart, whose answers are right, 0.52 and 0.53 were, while sums with a carry were still wrong."""
SYSTEMATIC = 0.5
"""Share of suspects off by one and the same amount from which on the model errs by a rule, such as a lost carry."""
OWN_MISTAKES = 2
"""Completions that made an error beside a right one of their group, from which on it is one of the model's own."""
WORDIER = 4
"""Factor on the words of an answer up to which a text is taken for one."""
NEAR_MISS = 0.8
"""Mean rank of the row's answer, among all by nearness, above which the model is nearly right and still learning."""
SHOWN_TEXT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredPrompt:
    """A prompt of a round, its row's answer, and the answers of its completions."""

    row: int
    question: str
    gold: str
    said: tuple[str, ...]
    """Answers of the completions that have one."""
    most: str
    """The most frequent of them."""
    paid: float
    """Mean reward of the completions with the most frequent answer."""
    size: int
    """Completions of the group."""

    def __str__(self) -> str:
        return f"row {self.row} '{self.question[-SHOWN_TEXT:]}' has {self.gold!r}, completions say {self.most!r}"


def answered_prompts(rounds: Sequence[RoundView]) -> list[AnsweredPrompt]:
    """The latest visit of each of the last rows that two completions or more answered."""
    found: dict[tuple[int, str], AnsweredPrompt] = {}
    for view in rounds:
        for p, gold in enumerate(view.answers_P):
            said = [_said(text, gold) for text in view.texts_PG[p]] if gold else []
            known = tuple(x for x in said if x)
            if gold and len(known) > 1:
                most = Counter(known).most_common(1)[0][0]
                paid = [r for x, r in zip(said, view.reward_PG[p], strict=True) if x == most]
                row = view.rows_P[p]
                question = view.questions_P[p]
                found.pop((row, question), None)
                found[row, question] = AnsweredPrompt(
                    row=row,
                    question=question,
                    gold=plain(gold),
                    said=known,
                    most=most,
                    paid=float(np.mean(paid)),
                    size=len(said),
                )
    return list(found.values())[-MOST_PROMPTS:]


def _said(text: str, gold: str) -> str:
    marked = marked_answer(text)
    if _number(gold) is not None:
        return plain(last_number(text if marked is None else marked) or "")
    said = plain(text if marked is None else marked)
    return said if len(said.split()) <= WORDIER * len(gold.split()) else ""


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


@functools.lru_cache(maxsize=1 << 16)
def _near(one: str, other: str) -> float:
    a = _number(one)
    b = _number(other)
    return -abs(a - b) if a is not None and b is not None else difflib.SequenceMatcher(None, one, other).ratio()


def ranks(one: Sequence[str], other: Sequence[str]) -> np.ndarray:
    """For each text, the share of all others that are further from it than its own partner; ties count half.

    >>> ranks(["1", "5", "9"], ["2", "5", "8"]).tolist()
    [1.0, 1.0, 1.0]
    """
    values = sorted(set(other))
    numbers = Counter(other)
    weights = np.array([numbers[value] for value in values], float)
    found = []
    for text, partner in zip(one, other, strict=True):
        near = np.array([_near(text, value) for value in values])
        own = near[values.index(partner)]
        rest = weights - (np.array(values) == partner)  # the partner itself is none of the others
        found.append(float((rest * ((near < own) + 0.5 * (near == own))).sum() / max(rest.sum(), 1.0)))
    return np.array(found)


def match(one: Sequence[str], other: Sequence[str]) -> float:
    """Nearness of texts to their partners compared with the others: 0 by chance, 1 as near as possible."""
    counts = Counter(other)
    equal = np.array([counts[partner] - 1 for partner in other])  # ties, of which half count
    best = float((1 - 0.5 * equal / max(len(other) - 1, 1)).mean()) - 0.5
    return (float(ranks(one, other).mean()) - 0.5) / best if best > 0.05 else 0.0


def answers_elsewhere(history: MetricHistory) -> Finding | None:
    """M155: completions agree about prompts, and fit the answers of their rows no better than those of others."""
    if not history.has_new_round or len(history.rounds) < 3:
        return None
    seen = answered_prompts(history.rounds)
    few = len({each.gold for each in seen}) <= FEW_ANSWERS
    if len(seen) < (MOST_PROMPTS if few else LEAST_PROMPTS):
        return None
    fit = match([each.most for each in seen], [each.gold for each in seen])
    if fit > FITS:
        return None
    agree = match(*([Counter(each.said[start::2]).most_common(1)[0][0] for each in seen] for start in (0, 1)))
    if agree < AGREES or _right_without_it(history):
        return None
    right = sum(each.gold in each.said for each in seen)
    examples = [each for each in seen if each.gold not in each.said] or seen
    return Finding(
        code="M155",
        severity="warning",
        what=f"The answers may not belong to their prompts: completions of a prompt agree with one another (match "
        f"{agree:.2f}), but are no nearer to their row's answer than to other rows' (match {fit:.2f}); {right} of "
        f"{len(seen)} prompts ever got it. {some([str(each) for each in examples[:3]])}.",
        why="Prompts and answers were joined by the wrong key, sorted apart or shuffled; or the answers are of "
        "another kind than the prompts ask for.",
        fix="Look at three rows by hand (`podium sample RECIPE`), then at how the two columns were put together.",
    )


def _right_without_it(history: MetricHistory) -> bool:
    """Whether most completions that are right by the reward do not say their row's answer, as code that computes it."""
    says_it = []
    for view in history.rounds:
        if (right_PG := history.right_PG(view)) is None:
            return False
        for gold, texts_G, right_G in zip(view.answers_P, view.texts_PG, right_PG, strict=True):
            right = [text for text, is_right in zip(texts_G, right_G, strict=True) if is_right == 1]
            says_it += [_said(text, gold) == plain(gold) for text in right] if gold else []
    return bool(says_it) and float(np.mean(says_it)) < 0.5


def suspicious_labels(history: MetricHistory) -> Finding | None:
    """M156: prompts whose completions agree on another answer than the row's, among prompts that are learnt."""
    if not history.has_new_round or len(history.rounds) < 4:
        return None
    seen = answered_prompts(history.rounds)
    agreed = [each for each in seen if each.said.count(each.most) >= CONSENSUS * each.size]
    learnt = [each for each in agreed if each.most == each.gold]
    wrong = [each for each in agreed if each.gold not in each.said]
    if len(learnt) < LEAST_LEARNT or len(wrong) < LEAST_SUSPECTS:
        return None
    paid = float(np.median([each.paid for each in learnt]))
    wrong = [each for each in wrong if each.paid < paid and _neighbours_are_learnt(each, agreed)]
    is_learnt = len(learnt) >= LEARNT_SHARE * (len(seen) - len(wrong))
    own = _own_mistakes(history.rounds)
    wrong = [each for each in wrong if not own.explain(each)]
    if len(wrong) < LEAST_SUSPECTS or not is_learnt:
        return None
    if _same_error(wrong):
        return None
    golds = [each.gold for each in agreed]
    if len(set(golds)) > len(golds) / 3:  # many answers: whether the wrong ones are at least near
        rank_of = dict(zip(agreed, ranks([each.most for each in agreed], golds), strict=True))
        if float(np.mean([rank_of[each] for each in wrong])) > NEAR_MISS:
            return None
    return Finding(
        code="M156",
        severity="warning" if len(wrong) >= SURE_SHARE * (len(wrong) + len(learnt)) else "note",
        what=f"Suspicious labels: {len(wrong)} of {len(seen)} prompts ({percent(len(wrong) / len(seen))}) have an "
        "answer that no completion gives and that is far from the one on which they agree, while "
        f"{len(learnt)} others are learnt: {some([str(each) for each in wrong], 3)}.",
        why="A wrong answer in the dataset pays for mistakes; or the model makes the same mistake every time.",
        fix="Look at these rows; correct or leave out those that are wrong, and look at where they came from.",
    )


class _OwnMistakes(NamedTuple):
    """What the model gets wrong by itself, where the answer of the row is sound."""

    solved: frozenset[tuple[int, str]]
    """Row and question of groups in which a completion gave the row's answer."""
    errors: Counter[float | None]
    """By how much other completions of these groups missed it; None: it is no number."""

    def explain(self, each: AnsweredPrompt) -> bool:
        """Whether the model's answer to a prompt may be its own mistake."""
        off = _error(each.most, each.gold)
        return (each.row, each.question) in self.solved or (off is not None and self.errors[off] >= OWN_MISTAKES)


def _own_mistakes(rounds: Sequence[RoundView]) -> _OwnMistakes:
    groups = [each for view in rounds for each in answered_prompts([view]) if each.gold in each.said]
    errors = Counter(_error(said, each.gold) for each in groups for said in each.said if said != each.gold)
    return _OwnMistakes(frozenset((each.row, each.question) for each in groups), errors)


def _error(said: str, gold: str) -> float | None:
    """Said less right, of numbers."""
    a = _number(said)
    b = _number(gold)
    return None if a is None or b is None else round(a - b, 6)


def _same_error(wrong: Sequence[AnsweredPrompt]) -> bool:
    """Whether most of these differ from their rows' answers by one amount: 10 less in sums whose carry was lost."""
    found = [_error(each.most, each.gold) for each in wrong]
    off = Counter(abs(error) for error in found if error is not None)
    return bool(off) and off.most_common(1)[0][1] >= SYSTEMATIC * len(wrong)


def _neighbours_are_learnt(each: AnsweredPrompt, agreed: Sequence[AnsweredPrompt]) -> bool:
    """Whether most rows with this answer, and most with the one given instead, are right, if each has four or more."""
    of_answer: dict[str, list[bool]] = defaultdict(list)
    for other in agreed:
        of_answer[other.gold].append(other.most == other.gold)
    return all(len(of_answer[x]) < 4 or np.mean(of_answer[x]) >= 0.5 for x in (each.gold, each.most))
