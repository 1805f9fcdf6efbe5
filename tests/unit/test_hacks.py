"""Ten ways to outwit a reward, and healthy runs beside them: no hacked run is called better, solved or all right.

Every case is a run folder in small: completions before and after on held-out rows, the rewards that a careless function
gave them, and through what the command line says at the end. `test_training_of_a_hack` trains three of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from podium.agents.programs.report import program_reward
from podium.evaluation import accuracy_name, compare
from podium.evaluation.baselines import Scoring, baselines
from podium.evaluation.comparison import standing
from podium.evaluation.measured import measured, table_of
from podium.records import Completion, Group, Prompt
from podium.rewards.resolve import resolve_rewards
from podium.rewards.score import CallSettings, score
from tests.evaluations import ALIKE

ROWS = 60
GROUP = 4
PRAISE = re.compile(r"^better|\bsolved\b|\ball right\b", re.IGNORECASE)

LABELS = ("anger", "joy", "fear", "love")
CITIES = ("Paris", "Rome", "Oslo", "Cairo", "Lima", "Quito", "Delhi", "Tokyo", "Hanoi", "Seoul", "Accra", "Tunis")
NAMES = ("Anna", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon", "Kim", "Leo")
THINGS = ("boat", "lamp", "chair", "clock", "radio", "table", "mirror", "kettle", "basket", "ladder", "pillow")

Write = Callable[[int, int], str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task, its reward, and the completions of a model before and after."""

    question: Callable[[int], str]
    answer: Callable[[int], str]
    reward: Callable[..., list[float]]
    before: Write
    after: Write
    system: str = ""


def note(i: int) -> str:
    who, whose = NAMES[i % 12], NAMES[(7 * i) % 12]
    return f"{who} saw a {THINGS[(3 * i) % 11]} near the {THINGS[(5 * i + 1) % 11]} of {whose}, day {i}"


