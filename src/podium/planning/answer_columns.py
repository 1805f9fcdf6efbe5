"""The columns with question and answer of a table: as they were given, by their names, from left to right.

Everything else is asked for. Where the order decides, the other reading is named with the flags that take it.
"""

from __future__ import annotations

import json
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
from podium.data.query import as_json
from podium.data.templates import CHOICES, column_of, field_of, labelled, parse
from podium.errors import ConfigError
from podium.errors.texts import did_you_mean


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OF_REWARDS = frozenset({*TESTS, CHOICES, "keywords", "budget"})
"""Columns of rewards of the library, which are neither question nor answer."""
FEW_VALUES = 0.2
"""Share of distinct values up to which a column holds answers rather than questions."""

_PAIRS = (("q", "a"), ("source", "target"), ("src", "tgt"))
"""Names that say something only together."""
_ASKED = (
    *(*QUESTIONS, *ALSO_QUESTIONS),
    *("frage", "aufgabe", "eingabe", "pregunta", "entrada", "domanda", "pergunta", "vraag", "вопрос"),
    *("質問", "問題", "入力", "问题", "질문", "problem_statement", "description"),
)
_TOLD = (
    *("correct_answer", "right_answer", "expected_answer", "best_answer", "correct_option", "correct_choice"),
    *(*ANSWERS, *ALSO_ANSWERS),
    *("answerkey", "answer_key", "final_answer", "correct"),
    *("antwort", "lösung", "ausgabe", "ergebnis", "respuesta", "salida", "réponse", "reponse", "risposta", "resposta"),
    *("antwoord", "ответ"),
    *("答え", "回答", "解答", "出力", "答案", "정답"),
    *("gold_label", "reward_model", "result", "count", "total", "sum", "class", "category"),
)
"""Further names of both, the likeliest first: other languages, and results."""
_BESIDE = _words(
    "context passage paragraph background premise hypothesis input options text document doc article story evidence "
    "facts kontext dokument contexto documento texto contexte contesto testo"
)
"""Columns that belong to the question beside them; so do the choices `A`, `B`, `option_a`, ..."""
_CHOICE = re.compile(r"(option|choice|opt)?[ _]?[a-f]|(option|choice|opt|ending|sol)[ _]?\d")
_UNASKED = (
    _words(
        "id index idx ind uuid row nr no split 番号 rejected question_id prompt_id task_id source_id input_output "
        "test_list challenge_test_list test_setup_code test_imports starter_code inferences context_messages "
        "annotator annotators annotator_id annotated_by labeler labeller rater rater_id worker worker_id workerid"
    )
    | {"unnamed: 0"},
    _words(
        "note notes remark remarks notiz notizen bemerkung quelle fuente nota notas remarque source "
        "url link author created created_at updated updated_at timestamp lang language 備考"
    ),
    frozenset({"date", "datum", "fecha", "日付", "level", "difficulty", "topic", "tag", "tags"}),
)
"""Columns that are neither, where at least two are left without them; the surest first."""
_OF_ANSWERS = _words("ground_truth answer_start aliases")
"""Fields of answers that are objects, which `answer_from` takes out of them: those of verl, SQuAD and TriviaQA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Templates of question and answer; None where the rows have `prompt` or `answer` already."""

    prompt: str | None
    answer: str | None
    unused: tuple[str, ...] = ()
    """Columns that are in neither; rewards still get them."""
    asked: str = ""
    told: str = ""
    """The first columns of both, as they were found."""
    other: str = ""
    """Flags for the other reading, where a second one is left."""
    why: str = ""
    """The ground of the choice, where another one is left."""

    @property
    def keys(self) -> dict[str, str]:
        """The keys of a recipe."""
        return {key: text for key in ("prompt", "answer") if (text := getattr(self, key)) is not None}


