"""From a name to rows with prompts: loaded, split by content, shaped by templates, filtered, mixed, ordered.

train, held_out = podium.data.load("qa.csv", prompt="{question}", answer="{expert_answer}", held_out=0.2)

A name becomes the splits of a dataset (`load_splits`), a split a `RowSource`, whose rows are read and transformed in
one pass (`TransformedRows`), and what was read a dataset again, of one part or of a mixture (`Loaded`). Several
datasets become one by Podium's parts with weights, or TRL's with fractions; no row is repeated for a share.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from podium.data.columns import Columns, Row, features
from podium.data.files import RowTable, dataset_of_columns, file_rows, good_rows, readable, stream_of
from podium.data.images import COLUMNS
from podium.data.selection import (
    Condition,
    Order,
    PassRates,
    RowTransform,
    as_difficulty,
    in_order,
    no_difficulty,
    read_pass_rates,
)
from podium.data.sources import (
    Line,
    RowSource,
    dataset_source,
    file_kind,
    file_source,
    folder_of,
    is_lines,
    is_stream,
    is_transformed,
    list_source,
    load_splits,
    undecoded,
)
from podium.data.tasks import is_task, task_rows
from podium.errors import DataError, Finding, PodiumError
from podium.errors.rule import Facts, Rule, error_of, findings
from podium.errors.texts import listed

logger = logging.getLogger(__name__)
T = TypeVar("T")

NAMING_ROWS = 100  # rows of a file that are read for its columns, where it has no header
OPENED = 8  # rows whose prompts are compared for what they begin with


# ---- which rows: the keys of a recipe ----


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """One dataset, or one of a mixture."""

    path: Any  # built-in or reasoning-gym task, `file.py:function`, file, folder, hub id; or a dataset
    weight: float | None = None  # its share of the mixture is this over the sum; None for all: all rows of all parts
    config: str | None = None  # configuration of a hub dataset
    split: str = "train"
    columns: Columns = field(default_factory=Columns)

    @property
    def name(self) -> str:
        return str(self.path) if isinstance(self.path, (str, Path)) else "the dataset"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """All datasets of a run and what is made of their rows; the fields are keys of a recipe, TRL's where it has one."""

    dataset: Any = None  # as `DatasetSpec.path`
    parts: tuple[DatasetSpec, ...] = ()  # a mixture, instead of `dataset`
    eval_dataset: Any = None  # held-out rows; None: `held_out`, or the test split of `dataset`, when it has one
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    use_test_split: Literal["if there", "needed", "no"] = "if there"
    """Whether the test split of `dataset` is held out; an `eval_dataset` of its own is always loaded."""
    dataset_streaming: bool = False
    datasets: tuple[Mapping[str, Any], ...] = ()
    """TRL's mixture, instead of `dataset`: `path, name, data_dir, data_files, split, columns, fraction`."""
    streaming: bool = False  # for TRL's mixture
    test_split_size: float | None = None  # for TRL's mixture: the share (or number) of rows to hold out
    columns: Columns = field(default_factory=Columns)  # for `dataset` and `eval_dataset`
    filter: tuple[Condition, ...] = ()
    """Conditions on the training rows, by their columns as they come; held-out rows stay as they are."""
    held_out: float | None = None  # share of the prompts to hold out, by their content
    pass_rates: str | None = None  # a file of measured pass rates
    pass_rate: tuple[float, float] | None = None  # lowest and highest of them that are trained on
    order: Order | None = None
    difficulty: str | None = None  # the column to order by; None: pass rates
    seed: int = 42  # for mixtures

    @property
    def all_parts(self) -> tuple[DatasetSpec, ...]:
        """The parts; one, where there is no mixture."""
        config = self.dataset_config
        split = self.dataset_train_split
        return self.parts or (DatasetSpec(path=self.dataset, config=config, split=split, columns=self.columns),)

    @property
    def name(self) -> str:
        return "the mixture" if self.parts or self.datasets else self.all_parts[0].name

    @property
    def is_streamed(self) -> bool:
        return self.dataset_streaming or self.streaming

    @property
    def is_given(self) -> bool:
        return self.dataset is not None or bool(self.datasets or self.parts)


