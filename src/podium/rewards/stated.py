r"""What a text states as its answer: one reading of running text for numbers and choices (docs/graders.md).

A text is sentences, a sentence is clauses, and a clause states a value where it is in one of the grammar's forms and
denies nothing. The last value of the strongest mark (`####` and `\boxed`, an answer word, none) is the answer;
several values in its place are none.

A clause is read as the string of its tokens' kinds, so that a form is a regular expression:

    n value   o other quantity   p operator   v fraction stroke   = equality   c copula, colon or arrow
    k answer word   K `####`   d denial   h condition, bound or doubt   a alternative   x beginning of a remark
    z correction   f reference ("step")   s "of"   t "to"   b "between"   l comma in brackets   i word before a choice
    y "correct"   w other word   ( ) brackets   , end of a clause   ; and ? ends of a sentence
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from podium.data.extract import DIGITS, normal, plain_number

Token = tuple[str, Any]
"""A kind and, of values and operators, what it stands for."""

SEVERAL = object()
"""In place of a value: a list, a range or alternatives."""

WRITTEN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""Words, signs and markup: a file that needs no program to be read and added to."""
_KIND_OF = {word: kind for kind, words in WRITTEN["words"].items() for word in words.split()}
UNITS = WRITTEN["units"].split()


def _tokens(kind_of_answer: str, **parts: str) -> re.Pattern[str]:
    """The tokens of one kind of answer and of all; `PART` in a pattern of the file stands for a part."""
    pattern = f"{WRITTEN[kind_of_answer]} | {WRITTEN['tokens']}"
    return re.compile(re.sub("|".join(parts), lambda found: parts[found[0]], pattern), re.VERBOSE)


