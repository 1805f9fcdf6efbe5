"""Reward functions as a run calls them: what check says of them, what they may not change, whether they repeat."""

from __future__ import annotations

import builtins
import logging
import os
import random
import sys
import time
from array import array
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import torch

from podium import GRPOConfig, check
from podium.checks.rewards import RULES
from podium.checks.setup import Setup
from podium.errors import Finding
from podium.errors.rule import findings
from podium.records import Completion, Group, Prompt
from podium.rewards import resolve_rewards
from podium.rewards.score import repeat_findings, score, warn_of_values
from podium.testing import tiny_model, tiny_tokenizer

Now = Callable[[str], None]
ROWS = [{"prompt": f"{n} + 7 = ", "answer": str(n + 7)} for n in range(10, 22)]


def groups(texts: list[str]) -> list[Group]:
    return [
        Group(
            prompt=Prompt(id=0, row=0, token_ids=(1,), text="", content="2+2=", columns={"answer": "4"}),
            completions=tuple(
                Completion(token_ids=(1,), logps=(0.0,), finish="stop", text=text, policy_step=0) for text in texts
            ),
        )
    ]


def found(reward: Any, rows: Any = ROWS) -> list[Finding]:
    args = GRPOConfig("out", num_generations=2, per_device_train_batch_size=2, max_completion_length=64, report_to=[])
    return [
        finding
        for finding in check(tiny_model("llama"), reward, args, rows, processing_class=tiny_tokenizer())
        if finding.code.startswith("W") and finding.code != "W123"  # below
    ]


# ---- check tests the rewards ----


def in_text(completions, answer):
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


def right(completions, answer):
    return [float(gold == text.strip()) for text, gold in zip(completions, answer, strict=True)]


def always(completions, answer):
    return [1.0] * len(completions)


def by_chance(completions):
    return [random.random() for _ in completions]


def empty_fails(completions, answer):
    return [float(text.split()[-1] == gold) if text else 0.0 for text, gold in zip(completions, answer, strict=True)]


async def by_waiting(completions, answer):
    return right(completions, answer)


SPACED = [{**row, "answer": f"{row['answer']} "} for row in ROWS]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("reward", "rows", "code"),
    [
        pytest.param(in_text, ROWS, "W106 W107", marks=pytest.mark.defect("D6", "the answer anywhere in the text")),
        pytest.param(right, SPACED, "W113", marks=pytest.mark.defect("D6", "answers that end in a space")),
        pytest.param(always, ROWS, "W008", marks=pytest.mark.defect("D6", "1 for everything")),
        pytest.param(by_chance, ROWS, "W111", marks=pytest.mark.defect("N", "check: a reward by chance")),
        pytest.param(empty_fails, ROWS, "W010", marks=pytest.mark.defect("N", "check: raises on white space")),
        pytest.param(by_waiting, ROWS, "W122", marks=pytest.mark.defect("D6", "not tested: said")),
        pytest.param(right, ROWS, None, marks=pytest.mark.defect("N", "check: nothing to say of a right one")),
    ],
)
def test_check_tests_the_rewards(reward: Any, rows: Any, code: str | None, now: Now) -> None:
    said = found(reward, rows)
    assert [finding.code for finding in said] == (code or "").split()
    if code:
        assert (said[0].severity == "error") == (said[0].code in ("W106", "W113"))
    now(str(said[0]) if said else "nothing")


@pytest.mark.defect("W11", "a first call that imports for 0.3 s")
def test_imports_of_the_first_call_are_not_slowness(now: Now) -> None:
    calls = []

    def importing(completions, answer):
        time.sleep(0 if calls else 1.0)
        calls.append(1)
        return right(completions, answer)

    assert found(importing) == []
    now("nothing")


@pytest.mark.slow
@pytest.mark.defect("W11", "slow at every call")
def test_a_reward_that_is_slow_each_time_is_said(now: Now) -> None:
    def slow(completions, answer):
        time.sleep(0.06 * len(completions))
        return right(completions, answer)

    assert [finding.code for finding in found(slow)] == ["W009", "W122"]
    now(str(found(slow)[0]))