CONTRADICTIONS: tuple[Rule, ...] = (
    Rule(
        code="C030",
        needs=("data",),
        when=lambda spec: spec.held_out is not None and spec.eval_dataset is not None,
        says="`held_out` and `eval_dataset` both say what is held out.",
        cure="Leave one of them out.",
        about=("held_out",),
    ),
    Rule(
        code="C030",
        needs=("data",),
        when=lambda spec: spec.pass_rate is not None and spec.pass_rates is None,
        says="`pass_rate` needs measured rates.",
        cure="Set `pass_rates: FILE`, which `podium sample -n N --save FILE` writes.",
        about=("pass_rate",),
    ),
    Rule(
        code="C030",
        needs=("data",),
        when=lambda spec: spec.difficulty is not None and spec.order is None,
        says="`difficulty` does nothing without an order.",
        cure="Set `order: easy_first` or `order: hard_first`.",
        about=("difficulty",),
    ),
    Rule(
        code="C030",
        needs=("data",),
        when=lambda spec: spec.order is not None and spec.is_streamed,
        says="`order` needs all rows at once.",
        cure="Leave out `dataset_streaming`.",
        about=("order",),
    ),
    Rule(
        code="C030",
        needs=("data",),
        when=lambda spec: (
            spec.order is not None and not spec.is_streamed and spec.difficulty is None and spec.pass_rates is None
        ),
        says="`order` needs to know what is hard.",
        cure="Set `difficulty: COLUMN`, numbers, or measured `pass_rates: FILE`.",
        about=("order",),
    ),
    Rule(
        code="C030",
        needs=("data",),
        when=lambda spec: len({part.weight is None for part in spec.parts}) == 2,
        says="`weight` is given for some parts of `dataset` and not for others.",
        cure="Give it for all or none.",
        about=("dataset",),
    ),
)
"""Keys about rows that exclude each other, or need another one."""


_COLUMN_KEYS = ("prompt", "answer", "system", "examples", "answer_from", "chat", "columns")
PART_KEYS = ("path", "weight", "split", "config", *_COLUMN_KEYS)


def read_parts(entries: Sequence[Any], columns: Columns) -> tuple[DatasetSpec, ...]:
    """The parts of a mixture from mappings (or names alone), the rest as in `columns`. Raises `DataError` (C003)."""
    return tuple(_part(entry, columns) for entry in entries)


def _part(entry: Any, columns: Columns) -> DatasetSpec:
    if not isinstance(entry, Mapping):
        return DatasetSpec(path=entry, columns=columns)
    if "path" not in entry or any(key not in PART_KEYS for key in entry):
        raise DataError(
            f"A part of a mixture has {listed(PART_KEYS)}, `path` in any case; got {listed(entry)}.",
            code="C003",
            fix="Rows in a list: `datasets.Dataset.from_list(rows)`.",
            part_keys=PART_KEYS,
            entry=entry,
        )
    own = {key: entry[key] for key in _COLUMN_KEYS if key in entry}
    if "examples" in own:
        own["examples"] = tuple(own["examples"] or ())
    rest = {key: entry[key] for key in ("path", "weight", "config", "split") if entry.get(key) is not None}
    return DatasetSpec(**rest, columns=replace(columns, **own))


# ---- rows with prompts ----


class Loaded(NamedTuple):
    """Rows with `prompt`, and the columns for the reward functions."""

    train: Any
    """`Dataset` or `IterableDataset`."""
    held_out: Any = None
    """The same; None: nothing is held out."""


def load(dataset: Any, **more: Any) -> Loaded:
    """Training rows and held-out rows, as a recipe with the same keys gets them.

    Args:
        dataset: the name of a file (.jsonl, .json, .csv, .parquet, .txt), a folder, a hub id, `builtin:TASK`,
            `reasoning-gym:TASK?size=100`, `file.py:function`; a `datasets.Dataset`; a function that makes rows; or a
            list of mappings with `path` and keys of its own, a mixture.
        prompt: template, `"{question}"`; None: the column `prompt`.
        answer: template; None: the column `answer`.
        system: template of a system message.
        examples: rows that become earlier turns of user and assistant, by the same templates.
        answer_from: where in the answer the final one stands: `after ####`, `last number`, a regular expression; or
            `last turn`, of conversations that end with their answer.
        chat: a text becomes a conversation of one turn; so it does with `system` or `examples`.
        columns: columns under the names that reward functions ask for, `{"tests": "test_list"}`.
        held_out: share of the prompts to hold out, by the hash of their content.
        eval_dataset: held-out rows of their own, shaped by the same templates.
        pass_rates: a file that `podium sample -n N --save FILE` wrote.
        pass_rate: lowest and highest pass rate to train on; None: all but never and always.
        order: `easy_first` or `hard_first`; train with `shuffle_dataset=False` then.
        difficulty: the column to order by, higher is harder; None: the pass rates.
        seed: of mixtures.
        more: other fields of `DataSpec`: `dataset_config`, `dataset_train_split`, `dataset_streaming`, ...

    Raises `DataError` where nothing is there, it is not readable, or columns are missing.
    """
    own = {key: more.pop(key) for key in _COLUMN_KEYS if key in more}
    columns = Columns(**{**own, "examples": tuple(own.get("examples") or ())})
    for error in columns.problems():
        raise error
    if more.get("pass_rates") is not None:
        more["pass_rates"] = str(more["pass_rates"])
    mixture = isinstance(dataset, (list, tuple))
    parts = read_parts(dataset, columns) if mixture else ()
    spec = DataSpec(dataset=None if mixture else dataset, parts=parts, columns=columns, **more)
    for problem in findings(CONTRADICTIONS, Facts(data=spec)):
        raise error_of(problem, DataError)
    return load_data(spec)


