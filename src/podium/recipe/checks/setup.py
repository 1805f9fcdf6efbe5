"""Everything that is known about a run before its weights are loaded, in one record.

    setup = from_recipe("run.yaml", {"learning_rate": 2e-6})

What cannot be had (a file that is not there, a key that is wrong) is a finding in `problems`, and the rest goes on
without it: all problems are said at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from podium.data.prompts import PromptBuilder
from podium.errors import ConfigError, DataError, PodiumError
from podium.models.loading import model_name
from podium.recipe import Recipe, open_document
from podium.recipe.checks.facts import ModelFacts, facts_of, tokenizer_of
from podium.recipe.checks.public import DATASETS, unasked_dataset
from podium.recipe.checks.rows import RowSurvey, Source, dataset_source, look_at
from podium.recipe.checks.sources import recipe_sources
from podium.recipe.document import Document, Problem
from podium.recipe.reading import survey as survey_recipe
from podium.recipe.stage import Stage, Surveyed, is_staged, survey_stages
from podium.records import Finding
from podium.rewards.resolve import Reward
from podium.trainer.assembly import load_settings, prompt_builder, reward_records
from podium.trainer.config import GRPOConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a run will be made of, without weights. None: it could not be had, and a finding says why."""

    name: str
    """For messages: the recipe."""
    args: GRPOConfig | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    """Where a setting was made: `run.yaml:7`, or `--flag`."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """A recipe's keys as written."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Those of them that nobody wrote."""
    model: ModelFacts | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    builder: PromptBuilder | None = None
    lora: Mapping[str, Any] | None = None
    """Of the adapter to train: `r`, `target_modules` and so on."""
    quantization: Mapping[str, Any] | None = None
    rewards: tuple[Reward, ...] = ()
    train: RowSurvey | None = None
    evaluation: RowSurvey | None = None
    resume: str | bool | None = None
    """As `resume_from_checkpoint`."""
    problems: tuple[Finding, ...] = ()

    def at(self, key: str) -> str:
        """`run.yaml:7: learning_rate`, or the name alone where nothing was written."""
        return f"{self.places[key]}: {key}" if key in self.places else key

    def line(self, key: str, value: object) -> str:
        """What to type to set a key: a line of YAML, or an argument of `GRPOConfig`."""
        return f"{key}: {value}" if self.given else f"{key}={value}"


@dataclass(slots=True)
class _Gathering:
    """Parts of a setup, and what kept others from being had."""

    problems: list[Finding] = field(default_factory=list)
    places: Mapping[str, str] = field(default_factory=dict)
    """Of a recipe's keys."""

    def attempt(self, make: Callable[[], T], where: str = "") -> T | None:
        """What `make` gives; None where it raises, which is then said, at `where` or the key that the message names."""
        try:
            return make()
        except PodiumError as error:
            named = (self.places[key] for key in re.findall(r"`(\w+)`", str(error)) if key in self.places)
            self.problems += findings_of(error, where or next(named, ""))
            return None

    def attempt_rows(self, make: Callable[[], T], name: str | None) -> T | None:
        """Likewise; a public dataset that the hub was not asked for is no mistake."""

        def reached() -> T:
            try:
                return make()
            except DataError as error:
                if name in DATASETS and isinstance(error.__cause__, ConnectionError):
                    error.findings = (unasked_dataset(str(name)),)
                raise

        return self.attempt(reached)


def findings_of(error: PodiumError, where: str = "") -> list[Finding]:
    """What an error says, as findings."""
    if error.findings:
        return [_with_fix(finding) for finding in error.findings]
    what = f"{where}: {error.what}" if where and not error.what.startswith(where) else error.what
    return [_with_fix(Finding(code=error.code or "C030", severity="error", what=what, fix=error.fix))]


def _from_problems(problems: Sequence[Problem]) -> list[Finding]:
    return [_with_fix(Finding(code=each.code, severity="error", what=str(each), fix=each.fix)) for each in problems]


def _with_fix(finding: Finding) -> Finding:
    return replace(finding, fix=finding.fix or f"see `podium explain {finding.code}`")


# ---- from a recipe ----


def from_recipe(path: str | Path | Document, overrides: Mapping[str, Any] | None = None) -> Setup:
    """All that a YAML file and overriding values make known."""
    gathering = _Gathering()
    overrides = dict(overrides or {})
    document = gathering.attempt(lambda: open_document(path))
    if document is None:
        return Setup(name=str(path), problems=tuple(gathering.problems))
    _set_variables(document, overrides)
    recipe, problems = survey_recipe(document, overrides)
    gathering.problems += _from_problems(problems)
    gathering.places = recipe.places
    return _of_recipe(recipe, gathering)


def _set_variables(document: Document, overrides: Mapping[str, Any]) -> None:
    """`env:` of a recipe, before anything reads it."""
    for variables in (document.values.get("env"), overrides.get("env")):
        if isinstance(variables, Mapping):
            os.environ.update({str(key): str(value) for key, value in variables.items()})


def of_recipe(recipe: Recipe) -> Setup:
    """The setup of a recipe that was read."""
    return _of_recipe(recipe, _Gathering(places=recipe.places))


def stages_of(path: str | Path | Document, overrides: Mapping[str, Any] | None = None) -> list[Surveyed] | None:
    """The stages of a recipe, as far as they can be understood; None: it has none, or cannot be read."""
    try:
        document = open_document(path)
    except PodiumError:
        return None
    if not is_staged(document):
        return None
    _set_variables(document, overrides or {})
    return survey_stages(document, overrides or {})


