"""The columns with question and answer of a table: as they were given, by their names, or by their content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.data.columns import (
    ALSO_ANSWERS,
    ALSO_QUESTIONS,
    ANSWERS,
    NOT_ASKED,
    QUESTIONS,
    as_flags,
    listed,
    named,
    usual,
)
from podium.data.templates import parse
from podium.errors import ConfigError, did_you_mean

OF_REWARDS = frozenset({"tests", "choices", "keywords", "budget"})
"""Columns of rewards of the library, which are neither question nor answer."""
FEW_VALUES = 0.2
"""Share of distinct values up to which a column holds answers rather than questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Templates of question and answer; None where the rows have `prompt` or `answer` already."""

    prompt: str | None
    answer: str | None
    remark: str = ""
    """The choice in words, where content and not names decided it."""

    @property
    def keys(self) -> dict[str, str]:
        """The keys of a recipe."""
        return {key: text for key in ("prompt", "answer") if (text := getattr(self, key)) is not None}


def chosen_columns(
    names: Sequence[str], rows: Sequence[Mapping[str, Any]], prompt: str | None = None, answer: str | None = None
) -> Chosen:
    """Templates for the columns of a table. `prompt` and `answer` are columns or templates that were given.

    Raises `ConfigError`, with the flags to type, for a column that is not there, and where no rule tells them.

    >>> rows = [{"text": f"Text number {n}", "mood": "good"} for n in range(9)]
    >>> chosen_columns(["text", "mood"], rows).keys
    {'prompt': '{text}', 'answer': '{mood}'}
    >>> chosen_columns(["question", "answer"], [{"question": "1+1", "answer": "2"}]).keys
    {'prompt': '{question}'}
    """
    asked, told = _given(prompt, names, "--prompt"), _given(answer, names, "--answer")
    given = {name for text in (asked, told) if text is not None for name in parse(text).columns}
    free = [name for name in names if name not in given and name.casefold() not in (*NOT_ASKED, *OF_REWARDS)]
    if asked is None and told is None and (found := usual(names)):
        return _by_names(*found, rows)
    question = None if asked is not None else named(free, QUESTIONS)
    target = None if told is not None else named([name for name in free if name != question], ANSWERS)
    certain = {name for name in (question, target) if name is not None}
    if asked is None and question is None:
        question, target = _by_content(free, rows, target, needs_answer=told is None)
        if question is None or (target is None and told is None and len(free) > 1):
            what = f"the columns of question and answer cannot be told; the columns are {listed(names)}."
            raise ConfigError(what, code="D001", fix=_flags(names, free, rows))
    elif told is None and target is None:
        rest = [name for name in free if name != question]
        target = named(rest, ALSO_ANSWERS) or _only(rest)
    guessed = {"question": question, "answer": target}
    remark = " and ".join(f"`{name}` as the {part}" for part, name in guessed.items() if name and name not in certain)
    return Chosen(
        prompt=asked if asked is not None else _template(question, "prompt", rows),
        answer=told if told is not None else _template(target, "answer", rows),
        remark=f"{remark} (others: --prompt, --answer)" if remark else "",
    )


def _flags(names: Sequence[str], free: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Flags with the column of the longest texts as the question and the last of the others as the answer."""
    if len(free) < 2:
        return as_flags(names).partition(";")[0]
    question = max(free, key=lambda name: _size(name, rows)[1])
    answer = next(name for name in reversed(free) if name != question)
    return f'--prompt "{{{question}}}" --answer "{{{answer}}}", or others of them'


def _by_names(question: str, answer: str, rows: Sequence[Mapping[str, Any]]) -> Chosen:
    both = question == "instruction" and any(row.get("input") for row in rows)
    prompt = "{instruction}\n\n{input}" if both else _template(question, "prompt", rows)
    return Chosen(prompt=prompt, answer=_template(answer, "answer", rows))


def _template(name: str | None, key: str, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The template of a column; None for no column, and for one that is used as it is."""
    as_is = name == key and (key == "prompt" or not rows or isinstance(rows[0].get(key), str))
    return None if name is None or as_is else f"{{{name}}}"


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


def _by_content(
    free: Sequence[str], rows: Sequence[Mapping[str, Any]], target: str | None, *, needs_answer: bool
) -> tuple[str | None, str | None]:
    """Question and answer among the free columns: by further names, else by values; None: they cannot be told."""
    rest = [name for name in free if name != target]
    question = named(rest, ALSO_QUESTIONS)
    if target is None and needs_answer:
        target = named([name for name in rest if name != question], ALSO_ANSWERS)
    rest = [name for name in rest if name not in (question, target)]
    sizes = {name: _size(name, rows) for name in rest}
    if question is None:
        if target is None and needs_answer and len(rest) == 2:
            question = max(rest, key=lambda name: sizes[name])
        else:
            question = _only([name for name in rest if sizes[name][0] > FEW_VALUES]) or _only(rest)
        rest = [name for name in rest if name != question]
    if target is None and needs_answer:
        target = _only(rest) or _only([name for name in rest if 0 < sizes[name][0] <= FEW_VALUES])
    return question, target


def _only(names: Sequence[str]) -> str | None:
    return names[0] if len(names) == 1 else None


def _size(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Share of distinct values, and their mean length in characters: both are larger for questions."""
    values = [str(row[name]) for row in rows if row.get(name) is not None]
    return len(set(values)) / max(1, len(values)), sum(map(len, values)) / max(1, len(values))