_OPTIONS = (*_COLUMN_KEYS, "held_out", "eval_dataset", "pass_rates", "pass_rate", "order", "difficulty", "seed")
_DEFAULTS = {field.name: field.default for field in (*fields(DataSpec), *fields(Columns))}
load.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter("dataset", Parameter.POSITIONAL_OR_KEYWORD),
        *(Parameter(name, Parameter.KEYWORD_ONLY, default=_DEFAULTS[name]) for name in _OPTIONS),
        Parameter("more", Parameter.VAR_KEYWORD),
    ]
)


def load_data(spec: DataSpec) -> Loaded:
    """The training rows and, when there are some, the held-out rows. Raises `DataError`, files with line and column."""
    opened = open_data(spec)
    for _, rows in (*opened.train, *opened.held_out):
        rows.read()
    return opened.loaded()


def shaped(rows: Any, columns: Columns, name: str, *, folder: Path | None = None) -> Any:
    """All the rows, with their prompts and answers. Raises `DataError` for columns that are not there.

    `folder`: that of the rows' files, to which paths of images are relative.
    """
    source = dataset_source(rows, name, images=(*columns.images, "prompt"), folder=folder)
    made = TransformedRows(source, RowTransform(columns=columns))
    made.read()
    return made.dataset()


def part_splits(spec: DataSpec, part: DatasetSpec, *, streaming: bool = False) -> Mapping[str, Any]:
    """The splits of one part as they are. Raises `DataError`."""
    if spec.datasets:
        size = spec.test_split_size
        return trl_mixture(spec.datasets, streaming=spec.streaming, test_split_size=size, seed=spec.seed)
    if part.path is None:
        raise DataError(
            "No dataset.", code="C031", fix="dataset: builtin:additions, a file (.jsonl, .csv, ...) or a hub id"
        )
    return load_splits(part.path, config=part.config, streaming=streaming or spec.dataset_streaming)


def first_rows(spec: DataSpec, part: DatasetSpec, count: int) -> list[Row]:
    """The first rows of a part's training split as they are, without reading the rest where that can be."""
    if is_lines(part.path):
        rows: Iterator[Any] = (row for _, row in file_rows(Path(part.path).expanduser()))
        return [dict(row) for row in itertools.islice(rows, count) if isinstance(row, Mapping)]
    splits = part_splits(spec, part, streaming=True)
    return list(itertools.islice(_train_rows(spec, part, splits), count))


def opening_of(spec: DataSpec) -> list[Any] | None:
    """The messages in front of the question that the first prompts of a training share; None where one is no list.

    Raises `DataError` for rows that are not there.
    """
    part = spec.all_parts[0]
    prompts: list[Any] = [part.columns(row).get("prompt") for row in first_rows(spec, part, OPENED)]
    if not prompts or not all(isinstance(prompt, list) and prompt for prompt in prompts):
        return None
    turns = itertools.takewhile(lambda turn: all(other == turn[0] for other in turn), zip(*prompts, strict=False))
    return [turn for turn, *_ in turns][: min(map(len, prompts)) - 1]


# ---- the datasets of a run, opened and read ----


