"""Findings about a run, all of them, before any weight is loaded.

    for finding in podium.check("run.yaml"):
        print(finding)

The list is the table in `podium.checks.table`: rules, over the facts of a `Setup`, which holds all that is knowable.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError, Finding, PodiumError, way_on
from podium.errors.texts import as_line, with_fix
from podium.recipe.document import open_document, variables
from podium.trainer.planned import planned

NOTES = ("C040", "D051", "W123")
"""Codes of notes to print when training starts: inferred settings, rows left out for their pass rates, the accuracy."""

if TYPE_CHECKING:
    from podium.checks.setup import Setup
    from podium.planning.layouts import Plan
    from podium.recipe.document import Document
    from podium.recipe.recipe import Recipe
    from podium.tester.truth import TruthTable
    from podium.trainer.config import GRPOConfig
    from podium.trainer.planned import Launch
    from podium.trainer.run import Arguments

__all__ = ["Checked", "as_error", "check", "check_arguments", "check_recipe", "examine", "worth_saying"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A recipe that was read and checked."""

    recipe: Recipe | None = None
    """The same as from `podium.recipe.load`; None where it cannot be read, or something in it is an error."""
    findings: list[Finding] = field(default_factory=list)
    """Errors first."""
    tables: tuple[TruthTable, ...] = ()
    """Scores of right and wrong answers by the rewards; of stages, those that differ."""
    plan: Plan | None = None
    """The layouts on the GPUs that the check is for; None: it is for none."""
    num_checks: int = 0
    num_rows: int = 0
    """Rows that were read, to train on and held out; of stages, of all."""

    @property
    def nothing(self) -> str:
        """The sentence for a recipe without findings."""
        return f"nothing found in {self.num_checks} checks of the settings and {self.num_rows:,} rows"


def check(
    model: Any,
    reward_funcs: Any = None,
    args: GRPOConfig | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    reward_processing_classes: Any = None,
    quantization_config: Any = None,
    peft_config: Any = None,
    tools: Any = None,
    rollout_func: Any = None,
    environment_factory: Any = None,
    agent: Any = None,
) -> list[Finding]:
    """Findings about a run, errors first. No weight is loaded, and nothing is raised for what is wrong.

    A trainer in the same process is not disturbed: see `process_as_it_was`.

    Takes the arguments of `GRPOTrainer`; or, alone, a recipe: the path of a YAML file, the name of a recipe that comes
    with Podium, or a `Recipe`.

    >>> from podium import GRPOConfig, check
    >>> rows = [{"prompt": "1 + 1 = ", "answer": "2"}, {"prompt": None, "answer": "3"}]
    >>> def right(completions, answer):
    ...     return [float(a in text) for text, a in zip(completions, answer)]
    >>> args = GRPOConfig("out", per_device_train_batch_size=2, num_generations=2)
    >>> found = check("./nowhere", right, args, rows)
    >>> [(finding.code, finding.what) for finding in found if finding.severity == "error"]
    [('M001', 'There is no folder ./nowhere.'), ('D005', 'train_dataset, row 1: prompt is null')]
    """
    if reward_funcs is None and args is None and train_dataset is None and isinstance(model, (str, Path)):
        return check_recipe(model)
    with process_as_it_was({}):
        from podium.checks.rewards import with_reward_test
        from podium.checks.setup import findings_of, from_recipe
        from podium.checks.table import findings_in
        from podium.recipe.recipe import Recipe
        from podium.recipe.stages import Surveyed
        from podium.trainer.arguments import converted
        from podium.trainer.run import Arguments

        if not isinstance(model, Recipe):
            try:
                taken = converted(
                    Arguments(
                        model=model,
                        reward_funcs=reward_funcs,
                        args=args,
                        train_dataset=train_dataset,
                        eval_dataset=eval_dataset,
                        processing_class=processing_class,
                        reward_processing_classes=reward_processing_classes,
                        quantization_config=quantization_config,
                        peft_config=peft_config,
                        tools=tools,
                        rollout_func=rollout_func,
                        environment_factory=environment_factory,
                        agent=agent,
                    )
                )
            except PodiumError as error:
                return findings_of(error)
            return check_arguments(taken, test_rewards=True)[0]
        stages = [Surveyed(recipe=stage.recipe, stage=stage) for stage in model.stages]
        surveyed = stages or [Surveyed(recipe=model)]
        return findings_in(surveyed, [with_reward_test(from_recipe(recipe)) for recipe in surveyed])


def check_arguments(given: Arguments, *, test_rewards: bool) -> tuple[list[Finding], Arguments]:
    """Findings about a trainer's arguments, errors first; and the arguments, with rows that need no second look.

    `test_rewards`: a trainer does that when it begins to train.
    """
    with process_as_it_was({}):
        from podium.checks.rewards import with_reward_test
        from podium.checks.setup import from_arguments
        from podium.checks.table import findings

        setup = from_arguments(given, all_images=test_rewards)
        setup = with_reward_test(setup) if test_rewards else setup
        found = findings(setup)
        train = given.train_dataset
        evaluation = given.eval_dataset
        if setup.builder is not None and not any(finding.severity == "error" for finding in found):
            if setup.train is not None:
                train = setup.train.checked(train)
            if setup.evaluation is not None and not isinstance(evaluation, Mapping):
                evaluation = setup.evaluation.checked(evaluation)
        factory = setup.pools or given.environment_factory
        return found, replace(
            given,
            train_dataset=train,
            eval_dataset=evaluation,
            environment_factory=factory,
            agent=setup.program or given.agent,
        )


