"""Rows of a dataset as a test needs them: the right answer as text, wrong ones beside it, formats to write them in.

Reads columns and texts; calls no reward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from podium.data.columns import GOLD, PROGRAMS, TESTS
from podium.data.extract import NUMBER, after_hashes, boxed
from podium.data.templates import parse
from podium.errors import DataError
from podium.records import Message, last_user_turn

GOLD_COLUMNS = (*GOLD, "final_answer", "reward_model")

STAND_IN = "42"
"""Written in place of an answer where rows have none."""

MAX_ROWS_READ = 1000
"""Rows among which different answers are looked for."""

NOT_COLUMNS = ("prompt", "completion", "completion_ids")


def prompt_text(prompt: str | list[Message]) -> str:
    """The texts of all messages."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content") or "") for message in prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCase:
    """One row with its right answer, and answers that are wrong for it."""

    row: int
    prompt: str | list[Message]
    columns: Mapping[str, Any]
    gold: str
    """The right answer as a model would write it; `STAND_IN` where the row has none."""
    has_gold: bool
    wrong: str
    """The answer of another row, or one made up where all rows have the same."""
    golds: tuple[str, ...]
    """The different answers of all rows."""

    @property
    def prompt_text(self) -> str:
        """All messages of the prompt."""
        return prompt_text(self.prompt)

    @property
    def value(self) -> float | None:
        """The right answer as a number; None where it is none."""
        return as_number(self.gold)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnFormat:
    """A way to write an answer down."""

    name: str
    template: str
    """With `{}` in place of the answer."""
    as_json: bool = False

    def write(self, answer: str) -> str:
        """
        >>> ReturnFormat(name="a quoted answer", template="x = {}", as_json=True).write('"')
        'x = "\\\\""'
        """
        return self.template.replace("{}", json.dumps(answer, ensure_ascii=False) if self.as_json else answer)


THOUGHT = "First I look at what is asked, then I work it out."

FORMS = tuple(
    ReturnFormat(name=name, template=template, as_json=name == "JSON text")
    for name, template in {
        "bare": "{}",
        "<answer> tags": "<answer>{}</answer>",
        "<think>, then <answer>": f"<think>{THOUGHT}</think>\n<answer>{{}}</answer>",
        "<reasoning>, then <answer>": f"<reasoning>{THOUGHT}</reasoning>\n<answer>{{}}</answer>",
        r"\boxed{x}": r"\boxed{{}}",
        r"$\boxed{x}$ in a sentence": r"The answer is $\boxed{{}}$.",
        r"<think>, then \boxed{x}": f"<think>{THOUGHT}</think>\n" + r"The answer is $\boxed{{}}$.",
        "#### x": f"{THOUGHT}\n#### {{}}",
        "#### x alone": "#### {}",
        "The answer is x.": "The answer is {}.",
        "x in running text": f"{THOUGHT} In the end we are left with {{}}.",
        "Answer: x": f"{THOUGHT}\nAnswer: {{}}",
        "<think>, then bare": f"<think>{THOUGHT}</think>\n{{}}",
        "(x)": "({})",
        "**x**": "**{}**",
        "JSON text": '{"answer": {}}',
        "JSON value": '{"answer": {}}',
        "code block": "```python\n{}\n```",
    }.items()
)
"""The formats that rewards in use read. `forms_for` adds the tags of the prompts and of the function's own code."""


