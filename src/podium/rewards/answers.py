"""Rewards for the right answer: 1 or 0 (by degrees in one), and None where a row has no answer to compare with.

Those for free answers (`keyword_coverage`, `answer_f1`, ...) look at words, not at sense: "not Paris" has the word
Paris. Each takes plain and chat completions. `extract` finds the final answer in a completion; the ways are listed
in `podium.data.extract`. Where the `answer` column holds a list, each of its entries is right.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Literal

import numpy as np

from podium.data.extract import PLACES, Extract, extractor, last_number, placed, seen, text_of
from podium.data.templates import labelled
from podium.errors import ConfigError
from podium.errors.texts import as_line
from podium.rewards.reading import (
    STOP_WORDS,
    Number,
    Options,
    alone,
    choice_of,
    number_of,
    options_in,
    words_of,
)


def answer_correct(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 where the text inside the last `<answer>` tags is the `answer` column, character for character.

    White space around both is left out of the comparison; characters that take no room, and other forms of a space, a
    dash or a quote, make no difference. Numbers are compared as they are written: `07` is not `7`
    (`numeric_match` compares values).

    >>> answer_correct(["<answer>7</answer>", "<answer>17</answer>", "7"], answer=["7", "7", "7"])
    [1.0, 0.0, 0.0]
    """
    return _each(completions, answer, placed("tag:answer"), _same)


def exact_match(
    completions: Sequence[Any], answer: Sequence[Any], *, extract: Extract = "text", ignore_case: bool = False
) -> list[float | None]:
    r"""1 where the final answer (by default the whole completion) is the `answer` column, white space around it aside.

    Characters that take no room, and other forms of a space, a dash or a quote, make no difference.

    >>> exact_match(["Paris", "It is Paris"], answer=["Paris", "Paris"])
    [1.0, 0.0]
    >>> exact_match([r"It is \boxed{paris}"], answer=[["Paris", "City of Light"]], extract="boxed", ignore_case=True)
    [1.0]
    """
    same = (lambda text, gold: _same(text.casefold(), str(gold).casefold())) if ignore_case else _same
    return _each(completions, answer, placed(extract), same)


def numeric_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    tolerance: float | None = None,
    extract: Extract = PLACES,
) -> list[float | None]:
    r"""1 where the number in the answer's place is the number in the `answer` column.

    The place is the first that there is: `<answer>` tags, `\boxed{}`, what follows `####`, a line `Answer: ...`, the
    last line; `extract` names another. It must hold one number, with a unit or a few words that say it is the answer
    (docs/rewards.md); what stands elsewhere is not read. Of the `answer` column it is the number that it is, that in
    its place, or else its last one. 7% is 7, and 0.07 where the answer lies between -1 and 1. Whole numbers must be
    equal; others may differ by a millionth. A `tolerance` is for both, and is multiplied by the larger of 1 and the
    answer. Units are converted; one without a unit is taken. None where the column has no number.

    >>> numeric_match(["It is 1,000.0", "<answer>41</answer> of 42", "12345678"], answer=["1000", 42, "12345679"])
    [1.0, 0.0, 0.0]
    >>> numeric_match(["3 / 4", "not 12", "11 or 12", "12, since 3 * 4 = 12"], answer=["0.75", "12", "12", "12"])
    [1.0, 0.0, 0.0, 0.0]
    >>> numeric_match(["3.1"], answer=["3.14159"], tolerance=0.02)
    [1.0]
    >>> numeric_match(["5 + 2\\n#### 7", "5 + 2 = 7"], answer=["7", "7"], extract="####")
    [1.0, 0.0]
    """
    if tolerance is not None and not tolerance >= 0:
        raise ConfigError(f"`tolerance` must be 0 or more; it is {tolerance}.", tolerance=tolerance)

    def close(text: str, gold: Any) -> bool | None:
        expected = _gold_number(str(gold))
        if expected is None:
            return None
        if _same(text, gold):
            return True
        number = _compared(text, expected)
        return number is not None and _close(number, expected.value, tolerance)

    return _each(completions, answer, placed(extract), close)


def numeric_closeness(
    completions: Sequence[Any], answer: Sequence[Any], *, scale: float = 1.0, extract: Extract = PLACES
) -> list[float | None]:
    """How near the number in the completion is to that in the `answer` column: 1 / (1 + error / `scale`).

    Partial credit where groups would otherwise be all wrong: 1 for the right number, one half at `scale` away from it,
    0 where there is no number. Numbers are read as `numeric_match` reads them, and of a sum that does not hold
    (`3 + 4 = 8`) what stands behind it. Keep a reward for the right answer beside it, of a larger weight, or the policy
    may settle for being near; where a form is to be learnt, too, read inside it (`extract: tag:answer`), or answers
    without it are worth as much.

    >>> numeric_closeness(["<answer>42</answer>", "It is 43.", "39", "many"], answer=["42"] * 4)
    [1.0, 0.5, 0.25, 0.0]
    """
    if not scale > 0:
        raise ConfigError(f"`scale` must be above 0; it is {scale}.", scale=scale)

    def near(text: str, gold: Any) -> float | None:
        expected = _gold_number(str(gold))
        if expected is None or not math.isfinite(float(expected.value)):
            return None
        number = _compared(text, expected, holds=False)
        if number is None or number.is_nan():
            return 0.0
        return 1 / (1 + abs(float(number) - float(expected.value)) / scale)

    return _each(completions, answer, placed(extract), near)


