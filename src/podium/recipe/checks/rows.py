"""One pass over a dataset, in constant memory: what is wrong with its rows, and what is counted by the way.

    survey = look_at(file_source(Path("train.jsonl")), builder)

Looks at single rows alone; `podium.recipe.checks.data` judges the whole.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from podium.data.check import Places, Survey, is_read_once, is_transformed
from podium.data.files import csv_columns, file_rows, kind_of, unusual
from podium.data.prompts import PromptBuilder, most_tokens
from podium.data.row import check_row, text_of
from podium.data.selection import plain
from podium.recipe.checks.distinct import DistinctSample
from podium.records import Finding
from podium.rewards.resolve import GOLD

MAX_SHOWN = 20
"""Bad rows of one kind that are written out; the rest is counted."""

MEASURED_ROWS = 1_000
"""Prompts whose tokens are counted, evenly over the whole dataset: a tenth of a millisecond each. On top come the
longest texts, and those that may be too long."""

SUSPECTS = 10_000
"""Most prompts measured because they may be too long."""

LONGEST = 64
"""Texts measured because no other has more bytes: one of them is the longest prompt."""

STREAM_ROWS = 10_000
"""Rows of a stream without an end that are looked at."""

EXAMPLES = 4
"""Usable rows that are kept, for trying the rewards on."""

SHORT_ANSWER = 100
"""Characters of an answer that another one contradicts; longer ones are texts of which several may be right."""

RENDERED = 20
"""Conversations with tools or late system messages that are rendered, to see what the template leaves out."""

LARGE_ROW = 1_000_000
"""Characters of a prompt from which on it is worth a word."""

COUNTED_BYTES = 64 << 20
"""Of a file whose lines are counted; the lines of a larger one are judged by these."""

_BATCH = 512


Line = int | str | None
"""Number of the line; a text says the whole place, None that it is the number of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where rows come from."""

    name: str
    """For messages: a file, or `train_dataset`."""
    rows: Callable[[], Iterator[tuple[Line, Any]]]
    """Line and row; a Finding in place of a row that cannot be read, None in place of one that is left out."""
    about: int | None
    """How many rows there are, roughly; None: not known."""
    columns: tuple[str, ...] | None = None
    """None: those of the rows."""
    is_stream: bool = False
    form: str = ""
    """Notes about the format of the file."""


@dataclass(slots=True)
class Column:
    """One column's values."""

    kinds: Counter[str] = field(default_factory=Counter)
    nulls: Places = field(default_factory=Places)
    long: Places = field(default_factory=Places)
    """Answers that are longer than a completion may be."""
    longest: tuple[int, int] = (0, -1)
    """Tokens of the longest answer that was measured, and its row."""


