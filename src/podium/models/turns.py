"""A turn that the policy drew becomes a message: content, reasoning and calls of tools apart, as in TRL."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from podium.records import MOST_NESTED, Message, is_too_deep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def parses_turns(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a response template, by which a turn is parsed."""
    return getattr(tokenizer, "response_template", None) is not None


def parse_turn(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, prefix: Sequence[int], schemas: Sequence[Any] = ()
) -> Message:
    """The message of a drawn turn; without a response template, or with a malformed call, its text. Never raises.

    Args:
        tokenizer: with or without a response template.
        token_ids: of the turn, with its end token where one was drawn.
        prefix: all tokens before it.
        schemas: of the completion's tools, as dictionaries: arguments get their types.
    """
    if parses_turns(tokenizer) and token_ids:
        from trl.chat_template_utils import parse_response

        try:
            message: dict[str, Any] = parse_response(tokenizer, list(token_ids), list(prefix), list(schemas) or None)
            _complete_calls(message)
            last = list(token_ids[-1:])
            end = str(tokenizer.decode(last))
            content = message["content"]
            if content.endswith(end) and not tokenizer.decode(last, skip_special_tokens=True):
                message["content"] = content.removesuffix(end).rstrip()  # an end token that is not the template's own
            return message
        except Exception:  # the parser is run on the model's text: deep nesting, for example, is a RecursionError
            logger.debug("A turn could not be parsed.", exc_info=True)
    return {"role": "assistant", "content": str(tokenizer.decode(list(token_ids), skip_special_tokens=True))}


def _complete_calls(message: Message) -> None:
    """Give every call the keys `type` and `function`. Raises for one that is no JSON in valid Unicode, or too deep."""
    for call in message.get("tool_calls") or ():
        if "function" not in call:
            call["function"] = {key: call.pop(key) for key in ("name", "arguments")}
        call.setdefault("type", "function")
        if is_too_deep(call["function"]["arguments"]):
            raise ValueError(f"The arguments of a call are nested more than {MOST_NESTED} deep.")
    json.dumps(message.get("tool_calls"), ensure_ascii=False).encode()
