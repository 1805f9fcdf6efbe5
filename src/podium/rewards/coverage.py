"""Rewards for free answers to questions: which key words are in them, and how far the words are those of the answer.

Each takes plain and chat completions. They look at words, not at sense: "not Paris" has the word Paris.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from podium.data.extract import Extract, extractor
from podium.errors import ConfigError
from podium.errors.texts import as_line
from podium.rewards.answers import golds_of
from podium.rewards.text import text_of
from podium.rewards.words import STOP_WORDS, words_of


def keyword_coverage(
    completions: Sequence[Any],
    keywords: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    *,
    max_words: int | None = None,
    extract: Extract = ("tag:answer", "text"),
) -> list[float | None]:
    """The share of a row's key words that the final answer has, as whole words in any case.

    The key words (or phrases) are the row's list in the column `keywords`; without that column they are the words of
    the `answer` column, English stop words left out. An answer of more than `max_words` words gets 0: otherwise a text
    that says everything covers everything. None where a row has no key words.

    >>> keyword_coverage(["Plants need light and water."], keywords=[["light", "water", "carbon dioxide"]])
    [0.6666666666666666]
    >>> keyword_coverage(["The mitochondria"], answer=["It is the mitochondria."])
    [1.0]
    """
    if max_words is not None and max_words < 1:
        raise ConfigError(f"`max_words` must be 1 or more; it is {max_words}.")
    if keywords is None and answer is None:
        raise ConfigError("`keyword_coverage` needs a column `keywords` (lists of words) or `answer` in the dataset.")
    if keywords is None:
        golds = [dict.fromkeys(words_of("" if gold is None else str(gold))) for gold in answer or ()]
        wanted = [[[word] for word in words if word not in STOP_WORDS["en"]] for words in golds]
    else:
        lists = [[own] if isinstance(own, str) else list(own or ()) for own in keywords]
        wanted = [[words for phrase in phrases if (words := words_of(str(phrase)))] for phrases in lists]
    take = extractor(extract)
    return [_covered(take(text_of(each)) or "", own, max_words) for each, own in zip(completions, wanted, strict=True)]


def answer_f1(
    completions: Sequence[Any], answer: Sequence[Any], *, extract: Extract = ("tag:answer", "text")
) -> list[float | None]:
    """How far the words of the final answer are those of the `answer` column: the F1 of SQuAD, 0 to 1.

    Precision counts as much as recall, so saying everything does not pay. Articles, case and punctuation are left out.
    Where the column holds a list, the nearest of its entries counts. None where it holds nothing.

    >>> answer_f1(["the Eiffel Tower", "<answer>a tower in Paris</answer>"], answer=[["Eiffel Tower"], "Eiffel Tower"])
    [1.0, 0.4]
    """
    take = extractor(extract)
    scores = []
    for each, gold in zip(completions, answer, strict=True):
        given = take(text_of(each)) or ""
        known = [f1 for one in golds_of(gold) if (f1 := _f1(given, str(one))) is not None]
        scores.append(max(known, default=None))
    return scores


def text_similarity(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    unit: Literal["character", "word"] = "character",
    extract: Extract = ("tag:answer", "text"),
) -> list[float | None]:
    """How near the final answer is to the `answer` column: 1 - Levenshtein's distance / the longer length, 0 to 1.

    Partial credit for spelling, dates, and lists whose order counts: 1 for the same text, white space around it aside.
    Keep a reward for the right answer beside it, of a larger weight. Compared are characters, or words (in any case and
    without punctuation) with `unit: word`. Where the column holds a list, the nearest of its entries counts. None where
    it holds nothing. Time and memory grow with the product of both lengths; completions are cut at twice the answer's
    length and 64 units more, where the similarity is below one half in any case.

    >>> text_similarity(["2024-05-01", "2024-06-01", "May"], answer=["2024-05-01"] * 3)
    [1.0, 0.9, 0.0]
    >>> text_similarity(["cat, dog, ant", "ant, cat, dog"], answer=["ant, cat, dog"] * 2, unit="word")
    [0.3333333333333333, 1.0]
    """
    if unit not in ("character", "word"):
        raise ConfigError(f"`unit` must be character or word; it is {unit!r}.", fix=as_line("unit", "character"))
    take, units = extractor(extract), words_of if unit == "word" else list
    scores = []
    for each, gold in zip(completions, answer, strict=True):
        given = units((take(text_of(each)) or "").strip())
        known = [_similarity(given, right) for one in golds_of(gold) if (right := units(str(one).strip()))]
        scores.append(max(known, default=None))
    return scores


def _covered(text: str, phrases: Sequence[Sequence[str]], max_words: int | None) -> float | None:
    if not phrases:
        return None
    words = words_of(text)
    if max_words is not None and len(words) > max_words:
        return 0.0
    joined = " " + " ".join(words) + " "
    return sum(f" {' '.join(phrase)} " in joined for phrase in phrases) / len(phrases)


def _similarity(given: Sequence[str], gold: Sequence[str]) -> float:
    """1 - the least number of insertions, deletions and replacements over the longer length."""
    longer = max(len(given), len(gold))
    given = given[: 2 * len(gold) + 64]
    codes = {each: code for code, each in enumerate({*given, *gold})}
    gold_G = np.array([codes[each] for each in gold])
    steps = np.arange(len(gold) + 1)
    distances = steps
    for row, each in enumerate(given, start=1):
        replaced = np.minimum(distances[:-1] + (gold_G != codes[each]), distances[1:] + 1)
        distances = np.minimum.accumulate(np.concatenate([[row], replaced]) - steps) + steps  # insertions
    cut = longer - max(len(given), len(gold))
    return max(0.0, float(longer - cut - distances[-1]) / longer)


_ARTICLES = frozenset({"a", "an", "the"})


def _f1(given: str, gold: str) -> float | None:
    counts = [Counter(word for word in words_of(text) if word not in _ARTICLES) for text in (given, gold)]
    return 2 * (counts[0] & counts[1]).total() / (counts[0].total() + counts[1].total()) if counts[1] else None
