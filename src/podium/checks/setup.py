"""All facts about a run that are known before its weights are loaded, in one record.

Of the model these are its configurations and the headers of its files; of the data, all rows, each as it is trained
on, from files that are streamed in constant memory. Parts that are not available (a missing file, a wrong key) are
findings in `problems`, and the rest goes on without them: all problems are reported at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from podium.agents.environments import EnvironmentPools
from podium.agents.setup import Program
from podium.checks.public import DATASETS, MODELS, public_config, unasked_dataset
from podium.data.images import OPENED_ROWS
from podium.data.prompts import PromptBuilder
from podium.data.rows import Attempts, Loaded, OpenData, load_data, open_data
from podium.data.sources import RowSource, dataset_source, is_read_once
from podium.data.survey import RowSurvey, survey_rows
from podium.errors import DataError, Finding, ModelError, PodiumError
from podium.errors.rule import Facts
from podium.errors.texts import as_line, as_lines, plain
from podium.models.builtin import resolve_model
from podium.models.check import check_model_name, read_config, reading
from podium.models.loading import LoadSettings, declared_ends, image_processor, load_tokenizer, model_name
from podium.models.stored import check_buildable, stored_shapes
from podium.recipe.document import placed
from podium.recipe.recipe import AgentSpec, Recipe, Stage
from podium.recipe.stages import Surveyed
from podium.rewards.resolve import Reward
from podium.tester.pretest import RewardTest
from podium.trainer.assembly import (
    agents_of,
    environment_pools,
    has_prompts,
    load_settings,
    program_of,
    prompt_builder,
    reward_records,
)
from podium.trainer.config import GRPOConfig, survey
from podium.trainer.planned import gpu_planned
from podium.trainer.run import Arguments

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Facts):
    """The parts of a run without weights. None: not available, and a finding in `problems` gives the reason."""

    name: str = "GRPOTrainer"
    """For messages: the recipe."""
    settings: GRPOConfig | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    """Place of a setting: `run.yaml:7`, or `--flag`."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """A recipe's keys as written."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """The inferred keys among `given`."""
    model: ModelFacts | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    builder: PromptBuilder | None = None
    lora: Mapping[str, Any] | None = None
    """Arguments of the adapter to train: `r`, `target_modules` and so on."""
    quantization: Mapping[str, Any] | None = None
    agents: AgentSpec = field(default_factory=AgentSpec)
    """A recipe's tools and environments."""
    program: Program | None = None
    """The agent's."""
    pools: EnvironmentPools | None = None
    """The environments of a trainer, made once, for the trainer too."""
    rewards: tuple[Reward, ...] = ()
    """Reward functions; those that the environments bring come last."""
    train: RowSurvey | None = None
    evaluation: RowSurvey | None = None
    opened: OpenData | None = None
    """The datasets of a recipe, whose rows were kept while they were surveyed; None: they were not."""
    adds_columns: bool = False
    """Whether a `rollout_func` gives the rewards columns that are not in the data."""
    tested: RewardTest | None = None
    """The test of the rewards without a model."""
    resume: str | bool | None = None
    """`resume_from_checkpoint`."""
    stage: Stage | None = None
    """None: the run has no stages."""
    problems: tuple[Finding, ...] = ()

    @property
    def has_environment(self) -> bool:
        """Whether an environment is given, also one that could not be made."""
        return self.pools is not None or bool(self.given.get("environment"))

    @property
    def has_program(self) -> bool:
        """Whether a program writes the prompts, also one that could not be read."""
        return self.program is not None or bool(self.given.get("agent"))

    @property
    def plays(self) -> bool:
        """Whether more of a row than its prompt decides what a completion is: an environment, or a program."""
        return self.has_environment or self.has_program

    @property
    def takes_turns(self) -> bool:
        """Whether an environment or a program could be made."""
        return self.pools is not None or self.program is not None

    @property
    def num_own_rewards(self) -> int:
        """Number of rewards that environments, or a program, have of their own."""
        return int(self.program is not None) if self.pools is None else len(self.pools.reward_functions())

    @property
    def surveys(self) -> tuple[RowSurvey, ...]:
        """The surveys of the training rows and of the held-out rows, without those that are missing."""
        return tuple(survey for survey in (self.train, self.evaluation) if survey is not None)

    @property
    def config(self) -> PretrainedConfig | None:
        """The model's configuration."""
        return None if self.model is None else self.model.config

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Variables of the chat template, from `chat_template_kwargs`."""
        if self.builder is not None:
            return self.builder.chat_template_kwargs
        return (self.settings and self.settings.chat_template_kwargs) or {}

    def loaded(self) -> Loaded | None:
        """The rows as they were surveyed, for a trainer; None where they were not kept. Raises `DataError`."""
        if self.opened is None or self.train is None:
            return None
        rows = self.opened.loaded()
        in_order = self.opened.keeps_order
        held_out = None if self.evaluation is None else self.evaluation.checked(rows.held_out, in_order=in_order)
        return Loaded(self.train.checked(rows.train, in_order=in_order), held_out)

    def placed(self, finding: Finding) -> Finding:
        """A finding of a rule, at the place of the first setting that it is about, with its cure as this run has it."""
        place = next((self.places[name] for name in finding.settings if name in self.places), "")
        fix = finding.fix
        if finding.changes and fix == as_lines(finding.changes):
            fix = "; ".join(line(self.given, name, value) for name, value in finding.changes.items())
        return replace(finding, what=f"{place}: {finding.what}" if place else finding.what, fix=fix)


def at(places: Mapping[str, str], key: str) -> str:
    """`run.yaml:7: learning_rate`, or the name alone where nothing was written."""
    return f"{places[key]}: {key}" if key in places else key


def line(given: Mapping[str, Any], key: str, value: object) -> str:
    """The text that sets a key: a line of YAML where a recipe is given, else an argument of `GRPOConfig`."""
    return as_line(key, value) if given else f"{key}={value!r}"


@dataclass(slots=True)
class _Gathering(Attempts):
    """Tries to make the parts of a setup, and collects what prevents it."""

    problems: list[Finding] = field(default_factory=list)
    places: Mapping[str, str] = field(default_factory=dict)

    def attempt(self, make: Callable[[], T], where: str = "") -> T | None:
        """The result of `make`; None where it raises: a problem at `where`, or at the key that the error is about."""
        try:
            return make()
        except PodiumError as error:
            named = (self.places[key] for key in error.settings if key in self.places)
            self.problems += findings_of(error, where or next(named, ""))
            return None

    def attempt_rows(self, make: Callable[[], T], name: str | None) -> T | None:
        """The same for the rows of a dataset; one that is public, while the hub cannot be reached, is no mistake."""

        def reached() -> T:
            try:
                return make()
            except DataError as error:
                if name in DATASETS and isinstance(error.__cause__, ConnectionError):
                    error.findings = (unasked_dataset(str(name)),)
                raise

        return self.attempt(reached)

    def report(self, findings: Sequence[Finding]) -> None:
        self.problems += findings


def findings_of(error: PodiumError, where: str = "") -> list[Finding]:
    """An error as findings."""
    what = f"{where}: {error.what}" if where and error.where != where else error.what
    code = error.code or "C030"
    facts = {name: plain(value) for name, value in error.facts.items()}
    own = Finding(code=code, severity="error", what=what, fix=error.fix, changes=error.changes, facts=facts)
    return [with_page(finding) for finding in error.findings or [own]]


def with_page(finding: Finding) -> Finding:
    """The finding, whose fix is its page where it has none."""
    return replace(finding, fix=finding.fix or f"see `podium explain {finding.code}`")


def from_recipe(surveyed: Surveyed, *, keep_rows: bool = False) -> Setup:
    """The setup of a recipe, or of one stage. A stage of supervised fine-tuning has no `GRPOConfig`.

    `keep_rows`: whether the rows are kept for `Setup.loaded`; otherwise files of any size take no memory.
    """
    recipe = surveyed.recipe
    stage = surveyed.stage
    gathering = _Gathering(places=recipe.places)
    gathering.problems += [with_page(placed(problem)) for problem in surveyed.problems]
    args = None if stage is not None and stage.kind == "sft" else _arguments(recipe, gathering)
    lora = None
    if recipe.lora is not None:
        builds = gathering.attempt(lambda: recipe.peft_config())
        lora = {**recipe.lora, "target_modules": getattr(builds, "target_modules", None)}
    agents = recipe.agents
    at = recipe.places.get("environment", "")
    pools = gathering.attempt(lambda: environment_pools(agents.environment), at)
    functions = [spec.function for spec in recipe.rewards]
    program = gathering.attempt(
        lambda: program_of(
            Arguments(model=None, tools=agents.tools, environment_factory=pools, agent=agents.program), args
        )
    )
    made = _with_parts(
        Setup(
            name=recipe.name,
            settings=args,
            adapter=lora is not None,
            places=recipe.places,
            given=recipe.given,
            assumed=recipe.assumed,
            lora=lora,
            quantization=recipe.quantization,
            resume=recipe.resume if stage is None else None,
            stage=stage,
            agents=agents,
            pools=pools,
            program=program,
        ),
        gathering,
        Arguments(model=recipe.model or None, reward_funcs=functions, args=args, tools=agents.tools),
    )
    rows = None if stage is None else stage.rows
    has_data = recipe.data.is_given and not {"D025", "D056"} & {finding.code for finding in gathering.problems}
    train = held_out = opened = None
    if rows:
        train, held_out = _given_sources(*rows)
    elif has_data:
        opened = open_data(recipe.data, gathering, keep=keep_rows)
        if recipe.data.parts and not keep_rows and len(opened.train) == len(recipe.data.parts):
            gathering.attempt(lambda: load_data(recipe.data))  # only Arrow knows whether the parts' columns go together
        train, held_out = opened.sources(gathering)
    made = replace(made, opened=opened if keep_rows else None)
    return _with_rows(made, gathering, train, held_out, all_images=not keep_rows)


def _arguments(recipe: Recipe, gathering: _Gathering) -> GRPOConfig | None:
    """The run's `GRPOConfig`; a setting that is refused is said and left out, so that the next one is found too."""
    problems, args = survey(GRPOConfig, recipe.config)
    cures = {key: value for error in problems for key, value in error.changes.items()}  # also of what was meant
    gathering.problems = [
        replace(problem, changes={key: cures.get(key, value) for key, value in problem.changes.items()})
        for problem in gathering.problems
    ]
    for error in problems:
        gathering.problems += findings_of(recipe.placed(error))
    return args


