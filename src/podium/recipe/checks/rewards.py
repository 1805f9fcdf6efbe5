"""Rules about the rewards: their arguments, and their values on a handful of real rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from podium.algorithm.metrics import accuracy_name
from podium.data.columns import GOLD
from podium.data.row import check_row
from podium.errors import PodiumError, RewardError, as_line
from podium.recipe.checks.setup import Setup, fatal, findings_of, note, warning
from podium.records import Finding
from podium.rewards.classifier import check_reward_models
from podium.rewards.resolve import check_rewards
from podium.rewards.tester.unasked import RewardTest, is_own, pretest
from podium.trainer.rules import unknown_accuracy
from podium.trainer.settings import advantage_settings

SLOW_SECONDS = 0.05
"""Seconds per completion."""


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
            why, gold = rest.partition("\n")[0], [name for name in columns if name in GOLD]
            found = fatal(code="W002", what=f"{survey.name}: {first}", why=why, fix=error.fix)
            if setup.given and "`answer`" in first and len(gold) == 1 and "answer" not in setup.given:
                fix = as_line("answer", f"{{{gold[0]}}}")
                found = replace(found, fix=f"{fix}; or {error.fix}", changes={"answer": f"{{{gold[0]}}}"})
            yield found


def models(setup: Setup) -> Iterator[Finding]:
    """Reward models that are not there, have no score, or cannot read the prompts."""
    prompts = [] if setup.train is None else [row["prompt"] for row in setup.train.examples if "prompt" in row]
    for reward in setup.rewards:
        try:
            check_reward_models([reward], prompts, setup.args and setup.args.max_completion_length)
        except PodiumError as error:
            yield from findings_of(error)


def with_reward_test(setup: Setup) -> Setup:
    """The setup with the test of its rewards."""
    return replace(setup, tested=_tested(setup))


def _tested(setup: Setup) -> RewardTest | None:
    """The test of all rewards without a model; None where there is nothing to test, or columns are missing."""
    rows = _usable(setup)
    if not setup.rewards or not rows or any(finding.code == "W002" for finding in needs(setup)):
        return None
    try:
        known = None if setup.args is None else advantage_settings(setup.args, len(setup.rewards)).weights_K
    except PodiumError:  # weights of another number
        known = None
    weights = [1.0] * len(setup.rewards) if known is None else known.tolist()
    return pretest(setup.rewards, weights, rows)


def trials(setup: Setup) -> Iterator[Finding]:
    """The findings of the test, and W009 by the batch of the run."""
    if setup.tested is None:
        return
    for reward, seconds in zip(setup.rewards, setup.tested.seconds, strict=True):
        if setup.args is not None and seconds >= SLOW_SECONDS:
            count = setup.args.generation_batch_size or 0
            what = f"{reward} took {seconds:.2g} s a completion: {seconds * count:.1f} s for every {count} completions"
            fix = "do the slow part once for all completions, or write it with `async def` and await inside"
            yield warning(code="W009", what=what, why="the model waits for it in every round", fix=fix)
    wishes = getattr(setup.args, "on_finding", None) or {}
    for finding in setup.tested.findings:
        if finding.code != "W009" and wishes.get(finding.code) != "ignore":
            yield _in_recipe(finding) if setup.given else finding


def _in_recipe(finding: Finding) -> Finding:
    """A fix that is a flag of `podium rewards test`, as a setting of the recipe."""
    column = re.search(r"--answer-column (\w+)$", finding.fix)
    if column is None:
        return finding
    fix = finding.fix[: column.start()] + as_line("answer", f"{{{column[1]}}}")
    return replace(finding, fix=fix, changes={"answer": f"{{{column[1]}}}"})


def accuracy(setup: Setup) -> Iterator[Finding]:
    """The reward that counts as accuracy, where only names tell."""
    if setup.args is None or setup.args.accuracy is not None or not any(map(is_own, setup.rewards)):
        return
    names = [reward.name for reward in setup.rewards]
    name = accuracy_name(names)
    if name is None:
        listed = ", ".join(f"`{each}`" for each in names)
        which = f"none of {listed} counts" if len(names) > 1 else f"{listed} does not count"
        what = f"{which} as accuracy: no name suggests that 1 is right and 0 is wrong"
    elif is_own(setup.rewards[names.index(name)]):
        what = f"`{name}` counts as accuracy, because of its name"
    else:
        return
    why = "held-out accuracy, pass rates and verdicts are of the reward for accuracy; without one, verdicts are of "
    why += "the weighted sum of all"
    yield note(code="W123", what=what, why=why, fix=setup.line("accuracy", name or names[0]))


def _usable(setup: Setup) -> list[dict[str, Any]]:
    return [row for row in (setup.train.examples if setup.train else ()) if check_row(row, 0) is None]
