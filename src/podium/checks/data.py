"""Rules about the rows, as a table: each reads what one pass over the datasets has counted, and says a finding."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from podium.checks.setup import Setup, findings_of
from podium.data.columns import GOLD, LAST_TURN, answer_extractor
from podium.data.completions import Completions
from podium.data.extract import numbers
from podium.data.files import kind_of
from podium.data.prompts import OVERLONG, ROOM, PromptBuilder
from podium.data.survey import (
    MAX_SHOWN,
    MEASURED_ROWS,
    OF_IMAGES,
    SHORT_ANSWER,
    Column,
    RowCount,
    RowSurvey,
    Trait,
    column_problems,
    mixtures,
    no_rows,
    too_few,
)
from podium.data.templates import parse
from podium.errors import ConfigError, Finding, PodiumError
from podium.errors.rule import Rule
from podium.errors.texts import as_line, as_lines, counted, listed
from podium.planning.columns import chosen_columns, unnamed_columns
from podium.recipe.recipe import Stage
from podium.records import last_user_turn
from podium.rewards.resolve import GIVEN, Reward
from podium.rewards.score import excerpt
from podium.trainer.assembly import plan_of
from podium.trainer.config import GRPOConfig
from podium.trainer.rounds import no_column_to_balance
from podium.trainer.setting_rules import STREAMS

Keys = Mapping[str, Any]
"""The keys of a recipe as written; empty for the arguments of a trainer, whose cures are in Python."""
FindingFacts = dict[str, Any]
"""Facts of one finding, by name."""

SHOWN_IMAGES = 3
"""Problems with images that are alike and written out."""
TRIED_ROWS = 1000
"""Rows whose right completion is made on trial, in a stage of supervised fine-tuning."""
SAME_ANSWERS = 16
"""Rows from which on a single answer for all of them is suspect."""
MOST_ANSWERS = 0.8
"""Share of the answers from which on their common words are no accident."""
UNREADABLE = frozenset(
    {"D004", "D024", "D025", "D026", "D027", "D030", "D031", "D034", "D035", "D038", "D039", "D056", "D057", "D058"}
)
"""Codes of findings about rows that cannot be read."""

_FOLLOWING = frozenset({"C015", "C028", "D001", "D015", "D022", "D023"})
"""Codes of findings that only follow from rows that are missing or cannot be used."""
_TEXTS = {"str", "int", "float", "bool"}
"""Types that are read as texts where a column of a file mixes them with texts."""
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
_INSTRUCT = re.compile(r"instruct|chat|[-_]it\b", re.IGNORECASE)
"""In the names of models that were trained on conversations."""
_TABLES = {
    ".csv": ("read_csv('{}', dtype=str)", "to_csv('{}', index=False)"),
    ".jsonl": ("read_json('{}', lines=True, dtype=False)", "to_json('{}', orient='records', lines=True)"),
    ".json": ("read_json('{}', dtype=False)", "to_json('{}', orient='records')"),
    ".parquet": ("read_parquet('{}')", "to_parquet('{}')"),
}
"""Calls of pandas that read and write a kind of file."""


_NULLS = "{survey_name}: `{name}` is null in {count:,} of {num_rows:,} rows ({rows}), and reward `{asker}` asks for it"


# ---- findings that follow from others ----


def without_consequences(setup: Setup, found: list[Finding]) -> list[Finding]:
    """Findings less those that only follow from rows that cannot be had, or of which none has a prompt."""
    bad = [survey for survey in setup.surveys if survey.num_bad.total() >= max(survey.num_rows, 1)]
    of_rows = [finding for survey in bad for finding in survey.findings]
    if any(finding.code in UNREADABLE for finding in [*setup.problems, *of_rows]):
        following = _FOLLOWING
    elif setup.assumed.get("filter") and any(finding.code == "C061" for finding in found):
        found = [_no_answer(setup.name, setup.given) if finding.code == "C061" else finding for finding in found]
        found = [finding for index, finding in enumerate(found) if finding not in found[:index]]
        following = _FOLLOWING
    elif bad or any(finding.code == "D001" for finding in _columns(setup.surveys, setup.given, setup.has_environment)):
        following = _FOLLOWING - {"D001"}
    else:
        return found
    kept = [finding for finding in found if finding.severity != "note" and finding.code not in following]
    return [finding for finding in kept if finding.facts.get("missing") != "rewards"]


def _no_answer(name: str, keys: Keys) -> Finding:
    """The cause of an assumed filter that keeps no row: a column of answers without any."""
    column = _columns_of(keys, "answer")[0]
    return Finding(
        code="D018",
        severity="error",
        what=f"{name}: `{column}` is empty in every row, so no reward can be assumed that compares with it",
        why="a reward cannot judge a completion without the answer",
        fix=f"write the answers into `{column}`, or name rewards that need none (`podium rewards list`)",
        facts={"setup_name": name, "column": column},
    )


# ---- cures by keys of a recipe ----


def _columns_of(keys: Keys, key: str) -> tuple[str, ...]:
    """The columns that a recipe's `prompt` or `answer` names, as the rows have them."""
    template = keys.get(key)
    return (parse(template).columns if isinstance(template, str) else ()) or (key,)


