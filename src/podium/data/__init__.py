"""From datasets to prompts: rows by name, what is wrong with them, and how a row is rendered and tokenized.

Names are loaded when first used: rows can be had without transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from podium.lazy import lazy_names

if TYPE_CHECKING:
    from podium.data.prompts import Overlong, PromptBuilder, check_row
    from podium.data.rows import Loaded, load
    from podium.data.survey import check_dataset, find_problems

__all__ = ["Loaded", "Overlong", "PromptBuilder", "check_dataset", "check_row", "find_problems", "load"]


__getattr__ = lazy_names(
    __name__,
    prompts="Overlong PromptBuilder check_row",
    rows="Loaded load",
    survey="check_dataset find_problems",
)


def __dir__() -> list[str]:
    return sorted(__all__)
