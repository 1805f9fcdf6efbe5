"""How good a policy is on prompts it was not trained on, and whether another one is better."""

from podium.evaluation.comparison import Comparison, compare
from podium.evaluation.held_out import HeldOut, numbers, summarize
from podium.evaluation.measured import Measured, accuracy_name, measure
from podium.evaluation.statistics import Interval

__all__ = [
    "Comparison",
    "HeldOut",
    "Interval",
    "Measured",
    "accuracy_name",
    "compare",
    "measure",
    "numbers",
    "summarize",
]
