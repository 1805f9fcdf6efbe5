"""Episodes without a model: the tools, environments or texts under test, played by simple policies.

subject, failures = subject_of(Guess)
play = finished(playing(subject, subject.make(), {"number": 3}, noise, turns=8))
play.reward, [event.content for event in play.events]

`noise` and other policies are in `policies`.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from podium.agents.environments import methods_of, reset
from podium.agents.episode import Episode, EpisodeLimits, Observation
from podium.agents.plain_text import OverrunError, RaisedError, TextEnvironment, call_user
from podium.agents.tools import CallLimits, Tool, ToolRunner, as_tools, by_name
from podium.errors import AgentError, ConfigError, Finding, PodiumError, Severity
from podium.records import Message
from podium.tester.cases import prompt_text

FIRST_SECONDS = 60.0
"""Limit of making the first environment, which may import and read what it needs."""

SEED = 0
"""Passed to a `reset` that names an argument `seed`."""

ADDRESS = re.compile(r"<[\w.]+ object at 0x|<(?:function|generator|class|coroutine)\b|<built-in")
"""Objects as Python shows them."""

Action = str | tuple[str, Mapping[str, Any]] | None
"""The text of a turn; or a call, the name of a tool with its arguments; None: the episode is left."""


class Situation(NamedTuple):
    """The input of a policy before each turn."""

    row: Mapping[str, Any]
    messages: Sequence[Message]
    """The prompt and all turns so far."""
    tools: Sequence[Tool]
    turn: int
    """From 0."""
    number: int = 0
    """Index of the row in the test."""


Policy = Callable[[Situation], Action]


class Event(NamedTuple):
    """One turn, and what came of it."""

    action: str
    content: str
    """The result of the tool, or the observation."""
    reward: float | None
    done: bool
    seconds: float
    problem: str = ""
    """As in `podium.records.Call`."""
    tool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One episode."""

    prompt: str = ""
    events: tuple[Event, ...] = ()
    reward: float | None = None
    """Sum of the episode; None: the environment gives none."""
    done: bool = False
    """Whether the environment ended it."""
    failure: Finding | None = None

    @property
    def outcome(self) -> tuple[Any, ...]:
        """Everything that a policy sees and earns; equal episodes have equal outcomes."""
        return self.prompt, tuple(event[:4] for event in self.events), self.reward

    @property
    def is_hung(self) -> bool:
        """Whether a call did not return in time."""
        return self.failure is not None and self.failure.code == "E005"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The tool, environment or program under test."""

    name: str
    make: Callable[[], Any] | None
    """Makes an environment; None: tools alone, or a program."""
    tools: tuple[Tool, ...] = ()
    """Tools that belong to no environment, or those of the first instance."""
    kind: str = "tool"
    """`tool`, `environment` (its methods are tools), `text` (turns are its actions) or `program`."""
    has_reward: bool = False
    limit: float = 10.0
    """Seconds of a call."""
    actions: tuple[str, ...] = ()
    """Texts that are legal turns; empty: not known."""
    made: type | None = None
    """Class of the environment."""

    def tools_of(self, environment: Any) -> tuple[Tool, ...]:
        """The tools of one instance: methods that have a schema."""
        if self.kind != "environment":
            return self.tools
        names = {tool.name for tool in self.tools}
        return as_tools([method for method in methods_of(environment) if method.__name__ in names])


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Episodes of one subject, for rules to compare."""

    subject: Subject
    rows: Sequence[Mapping[str, Any]]
    turns: int
    """Turns of an episode, at most."""
    failures: tuple[Finding, ...] = ()
    """Findings from before the first episode."""
    plays: Mapping[str, Sequence[Play]] = field(default_factory=dict)
    """By policy, one for each row, each with an environment of its own."""
    again: tuple[tuple[Play, Play], ...] = ()
    """Plays, each with the same once more in a new environment."""
    shared: tuple[Play, Play, str] | None = None
    """Two plays that differ, as long as what earlier episodes left is there; and what that is."""
    after: tuple[Play, ...] = ()
    """The noise in an environment that has played before."""
    beside: tuple[Play, ...] = ()
    """The noise while another environment plays another row, turn by turn."""
    repeated: tuple[tuple[float, ...], ...] = ()
    """Rewards of repetitions after 2, 4 and all turns."""

    def every(self) -> Iterator[Play]:
        """All episodes."""
        for plays in (*self.plays.values(), [second for _, second in self.again], self.after, self.beside):
            yield from plays

    @property
    def events(self) -> Mapping[str, Sequence[Event]]:
        """The turns of all episodes, by tool."""
        found: dict[str, list[Event]] = {}
        for play in self.every():
            for event in play.events:
                found.setdefault(event.tool, []).append(event)
        return found

    @property
    def is_hung(self) -> bool:
        """Whether a call did not return in time."""
        return any(play.is_hung for play in self.every())

    @property
    def is_sound(self) -> bool:
        """Whether there are episodes, and every one of them could be played."""
        return bool(self.plays) and all(play.failure is None for play in self.every())

    @property
    def is_repeatable(self) -> bool:
        """Whether no text that was read has an address in it, which is never the same twice."""
        return not any(ADDRESS.search(event.content) for play in self.every() for event in play.events)

    @property
    def is_environment(self) -> bool:
        """Whether there is more than tools."""
        return self.subject.make is not None

    @property
    def is_payable(self) -> bool:
        """Whether the rewards of policies can be compared."""
        return self.is_sound and self.is_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPlay(Play):
    """One episode of a program; its events are the policy's replies."""

    policy: str
    rewards: Mapping[str, float]
    ended: str
    """`returned`, `gave up` (at a limit of answers or tokens), `failed` or `hung`."""
    problem: str
    log: str
    seconds: float
    """That it took by itself."""
    requests: tuple[tuple[int, ...], ...]
    """The tokens of each that was answered."""
    messages: tuple[Message, ...]
    """Of its requests, but for the replies."""
    rejected: int
    """Its requests that were answered with an error, but for limits."""
    unread: str
    """The last line of a command, where that is no reward and it gave no other."""
    rejection: str
    """The first of these errors."""
    left: tuple[str, ...]
    """Command lines of processes that lived on."""

    @property
    def replies(self) -> tuple[str, ...]:
        """What the policy said."""
        return tuple(event.action for event in self.events)

    @property
    def outcome(self) -> tuple[Any, ...]:
        """The part of the result that should be the same when the replies are the same."""
        return self.ended, self.reward, dict(self.rewards), self.requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEvidence(Evidence):
    """Episodes of a program on one row. `again` has no policy that hung; `shared` differs by what a process keeps."""

    plays: Mapping[str, Sequence[ProgramPlay]] = field(default_factory=dict)
    again: tuple[tuple[ProgramPlay, ProgramPlay], ...] = ()
    swapped: tuple[Any, ProgramPlay] | None = None
    """Another answer, and an episode of the row with that; None: there was no reason to play it."""
    files: tuple[str, ...] | None = None
    """New or changed files in the working folder; None: the folder has too many to compare."""

    @property
    def row(self) -> Mapping[str, Any]:
        """The row that was played."""
        return self.rows[0]

    @property
    def first(self) -> Mapping[str, ProgramPlay]:
        """The first episode of each policy."""
        return {name: plays[0] for name, plays in self.plays.items()}

    @property
    def is_answered(self) -> bool:
        """Whether any request was answered."""
        return any(play.requests for play in self.every())

    @property
    def is_payable(self) -> bool:
        """Whether the rewards of policies can be compared: those that know nothing have one each."""
        rewarded = [name for name, play in self.first.items() if play.reward is not None]
        return self.is_answered and {"silence", "noise", "repetition"} <= set(rewarded)

    def every(self) -> Iterator[ProgramPlay]:
        """All episodes."""
        yield from self.first.values()
        yield from (second for _, second in self.again)


