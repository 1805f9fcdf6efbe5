r"""The final answer in a completion: one explicit way to find it, shared by every reward that compares answers.

    extract: boxed                             # what the last \boxed{...} holds, nested braces and all
    extract: ["tag:answer", "####"]            # the first of these that is there

| way | what it takes |
|---|---|
| `text` | the whole completion |
| `tag:NAME` | what the last `<NAME>...</NAME>` holds; `tag` alone is `tag:answer` |
| `boxed` | what the last `\boxed{...}` holds |
| `####` | what follows the last `####` on its line |
| `answer_line` | what follows `Answer:`, `Final answer:`, `Result:` or the like on the last line that begins so |
| `last_line` | the last line |
| `last_number` | the last number |
| `json:FIELD` | that field of the last JSON object that has it, `a.b` for one inside another; `json` is `json:answer` |
| `after:TEXT` | what follows the last TEXT |
| `regex:PATTERN` | the first group of PATTERN's last match, or the whole match where it has no group |

White space around what is taken is left out; None where a completion has no such place. Texts are first brought to one
way of writing (`normal`), so that what looks the same is the same.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium.errors import ConfigError
from podium.errors.texts import nearest, quoted

Extract = str | Sequence[str]
"""One way to take the final answer, or several, of which the first that finds something counts."""

Extractor = Callable[[str], str | None]

PLACES = ("tag:answer", "boxed", "####", "answer_line", "last_line")
"""Places of a short answer where none is declared; the first one that a completion has is read."""

DIGITS = (
    r"(?:[1-9][0-9]?(?:,[0-9]{2}){1,7},[0-9]{3}(?![0-9])(?:\.[0-9]{1,60})?"
    r"|[1-9][0-9]{0,2}(?P<between>[',_.])[0-9]{3}(?:(?P=between)[0-9]{3}){0,7}(?![0-9])(?:(?!(?P=between))[.,][0-9]{1,60})?"
    r"|[0-9]{1,400}(?:\.[0-9]{1,400}|(?<![0-9],[0-9]),[0-9]{1,60}(?![0-9]|,[0-9]))?|\.[0-9]{1,60})"
    r"(?:\.?[eE][-+]?[0-9]+|[ ]?(?:[x*]|\\times|\\cdot)[ ]?10[ ]?(?:\^|\*\*)[ ]?\{?[-+]?[0-9]+\}?)?"
)
"""A number without a sign: marks between thousands, a decimal point or comma, a power of ten."""
NUMBER = re.compile(rf"(?<![0-9])[-+]?{DIGITS}")
_POWER = re.compile(r"\.?[eE]|[ ]?(?:[x*]|\\times|\\cdot)[ ]?10[ ]?(?:\^|\*\*)[ ]?\{?")
_BOXED = re.compile(r"\\boxed\s*\{")
_MOST_OBJECTS = 1000  # most opening braces that are tried as the start of a JSON object, from the last one on


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a plain completion, or of the last message of a chat completion, which the policy must have written.

    >>> text_of("7"), text_of([{"role": "assistant", "content": "7"}]), text_of([{"role": "tool", "content": "7"}])
    ('7', '7', '')
    """
    if isinstance(completion, str):
        return completion
    last = completion[-1]
    return str(last.get("content") or "") if last.get("role", "assistant") == "assistant" else ""


def extractor(extract: Extract) -> Extractor:
    r"""The function that takes the final answer of a text. Raises `ConfigError` for a way that there is not.

    >>> extractor("boxed")(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extractor(["####", "last_number"])("about 1,234 in all")
    '1234'
    """
    ways = [_one(extract)] if isinstance(extract, str) else [_one(way) for way in extract]
    if not ways:
        raise ConfigError(f"`extract` is an empty list; it takes {_KNOWN}.", known=_KNOWN)
    if len(ways) == 1:
        return ways[0]
    return lambda text: next((found for way in ways if (found := way(text)) is not None), None)


def placed(extract: Extract) -> Extractor:
    """Make a function that reads the answer's place, outside of thoughts; inside where `extract` names their tag.

    >>> placed("tag")("<think><answer>6</answer>?</think><answer>7</answer>")
    '7'
    """
    take = extractor(extract)
    ways = {extract} if isinstance(extract, str) else {*extract}
    if ways & {"tag:think", "tag:thinking", "tag:reasoning"}:
        return take
    return lambda text: take(without_thoughts(text))


