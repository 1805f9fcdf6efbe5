"""Library rewards: what was refused or taken wrongly, as one table."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any

import pytest

from podium.rewards import ReasoningGym, gym_rows, library_reward
from podium.rewards.judge import Judge

Now = Callable[[str], None]


def case(line: str, what: str, reward: str, completion: str, gold: Any, expected: float | None, **settings: Any) -> Any:
    """One completion; the defect's case says what it is."""
    return pytest.param(reward, completion, gold, expected, settings, marks=pytest.mark.defect(line, what))


NUMBERS = [
    *[
        case("B9", f"{given} for {gold}", "numeric_match", f"<answer>{given}</answer>", gold, 0.0)
        for given, gold in [
            ("12345678", "12345679"),
            ("1000001", "1000000"),
            ("123456789012", "123456789013"),
            ("9007199254740993", "9007199254740992"),
            ("6.9999999", "7"),
            ("1e999999999999999999999", "1e99999999999999999998"),
        ]
    ],
    *[
        case("B9", f"{given} for {gold}", "numeric_match", given, gold, 1.0)
        for given, gold in [
            ("-$5", "-5"),
            ("The cost is -$5.", "-5"),
            ("- 5", "-5"),
            ("–7", "-7"),  # noqa: RUF001
            ("－7", "-7"),  # noqa: RUF001
            ("５", "5"),  # noqa: RUF001
            ("1 000", "1000"),
            ("12 345 678.5", "12345678.5"),
            ("1\u202f000", "1000"),
            ("1_000", "1000"),
            ("5x10^3", "5000"),
            (r"5 \times 10^{3}", "5000"),
            ("5×10**3", "5000"),  # noqa: RUF001
            ("7%", "0.07"),
            ("7%", "7"),
            ("7", "7%"),
            ("3.1415926", "3.14159265"),
            ("1000000.0", "1000000"),
        ]
    ],
    *[
        case("N", f"{given} for {gold}", "numeric_match", given, gold, expected)
        for given, gold, expected in [
            ("10 - 5", "5", 0.0),
            ("5²", "52", 0.0),
            ("of 3 – 7 apples", "7", 0.0),  # noqa: RUF001
            ("0 1 2 100", "1", 0.0),
            ("no number", "5", 0.0),
            ("5", "none", None),
            ("2 000 or 3 000", "3000", 0.0),
        ]
    ],
    case("N", "tolerance: 0.01 still holds for whole numbers", "numeric_match", "101", "100", 1.0, tolerance=0.01),
    # a number in the text that is not its answer
    *[
        case("B9", f"not the answer of {given[:9]}", "numeric_match", given, gold, 0.0)
        for given, gold in [("9/2", "1/2"), ("13:05", "12:05"), ("not 5", "5"), (" ".join(map(str, range(101))), "100")]
    ],
]
FORMULAS = [
    *[
        case("B2", f"{given} for {gold}", "math_match", rf"\boxed{{{given}}}", gold, 1.0)
        for given, gold in [
            (r"\frac12", r"\frac12"),
            (r"\frac 12", r"\frac{1}{2}"),
            (r"\frac{1}{2}", r"\frac12"),
            (r"1\frac12", r"\frac32"),
            (r"\sqrt2", r"\sqrt{2}"),
            (r"\frac{\sqrt3}2", r"\frac{\sqrt{3}}{2}"),
        ]
    ],
    *[
        case("B11", f"math_match: {given} for {gold}", "math_match", rf"\boxed{{{given}}}", gold, expected)
        for given, gold, expected in [
            (r"5\text{ cm}", r"5\text{ km}", 0.0),
            (r"5\ \mathrm{cm}", r"5\ \mathrm{cm}", 1.0),
            (r"5\text{ cm}", "5", 1.0),
            ("1=2=3=4=5", "5", 0.0),
            ("x=5", "5", 1.0),
            (r"1\,000", "1000", 1.0),
            ("5e3", "5000", 1.0),
        ]
    ],
    case(
        "B2",
        r"accuracy_reward keeps TRL's verdict of \frac12",
        "accuracy_reward",
        r"\boxed{\frac12}",
        r"\frac{1}{2}",
        0.0,
    ),
    case("N", "x = 2 + 3 = 5 is an answer", "math_match", r"\boxed{x = 2+3 = 5}", "5", 1.0),
    case("N", "another power of a unit", "math_match", r"\boxed{5\text{ cm}^2}", r"5\text{ cm}^3", 0.0),
]
CHOICES = [
    *[
        case("B11", f"multiple_choice: {given}", "multiple_choice", given, "B", 1.0)
        for given in [
            r"\boxed{\text{B}}",
            r"\boxed{\text{(B)}}",
            "The correct choice is **B**.",
            "The correct option is B",
            r"The answer is $\mathbf{B}$.",
        ]
    ],
    *[
        case("B11", f"multiple_choice: {given}", "multiple_choice", given, "A", 0.0)
        for given in ["A. or B", "A) b) c) d)", "A) is wrong", "A. is not right"]
    ],
    *[  # the answer's place holds the choice and nothing else
        case("N", f"multiple_choice: {given}", "multiple_choice", given, "A", expected)
        for given, expected in [
            ("A) Paris, and I am sure", 0.0),
            ("A. It is wrong to say more", 0.0),
            ("A: the others are not right", 0.0),
            ("I am sure. The others are not right.\nAnswer: A", 1.0),
        ]
    ],
]
FORMS = [
    *[
        case("B11", f"{reward}: {text!r}", reward, text, "", 0.0)
        for reward, text in [
            ("think_format", "<think>a</think> </think>b"),
            ("think_format", "<think>a</think>\u200b"),
            ("xml_format", "<reasoning>\u200b</reasoning><answer>7</answer>"),
            ("xml_format", "<reasoning>a</reasoning><answer>\u2060</answer>"),
        ]
    ],
    case("B11", "answer_format: a zero-width space", "answer_format", "<answer>\u200b</answer>", "", 0.5),
    case("N", "think_format: an ordinary text", "think_format", "<think>a\nb</think>\n\nSo 7.", "", 1.0),
]
JSON = [
    *[
        case("B11", f"json_match: {given} for {gold}", "json_match", given, gold, expected)
        for given, gold, expected in [
            ('{"a": [true]}', '{"a": [1]}', 0.0),
            ('{"a": {"b": true}}', '{"a": {"b": 1}}', 0.0),
            ('{"a": [1, {"b": "x"}]}', '{"a": [1.0, {"b": "x"}]}', 1.0),
            ('{"a": " x"}', '{"a": "x"}', 0.0),
        ]
    ],
    case("N", "json_match: a list that is too long", "json_match", '{"a": [1, 2, 3]}', '{"a": [1, 2]}', 0.0),
]


