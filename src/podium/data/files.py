"""Files of rows, read line by line, so that a bad one is reported with its place.

    for line, row in file_rows(Path("rows.csv.gz")):
        ...

The name of a file (`.csv`, `.tsv`, `.jsonl`, `.json`, `.txt`, `.parquet`) and its first bytes tell its format,
compression, encoding and the character between columns. `pandas` and `datasets` read the same files without lines.
"""

from __future__ import annotations

import ast
import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, cast

from podium.data.columns import USUAL
from podium.errors import LFS, DataError, Finding, hub_errors
from podium.errors.texts import quoted

MAX_PROBLEMS = 20
SEARCHED = 1 << 24  # bytes that are searched at a time
CHUNK = 50_000  # rows that are made into a table at a time

csv.field_size_limit(sys.maxsize)  # a long prompt is one field

KINDS: Mapping[str, str] = {
    ".jsonl": ".jsonl",
    ".ndjson": ".jsonl",
    ".json": ".json",
    ".csv": ".csv",
    ".tsv": ".csv",
    ".tab": ".csv",
    ".parquet": ".parquet",
    ".txt": ".txt",
}
"""Ways to read a file, by suffix."""

_OPENERS: Mapping[str, tuple[bytes, Callable[[Path], Any]]] = {
    "gzip": (b"\x1f\x8b", gzip.GzipFile),
    "bzip2": (b"BZh", bz2.BZ2File),
    "xz": (b"\xfd7zXZ", lzma.LZMAFile),
}
"""By compression: the first bytes of such a file, and its opener."""

_COMPRESSED = (".gz", ".bz2", ".xz")
_FROM_EXCEL = "in Excel: Save As, CSV UTF-8; then dataset: {stem}.csv"
_PAGE = ("a web page, not the data", "download the file itself (the button `raw` or `download`)")
_FOREIGN: Sequence[tuple[bytes, str, str]] = (
    (b"\xd0\xcf\x11\xe0", "an Excel workbook (.xls)", _FROM_EXCEL),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unzstd -o {stem} {path}"),
    (b"7z\xbc\xaf", "a 7z archive", "7z x {path}"),
    (b"SQLite format 3", "a SQLite database", 'sqlite3 -csv -header {path} "select * from TABLE" > {stem}.csv'),
    (b"%PDF", "a PDF", "the table it was made from, as CSV"),
    (b"ARROW1", "an Arrow file", "the folder that `save_to_disk` wrote, or a Parquet file"),
    (LFS, "a pointer of Git LFS, not the data", "git lfs pull"),
    (b"<!doctype html", *_PAGE),
    (b"<html", *_PAGE),
)
"""Beginnings of other files, capitals aside, with their kind and a way to their rows."""


class Form(NamedTuple):
    """The format of a file, by its name and its first bytes."""

    kind: str  # a value of `KINDS`
    compression: str = ""
    encoding: str = "utf-8"

    @property
    def words(self) -> str:
        """Note about an unusual format; empty where there is none."""
        code = "UTF-8 with a byte-order mark, which is skipped" if self.encoding == "utf-8-sig" else self.encoding
        return ", ".join(filter(None, [self.compression, "" if code == "utf-8" else code.replace("utf", "UTF")]))


def kind_of(path: Path) -> str | None:
    """The way to read a file of this name, one of `KINDS`; None: there is none.

    >>> kind_of(Path("rows.CSV.gz")), kind_of(Path("rows.xlsx"))
    ('.csv', None)
    """
    suffixes = (suffix.lower() for suffix in reversed(path.suffixes))
    return KINDS.get(next((suffix for suffix in suffixes if suffix not in _COMPRESSED), ""))