def _conditions(keys: Keys) -> list[str]:
    """The conditions of the recipe's `filter`."""
    written = keys.get("filter") or []
    return [written] if isinstance(written, str) else list(written)


def _filtered(keys: Keys, column: str) -> dict[str, Any]:
    """The `filter` that leaves out rows without a value in the column, beside the conditions that are there."""
    conditions = _conditions(keys)
    wanted = f"{column} != ''"
    return {"filter": [*conditions, wanted] if conditions else wanted}


_CURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "D013": ("chat: true", {"chat": True}),
    "M004": (
        "model: an instruct model, whose tokenizer has one; without `chat`, `system` and `examples` texts stay plain",
        {},
    ),
}
"""By code, the cure by keys of a recipe: in words, and as changes."""


def _by_keys(finding: Finding, keys: Keys, surveys: Sequence[RowSurvey]) -> Finding:
    """A finding whose cure was written for Python, for the reader of a recipe."""
    if not keys:
        return finding
    if finding.code == "D014":
        return _with_wider_prompts(finding, surveys)
    if finding.code == "D011" and not {"answer", "answer_from"} & keys.keys():
        changes = {"answer_from": LAST_TURN}
        fix = f"if the last turn is the answer you want, take it out of `prompt`: {as_lines(changes)}"
        return replace(finding, fix=fix, changes=changes)
    if finding.code in _CURES:
        fix, cure = _CURES[finding.code]
        return replace(finding, fix=fix, changes=cure)
    if not finding.facts.get("leave_out"):
        return finding
    names = _columns_of(keys, "prompt")
    parts = keys.get("dataset")
    own = isinstance(parts, list) and any("prompt" in part for part in parts if isinstance(part, dict))
    has_name = finding.code in ("D002", "D005") and len(names) == 1 and not own  # one for all rows
    changes = _filtered(keys, names[0]) if has_name else {}
    cure_text = f"leave such rows out: {as_lines(changes) or 'delete them in the data'}"
    return replace(finding, fix=cure_text, changes=changes)


def _with_wider_prompts(finding: Finding, surveys: Sequence[RowSurvey]) -> Finding:
    """D014 by keys of a recipe; a limit that is raised takes the prompts of all datasets."""
    longest = max(survey.longest[0] for survey in surveys)
    name, value = finding.facts.get("room") or ("", 0)
    changes = {name: longest} if name == "max_prompt_length" else {}
    ways = [f"`{as_line(name, changes.get(name, value))}` {ROOM[name]}"] if name else []
    if finding.severity == "error":
        words = ["drop"] if any(survey.counts["images"].count for survey in surveys) else [*OVERLONG]
        ways.append(", ".join(f"`overlong_prompts: {word}` {OVERLONG[word]}" for word in words))
    return replace(finding, fix="; ".join(ways) or finding.fix, changes=changes)


# ---- columns, bad rows, shapes ----


def _named(survey: RowSurvey, findings: Sequence[Finding]) -> list[Finding]:
    return [replace(finding, what=f"{survey.name}, {finding.what}") for finding in findings]


def _columns(surveys: Sequence[RowSurvey], keys: Keys, has_environment: bool) -> Iterator[Finding]:
    """A column for the prompt, and none with a name that is taken."""
    seen = set[tuple[str, ...]]()
    for survey in surveys:
        names = survey.source.columns or tuple(survey.columns)
        if names and names not in seen:
            proposed = _proposed(names, survey) if keys else None
            found = column_problems(names, "dataset", proposed=proposed, needs_prompt=not has_environment)
            yield from _named(survey, found)
        seen.add(names)


def _proposed(names: Sequence[str], survey: RowSurvey) -> dict[str, str]:
    """Templates for rows without a prompt, as `podium init` reads the names of their columns; else left to right."""
    first = {name: column.first for name, column in survey.columns.items()}
    try:
        return chosen_columns(names, [first]).keys
    except ConfigError:
        *asked, answer = [f"{{{name}}}" for name in names]
        return {"prompt": " ".join(asked), "answer": answer} if asked else {"prompt": answer}


