"""Rules about the rewards: their arguments, and their values on a handful of real rows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from podium.algorithm.metrics import accuracy_name
from podium.checks.setup import Setup, findings_of, line
from podium.data.columns import GOLD
from podium.data.prompts import PromptBuilder, check_row
from podium.data.survey import RowSurvey
from podium.errors import Finding, PodiumError, RewardError
from podium.errors.rule import Rule, findings, raised
from podium.errors.texts import as_lines, listed, named_list
from podium.recipe.recipe import AgentSpec, Stage
from podium.rewards.resolve import Reward, check_reward_models, check_rewards, near_column
from podium.rewards.score import excerpt
from podium.tester.cases import THOUGHT, columns_of, gold_of, prompt_text
from podium.tester.pretest import RewardTest, is_own, pretest
from podium.tester.probe_rules import LIKE
from podium.tester.reach import WHOLE, reach_of
from podium.tester.truth import AS_SHOWN, BARE, SUM, WRONG, TruthTable
from podium.trainer.config import GRPOConfig
from podium.trainer.rules import unknown_accuracy
from podium.trainer.settings import advantage_settings

UNSTABLE = frozenset({"W111", "W112"})
"""Codes of rewards whose scores of the same texts differ from call to call."""

SLOW_SECONDS = 0.05
"""Seconds per completion."""


def _wrong_accuracy(args: GRPOConfig, rewards: Sequence[Reward], problems: Sequence[Finding]) -> list[Finding]:
    """An accuracy that is none of the rewards."""
    is_refused = any("accuracy" in problem.changes for problem in problems)  # with its line, by the reader
    wrong = None if is_refused else unknown_accuracy(args.accuracy, [reward.name for reward in rewards])
    return [] if wrong is None else findings_of(wrong)


def _wrong_weights(args: GRPOConfig, rewards: Sequence[Reward], num_own: int) -> list[Finding]:
    """Weights of another number than that of the functions."""
    error = raised(advantage_settings, args, len(rewards) - num_own, num_own) if rewards else None
    if error is None:
        return []
    names = listed(reward.name for reward in rewards)
    return [replace(finding, what=f"{finding.what} The functions are {names}.") for finding in findings_of(error)]


def _missing_columns(
    train: RowSurvey,
    rewards: Sequence[Reward],
    given: Mapping[str, Any],
    takes_turns: bool,
    adds_columns: bool,
    args: GRPOConfig | None,
) -> Iterator[Finding]:
    """Rewards that need columns that the rows do not have. `takes_turns`: whether an environment or a program does."""
    if not train.columns or adds_columns:
        return
    columns = ["prompt"] if args is not None and args.remove_unused_columns else list(train.columns)
    for reward in rewards:
        try:
            check_rewards([reward], columns, environments=takes_turns)
        except RewardError as error:
            first, why = [*error.facts["problems"], error.facts["listed"]][:2]
            found = Finding(severity="error", code="W002", what=f"{train.name}: {first}", why=why, fix=error.fix)
            if changes := _by_another_name(given, error.facts["missing"], columns):
                found = replace(found, fix=f"{as_lines(changes)}; or {error.fix}", changes=changes)
            yield found


def _by_another_name(given: Mapping[str, Any], missing: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """The keys of a recipe that give columns the names that are missing; nothing where one is not there either."""
    near = {name: near_column(name, columns) for name in missing}
    if not (given and near and all(near.values())):
        return {}
    changes: dict[str, Any] = {}
    if column := near.pop("answer", None):  # has a key of its own
        if sum(name in GOLD for name in columns) > 1 or "answer" in given:
            return {}
        changes["answer"] = f"{{{column}}}"
    if near:
        own = given.get("columns")
        changes["columns"] = {**(own if isinstance(own, Mapping) else {}), **near}
    return changes


def _models(rewards: Sequence[Reward], train: RowSurvey | None, args: GRPOConfig | None) -> Iterator[Finding]:
    """Reward models that are not there, have no score, or cannot read the prompts."""
    prompts = [] if train is None else [row["prompt"] for row in train.examples if "prompt" in row]
    for reward in rewards:
        error = raised(check_reward_models, [reward], prompts, args and args.max_completion_length)
        if error is not None:
            yield from findings_of(error)


NEEDS: tuple[Rule, ...] = (
    Rule(code="C030", needs=("settings", "rewards", "problems"), when=_wrong_accuracy),
    Rule(needs=("settings", "rewards", "num_own_rewards"), when=_wrong_weights),
    Rule(
        code="W002",
        needs=("train", "rewards", "given", "takes_turns", "adds_columns"),
        wants=("settings",),
        when=_missing_columns,
    ),
)
"""Rules about columns and settings that rewards need."""


# ---- the test without a model ----


def with_reward_test(setup: Setup) -> Setup:
    """The setup with the test of its rewards."""
    return replace(setup, tested=_tested(setup))


def _tested(setup: Setup) -> RewardTest | None:
    """The test of all rewards without a model; None where there is nothing to test, or columns are missing."""
    rows = _usable(setup.train)
    if setup.adds_columns or not setup.rewards or not rows:
        return None
    if any(finding.code == "W002" for finding in findings(NEEDS, setup)):
        return None
    num_own = setup.num_own_rewards
    try:
        known = (
            None
            if setup.settings is None
            else advantage_settings(setup.settings, len(setup.rewards) - num_own, num_own).weights_K
        )
    except PodiumError:  # weights of another number
        known = None
    weights = [1.0] * len(setup.rewards) if known is None else known.tolist()
    takes_turns = setup.plays or bool(setup.agents.tools) or setup.program is not None
    reach = WHOLE if takes_turns else reach_of(setup.builder, rows)
    return pretest(setup.rewards, weights, rows, environments=setup.has_environment, reach=reach)


def _slow(tested: RewardTest, rewards: Sequence[Reward], args: GRPOConfig) -> Iterator[Finding]:
    """Rewards that the model would wait for, by the batch of the run."""
    for reward, seconds in zip(rewards, tested.seconds, strict=True):
        if seconds >= SLOW_SECONDS:
            count = args.generation_batch_size or 0
            yield Finding(
                code="W009",
                severity="warning",
                what=(
                    f"{reward} took {seconds:.2g} s a completion: {seconds * count:.1f} s for every {count} completions"
                ),
                why="the model waits for it in every round",
                fix="do the slow part once for all completions, or write it with `async def` and await inside",
            )


def _trials(tested: RewardTest, rewards: Sequence[Reward], given: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings of the test, less the times of single calls."""
    for finding in tested.findings:
        if finding.code != "W009":
            yield _in_recipe(finding, rewards, given) if given else finding


