"""Rules about episodes of a program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podium.agents.programs.program import shown_lines
from podium.agents.programs.report import no_answer
from podium.data.columns import GOLD
from podium.errors import Finding, Severity
from podium.errors.texts import clean, counted
from podium.records import Message, content_of
from podium.tester.cases import prompt_text
from podium.tester.episodes import ProgramEvidence, ProgramPlay

_ADDRESS = re.compile(" at 0x[0-9a-f]+")
MOST_NAMED = 5
"""Files and processes that a message names."""


def idling(evidence: ProgramEvidence) -> Iterator[Finding]:
    """C065: episodes that return, and none has got an answer."""
    plays = list(evidence.every())
    if any(play.ended == "returned" for play in plays) and not evidence.is_answered:
        error = no_answer(
            evidence.subject.name,
            len(plays),
            rejected=sum(play.rejected for play in plays),
            rejection=next((clean(play.rejection) for play in plays if play.rejected), ""),
            given_up=0,
        )
        yield Finding(code=error.code, severity="error", what=error.what, fix=error.fix, facts=error.facts)


def failing(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E003: episodes that raise, crash or return nonsense, by what they say; an error where all do."""
    failed: dict[str, list[ProgramPlay]] = {}
    for play in evidence.first.values():
        if play.ended == "failed":
            failed.setdefault(_ADDRESS.sub("", play.problem), []).append(play)
    whole = all(play.ended in ("failed", "hung") for play in evidence.first.values())
    for number, (problem, plays) in enumerate(failed.items()):
        policies = ", ".join(play.policy for play in plays)
        who = f"every policy ({len(plays)})" if len(plays) == len(evidence.plays) else policies
        why = "such an episode has no reward, and is left out of the step"
        if whole:
            why = f"{why}; all are: the run ends"
        fix = "treat any answer as possible; what it costs is yours to say: return a reward"
        if not any(play.requests for play in plays):
            fix = "correct what it does before its first request is answered"
        wrote = shown_lines(plays[0].log) if number == 0 else []
        output = "\n  ".join(["; it wrote:", *wrote]) if wrote else ""
        what = f"{evidence.subject.name} {problem}, with the replies of {who}{output}"
        yield _finding("E003", what, why, fix, "error" if whole else "warning")


