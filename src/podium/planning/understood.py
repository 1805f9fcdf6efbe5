"""What a proposal took a table for, in lines that a user can check at a glance; and tables that are no such task."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from podium.data.columns import Columns
from podium.data.extract import last_number, numbers
from podium.planning.answer_columns import Chosen, by_names
from podium.records import last_user_turn

SHOWN = 60
"""Characters of an example."""
_CASE = re.compile(
    r"case[- ]?insensitive|(ignor\w+|regardless of|no matter) (the )?(upper|lower)?[- ]?(case|capital)|"
    r"(case|capitals|capitali[sz]ation) (do(es)? not|don't|doesn't) (count|matter)"
)
_WRITES = re.compile(r"\W*(write|compose|make|describe|generate|tell|schreib|erzähl|écri|rédige|escrib|redacta)")
_UNITS = re.compile(
    r"word|letter|character|sentence|line|syllable|wörter|wort|zeichen|satz|sätze|mots?\b|palabra|frase"
)
_EXACTLY = re.compile(
    r"exactly|asked for|as many|number of|how many|at most|at least|genau|anzahl|exact|nombre de|número"
)


def lines(
    columns: Columns, chosen: Chosen, rows: Sequence[Mapping[str, Any]], about: str, right: str
) -> tuple[str, ...]:
    """Question, answer with its kind, and what is called right, each with an example; and columns that are not used."""
    asked = next((last_user_turn(text) for row in rows if (text := columns.question(row))), "")
    answers = [each for row in rows if (each := columns(row).get("answer")) not in (None, "")]
    told = answers[0] if answers else None
    made = [f"question: {columns.prompt or '{prompt}'}, such as `{shown(asked)}`"]
    if told is not None:
        source = "the last turn" if columns.ends_with_answer else columns.answer or "{answer}"
        if any(isinstance(each, (list, tuple)) and len(each) > 1 for each in answers):
            source = f"any one of the items of {source}"
        made.append(f"answer: {shown(source)}, {about}, such as `{shown(told[0] if isinstance(told, list) else told)}`")
    made.append(f"right: {right}")
    if chosen.unused:
        made.append(f"not used: {', '.join(f'`{name}`' for name in chosen.unused)}")
    # lines that any terminal and any YAML comment can hold
    return tuple("".join(each if each.isprintable() else "?" for each in " ".join(line.split())) for line in made)


def shown(value: Any) -> str:
    r"""A value in one short line.

    >>> shown("a\nb"), len(shown("x" * 99)), shown({"a": True})
    ('a b', 60, '{"a": true}')
    """
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, Mapping) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def case_is_free(answers: Sequence[Any], shape: str, sentence: str) -> bool:
    """Whether capitals do not decide: the same label is written in several ways, or the sentence says so.

    >>> case_is_free(["Yes", "yes", "no"], "label", ""), case_is_free(["US", "us"], "text", "")
    (True, False)
    >>> case_is_free(["Rome"], "text", "Name the capital; case does not matter.")
    True
    """
    spelled = {str(answer).strip() for answer in answers}
    differ = shape == "label" and len({text.casefold() for text in spelled}) < len(spelled)
    return differ or _CASE.search(sentence.casefold()) is not None


def is_a_setting(columns: Columns, rows: Sequence[Mapping[str, Any]], sentence: str) -> bool:
    """Whether a number is not the answer but a setting of the task: a text of so many words, as the question says.

    True where the sentence asks for a text of a certain length and the number stands in nearly every question.
    """
    words = sentence.casefold()
    if not (_WRITES.match(words) and _UNITS.search(words) and _EXACTLY.search(words)):
        return False
    pairs = [(last_user_turn(columns.question(row)), last_number(str(columns(row).get("answer")))) for row in rows]
    return bool(pairs) and sum(number in numbers(asked) for asked, number in pairs) >= 0.9 * len(pairs)


def unnamed_columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]], sentence: str = "") -> str:
    """The name of a column that looks like a row's value, as where a file has no header; empty where none does.

    A number above numbers, a question above questions, a name that is a value of its own column twice; one of two words
    above words that begin alike as those of most rows do, or of which neither is usual or in the sentence of the task.

    >>> unnamed_columns(["What is 1 + 1?", "2"], [{"What is 1 + 1?": "What is 3 + 4?", "2": "7"}] * 9)
    'What is 1 + 1?'
    >>> unnamed_columns(["noun", "plural"], [{"noun": "cat", "plural": "cats"}] * 9)
    ''
    >>> unnamed_columns(["dog", "dogs"], [{"dog": "cat", "dogs": "cats"}] * 9)
    'dog'
    >>> unnamed_columns(["dog", "chien"], [{"dog": "cat", "chien": "chat"}] * 9, "Translate into French.")
    'dog'
    """
    if len(names) == 2 and rows and all(_WORD.fullmatch(name) for name in names):
        pairs = [[str(row.get(name)).strip() for name in names] for row in rows]
        if sum(all(map(_WORD.fullmatch, pair)) for pair in pairs) >= 0.9 * len(pairs):
            same_form = _begin_alike(names) and sum(map(_begin_alike, pairs)) >= 0.6 * len(pairs)
            if same_form or (
                sentence and not any(by_names(names)) and not any(n.casefold() in sentence.casefold() for n in names)
            ):
                return names[0]
    for name in names if list(names) != list(map(str, range(len(names)))) else ():  # which pandas writes
        values = [str(row[name]).strip() for row in rows if row.get(name) is not None]
        alike = sum(_form(value) == _form(name) for value in values) if _form(name) else 0
        if values.count(name) >= 2 or (len(values) > 2 and alike >= 0.9 * len(values)):
            return name
    return ""


_WORD = re.compile(r"[^\W\d_]+")


def _begin_alike(words: Sequence[str]) -> bool:
    """Whether six in ten letters of the shorter one, and three or more, are the same."""
    length = max(3, round(0.6 * min(map(len, words))))
    return len({word.casefold()[:length] for word in words}) == 1 and min(map(len, words)) >= 3


_FORMS = (
    ("number", re.compile(r"[-+$€£]?\d[\d.,]*( ?[%€$£])?")),
    ("date", re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}")),
    ("question", re.compile(r".{8,}[?\uff1f]")),
    ("sentence", re.compile(r"\S+ \S+ \S+.*[.!。]")),
    ("object", re.compile(r"[\[{].*[\]}]")),
)


def _form(text: str) -> str:
    """The form of a text that names of columns seldom have; empty for words.

    >>> [_form(each) for each in ("13", "How old is she?", "2020-01-02", "noun", "price in $")]
    ['number', 'question', 'date', '', '']
    """
    return next((form for form, pattern in _FORMS if pattern.fullmatch(text.strip())), "")
