"""From a name to rows with prompts: loaded, split by content, shaped by templates, filtered, mixed, ordered.

    train, held_out = podium.data.load("qa.csv", prompt="{question}", answer="{expert_answer}", held_out=0.2)

`podium.data.check` judges the rows, `podium.data.prompts` renders them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from podium.data.columns import Columns, Row, features
from podium.data.conditions import Condition, filtered
from podium.data.files import dataset_of, file_rows, kind_of
from podium.data.mixture import chosen, mixed, trl_mixture
from podium.data.selection import Order, PassRates, Shape, Taking, in_order, read_pass_rates
from podium.data.sources import load_splits
from podium.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One dataset, or one of a mixture."""

    path: Any
    """Built-in or reasoning-gym task, `file.py:function`, file, folder, hub id; or a dataset."""
    weight: float | None = None
    """Its share of the mixture is this over the sum; None for all: all rows of all parts."""
    config: str | None = None
    """Of a hub dataset."""
    split: str = "train"
    columns: Columns = field(default_factory=Columns)

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.path) if isinstance(self.path, (str, Path)) else "the dataset"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Where the rows come from and what becomes of them; the fields are keys of a recipe, TRL's where it has one."""

    dataset: Any = None
    """What `Part.path` may be."""
    parts: tuple[Part, ...] = ()
    """A mixture, instead of `dataset`."""
    eval_dataset: Any = None
    """Held-out rows; None: `held_out`, or the test split of `dataset`, when it has one."""
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    use_test_split: Literal["if there", "needed", "no"] = "if there"
    """What becomes of the test split of `dataset`; an `eval_dataset` of its own is always loaded."""
    dataset_streaming: bool = False
    datasets: tuple[Mapping[str, Any], ...] = ()
    """TRL's mixture, instead of `dataset`: `path, name, data_dir, data_files, split, columns, fraction`."""
    streaming: bool = False
    """Of TRL's mixture."""
    test_split_size: float | None = None
    """Of TRL's mixture: the share (or number) of rows to hold out."""
    columns: Columns = field(default_factory=Columns)
    """Of `dataset`, and of `eval_dataset`."""
    filter: tuple[Condition, ...] = ()
    """Which of the training rows are kept, by their columns as they come; held-out rows stay as they are."""
    held_out: float | None = None
    """Share of the prompts to hold out, by their content."""
    pass_rates: str | None = None
    """A file of measured pass rates."""
    pass_rate: tuple[float, float] | None = None
    """Lowest and highest of them that are trained on."""
    order: Order | None = None
    difficulty: str | None = None
    """The column to order by; None: pass rates."""
    seed: int = 42
    """Of mixtures."""

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """The parts; one, where there is no mixture."""
        alone = Part(
            path=self.dataset, config=self.dataset_config, split=self.dataset_train_split, columns=self.columns
        )
        return self.parts or (alone,)

    @property
    def name(self) -> str:
        """For messages."""
        return "the mixture" if self.parts or self.datasets else self.all_parts[0].name

    @property
    def is_given(self) -> bool:
        """Whether there is anything to load."""
        return self.dataset is not None or bool(self.datasets or self.parts)


class Loaded(NamedTuple):
    """Rows with `prompt`, and the columns for the reward functions."""

    train: Any
    """`Dataset` or `IterableDataset`."""
    held_out: Any = None
    """Likewise; None: nothing is held out."""