# ---- which reward counts as accuracy ----


@pytest.mark.parametrize(
    ("names", "given", "said", "fix"),
    [
        pytest.param(
            ["f"],
            {},
            "`f` does not count as accuracy",
            "accuracy: f",
            marks=pytest.mark.defect("D12", "one reward `f`"),
        ),
        pytest.param(
            ["style_match"],
            {},
            "`style_match` counts as accuracy, because of its name",
            "accuracy: style_match",
            marks=pytest.mark.defect("D12", "a reward of style called style_match"),
        ),
        (["f"], {"accuracy": "f"}, "", ""),
    ],
)
def test_which_reward_counts_is_said(names: list[str], given: dict[str, Any], said: str, fix: str, now: Now) -> None:
    functions = []
    for name in names:

        def function(completions):
            return [0.0] * len(completions)

        function.__name__ = name
        functions.append(function)
    setup = Setup(settings=GRPOConfig(**given), given={"model": "m"}, rewards=resolve_rewards(functions))
    notes = [each for each in findings(RULES, setup) if each.code == "W123"]
    assert [finding.fix for finding in notes] == ([fix] if fix else [])
    assert all(said in finding.what for finding in notes)
    now(str(notes[0]) if notes else "nothing")


# ---- what a function may not change ----


def _chdir() -> None:
    os.chdir("/")


def _no_gradients() -> None:
    torch.set_grad_enabled(False)


def _recursion() -> None:
    sys.setrecursionlimit(5000)


def _umask() -> None:
    os.umask(0o077)


def _dtype() -> None:
    torch.set_default_dtype(torch.float64)


def _builtins() -> None:
    builtins.float = lambda _: 42.0  # type: ignore[misc, assignment]


def _new_builtin() -> None:
    builtins.podium_was_here = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param(_chdir, "the working directory", marks=pytest.mark.defect("B11", "chdir")),
        pytest.param(_no_gradients, "whether torch computes gradients", marks=pytest.mark.defect("B11", "no_grad")),
        pytest.param(_recursion, "the recursion limit", marks=pytest.mark.defect("B11", "recursion limit")),
        pytest.param(_umask, "the umask", marks=pytest.mark.defect("B11", "umask")),
        pytest.param(_dtype, "torch's default dtype", marks=pytest.mark.defect("B11", "default dtype")),
        pytest.param(_builtins, "Python's builtins", marks=pytest.mark.defect("B11", "builtins.float")),
        pytest.param(_new_builtin, "Python's builtins", marks=pytest.mark.defect("N", "a new builtin")),
    ],
)
def test_what_a_function_changes_is_put_back_and_named(
    change: Callable[[], None], what: str, caplog: pytest.LogCaptureFixture, now: Now
) -> None:
    def reward(completions):
        change()
        return [1 for _ in completions]

    reward.__name__ = f"reward{change.__name__}"
    resolved = resolve_rewards([reward, right])
    before = (os.getcwd(), torch.is_grad_enabled(), sys.getrecursionlimit(), torch.get_default_dtype(), builtins.float)
    mask = os.umask(0o022)
    os.umask(mask)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            [scored] = score(groups(["4", "b"]), resolved)
    after = (os.getcwd(), torch.is_grad_enabled(), sys.getrecursionlimit(), torch.get_default_dtype(), builtins.float)
    assert after == before
    assert os.umask(mask) == mask
    assert not hasattr(builtins, "podium_was_here")
    assert scored.rewards_GK[:, 1].tolist() == [1.0, 0.0], "of the function that is called next"
    [said] = [message for message in caplog.messages if "is put back" in message]
    assert f"reward function `reward{change.__name__}` (" in said
    assert f"changed {what}" in said
    now(said)


# ---- whether they repeat ----


