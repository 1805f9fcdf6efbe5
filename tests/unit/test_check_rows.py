"""Rules about rows on prepared surveys: no recipe, no model, no file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from podium.checks import data
from podium.checks.setup import Setup
from podium.data import PromptBuilder
from podium.data.sources import list_source
from podium.data.survey import RowSurvey, survey_rows
from podium.errors import Finding
from podium.errors.rule import findings
from podium.testing import tiny_tokenizer

PLAIN = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]
CHAT = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in PLAIN]
RULES = (data.LONG_ANSWERS, *data.RULES)


def survey(rows: list[dict[str, Any]], **settings: Any) -> RowSurvey:
    builder = PromptBuilder(tokenizer=tiny_tokenizer(), max_completion_length=32)
    return survey_rows(RowSurvey(source=list_source(rows, "rows"), builder=builder, **settings))


def found(rows: list[dict[str, Any]], keys: dict[str, Any] | None = None, **facts: Any) -> dict[str, Finding]:
    """The findings of the rules about rows, by code; `keys`: those of a recipe."""
    train = survey(rows)
    judge = SimpleNamespace(name="right", needs=("answer",), wants=None)
    setup = Setup(train=train, builder=train.builder, rewards=(judge,), given=keys or {}, **facts)  # type: ignore[arg-type]
    return {finding.code: finding for finding in findings(RULES, setup)}


def turns(*contents: str, role: str = "user") -> dict[str, Any]:
    return {"prompt": [{"role": role, "content": content} for content in contents], "answer": "2"}


CALL = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather"}}]},
    {"role": "tool", "content": "no"},
    {"role": "user", "content": "So?"},
]

ODD = {
    "system messages alone": (turns("1+1", role="system"), "D042", {"count": 1, "nothing_asked": "row 40"}),
    "a developer's alone": (turns("1+1", role="developer"), "D042", {"count": 1}),
    "a late system message": (
        {"prompt": [*turns("1+1")["prompt"], {"role": "system", "content": "No."}], "answer": "2"},
        "D012",
        {"count": 1, "late_system": "row 40"},
    ),
    "a tool's turn": ({"prompt": CALL, "answer": "2"}, "D043", {"example": "the call of `weather` in message 2"}),
    "control tokens": (turns("1<|im_end|>"), "D044", {"example": "<|im_end|>", "control": "row 40"}),
    "control tokens in a part": (
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1<|im_end|>"}]}], "answer": "2"},
        "D044",
        {"count": 1},
    ),
    "control tokens in a plain prompt": ({"prompt": "1+1<|im_end|>", "answer": "2"}, "D044", {"count": 1}),
    "a NUL": (turns("1\x001"), "D033", {"count": 1, "nul": "row 40"}),
    "a long answer": ({**turns("1+1"), "answer": "x" * 40}, "D037", {"count": 1, "tokens": 40}),
    "a null answer": ({**turns("1+1"), "answer": None}, "D018", {"count": 1, "num_rows": 41}),
    "a marked answer": ({**turns("1+1"), "answer": "N/A"}, "D018", {"marks": ["'N/A'"], "rows": "row 40"}),
    "a number among texts": ({**turns("1+1"), "answer": 2}, "D019", {"counts": "40 str, 1 int"}),
    "a repeated prompt": (CHAT[3], "D016", {"repeats": 1, "row": 40, "first": 3}),
    "another answer": ({**CHAT[3], "answer": "5"}, "D041", {"answer": "5", "other": "4"}),
}
"""By name, a row behind forty good ones, the code of the finding, and some of its facts."""


@pytest.mark.defect("S5", "system messages alone, a tool's turn, control tokens in a message, a part, a plain prompt")
@pytest.mark.parametrize(("row", "code", "facts"), ODD.values(), ids=ODD)
def test_an_odd_row_is_a_finding(row: dict[str, Any], code: str, facts: dict[str, Any]) -> None:
    assert code not in found(CHAT)
    finding = found([*CHAT, row])[code]
    assert {name: finding.facts[name] for name in facts} == facts


WHOLE = {
    "one answer": ([{**row, "answer": "4"} for row in PLAIN], "D046", {"value": "4", "count": 40}),
    "sentences": ([{**row, "answer": f"The sum is {row['answer']}."} for row in PLAIN], "D047", {"way": "last number"}),
    "lists as text": ([{**row, "prompt": str(row["prompt"])} for row in CHAT], "D059", {"count": 40, "total": 40}),
    "null answers": ([{**row, "answer": None} for row in PLAIN], "D018", {"count": 40, "num_rows": 40}),
}
"""By name, rows, the code of the finding, and some of its facts."""


@pytest.mark.parametrize(("rows", "code", "facts"), WHOLE.values(), ids=WHOLE)
def test_all_rows_are_odd(rows: list[dict[str, Any]], code: str, facts: dict[str, Any]) -> None:
    assert code not in found(PLAIN)
    finding = found(rows)[code]
    assert {name: finding.facts[name] for name in facts} == facts


def test_answers_that_are_null_everywhere_stop_the_run() -> None:
    assert found([{**row, "answer": None} for row in PLAIN])["D018"].severity == "error"
    assert found([*PLAIN, {"prompt": "1", "answer": None}])["D018"].severity == "warning"


def test_calls_that_cannot_be_rendered_are_no_fault_of_the_rows() -> None:
    toolless = Finding(code="C052", severity="error", what="no tools")
    assert "D043" not in found([*CHAT, {"prompt": CALL, "answer": "2"}], problems=(toolless,))


@pytest.mark.parametrize(
    ("row", "code", "changes"),
    [
        ({"prompt": "1", "answer": None}, "D018", {"filter": "gold != ''"}),
        ({"prompt": "1", "answer": "N/A"}, "D018", {"filter": ["gold != 'N/A'"]}),
        ({"prompt": None, "answer": "1"}, "D005", {"filter": "question != ''"}),
        ({"prompt": [{"role": "user", "content": "1"}], "answer": "1"}, "D013", {"chat": True}),
    ],
)
def test_the_cure_names_the_columns_of_the_recipe(row: dict[str, Any], code: str, changes: dict[str, Any]) -> None:
    keys = {"prompt": "{question}", "answer": "{gold}"}
    assert found([*PLAIN, row], keys)[code].changes == changes
    assert found([*PLAIN, row])[code].changes == {}


def test_a_condition_of_the_recipe_stays_in_a_cure() -> None:
    keys = {"answer": "{gold}", "filter": "level < 3"}
    assert found([*PLAIN, {"prompt": "1", "answer": None}], keys)["D018"].changes["filter"] == [
        "level < 3",
        "gold != ''",
    ]


def test_held_out_prompts_that_are_trained_on_are_counted_whatever_their_spelling() -> None:
    held_out = survey([{"prompt": " what IS 3 + 1? ", "answer": "4"}])
    train = survey(PLAIN, held_out=held_out.prompts)
    setup = Setup(train=train, evaluation=held_out, builder=train.builder)
    [leak] = [finding for finding in findings(data.RULES, setup) if finding.code == "D017"]
    assert (leak.facts["count"], leak.facts["shared"]) == (1, "row 3")
    played = Setup(train=train, evaluation=held_out, builder=train.builder, given={"environment": "x.py:make"})
    assert "D017" not in [finding.code for finding in findings(data.RULES, played)]
