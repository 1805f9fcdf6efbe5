"""Evaluation of a policy on prompts it was not trained on, and comparison with another one."""

from podium.algorithm.metrics import accuracy_name
from podium.evaluation.comparison import Comparison, compare
from podium.evaluation.held_out import EvalSummary, numbers, summarize
from podium.evaluation.measured import EvalScores

__all__ = ["Comparison", "EvalScores", "EvalSummary", "accuracy_name", "compare", "numbers", "summarize"]