def worked_steps(completions: Sequence[Any], prompts: Sequence[Any]) -> list[float | None]:
    """The share of a chain of additions and subtractions that is worked out step by step, each step right.

    The chain is the last expression in the prompt's last turn; the steps stand before any `<answer>`, with commas
    between them. Each begins with what the step before came to, right or wrong, so that one error costs one step. Half
    of it where there are more steps or fewer than the chain has operators. None where the last expression of the prompt
    is another one, as `2 * 3 + 4` is.

    >>> worked_steps(["2 - 9 = -7, -7 + 5 = -2", "2 - 9 = -8, -8 + 5 = -3", "-2"], prompts=["What is 2 - 9 + 5?"] * 3)
    [1.0, 0.5, 0.0]
    """
    asked = (prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts)
    last = [(_EXPRESSION.findall(str(text)) or [""])[-1].rstrip(".") for text in asked]
    pairs = zip(completions, last, strict=True)
    return [_steps(text_of(completion), chain) if _CHAIN.fullmatch(chain) else None for completion, chain in pairs]


_EXPRESSION = re.compile(r"[\d.+*/^\u00d7\u00f7()-]+(?: [\d.+*/^\u00d7\u00f7()-]+)+")
_CHAIN = re.compile(r"-?\d+(?: [+-] \d+)+")
_TERM = re.compile(r"([+-]) (\d+)")


def _steps(text: str, chain: str) -> float:
    terms = _TERM.findall(chain)
    reached = chain.partition(" ")[0]
    right = 0
    written = text.partition("<answer>")[0].split(",")
    for (sign, number), step in zip(terms, written, strict=False):
        found = re.fullmatch(rf"{reached} {re.escape(sign)} {number} = (-?\d{{1,9}})", step.strip())
        if found is None:
            break
        right += int(found[1]) == int(reached) + int(sign + number)
        reached = found[1]
    return right / len(terms) / (1 if len(written) == len(terms) else 2)


def multiple_choice(
    completions: Sequence[Any],
    answer: Sequence[Any],
    choices: Sequence[Any] | None = None,
    prompts: Sequence[Any] | None = None,
    *,
    extract: Extract = PLACES,
) -> list[float | None]:
    r"""1 where the answer's place holds the right choice and no other: `B`, `(B)`, `B) Paris`, or the choice's text.

    The place is that of `numeric_match`, and so are the words that may stand around the choice; a label with another
    choice's text is none. The `answer` column is a letter, the number of a choice from 0 on, or a choice's text. The
    choices are those of the `choices` column, a list of texts, or a mapping with `text` and `label`, as ARC has it;
    else those that the prompt lists as `A) ...`; else letters alone. None where the `answer` is none of the choices.

    >>> texts = ["The answer is (B).", "A or B", "Only B fits.", "<answer>C</answer>"]
    >>> multiple_choice(texts, answer=["B", "B", 1, "B"])
    [1.0, 0.0, 1.0, 0.0]
    >>> multiple_choice(["paris", "B) Paris"], answer=[0, 0], choices=[["Paris", "Rome"]] * 2)
    [1.0, 0.0]
    """
    offered = [_LETTERS] * len(completions)
    if choices is not None:
        offered = [_LETTERS if own is None else labelled(own) for own in choices]
    elif prompts is not None:
        offered = [options_in(prompt) or _LETTERS for prompt in prompts]
    take = placed(extract)
    scores: list[float | None] = []
    for completion, gold, options in zip(completions, answer, offered, strict=True):
        right = _label_of_gold(gold, options)
        text = take(text_of(completion))
        scores.append(None if right is None else float(text is not None and choice_of(text, options) == right))
    return scores


def _each(
    completions: Sequence[Any],
    answer: Sequence[Any],
    take: Callable[[str], str | None],
    right: Callable[[str, Any], float | None],
) -> list[float | None]:
    """`right` of what `take` finds; 0 where it finds nothing, None where there is no gold to compare with."""
    scores = []
    for completion, gold in zip(completions, answer, strict=True):
        found = take(text_of(completion))
        verdicts = [right(_NOTHING if found is None else found, one) for one in golds_of(gold)]
        scores.append(max((float(verdict) for verdict in verdicts if verdict is not None), default=None))
    return scores


_NOTHING = "\0no answer\0"
"""Is no gold: compared like an answer, so that what cannot be compared at all is None with and without one."""


def golds_of(gold: Any) -> list[Any]:
    """The right answers of a row: one, or those of a list; neither null nor NaN is any.

    >>> golds_of("7"), golds_of(["7", None, 7.0]), golds_of(float("nan"))
    (['7'], ['7', 7.0], [])
    """
    golds = gold if isinstance(gold, (list, tuple)) else [gold]
    return [one for one in golds if one is not None and not (isinstance(one, float) and math.isnan(one))]


