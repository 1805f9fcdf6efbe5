"""Rows as they are: a name becomes the splits of a dataset, and a split a source whose rows are read one by one.

load_splits("train.jsonl")["train"]
file_source(Path("train.jsonl")).rows()

Names are those of built-in tasks, tasks of libraries, functions in files, files, folders and datasets on the hub.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from podium.data.files import (
    columns_and_form,
    dataset_of,
    dataset_of_columns,
    file_rows,
    kind_of,
    load_file,
    mentions,
    readable,
    root_cause,
)
from podium.data.images import COLUMNS
from podium.data.query import parse_query
from podium.data.tasks import is_task, load_task
from podium.errors import ConfigError, DataError, odd_path, similar_listed, similar_paths
from podium.errors.texts import as_lines, listed, quoted
from podium.isolation.user_files import IN_FILE, attribute, find_file, module_from_file

STREAM_ROWS = 10_000  # rows of a stream without an end that are looked at
COUNTED_BYTES = 64 << 20  # bytes of a file whose lines are counted; the number of lines of a larger one is extrapolated
LONGEST_NAME = 255  # characters that file systems take in the name of a file

IMAGES = (*COLUMNS, "prompt")  # columns that may hold images

Line = int | str | None  # number of the line; a text is the whole place; None: rows have no lines


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """A source of rows."""

    name: str  # for messages: a file, or `train_dataset`
    rows: Callable[[], Iterator[tuple[Line, Any]]]
    """Line and row; a Finding in place of a row that cannot be read, None in place of one that is left out."""
    about: int | None  # approximate number of rows; None: not known
    columns: tuple[str, ...] | None = None  # None: those of the rows
    is_stream: bool = False
    form: str = ""  # notes about the format of the file
    dataset: Any = None  # the rows as a `Dataset`, a stream or a list; None: read one by one, of a file or a task
    lines_first: bool = False  # whether bad lines of the file behind a stream are to be found before the stream is used
    folder: Path | None = None  # of the files; paths of images are relative to it
    mentions: Callable[[Collection[str]], bool] = lambda words: False
    """Whether one of these words stands in quotes in a file whose columns are those of its rows."""


def file_source(path: Path, name: str | None = None) -> RowSource:
    """A file of lines, read as it is: no copy is made of it. Raises `DataError` for one that cannot be read."""
    columns, form = columns_and_form(path)
    with path.open("rb") as stream:
        start = stream.read(COUNTED_BYTES)
    about = max(1, path.stat().st_size * max(start.count(b"\n"), 1) // len(start))
    return RowSource(
        name=name or str(path),
        rows=lambda: file_rows(path),
        about=about,
        columns=columns,
        form=form,
        folder=path.parent,
        mentions=(lambda words: False) if columns else partial(mentions, path),
    )


def list_source(rows: Sequence[Mapping[str, Any]], name: str) -> RowSource:
    """Rows in memory that all have the same columns; every pass yields copies, as a pass over a file does."""
    return RowSource(
        name=name,
        rows=lambda: ((None, copy.deepcopy(row)) for row in rows),
        about=len(rows),
        columns=tuple(rows[0]),
    )


def dataset_source(
    dataset: Any,
    name: str,
    *,
    is_file: bool = False,
    most: int = STREAM_ROWS,
    only: Iterable[str] = (),
    images: Collection[str] = IMAGES,
    folder: Path | None = None,
) -> RowSource:
    """A `Dataset`, an `IterableDataset`, or a list of rows, which can be read more than once.

    All of a stream is read if it `is_file`, which ends, of any other the first `most` rows. `only`: the columns that
    are read of a `Dataset`; none: all. `images`: those whose images stay as they are stored. `folder`: as
    `RowSource.folder`.
    """
    stream = is_stream(dataset)
    columns: Sequence[str] | None = None if is_transformed(dataset) else getattr(dataset, "column_names", None)
    return RowSource(
        name=name,
        rows=lambda: ((None, row) for row in _rows(undecoded(dataset, images), None if is_file else most, only)),
        about=None if stream else len(dataset),
        columns=tuple(columns) if columns else None,
        is_stream=stream and not is_file,
        dataset=dataset,
        folder=folder,
    )


def _whole_rows(rows: Iterator[Any]) -> Iterator[Any]:
    """Rows of files that are read as they are needed. Raises `DataError` where one is damaged."""
    try:
        yield from rows
    except OSError as error:  # Arrow's, of a page that cannot be decompressed
        reason = " ".join(str(error).split())
        raise DataError(
            f"The rows of a file are damaged: {reason}", code="D039", fix="write or download it again", error=reason
        ) from error


def _rows(dataset: Any, most: int | None, only: Iterable[str]) -> Iterator[Any]:
    if is_stream(dataset):
        yield from _whole_rows(itertools.islice(dataset, most))
    elif keeps_rows(dataset):
        size = 16 if set(COLUMNS) & {*dataset.column_names} else 1000  # images are large
        for batch in (dataset.select_columns(list(only)) if only else dataset).iter(batch_size=size):
            keys = list(batch)
            yield from (dict(zip(keys, values, strict=True)) for values in zip(*batch.values(), strict=True))
    else:
        yield from (dataset[index] for index in range(len(dataset)))


def is_stream(dataset: Any) -> bool:
    """Whether the number of rows is unknown."""
    return not hasattr(dataset, "__len__")


def is_read_once(dataset: Any) -> bool:
    """Whether a dataset is an iterator, whose rows a survey would use up."""
    return is_stream(dataset) and iter(dataset) is dataset


def keeps_rows(dataset: Any) -> bool:
    """Whether a row is the same at every reading, so that one that was checked need not be checked again.

    It is in a `Dataset` that no function of the user's transforms. Only the first rows of a stream are checked before
    training; those of a list, or of a class of the user's, may change.
    """
    return hasattr(dataset, "iter") and not is_stream(dataset) and not is_transformed(dataset)


def is_transformed(dataset: Any) -> bool:
    """Whether a function of the user's makes the rows as they are read."""
    settings = getattr(dataset, "format", None)
    return isinstance(settings, Mapping) and settings.get("type") == "custom"


