"""A reward test that could test little says so: never that nothing was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForSequenceClassification

from podium.rewards import RewardModel, audit, examine
from podium.tester.rewards import ExamineSettings, RewardReport
from podium.testing import tiny_model, tiny_tokenizer

ROWS = [
    {"prompt": f"Which town is number {n}?", "town": f"Town{n}", "land": f"Land{n}", "mood": mood}
    for n, mood in enumerate(["glad", "cross", "calm", "tired", "keen", "bored", "proud", "sorry"])
]


def in_text(completions, mood):
    return [float(gold in text) for text, gold in zip(completions, mood, strict=True)]


def with_others(completions, mood, **kwargs):
    return in_text(completions, mood)


def from_kwargs(completions, **kwargs):
    return in_text(completions, kwargs["mood"])


def by_get(completions, **columns):
    return in_text(completions, columns.get("mood"))


def both(completions, town, land):
    return [float(a in text and b in text) for text, a, b in zip(completions, town, land, strict=True)]


def as_json(completions, town, land):
    return [float(_parsed(text) == {"town": a, "land": b}) for text, a, b in zip(completions, town, land, strict=True)]


def other_keys(completions, town, land):
    return [float(_parsed(text) == {"t": a, "l": b}) for text, a, b in zip(completions, town, land, strict=True)]


def last_of_two(completions, town, land):
    return [float(land_ in text) for text, land_ in zip(completions, land, strict=True)]


def short(completions):
    return [float(len(text) < 20) for text in completions]


def short_with_all(completions, **kwargs):
    return short(completions)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def codes(report: RewardReport) -> set[str]:
    return {finding.code for finding in report.findings}


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("reward", "column", "expected"),
    [
        pytest.param(in_text, "mood", {"W106", "W107"}, marks=pytest.mark.defect("D2", "a column `mood`")),
        pytest.param(with_others, "mood", {"W106", "W107"}, marks=pytest.mark.defect("D2", "`mood`, and **kwargs")),
        pytest.param(from_kwargs, "mood", {"W106", "W107"}, marks=pytest.mark.defect("D2", 'kwargs["mood"]')),
        pytest.param(by_get, "mood", {"W106", "W107"}, marks=pytest.mark.defect("N", 'columns.get("mood")')),
        pytest.param(
            both,
            '{{"town": "{town}", "land": "{land}"}}',
            {"W106"},
            marks=pytest.mark.defect("D2", "two columns, each in the text"),
        ),
        pytest.param(
            as_json,
            '{{"town": "{town}", "land": "{land}"}}',
            set(),
            marks=pytest.mark.defect("D2", "two columns as JSON"),
        ),
        pytest.param(last_of_two, "land", {"W106"}, marks=pytest.mark.defect("N", "two columns, one of them compared")),
    ],
)
def test_the_columns_that_a_function_reads_are_found(reward: Any, column: str, expected: set[str], now: Any) -> None:
    report = examine(reward, ROWS)
    assert (report.kind, report.column) == ("correctness", column)
    assert expected <= codes(report)
    assert "W008" not in codes(report)
    assert "W122" not in codes(report)
    now(f"right answers from {column}; {', '.join(sorted(codes(report))) or 'no finding'}")


@pytest.mark.parametrize(
    ("reward", "severity", "said"),
    [
        pytest.param(short, "note", "reads no column of the data", marks=pytest.mark.defect("D2", "style alone")),
        pytest.param(
            short_with_all,
            "note",
            "reads no column of the data that could be found in its code",
            marks=pytest.mark.defect("N", "style alone, with **kwargs"),
        ),
    ],
)
def test_what_was_not_tested_is_said(reward: Any, severity: str, said: str, now: Any) -> None:
    [finding] = [finding for finding in audit(reward, ROWS) if finding.code == "W122"]
    assert finding.severity == severity
    assert said in finding.what
    now(str(finding))


@pytest.mark.defect("D2", "two columns in a form that nobody can guess: the cure can express it")
def test_the_cure_for_two_columns_can_be_followed(now: Any) -> None:
    [finding] = audit(other_keys, ROWS)
    assert finding.code == "W008"
    assert "--answer-column '{town}, {land}'" in finding.fix
    now(str(finding))
    found = audit(other_keys, ROWS, answer_column='{{"t": "{town}", "l": "{land}"}}')
    assert [finding.code for finding in found] == ["W119"], "case matters to it, and no more is to be said"


@pytest.mark.defect("N", "a missing column is named with the function, not with its record")
def test_a_missing_column_is_one_sentence(now: Any) -> None:
    [finding] = audit(in_text, [{"prompt": "Which?", "answer": "a"}])
    assert finding.what.startswith("reward function `in_text` (")
    assert "Described" not in finding.what
    now(finding.what)


@pytest.fixture
def judge(tmp_path: Path) -> RewardModel:
    config = tiny_model("llama").config
    config.num_labels = 1
    return RewardModel(LlamaForSequenceClassification(config), tiny_tokenizer())


@pytest.mark.defect("F7", "chat rows, numbers in the question, a very long text")
def test_a_reward_model_is_not_failed_by_the_test_itself(judge: RewardModel, now: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 3?"}], "answer": str(n + 3)} for n in range(8)]
    report = examine(judge, rows, settings=ExamineSettings(num_rows=3))
    assert codes(report) == {"W122"}
    assert "a reward model" in report.findings[0].what
    now(str(report.findings[0]))


@pytest.mark.defect("F7", "audit of a reward that scores no right answer, questions without a number")
def test_questions_without_numbers_are_no_crash(now: Any) -> None:
    def never(completions, prompts, answer):
        return [float(text == "xyz" + gold) for text, gold in zip(completions, answer, strict=True)]

    rows = [
        {"prompt": f"What is the capital of {land}?", "answer": land[::-1]} for land in ("France", "Spain", "Italy")
    ]
    [finding] = audit(never, rows)
    assert finding.code == "W008"
    now(str(finding))
