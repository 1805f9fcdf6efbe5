"""The columns with question and answer of a table: those that the user names, usual names, else from left to right.

No column is chosen by what it holds. Two columns of which no name tells which is which are read from left to right, and
the flags for the other reading are returned; of more columns the user has to name them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from podium.data.columns import (
    ALSO_ANSWERS,
    ALSO_QUESTIONS,
    ANSWERS,
    QUESTIONS,
    TESTS,
    ends_with_answer,
    named,
    names_or_none,
)
from podium.data.templates import CHOICES, column_of, field_of, labelled, parse
from podium.errors import ConfigError
from podium.errors.texts import did_you_mean

QUESTION_NAMES = (*QUESTIONS, *ALSO_QUESTIONS, "problem_statement")
ANSWER_NAMES = (
    *("correct_answer", "expected_answer", "correct_option"),
    *(*ANSWERS, *ALSO_ANSWERS),
    *("answerkey", "answer_key", "final_answer", "gold_label", "reward_model"),
)
"""Names of questions and of answers in published datasets, the likeliest first."""
PAIRS = (("q", "a"), ("source", "target"), ("src", "tgt"))
"""Names that say something only together."""
BESIDE_QUESTION = frozenset(
    {
        *("context", "passage", "paragraph", "background", "premise", "hypothesis", "input", "options", "text"),
        *("document", "doc", "article", "story", "evidence", "facts"),
    }
)
"""Columns that belong to the question beside them; so do choices that are called `A`, `option_b` or `ending1`."""
_CHOICE = re.compile(r"(option|choice|opt)?[ _]?[a-f]|(option|choice|opt|ending|sol)[ _]?\d")
OF_REWARDS = frozenset({*TESTS, CHOICES, "keywords", "budget"})
"""Columns of rewards of the library, which are neither question nor answer."""
NEVER = frozenset(
    {
        *("id", "index", "idx", "ind", "uuid", "row", "nr", "no", "unnamed: 0", "split"),
        *("question_id", "prompt_id", "task_id", "source_id", "annotator", "annotator_id", "worker_id", "rejected"),
        *("starter_code", "test_setup_code", "test_imports", "challenge_test_list", "inferences", "context_messages"),
    }
)
"""Columns that are never question or answer: numbers of rows, parts of programs."""
NOTES = (
    frozenset(
        {
            *("note", "notes", "remark", "remarks", "source", "url", "link", "author"),
            *("created", "created_at", "updated", "updated_at", "timestamp", "lang", "language"),
        }
    ),
    frozenset({"date", "topic", "tag", "tags", "level", "difficulty"}),
)
"""Columns that are neither as long as two others are left without them; the surest first."""
JSON_PLACES: Mapping[str, str] = {
    "ground_truth": "json:ground_truth",
    "answer_start": "json:text",
    "aliases": "json:aliases",
}
"""The `answer_from` of answers that are objects, by a field that tells their form: verl's, SQuAD's, TriviaQA's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenColumns:
    """Templates of question and answer; None where the rows have `prompt` or `answer` already."""

    prompt: str | None
    answer: str | None
    question_column: str = ""
    answer_column: str = ""
    """The first columns of both, as they were found."""
    unused: tuple[str, ...] = ()
    """Columns that are in neither; rewards still get them."""
    other: str = ""
    """Flags for the other reading, where the order alone decided."""

    @property
    def keys(self) -> dict[str, str]:
        """The keys of a recipe."""
        templates = {"prompt": self.prompt, "answer": self.answer}
        return {key: template for key, template in templates.items() if template is not None}


