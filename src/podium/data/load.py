"""From a name to datasets: built-in tasks, files, folders, hub ids and mixtures.

Files are looked at before `datasets` reads them, because it hides where in a file an error is. Knows nothing of
prompts: `podium.data.check` judges the rows.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn

from podium.data.tasks import PREFIX, load_task
from podium.errors import DataError
from podium.records import Finding

MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Where the rows come from; the fields are the keys of a recipe, TRL's where TRL has one."""

    dataset: str | None = None
    """Built-in task, file, folder or hub id."""
    eval_dataset: str | None = None
    """Likewise; None: the test split of `dataset`, when it has one."""
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    held_out: Literal["if there", "needed", "no"] = "if there"
    """What becomes of the test split of `dataset`; an `eval_dataset` of its own is always loaded."""
    dataset_streaming: bool = False
    datasets: tuple[Mapping[str, Any], ...] = ()
    """A mixture, instead of `dataset`: TRL's `path, name, data_dir, data_files, split, columns, fraction`."""
    streaming: bool = False
    """Of the mixture."""
    test_split_size: float | None = None
    """Of the mixture: the share (or number) of rows to hold out."""


def load_data(spec: DataSpec) -> tuple[Any, Any | None]:
    """The training rows and, when there are some, the held-out rows (`Dataset` or `IterableDataset`).

    Raises:
        DataError: nothing there, or not readable; files are named with line and column.
    """
    if spec.datasets:
        splits = _mixture(spec)
    elif spec.dataset is not None:
        splits = load_splits(spec.dataset, config=spec.dataset_config, streaming=spec.dataset_streaming)
    else:
        raise DataError(
            "No dataset. Write `dataset: builtin:additions`, a file (.jsonl, .csv, ...) or a hub id.", code="C031"
        )
    name = spec.dataset or "the mixture"
    train = _split(splits, spec.dataset_train_split, name, "dataset_train_split")
    return train, _held_out(spec, splits, name)


def load_eval(spec: DataSpec) -> Any:
    """The rows of `eval_dataset`, which must be given. Raises `DataError`."""
    assert spec.eval_dataset is not None
    splits = load_splits(spec.eval_dataset, streaming=spec.dataset_streaming)
    only = next(iter(splits.values())) if len(splits) == 1 else None
    return (
        only if only is not None else _split(splits, spec.dataset_test_split, spec.eval_dataset, "dataset_test_split")
    )


def _held_out(spec: DataSpec, splits: Mapping[str, Any], name: str) -> Any | None:
    if spec.eval_dataset is not None:
        return load_eval(spec)
    if spec.held_out == "needed":
        return _split(splits, spec.dataset_test_split, name, "dataset_test_split")
    return splits.get(spec.dataset_test_split) if spec.held_out == "if there" else None


def _split(splits: Mapping[str, Any], wanted: str, name: str, key: str) -> Any:
    if wanted not in splits:
        raise DataError(f"{name} has no split `{wanted}`, but {', '.join(splits)}.", code="D038", fix=f"Set `{key}`.")
    return splits[wanted]


def load_splits(name: str, *, config: str | None = None, streaming: bool = False) -> dict[str, Any]:
    """All splits of one dataset by name."""
    if name.startswith(PREFIX):
        train, held_out = load_task(name)
        return {"train": train, "test": held_out}
    check_exists(name)
    path = Path(name).expanduser()
    if path.is_file():
        return {"train": _load_file(path, streaming=streaming)}
    if path.is_dir():
        return _load_folder(path, streaming=streaming)
    return _load_hub(name, config, streaming=streaming)


def check_exists(name: str) -> None:
    """Refuse a name that can only be a file or folder, and is not there.

    Raises:
        DataError: with near names.
    """
    if name.startswith(PREFIX):
        return
    path = Path(name).expanduser()
    if path.exists():
        return
    if path.suffix in READERS or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"There is no file or folder {name}.{_similar(path)}", code="D025")


def _similar(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (Nor is there a folder {path.parent}.)"
    near = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=3, cutoff=0.6)
    return f" Similar: {', '.join(str(path.parent / name) for name in near)}." if near else ""


# ---- files ----


def _load_file(path: Path, *, streaming: bool) -> Any:
    """One file as one dataset; a text file has one prompt a line."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    if path.suffix not in READERS:
        raise DataError(f"{path} is not a kind of file that is read: {', '.join(READERS)}.", code="D039")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes).", code="D024", fix="Write it again.")
    reader, check = READERS[path.suffix]
    check(path)
    try:
        dataset = load_dataset(reader, data_files=str(path), split="train", streaming=streaming)
    except (DatasetGenerationError, ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read: {_root(error)}", code="D039") from error
    return dataset.rename_column("text", "prompt") if reader == "text" else dataset


def _root(error: BaseException) -> str:
    """The innermost cause: `datasets` wraps what happened in messages that do not say it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


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
            "\n".join([*(problem.what for problem in problems), *more]), code=problems[0].code, findings=problems
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
        return _bad("D004", what, "write every row as one JSON object on a line of its own")
    except _NotJSON as error:
        return _bad("D029", f"{path} line {number}: {error} is not JSON; write null, or leave the key out")
    if isinstance(row, dict):
        return row
    return _bad("D031", f"{path} line {number}: expected an object, {{...}}, got {type(row).__name__}")


