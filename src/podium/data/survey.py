"""One pass over a dataset: problems of its rows, and counts for the rules about the whole.

survey = survey_rows(RowSurvey(source=file_source(Path("train.jsonl")), builder=builder))
"""

from __future__ import annotations

import copy
import heapq
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from podium.data.columns import GOLD
from podium.data.files import columns_and_form, file_rows
from podium.data.prompts import PromptBuilder, most_tokens, no_tokens, schema_of
from podium.data.row import UNWRITTEN, check_row, text_of
from podium.data.selection import plain
from podium.data.special_tokens import are_tags, special_tokens
from podium.errors import DataError, Finding
from podium.errors.texts import listed

logger = logging.getLogger(__name__)

MAX_SHOWN = 20  # bad rows of one kind that are written out; the rest is counted
SHOWN_ROWS = 5
MEASURED_ROWS = 1_000  # prompts whose tokens are counted, evenly over the whole dataset: a tenth of a millisecond each
SUSPECTS = 10_000  # most prompts measured besides because they may be too long
LONGEST = 64  # texts measured besides because no other has more bytes: one of them is the longest prompt
STREAM_ROWS = 10_000  # rows of a stream without an end that are looked at
EXAMPLES = 64  # usable rows that are kept, for trying the rewards on; large ones only among the first four
LARGE_EXAMPLE = 20_000  # characters of the prompt of such a row, about
SHORT_ANSWER = 100  # characters of an answer that another one contradicts; of longer texts several may be right
RENDERED = 20  # conversations with tools that are rendered, to see what the template leaves out
LARGE_ROW = 1_000_000  # characters of a prompt that is reported for its size
COUNTED_BYTES = 64 << 20  # bytes of a file whose lines are counted; the number of lines of a larger one is extrapolated
_BATCH = 512
_TEMPLATE = 512  # tokens that a chat template may add
_OF_TOOLS = ("tool", "function", "ipython")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRows:
    """A dataset in which no error was found, and which of its prompts are too long."""

    rows: Any
    settings: tuple[object, ...] = ()  # `PromptBuilder.settings` of the builder that rendered and measured the prompts
    too_long: tuple[int, ...] | None = ()  # rows that are to be dropped; None: not known

    def fits(self, builder: PromptBuilder) -> bool:
        """Whether `builder` would find the same."""
        return self.settings == builder.settings and (self.too_long is not None or builder.overlong != "drop")

    def without_too_long(self, builder: PromptBuilder) -> Any:
        """The rows without those whose prompts the builder leaves out."""
        if builder.overlong != "drop" or self.rows is None:
            return self.rows
        if is_stream(self.rows):
            return self.rows.filter(lambda row: builder(row, id=0, row_index=-1) is not None)
        if not self.too_long:
            return self.rows
        what = "%d of %d rows are dropped: their prompts are too long (%s)."
        logger.warning(what, len(self.too_long), len(self.rows), builder.limit_text)
        dropped = set(self.too_long)
        fits = [index for index in range(len(self.rows)) if index not in dropped]
        return self.rows.select(fits) if hasattr(self.rows, "select") else [self.rows[index] for index in fits]


@dataclass(slots=True)
class RowCount:
    """Number of rows, and the first of them."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, row: int) -> None:
        self.count += 1
        if len(self.first) < SHOWN_ROWS:
            self.first.append(row)

    def __str__(self) -> str:
        rows = listed([*self.first, "..."] if self.count > len(self.first) else self.first)
        return f"rows {rows}" if self.count > 1 else f"row {rows}"


@dataclass(slots=True)
class Column:
    """Counts of one column's values."""

    kinds: Counter[str] = field(default_factory=Counter)
    nulls: RowCount = field(default_factory=RowCount)
    absent: RowCount = field(default_factory=RowCount)  # values by which an answer is marked as missing, as `N/A`
    marks: set[str] = field(default_factory=set)  # these values, as code
    long: RowCount = field(default_factory=RowCount)  # answers that are longer than a completion may be
    longest: tuple[int, int] = (0, -1)  # tokens of the longest answer that was measured, and its row
    first: Any = None  # the first value that is not null
    differ: bool = False  # whether a later one is another