_CLEANED = [(sign, re.compile(pattern, re.MULTILINE), plain) for sign, pattern, plain in WRITTEN["cleaned"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """How one kind of answer is written."""

    pattern: re.Pattern[str]
    """The tokens of a text; a group's name is the token's kind."""
    token: Callable[[re.Match[str]], Token]
    """Of a token with a value."""
    form: Callable[[list[Token], str], Any]
    """The value of a clause and its kinds, `SEVERAL`, or None."""


def stated(text: str, grammar: Grammar) -> Any:
    """The value that a text states as its answer; None where it states none, or several.

    >>> [stated(text, NUMBERS) for text in ("It is not 13, it is 12.", "11 or 12", "3 * 4 = 12 (in 2 steps)")]
    [(Decimal('12'), False), None, (Decimal('12'), False)]
    """
    reading = _Reading(grammar=grammar)
    try:
        for sentence, is_question in _sentences(cleaned(text), grammar):
            reading.read(sentence, is_question=is_question)
    except ArithmeticError:  # of powers that Decimal does not hold
        return None
    value = reading.found[max(reading.found)] if reading.found else None
    return None if value is SEVERAL else value


def cleaned(text: str) -> str:
    """A text without thoughts and markup, in plain signs."""
    text = normal(text)
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    for sign, pattern, plain in _CLEANED:
        if sign in text:
            text = pattern.sub(plain, text)
    return text.strip()


def _sentences(text: str, grammar: Grammar) -> Iterator[tuple[list[list[Token]], bool]]:
    """The clauses of each sentence, and whether it is a question."""
    clauses, depth, is_over = [list[Token]()], 0, False
    for match in grammar.pattern.finditer(text):
        if match.lastgroup is None:  # blanks
            continue
        kind, value = _token(match, grammar)
        depth += (kind == "open") - (kind == "close" and depth > 0)
        if is_over and kind != "n":
            yield clauses, False
            clauses, depth = [[]], 0
        # A label with a point ends a sentence, unless its text follows.
        is_over = kind == "m" and match[0][-1] == "." and bool(clauses[-1])
        is_between = kind == "and" and any(each == "b" for each, _ in clauses[-1])  # between 10 and 12
        if kind in (",", "and", "stop") and not is_between and not (depth and value == ","):
            clauses.append([])
        elif kind in ("end", "ask"):
            yield clauses, kind == "ask"
            clauses, depth = [[]], 0
        else:
            clauses[-1].append((_SHORT.get(kind, kind), value))
    yield clauses, False


def _token(match: re.Match[str], grammar: Grammar) -> Token:
    kind, value = str(match.lastgroup).rstrip("_"), match[0]
    if kind == "w":
        return _word(value)
    return grammar.token(match) if kind in ("n", "m") else (kind, value)


_SHORT = {"e": "=", "stop": "l", "open": "(", "close": ")", "and": "t"}


@functools.lru_cache(maxsize=1 << 14)
def _word(word: str) -> Token:
    plain = word.casefold()
    kind = kind_of(plain)
    return kind, "-" if kind == "p" and plain in WRITTEN["sign_words"] else plain


def kind_of(word: str) -> str:
    """The kind of a word in small letters.

    >>> kind_of("isn't"), kind_of("oder"), kind_of("apples")
    ('d', 'a', 'w')
    """
    return "d" if word.endswith("n't") or word.startswith("n'") else _KIND_OF.get(word, "w")


@dataclass(slots=True, kw_only=True)
class _Reading:
    """What a text has stated so far."""

    grammar: Grammar
    found: dict[int, Any] = field(default_factory=dict)
    """The last value of each strength: 3 with `####`, 2 with an answer word, 1 without."""
    last: tuple[Any, int, bool] | None = None
    """Value and strength of the clause before, and whether it is a value alone."""

    def read(self, clauses: Sequence[list[Token]], *, is_question: bool) -> None:
        """The clauses of a sentence. A remark (`because`) behind a value goes on to the end of the sentence."""
        goes_on = False
        for clause in clauses if not is_question else ():
            clause, kinds = _without_remarks(clause)
            if "z" in kinds:
                self.found.clear()
                self.last, goes_on = None, False
                kinds = kinds[kinds.rindex("z") + 1 :].lstrip("c")
                clause = clause[len(clause) - len(kinds) :]
            cut = kinds.find("x")
            kinds = kinds if cut < 0 else kinds[:cut]
            self._clause(clause[: len(kinds)], kinds, goes_on=goes_on)
            goes_on |= self.last is not None
            if cut >= 0 and goes_on:
                break

    def _clause(self, clause: list[Token], kinds: str, *, goes_on: bool) -> None:
        values = [value for kind, value in clause if kind in "nm"]
        before, self.last = self.last, None
        if "d" in kinds:
            denies_all = not values and re.search(r".d[iy]?$", kinds)
            self.found = {k: v for k, v in self.found.items() if not denies_all and v not in values}
        elif values and "h" not in kinds and len(kinds) <= _LONGEST:
            value = self._agreed(clause, kinds, before) if "a" in kinds else self.grammar.form(clause, kinds)
            strength = 3 if "K" in kinds else 2 if "k" in kinds else 1
            is_bare = re.fullmatch(r"p?[nm]+", kinds) is not None
            if is_bare and before and before[0] != value and (goes_on or before[2]):
                value, strength = SEVERAL, before[1]
            if value is not None:
                self.found[strength] = value
                self.last = value, strength, is_bare

    def _agreed(self, clause: list[Token], kinds: str, before: tuple[Any, int, bool] | None) -> Any:
        """The value of all alternatives, where it is the same one: `1/2 or 0.5`."""
        parts = [found.span() for found in re.finditer("[^a]+", kinds)]
        values = [self.grammar.form(clause[start:end], kinds[start:end]) for start, end in parts]
        values += [before and before[0]] if kinds.startswith("a") else []
        is_one = len(values) > 1 and values[0] is not None and all(value == values[0] for value in values)
        return values[0] if is_one else SEVERAL


_LONGEST = 500
"""Tokens of a clause; a longer one states nothing."""


def _without_remarks(clause: list[Token]) -> tuple[list[Token], str]:
    """A clause without what denies or doubts something in brackets beside a value, and its kinds."""
    kinds = "".join(kind for kind, _ in clause)
    found = re.search(r"\([^()]*[dxha][^()]*\)", kinds) if "(" in kinds and len(kinds) <= _LONGEST else None
    if found and re.search("[nm]", kinds[: found.start()] + kinds[found.end() :]):
        return _without_remarks(clause[: found.start()] + clause[found.end() :])
    return clause, kinds


# --- numbers ---------------------------------------------------------------------------------------------------------

Number = tuple[Decimal, bool]
"""A number, and whether it is a percentage: 7% is (7, True)."""


def _number_token(match: re.Match[str]) -> Token:
    """Of a number with its sign, power of ten, scale and percent sign; NaN for an exponent that is beyond all use."""
    try:
        digits = f"1e{match['ten']}" if match["ten"] else plain_number(match["digits"])
        number = Decimal((match["sign"] or "") + digits)
        number *= WRITTEN["scales"][match["scale"].lower()] if match["scale"] else 1
    except ArithmeticError:
        number = Decimal("nan")
    return "n", (number, match["percent"] is not None)


def _number_of(clause: list[Token], kinds: str) -> Any:
    """The number of the last side of a clause that has one, of `12 = 5 + 7` that of the first."""
    if "(" in kinds or ")" in kinds:
        clause = _unwrapped(clause, kinds)
        kinds = "".join(kind for kind, _ in clause)
    while (place := kinds.find("fn")) >= 0:  # a reference
        clause, kinds = clause[:place] + clause[place + 2 :], kinds[:place] + kinds[place + 2 :]
    sides = [found.span() for found in re.finditer("[^c=K]+", kinds) if re.search("[no]", found[0])]
    if not sides:
        return None
    start, end = sides[-1]
    is_marked = re.search("[ck=K]", kinds[:start]) is not None
    value = _number_of_side(clause[start:end], kinds[start:end], is_marked=is_marked)
    if value is None and re.fullmatch("[^n]*n=.*", kinds):
        return next(value for kind, value in clause if kind == "n")
    return value


def _unwrapped(clause: list[Token], kinds: str) -> list[Token]:
    """A clause without brackets: a number in them stays, a list is one thing, all else goes if a number is outside."""
    while found := re.search(r"\(([^()]*)\)", kinds):
        start, end = found.span()
        inside = clause[start + 1 : end - 1]
        if re.search("[no]l+p?[no]", found[1]):
            inside = [("o", None)]
        elif not re.fullmatch("p?n", found[1]) and "n" in kinds[:start] + kinds[end:]:
            inside = []
        clause = clause[:start] + inside + clause[end:]
        kinds = "".join(kind for kind, _ in clause)
    return [token for token in clause if token[0] not in "()"]


def _number_of_side(side: list[Token], kinds: str, *, is_marked: bool) -> Any:
    """The only number, or the first behind a mark, the last without; None of an expression."""
    if re.match("pn", kinds) and side[0][1] == "-":
        number, is_percent = side[1][1]
        side, kinds = [("n", (-number, is_percent)), *side[2:]], kinds[1:]
    if found := re.search("(?<![npv])(n?)nvn(?![npv])", kinds):
        start, end = found.span()
        whole = side[start][1][0] if found[1] else Decimal(0)
        above, below = side[end - 3][1][0], side[end - 1][1][0]
        value = (whole + (above / below).copy_sign(whole or above / below) if below else Decimal("nan")), False
        side, kinds = [*side[:start], ("n", value), *side[end:]], f"{kinds[:start]}n{kinds[end:]}"
    if re.search("[pv][no]|[no][pv]", kinds):
        return None
    if re.search("n[stl]+n|nn", kinds):
        return SEVERAL
    kind, value = [token for token in side if token[0] in "no"][0 if is_marked else -1]
    return value if kind == "n" else None


def only_number(text: str) -> Number | None:
    """The number that a text is, and nothing else.

    >>> only_number(r"\\frac{1}{2}"), only_number("1 000"), only_number("7 apples")
    ((Decimal('0.5'), False), (Decimal('1000'), False), None)
    """
    clauses = [clause for sentence, _ in _sentences(cleaned(text), NUMBERS) for clause in sentence if clause]
    kinds = "".join(kind for kind, _ in clauses[0]) if len(clauses) == 1 else ""
    return _number_of_side(clauses[0], kinds, is_marked=False) if re.fullmatch("p?n?nvn|p?n", kinds) else None


NUMBERS = Grammar(
    pattern=_tokens("numbers", DIGITS=DIGITS, SCALES="|".join(WRITTEN["scales"]), UNITS="|".join(UNITS)),
    token=_number_token,
    form=_number_of,
)


# --- choices ---------------------------------------------------------------------------------------------------------

_CHOICE = re.compile(r"(?:.*[ck=K])?[iyk]*(m.*|[nm]+[iy]*)|[iyk]*([nm]+)c?i*[yk].*")


@functools.lru_cache(maxsize=4096)
def labels_by_text(options: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The labels of choices by their texts, cleaned and in small letters; none where two have the same."""
    labels = {cleaned(text).rstrip(".").casefold(): label for label, text in options}
    return labels if len(labels) == len(options) else {}


@functools.lru_cache(maxsize=4096)
def choice_grammar(options: tuple[tuple[str, str], ...]) -> Grammar:
    """The grammar of choices by their labels (upper case) and texts; a text that two choices have is none."""
    label_of = labels_by_text(options)
    texts = sorted(filter(None, label_of), key=len, reverse=True)
    label = "|".join(re.escape(label) for label, _ in options)
    text = "|".join(rf"(?<!\w){re.escape(text)}(?!\w)" for text in texts)

    def token(match: re.Match[str]) -> Token:
        word = match[0].strip("()[].:").upper()
        after = _NEXT_WORD.match(match.string, match.end()) if word == "A" and match.lastgroup == "n" else None
        if after and _word(after[1])[0] in "wki":  # an article
            return "w", match[0]
        return match.lastgroup or "", label_of.get(match[0].casefold(), word)

    return Grammar(pattern=_tokens("choices", LABEL=label, TEXT=text or r"(?!)"), token=token, form=_choice_of)


_NEXT_WORD = re.compile(r"\s+([^\W\d_A-Z]+)")


def _choice_of(clause: list[Token], kinds: str) -> Any:
    """The only choice in its place: alone, behind an answer word or copula, with its mark, or said to be correct."""
    clause = [token for token in clause if token[0] not in "()"]
    form = _CHOICE.fullmatch("".join(kind for kind, _ in clause))
    if form is None:
        return None
    start, end = form.span(form.lastindex or 0)
    values = {value for kind, value in clause[start:end] if kind in "nm"}
    return values.pop() if len(values) == 1 else SEVERAL
