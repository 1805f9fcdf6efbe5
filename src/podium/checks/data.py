"""Rules about the rows: what one pass over the datasets has counted, judged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from podium.checks.setup import Setup, findings_of, line
from podium.data.columns import GOLD, LAST_TURN, answer_extractor
from podium.data.completions import Completions
from podium.data.extract import numbers
from podium.data.files import kind_of
from podium.data.prompts import OVERLONG, ROOM, PromptBuilder
from podium.data.survey import (
    MAX_SHOWN,
    MEASURED_ROWS,
    SHORT_ANSWER,
    RowSurvey,
    column_problems,
    mixtures,
    no_rows,
    too_few,
)
from podium.data.templates import parse
from podium.errors import ConfigError, Finding, PodiumError
from podium.errors.rule import Rule
from podium.errors.texts import as_line, as_lines, listed
from podium.planning.columns import chosen_columns, unnamed_columns
from podium.recipe.recipe import Stage
from podium.records import last_user_turn
from podium.rewards.resolve import GIVEN, Reward
from podium.rewards.score import excerpt
from podium.trainer.assembly import plan_of
from podium.trainer.config import GRPOConfig
from podium.trainer.rounds import no_column_to_balance
from podium.trainer.setting_rules import STREAMS

TRIED_ROWS = 1000
"""Rows whose right completion is made on trial, in a stage of supervised fine-tuning."""


def _named(survey: RowSurvey, findings: Iterable[Finding]) -> list[Finding]:
    return [replace(finding, what=f"{survey.name}, {finding.what}") for finding in findings]


def _columns(surveys: Sequence[RowSurvey], given: Mapping[str, Any], has_environment: bool) -> Iterator[Finding]:
    """A column for the prompt, and none with a name that is taken."""
    seen = set[tuple[str, ...]]()
    for survey in surveys:
        names = survey.source.columns or tuple(survey.columns)
        if names and names not in seen:
            proposed = _proposed(names, survey) if given else None
            found = column_problems(names, "dataset", proposed=proposed, needs_prompt=not has_environment)
            yield from _named(survey, found)
        seen.add(names)


def _proposed(names: Sequence[str], survey: RowSurvey) -> dict[str, str]:
    """Templates for rows without a prompt, as `podium init` reads the names of their columns; else left to right."""
    first = {name: column.first for name, column in survey.columns.items()}
    try:
        return chosen_columns(names, [first]).keys
    except ConfigError:
        *asked, told = [f"{{{name}}}" for name in names]
        return {"prompt": " ".join(asked), "answer": told} if asked else {"prompt": told}


def _without_braces(given: Mapping[str, Any], train: RowSurvey) -> Iterator[dict[str, str]]:
    """Templates that are the bare name of a column, or name no column: one text for all rows."""
    names = [*(train.source.columns or ()), *train.columns]
    for key in ("prompt", "answer"):
        text = given.get(key)
        column = str(text).strip("{ }")
        if column in names and text in (column, f"{{{{{column}}}}}"):
            yield {"key": key, "text": text, "column": column}


UNREADABLE = frozenset(
    {"D004", "D024", "D025", "D026", "D027", "D030", "D031", "D034", "D035", "D038", "D039", "D056", "D057", "D058"}
)
"""Codes of findings about rows that cannot be read."""

_FOLLOWING = frozenset({"C015", "C028", "D001", "D015", "D022", "D023"})
"""Codes of findings that only follow from rows that are missing or cannot be used."""


def without_consequences(setup: Setup, found: list[Finding]) -> list[Finding]:
    """Findings less those that only follow from rows that cannot be had, or of which none has a prompt."""
    bad = [survey for survey in setup.surveys if survey.num_bad.total() >= max(survey.num_rows, 1)]
    if any(finding.code in UNREADABLE for finding in [*setup.problems, *(each for s in bad for each in s.findings)]):
        following = _FOLLOWING
    elif setup.assumed.get("filter") and any(finding.code == "C061" for finding in found):
        found = [_no_answer(setup.name, setup.given) if finding.code == "C061" else finding for finding in found]
        found = [finding for index, finding in enumerate(found) if finding not in found[:index]]
        following = _FOLLOWING
    elif bad or any(each.code == "D001" for each in _columns(setup.surveys, setup.given, setup.has_environment)):
        following = _FOLLOWING - {"D001"}
    else:
        return found
    kept = [finding for finding in found if finding.severity != "note" and finding.code not in following]
    return [finding for finding in kept if not _lacks_rewards(finding)]


def _lacks_rewards(finding: Finding) -> bool:
    return finding.facts.get("missing") == "rewards"


def _no_answer(name: str, given: Mapping[str, Any]) -> Finding:
    """The cause of an assumed filter that keeps no row: a column of answers without any."""
    column = _asking_columns(given, "answer")[0]
    return Finding(
        code="D018",
        severity="error",
        what=f"{name}: `{column}` is empty in every row, so no reward can be assumed that compares with it",
        why="a reward cannot judge a completion without the answer",
        fix=f"write the answers into `{column}`, or name rewards that need none (`podium rewards list`)",
        facts={"setup_name": name, "column": column},
    )


def _asking_columns(given: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The columns that a recipe's `prompt` or `answer` names, as the rows have them."""
    template = given.get(key)
    return (parse(template).columns if isinstance(template, str) else ()) or (key,)


_CURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "D013": ("chat: true", {"chat": True}),
    "M004": (
        "model: an instruct model, whose tokenizer has one; without `chat`, `system` and `examples` texts stay plain",
        {},
    ),
}
"""By code, the cure by keys of a recipe: in words, and as changes."""


def _by_keys(finding: Finding, given: Mapping[str, Any], surveys: Sequence[RowSurvey]) -> Finding:
    """A finding whose cure was written for Python, for the reader of a recipe."""
    if not given:
        return finding
    if finding.code == "D014":
        return _with_wider_prompts(finding, surveys)
    if finding.code == "D011" and not {"answer", "answer_from"} & given.keys():
        taken = {"answer_from": LAST_TURN}
        fix = f"if the last turn is the answer you want, take it out of `prompt`: {as_lines(taken)}"
        return replace(finding, fix=fix, changes=taken)
    if finding.code in _CURES:
        fix, changes = _CURES[finding.code]
        return replace(finding, fix=fix, changes=changes)
    if not finding.facts.get("leave_out"):
        return finding
    names = _asking_columns(given, "prompt")
    parts = given.get("dataset")
    own = isinstance(parts, list) and any("prompt" in part for part in parts if isinstance(part, dict))
    has_name = finding.code in ("D002", "D005") and len(names) == 1 and not own  # one for all rows
    changes = _filtered(given, names[0]) if has_name else {}
    cure = f"leave such rows out: {as_lines(changes) or 'delete them in the data'}"
    return replace(finding, fix=cure, changes=changes)


def _filtered(given: Mapping[str, Any], column: str) -> dict[str, Any]:
    """The `filter` that leaves out rows without a value in the column, beside the conditions that are there."""
    conditions = _conditions(given)
    wanted = f"{column} != ''"
    return {"filter": [*conditions, wanted] if conditions else wanted}


def _conditions(given: Mapping[str, Any]) -> list[str]:
    """The conditions of the recipe's `filter`."""
    written = given.get("filter") or []
    return [written] if isinstance(written, str) else list(written)


def _with_wider_prompts(finding: Finding, surveys: Sequence[RowSurvey]) -> Finding:
    """D014 by keys of a recipe; a limit that is raised takes the prompts of all datasets."""
    longest = max(survey.longest[0] for survey in surveys)
    name, value = finding.facts.get("room") or ("", 0)
    changes = {name: longest} if name == "max_prompt_length" else {}
    ways = [f"`{as_line(name, changes.get(name, value))}` {ROOM[name]}"] if name else []
    if finding.severity == "error":
        ways.append(", ".join(f"`overlong_prompts: {word}` {what}" for word, what in OVERLONG.items()))
    return replace(finding, fix="; ".join(ways) or finding.fix, changes=changes)


def _bad_rows(surveys: Sequence[RowSurvey], given: Mapping[str, Any]) -> Iterator[Finding]:
    """Rows that cannot be used, the first of each kind written out."""
    for survey in surveys:
        for code, count in survey.num_bad.items():
            if code == "D001" and "prompt" not in survey.columns:
                continue  # `_columns` reports that the column is missing altogether
            shown = [finding for finding in survey.findings if finding.code == code]
            yield from (_by_keys(finding, given, surveys) for finding in shown)
            if count > MAX_SHOWN:
                what = f"{survey.name}: {count - MAX_SHOWN:,} more rows like these {MAX_SHOWN}"
                yield _by_keys(replace(shown[-1], what=what), given, surveys)


