"""Rows of a dataset as the audit needs them: the right answer as text, wrong ones beside it, forms to write them in.

Knows columns and texts; calls no reward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from podium.data.templates import parse
from podium.errors import DataError
from podium.records import Message
from podium.rewards.tester.asking import Described

GOLD_COLUMNS = (
    "answer",
    "answers",
    "solution",
    "ground_truth",
    "target",
    "label",
    "reference",
    "gold",
    "expected",
    "final_answer",
    "reward_model",
)
"""What datasets call the right answer, most usual first."""

STAND_IN = "42"
"""Written in place of an answer where rows have none."""

ROWS_LOOKED_AT = 1000
"""Rows among which different answers are looked for."""

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
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
        """All that the prompt says."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(str(message.get("content") or "") for message in self.prompt)

    @property
    def question(self) -> str:
        """What the model is asked last: the last user turn, or the whole of a plain prompt."""
        if isinstance(self.prompt, str):
            return self.prompt
        asked = [message for message in self.prompt if message.get("role") == "user"] or list(self.prompt)
        return str(asked[-1].get("content") or "")

    @property
    def value(self) -> float | None:
        """The right answer as a number; None where it is none."""
        return as_number(self.gold)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A way to write an answer down."""

    name: str
    write: Callable[[str], str]


_THOUGHT = "First I look at what is asked, then I work it out."

FORMS = (
    Form(name="bare", write=lambda x: x),
    Form(name="<answer> tags", write=lambda x: f"<answer>{x}</answer>"),
    Form(name="<think>, then <answer>", write=lambda x: f"<think>{_THOUGHT}</think>\n<answer>{x}</answer>"),
    Form(name="<reasoning>, then <answer>", write=lambda x: f"<reasoning>{_THOUGHT}</reasoning>\n<answer>{x}</answer>"),
    Form(name=r"\boxed{x}", write=lambda x: f"\\boxed{{{x}}}"),
    Form(name=r"$\boxed{x}$ in a sentence", write=lambda x: f"The answer is $\\boxed{{{x}}}$."),
    Form(
        name=r"<think>, then \boxed{x}", write=lambda x: f"<think>{_THOUGHT}</think>\nThe answer is $\\boxed{{{x}}}$."
    ),
    Form(name="#### x", write=lambda x: f"{_THOUGHT}\n#### {x}"),
    Form(name="#### x alone", write=lambda x: f"#### {x}"),
    Form(name="The answer is x.", write=lambda x: f"The answer is {x}."),
    Form(name="Answer: x", write=lambda x: f"{_THOUGHT}\nAnswer: {x}"),
    Form(name="<think>, then bare", write=lambda x: f"<think>{_THOUGHT}</think>\n{x}"),
    Form(name="(x)", write=lambda x: f"({x})"),
    Form(name="**x**", write=lambda x: f"**{x}**"),
    Form(name="JSON text", write=lambda x: json.dumps({"answer": x}, ensure_ascii=False)),
    Form(name="JSON value", write=lambda x: f'{{"answer": {x}}}'),
    Form(name="code block", write=lambda x: f"```python\n{x}\n```"),
)
"""The forms that rewards in use read. `forms_for` adds the tags of the prompts and of the function's own code."""

_KNOWN_TAGS = frozenset({"answer", "think", "reasoning"})


def forms_for(texts: Iterable[str], templates: Iterable[str] = ()) -> tuple[Form, ...]:
    """`FORMS`, the tags that the texts name, and templates with `{}` for the answer.

    >>> [form.name for form in forms_for(["write <final>7</final>"])[len(FORMS):]]
    ['<final> tags', '<think>, then <final>']
    >>> forms_for([], templates=["= {}"])[-1].write("7")
    '= 7'
    """
    found = (tag for text in texts for tag in re.findall(r"</([A-Za-z][\w-]{0,30})>", text))
    tags = [tag for tag in dict.fromkeys(found) if tag not in _KNOWN_TAGS][:4]
    return (
        *FORMS,
        *(form for tag in tags for form in _tag_forms(tag)),
        *(_template_form(template) for template in templates),
    )


def _tag_forms(tag: str) -> tuple[Form, Form]:
    return (
        Form(name=f"<{tag}> tags", write=lambda x: f"<{tag}>{x}</{tag}>"),
        Form(name=f"<think>, then <{tag}>", write=lambda x: f"<think>{_THOUGHT}</think>\n<{tag}>{x}</{tag}>"),
    )


def _template_form(template: str) -> Form:
    return Form(name=template, write=lambda x: template.replace("{}", x))


# --- rows ------------------------------------------------------------------------------------------------------------


def make_cases(dataset: Iterable[Mapping[str, Any]], answer: str | None, num_rows: int) -> tuple[Case, ...]:
    """`num_rows` rows with answers as different as can be had among the first thousand.

    `answer` is a column, or a template such as `{city}, {country}`.

    Raises:
        DataError: no rows, or rows without a prompt.
    """
    rows = [(index, dict(row)) for index, row in enumerate(islice(dataset, ROWS_LOOKED_AT))]
    if not rows:
        raise DataError("the dataset has no rows to test with")
    if "prompt" not in rows[0][1]:
        raise DataError(
            f"rows have no `prompt`, but {', '.join(rows[0][1])}.",
            code="D001",
            fix='Rename the column that has the question, or test a recipe that names it, as in prompt: "{my_column}".',
        )
    read = parse(answer) if answer and "{" in answer else lambda row: row.get(answer or "")
    chosen = _most_different([(index, row, gold_of(read(row))) for index, row in rows], num_rows)
    golds = [gold for _, _, gold in chosen if gold is not None]
    return tuple(
        Case(
            row=index,
            prompt=row["prompt"],
            columns={key: value for key, value in row.items() if key not in ("prompt", "completion", "completion_ids")},
            gold=STAND_IN if gold is None else gold,
            has_gold=gold is not None,
            wrong=_wrong_for(STAND_IN if gold is None else gold, place, golds),
            golds=tuple(dict.fromkeys(golds)),
        )
        for place, (index, row, gold) in enumerate(chosen)
    )


