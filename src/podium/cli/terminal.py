"""What verbs print with. Text that a model wrote is data: no markup, no control sequences."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from rich.console import Console
from rich.text import Text


def _console(*, stderr: bool = False) -> Console:
    """In a file or pipe lines may be longer than the 80 columns that are assumed there."""
    made = Console(stderr=stderr, highlight=False)
    wide = not made.is_terminal and "COLUMNS" not in os.environ
    return Console(stderr=stderr, highlight=False, width=120) if wide else made


console = _console()
errors = _console(stderr=True)

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor moves
    r"|(?:\x1b[\]P^_X]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"  # OSC and its kin: titles, links, the clipboard
    r"|\x1b[ -/]*[0-~]?",
    re.DOTALL,
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    r"""Text without control sequences and characters, and without marks that turn its direction; lines stay.

    >>> clean("a\x1b[31mb\x1b]52;c;aGk=\x07c\rd\u202ee\nf")
    'abcde\nf'
    """
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def shown(text: str) -> Text:
    """Model text for a rich table or line."""
    return Text(clean(text))


def last_user_turn(content: Any) -> str:
    """What a prompt asks, for the terminal."""
    from podium.records import last_user_turn

    return clean(last_user_turn(content))


def say(to: Console, text: Text) -> None:
    """Lines of text, wrapped at words on a terminal, below where their last column begins; as they are in a pipe."""
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


class _Notes(logging.Handler):
    """Podium's notes and warnings, on stderr, above a progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "code"):  # a finding of `podium check`, which has said it
            return
        word = {"INFO": "note", "WARNING": "warning"}.get(record.levelname, record.levelname.lower())
        say(errors, Text(f"{word}: {clean(record.getMessage())}"))


def quiet() -> None:
    """Keep the progress bars of transformers and datasets, and the hub's retries, off the terminal."""
    import datasets
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def prepare_output() -> None:
    """Show Podium's own notes; keep the progress bars of transformers and datasets off the terminal."""
    import datasets
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    show_notes()


def show_notes() -> None:
    """Show Podium's own notes, without what `prepare_output` has to import."""
    logger = logging.getLogger("podium")
    if not any(isinstance(handler, _Notes) for handler in logger.handlers):
        logger.addHandler(_Notes())
        logger.setLevel(logging.INFO)
        logger.propagate = False