def form_of(path: Path) -> Form:
    """The format of a file. Raises `DataError` for an empty one (D024), or one that is not read (D030, D039)."""
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes).", code="D024", fix="Write it again.", file=path)
    with path.open("rb") as stream:
        start = stream.read(256)
    if start.startswith(b"PAR1"):
        return Form(".parquet")
    _refuse_foreign(path, start)
    kind = kind_of(path)
    if kind is None:
        what = f"{path} is not a kind of file that is read: {', '.join(KINDS)}."
        to = f"{path.stem}.jsonl"
        raise DataError(what, code="D039", fix=f"write one JSON object a line to {to}, then dataset: {to}")
    if kind == ".parquet":
        shown = start[:4].decode("ascii", errors="backslashreplace")
        raise DataError(
            f'{path} starts with "{shown}", not with "PAR1": it is not a Parquet file.',
            code="D030",
            fix=f"write it again: pandas.DataFrame(rows).to_parquet('{path}')",
            path=path,
            shown=shown,
        )
    compression = next((name for name, (magic, _) in _OPENERS.items() if start.startswith(magic)), "")
    if compression:
        with _readable(path), _opened(path, compression) as stream:
            start = stream.read(256)
    return Form(kind, compression, json.detect_encoding(start))


def _refuse_foreign(path: Path, start: bytes) -> None:
    lower = start.lstrip().lower()
    what, fix = next((rest for magic, *rest in _FOREIGN if lower.startswith(magic.lower())), ("", ""))
    if start.startswith(b"PK\x03\x04"):
        names = zipfile.ZipFile(path).namelist() if zipfile.is_zipfile(path) else []
        inside = next((name for name in names if kind_of(Path(name))), "the file in it")
        what = "a zip archive"
        fix = f"unzip {{path}}, then dataset: {inside}"
        if any(name.startswith("xl/") for name in names):
            what = "an Excel workbook (.xlsx)"
            fix = _FROM_EXCEL
    if what:
        raise DataError(
            f"{path} is {what}.",
            code="D039",
            fix=fix.format(path=path, stem=path.with_suffix("")),
            path=path,
            what=what,
        )


def load_file(path: Path, *, streaming: bool) -> Any:
    """One file as one dataset, fields of CSV as text. Raises `DataError` (D024 to D039), for bad lines by number."""
    from datasets import load_dataset

    if form_of(path).kind == ".parquet":
        fix = f"write it again: pandas.DataFrame(rows).to_parquet('{path}')"
        with readable(f"{path} cannot be read: {{cause}}", str(path), code="D039", fix=fix):
            return load_dataset("parquet", data_files=str(path), split="train", streaming=streaming)
    table = RowTable()
    for row in good_rows(file_rows(path)):  # of a stream, too: a bad line is reported before training
        if not streaming:
            table.add(row)
    return stream_of(path) if streaming else table.dataset()


def mentions(path: Path, words: Collection[str]) -> bool:
    """Whether one of these words may stand in quotes in a file; it is searched, as reading its rows takes longer."""
    form = form_of(path)
    if not form.encoding.startswith("utf-8"):
        return True  # not searched
    quoted_words = [f'"{word}"'.encode() for word in words]
    longest = max(map(len, quoted_words))
    end = b""
    with _readable(path), _opened(path, form.compression) as stream:
        while block := stream.read(SEARCHED):
            block = end + block
            if any(word in block for word in quoted_words):
                return True
            end = block[-longest:]
    return False


def stream_of(path: Path) -> Any:
    """The rows of a file of lines as a stream; its lines are not tried first."""
    from datasets import IterableDataset

    return IterableDataset.from_generator(_good_file_rows, gen_kwargs={"path": path})


def _good_file_rows(path: Path) -> Iterator[Any]:
    yield from good_rows(file_rows(path))


class RowTable:
    """A `Dataset` that is made of rows in parts: as Python objects rows take several times as much memory."""

    def __init__(self, features: Any = None) -> None:
        """`features`: types of the columns; None: those of the values."""
        self.features = features
        self.clear()

    def clear(self) -> None:
        self._rows: list[Mapping[str, Any]] = []
        self._parts: list[Any] = []

    def add(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) == CHUNK:
            self._close_part()

    def _close_part(self) -> None:
        self._parts.append(dataset_of(self._rows, self.features))
        self._rows = []

    def dataset(self) -> Any:
        from datasets import concatenate_datasets

        if self._rows or not self._parts:
            self._close_part()
        try:
            return concatenate_datasets(self._parts)
        except ValueError:  # a column has one type in one part and another elsewhere
            return dataset_of([row for part in self._parts for row in part])