def undecoded(dataset: Any, columns: Collection[str] = IMAGES) -> Any:
    """A dataset that gives images of these columns as they are stored: a bad one is then known by its row."""
    features = getattr(dataset, "features", None) or {}
    stored = {name: _stored(kind) for name, kind in features.items() if name in columns}
    changed = {name: kind for name, kind in stored.items() if kind != features[name]}
    if not changed or is_transformed(dataset):
        return dataset
    if is_stream(dataset):
        for name, kind in changed.items():
            dataset = dataset.cast_column(name, kind)
        return dataset
    found = copy.deepcopy(dataset)  # without the table, which stays as it is; `cast_column` copies one of lists
    found.info.features.update(changed)
    return found


def _stored(kind: Any) -> Any:
    """The type of a column that gives images as they are stored."""
    from datasets import Image

    if isinstance(kind, Image):
        return dataclasses.replace(kind, decode=False)
    if isinstance(kind, Mapping):
        return {key: _stored(value) for key, value in kind.items()}
    return dataclasses.replace(kind, feature=_stored(kind.feature)) if hasattr(kind, "feature") else kind


def is_lines(path: Any) -> bool:
    """Whether a dataset is a file that is read line by line."""
    return file_kind(path) not in (None, ".parquet")


def file_kind(path: Any) -> str | None:
    """The way to read a file that is there, one of `files.KINDS`; None: there is no such file."""
    file = Path(path).expanduser() if isinstance(path, (str, Path)) else None
    return kind_of(file) if file is not None and file.is_file() else None


# ---- from a name to splits ----


class TaskLibrary(NamedTuple):
    """A library whose tasks are datasets, as `reasoning-gym:chain_sum?size=10`."""

    module: str
    """The module here: its `gym_rows(task, **arguments)` makes rows, `check_task(task)` raises where there is none."""
    reward: str
    """The reward, with the task as `dataset`, of a run that names no other."""


TASK_LIBRARIES = {"reasoning-gym": TaskLibrary("podium.agents.adapters.reasoning_gym", "reasoning_gym")}
"""Libraries by the word before the colon."""


def task_library(name: str) -> TaskLibrary | None:
    """The library that makes a dataset of that name, if one does.

    >>> task_library("reasoning-gym:chain_sum?size=10").reward, task_library("train.jsonl")
    ('reasoning_gym', None)
    """
    library, colon, _ = name.partition(":")
    return TASK_LIBRARIES.get(library) if colon else None


def load_splits(source: Any, *, config: str | None = None, streaming: bool = False) -> dict[str, Any]:
    """All splits of a dataset: by name, by a function that makes its rows, or as given. Raises `DataError`."""
    if not isinstance(source, (str, Path)):
        return _given(source, streaming=streaming)
    name = str(source)
    if is_task(name):
        train, held_out = load_task(name)
        return {"train": train, "test": held_out}
    if (library := task_library(name)) is not None:
        task, settings = parse_query(name.partition(":")[2])
        return {"train": rows_dataset(import_module(library.module).gym_rows(task, **settings), name)}
    if IN_FILE.fullmatch(name):
        return {"train": _made(_function(name), name, streaming=streaming)}
    check_exists(name)
    path = Path(name).expanduser()
    if path.is_file():
        return {"train": load_file(path, streaming=streaming)}
    return _load_folder(path, streaming=streaming) if path.is_dir() else _load_hub(name, config, streaming=streaming)