class Attempts:
    """Calls that may fail with a message for the user: here it is raised, a check collects it."""

    def attempt(self, make: Callable[[], T]) -> T | None:
        """The result of `make`; None where it raised and the error was collected."""
        return make()

    def attempt_rows(self, make: Callable[[], T], name: str | None) -> T | None:
        """The same, for the rows of a dataset of this name."""
        return make()

    def report(self, findings: Sequence[Finding]) -> None:
        """Raise the first error as a `DataError`; log the rest."""
        for finding in findings:
            if finding.severity == "error":
                raise DataError(
                    f"{finding.what}.", code=finding.code, fix=finding.fix, findings=[finding], what=finding.what
                )
            logger.info("%s", finding.what)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenData:
    """The datasets of a spec, opened and not yet read, each with its part of the spec."""

    spec: DataSpec
    rates: PassRates | None
    train: tuple[tuple[DatasetSpec, TransformedRows], ...]
    held_out: tuple[tuple[DatasetSpec, TransformedRows], ...]

    def sources(self, attempts: Attempts) -> tuple[RowSource | None, RowSource | None]:
        """The training rows and the held-out rows, to be read; None where nothing could be opened."""
        train = _one_source([rows.source for _, rows in self.train], self.spec.name, attempts)
        return train, _one_source([rows.source for _, rows in self.held_out], "the held-out rows", attempts)

    def loaded(self) -> Loaded:
        """The rows, once all of them were read from their sources. Raises `DataError`."""
        spec = self.spec
        train = self._joined(self.train)
        if spec.order is not None:
            if is_stream(train):
                raise DataError(
                    "`order` needs all rows at once, and this is a stream.",
                    code="C030",
                    fix="Leave out `dataset_streaming`.",
                    settings=("order",),
                )
            train = in_order(train, spec.order, name=spec.name, difficulty=spec.difficulty, rates=self.rates)
        return Loaded(train, self._joined(self.held_out) if self.held_out else None)

    @property
    def keeps_order(self) -> bool:
        """Whether rows are loaded in the order in which they are read."""
        return self.spec.order is None and not any(part.weight for part in self.spec.parts)

    def _joined(self, parts: Sequence[tuple[DatasetSpec, TransformedRows]]) -> Any:
        """The parts' rows as one dataset; parts that have one path are told apart by a number."""
        named: dict[str, Any] = {}
        for part, rows in parts:
            number = sum(part.name == name.partition(" #")[0] for name in named)
            named[f"{part.name} #{number + 1}" if number else part.name] = rows.dataset()
        return mixed(named, [part.weight for part, _ in parts], seed=self.spec.seed)


def open_data(spec: DataSpec, attempts: Attempts | None = None, *, keep: bool = True) -> OpenData:
    """Open every dataset of a spec, without those that `attempts` collect errors of, to load (`keep`) or only read."""
    attempts = attempts or Attempts()
    file = spec.pass_rates
    rates = None if file is None else attempts.attempt(lambda: read_pass_rates(file, spec.pass_rate))
    difficulty = None if keep else spec.difficulty  # of loaded rows the order finds it
    train: list[tuple[DatasetSpec, TransformedRows]] = []
    held_out: list[tuple[DatasetSpec, TransformedRows]] = []

    def opened(source: RowSource, transform: RowTransform, difficulty: str | None = None) -> TransformedRows | None:
        return attempts.attempt(lambda: TransformedRows(source, transform, attempts, keep=keep, difficulty=difficulty))

    for part in spec.all_parts:
        sources = attempts.attempt_rows(partial(_part_sources, spec, part, keep=keep), part.name)
        if sources is None:
            continue
        transform = RowTransform(columns=part.columns, filter=spec.filter, held_out=spec.held_out, rates=rates)
        if (rows := opened(sources[0], transform, difficulty)) is not None:
            train.append((part, rows))
        if sources[1] is not None:
            present = tuple(condition for condition in spec.filter if condition.is_presence)
            aside = replace(transform, filter=present, rates=None, wants_held_out=spec.held_out is not None)
            if (rows := opened(sources[1], aside)) is not None:
                held_out.append((part, rows))
    if spec.eval_dataset is not None:
        part = DatasetSpec(path=spec.eval_dataset, columns=spec.columns)
        source = attempts.attempt(lambda: _eval_source(spec, part, keep=keep))
        if source is not None and (rows := opened(source, RowTransform(columns=part.columns))) is not None:
            held_out.append((part, rows))
    return OpenData(spec=spec, rates=rates, train=tuple(train), held_out=tuple(held_out))


def _part_sources(spec: DataSpec, part: DatasetSpec, *, keep: bool) -> tuple[RowSource, RowSource | None]:
    """The rows of a part to train on and those that are held out, as they are."""
    name = spec.name if spec.datasets else part.name
    ends = file_kind(part.path) is not None and (not keep or spec.dataset_streaming)
    splits: Mapping[str, Any]
    if is_lines(part.path):
        splits = {"train": _lines(name, spec)}
    elif is_task(part.path):
        train_list, held_out_list = task_rows(part.path)
        splits = {"train": list_source(train_list, name), "test": list_source(held_out_list, name)}
    else:
        splits = part_splits(spec, part, streaming=ends)
    train = _source(_train_rows(spec, part, splits), part, name, part.split, is_file=ends)
    held_out = None if spec.eval_dataset is not None else _held_out_rows(spec, part, splits)
    if held_out is None:
        return train, None
    side = spec.dataset_test_split if spec.held_out is None else "held out"
    split = spec.dataset_test_split if spec.held_out is None else part.split
    return train, replace(_source(held_out, part, name, split, is_file=ends), name=f"{name} ({side})", form="")


