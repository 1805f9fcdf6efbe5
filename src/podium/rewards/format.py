"""Rewards for the form of a completion, not its content. Each takes plain and chat completions."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from podium.data.extract import compiled_pattern
from podium.data.normal import seen
from podium.errors import ConfigError
from podium.rewards.text import text_of

_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_TRL_THINK = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)
_THINK_TAG = re.compile(r"<(/?)think\s*>")


def _says_something(content: str) -> bool:
    """Whether a text shows more than tags, white space, and characters that take no room, as entities too."""
    return bool(_TAG.sub("", seen(html.unescape(content))).strip())


def answer_format(completions: Sequence[Any]) -> list[float]:
    """How far a completion is one tagged answer: 0.25 for each tag that is there, 0.5 for nothing else around them.

    The parts make the reward reachable by small steps, for a model that hardly ever writes both tags by itself.

    >>> answer_format(["<answer>7</answer>", "It is <answer>7</answer>", "<answer>7", "7"])
    [1.0, 0.5, 0.25, 0.0]
    """
    return [_how_far_tagged(seen(text_of(each)).strip()) for each in completions]


def _how_far_tagged(text: str) -> float:
    content = text.removeprefix("<answer>").removesuffix("</answer>")
    is_one = text == f"<answer>{content}</answer>" and not _TAG.search(content) and _says_something(content)
    return 0.25 * ("<answer>" in text) + 0.25 * ("</answer>" in text) + 0.5 * is_one


def xml_format(completions: Sequence[Any], *, sections: Sequence[str] = ("reasoning", "answer")) -> list[float]:
    """1 where a completion is the given XML sections in their order, each once and not empty, and nothing else.

    >>> xml_format(["<reasoning>3+4</reasoning> <answer>7</answer>", "<answer>7</answer>"])
    [1.0, 0.0]
    >>> xml_format(["<answer>7</answer>"], sections=["answer"])
    [1.0]
    """
    tags = [re.escape(section) for section in _named(sections)]
    # Inside a section no tag of the list may open or close, so each appears once.
    inside = rf"((?:(?!</?(?:{'|'.join(tags)})>).)*)"
    whole = re.compile(r"\s*".join(f"<{tag}>{inside}</{tag}>" for tag in tags), re.DOTALL)
    found = [whole.fullmatch(seen(text_of(each)).strip()) for each in completions]
    return [float(match is not None and all(map(_says_something, match.groups()))) for match in found]


def xml_format_partial(
    completions: Sequence[Any],
    *,
    sections: Sequence[str] = ("reasoning", "answer"),
    penalty_per_character: float = 0.001,
) -> list[float]:
    """How far a completion is the given XML sections in their order: an equal share for each tag, once and in place.

    For a model that does not reach `xml_format` by itself. What stands after the last tag costs
    `penalty_per_character` for each character; the sum is never below 0.

    >>> done, started, goes_on = "<answer>7</answer>", "<answer>7", "<answer>7</answer> and so on."
    >>> xml_format_partial([done, started, goes_on, "7"], sections=["answer"], penalty_per_character=0.01)
    [1.0, 0.5, 0.9, 0.0]
    """
    if not penalty_per_character >= 0:
        raise ConfigError(f"`penalty_per_character` must be 0 or more; it is {penalty_per_character}.")
    tags = [tag for section in _named(sections) for tag in (f"<{section}>", f"</{section}>")]
    return [_tags_in_place(text_of(each).strip(), tags, penalty_per_character) for each in completions]


def _tags_in_place(text: str, tags: Sequence[str], penalty_per_character: float) -> float:
    """A tag counts where it is there once, and behind all that are counted before it."""
    end, num_right = 0, 0
    for tag in tags:
        start = text.find(tag)
        if start >= end and text.count(tag) == 1:
            end, num_right = start + len(tag), num_right + 1
    after = len(text[end:].strip()) if text.count(tags[-1]) else 0
    return round(max(0.0, num_right / len(tags) - penalty_per_character * after), 6)


def _named(sections: Sequence[str]) -> list[str]:
    if isinstance(sections, str) or not sections:
        raise ConfigError(f"`sections` must be a list of names; it is {sections!r}.")
    return list(sections)


def think_format(completions: Sequence[Any]) -> list[float]:
    """1 where a completion is one `<think>...</think>` block and then an answer, neither of them empty.

    Stricter than TRL's `think_format_reward`, which also takes an empty block, and one with no answer after it.

    >>> think_format(["<think>3+4</think> 7", "<think>3+4</think>", "<think></think> 7", "7"])
    [1.0, 0.0, 0.0, 0.0]
    """
    return [float(_is_thought_and_answer(seen(text_of(each)).strip())) for each in completions]


def _is_thought_and_answer(text: str) -> bool:
    before, *parts = _THINK_TAG.split(text)
    return not before and parts[::2] == ["", "/"] and all(map(_says_something, parts[1::2]))


def regex_format(completions: Sequence[Any], *, pattern: str) -> list[float]:
    r"""1 where the whole completion, white space around it aside, matches `pattern`; `.` matches line ends too.

    A pattern such as `(a+)+b` may take for ever on some texts; what ends it is the time limit of the reward.

    >>> regex_format(["#### 7", "7"], pattern=r"#### \d+")
    [1.0, 0.0]
    """
    whole = compiled_pattern(pattern, re.DOTALL)
    return [float(bool(whole.fullmatch(text_of(each).strip()))) for each in completions]


def think_format_reward(completions: Sequence[Any]) -> list[float]:
    """TRL's `think_format_reward`: 1 where a completion starts with `<think>...</think>`, plain text taken too.

    >>> think_format_reward(["<think>3+4</think> 7", "7"])
    [1.0, 0.0]
    """
    return [float(bool(_TRL_THINK.match(text_of(each)))) for each in completions]