def chosen_columns(
    names: Sequence[str], rows: Sequence[Mapping[str, Any]], prompt: str | None = None, answer: str | None = None
) -> ChosenColumns:
    """Templates for the columns of a table. `prompt` and `answer` are columns or templates that the user names.

    Raises `ConfigError`, with the flags to type, for a column that is not there, and where no name tells the question.

    >>> rows = [{"noun": f"cat {n}", "plural": f"cats {n}"} for n in range(9)]
    >>> chosen_columns(["noun", "plural"], rows).keys
    {'prompt': '{noun}', 'answer': '{plural}'}
    >>> chosen_columns(["noun", "plural"], rows).other
    '--prompt "{plural}" --answer "{noun}"'
    >>> chosen_columns(["question", "answer"], [{"question": "1+1", "answer": "2"}]).keys
    {'prompt': '{question}'}
    """
    prompt = _template_of_flag(prompt, names, "--prompt")
    answer = _template_of_flag(answer, names, "--answer")
    templates = [template for template in (prompt, answer) if template is not None]
    taken = {column_of(name, names) for template in templates for name in parse(template).columns}
    free = _free([name for name in names if name not in taken], rows)
    by_order = False
    questions: Sequence[str] = ()
    answers: Sequence[str] = ()
    if prompt is None and answer is None:
        questions, answers, by_order = _reading(free, rows)
    elif prompt is None:
        question, _ = by_names(free)
        questions = _with_companions([question], free) if question else free
    elif answer is None:
        _, named_answer = by_names(free)
        answers = [named_answer] if named_answer else _only(free)
    if prompt is None and not questions:
        raise ConfigError(
            f"the columns of question and answer cannot be told; the columns are {names_or_none(names)}.",
            code="D001",
            fix=_flags_to_type(free, names),
            listed=names_or_none(names),
        )
    used = {*taken, *questions, *answers, *OF_REWARDS}
    questions = [_field(name, rows, QUESTION_NAMES) for name in questions]
    answers = [_field(name, rows, ANSWER_NAMES) for name in answers]
    other = f"{_quoted('--prompt', answers)} {_quoted('--answer', questions)}" if by_order else ""
    return ChosenColumns(
        prompt=_with_choices(_template(questions, rows, "prompt"), rows) if prompt is None else prompt,
        answer=_template(answers, rows, "answer") if answer is None else answer,
        question_column="".join(questions[:1]),
        answer_column="".join(answers[:1]),
        unused=tuple(name for name in names if name not in used),
        other=other,
    )


def by_names(free: Sequence[str]) -> tuple[str | None, str | None]:
    """The columns of question and answer by their names; None for one that no name tells.

    >>> by_names(["a", "q"]), by_names(["text", "mood"]), by_names(["x", "label"])
    (('q', 'a'), ('text', None), (None, 'label'))
    """
    for left, right in PAIRS:
        if named(free, [left]) and named(free, [right]):
            return named(free, [left]), named(free, [right])
    question = named(free, QUESTIONS)
    answer = named([name for name in free if name != question], ANSWER_NAMES)
    return question or named([name for name in free if name != answer], QUESTION_NAMES), answer


