"""Library rewards: what was refused or taken wrongly, as one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from podium.rewards import library_reward

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
