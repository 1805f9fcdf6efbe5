"""Completions of several turns: calls of tools that are missing, pointless or in vain, and episodes that are cut off.

Whether a run has tools is seen from its metric `tools/call_frequency`, as in TRL; of a program, which runs its tools
itself, from `programs/calls`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from podium.errors import Finding
from podium.errors.texts import as_line, as_lines, clean
from podium.records import Call, Turn, content_of, has_malformed_call, is_void
from podium.runs.monitors.detection import mean, percent, some
from podium.runs.monitors.history import Activity, MetricHistory, RoundView, RunSettings
from podium.runs.monitors.signs import credited

WINDOW = 3
"""Generation rounds over which shares are taken."""
FEWEST = 16
"""Completions, or calls, below which a share is chance."""
NO_CALLS = 0.02
"""Calls a completion, below which there are none."""
SAME_IN_A_ROW = 3
"""Equal calls with equal results, one after the other, that are no longer a second look."""
LEAST_WAIT = 0.05
"""Seconds a turn that no one would save."""
LONG = 24
"""Rounds after which failures should have fallen."""


class Episode(NamedTuple):
    """One completion with turns."""

    turns: tuple[Turn, ...]
    finish: str
    reward: float

    @property
    def calls(self) -> list[Call]:
        return [call for turn in self.turns for call in turn.calls]

    @property
    def ends_in_a_call(self) -> bool:
        return bool(self.turns[-1].message.get("tool_calls"))


def episodes_of(view: RoundView) -> Iterator[Episode]:
    """Completions of a round that have turns."""
    for turns_G, finish_G, reward_G in zip(view.turns_PG, view.finish_PG, view.reward_PG, strict=True):
        for turns, finish, reward in zip(turns_G, finish_G, reward_G, strict=True):
            if turns:
                yield Episode(turns, finish, float(reward))


def _latest(history: MetricHistory) -> list[Episode]:
    """Episodes of the last rounds; none where there are too few, or this step drew no round."""
    if not history.has_new_round or len(history.rounds) < WINDOW:
        return []
    found = [episode for view in history.rounds[-WINDOW:] for episode in episodes_of(view)]
    return found if len(found) >= FEWEST else []


def _calls(history: MetricHistory) -> list[Call]:
    """Calls in the last rounds; none where there are too few."""
    calls = [call for episode in _latest(history) for call in episode.calls]
    return calls if len(calls) >= FEWEST else []


def _over(count: int) -> str:
    return f"over {WINDOW} rounds ({count} completions)"


# ---- the policy ----


def no_calls(history: MetricHistory) -> Finding | None:
    """M171: there are tools, and no completion calls one."""
    name = "programs/calls" if history.settings.agent else "tools/call_frequency"
    calls = history.series(name, last=WINDOW)
    before = history.series(name)
    if len(calls) < WINDOW or not max(calls) <= NO_CALLS or _collapsed(history) is not None:
        return None
    if any(has_malformed_call(e.turns[-1].message) for e in _latest(history)) and void_turns(history) is not None:
        return None  # M175: they are written, and not as the template has them
    fell = f"; it was {max(before):.1f} a completion" if max(before) > 10 * NO_CALLS else ""
    return Finding(
        code="M171",
        severity="warning",
        what=f"No completion calls a tool: {mean(calls):.2g} calls a completion over {WINDOW} steps{fell}.",
        why="A call that is never sampled is never rewarded, so it is not learnt: the policy answers without.",
        fix="Show a call in the prompt (a worked example), name the tools in the system message, or reward a "
        "well-formed call a little until calls are common.",
    )


def only_calls(history: MetricHistory) -> Finding | None:
    """M172: completions call tools until they are stopped, and never answer."""
    episodes = _latest(history)
    endless = [e for e in episodes if e.ends_in_a_call and e.finish == "turns" and len(e.turns) >= SAME_IN_A_ROW]
    if not episodes or len(endless) < 0.8 * len(episodes):
        return None
    turns = mean(np.array([len(e.turns) for e in endless]))
    return Finding(
        code="M172",
        severity="warning",
        what=f"{percent(len(endless) / len(episodes))} of completions end in a call and never answer, after "
        f"{turns:.1f} turns of calls on average, {_over(len(episodes))}.",
        why="An answer that is never given gets no reward; where calls are paid, calling on is what was learnt.",
        fix="Pay for the answer alone, or nothing where a call follows the last one that is needed; "
        "say in the prompt, or in the last result, when to stop calling.",
    )


def unknown_names(history: MetricHistory) -> Finding | None:
    """M173: calls of tools that do not exist."""
    calls = _calls(history)
    unknown = Counter(clean(call.name)[:40] for call in calls if call.problem == "unknown")
    share = unknown.total() / max(len(calls), 1)
    if share <= 0.1:
        return None
    known = sorted({call.name for call in calls if call.problem != "unknown"})
    listed = [f"`{name}` ({count})" for name, count in unknown.most_common()]
    near = {name: match[0] for name in unknown if (match := get_close_matches(name, known, n=1))}
    meant = "".join(f"; `{near[name]}` is there" for name in list(unknown)[:1] if name in near)
    return Finding(
        code="M173",
        severity="warning",
        what=f"{percent(share)} of {len(calls)} calls are of tools that do not exist: {some(listed, 3)}{meant}.",
        why="The model calls what it knows from elsewhere, or from an example in the prompt with other names.",
        fix="Give the tools the names that the model calls, or correct the names in the prompt and its examples.",
    )


def same_call(history: MetricHistory) -> Finding | None:
    """M174: the same call with the same result, over and over."""
    episodes = [e for e in _latest(history) if len(e.calls) >= SAME_IN_A_ROW]
    stuck = [e for e in episodes if _most_in_a_row(e) >= SAME_IN_A_ROW]
    if len(episodes) < FEWEST or len(stuck) < 0.3 * len(episodes):
        return None
    worst = max(stuck, key=_most_in_a_row)
    call = max((_key(c) for c in worst.calls), key=[_key(c) for c in worst.calls].count)
    return Finding(
        code="M174",
        severity="warning",
        what=f"{percent(len(stuck) / len(episodes))} of completions with {SAME_IN_A_ROW} calls or more repeat one that "
        f"has just given the same result, up to {_most_in_a_row(worst)} times in a row: {clean(call[0])[:80]}.",
        why="Its result does not help, or the policy does not read it: an error that names no cure, or an empty list.",
        fix="Let the tool's result say what to do next, also on errors; limit the rounds of calls.",
    )


def _key(call: Call) -> tuple[str, str]:
    return f"{call.name}({json.dumps(dict(call.arguments), sort_keys=True, default=str)})", str(call.content)


def _most_in_a_row(episode: Episode) -> int:
    return max((sum(1 for _ in run) for _, run in groupby(map(_key, episode.calls))), default=0)


def void_turns(history: MetricHistory) -> Finding | None:
    """M175: turns that are neither a call nor an answer: empty ones, and calls that cannot be parsed."""
    episodes = _latest(history)
    void = [(e, turn) for e in episodes for turn in e.turns if is_void(turn.message)]
    share = len({id(e) for e, _ in void}) / max(len(episodes), 1)
    if share <= 0.2:
        return None
    warm = (history.settings.temperature or 0.0) > 1
    changes = {"temperature": 1.0} if warm else {}
    cooler = f"Set {as_lines(changes)}; show" if warm else "Show"
    malformed = [turn for _, turn in void if has_malformed_call(turn.message)]
    example = repr(clean(content_of((malformed or [void[0][1]])[0].message))[:80])
    kinds = f"{len(malformed)} of {len(void)} are calls that cannot be parsed, as {example}"
    return Finding(
        code="M175",
        severity="warning",
        what=f"{percent(share)} of completions have a turn that is neither a call nor an answer, "
        f"{_over(len(episodes))}: {kinds if malformed else 'all of these are empty'}.",
        why="Such turns are improbable tokens with large gradients, from which runs with tools have collapsed "
        "(SimpleTIR, arXiv:2509.02479).",
        fix=f"{cooler} a well-formed call in the prompt, or leave such completions out of the loss: "
        f"{as_line('mask_void_turns', True)}",
        changes=changes,
    )


def inaction_pays(history: MetricHistory) -> Finding | None:
    """M176: the policy does less and less, and the rewards of a group become equal, at a low level."""
    found = _collapsed(history)
    if found is None:
        return None
    early, late = found
    acts = "calls" if early.calls > 2 * late.calls else "turns"
    return Finding(
        code="M176",
        severity="warning",
        what=f"The policy has stopped acting: {acts} a completion fell from {getattr(early, acts):.1f} to "
        f"{getattr(late, acts):.1f} while the spread of rewards in a group fell from {early.spread:.2g} to "
        f"{late.spread:.2g}, at a mean reward of {late.reward:.2g} (its best was {_best(history):.2g}).",
        why="Doing nothing is paid better than trying: a wrong try costs more than none.",
        fix="Give inaction the lowest reward of all, or a wrong answer no less than silence.",
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


def _best(history: MetricHistory) -> float:
    return max(row.reward for row in history.activity)


def right_without_tools(history: MetricHistory) -> Finding | None:
    """M179: completions without a call are right as often as those with one."""
    if not len(history.series("tools/call_frequency", last=1)) or not _latest(history):
        return None
    views = history.rounds[-WINDOW:]
    right = [x for view in views if (x := history.right_PG(view)) is not None]
    judged = len(right) == len(views)
    values = np.concatenate([np.ravel(x) for x in (right if judged else [view.reward_PG for view in views])])
    paid = credited(values, judged=judged, extremes=history.extremes)
    called = np.array([any(turn.calls for turn in turns) for view in views for g in view.turns_PG for turns in g])
    without = paid[~called]
    with_call = paid[called]
    least = max(0.6, with_call.mean() - 0.05) if len(with_call) else 0.6
    if len(without) < FEWEST or not without.mean() >= least:
        return None
    beside = f", with a call {percent(with_call.mean())}" if len(with_call) else ""
    return Finding(
        code="M179",
        severity="warning",
        what=f"The tools are not needed: without a call {percent(without.mean())} of {len(without)} completions are "
        f"right{beside}.",
        why="Where the answer is known, or can be read in the prompt, a call earns nothing and is unlearnt.",
        fix="Take rows that the model cannot answer alone; look for the answer in the prompt.",
    )


# ---- tools and environments ----


def slow_tools(history: MetricHistory) -> Finding | None:
    """M177: most of sampling is spent waiting for tools, or for the program between its requests."""
    episodes = _latest(history)
    turns = [turn for e in episodes for turn in e.turns if turn.calls or turn.replies]
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
    who, it = ("The program is", "it") if history.settings.agent else ("Tools are", "them")
    return Finding(
        code="M177",
        severity="warning",
        what=f"{who} slower than the model: {waited / len(turns):.2g} s a turn are spent waiting for {it} and "
        f"{drew / len(turns):.2g} s on drawing tokens{which}.",
        why="What waits for an answer does not decode, and a round ends with its slowest episode.",
        fix="Let the program do less between its requests: cache what repeats, load once what every episode needs."
        if history.settings.agent
        else "Write the tool with `async def`, cache what repeats, or lower tool_timeout.",
    )


def results_cut(history: MetricHistory) -> Finding | None:
    """M178: results of tools are cut off."""
    calls = _calls(history)
    cut = [call for call in calls if call.cut]
    if len(cut) <= 0.25 * max(len(calls), 1):
        return None
    names = Counter(clean(call.name)[:40] for call in cut)
    limit = history.settings.max_tool_result_tokens
    lost = np.array([call.cut for call in cut])
    changes = {"max_tool_result_tokens": int(limit + np.quantile(lost, 0.9))} if limit else {}
    room = f"set {as_lines(changes)}" if changes else "raise max_tool_result_tokens"
    return Finding(
        code="M178",
        severity="warning",
        what=f"{percent(len(cut) / len(calls))} of {len(calls)} results are cut off, by {np.median(lost):.0f} tokens "
        f"in the middle one: {some([f'`{name}` ({count})' for name, count in names.most_common()], 3)}.",
        why="What was cut off may be the answer that the policy has called for.",
        fix=f"Let the tool return less (the best matches, the end of a log), or {room}.",
        changes=changes,
    )


def prompts_differ(history: MetricHistory) -> Finding | None:
    """M180: completions of a group answer different prompts."""
    if not history.has_new_round or len(history.rounds) < WINDOW:
        return None
    differ = [x for view in history.rounds[-WINDOW:] for x in view.prompts_differ_P]
    share = sum(differ) / max(len(differ), 1)
    if share <= 0.1:
        return None
    return Finding(
        code="M180",
        severity="warning",
        what=f"In {percent(share)} of {len(differ)} groups the completions have different prompts.",
        why="`reset` draws by chance. A group's rewards are compared with their mean: where tasks differ, the luck of "
        "an easy one counts as merit.",
        fix="Let `reset` take an argument `seed`, which is the same for all completions of a group, or draw from the "
        "row's columns.",
    )


def failures_stay(history: MetricHistory) -> Finding | None:
    """M181: calls go on failing."""
    failures = np.array([row.failures for row in history.activity])
    failures = failures[np.isfinite(failures)]
    if len(failures) < LONG or not history.has_new_round:
        return None
    third = len(failures) // 3
    early = float(failures[:third].mean())
    late = float(failures[-third:].mean())
    if late < 0.3 or late < 0.8 * early:
        return None
    failed = [call for call in _calls(history) if call.failed and call.problem != "unknown"]
    messages = Counter(clean(str(call.content))[:80] for call in failed)
    common = f", most often {messages.most_common(1)[0][0]}" if messages else ""
    return Finding(
        code="M181",
        severity="warning",
        what=f"Failures do not fall: {percent(early)} of calls failed at first and {percent(late)} do now, after "
        f"{len(failures)} rounds{common}.",
        why="Failing costs nothing, or the error does not say what a right call is.",
        fix="Write the cure into the error, correct the tool's docstring, or take off a little for a failed call.",
    )


def ended_by_limits(history: MetricHistory) -> Finding | None:
    """M182: episodes end by a limit: of turns, or of tokens for what they are given."""
    episodes = _latest(history)
    by = Counter(e.finish for e in episodes)
    share = (by["turns"] + by["context"]) / max(len(episodes), 1)
    if share <= 0.5:
        return None
    settings = history.settings
    is_game = all(e.turns[0].reward is not None for e in episodes) and by["context"] <= by["turns"]
    changes: dict[str, Any] = {}
    where = "their turns are used up"
    other = "or make the task shorter"
    if by["context"] > by["turns"]:
        where = "what they were to be given did not fit"
        other = "within the model's context; bound results with max_tool_result_tokens"
        names = ["max_completion_length"]
        changes = _doubled(names, settings)
    elif is_game:
        names = ["the environment's own limit of turns"] if settings.max_turns is None else ["max_turns"]
    else:
        names = ["max_turns"] if settings.agent else ["max_tool_calling_iterations", "max_turns"]
        changes = _doubled(names, settings)
    room = f"Set {as_lines(changes)}" if changes else f"Raise {' or '.join(names)}"
    return Finding(
        code="M182",
        severity="note" if is_game else "warning",  # the limit may be the rule of a game
        what=f"{percent(share)} of completions end before their answer: {where}, {_over(len(episodes))}.",
        why="A completion without its answer rarely gets a reward, however good its calls were.",
        fix=f"{room}, {other}.",
        changes=changes,
    )


def _doubled(names: Sequence[str], settings: RunSettings) -> dict[str, Any]:
    """Twice each of these limits that is set."""
    return {name: 2 * limit for name in names if (limit := getattr(settings, name))}