def forms_for(
    prompts: Sequence[str | list[Message]], templates: Iterable[str] = (), *, code: str = "", keys: Iterable[str] = ()
) -> tuple[ReturnFormat, ...]:
    """`FORMS`, and forms that the run itself shows, the last first in the preference of `best_form`.

    Args:
        prompts: for the tags in them, and what the worked examples among their messages have around the answer.
        templates: with `{}` for the answer.
        code: of the function, for the tags in it and the beginnings of its literals.
        keys: of JSON objects with the answer alone.

    >>> [each.name for each in forms_for(["write <final>7</final>"])[len(FORMS):]]
    ['<final> tags', '<think>, then <final>']
    >>> forms_for([], templates=["= {}"])[-1].write("7")
    '= 7'
    >>> [each.write("7") for each in forms_for([], code="re.search(r'MOOD=(\\\\w+)', text)")[len(FORMS):]]
    ['MOOD=7', 'MOOD= 7']
    """
    texts = [prompt_text(prompt) for prompt in prompts]
    found = (tag for text in (*texts, code) for tag in re.findall(r"</([A-Za-z][\w-]{0,30})>", text))
    more = {}
    for tag in [tag for tag in dict.fromkeys(found) if tag not in ("answer", "think", "reasoning")][:4]:
        more[f"<{tag}> tags"] = f"<{tag}>{{}}</{tag}>"
        more[f"<think>, then <{tag}>"] = f"<think>{THOUGHT}</think>\n<{tag}>{{}}</{tag}>"
    for words in _leads(code):
        more |= {f"{words}{space}x": f"{words}{space}{{}}" for space in ("", " ") if not words.endswith(space or "\0")}
    more |= {text: text for text in (*_shown_forms(prompts), *templates)}
    as_json = (ReturnFormat(name=f"JSON `{key}`", template=f'{{"{key}": {{}}}}', as_json=True) for key in keys)
    return (*FORMS, *as_json, *(ReturnFormat(name=name, template=template) for name, template in more.items()))


def _shown_forms(prompts: Sequence[str | list[Message]]) -> list[str]:
    """The text that all worked examples of the prompts begin and end with, around `{}`.

    >>> turns = [{"role": "assistant", "content": f"Result => {n}."} for n in (7, 12)]
    >>> _shown_forms([[*turns, {"role": "user", "content": "3 + 4"}]])
    ['Result => {}.']
    """
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    shown = {str(turn.get("content") or "") for chat in chats for turn in chat if turn["role"] == "assistant"}
    if len(shown) < 2:
        return []
    lead = re.sub(r"\w+$", "", _common(list(shown)))
    rest = [text[len(lead) :] for text in shown]
    end = re.sub(r"^\w+", "", _common([text[::-1] for text in rest])[::-1])
    return [f"{lead}{{}}{end}"] if (lead + end).strip() and min(map(len, rest)) > len(end) else []


def worked_answers(cases: Sequence[ProbeCase]) -> tuple[tuple[str, str], ...]:
    """The worked examples of the prompts, the same in all rows: each as its text around `{}`, and its answer.

    The answer of an example is its last number where all answers are numbers, else the only answer of the rows in it,
    else the inside of a tag that no answer has, else what differs between examples that have the same words around it,
    else all of it.
    """
    chats = [() if isinstance(case.prompt, str) else case.prompt for case in cases]
    shown = {tuple(str(turn.get("content") or "") for turn in chat if turn["role"] == "assistant") for chat in chats}
    if len(shown) != 1:
        return ()
    [texts] = shown
    golds = sorted({case.gold for case in cases if case.has_gold})
    around = [form for form in _shown_forms([case.prompt for case in cases]) if _is_phrase(form, golds)]
    return tuple(
        _split(text, golds) or _in_tag(text, golds) or _without_words(text, around) or ("{}", text) for text in texts
    )


def _is_phrase(form: str, golds: Sequence[str]) -> bool:
    """Whether a form has two words or a tag that no answer has."""
    lead, _, end = form.partition("{}")
    marked = len(re.findall(r"[^\W\d]+", lead + end)) >= 2 or re.search(r"<\w+>$", lead)
    return bool(marked) and not any((lead and lead in gold) or (end and end in gold) for gold in golds)


def _split(text: str, golds: Sequence[str]) -> tuple[str, str] | None:
    """A text around the last number in it, or around the only one of the answers that occurs; None: there is none."""
    if golds and all(as_number(gold) is not None for gold in golds):
        places = [match.span() for match in NUMBER.finditer(text)][-1:]
    else:
        matches_by_gold = [list(re.finditer(rf"(?<!\w){re.escape(gold)}(?!\w)", text, re.IGNORECASE)) for gold in golds]
        found = [matches[-1].span() for matches in matches_by_gold if matches]
        places = found if len(found) == 1 else []
    return next(((f"{text[:start]}{{}}{text[end:]}", text[start:end]) for start, end in places), None)


def _in_tag(text: str, golds: Sequence[str]) -> tuple[str, str] | None:
    found = re.fullmatch(r"(?s)(<(\w+)>\s*)(.*?)(\s*</\2>)", text.strip())
    if found is None or any(found[1].strip() in gold for gold in golds):
        return None
    return f"{found[1]}{{}}{found[4]}", found[3]