def _counting() -> Any:
    calls: list[int] = []

    def counts(completions):
        calls.append(1)
        return [float(len(calls))] * len(completions)

    return counts


def _meant() -> Any:
    def meant(completions):
        return [random.random() for _ in completions]

    meant.is_random = True
    return meant


@pytest.mark.parametrize(
    ("reward", "repeats"),
    [
        pytest.param(by_chance, False, marks=pytest.mark.defect("N", "run: a reward by chance")),
        pytest.param(_counting(), False, marks=pytest.mark.defect("N", "run: a reward that counts its calls")),
        pytest.param(_meant(), True, marks=pytest.mark.defect("N", "run: chance that is declared")),
        (right, True),
        (lambda completions, answer: [None] * len(completions), True),
    ],
)
def test_functions_that_do_not_repeat_are_named_with_both_values(reward: Any, repeats: bool, now: Now) -> None:
    rewards = resolve_rewards([right, reward])
    scored = score(groups(["4", "5", "x"]), rewards)
    said = list(repeat_findings(scored, rewards))
    assert [finding.code for finding in said] == ([] if repeats else ["W111"])
    if said:
        assert f"`{rewards[1].name}`" in said[0].what
        assert ", then " in said[0].what
        now(str(said[0]))


@pytest.mark.slow
@pytest.mark.defect("N", "training: one finding at the first round, numbers of the run unchanged")
def test_training_says_it_once(make_trainer: Any, caplog: pytest.LogCaptureFixture, now: Now) -> None:
    trainer = make_trainer(by_chance, max_steps=3, prove_first_batch=True)
    trainer.train()
    said = [finding for finding in trainer.health.found if finding.code == "W111"]
    assert [(finding.step, finding.severity) for finding in said] == [(1, "warning")]
    now(str(said[0]))


@pytest.mark.defect("N", "training without the proof: each function is called once a round")
def test_without_the_proof_nothing_is_asked_twice(make_trainer: Any, now: Now) -> None:
    calls: list[int] = []

    def counted(completions):
        calls.append(len(completions))
        return [len(text) for text in completions]

    make_trainer(counted, max_steps=2).train()
    assert calls == [16, 16]
    now("two calls for two rounds")


@pytest.mark.defect("N", "a function that fails the second time alone does not end the run")
def test_a_second_call_that_fails_is_left_out(now: Now) -> None:
    calls: list[int] = []

    def fails_later(completions):
        calls.append(1)
        return [1.0 / (2 - len(calls)) for _ in completions]

    rewards = resolve_rewards([fails_later])
    assert list(repeat_findings(score(groups(["a"]), rewards), rewards)) == []
    now("nothing")


# ---- values ----


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([Decimal("0.5"), Decimal(1)], marks=pytest.mark.defect("B11", "Decimal")),
        pytest.param(array("d", [0.5, 1.0]), marks=pytest.mark.defect("B11", "array.array")),
        memoryview(array("d", [0.5, 1.0])),
    ],
)
def test_numbers_of_all_kinds_are_taken(values: Any, now: Now) -> None:
    [scored] = score(groups(["a", "b"]), resolve_rewards([lambda completions: values]))
    assert scored.rewards_GK[:, 0].tolist() == [0.5, 1.0]
    now("[0.5, 1.0]")


@pytest.mark.defect("N", "all rewards None: TRL's warning with the row's arguments")
def test_rows_that_nobody_scores_are_said_as_trl_says_it(caplog: pytest.LogCaptureFixture, now: Now) -> None:
    def silent_here(completions, answer):
        return [None for _ in completions]

    with caplog.at_level(logging.WARNING):
        warn_of_values(score(groups(["a"]), resolve_rewards([silent_here])), set())
    [said] = caplog.messages
    row = {"answer": "4", "prompt": "2+2=", "completion": "a"}
    assert said.startswith(f"All reward functions returned None for the following kwargs:\n{row}\n")
    assert "Please ensure that at least one reward function returns a valid reward." in said
    now(said.splitlines()[0])
