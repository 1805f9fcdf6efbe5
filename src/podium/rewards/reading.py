r"""The one value that a text is: a number with its unit, or a choice (docs/rewards.md); and the words of any text.

    number_of("The answer is 12 km.")
    choice_of("Only B fits.", (("A", "Paris"), ("B", "Rome")))

A text is read whole or not at all. Around a value only words of one list may stand (`words` of `reading.yaml`): those
that say no more than that it is the answer. Any other word, a second value or a question mark makes it no answer.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from podium.data.extract import DIGITS, normal, plain_number

WRITTEN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""Words, signs and markup: a file that needs no program to be read and added to."""

LONGEST = 300
"""Characters of an answer; a longer text is none."""


def words(key: str) -> list[str]:
    """A list of the file."""
    return [word.strip() for word in WRITTEN[key].split(",")]


def _any(*keys: str) -> str:
    """A pattern for each entry of lists, the longest first."""
    entries = sorted((word for key in keys for word in words(key)), key=len, reverse=True)
    return "(?:" + "|".join(re.escape(entry).replace(r"\ ", r"\s+") for entry in entries) + ")"


_CLEANED = [(sign, re.compile(pattern, re.MULTILINE), plain) for sign, pattern, plain in WRITTEN["cleaned"]]
_LONG_DASH = re.compile(r"\s*[\u2014\u2015]\s*")


def cleaned(text: str) -> str:
    """A text without markup, in plain signs, with one space between words.

    >>> cleaned("**Answer** \N{EM DASH} $\\\\frac{1}{2}$")
    'Answer : 1/2'
    """
    text = normal(_LONG_DASH.sub(" : ", text))
    for sign, pattern, plain in _CLEANED:
        if sign in text:
            text = pattern.sub(plain, text)
    return " ".join(text.split())


_MARK = r"\s*(?:[-=]>|[,:!=≈→⇒]|-(?=\s))?\s*"
_WORD = rf"(?:{_any('words')}(?:'s)?(?![\w'])|{_any('words_without_space')}){_MARK}"
_QUESTION = r"(?:is|are|was|were)\b"
_BEFORE = re.compile(rf"(?!{_QUESTION})(?:{_WORD})*(?:(?:[-=]>|[:=≈→⇒])\s*)?", re.IGNORECASE)
_NAME = re.compile(r"[^\W\d_](?:_\{?\w{1,9}\}?)?(?:\([^()]{0,30}\))?\s*(?:[=≈]|\bis\s)\s*")
_BEHIND = re.compile(rf"(?:\s+{_any('words', 'words_behind')}|\s*{_any('endings')})+", re.IGNORECASE)


def _values(text: str, *, named: bool = False) -> Iterator[str]:
    """What may be the value of a text: all of it, then without the words before and behind it.

    `12!` is a product, `It's 12!` a sentence. `named`: whether it may have a name, `x = 12`.
    """
    text = cleaned(text).strip("'")
    if len(text) > LONGEST:
        return
    yield text.rstrip(".。 ")
    before = _BEFORE.match(text)
    rest = text if before is None else text[before.end() :]
    if named and (name := _NAME.match(rest)):
        rest = rest[name.end() :]
    is_said = rest != text
    ended = rest.rstrip("!.。 ")
    behind = next((found for found in _BEHIND.finditer(ended) if found.end() == len(ended)), None)
    if behind:
        yield ended[: behind.start()].strip(" ,")
    elif is_said:
        yield ended if text[: len(text) - len(rest)].rstrip()[-1:].isalpha() else rest.rstrip(".。 ")


# --- numbers ---------------------------------------------------------------------------------------------------------

Unit = tuple[str, Decimal]
"""What a unit is of, with its power, and how much of it: cm^2 is ("m^2", 0.0001)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number as an answer states it."""

    value: Decimal
    is_percent: bool = False
    """7% is the value 7."""
    unit: Unit | None = None

    def in_unit_of(self, other: Number) -> Decimal | None:
        """The value in another number's unit; None where it cannot be told in it. Without a unit it is the value."""
        if (self.is_percent and other.unit) or (self.unit and other.is_percent):
            return None
        if self.unit is None or other.unit is None:
            return self.value
        return self.value * self.unit[1] / other.unit[1] if self.unit[0] == other.unit[0] else None


