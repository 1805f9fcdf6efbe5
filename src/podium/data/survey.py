"""One pass over a dataset: problems of its rows, counts for the rules about the whole, and how long its prompts are.

    survey = survey_rows(RowSurvey(source=file_source(Path("train.jsonl")), builder=builder))
    check_dataset(dataset, "train_dataset", num_needed=8, builder=builder)

`podium check` surveys thoroughly and measures a sample; a trainer (`check_dataset`) renders and measures every prompt
and raises all that is wrong at once. Rows are counted from 0, as in `dataset[8]`.
"""

from __future__ import annotations

import heapq
import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from podium.data.columns import GOLD, RESERVED, SERVICES, as_flags, likely, names_or_none
from podium.data.images import COLUMNS, OPENED_ROWS, has_images, image_blocks, image_values
from podium.data.prompts import (
    UNWRITTEN,
    PromptBuilder,
    check_row,
    most_tokens,
    no_template,
    no_tokens,
    problems_text,
    rename,
    row_problem,
    schema_of,
    special_tokens,
    text_of,
)
from podium.data.selection import plain
from podium.data.sources import Line, RowSource, dataset_source, is_read_once, is_stream, is_transformed
from podium.data.templates import parse
from podium.errors import DataError, Finding
from podium.errors.texts import counted, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAX_SHOWN = 20  # bad rows of one kind that are written out; the rest is counted
OF_IMAGES = ("D062", "D063")  # codes of problems that are counted by their fix
SHOWN_ROWS = 5
MEASURED_ROWS = 1_000  # prompts whose tokens are counted, evenly over the whole dataset: a tenth of a millisecond each
SUSPECTS = 10_000  # most prompts measured besides because they may be too long
LONGEST = 64  # texts measured besides because no other has more bytes: one of them is the longest prompt
TRAINER_ROWS = (
    100  # rows of a stream that a trainer checks before it starts; the others are checked when they are drawn
)
EXAMPLES = 64  # usable rows that are kept, for trying the rewards on; large ones only among the first four
LARGE_EXAMPLE = 20_000  # characters of the prompt of such a row, about
SHORT_ANSWER = 100  # characters of an answer that another one contradicts; of longer texts several may be right
RENDERED = 20  # conversations with tools that are rendered, to see what the template leaves out
LARGE_ROW = 1_000_000  # characters of a prompt that is reported for its size
CAPACITY = 100_000  # most values that a `DistinctSample` keeps: about 20 MB
_BATCH = 512
_TEMPLATE = 512  # tokens that a chat template may add
_OF_TOOLS = ("tool", "function", "ipython")

Trait = Literal[
    "chat",  # the prompt is a conversation
    "plain",  # the prompt is a text
    "continued",  # a conversation that ends with the assistant's turn
    "late_system",  # a conversation with a system message that is not the first
    "nothing_asked",  # a conversation of system messages alone
    "left_out",  # a conversation of which the chat template leaves something out
    "control",  # a prompt with control tokens in a text
    "written_out",  # a prompt that begins with a control token: a template was applied before
    "nul",  # a prompt with a NUL character
    "large",  # a prompt of over `LARGE_ROW` characters
    "long",  # a prompt over the limit
    "shared",  # a prompt that is held out too
    "images",  # a prompt with images
    "spelled",  # a prompt without images whose text has the token that stands for one
]
"""A property of a row that is counted."""


# ---- counts ----


@dataclass(slots=True)
class RowCount:
    """Number of rows, and the first of them."""

    count: int = 0
    first: list[int] = field(default_factory=list)
    example: str = ""
    """Text of the first that has one, for a message."""

    def add(self, row: int, example: str = "") -> None:
        self.count += 1
        self.example = self.example or example
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

    def add(self, value: Any, row: int) -> None:
        """Count the value of one row."""
        if value is None:
            self.nulls.add(row)
            return
        self.kinds[type(value).__name__] += 1
        if is_absent(value):
            self.absent.add(row)
            self.marks.add(repr(value))
        self.first = value if self.first is None else self.first
        self.differ = self.differ or not isinstance(value, (str, int, float)) or value != self.first


