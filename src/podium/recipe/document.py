"""YAML with line numbers: a file becomes plain values, and the line of every key is kept.

The rules are those of YAML 1.2's core schema: `1e-6` is a number, `on`, `yes` and `12:30` are text, `08` is eight.
Refused, with file and line: duplicate keys, tags, tabs, aliases that multiply, and files over 1 MB.

PyYAML composes the nodes and the values are built here: ruamel.yaml stops at the first duplicate key, drops tags
silently, and reads `1_000` as a number and `2024-01-01` as a date.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from podium.errors import ConfigError, Finding, PodiumError
from podium.errors.rule import of_error
from podium.errors.texts import did_you_mean, listed, quoted, with_fix
from podium.isolation.user_files import IN_FILE

SHIPPED = Path(__file__).parent / "recipes"

MAX_BYTES = 1_000_000
MAX_NODES = 20_000
"""Values in one file with every alias written out."""

Place = tuple[str | int, ...]
"""Path to a value: `("lora", "r")`, `("rewards", 0, "weight")`."""


def mistake(where: str, error: PodiumError, *, code: str = "C030") -> Finding:
    """An error at a place of a recipe: `run.yaml:4`, or the flag. `code`: where the error has none.

    Its words begin with the place once the whole recipe is read (`placed`): the name of a stage stands between.
    """
    return replace(of_error(error), code=error.code or code, where=where)


def placed(finding: Finding) -> Finding:
    """The mistake with its place in front of its words."""
    return replace(finding, what=f"{finding.where}: {finding.what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One YAML file as plain values."""

    name: str
    """As the user wrote it, for messages."""
    folder: Path
    values: Mapping[str, Any]
    lines: Mapping[Place, int]
    problems: tuple[Finding, ...] = field(default=())
    is_file: bool = True
    """Whether there is a recipe; without one, what flags leave open is assumed."""

    def __str__(self) -> str:
        return self.name

    def where(self, place: Place) -> str:
        """`run.yaml:4`, the line of the nearest enclosing value that has one."""
        while place and place not in self.lines:
            place = place[:-1]
        return f"{self.name}:{self.lines[place]}" if place else self.name


@dataclass(slots=True)
class Reader:
    """Base of readers that collect problems with the places of the values."""

    problems: list[Finding] = field(default_factory=list)

    def where(self, place: Place) -> str:
        """`run.yaml:4`, or the flag."""
        raise NotImplementedError

    def refuse(self, error: PodiumError, *place: str | int, code: str = "C030") -> None:
        """Add an error as a problem at a place. `code`: where the error has none."""
        self.problems.append(mistake(self.where(place), error, code=code))


def fail(name: str, problems: Sequence[Finding]) -> None:
    """Raise `ConfigError` with all the problems as one message, if there are any."""
    if len(problems) == 1:
        [only] = map(placed, problems)
        raise ConfigError(only.what, code=only.code, fix=only.fix)
    if problems:
        listed = (with_fix(f"  {problem.what}", problem.fix) for problem in map(placed, in_order(problems)))
        raise ConfigError("\n".join([f"{name} has {len(problems)} problems:", *listed]))


def in_order(problems: Sequence[Finding]) -> list[Finding]:
    """By line of the file; problems without a line (missing keys, flags) come last."""

    def line(problem: Finding) -> float:
        number = problem.where.rpartition(":")[2]
        return int(number) if number.isdigit() else float("inf")

    return sorted(problems, key=line)