def load(
    dataset: Any,
    *,
    prompt: str | None = None,
    answer: str | None = None,
    system: str | None = None,
    examples: Sequence[Mapping[str, Any]] = (),
    answer_from: str | None = None,
    chat: bool = False,
    held_out: float | None = None,
    eval_dataset: Any = None,
    pass_rates: str | Path | None = None,
    pass_rate: tuple[float, float] | None = None,
    order: Order | None = None,
    difficulty: str | None = None,
    seed: int = 42,
    **more: Any,
) -> Loaded:
    """Training rows and held-out rows, as a recipe with the same keys gets them.

    Args:
        dataset: the name of a file (.jsonl, .json, .csv, .parquet, .txt), a folder, a hub id, `builtin:TASK`,
            `reasoning-gym:TASK?size=100`, `file.py:function`; a `datasets.Dataset`; a function that makes rows; or a
            list of mappings with `path` and keys of its own, a mixture.
        prompt: template, `"{question}"`; None: the column `prompt`.
        answer: template; None: the column `answer`.
        system: template of a system message.
        examples: rows that become earlier turns of user and assistant, by the same templates.
        answer_from: where in the answer the final one stands: `after ####`, `last number`, a regular expression.
        chat: a text becomes a conversation of one turn; so it does with `system` or `examples`.
        held_out: share of the prompts to hold out, by the hash of their content.
        eval_dataset: held-out rows of their own, shaped by the same templates.
        pass_rates: a file that `podium check --rollouts N --save FILE` wrote.
        pass_rate: lowest and highest pass rate to train on; None: all but never and always.
        order: `easy_first` or `hard_first`; train with `shuffle_dataset=False` then.
        difficulty: the column to order by, higher is harder; None: the pass rates.
        seed: of mixtures.
        more: other fields of `DataSpec`: `dataset_config`, `dataset_train_split`, `dataset_streaming`, ...

    Raises:
        DataError: nothing there, not readable, or columns that are not there.
    """
    columns = Columns(
        prompt=prompt, answer=answer, system=system, examples=tuple(examples), answer_from=answer_from, chat=chat
    )
    for error in columns.check().values():
        raise error
    spec = DataSpec(
        **{"parts": read_parts(dataset, columns)} if isinstance(dataset, (list, tuple)) else {"dataset": dataset},
        columns=columns,
        eval_dataset=eval_dataset,
        held_out=held_out,
        pass_rates=None if pass_rates is None else str(pass_rates),
        pass_rate=pass_rate,
        order=order,
        difficulty=difficulty,
        seed=seed,
        **more,
    )
    for error in contradictions(spec).values():
        raise error
    return load_data(spec)


def load_data(spec: DataSpec) -> Loaded:
    """The training rows and, when there are some, the held-out rows.

    Raises:
        DataError: nothing there, or not readable; files are named with line and column.
    """
    rates = pass_rates_of(spec)
    splits = [(part, part_splits(spec, part)) for part in spec.all_parts]
    raw = [(part, kept_rows(spec, part, each)) for part, each in splits]
    train = _joined(spec, [(part, _taken(rows, train_shape(spec, part, rates), part.name)) for part, rows in raw])
    if spec.order is not None:
        _check_order(train)
        train = in_order(train, spec.order, name=spec.name, difficulty=spec.difficulty, rates=rates)
    return Loaded(train, _held_out(spec, splits))


def eval_rows(spec: DataSpec, *, streaming: bool = False) -> Any:
    """The rows of `eval_dataset`, which must be given, as they are. Raises `DataError`."""
    splits = load_splits(spec.eval_dataset, streaming=streaming or spec.dataset_streaming)
    if len(splits) == 1:
        return next(iter(splits.values()))
    return chosen(splits, spec.dataset_test_split, Part(path=spec.eval_dataset).name, "dataset_test_split")


def shaped(rows: Any, columns: Columns, name: str) -> Any:
    """All the rows, with their prompts and answers. Raises `DataError` for columns that are not there."""
    return _taken(rows, Shape(columns=columns), name)


def part_splits(spec: DataSpec, part: Part, *, streaming: bool = False) -> Mapping[str, Any]:
    """The splits of one part as they are. Raises `DataError`."""
    if spec.datasets:
        return trl_mixture(
            spec.datasets, streaming=spec.streaming, test_split_size=spec.test_split_size, seed=spec.seed
        )
    if part.path is None:
        raise DataError(
            "No dataset.", code="C031", fix="dataset: builtin:additions, a file (.jsonl, .csv, ...) or a hub id"
        )
    return load_splits(part.path, config=part.config, streaming=streaming or spec.dataset_streaming)