def check_exists(name: str, key: str = "dataset") -> None:
    """Raises `DataError` for a name, under `key`, that can only be a file, a folder or a task, and is not there."""
    if (library := task_library(name)) is not None:
        import_module(library.module).check_task(parse_query(name.partition(":")[2])[0])
        return
    path = Path(name).expanduser()
    if max(map(len, path.parts), default=0) > LONGEST_NAME:
        start = f"{name[:60]}..."
        raise DataError(
            f"{start} has {len(name)} characters: no file, folder or hub id has such a name.",
            code="D025",
            fix="the path of a file that is there, as seen from here (`ls`)",
            settings=(key,),
            name=start,
            size=len(name),
            setting=key,
        )
    if is_task(name) or IN_FILE.fullmatch(name) or path.is_file() or path.is_dir():
        return
    what, fix = odd_path(name)
    if what:
        raise DataError(what, code="D025", fix=fix)
    if kind_of(path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        near = similar_paths(path)
        changes = {key: near[0]} if near else {}
        full = f" ({path})" if name.startswith("~") else ""
        similar = similar_listed(path, near)
        raise DataError(
            f"There is no file or folder {name}{full}.{similar}",
            code="D025",
            fix=as_lines(changes) if changes else "the path of a file that is there, as seen from here (`ls`)",
            changes=changes,
            name=name,
            full=full,
            listed=similar,
        )


def _given(source: Any, *, streaming: bool) -> dict[str, Any]:
    """A dataset that is there already, a dict of its splits, or a function that makes its rows."""
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "column_names"):
        return {"train": source}
    if callable(source):
        return {"train": _made(source, getattr(source, "__name__", type(source).__name__), streaming=streaming)}
    raise DataError(
        f"A dataset is a name, a `datasets.Dataset` or a function that makes rows; got {type(source).__name__}.",
        code="D056",
        fix="Rows in a list: `datasets.Dataset.from_list(rows)`.",
        settings=("datasets",),
        kind=type(source).__name__,
    )


def _function(name: str) -> Callable[[], Any]:
    """The function in a file, looked for in the working directory, with its arguments."""
    target, arguments = parse_query(name)
    file, _, function = target.rpartition(":")
    try:
        module = module_from_file(find_file(file, Path()), file)
        return partial(attribute(module, function, file, rule="rows come from a function"), **arguments)
    except ConfigError as error:
        raise DataError(error.what, code="D056", fix=error.fix or _OF_FUNCTION) from error


_OF_FUNCTION = "dataset: FILE.py:FUNCTION, with a function that yields dicts"


def _made(make: Callable[[], Any], name: str, *, streaming: bool) -> Any:
    from datasets import IterableDataset

    rows = partial(_rows_of, make, name)
    return IterableDataset.from_generator(rows) if streaming else rows_dataset(list(rows()), name)


def _rows_of(make: Callable[[], Any], name: str) -> Iterator[Mapping[str, Any]]:
    """The rows that a user's function makes. Raises `DataError` (D056) with the line where it failed."""
    try:
        for number, row in enumerate(make()):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{name}: row {number} is {type(row).__name__}; a row is a dict, as {{'prompt': ...}}.",
                    code="D056",
                    fix=f"have {name} yield dicts: yield {{'prompt': '...', 'answer': '...'}}",
                    name=name,
                    number=number,
                    kind=type(row).__name__,
                )
            yield row
    except DataError:
        raise
    except Exception as error:  # a user's function can raise anything
        where = name
        fix = _OF_FUNCTION
        if error.__traceback__ and error.__traceback__.tb_next:
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{at.filename}:{at.lineno}"
            fix = f"correct line {at.lineno} of {at.filename}"
        raise DataError(
            f"{name}: making the rows failed at {where}: {type(error).__name__}: {quoted(error)}",
            code="D056",
            fix=fix,
            name=name,
            place=where,
            kind=type(error).__name__,
            error=error,
        ) from error


def rows_dataset(rows: list[Any], name: str) -> Any:
    """A `Dataset` of rows; a column that a row lacks is null there. Raises `DataError` (D056) where types differ."""
    import pyarrow as pa

    columns = {column: [row.get(column) for row in rows] for column in dict.fromkeys(itertools.chain(*rows))}
    for column, values in columns.items():
        try:
            pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in values if value is not None))
            raise DataError(
                f"{name}: the column `{column}` holds values that are no column ({kinds}): {quoted(error)}",
                code="D056",
                fix="Write one type in every row, for example str(value).",
                name=name,
                column=column,
                kinds=kinds,
                error=error,
            ) from None
    return dataset_of_columns(columns)


