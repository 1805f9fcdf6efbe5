"""Evaluation of a policy on prompts it was not trained on, and comparison with another one."""

from podium.evaluation.comparison import Comparison, compare
from podium.evaluation.held_out import EvalSummary, numbers, summarize
from podium.evaluation.measured import EvalScores, accuracy_name, measure

__all__ = ["Comparison", "EvalScores", "EvalSummary", "accuracy_name", "compare", "measure", "numbers", "summarize"]