_MARKS = frozenset(("", "#n/a", "<na>", "n/a", "na", "nan", "-nan", "none", "null"))
"""Texts that stand for a value that is missing, as pandas reads and writes them, in lower case."""


def is_absent(value: Any) -> bool:
    """Whether an answer is marked as missing: as text, as NaN, or by a list of nothing else.

    >>> [is_absent(value) for value in (" ", "N/A", float("nan"), [], ["", None], "0", 0, "nothing")]
    [True, True, True, True, True, False, False, False]
    """
    if isinstance(value, (list, tuple)):
        return all(entry is None or is_absent(entry) for entry in value)
    if isinstance(value, str):
        return value.strip().lower() in _MARKS
    return isinstance(value, float) and math.isnan(value)


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
            self.seen = {key: value for key, value in self.seen.items() if not key & ((1 << self.level) - 1)}

    def __contains__(self, value: Hashable) -> bool:
        return hash(value) in self.seen

    @property
    def exact(self) -> bool:
        return self.level == 0

    @property
    def num_repeats(self) -> int:
        """Rows that could go without losing a value; an estimate unless `exact`."""
        return sum(value.count - 1 for value in self.seen.values()) << self.level

    @property
    def num_repeated(self) -> int:
        """Values that occur more than once; an estimate unless `exact`."""
        return sum(value.count > 1 for value in self.seen.values()) << self.level


def _agree(one: str, other: str) -> bool:
    try:
        return one == other or float(one.replace(",", "")) == float(other.replace(",", ""))
    except ValueError:
        return False