def _load_folder(folder: Path, *, streaming: bool) -> dict[str, Any]:
    """A dataset that `save_to_disk` wrote, or a folder of data files, of whatever kinds."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    saved = any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))
    if not saved and (files := _files_by_split(folder)):
        return {split: _together(folder, paths, streaming=streaming) for split, paths in files.items()}
    what = f"The folder {folder} cannot be read as a dataset: {{cause}}"
    fix = "dataset: a file in it (.jsonl, .csv, .parquet), or what `save_to_disk` wrote"
    with readable(what, str(folder), code="D039", fix=fix):
        loaded = load_from_disk(str(folder)) if saved else load_dataset(str(folder), streaming=streaming)
    return dict(loaded) if isinstance(loaded, (DatasetDict, dict)) else {"train": loaded}


def folder_of(path: Any, split: str) -> Path | None:
    """The folder of the files of a split; None: the dataset is no file and no folder."""
    found = Path(path).expanduser() if isinstance(path, (str, Path)) else Path()
    if found.is_file():
        return found.parent
    if not isinstance(path, (str, Path)) or not found.is_dir():
        return None
    files = _files_by_split(found).get(split)
    return Path(os.path.commonpath([file.parent for file in files])) if files else found


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """The data files of a folder by their splits, as `datasets` names them; none where a card or a script names them.

    `datasets` would read the files of one kind and leave out the others. None, too, of a folder of images with their
    `metadata.csv` or `metadata.jsonl`, whose rows `datasets` puts beside them.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    card = folder / "README.md"
    has_card = card.is_file() and "configs:" in card.read_text(encoding="utf-8", errors="replace")
    if has_card or any(folder.glob("*.py")):
        return {}
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    except (OSError, ValueError):  # no file at all: an error of `load_dataset`
        return {}
    kept: dict[str, list[Path]] = {}
    others = False
    for split, names in found.items():
        others = others or not all(kind_of(Path(name)) for name in names)
        if paths := [path for name in names if kind_of(path := Path(name))]:
            kept[str(split)] = sorted(folder / os.path.relpath(path, folder) for path in paths)
    about_others = all(path.stem == "metadata" for paths in kept.values() for path in paths)
    return {} if others and about_others else kept


def _together(folder: Path, paths: list[Path], *, streaming: bool) -> Any:
    """Files as one dataset, each value as its file has it. Raises `DataError` (D058) where their columns differ."""
    from datasets import concatenate_datasets

    parts = {path: load_file(path, streaming=streaming) for path in paths}
    columns = {path: set(rows.column_names or next(iter(rows), ())) for path, rows in parts.items()}
    for path in paths[1:]:
        if columns[path] != columns[paths[0]]:
            listed = "; ".join(f"{file} has {', '.join(sorted(columns[file]))}" for file in (paths[0], path))
            entries = ", ".join(f'{{path: {file}, prompt: "{{COLUMN}}", answer: "{{COLUMN}}"}}' for file in paths)
            raise DataError(
                f"The files in {folder} have different columns: {listed}.",
                code="D058",
                fix=f"dataset: one of them, or all with their columns: [{entries}]",
                folder=folder,
                listed=listed,
                entries=entries,
            )
    try:
        return concatenate_datasets(list(parts.values()))
    except ValueError as error:
        if streaming:
            raise DataError(
                f"The files in {folder} cannot be joined: {root_cause(error)}",
                code="D058",
                fix="Write each column as one type in all files.",
                folder=folder,
                root_cause=root_cause(error),
            ) from error
        return dataset_of(list(itertools.chain.from_iterable(parts.values())))


def _load_hub(name: str, config: str | None, *, streaming: bool) -> dict[str, Any]:
    from datasets import load_dataset

    path = Path(name)
    near = similar_listed(path, similar_paths(path)) if path.parent.is_dir() else ""
    if "/" not in name and (found := [near for near in similar_paths(path) if Path(near).stem == name]):
        raise DataError(
            f"There is no file or folder {name}, but {listed(found)}.",
            code="D025",
            changes={"dataset": found[0]},
            name=name,
            found=found,
        )
    what = f"`{name}` is no file or folder here, and the hub's dataset of that name cannot be had ({{cause}})."
    fix = f"Private or gated: `hf auth login`. Without a hub: a file (.jsonl, .csv) or `builtin:additions`.{near}"
    with readable(what, name, code="D035", fix=fix):
        return dict(load_dataset(name, name=config, streaming=streaming))
