"""Rewards for how a text is written: patterns it must or must not have, repetition, variety within a
group, length in tokens, language.

Each takes plain and chat completions. Words are runs of letters and digits; in scripts without spaces between words
(Chinese, Japanese, Thai) every character counts as a word. Those named `get_...` are TRL's and make
a reward function of their settings.

The language is told from script and commonest words, without a model. What it can tell: languages with a script of
their own (Chinese, Japanese, Korean, Arabic, Hebrew, Greek, Thai, Hindi) by their letters, and eighteen languages in
Latin script by their stop words. What it cannot: languages that share another script (Russian and Ukrainian are both
Cyrillic, Persian and Arabic both Arabic script), one word, and names. By hand, because packages that identify languages
always guess one: they give neither a share nor "too little to tell".
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium.data.extract import compiled_pattern, text_of
from podium.errors import ConfigError
from podium.errors.texts import listed, nearest
from podium.records import as_name
from podium.rewards.mathematics import accuracy_reward
from podium.rewards.reading import STOP_WORDS, words_of


def forbidden_patterns(completions: Sequence[Any], *, patterns: Sequence[str], ignore_case: bool = True) -> list[float]:
    """1 where none of the patterns (regular expressions) occurs, 0 where one does.

    >>> forbidden_patterns(["It is 7.", "As an AI, I think it is 7."], patterns=["as an ai", "I cannot"])
    [1.0, 0.0]
    """
    compiled = _compiled(patterns, ignore_case=ignore_case)
    return [float(not any(pattern.search(text_of(completion)) for pattern in compiled)) for completion in completions]


def required_patterns(completions: Sequence[Any], *, patterns: Sequence[str], ignore_case: bool = True) -> list[float]:
    r"""The share of the patterns (regular expressions) that occur.

    >>> required_patterns(["Because 3+4 is 7.", "7"], patterns=["because", r"\d"])
    [1.0, 0.5]
    """
    compiled = _compiled(patterns, ignore_case=ignore_case)
    return [
        sum(bool(pattern.search(text_of(completion))) for pattern in compiled) / len(compiled)
        for completion in completions
    ]


def _compiled(patterns: Sequence[str], *, ignore_case: bool) -> list[re.Pattern[str]]:
    if isinstance(patterns, str) or not patterns:
        raise ConfigError(f"`patterns` must be a list of regular expressions; it is {patterns!r}.", patterns=patterns)
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
    texts = [text_of(completion) for completion in completions]
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


def group_of_each(prompts: Sequence[Any]) -> list[int]:
    """The number of the group that each completion of a round is in: those with equal prompts are one group.

    >>> group_of_each(["3+4", "3+4", "8-1", "8-1"])
    [0, 0, 1, 1]
    """
    keys = [
        prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=as_name) for prompt in prompts
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def _ngrams(text: str, size: int) -> Counter[tuple[str, ...]]:
    words = words_of(text)
    return Counter(zip(*(words[start:] for start in range(size)), strict=False))


def _check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"`size` must be a whole number of 1 or more; it is {size!r}.", size=size)


_SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "ar": ("ARABIC",),
    "bg": ("CYRILLIC",),
    "bn": ("BENGALI",),
    "el": ("GREEK",),
    "fa": ("ARABIC",),
    "he": ("HEBREW",),
    "hi": ("DEVANAGARI",),
    "hy": ("ARMENIAN",),
    "ja": ("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "CJK"),
    "ka": ("GEORGIAN",),
    "ko": ("HANGUL",),
    "ru": ("CYRILLIC",),
    "ta": ("TAMIL",),
    "te": ("TELUGU",),
    "th": ("THAI",),
    "uk": ("CYRILLIC",),
    "zh": ("CJK",),
    **dict.fromkeys(STOP_WORDS, ("LATIN",)),
}
"""First words of Unicode's names of a language's letters."""

_KANA = ("HIRAGANA", "KATAKANA")
_LEAST_KANA = 0.05
"""Share of a Japanese text's letters that are kana; with fewer it is taken for Chinese, which has none."""
_LEAST_LETTERS = 10
_LEAST_STOP_WORDS = 2
_NOT_PROSE = re.compile(r"```.*?(?:```|\Z)|\$\$.*?\$\$|\$[^$\n]*\$|\\boxed\s*\{[^}]*\}|</?\w+>|https?://\S+", re.DOTALL)
"""Code, formulas, tags and addresses are in no language."""


def language(completions: Sequence[Any], *, code: str = "en") -> list[float | None]:
    """The share of a completion's letters that are in the script of a language, 0 where the words are another's.

    `code` is the language's (`en`, `de`, `zh`, ...). Code blocks, formulas and tags are left out. In Latin script the
    commonest words decide: 0 where more of them are of another language. None where there is too little to tell: fewer
    than ten letters, or in Latin script fewer than two such words of any language.

    >>> english = "I think that this is the answer to all of it."
    >>> german = "Ich glaube, dass das die Antwort auf alles ist."
    >>> language([english, german, "Hm. 42!"], code="en"), language([german], code="de")
    ([1.0, 0.0, None], [1.0])
    """
    if code not in _SCRIPTS:
        near = nearest(str(code), _SCRIPTS)
        raise ConfigError(
            f"no language `{code}`. There are {listed(_SCRIPTS)}.",
            fix=f"Did you mean `{near}`?" if near else "",
            rule=code,
            scripts=_SCRIPTS,
            near=near,
        )
    return [_share(_NOT_PROSE.sub(" ", text_of(completion)), code) for completion in completions]