def _in_recipe(finding: Finding, rewards: Sequence[Reward], given: Mapping[str, Any]) -> Finding:
    """A fix that is a flag of `podium rewards test`, or a weight, as a setting of the recipe."""
    if finding.code == "W102" and "wanted" in finding.facts:
        changes = _weighted(rewards, given, finding.facts["name"], finding.facts["wanted"])
        return replace(finding, fix=as_lines(changes) or finding.fix, changes=changes)
    column = finding.facts.get("answer_column")
    if column is None:
        return finding
    changes = {"answer": f"{{{column}}}"}
    fix = finding.fix.removesuffix(f"--answer-column {column}") + as_lines(changes)
    return replace(finding, fix=fix, changes=changes)


def _weighted(rewards: Sequence[Reward], given: Mapping[str, Any], name: str, weight: float) -> dict[str, Any]:
    """The change of the weight of the reward of a name; empty where it is not clear where it is."""
    places = [place for place, reward in enumerate(rewards) if reward.name == name]
    if len(places) != 1:
        return {}
    if isinstance(weights := given.get("reward_weights"), list):
        return {"reward_weights": [weight if place in places else other for place, other in enumerate(weights)]}
    written = given.get("rewards")
    if not isinstance(written, list) or not isinstance(entry := written[places[0]], Mapping):
        return {}
    return {"rewards": [{**other, "weight": weight} if other is entry else other for other in written]}


def _assumed_accuracy(
    args: GRPOConfig, rewards: Sequence[Reward], given: Mapping[str, Any], stage: Stage | None
) -> Finding | None:
    """The reward that counts as accuracy, where only names tell."""
    if args.accuracy is not None or not any(map(is_own, rewards)):
        return None
    names = [reward.name for reward in rewards]
    name = accuracy_name(names)
    if name is None:
        which = f"none of {named_list(names)} counts" if len(names) > 1 else f"`{names[0]}` does not count"
        what = f"{which} as accuracy: no name suggests that 1 is right and 0 is wrong"
    elif is_own(rewards[names.index(name)]):
        what = f"`{name}` counts as accuracy, because of its name"
    else:
        return None
    fix = line(given, "accuracy", name or names[0])
    changes = {"accuracy": name or names[0]}
    if stage is not None:  # a key of the whole run
        fix = f"put `correct` into the name of the function that tells right from wrong: {names[0]}_correct"
        changes = {}
    return Finding(
        code="W123",
        severity="note",
        what=what,
        why=(
            "held-out accuracy, pass rates and verdicts are of the reward for accuracy; without one, verdicts are of "
            "the weighted sum of all"
        ),
        fix=fix,
        changes=changes,
    )