def dataset_of(rows: Sequence[Mapping[str, Any]], features: Any = None) -> Any:
    """A `Dataset` of rows as they are; a column that a row lacks is null there.

    `features`: types of the columns; None: those that give every value back as it is.
    """
    names = features or dict.fromkeys(chain.from_iterable(rows))
    return dataset_of_columns({name: [row.get(name) for row in rows] for name in names}, features)


def dataset_of_columns(columns: Mapping[str, Sequence[Any]], features: Any = None) -> Any:
    """A `Dataset` of columns, of equal length, as they are."""
    import pyarrow as pa
    from datasets import Dataset, Features
    from datasets.features.features import generate_from_arrow_type

    from podium.data.json_values import JsonValue

    columns = {name: [in_bytes(value) for value in values] for name, values in columns.items()}
    if features is not None:
        made = {
            name: _as_json(values) if isinstance(features[name], JsonValue) else values
            for name, values in columns.items()
        }
        return Dataset.from_dict(made, features=features)
    arrays = {name: _array(values) for name, values in columns.items()}
    kinds = {
        name: JsonValue() if isinstance(array.type, pa.JsonType) else generate_from_arrow_type(array.type)
        for name, array in arrays.items()
    }
    return Dataset.from_dict(arrays, features=Features(kinds))


def in_bytes(value: Any) -> Any:
    """A Pillow image, or a list of them, as `datasets` stores images; any other value unchanged."""
    if isinstance(value, list):
        return [in_bytes(entry) for entry in value] if value and _is_image(value[0]) else value
    if not _is_image(value):
        return value
    stream = io.BytesIO()
    value.save(stream, format="PNG")
    return {"bytes": stream.getvalue(), "path": None}


def _is_image(value: Any) -> bool:
    """Whether a value is a Pillow image, asked without importing Pillow."""
    return type(value).__module__.partition(".")[0] == "PIL"


def _array(values: Sequence[Any]) -> Any:
    """The values of a column in Arrow's own type, or as JSON where that would change them."""
    import pyarrow as pa

    try:
        array = pa.array(values)
        kinds = {type(value) for value in values if value is not None}
        if (len(kinds) < 2 and kinds <= {str, int, float, bool}) or repr(array.to_pylist()) == repr(list(values)):
            return array
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
        array = None
    try:
        return _as_json(values)
    except (TypeError, ValueError):  # values of a function that JSON does not have
        if array is None:
            raise
        return array


def _as_json(values: Sequence[Any]) -> Any:
    import pyarrow as pa

    return pa.array([None if value is None else json.dumps(value) for value in values], pa.json_())


@contextlib.contextmanager
def readable(what: str, name: str, *, code: str, fix: str) -> Iterator[None]:
    """Errors of `datasets` and of the hub as a `DataError`: `what` with the cause; D034 for a script, no longer run."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except (DatasetGenerationError, ValueError, OSError, RuntimeError, *hub_errors()) as error:
        if isinstance(error, DataError):
            raise
        cause = root_cause(error)
        if "scripts are no longer supported" in cause:
            to = f"{Path(name).name}.jsonl"
            program = f"load_dataset('{name}', trust_remote_code=True)['train'].to_json('{to}')"
            code = "D034"
            fix = f'once, where `pip install "datasets<4"`: {program}; then dataset: {to}'
        raise DataError(what.replace("{cause}", cause), code=code, fix=fix) from error


def root_cause(error: BaseException) -> str:
    """The innermost cause, which `datasets` wraps in messages of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


def good_rows(rows: Iterable[tuple[Any, Any]]) -> Iterator[Any]:
    """The rows of `file_rows`. Raises one `DataError` of all bad ones, before the end."""
    problems: list[Finding] = []
    for _, row in rows:
        if isinstance(row, Finding):
            problems.append(row)
        elif not problems:
            yield row
        if len(problems) == MAX_PROBLEMS:
            break
    if problems:
        lines = [problem.what for problem in problems]
        if len(problems) == MAX_PROBLEMS:
            lines.append("... and perhaps more.")
        raise DataError("\n".join(lines), code=problems[0].code, fix=problems[0].fix, findings=problems)