def _without_braces(keys: Keys, train: RowSurvey) -> Iterator[FindingFacts]:
    """Templates that are the bare name of a column, or name no column: one text for all rows."""
    names = [*(train.source.columns or ()), *train.columns]
    for key in ("prompt", "answer"):
        text = keys.get(key)
        column = str(text).strip("{ }")
        if column in names and text in (column, f"{{{{{column}}}}}"):
            yield {"key": key, "text": text, "column": column}


def _named_by_a_value(train: RowSurvey) -> FindingFacts | None:
    """A column of a table that has a value for its name: the first row of a file without a header."""
    if kind_of(Path(train.name)) != ".csv":
        return None
    column = unnamed_columns(list(train.columns), train.examples)
    return {"survey_name": train.name, "column": column} if column else None


def _bad_rows(surveys: Sequence[RowSurvey], keys: Keys) -> Iterator[Finding]:
    """Rows that cannot be used, the first of each kind written out."""
    for survey in surveys:
        for code, count in survey.num_bad.items():
            if code == "D001" and "prompt" not in survey.columns:
                continue  # `_columns` reports that the column is missing altogether
            shown = [finding for finding in survey.findings if finding.code == code]
            if code in OF_IMAGES:
                yield from _of_images(survey, shown)
                continue
            yield from (_by_keys(finding, keys, surveys) for finding in shown)
            if count > MAX_SHOWN:
                what = f"{survey.name}: {count - MAX_SHOWN:,} more rows like these {MAX_SHOWN}"
                yield _by_keys(replace(shown[-1], what=what), keys, surveys)


def _of_images(survey: RowSurvey, found: Sequence[Finding]) -> Iterator[Finding]:
    """Problems with images; those that have one fix, as of a folder that is not there, as one finding."""
    for fix in dict.fromkeys(finding.fix for finding in found):
        alike = [finding for finding in found if finding.fix == fix]
        count = survey.num_of_images[fix]
        if count <= SHOWN_IMAGES:
            yield from alike
            continue
        examples = "; ".join(finding.facts["problem"] for finding in alike[:SHOWN_IMAGES])
        things = "images" if alike[0].code == "D062" else "rows with images"
        yield replace(alike[0], what=f"{survey.name}: {count:,} {things} cannot be used. The first: {examples}")


def _shapes(surveys: Sequence[RowSurvey], keys: Keys) -> Iterator[Finding]:
    """Chat and plain rows mixed, turns to be continued, prompts too long, chat rows without a template."""
    for survey in surveys:
        yield from _named(survey, [_by_keys(finding, keys, surveys) for finding in mixtures(survey)])


def _enough(
    surveys: Sequence[RowSurvey], keys: Keys, args: GRPOConfig | None, train: RowSurvey | None
) -> Iterator[Finding]:
    """Rows at all, and as many as one generation round takes."""
    for survey in surveys:
        if not survey.num_rows:
            yield from _named(survey, [no_rows(survey.name, held_out=bool(keys.get("held_out")))])
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


# ---- prompts ----


def _with(trait: Trait) -> Callable[..., Iterator[FindingFacts]]:
    """The question of a rule about rows of one kind: which surveys have such rows, how many, and the first of them."""

    def found(surveys: Sequence[RowSurvey], *_: Any) -> Iterator[FindingFacts]:
        for survey in surveys:
            rows = survey.counts[trait]
            example = {"example": rows.example} if rows.example else {}
            if rows.count:
                yield {"survey_name": survey.name, "count": rows.count, trait: rows, **example}

    return found


def _left_out(surveys: Sequence[RowSurvey], problems: Sequence[Finding]) -> Iterator[FindingFacts]:
    """Conversations of which the template leaves something out, unless the tools cannot be had: then calls are not."""
    if not any(finding.code in ("C052", "C053") for finding in problems):
        yield from _with("left_out")(surveys)


def _begun_twice(surveys: Sequence[RowSurvey], builder: PromptBuilder) -> Iterator[FindingFacts]:
    """A token that the tokenizer puts before plain prompts and that they begin with."""
    for survey in surveys:
        rows = survey.counts["written_out"]
        token = rows.example
        ids = builder.tokenizer(token)["input_ids"] if token and survey.counts["plain"].count else []
        if len(ids) > 1 and ids[0] == ids[1]:
            yield {"name": survey.name, "token": token, "rows": rows, "count": rows.count}


def _ended(surveys: Sequence[RowSurvey], builder: PromptBuilder) -> Iterator[FindingFacts]:
    """An end token that the tokenizer puts behind plain prompts."""
    tokenizer = builder.tokenizer
    for survey in surveys:
        if survey.counts["plain"].count and tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id:
            yield {"name": survey.name, "token": tokenizer.eos_token}