def number_of(text: str, *, holds: bool = True) -> Number | None:
    """The number that a text is, with what may stand around it; None for any other text.

    An equation must hold, or with `holds=False` be one between an expression and a number behind it.

    >>> number_of("The answer is 12 km."), number_of("3 * 4 = 12").value
    (Number(value=Decimal('12'), is_percent=False, unit=('m', Decimal('1000.0'))), Decimal('12'))
    >>> [number_of(text) for text in ("12?", "12, 12", "not 12", "twice 12", "12!", "12 (wrong)")]
    [None, None, None, None, None, None]
    """
    found = (_number(value) or _chain(value, holds=holds) for value in _values(text, named=True))
    return next((number for number in found if number is not None), None)


_NUMBER = re.compile(
    rf"""
    \(?(?P<sign>[-+]|{_any("sign_words")}\s)?\s?(?:(?P<currency>{_any("currencies")})\s?(?P<sign_behind>-)?)?
    (?:
        (?:(?P<whole>\d+)\s)?(?P<above>\d+(?:\.\d+)?)\s?/\s?(?P<below>\d+(?:\.\d+)?)
      | 10\s?\^\s?(?P<ten>[-+]?\d{{1,4}})
      | (?P<digits>[1-9]\d{{0,2}}(?:[ ]\d{{3}}){{1,8}}(?![ ]?\d)(?:[.,]\d{{1,60}})?|{DIGITS})
    )
    (?:\s(?P<scale>{"|".join(WRITTEN["scales"])})\b)?
    (?P<percent>\s?{_any("percent")})?
    (?:\s?(?P<unit>[^\d\s)].*?))?(?P<closed>\))?
    """,
    re.VERBOSE | re.IGNORECASE,
)


def _number(text: str) -> Number | None:
    """A sign, digits, and what belongs to them, a unit among it."""
    found = _NUMBER.fullmatch(text)
    if found is None or (text[:1] == "(") != (found["closed"] is not None):
        return None
    units = [unit_of(written) for written in (found["currency"], found["unit"]) if written]
    if None in units or len(set(units)) > 1:
        return None
    try:
        value = _value(found)
    except ArithmeticError:  # an exponent that Decimal does not hold, a fraction over zero
        value = Decimal("nan")
    return Number(value=value, is_percent=found["percent"] is not None, unit=units[0] if units else None)


def _value(found: re.Match[str]) -> Decimal:
    if found["above"]:
        value = Decimal(found["whole"] or 0) + Decimal(found["above"]) / Decimal(found["below"])
    else:
        value = Decimal(f"1e{found['ten']}" if found["ten"] else plain_number(found["digits"]))
    if found["scale"]:
        value *= WRITTEN["scales"][found["scale"].lower()]
    signs = [found["sign"] or "", found["sign_behind"] or ""]
    return -value if any(sign not in ("", "+") for sign in signs) else value


def _chain(text: str, *, holds: bool) -> Number | None:
    """The number of equal sides, `3 * 4 = 12`: numbers, and sums and products of numbers."""
    sides = [side.strip() for side in re.split("==?", text)]
    if not 2 <= len(sides) <= 9:
        return None
    numbers = [_number(side) for side in sides]
    if not holds:
        return numbers[-1]
    values = {
        _computed(side) if number is None else _exact(number) for side, number in zip(sides, numbers, strict=True)
    }
    known = [number for number in numbers if number is not None]
    return known[-1] if known and len(values) == 1 and None not in values else None