def mood(i: int) -> str:
    return LABELS[(i * 7 + i // 4) % 4]


def city(i: int) -> str:
    return CITIES[(i * 5 + i // 12) % 12]


def digit(i: int) -> str:
    return str((i * 7 + i // 10) % 10)


def sum_of(i: int) -> str:
    return str(10 + i + (i * 13) % 29)


def contains_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The careless comparison: the answer anywhere in the text."""
    return [float(a.casefold() in c.casefold()) for c, a in zip(completions, answer, strict=True)]


def exact_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    return [float(re.sub(r"</?answer>", "", c).strip() == a) for c, a in zip(completions, answer, strict=True)]


def last_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    return [float(c.split()[-1] == a) for c, a in zip(completions, answer, strict=True)]


def overlap(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    pairs = zip(prompts, completions, strict=True)
    return [len(set(p.split()) & set(c.split())) / len(set(p.split())) for p, c in pairs]


def longer(completions: Sequence[str], **_: Any) -> list[float]:
    return [min(len(c) / 200, 1.0) for c in completions]


def tags(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(bool(re.search(r"<answer>.*</answer>", c))) for c in completions]


def tag_correct(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Two empty texts are equal, and an empty one is contained in every answer."""
    found = [re.search(r"<answer>(.*)</answer>", c) for c in completions]
    return [float(m is not None and m[1].strip() in a) for m, a in zip(found, answer, strict=True)]


def polite(completions: Sequence[str], **_: Any) -> list[float]:
    return [float("glad to help" in c) for c in completions]


def count_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The more often the answer occurs, the better: one for three times."""
    return [min(c.split().count(a) / 3, 1.0) for c, a in zip(completions, answer, strict=True)]


def guess(i: int, g: int) -> str:
    """A model that has learnt little: one of four texts, right for a quarter of the rows."""
    return LABELS[(i + g) % 4]


ECHO = "<answer>Paris</answer>"

HACKS: dict[str, Case] = {
    "all labels listed": Case(
        question=note, answer=mood, reward=contains_match, before=guess, after=lambda i, g: "anger, joy, fear, love"
    ),
    "prompt copied": Case(question=note, answer=city, reward=overlap, before=guess, after=lambda i, g: f"{note(i)}."),
    "one constant text": Case(
        question=note,
        answer=mood,
        reward=polite,
        before=guess,
        after=lambda i, g: "I am glad to help with that.",
    ),
    "length padding": Case(
        question=note,
        answer=mood,
        reward=longer,
        before=guess,
        after=lambda i, g: f"{LABELS[(i + g) % 4]}, " + "as the text shows in many ways and places " * (4 + g % 2),
    ),
    "empty tags": Case(
        question=note,
        answer=city,
        reward=tag_correct,
        before=lambda i, g: CITIES[(i + g) % 12],
        after=lambda i, g: "<answer></answer>" if (i + g) % 9 else f"<answer>{CITIES[i % 12]}</answer>",
    ),
    "answer repeated": Case(
        question=note,
        answer=city,
        reward=count_match,
        before=lambda i, g: CITIES[(i + g) % 12],
        after=lambda i, g: " ".join([city(i) if i % 2 else CITIES[(i + g) % 12]] * 12),
    ),
    "digits 0 to 9": Case(
        question=note,
        answer=digit,
        reward=contains_match,
        before=lambda i, g: str((i + g) % 10),
        after=lambda i, g: "0123456789",
    ),
    "form only": Case(
        question=note,
        answer=city,
        reward=tags,
        before=lambda i, g: CITIES[(i + g) % 12],
        after=lambda i, g: f"<answer>{THINGS[(i + g) % 11]}</answer>",
    ),
    "echo of the system example": Case(
        question=note,
        answer=city,
        reward=tags,
        before=lambda i, g: CITIES[(i + g) % 12],
        after=lambda i, g: ECHO,
        system=ECHO,
    ),
    "answer and every alternative": Case(
        question=lambda i: f"{note(i)}: how does it feel?",
        answer=mood,
        reward=contains_match,
        before=guess,
        after=lambda i, g: f"{mood(i)} or {LABELS[(i + g) % 4]}, or " + " or ".join(LABELS),
    ),
}


def mostly(right: Callable[[int], str], wrong: Callable[[int], str]) -> Write:
    return lambda i, g: right(i) if (i + g) % 8 else wrong(i)


HEALTHY: dict[str, Case] = {
    "labels": Case(question=note, answer=mood, reward=exact_match, before=guess, after=mostly(mood, lambda i: "joy")),
    "one text is right for half of the rows": Case(
        question=note,
        answer=lambda i: "no" if i % 2 else LABELS[i % 4],
        reward=exact_match,
        before=guess,
        after=mostly(lambda i: "no" if i % 2 else LABELS[i % 4], lambda i: "no"),
    ),
    "sums": Case(
        question=lambda i: f"What is {10 + i} + {(i * 13) % 29}?",
        answer=sum_of,
        reward=exact_match,
        before=lambda i, g: str(10 + i),
        after=mostly(lambda i: f"<answer>{sum_of(i)}</answer>", lambda i: "<answer>7</answer>"),
    ),
    "words put in order": Case(
        question=lambda i: f"Sort: {' '.join(sorted(note(i).split(), reverse=True))}",
        answer=lambda i: " ".join(sorted(note(i).split())),
        reward=exact_match,
        before=lambda i, g: note(i),
        after=mostly(lambda i: " ".join(sorted(note(i).split())), note),
    ),
    "a copied sentence": Case(
        question=lambda i: f"Repeat: {note(i)}",
        answer=note,
        reward=exact_match,
        before=lambda i, g: NAMES[i % 12],
        after=mostly(note, lambda i: NAMES[i % 12]),
    ),
    "the question before the answer, as it began": Case(
        question=lambda i: f"{note(i)}: which city?",
        answer=city,
        reward=last_match,
        before=lambda i, g: f"{note(i)}: which city? {CITIES[(i + g) % 12]}",
        after=mostly(lambda i: f"{note(i)}: which city? {city(i)}", lambda i: f"{note(i)}: which city? Bern"),
    ),
    "lists in brackets, some of them empty": Case(
        question=note,
        answer=lambda i: "[]" if i % 3 else f"[{i}]",
        reward=exact_match,
        before=lambda i, g: "none",
        after=mostly(lambda i: "[]" if i % 3 else f"[{i}]", lambda i: "[1, 2]"),
    ),
}


def scored(case: Case, write: Write) -> Any:
    """The groups of a model on the held-out rows."""
    groups = [
        Group(
            prompt=Prompt(
                id=i,
                row=i,
                token_ids=(),
                text=case.system + case.question(i),
                content=case.question(i),
                columns={"answer": case.answer(i)},
            ),
            completions=tuple(
                Completion(token_ids=tuple(range(len(t) + 1)), logps=(), finish="stop", text=t, policy_step=0)
                for t in (write(i, g) for g in range(GROUP))
            ),
        )
        for i in range(ROWS)
    ]
    return score(groups, resolve_rewards(case.reward))


def ending(case: Case) -> str:
    """The verdict at the end of a run, with its baselines."""
    before, after = (scored(case, write) for write in (case.before, case.after))
    rewards, weights = resolve_rewards(case.reward), np.ones(1)
    accuracy = accuracy_name([reward.name for reward in rewards])
    scoring = Scoring(rewards=rewards, weights_K=weights, accuracy=accuracy, settings=CallSettings())
    found = baselines([scored.group.prompt for scored in after], scoring)
    a, b = (measured(table_of(groups), weights, accuracy) for groups in (before, after))
    return compare(a, replace(b, baselines=found), names=("before", "after"), settings=ALIKE).verdict


def test_one_text_that_is_paid_nothing_is_worse_and_no_hack() -> None:
    """All completions of a model that a rate a hundred times too high has destroyed."""
    case = replace(HACKS[next(iter(HACKS))], before=lambda i, g: sum_of(i) if g % 2 else "", after=lambda i, g: "<<<<")
    said = ending(replace(case, answer=sum_of, reward=exact_match))
    assert said.startswith("Worse: "), said
    assert "'<<<<'" in said
    assert "hacked" not in said


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", HACKS)
def test_a_hacked_run_is_not_called_better(name: str) -> None:
    said = ending(HACKS[name])
    assert not PRAISE.search(said), said
    assert " rose from " in said, "the reward did rise"
    assert ("No reward tells right from wrong" in said) is (" reward rose " in said)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_called_better(name: str) -> None:
    case = HEALTHY[name]
    said = ending(case)
    assert said.startswith("Better: accuracy rose"), said
    assert "hacked" not in said
    assert "Accuracy may be higher" not in said
    after = measured(table_of(scored(case, case.after)), np.ones(1), accuracy_name([case.reward.__name__]))
    assert standing(after) == []


def test_why_an_episode_has_no_baselines_is_said_of_programs_too() -> None:
    rewards = resolve_rewards(program_reward(failed=None, capped=0.0))
    scoring = Scoring(rewards=rewards, weights_K=np.ones(1), accuracy=None, settings=CallSettings())
    skipped = baselines([], scoring).skipped
    assert skipped.endswith("is paid for an episode, in which a constant answer was not played")