def _same(text: str, gold: Any) -> bool:
    return seen(text).strip() == seen(str(gold)).strip()


_gold_place = extractor(PLACES)


@functools.lru_cache(maxsize=4096)
def _gold_number(text: str) -> Number | None:
    """The number that the column is, or that stands in its place, or else the last number in it."""
    if text.isdecimal():
        return Number(value=Decimal(text))
    if number := number_of(text) or number_of(_gold_place(text) or ""):
        return number
    last = last_number(text)
    return None if last is None else Number(value=Decimal(last))


def _compared(text: str, expected: Number, *, holds: bool = True) -> Decimal | None:
    """The number of an answer, in the unit of the right one; None where there is none. `holds`: of `number_of`."""
    number = number_of(text, holds=holds)
    if number is None:
        return None
    is_share = number.is_percent and not expected.is_percent and abs(float(expected.value)) <= 1
    if is_share and number.value != expected.value:
        return number.value / 100
    return number.in_unit_of(expected)


def _close(number: Decimal, right: Decimal, tolerance: float | None) -> bool:
    """Whether a number is the right one; without a tolerance whole numbers must be equal."""
    if number == right:
        return True
    if tolerance is None and right == right.to_integral_value():
        return False
    error = abs(float(number) - float(right))
    return error <= (1e-6 if tolerance is None else tolerance) * max(1.0, abs(float(right)))


# --- choices ---------------------------------------------------------------------------------------------------------

_LETTERS: Options = tuple((chr(ord("A") + index), "") for index in range(26))


def _label_of_gold(gold: Any, options: Options) -> str | None:
    if isinstance(gold, int) and not isinstance(gold, bool):
        return options[gold][0] if 0 <= gold < len(options) else None
    return alone(str(gold), options)


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
        raise ConfigError(f"`max_words` must be 1 or more; it is {max_words}.", max_words=max_words)
    if keywords is None and answer is None:
        raise ConfigError(
            "`keyword_coverage` needs a column `keywords` (lists of words) or `answer` in the dataset.",
            settings=("answer",),
        )
    if keywords is None:
        golds = [dict.fromkeys(words_of("" if gold is None else str(gold))) for gold in answer or ()]
        wanted = [[[word] for word in words if word not in STOP_WORDS["en"]] for words in golds]
    else:
        lists = [[own] if isinstance(own, str) else list(own or ()) for own in keywords]
        wanted = [[words for phrase in phrases if (words := words_of(str(phrase)))] for phrases in lists]
    take = placed(extract)
    return [
        _covered(take(text_of(completion)) or "", own, max_words)
        for completion, own in zip(completions, wanted, strict=True)
    ]


def answer_f1(
    completions: Sequence[Any], answer: Sequence[Any], *, extract: Extract = ("tag:answer", "text")
) -> list[float | None]:
    """How far the words of the final answer are those of the `answer` column: the F1 of SQuAD, 0 to 1.

    Precision counts as much as recall, so saying everything does not pay. Articles, case and punctuation are left out.
    Where the column holds a list, the nearest of its entries counts. None where it holds nothing.

    >>> answer_f1(["the Eiffel Tower", "<answer>a tower in Paris</answer>"], answer=[["Eiffel Tower"], "Eiffel Tower"])
    [1.0, 0.4]
    """
    take = placed(extract)
    scores = []
    for completion, gold in zip(completions, answer, strict=True):
        text = take(text_of(completion)) or ""
        known = [f1 for one in golds_of(gold) if (f1 := _f1(text, str(one))) is not None]
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
        raise ConfigError(
            f"`unit` must be character or word; it is {unit!r}.", fix=as_line("unit", "character"), unit=unit
        )
    take = placed(extract)
    units = words_of if unit == "word" else list
    scores = []
    for completion, gold in zip(completions, answer, strict=True):
        text = units((take(text_of(completion)) or "").strip())
        known = [_similarity(text, right) for one in golds_of(gold) if (right := units(str(one).strip()))]
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


def _similarity(found: Sequence[str], gold: Sequence[str]) -> float:
    """1 - the least number of insertions, deletions and replacements over the longer length."""
    longer = max(len(found), len(gold))
    found = found[: 2 * len(gold) + 64]
    codes = {unit: code for code, unit in enumerate({*found, *gold})}
    gold_G = np.array([codes[unit] for unit in gold])
    steps = np.arange(len(gold) + 1)
    distances = steps
    for row, unit in enumerate(found, start=1):
        replaced = np.minimum(distances[:-1] + (gold_G != codes[unit]), distances[1:] + 1)
        distances = np.minimum.accumulate(np.concatenate([[row], replaced]) - steps) + steps  # insertions
    cut = longer - max(len(found), len(gold))
    return max(0.0, float(longer - cut - distances[-1]) / longer)


_ARTICLES = frozenset({"a", "an", "the"})


def _f1(text: str, gold: str) -> float | None:
    counts = [Counter(word for word in words_of(side) if word not in _ARTICLES) for side in (text, gold)]
    return 2 * (counts[0] & counts[1]).total() / (counts[0].total() + counts[1].total()) if counts[1] else None
