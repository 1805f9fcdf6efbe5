"""Completions of several turns: calls of tools that are missing, pointless or in vain, and episodes that are cut off.

Whether a run has tools is seen from its metric `tools/call_frequency`, as in TRL; of a program, which runs its tools
itself, from `programs/calls`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from podium.errors.texts import as_line, as_lines, clean
from podium.records import Turn, content_of, has_malformed_call, is_void
from podium.runs.monitors.detection import EPISODES, Evidence, detector, mean, percent
from podium.runs.monitors.history import Activity, MetricHistory

WINDOW = 3
"""Generation rounds over which shares are taken."""
FEWEST = 16
"""Completions below which a share is chance."""
NO_CALLS = 0.02
"""Calls a completion, below which there are none."""
MANY_TURNS = 3
"""Turns of calls that are no longer a second look."""
LEAST_WAIT = 0.05
"""Seconds a turn that no one would save."""


class Episode(NamedTuple):
    """One completion with turns."""

    turns: tuple[Turn, ...]
    finish: str

    @property
    def ends_in_a_call(self) -> bool:
        return bool(self.turns[-1].message.get("tool_calls"))


def _latest(history: MetricHistory) -> list[Episode]:
    """Completions with turns of the last rounds; none where there are too few, or this step drew no round."""
    if not history.has_new_round or len(history.rounds) < WINDOW:
        return []
    found = [
        Episode(turns, finish)
        for view in history.rounds[-WINDOW:]
        for turns_G, finish_G in zip(view.turns_PG, view.finish_PG, strict=True)
        for turns, finish in zip(turns_G, finish_G, strict=True)
        if turns
    ]
    return found if len(found) >= FEWEST else []


def _over(count: int) -> str:
    return f"over {WINDOW} rounds ({count} completions)"


# ---- the policy ----


@detector(
    "M171",
    25,
    "calls of tools a completion, of 16 completions or more",
    "up to 0.02 in each of 3 steps; not where M175 or M176 is the cause",
    set_on=EPISODES,
    why="A call that is never sampled is never rewarded, so it is not learnt: the policy answers without.",
    fix="Show a call in the prompt (a worked example), name the tools in the system message, or reward a well-formed "
    "call a little until calls are common.",
)
def no_calls(history: MetricHistory) -> Evidence | None:
    """There are tools, and no completion calls one."""
    name = "programs/calls" if history.settings.agent else "tools/call_frequency"
    calls = history.numbers(name, WINDOW)
    before = history.series(name)
    if not len(calls) or not max(calls) <= NO_CALLS or _collapsed(history) is not None:
        return None
    if any(has_malformed_call(e.turns[-1].message) for e in _latest(history)) and void_turns(history) is not None:
        return None  # M175: they are written, and not as the template has them
    fell = f"; it was {max(before):.1f} a completion" if max(before) > 10 * NO_CALLS else ""
    return Evidence(f"No completion calls a tool: {mean(calls):.2g} calls a completion over {WINDOW} steps{fell}.")


@detector(
    "M172",
    23,
    "share of completions, of 16 or more in 3 rounds, that end in a call after 3 turns or more",
    "from 0.8 on",
    set_on=EPISODES,
    why="An answer that is never given gets no reward; where calls are paid, calling on is what was learnt.",
    fix="Pay for the answer alone, or nothing where a call follows the last one that is needed; say in the prompt, or "
    "in the last result, when to stop calling.",
)
def only_calls(history: MetricHistory) -> Evidence | None:
    """Completions call tools until they are stopped, and never answer."""
    episodes = _latest(history)
    endless = [e for e in episodes if e.ends_in_a_call and e.finish == "turns" and len(e.turns) >= MANY_TURNS]
    if not episodes or len(endless) < 0.8 * len(episodes):
        return None
    turns = mean(np.array([len(e.turns) for e in endless]))
    return Evidence(
        f"{percent(len(endless) / len(episodes))} of completions end in a call and never answer, after {turns:.1f} "
        f"turns of calls on average, {_over(len(episodes))}."
    )


@detector(
    "M175",
    15,
    "share of completions, of 16 or more in 3 rounds, with a turn that is empty or a call that cannot be parsed",
    "over 0.2",
    set_on=EPISODES,
    why="Such turns are improbable tokens with large gradients, from which runs with tools have collapsed (SimpleTIR, "
    "arXiv:2509.02479).",
)
def void_turns(history: MetricHistory) -> Evidence | None:
    """Turns that are neither a call nor an answer: empty ones, and calls that cannot be parsed."""
    episodes = _latest(history)
    void = [[turn for turn in episode.turns if is_void(turn.message)] for episode in episodes]
    share = sum(map(bool, void)) / max(len(episodes), 1)
    if share <= 0.2:
        return None
    turns = [turn for turns in void for turn in turns]
    malformed = [turn for turn in turns if has_malformed_call(turn.message)]
    example = repr(clean(content_of((malformed or turns)[0].message))[:80])
    kinds = f"{len(malformed)} of {len(turns)} are calls that cannot be parsed, as {example}"
    changes = {"temperature": 1.0} if (history.settings.temperature or 0.0) > 1 else {}
    cooler = f"Set {as_lines(changes)}; show" if changes else "Show"
    return Evidence(
        f"{percent(share)} of completions have a turn that is neither a call nor an answer, {_over(len(episodes))}: "
        f"{kinds if malformed else 'all of these are empty'}.",
        fix=f"{cooler} a well-formed call in the prompt, or leave such completions out of the loss: "
        f"{as_line('mask_void_turns', True)}",
        changes=changes,
    )


@detector(
    "M176",
    1,
    "calls or turns a completion and spread of rewards, means of the first and the last 3 rounds",
    "calls from 0.5 on, or turns from 2 on, fell below 0.25, and the spread below 0.3, at a reward in the lower half "
    "of its range",
    set_on=EPISODES,
    why="Doing nothing is paid better than trying: a wrong try costs more than none.",
    fix="Give inaction the lowest reward of all, or a wrong answer no less than silence.",
)
def inaction_pays(history: MetricHistory) -> Evidence | None:
    """The policy does less and less, and the rewards of a group become equal, at a low level."""
    found = _collapsed(history)
    if found is None:
        return None
    early, late = found
    best = max(row.reward for row in history.activity)
    acts = f"turns a completion fell from {early.turns:.1f} to {late.turns:.1f}"
    if early.calls > 2 * late.calls:
        acts = f"calls a completion fell from {early.calls:.1f} to {late.calls:.1f}"
    return Evidence(
        f"The policy has stopped acting: {acts} while the spread of rewards in a group fell from {early.spread:.2g} to "
        f"{late.spread:.2g}, at a mean reward of {late.reward:.2g} (its best was {best:.2g})."
    )


def _collapsed(history: MetricHistory) -> tuple[Activity, Activity] | None:
    """Means of the first and the last rounds, where acts and spread have collapsed and the reward is not high."""
    rows = history.activity
    if len(rows) < 2 * WINDOW or not history.has_new_round:
        return None
    early, late = (Activity(*map(mean, np.array(part).T)) for part in (rows[:WINDOW], rows[-WINDOW:]))
    calls = early.calls >= 0.5 and late.calls < 0.25 * early.calls
    turns = early.turns >= 2 and late.turns - 1 < 0.25 * (early.turns - 1)
    low, high = history.extremes
    if not (calls or turns) or not late.spread < 0.3 * early.spread or not late.reward <= (low + high) / 2:
        return None
    return early, late


# ---- tools and environments ----


@detector(
    "M177",
    57,
    "seconds spent waiting for tools, or for a program between its requests, over 3 rounds of 16 completions or more "
    "together",
    "more than on the model's tokens, and 0.05 a turn",
    set_on=EPISODES,
    why="What waits for an answer does not decode, and a round ends with its slowest episode.",
)
def slow_tools(history: MetricHistory) -> Evidence | None:
    """Most of sampling is spent waiting for tools, or for the program between its requests."""
    turns = [turn for e in _latest(history) for turn in e.turns if turn.calls or turn.replies]
    waited = sum(turn.reply_seconds for turn in turns)
    drew = sum(turn.seconds for turn in turns)
    if not turns or waited / len(turns) < LEAST_WAIT or not waited > drew:
        return None
    seconds: dict[str, list[float]] = {}
    for call in (call for turn in turns for call in turn.calls):
        seconds.setdefault(call.name, []).append(call.seconds)
    slowest = max(seconds, key=lambda name: sum(seconds[name]), default="")
    late = sum(call.problem == "timeout" for turn in turns for call in turn.calls)
    which = f"; `{clean(slowest)[:40]}` takes {np.mean(seconds[slowest]):.2g} s a call" if slowest else ""
    which += f", and {late} calls reached the time limit" if late else ""
    agent = history.settings.agent
    of_program = "Let the program do less between its requests: cache what repeats, load once what every episode needs."
    of_tools = "Write the tool with `async def`, cache what repeats, or lower tool_timeout."
    return Evidence(
        f"{'The program is' if agent else 'Tools are'} slower than the model: {waited / len(turns):.2g} s a turn are "
        f"spent waiting for {'it' if agent else 'them'} and {drew / len(turns):.2g} s on drawing tokens{which}.",
        fix=of_program if agent else of_tools,
    )


@detector(
    "M180",
    27,
    "share of groups of 3 rounds whose completions have different prompts",
    "over 0.1",
    set_on=EPISODES,
    why="`reset` draws by chance. A group's rewards are compared with their mean: where tasks differ, the luck of an "
    "easy one counts as merit.",
    fix="Let `reset` take an argument `seed`, which is the same for all completions of a group, or draw from the row's "
    "columns.",
)
def prompts_differ(history: MetricHistory) -> Evidence | None:
    """Completions of a group answer different prompts."""
    if not history.has_new_round or len(history.rounds) < WINDOW:
        return None
    differ = [x for view in history.rounds[-WINDOW:] for x in view.prompts_differ_P]
    share = sum(differ) / max(len(differ), 1)
    if share <= 0.1:
        return None
    return Evidence(f"In {percent(share)} of {len(differ)} groups the completions have different prompts.")


@detector(
    "M182",
    29,
    "share of completions, of 16 or more in 3 rounds, that end by a limit",
    "over 0.5; a note where the turns of a game are used up",
    severity="note or warning",
    set_on=EPISODES,
    why="A completion without its answer rarely gets a reward, however good its calls were.",
)
def ended_by_limits(history: MetricHistory) -> Evidence | None:
    """Episodes end by a limit: of turns, or of tokens for what they are given."""
    episodes = _latest(history)
    by = Counter(e.finish for e in episodes)
    share = (by["turns"] + by["context"]) / max(len(episodes), 1)
    if share <= 0.5:
        return None
    settings = history.settings
    what = f"{percent(share)} of completions end before their answer"
    if by["context"] > by["turns"]:
        room, changes = _more_room({"max_completion_length": settings.max_completion_length})
        return Evidence(
            f"{what}: what they were to be given did not fit, {_over(len(episodes))}.",
            fix=f"{room}, within the model's context; bound results with max_tool_result_tokens.",
            changes=changes,
        )
    what = f"{what}: their turns are used up, {_over(len(episodes))}."
    if all(e.turns[0].reward is not None for e in episodes):  # the limit may be the rule of a game
        own = "the environment's own limit of turns" if settings.max_turns is None else "max_turns"
        return Evidence(what, fix=f"Raise {own}, or make the task shorter.", severity="note")
    rounds = {} if settings.agent else {"max_tool_calling_iterations": settings.max_tool_calling_iterations}
    room, changes = _more_room({**rounds, "max_turns": settings.max_turns})
    return Evidence(what, fix=f"{room}, or make the task shorter.", changes=changes)


def _more_room(limits: Mapping[str, int | None]) -> tuple[str, dict[str, Any]]:
    """The advice to double each of these limits that is set, or to raise one of them; and the changes."""
    changes = {name: 2 * limit for name, limit in limits.items() if limit}
    return f"Set {as_lines(changes)}" if changes else f"Raise {' or '.join(limits)}", changes
