"""Secrets in settings and texts: the one rule by which they are hidden wherever they are recorded or shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"

_NAME = re.compile(
    r"(^|_)(api_?keys?|secrets?|passwords?|passwd|passphrase|pwd|pw|credentials?|authorization|bearer|cookies?|"
    r"private_?key|access_?key)(_|$)"
)
"""Names whose values are secret whatever they look like."""

_NAME_OF_TEXT = re.compile(r"(^|_)(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!mask_)(?<!special_)(tokens?|key|auth)$")
"""Names whose values are secret if they are text: `num_tokens: 5` is none."""

_TEXT = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{20,}"
    r"|\bxox[abprs]-[\w-]{10,}|\bA[KS]IA[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|(?<=://)[^\s/@:]*:[^\s/@]+(?=@)"
    r"|(?i:(?<=bearer )|(?<=basic ))(?=[\w.~+/=-]*\d)[\w.~+/=-]{8,}"
    r"|(?i:(?<=[?&]key=)|(?<=api_key=)|(?<=apikey=)|(?<=token=)|(?<=secret=)|(?<=password=)|(?<=[?&]sig=))[^\s&'\"]+",
    re.DOTALL,
)
"""Texts that are secret anywhere: tokens of known forms, keys, passwords in addresses and in headers."""


def is_secret(name: str, value: Any = "") -> bool:
    """Whether a value of this name must be hidden.

    >>> [is_secret(name, "x") for name in ("hub_token", "X-Api-Key", "apikey", "private key", "pw", "tokens")]
    [True, True, True, True, True, True]
    >>> is_secret("num_tokens", 5), is_secret("pad_token", "</s>"), is_secret("tokenizer", "x"), is_secret("key", None)
    (False, False, False, False)
    """
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if value is None or value == "" or isinstance(value, bool):
        return False
    texts = value if isinstance(value, (list, tuple)) else [value]
    return bool(_NAME.search(plain) or (_NAME_OF_TEXT.search(plain) and all(isinstance(each, str) for each in texts)))


def hide(text: str, mark: str = HIDDEN) -> str:
    """A text with its secrets replaced by `mark`.

    >>> hide("https://me:pass@host/x?api_key=abc&n=1, token hf_abcdefghijklmnopqrstuvwx")
    'https://<hidden>@host/x?api_key=<hidden>&n=1, token <hidden>'
    """
    return _TEXT.sub(mark, text)


def without_secrets(value: Any, name: str = "") -> Any:
    """Plain data with tokens, keys and passwords hidden, at any depth; other objects become text.

    >>> without_secrets({"hub_token": "hf_abc", "num_tokens": 5, "kwargs": {"api_key": "x", "path": None}})
    {'hub_token': '<hidden>', 'num_tokens': 5, 'kwargs': {'api_key': '<hidden>', 'path': None}}
    """
    if is_secret(name, value):
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(key): without_secrets(each, str(key)) for key, each in value.items() if key != "env"}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [without_secrets(each) for each in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return hide(str(getattr(value, "value", value)))