def _exact(number: Number) -> Fraction | None:
    """A number that may be computed with; None for one of more digits than anybody writes."""
    return Fraction(number.value) if number.value.is_finite() and abs(number.value.adjusted()) < 400 else None


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _computed(text: str) -> Fraction | None:
    """The value of an expression of `+ - * /`, numbers and brackets."""

    def evaluated(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(str(node.value))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -evaluated(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](evaluated(node.left), evaluated(node.right))
        raise ValueError(ast.dump(node))

    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))|[$€£¥₹]", "", text).replace("x", "*")
    if not re.fullmatch(r"[-+*/(). \d]{1,100}", text):
        return None
    try:
        return evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


_MEASURES = {name: (base, Decimal(str(much))) for name, (base, much) in WRITTEN["measures"].items()}
_WORDS = "|".join(name for name in _MEASURES if name.isalpha() and len(name) > 2)
_NOUN = rf"(?:{_any('units')}|(?i:{_any('plurals')}|[a-z]{{3,20}}s|{_WORDS}))"
_UNIT = re.compile(
    rf"(?P<size>(?i:{_any('size_words')})\.?\s+)?(?P<noun>{_NOUN})(?![^\W\d_])(?:\s?\^\s?(?P<power>-?[1-9]))?"
    rf"(?:\s?(?:/|(?i:per|an?)\s)\s?(?P<per>{_NOUN}|[a-z]{{3,12}})(?![^\W\d_])(?:\s?\^\s?(?P<power_per>[1-9]))?)?\.?"
)
_POWERS = {"square": 2, "sq": 2, "cubic": 3}


@functools.lru_cache(maxsize=4096)
def unit_of(text: str) -> Unit | None:
    """The unit that a text is: a sign, a word for a measure, or a plural in -s; None where it is none.

    >>> unit_of("km"), unit_of("square meters"), unit_of("apples")
    (('m', Decimal('1000.0')), ('m^2', Decimal('1')), ('apple', Decimal('1')))
    >>> unit_of("wrong"), unit_of("minus"), unit_of("thousands")
    (None, None, None)
    """
    found = _UNIT.fullmatch(text.strip())
    if found is None or found["noun"].lower() in words("no_units"):
        return None
    size = (found["size"] or "").strip(" .").lower()
    name, much = _measure(found["noun"], _POWERS.get(size) or int(found["power"] or 1))
    if not found["per"]:
        return name, much
    name_per, much_per = _measure(found["per"], int(found["power_per"] or 1))
    return f"{name}/{name_per}", much / much_per


def _measure(noun: str, power: int) -> Unit:
    """What a word stands for in a power, and how much of it; itself where it is no measure."""
    plain = noun.lower()
    singular = plain.removesuffix("s")
    known = (_MEASURES[name] for name in (noun, plain, singular, plain.removesuffix("es")) if name in _MEASURES)
    name, much = next(known, (singular, Decimal(1)))
    return (name, much) if power == 1 else (f"{name}^{power}", much**power)


# --- choices ---------------------------------------------------------------------------------------------------------

Options = tuple[tuple[str, str], ...]
"""Labels with the texts that they stand for."""


def choice_of(text: str, options: Options) -> str | None:
    """The label of the choice that a text is, by its label, its text, or both where they belong together.

    >>> cities = (("A", "Paris"), ("B", "Rome"))
    >>> [choice_of(text, cities) for text in ("(b)", "Only B fits.", "B. Rome", "rome", "Rome (B)")]
    ['B', 'B', 'B', 'B', 'B']
    >>> [choice_of(text, cities) for text in ("B?", "A, B", "B. Paris", "not B", "The second-best answer is B.")]
    [None, None, None, None, None]
    """
    by_text = labels_by_text(options)
    by_label = {label.casefold(): label for label, _ in options}
    for value in _values(text):
        plain = _plain(value)
        label = by_text.get(plain) or _labelled(plain, by_label, by_text)
        if label is not None:
            return label
    return None