def _shown_forms(
    tested: RewardTest,
    rewards: Sequence[Reward],
    agents: AgentSpec,
    given: Mapping[str, Any],
    args: GRPOConfig | None,
    train: RowSurvey | None,
    builder: PromptBuilder | None,
) -> Finding | None:
    """Worked examples in a form that the reward does not pay, and a form that it pays and no prompt shows."""
    table = tested.table
    if table is None or agents.tools:  # examples may show calls
        return None
    is_explained = any(finding.severity == "error" or finding.code in UNSTABLE for finding in tested.findings)
    is_shown = bool(table.examples) and all(old == new for old, new in table.examples)
    if is_explained or is_shown:
        return None
    asked = None if args is None else args.accuracy
    name = asked or accuracy_name([column for column in table.columns if column != SUM])
    column = name if name in table.columns else table.columns[-1]
    right = table.best(column)
    wrong = table.scores(WRONG, column)
    shown = table.scores(AS_SHOWN, column)
    if math.isnan(shown):
        shown = table.scores(BARE, column)
    if not shown < wrong + LIKE * (right - wrong):  # also where one of them is not known
        return None
    rows = _usable(train)
    if table.examples:
        before, after = next(((old, new) for old, new in table.examples if old != new), table.examples[0])
        changes = _with_room(builder, rows, table.template, _rewritten(given, table))
        return Finding(
            code="W124",
            severity="warning",
            what=(
                f"the worked examples show the form {excerpt(before)}, in which right answers score {shown:.2f} by "
                f"`{column}`; in the form {excerpt(after)} they score {right:.2f}"
            ),
            why="a model copies the form of the examples, and that form is not rewarded",
            fix=as_lines(changes) or f"write the examples' answers in the form {_filled(table)}",
            changes=changes,
        )
    mark = _unseen_mark(rows, table.template)
    if mark is None:
        return None
    changes = _with_room(builder, rows, table.template, _described(given, rewards, table.template))
    return Finding(
        code="W124",
        severity="warning",
        what=(
            f"right answers score {right:.2f} by `{column}` in the form {_filled(table)} and {shown:.2f} without it, "
            f"and no prompt mentions {mark}"
        ),
        why="a form that is neither described nor shown is found by accident, if at all",
        fix=as_lines(changes) or f"describe the form in the prompts: {_filled(table)}",
        changes=changes,
    )


def _filled(table: TruthTable) -> str:
    return table.template.replace("{}", "ANSWER")


def _rewritten(given: Mapping[str, Any], table: TruthTable) -> dict[str, Any]:
    """`examples` with their answers in the form that scores; empty where they are no rows with one answer column."""
    examples = given.get("examples")
    names = columns_of(str(given.get("answer") or "answer"))
    if len(names) != 1 or not isinstance(examples, list) or THOUGHT in table.template:
        return {}
    better = dict(table.examples)
    answers = [str(example.get(names[0])).strip() for example in examples]
    if any(text not in better for text in answers):
        return {}
    return {"examples": [{**example, names[0]: better[text]} for example, text in zip(examples, answers, strict=True)]}


_MARKS = (r"<(?!think|reasoning)[\w-]+>", r"\\boxed", "####", r"\{\"[\w-]+\":")
"""Patterns of the text before the answer, in the forms that a prompt has to mention."""


def _unseen_mark(rows: Sequence[Mapping[str, Any]], template: str) -> str | None:
    """The tag, or the like, of a form, where no prompt of a row mentions it."""
    lead = template.partition("{}")[0]
    mark = next((found[-1] for pattern in _MARKS if (found := re.findall(pattern, lead))), None)
    if mark is None:
        return None
    word = "json" if mark.startswith("{") else mark.strip("<>\\").casefold()
    words = (f"<{word}>", f"{word} tag", f"`{word}`") if mark.startswith("<") else (word,)
    prompts = [prompt_text(row["prompt"]).casefold() for row in rows]
    return None if any(word in prompt for prompt in prompts for word in words) else mark


def _described(given: Mapping[str, Any], rewards: Sequence[Reward], template: str) -> dict[str, Any]:
    """Worked examples where they are put in the form of themselves, else a sentence in the system message."""
    if not given or THOUGHT in template:
        return {}
    if "<answer>" in template and {"answer_format", "answer_correct"} & {reward.name for reward in rewards}:
        return {"examples": 2}
    form = template.replace("{}", "ANSWER").replace("{", "{{").replace("}", "}}")
    before = str(given.get("system") or "").strip()
    return {"system": f"{before} Write your answer in this form: {form}".strip()}


def _with_room(
    builder: PromptBuilder | None, rows: Sequence[Mapping[str, Any]], template: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """The changes, and a completion limit with room for the answers in that form and the end of the text."""
    limit = None if builder is None else builder.max_completion_length
    answers = [gold for row in rows if (gold := gold_of(row.get("answer"))) is not None]
    if not changes or builder is None or limit is None or not answers:
        return changes
    texts = [template.replace("{}", answer) for answer in answers]
    tokens = max(map(len, builder.tokenizer(texts, add_special_tokens=False)["input_ids"])) + 1
    return {**changes, "max_completion_length": tokens} if tokens > limit else changes


def _usable(train: RowSurvey | None) -> list[dict[str, Any]]:
    return [row for row in (train.examples if train else ()) if check_row(row, 0) is None]


RULES: tuple[Rule, ...] = (
    *NEEDS,
    Rule(needs=("rewards",), wants=("train", "settings"), when=_models),
    Rule(code="W009", needs=("tested", "rewards", "settings"), when=_slow),
    Rule(needs=("tested", "rewards", "given"), when=_trials),
    Rule(
        code="W124",
        needs=("tested", "rewards", "agents", "given"),
        wants=("settings", "train", "builder"),
        when=_shown_forms,
    ),
    Rule(code="W123", needs=("settings", "rewards", "given"), wants=("stage",), when=_assumed_accuracy),
)