def _eval_source(spec: DataSpec, part: DatasetSpec, *, keep: bool) -> RowSource:
    name = part.name
    if is_lines(spec.eval_dataset):
        return _lines(name, spec)
    ends = file_kind(name) is not None and (not keep or spec.dataset_streaming)
    splits = load_splits(spec.eval_dataset, streaming=ends or spec.dataset_streaming)
    wanted = next(iter(splits)) if len(splits) == 1 else spec.dataset_test_split
    return _source(chosen(splits, wanted, name, "dataset_test_split"), part, name, wanted, is_file=ends)


def _source(rows: Any, part: DatasetSpec, name: str, split: str, *, is_file: bool) -> RowSource:
    if isinstance(rows, RowSource):
        return rows
    names = getattr(rows, "column_names", None)
    kinds = getattr(rows, "features", None) or {}
    in_blocks = any("'image'" in repr(kind) for kind in kinds.values())
    may_have_images = names is None or in_blocks or not {*part.columns.images}.isdisjoint(names)
    folder = folder_of(part.path, split) if may_have_images else None
    return dataset_source(rows, name, is_file=is_file, images=(*part.columns.images, "prompt"), folder=folder)


def _lines(name: str, spec: DataSpec) -> RowSource:
    """A file of lines, which a check and a load read in the same way."""
    path = Path(name).expanduser()
    source = file_source(path, name)
    return replace(source, dataset=stream_of(path), lines_first=True) if spec.dataset_streaming else source


def _train_rows(spec: DataSpec, part: DatasetSpec, splits: Mapping[str, Any]) -> Any:
    """The training split of a part as it is. Raises `DataError`."""
    return chosen(splits, part.split, part.name, "split" if spec.parts else "dataset_train_split")


def _held_out_rows(spec: DataSpec, part: DatasetSpec, splits: Mapping[str, Any]) -> Any | None:
    """The split that the held-out rows of a part come from; None: there is none."""
    if spec.held_out is not None:
        return _train_rows(spec, part, splits)
    if spec.use_test_split == "needed":
        return chosen(splits, spec.dataset_test_split, part.name, "dataset_test_split")
    return splits.get(spec.dataset_test_split) if spec.use_test_split == "if there" else None


def chosen(splits: Mapping[str, Any], wanted: str, name: str, key: str) -> Any:
    """One split by its name. Raises `DataError` (D038)."""
    if wanted not in splits:
        near = (get_close_matches(wanted, splits) or [*splits, ""])[0]
        raise DataError(
            f"`{key}`: {name} has no split `{wanted}`, but {listed(splits)}.",
            code="D038",
            changes={key: near},
            settings=(key,),
            setting=key,
            name=name,
            wanted=wanted,
            splits=[*splits],
        )
    return splits[wanted]


def _one_source(sources: Sequence[RowSource], name: str, attempts: Attempts) -> RowSource | None:
    """Several sources as one; every row keeps the place it has in its own."""
    if len(sources) < 2:
        return sources[0] if sources else None

    def failed(error: PodiumError) -> None:
        raise error

    def rows() -> Iterator[tuple[Line, Any]]:
        for source in sources:
            try:
                for index, (line, row) in enumerate(source.rows()):
                    place = f"{source.name}:{line}" if isinstance(line, int) else source.name
                    yield f"{place}, row {index}", row
            except PodiumError as error:
                attempts.attempt(partial(failed, error))  # the other sources are still read

    abouts = [source.about for source in sources if source.about is not None]
    columns = [source.columns for source in sources if source.columns is not None]
    known = tuple(dict.fromkeys(itertools.chain.from_iterable(columns)))
    return RowSource(
        name=name,
        rows=rows,
        about=sum(abouts) if len(abouts) == len(sources) else None,
        columns=known if len(columns) == len(sources) else None,
        is_stream=any(source.is_stream for source in sources),
        form=next((source.form for source in sources if source.form), ""),
    )