def of_stage(surveyed: Surveyed) -> Setup:
    """The setup of one stage. One of supervised fine-tuning has no `GRPOConfig`."""
    recipe = surveyed.stage.recipe
    gathering = _Gathering(problems=_from_problems(surveyed.problems), places=recipe.places)
    return _of_recipe(recipe, gathering, surveyed.stage)


def _of_recipe(recipe: Recipe, gathering: _Gathering, stage: Stage | None = None) -> Setup:
    args = None if stage is not None and stage.kind == "sft" else _arguments(recipe, gathering)
    builds = gathering.attempt(lambda: recipe.peft_config()) if recipe.lora is not None else None
    functions = [spec.function for spec in recipe.rewards]
    missing = {finding.code for finding in gathering.problems} & {"D025", "C031"}
    has_data = recipe.data.is_given and "D025" not in missing
    rows = None if stage is None else stage.rows
    made = _setup(
        gathering,
        name=recipe.name,
        args=args,
        places=recipe.places,
        given=recipe.given,
        model=recipe.model or None,
        tokenizer=None,
        lora=None
        if recipe.lora is None
        else {**recipe.lora, "target_modules": getattr(builds, "target_modules", None)},
        quantization=recipe.quantization,
        reward_funcs=functions,
        sources=lambda: (
            _given_sources(*rows) if rows else recipe_sources(recipe, gathering) if has_data else (None, None)
        ),
    )
    return replace(made, assumed=recipe.assumed, resume=recipe.resume if stage is None else None)


_BATCH = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_generations",
}
"""Settings that must fit each other."""


def _arguments(recipe: Recipe, gathering: _Gathering) -> GRPOConfig | None:
    """The run's `GRPOConfig`; a setting that is refused is said and left out, so that the next one is found too."""
    config = dict(recipe.config)
    for _ in range(len(config) + 1):
        try:
            return replace(recipe, config=config).arguments()
        except ConfigError as error:
            gathering.problems += findings_of(error)
            named = [word for word in re.findall(r"\w+", str(error).partition(": ")[2]) if word in config]
            if not named:
                return None
            for word in _BATCH & config.keys() if error.code == "C010" else named[:1]:
                del config[word]
    return None


# ---- from the trainer's arguments ----


def from_arguments(
    model: Any,
    reward_funcs: Any = None,
    args: GRPOConfig | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    quantization_config: Any = None,
    peft_config: Any = None,
    reward_processing_classes: Any = None,
) -> Setup:
    """All that the arguments of `GRPOTrainer` make known."""
    gathering = _Gathering()
    if train_dataset is None:
        gathering.problems.append(
            Finding(code="C031", severity="error", what="no train_dataset", fix="train_dataset=rows with a `prompt`")
        )
    return _setup(
        gathering,
        name="GRPOTrainer",
        args=args if args is not None else GRPOConfig(f"{model_name(model)}-GRPO"),
        places={},
        given={},
        model=model,
        tokenizer=processing_class,
        lora=None if peft_config is None else peft_config.to_dict(),
        quantization=None if quantization_config is None else quantization_config.to_dict(),
        reward_funcs=reward_funcs,
        reward_tokenizers=reward_processing_classes,
        sources=lambda: _given_sources(train_dataset, eval_dataset),
    )


def _given_sources(train: Any, evaluation: Any) -> tuple[Source | None, Source | None]:
    first_eval = next(iter(evaluation.values()), None) if isinstance(evaluation, dict) else evaluation
    source = None if train is None else dataset_source(train, "train_dataset")
    return source, None if first_eval is None else dataset_source(first_eval, "eval_dataset")


# ---- both ----


def _setup(
    gathering: _Gathering,
    *,
    name: str,
    args: GRPOConfig | None,
    places: Mapping[str, str],
    given: Mapping[str, Any],
    model: Any,
    tokenizer: Any,
    lora: Mapping[str, Any] | None,
    quantization: Mapping[str, Any] | None,
    reward_funcs: Any,
    reward_tokenizers: Any = None,
    sources: Callable[[], tuple[Source | None, Source | None]],
) -> Setup:
    settings = load_settings(args if args is not None else GRPOConfig(), None, None)
    facts = found = builder = None
    if model is not None:
        facts = gathering.attempt(
            lambda: facts_of(model, settings, needs_tokenizer=tokenizer is None), _model_at(places)
        )
    if facts is not None and not (facts.unasked and tokenizer is None):
        found = gathering.attempt(lambda: tokenizer_of(model, tokenizer, settings), _model_at(places))
    if args is not None and found is not None and facts is not None and facts.config is not None:
        config = facts.config
        builder = gathering.attempt(lambda: prompt_builder(args, found, config), name)
    rewards = gathering.attempt(lambda: reward_records(reward_funcs, reward_tokenizers, args)) if reward_funcs else ()
    train_source, eval_source = sources()
    evaluation = _look(eval_source, builder, None, gathering)
    train = _look(train_source, builder, evaluation, gathering)
    return Setup(
        name=name,
        args=args,
        places=places,
        given=given,
        model=facts,
        tokenizer=found,
        builder=builder,
        lora=lora,
        quantization=quantization,
        rewards=rewards or (),
        train=train,
        evaluation=evaluation,
        problems=tuple(gathering.problems),
    )


def _model_at(places: Mapping[str, str]) -> str:
    return places.get("model", "")


def _look(
    source: Source | None, builder: PromptBuilder | None, other: RowSurvey | None, gathering: _Gathering
) -> RowSurvey | None:
    if source is None:
        return None
    return gathering.attempt(lambda: look_at(source, builder, None if other is None else other.prompts))
