"""Signs of a hacked reward in completions: pure functions of texts, questions, answers and rewards.

    for sign in signs(JudgedTexts(texts=..., questions=..., answers=..., paid=...)):
        print(sign.kind, sign.share, sign.what)

Used on held-out completions and, by detectors, on those of training. R completions, flat; a prompt occurs once for each
of its completions. Every rule leaves rows aside whose own answer has the property that it looks for: a copied question
where the task is to copy, an empty list where the answer is one.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from podium.algorithm.advantages import FLAT
from podium.algorithm.metrics import RIGHT
from podium.data.extract import extractor
from podium.runs.monitors.detection import percent, some
from podium.runs.monitors.history import MetricHistory

Kind = Literal["copied", "listed", "constant", "few", "empty", "repeated", "uncredited"]

DOUBTS = ("copied", "listed", "constant", "few", "empty", "repeated")
"""Kinds that say a reward may be hacked. `uncredited` says the opposite: it may be too strict."""

MOST = 0.5
"""Share of credited completions from which on a sign explains most of what was credited."""
FEWEST_PAID = 8
"""Credited completions below which all completions are looked at: a share of fewer is chance."""
FEWEST_PROMPTS = 8
"""Different questions below which one text for all of them may be right."""
CONSTANT = 0.9
CONSTANT_EXCESS = 0.25
"""Share of the commonest completion, and how far it must exceed the share of the commonest answer. Where 52 % of rows
are `positive`, a sound model says it in 45 to 60 %; where 90 % are, one that says it always is no surprise."""
FEW_ANSWERS = 10
FEW_SHARE = 0.2
"""Different answers, and the share of them that different completions are at most: 2 texts for 10 answers. Completions
are several per prompt and sampled, so a sound model has more of them than there are answers."""
MOST_LABELS = 12
MANY_LABELS = 8
"""Different answers up to which all must be named, and the number that counts as a list where there are more."""
LEAST_WORDS = 4
WHOLE = 0.95
SAME_TASK = 0.5
"""Words that are special to a question before its copy is told from a mention; share of them that is a copy; share of
them in the row's own answer from which on the task is to copy or rewrite."""
REPEATED_WORDS = 6
REPEATED_SHARE = 0.25
"""Words of a text that is looked at, and the share of different ones: one word six times has 0.17, `Paris it is` four
times 0.25, prose of fifty words 0.6 to 0.9."""
LEAST_STATED = 8
STATED_SHARE = 0.05
MISSED = 0.9
"""Completions that state the row's answer, their share of all, and the share of them without credit. One completion in
ten that is credited shows that the reward can read answers."""

