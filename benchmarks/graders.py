"""What the rewards of right answers take and refuse, on texts whose verdicts people gave, and how long they need.

    python -m benchmarks.graders            # the table, and every text that is judged wrongly
    python -m benchmarks.graders --speed    # and seconds for 10,000 answers

`reported` are texts of an adversarial test, `answers` were written before the rewards that are measured, `later` after
the first of them, `places` before they read declared places alone. `prose` are texts that state the answer elsewhere,
or with remarks around it: nothing is paid for them. The exit code is 1 where more than 3 % of the wrong texts are
taken, more than 5 % of the right ones refused, or prose is paid.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from podium.rewards import library_reward

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "unit" / "graders"
LISTS = ("reported", "answers", "later", "places", "unseen")
MOST_TAKEN, MOST_REFUSED = 0.03, 0.05
"""Shares of wrong texts that may be taken, and of right ones that may be refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A text, what it is, and whether the reward takes it."""

    reward: str
    answer: Any
    text: str
    kind: str
    """`right`: it states the row's answer where it is read; `prose`: elsewhere; `wrong`: it does not state it."""
    taken: bool


def scores(group: dict[str, Any], texts: Sequence[str]) -> list[float]:
    """What a reward gives the texts of one entry of a list."""
    reward = library_reward(group["reward"], **group.get("settings", {}))
    completions: list[Any] = list(texts)
    if group["reward"] == "tool_use":
        completions = [[{"role": "assistant", "content": ""}, {"role": "tool", "content": text}] for text in texts]
    columns = {name: [group[name]] * len(texts) for name in ("answer",) if name in group}
    columns |= {name: [value] * len(texts) for name, value in group.get("columns", {}).items()}
    return reward(completions=completions, **columns)


def judged(name: str) -> Iterator[Judged]:
    """All texts of a list. A text is taken where the reward gives it all."""
    for group in _list(name):
        texts = [(text, kind) for kind in ("right", "wrong", "prose") for text in group.get(kind, ())]
        for (text, kind), score in zip(texts, scores(group, [text for text, _ in texts]), strict=True):
            answer = group.get("answer")
            yield Judged(reward=group["reward"], answer=answer, text=text, kind=kind, taken=score == 1)


@functools.cache
def _list(name: str) -> list[dict[str, Any]]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def rates(found: Sequence[Judged]) -> tuple[float, float, float]:
    """The shares of wrong texts that are taken, of right ones that are refused, and of prose that is paid."""
    taken = {kind: [each.taken for each in found if each.kind == kind] for kind in ("wrong", "right", "prose")}
    shares = {kind: sum(values) / max(1, len(values)) for kind, values in taken.items()}
    refused = 1 - shares["right"] if taken["right"] else 0.0
    return shares["wrong"], refused, shares["prose"]


def table(name: str, found: Sequence[Judged]) -> Iterator[str]:
    """Lines: the rates of each reward and of all, then what is judged wrongly."""
    yield f"{name:18}{'wrong':>8}{'taken':>8}{'right':>8}{'refused':>9}{'prose':>8}{'paid':>6}"
    for reward in [*dict.fromkeys(each.reward for each in found), "all"]:
        own = [each for each in found if reward in (each.reward, "all")]
        wrong, right, prose = (
            [each.taken for each in own if each.kind == kind] for kind in ("wrong", "right", "prose")
        )
        counts = f"{len(wrong):8}{sum(wrong):8}{len(right):8}{len(right) - sum(right):9}"
        yield f"{reward:18}{counts}{len(prose):8}{sum(prose):6}"
    yield "taken {:.1%}, refused {:.1%}, prose paid {:.1%}".format(*rates(found))
    for each in found:
        if (each.kind == "right") != each.taken:
            yield f"  {'refused' if each.kind == 'right' else 'taken'}: {each.reward}, {each.answer!r}: {each.text!r}"


REASONED = "We add the parts: 3 rows of 4 seats are 3 * 4 = 12 seats, and 2 more make 14. "


def answers_per_reward(count: int) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """For each reward that reads answers, a call with so many of them, no two alike."""
    indices = range(count)
    numbers = [f"{REASONED * (i % 4)}The answer is {i:,}." for i in indices]
    choices = [f"{REASONED * (i % 4)}So the answer is ({'ABCD'[i % 4]}), row {i}." for i in indices]
    objects = [f'```json\n{{"answer": {i}, "name": "n{i}"}}\n```' for i in indices]
    golds = [str(i) for i in indices]
    return {
        "numeric_match": (library_reward("numeric_match"), {"completions": numbers, "answer": golds}),
        "multiple_choice": (library_reward("multiple_choice"), {"completions": choices, "answer": ["B"] * count}),
        "math_match": (
            library_reward("math_match"),
            {"completions": [rf"So it is $\boxed{{\frac{{{i}}}{{2}}}}$." for i in indices], "answer": golds},
        ),
        "exact_match": (library_reward("exact_match"), {"completions": [f"\u00a0{n}" for n in golds], "answer": golds}),
        "answer_format": (
            library_reward("answer_format"), {"completions": [f"<answer>{i}</answer>" for i in indices]}
        ),
        "think_format": (
            library_reward("think_format"), {"completions": [f"<think>{REASONED}</think>{i}" for i in indices]}
        ),
        "xml_format": (
            library_reward("xml_format"),
            {"completions": [f"<reasoning>{REASONED}</reasoning><answer>{i}</answer>" for i in indices]},
        ),
        "json_match": (library_reward("json_match"), {"completions": objects, "answer": objects}),
    }  # fmt: skip


def seconds(call: tuple[Callable[..., Any], dict[str, Any]]) -> float:
    """Wall time of one call."""
    reward, arguments = call
    start = time.perf_counter()
    reward(**arguments)
    return time.perf_counter() - start


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="also time 10,000 answers with each reward")
    args = parser.parse_args()
    failed = False
    for name in LISTS:
        found = list(judged(name))
        print("\n".join(table(name, found)), end="\n\n")
        taken, refused, paid = rates(found)
        failed |= taken > MOST_TAKEN or refused > MOST_REFUSED or paid > 0
    if args.speed:
        for reward, call in answers_per_reward(10_000).items():
            print(f"{reward:18}{seconds(call):6.2f} s for 10,000 answers")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