def from_arguments(given: Arguments, *, all_images: bool) -> Setup:
    """The setup of a trainer. `all_images`: whether the images of all rows are opened."""
    gathering = _Gathering()
    pools = gathering.attempt(lambda: environment_pools(given.environment_factory))
    program = gathering.attempt(lambda: program_of(given, given.args))
    if given.train_dataset is None and pools is None:
        gathering.problems.append(
            Finding(code="C031", severity="error", what="no train_dataset", fix="train_dataset=rows with a `prompt`")
        )
    args = given.args if given.args is not None else GRPOConfig(f"{model_name(given.model)}-GRPO")
    adapter = given.peft_config or getattr(given.model, "active_peft_config", None)
    quantization = given.quantization_config
    made = Setup(
        settings=args,
        adapter=adapter is not None,
        lora=None if adapter is None else adapter.to_dict(),
        quantization=None if quantization is None else quantization.to_dict(),
        pools=pools,
        program=program,
        adds_columns=given.rollout_func is not None,
    )
    made = _with_parts(made, gathering, given)
    sources = _given_sources(given.train_dataset, given.eval_dataset, pools)
    return _with_rows(made, gathering, *sources, all_images=all_images)


def _given_sources(
    train: Any, evaluation: Any, pools: EnvironmentPools | None = None
) -> tuple[RowSource | None, RowSource | None]:
    """The sets to survey: not those whose prompts the environments make."""
    first_eval = next(iter(evaluation.values()), None) if isinstance(evaluation, dict) else evaluation

    def source(dataset: Any, name: str) -> RowSource | None:
        if dataset is None or is_read_once(dataset) or (pools is not None and not has_prompts(dataset)):
            return None
        return dataset_source(dataset, name)

    return source(train, "train_dataset"), source(first_eval, "eval_dataset")