def open_document(path: str | Path | Document) -> Document:
    """The YAML file at `path`, or the shipped recipe of that name; `ConfigError` where neither is there."""
    if isinstance(path, Document):
        return path
    file = Path(path).expanduser()
    if file.is_file():
        _refuse_other_files(file, str(path))
        return read_document(file, str(path))
    shipped = shipped_recipes()
    if str(path) in shipped:
        return read_document(shipped[str(path)], f"{path}.yaml")
    if file.is_dir():
        recipe = next(iter(sorted(file.glob("*.y*ml"))), None)
        is_model = (file / "config.json").is_file()
        fix = f"Did you mean `{recipe}`?" if recipe else f"--{'model' if is_model else 'dataset'} {path}"
        raise ConfigError(f"{path} is a folder; a recipe is a YAML file.", fix=fix, path=path)
    beside = sorted(entry.name for entry in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
    near = did_you_mean(file.name, [*beside, *shipped]) or did_you_mean(f"{file.name}.yaml", beside)
    raise ConfigError(
        f"There is no recipe {path}. Recipes that come with Podium: {listed(shipped)}.",
        fix=near or "the path of a YAML file that is there, or one of these names",
        path=path,
        shipped=shipped,
    )


def _refuse_other_files(file: Path, name: str) -> None:
    """Raises `ConfigError` for a table, a program or a notebook in place of a recipe."""
    from podium.data.files import kind_of

    suffix = file.suffix.lower()
    if suffix != ".json" and kind_of(file):
        raise ConfigError(
            f"{name} is data, not a recipe.",
            code="C019",
            fix=f"--dataset {name}, without a recipe",
            settings=(name,),
            name=name,
        )
    if suffix in (".py", ".ipynb"):
        what = f"{name} is {'Python' if suffix == '.py' else 'a notebook'}, not a recipe."
        fix = f"python {name}; of a reward in it: podium rewards test {name}:FUNCTION"
        raise ConfigError(what, code="C019", fix=fix if suffix == ".py" else f"jupyter lab {name}, or a YAML file")


def shipped_recipes() -> dict[str, Path]:
    """Name and file of every recipe that comes with the package."""
    return {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}


def variables(document: Document, overrides: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that `env:` of a recipe and its flags set."""
    given = [values for values in (document.values.get("env"), overrides.get("env")) if isinstance(values, Mapping)]
    return {str(name): str(value) for values in given for name, value in values.items()}


def read_document(path: Path, name: str) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises:
        ConfigError: not readable, not YAML, or not a mapping. Duplicate keys do not raise; they are in `problems`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot be read ({error.strerror})",
            code="C019",
            fix=f"ls -l {name}",
            settings=(name,),
            name=name,
            strerror=error.strerror,
        ) from error
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{name}: {len(data):,} bytes; a recipe has at most {MAX_BYTES:,}. Is this the dataset?",
            code="C019",
            fix=f"--dataset {name}, without a recipe",
            settings=(name,),
            name=name,
            data_count=len(data),
            max_bytes=MAX_BYTES,
        )
    try:
        text = data.decode(json.detect_encoding(data))  # Notepad writes UTF-16
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[error.start]
        raise ConfigError(
            f"{name}:{line}: byte 0x{byte:02X} is not UTF-8",
            code="C019",
            fix=f"iconv -f cp1252 -t utf-8 {name} > utf8-{path.name}, if it was written on Windows",
            settings=(name,),
            name=name,
            line=line,
            data=byte,
            path_name=path.name,
        ) from error
    return parse(text, name=name, folder=path.parent)


def from_here(value: Any, folder: Path) -> Any:
    """A value of a recipe in `folder` whose functions in files beside it are named as seen from the working directory.

    >>> from_here({"rewards": ["json_format", "mine.py:right"], "max_steps": 5}, Path("nowhere"))
    {'rewards': ['json_format', 'mine.py:right'], 'max_steps': 5}
    """
    if type(value) is dict:  # not a DatasetDict
        return {key: from_here(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [from_here(inner, folder) for inner in value]
    found = IN_FILE.fullmatch(value) if isinstance(value, str) and folder.resolve() != Path.cwd() else None
    if not found or Path(found["file"]).is_absolute() or not (folder / found["file"]).is_file():
        return value
    return f"{os.path.relpath(folder / found['file'])}{value[found.end('file') :]}"


def parse(text: str, *, name: str, folder: Path = Path()) -> Document:
    """The document that a text is. Raises `ConfigError` as `read_document` does."""
    try:
        if (root := yaml.compose(text, Loader=Loader)) is None:
            return Document(name=name, folder=folder, values={}, lines={})
        if not isinstance(root, yaml.MappingNode):
            what = f"{name}:{root.start_mark.line + 1}: expected keys with values (`model: ...`), got {_kind(root)}"
            raise ConfigError(what, code="C019", fix=_odd_spaces(text) or _as_key(text))
        if _count(root) > MAX_NODES:
            raise ConfigError(
                f"{name}: its aliases (*name) multiply to more than {MAX_NODES:,} values",
                code="C019",
                fix="write them out",
                settings=(name,),
                name=name,
                max_nodes=MAX_NODES,
            )
        builder = _Builder(name)
        values = builder.build(root, ())
    except RecursionError:
        raise ConfigError(
            f"{name}: nested too deeply, or an alias (*name) that contains itself",
            code="C019",
            fix="write the value in place of the alias",
            settings=(name,),
            name=name,
        ) from None
    except yaml.YAMLError as error:
        raise _syntax_error(error, name, text) from None
    return Document(name=name, folder=folder, values=values, lines=builder.lines, problems=tuple(builder.problems))


def scalar(text: str) -> Any:
    """The value of a plain word: a number, true or false, null, or text. Lists and mappings in flow style too.

    >>> [scalar(text) for text in ("1e-6", "08", "12:30", "on", "true", "[1, 2]", "a: b")]
    [1e-06, 8, '12:30', 'on', True, [1, 2], 'a: b']
    """
    if text.startswith(("[", "{")):
        try:
            node = yaml.compose(text, Loader=Loader)
        except yaml.YAMLError:
            return text
        assert node is not None
        return _Builder("").build(node, ())
    return _plain(text)


def _plain(text: str) -> Any:
    return next((value(text) for pattern, value in _SCALARS if pattern.fullmatch(text)), text)


_SCALARS: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"~|null|Null|NULL|"), lambda text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text, 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text, 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: float(text.replace(".", ""))),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda text: float("nan")),
)
"""Scalars of YAML 1.2, section 10.3.2; other plain words are text."""


class Loader(yaml.SafeLoader):
    """Composes nodes only; every plain scalar stays text until `scalar` reads it."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute


class _Builder:
    """Builds values from nodes, and collects lines and problems."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Place, int] = {}
        self.problems: list[Finding] = []

    def build(self, node: yaml.Node, place: Place) -> Any:
        if place:
            self.lines.setdefault(place, node.start_mark.line + 1)
        kind = "str"
        if isinstance(node, yaml.MappingNode):
            kind = "map"
        elif isinstance(node, yaml.SequenceNode):
            kind = "seq"
        if node.tag != f"tag:yaml.org,2002:{kind}":
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(node, f"tags ({tag}) are not taken", code="C019", fix="leave it out")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*place, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        if not node.style and (quoted := _CURLY.fullmatch(node.value)):
            fix = f'write straight ones: "{quoted[1]}"'
            self._refuse(node, f"{node.value}: typographic quotes are no quotes of YAML", code="C019", fix=fix)
            return quoted[1]
        return node.value if node.style else _plain(node.value)

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if isinstance(key, str) and not key_node.style and (fix := _odd_spaces(key, line)):
                self._refuse(key_node, f"the key `{key}` holds a space that is none", code="C019", fix=fix)
            elif not isinstance(key_node, yaml.ScalarNode):
                what = f"a key must be a word, got {_kind(key_node)}"
                self._refuse(key_node, what, code="C019", fix="key: value; text with braces goes in quotes")
            elif key in values:
                first = self.lines[(*place, key)]
                fix = f"delete line {line} or line {first}: one `{key}` is enough"
                self._refuse(key_node, f"`{key}` is already set at line {first}", code="C006", fix=fix)
            else:
                self.lines[(*place, key)] = line
                values[key] = self.build(value_node, (*place, key))
        return values

    def _refuse(self, node: yaml.Node, what: str, *, code: str, fix: str = "") -> None:
        where = f"{self.name}:{node.start_mark.line + 1}"
        self.problems.append(mistake(where, ConfigError(what, code=code, fix=fix)))


_CURLY = re.compile("[\u201c\u201d\u201e\u2018\u2019\u00ab](.*)[\u201c\u201d\u2018\u2019\u00bb]")
_ODD_SPACE = re.compile("[\u00a0\u1680\u2000-\u200f\u202f\u205f\u2060\u3000\ufeff\uff1a]")


def _odd_spaces(text: str, line: int = 1) -> str:
    """The advice about the first space that is no space to YAML, as web pages and chat programs have them."""
    if (found := _ODD_SPACE.search(text)) is None:
        return ""
    line += text.count("\n", 0, found.start())
    plain = "`: `" if found[0] == "\uff1a" else "space"
    return f"write a plain {plain} in line {line} in place of U+{ord(found[0]):04X}, which looks like one"


def _as_key(text: str) -> str:
    """The advice for a text without a key, by its first line.

    >>> _as_key('# of mine\\nmodel = "x"'), _as_key("words")
    ('model: "x", for every line with =', 'a key and its value a line, as in dataset: train.jsonl')
    """
    found = re.search(r"^\s*(\w+)\s*=\s*(.+)$", text, re.MULTILINE)
    return f"{found[1]}: {found[2]}, for every line with =" if found else _FORM


_FORM = "a key and its value a line, as in dataset: train.jsonl"


def _kind(node: yaml.Node) -> str:
    names = {yaml.MappingNode: "a mapping", yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value"}
    return names[type(node)]


def _count(root: yaml.Node) -> int:
    """Number of values with every alias written out. An alias is the same node again, so each is visited once."""
    counts: dict[int, int] = {}

    def count(node: yaml.Node) -> int:
        if id(node) not in counts:
            children: Any = () if isinstance(node, yaml.ScalarNode) else node.value
            if isinstance(node, yaml.MappingNode):
                children = [child for pair in node.value for child in pair]
            counts[id(node)] = 1 + sum(map(count, children))
        return counts[id(node)]

    return count(root)


def _syntax_error(error: yaml.YAMLError, name: str, text: str) -> ConfigError:
    """PyYAML's message with file, line, and a caret."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ConfigError(
            f"{name}: not valid YAML ({quoted(error)})",
            code="C019",
            fix=_FORM,
            settings=(name,),
            name=name,
            error=error,
        )
    mark = error.problem_mark
    fix = _odd_spaces(text)
    what = error.problem or "not valid YAML"
    snippet = mark.get_snippet(indent=2, max_length=100) or ""
    if r"'\t'" in what:
        what = "a tab; YAML is indented with spaces"
        fix = "write two spaces in place of the tab"
    elif "mapping values are not allowed" in what and not fix:
        what = "a second `:` in the line, or a wrong indent; text with `: ` in it goes in quotes"
        fix = _quoted(snippet.partition("\n")[0])
    elif "cannot start any token" in what or "expected alphabetic" in what:
        what = "a value that begins with `*`, `&`, `@`, `%` or a backtick goes in quotes"
        fix = fix or _quoted(snippet.partition("\n")[0])
    elif "another document" in what:
        fix = f"one recipe in a file: take out line {mark.line + 1} and all below it"
    elif error.context_mark is not None and mark.line > error.context_mark.line and not fix:
        fix = f"close the quote or bracket that opens in line {error.context_mark.line + 1}"
    elif "undefined alias" in what:
        word = what.split()[-1].strip("'")
        fix = f"write the value in place of *{word}, or &{word} before the value that it repeats"
    fix = fix or (_as_key(text) if " = " in text.partition("\n")[0] else f"correct line {mark.line + 1}: {_FORM}")
    return ConfigError(f"{name}:{mark.line + 1}: {what}\n{snippet}".rstrip(), code="C019", fix=fix)


def _quoted(line: str) -> str:
    """The line with its text in quotes.

    >>> _quoted("  system: Think: then answer")
    'system: "Think: then answer"'
    """
    key, _, text = line.strip().partition(": ")
    escaped = text.strip().replace('"', '\\"')
    return f'{key}: "{escaped}"' if text else ""
