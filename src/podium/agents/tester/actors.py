"""Episodes without a model: the tools, environments or texts under test, played by simple policies.

subject, failures = subject_of(Guess)
play = finished(playing(subject, subject.make(), {"number": 3}, POLICIES["noise"], turns=8))
play.reward, [event.content for event in play.events]
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from podium.agents.environments import methods_of, reset
from podium.agents.episode import Episode, EpisodeLimits, Observation
from podium.agents.plain_text import OverrunError, RaisedError, TextEnvironment, call_user
from podium.agents.tools import CallLimits, Tool, ToolRunner, as_tools, by_name
from podium.errors import AgentError, ConfigError, Finding, PodiumError, Severity
from podium.records import Message

FIRST_SECONDS = 60.0
"""Limit of making the first environment, which may import and read what it needs."""

SEED = 0
"""Passed to a `reset` that names an argument `seed`."""

WORDS = ("amber", "1", "north", "yes", "7", "left", "42", "open the box", "3.5", "ümläut ✓", "0", "look")
"""Turns of the noise."""

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
    over: bool
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
    over: bool = False
    """Whether the environment ended it."""
    failure: Finding | None = None

    @property
    def outcome(self) -> tuple[Any, ...]:
        """Everything that a policy sees and earns; equal episodes have equal outcomes."""
        return self.prompt, tuple(each[:4] for each in self.events), self.reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The tool or environment under test."""

    name: str
    make: Callable[[], Any] | None
    """Makes an environment; None: tools alone."""
    tools: tuple[Tool, ...] = ()
    """Tools that belong to no environment, or those of the first instance."""
    kind: str = "tool"
    """`tool`, `environment` (its methods are tools) or `text` (turns are its actions)."""
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
        return as_tools([each for each in methods_of(environment) if each.__name__ in names])


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
        text = prompt if isinstance(prompt, str) else "\n".join(str(each.get("content", "")) for each in prompt)
        over = bool(events) and events[-1].over
        return Play(prompt=text, events=tuple(events), reward=reward, over=over, failure=failure)

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
        return ended(
            Finding(code="E005", severity="warning", what=str(error), fix="bound what it waits for, or raise --limit")
        )
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
        said = "".join(str(each["content"]) for each in observation.messages)
        problem = "timeout" if isinstance(environment, TextEnvironment) and environment.is_hanging else ""
        return Event(action["content"], said, observation.reward, observation.done, observation.seconds, problem)
    [call] = observation.calls
    arguments = ", ".join(f"{key}={value!r}" for key, value in action["tool_calls"][0]["function"]["arguments"].items())
    asked = f"{call.name}({arguments})"
    return Event(asked, str(call.content), None, False, observation.seconds, call.problem, call.name)


def _reward(subject: Subject, environment: Any) -> float | None:
    """The reward of the episode. Raises `AgentError` for what is no number."""
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


# ---- policies ----


def silence(now: Situation) -> Action:
    """Say nothing; with tools, call nothing."""
    return None if now.tools else ""


def noise(now: Situation) -> Action:
    """Words without sense; with tools, each in turn with arguments of the types in its schema."""
    if not now.tools:
        return WORDS[now.turn % len(WORDS)]
    tool = now.tools[now.turn % len(now.tools)]
    return tool.name, arguments_of(tool, now.turn // len(now.tools))


def repetition(now: Situation) -> Action:
    """The same word, or the same call, in every turn; rows take turns in the tool that is called."""
    if not now.tools:
        return WORDS[1]
    tool = now.tools[now.number % len(now.tools)]
    return tool.name, arguments_of(tool, 0)


POLICIES: Mapping[str, Policy] = {"silence": silence, "noise": noise, "repetition": repetition}


def scripted(oracle: Callable[..., Any], limit: float) -> Policy:
    """A policy from a function `oracle(row, messages)`, which gives the next turn: a text, `(tool, arguments)` or None.

    Raises, when played, `AgentError` for what the function raises, and for anything else that it returns.
    """

    def play(now: Situation) -> Action:
        run = functools.partial(oracle, dict(now.row), list(now.messages))
        action = call_user(run, who="the oracle", where=f"turn {now.turn + 1}", limit=limit)
        is_call = isinstance(action, (tuple, list)) and len(action) == 2 and isinstance(action[1], Mapping)
        if action is None or isinstance(action, str):
            return action
        if not is_call or not now.tools:  # a text environment would take the call for an empty turn
            raise AgentError(
                f"the oracle returned {action!r}",
                fix="return a text, (tool, arguments) where there are tools, or None",
                action=action,
            )
        return str(action[0]), action[1]

    return play


_SAMPLES: Mapping[str, Sequence[Any]] = {
    "integer": (3, 12, 0, -1),
    "number": (3.5, 12.0, 0.0, -1.5),
    "string": ("amber", "3", "", "ümläut ✓"),
    "boolean": (True, False),
    "array": ([], [1, 2]),
    "object": ({},),
}


def arguments_of(tool: Tool, which: int) -> dict[str, Any]:
    """Arguments of the types in a tool's schema; never from a row, which may have the answer."""
    wanted = tool.schema["function"].get("parameters", {}).get("properties") or {}
    given = {}
    for name, schema in wanted.items():
        schema = schema if isinstance(schema, Mapping) else {}  # `true`: anything
        kind = schema.get("type") or "string"
        samples = schema.get("enum") or _SAMPLES.get(kind if isinstance(kind, str) else kind[0], (None,))
        given[name] = samples[which % len(samples)]
    return given


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
        failure = Finding(code="E001", severity="error", what=error.what, fix=error.fix)
        return Subject(name=name, make=target), [failure]
    name = type(first).__name__
    if not callable(getattr(type(first), "reset", None)):
        failure = Finding(
            code="E001",
            severity="error",
            what=f"environment `{name}` has no method `reset`",
            fix="write `def reset(self, **row):` in the class",
        )
        return Subject(name=name, make=target), [failure]
    is_text = isinstance(first, TextEnvironment)
    tools, failures = ((), []) if is_text else _schemas(methods_of(first))
    if not is_text and not tools and not failures:
        failure = Finding(
            code="E001",
            severity="error",
            what=f"environment `{name}` has no method that a model could call",
            fix="write public methods, or make it a `podium.TextEnvironment`",
        )
        failures = [failure]
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


def _schemas(functions: Sequence[Callable[..., Any]]) -> tuple[tuple[Tool, ...], list[Finding]]:
    tools: list[Tool] = []
    failures: list[Finding] = []
    for function in functions:
        try:
            tools += as_tools([function])
        except ConfigError as error:
            failures.append(Finding(code="E002", severity="error", what=error.what, fix=error.fix))
    return tuple(tools), failures
