"""Planted failures of agents, each named first, and five sound agent runs about which nothing is said.

Scripted rollouts: every completion is a record as the engines make it, written and read like those of a run's folder.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from podium.records import Call, Completion, Finish, Group, Prompt, ScoredGroup, StepMetrics, Turn
from podium.runs.monitors import Issue, RunSettings, diagnose
from podium.runs.monitors.detection import tried_by
from podium.runs.recording import joined, rollout_rows
from tests.cures import assert_agree

GROUPS, COMPLETIONS = 4, 8
WORDS = [
    "amber",
    "birch",
    "cedar",
    "dune",
    "ember",
    "fjord",
    "grove",
    "heath",
    "iris",
    "jade",
    "kelp",
    "larch",
    "moss",
    "north",
    "oak",
    "pine",
    "quartz",
    "reed",
]


def call(name: str, content: str, **given: Any) -> Call:
    """A call of a tool; settings of `Call` by their names, other arguments are the tool's."""
    settings = {key: given.pop(key) for key in list(given) if key in ("problem", "seconds", "cut")}
    return Call(
        name=name,
        arguments=given,
        content=content,
        failed=bool(settings.get("problem")),
        **{"seconds": 0.002, **settings},
    )


class Script:
    """One completion in the making."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.ids: list[int] = []
        self.num_drawn = 0
        self.finish: Finish = "stop"
        self.reward = 0.0
        self.prompt: str | None = None

    def says(self, text: str, *calls: Call, reply: str | None = None, reward: float | None = None) -> Script:
        """A turn, with what came of it."""
        asked = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls]
        message = {"role": "assistant", "content": text, **({"tool_calls": asked} if asked else {})}
        replies = [{"role": "tool", "name": c.name, "content": c.content} for c in calls]
        replies += [{"role": "user", "content": reply}] if reply is not None else []
        start, drawn = len(self.ids), 4 + len(text.split())
        self.ids += range(drawn)
        turn = Turn(
            start=start,
            stop=len(self.ids),
            message=message,
            calls=calls,
            replies=tuple(replies),
            reward=reward,
            seconds=0.2,
            reply_seconds=max((c.seconds for c in calls), default=0.001),
        )
        self.turns.append(turn)
        self.num_drawn += drawn
        self.ids += [9] * (6 * len(replies))
        return self

    def ends(self, reward: float, finish: Finish = "stop") -> Script:
        self.reward, self.finish = reward, finish
        return self

    def completion(self, prompt: Prompt) -> Completion:
        own = None if self.prompt is None else Prompt(id=0, row=0, token_ids=(1,), text=self.prompt, content="")
        text = " ".join(str(m["content"]) for turn in self.turns for m in (turn.message, *turn.replies))
        return Completion(
            token_ids=tuple(self.ids),
            logps=(-0.7,) * self.num_drawn,
            finish=self.finish,
            text=text,
            policy_step=0,
            turns=tuple(self.turns),
            prompt=own,
        )


Play = Callable[[random.Random, int, int, int], Script]
"""A completion from chance, the step, the prompt and the number of the completion."""


def played(play: Play, *, steps: int = 12, has_tools: bool = True, **settings: Any) -> list[Issue]:
    """The findings of a run whose completions are scripted."""
    history, rounds = [], {}
    for step in range(1, steps + 1):
        scored, scripts = [], []
        for p in range(GROUPS):
            text = f"question {step} {p}"
            prompt = Prompt(id=p, row=10 * step + p, token_ids=(1, 2), text=text, content=text)
            rng = random.Random(f"{step} {p}")
            group = [play(rng, step, p, g) for g in range(COMPLETIONS)]
            completions = tuple(script.completion(prompt) for script in group)
            rewards = np.array([[script.reward] for script in group])
            group_made = Group(prompt=prompt, completions=completions)
            scored.append(ScoredGroup(group=group_made, names_K=("right",), rewards_GK=rewards))
            scripts += group
        advantages = [each.rewards_GK[:, 0] - each.rewards_GK.mean() for each in scored]
        kept = [np.ones(COMPLETIONS, bool)] * GROUPS
        rounds[step] = [joined(rollout_rows(scored, advantages, kept, weights_K=np.ones(1), step=step))]
        values = numbers(step, scored, scripts, has_tools=has_tools)
        if settings.get("agent"):  # a program runs its tools itself
            values = {name: x for name, x in values.items() if not name.startswith("tools/")}
            values["programs/calls"] = sum("tool_calls" in turn.message for x in scripts for turn in x.turns) / 32
        history.append(StepMetrics(step=step, values=values))
    found = diagnose(history, rounds, RunSettings(accuracy="right", weights={"right": 1.0}, **settings))
    for issue in found:
        assert_agree(issue.finding)
    return found


def numbers(
    step: int, scored: Sequence[ScoredGroup], scripts: Sequence[Script], *, has_tools: bool
) -> dict[str, float]:
    rewards = np.array([each.rewards_GK[:, 0] for each in scored])
    calls = [c for script in scripts for turn in script.turns for c in turn.calls]
    values = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(1).mean()),
        "frac_reward_zero_std": float((np.ptp(rewards, axis=1) == 0).mean()),
        "rewards/right/mean": float(rewards.mean()),
        "entropy": 1.0 + 0.05 * np.sin(step),
        "grad_norm": 1.0,
        "completions/mean_length": float(np.mean([script.num_drawn for script in scripts])),
        "completions/clipped_ratio": 0.0,
        "step_time": 2.0,
        "health/update_ratio": 5e-5,
        "health/moved_share": 1.0,
    }
    if has_tools:
        values["tools/call_frequency"] = len(calls) / len(scripts)
        values["tools/failure_frequency"] = sum(c.failed for c in calls) / max(len(calls), 1)
    return values


def chance(rng: random.Random, share: float) -> float:
    return float(rng.random() < share)


def phrase(rng: random.Random, count: int = 4) -> str:
    return " ".join(rng.sample(WORDS, count))


# ---- failures ----


def never_calls(rng: random.Random, step: int, p: int, g: int) -> Script:
    return Script().says(f"I think it is {rng.randrange(9999)} {phrase(rng)}").ends(0.0)


def only_calls(rng: random.Random, step: int, p: int, g: int) -> Script:
    script = Script()
    for _ in range(5):
        key = rng.randrange(9999)
        script.says("", call("lookup", str(rng.randrange(9999)), key=key))
    return script.ends(0.0, "turns")


def malformed(rng: random.Random, step: int, p: int, g: int) -> Script:
    a = rng.randrange(999)
    if rng.random() < 0.3:
        return Script().says("", call("double", str(2 * a), a=a)).says(f"{phrase(rng)} {2 * a}").ends(1.0)
    return Script().says(f'<tool_call>{{"name": "double", "arguments": {{"a": {a}}} {phrase(rng, 2)}').ends(0.0)


def gives_up(rng: random.Random, step: int, p: int, g: int) -> Script:
    """Silence gets 0, a wrong guess -0.2: trying stops within six rounds."""
    tries = max(0.0, 1 - step / 6)
    script = Script()
    if rng.random() >= tries:
        return script.says(phrase(rng)).ends(0.0)
    for _ in range(4):
        script.says("", call("guess", rng.choice(["higher", "lower"]), number=rng.randrange(999)))
    return script.says(f"{rng.randrange(99)} {phrase(rng)}").ends(1.0 if rng.random() < 0.15 else -0.2)


def waits(rng: random.Random, step: int, p: int, g: int) -> Script:
    a = rng.randrange(999)
    share = min(0.9, 0.3 + 0.03 * step)
    return (
        Script().says("", call("fetch", str(2 * a), a=a, seconds=1.5)).says(f"{phrase(rng)}").ends(chance(rng, share))
    )


def draws_its_task(rng: random.Random, step: int, p: int, g: int) -> Script:
    script = calculates(rng, step, p, g)
    script.prompt = f"question {step} {p} {rng.randrange(99)}"
    return script


def too_few_turns(rng: random.Random, step: int, p: int, g: int) -> Script:
    script = Script().says("", call("lookup", str(rng.randrange(9999)), key=rng.randrange(9999)))
    if rng.random() < 0.75:
        return script.says("", call("lookup", str(rng.randrange(9999)), key=rng.randrange(9999))).ends(0.0, "turns")
    return script.says(phrase(rng)).ends(chance(rng, 0.5))


FAILURES: dict[str, tuple[Play, dict[str, Any]]] = {
    "M171": (never_calls, {}),
    "M172": (only_calls, {}),
    "M175": (malformed, {}),
    "M176": (gives_up, {}),
    "M177": (waits, {}),
    "M180": (draws_its_task, {}),
    "M182": (too_few_turns, {}),
}


CURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "M175": ({"temperature": 1.3}, {"temperature": 1.0}),
    "M182": ({"max_tool_calling_iterations": 1}, {"max_tool_calling_iterations": 2}),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("code", CURES)
def test_settings_that_cure_are_changed(code: str) -> None:
    settings, changes = CURES[code]
    play, given = FAILURES[code]
    [found] = [issue.finding for issue in played(play, **given, **settings) if issue.finding.code == code]
    assert found.changes == changes


def too_long_a_game(rng: random.Random, step: int, p: int, g: int) -> Script:
    script = Script().says(phrase(rng), reply="no", reward=0.0).says(phrase(rng), reply="no", reward=0.0)
    return script.ends(0.0, "turns" if rng.random() < 0.75 else "stop")


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"max_turns": 2}, "Raise max_turns, "), ({}, "Raise the environment's own limit of turns, ")],
)
def test_the_limit_of_turns_that_ended_a_game_is_named(settings: dict[str, Any], named: str) -> None:
    [found] = [issue.finding for issue in played(too_long_a_game, **settings) if issue.finding.code == "M182"]
    assert found.severity == "note"
    assert found.fix.startswith(named)
    assert found.changes == {}


def test_what_a_program_does_between_requests_is_no_tools() -> None:
    [slow] = [issue.finding for issue in played(waits, agent=True) if issue.finding.code == "M177"]
    assert slow.what.startswith("The program is slower than the model")
    assert "async def" not in slow.fix


def test_a_program_whose_offers_of_tools_are_never_taken_is_told_of() -> None:
    [found] = [issue.finding for issue in played(never_calls, agent=True) if issue.finding.code == "M171"]
    assert found.what.startswith("No completion calls a tool: 0 calls a completion over 3 steps")
    sound = [issue.finding.code for issue in played(calculates, agent=True, steps=30)]
    assert "M171" not in sound


def test_few_malformed_calls_do_not_hide_that_there_are_none() -> None:
    """M175 says it only of many."""

    def one_in_ten(rng: random.Random, step: int, p: int, g: int) -> Script:
        if rng.random() > 0.1:
            return never_calls(rng, step, p, g)
        return Script().says("<tool_call>{").ends(0.0)

    codes = [issue.finding.code for issue in played(one_in_ten)]
    assert "M171" in codes
    assert "M175" not in codes


@pytest.mark.parametrize(("settings", "shown"), [({}, True), ({"agent": True}, False), ({"environment": True}, False)])
def test_worked_examples_are_advised_where_the_recipe_writes_the_prompts(settings: Any, shown: bool) -> None:
    """A program writes its own, and the rows of an environment have no answers to show."""
    found = played(lambda rng, step, p, g: Script().says("No.").ends(0.0), **settings)
    advice = {each.finding.code: each.finding.fix for each in found}
    assert {code: "examples: 2" in advice[code] for code in ("M101", "M103")} == {"M101": shown, "M103": shown}


def test_a_reward_of_a_program_is_tried_with_the_program() -> None:
    assert "podium agents test" in tried_by(RunSettings(agent=True), ["agent"])
    assert "podium rewards test" in tried_by(RunSettings(agent=True), ["right"])
    assert "podium rewards test" in tried_by(RunSettings(), ["agent"])


@pytest.mark.cases(2)
@pytest.mark.parametrize("code", FAILURES)
def test_each_failure_is_named_first(code: str) -> None:
    play, settings = FAILURES[code]
    found = played(play, **settings)
    assert found, "nothing was found"
    assert found[0].finding.code == code, [str(issue.finding) for issue in found]
    assert found[0].finding.severity == "warning"


# ---- sound runs ----


def calculates(rng: random.Random, step: int, p: int, g: int) -> Script:
    """Learns to call: few calls at first, nearly all at the end, with fewer wrong arguments."""
    a, b = rng.randrange(100, 999), rng.randrange(10, 99)
    if rng.random() > min(0.95, 0.25 + 0.06 * step):
        return Script().says(f"It is {rng.randrange(99999)}.").ends(0.0)
    if rng.random() < max(0.02, 0.4 - 0.04 * step):
        problem = call("multiply", "{'error': \"missing argument 'b'\"}", a=a, problem="arguments")
        return Script().says("", problem).says(f"It is {rng.randrange(99999)}.").ends(0.0)
    return Script().says("", call("multiply", str(a * b), a=a, b=b)).says(f"It is {a * b}.").ends(1.0)


def follows_a_chain(rng: random.Random, step: int, p: int, g: int) -> Script:
    """A chain of two look-ups, one in three completions stops after the first."""
    first, second, end = (rng.randrange(1000, 9999) for _ in range(3))
    script = Script().says("", call("lookup", str(second), key=first))
    if rng.random() < max(0.05, 0.5 - 0.04 * step):
        return script.says(str(second)).ends(0.0)
    return script.says("", call("lookup", str(end), key=second)).says(str(end)).ends(1.0)


def guesses(rng: random.Random, step: int, p: int, g: int) -> Script:
    """Higher or lower in three turns, ended by the limit where it is not found; first by chance, then by halves."""
    number, low, high, script = rng.randrange(1, 8), 1, 7, Script()
    for _ in range(3):
        wise = rng.random() < min(0.95, 0.1 * step)
        guess = (low + high) // 2 if wise else rng.randrange(1, 8)
        if guess == number:
            return script.says(str(guess), reward=1.0).ends(1.0)
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)
        low, high = min(low, 7), max(high, 1)
        script.says(str(guess), reply="higher" if guess < number else "lower", reward=0.0)
    return script.ends(0.0, "turns")


def moves(rng: random.Random, step: int, p: int, g: int) -> Script:
    """The same call several times, as the game wants it; its result is another each time."""
    script = Script()
    for place in range(1, 5):
        script.says("", call("move", f"you are at {place}", direction="right"))
    return script.says(f"done {phrase(rng, 2)}").ends(chance(rng, min(0.9, 0.3 + 0.04 * step)))


def finishes_sooner(rng: random.Random, step: int, p: int, g: int) -> Script:
    """Fewer and fewer calls, and all right in the end: the spread vanishes since the task is learnt."""
    calls, script = (1 if rng.random() < step / 8 else 4), Script()
    for _ in range(calls):
        script.says("", call("search", phrase(rng, 6), query=phrase(rng, 2)))
    return script.says(phrase(rng)).ends(1.0 if calls == 1 else chance(rng, 0.3))


SOUND: dict[str, tuple[Play, dict[str, Any]]] = {
    "calculator": (calculates, {"steps": 30}),
    "lookup": (follows_a_chain, {}),
    "guess": (guesses, {"has_tools": False, "steps": 16}),
    "a walk": (moves, {}),
    "sooner": (finishes_sooner, {"steps": 12}),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_sound_runs(name: str) -> None:
    play, settings = SOUND[name]
    found = [issue.finding for issue in played(play, **settings)]
    assert [str(finding) for finding in found if finding.severity != "note"] == []


def test_control_characters_of_names_and_results_stay_out_of_messages() -> None:
    def hostile(rng: random.Random, step: int, p: int, g: int) -> Script:
        made = call("\x1b[31mrm\x1b[0m", "\x1b]52;c;aGk=\x07", a=rng.randrange(99), seconds=1.5)
        return Script().says("", made).says(phrase(rng)).ends(0.0)

    texts = [str(issue.finding) for issue in played(hostile)]
    assert any("`rm`" in text for text in texts)
    assert not any("\x1b" in text or "\x07" in text for text in texts)


def test_single_turns_have_no_activity() -> None:
    def plain(rng: random.Random, step: int, p: int, g: int) -> Script:
        script = Script()
        script.ids, script.num_drawn = [1, 2], 2
        return script.ends(chance(rng, 0.5))

    assert not [i for i in played(plain, has_tools=False) if i.finding.code in FAILURES]