def _unasked_in_chat(train: RowSurvey, builder: PromptBuilder, has_program: bool, keys: Keys) -> Finding | None:
    """Plain prompts, and a model with a chat template."""
    if builder.chat_template is None or has_program or not train.counts["plain"].count:
        return None
    if train.counts["chat"].count or train.counts["written_out"].count:
        return None
    name = f"{keys.get('model', '')} {builder.tokenizer.name_or_path}"
    changes = {"chat": True} if keys else {}
    return Finding(
        code="D045",
        severity="warning" if _INSTRUCT.search(name) else "note",
        what=f"{train.name}: the prompts are plain texts, and the model's tokenizer has a chat template",
        why="a model that was trained on conversations continues a plain text rather than to answer it",
        fix=as_lines(changes) or 'prompts as [{"role": "user", "content": text}]',
        changes=changes,
    )


def _written_as_text(surveys: Sequence[RowSurvey]) -> Iterator[FindingFacts]:
    """Prompts that are the text of a list of messages, and not the list."""
    for survey in surveys:
        asked = (last_user_turn(row["prompt"]) for row in survey.examples if row.get("prompt"))
        texts = [text for text in asked if _MESSAGES.match(text)]
        if texts:
            total = len(survey.examples)
            yield {"survey_name": survey.name, "count": len(texts), "total": total, "first": excerpt(texts[0])}


def _has_no_room(builder: PromptBuilder) -> bool:
    """Prompts that are allowed and have no place before the longest completion."""
    if builder.max_prompt_length is None or builder.context_room is None:
        return False
    return builder.max_prompt_length > builder.context_room


def _lengths(
    train: RowSurvey, builder: PromptBuilder, has_program: bool, has_environment: bool, keys: Keys
) -> Finding | None:
    """Lengths of the prompts, and of rollouts with them; of a program the limit of its answers alone."""
    if not train.lengths:
        return None
    completion = builder.max_completion_length or 0
    facts: FindingFacts = {"survey_name": train.name, "count": train.num_rows, "tokens": completion}
    if has_program:
        what = (
            "the agent writes the prompts, whose lengths are not known before it runs; behind them an episode has at "
            f"most {completion:,} tokens, all its branches together"
        )
    else:
        low, middle, high = np.quantile(train.lengths, [0.05, 0.5, 0.95]).round().astype(int).tolist()
        longest = train.longest[0]
        facts |= {"low": low, "middle": middle, "high": high, "longest": longest}
        room = f" of the model's {builder.context_length:,} positions" if builder.context_length else ""
        more = ", beside what `reset` adds to its prompt" if has_environment else ""
        what = (
            f"prompts have {low:,} / {middle:,} / {high:,} tokens (5 % / 50 % / 95 %), the longest {longest:,}; with "
            f"completions of {completion:,} a rollout takes at most {longest + completion:,}{room}{more}"
        )
        if train.image_tokens:
            sizes = np.quantile(train.image_tokens, [0, 0.5, 1]).round().astype(int).tolist()
            facts |= {"images": len(train.image_tokens), "image_tokens": sizes}
            what += (
                f"; {counted(len(train.image_tokens), 'image becomes', 'images become')} "
                f"{' / '.join(f'{size:,}' for size in sizes)} tokens each (smallest / median / largest)"
            )
            if keys and not {"chat", "system", "examples"} & keys.keys():
                what += ", and texts are asked as conversations behind them, as `chat: true` does"
    return Finding(code="D040", severity="note", what=f"{train.name}: {train.num_rows:,} rows; {what}", facts=facts)


def _sampled(surveys: Sequence[RowSurvey], has_program: bool) -> Iterator[FindingFacts]:
    """Whether only a sample of the prompts was measured."""
    for survey in surveys:
        if survey.stride > 1 and survey.lengths and not has_program:
            yield {
                "survey_name": survey.name,
                "count": survey.num_rows,
                "spread": len(survey.lengths),
                "largest": len(survey.largest),
                "suspects": survey.num_suspects,
            }


# ---- rows that are alike ----


def _repeats(train: RowSurvey, plays: bool, keys: Keys) -> FindingFacts | None:
    """The same prompt more than once; of an environment other columns tell the rows apart."""
    prompts = train.prompts
    if not prompts.num_repeats or plays:
        return None
    row, first = prompts.first_repeat or (-1, -1)
    return {
        "survey_name": train.name,
        "about": "" if prompts.exact else "about ",
        "repeats": prompts.num_repeats,
        "repeated": prompts.num_repeated,
        "row": row,
        "first": first,
    }


