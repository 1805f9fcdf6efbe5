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

from podium.checks.setup import Setup, findings_of
from podium.data.check import column_problems, mixtures, no_rows, too_few
from podium.data.columns import GOLD, LAST_TURN, answer_extractor
from podium.data.completions import Completions
from podium.data.extract import numbers
from podium.data.files import kind_of
from podium.data.prompts import OVERLONG, ROOM
from podium.data.survey import MAX_SHOWN, MEASURED_ROWS, SHORT_ANSWER, RowSurvey
from podium.data.templates import parse
from podium.errors import ConfigError, Finding, PodiumError, Severity
from podium.errors.rule import Facts, findings
from podium.errors.texts import as_line, as_lines, listed
from podium.planning.answer_columns import chosen_columns
from podium.planning.understood import unnamed_columns
from podium.records import last_user_turn
from podium.rewards.resolve import GIVEN, Reward
from podium.rewards.score import excerpt
from podium.trainer.assembly import plan_of
from podium.trainer.preflight import STREAMS
from podium.trainer.rounds import no_column_to_balance

TRIED_ROWS = 1000
"""Rows whose right completion is made on trial, in a stage of supervised fine-tuning."""


def _surveys(setup: Setup) -> list[RowSurvey]:
    return [survey for survey in (setup.train, setup.evaluation) if survey is not None]


def _named(survey: RowSurvey, findings: Iterable[Finding]) -> list[Finding]:
    return [replace(finding, what=f"{survey.name}, {finding.what}") for finding in findings]


def columns(setup: Setup) -> Iterator[Finding]:
    """A column for the prompt, and none with a name that is taken."""
    seen = set[tuple[str, ...]]()
    for survey in _surveys(setup):
        names = survey.source.columns or tuple(survey.columns)
        if names and names not in seen:
            proposed = _proposed(names, survey) if setup.given else None
            found = column_problems(names, "dataset", proposed=proposed, needs_prompt=not setup.has_environment)
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


def without_braces(setup: Setup) -> Iterator[Finding]:
    """Templates that are the bare name of a column, or name no column: one text for all rows."""
    names = () if setup.train is None else [*(setup.train.source.columns or ()), *setup.train.columns]
    for key in ("prompt", "answer"):
        text = setup.given.get(key)
        column = str(text).strip("{ }")
        if column in names and text in (column, f"{{{{{column}}}}}"):
            what = f"{setup.at(key)} `{text}` is the same text for every row, and there is a column of this name"
            changes = {key: f"{{{column}}}"}
            yield Finding(severity="warning", code="D052", what=what, fix=as_lines(changes), changes=changes)


UNREADABLE = frozenset(
    {"D004", "D024", "D025", "D026", "D027", "D030", "D031", "D034", "D035", "D038", "D039", "D056", "D057", "D058"}
)
"""Codes of findings about rows that cannot be read."""

_FOLLOWING = frozenset({"C015", "C028", "D001", "D015", "D022", "D023"})
"""Codes of findings that only follow from rows that are missing or cannot be used."""


def without_consequences(setup: Setup, found: list[Finding]) -> list[Finding]:
    """Findings less those that only follow from rows that cannot be had, or of which none has a prompt."""
    bad = [survey for survey in _surveys(setup) if survey.num_bad.total() >= max(survey.num_rows, 1)]
    if any(finding.code in UNREADABLE for finding in [*setup.problems, *(each for s in bad for each in s.findings)]):
        following = _FOLLOWING
    elif setup.assumed.get("filter") and any(finding.code == "C061" for finding in found):
        found = [_no_answer(setup) if finding.code == "C061" else finding for finding in found]
        found = [finding for index, finding in enumerate(found) if finding not in found[:index]]
        following = _FOLLOWING
    elif bad or any(finding.code == "D001" for finding in columns(setup)):
        following = _FOLLOWING - {"D001"}
    else:
        return found
    kept = [finding for finding in found if finding.severity != "note" and finding.code not in following]
    return [finding for finding in kept if not _lacks_rewards(finding)]


def _lacks_rewards(finding: Finding) -> bool:
    return finding.facts.get("missing") == "rewards"


