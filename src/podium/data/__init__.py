"""From datasets to prompts: rows by name, what is wrong with them, and how a row is rendered and tokenized.

Names are loaded when first used: rows can be had without transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podium.data.check import check_dataset, find_problems
    from podium.data.loading import Loaded, load
    from podium.data.prompts import Overlong, PromptBuilder
    from podium.data.row import check_row

_HOME = {
    "Loaded": "loading",
    "Overlong": "prompts",
    "PromptBuilder": "prompts",
    "check_dataset": "check",
    "check_row": "row",
    "find_problems": "check",
    "load": "loading",
}

__all__ = ["Loaded", "Overlong", "PromptBuilder", "check_dataset", "check_row", "find_problems", "load"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"podium.data.{_HOME[name]}"), name)
    raise AttributeError(f"module `podium.data` has no attribute `{name}`")