def playing(
    subject: Subject, environment: Any, row: Mapping[str, Any], policy: Policy, *, turns: int, index: int = 0
) -> Generator[None, None, Play]:
    """Play an episode, and pause after each turn; the result is the generator's value."""
    prompt: str | list[Message] = row.get("prompt") or ""
    events: list[Event] = []
    messages: list[Message] = []
    runner = ToolRunner()
    ending = ExitStack()
    reward = None

    def ended(failure: Finding | None = None) -> Play:
        done = bool(events) and events[-1].done
        return Play(prompt=prompt_text(prompt), events=tuple(events), reward=reward, done=done, failure=failure)

    try:
        if subject.make is not None:
            prompt = reset(environment, row, named=False, seed=SEED, index=index, limit=subject.limit)
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        tools = subject.tools_of(environment)
        limits = EpisodeLimits(calls=CallLimits(timeout=subject.limit))
        episode = Episode(by_name(tools), environment, limits=limits, runner=runner)
        ending.callback(episode.close)

        def act(observation: Observation) -> Message | None:
            messages.extend(observation.messages)
            if len(events) == turns:
                return None
            action = policy(Situation(row, tuple(messages), tools, len(events), index))
            if action is not None:
                messages.append(_message(action))
            return None if action is None else messages[-1]

        yield
        for action, observation in episode.play(act):
            events.append(_event(action, observation, environment))
            if events[-1].problem == "timeout":
                what = f"{subject.name} did not return within {subject.limit:g} s for {events[-1].action[:60]!r}"
                raise TimeoutError(what)
            yield
        reward = _reward(subject, environment)
    except TimeoutError as error:
        fix = "bound what it waits for, or raise --limit"
        return ended(Finding(code="E005", severity="warning", what=str(error), fix=fix))
    except PodiumError as error:
        return ended(failure_of(error, row))
    finally:
        runner.close()
        ending.close()
    return ended()


