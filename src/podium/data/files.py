"""Files of rows, looked at before `datasets` reads them, because it hides where in a file an error is."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from podium.errors import DataError
from podium.records import Finding

MAX_PROBLEMS = 20


def load_file(path: Path, *, streaming: bool) -> Any:
    """One file as one dataset; a text file has one prompt a line, and a field of a CSV file is text.

    Raises:
        DataError: another kind of file, or one that cannot be read; bad lines by their numbers.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    if path.suffix not in READERS:
        what = f"{path} is not a kind of file that is read: {', '.join(READERS)}."
        raise DataError(what, code="D039", fix=_as_lines(path))
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes).", code="D024", fix="Write it again.")
    reader, check = READERS[path.suffix]
    check(path)
    try:
        options = _as_text(path) if reader == "csv" else {}
        dataset = load_dataset(reader, data_files=str(path), split="train", streaming=streaming, **options)
    except (DatasetGenerationError, ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read: {root_cause(error)}", code="D039", fix=_as_lines(path)) from error
    return dataset.rename_column("text", "prompt") if reader == "text" else dataset


def _as_lines(path: Path) -> str:
    """How another kind of file becomes one that is read."""
    to = f"{path.stem}.jsonl"
    if path.suffix not in (".xls", ".xlsx"):
        return f"write one JSON object a line to {to}, then dataset: {to}"
    program = f"import pandas; pandas.read_excel('{path}').to_json('{to}', orient='records', lines=True)"
    return f'python -c "{program}", then dataset: {to}'


def root_cause(error: BaseException) -> str:
    """The innermost cause: `datasets` wraps what happened in messages that do not say it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


def _as_text(path: Path) -> dict[str, Any]:
    """A CSV file has no types: guessed ones make `007` a 7, and all answers `7.0` where one of them is missing."""
    from datasets import Features, Value

    names = {name: Value("string") for name in next(csv.reader(line for _, line in _lines(path)), [])}
    return {"features": Features(names), "keep_default_na": False, "na_values": [""]}


def _check_jsonl(path: Path) -> None:
    """Every line an object, streamed: a large file is checked in constant memory."""
    problems: list[Finding] = []
    for _, row in jsonl_rows(path):
        if isinstance(row, Finding):
            problems.append(row)
        if len(problems) == MAX_PROBLEMS:
            break
    if problems:
        more = ["... and perhaps more."] * (len(problems) == MAX_PROBLEMS)
        raise DataError(
            "\n".join([*(problem.what for problem in problems), *more]),
            code=problems[0].code,
            fix=problems[0].fix,
            findings=problems,
        )


def jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Number of the line and row of every line that is not blank; in place of a bad row, what is wrong with it.

    Raises:
        DataError: not UTF-8, or not one row.
    """
    number = 0
    for number, line in _lines(path):
        yield number, _row_of(path, number, line.rstrip("\r\n"))
    if number == 0:
        raise DataError(f"{path} has no rows, only white space.", code="D024", fix="Write it again.")


def _row_of(path: Path, number: int, line: str) -> Any:
    try:
        row = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        what = f"{path} line {number}, column {error.colno}: not valid JSON ({error.msg})\n{_caret(line, error.colno)}"
        return _bad("D004", what, _ONE_A_LINE)
    except _NotJSON as error:
        return _bad("D029", f"{path} line {number}: {error} is not JSON", _NULL)
    if isinstance(row, dict):
        return row
    return _bad("D031", f"{path} line {number}: expected an object, {{...}}, got {type(row).__name__}", _OBJECT)


_ONE_A_LINE = "write every row as one JSON object on a line of its own"
_NULL = 'write null in its place, {"answer": null}, or leave the key out'
_OBJECT = '{"prompt": "...", "answer": "..."}, one object a line'


def _bad(code: str, what: str, fix: str) -> Finding:
    return Finding(code=code, severity="error", what=what, fix=fix)


class _NotJSON(ValueError):
    """NaN or Infinity, which Python writes and reads and JSON does not have."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NotJSON(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _caret(line: str, column: int) -> str:
    """The part of the line around the error, with a caret below it."""
    start = max(0, column - 41)
    return f"  {line[start : start + 80]}\n  {' ' * (column - 1 - start)}^"


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not blank; what is not UTF-8 is named. A byte-order mark is skipped."""
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if raw.isspace():
                continue
            try:
                yield number, (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} line {number}: byte 0x{raw[error.start]:02X} is not UTF-8; the file looks like cp1252 "
                    "(Windows).",
                    code="D026",
                    fix=f"Convert it: iconv -f cp1252 -t utf-8 {path} > {path.stem}-utf8{path.suffix}",
                ) from None