def _one_of_each(train: RowSurvey, plays: bool, keys: Keys, **_: Any) -> str:
    if not keys and not train.counts["images"].count:
        return "keep one of each: Dataset.from_pandas(dataset.to_pandas().drop_duplicates('prompt'))"
    if train.counts["images"].count:
        return "keep one row of each prompt and its images in the data"
    names = _columns_of(keys, "prompt")
    file = Path(train.name)
    kind = kind_of(file)
    if len(names) > 1 or train.source.form or kind not in _TABLES:
        return f"keep one row of each {' and '.join(names)} in the data"
    read, write = _TABLES[kind]
    to = file.with_name(f"{file.stem}-unique{file.suffix}")
    alike = f"~t['{names[0]}'].astype(str).str.casefold().str.split().str.join(' ').duplicated()"
    program = f"import pandas; pandas.{read.format(file)}.loc[lambda t: {alike}].{write.format(to)}"
    return f'keep one of each: python -c "{program}"; then dataset: {to}'


def _contradictions(train: RowSurvey, plays: bool) -> FindingFacts | None:
    """The same prompt with different answers."""
    if train.prompts.first_contradiction is None or plays:
        return None
    row, answer, first, other = train.prompts.first_contradiction
    count = train.prompts.num_contradicting
    return {"survey_name": train.name, "count": count, "row": row, "answer": answer, "first": first, "other": other}


def _leaks(train: RowSurvey, held_out: RowSurvey, plays: bool, keys: Keys) -> FindingFacts | None:
    """Held-out prompts that are trained on."""
    shared = train.counts["shared"]
    if not shared.count or plays:
        return None
    about = "" if held_out.prompts.exact else "at least "
    return {"survey_name": train.name, "other": held_out.name, "about": about, "count": shared.count, "shared": shared}


# ---- answers ----


def _asks(reward: Reward, column: str) -> bool:
    return column not in GIVEN and (column in reward.needs or column in (reward.wants or ()))


def _judged_columns(
    surveys: Sequence[RowSurvey], rewards: Sequence[Reward]
) -> Iterator[tuple[RowSurvey, str, Column, Reward]]:
    """The columns that a reward asks for, with the first that does."""
    for survey in surveys:
        for name, column in survey.columns.items():
            if (asker := next((reward for reward in rewards if _asks(reward, name)), None)) is not None:
                yield survey, name, column, asker


def _unusable(survey: RowSurvey, name: str, asker: Reward, rows: RowCount) -> FindingFacts:
    facts = {"survey_name": survey.name, "name": name, "asker": asker.name}
    return {**facts, "count": rows.count, "num_rows": survey.num_rows, "rows": rows}


def _marked_as_missing(surveys: Sequence[RowSurvey], rewards: Sequence[Reward], keys: Keys) -> Iterator[FindingFacts]:
    """Answers such as an empty text, `N/A` or NaN."""
    for survey, name, column, asker in _judged_columns(surveys, rewards):
        if name in GOLD and column.absent.count:
            yield {**_unusable(survey, name, asker, column.absent), "marks": sorted(column.marks)[:MAX_SHOWN]}


def _without_marks(
    surveys: Sequence[RowSurvey], rewards: Sequence[Reward], keys: Keys, *, name: str, marks: list[str], **_: Any
) -> tuple[str, dict[str, Any]]:
    """The cure for answers that are marked as missing: a filter, where all marks are texts that it can name."""
    texts = [mark for mark in marks if mark.startswith(("'", '"'))]
    changes: dict[str, Any] = {}
    leave_out = "leave such rows out"
    if keys and len(texts) == len(marks) and not (keys.get("answer_from") and name == "answer"):
        column = _columns_of(keys, name)[0]
        changes = {"filter": [*_conditions(keys), *(f"{column} != {mark}" for mark in texts)]}
        leave_out = f"{as_lines(changes)}, which leaves such rows out"
    return f"{leave_out}; nothing, if that is what should be answered there", changes


def _nulls(*, in_all: bool) -> Callable[..., Iterator[FindingFacts]]:
    """The question of a rule about null values in a column that a reward asks for: in all rows, or in some."""

    def found(surveys: Sequence[RowSurvey], rewards: Sequence[Reward], keys: Keys) -> Iterator[FindingFacts]:
        for survey, name, column, asker in _judged_columns(surveys, rewards):
            if column.nulls.count and (column.nulls.count == survey.num_rows) is in_all:
                yield _unusable(survey, name, asker, column.nulls)

    return found


