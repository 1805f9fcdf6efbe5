"""Rewards for the form of a completion, whatever it says. Each takes plain and chat completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from podium.rewards.text import as_chat, text_of

_ONLY_ANSWER = re.compile(r"<answer>\s*[^<\s][^<]*</answer>")
_THINK_FIRST = re.compile(r"<think>(?:(?!<think>).)*?</think>(?!.*</?think>)\s*\S.*", re.DOTALL)


def answer_format(completions: Sequence[Any]) -> list[float]:
    """How far a completion is one tagged answer: 0.25 for each tag that is there, 0.5 for nothing else around them.

    The parts make the reward reachable by small steps, for a model that hardly ever writes both tags by itself.

    >>> answer_format(["<answer>7</answer>", "It is <answer>7</answer>", "<answer>7", "7"])
    [1.0, 0.5, 0.25, 0.0]
    """
    return [_answer_format(text_of(each).strip()) for each in completions]


def _answer_format(text: str) -> float:
    tags = 0.25 * ("<answer>" in text) + 0.25 * ("</answer>" in text)
    return tags + 0.5 * bool(_ONLY_ANSWER.fullmatch(text))


def xml_format(completions: Sequence[Any], *, sections: Sequence[str] = ("reasoning", "answer")) -> list[float]:
    """1 where a completion is the given XML sections in their order, each once and not empty, and nothing else.

    >>> xml_format(["<reasoning>3+4</reasoning> <answer>7</answer>", "<answer>7</answer>"])
    [1.0, 0.0]
    >>> xml_format(["<answer>7</answer>"], sections=["answer"])
    [1.0]
    """
    tags = [re.escape(section) for section in sections]
    # Inside a section no tag of the list may open or close, so each appears once.
    inside = rf"(?:(?!</?(?:{'|'.join(tags)})>).)*"
    whole = re.compile(r"\s*".join(rf"<{tag}>(?!\s*</{tag}>){inside}</{tag}>" for tag in tags), re.DOTALL)
    return [float(bool(whole.fullmatch(text_of(each).strip()))) for each in completions]


def think_format(completions: Sequence[Any]) -> list[float]:
    """1 where a completion is one `<think>...</think>` block and then an answer.

    Stricter than TRL's `think_format_reward`, which also takes a block with no answer after it.

    >>> think_format(["<think>3+4</think> 7", "<think>3+4</think>", "7"])
    [1.0, 0.0, 0.0]
    """
    return [float(bool(_THINK_FIRST.fullmatch(text_of(each).strip()))) for each in completions]


def regex_format(completions: Sequence[Any], *, pattern: str) -> list[float]:
    r"""1 where the whole completion, white space around it aside, matches `pattern`; `.` matches line ends too.

    >>> regex_format(["#### 7", "7"], pattern=r"#### \d+")
    [1.0, 0.0]
    """
    whole = re.compile(pattern, re.DOTALL)
    return [float(bool(whole.fullmatch(text_of(each).strip()))) for each in completions]


def think_format_reward(completions: Sequence[Any]) -> list[float]:
    """TRL's `think_format_reward`: 1 where a completion starts with `<think>...</think>`, plain text taken too.

    >>> think_format_reward(["<think>3+4</think> 7", "7"])
    [1.0, 0.0]
    """
    from trl.rewards import think_format_reward as matched

    return matched([as_chat(each) for each in completions])
