"""The weighted sum of several rewards: is there a text without the right answer that it likes as well?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from podium.records import Finding
from podium.rewards.tester.evidence import mean
from podium.rewards.tester.probes import PROBES
from podium.rewards.tester.report import Report

NO_ANSWER = frozenset(probe.name for probe in PROBES if probe.code in {"W105", "W106", "W115", "W117"})


def judge_sum(reports: Sequence[Report], weights: Sequence[float]) -> list[Finding]:
    """W121, where a text that is no right answer gets as much as the right one in its best form.

    Compared are texts that were the same for all functions. One function alone, functions that were asked about
    different rows, and sums without a reward for the answer say nothing.
    """
    same_rows = {report.rows for report in reports}
    if len(reports) < 2 or len(same_rows) != 1 or not any(report.form for report in reports):
        return []
    sums = _sums(reports, weights)
    right = {text: values for (group, text), values in sums.items() if group == "right answer"}
    if not right:
        return []
    form = max(right, key=lambda text: _or_least(mean(right[text])))
    better = [
        (text, mean(values))
        for (group, text), values in sums.items()
        if group == "wrong answer" or text in NO_ANSWER
        if _reaches(values, right[form])
    ]
    if not better:
        return []
    shown = ", ".join(f"{text} {value:.3g}" for text, value in sorted(better, key=lambda pair: -pair[1])[:5])
    what = f"the weighted sum of {', '.join(report.name for report in reports)} gives texts without the right answer "
    return [
        Finding(
            code="W121",
            severity="error",
            what=what + f"as much as the right one ({form}: {mean(right[form]):.3g}): {shown}",
            why="what the sum likes best is what training makes",
            fix="raise the weight of the reward for the answer, or let the others count only where it is right",
        )
    ]


def _sums(reports: Sequence[Report], weights: Sequence[float]) -> dict[tuple[str, str], list[float]]:
    """Per text and row; a reward without an opinion adds nothing. Texts in the form of one reward are left out."""
    tables = [{(line.group, line.text): line for line in report.lines} for report in reports]
    shared = [key for key, line in tables[0].items() if all(key in table for table in tables) and line.is_shared]
    return {
        key: [
            _total([(weight, table[key].values[row]) for weight, table in zip(weights, tables, strict=True)])
            for row in range(len(reports[0].rows))
        ]
        for key in shared
    }


def _total(parts: Sequence[tuple[float, float]]) -> float:
    known = [weight * value for weight, value in parts if not math.isnan(value)]
    return sum(known) if known else math.nan


def _or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _reaches(values: Sequence[float], right: Sequence[float]) -> bool:
    """In half the rows or more."""
    pairs = [(one, other) for one, other in zip(values, right, strict=True) if not math.isnan(one + other)]
    return bool(pairs) and sum(one >= other - 1e-9 for one, other in pairs) >= 0.5 * len(pairs)
