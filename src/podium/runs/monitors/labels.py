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
from podium.runs.monitors.detection import PLANTED, Evidence, detector, percent, some
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
    answers: tuple[str, ...]
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
            answers = [_answer(text, gold) for text in view.texts_PG[p]] if gold else []
            known = tuple(x for x in answers if x)
            if gold and len(known) > 1:
                most = Counter(known).most_common(1)[0][0]
                paid = [r for x, r in zip(answers, view.reward_PG[p], strict=True) if x == most]
                row = view.rows_P[p]
                question = view.questions_P[p]
                found.pop((row, question), None)
                found[row, question] = AnsweredPrompt(
                    row=row,
                    question=question,
                    gold=plain(gold),
                    answers=known,
                    most=most,
                    paid=float(np.mean(paid)),
                    size=len(answers),
                )
    return list(found.values())[-MOST_PROMPTS:]


def _answer(text: str, gold: str) -> str:
    """The answer in a text, of the kind of the row's; empty: there is none."""
    marked = marked_answer(text)
    if _number(gold) is not None:
        return plain(last_number(text if marked is None else marked) or "")
    answer = plain(text if marked is None else marked)
    return answer if len(answer.split()) <= WORDIER * len(gold.split()) else ""


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


@detector(
    "M155",
    8,
    "match of a prompt's completions with one another and with the row's answer: 0 by chance, 1 at best",
    "0.5 or more, and up to 0.2, over 32 prompts; over 128 where there are up to 8 different answers; after 3 rounds; "
    "texts over 4 times as wordy as the answer are no answers, and a best match up to 0.05 is none; not where most "
    "completions that are right do not say the answer, such as code that computes it",
    set_on=f"{PLANTED}; labels and units (`benchmarks/mistakes.py`)",
    why="Prompts and answers were joined by the wrong key, sorted apart or shuffled; or the answers are of another "
    "kind than the prompts ask for.",
    fix="Look at three rows by hand (`podium sample RECIPE`), then at how the two columns were put together.",
)
def answers_elsewhere(history: MetricHistory) -> Evidence | None:
    """Completions agree about prompts, and fit the answers of their rows no better than those of others."""
    if not history.has_new_round or len(history.rounds) < 3:
        return None
    seen = answered_prompts(history.rounds)
    few = len({prompt.gold for prompt in seen}) <= FEW_ANSWERS
    if len(seen) < (MOST_PROMPTS if few else LEAST_PROMPTS):
        return None
    fit = match([prompt.most for prompt in seen], [prompt.gold for prompt in seen])
    if fit > FITS:
        return None
    halves = ([Counter(prompt.answers[start::2]).most_common(1)[0][0] for prompt in seen] for start in (0, 1))
    agree = match(*halves)
    if agree < AGREES or _right_without_it(history):
        return None
    missed = [prompt for prompt in seen if prompt.gold not in prompt.answers]
    examples = some([str(prompt) for prompt in (missed or seen)[:3]])
    return Evidence(
        "The answers may not belong to their prompts: completions of a prompt agree with one another (match "
        f"{agree:.2f}), but are no nearer to their row's answer than to other rows' (match {fit:.2f}); "
        f"{len(seen) - len(missed)} of {len(seen)} prompts ever got it. {examples}."
    )


def _right_without_it(history: MetricHistory) -> bool:
    """Whether most completions that are right by the reward do not say their row's answer, as code that computes it."""
    says_it = []
    for view in history.rounds:
        if (right_PG := history.right_PG(view)) is None:
            return False
        for gold, texts_G, right_G in zip(view.answers_P, view.texts_PG, right_PG, strict=True):
            right = [text for text, is_right in zip(texts_G, right_G, strict=True) if is_right == 1]
            says_it += [_answer(text, gold) == plain(gold) for text in right] if gold else []
    return bool(says_it) and float(np.mean(says_it)) < 0.5


