"""The reward tester finds planted mistakes, each under its own code, and has nothing to say of what is right."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from podium.recipe.rewards import LOADER, reward_by_name
from podium.tester.calls import Source
from podium.tester.probes import PROBES
from podium.tester.rewards import ExamineSettings, RewardReport, examine, examine_source

PLANTED = Path(__file__).with_name("planted_rewards.py")


def sums(n: int = 12) -> list[dict[str, Any]]:
    """Conversations about numbers; no answer stands in its question."""
    pairs = [(13 + 7 * i, 25 + 3 * i) for i in range(n)]
    return [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in pairs]


def changed(**columns: Any) -> list[dict[str, Any]]:
    """`sums` with columns made from each row."""
    return [{**row, **{name: make(row) for name, make in columns.items()}} for row in sums()]


UNITS = [
    {"prompt": f"Convert: {n} of the other.", "answer": f"{n} {unit}"}
    for n, unit in zip(
        range(3, 15), ["mW", "MW", "kB", "kb", "Mb", "mV", "MV", "mPa", "MPa", "mJ", "MJ", "kW"], strict=True
    )
]

# name: the codes that must be found (errors and warnings: no others), and the data where it is not the sums
PLANTED_BUGS: dict[str, tuple[set[str], Any]] = {
    "always_one": ({"W008"}, None),
    "always_zero": ({"W008"}, None),
    "anything_in_tags": ({"W120"}, None),
    "any_number": ({"W120"}, None),
    "white_space": ({"W113"}, lambda: changed(answer=lambda row: row["answer"] + "\n")),
    "int_and_text": ({"W113"}, lambda: changed(answer=lambda row: int(row["answer"]))),
    "next_row": ({"W103"}, None),
    "first_row": ({"W103"}, None),
    "wrong_sign": ({"W102"}, None),
    "substring": ({"W107", "W106"}, None),
    "part_of_the_answer": ({"W107"}, None),
    "folds_units": ({"W114"}, lambda: UNITS),
    "last_number_of_prompt": ({"W104"}, None),
    "length_only": ({"W120"}, None),
    "by_chance": ({"W111"}, None),
    "by_place": ({"W109"}, None),
    "normalised_over_batch": ({"W110"}, None),
    "changes_columns": ({"W011"}, lambda: changed(answer=lambda row: row["answer"] + " ")),
    "no_tags_no_match": ({"W010", "W108"}, None),
    "empty_text": ({"W010"}, None),
    "nan_for_long": ({"W006"}, None),
    "any_candidate": ({"W106"}, None),
    "like_the_prompt": ({"W117"}, None),
    "first_tag": ({"W108"}, None),
    "empty_is_right": ({"W105"}, None),
    "takes_the_word_for_it": ({"W105"}, None),
    "wide_tolerance": ({"W115"}, None),
    "absolute_value": ({"W115"}, None),
    "right_text": (
        {"W116"},
        lambda: changed(prompt=lambda row: f"{row['prompt'][0]['content']} <answer>{row['answer']}</answer>"),
    ),
    "strings_only": ({"W012"}, None),
    "split_of_a_list": ({"W012"}, None),
    "one_short": ({"W003"}, None),
    "one_number": ({"W005"}, None),
    "as_words": ({"W004"}, None),
    "other_column": ({"W002"}, None),
    "percent_of_millions": ({"W007"}, None),
    "sleeps": ({"W009", "W122"}, lambda: sums(2)),
    "forgotten_await": ({"W014"}, None),
}


def serious(report: RewardReport) -> set[str]:
    return {finding.code for finding in report.findings if finding.severity != "note"}


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", PLANTED_BUGS)
def test_a_planted_mistake_is_found_under_its_code(name: str) -> None:
    codes, rows = PLANTED_BUGS[name]
    reward = reward_by_name(f"{PLANTED}:{name}", {}, Path())
    report = examine(
        reward, rows() if rows else sums(), settings=ExamineSettings(budget_seconds=1 if name == "sleeps" else 60)
    )
    assert serious(report) == codes, "\n".join(map(str, report.findings))


@pytest.mark.slow
def test_a_slow_reward_is_tested_with_the_time_that_is_named() -> None:
    """The seconds in the fix are enough: with them nothing says that there was no time."""

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        time.sleep(0.004 * len(completions))
        return [float(str(gold) in str(each)) for each, gold in zip(completions, answer, strict=True)]

    rows = sums(2)
    cut = examine(reward, rows, settings=ExamineSettings(budget_seconds=0.5))
    fix = next(each.fix for each in cut.findings if each.code == "W122")
    seconds = float(fix.partition("--budget ")[2].partition(";")[0])
    tested = examine(reward, rows, settings=ExamineSettings(budget_seconds=seconds))
    assert not [each for each in tested.findings if "not tested" in each.what]


def apart(name: str, rows: Any, **settings: Any) -> RewardReport:
    source = Source(
        loader=LOADER,
        arguments=(f"{PLANTED}:{name}", {}, Path()),
        limit_seconds=settings.get("limit_seconds", 10.0),
    )
    return examine_source(name, source, rows, settings=ExamineSettings(**settings))


@pytest.mark.slow
def test_state_is_told_from_chance_by_a_second_process() -> None:
    assert serious(apart("only_new_texts", sums())) == {"W112"}
    assert serious(apart("by_chance", sums())) == {"W111"}


@pytest.mark.slow
def test_a_hang_is_ended_and_named() -> None:
    report = apart("hangs_on_empty", sums(), limit_seconds=1.0)
    assert "error" not in [finding.severity for finding in report.findings]  # it may be the machine that is slow
    [finding] = [finding for finding in report.findings if finding.code == "W016"]
    assert "hangs_on_empty" in finding.what
    assert "row 0, empty text" in finding.what
    assert "planted_rewards.py" in finding.why


@pytest.mark.slow
def test_a_process_that_ends_is_named() -> None:
    report = apart("ends_the_process", sums())
    [finding] = [finding for finding in report.findings if finding.severity == "error"]
    assert finding.code == "W017"
    assert "ended its worker process with SIGKILL" in finding.what
    assert "row 0, empty text" in finding.what


def test_characters_without_an_answer_hold_no_number() -> None:
    """A number in them is the answer of some row: a label, or a rating."""
    [probe] = [each for each in PROBES if each.name == "control characters"]
    text: str | None = probe.make(None, str)  # type: ignore[arg-type]
    assert text is not None
    assert not any(map(str.isdigit, text))