class TransformedRows:
    """Rows of a source, transformed as they are read; those that were read are there as a dataset."""

    def __init__(
        self,
        source: RowSource,
        transform: RowTransform,
        attempts: Attempts | None = None,
        *,
        keep: bool = True,
        difficulty: str | None = None,
    ) -> None:
        """Open the source; nothing is read yet. Raises `DataError` for columns that are not there.

        Args:
            source: the rows as they are.
            transform: what is made of a row.
            attempts: where findings about the rows are reported.
            keep: whether rows are kept for `dataset`; without, any number of them takes no memory.
            difficulty: a column that must hold a number in every row.
        """
        self._original = source
        self._transform = transform = _with_images(transform, source, source.columns) if source.columns else transform
        self._keep = keep
        self._difficulty = difficulty
        self._report = (attempts or Attempts()).report
        self._table = _table(source, transform) if keep else None
        self._apart = {} if self._table is None else _images_apart(source, transform)
        self._kept: list[int] = []
        if source.columns:
            self._check_names(source.columns)
        made = [key for key in ("prompt", "answer") if getattr(transform.columns, key) is not None]
        made += transform.columns.columns or ()
        stay = [name for name in source.columns or () if name not in transform.columns.taken]
        columns = None if source.columns is None else tuple(dict.fromkeys([*stay, *made]))
        self.source = replace(source, rows=self._rows, columns=columns)

    def _rows(self) -> Iterator[tuple[Line, Any]]:
        counts: Counter[str] = Counter()
        self._kept.clear()
        if self._table is not None:
            self._table.clear()
        for index, (line, row) in enumerate(self._with_known_names()):
            if isinstance(row, Mapping):
                if (made := self._transform(row, counts)) is not None:
                    self._add(index, made)
                yield line, made
            else:
                yield line, None if self._transform.wants_held_out else row
        self._report(self._transform.findings(self._original.name, counts))

    def _add(self, index: int, row: Mapping[str, Any]) -> None:
        if self._difficulty is not None:
            as_difficulty(row.get(self._difficulty), self._difficulty, index, self._original.name)
        if self._table is not None:
            self._table.add({name: value for name, value in row.items() if name not in self._apart})
        if self._keep and (self._transform.selects or self._apart):
            self._kept.append(index)

    def _with_known_names(self) -> Iterator[tuple[Line, Any]]:
        """The rows as they are. Raises `DataError` before the first where none has a column that is needed."""
        rows = self._original.rows()
        if self._original.columns:
            return rows
        first = list(itertools.islice(rows, NAMING_ROWS))
        if names := _names(first):
            images = self._transform.columns.images
            in_blocks = self._original.mentions(("image", *images))
            if in_blocks and {*images}.isdisjoint(names):
                names = _names(self._original.rows())
            self._transform = _with_images(self._transform, self._original, names, in_blocks=in_blocks)
            try:
                self._check_names(names)
            except DataError:
                self._check_names(_names(self._original.rows()))
        return itertools.chain(first, rows)

    def _check_names(self, names: Sequence[str]) -> None:
        self._transform.check_names(names, self._original.name)
        if self._original.dataset is None or not is_stream(self._original.dataset):
            self._transform.columns.check_fields(lambda: (row for _, row in self._original.rows()), self._original.name)
        if self._difficulty is not None and self._difficulty not in names:
            raise no_difficulty(self._difficulty, names, self._original.name)

    def read(self) -> None:
        """Read all rows, unless the dataset is there without. Raises `DataError` for rows that cannot be read."""
        selects = self._transform.selects and not is_stream(self._original.dataset)
        if self._table is not None or selects or self._original.lines_first:
            for _ in good_rows(self.source.rows()):
                pass

    def dataset(self) -> Any:
        """The rows, once they were read from `source`."""
        from datasets import concatenate_datasets

        rows = self._original.dataset
        if self._table is not None:
            parts = [self._table.dataset()]
            for name, column in self._apart.items():
                parts.append(rows.select(self._kept).select_columns(column).rename_columns({column: name}))
            return concatenate_datasets(parts, axis=1) if self._apart else parts[0]
        if is_stream(rows):
            return _lazily(self._original, self._transform)
        return rows.select(self._kept) if self._transform.selects else rows


def _with_images(
    transform: RowTransform, source: RowSource, names: Collection[str], *, in_blocks: bool = False
) -> RowTransform:
    """The transform for rows with these columns: beside images, texts are asked as conversations.

    `in_blocks`: whether messages may have paths of images where the types of the columns do not tell.
    """
    columns = transform.columns
    own = {*columns.images}.intersection(names)
    kinds = getattr(source.dataset, "features", None)
    in_blocks = in_blocks or any("'image': Value('string')" in repr(kind) for kind in (kinds or {}).values())
    if not own:
        return replace(transform, columns=replace(columns, folder=source.folder)) if in_blocks else transform
    prompt = kinds.get("prompt") if kinds else None
    is_text = columns.prompt is not None or ("prompt" in names and getattr(prompt, "dtype", "string") == "string")
    has_paths = (
        kinds is None or in_blocks or any("Value('string')" in repr(kinds[name]) for name in own if name in kinds)
    )
    folder = source.folder if has_paths else None
    return replace(transform, columns=replace(columns, chat=columns.chat or is_text, folder=folder))


