"""One episode of a program in a worker: a function of a file is called, or a command is run, and its output kept.

It imports nothing heavy, since every worker imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from podium.isolation.functions import Call, Took, answering, awaited, location

LARGEST_FILE = 1 << 30
"""Bytes of a file that a program may write, its output included."""

LONGEST = 300
"""Characters of the text of an exception that a message has."""

MOST_FRAMES = 20
"""Frames of the user's files that a traceback keeps."""
LAST_FRAMES = 3
"""Frames of libraries that it keeps, its last ones."""
LIBRARIES = (str(Path(__file__).parents[2]), "<frozen ", *sysconfig.get_paths().values())
"""Beginnings of files that are not the user's."""


class Returned(NamedTuple):
    """The result of a program, or the error that it raised, in one line and as a traceback."""

    returned: Any = None
    raised: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCall(Call):
    """One episode of a function in a file, or without arguments its description."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    log: str = ""
    """The file that its output goes to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandCall:
    """One episode of a command."""

    command: Sequence[str]
    folder: str
    variables: Mapping[str, str]
    log: str
    stdout: str


def answer(request: ProgramCall | CommandCall, took: Took) -> Iterator[Any]:
    """The reply of a worker: names of a function's arguments, or how one episode ended."""
    if isinstance(request, ProgramCall):
        yield from _of_function(request, took)
        return
    with output_to(request.log, request.stdout):
        variables = {**os.environ, **request.variables}
        code = subprocess.call(request.command, stdin=subprocess.DEVNULL, cwd=request.folder, env=variables)
    yield {"code": code}


def _described(function: Callable[..., Any], _: ProgramCall) -> Mapping[str, Any]:
    return {"where": location(function), "needs": needs(function)}


def _result(function: Callable[..., Any], request: ProgramCall, _: Took) -> Mapping[str, Any]:
    os.environ.update(request.variables)
    tempfile.tempdir = None  # from the variables
    with output_to(request.log):
        ended = called(function, request.arguments, functools.partial(awaited, ends_tasks=True))
        if ended.raised:
            with contextlib.suppress(Exception):  # a program may have closed or replaced them
                sys.stdout.flush()
                sys.stderr.write(ended.traceback)
    return {"returned": plain(ended.returned), "raised": ended.raised}


_of_function = answering("an agent is a function", _described, _result)


def called(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run,
) -> Returned:
    """The result of a program with the arguments that it names; never raises. `run`: awaits what it returns."""
    try:
        returned = function(**wanted(function, arguments))
        return Returned(run(returned) if asyncio.iscoroutine(returned) else returned)
    except BaseException as error:  # noqa: BLE001  also `exit()`: a program ends its own episode
        return Returned(None, in_words(error), traceback_of(error))


def traceback_of(error: BaseException) -> str:
    """Its traceback from the user's first line on: the frames of the user's files, and the last ones of libraries."""
    every = [made := traceback.TracebackException.from_exception(error)]
    for shown in every:
        more = (shown.__cause__, shown.__context__, *(shown.exceptions or ()))
        every += [other for other in more if other is not None]
        chosen = _chosen([frame.filename for frame in shown.stack])
        shown.stack[:] = [shown.stack[i] for i in (*chosen[:LAST_FRAMES], *chosen[LAST_FRAMES:][-MOST_FRAMES:])]
    return "".join(made.format())


def _chosen(files: Sequence[str]) -> list[int]:
    """Which frames a traceback keeps.

    >>> _chosen([__file__, "agent.py", *[os.__file__] * 9])
    [1, 8, 9, 10]
    """
    own = [i for i, file in enumerate(files) if not file.startswith(LIBRARIES)]
    return sorted({*own, *range(max(len(files) - LAST_FRAMES, *own[:1], 0), len(files))})


def in_words(error: BaseException) -> str:
    r"""The class of an exception and the first line of its text, which may be as broken as the program.

    >>> in_words(ValueError("cannot parse:\n42")), in_words(KeyError())
    ('ValueError: cannot parse:', 'KeyError')
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001
        text = "(its text cannot be made)"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    name = type(error).__qualname__
    return f"{name}: {first[:LONGEST]}" if first else name


def wanted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that a function has parameters for; all of them for `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def needs(function: Callable[..., Any]) -> list[str]:
    """Arguments without a default."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in kinds
    ]


def plain(value: Any) -> Any:
    """Numbers as JSON has them: also those of numpy and torch. Other values as they are, or as their text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "item"):
        with contextlib.suppress(Exception):  # of more than one number
            return value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)[:200]


@contextlib.contextmanager
def output_to(log: str, stdout: str | None = None) -> Iterator[None]:
    """Everything that is written to standard output and error goes into a file, also by processes that are started.

    `stdout`: another file, for standard output alone.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.flush(), sys.stderr.flush()
    before = [os.dup(descriptor) for descriptor in (1, 2)]
    for descriptor, path in ((1, stdout or log), (2, log)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # a program may have closed or replaced them
            sys.stdout.flush(), sys.stderr.flush()
        for descriptor, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, descriptor)
            os.close(kept)
