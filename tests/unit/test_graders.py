"""How often the rewards of right answers are wrong, on texts that people judged, and how long they take.

`python -m benchmarks.graders` prints the same tables.
"""

from __future__ import annotations

import time

import pytest

from benchmarks.graders import LISTS, MOST_REFUSED, MOST_TAKEN, answers_per_reward, judged, rates, seconds, table
from podium.rewards import library_reward
from podium.rewards.reading import number_of

pytest.importorskip("math_verify")


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", LISTS)
def test_few_wrong_texts_are_taken_and_few_right_ones_refused(name: str) -> None:
    found = list(judged(name))
    print("\n".join(table(name, found)))  # noqa: T201  # the rates are to be seen
    taken, refused, paid = rates(found)
    assert taken <= MOST_TAKEN
    assert refused <= MOST_REFUSED
    assert paid == 0, "prose outside of the answer's place is not read"


@pytest.mark.slow
def test_the_lists_are_long_enough() -> None:
    found = [each for name in LISTS if name != "reported" for each in judged(name)]
    assert sum(each.kind == "right" for each in found) >= 300
    assert sum(each.kind == "wrong" for each in found) >= 300
    assert len({(each.reward, str(each.answer), each.text) for each in found}) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("reward", [name for name in answers_per_reward(1) if name != "math_match"])
def test_ten_thousand_answers_take_seconds(reward: str) -> None:
    """2 s on a free machine (measured: at most 1.9 s); this one may be busy."""
    assert seconds(answers_per_reward(10_000)[reward]) < 20


HOSTILE = {
    "digits": "1" * 100_000,
    "groups of three": "123 " * 25_000,
    "thousands": "1" + ",234" * 25_000,
    "a version number": "1.2" * 33_000,
    "brackets": "(" * 50_000 + "12" + ")" * 50_000,
    "pairs of brackets": "(12)" * 25_000,
    "or": "12 or " * 16_000,
    "not": "not " * 25_000,
    "equations": "=12" * 33_000,
    "boxes": r"\boxed{" * 14_000,
    "fractions": r"\frac{1}{2}" * 9_000,
    "stars": "*" * 100_000,
    "stars around words": "**a " * 25_000,
    "thoughts": "<think>" * 14_000,
    "tags": "<a" * 50_000,
    "labels": "A) " * 33_000,
    "letters": "A" * 100_000,
    "blanks": " " * 100_000,
    "lines": "\n" * 100_000,
    "powers": "2^" * 50_000,
    "zero-width": "\u200b1" * 50_000,
    "raised": "\u00b2" * 100_000,
    "fences": "```" * 33_000,
    "words": "answer " * 14_000,
    "marks": "|-1" * 33_000,
}


@pytest.mark.cases(15)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("reward", ["numeric_match", "multiple_choice", "answer_format", "think_format", "xml_format"])
def test_hostile_texts_take_no_time(reward: str, text: str) -> None:
    arguments = {"answer": ["A" if reward == "multiple_choice" else "12"]} if not reward.endswith("_format") else {}
    start = time.process_time()
    library_reward(reward)(completions=[text], **arguments)
    assert time.process_time() - start < 5  # under 1 s on a free machine


@pytest.mark.cases(2)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_formulas_take_no_time(text: str) -> None:
    start = time.process_time()
    library_reward("math_match", timeout_seconds=1)(completions=[rf"\boxed{{{text[:2000]}}}"], answer=["12"])
    assert time.process_time() - start < 5


def test_a_number_is_read_once_and_exactly() -> None:
    read = [number_of(text) for text in ("0.1", "1/3", "9007199254740993", "1e400", "1e99999999999999999999")]
    assert [str(number.value) for number in read if number] == [
        "0.1",
        f"0.{'3' * 28}",
        "9007199254740993",
        "1E+400",
        "NaN",
    ]