# ---- the pass ----


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A prompt whose tokens are to be counted."""

    row: int
    position: int  # among the rows that are not left out
    prompt: Any = None
    text: str | None = None  # the prompt rendered; None: not yet
    is_spread: bool = False  # whether it is one of the evenly spread ones
    images: bool = False  # whether it has some


@dataclass(slots=True, kw_only=True)
class RowSurvey:
    """Counts of one pass over a dataset."""

    source: RowSource
    builder: PromptBuilder | None = None  # renders and measures the prompts; None: neither is done
    tokenizer: Any = None  # for its chat template, where there is no builder
    thorough: bool = True  # whether columns, repeats and odd texts are counted too, and lengths sampled
    exact: bool = False  # whether every conversation is rendered, as before training
    held_out: DistinctSample | None = None  # prompts of the held-out rows, to find those that are in both
    may_lack_prompt: bool = False  # whether environments write the prompts of rows that have none, or one without text
    most_opened: int | None = None  # rows whose images are opened, if all need not be measured; None: all

    findings: list[Finding] = field(default_factory=list)
    """Problems of single rows in their order; of a thorough survey the first `MAX_SHOWN` that are alike."""
    num_bad: Counter[str] = field(default_factory=Counter)  # rows by the code of their problem
    num_of_images: Counter[str] = field(default_factory=Counter)  # problems with images by their fix
    num_rows: int = 0
    counts: dict[Trait, RowCount] = field(default_factory=lambda: defaultdict(RowCount))
    columns: dict[str, Column] = field(default_factory=dict)
    prompts: DistinctSample = field(default_factory=DistinctSample)
    examples: list[dict[str, Any]] = field(default_factory=list)
    too_long: list[int] = field(default_factory=list)
    """All of them, counted from 0 without the rows that are left out; where they are to be dropped."""
    longest: tuple[int, int] = (0, -1)  # tokens of the longest prompt that was measured, and its row
    lengths: list[int] = field(default_factory=list)  # tokens of the evenly spread prompts
    num_suspects: int = 0  # prompts measured because they may be too long
    largest: list[tuple[int, int, _Measured]] = field(default_factory=list)
    """A heap of the largest prompts that nothing else asks to measure: most tokens, row, prompt."""
    chat_template: str | None = None  # the builder's or the tokenizer's
    image_tokens: list[int] = field(default_factory=list)  # of each image that was opened
    most_pixels: int = 0  # numbers that describe the images of one prompt, of those that were opened
    _reads_images: bool = True  # whether the model has a processor, as far as is known
    _control_tokens: re.Pattern[str] | None = None
    _num_rendered: int = 0
    _template_size: int = _TEMPLATE  # tokens that the chat template may add, with the schemas of tools
    _pending: list[_Measured] = field(default_factory=list)

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
    def stride(self) -> int:
        """Sampling interval: every n-th prompt is measured."""
        return max(1, -(-(self.source.about or 0) // MEASURED_ROWS))

    def add(self, index: int, line: Line, row: Any) -> None:
        """Count one row; a Finding in its place is one that could not be read."""
        self.num_rows += 1
        problem = row if isinstance(row, Finding) else check_row(row, index, chat_template=self.chat_template)
        prompt = row.get("prompt") if isinstance(row, Mapping) else None
        if isinstance(prompt, (str, list, tuple)):
            self.counts["plain" if isinstance(prompt, str) else "chat"].add(index)
        if self.thorough and isinstance(row, Mapping):
            self._count_columns(index, row)
        if problem is None:
            self._add_good(index, line, row)
        elif self.may_lack_prompt and problem.code in UNWRITTEN:
            if len(self.examples) < EXAMPLES:
                self.examples.append(dict(row))
        else:
            self._note(problem, index, line)

    def _note(self, finding: Finding, index: int, line: Line = None) -> None:
        self.num_bad[finding.code] += 1
        alike = self.num_bad[finding.code]
        if finding.code in OF_IMAGES:
            self.num_of_images[finding.fix] += 1
            alike = self.num_of_images[finding.fix]
        if not self.thorough:
            self.findings.append(finding)
        elif alike <= MAX_SHOWN:
            placed = _placed(finding.what, self.name, index, line)
            self.findings.append(replace(finding, what=placed, facts={**finding.facts, "problem": finding.what}))

    def _count_columns(self, index: int, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if key not in self.columns:
                before = self.num_rows - 1  # rows that did not have it
                self.columns[key] = Column(nulls=RowCount(before, list(range(min(before, SHOWN_ROWS)))))
            self.columns[key].add(value, index)

    def _add_good(self, index: int, line: Line, row: Mapping[str, Any]) -> None:
        prompt = row["prompt"]
        is_plain = isinstance(prompt, str)
        texts = [prompt] if is_plain else [text_of(message) for message in prompt]
        if not is_plain and prompt[-1]["role"] == "assistant":
            self.counts["continued"].add(index)
        size = sum(map(most_tokens, texts))
        is_measured = self.builder is not None and (self.chat_template is not None or is_plain)
        example: Mapping[str, Any] | None = row
        if has_images(row):
            is_measured = False
            example, rendered = self._read_images(index, line, row)
        else:
            rendered = self._rendered(index, prompt) if is_measured and self.exact else None
            if self.builder is not None and (token := self.builder.spelled(prompt)):
                self.counts["spelled"].add(index, token)
        if self.thorough:
            self._count_texts(index, row, "\n".join(texts), size, example)
            if not is_plain:
                self._count_turns(index, prompt, rendered)
            self._measure_answers(index, row)
        if is_measured and not (self.exact and rendered is None):
            self._queue(_Measured(row=index, position=self.num_rows - 1, prompt=prompt, text=rendered), size)

    def _read_images(
        self, index: int, line: Line, row: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any] | None, str | None]:
        """Open the images of a row and count their tokens: the row with them, and its text; None: they are not read."""
        self.counts["images"].add(index)
        is_beyond = self.most_opened is not None and self.counts["images"].count > self.most_opened
        if self.builder is None or not self._reads_images or (is_beyond and not self._drops):
            return None, None
        try:
            row = self.builder.with_images(row, index)
            token_ids, images = self.builder.read_images(row["prompt"], index)
        except DataError as error:
            self._reads_images = error.code != "D036"
            for finding in error.findings:
                self._note(finding, index, line)
            return None, None
        pixels = sum(x.numel() for x in images.fields.values() if x.is_floating_point())
        self.most_pixels = max(self.most_pixels, pixels)
        places = images.placeholders
        runs = [len(run) for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)]
        count = sum(len(image_blocks(message)) for message in row["prompt"])
        self.image_tokens += runs if len(runs) == count else [len(places) // count] * count
        is_spread = self.thorough and index % self.stride == 0
        self._count_length(
            _Measured(row=index, position=self.num_rows - 1, is_spread=is_spread, images=True), token_ids
        )
        return row, str(self.builder.tokenizer.decode(token_ids))

    def _count_texts(
        self, index: int, row: Mapping[str, Any], text: str, size: int, example: Mapping[str, Any] | None
    ) -> None:
        """Count a prompt by its text; `example`: the row as the rewards get it, with its images opened."""
        is_text = example is row
        key = plain(text if is_text else [*row["prompt"], *image_values(row)])
        self.prompts.add(key, index, _short_answer(row))
        if self.held_out is not None and key in self.held_out:
            self.counts["shared"].add(index)
        if "\x00" in text:
            self.counts["nul"].add(index)
        if size > LARGE_ROW:
            self.counts["large"].add(index)
        if self._control_tokens and (found := self._control_tokens.search(text)):
            begins = isinstance(row["prompt"], str) and text.lstrip().startswith(found[0])
            self.counts["written_out" if begins else "control"].add(index, found[0])
        if example is not None and len(self.examples) < (EXAMPLES if size < LARGE_EXAMPLE and is_text else 4):
            self.examples.append(dict(example))

    def _count_turns(self, index: int, messages: Sequence[Any], rendered: str | None) -> None:
        if any(message["role"] == "system" for message in messages[1:]):
            self.counts["late_system"].add(index)
        if all(message["role"] in ("system", "developer") for message in messages):
            self.counts["nothing_asked"].add(index)
        tools = any(message.get("tool_calls") or message["role"] in _OF_TOOLS for message in messages)
        if not tools or self.builder is None or self._num_rendered == RENDERED:
            return
        self._num_rendered += 1
        text = rendered or self.builder.rendered(messages, index)
        if not isinstance(text, Finding) and (gone := _left_out(messages, text)):
            self.counts["left_out"].add(index, gone)

    @property
    def _drops(self) -> bool:
        return self.exact and self.builder is not None and self.builder.overlong == "drop"

    def _queue(self, prompt: _Measured, size: int) -> None:
        """Have a prompt measured if it is one of the sample or may be too long; else keep it if it is large.

        `size`: most tokens of its texts.
        """
        assert self.builder is not None
        is_spread = self.thorough and prompt.row % self.stride == 0
        may_exceed = self.builder.lacks_rows
        if prompt.text is not None:
            may_exceed = may_exceed or self.builder.may_exceed(prompt.text)
        elif self.builder.limit is not None:
            may_exceed = may_exceed or size + self._template_size > self.builder.limit
        suspect = may_exceed and (self._drops or self.num_suspects < SUSPECTS)
        self.num_suspects += suspect and not is_spread
        if is_spread or suspect:
            self._measure(replace(prompt, is_spread=is_spread))
            if len(self._pending) >= _BATCH or size > LARGE_ROW:
                self._count_tokens()
        elif self.thorough:
            push = heapq.heappush if len(self.largest) < LONGEST else heapq.heappushpop
            push(self.largest, (size, prompt.row, prompt))

    def _measure(self, prompt: _Measured) -> None:
        text = self._rendered(prompt.row, prompt.prompt) if prompt.text is None else prompt.text
        if text is not None:
            self._pending.append(replace(prompt, text=text))

    def _rendered(self, index: int, prompt: Any) -> str | None:
        assert self.builder is not None
        text = self.builder.rendered(prompt, index)
        if not isinstance(text, Finding):
            return text
        self._note(text, index)
        return None

    def _count_tokens(self) -> None:
        """Count the tokens of the prompts that wait for it."""
        if self.builder is None or not self._pending:
            return
        waiting = self._pending
        self._pending = []
        texts = [(prompt.text or "", isinstance(prompt.prompt, str)) for prompt in waiting]
        for prompt, token_ids in zip(waiting, self.builder.tokenized(texts), strict=True):
            self._count_length(prompt, token_ids)

    def _count_length(self, prompt: _Measured, token_ids: Sequence[int]) -> None:
        assert self.builder is not None
        count = len(token_ids)
        if not count:
            self._note(no_tokens(prompt.row), prompt.row)
            return
        limit = self.builder.limit
        is_long = limit is not None and count > limit
        if is_long and prompt.images and self.builder.overlong == "truncate":
            self._note(self.builder.uncut(count, prompt.row), prompt.row)
            return
        if self.builder.vocabulary is not None and not (self._drops and is_long):
            largest = max(token_ids[-(limit or count) :])
            if largest >= self.builder.vocabulary:
                self._note(self.builder.without_embedding(largest, prompt.row), prompt.row)
        self.longest = max(self.longest, (count, prompt.row))
        if is_long:
            self.counts["long"].add(prompt.row)
        if is_long and self._drops:
            self.too_long.append(prompt.position)
        if prompt.is_spread:
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

    def finish(self) -> None:
        """Measure the prompts that are left, the largest among them; examples from a file get the columns they lack."""
        for _, _, prompt in sorted(self.largest, key=lambda entry: entry[1]):
            self._measure(prompt)
        self._count_tokens()
        if self.source.dataset is None:  # as in the table that is made of the file
            self.examples = [{name: row.get(name) for name in (*self.columns, *row)} for row in self.examples]

    def checked(self, rows: Any, *, in_order: bool = True) -> CheckedRows:
        """The surveyed rows as a dataset; `in_order`: whether it has them in the order of the survey."""
        too_long = tuple(sorted(self.too_long)) if in_order and self.exact else None
        return CheckedRows(rows=rows, settings=self.builder.settings if self.builder else (), too_long=too_long)


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
    """A pattern of the special tokens that a tokenizer recognises in any text, tags such as `<answer>` left out.

    A tag is a token with a closing one beside it, and so no part of a turn.
    """
    names = special_tokens(tokenizer)
    ends = {getattr(tokenizer, name, None) for name in ("bos_token", "eos_token")}
    others = [name for name in names if name not in ends]
    opening = [name for name in others if f"</{name[1:]}" in others]
    tags = {*opening, *(f"</{name[1:]}" for name in opening)}
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


# ---- rows that were checked ----


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


def check_dataset(
    dataset: Any,
    name: str,
    *,
    num_needed: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    builder: PromptBuilder | None = None,
) -> None:
    """Raises one `DataError` with all the problems of `dataset`; logs its warnings.

    `dataset` is a `datasets.Dataset`, an `IterableDataset` (its first rows are looked at), or a list of rows. `name` is
    what messages call it. `num_needed` is the number of prompts of one generation round. With a `builder` prompts are
    tokenized and measured too; with a `tokenizer` alone, chat data without a chat template is found.
    """
    _raise_errors(name, find_problems(dataset, name, num_needed=num_needed, tokenizer=tokenizer, builder=builder))


def checked_rows(
    dataset: Any, name: str, *, num_needed: int | None, builder: PromptBuilder, may_lack_prompt: bool = False
) -> CheckedRows:
    """`check_dataset`, with the dataset as checked; one that was checked for the same prompts is not read again.

    `may_lack_prompt`: environments write the prompts of rows that have none, or one without text.
    """
    if isinstance(dataset, CheckedRows):
        if dataset.fits(builder):
            return dataset
        dataset = dataset.rows
    survey = _survey(dataset, name, None, builder, may_lack_prompt=may_lack_prompt)
    _raise_errors(name, _problems(dataset, survey, name, num_needed))
    return CheckedRows(rows=dataset, settings=builder.settings) if survey is None else survey.checked(dataset)


def find_problems(
    dataset: Any,
    name: str,
    *,
    num_needed: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    builder: PromptBuilder | None = None,
) -> list[Finding]:
    """List what `check_dataset` raises and warns of: the columns first, then the rows in order, then counts."""
    return _problems(dataset, _survey(dataset, name, tokenizer, builder), name, num_needed)


def _raise_errors(name: str, findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.severity == "warning":
            logger.warning("%s: %s%s", name, finding.what, f"\n  fix: {finding.fix}" if finding.fix else "")
    if errors := [finding for finding in findings if finding.severity == "error"]:
        raise DataError(problems_text(name, errors), code=errors[0].code, findings=errors)


def _survey(
    dataset: Any, name: str, tokenizer: Any, builder: PromptBuilder | None, *, may_lack_prompt: bool = False
) -> RowSurvey | None:
    """The rows' prompts, surveyed; None where there is no column for them, or the rows can be read only once."""
    if is_read_once(dataset) or "prompt" not in _column_names(dataset):
        return None
    only = [column for column in ("prompt", *COLUMNS) if column in _column_names(dataset)]
    survey = RowSurvey(
        source=dataset_source(dataset, name, most=TRAINER_ROWS, only=only),
        builder=builder,
        tokenizer=tokenizer,
        thorough=False,
        exact=True,
        may_lack_prompt=may_lack_prompt,
        most_opened=OPENED_ROWS,
    )
    return survey_rows(survey)