def file_rows(path: Path) -> Iterator[tuple[int | None, Any]]:
    """Line (None in a JSON list) and row of every row, or its Finding, in constant memory. Raises `DataError`."""
    form = form_of(path)
    empty = True
    with _readable(path):
        for numbered in _READERS[form.kind](path, form):
            empty = False
            yield numbered
    if empty:
        only = "only a header" if form.kind == ".csv" else "only white space"
        raise DataError(f"{path} has no rows, {only}.", code="D024", fix="Write it again.", path=path, only=only)


def jsonl_rows(path: Path) -> Iterator[tuple[int | None, Any]]:
    """Rows of a file with an object a line, whatever its name. Raises `DataError` (D024, D026, D039)."""
    yield from _jsonl_rows(path, form_of(path)._replace(kind=".jsonl"))


def columns_and_form(path: Path) -> tuple[tuple[str, ...] | None, str]:
    """Columns of a CSV file's header, a note on an odd format. Raises `DataError` (D024, D026, D027, D039)."""
    form = form_of(path)
    if form.kind != ".csv":
        return None, form.words
    separator, _, names = _csv_header(path, _lines(path, form))
    notes = [form.words] if form.words else []
    if separator != ("\t" if path.suffix.lower() in (".tsv", ".tab") else ","):
        notes.append(f"a table with {SEPARATORS.get(separator, separator)} between its columns")
    return tuple(filter(None, names)), ", ".join(notes)


def _jsonl_rows(path: Path, form: Form) -> Iterator[tuple[int | None, Any]]:
    first = True
    for number, line in _lines(path, form):
        if line.isspace():
            continue
        if first and line.strip() in ("[", "{", "[{"):
            raise DataError(
                f"{path} is JSON over several lines, where a .jsonl file has one object a line.",
                code="D004",
                fix=f"mv {path} {path.with_suffix('.json')}",
                path=path,
                with_suffix=path.with_suffix(".json"),
            )
        first = False
        yield number, _row_of(path, number, line.rstrip("\r\n"))


def _row_of(path: Path, number: int, line: str) -> Any:
    try:
        row = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        what = f", column {error.colno}: not valid JSON ({error.msg})\n{_caret(line, error.colno)}"
        code = "D004"
        fix = _ONE_A_LINE
        if _is_python(line):
            fix = _PROGRAM.format("import ast, json", "ast.literal_eval(line)", path, path.stem)
    except _NotJSON as error:
        code = "D029"
        what = f": {error} is not JSON"
        fix = _NULL
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands of brackets
        code = "D004"
        what = f": {error}"
        fix = _ONE_A_LINE
    else:
        if isinstance(row, dict):
            return row
        code = "D031"
        what = f": expected an object, {{...}}, got {type(row).__name__}"
        fix = _OBJECT
        if isinstance(row, str):
            fix = _PROGRAM.format("import json", "{'prompt': json.loads(line)}", path, path.stem)
    return _bad_line(code, f"{path} line {number}{what}", fix)


def _bad_line(code: str, what: str, fix: str) -> Finding:
    return Finding(code=code, severity="error", what=what, fix=fix, facts={"leave_out": False})


_ONE_A_LINE = "write every row as one JSON object on a line of its own"
_NULL = 'write null in its place, {"answer": null}, or leave the key out'
_OBJECT = '{"prompt": "...", "answer": "..."}, one object a line'


_PROGRAM = "python -c \"{}; [print(json.dumps({})) for line in open('{}')]\" > {}-json.jsonl; then that as the dataset"


def _is_python(line: str) -> bool:
    """Whether a line is a dict as Python prints it."""
    try:
        return line.lstrip().startswith("{'") and isinstance(ast.literal_eval(line.strip()), dict)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


