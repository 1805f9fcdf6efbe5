"""Settings of evaluations, and verdicts of paired tests, for tests that make both by hand."""

from __future__ import annotations

from typing import Any

from podium.evaluation.comparison import PairedTest
from podium.evaluation.saved import EvalSettings
from podium.evaluation.statistics import Difference

SETTINGS = EvalSettings(
    model="a model",
    data="some rows",
    names=("correct",),
    weights=(1.0,),
    accuracy="correct",
    num_completions=4,
    greedy=False,
    temperature=1.0,
    max_tokens=8,
    seed=0,
    engine="live",
    products="",
    code=("c",),
    rows="r",
    prompts="p",
    chat_template="t",
    vocabulary="v",
)
ALIKE = (SETTINGS, SETTINGS)


def verdict(found: Difference, metric: Any = "accuracy", names: tuple[str, str] = ("A", "B"), **given: Any) -> str:
    """The verdict of a test with nothing that speaks against it, unless it is given."""
    return paired_test(found, metric, names, **given).verdict


def paired_test(
    found: Difference, metric: Any = "accuracy", names: tuple[str, str] = ("A", "B"), **given: Any
) -> PairedTest:
    """The test itself."""
    nothing: dict[str, Any] = {"paid": found, "differing": (), "doubts": (), "strict": (), "baseline": ""}
    return PairedTest(
        names=names,
        metric=metric,
        reward="correct",
        main=found,
        num_completions=(4, 4),
        settings=(SETTINGS.digest, SETTINGS.digest),
        **{**nothing, **given},
    )
