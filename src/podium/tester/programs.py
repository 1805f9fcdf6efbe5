"""Episodes of a program without a model: it runs as in training, at the endpoint, and a policy writes the answers.

    stage = Stage(program=resolve_program("agent.py:run"), endpoint=endpoint, chat=chat, turns=8, limit=10.0)
    report = examine_program(stage, row, oracle=None)

Each policy plays twice, with the others in between and in the other order, so that what an episode leaves shows.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podium.agents.chat import ChatFormat
from podium.agents.programs.episode import ProgramEpisode, program_episodes
from podium.agents.programs.program import CommandProgram, FileProgram, InProcess, Running
from podium.agents.programs.server import Endpoint
from podium.agents.setup import ProgramLimits
from podium.agents.tools import Tool
from podium.engines.base import RolloutEngine, Sampled, play
from podium.errors.texts import counted
from podium.records import Prompt, RolloutRequest, SamplingSettings, content_of
from podium.tester.cases import prompt_text
from podium.tester.episode_rules import RULES
from podium.tester.episodes import Action, Event, Policy, ProgramEvidence, ProgramPlay, Situation, Subject
from podium.tester.policies import ORACLE, POLICIES, scripted
from podium.tester.program_rules import gold_of, has_word, with_answer
from podium.tester.report import Earned, ProgramReport, unknown
from podium.tester.rules import evaluate

LONG = 20_000
"""Characters of the long answer, with which the tokens of an episode are used up."""
MOST_TOKENS = 1 << 22
"""Tokens of other episodes."""
MOST_FILES = 20_000
"""Files of a working folder that are compared, at most."""
SETTLE_SECONDS = 0.5
"""How long a process that an episode has started may take to end after it."""
REFUSAL = "I'm sorry, but I can't help with that."


def program_policies(row: Mapping[str, Any], oracle: Callable[..., Any] | None, limit: float) -> dict[str, Policy]:
    """All policies by name; the oracle first, if there is one, or the row has the answer."""
    made: dict[str, Policy] = {}
    if oracle is not None:
        made[ORACLE] = scripted(oracle, limit)
    elif gold := gold_of(row):
        made[ORACLE] = lambda now: str(now.row[gold])
    return {
        **made,
        **POLICIES,
        "refusal": lambda now: REFUSAL,
        "malformed call": lambda now: f'<tool_call>\n{{"name": "{now.tools[0].name if now.tools else "run"}", "argu',
        "unknown tool": lambda now: ("no_such_tool", {"query": [None]}),
        "long answer": lambda now: ("word " * LONG)[:LONG],
    }


def text_of(action: Action) -> str:
    """A turn as the policy's tokens say it: a call as Podium's tool template writes it."""
    if action is None or isinstance(action, str):
        return action or ""
    name, arguments = action
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class _Watched:
    """A program whose processes are looked at after each episode, before they are ended."""

    at_a_time = 1
    needs: Sequence[str] = ()

    def __init__(self, program: FileProgram | CommandProgram) -> None:
        self.program = program
        self.name = program.name
        self.code = program.code
        self.left: tuple[str, ...] = ()

    def begin(self) -> Running:
        return InProcess(self.program, is_fresh=False)

    def tidy(self) -> None:
        import psutil

        found = [process for every in self.program.left().values() for process in every]
        _, alive = psutil.wait_procs(found, timeout=SETTLE_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                self.left += (" ".join(process.cmdline())[:80],)
        self.program.tidy()


class _ScriptedEngine(RolloutEngine):
    """Draws the answers that a policy writes to the requests of one episode."""

    def __init__(self, episode: ProgramEpisode, policy: Policy, row: Mapping[str, Any]) -> None:
        self.tokenizer = episode.session.chat.tokenizer
        self.episode = episode
        self.policy = policy
        self.row = row
        self.requests: list[tuple[int, ...]] = []
        self.replies: list[str] = []

    def sample(self, requests: Sequence[RolloutRequest], settings: SamplingSettings) -> list[list[Sampled]]:
        """The policy's answer to each request, as drawn tokens."""
        return [[self._answer(request)] for request in requests]

    def _answer(self, request: RolloutRequest) -> Sampled:
        """The long answer alone is cut off where the request has no more room.

        The others are whole whatever `max_tokens` a program asks for: they are bytes, and a model needs fewer tokens.
        """
        asked = self.episode.asked(request)
        messages = [{"role": "user", "content": asked.prompt}] if isinstance(asked.prompt, str) else asked.messages
        tools = tuple(Tool(name=schema["function"]["name"], function=print, schema=schema) for schema in asked.tools)
        action = self.policy(Situation(self.row, tuple(messages), tools, len(self.replies)))
        self.requests.append(request.token_ids)
        self.replies.append(text_of(action))
        ids = self.episode.session.chat.encode(self.replies[-1])
        ids = ids[: request.max_tokens] if len(ids) >= LONG else [*ids, *self.episode.settings.end_ids]
        return Sampled(ids, [0.0] * len(ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How episodes are played."""

    program: FileProgram | CommandProgram
    endpoint: Endpoint
    chat: ChatFormat
    turns: int
    """Answers, at most."""
    limit: float
    """Seconds that the program may take by itself."""

    def play(self, name: str, policy: Policy, row: Mapping[str, Any]) -> ProgramPlay:
        """One episode."""
        most = LONG if name == "long answer" else MOST_TOKENS
        end = self.chat.tokenizer.eos_token_id
        settings = SamplingSettings(num_completions=1, max_tokens=most, end_ids=frozenset({end}))
        limits = ProgramLimits(timeout=self.limit, max_turns=self.turns, context_length=None)
        columns = {name: value for name, value in row.items() if name != "prompt"}
        prompt = Prompt(id=0, row=0, token_ids=(), text="", content=row.get("prompt") or "", columns=columns)
        watched = _Watched(self.program)
        with program_episodes(watched, self.endpoint, [prompt], settings, chat=self.chat, limits=limits) as [episode]:
            engine = _ScriptedEngine(episode, policy, row)
            play(engine, settings, [episode.rollout()], [], threads=1)
        record = episode.record()
        result = record.result
        if episode.is_overdue:
            ended = "hung"
        elif not result.problem:
            ended = "returned"
        else:
            ended = "gave up" if result.capped else "failed"
        branches = episode.session.branches
        messages = [message for branch in branches for message in branch.asked.messages]
        messages += [reply for branch in branches for turn in branch.turns for reply in turn.replies]
        messages += [{"role": "user", "content": x.asked.prompt} for x in branches if isinstance(x.asked.prompt, str)]
        replies = set(engine.replies)
        return ProgramPlay(
            policy=name,
            reward=result.reward,
            rewards=result.rewards,
            ended=ended,
            problem=result.problem,
            log=result.log,
            seconds=result.seconds,
            requests=tuple(engine.requests),
            events=tuple(Event(reply, "", None, False, 0.0) for reply in engine.replies),
            messages=tuple(x for x in messages if x["role"] != "assistant" or content_of(x) not in replies),
            rejected=record.rejected,
            rejection=result.rejected,
            unread=record.unread,
            left=watched.left,
        )

    def alone(self, name: str, policy: Policy, row: Mapping[str, Any]) -> ProgramPlay:
        """The same in a process that has played nothing."""
        for worker in self.program.workers().workers:
            worker.kill()
        return self.play(name, policy, row)


def examine_program(stage: Stage, row: Mapping[str, Any], oracle: Callable[..., Any] | None) -> ProgramReport:
    """Play a row with every policy, compare, and report; `oracle` as for environments."""
    evidence = gather(stage, row, program_policies(row, oracle, stage.limit))
    found = evaluate(RULES, "program", evidence)
    return ProgramReport(
        name=stage.program.name,
        played=tuple(evidence.first.values()),
        findings=tuple(found),
        closing=_closing(evidence, len(found)),
    )


def gather(stage: Stage, row: Mapping[str, Any], policies: Mapping[str, Policy]) -> ProgramEvidence:
    """Play everything."""
    program = stage.program
    folder = program.folder if isinstance(program, CommandProgram) else Path.cwd()
    before = _files(folder)
    first = {name: stage.play(name, policy, row) for name, policy in policies.items()}
    calm = [name for name, play in first.items() if play.ended != "hung"]
    second = {name: stage.play(name, policies[name], row) for name in reversed(calm)}
    after = _files(folder)
    files = None
    if before is not None and after is not None:
        files = tuple(sorted(name for name, state in after.items() if before.get(name) != state))
    evidence = ProgramEvidence(
        subject=Subject(name=program.name, make=None, kind="program", limit=stage.limit),
        rows=[row],
        turns=stage.turns,
        plays={name: (play,) for name, play in first.items()},
        again=tuple((first[name], second[name]) for name in calm),
        files=files,
    )
    differ = next((pair for pair in evidence.again if pair[0].outcome != pair[1].outcome), None)
    if differ is not None and isinstance(program, FileProgram):
        name = differ[0].policy
        alone, once_more = (stage.alone(name, policies[name], row) for _ in range(2))
        if alone.outcome == once_more.outcome:
            other = next(play for play in differ if play.outcome != alone.outcome)
            evidence = replace(evidence, shared=(alone, other, name))
    if (found := with_answer(evidence)) is not None:
        gold = gold_of(row)
        other_answer = _another(row[gold])
        swapped = stage.play(found[0], policies[found[0]], {**row, gold: other_answer})
        evidence = replace(evidence, swapped=(other_answer, swapped))
    return evidence


def _closing(evidence: ProgramEvidence, num_findings: int) -> str:
    """What was played and compared, and what remains unknown."""
    names = list(evidence.plays)
    twice = [first.policy for first, _ in evidence.again]
    once = ", ".join(name for name in names if name not in twice)
    times = f"each twice but for {once}" if once else "each twice"
    lines = [f"{counted(num_findings, 'finding')} in {len(names)} policies, {times}: {', '.join(names)}."]
    if evidence.is_answered:
        rewards = [(play.policy, play.reward) for play in evidence.every() if play.reward is not None]
        earned = [Earned(policy=policy, rewards=(reward,), turns=0) for policy, reward in rewards]
        lines += unknown(earned, has_reward=bool(earned))
    else:
        lines.append("None of its episodes has got an answer: what it does with answers is not known.")
    looked = ["processes that are left"]
    if evidence.files is not None:
        looked.append("files of its working folder (hidden ones left out)")
    gold = gold_of(evidence.row)
    is_in_prompt = bool(gold) and has_word(prompt_text(evidence.row.get("prompt") or ""), evidence.row[gold])
    if gold and not is_in_prompt and evidence.is_answered:
        looked.append(f"`{gold}` in the requests")
    lines.append(f"Looked at: {', '.join(looked)}.")
    lines.append("Other replies, other rows and episodes at the same time were not tried.")
    return " ".join(lines)


def _another(value: Any) -> Any:
    """Another answer of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return str(int(value) + 1) if value.strip().isdecimal() else f"{value.strip()[::-1]} zq"


def _files(folder: Path) -> dict[str, tuple[int, int]] | None:
    """Time and size of the files in a folder; hidden ones and bytecode are left out. None: there are too many."""
    found: dict[str, tuple[int, int]] = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [folder for folder in folders if not folder.startswith(".") and folder != "__pycache__"]
        for name in names:
            path = os.path.join(place, name)
            try:
                state = os.lstat(path)
            except OSError:  # gone meanwhile
                continue
            found[os.path.relpath(path, folder)] = state.st_mtime_ns, state.st_size
        if len(found) > MOST_FILES:
            return None
    return found