def _images_apart(source: RowSource, transform: RowTransform) -> dict[str, str]:
    """Columns of images that the dataset has itself, by their names in the rows: a table of them would fill memory."""
    kinds = {} if is_transformed(source.dataset) else getattr(source.dataset, "features", None) or {}
    own = {name: name for name in transform.columns.images if "Image(" in repr(kinds.get(name))}
    named = dict(zip(COLUMNS, transform.columns.images, strict=True))
    return own | {name: column for name, column in named.items() if column in own}


def _table(source: RowSource, transform: RowTransform) -> RowTable | None:
    """An empty table for the rows; None for a stream, and where they can be taken from the dataset as they are."""
    from datasets import Json

    rows = source.dataset
    if rows is None:
        return RowTable()
    if is_stream(rows) or not transform.columns.changes:
        return None
    plain = is_transformed(rows) or any(isinstance(kind, Json) for kind in rows.features.values())
    if plain:
        return RowTable()
    kinds = features(transform.columns, rows.features)
    for name in _images_apart(source, transform):
        kinds.pop(name)
    return RowTable(kinds)


def _names(rows: Iterable[tuple[Line, Any]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(row for _, row in rows if isinstance(row, Mapping))))


def _lazily(source: RowSource, transform: RowTransform) -> Any:
    """A stream whose rows are transformed as they are drawn."""
    rows = source.dataset
    names = rows.column_names or list(next(iter(rows), ()))  # a stream may not know them
    if names and not source.lines_first:  # else they were those of all lines
        transform.check_names(names, source.name)
        transform = _with_images(transform, source, names)
    if transform.selects:
        counts: Counter[str] = Counter()
        rows = undecoded(rows, (*transform.columns.images, "prompt"))  # known by what is stored, as in a file
        rows = rows.filter(lambda row: transform(row, counts) is not None)
    columns = transform.columns
    if not columns.changes:
        return rows
    gone = [name for name in columns.taken if name in (rows.column_names or columns.taken)]
    return rows.map(columns, features=features(columns, rows.features), remove_columns=gone)


# ---- several datasets as one ----


def mixed(parts: Mapping[str, Any], weights: Sequence[float | None], *, seed: int) -> Any:
    """Parts by name as one dataset: all their rows, or with weights as many of each as keeps the shares.

    Which rows of a part are taken depends on `seed` alone. They are spread evenly, so that every stretch of the
    mixture has about the shares of the whole. Of streams the shares hold on average. Raises `DataError` (D058) for
    columns of one name whose types do not go together.
    """
    from datasets import concatenate_datasets, interleave_datasets

    _check_types(parts)
    rows = _with_json(list(parts.values()))
    if len(rows) == 1:
        return rows[0]
    if any(weight is None for weight in weights):
        return concatenate_datasets(rows)
    shares = np.array(weights, float) / sum(float(weight or 0) for weight in weights)
    if not all(hasattr(part, "__len__") for part in rows):
        return interleave_datasets(rows, probabilities=shares.tolist(), seed=seed, stopping_strategy="first_exhausted")
    return concatenate_datasets(rows).select(_interleaved([len(part) for part in rows], shares, seed))


def _interleaved(sizes: Sequence[int], shares: np.ndarray, seed: int) -> list[int]:
    """Rows of the parts laid end to end, in the order of the mixture.

    >>> order = _interleaved([4, 100], np.array([0.4, 0.6]), seed=1)
    >>> len(order), sum(index < 4 for index in order), sum(index < 4 for index in order[:5])
    (10, 4, 2)
    """
    total = min(size / share for size, share in zip(sizes, shares, strict=True))
    places: list[tuple[float, int]] = []
    start = 0
    for part, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        count = min(size, round(share * total))
        drawn = np.sort(np.random.default_rng([seed, part]).permutation(size)[:count])
        places += [((k + 0.5) / count, start + int(index)) for k, index in enumerate(drawn)]
        start += size
    return [index for _, index in sorted(places)]


