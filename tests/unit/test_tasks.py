"""Built-in tasks."""

from __future__ import annotations

import re

import pytest

from podium.data.tasks import EXAMPLE, TASKS, additions, load_task
from podium.errors import DataError


def numbers(row) -> tuple[int, int]:
    a, b = re.fullmatch(r"What is (\d+) \+ (\d+)\?", row["prompt"][-1]["content"]).groups()
    return int(a), int(b)


def test_additions_are_all_ordered_pairs_once_one_in_five_held_out():
    train, held_out = additions()
    pairs = [numbers(row) for row in (*train, *held_out)]
    assert sorted(pairs) == [(a, b) for a in range(1, 21) for b in range(1, 21)]
    assert (len(train), len(held_out)) == (320, 80)
    assert all(row["answer"] == str(sum(numbers(row))) for row in (*train, *held_out))


@pytest.mark.parametrize("make", [additions, TASKS["two-digit-additions"]])
def test_no_held_out_sum_is_learnt_from_its_mirror_image_or_from_the_worked_example(make):
    train, held_out = make()
    learnt = {frozenset(numbers(row)) for row in train} | {frozenset(EXAMPLE)}
    assert not learnt & {frozenset(numbers(row)) for row in held_out}


def test_the_split_depends_on_nothing_but_content():
    """Pinned: runs on different machines are compared on the same held-out rows."""
    _, held_out = additions()
    assert [numbers(row) for row in held_out[:6]] == [(1, 1), (1, 7), (1, 17), (2, 2), (2, 7), (2, 11)]


def test_a_prompt_opens_with_the_form_and_a_worked_example():
    train, held_out = load_task("builtin:additions")
    prompt = held_out[0]["prompt"]
    assert [turn["role"] for turn in prompt] == ["system", "user", "assistant", "user"]
    assert prompt[0]["content"] == "Answer inside tags like this: <answer>7</answer>."
    assert prompt[2]["content"] == "<answer>7</answer>"
    assert train.column_names == ["prompt", "answer"]


def test_unknown_task_is_named():
    with pytest.raises(DataError, match="Did you mean `additions`"):
        load_task("builtin:addition")
