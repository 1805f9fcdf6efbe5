"""Whether a form that a reward pays can come from the model at all, behind the run's prompts and through its tokenizer.

    reach = reach_of(builder, rows)
    reach.text(0, "<think>3 + 4</think> 7")       # "3 + 4</think> 7", where prompt 0 ends in `<think>`

A completion begins behind its prompt, and is decoded without special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.data.prompts import PromptBuilder, check_row, special_tokens
from podium.errors import Finding
from podium.errors.texts import named_list
from podium.tester.calls import RewardCaller, Session
from podium.tester.cases import forms_for
from podium.tester.scores import Evidence, mean

BUDGET_SECONDS = 10.0

_OPENED = re.compile(r"<[A-Za-z][\w-]*>(?=\s*\Z)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The part of prompts and tokenizer that decides it."""

    openings: tuple[str, ...] = ()
    """The tag with which the prompt of each row ends, or an empty text."""
    special: tuple[str, ...] = ()
    """Special tokens of the tokenizer, the longest first."""

    def text(self, row: int, text: str) -> str:
        """What a reward gets to see of a text that goes on behind the prompt of a row."""
        opening = self.openings[row] if row < len(self.openings) else ""
        if opening and opening in text:
            text = text.partition(opening)[2]
        for token in self.special:
            text = text.replace(token, "")
        return text


WHOLE = Reach()
"""Of prompts that open nothing, and a tokenizer without special tokens."""


def reach_of(builder: PromptBuilder | None, rows: Sequence[Mapping[str, Any]]) -> Reach:
    """The reach of a run; without a builder all texts can come."""
    if builder is None:
        return WHOLE
    openings = tuple(_opening(builder, row) for row in rows)
    return Reach(openings=openings if any(openings) else (), special=special_tokens(builder.tokenizer))


def _opening(builder: PromptBuilder, row: Mapping[str, Any]) -> str:
    """The tag with which a prompt ends; or the first of what its last, unfinished message opens and does not close."""
    if check_row(row, 0, chat_template=builder.chat_template) is not None:
        return ""
    content = row["prompt"]
    if not isinstance(content, str) and content[-1]["role"] == "assistant" and isinstance(content[-1]["content"], str):
        begun = content[-1]["content"]
        opened = (tag for tag in re.findall(r"<[A-Za-z][\w-]*>", begun) if f"</{tag[1:]}" not in begun)
        return next(opened, "")
    rendered = builder.rendered(content, 0)
    found = None if isinstance(rendered, Finding) else _OPENED.search(rendered)
    return found[0] if found else ""


def unreachable(caller: RewardCaller, evidence: Evidence, reach: Reach, *, is_style: bool) -> Finding | None:
    """W125: of the forms of a right answer, one that cannot come as it is is worth more than all that comes.

    An error where what can come is worth no more than an empty text, or where the reward is about the form alone
    (`is_style`).
    """
    cases = evidence.cases
    forms = forms_for([case.prompt for case in cases], code=caller.info.code_text)
    written = {form.name: [form.write(case.gold) for case in cases] for form in forms}
    come = {
        name: [reach.text(case.row, text) for case, text in zip(cases, texts, strict=True)]
        for name, texts in written.items()
    }
    if come == written:
        return None
    session = Session(caller=caller, cases=cases, budget_seconds=BUDGET_SECONDS)
    whole = {name: _known(values) for name, values in session.scores(written, quietly=True).items()}
    left = {name: _known(values) for name, values in session.scores(come, quietly=True).items()}
    empty = mean(session.scores({"empty": [""] * len(cases)}, quietly=True)["empty"])
    best = max(written, key=lambda name: whole[name])
    best_left = max(come, key=lambda name: (left[name], name == best))
    paid = whole[best]
    paid_left = left[best_left]
    if session.is_over or not paid > paid_left:
        return None
    text = written[best][0]
    text_left = come[best_left][0]
    opening = reach.openings[cases[0].row] if cases[0].row < len(reach.openings) else ""
    reward = f"`{caller.info.name}` ({caller.info.where})" if caller.info.where else f"`{caller.info.name}`"
    opening = opening if opening in text else ""
    special = sorted(token for token in reach.special if token in text)
    if opening:
        lost = f"the prompts end in `{opening}`, and a completion begins behind it"
        fix = f"leave `{opening}` out of the prompt, or reward what follows it, as `regex_format` can"
    else:
        lost = f"{named_list(special)} are special tokens of the tokenizer, without which completions are decoded"
        fix = "name other tags in prompts and reward, or make them text: AddedToken(TAG, special=False)"
    return Finding(
        code="W125",
        severity="error" if is_style or not paid_left > empty else "warning",
        what=f"{reward} gives {paid:.3g} to {text!r}, but {lost}: what then comes is worth at most "
        f"{paid_left:.3g}, as {text_left!r}",
        why="completions do not have the form that is paid, however the model is trained",
        fix=fix,
        facts={
            "reward": reward,
            "whole": repr(text),
            "paid": paid,
            "opening": opening,
            "special": special,
            "come": repr(text_left),
            "left": paid_left,
        },
    )


def _known(values: Any) -> float:
    value = mean(values)
    return value if value == value else float("-inf")
