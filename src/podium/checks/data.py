"""Rules about the rows: what one pass over the datasets has counted, judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from podium.assembly import plan_of
from podium.checks.rows import MAX_SHOWN, MEASURED_ROWS, RowSurvey
from podium.checks.setup import Setup
from podium.data.check import column_problems, continued, mixed, no_rows, overlong, too_few
from podium.data.row import no_template
from podium.records import Finding
from podium.rewards.resolve import GIVEN, GOLD, Reward


def _surveys(setup: Setup) -> list[RowSurvey]:
    return [survey for survey in (setup.train, setup.evaluation) if survey is not None]


def _named(survey: RowSurvey, findings: Iterable[Finding]) -> Iterator[Finding]:
    yield from (replace(finding, what=f"{survey.name}, {finding.what}") for finding in findings)


def columns(setup: Setup) -> Iterator[Finding]:
    """A column for the prompt, and none with a name that is taken."""
    for survey in _surveys(setup):
        names = survey.source.columns or tuple(survey.columns)
        if names:
            yield from _named(survey, column_problems(names, "dataset"))


def bad_rows(setup: Setup) -> Iterator[Finding]:
    """Rows that cannot be used, the first of each kind written out."""
    for survey in _surveys(setup):
        for code, shown in survey.bad.items():
            if code == "D001" and survey.counts.num_rows == survey.num_bad[code]:
                continue  # the column is missing altogether, which `columns` says
            yield from shown
            more = survey.num_bad[code] - MAX_SHOWN
            if more > 0:
                what = f"{survey.name}: {more:,} more rows like these {MAX_SHOWN}"
                yield replace(shown[-1], what=what)


def shapes(setup: Setup) -> Iterator[Finding]:
    """Chat and plain rows mixed, turns to be continued, prompts too long, chat rows without a template."""
    for survey in _surveys(setup):
        counts, builder = survey.counts, survey.builder
        yield from _named(survey, [*mixed(counts), *continued(counts), *overlong(counts, builder)])
        if counts.chat_rows.count and builder is not None and builder.chat_template is None:
            yield from _named(survey, [no_template(counts.chat_rows.first[0])])
        if survey.late_system.count:
            yield Finding(
                code="D012",
                severity="warning",
                what=f"{survey.name}, {survey.late_system.count:,} conversations have a system message that is not the "
                f"first ({survey.late_system})",
                why="many chat templates leave it out without a word, or refuse it",
                fix="put everything the system says into the first message",
            )


def room(setup: Setup) -> Iterator[Finding]:
    """Prompts that are allowed and have no place before the longest completion."""
    builder = setup.builder
    if builder is None or builder.max_prompt_length is None or builder.context_room is None:
        return
    if builder.max_prompt_length <= builder.context_room:
        return
    yield Finding(
        code="D015",
        severity="warning",
        what=f"{setup.at('max_prompt_length')} {builder.max_prompt_length:,} and max_completion_length "
        f"{builder.max_completion_length or 0:,} are more than the {builder.context_length:,} positions of the model",
        why=f"a prompt may have {builder.context_room:,} tokens, whatever max_prompt_length says",
        fix=setup.line("max_prompt_length", builder.context_room),
    )


def enough(setup: Setup) -> Iterator[Finding]:
    """Rows at all, and as many as one generation round takes."""
    for survey in _surveys(setup):
        if not survey.counts.num_rows:
            yield from _named(survey, [no_rows(survey.name)])
    train = setup.train
    if train is None or setup.args is None or not train.counts.num_rows or train.source.is_stream:
        return
    dropped = train.counts.long_rows.count if setup.args.overlong_prompts == "drop" else 0
    left = train.counts.num_rows - dropped
    yield from _named(train, too_few(left, dropped, plan_of(setup.args).prompts_per_round))


def repeats(setup: Setup) -> Iterator[Finding]:
    """The same prompt more than once."""
    train = setup.train
    if train is None or not train.prompts.num_repeats:
        return
    prompts = train.prompts
    about = "" if prompts.exact else "about "
    row, first = prompts.first_repeat or (-1, -1)
    yield Finding(
        code="D016",
        severity="warning",
        what=f"{train.name}: {about}{prompts.num_repeats:,} rows repeat the prompt of another row "
        f"({about}{prompts.num_repeated:,} prompts occur more than once; row {row} repeats row {first})",
        why="a prompt that occurs twice is trained on twice as often, and a split made at random leaks into evaluation",
        fix="keep one of each: pandas.read_json(file, lines=True).drop_duplicates('prompt')",
    )


def leaks(setup: Setup) -> Iterator[Finding]:
    """Held-out prompts that are trained on."""
    train, held_out = setup.train, setup.evaluation
    if train is None or held_out is None or not train.shared.count:
        return
    about = "" if held_out.prompts.exact else "at least "
    yield Finding(
        code="D017",
        severity="warning",
        what=f"{about}{train.shared.count:,} rows of {train.name} have a prompt that is in {held_out.name} too "
        f"({train.shared})",
        why="numbers on prompts that were trained on say nothing about new ones",
        fix="take these rows out of the training set",
    )


def unusable_answers(setup: Setup) -> Iterator[Finding]:
    """Null values in columns that a reward function asks for."""
    for survey in _surveys(setup):
        for name, column in survey.columns.items():
            askers = [reward for reward in setup.rewards if _asks(reward, name)]
            if not askers or not column.nulls.count:
                continue
            yield Finding(
                code="D018",
                severity="error" if column.nulls.count == survey.counts.num_rows else "warning",
                what=f"{survey.name}: `{name}` is null in {column.nulls.count:,} of {survey.counts.num_rows:,} rows "
                f"({column.nulls}), and reward `{askers[0].name}` asks for it",
                why="a reward cannot judge a completion without the answer",
                fix=f'leave such rows out: dataset = dataset.filter(lambda row: row["{name}"] is not None)',
            )


def _asks(reward: Reward, column: str) -> bool:
    return column not in GIVEN and (column in reward.needs or (reward.wants is not None and column in reward.wants))


def mixed_types(setup: Setup) -> Iterator[Finding]:
    """Values of several types in one column of answers."""
    for survey in _surveys(setup):
        for name, column in survey.columns.items():
            if name == "prompt" or len(column.kinds) < 2 or not any(_asks(reward, name) for reward in setup.rewards):
                continue
            counts = ", ".join(f"{count:,} {kind}" for kind, count in column.kinds.most_common())
            yield Finding(
                code="D019",
                severity="note",
                what=f"{survey.name}: column `{name}` holds {counts}; they are passed to the rewards as they are",
                why='a reward that compares with == says 4 is not "4"',
                fix="write one type in every row, for example str(answer)",
            )


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
            yield Finding(
                code="D037",
                severity="warning",
                what=f"{survey.name}: {column.long.count:,} values of `{name}` have more tokens than "
                f"max_completion_length {limit} ({column.long}; longest, row {row}: {tokens:,} tokens)",
                why="the model is cut off before it can have written them",
                fix=setup.line("max_completion_length", tokens),
            )


def lengths(setup: Setup) -> Iterator[Finding]:
    """How long the prompts are, and what that leaves."""
    train, builder = setup.train, setup.builder
    if train is None or builder is None or not train.lengths:
        return
    low, middle, high = np.quantile(train.lengths, [0.05, 0.5, 0.95]).round().astype(int)
    longest = train.counts.longest[0]
    completion = builder.max_completion_length or 0
    room = f" of the model's {builder.context_length:,} positions" if builder.context_length else ""
    yield Finding(
        code="D040",
        severity="note",
        what=f"{train.name}: {train.counts.num_rows:,} rows; prompts have {low:,} / {middle:,} / {high:,} tokens "
        f"(5 % / 50 % / 95 %), the longest {longest:,}; with completions of {completion:,} a rollout takes at most "
        f"{longest + completion:,}{room}",
    )


def sampled(setup: Setup) -> Iterator[Finding]:
    """That not every prompt was measured."""
    for survey in _surveys(setup):
        if survey.stride == 1 or not survey.lengths:
            continue
        yield Finding(
            code="D032",
            severity="note",
            what=f"{survey.name}: {survey.counts.num_rows:,} rows; every row was looked at, and the tokens counted of "
            f"{len(survey.lengths):,} spread evenly, of the {len(survey.largest):,} largest others and of "
            f"{survey.num_suspects:,} that may be too long",
            why=f"counting tokens is the slow part: of more than {MEASURED_ROWS:,} rows a sample is taken",
        )


def odd_text(setup: Setup) -> Iterator[Finding]:
    """NUL characters, very large rows, a byte-order mark."""
    for survey in _surveys(setup):
        if survey.nul.count:
            yield Finding(
                code="D033",
                severity="warning",
                what=f"{survey.name}: {survey.nul.count:,} prompts have a NUL character in them ({survey.nul})",
                why="it is a trace of a wrong decoding, and C libraries end a text there",
                fix=r'text.replace("\x00", "")',
            )
        if survey.large.count:
            yield Finding(
                code="D033",
                severity="warning",
                what=f"{survey.name}: {survey.large.count:,} prompts have over a million characters ({survey.large})",
                why="they are hardly prompts; a missing line break or quote makes such rows",
                fix="look at these rows",
            )
        if survey.source.has_bom:
            yield Finding(
                code="D028",
                severity="note",
                what=f"{survey.name} begins with a byte-order mark, which is skipped",
                fix="nothing; other tools may trip over it",
            )