def _problems(dataset: Any, survey: RowSurvey | None, name: str, num_needed: int | None) -> list[Finding]:
    if is_read_once(dataset):
        return []
    if not (columns := _column_names(dataset)):
        return [no_rows(name)]
    findings = column_problems(columns, name)
    if survey is None:
        return findings
    findings += [*survey.findings, *mixtures(survey)]
    if survey.num_rows == 0:
        return [*findings, no_rows(name)]
    return findings if is_stream(dataset) else [*findings, *too_few(survey, num_needed)]


def _column_names(dataset: Any) -> list[str]:
    """Columns of the rows as they are drawn: a transform may add or rename some. Empty where there is no row."""
    names = getattr(dataset, "column_names", None)
    if names and not is_transformed(dataset) and (is_stream(dataset) or len(dataset) > 0):
        return list(names)
    first = next(iter(dataset), None)
    if first is None:
        return []
    return list(first) if isinstance(first, Mapping) else ["prompt"]


def column_problems(
    columns: Sequence[str], name: str, *, proposed: Mapping[str, str] | None = None, needs_prompt: bool = True
) -> list[Finding]:
    """Problems of the columns of a dataset.

    Args:
        columns: their names.
        name: of the dataset in messages.
        proposed: templates of a recipe for rows without a prompt, by key; None: the fix is Python.
        needs_prompt: whether rows must have a prompt; False where environments make it.
    """
    findings = []
    taken: set[str | None] = set()
    if "prompt" not in columns and needs_prompt:
        fix = rename(columns, name) if proposed is None else as_flags(proposed)
        what = f"no `prompt` column; the columns are {names_or_none(columns)}"
        findings.append(replace(row_problem("D001", None, what, fix), changes=proposed or {}))
        taken = {name for text in (proposed or {}).values() for name in parse(text).columns} or set(likely(columns))
    for column in (column for column in RESERVED if column in columns and column not in taken):
        fix = f"name it otherwise in the data: `dataset_{column}`"
        if column == "completions" and "answer" not in columns:
            fix = 'answer: "{completions}"; or ' + fix
        if proposed is None:
            fix = f'rename it: {name} = {name}.rename_column("{column}", "dataset_{column}")'
        what = f"column `{column}` has a name that is reserved for what reward functions get"
        findings.append(row_problem("D021" if column in SERVICES else "D020", None, what, fix))
    return findings


