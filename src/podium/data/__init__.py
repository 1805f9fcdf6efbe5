"""From datasets to prompts: what is wrong with the rows, and how a row is rendered and tokenized."""

from podium.data.check import check_dataset, check_row, find_problems
from podium.data.prompts import Overlong, PromptBuilder

__all__ = ["Overlong", "PromptBuilder", "check_dataset", "check_row", "find_problems"]
