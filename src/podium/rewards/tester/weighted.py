"""The weighted sum of several rewards: is there a text without the right answer that scores as high?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from podium.records import Finding
from podium.rewards.tester.evidence import mean
from podium.rewards.tester.probes import PROBES
from podium.rewards.tester.report import RewardReport

NO_ANSWER = frozenset(probe.name for probe in PROBES if probe.code in {"W105", "W106", "W115", "W117"})


def check_sum(reports: Sequence[RewardReport], weights: Sequence[float]) -> list[Finding]:
    """W121, where a text that is no right answer gets as much as the right one in its best form.

    Compared are texts that were the same for all functions. One function alone, functions that were tested with
    different rows, and sums without a reward for the answer give no finding.
    """
    if len(reports) < 2 or len({report.rows for report in reports}) != 1 or not any(report.form for report in reports):
        return []
    sums = _sums(reports, weights)
    right = {text: values for (group, text), values in sums.items() if group == "right answer"}
    if not right:
        return []
    form = max(right, key=lambda text: -math.inf if math.isnan(mean(right[text])) else mean(right[text]))
    better = [
        (text, mean(values))
        for (group, text), values in sums.items()
        if (group == "wrong answer" or text in NO_ANSWER) and _reaches(values, right[form])
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


def _sums(reports: Sequence[RewardReport], weights: Sequence[float]) -> dict[tuple[str, str], list[float]]:
    """By text, for each row; a reward without a value adds nothing. Texts in the form of one reward are left out."""
    tables = [{(line.group, line.text): line for line in report.lines} for report in reports]
    shared = [key for key, line in tables[0].items() if all(key in table for table in tables) and line.is_shared]
    columns = {key: zip(*(table[key].values for table in tables), strict=True) for key in shared}
    return {key: [_total(weights, values) for values in rows] for key, rows in columns.items()}


def _total(weights: Sequence[float], values: Sequence[float]) -> float:
    known = [weight * value for weight, value in zip(weights, values, strict=True) if not math.isnan(value)]
    return sum(known) if known else math.nan


def _reaches(values: Sequence[float], right: Sequence[float]) -> bool:
    """In half the rows or more."""
    pairs = [(one, other) for one, other in zip(values, right, strict=True) if not math.isnan(one + other)]
    return bool(pairs) and sum(one >= other - 1e-9 for one, other in pairs) >= 0.5 * len(pairs)