def no_rows(name: str, *, held_out: bool = False) -> Finding:
    """The error of a dataset without rows. `held_out`: some of its rows are held out."""
    fix = f"look at how {name} is loaded and filtered"
    if held_out or name.endswith("(held out)"):
        fix = (
            "rows with the same prompt are all on one side of held_out: let prompts differ, or give other rows as "
            "eval_dataset; of prompts that differ hold out more. Where an environment or a program tells rows apart "
            'by other columns, write the prompt in the recipe, such as `prompt: "Play."`: then all columns count'
        )
    return row_problem("D022", None, "no rows", fix)


def mixtures(survey: RowSurvey) -> list[Finding]:
    """Chat rows without a template, chat and plain rows mixed, turns to be continued, prompts over the limit."""
    chat = survey.counts["chat"]
    plain = survey.counts["plain"]
    continued = survey.counts["continued"]
    lacks_template = survey.tokenizer is not None and survey.chat_template is None
    findings = [no_template(chat.first[0])] if chat.count and lacks_template else []
    if chat.count and plain.count:
        few, kind = (plain, "plain") if plain.count <= chat.count else (chat, "chat")
        what = (
            f"conversations and plain strings are mixed: {chat.count} rows are chat, {plain.count} are plain "
            f"({kind}: {few})"
        )
        fix = 'write all prompts one way; a string becomes a conversation as [{"role": "user", "content": text}]'
        findings.append(row_problem("D013", None, what, fix))
    spelled = survey.counts["spelled"]
    if spelled.count and survey.counts["images"].count:
        what = (
            f"{counted(spelled.count, 'prompt')} without images {'has' if spelled.count == 1 else 'have'} "
            f"`{spelled.example}` in the text, which stands for an image, and other rows have images ({spelled})"
        )
        findings.append(row_problem("D063", None, what, f"take it out, or write it apart: `< {spelled.example[1:]}`"))
    if continued.count:
        ending = "1 row ends" if continued.count == 1 else f"{continued.count} rows end"
        what = f"{ending} with an assistant turn, which the completion will continue (first: row {continued.first[0]})"
        fix = "if the last turn is the answer you want, take it out of `prompt` and keep it in a column of its own"
        findings.append(Finding(code="D011", severity="warning", what=what, fix=fix))
    if survey.builder is not None and survey.counts["long"].count:
        findings.append(_too_long(survey, survey.builder))
    return findings