def _shapes(surveys: Sequence[RowSurvey], given: Mapping[str, Any]) -> Iterator[Finding]:
    """Chat and plain rows mixed, turns to be continued, prompts too long, chat rows without a template."""
    for survey in surveys:
        yield from _named(survey, (_by_keys(each, given, surveys) for each in mixtures(survey)))
        if (late_system := survey.counts["late_system"]).count:
            yield Finding(
                code="D012",
                severity="warning",
                what=(
                    f"{survey.name}, {late_system.count:,} conversations have a system message that is not the "
                    f"first ({late_system})"
                ),
                why="many chat templates leave it out without a word, or refuse it",
                fix="put everything the system says into the first message",
            )


def _turns(
    surveys: Sequence[RowSurvey], problems: Sequence[Finding], builder: PromptBuilder | None
) -> Iterator[Finding]:
    """Conversations in which nothing is asked, or of which the template leaves something out; control tokens."""
    toolless = any(finding.code in ("C052", "C053") for finding in problems)  # so calls cannot be rendered
    for survey in surveys:
        nothing_asked = survey.counts["nothing_asked"]
        left_out = survey.counts["left_out"]
        control = survey.counts["control"]
        if count := nothing_asked.count:
            yield Finding(
                code="D042",
                severity="warning",
                what=f"{survey.name}: {count:,} conversations have system messages alone ({nothing_asked})",
                why="they ask nothing, so there is nothing to answer",
                fix='write what is asked as {"role": "user", "content": "..."} behind the system message',
                facts={"survey_name": survey.name, "count": count, "nothing_asked": nothing_asked},
            )
        if left_out.count and not toolless:
            yield Finding(
                code="D043",
                severity="warning",
                what=f"{survey.name}: the chat template leaves out {left_out.example} ({left_out})",
                why="the model is trained on prompts in which that part is missing",
                fix=(
                    "a model whose chat template has tools; or write what the tool was asked and said as text of the "
                    "user's turn"
                ),
            )
        if count := control.count:
            token = control.example
            yield Finding(
                code="D044",
                severity="warning",
                what=(
                    f"{survey.name}: {count:,} prompts have control tokens of the tokenizer in their text, such as "
                    f"`{token}` ({control})"
                ),
                why=(
                    "the model reads them as the end or the beginning of a turn, so that a text can speak for the "
                    "system or the assistant"
                ),
                fix=f"take them out of the data, or write them apart: `{token[:1]} {token[1:]}`",
            )
        if builder is not None and survey.counts["plain"].count:
            yield from _around_plain(survey, builder.tokenizer)


