"""benchmarks/RESULTS.md has every threshold as it is in the code.

The rows of detectors are printed from their table. A row is read as numbers: those of its words have to be those that
the code compares with. 0, 1, the divisors of means, and differences that are rounding stand in no row.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.health import thresholds
from podium.checks import rewards as recipe
from podium.rewards.score import HUGE, repeat_findings
from podium.runs.monitors import DETECTORS, signs
from podium.tester import environments, pretest, probe_rules, reward_rules, rewards, scores
from podium.tester import episode_rules as games
from podium.tester.scores import best_form
from podium.trainer.proof import checks, completions, evidence

PAGE = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\d)")
ROUNDING = {0, 1, 1e-12, 1e-9, 1e-6}

SIGNS = {"M112": ("_uncredited",), "M159": ("_listed", "_constant", "_few"), "M160": ("_empty", "_repeated")}
"""The rules of `podium.runs.monitors.signs` that a detector asks for; others it names without asking them."""
LOOKS = ("_copied", *(name for names in SIGNS.values() for name in names))
ASIDE: Mapping[str, set[float]] = {
    **{"M101": {2}, "M103": {0.05}, "M110": {60}, "M112": {2, 4}, "M121": {3}, "M122": {0.3}, "M134": {0.01, 2}},
    **{"M136": {0.9, 0.95, 3}, "M137": {10}, "M141": {8}, "M146": {0.1}, "M155": {40}, "M156": {40}},
    **{"M160": {2, 4}, "M161": {2}, "M171": {0.25, 0.3, 0.5, 2, 10}, "W104": {2}},
    **{"W116": {30}, "P007": {0.005}, "E011": {2}, "E012": {2}},
}
"""Numbers beside the conditions: of the words of a message, of the size of a cure, of what another code reports."""

LOGPS = (evidence.EXACT, evidence.HALF, evidence.ROUNDINGS)
LIKE_THE_ANSWER = (probe_rules.LIKE, scores.MOST)
OTHERS: Mapping[str, tuple[Any, ...]] = {
    "P004": (*LOGPS, checks.sampler_synced, checks.shortened),
    "P005": LOGPS,
    "P006": (*LOGPS, checks.sampler_synced),
    "P007": (checks.batch_invariance, evidence.ROUNDINGS),
    "P008": (checks.gradients, checks.LEAST_DOUBT),
    "P012": (checks._stay_where_the_plain_model_moves,),
    "P014": (completions.own_language, completions._surprise, completions._opened_by_the_model),
    "P015": (checks.step_direction,),
    "P016": (*LOGPS[:2], checks.reference_kept),
    "P018": (*LOGPS, completions._with_most_turns),
    "W007": (HUGE,),
    "W008": (reward_rules.constant,),
    "W009": (reward_rules.SLOW_SECONDS, recipe.SLOW_SECONDS),
    "W012": (reward_rules.other_kind,),
    "W016": (pretest.SETTINGS.limit_seconds,),
    "W101": (best_form,),
    "W102": (reward_rules.wrong_sign,),
    "W103": (reward_rules.other_rows, reward_rules._scored_against),
    "W104": (reward_rules.prompt_number, *LIKE_THE_ANSWER),
    "W105": LIKE_THE_ANSWER,
    "W106": LIKE_THE_ANSWER,
    "W107": LIKE_THE_ANSWER,
    "W108": LIKE_THE_ANSWER,
    "W109": (scores.close,),
    "W110": (scores.close,),
    "W111": (scores.close, repeat_findings),
    "W112": (scores.close,),
    "W113": (reward_rules.column_unfit,),
    "W115": LIKE_THE_ANSWER,
    "W116": (reward_rules.answer_in_prompt,),
    "W117": LIKE_THE_ANSWER,
    "W118": LIKE_THE_ANSWER,
    "W119": LIKE_THE_ANSWER,
    "W121": (rewards._reaches,),
    "W122": (pretest.SETTINGS.budget_seconds, pretest.SECONDS),
    "W124": (recipe.LIKE,),
    "E005": (environments.ExamineSettings().limit, environments.TEST_SECONDS),
    "E010": (games._inaction,),
    "E011": (games._senseless, games.HIGH),
    "E012": (games._senseless, games.HIGH),
    "E013": (games.ROWS,),
    "E015": (games.LONG_RESULT,),
    "E016": (games.SLOW_SECONDS,),
    "E018": (environments.ExamineSettings().turns,),
}
"""By code of the proof, of the test of rewards and of that of environments: where its numbers are."""

SIZES = {
    *("PROMPTS", "COMPLETIONS", "PROMPT_TOKENS", "COMPLETION_TOKENS", "GIVEN_TOKEN", "SAMPLE_ROUND", "NUDGED_TENSORS"),
    *("NUDGE", "HEAD_TOKENS", "KEPT", "NUM_WHOLE", "WHOLE", "ONE_PACK", "COMPARED", "MORE_EPISODES", "LARGEST"),
}
"""Constants of the same modules that decide nothing: how much is sampled, moved for a moment, or looked at."""


def block(name: str) -> str:
    """The part of the page between two marks."""
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- /{name} -->")[0]


def rows() -> dict[str, str]:
    """By code: what is measured and when it is reported."""
    lines = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for name in ("detectors", "thresholds")
        for line in block(name).splitlines()[2:]
    ]
    return {cells[0].strip("`"): f"{cells[1]}: {cells[2]}" for cells in lines}


def decides(value: Any, looks: tuple[str, ...]) -> bool:
    """Whether what a detector names is a part of it: not another detector, nor what only adds words to a message."""
    home, _, module = getattr(value, "__module__", "").rpartition(".")
    if home != "podium.runs.monitors" or module in ("detection", "history") or value.__name__ == "doubt_about":
        return False
    return value.__name__ not in {*LOOKS} - {*looks}


def parts(code: str) -> list[Any]:
    """A detector with all that it decides by; of other findings the sources above."""
    if code not in DETECTORS:
        return list(OTHERS[code])
    looks = SIGNS.get(code, ())
    found: list[Any] = [DETECTORS[code].find, *(getattr(signs, name) for name in looks)]
    for each in found:
        named = [named_in(each, node) for node in ast.walk(tree_of(each)) if isinstance(node, ast.Name)]
        found += [
            x
            for x in dict.fromkeys(x for x in named if isinstance(x, (types.FunctionType, type)) and decides(x, looks))
            if x not in found
        ]
    return found


def tree_of(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def named_in(function: Any, node: ast.Name) -> Any:
    return vars(importlib.import_module(function.__module__)).get(node.id)


def numbers(part: Any) -> set[float]:
    """Numbers in comparisons, bounds and windows of a function, and the constants that it names."""
    if is_number(part):
        return {abs(part)}
    found: set[float] = set()
    for node in ast.walk(tree_of(part)):
        for each in compared(node):
            found |= {abs(n.value) for n in ast.walk(each) if isinstance(n, ast.Constant) and is_number(n.value)}
        value = named_in(part, node) if isinstance(node, ast.Name) else None
        found |= {abs(x) for x in (value.values() if isinstance(value, dict) else [value]) if is_number(x)}
    return found - ROUNDING


CALLS = ("history.change", "history.numbers", "history.shares", "max", "min")
"""Calls whose numbers are thresholds, or the widths of windows."""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def compared(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a piece of code whose numbers are thresholds, or the widths of windows."""
    if isinstance(node, ast.Compare):
        yield node
    elif isinstance(node, ast.Slice) and isinstance(node.lower, ast.UnaryOp):
        yield node.lower
    elif isinstance(node, ast.keyword) and node.arg in ("last", "least", "rtol"):
        yield node.value
    elif isinstance(node, ast.arguments):
        yield from filter(None, [*node.defaults, *node.kw_defaults])
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
        yield from node.args


