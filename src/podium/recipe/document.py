"""YAML with line numbers: a file becomes plain values, and every key knows where it stands.

YAML 1.2's core rules, not PyYAML's 1.1: `1e-6` is a number, `on`, `yes` and `12:30` are text, `08` is eight. Refused,
with file and line: duplicate keys, tags, tabs, aliases that multiply, and files over 1 MB.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from podium.errors import ConfigError, with_fix

MAX_BYTES = 1_000_000
MAX_NODES = 20_000
"""Values in one file with every alias written out."""

Place = tuple[str | int, ...]
"""Where a value is: `("lora", "r")`, `("rewards", 0, "weight")`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, with where it stands: `run.yaml:4`, or the flag."""

    where: str
    what: str
    code: str = "C030"
    """Of the rule that is broken; C030: settings that contradict each other."""
    fix: str = ""
    """What to type."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One YAML file as plain values."""

    name: str
    """As the user wrote it, for messages."""
    folder: Path
    values: Mapping[str, Any]
    lines: Mapping[Place, int]
    problems: tuple[Problem, ...] = field(default=())
    is_file: bool = True
    """Whether there is a recipe; without one, what flags leave open is assumed."""

    def __str__(self) -> str:
        return self.name

    def where(self, place: Place) -> str:
        """`run.yaml:4`, the line of the nearest enclosing value that has one."""
        while place and place not in self.lines:
            place = place[:-1]
        return f"{self.name}:{self.lines[place]}" if place else self.name


def fail(name: str, problems: Sequence[Problem]) -> None:
    """Raise all the problems as one message, if there are any.

    Raises:
        ConfigError: there are.
    """
    if len(problems) == 1:
        raise ConfigError(str(problems[0]), code=problems[0].code, fix=problems[0].fix)
    if problems:
        listed = (with_fix(f"  {problem}", problem.fix) for problem in in_order(problems))
        raise ConfigError("\n".join([f"{name} has {len(problems)} problems:", *listed]))


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """What stands in the file, by line; then what is missing; then flags."""
    return sorted(problems, key=_line)


def _line(problem: Problem) -> float:
    _, _, line = problem.where.rpartition(":")
    return int(line) if line.isdigit() else float("inf")


def read_document(path: Path, name: str) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises:
        ConfigError: not readable, not YAML, or not a mapping. Duplicate keys do not raise; they are in `problems`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror})", code="C019") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{name}: {len(data):,} bytes; a recipe has at most {MAX_BYTES:,}. Is this the dataset?", code="C019"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: byte 0x{data[error.start]:02X} is not UTF-8", code="C019") from error
    return parse(text, name=name, folder=path.parent)


def parse(text: str, *, name: str, folder: Path = Path()) -> Document:
    """`read_document` for text. Raises `ConfigError` likewise."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is None:
            return Document(name=name, folder=folder, values={}, lines={})
        if not isinstance(root, yaml.MappingNode):
            line = root.start_mark.line + 1
            raise ConfigError(
                f"{name}:{line}: expected keys with values (`model: ...`), got {_kind(root)}", code="C019"
            )
        if _count(root) > MAX_NODES:
            raise ConfigError(
                f"{name}: its aliases (*name) multiply to more than {MAX_NODES:,} values; write them out", code="C019"
            )
        builder = _Builder(name)
        values = builder.build(root, ())
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply, or an alias (*name) that contains itself", code="C019") from None
    except yaml.YAMLError as error:
        raise _syntax_error(error, name) from None
    return Document(name=name, folder=folder, values=values, lines=builder.lines, problems=tuple(builder.problems))


def scalar(text: str) -> Any:
    """What a plain word means: a number, true or false, null, or text. Lists and mappings in flow style too.

    >>> [scalar(text) for text in ("1e-6", "08", "12:30", "on", "true", "[1, 2]", "a: b")]
    [1e-06, 8, '12:30', 'on', True, [1, 2], 'a: b']
    """
    if text[:1] in "[{" and text:
        try:
            node = yaml.compose(text, Loader=_Loader)
        except yaml.YAMLError:
            return text
        assert node is not None
        return _Builder("").build(node, ())
    return _VALUES[_tag(text)](text)


# ---- scalars: YAML 1.2, section 10.3.2 ----

_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("null", re.compile(r"~|null|Null|NULL|")),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE")),
    ("int", re.compile(r"[-+]?[0-9]+")),
    ("octal", re.compile(r"0o[0-7]+")),
    ("hex", re.compile(r"0x[0-9a-fA-F]+")),
    ("float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")),
    ("inf", re.compile(r"[-+]?\.(inf|Inf|INF)")),
    ("nan", re.compile(r"\.(nan|NaN|NAN)")),
)
_VALUES: Mapping[str, Any] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": int,
    "octal": lambda text: int(text, 8),
    "hex": lambda text: int(text, 16),
    "float": float,
    "inf": lambda text: float(text.replace(".", "")),
    "nan": lambda text: float("nan"),
    "str": str,
}


def _tag(text: str) -> str:
    return next((tag for tag, pattern in _PATTERNS if pattern.fullmatch(text)), "str")


class _Loader(yaml.SafeLoader):
    """Composes nodes only; every plain scalar stays text until `_tag` looks at it."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute


class _Builder:
    """Nodes into values, with lines and problems by the way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Place, int] = {}
        self.problems: list[Problem] = []

    def build(self, node: yaml.Node, place: Place) -> Any:
        if place:
            self.lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            self._check_tag(node, "map")
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, "seq")
            return [self.build(item, (*place, index)) for index, item in enumerate(node.value)]
        self._check_tag(node, "str")
        assert isinstance(node, yaml.ScalarNode)
        return node.value if node.style else _VALUES[_tag(node.value)](node.value)

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            where = f"{self.name}:{line}"
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(
                    Problem(where=where, what=f"a key must be a word, got {_kind(key_node)}", code="C019")
                )
                continue
            key = key_node.value
            if key in values:
                first = self.lines[(*place, key)]
                what, fix = f"`{key}` is already set at line {first}", f"delete line {line} or line {first}"
                self.problems.append(Problem(where=where, what=what, code="C006", fix=f"{fix}: one `{key}` is enough"))
                continue
            self.lines[(*place, key)] = line
            values[key] = self.build(value_node, (*place, key))
        return values

    def _check_tag(self, node: yaml.Node, kind: str) -> None:
        if node.tag != f"tag:yaml.org,2002:{kind}":
            line, tag = node.start_mark.line + 1, node.tag.replace("tag:yaml.org,2002:", "!!")
            self.problems.append(
                Problem(
                    where=f"{self.name}:{line}", what=f"tags ({tag}) are not taken", code="C019", fix="leave it out"
                )
            )


def _kind(node: yaml.Node) -> str:
    names = {yaml.MappingNode: "a mapping", yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value"}
    return names[type(node)]


def _count(root: yaml.Node) -> int:
    """Number of values with every alias written out; an alias is the same node again, so each is counted once."""
    counts: dict[int, int] = {}

    def count(node: yaml.Node) -> int:
        if id(node) not in counts:
            children = [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else []
            children = node.value if isinstance(node, yaml.SequenceNode) else children
            counts[id(node)] = 1 + sum(count(child) for child in children)
        return counts[id(node)]

    return count(root)


def _syntax_error(error: yaml.YAMLError, name: str) -> ConfigError:
    """PyYAML's message with file, line, and a caret."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ConfigError(f"{name}: not valid YAML ({error})", code="C019")
    mark, fix = error.problem_mark, ""
    what = error.problem or "not valid YAML"
    snippet = mark.get_snippet(indent=2, max_length=100) or ""
    if r"'\t'" in what:
        what, fix = "a tab; YAML is indented with spaces", "write two spaces in place of the tab"
    elif "mapping values are not allowed" in what:
        what = "a second `:` in the line, or a wrong indent; text with `: ` in it goes in quotes"
        fix = _quoted(snippet.partition("\n")[0])
    return ConfigError(f"{name}:{mark.line + 1}: {what}\n{snippet}".rstrip(), code="C019", fix=fix)


def _quoted(line: str) -> str:
    """The line with its text in quotes.

    >>> _quoted("  system: Think: then answer")
    'system: "Think: then answer"'
    """
    key, _, text = line.strip().partition(": ")
    escaped = text.strip().replace('"', '\\"')
    return f'{key}: "{escaped}"' if ":" in text else ""
