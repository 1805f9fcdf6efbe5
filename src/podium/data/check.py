"""What is wrong with a dataset, found before any weight is loaded: every bad row at once, with what to type.

    check_dataset(dataset, "train_dataset", num_needed=8, builder=builder)

Rows are counted from 0, as in `dataset[8]`. Knows rows and columns; of tokenizers only what a `PromptBuilder` tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from podium.data.columns import RESERVED, as_flags, likely
from podium.data.row import TEXT_ONLY, check_row, listed, no_template, rename, row_problem
from podium.errors import ConfigError, DataError
from podium.records import Finding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podium.data.prompts import PromptBuilder
    from podium.trainer.config import GRPOConfig

logger = logging.getLogger(__name__)

_SERVICES = ("trainer_state", "log_extra", "log_metric")

IMAGE_COLUMNS = ("image", "images")

MAX_LISTED = 20
"""Problems written out in one message; the rest is counted."""

SHOWN_PLACES = 5
"""Rows that a count of rows names."""

STREAM_ROWS = 100
"""Rows of a stream that are looked at before training. The others are checked when they are drawn."""

TOKENIZED_ROWS = 10_000
"""Prompts that may be too long and are measured before training; more of them are measured when they are drawn."""

_BATCH = 512


def check_dataset(
    dataset: Any,
    name: str,
    *,
    num_needed: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    builder: PromptBuilder | None = None,
) -> None:
    """Raises one `DataError` with all the problems of `dataset`; warns of what is only odd.

    `dataset` is a `datasets.Dataset`, an `IterableDataset` (its first rows are looked at), or a list of rows. `name` is
    what messages call it. `num_needed` is the number of prompts of one generation round. With a `builder` prompts are
    tokenized and measured too; with a `tokenizer` alone, chat data without a chat template is found.
    """
    findings = find_problems(dataset, name, num_needed=num_needed, tokenizer=tokenizer, builder=builder)
    for finding in findings:
        if finding.severity == "warning":
            logger.warning("%s: %s%s", name, finding.what, f"\n  fix: {finding.fix}" if finding.fix else "")
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise DataError(describe(name, errors), code=errors[0].code, findings=errors)


def find_problems(
    dataset: Any,
    name: str,
    *,
    num_needed: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    builder: PromptBuilder | None = None,
) -> list[Finding]:
    """What `check_dataset` raises and warns of, as a list: the columns first, then the rows in order, then counts."""
    if is_read_once(dataset):
        return []
    columns = _column_names(dataset)
    if not columns:
        return [no_rows(name)]
    findings = column_problems(columns, name)
    if any(finding.code == "D001" for finding in findings):
        return findings
    template = _template(tokenizer, builder)
    survey = Survey(builder=builder)
    for index, row in enumerate(_rows_with_prompts(dataset)):
        survey.add(index, row, check_row(row, index, chat_template=template))
    survey.measure()
    findings += survey.findings
    if survey.chat_rows.count and template is None and (tokenizer or builder):
        findings.append(no_template(survey.chat_rows.first[0]))
    findings += [*mixed(survey), *continued(survey), *overlong(survey, builder)]
    return [*findings, *_too_few(dataset, survey, num_needed, name)]


def describe(name: str, findings: Sequence[Finding]) -> str:
    """Many problems as one message; each cure is written once.

    >>> print(describe("train_dataset", [row_problem("D005", 8, "prompt is null", "drop it")]))
    train_dataset, row 8: prompt is null [D005]
      fix: drop it
    """
    if len(findings) == 1:
        lines = [f"{name}, {findings[0].what} [{findings[0].code}]"]
    else:
        lines = [f"{name} has {len(findings)} problems:"]
        lines += [f"  {finding.what} [{finding.code}]" for finding in findings[:MAX_LISTED]]
        lines += [f"  and {len(findings) - MAX_LISTED} more"] * (len(findings) > MAX_LISTED)
    codes_by_fix: dict[str, dict[str, None]] = {}
    for finding in findings[:MAX_LISTED]:
        if finding.fix:
            codes_by_fix.setdefault(finding.fix, {})[finding.code] = None
    coded = len(codes_by_fix) > 1
    lines += [f"  fix{_for_codes(codes) if coded else ''}: {fix}" for fix, codes in codes_by_fix.items()]
    return "\n".join(lines)


def _for_codes(codes: Iterable[str]) -> str:
    return f" ({', '.join(codes)})"


def column_problems(columns: Sequence[str], name: str, *, by_keys: bool = False) -> list[Finding]:
    """What is wrong with the columns of a dataset; `by_keys`: it is cured by keys of a recipe, else in Python."""
    findings, taken = [], set[str | None]()
    if "prompt" not in columns:
        fix = as_flags(columns) if by_keys else rename(columns, name)
        what = f"no `prompt` column; the columns are {listed(columns)}"
        findings.append(row_problem("D001", None, what, fix))
        taken = set(likely(columns))  # a template takes these away
    for column in (each for each in RESERVED if each in columns and each not in taken):
        fix = f"name it otherwise in the data: `dataset_{column}`"
        if column == "completions" and "answer" not in columns:
            fix = 'answer: "{completions}"; or ' + fix
        if not by_keys:
            fix = f'rename it: {name} = {name}.rename_column("{column}", "dataset_{column}")'
        what = f"column `{column}` has a name that is reserved for what reward functions get"
        findings.append(row_problem("D021" if column in _SERVICES else "D020", None, what, fix))
    findings += [
        row_problem("D036", None, f"column `{column}` holds images", TEXT_ONLY)
        for column in IMAGE_COLUMNS
        if column in columns
    ]
    return findings


def no_rows(name: str) -> Finding:
    """A dataset without rows."""
    return row_problem("D022", None, "no rows", f"look at how {name} is loaded and filtered")


@dataclass(slots=True)
class Places:
    """How many rows, and which were the first; a large number of them takes no more memory than a few."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, row: int) -> None:
        """One more row."""
        self.count += 1
        if len(self.first) < SHOWN_PLACES:
            self.first.append(row)

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.first)) + ", ..." * (self.count > len(self.first))
        return f"row{'s' * (self.count > 1)} {rows}"