def _no_answer(setup: Setup) -> Finding:
    """The cause of an assumed filter that keeps no row: a column of answers without any."""
    column = _asking_columns(setup, "answer")[0]
    return Finding(
        code="D018",
        severity="error",
        what=f"{setup.name}: `{column}` is empty in every row, so no reward can be assumed that compares with it",
        why="a reward cannot judge a completion without the answer",
        fix=f"write the answers into `{column}`, or name rewards that need none (`podium rewards list`)",
        facts={"setup_name": setup.name, "column": column},
    )


def _asking_columns(setup: Setup, key: str) -> tuple[str, ...]:
    """The columns that a recipe's `prompt` or `answer` names, as the rows have them."""
    template = setup.given.get(key)
    return (parse(template).columns if isinstance(template, str) else ()) or (key,)


_CURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "D013": ("chat: true", {"chat": True}),
    "M004": (
        "model: an instruct model, whose tokenizer has one; without `chat`, `system` and `examples` texts stay plain",
        {},
    ),
}
"""By code, the cure by keys of a recipe: in words, and as changes."""


def _by_keys(setup: Setup, finding: Finding) -> Finding:
    """A finding whose cure was written for Python, for the reader of a recipe."""
    if not setup.given:
        return finding
    if finding.code == "D014":
        return _with_wider_prompts(setup, finding)
    if finding.code == "D011" and not {"answer", "answer_from"} & setup.given.keys():
        taken = {"answer_from": LAST_TURN}
        fix = f"if the last turn is the answer you want, take it out of `prompt`: {as_lines(taken)}"
        return replace(finding, fix=fix, changes=taken)
    if finding.code in _CURES:
        fix, changes = _CURES[finding.code]
        return replace(finding, fix=fix, changes=changes)
    if not finding.facts.get("leave_out"):
        return finding
    names = _asking_columns(setup, "prompt")
    parts = setup.given.get("dataset")
    own = isinstance(parts, list) and any("prompt" in part for part in parts if isinstance(part, dict))
    has_name = finding.code in ("D002", "D005") and len(names) == 1 and not own  # one for all rows
    changes = _filtered(setup, names[0]) if has_name else {}
    cure = f"leave such rows out: {as_lines(changes) or 'delete them in the data'}"
    return replace(finding, fix=cure, changes=changes)


def _filtered(setup: Setup, column: str) -> dict[str, Any]:
    """The `filter` that leaves out rows without a value in the column, beside the conditions that are there."""
    given = _conditions(setup)
    wanted = f"{column} != ''"
    return {"filter": [*given, wanted] if given else wanted}


def _conditions(setup: Setup) -> list[str]:
    """The conditions of the recipe's `filter`."""
    given = setup.given.get("filter") or []
    return [given] if isinstance(given, str) else list(given)


def _with_wider_prompts(setup: Setup, finding: Finding) -> Finding:
    """D014 by keys of a recipe; a limit that is raised takes the prompts of all datasets."""
    longest = max(survey.longest[0] for survey in _surveys(setup))
    name, value = finding.facts.get("room") or ("", 0)
    changes = {name: longest} if name == "max_prompt_length" else {}
    ways = [f"`{as_line(name, changes.get(name, value))}` {ROOM[name]}"] if name else []
    if finding.severity == "error":
        ways.append(", ".join(f"`overlong_prompts: {word}` {what}" for word, what in OVERLONG.items()))
    return replace(finding, fix="; ".join(ways) or finding.fix, changes=changes)


def bad_rows(setup: Setup) -> Iterator[Finding]:
    """Rows that cannot be used, the first of each kind written out."""
    for survey in _surveys(setup):
        for code, count in survey.num_bad.items():
            if code == "D001" and "prompt" not in survey.columns:
                continue  # `columns` reports that the column is missing altogether
            shown = [finding for finding in survey.findings if finding.code == code]
            yield from (_by_keys(setup, finding) for finding in shown)
            if count > MAX_SHOWN:
                what = f"{survey.name}: {count - MAX_SHOWN:,} more rows like these {MAX_SHOWN}"
                yield _by_keys(setup, replace(shown[-1], what=what))


