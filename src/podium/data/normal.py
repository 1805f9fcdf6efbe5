"""Texts in one way of writing, so that what looks the same is the same: the first step of reading an answer."""

from __future__ import annotations

import re
import unicodedata

_UNSEEN = re.compile(
    r"[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    r"\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff\0-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]"
)
"""Unicode's property Default_Ignorable_Code_Point, control characters, and the empty pattern of Braille."""
_ALIKE = str.maketrans(
    "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
    "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d\u2018\u2019\u201b\u02bc\u201c\u201d\u201e\u201f\u0085\u2028\u2029",
    " " * 16 + "-" * 10 + "'" * 4 + '"' * 4 + "\n" * 3,
)
_SIGNS = str.maketrans("\u2044\u2215\u066b\u066c\u066a\u00d7\u00b7\u22c5\u2219", "//.,%****")
_RAISED = re.compile("[\u00b9\u00b2\u00b3\u2070-\u207e]+")
_VULGAR = re.compile("(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")


def seen(text: str) -> str:
    r"""A text as it is seen: composed, without characters that take no room, one kind of space, dash and quote.

    >>> seen("<answer>\u200bdon\u2019t\u00a0\u2013 Zu\u0308rich</answer>")
    "<answer>don't - Zürich</answer>"
    """
    if text.isascii() and text.isprintable():
        return text
    return _UNSEEN.sub("", unicodedata.normalize("NFC", text.replace("\r\n", "\n")).translate(_ALIKE))


def normal(text: str) -> str:
    r"""A text as it is meant: as it is seen, and in compatible characters (NFKC), powers and fractions written out.

    >>> normal("\uff11\uff12 m\u00b2, 2\u00bd \u00d7 \u0661\u0662")
    '12 m^{2}, 2 1/2 * 12'
    """
    if text.isascii():
        return seen(text)
    text = _VULGAR.sub(" ", _RAISED.sub(lambda found: f"^{{{found[0]}}}", text))
    text = seen(unicodedata.normalize("NFKC", text)).translate(_SIGNS)
    return _OTHER_DIGIT.sub(lambda found: str(unicodedata.digit(found[0])), text)