def _without_words(text: str, around: Sequence[str]) -> tuple[str, str] | None:
    for form in around:
        lead, _, end = form.partition("{}")
        return form, text[len(lead) : len(text) - len(end)]
    return None


def _common(texts: Sequence[str]) -> str:
    """The characters with which all begin."""
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*texts)))  # noqa: B905


def _leads(code: str) -> list[str]:
    """The first two beginnings of the code's string literals, up to a placeholder, that may stand before an answer."""
    literals = re.findall(
        r"""[rfb]{0,2}(["'])((?:(?!\1)[^\n]){2,60})\1""", re.sub(r'"{3}.*?"{3}', "", code, flags=re.DOTALL)
    )
    begins = (re.split(r"[\\\[(.*+?{^$|]", text.lstrip("^").removeprefix("(?i)"))[0] for _, text in literals)
    return list(dict.fromkeys(text for text in begins if re.fullmatch(r"\w[^<>\n]{0,30}[:=>~-]\s?", text)))[:2]


def make_cases(dataset: Iterable[Mapping[str, Any]], answer: str | None, num_rows: int) -> tuple[ProbeCase, ...]:
    """`num_rows` rows whose answers differ as far as possible, among the first thousand.

    `answer` is a column, or a template such as `{city}, {country}`.

    Raises:
        DataError: no rows, or rows without a prompt.
    """
    rows = [(index, dict(row)) for index, row in enumerate(islice(dataset, MAX_ROWS_READ))]
    if not rows:
        raise DataError("the dataset has no rows to test with")
    if "prompt" not in rows[0][1]:
        raise DataError(
            f"rows have no `prompt`, but {', '.join(rows[0][1])}.",
            code="D001",
            fix='Rename the column that has the question, or test a recipe that names it, as in prompt: "{my_column}".',
            settings=("prompt",),
            second_first_rows=", ".join(rows[0][1]),
        )
    read = parse(answer) if answer and "{" in answer else lambda row: row.get(answer or "")
    chosen = _most_different([(index, row, gold_of(read(row))) for index, row in rows], num_rows)
    golds = [gold for _, _, gold in chosen if gold is not None]
    return tuple(
        ProbeCase(
            row=index,
            prompt=row["prompt"],
            columns={key: value for key, value in row.items() if key not in NOT_COLUMNS},
            gold=STAND_IN if gold is None else gold,
            has_gold=gold is not None,
            wrong=_wrong_for(_accepted(read(row)) or [STAND_IN], place, golds),
            golds=tuple(dict.fromkeys(golds)),
        )
        for place, (index, row, gold) in enumerate(chosen)
    )


def _is_in(gold: str | None, prompt: str | list[Message]) -> bool:
    """Whether the question has the answer in it as a word, as 0 + 7 has 7: a copy of it is then right."""
    return gold is not None and re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", last_user_turn(prompt)) is not None