def first_rows(spec: DataSpec, part: Part, count: int) -> list[Row]:
    """The first rows of a part's training split as they are, without reading the rest where that can be."""
    if is_lines(part.path):
        rows: Iterator[Any] = (row for _, row in file_rows(Path(part.path).expanduser()))
        return [dict(row) for row in itertools.islice(rows, count) if isinstance(row, Mapping)]
    splits = part_splits(spec, part, streaming=True)
    return list(itertools.islice(train_rows(spec, part, splits), count))


def is_lines(path: Any) -> bool:
    """Whether a dataset is a file that is read line by line."""
    if not isinstance(path, (str, Path)):
        return False
    file = Path(path).expanduser()
    return kind_of(file) not in (None, ".parquet") and file.is_file()


def pass_rates_of(spec: DataSpec) -> PassRates | None:
    """The measured pass rates, where there is a file of them. Raises `DataError`."""
    return None if spec.pass_rates is None else read_pass_rates(spec.pass_rates, spec.pass_rate)


def train_shape(spec: DataSpec, part: Part, rates: PassRates | None) -> Shape:
    """What becomes of a row of the training split."""
    return Shape(columns=part.columns, held_out=spec.held_out, rates=rates)


def held_out_shape(spec: DataSpec, part: Part) -> Shape:
    """What becomes of a row on the held-out side."""
    return Shape(columns=part.columns, held_out=spec.held_out, wants_held_out=spec.held_out is not None)


def train_rows(spec: DataSpec, part: Part, splits: Mapping[str, Any]) -> Any:
    """The training split of a part as it is. Raises `DataError`."""
    return chosen(splits, part.split, part.name, "split" if spec.parts else "dataset_train_split")


def kept_rows(spec: DataSpec, part: Part, splits: Mapping[str, Any]) -> Any:
    """Likewise, those that `filter` keeps."""
    return filtered(train_rows(spec, part, splits), spec.filter)


def _held_out(spec: DataSpec, splits: Sequence[tuple[Part, Mapping[str, Any]]]) -> Any | None:
    if spec.eval_dataset is not None:
        return _taken(eval_rows(spec), Shape(columns=spec.columns), Part(path=spec.eval_dataset).name)
    rows = [(part, held_out_rows(spec, part, each)) for part, each in splits]
    there = [(part, each) for part, each in rows if each is not None]
    shaped = [(part, _taken(each, held_out_shape(spec, part), part.name)) for part, each in there]
    return _joined(spec, shaped) if shaped else None


def held_out_rows(spec: DataSpec, part: Part, splits: Mapping[str, Any]) -> Any | None:
    """The split that the held-out rows of a part come from; None: there is none."""
    if spec.held_out is not None:
        return train_rows(spec, part, splits)
    if spec.use_test_split == "needed":
        return chosen(splits, spec.dataset_test_split, part.name, "dataset_test_split")
    return splits.get(spec.dataset_test_split) if spec.use_test_split == "if there" else None


def _joined(spec: DataSpec, parts: Sequence[tuple[Part, Any]]) -> Any:
    """The parts' rows as one dataset; parts that have one path are told apart by a number."""
    named: dict[str, Any] = {}
    for part, rows in parts:
        number = sum(part.name == name.partition(" #")[0] for name in named)
        named[f"{part.name} #{number + 1}" if number else part.name] = rows
    return mixed(named, [part.weight for part, _ in parts], seed=spec.seed)


def _taken(rows: Any, shape: Shape, name: str) -> Any:
    """The rows that a shape takes, shaped. Says how many went for their pass rates."""
    names = rows.column_names or list(next(iter(rows), ()))  # a stream may not know them
    if names:
        shape.columns.check_names(names, name)
    take = Taking(shape)
    if not hasattr(rows, "__len__"):
        kept = rows.filter(lambda row: take(row) is not None) if shape.selects else rows
        return _mapped(kept, shape.columns)
    if shape.selects:
        rows = rows.select([index for index, row in enumerate(rows) if take(row) is not None])
    for finding in take.findings(name):
        if finding.severity == "error":
            raise DataError(f"{finding.what}.", code=finding.code, fix=finding.fix, findings=[finding])
        logger.info("%s", finding.what)
    return _mapped(rows, shape.columns)


