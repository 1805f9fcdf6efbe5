"""A reward for the language of a completion, from its script and its commonest words. No model, no dictionary.

What it can tell: languages with a script of their own (Chinese, Japanese, Korean, Arabic, Hebrew, Greek, Thai, Hindi)
by their letters, and eighteen languages in Latin script by their stop words. What it cannot: languages that share
another script (Russian and Ukrainian are both Cyrillic, Persian and Arabic both Arabic script), one word, and names.
By hand, because packages that identify languages always guess one: they give neither a share nor "too little to tell".
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from podium.errors import ConfigError
from podium.errors.texts import did_you_mean
from podium.rewards.text import text_of
from podium.rewards.words import STOP_WORDS, words_of

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
        what = f"no language `{code}`. There are {', '.join(_SCRIPTS)}."
        raise ConfigError(what, fix=did_you_mean(str(code), _SCRIPTS))
    return [_share(_NOT_PROSE.sub(" ", text_of(each)), code) for each in completions]


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