def _without_nulls(
    surveys: Sequence[RowSurvey], rewards: Sequence[Reward], keys: Keys, *, name: str, **_: Any
) -> tuple[str, dict[str, Any]]:
    """The cure for null values in some rows."""
    if not keys:
        return f'leave such rows out: dataset = dataset.filter(lambda row: row["{name}"] is not None)', {}
    if keys.get("answer_from") and name == "answer":
        return "correct `answer_from` or these rows, or leave such rows out: delete them in the data", {}
    changes = _filtered(keys, _columns_of(keys, name)[0])
    return f"leave such rows out: {as_lines(changes)}", changes


def _same_answers(train: RowSurvey, rewards: Sequence[Reward]) -> Iterator[FindingFacts]:
    """Training rows that all have one short answer."""
    for _, name, column, _ in _judged_columns([train], rewards):
        count = train.num_rows - column.nulls.count
        is_short = 0 < len(str(column.first)) <= SHORT_ANSWER
        if name in GOLD and is_short and not column.differ and count >= SAME_ANSWERS:
            yield {"survey_name": train.name, "name": name, "value": column.first, "count": count}


def _sentences(train: RowSurvey, rewards: Sequence[Reward], keys: Keys) -> FindingFacts | None:
    """Training answers that are sentences around a short answer."""
    if keys.get("answer_from") or not any(_asks(reward, "answer") for reward in rewards):
        return None
    answers = [(row["prompt"], row["answer"]) for row in train.examples if isinstance(row.get("answer"), str)]
    rows = [(prompt, " ".join(text.split())) for prompt, text in answers if re.match(r"\s*[^\s{\[<]", text)]
    if len(rows) < SAME_ANSWERS:
        return None
    texts = [text for _, text in rows]
    way, count = _common_words(texts)
    if not way:
        way = "last number"
        count = sum(_computes(prompt, text) for prompt, text in rows)
    if count < MOST_ANSWERS * len(rows):
        return None
    take = answer_extractor(way)
    whole, part = next((text, found) for text in texts if (found := take(text)) is not None)
    facts = {"survey_name": train.name, "count": count, "total": len(rows), "way": way}
    return {**facts, "whole": excerpt(whole), "part": excerpt(part)}


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


def _mixed_types(surveys: Sequence[RowSurvey], rewards: Sequence[Reward], keys: Keys) -> Iterator[FindingFacts]:
    """Values of several types in one column of answers."""
    for survey, name, column, _ in _judged_columns(surveys, rewards):
        if name != "prompt" and len(column.kinds) > 1:
            counts = ", ".join(f"{count:,} {kind}" for kind, count in column.kinds.most_common())
            passed = "texts" if keys and set(column.kinds) <= _TEXTS else "they are"
            yield {"survey_name": survey.name, "name": name, "counts": counts, "passed": passed}


def _long_answers(builder: PromptBuilder, surveys: Sequence[RowSurvey]) -> Iterator[FindingFacts]:
    """Gold answers that no completion has room for."""
    for survey in surveys:
        for name in GOLD:
            column = survey.columns.get(name)
            if column is not None and column.long.count:
                tokens, row = column.longest
                rows = column.long
                facts = {"survey_name": survey.name, "name": name, "count": rows.count, "rows": rows}
                yield {**facts, "row": row, "tokens": tokens}