def worth_saying(found: Sequence[Finding]) -> list[Finding]:
    """The findings to print when training starts: warnings, and notes about what is assumed or left out."""
    return [finding for finding in found if finding.severity == "warning" or finding.code in NOTES]


def check_recipe(path: str | Path | Document, overrides: Mapping[str, Any] | None = None) -> list[Finding]:
    """Findings about a recipe and values that override it, errors first."""
    return examine(path, overrides).findings


def examine(
    path: str | Path | Document,
    overrides: Mapping[str, Any] | None = None,
    *,
    keep_rows: bool = False,
    launch: Launch | None = None,
    layouts: Mapping[str, Launch] | None = None,
) -> Checked:
    """Read a recipe once, for its findings and for the run. The variables of its `env:` are not left set.

    `keep_rows`: whether the run takes the rows as they were checked, unless it has stages. `launch`: the processes that
    the run would have; None: those of which this is one. `layouts`: what a plan is to compare, by name, instead.
    """
    overrides = dict(overrides or {})
    if layouts:
        launch = next(iter(layouts.values()))
    try:
        document = open_document(path)
    except PodiumError as error:
        from podium.checks.setup import findings_of

        return Checked(findings=findings_of(error))
    with process_as_it_was(variables(document, overrides)), planned(launch):
        from podium.checks.rewards import with_reward_test
        from podium.checks.setup import findings_of, from_recipe
        from podium.checks.table import RULES, findings_in
        from podium.recipe.stages import survey, whole

        try:
            surveyed = survey(document, overrides)
            alone = surveyed[0].stage is None
            setups = [with_reward_test(from_recipe(recipe, keep_rows=keep_rows and alone)) for recipe in surveyed]
            found = findings_in(surveyed, setups)
            rows = [dataset.num_rows for setup in setups for dataset in (setup.train, setup.evaluation) if dataset]
            checked = Checked(
                findings=found,
                num_checks=len(RULES) * len(setups),
                num_rows=sum(rows),
                tables=_tables(setups),
                plan=_plan(setups, layouts),
            )
            if any(finding.severity == "error" for finding in found):
                return checked
            recipe = whole(document, overrides, surveyed)
            recipe = replace(recipe, rows=setups[0].loaded()) if alone else recipe
            return replace(checked, recipe=recipe)
        except PodiumError as error:
            return Checked(findings=findings_of(error))


def _plan(setups: Sequence[Setup], layouts: Mapping[str, Launch] | None) -> Plan | None:
    if not layouts:
        return None
    from podium.checks.layouts import plan_of

    return plan_of(setups[0], layouts)


def _tables(setups: Sequence[Setup]) -> tuple[TruthTable, ...]:
    known = [setup.tested.table for setup in setups if setup.tested is not None]
    return tuple(dict.fromkeys(table for table in known if table is not None))


def as_error(name: str, found: Sequence[Finding]) -> ConfigError:
    """Findings that stop a run as one error; `name` is the recipe's."""
    listed = [with_fix(f"{finding.what} [{finding.code}]", way_on(finding)) for finding in found]
    if len(found) > 1:
        listed.insert(0, f"{name} has {len(found)} problems:")
    changes = {key: value for finding in reversed(found) for key, value in finding.changes.items()}
    if len(found) > 1 and changes:
        listed.append(f"All of it (`podium cure {name}` writes it):")
        listed += [as_line(key, value) for key, value in changes.items() if value is not None]
        gone = ", ".join(key for key, value in changes.items() if value is None)
        if gone:
            listed.append(f"# without {gone}")
    return ConfigError("\n".join(listed), findings=found)


@contextlib.contextmanager
def process_as_it_was(variables: Mapping[str, str]) -> Iterator[None]:
    """With these environment variables; then accelerate's state, the environment and random generators are restored.

    Every `TrainingArguments` that is made empties the state of all trainers of the process, and sets variables.
    """
    environment = dict(os.environ)
    os.environ.update(variables)  # before transformers is imported, which reads some of them once
    from accelerate.state import AcceleratorState, PartialState

    from podium.trainer.snapshot import same_random_numbers

    sharding = logging.getLogger("transformers.distributed.tensor_parallel")  # warns of every model without weights
    level = sharding.level
    sharding.setLevel(logging.ERROR)
    shared = [state._shared_state for state in (AcceleratorState, PartialState)]
    before = [dict(values) for values in shared]
    try:
        with same_random_numbers():
            yield
    finally:
        sharding.setLevel(level)
        for values, then in zip(shared, before, strict=True):
            values.clear()
            values.update(then)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
