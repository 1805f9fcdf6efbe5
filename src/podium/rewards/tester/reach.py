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

from podium.data.prompts import PromptBuilder
from podium.data.row import check_row
from podium.data.special_tokens import special_tokens
from podium.errors import Finding
from podium.errors.texts import named_list
from podium.rewards.tester.callers import RewardCaller
from podium.rewards.tester.cases import ProbeCase, forms_for
from podium.rewards.tester.evidence import mean
from podium.rewards.tester.report import RewardReport
from podium.rewards.tester.session import Session

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


def unreachable(
    caller: RewardCaller, report: RewardReport, cases: tuple[ProbeCase, ...], reach: Reach
) -> Finding | None:
    """W125: of the forms of a right answer, one that cannot come as it is is worth more than all that comes.

    An error where what can come is worth no more than an empty text, or where the reward is about the form alone.
    """
    forms = forms_for([case.prompt for case in cases], code=caller.info.code_text)
    written = {form.name: [form.write(case.gold) for case in cases] for form in forms}
    come = {
        name: [reach.text(case.row, text) for case, text in zip(cases, texts, strict=True)]
        for name, texts in written.items()
    }
    if come == written:
        return None
    session = Session(caller=caller, cases=cases, budget_seconds=BUDGET_SECONDS)
    before = session.scores(written, quietly=True)
    after = session.scores(come, quietly=True)
    empty = mean(session.scores({"empty": [""] * len(cases)}, quietly=True)["empty"])
    best = max(written, key=lambda name: _known(before[name]))
    left = max(come, key=lambda name: (_known(after[name]), name == best))
    if session.is_over or not _known(before[best]) > _known(after[left]):
        return None
    gains_nothing = not _known(after[left]) > empty
    text = written[best][0]
    opening = reach.openings[cases[0].row] if cases[0].row < len(reach.openings) else ""
    reward = f"`{report.name}` ({report.where})" if report.where else f"`{report.name}`"
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
        severity="error" if gains_nothing or report.kind == "style" else "warning",
        what=f"{reward} gives {_known(before[best]):.3g} to {text!r}, but {lost}: what then comes is worth at most "
        f"{_known(after[left]):.3g}, as {come[left][0]!r}",
        why="completions do not have the form that is paid, however the model is trained",
        fix=fix,
        facts={
            "reward": reward,
            "whole": repr(text),
            "paid": _known(before[best]),
            "opening": opening,
            "special": special,
            "come": repr(come[left][0]),
            "left": _known(after[left]),
        },
    )


BUDGET_SECONDS = 10.0


def _known(values: Any) -> float:
    value = mean(values)
    return value if value == value else float("-inf")
