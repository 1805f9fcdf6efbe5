"""Problems of a dataset, found before any weight is loaded: every bad row at once, with what to type.

    check_dataset(dataset, "train_dataset", num_needed=8, builder=builder)

Rows are counted from 0, as in `dataset[8]`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from podium.data.columns import RESERVED, SERVICES, as_flags, likely, names_or_none
from podium.data.prompts import PromptBuilder
from podium.data.row import TEXT_ONLY, no_template, problems_text, rename, row_problem
from podium.data.survey import (
    CheckedRows,
    RowSurvey,
    dataset_source,
    is_read_once,
    is_stream,
    is_transformed,
    survey_rows,
)
from podium.data.templates import parse
from podium.errors import DataError, Finding
from podium.errors.texts import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

IMAGE_COLUMNS = ("image", "images")
STREAM_ROWS = 100  # rows of a stream that a trainer checks before it starts; the others are checked when they are drawn


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
    dataset: Any, name: str, *, num_needed: int | None, builder: PromptBuilder, made: bool = False
) -> CheckedRows:
    """`check_dataset`, with the dataset as checked; one that was checked for the same prompts is not read again.

    `made`: environments write the prompts of rows that have none, or one without text.
    """
    if isinstance(dataset, CheckedRows):
        if dataset.fits(builder):
            return dataset
        dataset = dataset.rows
    survey = _survey(dataset, name, None, builder, made=made)
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
    dataset: Any, name: str, tokenizer: Any, builder: PromptBuilder | None, *, made: bool = False
) -> RowSurvey | None:
    """The rows' prompts, surveyed; None where there is no column for them, or the rows can be read only once."""
    if is_read_once(dataset) or "prompt" not in _column_names(dataset):
        return None
    source = dataset_source(dataset, name, most=STREAM_ROWS, only=["prompt"])
    assert source is not None
    how = {"builder": builder, "tokenizer": tokenizer, "thorough": False, "exact": True, "made": made}
    return survey_rows(RowSurvey(source=source, **how))


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
    for column in (each for each in RESERVED if each in columns and each not in taken):
        fix = f"name it otherwise in the data: `dataset_{column}`"
        if column == "completions" and "answer" not in columns:
            fix = 'answer: "{completions}"; or ' + fix
        if proposed is None:
            fix = f'rename it: {name} = {name}.rename_column("{column}", "dataset_{column}")'
        what = f"column `{column}` has a name that is reserved for what reward functions get"
        findings.append(row_problem("D021" if column in SERVICES else "D020", None, what, fix))
    images = [column for column in IMAGE_COLUMNS if column in columns]
    return findings + [row_problem("D036", None, f"column `{each}` holds images", TEXT_ONLY) for each in images]


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
    chat = survey.chat_rows
    plain = survey.plain_rows
    builder = survey.builder
    findings = [no_template(chat.first[0])] if chat.count and survey.lacks_template else []
    if chat.count and plain.count:
        few, kind = (plain, "plain") if plain.count <= chat.count else (chat, "chat")
        what = (
            f"conversations and plain strings are mixed: {chat.count} rows are chat, {plain.count} are plain "
            f"({kind}: {few})"
        )
        fix = 'write all prompts one way; a string becomes a conversation as [{"role": "user", "content": text}]'
        findings.append(row_problem("D013", None, what, fix))
    if rows := survey.continued.count:
        ending = "1 row ends" if rows == 1 else f"{rows} rows end"
        what = (
            f"{ending} with an assistant turn, which the completion will continue (first: row "
            f"{survey.continued.first[0]})"
        )
        fix = "if the last turn is the answer you want, take it out of `prompt` and keep it in a column of its own"
        findings.append(Finding(code="D011", severity="warning", what=what, fix=fix))
    if builder is not None and survey.long_rows.count:
        findings.append(_too_long(survey, builder))
    return findings


def _too_long(survey: RowSurvey, builder: PromptBuilder) -> Finding:
    tokens, row = survey.longest
    rows = "1 prompt is" if survey.long_rows.count == 1 else f"{survey.long_rows.count} prompts are"
    what = f"{rows} too long: {builder.limit_text} (longest, row {row}: {tokens} tokens)"
    facts = {"room": builder.room_for(tokens)}
    if builder.overlong == "error":
        return replace(row_problem("D014", None, what, builder.cure(tokens)), facts=facts)
    done = {"drop": "left out", "truncate": "cut to the last tokens"}[builder.overlong]
    fix = builder.wider(tokens) or "shorter prompts"
    return Finding(code="D014", severity="warning", what=f"{what}; {done}", fix=fix, facts=facts)


def too_few(survey: RowSurvey, num_needed: int | None) -> list[Finding]:
    """Fewer prompts than one generation round takes, without those that are dropped for their length."""
    dropped = survey.long_rows.count if survey.builder is not None and survey.builder.overlong == "drop" else 0
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
