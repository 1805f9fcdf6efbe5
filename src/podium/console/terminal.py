"""Printing for all verbs: lines, tables, episodes, findings, JSON. A model's text is data: no markup, no controls."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from podium.errors import Finding, way_on
from podium.errors.texts import as_line, clean
from podium.errors.texts import counted as number
from podium.isolation.machine import to_nowhere

if TYPE_CHECKING:
    from podium.runs.conversations import Passage


def _console(*, stderr: bool = False) -> Console:
    """In a file or pipe lines may be longer than the 80 columns that are assumed there."""
    made = Console(stderr=stderr, highlight=False)
    wide = not made.is_terminal and "COLUMNS" not in os.environ
    return Console(stderr=stderr, highlight=False, width=120) if wide else made


console = _console()
errors = _console(stderr=True)


def plain_text(text: str) -> Text:
    """Text of any origin for a rich table or line: no markup, no control sequences."""
    return Text(clean(text))


Columns = Mapping[str, str] | Sequence[tuple[str, str]]
"""Titles, each with a kind: `left` or `right`; `whole` never wraps."""


def table(columns: Columns, rows: Iterable[Sequence[str]], *, title: str | None = None, **options: Any) -> Table:
    """A table of text of any origin; `options` are those of rich."""
    made = Table(title=plain_text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD, **options)
    for name, kind in columns.items() if isinstance(columns, Mapping) else columns:
        side: Literal["right", "left"] = "right" if "right" in kind else "left"
        made.add_column(plain_text(name), justify=side, overflow="fold", no_wrap="whole" in kind)
    for row in rows:
        made.add_row(*map(plain_text, row))
    return made


def print_wrapped(to: Console, text: Text) -> None:
    """Print lines, wrapped at words on a terminal, below where their last column begins; as they are in a pipe."""
    if not to.is_terminal and "COLUMNS" not in os.environ:
        to.print(text, soft_wrap=True)
        return
    for line in text.split("\n"):
        columns = [found.end() for found in re.finditer(r"\S  +", line.plain)]
        hang = next((column for column in reversed(columns) if column <= to.width // 2), 4)
        head = line.wrap(to, to.width)[0] if len(line) > to.width else line
        to.print(head, no_wrap=True, soft_wrap=True)
        rest = line[len(head.plain.rstrip()) :].plain.lstrip()
        for more in Text(rest).wrap(to, to.width - hang) if rest else ():
            to.print(Text(" " * hang) + more, no_wrap=True, soft_wrap=True)


def episode_lines(passages: Iterable[Passage]) -> Iterator[Text]:
    """Lines to print: drawn text at the margin, given text further in behind a bar, branches further in still."""
    for drawn, head, text, depth, begins in passages:
        bar = "  > " if drawn else "      | "
        style = "" if drawn else "dim"
        margin = "    " * depth
        before = "  " if begins else bar[:-2]
        yield Text(f"{margin}{before}{clean(head)}", style="bold" if begins else "dim")
        for line in clean(text).splitlines():
            yield Text(f"{margin}{bar}{line}", style=style)


def failure_lines(problem: str, log: str) -> Iterator[Text]:
    """Lines that say how a program has failed, with the end of its output; none where it has not."""
    if problem:
        yield Text(f"  The program {clean(problem)}", style="bold")
        yield from (Text(f"      | {line}", style="dim") for line in clean(log).splitlines())


class _PipeStream:
    """A stream that discards what is written after its reader has gone, as `head` does, and says so once."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except BrokenPipeError:
            to_nowhere(self._stream.fileno())
            if self._name == "stdout":
                sys.stderr.write("\nNobody reads stdout any more: the run goes on, and prints nothing there.\n")