@detector(
    "M156",
    9,
    "prompts that agree, 0.85 of the group, on another answer than the row's",
    "5 of up to 128, beside 8 learnt and 0.75 of the others, after 4 rounds; a note below 0.2 of both; not where 0.5 "
    "of them are off by one amount, where 2 completions beside right ones made that error, where they are nearly right "
    "(mean rank over 0.8, if over a 3rd of the answers differ), nor where under 0.5 of 4 rows with the answer are "
    "learnt",
    severity="note or warning",
    set_on=f"{PLANTED}; two quickstarts with right answers",
    why="A wrong answer in the dataset pays for mistakes; or the model makes the same mistake every time.",
    fix="Look at these rows; correct or leave out those that are wrong, and look at where they came from.",
)
def suspicious_labels(history: MetricHistory) -> Evidence | None:
    """Prompts whose completions agree on another answer than the row's, among prompts that are learnt."""
    if not history.has_new_round or len(history.rounds) < 4:
        return None
    seen = answered_prompts(history.rounds)
    agreed = [prompt for prompt in seen if prompt.answers.count(prompt.most) >= CONSENSUS * prompt.size]
    learnt = [prompt for prompt in agreed if prompt.most == prompt.gold]
    wrong = [prompt for prompt in agreed if prompt.gold not in prompt.answers]
    if len(learnt) < LEAST_LEARNT or len(wrong) < LEAST_SUSPECTS:
        return None
    paid = float(np.median([prompt.paid for prompt in learnt]))
    wrong = [prompt for prompt in wrong if prompt.paid < paid and _neighbours_are_learnt(prompt, agreed)]
    is_learnt = len(learnt) >= LEARNT_SHARE * (len(seen) - len(wrong))
    own = _own_mistakes(history.rounds)
    wrong = [prompt for prompt in wrong if not own.explain(prompt)]
    if len(wrong) < LEAST_SUSPECTS or not is_learnt or _same_error(wrong) or _are_near(wrong, agreed):
        return None
    return Evidence(
        f"Suspicious labels: {len(wrong)} of {len(seen)} prompts ({percent(len(wrong) / len(seen))}) have an answer "
        "that no completion gives and that is far from the one on which they agree, while "
        f"{len(learnt)} others are learnt: {some([str(prompt) for prompt in wrong], 3)}.",
        severity="warning" if len(wrong) >= SURE_SHARE * (len(wrong) + len(learnt)) else "note",
    )


def _are_near(wrong: Sequence[AnsweredPrompt], agreed: Sequence[AnsweredPrompt]) -> bool:
    """Whether the answers of these prompts are nearly their rows', where rows have many answers."""
    golds = [prompt.gold for prompt in agreed]
    if len(set(golds)) <= len(golds) / 3:
        return False
    rank_of = dict(zip(agreed, ranks([prompt.most for prompt in agreed], golds), strict=True))
    return float(np.mean([rank_of[prompt] for prompt in wrong])) > NEAR_MISS


class _OwnMistakes(NamedTuple):
    """What the model gets wrong by itself, where the answer of the row is sound."""

    solved: frozenset[tuple[int, str]]
    """Row and question of groups in which a completion gave the row's answer."""
    errors: Counter[float | None]
    """By how much other completions of these groups missed it; None: it is no number."""

    def explain(self, prompt: AnsweredPrompt) -> bool:
        """Whether the model's answer to a prompt may be its own mistake."""
        off = _error(prompt.most, prompt.gold)
        return (prompt.row, prompt.question) in self.solved or (off is not None and self.errors[off] >= OWN_MISTAKES)


def _own_mistakes(rounds: Sequence[RoundView]) -> _OwnMistakes:
    solved = [prompt for view in rounds for prompt in answered_prompts([view]) if prompt.gold in prompt.answers]
    errors = Counter(_error(x, prompt.gold) for prompt in solved for x in prompt.answers if x != prompt.gold)
    return _OwnMistakes(frozenset((prompt.row, prompt.question) for prompt in solved), errors)


def _error(answer: str, gold: str) -> float | None:
    """A completion's answer less the row's, of numbers."""
    a = _number(answer)
    b = _number(gold)
    return None if a is None or b is None else round(a - b, 6)


def _same_error(wrong: Sequence[AnsweredPrompt]) -> bool:
    """Whether most of these differ from their rows' answers by one amount: 10 less in sums whose carry was lost."""
    found = [_error(prompt.most, prompt.gold) for prompt in wrong]
    off = Counter(abs(error) for error in found if error is not None)
    return bool(off) and off.most_common(1)[0][1] >= SYSTEMATIC * len(wrong)


def _neighbours_are_learnt(prompt: AnsweredPrompt, agreed: Sequence[AnsweredPrompt]) -> bool:
    """Whether most rows with this answer, and most with the one given instead, are right, if each has four or more."""
    of_answer: dict[str, list[bool]] = defaultdict(list)
    for other in agreed:
        of_answer[other.gold].append(other.most == other.gold)
    return all(len(of_answer[x]) < 4 or np.mean(of_answer[x]) >= 0.5 for x in (prompt.gold, prompt.most))
