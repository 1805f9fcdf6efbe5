"""The special tokens of a tokenizer, which it recognises in any text and leaves out when it decodes."""

from __future__ import annotations

from typing import Any


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Their texts, the longest first.

    >>> from podium.testing import tiny_tokenizer
    >>> special_tokens(tiny_tokenizer())
    ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|pad|>')
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {token.content for token in added if token.special and len(token.content) > 1}
    return tuple(sorted(sorted(names), key=len, reverse=True))


def are_tags(names: tuple[str, ...], tokenizer: Any) -> tuple[str, ...]:
    """Those that begin or end a tag, as `<answer>` where there is `</answer>`, and so are no part of a turn."""
    ends = {getattr(tokenizer, name, None) for name in ("bos_token", "eos_token")}
    others = [name for name in names if name not in ends]
    opening = [name for name in others if f"</{name[1:]}" in others]
    return (*opening, *(f"</{name[1:]}" for name in opening))