def shapes(setup: Setup) -> Iterator[Finding]:
    """Chat and plain rows mixed, turns to be continued, prompts too long, chat rows without a template."""
    for survey in _surveys(setup):
        yield from _named(survey, (_by_keys(setup, each) for each in mixtures(survey)))
        if survey.late_system.count:
            what = f"{survey.name}, {survey.late_system.count:,} conversations have a system message that is not the "
            what += f"first ({survey.late_system})"
            why = "many chat templates leave it out without a word, or refuse it"
            fix = "put everything the system says into the first message"
            yield Finding(severity="warning", code="D012", what=what, why=why, fix=fix)


def turns(setup: Setup) -> Iterator[Finding]:
    """Conversations in which nothing is asked, or of which the template leaves something out; control tokens."""
    for survey in _surveys(setup):
        if count := survey.nothing_asked.count:
            yield Finding(
                code="D042",
                severity="warning",
                what=f"{survey.name}: {count:,} conversations have system messages alone ({survey.nothing_asked})",
                why="they ask nothing, so there is nothing to answer",
                fix='write what is asked as {"role": "user", "content": "..."} behind the system message',
                facts={"survey_name": survey.name, "count": count, "nothing_asked": survey.nothing_asked},
            )
        toolless = any(finding.code in ("C052", "C053") for finding in setup.problems)  # so calls cannot be rendered
        if (count := survey.left_out.count) and not toolless:
            what = f"{survey.name}: the chat template leaves out {survey.first_left_out} ({survey.left_out})"
            why = "the model is trained on prompts in which that part is missing"
            fix = "a model whose chat template has tools; or write what the tool was asked and said as text of the "
            fix += "user's turn"
            yield Finding(severity="warning", code="D043", what=what, why=why, fix=fix)
        if count := survey.control.count:
            what = f"{survey.name}: {count:,} prompts have control tokens of the tokenizer in their text, such as "
            what += f"`{survey.first_control}` ({survey.control})"
            why = "the model reads them as the end or the beginning of a turn, so that a text can speak for the "
            why += "system or the assistant"
            fix = f"take them out of the data, or write them apart: `{survey.first_control[:1]} "
            fix += f"{survey.first_control[1:]}`"
            yield Finding(severity="warning", code="D044", what=what, why=why, fix=fix)
        yield from _around_plain(setup, survey)


