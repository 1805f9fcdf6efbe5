"""Rules about the rewards: their arguments, and their values on a handful of real rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from transformers import TrainerState

from podium.algorithm.metrics import accuracy_name
from podium.data.columns import GOLD
from podium.data.row import check_row
from podium.errors import PodiumError, RewardError
from podium.isolation.workers.functions import unwrapped
from podium.recipe.checks.setup import Setup, fatal, findings_of, note, warning
from podium.records import Completion, Finding, Group, Prompt
from podium.rewards.classifier import check_reward_models
from podium.rewards.from_file import FileReward
from podium.rewards.model import RewardModel
from podium.rewards.resolve import Reward, check_rewards
from podium.rewards.score import score
from podium.rewards.tester import quick_test
from podium.trainer.rules import unknown_accuracy
from podium.trainer.settings import advantage_settings

SLOW_SECONDS = 0.05
"""Seconds per completion."""

TESTED_SECONDS = 0.005
"""Seconds per completion; the tester scores hundreds of them."""


def needs(setup: Setup) -> Iterator[Finding]:
    """Missing columns, and weights of another number."""
    survey, args = setup.train, setup.args
    if args is not None and setup.rewards:
        unknown = unknown_accuracy(args.accuracy, [reward.name for reward in setup.rewards])
        yield from [] if unknown is None else findings_of(unknown)
        try:
            advantage_settings(args, len(setup.rewards))
        except PodiumError as error:
            names = ", ".join(reward.name for reward in setup.rewards)
            for finding in findings_of(error):
                yield replace(finding, what=f"{finding.what} The functions are {names}.")
    if survey is None or not survey.columns:
        return
    columns = ["prompt"] if args is not None and args.remove_unused_columns else list(survey.columns)
    for reward in setup.rewards:
        try:
            check_rewards([reward], columns)
        except RewardError as error:
            first, _, rest = error.what.partition("\n")
            yield fatal(code="W002", what=f"{survey.name}: {first}", why=rest.partition("\n")[0], fix=error.fix)


def models(setup: Setup) -> Iterator[Finding]:
    """Reward models that are not there, have no score, or cannot read the prompts."""
    prompts = [] if setup.train is None else [row["prompt"] for row in setup.train.examples if "prompt" in row]
    for reward in setup.rewards:
        try:
            check_reward_models([reward], prompts, setup.args and setup.args.max_completion_length)
        except PodiumError as error:
            yield from findings_of(error)


def trials(setup: Setup) -> Iterator[Finding]:
    """Every reward on a few rows, with the gold answer and with nothing as the completion."""
    groups = _groups(setup)
    if any(finding.code == "W002" for finding in needs(setup)):
        return
    for reward in setup.rewards if groups else ():
        if isinstance(reward.function, RewardModel):
            continue
        try:
            seconds = _seconds(groups, reward)
            if seconds > TESTED_SECONDS:  # the first call imports its modules
                seconds = _seconds(groups, reward)
        except PodiumError as error:
            yield from findings_of(error)
            continue
        if setup.args is not None and seconds >= SLOW_SECONDS:
            count = setup.args.generation_batch_size or 0
            what = f"{reward} took {seconds:.2g} s a completion: {seconds * count:.1f} s for every {count} completions"
            fix = "do the slow part once for all completions, or write it with `async def` and await inside"
            yield warning(code="W009", what=what, why="the model waits for it in every round", fix=fix)
        yield from _tested(setup, reward, seconds)


def _seconds(groups: Sequence[Group], reward: Reward) -> float:
    """Seconds a completion, in one call."""
    started = time.perf_counter()
    score(groups, [reward], trainer_state=TrainerState())
    return (time.perf_counter() - started) / (2 * len(groups))


def _is_own(reward: Reward) -> bool:
    function = unwrapped(reward.function)
    return isinstance(function, FileReward) or not str(getattr(function, "__module__", "")).startswith("podium.")


def accuracy(setup: Setup) -> Iterator[Finding]:
    """The reward that counts as accuracy, where only names tell."""
    if setup.args is None or setup.args.accuracy is not None or not any(map(_is_own, setup.rewards)):
        return
    names = [reward.name for reward in setup.rewards]
    name = accuracy_name(names)
    if name is None:
        what = f"none of {', '.join(f'`{each}`' for each in names)} counts as accuracy: no name says right or wrong"
    elif _is_own(setup.rewards[names.index(name)]):
        what = f"`{name}` counts as accuracy, because of its name"
    else:
        return
    why = "held-out accuracy, pass rates and verdicts are of that reward; where there is none, of the weighted sum"
    yield note(code="W123", what=what, why=why, fix=setup.line("accuracy", name or names[0]))


def _tested(setup: Setup, reward: Reward, seconds: float) -> Iterator[Finding]:
    """The worst finding of the reward tester about a function of the user's, by a few rows."""
    if setup.train is None or not _is_own(reward):
        return
    more = (
        f"podium rewards test {setup.name}" if setup.given else f"podium.rewards.examine({reward.name}, train_dataset)"
    )
    if reward.is_async or seconds > TESTED_SECONDS:
        what = f"{reward} was not tested on right and wrong answers here: {seconds:.2g} s a completion"
        yield note(code="W122", what=what, fix=more)
        return
    found = [finding for finding in quick_test(reward, _usable(setup)) if finding.severity != "note"]
    if found:
        worst = found[0]
        others = f" ({len(found) - 1} more)" if len(found) > 1 else ""
        yield replace(worst, severity="warning", what=f"{worst.what}{others}", fix=f"{worst.fix}; next: {more}")


def _groups(setup: Setup) -> list[Group]:
    """The survey's example rows as groups of two completions: the gold answer, and nothing."""

    def completion(text: str) -> Completion:
        ids: Sequence[int] = (0,) if setup.tokenizer is None else setup.tokenizer(text)["input_ids"] or (0,)
        return Completion(token_ids=tuple(ids), logps=(0.0,) * len(ids), finish="stop", text=text, policy_step=0)

    def group(index: int, row: dict[str, Any]) -> Group:
        content = row["prompt"]
        columns = {key: value for key, value in row.items() if key not in ("prompt", "completion", "completion_ids")}
        prompt = Prompt(id=index, row=index, token_ids=(0,), text=str(content), content=content, columns=columns)
        gold = next((str(row[name]) for name in GOLD if row.get(name) is not None), "")
        return Group(prompt=prompt, completions=(completion(gold), completion("")))

    return [group(index, row) for index, row in enumerate(_usable(setup))]


def _usable(setup: Setup) -> list[dict[str, Any]]:
    return [row for row in (setup.train.examples if setup.train else ()) if check_row(row, 0) is None]
