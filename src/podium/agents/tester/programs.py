"""Episodes of a program without a model: it runs as in training, at the endpoint, and a policy writes the answers.

    stage = Stage(program=resolve_program("agent.py:run"), endpoint=endpoint, chat=chat, turns=8, limit=10.0)
    evidence = gather_program(stage, row, program_policies(row, oracle=None, limit=10.0))
    program_report(evidence).findings

Each policy plays twice, with the others in between and in the other order, so that what an episode leaves shows.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.agents.chat import ChatFormat
from podium.agents.programs.episode import ProgramEpisode, program_episodes
from podium.agents.programs.program import CommandProgram, FileProgram, InProcess, Running
from podium.agents.programs.server import Endpoint
from podium.agents.setup import ProgramLimits
from podium.agents.tester.actors import POLICIES, Action, Policy, Situation, scripted
from podium.agents.tester.rules import ORACLE
from podium.agents.tools import Tool
from podium.data.columns import GOLD
from podium.engines.base import RolloutEngine, Sampled, play
from podium.records import Message, Prompt, RolloutRequest, SamplingSettings, content_of

LONG = 20_000
"""Characters of the long answer, with which the tokens of an episode are used up."""
MOST_TOKENS = 1 << 22
"""Tokens of other episodes."""
MOST_FILES = 20_000
"""Files of a working folder that are compared, at most."""
SETTLE_SECONDS = 0.5
"""How long a process that an episode has started may take to end after it."""
REFUSAL = "I'm sorry, but I can't help with that."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPlay:
    """One episode."""

    policy: str
    reward: float | None
    """None: it returned none, or did not return."""
    rewards: Mapping[str, float]
    ended: str
    """`returned`, `gave up` (at a limit of answers or tokens), `failed` or `hung`."""
    problem: str
    log: str
    seconds: float
    """That it took by itself."""
    requests: tuple[tuple[int, ...], ...]
    """The tokens of each that was answered."""
    replies: tuple[str, ...]
    given: tuple[Message, ...]
    """Messages of its requests but for the replies."""
    rejected: int
    """Its requests that were answered with an error, but for limits."""
    unread: str
    """The last line of a command, where that is no reward and it gave no other."""
    rejection: str
    """The first of these errors."""
    left: tuple[str, ...]
    """Command lines of processes that lived on."""

    @property
    def outcome(self) -> tuple[Any, ...]:
        """The part of the result that should be the same when the replies are the same."""
        return self.ended, self.reward, dict(self.rewards), self.requests


@dataclass(slots=True, kw_only=True)
class ProgramEvidence:
    """Everything that was played."""

    name: str
    row: Mapping[str, Any]
    limit: float
    plays: dict[str, ProgramPlay]
    again: dict[str, ProgramPlay]
    """The second episode of each policy that has not hung."""
    alone: dict[str, tuple[ProgramPlay, ProgramPlay]]
    """Two episodes in processes that had played nothing, where those above differ and the process is kept."""
    swapped: tuple[Any, ProgramPlay] | None = None
    """Another answer, and an episode of the row with that; None: there was no reason to play it."""
    files: tuple[str, ...] | None = None
    """New or changed files in the working folder; None: the folder has too many to compare."""


def gold_of(row: Mapping[str, Any]) -> str:
    """The column with the right answer; empty: there is none."""
    return next((name for name in GOLD if isinstance(row.get(name), str | int | float) and str(row[name]).strip()), "")


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
        for each in alive:
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                self.left += (" ".join(each.cmdline())[:80],)
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
        return [[self._answer(each)] for each in requests]

    def _answer(self, request: RolloutRequest) -> Sampled:
        """The long answer alone is cut off where the request has no more room.

        The others are whole whatever `max_tokens` a program asks for: they are bytes, and a model needs fewer tokens.
        """
        asked = self.episode.asked(request)
        said = [{"role": "user", "content": asked.prompt}] if isinstance(asked.prompt, str) else asked.messages
        tools = tuple(Tool(name=each["function"]["name"], function=print, schema=each) for each in asked.tools)
        action = self.policy(Situation(self.row, tuple(said), tools, len(self.replies)))
        self.requests.append(request.token_ids)
        self.replies.append(text_of(action))
        ids = self.episode.session.chat.encode(self.replies[-1])
        ids = ids[: request.max_tokens] if len(ids) >= LONG else [*ids, *self.episode.settings.end_ids]
        return ids, [0.0] * len(ids)


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
        given = [message for branch in branches for message in branch.asked.messages]
        given += [reply for branch in branches for turn in branch.turns for reply in turn.replies]
        given += [{"role": "user", "content": x.asked.prompt} for x in branches if isinstance(x.asked.prompt, str)]
        return ProgramPlay(
            policy=name,
            reward=result.reward,
            rewards=result.rewards,
            ended=ended,
            problem=result.problem,
            log=result.log,
            seconds=result.seconds,
            requests=tuple(engine.requests),
            replies=tuple(engine.replies),
            given=tuple(x for x in given if x["role"] != "assistant" or content_of(x) not in engine.replies),
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


def gather_program(stage: Stage, row: Mapping[str, Any], policies: Mapping[str, Policy]) -> ProgramEvidence:
    """Play everything."""
    program = stage.program
    folder = program.folder if isinstance(program, CommandProgram) else Path.cwd()
    before = _files(folder)
    plays = {name: stage.play(name, policy, row) for name, policy in policies.items()}
    calm = [name for name, each in plays.items() if each.ended != "hung"]
    again = {name: stage.play(name, policies[name], row) for name in reversed(calm)}
    after = _files(folder)
    evidence = ProgramEvidence(name=program.name, row=row, limit=stage.limit, plays=plays, again=again, alone={})
    if before is not None and after is not None:
        evidence.files = tuple(sorted(name for name, state in after.items() if before.get(name) != state))
    differ = next((name for name in calm if plays[name].outcome != again[name].outcome), None)
    if differ is not None and isinstance(program, FileProgram):
        first, second = (stage.alone(differ, policies[differ], row) for _ in range(2))
        evidence.alone[differ] = first, second
    if (found := with_answer(evidence)) is not None:
        gold = gold_of(row)
        other = _another(row[gold])
        evidence.swapped = other, stage.play(found[0], policies[found[0]], {**row, gold: other})
    return evidence


def with_answer(evidence: ProgramEvidence) -> tuple[str, Message] | None:
    """A policy that has not said the answer, and a message of its episode that has it; None: there is none."""
    gold = gold_of(evidence.row)
    if not gold or has_word(prompt_text(evidence.row), evidence.row[gold]):
        return None
    for name, played in evidence.plays.items():
        if not any(has_word(reply, evidence.row[gold]) for reply in played.replies):
            for message in played.given:
                if has_word(content_of(message), evidence.row[gold]):
                    return name, message
    return None


def prompt_text(row: Mapping[str, Any]) -> str:
    """The text of a row's prompt."""
    prompt = row.get("prompt") or ""
    return prompt if isinstance(prompt, str) else "\n".join(content_of(each) for each in prompt)


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
        folders[:] = [each for each in folders if not each.startswith(".") and each != "__pycache__"]
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