def chosen_columns(
    names: Sequence[str], rows: Sequence[Mapping[str, Any]], prompt: str | None = None, answer: str | None = None
) -> Chosen:
    """Templates for the columns of a table. `prompt` and `answer` are columns or templates that were given.

    Raises `ConfigError`, with the flags to type, for a column that is not there, and where no name tells the question.

    >>> rows = [{"noun": f"cat {n}", "plural": f"cats {n}"} for n in range(9)]
    >>> chosen_columns(["noun", "plural"], rows).keys
    {'prompt': '{noun}', 'answer': '{plural}'}
    >>> chosen_columns(["noun", "plural"], rows).other
    '--prompt "{plural}" --answer "{noun}"'
    >>> chosen_columns(["question", "answer"], [{"question": "1+1", "answer": "2"}]).keys
    {'prompt': '{question}'}
    """
    asked = _given(prompt, names, "--prompt")
    told = _given(answer, names, "--answer")
    given = {column_of(name, names) for text in (asked, told) if text is not None for name in parse(text).columns}
    table = _Table.of([name for name in names if name not in given], rows)
    read = table.reading() if asked is None and told is None else table.rest(asks=asked is None, tells=told is None)
    if asked is None and not read.asked:
        raise ConfigError(
            f"the columns of question and answer cannot be told; the columns are {names_or_none(names)}.",
            code="D001",
            fix=table.flags(names),
            listed=names_or_none(names),
        )
    used = {*given, *read.asked, *read.told}
    question = table.inside(read.asked, _ASKED)
    target = table.inside(read.told, _TOLD)
    return Chosen(
        prompt=asked if asked is not None else table.with_choices(table.template(question, "prompt")),
        answer=told if told is not None else table.answer(target),
        unused=tuple(name for name in names if name not in {*used, *OF_REWARDS}),
        asked="".join(question[:1]),
        told="".join(target[:1]),
        other=_as_flags(table.template(target), table.template(question)) if read.why else "",
        why=read.why,
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """Columns of the question and of the answer."""

    asked: Sequence[str] = ()
    told: Sequence[str] = ()
    why: str = ""
    """The ground of this reading, where the other way round is as good."""


@dataclass(frozen=True, slots=True)
class _Table:
    """The columns that may be asked or told."""

    free: Sequence[str]
    rows: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> _Table:
        """The columns without numbers of rows, dates and notes, as long as two others are left."""
        filled = [name for name in names if not rows or any(row.get(name) not in (None, "") for row in rows)]
        free = [name for name in filled if name.casefold() not in OF_REWARDS]
        pairs = {each for pair in _PAIRS if set(pair) <= {name.casefold() for name in free} for each in pair}
        for unasked in _UNASKED:
            left = [name for name in free if name.casefold() not in unasked - pairs]
            free = left if len(left) > 1 or (left and unasked is _UNASKED[0]) else free
        return cls(free, rows)

    def _conversations(self) -> list[str]:
        """The column of conversations that end with their answer; none where a name tells an answer beside it."""
        known = named(self.free, (*ANSWERS, *ALSO_ANSWERS)) is not None and len(self.free) > 1
        free = () if known or not self.rows else self.free
        return _only([n for n in free if all(ends_with_answer(row.get(n)) for row in self.rows)])

    def rest(self, *, asks: bool, tells: bool) -> _Reading:
        """Question or answer, where the other one was given."""
        question, target = by_names(self.free)
        if asks and not tells:
            return _Reading(self._with_companions([question], ()) if question else self.free)
        right = [name for name in self.free if name.casefold() != "rejected"]
        if not tells:
            return _Reading((), ())
        return _Reading((), [target] if target else self._sole_answer(right))

    def reading(self) -> _Reading:
        """Question and answer by names, else from left to right; empty where there are more than two without a name."""
        question, target = by_names(self.free)
        if turns := self._conversations():
            return _Reading(turns)
        asked = self._with_companions([question] if question else [], [target])
        if target:
            return self._by_names(asked if question else [name for name in self.free if name != target], target)
        if asked:
            told = self._sole_answer([name for name in self.free if name not in asked])
            return self._by_names(asked, *told)
        if len(self.free) == 2:
            return self._left_to_right()
        return _Reading(self.free if len(self.free) == 1 else ())

    def _left_to_right(self) -> _Reading:
        left, right = self.free
        if self._has_few_values(left, than=right):
            return _Reading([right], [left], f"`{left}` has few different values")
        sure = self._has_few_values(right, than=left)
        return _Reading([left], [right], "" if sure else "their names leave it open, so the left one is the question")

    def _by_names(self, asked: Sequence[str], *told: str) -> _Reading:
        few = len(asked) == 1 and bool(told) and self._has_few_values(asked[0], than=told[0])
        return _Reading(asked, told, f"their names say so, though `{asked[0]}` has few different values" if few else "")

    def _sole_answer(self, names: Sequence[str]) -> list[str]:
        """The only column, or else the only one that holds objects with a field that is called after an answer."""
        objects = [name for name in names if self.inside([name], _TOLD) != [name]]
        return _only(names) or _only(objects)

    def _has_few_values(self, name: str, *, than: str) -> bool:
        return 0 < _distinct(name, self.rows) <= FEW_VALUES < _distinct(than, self.rows)

    def inside(self, names: Sequence[str], usual: Sequence[str]) -> list[str]:
        """The columns; in place of one that holds objects the field that a usual name tells.

        Without such a name, and where some fields are neither question nor answer, as `annotator`: the others.
        """
        made: list[str] = []
        for name in names:
            objects = [value for row in self.rows if (value := row.get(name)) is not None]
            is_object = all(isinstance(each, Mapping) and "role" not in each for each in objects)
            fields = list(dict.fromkeys(chain.from_iterable(objects))) if objects and is_object else []
            if not fields or name == CHOICES or _OF_ANSWERS.intersection(fields):
                made.append(name)
                continue
            found = named(fields, usual)
            left = [found] if found else [each for each in fields if not any(each.casefold() in u for u in _UNASKED)]
            made += [name] if len(left) in (0, len(fields)) and not found else [f"{name}.{each}" for each in left]
        return made

    def _with_companions(self, asked: Sequence[str], told: Sequence[str | None]) -> list[str]:
        """The columns of the question with those that belong to it, in the order of the table."""
        choices = [name for name in self.free if _CHOICE.fullmatch(name.casefold())]
        beside = {*asked, *(choices if len(choices) > 1 and asked else ())}
        return [n for n in self.free if n not in told and (n in beside or n.casefold() in _BESIDE)]

    def template(self, names: Sequence[str], key: str = "") -> str | None:
        """The template of columns; None for no column, and for one that is used as it is."""
        if len(names) < 2:
            name = names[0] if names else None
            kept = not self.rows or isinstance(self.rows[0].get(key), str) or CHOICES in self.rows[0]
            as_is = name == key and (key == "prompt" or kept)  # the number of a choice is no text
            return None if name is None or as_is else f"{{{name}}}"
        if tuple(names) == ("instruction", "input"):
            return "{instruction}\n\n{input}" if any(row.get("input") for row in self.rows) else "{instruction}"
        choices = [name for name in names if _CHOICE.fullmatch(name.casefold())]
        short = all(len(str(field_of(row, name)).split()) < 2 for row in self.rows for name in names)
        short = short and len(choices) in (0, len(names))  # an answer names a choice by what stands before it
        return " ".join(f"{{{name}}}" for name in names) if short else "\n".join(f"{n}: {{{n}}}" for n in names)

    def with_choices(self, template: str | None) -> str | None:
        """The template with the choices of each row behind it, unless the first question has them already."""
        first = self.rows[0] if self.rows else {}
        asked = parse(template or "{prompt}")(first)
        choices = first.get(CHOICES)
        listed = isinstance(choices, (list, tuple, Mapping)) and isinstance(asked, str)
        if not listed or all(text in asked for _, text in labelled(choices)):
            return template
        return f"{template or '{prompt}'}\n{{{CHOICES}}}"

    def answer(self, names: Sequence[str]) -> str | None:
        """The template of the answer: of several columns a JSON object."""
        if len(names) < 2:
            return self.template(names, "answer")
        keys = (json.dumps(name.rpartition(".")[2], ensure_ascii=False) for name in names)
        fields = (f"{key}: {self._value(name)}" for key, name in zip(keys, names, strict=True))
        return f"{{{{{', '.join(fields)}}}}}"

    def _value(self, name: str) -> str:
        numbers = all(isinstance(as_json(str(field_of(row, name))), (int, float)) for row in self.rows)
        return f"{{{name}}}" if numbers and self.rows else f'"{{{name}}}"'

    def flags(self, names: Sequence[str]) -> str:
        """Flags with the last column as the answer and all before it as the question."""
        if len(self.free) < 2:
            return f'--prompt "{{{next(iter(names), "COLUMN")}}}"'
        asked = " ".join(f"{{{name}}}" for name in self.free[:-1])
        return f"{_as_flags(asked, self.answer(self.free[-1:]) or '{answer}')}, or others of them"


def by_names(free: Sequence[str]) -> tuple[str | None, str | None]:
    """Question and answer by their names; None for one that no name tells."""
    for pair in _PAIRS:
        if all(named(free, [each]) for each in pair):
            return named(free, pair[:1]), named(free, pair[1:])
    question = named(free, QUESTIONS)
    target = named([name for name in free if name != question], _TOLD)
    return question or named([name for name in free if name != target], _ASKED), target


def _as_flags(prompt: str | None, answer: str | None) -> str:
    quoted = (f"'{text}'" if '"' in text else f'"{text}"' for text in (prompt or "", answer or ""))
    return "--prompt {} --answer {}".format(*quoted)


def _given(written: str | None, names: Sequence[str], flag: str) -> str | None:
    """The template of a flag that names a column, with or without braces, or is a template."""
    if written is None:
        return None
    template = written if "{" in written else f"{{{written}}}"
    for column in parse(template).columns:
        if column_of(column, names) is None:
            what = f"{flag}: there is no column `{column}`; the columns are {names_or_none(names)}."
            likely = "COLUMN"
            if names:
                likely = names[0] if flag == "--prompt" else names[-1]
            raise ConfigError(what, fix=did_you_mean(column, names) or f'{flag} "{{{likely}}}"')
    return template


def _only(names: Sequence[str]) -> list[str]:
    return list(names) if len(names) == 1 else []


def _distinct(name: str, rows: Sequence[Mapping[str, Any]]) -> float:
    """Share of distinct values."""
    values = [str(row[name]) for row in rows if row.get(name) is not None]
    return len(set(values)) / max(1, len(values))