_MARKS = frozenset(("", "#n/a", "<na>", "n/a", "na", "nan", "-nan", "none", "null"))
"""Texts that stand for a value that is missing, as pandas reads and writes them, in lower case."""


def is_absent(value: Any) -> bool:
    """Whether an answer is marked as missing: as text, as NaN, or by a list of nothing else.

    >>> [is_absent(value) for value in (" ", "N/A", float("nan"), [], ["", None], "0", 0, "nothing")]
    [True, True, True, True, True, False, False, False]
    """
    if isinstance(value, (list, tuple)):
        return all(each is None or is_absent(each) for each in value)
    if isinstance(value, str):
        return value.strip().lower() in _MARKS
    return isinstance(value, float) and math.isnan(value)


CAPACITY = 100_000  # most values kept: about 20 MB


@dataclass(slots=True)
class _Seen:
    row: int
    answer: str | None
    count: int = 1


@dataclass(slots=True)
class DistinctSample:
    """Counts of repeated values, in constant memory and one pass.

    Distinct sampling (P. B. Gibbons, "Distinct Sampling for Highly-Accurate Answers to Distinct Values Queries", VLDB
    2001): values are kept by their hash alone, and where there are too many, only those whose hash ends in enough zero
    bits. Every kept value is counted over the whole stream, so shares of the sample are shares of all values. Up to
    `capacity` different values nothing is left out and the numbers are exact.

    >>> sample = DistinctSample()
    >>> for number, text in enumerate(["a", "b", "a", "a"]):
    ...     sample.add(text, number)
    >>> sample.num_repeats, sample.num_repeated, sample.first_repeat, sample.exact
    (2, 1, (2, 0), True)
    """

    capacity: int = CAPACITY
    level: int = 0  # zero bits that a hash must end in
    seen: dict[int, _Seen] = field(default_factory=dict)
    first_repeat: tuple[int, int] | None = None  # the first row that repeats another that was kept, and that other
    num_contradicting: int = 0  # rows with another answer than the first row of the same value
    first_contradiction: tuple[int, str, int, str] | None = None
    """Row and answer, of the first such row and of the one before it."""

    def add(self, value: Hashable, row: int, answer: str | None = None) -> None:
        """Count one row's value, and compare its answer; None: not known."""
        key = hash(value)
        if key & ((1 << self.level) - 1):
            return
        if (known := self.seen.get(key)) is not None:
            known.count += 1
            self.first_repeat = self.first_repeat or (row, known.row)
            if answer is not None and known.answer is not None and not _agree(answer, known.answer):
                self.num_contradicting += 1
                self.first_contradiction = self.first_contradiction or (row, answer, known.row, known.answer)
            return
        self.seen[key] = _Seen(row, answer)
        while len(self.seen) > self.capacity:
            self.level += 1
            self.seen = {key: each for key, each in self.seen.items() if not key & ((1 << self.level) - 1)}

    def __contains__(self, value: Hashable) -> bool:
        return hash(value) in self.seen

    @property
    def exact(self) -> bool:
        return self.level == 0

    @property
    def num_repeats(self) -> int:
        """Rows that could go without losing a value; an estimate unless `exact`."""
        return sum(each.count - 1 for each in self.seen.values()) << self.level

    @property
    def num_repeated(self) -> int:
        """Values that occur more than once; an estimate unless `exact`."""
        return sum(each.count > 1 for each in self.seen.values()) << self.level


def _agree(one: str, other: str) -> bool:
    try:
        return one == other or float(one.replace(",", "")) == float(other.replace(",", ""))
    except ValueError:
        return False