def _mapped(rows: Any, columns: Columns) -> Any:
    from datasets import Json

    if not columns.changes:
        return rows
    made = features(columns, rows.features)
    gone = [name for name in columns.taken if name in (rows.column_names or columns.taken)]
    if not hasattr(rows, "__len__"):
        return rows.map(columns, features=made, remove_columns=gone)
    if any(isinstance(kind, Json) for kind in rows.features.values()):
        return dataset_of([columns(row) for row in rows])  # `map` would take a text "7" for the number
    # not from the cache, whose key does not know this code's version
    return rows.map(columns, features=made, remove_columns=gone, load_from_cache_file=False)


# ---- what a spec may not say ----


def contradictions(spec: DataSpec) -> dict[str, DataError]:
    """By key, what cannot be meant."""
    return {key: DataError(what, code="C030", fix=fix) for key, holds, what, fix in _CONTRADICTIONS if holds(spec)}


def _weighs_some(spec: DataSpec) -> bool:
    weighted = [part.weight is not None for part in spec.parts]
    return any(weighted) and not all(weighted)


_CONTRADICTIONS: tuple[tuple[str, Callable[[DataSpec], bool], str, str], ...] = (
    (
        "held_out",
        lambda spec: spec.held_out is not None and spec.eval_dataset is not None,
        "`held_out` and `eval_dataset` both say what is held out.",
        "Leave one of them out.",
    ),
    (
        "pass_rate",
        lambda spec: spec.pass_rate is not None and spec.pass_rates is None,
        "`pass_rate` needs measured rates.",
        "Set `pass_rates: FILE`, which `podium check --rollouts N --save FILE` writes.",
    ),
    (
        "difficulty",
        lambda spec: spec.order is None and spec.difficulty is not None,
        "`difficulty` does nothing without an order.",
        "Set `order: easy_first` or `order: hard_first`.",
    ),
    (
        "order",
        lambda spec: spec.order is not None and spec.difficulty is None and spec.pass_rates is None,
        "`order` needs to know what is hard.",
        "Set `difficulty: COLUMN`, numbers, or measured `pass_rates: FILE`.",
    ),
    (
        "order",
        lambda spec: spec.order is not None and (spec.dataset_streaming or spec.streaming),
        "`order` needs all rows at once.",
        "Leave out `dataset_streaming`.",
    ),
    (
        "dataset",
        _weighs_some,
        "`weight` is given for some parts of `dataset` and not for others.",
        "Give it for all or none.",
    ),
)
"""(key, whether it holds, what is wrong, what to type); of one key the last that holds is said."""


def _check_order(train: Any) -> None:
    if not hasattr(train, "__len__"):
        what = "`order` needs all rows at once, and this is a stream."
        raise DataError(what, code="C030", fix="Leave out `dataset_streaming`.")


PART_KEYS = ("path", "weight", "split", "config", "prompt", "answer", "system", "examples", "answer_from", "chat")
_COLUMN_KEYS = PART_KEYS[4:]


def read_parts(entries: Sequence[Any], columns: Columns) -> tuple[Part, ...]:
    """The parts of a mixture from mappings (or names alone); what one leaves out is as in `columns`.

    Raises:
        DataError: an entry that is none.
    """
    return tuple(_part(entry, columns) for entry in entries)


def _part(entry: Any, columns: Columns) -> Part:
    if not isinstance(entry, Mapping):
        return Part(path=entry, columns=columns)
    unknown = [key for key in entry if key not in PART_KEYS]
    if unknown or "path" not in entry:
        raise DataError(
            f"A part of a mixture has {', '.join(PART_KEYS)}, `path` in any case; got {', '.join(map(str, entry))}.",
            code="C003",
            fix="Rows in a list: `datasets.Dataset.from_list(rows)`.",
        )
    own = {key: entry[key] for key in _COLUMN_KEYS if key in entry}
    if "examples" in own:
        own["examples"] = tuple(own["examples"] or ())
    rest = {key: entry[key] for key in ("path", "weight", "config", "split") if entry.get(key) is not None}
    return Part(**rest, columns=replace(columns, **own))
