"""The columns with question and answer of a table: as they were given, by names, by the task's sentence, by order.

Contents decide only what these leave open, and then the other reading is named.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.data.columns import (
    ALSO_ANSWERS,
    ALSO_QUESTIONS,
    ANSWERS,
    QUESTIONS,
    TESTS,
    ends_with_answer,
    listed,
    named,
)
from podium.data.query import as_json
from podium.data.templates import CHOICES, labelled, parse
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
_BESIDE = ("context", "passage", "paragraph", "background", "premise", "hypothesis", "input", "options", "kontext")
"""Columns that belong to the question beside them; so do the choices `A`, `B`, `option_a`, ..."""
_CHOICE = re.compile(r"(option|choice|opt)?[ _]?[a-f]|(option|choice|opt|ending|sol)[ _]?\d")
_UNASKED = (
    _words(
        "id index idx ind uuid row nr no split 番号 rejected question_id prompt_id task_id source_id input_output "
        "test_list challenge_test_list test_setup_code test_imports starter_code inferences context_messages"
    )
    | {"unnamed: 0"},
    _words(
        "note notes comment comments remark remarks notiz notizen bemerkung quelle fuente nota notas remarque source "
        "url link author created created_at updated updated_at timestamp lang language 備考"
    ),
    frozenset({"date", "datum", "fecha", "日付", "category", "level", "difficulty", "topic", "tag", "tags"}),
)
"""Columns that are neither, where at least two are left without them; the surest first."""
_COMMENTS = _words("comment comments remark remarks note notes kommentar comentario commentaire")


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
    names: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    prompt: str | None = None,
    answer: str | None = None,
    sentence: str = "",
) -> Chosen:
    """Templates for the columns of a table. `prompt` and `answer` are columns or templates that were given.

    `sentence` is the task in the user's words: "Write the plural of the noun." says which of the two is the answer.
    Raises `ConfigError`, with the flags to type, for a column that is not there, and where no rule tells them.

    >>> rows = [{"noun": f"cat {n}", "plural": f"cats {n}"} for n in range(9)]
    >>> chosen_columns(["noun", "plural"], rows).keys
    {'prompt': '{noun}', 'answer': '{plural}'}
    >>> chosen_columns(["noun", "plural"], rows, sentence="Give the noun of the plural.").keys
    {'prompt': '{plural}', 'answer': '{noun}'}
    >>> chosen_columns(["question", "answer"], [{"question": "1+1", "answer": "2"}]).keys
    {'prompt': '{question}'}
    """
    asked, told = _given(prompt, names, "--prompt"), _given(answer, names, "--answer")
    given = {name for text in (asked, told) if text is not None for name in parse(text).columns}
    table = _Table.of([name for name in names if name not in given], rows, sentence)
    read = table.reading() if asked is None and told is None else table.rest(asks=asked is None, tells=told is None)
    if asked is None and not read.asked:
        raise ConfigError("D001.columns_question_answer", fix=table.flags(names), listed=listed(names))
    return Chosen(
        prompt=asked if asked is not None else table.with_choices(table.template(read.asked, "prompt")),
        answer=told if told is not None else table.answer(read.told),
        unused=tuple(name for name in names if name not in {*given, *read.asked, *read.told, *OF_REWARDS}),
        asked="".join(read.asked[:1]),
        told="".join(read.told[:1]),
        other=_as_flags(table.template(read.other[0]), table.template(read.other[1])) if read.other else "",
        why=read.why,
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """Columns of the question and of the answer."""

    asked: Sequence[str] = ()
    told: Sequence[str] = ()
    other: tuple[Sequence[str], Sequence[str]] | None = None
    """Question and answer of the reading that is left besides."""
    why: str = ""
    """The ground of this one, where there is another."""


@dataclass(frozen=True, slots=True)
class _Table:
    """The columns that may be asked or told, and what the sentence says of them."""

    free: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    roles: Mapping[str, str]
    """By column that the sentence names, what `role_in` says of it."""
    wants_object: bool
    """Whether the sentence asks for JSON, and no column has any."""

    @classmethod
    def of(cls, names: Sequence[str], rows: Sequence[Mapping[str, Any]], sentence: str) -> _Table:
        """The columns without numbers of rows, dates and notes, as long as two others are left."""
        roles = {name: role for name in names if (role := role_in(name, sentence))}
        filled = [name for name in names if not rows or any(row.get(name) not in (None, "") for row in rows)]
        free = [name for name in filled if name.casefold() not in OF_REWARDS]
        pairs = {each for pair in _PAIRS if set(pair) <= {name.casefold() for name in free} for each in pair}
        kept = pairs | {name.casefold() for name in _sole_comment(free, rows)}
        for unasked in _UNASKED:
            left = [name for name in free if name in roles or name.casefold() not in unasked - kept]
            free = left if len(left) > 1 or (left and unasked is _UNASKED[0]) else free
        objects = any(isinstance(as_json(str(row.get(name))), Mapping) for row in rows[:1] for name in free)
        return cls(free, rows, roles, len(free) > 2 and "json" in sentence.casefold() and not objects)

    def _conversations(self) -> list[str]:
        """The column of conversations that end with their answer; none where a name tells an answer beside it."""
        known = named(self.free, (*ANSWERS, *ALSO_ANSWERS)) is not None and len(self.free) > 1
        free = () if known or not self.rows else self.free
        return _only([n for n in free if all(ends_with_answer(row.get(n)) for row in self.rows)])

    def said(self, role: str) -> list[str]:
        """Columns to which the sentence gives a role."""
        return [name for name in self.free if self.roles.get(name) == role]

    def rest(self, *, asks: bool, tells: bool) -> _Reading:
        """Question or answer, where the other one was given."""
        question, target = by_names(self.free)
        if asks and not tells:
            return _Reading(self._with_companions(_first(question, self.said("asked"), self.free), ()))
        right = [name for name in self.free if name.casefold() != "rejected"]
        return _Reading((), _first(target, self.said("told"), _only(right)) if tells else ())

    def reading(self) -> _Reading:
        """Question and answer by the sentence, else by names, else by order; empty where nothing tells them."""
        question, target = by_names(self.free)
        if turns := self._conversations():
            return _Reading(turns)
        forms = self.said("form")
        asked = self.said("asked") or forms
        told = (self.said("told") or (forms if asked != forms else []))[:1]
        if self.wants_object:
            asked = _first(question, asked, self.free[:1])
            rest = [name for name in self.free if name not in asked]
            return _Reading(asked, [name for name in rest if name in self.roles] or rest)
        both_named = bool(question and target and not {question, target} & {*asked, *told})
        if asked and told and not both_named:
            return self._by_sentence(self._with_companions(asked, told), told, doubtful=target in asked)
        if question and target:
            return _Reading(self._with_companions([question], [target]), [target])
        if target or told:
            found = _first(target, told)
            rest = [name for name in self.free if name not in found]
            named = [name for name in rest if name in self.roles]
            asked = self._with_companions([question] if question else named, found) if question or named else rest
            return self._by_sentence(asked, found, doubtful=not (target or question) and self.free[0] in found)
        return self._by_order(_first(question, asked))

    def _by_sentence(self, asked: Sequence[str], told: Sequence[str], *, doubtful: bool) -> _Reading:
        doubtful = doubtful and _distinct(told[0], self.rows) > FEW_VALUES
        why = "the sentence of --task says so" if doubtful else ""
        return _Reading(asked, told, (told, asked) if doubtful else None, why)

    def _by_order(self, asked: Sequence[str]) -> _Reading:
        """The reading where neither names nor the sentence say what is told: left to right."""
        rest = [name for name in self.free if name not in asked]
        if len(self.free) < 2 or not rest:
            return _Reading(self.free)
        if not asked and len(rest) == 2:
            return self._left_to_right(*rest)
        unnamed = [name for name in self.free if name not in self.roles]
        named = self.said("named")
        told = _only(rest) or (_only(unnamed) if unnamed[-1:] == list(self.free[-1:]) else [])
        if not told and not asked and len(named) == 2:
            return self._left_to_right(*named)
        if told:
            other = (named[:-1], named[-1:]) if told != rest and len(named) > 1 else None
            why = f"--task names all columns but `{told[0]}`" if other else ""
            return _Reading([name for name in self.free if name not in told], told, other, why)
        behind = _only(self.free[self.free.index(asked[-1]) + 1 :] if asked else [])
        told = behind or _only([name for name in rest if 0 < _distinct(name, self.rows) <= FEW_VALUES])
        if not told:
            return _Reading(asked)
        others = [name for name in rest if name not in told]
        why = f"it stands to the right of `{asked[-1]}`" if behind else f"`{told[0]}` has few different values"
        return _Reading(self._with_companions(asked, told) or others, told, (asked or others[:1], others[-1:]), why)

    def _left_to_right(self, left: str, right: str) -> _Reading:
        told, back = _tells(left, right, self.rows), _tells(right, left, self.rows)
        if back and not told:
            why = f"rows with the same `{left}` have different `{right}`"
            return _Reading([right], [left], ([left], [right]), why)
        if back and _distinct(right, self.rows) > FEW_VALUES:
            return _Reading(
                [left], [right], ([right], [left]), "names and --task leave it open, so the left one is the question"
            )
        return _Reading([left], [right])

    def _with_companions(self, asked: Sequence[str], told: Sequence[str]) -> list[str]:
        """The columns of the question with those that belong to it, in the order of the table."""
        choices = [name for name in self.free if _CHOICE.fullmatch(name.casefold())]
        beside = {*asked, *(choices if len(choices) > 1 else ()), *self.said("named"), *self.said("asked")}
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
        short = all(len(str(row.get(name)).split()) < 2 for row in self.rows for name in names)
        short = short and len(choices) in (0, len(names))  # an answer names a choice by what stands before it
        return " ".join(f"{{{name}}}" for name in names) if short else "\n".join(f"{n}: {{{n}}}" for n in names)

    def with_choices(self, template: str | None) -> str | None:
        """The template with the choices of each row behind it, unless the first question has them already."""
        first = self.rows[0] if self.rows else {}
        asked, choices = parse(template or "{prompt}")(first), first.get(CHOICES)
        listed = isinstance(choices, (list, tuple, Mapping)) and isinstance(asked, str)
        if not listed or all(text in asked for _, text in labelled(choices)):
            return template
        return f"{template or '{prompt}'}\n{{{CHOICES}}}"

    def answer(self, names: Sequence[str]) -> str | None:
        """The template of the answer: of several columns a JSON object."""
        if len(names) < 2 and not self.wants_object:
            return self.template(names, "answer")
        fields = (f"{json.dumps(name, ensure_ascii=False)}: {self._value(name)}" for name in names)
        return f"{{{{{', '.join(fields)}}}}}"

    def _value(self, name: str) -> str:
        numbers = all(isinstance(as_json(str(row.get(name))), (int, float)) for row in self.rows)
        return f"{{{name}}}" if numbers and self.rows else f'"{{{name}}}"'

    def flags(self, names: Sequence[str]) -> str:
        """Flags with the last column as the answer and all before it as the question; with JSON the other way round."""
        if len(self.free) < 2:
            return f'--prompt "{{{next(iter(names), "COLUMN")}}}"'
        at = 1 if self.wants_object else len(self.free) - 1
        asked, told = " ".join(f"{{{name}}}" for name in self.free[:at]), self.answer(self.free[at:])
        return f"{_as_flags(asked, told or '{answer}')}, or others of them"


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
        if column not in names:
            what = f"{flag}: there is no column `{column}`; the columns are {listed(names)}."
            likely = names[0 if flag == "--prompt" else -1] if names else "COLUMN"
            raise ConfigError(what, fix=did_you_mean(column, names) or f'{flag} "{{{likely}}}"')
    return template


def _sole_comment(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The column of comments where a table has no other column of texts; it is the question then, and no note.

    >>> _sole_comment(["comment", "likes"], [{"comment": f"It is no. {n}, I think", "likes": n} for n in range(9)])
    ['comment']
    >>> _sole_comment(["noun", "comment"], [{"noun": f"cat {n}", "comment": f"It is no. {n}"} for n in range(9)])
    []
    """
    names = [name for name in names if name.casefold() not in _UNASKED[0] | _UNASKED[2]]
    texts = [
        name
        for name in names
        if _distinct(name, rows) > FEW_VALUES and any(re.search(r"[^\W\d_]{2}", str(row.get(name))) for row in rows)
    ]
    return texts if len(texts) == 1 and texts[0].casefold() in _COMMENTS else []


