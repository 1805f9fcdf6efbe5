"""Secrets in settings and texts: the one rule by which they are hidden wherever they are recorded or shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"

_WORDS = (
    r"passwords?|passwd|passphrase|pwd|pw|secrets?|creds?|credentials?|authorization|bearer|cookies?|jwt|otp|totp|pin|"
    r"signature|sig|session|session_id|api_?keys?|(?:private|access|signing|encryption)_?key"
)
_TEXT_WORDS = r"(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!mask_)(?<!special_)tokens?|key|auth"
_NAME = re.compile(rf"(?:^|_)(?:{_WORDS})$|(?:^|_)(?:api_?keys?|secrets?|passwords?|credentials?|cookies?)(?:_|$)")
"""Names whose values are secret whatever they look like."""
_NAME_OF_TEXT = re.compile(rf"(?:^|_)(?:{_TEXT_WORDS})$")
"""Names whose values are secret if they are text: `num_tokens: 5` and `max_new_tokens=256` are none."""
_PLAIN = re.compile(r"(?:[0-9.]{1,7}|[Tt]rue|[Ff]alse|[Nn]one|null)[)\]}]*")
"""Numbers and words of settings, as they stand in code and YAML."""
_NAME_OF_PLACE = re.compile(r"_(?:env|columns?|file|path)$")
"""Ends of names whose values say where a secret is: `api_key_env: JUDGE_KEY`."""

_TEXT = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?"
    r"|(?<=://)[^\s/@:]{0,200}:[^\s/@]{1,200}(?=@)"
    r"|(?i:(?<=\bbearer )|(?<=\bbasic )|(?<=\btoken ))(?=[\w.~+/=-]{0,200}\d)[\w.~+/=-]{8,}"
    r"|\b(?:hf|sk|gh[pousr]|github_pat|glpat|xox[abprs]|AIza)[-_](?=[\w-]{12})[\w-]+|\bA[KS]IA[A-Z0-9]{16}\b|\bAIza[\w-]{30,}",
    re.DOTALL,
)
"""Texts that are secret anywhere: private keys, signed tokens, passwords in addresses and headers, known beginnings."""
_ASSIGNED = re.compile(
    r"""(?<![\w.-])(?P<name>--?[A-Za-z][\w-]{0,60}(?=[ =])|[A-Za-z][\w-]{0,60}(?=["']?[ ]?[:=](?!//)))"""
    r"""(?P<is>["']?[ ]?[:=][ ]?["']?|[ ])(?P<value>[^\s"'&,;<]+)"""
)
"""A name and what may be its value: in the query of an address, a command, an assignment, JSON or YAML."""
_RUN = re.compile(r"[A-Za-z0-9_+=~-]{20,}|(?<![\w/+.])[A-Za-z0-9/+]{40}(?![\w/+.=])")
_PART = re.compile(r"[A-Za-z0-9]{12,}")
_SYLLABLES = re.compile(r"[A-Za-z]?[a-z]*[aeiou][a-z]*")
_CHANGES = re.compile(r"(?<=[0-9])(?=[A-Za-z])|(?<=[A-Za-z])(?=[0-9])")


def is_secret(name: str, value: Any = "") -> bool:
    """Whether a value of this name must be hidden.

    >>> [is_secret(name, "x") for name in ("hub_token", "X-Api-Key", "apikey", "private key", "pw", "tokens")]
    [True, True, True, True, True, True]
    >>> is_secret("num_tokens", 5), is_secret("pad_token", "</s>"), is_secret("tokenizer", "x"), is_secret("key", None)
    (False, False, False, False)
    """
    plain = _plain(name)
    if value is None or value == "" or isinstance(value, bool) or _NAME_OF_PLACE.search(plain):
        return False
    texts = value if isinstance(value, (list, tuple)) else [value]
    are_texts = all(isinstance(text, str) and not _PLAIN.fullmatch(text) for text in texts)
    return bool(_NAME.search(plain) or (_NAME_OF_TEXT.search(plain) and are_texts))


def _plain(name: str) -> str:
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", parts.lower()).strip("_")


def hide(text: str, mark: str = HIDDEN) -> str:
    """A text with its secrets replaced by `mark`.

    Secret is what has a secret's name, place or beginning, and a run of letters and digits that looks drawn at random.
    Digests are not: hexadecimal digits alone name files and commits.

    >>> hide("https://me:pass@host/x?api_key=abc&n=1, token hf_abcdefghijklmnopqrstuvwx")
    'https://<hidden>@host/x?api_key=<hidden>&n=1, token <hidden>'
    >>> hide("generate(max_new_tokens=256)")
    'generate(max_new_tokens=256)'
    """

    def assigned(found: re.Match[str]) -> str:
        name = found["name"]
        between = found["is"]
        value = found["value"]
        # In YAML and headers nothing follows on the line; in a sentence something does.
        is_prose = between == ": " and found.string[found.end() : found.end() + 1] not in ("", "\n", ",", "}")
        return found[0] if is_prose or not is_secret(name, value) else f"{name}{between}{mark}"

    text = _ASSIGNED.sub(assigned, _TEXT.sub(mark, text))
    return _RUN.sub(lambda found: mark if _is_random(found[0]) else found[0], text)


def line_of_secret(text: str) -> int | None:
    """The number of the first line that holds a secret by its form or its place; None without one.

    Runs of letters that look drawn at random count for nothing here, nor do numbers: a tokenizer's vocabulary is full
    of them (`"pin": 9955`), and `cls_token` names no secret.

    >>> line_of_secret('{"pin": 9955, "cls_token": "[CLS]"}\\nkey: hf_abcdefghijklmnopqrstuvwx'), line_of_secret("pw: ")
    (2, None)
    """
    named = (
        found
        for found in _ASSIGNED.finditer(text)
        if _NAME.search(_plain(found["name"])) and not found["value"].strip("\"', ").isdigit()
    )
    starts = [found.start() for found in (_TEXT.search(text), next(named, None)) if found]
    return text.count("\n", 0, min(starts)) + 1 if starts else None


def _is_random(run: str) -> bool:
    """Whether letters and digits are mixed as no name mixes them."""
    parts = [part for part in _PART.findall(run) if not re.fullmatch("[0-9a-f]+|[0-9A-F]+|[A-Z]+|[a-z]+|[0-9]+", part)]
    for part in [*parts, *([run] if "/" in run else [])]:
        words = sum(len(word) for word in _SYLLABLES.findall(part) if len(word) > 2)
        mixed = any(map(str.isupper, part)) and any(map(str.islower, part)) and any(map(str.isdigit, part))
        changes = len(_CHANGES.findall(part)) / len(part)
        if (mixed and len(part) >= 16 and words <= 0.5 * len(part)) or (len(part) >= 20 and changes >= 0.25):
            return True
    return False


def without_secrets(value: Any, name: str = "") -> Any:
    """Plain data with tokens, keys and passwords hidden, at any depth; other objects become text.

    >>> without_secrets({"hub_token": "hf_abc", "num_tokens": 5, "kwargs": {"api_key": "x", "path": None}})
    {'hub_token': '<hidden>', 'num_tokens': 5, 'kwargs': {'api_key': '<hidden>', 'path': None}}
    """
    if is_secret(name, value):
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(key): without_secrets(part, str(key)) for key, part in value.items() if key != "env"}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [without_secrets(part) for part in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return hide(str(getattr(value, "value", value)))
