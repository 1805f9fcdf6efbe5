"""The reward tester has nothing to say against the library's own rewards, each with data that suits it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from podium.recipe.rewards import find_reward
from podium.rewards import LIBRARY
from podium.tester.rewards import ExamineSettings, examine

SUMS = [
    {"prompt": f"What is {a} + {b}?", "answer": str(a + b), "solution": str(a + b)}
    for a, b in [(13 + 7 * i, 25 + 3 * i) for i in range(8)]
]
FRACTIONS = [
    {"prompt": f"Simplify {2 * n}/{2 * d}.", "answer": rf"\frac{{{n}}}{{{d}}}", "solution": rf"$\frac{{{n}}}{{{d}}}$"}
    for n, d in [(1, 3), (2, 5), (3, 7), (4, 9)]
]
CHAINS = [
    {"prompt": f"What is {n} + 8 - {2 * n}?", "solution": f"{n} + 8 = {n + 8}, {n + 8} - {2 * n} = {8 - n}"}
    for n in range(2, 10)
]
CHOICES = [{"prompt": f"Which is the {n}th letter?\nA) K\nB) L\nC) M\nD) N", "answer": "ABCD"[n % 4]} for n in range(8)]
QUESTIONS = [
    {"prompt": f"What does {who} need?", "answer": " and ".join(words), "keywords": words}
    for who, words in {
        "a plant": ["light", "water"],
        "a fire": ["fuel", "oxygen"],
        "a letter": ["an address", "a stamp"],
        "bread": ["flour", "yeast"],
    }.items()
]
CODE = [
    {
        "prompt": f"Write add{n}(x), which adds {n}.",
        "solution": f"def add{n}(x):\n    return x + {n}",
        "tests": [{"call": f"add{n}", "args": [x], "expected": x + n} for x in (1, 5)],
    }
    for n in (1, 2, 3)
]
OBJECTS = [
    {"prompt": f"Write as JSON: {who}, {age}.", "answer": json.dumps({"name": who, "age": age})}
    for who, age in [("Ana", 41), ("Ben", 7), ("Cleo", 23), ("Dan", 68)]
]


def gym_rows() -> list[dict[str, Any]]:
    reasoning_gym = pytest.importorskip("reasoning_gym")

    items = reasoning_gym.create_dataset("basic_arithmetic", size=4, seed=7)
    return [
        {"prompt": item["question"], "answer": item["answer"], "metadata": json.dumps(item["metadata"], default=str)}
        for item in items
    ]


@dataclass(frozen=True)
class Suits:
    """ExamineSettings and rows with which a reward makes sense."""

    rows: Any = field(default_factory=lambda: SUMS)
    args: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "style"


CORRECT: dict[str, Any] = {"kind": "correctness"}
SUITABLE: dict[str, Suits] = {
    "accuracy_reward": Suits(rows=FRACTIONS, settings={"num_rows": 3}, **CORRECT),
    "answer_correct": Suits(**CORRECT),
    "answer_f1": Suits(**CORRECT),
    "text_similarity": Suits(**CORRECT),
    "answer_format": Suits(),
    "clipped": Suits(args={"reward": "numeric_match", "high": 0.5}, **CORRECT),
    "code_stages": Suits(rows=CODE, settings={"answer_column": "solution", "num_rows": 3}, **CORRECT),
    "code_tests": Suits(rows=CODE, settings={"answer_column": "solution", "num_rows": 3}, **CORRECT),
    "distinct_ngrams": Suits(),
    "exact_match": Suits(**CORRECT),
    "forbidden_patterns": Suits(args={"patterns": ["as an ai", "the answer is"]}),
    "gated": Suits(args={"reward": "numeric_match", "gate": "answer_format"}, **CORRECT),
    "get_cosine_scaled_reward": Suits(rows=FRACTIONS, args={"max_len": 100}, settings={"num_rows": 3}, **CORRECT),
    "get_repetition_penalty_reward": Suits(),
    "get_soft_overlong_punishment": Suits(args={"max_completion_len": 300, "soft_punish_cache": 100}),
    "group_diversity": Suits(),
    "ideal_length": Suits(args={"tokens": 40}),
    "json_format": Suits(),
    "json_match": Suits(rows=OBJECTS, **CORRECT),
    "json_schema": Suits(args={"schema": {"type": "object", "required": ["answer"]}}),
    "keyword_coverage": Suits(rows=QUESTIONS, args={"max_words": 12}, **CORRECT),
    "language": Suits(),
    "math_match": Suits(rows=FRACTIONS, settings={"num_rows": 3}, **CORRECT),
    "multiple_choice": Suits(rows=CHOICES, **CORRECT),
    "normalised": Suits(args={"reward": "numeric_match", "scale": "none"}, **CORRECT),
    "numeric_closeness": Suits(**CORRECT),
    "numeric_match": Suits(**CORRECT),
    "reasoning_accuracy_reward": Suits(rows=FRACTIONS, settings={"num_rows": 3}, **CORRECT),
    "reasoning_gym": Suits(rows=gym_rows, args={"dataset": "basic_arithmetic"}, settings={"num_rows": 3}, **CORRECT),
    "regex_format": Suits(args={"pattern": r"#### \d+"}),
    "required_patterns": Suits(args={"patterns": ["answer", "[0-9]"]}),
    "scheduled": Suits(args={"reward": "answer_correct", "start": 0.5, "end": 1.0}, **CORRECT),
    "think_format": Suits(),
    "think_format_reward": Suits(),
    "token_budget": Suits(args={"tokens": 50}),
    "weighted": Suits(args={"rewards": ["numeric_match", "answer_format"], "weights": [2, 1]}, **CORRECT),
    "worked_steps": Suits(rows=CHAINS, settings={"answer_column": "solution"}, **CORRECT),
    "xml_format": Suits(),
    "xml_format_partial": Suits(),
}
NOT_HERE = {
    "reward_model": "needs the weights of a model",
    "judge": "asks a service",
    "tool_use": "scores the calls in a conversation, which the answers that are tried do not have",
}
"""Not called, and why."""


def test_every_reward_of_the_library_is_in_the_table() -> None:
    assert set(LIBRARY) - set(NOT_HERE) == set(SUITABLE)


IN_SANDBOX = ("code_stages", "code_tests", "reasoning_gym")
"""Some thousand programs."""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in IN_SANDBOX)) for name in SUITABLE]
)
def test_nothing_is_said_against(name: str) -> None:
    suits = SUITABLE[name]
    rows = suits.rows() if callable(suits.rows) else suits.rows
    settings = ExamineSettings(**{"limit_seconds": 30.0, **suits.settings})
    report = examine(find_reward(name, suits.args), rows, settings=settings)
    assert [str(finding) for finding in report.findings if finding.severity != "note"] == []
    assert report.kind == suits.kind


@pytest.mark.parametrize("key", ["city", "answer"])
def test_objects_are_written_as_json(key: str) -> None:
    """Also those that a table holds as such, with a field of any name."""
    rows = [{**row, "answer": {**json.loads(row["answer"]), key: row["prompt"][-3:]}} for row in OBJECTS]
    report = examine(find_reward("json_match", {}), rows)
    assert [str(finding) for finding in report.findings if finding.severity != "note"] == []
    assert report.kind == "correctness"


def test_an_accepted_answer_is_no_wrong_one() -> None:
    """Where several are right: the answer of another row may be among them."""
    labels = ["home", "work", "bill", "spam"]
    rows = [{"prompt": f"Mail {n}", "answer": [labels[n % 4], labels[(n + 1) % 4]]} for n in range(8)]
    report = examine(find_reward("exact_match", {}), rows)
    assert [str(finding) for finding in report.findings if finding.severity != "note"] == []