class _NotJSON(ValueError):
    """NaN or Infinity, which Python writes and reads and JSON does not have."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NotJSON(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _caret(line: str, column: int) -> str:
    """The part of the line around the error, with a caret below it."""
    start = max(0, column - 41)
    return f"  {line[start : start + 80]}\n  {' ' * (column - 1 - start)}^"


def _json_rows(path: Path, form: Form) -> Iterator[tuple[int | None, Any]]:
    text = "".join(line for _, line in _lines(path, form))
    try:
        rows = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith("["):  # more than one value: an object a line, or an error with its place
            yield from _jsonl_rows(path, form)
            return
        where = f"{path} line {error.lineno}, column {error.colno}"
        caret = _caret(text.splitlines()[error.lineno - 1], error.colno)
        raise DataError(
            f"not valid JSON ({error.msg})\n{caret}",
            code="D004",
            where=where,
            fix="[{...}, {...}], or one object a line",
            msg=error.msg,
            caret=caret,
        ) from None
    except _NotJSON as error:
        raise DataError(
            f"{path}: {quoted(error)} is not JSON", code="D029", fix=_NULL, path=path, error=error
        ) from None
    if isinstance(rows, dict):
        if any(isinstance(value, list) for value in rows.values()):
            what = f"{path} is one object with the keys {', '.join(rows)}; rows are expected."
            fix = "Write the list under one of these keys to a file of its own, or write one object a line (.jsonl)."
            lists = [value for value in rows.values() if isinstance(value, list)]
            if len(lists) == len(rows) > 1 and len(set(map(len, lists))) == 1:
                to = f"{path.stem}-rows.jsonl"
                program = f"import pandas; pandas.read_json('{path}', dtype=False)"
                fix = f"python -c \"{program}.to_json('{to}', orient='records', lines=True)\"; then dataset: {to}"
            raise DataError(what, code="D031", fix=fix)
        rows = [rows]
    for index, row in enumerate(rows if isinstance(rows, list) else [rows]):
        if not isinstance(row, dict):
            raise DataError(
                f"{path}: row {index} is {type(row).__name__}; expected an object, {{...}}",
                code="D031",
                fix=_OBJECT,
                path=path,
                index=index,
                kind=type(row).__name__,
            )
        yield None, row


SEPARATORS: Mapping[str, str] = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}
"""Separators of the columns of a CSV file, in words; the first of them where two fit."""


def _csv_header(path: Path, lines: Iterable[tuple[int, str]]) -> tuple[str, int, list[str]]:
    """Separator, number of the header's line, and the columns, whose names may be empty; takes these lines."""
    number, line = next(((number, line) for number, line in lines if line.strip()), (0, ""))
    if named := re.fullmatch(r"\"?sep=(.)\"?\s*", line):  # written by Excel
        number, line = next(iter(lines), (number, ""))

    def parts(separator: str) -> list[str]:
        return [name.strip() for name in next(csv.reader([line], delimiter=separator), [])]

    separator = named[1] if named else max(SEPARATORS, key=lambda mark: len(parts(mark)))
    names = parts(separator)
    if sum(map(bool, names)) == 1:
        _refuse_title(path, number)
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f"{path} line {number}: the header names `{twice}` twice",
            code="D027",
            fix=f"call one of them `{twice}_2`",
            path=path,
            number=number,
            twice=twice,
        )
    return separator, number, names


def _csv_rows(path: Path, form: Form) -> Iterator[tuple[int | None, Any]]:
    """Fields are text or messages, empty ones null: guessed types make `007` a 7, answers `7.0` where one is missing.

    Columns without a name (an index, separators at the ends of lines) and lines without a field are left out.
    """
    lines = _lines(path, form)
    separator, header, names = _csv_header(path, lines)
    reader = csv.reader((line for _, line in lines), delimiter=separator, strict=True)
    while True:
        start = header + reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            what = f"{path} line {start}: a quote that is not closed, or stands inside a field ({error})"
            fix = 'write a quote inside a field twice, the field in quotes: "5"" wide"'
            yield start, _bad_line("D027", what, fix)
            continue
        if fields is None:
            return
        if not any(fields):
            continue
        if len(fields) < len(names) or any(fields[len(names) :]):
            what = f"{path} line {header + reader.line_num} has {len(fields)} fields, the header has {len(names)}"
            fix = f'quote fields that hold {SEPARATORS.get(separator, separator)} in line {start}: "1{separator}5"'
            yield start, _bad_line("D027", what, fix)
            continue
        yield start, {name: _cell(field) for name, field in zip(names, fields, strict=False) if name}