def _all_text(path: Path) -> str:
    """With its blank lines, so that lines can be counted in it."""
    for _ in _lines(path):
        pass
    return path.read_text(encoding="utf-8-sig")


def _check_json(path: Path) -> None:
    """A list of objects, or an object a line; anything else is named."""
    first = next((line.lstrip()[0] for _, line in _lines(path)), "")
    if first != "[":
        _check_json_lines_or_object(path)
        return
    text = _all_text(path)
    try:
        rows = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1] if text.splitlines() else ""
        where = f"{path} line {error.lineno}, column {error.colno}"
        what = f"{where}: not valid JSON ({error.msg})\n{_caret(line, error.colno)}"
        raise DataError(what, code="D004", fix="[{...}, {...}], or one object a line") from None
    except _NotJSON as error:
        raise DataError(f"{path}: {error} is not JSON", code="D029", fix=_NULL) from None
    wrong = next((index for index, row in enumerate(rows) if not isinstance(row, dict)), None)
    if wrong is not None:
        kind = type(rows[wrong]).__name__
        raise DataError(f"{path}: row {wrong} is {kind}; expected an object, {{...}}", code="D031", fix=_OBJECT)


def _check_json_lines_or_object(path: Path) -> None:
    """One object over the whole file is not a list of rows; one object a line is."""
    try:
        whole = json.loads(_all_text(path))
    except ValueError:
        _check_jsonl(path)  # more than one value: an object a line, or an error with its place
        return
    keys = ", ".join(map(str, whole)) if isinstance(whole, dict) else ""
    if isinstance(whole, dict) and any(isinstance(value, list) for value in whole.values()):
        raise DataError(
            f"{path} is one object with the keys {keys}; rows are expected.",
            code="D031",
            fix="Write the list under one of these keys to a file of its own, or write one object a line (.jsonl).",
        )


def _check_csv(path: Path) -> None:
    """A name for every column, and as many fields in every line as in the header."""
    reader = csv.reader(line for _, line in _lines(path))
    header: Sequence[str] = next(reader, [])
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        what = f"{path} line 1: the header names `{twice}` twice"
        raise DataError(what, code="D027", fix=f"call one of them `{twice}_2`")
    findings, num_problems = [], 0
    for row in reader:
        if not row or len(row) == len(header):
            continue
        num_problems += 1
        if num_problems <= MAX_PROBLEMS:
            line = reader.line_num
            what = f"{path} line {line} has {len(row)} fields, the header has {len(header)}"
            findings.append(_bad("D027", what, f'quote fields that hold a comma in line {line}: "1,5"'))
    if findings:
        more = f"\n... and {num_problems - MAX_PROBLEMS} more." if num_problems > MAX_PROBLEMS else ""
        what = "\n".join(finding.what for finding in findings) + more
        raise DataError(what, code="D027", fix='quote fields that hold a comma: "1,5"', findings=findings)


def _check_parquet(path: Path) -> None:
    with path.open("rb") as stream:
        start = stream.read(4)
    if start != b"PAR1":
        shown = start.decode("ascii", errors="backslashreplace")
        what = f'{path} starts with "{shown}", not with "PAR1": it is not a Parquet file.'
        raise DataError(what, code="D030", fix=f"write it again: pandas.DataFrame(rows).to_parquet('{path}')")


def _check_text(path: Path) -> None:
    for _ in _lines(path):
        pass


READERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    ".jsonl": ("json", _check_jsonl),
    ".json": ("json", _check_json),
    ".csv": ("csv", _check_csv),
    ".parquet": ("parquet", _check_parquet),
    ".txt": ("text", _check_text),
}
"""By suffix: the reader of `datasets`, and what is looked at before."""