@dataclass(slots=True)
class Survey:
    """What is counted while the rows go by."""

    builder: PromptBuilder | None = None
    """Measures the prompts; None: nobody does, or the caller does."""
    findings: list[Finding] = field(default_factory=list)
    num_rows: int = 0
    chat_rows: Places = field(default_factory=Places)
    plain_rows: Places = field(default_factory=Places)
    continued_rows: Places = field(default_factory=Places)
    long_rows: Places = field(default_factory=Places)
    """Prompts over the limit."""
    longest: tuple[int, int] = (0, -1)
    """Tokens of the longest prompt that was measured, and its row."""
    num_measured: int = 0
    _waiting: list[tuple[int, Any]] = field(default_factory=list)

    def add(self, index: int, row: Any, problem: Finding | None) -> None:
        """One row that was checked; `problem` is what is wrong with it."""
        self.num_rows += 1
        prompt = row.get("prompt") if isinstance(row, Mapping) else None
        if problem is not None:
            self.findings.append(problem)
        if isinstance(prompt, str):
            self.plain_rows.add(index)
        elif isinstance(prompt, (list, tuple)):
            self.chat_rows.add(index)
        if problem is None:
            self._look_at(index, prompt)

    def measured(self, index: int, num_tokens: int, limit: int | None) -> None:
        """One prompt's length."""
        self.longest = max(self.longest, (num_tokens, index))
        if limit is not None and num_tokens > limit:
            self.long_rows.add(index)

    def _look_at(self, index: int, prompt: Any) -> None:
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            self.continued_rows.add(index)
        if self.builder is None or (self.builder.chat_template is None and not isinstance(prompt, str)):
            return
        text = self.builder.rendered(prompt, index)
        if isinstance(text, Finding):
            self.findings.append(text)
        elif self.builder.may_exceed(text) and self.num_measured < TOKENIZED_ROWS:
            self.num_measured += 1
            self._waiting.append((index, prompt))
            if len(self._waiting) == _BATCH:
                self.measure()

    def measure(self) -> None:
        """The lengths of the prompts that wait for it: only those whose bytes are more than the limit in tokens."""
        waiting, self._waiting = self._waiting, []
        if self.builder is None or not waiting:
            return
        for (index, _), length in zip(waiting, self.builder.lengths(waiting), strict=True):
            if isinstance(length, Finding):
                self.findings.append(length)
            else:
                self.measured(index, length, self.builder.limit)


def _template(tokenizer: Any, builder: PromptBuilder | None) -> str | None:
    if builder is not None:
        return builder.chat_template
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else str(template)


def mixed(survey: Survey) -> list[Finding]:
    """Conversations and plain strings in one dataset."""
    chat, plain = survey.chat_rows, survey.plain_rows
    if not chat.count or not plain.count:
        return []
    few, kind = (plain, "plain") if plain.count <= chat.count else (chat, "chat")
    return [
        row_problem(
            "D013",
            None,
            f"conversations and plain strings are mixed: {chat.count} rows are chat, {plain.count} are plain "
            f"({kind}: {few})",
            'write all prompts one way; a string becomes a conversation as [{"role": "user", "content": text}]',
        )
    ]


def continued(survey: Survey) -> list[Finding]:
    """Conversations that end with the assistant's turn."""
    rows = survey.continued_rows
    if not rows.count:
        return []
    ending = "1 row ends" if rows.count == 1 else f"{rows.count} rows end"
    what = f"{ending} with an assistant turn, which the completion will continue (first: row {rows.first[0]})"
    fix = "if the last turn is the answer you want, take it out of `prompt` and keep it in a column of its own"
    return [Finding(code="D011", severity="warning", what=what, fix=fix)]