def _only(names: Sequence[str]) -> list[str]:
    return list(names) if len(names) == 1 else []


def _first(*found: str | Sequence[str] | None) -> list[str]:
    """The first that is not empty; a name counts as a list of one."""
    made = next((each for each in found if each), ())
    return [made] if isinstance(made, str) else list(made)


def _distinct(name: str, rows: Sequence[Mapping[str, Any]]) -> float:
    """Share of distinct values."""
    values = [str(row[name]) for row in rows if row.get(name) is not None]
    return len(set(values)) / max(1, len(values))


def _tells(asked: str, told: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one column decides the other: in most rows, a value has no second value beside it."""
    beside: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        beside[str(row.get(asked))].add(str(row.get(told)))
    return sum(len(beside[str(row.get(asked))]) == 1 for row in rows) * 2 >= len(rows)


# ---- the sentence ----

_LANGUAGES = {
    "en": _words("english englisch anglais inglés inglese"),
    "de": _words("german deutsch deutsche allemand alemán tedesco"),
    "fr": _words("french französisch français francés francese"),
    "es": _words("spanish spanisch espagnol español spagnolo"),
    "it": _words("italian italienisch italien italiano"),
    "pt": _words("portuguese portugiesisch portugais portugués português"),
    "nl": _words("dutch niederländisch néerlandais nederlands"),
}
"""Words for the language that a column's name is the code of."""

_SKIPPED = _words(
    "the a an its their this that these each every right correct matching corresponding given same following l d "
    "der die das dem den ein eine einen passende richtige le la les un une el los las una lo il"
)
"""Words between a column and the word that says what is done with it."""
_WRITTEN = _words(
    "write give name say find tell return output predict guess determine state produce generate is are was what which "
    "make many much choose pick extract into as form schreibe gib nenne bilde bestimme finde sage ins donne "
    "ecris écris nomme trouve dis da escribe di nombra encuentra al wie als vers"
)
_ASSIGN = _words("assign classify categorize categorise label map match route tag convert group put")
_ASSIGNED = _words("to into as under by with on")
"""After a first word of `_ASSIGN`, in front of what is written: "Assign the ticket to a team."."""
_ASKING = _words("is are was were does ist sind est")
"""At the beginning of a question, in front of what is asked about: "Is the email urgent?"."""
_ANSWERING = _words("answer reply respond")
_WRITTEN_ALONE = _words("to in en auf nach zu a")
"""In front of what is written where no article follows: "in words", and not "in the word"."""
_READ = _words(
    "of from for in on about by whether if per des der vom von aus zum zur für im du de del des depuis dans para"
)
_FORMS = _words("in into as to with without backwards again")
"""Behind a column whose text is written in another form: "Write the word in capital letters."."""


def role_in(name: str, sentence: str) -> str:
    """What the sentence of a task says of a column: `told`, `asked`, `form`, `named` without a role, or nothing.

    `form` is of a text that is written in some form: what is asked, unless that is another column.

    >>> [role_in(name, "Write the plural of the noun.") for name in ("plural", "noun", "id")]
    ['told', 'asked', '']
    >>> [role_in(name, "Translate from French into English.") for name in ("english", "french")]
    ['told', 'asked']
    >>> [role_in(name, "Assign each support ticket to a team.") for name in ("ticket", "team", "priority")]
    ['named', 'told', '']
    """
    words, parts = re.findall(r"[^\W_]+", sentence.casefold()), re.findall(r"[^\W_]+", name.casefold())
    found = ""
    for at in range(len(words) - len(parts) + 1 if parts else 0):
        if all(_alike(word, part) for word, part in zip(words[at:], parts, strict=False)):
            found = _role_at(words, at, at + len(parts)) or found or "named"
            if found != "named":
                break
    return found


def _role_at(words: Sequence[str], start: int, end: int) -> str:
    """The role of the words from `start` to `end`, by the words around them."""
    before = start - 1
    while before >= 0 and words[before] in _SKIPPED:
        before -= 1
    if before < 0:
        return ""
    cue, after, first, alone = words[before], "".join(words[end : end + 1]), words[0], before == start - 1
    rules = (
        (first in _ASSIGN and cue in _ASSIGNED, "told"),
        # "How often is the letter in the word?", and not "How many are the stars of the review?"
        (first == "how" and words[1] not in ("many", "much") and cue in _ASKING, "asked"),
        (first in _ASKING and before == 0, "asked"),
        # "Is the email urgent?", and not "Does the premise entail the hypothesis?"
        (first in _ASKING and alone and cue not in _READ, "told"),
        (cue in _WRITTEN, "form" if after in _FORMS else "told"),
        (cue == "with", "told" if before < 2 or words[before - 1] in _ANSWERING else "asked"),
        (cue in _WRITTEN_ALONE and alone, "told"),
        (cue in _READ, "asked"),
        (cue in _WRITTEN_ALONE, ""),
        (before == 0, "told" if after in ("of", "des", "du", "del") else "asked"),
    )
    return next((role for holds, role in rules if holds), "")


def _alike(word: str, part: str) -> bool:
    """Whether a word of a sentence is one of a column's name, endings aside."""
    same = next(
        (at for at, both in enumerate(zip(word, part, strict=False)) if both[0] != both[1]), min(len(word), len(part))
    )
    return word == part or word in _LANGUAGES.get(part, ()) or (same >= max(4, len(part) - 2) and len(word) - same <= 3)