@dataclass(slots=True, kw_only=True)
class RowSurvey:
    """Counts of one pass over a dataset."""

    source: RowSource
    builder: PromptBuilder | None = None  # renders and measures the prompts; None: neither is done
    tokenizer: Any = None  # for its chat template, where there is no builder
    thorough: bool = True  # whether columns, repeats and odd texts are counted too, and lengths sampled
    exact: bool = False  # whether every conversation is rendered, as before training
    held_out: DistinctSample | None = None  # prompts of the held-out rows, to find those that are in both
    made: bool = False  # whether environments write the prompts of rows that have none, or one without text

    findings: list[Finding] = field(default_factory=list)
    """Problems of single rows in their order; of a thorough survey the first `MAX_SHOWN` of each code."""
    num_bad: Counter[str] = field(default_factory=Counter)  # rows by the code of their problem
    num_rows: int = 0
    chat_rows: RowCount = field(default_factory=RowCount)
    plain_rows: RowCount = field(default_factory=RowCount)
    continued: RowCount = field(default_factory=RowCount)  # conversations that end with the assistant's turn
    long_rows: RowCount = field(default_factory=RowCount)  # prompts over the limit
    too_long: list[int] = field(default_factory=list)
    """All of them, counted from 0 without the rows that are left out; where they are to be dropped."""
    longest: tuple[int, int] = (0, -1)  # tokens of the longest prompt that was measured, and its row
    columns: dict[str, Column] = field(default_factory=dict)
    prompts: DistinctSample = field(default_factory=DistinctSample)
    shared: RowCount = field(default_factory=RowCount)  # rows whose prompts are held out too
    lengths: list[int] = field(default_factory=list)  # tokens of the evenly spread prompts
    late_system: RowCount = field(default_factory=RowCount)  # conversations with a system message that is not the first
    nothing_asked: RowCount = field(default_factory=RowCount)  # conversations of system messages alone
    left_out: RowCount = field(default_factory=RowCount)  # conversations of which the template leaves something out
    first_left_out: str = ""
    control: RowCount = field(default_factory=RowCount)  # prompts with control tokens in a text
    first_control: str = ""
    written_out: RowCount = field(default_factory=RowCount)  # begin with a control token: a template was applied before
    first_written_out: str = ""  # that token
    nul: RowCount = field(default_factory=RowCount)
    large: RowCount = field(default_factory=RowCount)
    num_suspects: int = 0  # prompts measured because they may be too long
    largest: list[tuple[int, int, int, Any, str | None]] = field(default_factory=list)
    """A heap of the largest prompts that nothing else asks to measure: most tokens, row, position, prompt, and the
    prompt rendered, unless it is not yet."""
    examples: list[dict[str, Any]] = field(default_factory=list)
    chat_template: str | None = None  # the builder's or the tokenizer's
    _control_tokens: re.Pattern[str] | None = None
    _num_rendered: int = 0
    _template_size: int = _TEMPLATE  # tokens that the chat template may add, with the schemas of tools
    _pending: list[tuple[int, int, str, bool, bool]] = field(default_factory=list)
    """Prompts to measure: row, position, text, whether it is plain, whether it is one of the spread ones."""

    def __post_init__(self) -> None:
        if self.builder is not None:
            self.chat_template = self.builder.chat_template
            self.tokenizer = self.builder.tokenizer
            self._control_tokens = _control_tokens(self.tokenizer)
            self._template_size += sum(most_tokens(str(schema_of(tool))) for tool in self.builder.tools)
        elif (template := getattr(self.tokenizer, "chat_template", None)) is not None:
            self.chat_template = str(template)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def lacks_template(self) -> bool:
        """Whether the tokenizer is known to have no chat template."""
        return self.tokenizer is not None and self.chat_template is None

    @property
    def stride(self) -> int:
        """Sampling interval: every n-th prompt is measured."""
        return max(1, -(-(self.source.about or 0) // MEASURED_ROWS))

    def add(self, index: int, line: Line, row: Any) -> None:
        """Count one row."""
        self.num_rows += 1
        problem = row if isinstance(row, Finding) else check_row(row, index, chat_template=self.chat_template)
        prompt = row.get("prompt") if isinstance(row, Mapping) else None
        if isinstance(prompt, str):
            self.plain_rows.add(index)
        elif isinstance(prompt, (list, tuple)):
            self.chat_rows.add(index)
        if self.thorough and isinstance(row, Mapping):
            self._count_columns(index, row)
        if problem is None:
            self._add_good(index, row)
        elif self.made and problem.code in UNWRITTEN:
            if len(self.examples) < EXAMPLES:
                self.examples.append(dict(row))
        else:
            self._note(problem, index, line)

    def _note(self, finding: Finding, index: int, line: Line = None) -> None:
        self.num_bad[finding.code] += 1
        if not self.thorough:
            self.findings.append(finding)
        elif self.num_bad[finding.code] <= MAX_SHOWN:
            self.findings.append(replace(finding, what=_placed(finding.what, self.name, index, line)))

    def _count_columns(self, index: int, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if (column := self.columns.get(key)) is None:  # rows before this one did not have it
                before = self.num_rows - 1
                column = self.columns[key] = Column(nulls=RowCount(before, list(range(min(before, SHOWN_ROWS)))))
            if value is None:
                column.nulls.add(index)
            else:
                column.kinds[type(value).__name__] += 1
                if is_absent(value):
                    column.absent.add(index)
                    column.marks.add(repr(value))
                column.first = value if column.first is None else column.first
                column.differ = column.differ or not isinstance(value, (str, int, float)) or value != column.first

    def _add_good(self, index: int, row: Mapping[str, Any]) -> None:
        prompt = row["prompt"]
        texts = [prompt] if isinstance(prompt, str) else [text_of(message) for message in prompt]
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            self.continued.add(index)
        size = sum(map(most_tokens, texts))
        is_measured = self.builder is not None and (self.chat_template is not None or isinstance(prompt, str))
        rendered = self._rendered(index, prompt) if is_measured and self.exact else None
        if self.thorough:
            self._count_texts(index, row, texts, size, rendered)
            self._measure_answers(index, row)
        if is_measured and not (self.exact and rendered is None):
            self._queue(index, prompt, size, rendered)

    def _count_texts(
        self, index: int, row: Mapping[str, Any], texts: Sequence[str], size: int, rendered: str | None
    ) -> None:
        prompt = row["prompt"]
        text = "\n".join(texts)
        key = plain(text)
        self.prompts.add(key, index, _short_answer(row))
        if self.held_out is not None and key in self.held_out:
            self.shared.add(index)
        if "\x00" in text:
            self.nul.add(index)
        if size > LARGE_ROW:
            self.large.add(index)
        if not isinstance(prompt, str):
            self._count_turns(index, prompt, rendered)
        if self._control_tokens and (found := self._control_tokens.search(text)):
            begins = isinstance(prompt, str) and prompt.lstrip().startswith(found[0])
            if begins:
                self.first_written_out = self.first_written_out or found[0]
                self.written_out.add(index)
            else:
                self.first_control = self.first_control or found[0]
                self.control.add(index)
        if len(self.examples) < (EXAMPLES if size < LARGE_EXAMPLE else 4):
            self.examples.append(dict(row))

    def _count_turns(self, index: int, messages: Sequence[Any], rendered: str | None) -> None:
        if any(message["role"] == "system" for message in messages[1:]):
            self.late_system.add(index)
        if all(message["role"] in ("system", "developer") for message in messages):
            self.nothing_asked.add(index)
        tools = any(message.get("tool_calls") or message["role"] in _OF_TOOLS for message in messages)
        if not tools or self.builder is None or self._num_rendered == RENDERED:
            return
        self._num_rendered += 1
        text = rendered or self.builder.rendered(messages, index)
        if not isinstance(text, Finding) and (gone := _left_out(messages, text)):
            self.first_left_out = self.first_left_out or gone
            self.left_out.add(index)

    def _queue(self, index: int, prompt: Any, size: int, rendered: str | None) -> None:
        """Have a prompt measured if it is one of the sample or may be too long; else keep it if it is large.

        `size`: most tokens of its texts; `rendered`: None where not every prompt is.
        """
        assert self.builder is not None
        spread = self.thorough and index % self.stride == 0
        position = self.num_rows - 1
        may_exceed = self.builder.lacks_rows
        if rendered is not None:
            may_exceed = may_exceed or self.builder.may_exceed(rendered)
        elif self.builder.limit is not None:
            may_exceed = may_exceed or size + self._template_size > self.builder.limit
        suspect = may_exceed and (self._drops or self.num_suspects < SUSPECTS)
        self.num_suspects += suspect and not spread
        if spread or suspect:
            text = self._rendered(index, prompt) if rendered is None else rendered
            if text is not None:
                self._pending.append((index, position, text, isinstance(prompt, str), spread))
            if len(self._pending) >= _BATCH or size > LARGE_ROW:
                self._measure()
        elif self.thorough:
            push = heapq.heappush if len(self.largest) < LONGEST else heapq.heappushpop
            push(self.largest, (size, index, position, prompt, rendered))

    @property
    def _drops(self) -> bool:
        return self.exact and self.builder is not None and self.builder.overlong == "drop"

    def _rendered(self, index: int, prompt: Any) -> str | None:
        assert self.builder is not None
        text = self.builder.rendered(prompt, index)
        if not isinstance(text, Finding):
            return text
        self._note(text, index)
        return None

    def _measure(self) -> None:
        if self.builder is None or not self._pending:
            return
        waiting = self._pending
        self._pending = []
        tokenized = self.builder.tokenized([(text, is_plain) for _, _, text, is_plain, _ in waiting])
        limit = self.builder.limit
        for (index, position, _, _, spread), token_ids in zip(waiting, tokenized, strict=True):
            count = len(token_ids)
            if not count:
                self._note(no_tokens(index), index)
                continue
            is_dropped = self._drops and limit is not None and count > limit
            if self.builder.vocabulary is not None and not is_dropped:
                largest = max(token_ids[-(limit or count) :])
                if largest >= self.builder.vocabulary:
                    self._note(self.builder.without_embedding(largest, index), index)
            self.longest = max(self.longest, (count, index))
            if limit is not None and count > limit:
                self.long_rows.add(index)
                if self._drops:
                    self.too_long.append(position)
            if spread:
                self.lengths.append(count)

    def _measure_answers(self, index: int, row: Mapping[str, Any]) -> None:
        """Measure answers of more bytes than the limit in tokens: no others can have more tokens."""
        limit = None if self.builder is None else self.builder.max_completion_length
        for key in GOLD:
            value = row.get(key)
            if self.builder is None or limit is None or not isinstance(value, str) or most_tokens(value) <= limit:
                continue
            column = self.columns[key]
            if column.long.count < SUSPECTS:
                tokens = len(self.builder.tokenizer(value, add_special_tokens=False)["input_ids"])
                column.longest = max(column.longest, (tokens, index))
                if tokens > limit:
                    column.long.add(index)

    def checked(self, rows: Any, *, in_order: bool = True) -> CheckedRows:
        """The surveyed rows as a dataset; `in_order`: whether it has them in the order of the survey."""
        too_long = tuple(sorted(self.too_long)) if in_order else None
        return CheckedRows(rows=rows, settings=self.builder.settings if self.builder else (), too_long=too_long)

    def finish(self) -> None:
        """Measure the prompts that are left, the largest among them; examples from a file get the columns they lack."""
        for _, index, position, prompt, rendered in sorted(self.largest, key=lambda each: each[1]):
            text = self._rendered(index, prompt) if rendered is None else rendered
            if text is not None:
                self._pending.append((index, position, text, isinstance(prompt, str), False))
        self._measure()
        if self.source.dataset is None:  # as in the table that is made of the file
            self.examples = [{name: row.get(name) for name in (*self.columns, *row)} for row in self.examples]


def survey_rows(survey: RowSurvey) -> RowSurvey:
    """Make the pass over the survey's source. Raises `DataError` for rows that cannot be read at all."""
    for index, (line, row) in enumerate(survey.source.rows()):
        if row is not None:
            survey.add(index, line, row)
    survey.finish()
    return survey


def _left_out(messages: Sequence[Any], text: str) -> str:
    """The first tool call, or turn that is not the assistant's, that is not in the rendered text; empty: none."""
    text = " ".join(text.split())
    for number, message in enumerate(messages, start=1):
        calls = (call.get("function") or call for call in message.get("tool_calls") or ())
        names = [name for call in calls if (name := call.get("name"))]
        if missing := next((name for name in names if name not in text), None):
            return f"the call of `{missing}` in message {number}"
        if message["role"] != "assistant" and " ".join(text_of(message).split()) not in text:
            return f"message {number} ({message['role']})"
    return ""


def _control_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """A pattern of the special tokens that a tokenizer recognises in any text, tags such as `<answer>` left out."""
    names = special_tokens(tokenizer)
    tags = are_tags(names, tokenizer)
    names = tuple(name for name in names if name not in tags)
    return re.compile("|".join(map(re.escape, names))) if names else None


def _short_answer(row: Mapping[str, Any]) -> str | None:
    """The answer to compare with that of another row; None: there is none, or a long one."""
    value = next((row[name] for name in GOLD if row.get(name) is not None), None)
    if value is None:
        return None
    text = plain(str(value)).rpartition("####")[2].strip()
    return text if 0 < len(text) <= SHORT_ANSWER else None


def _placed(what: str, name: str, index: int, line: Line) -> str:
    """`row 3: prompt is null` as `train.jsonl:4, row 3: prompt is null`."""
    if what.startswith(name):
        return what  # the reader named the line
    if isinstance(line, str):
        named = what.startswith(line.partition(":")[0].partition(",")[0])
        return what if named else f"{line}: {what.removeprefix(f'row {index}: ')}"
    where = name if line is None else f"{name}:{line}"
    return f"{where}, {what}" if what.startswith("row ") else f"{where}, row {index}: {what}"


def file_source(path: Path, name: str | None = None) -> RowSource:
    """A file of lines, read as it is: no copy is made of it. Raises `DataError` for one that cannot be read."""
    columns, form = columns_and_form(path)
    with path.open("rb") as stream:
        start = stream.read(COUNTED_BYTES)
    about = max(1, path.stat().st_size * max(start.count(b"\n"), 1) // len(start))
    return RowSource(name=name or str(path), rows=lambda: file_rows(path), about=about, columns=columns, form=form)


def list_source(rows: Sequence[Mapping[str, Any]], name: str) -> RowSource:
    """Rows in memory that all have the same columns; every pass yields copies, as a pass over a file does."""
    return RowSource(
        name=name,
        rows=lambda: ((None, copy.deepcopy(row)) for row in rows),
        about=len(rows),
        columns=tuple(rows[0]),
    )


def dataset_source(
    dataset: Any, name: str, *, is_file: bool = False, most: int = STREAM_ROWS, only: Iterable[str] = ()
) -> RowSource | None:
    """A `Dataset`, an `IterableDataset`, or a list of rows; None for an iterator, which can be read only once.

    All of a stream is read if it `is_file`, which ends, of any other the first `most` rows. `only`: the columns that
    are read of a `Dataset`; none: all.
    """
    if is_read_once(dataset):
        return None
    stream = is_stream(dataset)
    columns: Sequence[str] | None = None if is_transformed(dataset) else getattr(dataset, "column_names", None)
    return RowSource(
        name=name,
        rows=lambda: ((None, row) for row in _rows(dataset, None if is_file else most, only)),
        about=None if stream else len(dataset),
        columns=tuple(columns) if columns else None,
        is_stream=stream and not is_file,
        dataset=dataset,
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
        yield from _whole_rows(islice(dataset, most))
    elif keeps_rows(dataset):
        for batch in (dataset.select_columns(list(only)) if only else dataset).iter(batch_size=1000):
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