@contextlib.contextmanager
def ignoring_closed_pipes() -> Iterator[None]:
    """Within it a reader of stdout or stderr that goes away ends nothing."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        cast(Any, _PipeStream(x, name)) for x, name in zip(before, ("stdout", "stderr"), strict=True)
    )
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def print_on_main(text: str) -> None:
    """Print lines of a run, once: from the first of its processes."""
    if is_main():
        print_wrapped(console, Text(clean(text)))


def is_main() -> bool:
    """Whether this is the first, or the only, process of a run."""
    return int(os.environ.get("RANK", 0)) == 0


# ---- findings, and JSON ----

STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def print_findings(to: Console, found: Sequence[Finding], *, stops: bool = False) -> None:
    """Each finding on a few lines; why and fix of several equal ones below the last of them.

    `stops`: whether errors stop a run that reads `on_finding`; then the line that overrules each is printed.
    """
    for finding, following in zip_longest(found, found[1:]):
        head = Text(f"{finding.severity}[{finding.code}] ", style=STYLES[finding.severity])
        print_wrapped(to, head + plain_text(finding.what))
        if following is not None and _cure(following) == _cure(finding):
            continue
        for word, text in (("why", finding.why), ("fix", way_on(finding) if stops else finding.fix)):
            if text:
                print_wrapped(to, Text(f"  {word}: ", style="dim") + plain_text(text))
        for key, value in finding.changes.items():
            if as_line(key, value) in finding.fix:
                continue
            print_wrapped(to, Text("    ") + plain_text(as_line(key, value)))


def _cure(finding: Finding) -> tuple[object, ...]:
    return finding.code, finding.fix, finding.changes


def counted(found: Sequence[Finding]) -> str:
    """`1 error, 2 warnings`; empty where nothing was found, of which the caller says in what."""
    counts: Counter[str] = Counter(finding.severity for finding in found)
    return ", ".join(number(counts[severity], severity) for severity in STYLES if counts[severity])


def fail_on_errors(found: Iterable[Finding]) -> None:
    """End with exit code 1 if there is an error among the findings."""
    if any(finding.severity == "error" for finding in found):
        raise typer.Exit(1)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one object, indented; findings under `findings`, NaN and infinity as null.

    Everything outside ASCII is escaped: text that a model wrote may hold control sequences.
    """
    typer.echo(json.dumps(without_nan(value), indent=2, allow_nan=False))


def as_dicts(found: Iterable[Finding]) -> list[dict[str, Any]]:
    """Findings for JSON: `code`, `severity`, `what`, `why`, `fix`, `step`, `changes`."""
    return [finding.as_dict() for finding in found]


def without_nan(value: Any) -> Any:
    """JSON has neither NaN nor infinity, and no numbers of numpy.

    >>> without_nan({"mean": float("nan"), "values": (1.0, float("inf"))})
    {'mean': None, 'values': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(part) for part in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    return None if isinstance(value, float) and value - value != 0 else value


# ---- notes of Podium, bars of others ----


class _Notes(logging.Handler):
    """Podium's notes and warnings, on stderr, above a progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "code"):  # a finding of `podium check`, which has said it
            return
        word = {"INFO": "note", "DEBUG": "note"}.get(record.levelname, record.levelname.lower())
        print_wrapped(errors, Text(f"{word}: {clean(record.getMessage())}"))


def show_notes(*, details: bool = False) -> None:
    """Show Podium's own notes and warnings, with `details` also what it otherwise only records."""
    logger = logging.getLogger("podium")
    if not any(isinstance(handler, _Notes) for handler in logger.handlers):
        logger.addHandler(_Notes())
        logger.propagate = False
    logger.setLevel(logging.DEBUG if details else logging.INFO)


def prepare_output(*, details: bool = False) -> None:
    """Show Podium's own notes; keep the progress bars of transformers and datasets off the terminal."""
    _hide_bars()
    show_notes(details=details)


def quiet() -> None:
    """Keep progress bars, transformers' warnings and the hub's retries off the terminal."""
    _hide_bars().set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _hide_bars() -> Any:
    import warnings

    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore", "You are using 'environment_factory'")  # TRL's, for Python; a recipe's key is not
    transformers_logging.disable_progress_bar()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when `datasets` is imported, if ever
    return transformers_logging