def _with_parts(setup: Setup, gathering: _Gathering, given: Arguments) -> Setup:
    """Adds the facts about the model, its tokenizer, the prompt builder and the rewards."""
    args = setup.settings
    model = given.model
    tokenizer = given.processing_class
    pools = setup.pools
    settings = load_settings(args if args is not None else GRPOConfig(), None, None)
    at = setup.places.get("model", "")
    facts = None
    found = None
    builder = None
    if model is not None:
        facts = gathering.attempt(lambda: facts_of(model, settings, needs_tokenizer=tokenizer is None), at)
    if facts is not None and not (facts.unasked and tokenizer is None):
        found = gathering.attempt(lambda: load_tokenizer(model, tokenizer, settings), at)
    if args is not None and found is not None and facts is not None and facts.config is not None:
        config = facts.config
        images = image_processor(config, model, tokenizer, settings)
        agents = gathering.attempt(
            lambda: agents_of(given, pools, args, found, setup.program, images=images), setup.name
        )
        builder = gathering.attempt(lambda: prompt_builder(args, found, config, agents), setup.name)
    rewards: tuple[Reward, ...] = ()
    if given.reward_funcs or pools is not None or setup.program is not None:
        given_rewards = given.reward_funcs, given.reward_processing_classes, args
        rewards = gathering.attempt(lambda: reward_records(*given_rewards, pools, setup.program)[0]) or ()
    return replace(setup, model=facts, tokenizer=found, builder=builder, rewards=rewards)