def _with_json(parts: list[Any]) -> list[Any]:
    """The parts, with a column as `JsonValue` in all of them where one has it so; streams stay as they are."""
    from datasets import Features, Json

    from podium.data.json_values import JsonValue

    known = [rows.features or {} for rows in parts]
    mixed_types = {name for kinds in known for name, kind in kinds.items() if isinstance(kind, Json)}
    made = []
    for rows, kinds in zip(parts, known, strict=True):
        changed = {name: JsonValue() for name in mixed_types & {*kinds} if not isinstance(kinds[name], Json)}
        if changed and hasattr(rows, "__len__"):
            rows = dataset_of_columns(rows[:], Features({**kinds, **changed}))
        made.append(rows)
    return made


def _check_types(parts: Mapping[str, Any]) -> None:
    """Raises `DataError` for columns of two parts that differ in type; null fits every type, JSON holds every value."""
    from datasets import Json, Value

    seen: dict[str, tuple[str, Any]] = {}
    for name, rows in parts.items():
        for column, kind in (rows.features or {}).items():
            if kind == Value("null") or isinstance(kind, Json):
                continue
            first, other = seen.setdefault(column, (name, kind))
            if other != kind:
                one = _kind_in_words(other)
                two = _kind_in_words(kind)
                raise DataError(
                    f"`{column}` is {one} in {first} and {two} in {name}.",
                    code="D058",
                    fix=_ONE_WAY.get(column, "Write the column one way in all parts, or leave it out of one."),
                    column=column,
                    one=one,
                    first=first,
                    two=two,
                    name=name,
                )


_ONE_WAY = {
    "prompt": 'Write `prompt: "{column}"` and `chat: true` (or a `system`) for every part, or for none.',
    "answer": 'Write `answer: "{column}"` for every part: a template gives text.',
}


def trl_mixture(
    datasets: Sequence[Mapping[str, Any]], *, streaming: bool, test_split_size: float | None, seed: int
) -> dict[str, Any]:
    """TRL's `datasets:`: parts one after another, cut to shares when `fraction` is given. Raises `DataError`."""
    from datasets import concatenate_datasets

    parts = [_trl_part(part, streaming=streaming) for part in datasets]
    fractions = [part.get("fraction") for part in datasets]
    if any(fraction is not None for fraction in fractions):
        parts = _cut_to_shares(parts, fractions, streaming=streaming)
    rows = concatenate_datasets(parts)
    if test_split_size is None:
        return {"train": rows}
    if streaming:
        raise DataError(
            "`test_split_size` needs to know how many rows there are.",
            code="C030",
            fix="Leave out `streaming`.",
            settings=("test_split_size",),
            setting="test_split_size",
        )
    return dict(rows.train_test_split(test_size=test_split_size, seed=seed))


def _kind_in_words(kind: Any) -> str:
    """The type of a column of a dataset, for messages."""
    from datasets import Value

    if isinstance(kind, Value):
        return str(kind.dtype)
    return "a mapping" if isinstance(kind, dict) else "a list"


def _trl_part(part: Mapping[str, Any], *, streaming: bool) -> Any:
    from datasets import load_dataset

    path = part["path"]
    split = part.get("split") or "train"
    if part.get("data_files") or part.get("data_dir") or part.get("name") or not split.isidentifier():
        options = {key: part.get(key) for key in ("name", "data_dir", "data_files")}
        what = f"The part `{path}` of `datasets` cannot be had: {{cause}}"
        with readable(what, path, code="D035", fix="Private or gated: `hf auth login`."):
            rows = load_dataset(path, split=split, streaming=streaming, **options)
    else:
        rows = chosen(load_splits(path, streaming=streaming), split, path, "split")
    return rows.select_columns(part["columns"]) if part.get("columns") else rows


def _cut_to_shares(parts: list[Any], fractions: list[float | None], *, streaming: bool) -> list[Any]:
    """The first rows of each part, so that none is repeated and the shares come out (as in TRL 1.16)."""
    if streaming:
        raise DataError(
            "`fraction` needs to know how many rows there are.",
            code="C030",
            fix="Leave out `streaming`.",
            settings=("fraction",),
            setting="fraction",
        )
    if any(fraction is None for fraction in fractions):
        raise DataError(
            "`fraction` is given for some parts of `datasets` and not for others.",
            code="C030",
            fix="Give it for all or none.",
            settings=("datasets",),
        )
    given = [float(fraction or 0) for fraction in fractions]
    shares = [fraction / sum(given) for fraction in given]
    total = min(len(part) / share for part, share in zip(parts, shares, strict=True) if share > 0)
    return [part.select(range(round(share * total))) for part, share in zip(parts, shares, strict=True)]