def _around_plain(setup: Setup, survey: RowSurvey) -> Iterator[Finding]:
    """A token that the tokenizer puts before plain prompts and that they begin with, or an end that it puts behind."""
    if setup.builder is None or not survey.plain_rows.count:
        return
    tokenizer = setup.builder.tokenizer
    token = survey.first_written_out
    if token and len(ids := tokenizer(token)["input_ids"]) > 1 and ids[0] == ids[1]:
        yield Finding(
            code="D044",
            severity="warning",
            what=f"{survey.name}: {survey.written_out.count:,} plain prompts begin with `{token}`, which the "
            f"tokenizer puts before them as well ({survey.written_out})",
            why="the model reads it twice, as it never did in its training",
            fix="the lists of messages themselves as prompts; or take the token out of these texts",
            facts={"name": survey.name, "token": token, "rows": survey.written_out},
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


def written_as_text(setup: Setup) -> Iterator[Finding]:
    """Prompts that are the text of a list of messages, and not the list."""
    for survey in _surveys(setup):
        asked = (last_user_turn(row["prompt"]) for row in survey.examples if row.get("prompt"))
        texts = [text for text in asked if _MESSAGES.match(text)]
        if texts:
            what = f"{survey.name}: {len(texts)} of {len(survey.examples)} prompts are the text of a list of messages, "
            what += f"{excerpt(texts[0])}"
            why = "the model is asked with brackets, roles and quotes in one message"
            fix = "write the list itself, in a .jsonl file or as dataset.map(lambda row: "
            fix += '{"prompt": json.loads(row["prompt"])})'
            yield Finding(severity="warning", code="D059", what=what, why=why, fix=fix)


_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")

_INSTRUCT = re.compile(r"instruct|chat|[-_]it\b", re.IGNORECASE)
"""In the names of models that were trained on conversations."""


def unasked_in_chat(setup: Setup) -> Iterator[Finding]:
    """Plain prompts, and a model with a chat template."""
    train, builder = setup.train, setup.builder
    if train is None or builder is None or builder.chat_template is None or setup.has_program:
        return
    if not train.plain_rows.count or train.chat_rows.count or train.written_out.count:
        return
    name = f"{setup.given.get('model', '')} {builder.tokenizer.name_or_path}"
    what = f"{train.name}: the prompts are plain texts, and the model's tokenizer has a chat template"
    why = "a model that was trained on conversations continues a plain text rather than to answer it"
    changes = {"chat": True} if setup.given else {}
    fix = as_lines(changes) or 'prompts as [{"role": "user", "content": text}]'
    severity: Severity = "warning" if _INSTRUCT.search(name) else "note"
    yield Finding(code="D045", severity=severity, what=what, why=why, fix=fix, changes=changes)


def room(setup: Setup) -> Iterator[Finding]:
    """Prompts that are allowed and have no place before the longest completion."""
    builder = setup.builder
    if builder is None or builder.max_prompt_length is None or builder.context_room is None:
        return
    if builder.max_prompt_length <= builder.context_room:
        return
    what = f"{setup.at('max_prompt_length')} {builder.max_prompt_length:,} and max_completion_length "
    what += f"{builder.max_completion_length or 0:,} are more than the {builder.context_length:,} positions of the "
    what += "model"
    why = f"a prompt may have {builder.context_room:,} tokens, whatever max_prompt_length says"
    cure = setup.cure("max_prompt_length", builder.context_room)
    yield Finding(severity="warning", code="D015", what=what, why=why, **cure)


def enough(setup: Setup) -> Iterator[Finding]:
    """Rows at all, and as many as one generation round takes."""
    for survey in _surveys(setup):
        if not survey.num_rows:
            yield from _named(survey, [no_rows(survey.name, held_out=bool(setup.given.get("held_out")))])
    train = setup.train
    if train is not None and "D027" in train.num_bad:
        return  # behind an open quote no row was read
    if train is not None and setup.args is not None and train.num_rows and not train.source.is_stream:
        yield from _named(train, too_few(train, plan_of(setup.args).prompts_per_round))


def streams(setup: Setup) -> Iterator[Finding]:
    """Settings that ask for more than a stream can give."""
    streamed = bool(setup.given.get("dataset_streaming") or setup.given.get("streaming"))
    is_stream = [streamed or survey.source.is_stream for survey in _surveys(setup)]
    if setup.args is not None and any(is_stream):
        stream = "train" if setup.train is not None and is_stream[0] else "evaluation"
        yield from findings(STREAMS, Facts(settings=setup.args, stream=stream))


def balance(setup: Setup) -> Iterator[Finding]:
    """A column to balance that the rows do not have."""
    column = None if setup.args is None else setup.args.balance_column
    names = [] if setup.train is None else list(setup.train.source.columns or setup.train.columns)
    if column is not None and names and column not in names:
        yield setup.finding(no_column_to_balance(column, names), "balance_column")


def repeats(setup: Setup) -> Iterator[Finding]:
    """The same prompt more than once, and with different answers."""
    train = setup.train
    if train is None or not train.prompts.num_repeats or setup.plays:  # whose other columns tell them apart
        return
    prompts = train.prompts
    about = "" if prompts.exact else "about "
    row, first = prompts.first_repeat or (-1, -1)
    many, occur = prompts.num_repeats, prompts.num_repeated
    what = f"{train.name}: {about}{many:,} {'rows repeat' if many != 1 else 'row repeats'} the prompt of another row, "
    what += f"white space and capitals aside ({about}{occur:,} prompt{'s occur' if occur != 1 else ' occurs'} more "
    what += f"than once; row {row} repeats row {first})"
    why = "a prompt that occurs twice is trained on twice as often"
    if setup.given.get("held_out") is None:  # which goes by the prompt
        why += ", and a split made at random leaks into evaluation"
    yield Finding(severity="warning", code="D016", what=what, why=why, fix=_one_of_each(setup, train))
    if prompts.first_contradiction is not None:
        row, answer, first, other = prompts.first_contradiction
        what = f"{train.name}: {prompts.num_contradicting:,} rows have another answer than an earlier row with the "
        what += f"same prompt (row {row}: `{answer}`, row {first}: `{other}`)"
        why = "what one of them rewards the other one punishes"
        fix = "correct the wrong rows; where several answers are right, write one row with a list of them"
        yield Finding(severity="warning", code="D041", what=what, why=why, fix=fix)


def _one_of_each(setup: Setup, train: RowSurvey) -> str:
    names, file = _asking_columns(setup, "prompt"), Path(train.name)
    kind = kind_of(file)
    if not setup.given:
        return "keep one of each: Dataset.from_pandas(dataset.to_pandas().drop_duplicates('prompt'))"
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


def leaks(setup: Setup) -> Iterator[Finding]:
    """Held-out prompts that are trained on."""
    train, held_out = setup.train, setup.evaluation
    if train is None or held_out is None or not train.shared.count or setup.plays:
        return
    about = "" if held_out.prompts.exact else "at least "
    what = f"{about}{train.shared.count:,} rows of {train.name} have a prompt that is in {held_out.name} too "
    what += f"({train.shared})"
    why = "numbers on prompts that were trained on say nothing about new ones"
    fix = "take these rows out of the training set"
    if setup.given:
        fix += "; or `held_out: 0.1` in place of `eval_dataset`, which never overlaps"
    yield Finding(severity="warning", code="D017", what=what, why=why, fix=fix)


def unusable_answers(setup: Setup) -> Iterator[Finding]:
    """Null values in columns that a reward function asks for, and answers that are marked as missing."""
    for survey in _surveys(setup):
        for name, column in survey.columns.items():
            askers = [reward for reward in setup.rewards if _asks(reward, name)]
            if askers and name in GOLD and column.absent.count:
                yield _marked_as_missing(setup, survey, name, askers[0])
            if not askers or not column.nulls.count:
                continue
            empty = column.nulls.count == survey.num_rows
            what = f"{survey.name}: `{name}` is null in {column.nulls.count:,} of {survey.num_rows:,} rows "
            what += f"({column.nulls}), and reward `{askers[0].name}` asks for it"
            why = "a reward cannot judge a completion without the answer"
            fix, changes = _without_nulls(setup, name, empty=empty)
            yield Finding(
                severity="error" if empty else "warning", code="D018", what=what, why=why, fix=fix, changes=changes
            )


def _marked_as_missing(setup: Setup, survey: RowSurvey, name: str, asker: Reward) -> Finding:
    """D018 for answers such as an empty text, `N/A` or NaN."""
    column = survey.columns[name]
    marks = sorted(column.marks)[:MAX_SHOWN]
    changes: dict[str, Any] = {}
    texts = [mark for mark in marks if mark.startswith(("'", '"'))]
    if setup.given and len(texts) == len(marks) and not (setup.given.get("answer_from") and name == "answer"):
        where = _asking_columns(setup, name)[0]
        changes = {"filter": [*_conditions(setup), *(f"{where} != {mark}" for mark in texts)]}
    return Finding(
        code="D018",
        severity="warning",
        what=f"{survey.name}: `{name}` is {listed(marks)} in {column.absent.count:,} of {survey.num_rows:,} "
        f"rows ({column.absent!s}), and reward `{asker.name}` compares with it",
        why="read as a right answer it is one that no completion should be paid for; read as none, these "
        "completions are not trained on",
        fix=(
            (f"{as_lines(changes)}, which leaves such rows out" if changes else "leave such rows out")
            + "; nothing, if that is what should be answered there"
        ),
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


def _without_nulls(setup: Setup, name: str, *, empty: bool) -> tuple[str, dict[str, Any]]:
    if empty:
        return f"write the values of `{name}` into the data, or name the column that has them", {}
    if not setup.given:
        return f'leave such rows out: dataset = dataset.filter(lambda row: row["{name}"] is not None)', {}
    if setup.given.get("answer_from") and name == "answer":
        return "correct `answer_from` or these rows, or leave such rows out: delete them in the data", {}
    changes = _filtered(setup, _asking_columns(setup, name)[0])
    return f"leave such rows out: {as_lines(changes)}", changes


def _asks(reward: Reward, column: str) -> bool:
    return column not in GIVEN and (column in reward.needs or (reward.wants is not None and column in reward.wants))


def no_header(setup: Setup) -> Iterator[Finding]:
    """A column of a table that has a value for its name: the first row of a file without a header."""
    survey = setup.train
    if survey is None or kind_of(Path(survey.name)) != ".csv":
        return
    if column := unnamed_columns(list(survey.columns), survey.examples):
        yield Finding(
            code="D048",
            severity="warning",
            what=f"{survey.name}: the column `{column}` has a name that looks like one of its values",
            why="the first line of the file is taken for names, and seems to be a row, which is lost",
            fix="write a line with the names above it, such as question,answer; then name these columns",
            facts={"survey_name": survey.name, "column": column},
        )


SAME_ANSWERS = 16
"""Rows from which on a single answer for all of them is suspect."""


def same_answers(setup: Setup) -> Iterator[Finding]:
    """Training rows that all have one short answer."""
    survey = setup.train
    if survey is None:
        return
    for name, column in survey.columns.items():
        value, count = column.first, survey.num_rows - column.nulls.count
        if name not in GOLD or column.differ or count < SAME_ANSWERS or not 0 < len(str(value)) <= SHORT_ANSWER:
            continue
        if any(_asks(reward, name) for reward in setup.rewards):
            yield Finding(
                code="D046",
                severity="warning",
                what=f"{survey.name}: `{name}` is `{value}` in all of {count:,} rows",
                why="one text that ignores the prompt earns every reward, and that is what is learnt",
                fix="add rows with other answers, or shuffle a sorted file",
                facts={"survey_name": survey.name, "name": name, "value": value, "count": count},
            )


MOST_ANSWERS = 0.8
"""Share of the answers from which on their common words are no accident."""


def sentences(setup: Setup) -> Iterator[Finding]:
    """Training answers that are sentences around a short answer."""
    survey = setup.train
    if survey is None or setup.given.get("answer_from") or not any(_asks(each, "answer") for each in setup.rewards):
        return
    rows = [row for row in survey.examples if re.match(r"\s*[^\s{\[<]", _text_of(row.get("answer")))]
    if len(rows) < SAME_ANSWERS:
        return
    texts = [" ".join(row["answer"].split()) for row in rows]
    way, count = _common_words(texts)
    if not way:
        way, count = "last number", sum(_computes(row["prompt"], text) for row, text in zip(rows, texts, strict=True))
    if count < MOST_ANSWERS * len(rows):
        return
    take = answer_extractor(way)
    whole, part = next((text, found) for text in texts if (found := take(text)) is not None)
    what = f"{survey.name}: {count:,} of {len(rows):,} answers are sentences around a short answer, for example "
    what += f"{excerpt(whole)} around {excerpt(part)}"
    why = "a reward that compares with the answer requires every word of the sentence"
    changes = {"answer_from": way}
    fix = as_lines(changes) if setup.given else f'podium.data.load(..., answer_from="{way}")'
    yield Finding(severity="warning", code="D047", what=what, why=why, fix=fix, changes=changes if setup.given else {})


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


def mixed_types(setup: Setup) -> Iterator[Finding]:
    """Values of several types in one column of answers."""
    for survey in _surveys(setup):
        for name, column in survey.columns.items():
            if name == "prompt" or len(column.kinds) < 2 or not any(_asks(reward, name) for reward in setup.rewards):
                continue
            counts = ", ".join(f"{count:,} {kind}" for kind, count in column.kinds.most_common())
            what = f"{survey.name}: column `{name}` holds {counts}; they are passed to the rewards as " + (
                "texts" if setup.given and set(column.kinds) <= _TEXTS else "they are"
            )
            why = 'a reward that compares with == says 4 is not "4"'
            fix = (
                f'answer: "{{{name}}}", a template, which gives text'
                if setup.given and name == "answer"
                else "write one type in every row, for example str(answer)"
            )
            yield Finding(severity="note", code="D019", what=what, why=why, fix=fix)


def long_answers(setup: Setup) -> Iterator[Finding]:
    """Gold answers that no completion has room for."""
    if setup.builder is None:
        return
    limit = setup.builder.max_completion_length
    for survey in _surveys(setup):
        for name in GOLD:
            column = survey.columns.get(name)
            if column is None or not column.long.count:
                continue
            tokens, row = column.longest
            what = f"{survey.name}: {column.long.count:,} values of `{name}` have more tokens than "
            what += f"max_completion_length {limit} ({column.long}; longest, row {row}: {tokens:,} tokens)"
            why = "the model is cut off before it can have written them"
            cure = setup.cure("max_completion_length", tokens)
            yield Finding(severity="warning", code="D037", what=what, why=why, **cure)


def lengths(setup: Setup) -> Iterator[Finding]:
    """Lengths of the prompts, and of rollouts with them; of a program the limit of its answers alone."""
    train, builder = setup.train, setup.builder
    if train is None or builder is None or not train.lengths:
        return
    completion = builder.max_completion_length or 0
    if setup.has_program:
        yield Finding(
            code="D040",
            severity="note",
            what=f"{train.name}: {train.num_rows:,} rows; the agent writes the prompts, whose lengths are not "
            f"known before it runs; behind them an episode has at most {completion:,} tokens, all its "
            "branches together",
            facts={"survey_name": train.name, "count": train.num_rows, "tokens": completion},
        )
        return
    low, middle, high = np.quantile(train.lengths, [0.05, 0.5, 0.95]).round().astype(int)
    longest = train.longest[0]
    room = f" of the model's {builder.context_length:,} positions" if builder.context_length else ""
    what = f"{train.name}: {train.num_rows:,} rows; prompts have {low:,} / {middle:,} / {high:,} tokens "
    what += f"(5 % / 50 % / 95 %), the longest {longest:,}; with completions of {completion:,} a rollout takes at most "
    what += f"{longest + completion:,}{room}"
    if setup.has_environment:
        what += ", beside what `reset` adds to its prompt"
    yield Finding(severity="note", code="D040", what=what)


def sampled(setup: Setup) -> Iterator[Finding]:
    """A note that only a sample of the prompts was measured."""
    for survey in _surveys(setup):
        if survey.stride == 1 or not survey.lengths or setup.has_program:
            continue
        what = f"{survey.name}: {survey.num_rows:,} rows; every row was looked at, and the tokens counted of "
        what += f"{len(survey.lengths):,} spread evenly, of the {len(survey.largest):,} largest others and of "
        what += f"{survey.num_suspects:,} that may be too long"
        why = f"counting tokens is the slow part: of more than {MEASURED_ROWS:,} rows a sample is taken"
        yield Finding(severity="note", code="D032", what=what, why=why)


def odd_text(setup: Setup) -> Iterator[Finding]:
    """NUL characters, very large rows, a byte-order mark."""
    for survey in _surveys(setup):
        if survey.nul.count:
            what = f"{survey.name}: {survey.nul.count:,} prompts have a NUL character in them ({survey.nul})"
            why = "it is a trace of a wrong decoding, and C libraries end a text there"
            fix = "take them out of the data" if setup.given else r'text.replace("\x00", "")'
            yield Finding(severity="warning", code="D033", what=what, why=why, fix=fix)
        if survey.large.count:
            yield Finding(
                code="D033",
                severity="warning",
                what=f"{survey.name}: {survey.large.count:,} prompts have over a million characters ({survey.large})",
                why="they are hardly prompts; a missing line break or quote makes such rows",
                fix="look at these rows",
                facts={"survey_name": survey.name, "count": survey.large.count, "large": survey.large},
            )
        if survey.source.form:
            yield Finding(
                code="D028",
                severity="note",
                what=f"{survey.name} is read as {survey.source.form}",
                fix="nothing; other tools may trip over it",
                facts={"survey_name": survey.name, "form": survey.source.form},
            )


def right_completions(setup: Setup) -> Iterator[Finding]:
    """Problems that keep an SFT stage from starting: its arguments, and rows without a right completion."""
    stage, survey = setup.stage, setup.train
    if stage is None or stage.kind != "sft":
        return
    try:
        stage.sft_arguments()
        tried = [] if survey is None else [row for _, row in islice(survey.source.rows(), TRIED_ROWS)]
        rows = [row for row in tried if isinstance(row, dict) and row.get("prompt")]
        if survey is not None and rows:
            right = Completions.of(stage.completion, survey.source.columns or tuple(rows[0]))
            for row in rows:
                right(row)
    except PodiumError as error:
        yield from findings_of(error, stage.recipe.name)