def _with_rows(
    setup: Setup, gathering: _Gathering, train: RowSource | None, evaluation: RowSource | None, *, all_images: bool
) -> Setup:
    """Adds a survey of the rows, and the problems of all parts. `all_images`: whether it opens the images of all."""

    def survey(source: RowSource | None, other: RowSurvey | None) -> RowSurvey | None:
        if source is None:
            return None
        counts = RowSurvey(
            source=source,
            builder=setup.builder,
            exact=setup.opened is not None,
            held_out=None if other is None else other.prompts,
            may_lack_prompt=setup.has_environment,
            most_opened=None if all_images else OPENED_ROWS,
        )
        return gathering.attempt(lambda: survey_rows(counts))

    held_out = survey(evaluation, None)
    trained = survey(train, held_out)
    streamed = bool(setup.given.get("dataset_streaming") or setup.given.get("streaming"))
    stream = None
    if held_out is not None and (streamed or held_out.source.is_stream):
        stream = "evaluation"
    if trained is not None and (streamed or trained.source.is_stream):
        stream = "train"
    unread = trained is None or any(problem.code.startswith("D") for problem in gathering.problems)
    return replace(
        setup,
        train=trained,
        evaluation=held_out,
        evaluates=unread or held_out is not None,
        stream=stream,
        problems=tuple(gathering.problems),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as far as its small files describe it."""

    name: str
    config: PretrainedConfig | None = None
    generation_config: GenerationConfig | None = None
    folder: Path | None = None
    """None: on the hub and not here, or given as an object."""
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes by name, from the headers of safetensors files; empty where there are none to read."""
    unasked: bool = False
    """Whether the hub cannot be reached, and the configuration is one of `public.MODELS`."""

    @property
    def num_parameters(self) -> int:
        """0: unknown."""
        return sum(prod(shape) for shape in self.tensors.values())

    @property
    def embedding(self) -> tuple[int, ...] | None:
        """Shape [vocabulary, width] of the input embedding."""
        endings = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
        return next((shape for name, shape in self.tensors.items() if name.endswith(endings)), None)

    @property
    def end_ids(self) -> frozenset[int]:
        """The end tokens of the generation configuration."""
        return declared_ends(self.generation_config)


def facts_of(model: Any, settings: LoadSettings, *, needs_tokenizer: bool) -> ModelFacts:
    """Raises `ModelError` for a name that cannot become a language model."""
    if not isinstance(model, str):
        # names without the layer that an adapter wraps
        inside = ((name.replace(".base_layer.", "."), parameter) for name, parameter in model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in inside if ".lora_" not in name}
        generation = getattr(model, "generation_config", None)
        name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        return ModelFacts(name=name, config=model.config, generation_config=generation, tensors=shapes)
    try:
        check_model_name(
            model,
            needs_tokenizer=needs_tokenizer,
            needs_weights=gpu_planned() is None,
            trust_remote_code=settings.trust_remote_code,
        )
    except ModelError as error:
        if error.code != "M002" or model not in MODELS:
            raise
        return ModelFacts(name=model, config=public_config(model), unasked=True)
    source = resolve_model(model)
    revision = settings.init_kwargs.get("revision")
    folder = Path(source).expanduser()
    config = read_config(source, revision=revision, trust_remote_code=settings.trust_remote_code)
    shapes = stored_shapes(folder)
    check_buildable(model, config, shapes)
    generation_config = None
    refused = reading(
        lambda line: ModelError(
            f"{model}: transformers cannot take a value in its generation_config.json ({line}).",
            code="M016",
            fix="correct that value, or copy generation_config.json again from the original model",
            model=model,
            line=line,
        )
    )
    with refused, contextlib.suppress(OSError, ValueError):  # many models have none
        generation_config = GenerationConfig.from_pretrained(source, revision=revision)
    declared_ends(generation_config)
    return ModelFacts(
        name=model,
        config=config,
        generation_config=generation_config,
        folder=folder if folder.is_dir() else None,
        tensors=shapes,
    )