def _right_completions(stage: Stage, train: RowSurvey | None) -> list[Finding]:
    """Problems that keep an SFT stage from starting: images, its arguments, and rows without a right completion."""
    if stage.kind != "sft":
        return []
    if train is not None and (images := train.counts["images"]).count:
        return [
            Finding(
                code="D036",
                severity="error",
                what=f"{train.name}: {counted(images.count, 'row has', 'rows have')} images, which supervised "
                f"fine-tuning would leave out ({images})",
                fix="leave the stage out, or give it rows of text; a model that TRL's SFTTrainer trained on images is "
                "taken as `model`",
            )
        ]
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
        says="{key} `{text}` is the same text for every row, and there is a column of this name",
        cure=lambda *_, key, text, column: {key: f"{{{column}}}"},
        about=lambda *_, key, text, column: (key,),
    ),
    Rule(
        code="D048",
        severity="warning",
        needs=("train",),
        when=_named_by_a_value,
        says="{survey_name}: the column `{column}` has a name that looks like one of its values",
        why="the first line of the file is taken for names, and seems to be a row, which is lost",
        cure="write a line with the names above it, such as question,answer; then name these columns",
    ),
    Rule(needs=("surveys", "given"), when=_bad_rows),
    Rule(needs=("surveys", "given"), when=_shapes),
    Rule(
        code="D012",
        severity="warning",
        needs=("surveys",),
        when=_with("late_system"),
        says="{survey_name}, {count:,} conversations have a system message that is not the first ({late_system})",
        why="many chat templates leave it out without a word, or refuse it",
        cure="put everything the system says into the first message",
    ),
    Rule(
        code="D042",
        severity="warning",
        needs=("surveys",),
        when=_with("nothing_asked"),
        says="{survey_name}: {count:,} conversations have system messages alone ({nothing_asked})",
        why="they ask nothing, so there is nothing to answer",
        cure='write what is asked as {"role": "user", "content": "..."} behind the system message',
    ),
    Rule(
        code="D043",
        severity="warning",
        needs=("surveys", "problems"),
        when=_left_out,
        says="{survey_name}: the chat template leaves out {example} ({left_out})",
        why="the model is trained on prompts in which that part is missing",
        cure="a model whose chat template has tools; or write what the tool was asked and said as text of the user's "
        "turn",
    ),
    Rule(
        code="D044",
        severity="warning",
        needs=("surveys",),
        when=_with("control"),
        says=(
            "{survey_name}: {count:,} prompts have control tokens of the tokenizer in their text, such as "
            "`{example}` ({control})"
        ),
        why="the model reads them as the end or the beginning of a turn, so that a text can speak for the system or "
        "the assistant",
        cure=lambda *_, survey_name, count, control, example: (
            f"take them out of the data, or write them apart: `{example[:1]} {example[1:]}`"
        ),
    ),
    Rule(
        code="D044",
        severity="warning",
        needs=("surveys", "builder"),
        when=_begun_twice,
        says=(
            "{name}: {count:,} plain prompts begin with `{token}`, which the tokenizer puts before them as well "
            "({rows})"
        ),
        why="the model reads it twice, as it never did in its training",
        cure="the lists of messages themselves as prompts; or take the token out of these texts",
    ),
    Rule(
        code="D044",
        severity="warning",
        needs=("surveys", "builder"),
        when=_ended,
        says="{name}: the tokenizer puts its end token `{token}` behind every plain prompt",
        why="the model is asked to go on after the end of a text, and writes another one",
        cure="a tokenizer that was made with add_eos_token=False; or prompts as messages, which the chat template ends",
    ),
    Rule(code="D045", needs=("train", "builder", "has_program", "given"), when=_unasked_in_chat),
    Rule(
        code="D059",
        severity="warning",
        needs=("surveys",),
        when=_written_as_text,
        says="{survey_name}: {count} of {total} prompts are the text of a list of messages, {first}",
        why="the model is asked with brackets, roles and quotes in one message",
        cure="write the list itself, in a .jsonl file or as dataset.map(lambda row: "
        '{"prompt": json.loads(row["prompt"])})',
    ),
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
    Rule(
        code="D016",
        severity="warning",
        needs=("train", "plays", "given"),
        when=_repeats,
        says=lambda *_, survey_name, about, repeats, repeated, row, first: (
            f"{survey_name}: {about}{counted(repeats, 'row repeats', 'rows repeat')} the prompt of another row, white "
            f"space and capitals aside ({about}{counted(repeated, 'prompt occurs', 'prompts occur')} more than once; "
            f"row {row} repeats row {first})"
        ),
        why=lambda train, plays, keys, **_: (
            "a prompt that occurs twice is trained on twice as often"
            if keys.get("held_out") is not None  # which goes by the prompt
            else "a prompt that occurs twice is trained on twice as often, and a split made at random leaks into "
            "evaluation"
        ),
        cure=_one_of_each,
    ),
    Rule(
        code="D041",
        severity="warning",
        needs=("train", "plays"),
        when=_contradictions,
        says=(
            "{survey_name}: {count:,} rows have another answer than an earlier row with the same prompt (row {row}: "
            "`{answer}`, row {first}: `{other}`)"
        ),
        why="what one of them rewards the other one punishes",
        cure="correct the wrong rows; where several answers are right, write one row with a list of them",
    ),
    Rule(
        code="D017",
        severity="warning",
        needs=("train", "evaluation", "plays", "given"),
        when=_leaks,
        says="{about}{count:,} rows of {survey_name} have a prompt that is in {other} too ({shared})",
        why="numbers on prompts that were trained on say nothing about new ones",
        cure=lambda train, held_out, plays, keys, **_: (
            "take these rows out of the training set; or `held_out: 0.1` in place of `eval_dataset`, which never "
            "overlaps"
            if keys
            else "take these rows out of the training set"
        ),
    ),
    Rule(
        code="D018",
        severity="warning",
        needs=("surveys", "rewards", "given"),
        when=_marked_as_missing,
        says=lambda *_, survey_name, name, marks, asker, count, num_rows, rows: (
            f"{survey_name}: `{name}` is {listed(marks)} in {count:,} of {num_rows:,} rows ({rows}), and reward "
            f"`{asker}` compares with it"
        ),
        why="read as a right answer it is one that no completion should be paid for; read as none, these completions "
        "are not trained on",
        cure=_without_marks,
    ),
    Rule(
        code="D018",
        needs=("surveys", "rewards", "given"),
        when=_nulls(in_all=True),
        says=_NULLS,
        why="a reward cannot judge a completion without the answer",
        cure=lambda *_, name, **__: f"write the values of `{name}` into the data, or name the column that has them",
    ),
    Rule(
        code="D018",
        severity="warning",
        needs=("surveys", "rewards", "given"),
        when=_nulls(in_all=False),
        says=_NULLS,
        why="a reward cannot judge a completion without the answer",
        cure=_without_nulls,
    ),
    Rule(
        code="D046",
        severity="warning",
        needs=("train", "rewards"),
        when=_same_answers,
        says="{survey_name}: `{name}` is `{value}` in all of {count:,} rows",
        why="one text that ignores the prompt earns every reward, and that is what is learnt",
        cure="add rows with other answers, or shuffle a sorted file",
    ),
    Rule(
        code="D047",
        severity="warning",
        needs=("train", "rewards", "given"),
        when=_sentences,
        says=(
            "{survey_name}: {count:,} of {total:,} answers are sentences around a short answer, for example "
            "{whole} around {part}"
        ),
        why="a reward that compares with the answer requires every word of the sentence",
        cure=lambda train, rewards, keys, *, way, **_: (
            {"answer_from": way} if keys else f'podium.data.load(..., answer_from="{way}")'
        ),
    ),
    Rule(
        code="D019",
        severity="note",
        needs=("surveys", "rewards", "given"),
        when=_mixed_types,
        says="{survey_name}: column `{name}` holds {counts}; they are passed to the rewards as {passed}",
        why='a reward that compares with == says 4 is not "4"',
        cure=lambda surveys, rewards, keys, *, name, **_: (
            f'answer: "{{{name}}}", a template, which gives text'
            if keys and name == "answer"
            else "write one type in every row, for example str(answer)"
        ),
    ),
    Rule(
        code="D033",
        severity="warning",
        needs=("surveys", "given"),
        when=_with("nul"),
        says="{survey_name}: {count:,} prompts have a NUL character in them ({nul})",
        why="it is a trace of a wrong decoding, and C libraries end a text there",
        cure=lambda surveys, keys, **_: "take them out of the data" if keys else r'text.replace("\x00", "")',
    ),
    Rule(
        code="D033",
        severity="warning",
        needs=("surveys",),
        when=_with("large"),
        says="{survey_name}: {count:,} prompts have over a million characters ({large})",
        why="they are hardly prompts; a missing line break or quote makes such rows",
        cure="look at these rows",
    ),
    Rule(
        code="D028",
        severity="note",
        needs=("surveys",),
        when=lambda surveys: [
            {"survey_name": survey.name, "form": survey.source.form} for survey in surveys if survey.source.form
        ],
        says="{survey_name} is read as {form}",
        cure="nothing; other tools may trip over it",
    ),
    Rule(code="D040", needs=("train", "builder", "has_program", "has_environment", "given"), when=_lengths),
    Rule(
        code="D032",
        severity="note",
        needs=("surveys", "has_program"),
        when=_sampled,
        says=(
            "{survey_name}: {count:,} rows; every row was looked at, and the tokens counted of {spread:,} spread "
            "evenly, of the {largest:,} largest others and of {suspects:,} that may be too long"
        ),
        why=f"counting tokens is the slow part: of more than {MEASURED_ROWS:,} rows a sample is taken",
    ),
)
"""In the order of their findings; `given` are the keys of a recipe."""

LONG_ANSWERS = Rule(
    code="D037",
    severity="warning",
    needs=("builder", "surveys"),
    when=_long_answers,
    says=lambda builder, surveys, *, survey_name, name, count, rows, row, tokens: (
        f"{survey_name}: {count:,} values of `{name}` have more tokens than max_completion_length "
        f"{builder.max_completion_length} ({rows}; longest, row {row}: {tokens:,} tokens)"
    ),
    why="the model is cut off before it can have written them",
    cure=lambda *_, tokens, **__: {"max_completion_length": tokens},
)

RIGHT_COMPLETIONS = Rule(needs=("stage",), wants=("train",), when=_right_completions)
