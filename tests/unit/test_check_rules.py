"""The table of `podium check` on prepared facts: no recipe, no model, no rows on disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from podium.checks.settings import LEARNING
from podium.checks.setup import Setup
from podium.checks.table import RULES
from podium.errors import Finding
from podium.errors.rule import Rule, Settings, broken, findings

NEEDED = [
    pytest.param(rule, name, id=f"{rule.code}-{row}-{name}") for row, rule in enumerate(RULES) for name in rule.needs
]


def found(code: str, setup: Any) -> list[Finding]:
    return [each for rule in RULES if rule.code == code for each in broken(rule, setup)]


@pytest.mark.parametrize(("rule", "missing"), NEEDED)
def test_a_rule_is_skipped_where_a_fact_that_it_needs_is_missing(rule: Rule, missing: str) -> None:
    facts = SimpleNamespace(**{name: object() for name in (*rule.needs, *rule.wants)})  # no rule can use such a fact
    setattr(facts, missing, None)
    assert list(broken(rule, facts)) == []


def test_nothing_is_found_where_nothing_is_known() -> None:
    assert list(findings(RULES, Setup())) == []


def test_a_setup_has_every_fact_that_a_rule_takes() -> None:
    setup = Setup()
    assert all(hasattr(setup, name) for rule in RULES for name in (*rule.needs, *rule.wants))


@pytest.mark.parametrize(
    ("rate", "lora", "code", "cure"),
    [
        (0.0, None, "C026", 2e-5),
        (1e-6, {"r": 16}, "C021", 2e-4),
        (1e-4, {"r": 16}, "", None),
        (1e-8, None, "C037", 2e-5),
        (1e-5, None, "", None),
        (5e-4, None, "C022", 2e-5),
    ],
)
def test_the_learning_rate_is_one_of_its_kind(rate: float, lora: Any, code: str, cure: float | None) -> None:
    setup = Setup(settings=Settings(learning_rate=rate), lora=lora)
    told = findings(LEARNING[:1], setup)
    expected = [(code, {"learning_rate": cure})] if code else []
    assert [(each.code, each.changes) for each in told] == expected


@pytest.mark.parametrize(("value", "count"), [(0.2, 1), (1.0, 0), (2.5, 1)])
def test_a_temperature_makes_completions_equal_or_noise(value: float, count: int) -> None:
    told = found("C027", Setup(settings=Settings(temperature=value)))
    assert [each.changes for each in told] == [{"temperature": 1.0}] * count


def test_a_prompt_needs_room_before_a_completion() -> None:
    builder = SimpleNamespace(max_prompt_length=90, max_completion_length=20, context_length=100, context_room=80)
    [told] = found("D015", Setup(builder=builder))
    assert told.changes == {"max_prompt_length": 80}
    builder.max_prompt_length = 80
    assert found("D015", Setup(builder=builder)) == []


def test_padding_may_be_the_end_token() -> None:
    tokenizer = SimpleNamespace(pad_token_id=2, eos_token_id=2, eos_token="<end>")
    [told] = found("M005", Setup(tokenizer=tokenizer))
    assert (told.severity, told.facts) == ("note", {"eos_token": "<end>", "eos_token_id": 2})
    tokenizer.pad_token_id = 0
    assert found("M005", Setup(tokenizer=tokenizer)) == []


def test_a_finding_has_the_place_of_its_setting_and_a_cure_in_the_words_of_the_run() -> None:
    setup = Setup(settings=Settings(temperature=9.0))
    [told] = found("C027", setup)
    assert (setup.placed(told).what, setup.placed(told).fix) == ("temperature is 9", "temperature=1.0")
    written = Setup(given={"temperature": 9.0}, places={"temperature": "run.yaml:4"})
    assert (written.placed(told).what, written.placed(told).fix) == (
        "run.yaml:4: temperature is 9",
        "temperature: 1.0",
    )