def _around_plain(survey: RowSurvey, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """A token that the tokenizer puts before plain prompts and that they begin with, or an end that it puts behind."""
    written_out = survey.counts["written_out"]
    token = written_out.example
    if token and len(ids := tokenizer(token)["input_ids"]) > 1 and ids[0] == ids[1]:
        yield Finding(
            code="D044",
            severity="warning",
            what=f"{survey.name}: {written_out.count:,} plain prompts begin with `{token}`, which the "
            f"tokenizer puts before them as well ({written_out})",
            why="the model reads it twice, as it never did in its training",
            fix="the lists of messages themselves as prompts; or take the token out of these texts",
            facts={"name": survey.name, "token": token, "rows": written_out},
        )
    if tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id:
        yield Finding(
            code="D044",
            severity="warning",
            what=f"{survey.name}: the tokenizer puts its end token `{tokenizer.eos_token}` behind every plain prompt",
            why="the model is asked to go on after the end of a text, and writes another one",
            fix="a tokenizer that was made with add_eos_token=False; or prompts as messages, which the chat "
            "template ends",
            facts={"name": survey.name, "token": tokenizer.eos_token},
        )


def _written_as_text(surveys: Sequence[RowSurvey]) -> Iterator[Finding]:
    """Prompts that are the text of a list of messages, and not the list."""
    for survey in surveys:
        asked = (last_user_turn(row["prompt"]) for row in survey.examples if row.get("prompt"))
        texts = [text for text in asked if _MESSAGES.match(text)]
        if texts:
            yield Finding(
                code="D059",
                severity="warning",
                what=(
                    f"{survey.name}: {len(texts)} of {len(survey.examples)} prompts are the text of a list of "
                    f"messages, {excerpt(texts[0])}"
                ),
                why="the model is asked with brackets, roles and quotes in one message",
                fix=(
                    "write the list itself, in a .jsonl file or as dataset.map(lambda row: "
                    '{"prompt": json.loads(row["prompt"])})'
                ),
            )


_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")

_INSTRUCT = re.compile(r"instruct|chat|[-_]it\b", re.IGNORECASE)
"""In the names of models that were trained on conversations."""


def _unasked_in_chat(
    train: RowSurvey, builder: PromptBuilder, has_program: bool, given: Mapping[str, Any]
) -> Finding | None:
    """Plain prompts, and a model with a chat template."""
    if builder.chat_template is None or has_program:
        return None
    if not train.counts["plain"].count or train.counts["chat"].count or train.counts["written_out"].count:
        return None
    name = f"{given.get('model', '')} {builder.tokenizer.name_or_path}"
    changes = {"chat": True} if given else {}
    return Finding(
        code="D045",
        severity="warning" if _INSTRUCT.search(name) else "note",
        what=f"{train.name}: the prompts are plain texts, and the model's tokenizer has a chat template",
        why="a model that was trained on conversations continues a plain text rather than to answer it",
        fix=as_lines(changes) or 'prompts as [{"role": "user", "content": text}]',
        changes=changes,
    )


def _has_no_room(builder: PromptBuilder) -> bool:
    """Prompts that are allowed and have no place before the longest completion."""
    if builder.max_prompt_length is None or builder.context_room is None:
        return False
    return builder.max_prompt_length > builder.context_room


def _enough(
    surveys: Sequence[RowSurvey], given: Mapping[str, Any], args: GRPOConfig | None, train: RowSurvey | None
) -> Iterator[Finding]:
    """Rows at all, and as many as one generation round takes."""
    for survey in surveys:
        if not survey.num_rows:
            yield from _named(survey, [no_rows(survey.name, held_out=bool(given.get("held_out")))])
    if train is None or args is None or "D027" in train.num_bad:
        return  # D027: behind an open quote no row was read
    if train.num_rows and not train.source.is_stream:
        yield from _named(train, too_few(train, plan_of(args).prompts_per_round))


def _without_column(args: GRPOConfig, train: RowSurvey) -> ConfigError | None:
    """A column to balance that the rows do not have."""
    names = list(train.source.columns or train.columns)
    if args.balance_column is None or not names or args.balance_column in names:
        return None
    return no_column_to_balance(args.balance_column, names)


def _repeats(train: RowSurvey, plays: bool, given: Mapping[str, Any]) -> Iterator[Finding]:
    """The same prompt more than once, and with different answers."""
    if not train.prompts.num_repeats or plays:  # whose other columns tell them apart
        return
    prompts = train.prompts
    about = "" if prompts.exact else "about "
    row, first = prompts.first_repeat or (-1, -1)
    repeat = "row repeats" if prompts.num_repeats == 1 else "rows repeat"
    occur = "prompt occurs" if prompts.num_repeated == 1 else "prompts occur"
    why = "a prompt that occurs twice is trained on twice as often"
    if given.get("held_out") is None:  # which goes by the prompt
        why = f"{why}, and a split made at random leaks into evaluation"
    yield Finding(
        code="D016",
        severity="warning",
        what=(
            f"{train.name}: {about}{prompts.num_repeats:,} {repeat} the prompt of another row, white space and "
            f"capitals aside ({about}{prompts.num_repeated:,} {occur} more than once; row {row} repeats row {first})"
        ),
        why=why,
        fix=_one_of_each(given, train),
    )
    if prompts.first_contradiction is not None:
        row, answer, first, other = prompts.first_contradiction
        yield Finding(
            code="D041",
            severity="warning",
            what=(
                f"{train.name}: {prompts.num_contradicting:,} rows have another answer than an earlier row with the "
                f"same prompt (row {row}: `{answer}`, row {first}: `{other}`)"
            ),
            why="what one of them rewards the other one punishes",
            fix="correct the wrong rows; where several answers are right, write one row with a list of them",
        )


def _one_of_each(given: Mapping[str, Any], train: RowSurvey) -> str:
    if not given:
        return "keep one of each: Dataset.from_pandas(dataset.to_pandas().drop_duplicates('prompt'))"
    names = _asking_columns(given, "prompt")
    file = Path(train.name)
    kind = kind_of(file)
    if len(names) > 1 or train.source.form or kind not in _TABLES:
        return f"keep one row of each {' and '.join(names)} in the data"
    read, write = _TABLES[kind]
    to = file.with_name(f"{file.stem}-unique{file.suffix}")
    alike = f"~t['{names[0]}'].astype(str).str.casefold().str.split().str.join(' ').duplicated()"
    program = f"import pandas; pandas.{read.format(file)}.loc[lambda t: {alike}].{write.format(to)}"
    return f'keep one of each: python -c "{program}"; then dataset: {to}'


_TABLES = {
    ".csv": ("read_csv('{}', dtype=str)", "to_csv('{}', index=False)"),
    ".jsonl": ("read_json('{}', lines=True, dtype=False)", "to_json('{}', orient='records', lines=True)"),
    ".json": ("read_json('{}', dtype=False)", "to_json('{}', orient='records')"),
    ".parquet": ("read_parquet('{}')", "to_parquet('{}')"),
}
"""Calls of pandas that read and write a kind of file."""


def _leaks(train: RowSurvey, held_out: RowSurvey, plays: bool, given: Mapping[str, Any]) -> Finding | None:
    """Held-out prompts that are trained on."""
    shared = train.counts["shared"]
    if not shared.count or plays:
        return None
    about = "" if held_out.prompts.exact else "at least "
    fix = "take these rows out of the training set"
    if given:
        fix = f"{fix}; or `held_out: 0.1` in place of `eval_dataset`, which never overlaps"
    return Finding(
        code="D017",
        severity="warning",
        what=(f"{about}{shared.count:,} rows of {train.name} have a prompt that is in {held_out.name} too ({shared})"),
        why="numbers on prompts that were trained on say nothing about new ones",
        fix=fix,
    )


def _unusable_answers(
    surveys: Sequence[RowSurvey], rewards: Sequence[Reward], given: Mapping[str, Any]
) -> Iterator[Finding]:
    """Null values in columns that a reward function asks for, and answers that are marked as missing."""
    for survey in surveys:
        for name, column in survey.columns.items():
            askers = [reward for reward in rewards if _asks(reward, name)]
            if askers and name in GOLD and column.absent.count:
                yield _marked_as_missing(given, survey, name, askers[0])
            if not askers or not column.nulls.count:
                continue
            empty = column.nulls.count == survey.num_rows
            fix, changes = _without_nulls(given, name, empty=empty)
            yield Finding(
                code="D018",
                severity="error" if empty else "warning",
                what=(
                    f"{survey.name}: `{name}` is null in {column.nulls.count:,} of {survey.num_rows:,} rows "
                    f"({column.nulls}), and reward `{askers[0].name}` asks for it"
                ),
                why="a reward cannot judge a completion without the answer",
                fix=fix,
                changes=changes,
            )


def _marked_as_missing(given: Mapping[str, Any], survey: RowSurvey, name: str, asker: Reward) -> Finding:
    """D018 for answers such as an empty text, `N/A` or NaN."""
    column = survey.columns[name]
    marks = sorted(column.marks)[:MAX_SHOWN]
    texts = [mark for mark in marks if mark.startswith(("'", '"'))]
    changes: dict[str, Any] = {}
    leave_out = "leave such rows out"
    if given and len(texts) == len(marks) and not (given.get("answer_from") and name == "answer"):
        where = _asking_columns(given, name)[0]
        changes = {"filter": [*_conditions(given), *(f"{where} != {mark}" for mark in texts)]}
        leave_out = f"{as_lines(changes)}, which leaves such rows out"
    return Finding(
        code="D018",
        severity="warning",
        what=(
            f"{survey.name}: `{name}` is {listed(marks)} in {column.absent.count:,} of {survey.num_rows:,} rows "
            f"({column.absent!s}), and reward `{asker.name}` compares with it"
        ),
        why=(
            "read as a right answer it is one that no completion should be paid for; read as none, these completions "
            "are not trained on"
        ),
        fix=f"{leave_out}; nothing, if that is what should be answered there",
        changes=changes,
        facts={
            "survey_name": survey.name,
            "name": name,
            "marks": marks,
            "asker": asker.name,
            "count": column.absent.count,
            "num_rows": survey.num_rows,
            "rows": str(column.absent),
        },
    )


def _without_nulls(given: Mapping[str, Any], name: str, *, empty: bool) -> tuple[str, dict[str, Any]]:
    """The fix for null values in a column, and its changes. `empty`: there are no other values."""
    if empty:
        return f"write the values of `{name}` into the data, or name the column that has them", {}
    if not given:
        return f'leave such rows out: dataset = dataset.filter(lambda row: row["{name}"] is not None)', {}
    if given.get("answer_from") and name == "answer":
        return "correct `answer_from` or these rows, or leave such rows out: delete them in the data", {}
    changes = _filtered(given, _asking_columns(given, name)[0])
    return f"leave such rows out: {as_lines(changes)}", changes


def _asks(reward: Reward, column: str) -> bool:
    return column not in GIVEN and (column in reward.needs or (reward.wants is not None and column in reward.wants))


def _named_by_a_value(train: RowSurvey) -> dict[str, str] | None:
    """A column of a table that has a value for its name: the first row of a file without a header."""
    if kind_of(Path(train.name)) != ".csv":
        return None
    column = unnamed_columns(list(train.columns), train.examples)
    return {"survey_name": train.name, "column": column} if column else None


SAME_ANSWERS = 16
"""Rows from which on a single answer for all of them is suspect."""


def _same_answers(train: RowSurvey, rewards: Sequence[Reward]) -> Iterator[dict[str, Any]]:
    """Training rows that all have one short answer."""
    for name, column in train.columns.items():
        value = column.first
        count = train.num_rows - column.nulls.count
        if name not in GOLD or column.differ or count < SAME_ANSWERS or not 0 < len(str(value)) <= SHORT_ANSWER:
            continue
        if any(_asks(reward, name) for reward in rewards):
            yield {"survey_name": train.name, "name": name, "value": value, "count": count}


MOST_ANSWERS = 0.8
"""Share of the answers from which on their common words are no accident."""


def _sentences(train: RowSurvey, rewards: Sequence[Reward], given: Mapping[str, Any]) -> Finding | None:
    """Training answers that are sentences around a short answer."""
    if given.get("answer_from") or not any(_asks(each, "answer") for each in rewards):
        return None
    rows = [row for row in train.examples if re.match(r"\s*[^\s{\[<]", _text_of(row.get("answer")))]
    if len(rows) < SAME_ANSWERS:
        return None
    texts = [" ".join(row["answer"].split()) for row in rows]
    way, count = _common_words(texts)
    if not way:
        way = "last number"
        count = sum(_computes(row["prompt"], text) for row, text in zip(rows, texts, strict=True))
    if count < MOST_ANSWERS * len(rows):
        return None
    take = answer_extractor(way)
    whole, part = next((text, found) for text in texts if (found := take(text)) is not None)
    changes = {"answer_from": way} if given else {}
    return Finding(
        code="D047",
        severity="warning",
        what=(
            f"{train.name}: {count:,} of {len(rows):,} answers are sentences around a short answer, for example "
            f"{excerpt(whole)} around {excerpt(part)}"
        ),
        why="a reward that compares with the answer requires every word of the sentence",
        fix=as_lines(changes) or f'podium.data.load(..., answer_from="{way}")',
        changes=changes,
    )


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _common_words(texts: Sequence[str]) -> tuple[str, int]:
    """The `answer_from` for two words or more in front of one or two that vary, and how many texts begin with them."""
    leads = Counter(text[: space.end()] for text in texts for space in re.finditer(r"(?<=\w|:) ", text))
    often = [lead for lead, count in leads.items() if count >= MOST_ANSWERS * len(texts)]
    lead = max(often, key=len, default="")
    rest = [text.removeprefix(lead) for text in texts if text.startswith(lead)]
    short = [text for text in rest if len(text.split()) <= 2]
    if len(lead.split()) < 2 or len(short) < MOST_ANSWERS * len(texts) or len(set(short)) < 2:
        return "", 0
    if all(len(numbers(text)) == 1 and not re.search(r"[^\W\d_]", text) for text in short):
        return "last number", len(short)
    if all(text.endswith(".") for text in short):
        return f"regex:{re.escape(lead.strip())} (.+)\\.$".replace("\\ ", " "), len(short)
    return f"after {lead.strip()}", len(short)


def _computes(prompt: Any, answer: str) -> bool:
    """Whether an answer has several words and one number, which the question does not have."""
    found = numbers(answer)
    return len(found) == 1 and len(answer.split()) > 2 and found[0] not in numbers(last_user_turn(prompt))


_TEXTS = {"str", "int", "float", "bool"}
"""Types that are read as texts where a column of a file mixes them with texts."""


def _mixed_types(
    surveys: Sequence[RowSurvey], rewards: Sequence[Reward], given: Mapping[str, Any]
) -> Iterator[Finding]:
    """Values of several types in one column of answers."""
    for survey in surveys:
        for name, column in survey.columns.items():
            if name == "prompt" or len(column.kinds) < 2 or not any(_asks(reward, name) for reward in rewards):
                continue
            counts = ", ".join(f"{count:,} {kind}" for kind, count in column.kinds.most_common())
            passed = "texts" if given and set(column.kinds) <= _TEXTS else "they are"
            fix = "write one type in every row, for example str(answer)"
            if given and name == "answer":
                fix = f'answer: "{{{name}}}", a template, which gives text'
            yield Finding(
                code="D019",
                severity="note",
                what=f"{survey.name}: column `{name}` holds {counts}; they are passed to the rewards as {passed}",
                why='a reward that compares with == says 4 is not "4"',
                fix=fix,
            )


def _long_answers(builder: PromptBuilder, surveys: Sequence[RowSurvey], given: Mapping[str, Any]) -> Iterator[Finding]:
    """Gold answers that no completion has room for."""
    limit = builder.max_completion_length
    for survey in surveys:
        for name in GOLD:
            column = survey.columns.get(name)
            if column is None or not column.long.count:
                continue
            tokens, row = column.longest
            yield Finding(
                code="D037",
                severity="warning",
                what=(
                    f"{survey.name}: {column.long.count:,} values of `{name}` have more tokens than "
                    f"max_completion_length {limit} ({column.long}; longest, row {row}: {tokens:,} tokens)"
                ),
                why="the model is cut off before it can have written them",
                fix=line(given, "max_completion_length", tokens),
                changes={"max_completion_length": tokens},
            )


def _lengths(train: RowSurvey, builder: PromptBuilder, has_program: bool, has_environment: bool) -> Finding | None:
    """Lengths of the prompts, and of rollouts with them; of a program the limit of its answers alone."""
    if not train.lengths:
        return None
    completion = builder.max_completion_length or 0
    if has_program:
        return Finding(
            code="D040",
            severity="note",
            what=f"{train.name}: {train.num_rows:,} rows; the agent writes the prompts, whose lengths are not "
            f"known before it runs; behind them an episode has at most {completion:,} tokens, all its "
            "branches together",
            facts={"survey_name": train.name, "count": train.num_rows, "tokens": completion},
        )
    low, middle, high = np.quantile(train.lengths, [0.05, 0.5, 0.95]).round().astype(int)
    longest = train.longest[0]
    room = f" of the model's {builder.context_length:,} positions" if builder.context_length else ""
    more = ", beside what `reset` adds to its prompt" if has_environment else ""
    return Finding(
        code="D040",
        severity="note",
        what=(
            f"{train.name}: {train.num_rows:,} rows; prompts have {low:,} / {middle:,} / {high:,} tokens "
            f"(5 % / 50 % / 95 %), the longest {longest:,}; with completions of {completion:,} a rollout takes at most "
            f"{longest + completion:,}{room}{more}"
        ),
    )


def _sampled(surveys: Sequence[RowSurvey], has_program: bool) -> Iterator[Finding]:
    """A note that only a sample of the prompts was measured."""
    for survey in surveys:
        if survey.stride == 1 or not survey.lengths or has_program:
            continue
        yield Finding(
            code="D032",
            severity="note",
            what=(
                f"{survey.name}: {survey.num_rows:,} rows; every row was looked at, and the tokens counted of "
                f"{len(survey.lengths):,} spread evenly, of the {len(survey.largest):,} largest others and of "
                f"{survey.num_suspects:,} that may be too long"
            ),
            why=f"counting tokens is the slow part: of more than {MEASURED_ROWS:,} rows a sample is taken",
        )


def _odd_text(surveys: Sequence[RowSurvey], given: Mapping[str, Any]) -> Iterator[Finding]:
    """NUL characters, very large rows, a byte-order mark."""
    for survey in surveys:
        if (nul := survey.counts["nul"]).count:
            yield Finding(
                code="D033",
                severity="warning",
                what=f"{survey.name}: {nul.count:,} prompts have a NUL character in them ({nul})",
                why="it is a trace of a wrong decoding, and C libraries end a text there",
                fix="take them out of the data" if given else r'text.replace("\x00", "")',
            )
        if (large := survey.counts["large"]).count:
            yield Finding(
                code="D033",
                severity="warning",
                what=f"{survey.name}: {large.count:,} prompts have over a million characters ({large})",
                why="they are hardly prompts; a missing line break or quote makes such rows",
                fix="look at these rows",
                facts={
                    "survey_name": survey.name,
                    "count": survey.counts["large"].count,
                    "large": survey.counts["large"],
                },
            )
        if survey.source.form:
            yield Finding(
                code="D028",
                severity="note",
                what=f"{survey.name} is read as {survey.source.form}",
                fix="nothing; other tools may trip over it",
                facts={"survey_name": survey.name, "form": survey.source.form},
            )


def _right_completions(stage: Stage, train: RowSurvey | None) -> list[Finding]:
    """Problems that keep an SFT stage from starting: its arguments, and rows without a right completion."""
    if stage.kind != "sft":
        return []
    try:
        stage.sft_arguments()
        tried = [] if train is None else [row for _, row in islice(train.source.rows(), TRIED_ROWS)]
        rows = [row for row in tried if isinstance(row, dict) and row.get("prompt")]
        if train is not None and rows:
            right = Completions.of(stage.completion, train.source.columns or tuple(rows[0]))
            for row in rows:
                right(row)
    except PodiumError as error:
        return findings_of(error, stage.recipe.name)
    return []


RULES: tuple[Rule, ...] = (
    Rule(needs=("surveys", "given", "has_environment"), when=_columns),
    Rule(
        code="D052",
        severity="warning",
        needs=("given", "train"),
        when=_without_braces,
        says=lambda given, train, *, key, text, column: (
            f"{key} `{text}` is the same text for every row, and there is a column of this name"
        ),
        cure=lambda given, train, *, key, text, column: {key: f"{{{column}}}"},
        about=lambda given, train, *, key, text, column: (key,),
    ),
    Rule(
        code="D048",
        severity="warning",
        needs=("train",),
        when=_named_by_a_value,
        says=lambda train, *, survey_name, column: (
            f"{survey_name}: the column `{column}` has a name that looks like one of its values"
        ),
        why="the first line of the file is taken for names, and seems to be a row, which is lost",
        cure="write a line with the names above it, such as question,answer; then name these columns",
    ),
    Rule(needs=("surveys", "given"), when=_bad_rows),
    Rule(needs=("surveys", "given"), when=_shapes),
    Rule(needs=("surveys", "problems"), wants=("builder",), when=_turns),
    Rule(code="D045", needs=("train", "builder", "has_program", "given"), when=_unasked_in_chat),
    Rule(code="D059", needs=("surveys",), when=_written_as_text),
    Rule(
        code="D015",
        severity="warning",
        needs=("builder",),
        when=_has_no_room,
        says=lambda builder: (
            f"max_prompt_length {builder.max_prompt_length:,} and max_completion_length "
            f"{builder.max_completion_length or 0:,} are more than the {builder.context_length:,} positions of the "
            "model"
        ),
        why=lambda builder: f"a prompt may have {builder.context_room:,} tokens, whatever max_prompt_length says",
        cure=lambda builder: {"max_prompt_length": builder.context_room},
        about=("max_prompt_length",),
    ),
    Rule(needs=("surveys", "given"), wants=("settings", "train"), when=_enough),
    *STREAMS,
    Rule(code="C064", needs=("settings", "train"), when=_without_column),
    Rule(needs=("train", "plays", "given"), when=_repeats),
    Rule(code="D017", needs=("train", "evaluation", "plays", "given"), when=_leaks),
    Rule(code="D018", needs=("surveys", "rewards", "given"), when=_unusable_answers),
    Rule(
        code="D046",
        severity="warning",
        needs=("train", "rewards"),
        when=_same_answers,
        says=lambda train, rewards, *, survey_name, name, value, count: (
            f"{survey_name}: `{name}` is `{value}` in all of {count:,} rows"
        ),
        why="one text that ignores the prompt earns every reward, and that is what is learnt",
        cure="add rows with other answers, or shuffle a sorted file",
    ),
    Rule(code="D047", needs=("train", "rewards", "given"), when=_sentences),
    Rule(code="D019", needs=("surveys", "rewards", "given"), when=_mixed_types),
    Rule(needs=("surveys", "given"), when=_odd_text),
    Rule(code="D040", needs=("train", "builder", "has_program", "has_environment"), when=_lengths),
    Rule(code="D032", needs=("surveys", "has_program"), when=_sampled),
)

LONG_ANSWERS = Rule(code="D037", needs=("builder", "surveys", "given"), when=_long_answers)

RIGHT_COMPLETIONS = Rule(needs=("stage",), wants=("train",), when=_right_completions)