def tagged(text: str, tag: str) -> str | None:
    """The content of the last `<tag>...</tag>`, without the white space around it; None where there is none.

    >>> tagged("<answer>6</answer> no: <answer> 7 </answer>", "answer")
    '7'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


_OPENING = re.compile(r"((?:[ \t]*>)*)([ \t]*(?:(?:[-*+]|\d{1,3}[.)])[ \t]+)?)(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)")
_PYTHON = re.compile(r"\{?\.?py(?:thon)?[\d.]*\b", re.I)


def fenced(text: str) -> str | None:
    """The program in the last fenced block that says it is Python, or else in the last that names no language.

    Fences as in Markdown: of backticks or tildes, indented or quoted; one that is never closed reaches to the end.

    >>> fenced("```text\\n3\\n```\\nso:\\n~~~python\\nx = 3\\n~~~\\n```\\n3\\n```")
    'x = 3\\n'
    """
    blocks: dict[bool, str] = {}
    lines = iter(text.replace("\r\n", "\n").removesuffix("\n").split("\n"))
    for line in lines:
        if not (opening := _OPENING.fullmatch(line)):
            continue
        quotes, before, fence, language = opening.groups()
        closing = re.compile(rf"[ \t]{{0,{len(before) + 3}}}{fence[0]}{{{len(fence)},}}[ \t]*")
        program = []
        for inner in lines:
            inner = re.sub(r"^[ \t]*> ?", "", inner) if quotes else inner
            if closing.fullmatch(inner):
                break
            program.append(re.sub(rf"^[ \t]{{0,{len(before)}}}", "", inner) + "\n")
        if not language.strip() or _PYTHON.match(language):
            blocks[bool(language.strip())] = "".join(program)
    return blocks.get(True, blocks.get(False))


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`; None where there is none, or where it is never closed.

    >>> boxed(r"\boxed{1} or \boxed{\sqrt{2}}"), boxed(r"\boxed{1} or \boxed{2")
    ('\\sqrt{2}', None)
    """
    starts = list(_BOXED.finditer(text))
    if not starts:
        return None
    start = starts[-1].end()
    depth = 1
    escaped = False
    for index in range(start, len(text)):
        character = text[index]
        if not escaped:
            depth += (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if depth == 0:
            return text[start:index].strip()
    return None


def after_hashes(text: str) -> str | None:
    """The text after the last `####` on its line, as GSM8K writes its answers.

    >>> after_hashes("48 / 2 = 24\\n#### 24\\n")
    '24'
    """
    return text.rpartition("####")[2].split("\n")[0].strip() if "####" in text else None


_ANSWER_LINE = re.compile(
    r"^[\s>*_#-]*(?:(?:the|my)\s+)?(?:(?:final|correct|right|short|numerical)\s+)*"
    r"(?:answer|result|antwort|ergebnis|réponse|résultat|respuesta|resultado|risposta|resposta|ответ|antwoord"
    r"|wynik|odpowiedź|cevap|最终答案|答案|答え|正解|정답|答|उत्तर|الإجابة|الجواب)"
    r"(?:[*_\s]*(?:[:\uff1a=\u2014]|\s[-\u2013](?=\s))[*_]*|[*_]*$)(.*)$",
    re.IGNORECASE,
)
_NO_LINE = re.compile(r"[\s$*_`~\\\[\]=|-]*|[`~]{3,}\w*")
_BARE_LINE = re.compile(r"[(\[]?(?:[-+$]?\d[\d.,/]*%?|[^\W\d_])[)\].,;:]{0,2}")
_OPEN_THOUGHT = re.compile(r"<(?:think|thinking|reasoning)>")
_THOUGHTS = re.compile(r"<(think|thinking|reasoning)>(?:(?!</?\1>)[^\0])*</\1>")


def without_thoughts(text: str) -> str:
    """A text without `<think>...</think>` and the like; up to a `</think>` whose beginning is in the prompt, too.

    >>> without_thoughts("<think>7? No.</think> 8"), without_thoughts("7? No.</think>8")
    (' 8', '8')
    """
    if "</" not in text:
        return text
    return _THOUGHTS.sub("", text).rpartition("</think>")[2]


def answer_line(text: str) -> str | None:
    """Return the text behind `Answer:` on the last line that begins so; behind a bare heading, the last line after it.

    >>> texts = ("3 * 4\\n**Answer:** 12 km\\nThat is all.", "### Final answer\\n12", "It is 12.")
    >>> [answer_line(text) for text in texts]
    ['12 km', '12', None]
    """
    lines = _lines(text)
    for place in range(len(lines) - 1, -1, -1):
        found = _ANSWER_LINE.match(lines[place])
        if found and found[1].strip():
            return found[1].strip()
        if found and place == len(lines) - 2:
            return lines[-1]
    return None


def last_line(text: str) -> str | None:
    """The last line, fences and rules aside. None for a list of numbers or letters, and in thoughts that do not end.

    >>> last_line("3 * 4 = 12\\n\\nIt is 12.\\n"), last_line("11\\n12"), last_line("<think>12")
    ('It is 12.', None, None)
    """
    lines = _lines(text)
    is_list = len(lines) > 1 and all(_BARE_LINE.fullmatch(line) for line in lines[-2:])
    return None if not lines or is_list or _OPEN_THOUGHT.search(text) else lines[-1]


def _lines(text: str) -> list[str]:
    """The lines with something on them, without spaces around them."""
    return [line.strip() for line in text.splitlines() if not _NO_LINE.fullmatch(line)]


def last_number(text: str) -> str | None:
    """The last number in plain digits, with a point for decimals and nothing between thousands.

    Signs and digits may be typographic ones, the sign may stand before a currency, and a power of ten may be written
    out. A point that ends a sentence is no part of it.

    >>> last_number("5-3 is 2, not -1,000.5e1"), last_number("1,2,3."), last_number("none")
    ('-1000.5e1', '3', None)
    """
    return next(reversed(numbers(text)), None)


def numbers(text: str) -> list[str]:
    """All numbers of a text, each as `last_number` writes it.

    >>> numbers("1,000 and 4.5, 1.234,50 and 0,5")
    ['1000', '4.5', '1234.50', '0.5']
    """
    text = normal(_THIN.sub("", text))
    return [plain_number(found[0]) for found in NUMBER.finditer(_SIGN_APART.sub("-", text))]


_THIN = re.compile("(?<=[0-9])[\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}](?=[0-9]{3}(?![0-9]))")
_SIGN_APART = re.compile(r"(?<![0-9])-\s?[$€£¥]\s?(?=[0-9.])|\A\s*-\s+(?=[0-9.]+\s*\Z)")


def plain_number(found: str) -> str:
    """A number that `NUMBER` found, as Python reads it. One comma before three digits stands between thousands.

    >>> [plain_number(each) for each in ("1,234", "1.234", "1.234.567", "12,5", "1'234,5", "5 x 10^{3}")]
    ['1234', '1.234', '1234567', '12.5', '1234.5', '5e3']
    """
    if found.isdecimal():
        return found
    digits, *power = _POWER.split(found.rstrip("}"), maxsplit=1)
    digits = re.sub("[ '_]", "", digits)
    whole, mark, rest = digits.rpartition("," if digits.rfind(",") > digits.rfind(".") else ".")
    thousands = mark in whole or (mark == "," and len(rest) == 3 and re.fullmatch("[-+]?[1-9][0-9]{0,2}", whole))
    digits = re.sub("[,.]", "", whole) + ("" if thousands or not mark else ".") + rest
    return "e".join([digits, *power])


def json_field(text: str, field: str) -> str | None:
    """The field of the last JSON object that has it: text as it is, everything else as JSON. `a.b` goes inside.

    >>> json_field('I think {"answer": 7, "unit": {"name": "m"}}', "answer")
    '7'
    >>> json_field('{"unit": {"name": "m"}}', "unit.name")
    'm'
    """
    decoder = json.JSONDecoder(object_pairs_hook=_names_once)
    starts = [match.start() for match in re.finditer(r"\{", text)][-_MOST_OBJECTS:]
    end = -1
    found = None
    for start in starts:  # in order, so that what is inside an object that was read is not an object of its own
        if start < end:
            continue
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        inside = _inside(value, field.split("."))
        found = found if inside is None else inside
    return found if found is None or isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without the names that stand in it twice: it does not say which of the values counts."""
    counts = Counter(name for name, _ in pairs)
    return {name: value for name, value in pairs if counts[name] == 1}


def _inside(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value.strip() if isinstance(value, str) else value


def _matching(pattern: str) -> Extractor:
    compiled = compiled_pattern(pattern)

    def last_match(text: str) -> str | None:
        matches = deque(compiled.finditer(text), maxlen=1)
        found = matches[0][min(compiled.groups, 1)] if matches else None
        return None if found is None else found.strip()

    return last_match


_PLAIN: Mapping[str, Extractor] = {
    "text": str.strip,
    "boxed": boxed,
    "####": after_hashes,
    "answer_line": answer_line,
    "last_line": last_line,
    "last_number": last_number,
}
_WITH_ARGUMENT: Mapping[str, tuple[Callable[[str], Extractor], str | None]] = {
    "tag": (lambda name: functools.partial(tagged, tag=name), "answer"),
    "json": (lambda field: functools.partial(json_field, field=field), "answer"),
    "after": (lambda mark: lambda text: text.rpartition(mark)[2].strip() if mark in text else None, None),
    "regex": (_matching, None),
}
"""Ways that take an argument: a function that makes the extractor, and the default (None: one must be written)."""
_KNOWN = ", ".join([*_PLAIN, "tag:NAME", "json:FIELD", "after:TEXT", "regex:PATTERN"])


def _one(way: str) -> Extractor:
    if way in _PLAIN:
        return _PLAIN[way]
    name, colon, argument = way.partition(":") if isinstance(way, str) else (way, "", "")
    if name not in _WITH_ARGUMENT:
        near = nearest(str(name), [*_PLAIN, *_WITH_ARGUMENT])
        raise ConfigError(
            f"no way `{way}` to extract an answer. There are {_KNOWN}.",
            fix=f"Did you mean `{near}`?" if near else "",
            way=way,
            known=_KNOWN,
            near=near,
        )
    make, usual = _WITH_ARGUMENT[name]
    argument = argument if colon else usual or ""
    if not argument:
        raise ConfigError(
            f"`extract: {way}` needs something after the colon; there are {_KNOWN}.", way=way, known=_KNOWN
        )
    return make(argument)


def compiled_pattern(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """A regular expression of a user, compiled. Raises `ConfigError` with the place where it is wrong.

    >>> compiled_pattern("[0-9]+").pattern
    '[0-9]+'
    """
    try:
        return re.compile(pattern, flags)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"the pattern `{pattern}` is no regular expression: {quoted(error)}.", pattern=pattern, error=error
        ) from error


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
