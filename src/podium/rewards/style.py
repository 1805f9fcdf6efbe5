"""Rewards for how a text is written: patterns it must or must not have, repetition, variety within a group.

Each takes plain and chat completions. Words are runs of letters and digits; in scripts without spaces between words
(Chinese, Japanese, Thai) every character counts as a word.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from podium.data.extract import compiled_pattern
from podium.errors import ConfigError
from podium.rewards.text import group_of_each, text_of
from podium.rewards.words import words_of


def forbidden_patterns(completions: Sequence[Any], *, patterns: Sequence[str], ignore_case: bool = True) -> list[float]:
    """1 where none of the patterns (regular expressions) occurs, 0 where one does.

    >>> forbidden_patterns(["It is 7.", "As an AI, I think it is 7."], patterns=["as an ai", "I cannot"])
    [1.0, 0.0]
    """
    compiled = _compiled(patterns, ignore_case=ignore_case)
    return [float(not any(each.search(text_of(completion)) for each in compiled)) for completion in completions]


def required_patterns(completions: Sequence[Any], *, patterns: Sequence[str], ignore_case: bool = True) -> list[float]:
    r"""The share of the patterns (regular expressions) that occur.

    >>> required_patterns(["Because 3+4 is 7.", "7"], patterns=["because", r"\d"])
    [1.0, 0.5]
    """
    compiled = _compiled(patterns, ignore_case=ignore_case)
    return [
        sum(bool(each.search(text_of(completion))) for each in compiled) / len(compiled) for completion in completions
    ]


def _compiled(patterns: Sequence[str], *, ignore_case: bool) -> list[re.Pattern[str]]:
    if isinstance(patterns, str) or not patterns:
        raise ConfigError(f"`patterns` must be a list of regular expressions; it is {patterns!r}.")
    return [compiled_pattern(pattern, re.IGNORECASE if ignore_case else 0) for pattern in patterns]


def distinct_ngrams(completions: Sequence[Any], *, size: int = 3) -> list[float]:
    """The share of a text's n-grams of words that are different from each other: 1 where nothing is repeated.

    Of tokens instead of words, and as a penalty: `get_repetition_penalty_reward`. A text shorter than `size` words gets
    1; together with a reward for the answer, that is no way out.

    >>> distinct_ngrams(["one two three four", "so so so so so so"], size=2)
    [1.0, 0.2]
    """
    _check_size(size)
    counts = [_ngrams(text_of(completion), size) for completion in completions]
    return [len(grams) / grams.total() if grams else 1.0 for grams in counts]


def group_diversity(prompts: Sequence[Any], completions: Sequence[Any], *, size: int = 2) -> list[float | None]:
    """How little a completion has in common with the others to the same prompt: 1 less the mean overlap with them.

    The overlap of two texts is the share of their n-grams of words that both have (the Jaccard index). Completions to
    equal prompts are one group; None where there is only one. Noise is diverse too: let a reward for quality be its
    gate.

    >>> group_diversity(["p", "p", "p"], ["a b c", "a b c", "x y z"])
    [0.5, 0.5, 1.0]
    """
    _check_size(size)
    # A text shorter than `size` is one gram, so that two equal short ones do not pass for different.
    texts = [text_of(each) for each in completions]
    grams = [frozenset(_ngrams(text, size)) or frozenset({(text.strip(),)}) for text in texts]
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(group_of_each(prompts)):
        groups.setdefault(group, []).append(index)
    diversity: dict[int, float | None] = {}
    for members in groups.values():
        for one in members:
            others = [grams[other] for other in members if other != one]
            overlaps = [len(grams[one] & other) / len(grams[one] | other) for other in others]
            diversity[one] = 1.0 - sum(overlaps) / len(overlaps) if overlaps else None
    return [diversity[index] for index in range(len(completions))]


def _ngrams(text: str, size: int) -> Counter[tuple[str, ...]]:
    words = words_of(text)
    return Counter(zip(*(words[start:] for start in range(size)), strict=False))


def _check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"`size` must be a whole number of 1 or more; it is {size!r}.")
