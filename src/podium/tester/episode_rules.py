"""Rules about episodes: of tools and environments, and of programs. `RULES` is the table of all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from podium.errors import Finding, Severity
from podium.errors.texts import clean
from podium.tester import program_rules
from podium.tester.episodes import ADDRESS, Evidence, Play
from podium.tester.policies import COLUMN, LEGAL, ORACLE, POLICIES
from podium.tester.rules import Rule, Subject

SLOW_SECONDS = 0.25
"""Median duration from which calls are slow: 64 completions of four turns take 16 s a round if calls cannot overlap."""
LONG_RESULT = 4000
"""Characters of a result, about a thousand tokens."""
HIGH = 0.5
"""A mean reward that senseless turns should not reach, where no oracle shows what can be earned."""
ROWS = 3
"""Rows below which nothing about rewards is called wrong."""
PAID = 1e-9
"""Rewards that differ by less are equal."""

_BYTES = re.compile(r"^b(?:'.*'|\".*\")$", re.DOTALL)
_DICT = re.compile(r"^\{['\d(]")


def _finding(code: str, severity: Severity, what: str, why: str = "", fix: str = "") -> Finding:
    return Finding(code=code, severity=severity, what=clean(what), why=why, fix=fix)


# ---- code that fails ----


def failures(evidence: Evidence) -> Iterator[Finding]:
    """E001 to E005: what could not be made, described or played, each once."""
    found = [*evidence.failures, *(play.failure for play in evidence.every() if play.failure is not None)]
    for code in dict.fromkeys(failure.code for failure in found):
        same = [failure for failure in found if failure.code == code]
        for first in same if code == "E002" else same[:1]:
            what = first.what
            if len(same) > 1 and code != "E002":
                what = f"{what}; {len(same) - 1} more episodes end so"
            yield replace(first, what=clean(what))


def failing_tools(evidence: Evidence) -> Iterator[Finding]:
    """E003 of a tool: every call with arguments of the types in its schema has raised."""
    for name, calls in evidence.events.items():
        failed = [event for event in calls if event.problem in ("error", "arguments", "result")]
        if not name or len(failed) < len(calls):
            continue
        first = failed[0]
        is_refused = first.problem == "arguments"
        yield _finding(
            "E003",
            "error" if is_refused else "note",  # the others may be right to refuse
            f"all {len(calls)} calls of `{name}` failed, as {first.action[:80]}: {first.content[:160]}",
            "arguments of the types in its schema are refused" if is_refused else "",
            "correct the type hints, or let the error name a call that is right; data of its own: --data",
        )


# ---- results ----


def results(evidence: Evidence) -> Iterator[Finding]:
    """E014: results that are no text and no plain data."""
    for name, events in evidence.events.items():
        mine = [event for event in events if event.problem in ("", "result")]
        odd = [e for e in mine if e.problem or ADDRESS.search(e.content) or _BYTES.match(e.content.strip())]
        dicts = [event for event in mine if name and _DICT.match(event.content)]
        what = f"`{name}` returns" if name else "the observation is"
        if odd:
            text = f"{what} what is not JSON: the model reads {odd[0].content[:80]!r} after {odd[0].action[:60]}"
            why = "an address or bytes say nothing to it"
            yield _finding("E014", "warning", text, why, "return text, or json.dumps")
        elif dicts:
            text = f"{what} a dict: the model reads Python's repr, {dicts[0].content[:80]!r}, and not JSON"
            yield _finding("E014", "note", text, "", "return json.dumps(result)")


def sizes(evidence: Evidence) -> Iterator[Finding]:
    """E015: results that fill the context."""
    for name, events in evidence.events.items():
        largest = max(events, key=lambda event: len(event.content))
        if len(largest.content) > LONG_RESULT:
            subject = f"`{name}`" if name else "a step"
            yield _finding(
                "E015",
                "warning",
                f"{subject} returns {len(largest.content):,} characters, after {largest.action[:60]}",
                "results count towards max_completion_length; what does not fit ends the episode",
                "return less: the best matches, the end of a log; or set max_tool_result_tokens",
            )


def seconds(evidence: Evidence) -> Iterator[Finding]:
    """E016: slow calls."""
    for name, events in evidence.events.items():
        took = [event.seconds for event in events if event.problem != "timeout"]
        if took and median(took) > SLOW_SECONDS:
            what = f"{f'`{name}` takes' if name else 'a step takes'} {median(took):.2f} s"
            why = "a round ends with its slowest episode, and each of its turns waits"
            yield _finding("E016", "warning", what, why, "cache, or write it with `async def`")


# ---- state ----


def unstable(evidence: Evidence) -> Iterator[Finding]:
    """E006, E007 and E017: the same row, or the same turns, give something else the second time."""
    if evidence.shared is not None:
        yield _not_apart(f"of {evidence.shared[2]} outside of them", *evidence.shared[:2])
        return
    starts = [(a, b) for a, b in evidence.again if a.prompt != b.prompt]
    if starts:
        a, b = starts[0]
        what = f"reset with the same row gives {_short(a.prompt)}, then {_short(b.prompt)}"
        why = "completions of a group get different tasks, and are compared all the same"
        fix = "draw from the row's columns, or from an argument `seed` of `reset`, which a group shares"
        yield _finding("E007", "warning", what, why, fix)
    elif differ := [(a, b) for a, b in evidence.again if a.outcome != b.outcome]:
        what = f"the same turns have another outcome the second time: {_difference(*differ[0])}"
        why = "chance in the environment is noise in every advantage"
        fix = "seed it in `reset`, with the row or with its argument `seed`; what instances count together: on `self`"
        yield _finding("E017", "warning", what, why, fix)


def shared(evidence: Evidence) -> Iterator[Finding]:
    """E006: another instance changes the outcome."""
    if differ := _differ(evidence.plays["noise"], evidence.beside):
        yield _not_apart("beside another one", *differ[0])


def _not_apart(how: str, a: Play, b: Play) -> Finding:
    what = f"instances share state ({how}): the same turns have another outcome: {_difference(a, b)}"
    why = "completions are played at the same time, each in an instance of its own"
    fix = "set state on `self`, in `reset`: not on the class, in a module or in a default argument"
    return _finding("E006", "error", what, why, fix)


def leftovers(evidence: Evidence) -> Iterator[Finding]:
    """E009: the episode before changes the outcome."""
    if differ := _differ(evidence.plays["noise"], evidence.after):
        what = f"`reset` leaves something of the episode before: {_difference(*differ[0])}"
        why = "instances are reused: rewards of one completion go to the next"
        yield _finding("E009", "error", what, why, "set all that belongs to an episode in `reset`, not in `__init__`")


def ignored_rows(evidence: Evidence) -> Iterator[Finding]:
    """E008: different rows, and always the same episode."""
    columns = [{key: value for key, value in row.items() if key != "prompt"} for row in evidence.rows]
    if len(set(map(str, columns))) < 2 or len({str(row.get("prompt")) for row in evidence.rows}) > 1:
        return
    blind = {*POLICIES, ORACLE}  # other policies say something of the row
    tables = [[play.outcome for play in plays] for name, plays in evidence.plays.items() if name in blind]
    if any(
        min(gains) > PAID for name in evidence.plays if name.startswith(COLUMN) and (gains := _gains(evidence, name))
    ):
        return  # other turns are paid in other rows
    if all(len(set(map(str, outcomes))) == 1 for outcomes in tables):
        differing = f"{len(evidence.rows)} rows that differ in {', '.join(columns[0])}"
        what = f"`reset` ignores the row: {differing} give the same episodes"
        fix = "read the columns: `def reset(self, column, **row)`"
        yield _finding("E008", "warning", what, "every row is then the same task", fix)


def _differ(one: Sequence[Play], other: Sequence[Play]) -> list[tuple[Play, Play]]:
    return [(a, b) for a, b in zip(one, other, strict=False) if a.outcome != b.outcome]


def _difference(a: Play, b: Play) -> str:
    """The first difference of two episodes."""
    if a.prompt != b.prompt:
        return f"the prompt is {_short(b.prompt)}, not {_short(a.prompt)}"
    for turn, (x, y) in enumerate(zip(a.events, b.events, strict=False), start=1):
        for name, first, second in zip(("turn", "answer", "reward", "end"), x[:4], y[:4], strict=True):
            if first != second:
                return f"the {name} of turn {turn} ({x.action[:40]!r}) is {_short(second)}, not {_short(first)}"
    if len(a.events) != len(b.events):
        return f"it has {len(b.events)} turns, not {len(a.events)}"
    return f"the reward is {b.reward}, not {a.reward}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


# ---- what is paid ----


def endless(evidence: Evidence) -> Iterator[Finding]:
    """E018: a text environment that silence never ends."""
    plays = evidence.plays["silence"]
    if evidence.subject.kind != "text" or any(play.done for play in plays):
        return
    turns = max(len(play.events) for play in plays)
    what = f"silence ends no episode within {turns} turns"
    why = "an episode then goes on until max_completion_length, and costs as much"
    fix = "set `max_turns` in the class or the recipe, or end the episode after some turns"
    yield _finding("E018", "warning", what, why, fix)


def payments(evidence: Evidence) -> Iterator[Finding]:
    """E010 to E013 and E019: inaction, chance and repetition that pay, an oracle that does not."""
    means = {
        name: fmean(rewards)
        for name, plays in evidence.plays.items()
        if (rewards := [play.reward for play in plays if play.reward is not None])
    }
    others = {name: x for name, x in means.items() if name in POLICIES}
    if not others:
        return
    table = ", ".join(f"{name} {means[name]:.3g}" for name in means if name in (*POLICIES, ORACLE, LEGAL))
    oracle = means.get(ORACLE)
    best = max(others, key=others.__getitem__)
    if oracle is not None and oracle <= others[best] + PAID:
        gains = _gains(evidence, ORACLE, "silence")
        never = len(gains) >= ROWS and max(gains) <= PAID
        why = "what solves the task must earn more than what does not"
        less = f"silence on any of {len(gains)} rows" if never else best
        what = f"the oracle earns no more than {less}: {table}"
        yield _finding("E013", "error" if never else "warning", what, why, _look_at_the_oracle(evidence))
        return
    yield from _inaction(means, oracle, table)
    yield from _senseless(evidence, means, oracle, table)
    if oracle is None and len(means) > 1 and max(means.values()) - min(means.values()) <= PAID and others[best] > PAID:
        why = "where all episodes earn the same nothing is learnt"
        yield _finding("E019", "warning", f"everything earns the same: {table}", why, "reward what solves the task")


def _look_at_the_oracle(evidence: Evidence) -> str:
    """The fix where an oracle earns nothing."""
    if evidence.subject.kind != "program":
        return "look at what `step` or `get_reward` compares; or the oracle is wrong: print its turns"
    events = evidence.plays[ORACLE][0].events
    wrong = f"; or the oracle is wrong: its first reply is {events[0].action[:60]!r}" if events else ""
    return f"look at what it compares{wrong}"


def _inaction(means: Mapping[str, float], oracle: float | None, table: str) -> Iterator[Finding]:
    if "silence" not in means:
        return
    tried = [means[name] for name in ("noise", "repetition") if name in means]
    least = means.get(LEGAL, min(tried, default=means["silence"]))
    why = "a policy that is rarely right learns to do nothing, and rewards of a group become equal"
    fix = "give silence the lowest reward of all, or a wrong try no less than none"
    paid = oracle is not None and means["silence"] >= 0.5 * oracle > 0
    if paid or (means["silence"] > PAID and means["silence"] >= max(tried, default=0.0)):
        yield _finding("E010", "warning", f"silence is paid: {table}", why, fix)
    elif means["silence"] > least + PAID:
        yield _finding("E010", "warning", f"a try costs more than silence: {table}", why, fix)


def _senseless(evidence: Evidence, means: Mapping[str, float], oracle: float | None, table: str) -> Iterator[Finding]:
    least = means.get("silence", 0.0) + PAID
    enough = 0.5 * oracle if oracle is not None and oracle > 0 else HIGH + PAID
    paid = {n: x for n, x in means.items() if x >= enough and x > least and n != LEGAL and not _is_informed(n)}
    why = "what is paid without sense is learnt before the task"
    if senseless := {name: value for name, value in paid.items() if name != "repetition"}:
        values = [f"{name} {value:.3g}" for name, value in senseless.items()]
        first = next(iter(senseless))
        best = max(evidence.plays[first], key=lambda play: play.reward or 0.0)
        turns = ", ".join(_short(event.action) for event in best.events[:3])
        what = (
            f"turns without sense are paid: {', '.join(values)}; beside them {table}. "
            f"The turns of {first} begin with {turns or 'nothing'}"
        )
        yield _finding("E011", "warning", what, why, "compare the whole answer, not its form or a part of it")
    grows = [row for row in evidence.repeated if row[0] + PAID < row[1] < row[2] - PAID]
    if grows or "repetition" in paid:
        more = f"; after 2, 4 and more turns it has {', '.join(f'{x:.3g}' for x in grows[0])}" if grows else ""
        fix = "pay for the result, once, at the end" if grows else "compare the whole answer, not its form"
        yield _finding("E012", "warning", f"repetition is paid: {table}{more}", why, fix)


def _is_informed(name: str) -> bool:
    """Whether a policy knows the row."""
    return name.startswith((ORACLE, COLUMN, "silence"))


def _gains(evidence: Evidence, name: str, base: str = "noise") -> list[float]:
    """The rewards of a policy above those of another one, by row."""
    pairs = zip(evidence.plays.get(name, ()), evidence.plays.get(base, ()), strict=False)
    return [(a.reward or 0.0) - (b.reward or 0.0) for a, b in pairs]


def paid_again(evidence: Evidence) -> Iterator[Finding]:
    """E012: what has been paid is paid once more: for the oracle's last turn, or a column's value, said again."""
    gains = _gains(evidence, f"{ORACLE} repeated", ORACLE)
    pairs = zip(gains, evidence.plays.get(f"{ORACLE} repeated", ()), strict=False)
    repeated = [repr(play.events[-1].action[:40]) for gain, play in pairs if gain > PAID]
    for play in (play for name, plays in evidence.plays.items() if _is_informed(name) for play in plays):
        paid = [(event.action, event.content) for event in play.events if (event.reward or 0.0) > PAID and event.action]
        repeated += [repr(action[:40]) for action, _ in paid[:1] if len(paid) > len(set(paid))]
    if repeated:
        why = "the policy learns to say it until the episode ends"
        fix = "end the episode, or pay once; right as it is where every turn is a task of its own"
        yield _finding("E012", "warning", f"the turn {repeated[0]} is paid again when it is said again", why, fix)


def leaks(evidence: Evidence) -> Iterator[Finding]:
    """E020: what is paid stands at the same place of every prompt, or of every observation."""
    if evidence.subject.kind != "text" or len(evidence.rows) < 2:
        return
    noise = evidence.plays["noise"]
    oracle = evidence.plays.get(ORACLE)
    texts = [("the prompt", [play.prompt for play in noise])]
    for plays in (noise, evidence.plays.get("polite words", noise)):  # noise may solve a row
        for turn in range(min(len(play.events) for play in plays)):
            events = [play.events[turn] for play in plays]
            if not any(event.done for event in events):  # the last word of an episode may well be the solution
                texts.append((f"the observation of turn {turn + 1}", [event.content for event in events]))
    for name in (policy for policy in evidence.plays if policy.startswith(COLUMN)):
        values = [str(row.get(name.removeprefix(COLUMN))) for row in evidence.rows]
        actions = [play.events[-1].action if play.events else "" for play in oracle or ()]
        gains = _gains(evidence, name)
        earns = min(gains) >= -PAID and max(gains) > PAID
        paid = earns or (oracle is not None and all(v in text for v, text in zip(values, actions, strict=False)))
        for where, seen in texts if paid and len(set(values)) > 1 else ():
            if (before := _place(values, seen)) is not None:
                what = (
                    f"what is paid, column `{name.removeprefix(COLUMN)}`, stands in {where}, behind {before!r} "
                    f"in all {len(seen)} rows: {_short(seen[0])}"
                )
                fix = "leave it out of what the model reads; right as it is where copying is the task"
                yield _finding("E020", "warning", what, "a policy that copies it solves every row", fix)
                break


def _place(values: Sequence[str], texts: Sequence[str]) -> str | None:
    """The characters before a value, where they are the same in every text; None: it is not always there."""
    found = []
    for value, text in zip(values, texts, strict=True):
        matches = re.finditer(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE)
        found.append({text[max(0, match.start() - 8) : match.start()] for match in matches})
    return min(set.intersection(*found), default=None)


# ---- the table ----

ENVIRONMENT: tuple[Subject, ...] = ("environment",)
PROGRAM: tuple[Subject, ...] = ("program",)
CHANCE = ("E006", "E007", "E017")
"""Codes of environments in which the same turns have another outcome: they are compared with nothing else."""
COMPARED = ("is_sound", "is_repeatable", "is_environment")

RULES: tuple[Rule, ...] = (
    Rule(codes="E001 E002 E003 E004 E005", of=ENVIRONMENT, find=failures),
    Rule(codes="E014", of=ENVIRONMENT, find=results, needs=("plays",)),
    Rule(codes="E015", of=ENVIRONMENT, find=sizes, needs=("plays",)),
    Rule(codes="E016", of=ENVIRONMENT, find=seconds, needs=("plays",)),
    Rule(codes="E003", of=ENVIRONMENT, find=failing_tools, needs=("plays",)),
    Rule(codes="E006 E007 E017", of=ENVIRONMENT, find=unstable, needs=("is_sound", "is_repeatable")),
    Rule(codes="E008", of=ENVIRONMENT, find=ignored_rows, needs=COMPARED, unless=CHANCE),
    Rule(codes="E006", of=ENVIRONMENT, find=shared, needs=COMPARED, unless=CHANCE),
    Rule(codes="E009", of=ENVIRONMENT, find=leftovers, needs=COMPARED, unless=CHANCE),
    Rule(codes="E018", of=ENVIRONMENT, find=endless, needs=("is_sound", "is_environment")),
    Rule(codes="C065", of=PROGRAM, find=program_rules.idling),
    Rule(codes="E003", of=PROGRAM, find=program_rules.failing),
    Rule(codes="E003", of=PROGRAM, find=program_rules.rejecting, needs=("is_answered",)),
    Rule(codes="E003", of=PROGRAM, find=program_rules.unread),
    Rule(codes="E005", of=PROGRAM, find=program_rules.hanging),
    Rule(codes="E006", of=PROGRAM, find=program_rules.keeping, needs=("shared",)),
    Rule(codes="E017", of=PROGRAM, find=program_rules.changing, unless=("E006",)),
    Rule(codes="E009", of=PROGRAM, find=program_rules.leaving),
    Rule(codes="E020", of=PROGRAM, find=program_rules.reading, needs=("swapped",)),
    Rule(codes="E010 E011 E012 E013 E019", of=(*ENVIRONMENT, *PROGRAM), find=payments, needs=("is_payable",)),
    Rule(codes="E020", of=ENVIRONMENT, find=leaks, needs=("is_payable",)),
    Rule(codes="E012", of=ENVIRONMENT, find=paid_again, needs=("is_payable",)),
)
"""All rules about episodes, in the order in which they are asked."""