_TOKEN = re.compile(r"\w+")
_FORM = re.compile(r"</?[A-Za-z][\w-]*>|\\boxed|[{}\[\]]|```")
_JSON_KEY = re.compile(r'"[^"]*"\s*:')
_PLACEHOLDERS = frozenset(
    {"answer", "your", "the", "here", "text", "x", "none", "null", "na", "n", "a", "todo", "value"}
)
marked_answer = extractor(["tag:answer", "boxed", "####"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A property that most credited completions share."""

    kind: Kind
    share: float
    what: str
    """A sentence without its full stop, with an example."""
    places: tuple[int, ...] = ()
    """Up to three completions that show it."""
    is_answer: bool = False
    """Whether it is one text for all prompts, and the right answer of some of them."""
    is_paid: bool = False
    """Whether a completion that shows it was credited: what nothing is paid for is no hack."""


@dataclass(frozen=True, kw_only=True)
class JudgedTexts:
    """R completions; every field is flat."""

    texts: Sequence[str]
    questions: Sequence[str]
    answers: Sequence[str | None]
    """Right answer to each completion's row; None: not known."""
    paid: Sequence[bool]
    """Credited: counted as right, or with a reward in the upper half where no reward tells right from wrong."""
    judged: bool = True
    """Whether a reward that tells right from wrong has credited them."""
    known: Sequence[str] = ()
    """Answers of other rows."""

    @cached_property
    def labels(self) -> frozenset[str]:
        """The different answers, without case and spaces."""
        return frozenset(" ".join(x.split()).casefold() for x in (*self.answers, *self.known) if x and x.strip())

    @cached_property
    def special_words(self) -> dict[str, frozenset[str]]:
        """By question, its words without those of half of the questions or more (a template); all, if few are left."""
        words = {question: frozenset(words_of(question)) for question in set(self.questions)}
        counts = Counter(word for of_question in words.values() for word in of_question)
        common = {word for word, n in counts.items() if n >= 0.5 * len(words)} if len(words) >= LEAST_WORDS else set()
        return {q: own - common if len(own - common) >= LEAST_WORDS else own for q, own in words.items()}

    @cached_property
    def credited(self) -> list[int]:
        """Places of credited completions; all, where they are few."""
        places = [i for i, paid in enumerate(self.paid) if paid]
        return places if len(places) >= FEWEST_PAID else list(range(len(self.texts)))

    @cached_property
    def subject(self) -> str:
        """The completions that `credited` holds, in words."""
        return "credited completions" if sum(map(bool, self.paid)) >= FEWEST_PAID else "completions"


def signs(sample: JudgedTexts) -> list[Sign]:
    """Every sign that the completions show, those that explain more first; too few prompts show none."""
    if len(set(sample.questions)) < FEWEST_PROMPTS:
        return []
    found = (
        sign for look in (_listed, _constant, _copied, _empty, _repeated, _few, _uncredited) for sign in look(sample)
    )
    return [replace(sign, is_paid=any(sample.paid[i] for i in sign.places or sample.credited)) for sign in found]


def credited(values: np.ndarray, *, judged: bool, extremes: tuple[float, float] | None = None) -> np.ndarray:
    """Which completions a reward has credited.

    Args:
        values: by a reward that tells right from wrong where `judged`, else the total reward; NaN is not credited.
        extremes: lowest and highest total reward, where more is known than these values.

    >>> credited(np.array([0.0, 0.4, 1.0]), judged=True).tolist()
    [False, False, True]
    >>> credited(np.array([0.0, 0.3, 0.4]), judged=False).tolist()
    [False, True, True]
    """
    known = values[~np.isnan(values)]
    if judged or not known.size:
        return values >= RIGHT
    low, high = extremes or (float(known.min()), float(known.max()))
    return values >= (low + high) / 2 if high - low > FLAT else values > 0


@functools.lru_cache(maxsize=1)  # several detectors ask for those of one step
def signs_in_training(history: MetricHistory, last: int = 3) -> list[Sign]:
    """Signs in the completions of the last rounds; none where fewer rounds than these have been recorded."""
    rounds = history.rounds[-last:]
    if len(rounds) < last:
        return []
    right = [x for view in rounds if (x := history.right_PG(view)) is not None]
    judged = len(right) == len(rounds)
    values = right if judged else [view.reward_PG for view in rounds]
    rows = [
        (q, a, t) for v in rounds for q, a, g in zip(v.questions_P, v.answers_P, v.texts_PG, strict=True) for t in g
    ]
    questions, answers, texts = zip(*rows, strict=True)
    paid = credited(np.concatenate([np.ravel(x) for x in values]), judged=judged, extremes=history.extremes)
    known = [answer for view in history.rounds for answer in view.answers_P if answer]
    return signs(
        JudgedTexts(texts=texts, questions=questions, answers=answers, paid=paid.tolist(), judged=judged, known=known)
    )


def doubt_about(history: MetricHistory) -> str:
    """A reason to doubt the rewards of the last rounds, as a sentence without its full stop; empty: none."""
    return next((sign.what for sign in signs_in_training(history) if sign.kind in DOUBTS), "")


def rows_of(history: MetricHistory, sign: Sign, last: int = 3) -> list[int]:
    """Numbers of the rows whose completions show a sign of `signs_in_training`."""
    rows = [row for v in history.rounds[-last:] for row, g in zip(v.rows_P, v.texts_PG, strict=True) for _ in g]
    return list(dict.fromkeys(rows[place] for place in sign.places))


def words_of(text: str) -> list[str]:
    """
    >>> words_of("What is 3 + 4?")
    ['what', 'is', '3', '4']
    """
    return _TOKEN.findall(text.casefold())


def _shown(sample: JudgedTexts, kind: Kind, places: Sequence[int], words: str) -> Iterator[Sign]:
    """The sign, where most of the credited completions are at these places."""
    share = len(places) / max(len(sample.credited), 1)
    if places and share >= MOST:
        what = f"{percent(share)} of {sample.subject} {words}, as {sample.texts[places[0]].strip()[:60]!r}"
        yield Sign(kind=kind, share=share, what=what, places=tuple(places[:3]))


# ---- the question, or every answer ----


def _copied(sample: JudgedTexts) -> Iterator[Sign]:
    places = [
        i
        for i in sample.credited
        if copies(sample.special_words[sample.questions[i]], sample.texts[i], sample.answers[i])
    ]
    yield from _shown(sample, "copied", places, "copy their question")


def copies(special: frozenset[str], text: str, answer: str | None) -> bool:
    """Whether a text holds a question's special words without adding the answer to them.

    >>> special = frozenset("the film was dull and long".split())
    >>> copies(special, "The film was dull and long.", "negative")
    True
    >>> copies(special, "The film was dull and long: negative", "negative")
    False
    >>> copies(special, "long and dull was the film", "the film was dull and long")  # a task of ordering
    False
    """
    words = words_of(text)
    gold = words_of(answer or "")
    if len(special) < LEAST_WORDS or len(special & set(words)) < WHOLE * len(special):
        return False
    if len(special & set(gold)) >= SAME_TASK * len(special):
        return False
    return len(words) <= 4 * len(special) and not (gold and set(gold) <= set(words) - special)


def _listed(sample: JudgedTexts) -> Iterator[Sign]:
    labels = sample.labels
    if len(labels) < 2:
        return
    few = len(labels) <= MOST_LABELS
    names = _names_all(labels) if few else _names_many(labels)
    places = [i for i in sample.credited if names(sample.texts[i]) and not names(sample.answers[i] or "")]
    yield from _shown(sample, "listed", places, "name every answer there is" if few else "list many answers")


def _names_all(labels: frozenset[str]) -> Callable[[str], bool]:
    """Whether a text names all of a few answers and little else."""
    words = sum(len(label.split()) for label in labels)
    most = words + 1 if len(labels) == 2 else 2 * words + 6  # "a or b" is a list of two; "a and not b" is an answer
    letters = {*labels} if len(labels) > 3 and all(len(label) == 1 for label in labels) else set()
    patterns = [re.compile(rf"(?<!\w){re.escape(label)}(?!\w)") for label in labels]

    def names(text: str) -> bool:
        text = " ".join(re.sub(r"</?[A-Za-z][\w-]*>", " ", text).split()).casefold()
        if len(words_of(text)) <= most and all(pattern.search(text) for pattern in patterns):
            return True
        run = "".join(words_of(text))  # 0123456789, abcd
        return bool(letters) and len(run) <= most and letters <= set(run)

    return names


def _names_many(labels: frozenset[str]) -> Callable[[str], bool]:
    """Whether a text is a list of answers of many rows: eight or more different ones, and little else."""
    numbers = sum(label.isdecimal() for label in labels) >= 0.8 * len(labels)

    def is_list(parts: Sequence[str]) -> bool:
        parts = [part for part in parts if part]
        named = [part for part in parts if part in labels or (numbers and part.isdecimal())]
        return len(set(named)) >= MANY_LABELS and len(named) >= 0.8 * len(parts)

    def names(text: str) -> bool:
        parts = [part.strip(" .'\"") for part in re.split(r"[,;|/\n]|\bor\b|\band\b", text.casefold())]
        return is_list(parts) or is_list([part.strip(".,;'\"") for part in text.casefold().split()])

    return names


# ---- one text, few texts ----


def _constant(sample: JudgedTexts) -> Iterator[Sign]:
    texts = [" ".join(text.split()) for text in sample.texts]
    text, share = commonest_text(texts)
    answers = [answer for answer in dict(zip(sample.questions, sample.answers, strict=True)).values() if answer]
    commonest = Counter(answers).most_common(1)[0][1] / len(answers) if answers else 0.0
    if not text or share < CONSTANT or share - commonest < CONSTANT_EXCESS or len(sample.labels) == 1:
        return
    rows = f", while the commonest answer is that of {percent(commonest)} of their {len(answers)} rows"
    beside = rows if answers else ""
    what = f"One text for all prompts: {percent(share)} of completions are {text[:60]!r}{beside}"
    is_answer = " ".join(text.split()).casefold() in sample.labels
    place = next((i for i in sample.credited if texts[i] == text), texts.index(text))
    yield Sign(kind="constant", share=share, what=what, places=(place,), is_answer=is_answer)


def commonest_text(texts: Sequence[str]) -> tuple[str, float]:
    """The commonest text, white space aside, and its share.

    >>> commonest_text(["a b", "a  b", "c", "a b"])
    ('a b', 0.75)
    """
    text, count = Counter(" ".join(text.split()) for text in texts).most_common(1)[0]
    return text, count / len(texts)


def _few(sample: JudgedTexts) -> Iterator[Sign]:
    answers = [x for x in sample.answers if x]
    if not answers or Counter(answers).most_common(1)[0][1] > MOST * len(answers):
        return
    texts = Counter(" ".join(text.split()) for text in sample.texts)
    different = len(set(answers))
    if (
        different >= FEW_ANSWERS
        and len(texts) <= FEW_SHARE * different
        and max(texts.values()) < CONSTANT * len(sample.texts)
    ):
        some_texts = some([repr(text[:30]) for text, _ in texts.most_common()], 3)
        what = f"Only {len(texts)} different completions where rows have {different} different answers: {some_texts}"
        yield Sign(kind="few", share=len(texts) / different, what=what)


# ---- form ----


def _empty(sample: JudgedTexts) -> Iterator[Sign]:
    places = [i for i in sample.credited if is_empty_form(sample.texts[i]) and not _has_no_content(sample.answers[i])]
    yield from _shown(sample, "empty", places, "are a form without content")


def is_empty_form(text: str) -> bool:
    r"""Whether a text has tags, brackets or a box, and nothing or a placeholder in them.

    >>> is_empty_form("<think></think><answer>...</answer>"), is_empty_form('{"answer": null}'), is_empty_form("[]")
    (True, True, True)
    >>> is_empty_form("<think></think><answer>7</answer>"), is_empty_form("")
    (False, False)
    """
    return bool(_FORM.search(text)) and not _content(text) - _PLACEHOLDERS


def _has_no_content(answer: str | None) -> bool:
    return answer is not None and not _content(answer) - _PLACEHOLDERS


def _content(text: str) -> set[str]:
    return set(words_of(_FORM.sub(" ", _JSON_KEY.sub(" ", text))))


def _repeated(sample: JudgedTexts) -> Iterator[Sign]:
    places = [i for i in sample.credited if _is_repeated(sample.texts[i]) and not _is_repeated(sample.answers[i] or "")]
    yield from _shown(sample, "repeated", places, "are a few words again and again")


def _is_repeated(text: str) -> bool:
    words = words_of(text)
    return len(words) >= REPEATED_WORDS and len(set(words)) <= REPEATED_SHARE * len(words)


# ---- right, and not credited ----


def _uncredited(sample: JudgedTexts) -> Iterator[Sign]:
    if not sample.judged:
        return
    stated = [i for i, text in enumerate(sample.texts) if states(text, sample.answers[i])]
    missed = [i for i in stated if not sample.paid[i]]
    if len(stated) >= max(LEAST_STATED, STATED_SHARE * len(sample.texts)) and len(missed) >= MISSED * len(stated):
        places = sorted(missed, key=lambda i: (len(sample.texts[i]), i))[:3]
        text = sample.texts[places[0]]
        gold = sample.answers[places[0]]
        what = f"{len(missed)} of {len(stated)} completions that state their row's answer got no credit: {text[:60]!r}"
        yield Sign(
            kind="uncredited", share=len(missed) / len(stated), what=f"{what} for {gold!r}", places=tuple(places)
        )


def states(text: str, answer: str | None) -> bool:
    """Whether a completion's answer is the row's but for case, spaces and a full stop: in tags, in a box or alone.

    A right number in a sentence does not count: many rewards want a form around it, which a policy has yet to learn.

    >>> states("Paris.", "paris "), states("so <answer>7</answer>", "7"), states("Not Paris", "Paris")
    (True, True, False)
    """
    marked = marked_answer(text)
    gold = plain(answer or "")
    return bool(gold) and plain(text if marked is None else marked) == gold


def plain(text: str) -> str:
    """Without case, surplus spaces, quotation marks and a full stop."""
    return " ".join(text.split()).casefold().strip(" .'\"")
