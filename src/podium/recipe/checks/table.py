"""The table of rules: every function that looks at a setup, with the codes it may give and how bad each can be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from podium.recipe.checks import data, model, rewards, settings
from podium.recipe.checks.setup import Setup
from podium.records import Finding

Severity = Literal["error", "warning", "note"]

ERROR: Severity = "error"
WARNING: Severity = "warning"
NOTE: Severity = "note"

ORDER: Mapping[str, int] = {"error": 0, "warning": 1, "note": 2}


TESTED = ("W002", "W008", "W009", "W011", "W016", "W017", "W018", *(f"W{number}" for number in range(101, 123)))
"""Codes of the reward tester's findings."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One function and what it may find; the severity is the worst that it gives."""

    function: Callable[[Setup], Iterable[Finding]]
    codes: Mapping[str, Severity]


def _gathered(setup: Setup) -> Iterator[Finding]:
    """What kept parts of the setup from being had: said by whoever read the recipe, the files, the model."""
    yield from setup.problems


RULES: tuple[Rule, ...] = (
    Rule(
        _gathered,
        {
            "C001": ERROR,
            "C002": ERROR,
            "C003": ERROR,
            "C004": ERROR,
            "C006": ERROR,
            "C009": ERROR,
            "C010": ERROR,
            "C011": ERROR,
            "C012": ERROR,
            "C013": ERROR,
            "C014": ERROR,
            "C016": ERROR,
            "C017": ERROR,
            "C018": ERROR,
            "C019": ERROR,
            "C030": ERROR,
            "C031": ERROR,
            "C033": ERROR,
            "C060": ERROR,
            "C061": ERROR,
            "D004": ERROR,
            "D015": ERROR,
            "D024": ERROR,
            "D025": ERROR,
            "D026": ERROR,
            "D027": ERROR,
            "D029": ERROR,
            "D030": ERROR,
            "D031": ERROR,
            "D034": ERROR,
            "D035": ERROR,
            "D038": ERROR,
            "D039": ERROR,
            "D050": WARNING,
            "D051": NOTE,
            "D052": ERROR,
            "D053": ERROR,
            "D054": ERROR,
            "D055": ERROR,
            "D056": ERROR,
            "D057": ERROR,
            "D058": ERROR,
            "D060": ERROR,
            "M001": ERROR,
            "M002": ERROR,
            "M003": ERROR,
            "M006": ERROR,
            "M008": ERROR,
            "M009": ERROR,
            "M011": ERROR,
            "M012": ERROR,
            "M013": ERROR,
            "M016": ERROR,
            "M017": ERROR,
            "W001": ERROR,
            "W013": ERROR,
        },
    ),
    Rule(settings.assumed, {"C040": NOTE}),
    Rule(settings.variables, {"C020": ERROR}),
    Rule(settings.contradictions, {"C004": ERROR, "C030": ERROR, "C036": ERROR}),
    Rule(settings.resumed, {"K001": ERROR, "K002": NOTE}),
    Rule(settings.packages, {"C032": WARNING}),
    Rule(settings.vllm, {"C032": WARNING, "C034": WARNING}),
    Rule(settings.filters, {"C035": WARNING}),
    Rule(settings.combinations, {"C025": WARNING}),
    Rule(settings.learning_rate, {"C021": WARNING, "C022": WARNING, "C026": WARNING}),
    Rule(settings.group_size, {"C023": WARNING}),
    Rule(settings.few_groups, {"C024": WARNING}),
    Rule(settings.temperature, {"C027": WARNING}),
    Rule(settings.unusual, {"C037": WARNING}),
    Rule(settings.warm_up, {"C037": WARNING}),
    Rule(model.unasked, {"M023": WARNING}),
    Rule(model.weights, {"M022": ERROR}),
    Rule(model.vocabulary, {"M007": ERROR}),
    Rule(model.special_tokens, {"M005": NOTE}),
    Rule(model.end_tokens, {"M018": WARNING}),
    Rule(model.template, {"M019": NOTE, "M025": WARNING}),
    Rule(model.pickles, {"M010": WARNING}),
    Rule(model.quantized, {"M014": ERROR, "M015": ERROR}),
    Rule(model.precision, {"M015": ERROR}),
    Rule(model.adapter_targets, {"M020": ERROR}),
    Rule(model.router, {"M021": ERROR}),
    Rule(model.memory, {"C015": ERROR, "C028": WARNING, "C029": NOTE, "C038": WARNING}),
    Rule(data.columns, {"D001": ERROR, "D020": ERROR, "D021": ERROR, "D036": ERROR}),
    Rule(
        data.bad_rows,
        {
            "D001": ERROR,
            "D002": ERROR,
            "D003": ERROR,
            "D004": ERROR,
            "D005": ERROR,
            "D006": ERROR,
            "D007": ERROR,
            "D008": ERROR,
            "D009": ERROR,
            "D010": ERROR,
            "D012": ERROR,
            "D027": ERROR,
            "D029": ERROR,
            "D031": ERROR,
            "D033": ERROR,
            "D036": ERROR,
        },
    ),
    Rule(data.shapes, {"D011": WARNING, "D012": WARNING, "D013": ERROR, "D014": ERROR, "M004": ERROR}),
    Rule(data.turns, {"D042": WARNING, "D043": WARNING, "D044": WARNING}),
    Rule(data.unasked_in_chat, {"D045": WARNING}),
    Rule(data.room, {"D015": WARNING}),
    Rule(data.enough, {"D022": ERROR, "D023": ERROR}),
    Rule(data.streams, {"C030": ERROR}),
    Rule(data.repeats, {"D016": WARNING, "D041": WARNING}),
    Rule(data.leaks, {"D017": WARNING}),
    Rule(data.unusable_answers, {"D018": ERROR}),
    Rule(data.mixed_types, {"D019": NOTE}),
    Rule(data.long_answers, {"D037": WARNING}),
    Rule(data.odd_text, {"D028": NOTE, "D033": WARNING}),
    Rule(data.lengths, {"D040": NOTE}),
    Rule(data.sampled, {"D032": NOTE}),
    Rule(rewards.needs, {"W002": ERROR, "W015": ERROR}),
    Rule(
        rewards.models,
        dict.fromkeys(("C030", "D015", "M001", "M002", "M003", "M004", "M008", "M011", "M013", "M016", "M017"), ERROR),
    ),
    Rule(
        rewards.trials,
        {
            "W003": ERROR,
            "W004": ERROR,
            "W005": ERROR,
            "W006": ERROR,
            "W007": ERROR,
            "W010": ERROR,
            "W012": ERROR,
            "W014": ERROR,
            **dict.fromkeys(TESTED, WARNING),
        },
    ),
    Rule(rewards.accuracy, {"W123": NOTE}),
)

NOT_HERE = frozenset({"C032", "D050", "M023"})
"""What this machine lacks, and not the recipe: a check warns of it, training stops before weights are loaded."""


def codes() -> frozenset[str]:
    """Every code that a rule may give."""
    return frozenset(code for rule in RULES for code in rule.codes)


def findings(setup: Setup) -> list[Finding]:
    """What all rules find: errors first, each kind in the order of the table."""
    found = [finding for rule in RULES for finding in _checked(rule, setup)]
    return errors_first(data.without_consequences(setup, found))


def errors_first(found: Iterable[Finding]) -> list[Finding]:
    """By severity, each kind in the order in which it was found."""
    return sorted(found, key=lambda finding: ORDER[finding.severity])


def _checked(rule: Rule, setup: Setup) -> Iterator[Finding]:
    for finding in rule.function(setup):
        worst = rule.codes.get(finding.code)
        assert worst is not None, f"{rule.function.__name__} gives {finding.code}, which its rule does not name"
        assert ORDER[worst] <= ORDER[finding.severity], f"{finding.code} is {finding.severity}; its rule says {worst}"
        yield finding