def _refuse_title(path: Path, first: int) -> None:
    """Raises `DataError` where line `first` is a title or a comment: one of the next has usual names of columns."""
    for number, line in islice(_lines(path, form_of(path)), first, first + 10):
        for separator in SEPARATORS:
            fields = [name.strip().casefold() for name in next(csv.reader([line], delimiter=separator), []) if name]
            if len(fields) > 1 and USUAL.issuperset(fields):
                to = f"{path.stem}-table{path.suffix}"
                raise DataError(
                    f"{path} line {number} has the names of the columns, and line {first} is a title or a comment.",
                    code="D027",
                    fix=f"tail -n +{number} {path} > {to}; then dataset: {to}",
                    path=path,
                    number=number,
                    first=first,
                    to=to,
                )


def _cell(field: str) -> Any:
    """The text of a field, null where it is empty; a conversation where it is one, as JSON or as pandas writes it.

    >>> _cell("[{'role': 'user', 'content': 'What is 1+1?'}]"), _cell("[1, 2]"), _cell("")
    ([{'role': 'user', 'content': 'What is 1+1?'}], '[1, 2]', None)
    """
    if field.startswith("[{"):
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                turns = read(field)
                if all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns):
                    return turns
    return field or None


def _text_rows(path: Path, form: Form) -> Iterator[tuple[int | None, Any]]:
    yield from ((number, {"prompt": line.rstrip("\r\n")}) for number, line in _lines(path, form) if line.strip())


_READERS = {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows, ".txt": _text_rows}


def _lines(path: Path, form: Form) -> Iterator[tuple[int, str]]:
    with _opened(path, form.compression) as stream, TextIOWrapper(stream, form.encoding, newline="") as text:
        try:
            yield from enumerate(text, start=1)
        except UnicodeDecodeError as error:
            raise _no_text(path, form, error) from None


def _opened(path: Path, compression: str) -> IO[bytes]:
    return cast(IO[bytes], _OPENERS[compression][1](path) if compression else path.open("rb"))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Errors of a compressed file that ends too early, or is damaged, as a `DataError`."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{path} is damaged: {quoted(error)}.",
            code="D039",
            fix="write or download it again",
            path=path,
            error=error,
        ) from error


def _no_text(path: Path, form: Form, error: UnicodeDecodeError) -> DataError:
    if form.encoding not in ("utf-8", "utf-8-sig"):
        return DataError(
            f"{path} begins as {form.encoding.upper()} and goes on as something else ({error.reason}).",
            code="D026",
            fix="write it again as UTF-8",
            path=path,
            encoding=form.encoding.upper(),
            reason=error.reason,
        )
    with _opened(path, form.compression) as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                raw.decode("utf-8")
            except UnicodeDecodeError as bad:
                code = "cp1252"
                looks = "; the file looks like cp1252 (Windows)"
                to = f"{path.stem}-utf8{path.suffix}"
                if re.search(rb"[\x80-\xff]{3}", raw):  # letters with accents stand alone
                    code = "ENCODING"
                    looks = ", and which encoding it is is not known"
                byte = raw[bad.start]
                return DataError(
                    f"{path} line {number}: byte 0x{byte:02X} is not UTF-8{looks}.",
                    code="D026",
                    fix=f"Convert it: iconv -f {code} -t utf-8 {path} > {to}; or in Excel: Save As, CSV UTF-8",
                    path=path,
                    number=number,
                    raw=byte,
                    looks=looks,
                    rule=code,
                    to=to,
                )
    raise error