def overlong(survey: Survey, builder: PromptBuilder | None) -> list[Finding]:
    """Prompts over the builder's limit."""
    if builder is None or not survey.long_rows.count:
        return []
    tokens, row = survey.longest
    rows = "1 prompt is" if survey.long_rows.count == 1 else f"{survey.long_rows.count} prompts are"
    what = f"{rows} too long: {builder.limit_text} (longest, row {row}: {tokens} tokens)"
    if builder.overlong == "error":
        return [row_problem("D014", None, what, builder.cure(tokens))]
    done = {"drop": "left out", "truncate": "cut to the last tokens"}[builder.overlong]
    fix = builder.wider(tokens) or "shorter prompts"
    return [Finding(code="D014", severity="warning", what=f"{what}; {done}", fix=fix)]


def _too_few(dataset: Any, survey: Survey, num_needed: int | None, name: str) -> list[Finding]:
    """Nothing to say about a stream: its length is not known."""
    if survey.num_rows == 0:
        return [no_rows(name)]
    if _is_stream(dataset):
        return []
    dropped = survey.long_rows.count if survey.builder is not None and survey.builder.overlong == "drop" else 0
    return too_few(survey.num_rows - dropped, dropped, num_needed)


def too_few(num_left: int, dropped: int, num_needed: int | None) -> list[Finding]:
    """Fewer prompts than one generation round takes; `dropped` are those left out for their length."""
    if num_left >= max(num_needed or 1, 1):
        return []
    without = f" once {dropped} too long ones are left out" if dropped else ""
    return [
        row_problem(
            "D023",
            None,
            f"{num_left} prompt{'s' * (num_left != 1)}{without}, but one generation round takes {num_needed or 1}",
            "add rows, or lower `generation_batch_size` (or `per_device_train_batch_size`, "
            "`gradient_accumulation_steps`, `steps_per_generation`), or raise `num_generations`: a round takes "
            "generation_batch_size / num_generations prompts",
        )
    ]


def stream_problems(args: GRPOConfig, *, train: bool) -> Iterator[Finding]:
    """What settings ask of a dataset that a stream cannot give; `train`: it is trained on, else evaluated."""
    if train and args.max_steps <= 0:
        what = "max_steps must be set: the training rows are a stream without a length, so epochs cannot be counted"
        yield Finding(code="C030", severity="error", what=what, fix="max_steps: 500")
    if train and args.dynamic_sampling:
        what = "dynamic_sampling draws replacements from the whole dataset, which a stream does not offer"
        yield Finding(code="C030", severity="error", what=what, fix="dataset_streaming: false")
    if getattr(args.accelerator_config, "dispatch_batches", None):
        what = "Iterable datasets require `dispatch_batches=False`, but it is set to `True` in `accelerator_config`"
        yield Finding(code="C030", severity="error", what=what, fix="accelerator_config: {dispatch_batches: false}")


def set_for_streams(args: GRPOConfig, train: Any, evaluation: Any) -> None:
    """TRL's settings of accelerate and of dataloaders for streams. Raises `ConfigError` for what a stream cannot give.

    Podium reads a stream itself, in order; the settings are for whoever asks the arguments, or gets a dataloader.
    """
    others = evaluation.values() if isinstance(evaluation, Mapping) else [evaluation]
    if not any(each is not None and _is_stream(each) for each in (train, *others)):
        return
    for problem in stream_problems(args, train=_is_stream(train)):
        raise ConfigError(f"{problem.what}.", code=problem.code, fix=problem.fix)
    args.accelerator_config.dispatch_batches = False
    if _is_stream(train) and args.dataloader_num_workers:
        logger.warning(
            "Iterable datasets require `dataloader_num_workers=0`; the %d that were set are left out.",
            args.dataloader_num_workers,
        )
        args.dataloader_num_workers = 0


def _is_stream(dataset: Any) -> bool:
    return not hasattr(dataset, "__len__")


def _column_names(dataset: Any) -> list[str]:
    """Columns of the rows as they are drawn: a transform may add or rename some. Empty where there is no row."""
    names = getattr(dataset, "column_names", None)
    if names and not is_transformed(dataset) and (_is_stream(dataset) or len(dataset) > 0):
        return list(names)
    first = next(iter(_rows(dataset)), None)
    return list(first) if isinstance(first, Mapping) else ["prompt"] * (first is not None)


def is_transformed(dataset: Any) -> bool:
    """Whether a function of the user's makes the rows as they are read."""
    settings = getattr(dataset, "format", None)
    return isinstance(settings, Mapping) and settings.get("type") == "custom"


def is_read_once(dataset: Any) -> bool:
    """A generator or the like: looking at its rows would use them up."""
    return _is_stream(dataset) and iter(dataset) is dataset


def _rows(dataset: Any) -> Iterator[Any]:
    """The rows; of a stream the first ones."""
    if _is_stream(dataset):
        return islice(dataset, STREAM_ROWS)
    return (dataset[index] for index in range(len(dataset)))


def _rows_with_prompts(dataset: Any) -> Iterator[Any]:
    """The rows with at least their prompts. Of a `datasets.Dataset` that column alone is read, in batches."""
    select: Callable[[str], Any] | None = getattr(dataset, "select_columns", None)
    if select is None or _is_stream(dataset) or is_transformed(dataset):
        return _rows(dataset)
    batches = select("prompt").iter(batch_size=1000)
    return ({"prompt": prompt} for batch in batches for prompt in batch["prompt"])