def _free(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns that may be question or answer: with a value in any row, and that no name excludes."""
    filled = [name for name in names if not rows or any(row.get(name) not in (None, "") for row in rows)]
    free = [name for name in filled if name.casefold() not in OF_REWARDS | NEVER]
    lower = {name.casefold() for name in free}
    in_pairs = set(chain.from_iterable(pair for pair in PAIRS if lower.issuperset(pair)))
    for notes in NOTES:
        others = [name for name in free if name.casefold() not in notes - in_pairs]
        if len(others) > 1:
            free = others
    return free


def _reading(free: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Sequence[str], bool]:
    """Columns of the question and of the answer, and whether their order decided; none where nothing tells them."""
    question, answer = by_names(free)
    known_answer = named(free, (*ANSWERS, *ALSO_ANSWERS)) is not None and len(free) > 1
    conversations = [name for name in free if rows and all(ends_with_answer(row.get(name)) for row in rows)]
    if len(conversations) == 1 and not known_answer:
        return conversations, (), False
    if answer and not question:
        return [name for name in free if name != answer], [answer], False
    questions = _with_companions([question] if question else [], [name for name in free if name != answer])
    if answer:
        return questions, [answer], False
    if questions:
        return questions, _only([name for name in free if name not in questions]), False
    if len(free) == 2:
        return free[:1], free[1:], True
    return _only(free), (), False


def _only(names: Sequence[str]) -> Sequence[str]:
    return names if len(names) == 1 else ()


def _with_companions(questions: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns of the question with those that belong to it, in the order of the table."""
    choices = [name for name in names if _CHOICE.fullmatch(name.casefold())]
    listed = choices if questions and len(choices) > 1 else []
    return [name for name in names if name in (*questions, *listed) or name.casefold() in BESIDE_QUESTION]


def _field(name: str, rows: Sequence[Mapping[str, Any]], usual: Sequence[str]) -> str:
    """A column; of one with objects the field that a usual name tells, else the column."""
    objects = [value for row in rows if (value := row.get(name)) is not None]
    if name == CHOICES or not all(isinstance(value, Mapping) and "role" not in value for value in objects):
        return name
    fields = list(dict.fromkeys(chain.from_iterable(objects)))
    field = None if JSON_PLACES.keys() & set(fields) else named(fields, usual)
    return f"{name}.{field}" if field else name


def _template(names: Sequence[str], rows: Sequence[Mapping[str, Any]], key: str) -> str | None:
    """The template of columns for a key; None for no column, and for one that is used as it is."""
    if not names:
        return None
    if len(names) == 1:
        is_text = not rows or isinstance(rows[0].get(key), str) or CHOICES in rows[0]
        used_as_it_is = names[0] == key and (key == "prompt" or is_text)  # the number of a choice is no text
        return None if used_as_it_is else f"{{{names[0]}}}"
    if tuple(names) == ("instruction", "input"):
        return "{instruction}\n\n{input}" if any(row.get("input") for row in rows) else "{instruction}"
    choices = [name for name in names if _CHOICE.fullmatch(name.casefold())]
    single_words = all(len(str(field_of(row, name)).split()) < 2 for row in rows for name in names)
    if single_words and len(choices) in (0, len(names)):  # an answer names a choice by what stands before it
        return " ".join(f"{{{name}}}" for name in names)
    return "\n".join(f"{name}: {{{name}}}" for name in names)


def _with_choices(template: str | None, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The template with the choices of each row behind it, unless the first question has them already."""
    first = rows[0] if rows else {}
    question = parse(template or "{prompt}")(first)
    choices = first.get(CHOICES)
    listed = isinstance(choices, (list, tuple, Mapping)) and isinstance(question, str)
    if not listed or all(text in question for _, text in labelled(choices)):
        return template
    return f"{template or '{prompt}'}\n{{{CHOICES}}}"


def _template_of_flag(text: str | None, names: Sequence[str], flag: str) -> str | None:
    """The template of a flag that names a column, with or without braces, or is a template."""
    if text is None:
        return None
    template = text if "{" in text else f"{{{text}}}"
    for column in parse(template).columns:
        if column_of(column, names) is None:
            what = f"{flag}: there is no column `{column}`; the columns are {names_or_none(names)}."
            likely = "COLUMN"
            if names:
                likely = names[0] if flag == "--prompt" else names[-1]
            raise ConfigError(what, fix=did_you_mean(column, names) or f'{flag} "{{{likely}}}"')
    return template


def _flags_to_type(free: Sequence[str], names: Sequence[str]) -> str:
    """Flags with the last column as the answer and all before it as the question."""
    if len(free) < 2:
        return f'--prompt "{{{next(iter(names), "COLUMN")}}}"'
    return f"{_quoted('--prompt', free[:-1])} {_quoted('--answer', free[-1:])}, or others of them"


def _quoted(flag: str, names: Sequence[str]) -> str:
    text = " ".join(f"{{{name}}}" for name in names)
    return f"{flag} '{text}'" if '"' in text else f'{flag} "{text}"'


# ---- a file without a header ----

_FORMS = (
    re.compile(r"[-+$€£]?\d[\d.,]*( ?[%€$£])?"),
    re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}"),
    re.compile(r".{8,}[?\uff1f]"),
    re.compile(r"\S+ \S+ \S+.*[.!。]"),
    re.compile(r"[\[{].*[\]}]"),
)
"""Forms that names of columns seldom have: a number, a date, a question, a sentence, an object."""


def unnamed_columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """The name of a column that looks like a value of it, as where a file has no header; empty where none does.

    It has the form of nearly all values (a number, a date, a question, ...), or two rows have it as their value.

    >>> unnamed_columns(["What is 1 + 1?", "2"], [{"What is 1 + 1?": "What is 3 + 4?", "2": "7"}] * 9)
    'What is 1 + 1?'
    >>> unnamed_columns(["noun", "plural"], [{"noun": "cat", "plural": "cats"}] * 9)
    ''
    """
    if list(names) == list(map(str, range(len(names)))):  # as pandas numbers columns without names
        return ""
    for name in names:
        values = [str(row[name]).strip() for row in rows if row.get(name) is not None]
        form = next((form for form in _FORMS if form.fullmatch(name.strip())), None)
        alike = form is not None and sum(map(bool, map(form.fullmatch, values))) >= 0.9 * len(values)
        if values.count(name) >= 2 or (alike and len(values) > 2):
            return name
    return ""