def rejecting(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E003: requests that were refused, and the program went on; where none was answered C065 says so."""
    plays = list(evidence.every())
    refused = [play for play in plays if play.rejected and play.ended != "failed"]
    if refused:
        count = sum(play.rejected for play in refused)
        where = f"in {len(refused)} of {len(plays)} episodes"
        what = f"{count} requests {where} were answered with an error, and it went on; the first with "
        why = "nothing else tells of it in training but `programs/rejected`: such an episode has its reward"
        fix = "ask for what the endpoint offers, and catch what the model can cause alone"
        yield _finding("E003", f"{what}{refused[0].rejection}", why, fix)


def unread(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E003: commands that end with a line that is no reward; a note where they never give one."""
    plays = evidence.first.values()
    if found := [play for play in plays if play.unread]:
        line = f"the line {found[0].unread!r} with the replies of {found[0].policy}"
        why = "that is neither a number nor a JSON object: the recipe's reward functions score such an episode"
        fix = "print the reward last, on standard output, or write it into the file PODIUM_REWARD"
        rewarded = any(play.reward is not None for play in plays)
        yield _finding(
            "E003", f"{evidence.subject.name} ended with {line}", why, fix, "warning" if rewarded else "note"
        )


def hanging(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E005: episodes that were ended at the limit."""
    if hung := [play for play in evidence.first.values() if play.ended == "hung"]:
        names = ", ".join(play.policy for play in hung)
        limit = f"{evidence.subject.limit:g} s"
        what = f"{evidence.subject.name} took more than {limit} by itself with the replies of {names}"
        why = "a round ends with its slowest episode; it was ended, and played once"
        fix = "bound what it waits for, or raise --limit"
        if not any(play.requests for play in hung):
            what = f"{what}, and made no request by then"
            fix = f"{fix} (`agent_timeout` in training): a command imports modules in every episode, a file only once"
        yield _finding("E005", what, why, fix)


def keeping(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E006: what a process keeps decides."""
    assert evidence.shared is not None
    alone, other, policy = evidence.shared
    difference = _difference(alone, other)  # type: ignore[arg-type]
    yield _finding(
        "E006",
        f"{evidence.subject.name} keeps state between episodes: with the replies of {policy} {difference} after other "
        "episodes",
        "in a process that has played nothing it does the same twice; training keeps its processes",
        "make in the function what belongs to an episode: not in the module or a default argument",
        "error",
    )


def changing(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E017: the same replies, and another outcome."""
    for first, second in evidence.again:
        if first.outcome != second.outcome:
            difference = _difference(first, second)
            what = f"the same replies, of {first.policy}, have another outcome the second time: {difference}"
            why = "chance, the clock, or files that it keeps: noise in every advantage"
            yield _finding("E017", what, why, "seed it with the row: its random numbers are those of its episode")
            return


def leaving(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E009: processes and files that outlive an episode."""
    plays = list(evidence.every())
    if left := [play for play in plays if play.left and play.ended != "hung"]:
        lines = list(dict.fromkeys(line for play in left for line in play.left))
        what = f"{len(left)} of {len(plays)} episodes left processes behind: {_some(lines)}"
        why = "they take memory until the round is over, when they are ended with their worker"
        yield _finding("E009", what, why, "end and wait for what it starts, also where it raises: try, finally")
    if evidence.files:
        files = f"{counted(len(evidence.files), 'file')} in its working folder: {_some(evidence.files)}"
        why = "episodes run at the same time, and the next one finds them"
        fix = "write into tempfile.mkdtemp(): it goes with the episode"
        yield _finding("E009", f"the episodes left {files}", why, fix)


def reading(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E020: the row's answer in a request, and another one where the row has another."""
    found = with_answer(evidence)
    assert found is not None
    assert evidence.swapped is not None
    name, message = found
    other, play = evidence.swapped
    gold = gold_of(evidence.row)
    texts = [content_of(message) for message in play.messages]
    if any(has_word(text, other) and not has_word(text, evidence.row[gold]) for text in texts):
        text = content_of(message)
        shown = text if len(text) <= 200 else f"{text[:200]}... ({len(text):,} characters)"
        what = (
            f"its requests hold the row's `{gold}`, {str(evidence.row[gold])!r}, with the replies of {name}, as the "
            f"message of {message['role']} {shown!r}"
        )
        why = f"with the answer {str(other)!r} they hold that: a policy that copies it solves every row"
        yield _finding("E020", what, why, "leave it out; right as it is where the program is meant to tell")


def _difference(first: ProgramPlay, second: ProgramPlay) -> str:
    if first.reward != second.reward:
        return f"the reward is {_number(first.reward)}, and {_number(second.reward)}"
    if first.ended != second.ended:
        return f"it {first.ended}, and {second.ended}"
    if len(first.requests) != len(second.requests):
        return f"it makes {len(first.requests)} requests, and {len(second.requests)}"
    if first.requests != second.requests:
        number = next(i for i, (a, b) in enumerate(zip(first.requests, second.requests, strict=True)) if a != b)
        return f"request {number + 1} is another one"
    return f"the rewards are {dict(first.rewards)}, and {dict(second.rewards)}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _finding(code: str, what: str, why: str, fix: str, severity: Severity = "warning") -> Finding:
    return Finding(code=code, severity=severity, what=clean(what), why=why, fix=clean(fix))


# ---- the answer in requests ----


def gold_of(row: Mapping[str, Any]) -> str:
    """The column with the right answer; empty: there is none."""
    return next((name for name in GOLD if isinstance(row.get(name), str | int | float) and str(row[name]).strip()), "")


def with_answer(evidence: ProgramEvidence) -> tuple[str, Message] | None:
    """A policy that has not said the answer, and a message of its episode that has it; None: there is none."""
    gold = gold_of(evidence.row)
    if not gold or has_word(prompt_text(evidence.row.get("prompt") or ""), evidence.row[gold]):
        return None
    for name, play in evidence.first.items():
        if not any(has_word(reply, evidence.row[gold]) for reply in play.replies):
            for message in play.messages:
                if has_word(content_of(message), evidence.row[gold]):
                    return name, message
    return None


def has_word(text: str, value: Any) -> bool:
    """Whether a value stands in a text by itself.

    >>> has_word("It is 12.", 12), has_word("It is 12.", 2)
    (True, False)
    """
    word = str(value).strip().casefold()
    place = -1
    text = f" {text.casefold()} "
    while (place := text.find(word, place + 1)) >= 0:
        if not (text[place - 1].isalnum() and word[0].isalnum()):
            end = place + len(word)
            if not (text[end].isalnum() and word[-1].isalnum()):
                return True
    return False
