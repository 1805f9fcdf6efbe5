"""Rules about the rewards: their arguments, and their values on a handful of real rows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from podium.algorithm.metrics import accuracy_name
from podium.checks.setup import Setup, findings_of
from podium.data.columns import GOLD
from podium.data.row import check_row
from podium.errors import Finding, PodiumError, RewardError
from podium.errors.texts import as_lines
from podium.rewards.classifier import check_reward_models
from podium.rewards.resolve import check_rewards, near_column
from podium.rewards.score import excerpt
from podium.rewards.tester.cases import THOUGHT, columns_of, gold_of, prompt_text
from podium.rewards.tester.reach import WHOLE, reach_of
from podium.rewards.tester.rules.false_positives import LIKE
from podium.rewards.tester.truth import AS_SHOWN, BARE, SUM, WRONG, TruthTable
from podium.rewards.tester.unasked import RewardTest, is_own, pretest
from podium.trainer.rules import unknown_accuracy
from podium.trainer.settings import advantage_settings

UNSTABLE = frozenset({"W111", "W112"})
"""Codes of rewards whose scores of the same texts differ from call to call."""

SLOW_SECONDS = 0.05
"""Seconds per completion."""


def needs(setup: Setup) -> Iterator[Finding]:
    """Missing columns, and weights of another number."""
    survey, args = setup.train, setup.args
    if args is not None and setup.rewards:
        names = [reward.name for reward in setup.rewards]
        said = any("accuracy" in problem.changes for problem in setup.problems)  # with its line, by the reader
        wrong = None if said else unknown_accuracy(args.accuracy, names)
        if wrong is not None:
            yield from findings_of(wrong)
        try:
            advantage_settings(args, len(setup.rewards) - num_own(setup), num_own(setup))
        except PodiumError as error:
            for finding in findings_of(error):
                yield replace(finding, what=f"{finding.what} The functions are {', '.join(names)}.")
    if survey is None or not survey.columns or setup.adds_columns:
        return
    columns = ["prompt"] if args is not None and args.remove_unused_columns else list(survey.columns)
    for reward in setup.rewards:
        try:
            check_rewards([reward], columns, environments=setup.pools is not None or setup.program is not None)
        except RewardError as error:
            first, why = [*error.facts["problems"], error.facts["listed"]][:2]
            found = Finding(severity="error", code="W002", what=f"{survey.name}: {first}", why=why, fix=error.fix)
            if changes := _by_another_name(setup, error.facts["missing"], columns):
                fix = as_lines(changes)
                found = replace(found, fix=f"{fix}; or {error.fix}", changes=changes)
            yield found


def _by_another_name(setup: Setup, missing: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """The keys of a recipe that give columns the names that are missing; nothing where one is not there either."""
    near = {name: near_column(name, columns) for name in missing}
    if not (setup.given and near and all(near.values())):
        return {}
    changes: dict[str, Any] = {}
    if column := near.pop("answer", None):  # has a key of its own
        if sum(name in GOLD for name in columns) > 1 or "answer" in setup.given:
            return {}
        changes["answer"] = f"{{{column}}}"
    own = setup.given.get("columns")
    return changes | ({"columns": {**(own if isinstance(own, Mapping) else {}), **near}} if near else {})


def num_own(setup: Setup) -> int:
    """Number of rewards that environments, or a program, have of their own."""
    return int(setup.program is not None) if setup.pools is None else len(setup.pools.reward_functions())


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
    if setup.adds_columns or not setup.rewards or not rows or any(finding.code == "W002" for finding in needs(setup)):
        return None
    try:
        known = (
            None
            if setup.args is None
            else advantage_settings(setup.args, len(setup.rewards) - num_own(setup), num_own(setup)).weights_K
        )
    except PodiumError:  # weights of another number
        known = None
    weights = [1.0] * len(setup.rewards) if known is None else known.tolist()
    takes_turns = setup.plays or bool(setup.agents.tools) or setup.program is not None
    reach = WHOLE if takes_turns else reach_of(setup.builder, rows)
    return pretest(setup.rewards, weights, rows, environments=setup.has_environment, reach=reach)


def trials(setup: Setup) -> Iterator[Finding]:
    """The findings of the test, and W009 by the batch of the run."""
    if setup.tested is None:
        return
    for reward, seconds in zip(setup.rewards, setup.tested.seconds, strict=True):
        if setup.args is not None and seconds >= SLOW_SECONDS:
            count = setup.args.generation_batch_size or 0
            what = f"{reward} took {seconds:.2g} s a completion: {seconds * count:.1f} s for every {count} completions"
            fix = "do the slow part once for all completions, or write it with `async def` and await inside"
            yield Finding(
                severity="warning", code="W009", what=what, why="the model waits for it in every round", fix=fix
            )
    for finding in setup.tested.findings:
        if finding.code != "W009":
            yield _in_recipe(setup, finding) if setup.given else finding


def _in_recipe(setup: Setup, finding: Finding) -> Finding:
    """A fix that is a flag of `podium rewards test`, or a weight, as a setting of the recipe."""
    if finding.code == "W102" and "wanted" in finding.facts:
        changes = _weighted(setup, finding.facts["name"], finding.facts["wanted"])
        return replace(finding, fix=as_lines(changes) or finding.fix, changes=changes)
    column = finding.facts.get("answer_column")
    if column is None:
        return finding
    changes = {"answer": f"{{{column}}}"}
    fix = finding.fix.removesuffix(f"--answer-column {column}") + as_lines(changes)
    return replace(finding, fix=fix, changes=changes)


def _weighted(setup: Setup, name: str, weight: float) -> dict[str, Any]:
    """The change of the weight of the reward of a name; empty where it is not clear where it is."""
    places = [place for place, each in enumerate(setup.rewards) if each.name == name]
    if len(places) != 1:
        return {}
    if isinstance(weights := setup.given.get("reward_weights"), list):
        return {"reward_weights": [weight if place in places else each for place, each in enumerate(weights)]}
    rewards = setup.given.get("rewards")
    if not isinstance(rewards, list) or not isinstance(entry := rewards[places[0]], Mapping):
        return {}
    return {"rewards": [{**each, "weight": weight} if each is entry else each for each in rewards]}


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
    cure = setup.cure("accuracy", name or names[0])
    if setup.stage is not None:  # a key of the whole run
        cure = {"fix": f"put `correct` into the name of the function that tells right from wrong: {names[0]}_correct"}
    yield Finding(severity="note", code="W123", what=what, why=why, **cure)


def shown_forms(setup: Setup) -> Iterator[Finding]:
    """Worked examples in a form that the reward does not pay, and a form that it pays and no prompt shows."""
    if setup.tested is None or (table := setup.tested.table) is None or setup.agents.tools:  # examples may show calls
        return
    if table.examples and all(old == new for old, new in table.examples):
        return
    if any(each.severity == "error" or each.code in UNSTABLE for each in setup.tested.findings):  # explains the scores
        return
    asked = None if setup.args is None else setup.args.accuracy
    name = asked or accuracy_name([each for each in table.columns if each != SUM])
    column = name if name in table.columns else table.columns[-1]
    right, wrong = table.best(column), table.scores(WRONG, column)
    shown = table.scores(AS_SHOWN, column)
    shown = table.scores(BARE, column) if math.isnan(shown) else shown
    if not shown < wrong + LIKE * (right - wrong):  # also where one of them is not known
        return
    if table.examples:
        before, after = next(((old, new) for old, new in table.examples if old != new), table.examples[0])
        what = f"the worked examples show the form {excerpt(before)}, in which right answers score {shown:.2f} by "
        what += f"`{column}`; in the form {excerpt(after)} they score {right:.2f}"
        changes = _with_room(setup, table.template, _rewritten(setup, table))
        fix = as_lines(changes) or f"write the examples' answers in the form {_filled(table)}"
        why = "a model copies the form of the examples, and that form is not rewarded"
        yield Finding(severity="warning", code="W124", what=what, why=why, fix=fix, changes=changes)
    elif (mark := _unseen_mark(setup, table.template)) is not None:
        what = (
            f"right answers score {right:.2f} by `{column}` in the form {_filled(table)} and {shown:.2f} without it, "
        )
        what += f"and no prompt mentions {mark}"
        why = "a form that is neither described nor shown is found by accident, if at all"
        changes = _with_room(setup, table.template, _described(setup, table.template))
        fix = as_lines(changes) or f"describe the form in the prompts: {_filled(table)}"
        yield Finding(severity="warning", code="W124", what=what, why=why, fix=fix, changes=changes)


def _filled(table: TruthTable) -> str:
    return table.template.replace("{}", "ANSWER")


def _rewritten(setup: Setup, table: TruthTable) -> dict[str, Any]:
    """`examples` with their answers in the form that scores; empty where they are no rows with one answer column."""
    examples, names = setup.given.get("examples"), columns_of(str(setup.given.get("answer") or "answer"))
    if len(names) != 1 or not isinstance(examples, list) or THOUGHT in table.template:
        return {}
    better = dict(table.examples)
    told = [str(each.get(names[0])).strip() for each in examples]
    if any(text not in better for text in told):
        return {}
    return {"examples": [{**each, names[0]: better[text]} for each, text in zip(examples, told, strict=True)]}


_MARKS = (r"<(?!think|reasoning)[\w-]+>", r"\\boxed", "####", r"\{\"[\w-]+\":")
"""Patterns of the text before the answer, in the forms that a prompt has to mention."""


def _unseen_mark(setup: Setup, template: str) -> str | None:
    """The tag, or the like, of a form, where no prompt of a row mentions it."""
    lead = template.partition("{}")[0]
    mark = next((found[-1] for pattern in _MARKS if (found := re.findall(pattern, lead))), None)
    if mark is None:
        return None
    word = "json" if mark.startswith("{") else mark.strip("<>\\").casefold()
    words = (f"<{word}>", f"{word} tag", f"`{word}`") if mark.startswith("<") else (word,)
    prompts = [prompt_text(row["prompt"]).casefold() for row in _usable(setup)]
    return None if any(each in prompt for prompt in prompts for each in words) else mark


def _described(setup: Setup, template: str) -> dict[str, Any]:
    """Worked examples where they are put in the form of themselves, else a sentence in the system message."""
    if not setup.given or THOUGHT in template:
        return {}
    if "<answer>" in template and {"answer_format", "answer_correct"} & {reward.name for reward in setup.rewards}:
        return {"examples": 2}
    form = template.replace("{}", "ANSWER").replace("{", "{{").replace("}", "}}")
    before = str(setup.given.get("system") or "").strip()
    return {"system": f"{before} Write your answer in this form: {form}".strip()}


def _with_room(setup: Setup, template: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes, and a completion limit with room for the answers in that form and the end of the text."""
    limit = None if setup.builder is None else setup.builder.max_completion_length
    answers = [gold for row in _usable(setup) if (gold := gold_of(row.get("answer"))) is not None]
    if not changes or setup.builder is None or limit is None or not answers:
        return changes
    texts = [template.replace("{}", answer) for answer in answers]
    tokens = max(map(len, setup.builder.tokenizer(texts, add_special_tokens=False)["input_ids"])) + 1
    return {**changes, "max_completion_length": tokens} if tokens > limit else changes


def _usable(setup: Setup) -> list[dict[str, Any]]:
    return [row for row in (setup.train.examples if setup.train else ()) if check_row(row, 0) is None]