_LABELLED = re.compile(
    r"(?:(?:the\s+)?(?:option|choice|answer|letter)\s+)?(?:[(\[](\w+)[)\]]|(\w+))(?:\s*[).:,=]+|\s*-+(?=\s*\w))?(?:\s*(?<![\w])(\S.*))?",
    re.DOTALL,
)
_LABEL_LAST = re.compile(r"(\S.*?)\s*[(\[](\w+)[)\]]", re.DOTALL)


def _plain(text: str) -> str:
    return text.strip("'").rstrip(".! ").casefold()


def _labelled(text: str, by_label: dict[str, str], by_text: dict[str, str]) -> str | None:
    """The label at the beginning of a text, or in brackets at its end, the rest being its own text or nothing."""
    first = _LABELLED.fullmatch(text)
    if first and (label := by_label.get(first[1] or first[2])):
        own = first[3] and re.sub(r"^[(\[](.*)[)\]]$", r"\1", first[3])
        return label if not own or label in (by_text.get(_plain(first[3])), by_text.get(_plain(own))) else None
    last = _LABEL_LAST.fullmatch(text)
    if last and (label := by_label.get(last[2])):
        return label if by_text.get(_plain(last[1])) == label else None
    return None


@functools.lru_cache(maxsize=4096)
def labels_by_text(options: Options) -> dict[str, str]:
    """The labels of choices by their texts, cleaned and in small letters; none where two have the same."""
    labels = {_plain(cleaned(text)): label for label, text in options if text.strip()}
    return labels if len(labels) == sum(bool(text.strip()) for _, text in options) else {}


def options_in(prompt: Any) -> Options | None:
    """The choices that the last turn of a prompt lists, `A) Paris` and so on, from A on; None where there are none.

    >>> options_in("Which city lies in Italy? A) Paris B) Rome")
    (('A', 'Paris'), ('B', 'Rome'))
    """
    if not prompt:
        return _options_in("")
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
    return _options_in(text[-4000:])


@functools.lru_cache(maxsize=4096)
def _options_in(text: str) -> Options | None:
    marks = list(re.finditer(r"(?:^|(?<=\s))[(\[]?([A-Z])[).:\]]{1,2}\s+", text))
    start = next((place for place in range(len(marks) - 1, -1, -1) if marks[place][1] == "A"), len(marks))
    found: list[tuple[str, str]] = []
    for place, mark in enumerate(marks[start:], start):
        if mark[1] != chr(ord("A") + len(found)):
            break
        end = marks[place + 1].start() if place + 1 < len(marks) else len(text)
        found.append((mark[1], text[mark.end() : end].split("\n")[0].strip(" ,;")))
    return tuple(found) if len(found) > 1 else None


def alone(text: str, options: Sequence[tuple[str, str]]) -> str | None:
    """The choice whose label or text is a whole text."""
    plain = _plain(cleaned(text))
    label = next((label for label, _ in options if label.casefold() == plain), None)
    return label or labels_by_text(tuple(options)).get(plain or "\0")


# --- words -----------------------------------------------------------------------------------------------------------

STOP_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(text.split()) for language, text in WRITTEN["stop_words"].items()
}
"""The commonest words of languages in Latin script, which say little."""
_NO_SPACES = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f"
"""Kana, Han and Thai, in the brackets of a regular expression."""
_DIGITS = r"(?<![^\W_])-?[0-9]+(?:[.,][0-9]+)*(?![^\W_])"
_ONE_WORD = re.compile(rf"{_DIGITS}|[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+(?:['\u2019][^\W\d_]+)?")


def words_of(text: str) -> list[str]:
    """Lower-cased words in their order, compatibility forms (full-width letters, ligatures) made plain.

    A number is one word, its sign and its decimals included.

    >>> words_of("Don't panic, it is 42!"), words_of("\\u6771\\u4eac 2")
    (["don't", 'panic', 'it', 'is', '42'], ['東', '京', '2'])
    >>> words_of("from -3.5 to 1,000, in 1990-95")
    ['from', '-3.5', 'to', '1,000', 'in', '1990', '95']
    """
    return _ONE_WORD.findall(unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-").casefold())