def _bad(code: str, what: str, fix: str = "") -> Finding:
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
        raise DataError(f"{where}: not valid JSON ({error.msg})\n{_caret(line, error.colno)}", code="D004") from None
    except _NotJSON as error:
        raise DataError(f"{path}: {error} is not JSON; write null, or leave the key out", code="D029") from None
    wrong = next((index for index, row in enumerate(rows) if not isinstance(row, dict)), None)
    if wrong is not None:
        kind = type(rows[wrong]).__name__
        raise DataError(f"{path}: row {wrong} is {kind}; expected an object, {{...}}", code="D031")


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
    """As many fields in every line as in the header."""
    reader = csv.reader(line for _, line in _lines(path))
    header: Sequence[str] = next(reader, [])
    problems = [
        f"{path} line {reader.line_num} has {len(row)} fields, the header has {len(header)}; quote fields with commas"
        for row in reader
        if row and len(row) != len(header)
    ]
    if problems:
        more = f"\n... and {len(problems) - MAX_PROBLEMS} more." if len(problems) > MAX_PROBLEMS else ""
        findings = [_bad("D027", problem) for problem in problems]
        raise DataError("\n".join(problems[:MAX_PROBLEMS]) + more, code="D027", findings=findings)


def _check_parquet(path: Path) -> None:
    with path.open("rb") as stream:
        start = stream.read(4)
    if start != b"PAR1":
        shown = start.decode("ascii", errors="backslashreplace")
        raise DataError(f'{path} starts with "{shown}", not with "PAR1": it is not a Parquet file.', code="D030")


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


# ---- folders, the hub, mixtures ----


def _read_code(error: BaseException, otherwise: str = "D039") -> str:
    """D034: a dataset that is a script, which `datasets` no longer runs."""
    return "D034" if "scripts are no longer supported" in _root(error) else otherwise


def _load_folder(folder: Path, *, streaming: bool) -> dict[str, Any]:
    """What `save_to_disk` wrote, or a folder of data files."""
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    saved = any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))
    try:
        loaded = load_from_disk(str(folder)) if saved else load_dataset(str(folder), streaming=streaming)
    except (DatasetGenerationError, ValueError, OSError, RuntimeError) as error:
        raise DataError(
            f"The folder {folder} cannot be read as a dataset: {_root(error)}", code=_read_code(error)
        ) from error
    return dict(loaded) if isinstance(loaded, (DatasetDict, dict)) else {"train": loaded}


def _load_hub(name: str, config: str | None, *, streaming: bool) -> dict[str, Any]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        return dict(load_dataset(name, name=config, streaming=streaming))
    except (DatasetGenerationError, ValueError, OSError, RuntimeError) as error:
        path = Path(name)
        near = _similar(path) if path.parent.is_dir() else ""
        raise DataError(
            f"`{name}` is no file or folder here, and the hub's dataset of that name cannot be had ({_root(error)}).",
            code=_read_code(error, "D035"),
            fix="Private or gated: `hf auth login`. Without a hub: a file (.jsonl, .csv) or `builtin:additions`."
            + near,
        ) from error


def _mixture(spec: DataSpec) -> dict[str, Any]:
    """TRL's mixture: parts one after another, cut to shares when `fraction` is given."""
    from datasets import concatenate_datasets

    parts = [_mixture_part(part, streaming=spec.streaming) for part in spec.datasets]
    fractions = [part.get("fraction") for part in spec.datasets]
    if any(fraction is not None for fraction in fractions):
        parts = _cut_to_shares(parts, fractions, streaming=spec.streaming)
    rows = concatenate_datasets(parts)
    if spec.test_split_size is None:
        return {"train": rows}
    if spec.streaming:
        raise DataError("`test_split_size` needs to know how many rows there are; leave out `streaming`.", code="C030")
    return dict(rows.train_test_split(test_size=spec.test_split_size))


def _mixture_part(part: Mapping[str, Any], *, streaming: bool) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    path, split = part["path"], part.get("split") or "train"
    if part.get("data_files") or part.get("data_dir") or part.get("name") or not _is_plain(split):
        options = {key: part.get(key) for key in ("name", "data_dir", "data_files")}
        try:
            rows = load_dataset(path, split=split, streaming=streaming, **options)
        except (DatasetGenerationError, ValueError, OSError, RuntimeError) as error:
            raise DataError(f"The part `{path}` of `datasets` cannot be had: {_root(error)}", code="D035") from error
    else:
        rows = _split(load_splits(path, streaming=streaming), split, path, "split")
    return rows.select_columns(part["columns"]) if part.get("columns") else rows


def _is_plain(split: str) -> bool:
    """`train`, and not `train[:10%]`, which only `datasets` understands."""
    return split.isidentifier()


def _cut_to_shares(parts: list[Any], fractions: list[float | None], *, streaming: bool) -> list[Any]:
    """The first rows of each part, so that none is repeated and the shares come out (as in TRL 1.16)."""
    if streaming:
        raise DataError("`fraction` needs to know how many rows there are; leave out `streaming`.", code="C030")
    if any(fraction is None for fraction in fractions):
        raise DataError(
            "`fraction` is given for some parts of `datasets` and not for others; give it for all or none.", code="C030"
        )
    given = [float(fraction or 0) for fraction in fractions]
    shares = [fraction / sum(given) for fraction in given]
    total = min(len(part) / share for part, share in zip(parts, shares, strict=True) if share > 0)
    return [part.select(range(round(share * total))) for part, share in zip(parts, shares, strict=True)]