@dataclass(slots=True)
class RowSurvey:
    """What one pass over a dataset has seen."""

    source: Source
    builder: PromptBuilder | None
    counts: Survey = field(default_factory=Survey)
    bad: dict[str, list[Finding]] = field(default_factory=dict)
    """By code, the first of them."""
    num_bad: Counter[str] = field(default_factory=Counter)
    columns: dict[str, Column] = field(default_factory=dict)
    prompts: DistinctSample = field(default_factory=DistinctSample)
    shared: Places = field(default_factory=Places)
    """Rows whose prompts are in the other dataset too."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of the evenly spread prompts."""
    late_system: Places = field(default_factory=Places)
    """Conversations with a system message that is not the first."""
    nothing_asked: Places = field(default_factory=Places)
    """Conversations of system messages alone."""
    left_out: Places = field(default_factory=Places)
    """Conversations of which the chat template leaves something out."""
    first_left_out: str = ""
    num_rendered: int = 0
    control: Places = field(default_factory=Places)
    """Prompts with control tokens in a text."""
    first_control: str = ""
    written_out: Places = field(default_factory=Places)
    """Plain prompts that begin with a control token: somebody has applied a template."""
    nul: Places = field(default_factory=Places)
    large: Places = field(default_factory=Places)
    control_tokens: re.Pattern[str] | None = field(init=False)
    """None: the tokenizer is not known."""
    num_suspects: int = 0
    """Prompts measured because they may be too long."""
    largest: list[tuple[int, int, Any]] = field(default_factory=list)
    """A heap of the largest prompts that nothing else asks to measure: most tokens, row, prompt."""
    examples: list[dict[str, Any]] = field(default_factory=list)
    _pending: list[tuple[int, Any, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.control_tokens = None if self.builder is None else _control_tokens(self.builder.tokenizer)

    @property
    def name(self) -> str:
        """For messages."""
        return self.source.name

    @property
    def stride(self) -> int:
        """Every how manieth prompt is measured."""
        return max(1, -(-(self.source.about or 0) // MEASURED_ROWS))

    def add(self, index: int, line: Line, row: Any, other: DistinctSample | None) -> None:
        """One row."""
        if isinstance(row, Finding):
            self._note(row, index, line)
            self.counts.num_rows += 1
            return
        problem = check_row(row, index, chat_template=None if self.builder is None else self.builder.chat_template)
        self.counts.add(index, row, problem)
        self.counts.findings.clear()
        if problem is not None:
            self._note(problem, index, line)
        if isinstance(row, Mapping):
            self._count_columns(index, row)
            if problem is None:
                self._look_at(index, row, other)

    def _note(self, finding: Finding, index: int, line: Line) -> None:
        self.num_bad[finding.code] += 1
        shown = self.bad.setdefault(finding.code, [])
        if len(shown) < MAX_SHOWN:
            shown.append(replace(finding, what=_placed(finding.what, self.name, index, line)))

    def _count_columns(self, index: int, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            column = self.columns.get(key)
            if column is None:
                column = self.columns[key] = Column()
                column.nulls.count = self.counts.num_rows - 1  # rows before this one did not have it
                column.nulls.first = list(range(min(column.nulls.count, 5)))
            if value is None:
                column.nulls.add(index)
            else:
                column.kinds[type(value).__name__] += 1

    def _look_at(self, index: int, row: Mapping[str, Any], other: DistinctSample | None) -> None:
        prompt = row["prompt"]
        texts = [prompt] if isinstance(prompt, str) else [text_of(message) for message in prompt]
        key = plain("\n".join(texts))
        self.prompts.add(key, index, _short_answer(row))
        if other is not None and key in other:
            self.shared.add(index)
        size = sum(map(most_tokens, texts))
        if any("\x00" in text for text in texts):
            self.nul.add(index)
        if size > LARGE_ROW:
            self.large.add(index)
        if not isinstance(prompt, str):
            self._look_at_turns(index, prompt)
        if self.control_tokens and (found := self.control_tokens.search("\n".join(texts))):
            begins = isinstance(prompt, str) and prompt.lstrip().startswith(found[0])
            self.first_control = self.first_control or found[0]
            (self.written_out if begins else self.control).add(index)
        if len(self.examples) < EXAMPLES:
            self.examples.append(dict(row))
        if self.builder is not None:
            self._queue(index, prompt, size)
            self._measure_answers(index, row)

    def _look_at_turns(self, index: int, messages: Sequence[Any]) -> None:
        if any(message["role"] == "system" for message in messages[1:]):
            self.late_system.add(index)
        if all(message["role"] in ("system", "developer") for message in messages):
            self.nothing_asked.add(index)
        tools = any(message.get("tool_calls") or message["role"] in _OF_TOOLS for message in messages)
        if not tools or self.builder is None or self.num_rendered == RENDERED:
            return
        self.num_rendered += 1
        text = self.builder.rendered(messages, index)
        gone = "" if isinstance(text, Finding) else _left_out(messages, text)
        if gone:
            self.first_left_out = self.first_left_out or gone
            self.left_out.add(index)

    def _queue(self, index: int, prompt: Any, size: int) -> None:
        assert self.builder is not None
        if self.builder.chat_template is None and not isinstance(prompt, str):
            return
        spread = index % self.stride == 0
        limit = self.builder.limit
        suspect = limit is not None and size + _TEMPLATE > limit and self.num_suspects < SUSPECTS
        self.num_suspects += suspect and not spread
        if spread or suspect:
            self._pending.append((index, prompt, spread))
            if len(self._pending) >= _BATCH or size > LARGE_ROW:
                self.measure()
        elif len(self.largest) < LONGEST:
            heapq.heappush(self.largest, (size, index, prompt))
        else:
            heapq.heappushpop(self.largest, (size, index, prompt))

    def measure(self) -> None:
        """The lengths of the prompts that wait for it."""
        if self.builder is None or not self._pending:
            return
        waiting, self._pending = self._pending, []
        found = self.builder.lengths([(index, prompt) for index, prompt, _ in waiting])
        for (index, _, spread), length in zip(waiting, found, strict=True):
            if isinstance(length, Finding):
                self._note(length, index, None)
                continue
            self.counts.measured(index, length, self.builder.limit)
            if spread:
                self.lengths.append(length)

    def finish(self) -> None:
        """Measure what is left, the largest prompts among it."""
        self._pending += [(index, prompt, False) for _, index, prompt in sorted(self.largest, key=lambda each: each[1])]
        self.measure()

    def _measure_answers(self, index: int, row: Mapping[str, Any]) -> None:
        """Only an answer of more bytes than the limit can have more tokens."""
        assert self.builder is not None
        limit = self.builder.max_completion_length
        for key in GOLD:
            value = row.get(key)
            if limit is None or not isinstance(value, str) or most_tokens(value) <= limit:
                continue
            column = self.columns[key]
            if column.long.count < SUSPECTS:
                tokens = len(self.builder.tokenizer(value, add_special_tokens=False)["input_ids"])
                column.longest = max(column.longest, (tokens, index))
                if tokens > limit:
                    column.long.add(index)


_TEMPLATE = 512
"""Tokens that a chat template may add."""


_OF_TOOLS = ("tool", "function", "ipython")


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
    """Finds the tokens that a tokenizer takes out of any text for ends, beginnings and the like."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {token.content for token in added if token.special and len(token.content) > 1}
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None


def _short_answer(row: Mapping[str, Any]) -> str | None:
    """The answer to compare with that of another row; None: there is none, or a long one."""
    value = next((row[name] for name in GOLD if row.get(name) is not None), None)
    text = "" if value is None else plain(value if isinstance(value, str) else str(value))
    text = text.rpartition("####")[2].strip()
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


def look_at(source: Source, builder: PromptBuilder | None, other: DistinctSample | None = None) -> RowSurvey:
    """The pass. `other` are the prompts of another dataset, to find those that are in both.

    Raises:
        DataError: the rows cannot be read at all.
    """
    survey = RowSurvey(source=source, builder=builder)
    for index, (line, row) in enumerate(source.rows()):
        if row is not None:
            survey.add(index, line, row, other)
    survey.finish()
    return survey


# ---- sources ----


def file_source(path: Path, name: str | None = None) -> Source:
    """A file of lines, read as it is: no copy is made of it. Raises `DataError` for one that cannot be read."""
    form = unusual(path)
    with path.open("rb") as stream:
        start = stream.read(COUNTED_BYTES)
    lines = max(start.count(b"\n"), 1)
    return Source(
        name=name or str(path),
        rows=lambda: file_rows(path),
        about=max(1, path.stat().st_size * lines // len(start)),
        columns=csv_columns(path) if kind_of(path) == ".csv" else None,
        form=form,
    )


def dataset_source(dataset: Any, name: str, *, is_file: bool = False) -> Source | None:
    """A `Dataset`, an `IterableDataset`, or a list of rows; None for what can be read only once.

    `is_file`: a stream that ends, so that all of it is read.
    """
    if is_read_once(dataset):
        return None
    is_stream = not hasattr(dataset, "__len__")
    columns: Sequence[str] | None = None if is_transformed(dataset) else getattr(dataset, "column_names", None)
    return Source(
        name=name,
        rows=lambda: ((None, row) for row in _rows(dataset, None if is_file else STREAM_ROWS)),
        about=None if is_stream else len(dataset),
        columns=tuple(columns) if columns else None,
        is_stream=is_stream and not is_file,
    )


def _rows(dataset: Any, most: int | None) -> Iterator[Any]:
    if not hasattr(dataset, "__len__"):
        yield from islice(dataset, most)
    elif hasattr(dataset, "iter") and not is_transformed(dataset):
        for batch in dataset.iter(batch_size=1000):
            keys = list(batch)
            yield from (dict(zip(keys, values, strict=True)) for values in zip(*batch.values(), strict=True))
    else:
        yield from (dataset[index] for index in range(len(dataset)))