def _most_different(rows: Sequence[tuple[int, dict[str, Any], str | None]], num_rows: int) -> list[Any]:
    """First rows whose answer no other has, then rows with an answer, then any; in the dataset's order."""
    seen: set[str] = set()
    ranks = []
    for index, _, gold in rows:
        rank = 2 if gold is None else int(gold in seen)
        seen.add(gold or "")
        ranks.append((rank, index))
    chosen = {index for _, index in sorted(ranks)[:num_rows]}
    return [row for row in rows if row[0] in chosen]


def _wrong_for(gold: str, place: int, golds: Sequence[str]) -> str:
    """The answer half of the rows away, or the next that differs.

    Not a neighbour's, to tell wrong answers from columns that are one row off; and where all answers differ every one
    is wrong for one row, so that a score of the text alone has the same mean for right and wrong answers.
    """
    far = [golds[(place + len(golds) // 2 + step) % len(golds)] for step in range(len(golds))]
    others = [other for other in far if not same_answer(other, gold)]
    if others:
        return others[0]
    value = as_number(gold)
    return "something else" if value is None else f"{value + 1:g}"


def asked_columns(described: Described, columns: Iterable[str]) -> tuple[str, ...]:
    """Columns of the data that the signature names; with `**kwargs` also those that the code looks up, `x["name"]`."""
    named = {*(described.needs if described.wants is None else described.wants)}
    if described.wants is None:
        named |= set(re.findall(r"""(?:\[|\.get\()["'](\w+)["']""", described.code_text))
    return tuple(c for c in columns if c in named and c not in ("prompt", "completion", "completion_ids"))


def columns_of(answer: str | None) -> tuple[str, ...]:
    """The columns of an answer that is a column, or a template of several.

    >>> columns_of("answer"), columns_of("{city}, {country}"), columns_of(None)
    (('answer',), ('city', 'country'), ())
    """
    return parse(answer).columns if answer and "{" in answer else (answer,) if answer else ()


def answer_candidates(asked: Sequence[str], row: Mapping[str, Any]) -> tuple[str, ...]:
    """Where answers may stand, the likeliest first: a column, or a template of several; none: no such column.

    Of what the function asks for, the column whose name says so; of several others each, and all together. Where it
    asks for nothing, the column whose name says so.

    >>> answer_candidates(["capital"], {"prompt": "", "capital": "", "answer": ""})
    ('capital',)
    >>> answer_candidates([], {"prompt": "", "solution": "", "level": ""})
    ('solution',)
    >>> answer_candidates(["a", "b"], {"a": "x", "b": 1})
    ('a', 'b', '{{"a": "{a}", "b": {b}}}', '{a}, {b}', '{a} {b}')
    """
    by_name = [column for column in GOLD_COLUMNS if column in asked] or list(asked[:1] if len(asked) == 1 else ())
    usual = [column for column in GOLD_COLUMNS if column in row][:1]
    if by_name or not asked:
        return tuple(by_name[:1] or usual)
    fields = (f'"{name}": "{{{name}}}"' if isinstance(row[name], str) else f'"{name}": {{{name}}}' for name in asked)
    joined = [separator.join(f"{{{name}}}" for name in asked) for separator in (", ", " ")]
    return (*usual, *asked, f"{{{{{', '.join(fields)}}}}}", *joined)


# --- answers ---------------------------------------------------------------------------------------------------------


def gold_of(value: Any) -> str | None:
    r"""The right answer in a column's value as a model would write it; None where there is none.

    >>> gold_of("6 * 7 = 42\n#### 42"), gold_of(r"so $\boxed{\frac{1}{3}}$"), gold_of(7), gold_of(["Paris", "paris"])
    ('42', '\\frac{1}{3}', '7', 'Paris')
    >>> gold_of({"style": "rule", "ground_truth": "7"}), gold_of(" "), gold_of([])
    ('7', None, None)
    """
    if isinstance(value, Mapping):
        keys = [key for key in ("ground_truth", "answer", "target", "solution") if key in value]
        return gold_of(value[keys[0]]) if keys else None
    if isinstance(value, (list, tuple)):
        return gold_of(value[0]) if value else None
    if value is None:
        return None
    text = str(value)
    if "####" in text:
        text = text.rsplit("####", 1)[1]
    return (_boxed(text) or text).strip() or None


def _boxed(text: str) -> str | None:
    """What the last `\\boxed{}` holds, braces inside counted."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def as_number(text: str) -> float | None:
    """
    >>> as_number("1,000"), as_number("-.5"), as_number("five"), as_number("nan")
    (1000.0, -0.5, None, None)
    """
    try:
        value = float(text.replace(",", "")) if re.search(r"\d", text) else None
    except ValueError:
        return None
    return value


def numbers_in(text: str) -> list[str]:
    """
    >>> numbers_in("What is 1,000 + 4.5?")
    ['1,000', '4.5']
    """
    return _NUMBER.findall(text)


def same_answer(one: str, other: str) -> bool:
    """Equal as texts, case and white space aside, or as numbers.

    >>> same_answer("7.0", "7"), same_answer(" Paris", "paris"), same_answer("7", "17")
    (True, True, False)
    """
    values = as_number(one), as_number(other)
    if None not in values:
        return values[0] == values[1]
    return " ".join(one.casefold().split()) == " ".join(other.casefold().split())
