"""Findings from episodes of a program. Pure: no rule plays or loads anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from podium.agents.programs.program import shown_lines
from podium.agents.programs.report import no_answer
from podium.agents.tester.actors import POLICIES, Event, Play, Subject
from podium.agents.tester.evidence import Evidence
from podium.agents.tester.programs import ProgramEvidence, ProgramPlay, gold_of, has_word, prompt_text, with_answer
from podium.agents.tester.report import Earned, unknown
from podium.agents.tester.rules import ORACLE, payments
from podium.errors import Finding, gravest_first
from podium.errors.texts import clean, counted
from podium.records import content_of

_ADDRESS = re.compile(" at 0x[0-9a-f]+")
MOST_NAMED = 5
"""Files and processes that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramReport:
    """The result of a test of a program."""

    name: str
    played: tuple[ProgramPlay, ...]
    """The first episode of each policy."""
    findings: tuple[Finding, ...]
    closing: str
    """Sentences on which episodes were played and compared, and what remains unknown."""


def program_report(evidence: ProgramEvidence) -> ProgramReport:
    """The findings, the gravest first, and what they rest on."""
    rules = (idling, failing, rejecting, unread, hanging, keeping, leaving, reading, paying)
    found = gravest_first(each for rule in rules for each in rule(evidence))
    played = tuple(evidence.plays.values())
    return ProgramReport(name=evidence.name, played=played, findings=tuple(found), closing=_closing(evidence, found))


def idling(evidence: ProgramEvidence) -> Iterator[Finding]:
    """C065: episodes that return, and none has got an answer."""
    every = (*evidence.plays.values(), *evidence.again.values())
    if any(each.ended == "returned" for each in every) and not any(each.requests for each in every):
        error = no_answer(
            evidence.name,
            len(every),
            rejected=sum(each.rejected for each in every),
            rejection=next((clean(each.rejection) for each in every if each.rejected), ""),
            given_up=0,
        )
        yield Finding(code=error.code, severity="error", what=error.what, fix=error.fix, facts=error.facts)