def severities(part: Any) -> set[str]:
    """Of the evidence that a function makes."""
    made = [n for n in ast.walk(tree_of(part)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Evidence"]
    given = [next((k.value for k in n.keywords if k.arg == "severity"), ast.Constant("warning")) for n in made]
    words = {n.value for each in given for n in ast.walk(each) if isinstance(n, ast.Constant)}
    return {str(word) for word in words} & {"error", "warning", "note"}


def test_the_rows_of_detectors_are_printed_from_their_table() -> None:
    assert block("detectors") == thresholds()
    assert list(rows()) == [*DETECTORS, *OTHERS]


@pytest.mark.cases(30)
@pytest.mark.parametrize("code", [*DETECTORS, *OTHERS])
def test_thresholds_are_those_of_the_code(code: str) -> None:
    words = rows()[code]
    named = {float(number) for number in NUMBER.findall(words)} - ROUNDING
    assert named == set().union(*map(numbers, parts(code))) - ASIDE.get(code, set()), words
    if code in DETECTORS:
        assert set(DETECTORS[code].severity.split(" or ")) == set().union(*map(severities, parts(code)))


@pytest.mark.parametrize(
    "module", [checks, completions, evidence, scores, reward_rules, probe_rules, environments, games]
)
def test_every_constant_is_in_a_row(module: types.ModuleType) -> None:
    shown = set().union(*(numbers(part) for code in OTHERS for part in parts(code)))
    constants = {name: x for name, x in vars(module).items() if name.isupper() and is_number(x) and name not in SIZES}
    assert {name for name, x in constants.items() if x not in shown | ROUNDING} == set()