@pytest.mark.parametrize(
    ("reward", "completion", "gold", "expected", "settings"), [*NUMBERS, *FORMULAS, *CHOICES, *FORMS, *JSON]
)
def test_a_completion_gets_what_it_deserves(
    reward: str, completion: str, gold: Any, expected: float | None, settings: dict[str, Any], now: Now
) -> None:
    column = {"accuracy_reward": {"solution": [gold]}}.get(reward, {"answer": [gold]})
    columns = {} if reward.endswith("_format") else column
    [score] = library_reward(reward, **settings)(completions=[completion], **columns)
    now(f"{score}")
    assert score == expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        pytest.param(
            '{"score": 1}\nThe text was: {"score": 10}', None, marks=pytest.mark.defect("B11", "judge: two scores")
        ),
        pytest.param('[{"score":2},{"score":9}]', None, marks=pytest.mark.defect("B11", "judge: a list of two scores")),
        ('I would say {"score": 7}', 0.7),
        ('{"score": 7}, that is {"score": 7}', 0.7),
    ],
)
def test_a_judge_that_says_two_things_says_nothing(reply: str, expected: float | None, now: Now) -> None:
    judge = Judge(base_url="http://127.0.0.1:8000/v1", model="m", template="Rate 0 to 10: {completion}")
    now(str(judge.score_of(reply)))
    assert judge.score_of(reply) == expected


needs_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is missing")


@pytest.mark.cases(1)
@needs_gym
@pytest.mark.parametrize(
    "task",
    [pytest.param(t, marks=pytest.mark.defect("B3", t)) for t in ("arc_agi", "rearc", "intermediate_integration")],
)
def test_the_right_answer_gets_all(task: str, now: Now) -> None:
    rows = gym_rows(task, size=3, seed=5)
    golds = [
        row["answer"] or "\n".join(" ".join(map(str, line)) for line in json.loads(row["metadata"])["output"])
        for row in rows
    ]
    reward = ReasoningGym(dataset=task, sandbox="none", timeout=20)
    completions = [f"<answer>{gold}</answer>" for gold in golds]
    scores = reward(completions, [row["metadata"] for row in rows], [row["answer"] for row in rows])
    now(str(scores))
    assert scores == [1.0] * len(rows)


@needs_gym
@pytest.mark.defect("B3", "a scorer that pays for nothing is named; complex_arithmetic takes no nan")
def test_generous_scorers_are_named(caplog: pytest.LogCaptureFixture, now: Now) -> None:
    ReasoningGym(dataset="game_of_life_halting", sandbox="none")
    assert "gives credit to every text that is not empty" in caplog.text
    now(caplog.messages[-1])
    [row] = gym_rows("complex_arithmetic", size=1, seed=1)
    reward = ReasoningGym(dataset="complex_arithmetic", sandbox="none", timeout=20)
    texts = ["nan", "nan + nanj", "inf", row["answer"]]
    scores = reward([f"<answer>{text}</answer>" for text in texts], [row["metadata"]] * 4, [row["answer"]] * 4)
    assert scores[:3] == [0.0] * 3
    assert scores[3] == pytest.approx(1.0, abs=0.01)