def _too_long(survey: RowSurvey, builder: PromptBuilder) -> Finding:
    tokens, row = survey.longest
    count = survey.counts["long"].count
    rows = "1 prompt is" if count == 1 else f"{count} prompts are"
    what = f"{rows} too long: {builder.limit_text} (longest, row {row}: {tokens} tokens)"
    facts = {"room": builder.room_for(tokens)}
    if builder.overlong == "error":
        return replace(
            row_problem("D014", None, what, builder.cure(tokens, images=survey.counts["images"].count > 0)), facts=facts
        )
    done = {"drop": "left out", "truncate": "cut to the last tokens"}[builder.overlong]
    fix = builder.wider(tokens) or "shorter prompts"
    return Finding(code="D014", severity="warning", what=f"{what}; {done}", fix=fix, facts=facts)


def too_few(survey: RowSurvey, num_needed: int | None) -> list[Finding]:
    """Fewer prompts than one generation round takes, without those that are dropped for their length."""
    drops = survey.builder is not None and survey.builder.overlong == "drop"
    dropped = survey.counts["long"].count if drops else 0
    num_left = survey.num_rows - dropped
    if num_left >= max(num_needed or 1, 1):
        return []
    without = f" once {dropped} too long ones are left out" if dropped else ""
    what = f"{counted(num_left, 'prompt')}{without}, but one generation round takes {num_needed or 1}"
    fix = (
        "add rows, or lower `generation_batch_size` (or `per_device_train_batch_size`, `gradient_accumulation_steps`, "
        "`steps_per_generation`), or raise `num_generations`: a round takes generation_batch_size / num_generations "
        "prompts"
    )
    return [row_problem("D023", None, what, fix)]