def _most_different(rows: Sequence[tuple[int, dict[str, Any], str | None]], num_rows: int) -> list[Any]:
    """Rows with answers that differ and, if possible, are not in their questions; if too few, any with an answer.

    They are spread over all such rows, because the first of a sorted table are alike, and stay in the dataset's order.
    """
    seen: set[str] = set()
    ranks = []
    for copied, index, gold in sorted((_is_in(gold, row["prompt"]), index, gold) for index, row, gold in rows):
        rank = int(copied)
        if gold is None:
            rank = 3
        elif gold in seen:
            rank = 2
        ranks.append((rank, index))
        seen.add(gold or "")
    distinct = sorted(index for rank, index in ranks if rank == 0)
    if len(distinct) > num_rows:
        chosen = {distinct[place * len(distinct) // num_rows] for place in range(num_rows)}
    else:
        chosen = {index for _, index in sorted(ranks)[:num_rows]}
    return [row for row in rows if row[0] in chosen]


def _accepted(value: Any) -> list[str]:
    """The right answers in a column's value: of a list each of its items is one."""
    return [gold for part in (value if isinstance(value, (list, tuple)) else [value]) if (gold := gold_of(part))]


def _wrong_for(accepted: Sequence[str], place: int, golds: Sequence[str]) -> str:
    """The answer half of the rows away, or the next that differs from all that are accepted.

    Not a neighbour's, to tell wrong answers from columns that are one row off; and where all answers differ every one
    is wrong for one row, so that a score of the text alone has the same mean for right and wrong answers.
    """
    far = [golds[(place + len(golds) // 2 + step) % len(golds)] for step in range(len(golds))]
    value = as_number(accepted[0])
    made_up = "something else" if value is None else f"{value + 1:g}"
    return next((other for other in far if not any(same_answer(other, answer) for answer in accepted)), made_up)


def columns_of(answer: str | None) -> tuple[str, ...]:
    """The columns of an answer that is a column, or a template of several.

    >>> columns_of("answer"), columns_of("{city}, {country}"), columns_of(None)
    (('answer',), ('city', 'country'), ())
    """
    if not answer:
        return ()
    return parse(answer).columns if "{" in answer else (answer,)


def answer_candidates(asked: Sequence[str], row: Mapping[str, Any]) -> tuple[str, ...]:
    """Possible places of the answers, the likeliest first: a column, or a template of several; none: no such column.

    Of the columns that the function reads: the one with a usual name, each, and all together. Where it reads none, the
    column with a usual name. Of one that reads tests: the program that passes them.

    >>> answer_candidates(["capital"], {"prompt": "", "capital": "", "answer": ""})
    ('capital',)
    >>> answer_candidates([], {"prompt": "", "solution": "", "level": ""})
    ('solution',)
    >>> answer_candidates(["tests"], {"prompt": "", "code": "", "tests": ""})
    ('code', 'tests')
    >>> answer_candidates(["a", "answer"], {"a": "x", "answer": 1})
    ('answer', 'a', '{{"a": "{a}", "answer": {answer}}}', '{a}, {answer}', '{a} {answer}')
    """
    if len(asked) == 1 and asked[0] in TESTS:
        return (*[column for column in (*GOLD_COLUMNS, *PROGRAMS) if column in row][:1], *asked)
    usual = [column for column in GOLD_COLUMNS if column in (asked or row)][:1]
    if not usual:
        usual = [column for column in GOLD_COLUMNS if column in row][: len(asked) > 1]
    if len(asked) < 2:
        return tuple(asked or usual)
    fields = (f'"{name}": "{{{name}}}"' if isinstance(row[name], str) else f'"{name}": {{{name}}}' for name in asked)
    joined = [separator.join(f"{{{name}}}" for name in asked) for separator in (", ", " ")]
    return (*dict.fromkeys([*usual, *asked]), f"{{{{{', '.join(fields)}}}}}", *joined)


_INNER = {"ground_truth": "ground_truth", "answer_start": "text", "aliases": "aliases"}
"""By a field that tells a mapping of verl, SQuAD or TriviaQA, the field with the answer; others are JSON to write."""


def gold_of(value: Any) -> str | None:
    r"""The right answer in a column's value as a model would write it; None where there is none.

    >>> gold_of("6 * 7 = 42\n#### 42"), gold_of(r"so $\boxed{\frac{1}{3}}$"), gold_of(7), gold_of(["Paris", "paris"])
    ('42', '\\frac{1}{3}', '7', 'Paris')
    >>> gold_of({"style": "rule", "ground_truth": "7"}), gold_of({"name": "Ana", "age": 41}), gold_of(" "), gold_of([])
    ('7', '{"name": "Ana", "age": 41}', None, None)
    """
    if isinstance(value, Mapping):
        inner = [_INNER[key] for key in value if key in _INNER]
        inner += [key for key in ("answer", "target", "solution") if [*value] == [key]]
        return gold_of(value.get(inner[0])) if inner else json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, (list, tuple)):
        return gold_of(value[0]) if value else None
    text = "" if value is None else str(value)
    text = after_hashes(text) or text
    return (boxed(text) or text).strip() or None


def as_number(text: str) -> float | None:
    """
    >>> as_number("1,000"), as_number("-.5"), as_number("five"), as_number("nan")
    (1000.0, -0.5, None, None)
    """
    try:
        return float(text.replace(",", "")) if any(map(str.isdigit, text)) else None
    except ValueError:
        return None


def same_answer(one: str, other: str) -> bool:
    """Equal as texts, case and white space aside, or as numbers.

    >>> same_answer("7.0", "7"), same_answer(" Paris", "paris"), same_answer("7", "17")
    (True, True, False)
    """
    values = as_number(one), as_number(other)
    if None not in values:
        return values[0] == values[1]
    return " ".join(one.casefold().split()) == " ".join(other.casefold().split())