def _share(text: str, code: str) -> float | None:
    letters = Counter(_script(character) for character in text if character.isalpha())
    if letters.total() < _LEAST_LETTERS:
        return None
    share = sum(letters[script] for script in _SCRIPTS[code]) / letters.total()
    kana = sum(letters[script] for script in _KANA) / letters.total()
    if (code == "ja" and kana < _LEAST_KANA) or (code == "zh" and kana >= _LEAST_KANA):
        return 0.0
    if code not in STOP_WORDS or share == 0:
        return share
    counts = Counter(words_of(text))
    hits = {other: sum(counts[word] for word in words) for other, words in STOP_WORDS.items()}
    most = max(hits.values())
    if most < _LEAST_STOP_WORDS:
        return None
    return share if hits[code] == most else 0.0


def _script(character: str) -> str:
    """
    >>> _script("a"), _script("я"), _script("学")
    ('LATIN', 'CYRILLIC', 'CJK')
    """
    return unicodedata.name(character, "").split(" ")[0]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """DAPO's length penalty (arXiv:2503.14476, equation 13): 0, then falling to -1 over the last tokens.

    Up to `max_completion_len - soft_punish_cache` tokens cost nothing; `max_completion_len` tokens and more cost 1.

    >>> soft_overlong = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    >>> soft_overlong(completion_ids=[[1] * 80, [1] * 90, [1] * 101])
    [0.0, -0.5, -1.0]
    """
    from trl import rewards

    return rewards.get_soft_overlong_punishment(max_completion_len, soft_punish_cache)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    r"""`accuracy_reward` scaled by length along a cosine (arXiv:2502.03373, appendix C.1): short and right is best.

    `max_len` is in tokens. TRL's takes chat completions only, this one plain text too.

    >>> cosine = get_cosine_scaled_reward(max_len=100)
    >>> cosine(completions=[r"\boxed{4}", r"\boxed{5}"], solution=["4", "4"], completion_ids=[[1] * 50, [1] * 50])
    [0.75, -0.75]
    """
    return _CosineScaled(max_len, (max_value_wrong, min_value_wrong), (min_value_correct, max_value_correct))


class _CosineScaled:
    """An object, so that it can be sent to another process."""

    __name__ = "cosine_scaled_reward"  # as TRL's, for metrics

    def __init__(self, max_len: int, wrong: tuple[float, float], correct: tuple[float, float]) -> None:
        self.max_len = max_len
        self.bounds = {0.0: wrong, 1.0: correct}
        """For a wrong and for a right answer: the values at `max_len` and at 0 tokens."""

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[float | None]:
        verdicts = accuracy_reward(completions, solution)
        return [
            None if verdict is None else self._scaled(self.bounds[verdict], len(ids))
            for verdict, ids in zip(verdicts, completion_ids, strict=True)
        ]

    def _scaled(self, bounds: tuple[float, float], num_tokens: int) -> float:
        longest, shortest = bounds
        progress = min(num_tokens / self.max_len, 1.0)  # a cosine would rise again behind `max_len`
        return longest + 0.5 * (shortest - longest) * (1.0 + math.cos(progress * math.pi))


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """`max_penalty` times the share of n-grams of token ids that are repetitions (arXiv:2502.03373, appendix C.2).

    >>> repetition = get_repetition_penalty_reward(ngram_size=2)
    >>> repetition(completion_ids=[[1, 2, 3, 4], [1, 2, 1, 2, 1]])
    [0.0, -0.5]
    """
    from trl import rewards

    return rewards.get_repetition_penalty_reward(ngram_size, max_penalty)


def ideal_length(completion_ids: Sequence[Sequence[int]], *, tokens: int, width: int | None = None) -> list[float]:
    """1 at `tokens` tokens, falling evenly to 0 at `width` tokens more or fewer (by default half of `tokens`).

    The end token counts as one.

    >>> ideal_length([[1] * 100, [1] * 125, [1] * 10], tokens=100)
    [1.0, 0.5, 0.0]
    """
    span = max(1, tokens // 2) if width is None else width
    if tokens < 1 or span < 1:
        raise ConfigError(
            f"`tokens` and `width` must be 1 or more; they are {tokens} and {width}.", tokens=tokens, width=width
        )
    return [max(0.0, 1.0 - abs(len(ids) - tokens) / span) for ids in completion_ids]


def token_budget(
    completion_ids: Sequence[Sequence[int]],
    budget: Sequence[Any] | None = None,
    *,
    tokens: int | None = None,
    slack: float = 0.5,
) -> list[float | None]:
    """1 up to the budget, falling evenly to 0 at `1 + slack` times of it.

    The budget is the row's `budget` column, where the dataset has one, else the setting `tokens`. None where a row has
    neither.

    >>> token_budget([[1] * 80, [1] * 125, [1] * 200], tokens=100)
    [1.0, 0.5, 0.0]
    >>> token_budget([[1] * 80, [1] * 80], budget=[100, None])
    [1.0, None]
    """
    if not slack > 0 or (tokens is not None and tokens < 1):
        raise ConfigError(
            f"`slack` must be above 0 and `tokens` 1 or more; they are {slack} and {tokens}.",
            slack=slack,
            tokens=tokens,
        )
    if budget is None and tokens is None:
        raise ConfigError("`token_budget` needs the setting `tokens`, or a column `budget` in the dataset.")
    own_limits = [None] * len(completion_ids) if budget is None else budget
    limits = [tokens if own is None else own for own in own_limits]
    return [
        None if limit is None else min(1.0, max(0.0, 1.0 - (len(ids) - limit) / (slack * limit)))
        for ids, limit in zip(completion_ids, limits, strict=True)
    ]