def failing(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E003: episodes that raise, crash or return nonsense, by what they say; an error where all do."""
    failed = [each for each in evidence.plays.values() if each.ended == "failed"]
    whole = all(each.ended in ("failed", "hung") for each in evidence.plays.values())
    problems = [_ADDRESS.sub("", each.problem) for each in failed]
    for number, problem in enumerate(dict.fromkeys(problems)):
        same = [each for each, what in zip(failed, problems, strict=True) if what == problem]
        names = [each.policy for each in same]
        who = f"every policy ({len(same)})" if len(same) == len(evidence.plays) else ", ".join(names)
        why = "such an episode has no reward, and is left out of the step"
        if whole:
            why = f"{why}; all are: the run ends"
        fix = "treat any answer as possible; what it costs is yours to say: return a reward"
        if not any(each.requests for each in same):
            fix = "correct what it does before its first request is answered"
        wrote = shown_lines(same[0].log) if not number else []
        output = "\n  ".join(["; it wrote:", *wrote]) if wrote else ""
        what = f"{evidence.name} {problem}, with the replies of {who}{output}"
        yield _finding("E003", what, why, fix, "error" if whole else "warning")


def rejecting(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E003: requests that were refused, and the program went on; where none was answered C065 says so."""
    every = (*evidence.plays.values(), *evidence.again.values())
    refused = [each for each in every if each.rejected and each.ended != "failed"]
    if refused and any(each.requests for each in every):
        count = sum(each.rejected for each in refused)
        where = f"in {len(refused)} of {len(every)} episodes"
        what = f"{count} requests {where} were answered with an error, and it went on; the first with "
        why = "nothing else tells of it in training but `programs/rejected`: such an episode has its reward"
        fix = "ask for what the endpoint offers, and catch what the model can cause alone"
        yield _finding("E003", f"{what}{refused[0].rejection}", why, fix)


def unread(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E003: commands that end with a line that is no reward; a note where they never give one."""
    if found := [each for each in evidence.plays.values() if each.unread]:
        what = f"{evidence.name} ended with the line {found[0].unread!r} with the replies of {found[0].policy}"
        why = "that is neither a number nor a JSON object: the recipe's reward functions score such an episode"
        fix = "print the reward last, on standard output, or write it into the file PODIUM_REWARD"
        rewarded = any(each.reward is not None for each in evidence.plays.values())
        yield _finding("E003", what, why, fix, "warning" if rewarded else "note")


def hanging(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E005: episodes that were ended at the limit."""
    if hung := [each for each in evidence.plays.values() if each.ended == "hung"]:
        names = ", ".join(each.policy for each in hung)
        what = f"{evidence.name} took more than {evidence.limit:g} s by itself with the replies of {names}"
        why = "a round ends with its slowest episode; it was ended, and played once"
        fix = "bound what it waits for, or raise --limit"
        if not any(each.requests for each in hung):
            what = f"{what}, and made no request by then"
            fix = f"{fix} (`agent_timeout` in training): a command imports modules in every episode, a file only once"
        yield _finding("E005", what, why, fix)


def keeping(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E006, E017: the same replies, and another outcome."""
    played = [name for name in evidence.plays if name in evidence.again]
    differ = [name for name in played if evidence.again[name].outcome != evidence.plays[name].outcome]
    for name, (first, second) in evidence.alone.items():
        if first.outcome == second.outcome:
            pair = next(x for x in (evidence.plays[name], evidence.again[name]) if x.outcome != first.outcome)
            what = (
                f"{evidence.name} keeps state between episodes: with the replies of {name} "
                f"{_difference(first, pair)} after other episodes"
            )
            why = "in a process that has played nothing it does the same twice; training keeps its processes"
            fix = "make in the function what belongs to an episode: not in the module or a default argument"
            yield _finding("E006", what, why, fix, "error")
            return
    for name in differ[:1]:
        difference = _difference(evidence.plays[name], evidence.again[name])
        what = f"the same replies, of {name}, have another outcome the second time: {difference}"
        why = "chance, the clock, or files that it keeps: noise in every advantage"
        yield _finding("E017", what, why, "seed it with the row: its random numbers are those of its episode")


def leaving(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E009: processes and files that outlive an episode."""
    every = (*evidence.plays.values(), *evidence.again.values())
    if left := [each for each in every if each.left and each.ended != "hung"]:
        lines = list(dict.fromkeys(line for each in left for line in each.left))
        what = f"{len(left)} of {len(every)} episodes left processes behind: {_some(lines)}"
        why = "they take memory until the round is over, when they are ended with their worker"
        yield _finding("E009", what, why, "end and wait for what it starts, also where it raises: try, finally")
    if evidence.files:
        what = (
            f"the episodes left {counted(len(evidence.files), 'file')} in its working folder: {_some(evidence.files)}"
        )
        why = "episodes run at the same time, and the next one finds them"
        yield _finding("E009", what, why, "write into tempfile.mkdtemp(): it goes with the episode")


def reading(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E020: the row's answer in a request, and another one where the row has another."""
    found = with_answer(evidence)
    if found is None or evidence.swapped is None:
        return
    (name, message), (other, play), gold = found, evidence.swapped, gold_of(evidence.row)
    if any(has_word(content_of(x), other) and not has_word(content_of(x), evidence.row[gold]) for x in play.given):
        text = content_of(message)
        shown = text if len(text) <= 200 else f"{text[:200]}... ({len(text):,} characters)"
        what = (
            f"its requests hold the row's `{gold}`, {str(evidence.row[gold])!r}, with the replies of {name}, as the "
            f"message of {message['role']} {shown!r}"
        )
        why = f"with the answer {str(other)!r} they hold that: a policy that copies it solves every row"
        yield _finding("E020", what, why, "leave it out; right as it is where the program is meant to tell")


def paying(evidence: ProgramEvidence) -> Iterator[Finding]:
    """E010, E011, E013, E019: what is paid, by the rules of environments."""
    plays = {
        name: [Play(reward=each.reward, events=tuple(Event(said, "", None, False, 0.0) for said in each.replies))]
        for name, each in evidence.plays.items()
        if each.reward is not None
    }
    if set(POLICIES) <= set(plays) and any(each.requests for each in evidence.plays.values()):
        as_rows = Evidence(subject=Subject(name=evidence.name, make=None), rows=[evidence.row], turns=0, plays=plays)
        for each in payments(as_rows):
            said = evidence.plays[ORACLE].replies[:1] if ORACLE in evidence.plays else ()
            wrong = f"; or the oracle is wrong: its first reply is {said[0][:60]!r}" if said else ""
            yield replace(each, fix=f"look at what it compares{wrong}") if each.code == "E013" else each


def _closing(evidence: ProgramEvidence, found: list[Finding]) -> str:
    names = list(evidence.plays)
    every = (*evidence.plays.values(), *evidence.again.values())
    once = ", ".join(name for name in names if name not in evidence.again)
    times = f"each twice but for {once}" if once else "each twice"
    lines = [f"{counted(len(found), 'finding')} in {len(names)} policies, {times}: {', '.join(names)}."]
    if not any(each.requests for each in every):
        lines.append("None of its episodes has got an answer: what it does with answers is not known.")
    else:
        earned = [Earned(policy=x.policy, rewards=(x.reward,), turns=0) for x in every if x.reward is not None]
        lines += unknown(earned, has_reward=bool(earned))
    looked = ["processes that are left"]
    if evidence.files is not None:
        looked.append("files of its working folder (hidden ones left out)")
    gold = gold_of(evidence.row)
    if gold and not has_word(prompt_text(evidence.row), evidence.row[gold]) and any(x.requests for x in every):
        looked.append(f"`{gold}` in the requests")
    lines.append(f"Looked at: {', '.join(looked)}.")
    lines.append("Other replies, other rows and episodes at the same time were not tried.")
    return " ".join(lines)


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


def _some(names: list[str] | tuple[str, ...]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _finding(code: str, what: str, why: str, fix: str, severity: str = "warning") -> Finding:
    return Finding(code=code, severity=severity, what=clean(what), why=why, fix=clean(fix))  # type: ignore[arg-type]