def finished(play: Generator[None, None, Play]) -> Play:
    """Play to the end."""
    while True:
        try:
            next(play)
        except StopIteration as end:
            return end.value


def failure_of(error: PodiumError, row: Mapping[str, Any]) -> Finding:
    """The finding of an error of an environment: it raised, took too long, or returned something else."""
    if isinstance(error, RaisedError):
        code = "E003"
    elif isinstance(error, OverrunError):
        code = "E005"
    else:
        code = "E004"
    code = error.code or code
    severity: Severity = "warning" if code == "E005" else "error"  # a slow machine is no mistake
    # A call that its signature refuses has no line of the user's in its trace.
    refused = isinstance(error.__cause__, TypeError) and not error.facts.get("trace")
    fix = "give rows with its columns: --data rows.jsonl" if refused and not row else error.fix
    return Finding(code=code, severity=severity, what=error.what, fix=fix)


def _message(action: str | tuple[str, Mapping[str, Any]]) -> Message:
    """The action as a model would write it."""
    if isinstance(action, str):
        return {"role": "assistant", "content": action}
    name, arguments = action
    called = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return {"role": "assistant", "content": "", "tool_calls": [called]}


def _event(action: Message, observation: Observation, environment: Any) -> Event:
    """The turn for the report."""
    if not observation.calls:
        content = "".join(str(message["content"]) for message in observation.messages)
        problem = "timeout" if isinstance(environment, TextEnvironment) and environment.is_hanging else ""
        return Event(action["content"], content, observation.reward, observation.done, observation.seconds, problem)
    [call] = observation.calls
    arguments = ", ".join(f"{key}={value!r}" for key, value in action["tool_calls"][0]["function"]["arguments"].items())
    asked = f"{call.name}({arguments})"
    return Event(asked, str(call.content), None, False, observation.seconds, call.problem, call.name)


def _reward(subject: Subject, environment: Any) -> float | None:
    """The reward of the episode, None where there is none. Raises `AgentError` for what is no number."""
    if not subject.has_reward:
        return None
    who = f"environment `{subject.name}`"
    where = "get_reward"

    def run() -> Any:
        value = environment.get_reward()
        return asyncio.run(value) if inspect.iscoroutine(value) else value

    value = call_user(run, who=who, where=where, limit=subject.limit)
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if number is not None and number - number != 0:
        raise AgentError(
            f"{who} returned {value!r} in {where}",
            fix="return a finite number, or None",
            who=who,
            value=value,
            place=where,
        )
    return number


# ---- the subject ----


def subject_of(target: Any, *, limit: float = 10.0) -> tuple[Subject, list[Finding]]:
    """A subject from a tool (a function with parameters, or a `Tool`), or from an environment class or factory.

    Also every failure before the first episode: of the factory (E001), and schemas that cannot be made (E002).
    """
    if isinstance(target, Tool):
        return Subject(name=target.name, make=None, tools=(target,), limit=limit), []
    name = getattr(target, "__name__", type(target).__name__)
    if not inspect.isclass(target) and inspect.isfunction(target) and inspect.signature(target).parameters:
        tools, failures = _schemas([target])
        return Subject(name=name, make=None, tools=tools, limit=limit), failures
    try:
        first = call_user(target, who=f"the factory `{name}`", where="its first call", limit=FIRST_SECONDS)
    except TimeoutError:
        what = f"`{name}` was not made within {FIRST_SECONDS:g} s"
        return Subject(name=name, make=target), [Finding(code="E005", severity="warning", what=what)]
    except PodiumError as error:
        return Subject(name=name, make=target), [_unusable(error.what, error.fix)]
    name = type(first).__name__
    if not callable(getattr(type(first), "reset", None)):
        failure = _unusable(
            f"environment `{name}` has no method `reset`", "write `def reset(self, **row):` in the class"
        )
        return Subject(name=name, make=target), [failure]
    is_text = isinstance(first, TextEnvironment)
    tools, failures = ((), []) if is_text else _schemas(methods_of(first))
    if not is_text and not tools and not failures:
        what = f"environment `{name}` has no method that a model could call"
        failures = [_unusable(what, "write public methods, or make it a `podium.TextEnvironment`")]
    subject = Subject(
        name=name,
        make=target,
        tools=tools,
        kind="text" if is_text else "environment",
        has_reward=callable(getattr(type(first), "get_reward", None)),
        limit=limit,
        actions=tuple(getattr(first, "actions", ())) if is_text else (),
        made=type(first),
    )
    return subject, failures


def _unusable(what: str, fix: str) -> Finding:
    return Finding(code="E001", severity="error", what=what, fix=fix)


def _schemas(functions: Sequence[Callable[..., Any]]) -> tuple[tuple[Tool, ...], list[Finding]]:
    tools: list[Tool] = []
    failures: list[Finding] = []
    for function in functions:
        try:
            tools += as_tools([function])
        except ConfigError as error:
            failures.append(Finding(code="E002", severity="error", what=error.what, fix=error.fix))
    return tuple(tools), failures
